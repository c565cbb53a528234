"""Which bytes a load needs, and in which requests it fetches them.

Problem: torch's readers fetch, for a slice of a tensor, the whole saved chunk, one entry at a time and in the
order of the plan: a reshard from one rank to two moves everything twice, and a state of many small tensors
costs a round trip each (cases 64, 70, 88).

Way taken: pure functions, from boxes to bytes to requests. `box_blocks` turns a box of a stored chunk into
contiguous *blocks*: one for a run of rows, and for other slices as few as are sensible (near rows become one
block that covers the gaps between them). `plan_requests` sorts the *segments* of one file, merges what lies near,
and cuts what is large, so that every request is about as long as `RequestLimits` says. Nothing here touches
storage or tensors; a segment carries its destination along as an opaque value.

::

    box of a chunk ──box_blocks──► blocks ──(the reader places them in memory)──► segments ──plan_requests──► requests

A request of large segments is *scattered*: the store fills the destinations directly, gaps go to a small scratch.
A request of many small segments is *staged*: it fills one scratch buffer, from which the segments are copied, since
handing a store a thousand tiny buffers costs more than the copy.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Generic, TypeVar

from typing_extensions import NamedTuple  # Python 3.10's can't be generic

__all__ = [
    "Block",
    "Request",
    "RequestLimits",
    "Segment",
    "box_blocks",
    "choose_joins",
    "choose_limits",
    "intersect_boxes",
    "plan_requests",
    "row_major_strides",
]

D = TypeVar("D")

_KIB = 1 << 10
_MIB = 1 << 20
_COVER_RATIO = 1.25
"""A block may cover gaps of any size as long as it costs no more than this times the bytes needed."""
_SMALL_REMOTE_BYTES = 128 * _KIB
"""Below this mean size of its segments a remote request is staged: copying 128 KiB takes about 10 µs, no more than one
more call on a socket."""
_SMALL_LOCAL_BYTES = 4 * _KIB
"""The same for a local file, where one system call fills a thousand buffers."""
_DIRECT_RUN_BYTES = 64 * _KIB
"""Rows at least this long go straight to their destination one by one; shorter ones come as one covering block."""
_STAGED_BYTES = 4 * _MIB
"""Length of a staged request: its scratch buffer stays in the cache, and is small beside any budget."""
_LEAST_PIECE_BYTES = 1 * _MIB
"""No request is made shorter than this for parallelism's sake: at 80 MB/s it takes 13 ms, as long as a round trip."""

_FRAME_SHARE = 0.01
"""What lies between tensors and is read with them: without room for it each round would leave a short request over."""
_WASTE_SHARE = 0.02
"""Farther segments are joined too while all gaps together stay within this share of the bytes wanted."""
_WIDEST_GAP_BYTES = 1 * _MIB
"""No gap beyond this is worth a request: at 80 MB/s it takes 13 ms, as long as a round trip."""


class Block(NamedTuple):
    """Contiguous bytes of a chunk's payload, and the part of a box that they hold.

    Attributes:
        start_bytes: Where they start, from the start of the payload.
        size_bytes: How many there are, gaps included.
        offsets: Origin of the part within the box.
        lengths: Shape of the part.
        strides: Strides of the part within the bytes, in elements; the first element is the first one there.
        dense: There are no gaps, so the bytes are the part in row-major order.
    """

    start_bytes: int
    size_bytes: int
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    strides: tuple[int, ...]
    dense: bool


class Segment(NamedTuple, Generic[D]):
    """Contiguous bytes of a file and where they go.

    Attributes:
        start: First byte in the file.
        stop: One past the last.
        destination: Opaque.
        position: Where in the destination the first byte goes; -1: the segment must arrive in one piece.
    """

    start: int
    stop: int
    destination: D
    position: int


class Request(NamedTuple, Generic[D]):
    """One ranged read. Its segments are sorted by start; they may overlap when it is staged.

    Attributes:
        file: Name of the file.
        start: First byte.
        stop: One past the last.
        segments: What it brings.
        staged: It is read into one scratch buffer and copied from there; otherwise scattered.
    """

    file: str
    start: int
    stop: int
    segments: list[Segment[D]]
    staged: bool


class RequestLimits(NamedTuple):
    """What `plan_requests` keeps to.

    Attributes:
        gap_bytes: Segments nearer than this are read as one.
        request_bytes: A request is cut at this length.
        staged_bytes: A staged request is cut at this length; 0: nothing is staged.
        small_bytes: A request is staged when its segments are smaller than this on the average.
    """

    gap_bytes: int
    request_bytes: int
    staged_bytes: int
    small_bytes: int = _SMALL_REMOTE_BYTES


def choose_limits(
    total_bytes: int,
    *,
    concurrency: int,
    gap_bytes: int,
    read_bytes: int,
    budget_bytes: int,
    ranged: bool = True,
    remote: bool = True,
) -> RequestLimits:
    """Choose the length of requests so that all workers have work in every round, and none is needlessly short.

    Args:
        total_bytes: What the load needs in all.
        concurrency: Requests in flight.
        gap_bytes: Largest gap to read through.
        read_bytes: Longest request.
        budget_bytes: Memory for scratch buffers.
        ranged: The store can read a range. Otherwise each request brings the whole object, so there is one a file.
        remote: A request costs a round trip.
    """
    if not ranged:
        return RequestLimits(1 << 62, 1 << 62, 0)
    rounds = max(1, math.ceil(total_bytes / (concurrency * read_bytes)))
    even_bytes = math.ceil(total_bytes * (1 + _FRAME_SHARE) / (rounds * concurrency))
    request_bytes = min(read_bytes, max(_LEAST_PIECE_BYTES, even_bytes), max(64 * _KIB, budget_bytes // 4))
    staged_bytes = min(_STAGED_BYTES, request_bytes)
    small_bytes = _SMALL_REMOTE_BYTES if remote else _SMALL_LOCAL_BYTES
    return RequestLimits(min(gap_bytes, request_bytes // 2), request_bytes, staged_bytes, small_bytes)


def row_major_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous array."""
    strides = []
    step = 1
    for size in reversed(sizes):
        strides.append(step)
        step *= size
    strides.reverse()
    return tuple(strides)


def intersect_boxes(
    saved_offsets: Sequence[int],
    saved_sizes: Sequence[int],
    wanted_offsets: Sequence[int],
    wanted_sizes: Sequence[int],
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None:
    """Where two boxes of one tensor meet: its offsets in the saved one, in the wanted one, and its lengths.

    None when they share no element. Boxes without dimensions share their one element.
    """
    in_saved = []
    in_wanted = []
    lengths = []
    for saved_start, saved_size, wanted_start, wanted_size in zip(
        saved_offsets, saved_sizes, wanted_offsets, wanted_sizes, strict=True
    ):
        start = max(saved_start, wanted_start)
        saved_stop = saved_start + saved_size
        wanted_stop = wanted_start + wanted_size
        length = min(saved_stop, wanted_stop) - start
        if length <= 0:
            return None
        in_saved.append(start - saved_start)
        in_wanted.append(start - wanted_start)
        lengths.append(length)
    return tuple(in_saved), tuple(in_wanted), tuple(lengths)


def box_blocks(
    sizes: Sequence[int],
    offsets: Sequence[int],
    lengths: Sequence[int],
    *,
    itemsize: int,
    gap_bytes: int,
    block_bytes: int,
    direct: bool,
) -> Iterator[Block]:
    """Split a box of a row-major chunk into contiguous blocks of bytes, ascending.

    Args:
        sizes: Shape of the chunk.
        offsets: Origin of the box in it.
        lengths: Shape of the box, no dimension empty.
        itemsize: Bytes of one element.
        gap_bytes: Rows nearer than this come as one block that covers the gap.
        block_bytes: A block that needs scratch memory is cut into such as fit this, down to single elements.
        direct: The destination is row-major memory of the same dtype: dense blocks need no scratch, so they are not
            cut, and long rows are not joined by a covering block.
    """
    strides = row_major_strides(sizes)
    outer = len(sizes)  # the dimensions before this one are walked index by index, the rest is one block
    extent = needed = 1
    while outer > 0:
        length, stride = lengths[outer - 1], strides[outer - 1]
        if length > 1:
            gap = (stride - extent) * itemsize
            covering = (length - 1) * stride + extent
            if gap > 0:
                if direct and extent == needed and extent * itemsize >= _DIRECT_RUN_BYTES:
                    break
                if gap > gap_bytes and covering > _COVER_RATIO * needed * length:
                    break
            extent, needed = covering, needed * length
        outer -= 1
    dense = extent == needed
    part = (1,) * outer + tuple(lengths[outer:])
    start = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    for origin in _indices(lengths[:outer]):
        at = start + sum(index * stride for index, stride in zip(origin, strides, strict=False))
        block = Block(
            at * itemsize,
            extent * itemsize,
            origin + (0,) * (len(sizes) - outer),
            part,
            strides,
            dense,
        )
        if (direct and dense) or block.size_bytes <= block_bytes:
            yield block
        else:
            yield from _cut(block, itemsize, block_bytes)


def _indices(lengths: Sequence[int]) -> Iterator[tuple[int, ...]]:
    if not lengths:
        yield ()
        return
    for head in _indices(lengths[:-1]):
        for index in range(lengths[-1]):
            yield (*head, index)


def _cut(block: Block, itemsize: int, block_bytes: int) -> Iterator[Block]:
    """Cut a block along its first dimension, and rows that are too long themselves again."""
    axis = next((d for d, length in enumerate(block.lengths) if length > 1), None)
    if axis is None or block.size_bytes <= block_bytes:
        yield block
        return
    row_bytes = block.strides[axis] * itemsize
    rows = max(1, block_bytes // row_bytes)
    length = block.lengths[axis]
    inner_bytes = block.size_bytes - (length - 1) * row_bytes
    for first in range(0, length, rows):
        count = min(rows, length - first)
        piece = Block(
            block.start_bytes + first * row_bytes,
            (count - 1) * row_bytes + inner_bytes,
            (*block.offsets[:axis], block.offsets[axis] + first, *block.offsets[axis + 1 :]),
            (*block.lengths[:axis], count, *block.lengths[axis + 1 :]),
            block.strides,
            block.dense,
        )
        if count == 1 and piece.size_bytes > block_bytes:
            yield from _cut(piece, itemsize, block_bytes)
        else:
            yield piece


_start_of = itemgetter(0)


def choose_joins(files: Mapping[str, list[Segment[D]]], limits: RequestLimits) -> dict[str, set[int]]:
    """Choose gaps wider than the limit that are read through too, so that a load takes fewer requests.

    They are taken from the nearest on, as long as these and the gaps within the limit together are at most 2 % of the
    bytes of the segments. Sorts the lists in place.

    Args:
        files: The segments of each file.
        limits: What holds otherwise.

    Returns:
        For each file that has some, the starts of the segments that are read together with what comes before them.
    """
    widest = min(_WIDEST_GAP_BYTES, limits.request_bytes // 2)
    gap_bytes = limits.gap_bytes
    wanted = wasted = 0
    farther: list[tuple[int, str, int]] = []
    for file, segments in files.items():
        segments.sort(key=_start_of)
        end = segments[0][0] if segments else 0
        for segment in segments:
            start, stop = segment[0], segment[1]
            gap = start - end
            if gap > 0:
                if gap <= gap_bytes:
                    wasted += gap
                elif gap <= widest:
                    farther.append((gap, file, start))
            if stop > end:
                wanted += stop - max(start, end)
                end = stop
    joins: dict[str, set[int]] = {}
    allowed = wanted * _WASTE_SHARE
    farther.sort()
    for gap, file, start in farther:
        wasted += gap
        if wasted > allowed:
            break
        joins.setdefault(file, set()).add(start)
    return joins


def plan_requests(
    file: str, segments: list[Segment[D]], limits: RequestLimits, joins: Collection[int] = ()
) -> list[Request[D]]:
    """Arrange the segments of one file into requests, ascending. Sorts ``segments`` in place.

    Args:
        file: Name of the file.
        segments: What is wanted of it.
        limits: Which are near, and how long a request may be.
        joins: Starts of segments that count as near to what comes before them, however far that is.
    """
    segments.sort(key=_start_of)
    gap_bytes, request_bytes, staged_bytes, _ = limits
    requests: list[Request[D]] = []
    current: list[Segment[D]] = []
    begin = end = 0
    overlaps = False

    for segment in segments:
        start, stop = segment[0], segment[1]
        if current:
            fits = stop - begin <= request_bytes
            if start < end:
                joined = begin <= start and max(stop, end) - begin <= staged_bytes
                overlaps = overlaps or joined
            else:
                joined = (start - end <= gap_bytes or start in joins) and (
                    fits or (segment[3] >= 0 and start - begin <= request_bytes - _DIRECT_RUN_BYTES)
                )
            if joined:
                if fits or start < end:
                    current.append(segment)
                    end = max(end, stop)
                    continue
                cut = begin + request_bytes
                current.append(Segment(start, cut, segment[2], segment[3]))
                segment = Segment(cut, stop, segment[2], segment[3] + cut - start)  # noqa: PLW2901 - the rest of it
                start, end = cut, cut
            _close(file, current, end, overlaps, limits, requests)
            current, overlaps = [], False
        while segment[3] >= 0 and stop - start > request_bytes:
            cut = start + request_bytes
            requests.append(Request(file, start, cut, [Segment(start, cut, segment[2], segment[3])], False))
            segment = Segment(cut, stop, segment[2], segment[3] + request_bytes)  # noqa: PLW2901 - the rest of it
            start = cut
        current = [segment]
        begin, end = start, stop
    if current:
        _close(file, current, end, overlaps, limits, requests)
    return requests


def _close(
    file: str,
    segments: list[Segment[D]],
    end: int,
    overlaps: bool,
    limits: RequestLimits,
    requests: list[Request[D]],
) -> None:
    begin, staged_bytes, small_bytes = segments[0][0], limits.staged_bytes, limits.small_bytes
    if staged_bytes == 0 or len(segments) == 1 or (not overlaps and end - begin >= len(segments) * small_bytes):
        requests.append(Request(file, begin, end, segments, False))
        return
    if overlaps or end - begin <= staged_bytes:
        requests.append(Request(file, begin, end, segments, True))
        return
    group: list[Segment[D]] = []
    for segment in segments:
        if group and segment[1] - group[0][0] > staged_bytes:
            _close_group(file, group, small_bytes, requests)
            group = []
        group.append(segment)
    _close_group(file, group, small_bytes, requests)


def _close_group(file: str, group: list[Segment[D]], small_bytes: int, requests: list[Request[D]]) -> None:
    begin, end = group[0][0], group[-1][1]
    requests.append(Request(file, begin, end, group, 1 < len(group) > (end - begin) / small_bytes))
