"""Chunks must cover a tensor without gap or overlap."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpfs.dcp.coverage import Box, find_fault


@pytest.mark.parametrize(
    ("shape", "boxes", "word"),
    [
        ((4, 2), [((0, 0), (2, 2)), ((2, 0), (2, 2))], None),
        ((4, 2), [((0, 0), (2, 2)), ((3, 0), (2, 2))], "outside"),
        ((4, 2), [((0, 0), (3, 2)), ((2, 0), (2, 2))], "overlap"),
        ((4, 2), [((0, 0), (1, 2)), ((2, 0), (2, 2))], "6 of 8"),
        ((6,), [((0,), (2,)), ((2,), (2,)), ((4,), (2,)), ((6,), (0,))], None),
        ((), [((), ())], None),
        ((), [((), ()), ((), ())], "overlap"),
        ((0, 3), [((0, 0), (0, 3))], None),
    ],
)
def test_faults(shape: tuple[int, ...], boxes: list[Box], word: str | None) -> None:
    fault = find_fault(shape, boxes, complete=True)
    assert fault is None if word is None else word in (fault or "")


def test_gaps_are_allowed_where_other_ranks_are_unknown() -> None:
    assert find_fault((4,), [((0,), (1,))], complete=False) is None


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_any_grid_is_a_cover_and_a_doubled_cell_is_not(rows: list[int], columns: list[int]) -> None:
    boxes: list[Box] = [
        ((sum(rows[:i]), sum(columns[:j])), (rows[i], columns[j]))
        for i in range(len(rows))
        for j in range(len(columns))
    ]
    shape = (sum(rows), sum(columns))
    assert find_fault(shape, boxes, complete=True) is None
    assert "overlap" in (find_fault(shape, [*boxes, boxes[-1]], complete=True) or "")
