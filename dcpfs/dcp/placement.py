"""Which entry goes into which file, at which offset, and which bytes of it fall into which part. Pure.

Problem: torch appends entries to a stream, so offsets are known only after the bytes have passed, one after the
other. Parts of a file can then not be sent in parallel, nor straight from tensor memory, and the size of the file
is a surprise to the store (which has to choose its part size from it).

Way taken: an entry's length follows from dtype and shape, so everything is placed before a byte moves. Files are
filled largest entry first, so that they end up even; within a file the entries keep the plan's order, so that
keys that are loaded together lie together.

Flow: ``place(sizes, files=n)`` → one `FileLayout` per file → the store's parts of that file → ``cut(layout, parts)``
→ for every part the `Piece` of each entry that falls into it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from dcpfs.storage.store import PartRange

__all__ = ["FileLayout", "Piece", "count_files", "cut", "place"]


class Piece(NamedTuple):
    """The bytes ``start`` to ``stop`` of one entry, counted from the entry's own start.

    Attributes:
        number: The entry's position in the plan.
        whole: The piece is the whole entry.
    """

    number: int
    start: int
    stop: int
    whole: bool


_make_piece = partial(tuple.__new__, Piece)


@dataclass(frozen=True, slots=True)
class FileLayout:
    """One file: entries back to back.

    Attributes:
        numbers: Positions in the plan, ascending, of the entries in it.
        offsets_bytes: Where each starts.
        size_bytes: Size of the file.
    """

    numbers: Sequence[int]
    offsets_bytes: Sequence[int]
    size_bytes: int


def count_files(total_bytes: int, entries: int, *, file_bytes: int | None) -> int:
    """Number of files of about ``file_bytes`` each; one without a wish, none for no entries."""
    if entries == 0:
        return 0
    if file_bytes is None:
        return 1
    return max(1, min(entries, -(-total_bytes // file_bytes)))


def place(sizes_bytes: Sequence[int], *, files: int) -> list[FileLayout]:
    """Distribute entries over at most ``files`` files, largest first, each to the emptiest file so far.

    Files that would stay empty are left out.
    """
    if not sizes_bytes or files < 1:
        return []
    if files == 1:
        return [_lay_out(range(len(sizes_bytes)), sizes_bytes)]
    members: list[list[int]] = [[] for _ in range(files)]
    emptiest = [(0, file) for file in range(files)]
    for number in sorted(range(len(sizes_bytes)), key=lambda each: (-sizes_bytes[each], each)):
        filled_bytes, file = emptiest[0]
        heapq.heapreplace(emptiest, (filled_bytes + sizes_bytes[number], file))
        members[file].append(number)
    return [_lay_out(sorted(numbers), sizes_bytes) for numbers in members if numbers]


def _lay_out(numbers: Sequence[int], sizes_bytes: Sequence[int]) -> FileLayout:
    offsets_bytes = []
    offset = 0
    for number in numbers:
        offsets_bytes.append(offset)
        offset += sizes_bytes[number]
    return FileLayout(numbers, offsets_bytes, offset)


def cut(
    layout: FileLayout, sizes_bytes: Sequence[int], parts: Sequence[PartRange]
) -> Iterator[tuple[PartRange, list[Piece]]]:
    """For each part, in order, the pieces that fill it. Empty entries appear with the part they start in.

    Args:
        layout: The file.
        sizes_bytes: Entry sizes of the whole plan.
        parts: Parts that cover the file, ascending.
    """
    numbers, offsets = layout.numbers, layout.offsets_bytes
    position = 0
    for part in parts:
        pieces = []
        while position < len(numbers):
            number, offset = numbers[position], offsets[position]
            if offset >= part.stop and part.stop < layout.size_bytes:
                break
            end = offset + sizes_bytes[number]
            start, stop = max(part.start, offset), min(part.stop, end)
            whole = start == offset and stop == end
            pieces.append(_make_piece((number, start - offset, stop - offset, whole)))
            if end > part.stop:
                break
            position += 1
        yield part, pieces
