"""Who writes what several ranks hold."""

from __future__ import annotations

from dcpfs.dcp.sharing import SMALL_BYTES, SMALL_TOTAL_BYTES, choose_writers


def test_case_71_small_items_stay_with_the_lowest_rank() -> None:
    holders = {key: [1, 2, 3] for key in "abcdef"}
    assert set(choose_writers(holders, dict.fromkeys("abcdef", 100), [0, 0, 0, 0]).values()) == {1}


def test_case_73_large_items_are_balanced_by_bytes() -> None:
    sizes = {f"k{n}": SMALL_BYTES * (n + 1) for n in range(16)}
    writers = choose_writers({key: [0, 1, 2, 3] for key in sizes}, sizes, [0, 0, 0, 0])
    loads = [sum(sizes[key] for key, rank in writers.items() if rank == each) for each in range(4)]
    assert max(loads) <= 1.1 * min(loads)


def test_case_73_what_a_rank_writes_anyway_counts() -> None:
    sizes = {"a": SMALL_BYTES, "b": SMALL_BYTES}
    assert choose_writers({"a": [0, 1], "b": [0, 1]}, sizes, [10 * SMALL_BYTES, 0]) == {"a": 1, "b": 1}


def test_small_items_spread_once_one_rank_has_many() -> None:
    size = SMALL_BYTES - 1
    sizes = {str(n): size for n in range(4 * SMALL_TOTAL_BYTES // size)}
    writers = choose_writers({key: [0, 1] for key in sizes}, sizes, [0, 0])
    assert 0.4 < sum(rank == 0 for rank in writers.values()) / len(writers) < 0.6
