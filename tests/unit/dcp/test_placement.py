"""Placement: everything is placed before a byte moves, and every byte falls into exactly one part."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dcpfs.dcp.placement import FileLayout, count_files, cut, place
from dcpfs.storage.store import PartRange

SIZES = st.lists(st.integers(0, 50), max_size=30)


def _parts(size_bytes: int, part_bytes: int) -> list[PartRange]:
    if size_bytes == 0:
        return [PartRange(0, 0)]
    return [PartRange(at, min(at + part_bytes, size_bytes)) for at in range(0, size_bytes, part_bytes)]


@given(SIZES, st.integers(1, 5))
def test_every_entry_is_placed_once_and_back_to_back(sizes: list[int], files: int) -> None:
    layouts = place(sizes, files=files)
    assert sorted(number for layout in layouts for number in layout.numbers) == list(range(len(sizes)))
    for layout in layouts:
        end = 0
        for number, offset in zip(layout.numbers, layout.offsets_bytes, strict=True):
            assert offset == end
            end += sizes[number]
        assert end == layout.size_bytes
        assert list(layout.numbers) == sorted(layout.numbers)


def test_files_end_up_even() -> None:
    layouts = place([100, 1, 1, 50, 49, 99], files=3)
    assert sorted(layout.size_bytes for layout in layouts) == [100, 100, 100]


@given(SIZES, st.integers(1, 40))
def test_parts_are_filled_exactly(sizes: list[int], part_bytes: int) -> None:
    for layout in place(sizes, files=1):
        seen: dict[int, int] = dict.fromkeys(range(len(sizes)), 0)
        for part, pieces in cut(layout, sizes, _parts(layout.size_bytes, part_bytes)):
            assert sum(piece.stop - piece.start for piece in pieces) == part.size_bytes
            at = part.start
            for piece in pieces:
                assert layout.offsets_bytes[piece.number] + piece.start == at
                assert piece.start == seen[piece.number]
                assert piece.whole == (piece.start == 0 and piece.stop == sizes[piece.number])
                seen[piece.number] = piece.stop
                at += piece.stop - piece.start
        assert all(seen[number] == size for number, size in enumerate(sizes))


def test_an_empty_plan_has_no_file_and_an_empty_file_one_empty_part() -> None:
    assert place([], files=3) == []
    assert count_files(0, 0, file_bytes=None) == 0
    assert list(cut(FileLayout([], [], 0), [], [PartRange(0, 0)])) == [(PartRange(0, 0), [])]


def test_number_of_files() -> None:
    assert count_files(1000, 10, file_bytes=None) == 1
    assert count_files(1000, 10, file_bytes=300) == 4
    assert count_files(1000, 2, file_bytes=10) == 2
