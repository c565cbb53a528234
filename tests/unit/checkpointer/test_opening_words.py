"""The words that ranks exchange before a save."""

from __future__ import annotations

import dataclasses
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpfs.checkpointer.opening_words import OpeningWords, TogetherWords

SAVE_ID = "f" * 31 + "0"
COORDINATOR = OpeningWords(
    failed=False, state=2, token=7, iteration=5, save_id=SAVE_ID, first_file_number=3, metric=None
)
OTHER = OpeningWords(failed=False, state=0, token=7, iteration=5, save_id="", first_file_number=0, metric=None)


def together(*ranks: OpeningWords) -> TogetherWords:
    encoded = [rank.encode() for rank in ranks]
    assert all(-(1 << 63) <= word < 1 << 63 for words in encoded for word in words)
    return TogetherWords.decode([max(words) for words in zip(*encoded, strict=True)])


def test_what_the_coordinator_knows_all_know() -> None:
    assert together(COORDINATOR, OTHER, OTHER) == TogetherWords(
        failed=False, state=2, plans_fit=True, iterations=(5, 5), save_id=SAVE_ID, first_file_number=3, metrics=()
    )


def test_one_rank_that_failed_or_differs_shows() -> None:
    assert together(COORDINATOR, dataclasses.replace(OTHER, failed=True)).failed
    assert together(COORDINATOR, dataclasses.replace(OTHER, iteration=9)).iterations == (5, 9)
    assert together(COORDINATOR, dataclasses.replace(OTHER, iteration=0)).iterations == (0, 5)
    for token in (0, 8):
        assert not together(COORDINATOR, dataclasses.replace(OTHER, token=token)).plans_fit
    assert not together(dataclasses.replace(COORDINATOR, token=0), dataclasses.replace(OTHER, token=0)).plans_fit


@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -1.5, sys.float_info.max, -sys.float_info.max, 5e-324, -5e-324])
def test_a_metric_travels_bit_for_bit(value: float) -> None:
    (found,) = together(dataclasses.replace(COORDINATOR, metric=value), OTHER).metrics
    assert found == value


@given(st.lists(st.none() | st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=5))
def test_metrics_that_differ_are_two_and_none_differs_from_none(metrics: list[float | None]) -> None:
    given_ones = {metric for metric in metrics if metric is not None}
    found = together(*(dataclasses.replace(OTHER, metric=metric) for metric in metrics)).metrics
    assert len(found) == min(2, len(given_ones))
    assert set(found) <= given_ones
