"""The stall case runs, at a size of no account, and proves what it measures."""

from __future__ import annotations

import pytest

from benchmarks.figures import Missing
from benchmarks.stall import CONTENDERS, Blocked, StallFigure, markdown, measure
from tests.unit.benchmarks.recordings import STALLED


@pytest.mark.timeout(1800)
def test_every_contender_is_blocked_for_something_and_stores_what_was_there() -> None:
    said: list[str] = []
    figures = list(measure(size_bytes=2_000_000, rounds=2, tell=said.append))
    assert [isinstance(figure, StallFigure) and figure.contender for figure in figures] == list(CONTENDERS)
    for figure in figures:
        assert isinstance(figure, StallFigure)
        assert figure.first.total_seconds >= figure.first.call_seconds > 0
        assert figure.copies > 0
        assert figure.quiet_steps_per_second > 0
        assert figure.saving_steps_per_second > 0
        assert figure.lost_seconds is not None
        assert StallFigure.model_validate_json(figure.model_dump_json()) == figure
    assert len(said) == len(figures)
    text = markdown(figures)
    assert all(f"| {contender} | " in text for contender in CONTENDERS)


@pytest.mark.timeout(1800)
def test_a_contender_that_fails_is_told_and_the_others_go_on_in_turns() -> None:
    said: list[str] = []
    contenders = ("torch-nonsense", "torch-thread")
    results = list(measure(size_bytes=400_000, rounds=2, tell=said.append, contenders=contenders, repetitions=2))
    assert [result.kind for result in results] == ["failed", "stall", "stall"]
    failed, *figures = results
    assert isinstance(failed, Missing)
    assert "is not a valid AsyncCheckpointerType" in failed.reason
    assert [isinstance(figure, StallFigure) and figure.repetition for figure in figures] == [0, 1]
    text = markdown(results)
    assert "| torch-nonsense | failed: " in text
    assert "| torch-thread | " in text


def test_repetitions_are_told_with_their_range() -> None:
    waits = [
        STALLED.model_copy(update={"later": Blocked(call_seconds=0.01, total_seconds=each)}) for each in (0.2, 0.1, 0.4)
    ]
    (row,) = [line for line in markdown(waits).splitlines() if line.startswith("| torch-thread")]
    assert "| 0.200 (0.100–0.400) | 2.00 (1.00–4.00) |" in row
    assert row.endswith("| 3 |")
