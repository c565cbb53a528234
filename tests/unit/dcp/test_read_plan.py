"""Boxes to bytes to requests: every byte that is wanted arrives once, and few others do."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from dcpfs.dcp.read_plan import (
    Request,
    RequestLimits,
    Segment,
    box_blocks,
    choose_joins,
    choose_limits,
    intersect_boxes,
    plan_requests,
    row_major_strides,
)

_MIB = 1 << 20


def _gather(tensor: torch.Tensor, offsets: tuple[int, ...], lengths: tuple[int, ...], **options: int) -> torch.Tensor:
    """Read a box through its blocks, as a reader does."""
    payload = tensor.contiguous().reshape(-1)
    box = torch.full(lengths, -1, dtype=tensor.dtype)
    for block in box_blocks(
        tuple(tensor.shape),
        offsets,
        lengths,
        itemsize=tensor.element_size(),
        gap_bytes=options["gap_bytes"],
        block_bytes=options["block_bytes"],
        direct=bool(options["direct"]),
    ):
        first = block.start_bytes // tensor.element_size()
        source = payload[first : first + block.size_bytes // tensor.element_size()]
        part = source.as_strided(block.lengths, block.strides, source.storage_offset())
        target = box[tuple(slice(o, o + n) for o, n in zip(block.offsets, block.lengths, strict=True))]
        assert torch.all(target == -1), "a part arrives twice"
        target.copy_(part)
        if block.dense:
            assert source.numel() == part.numel()
    return box


@pytest.mark.parametrize("gap_bytes", [0, 16, 1 << 20])
@pytest.mark.parametrize("block_bytes", [1, 40, 1 << 20])
@pytest.mark.parametrize("direct", [0, 1])
def test_blocks_hold_exactly_the_box(gap_bytes: int, block_bytes: int, direct: int) -> None:
    random.seed(5)
    shapes = [(), (1,), (7,), (5, 6), (1, 9), (9, 1), (4, 5, 6), (3, 1, 2, 5)]
    for shape, _ in itertools.product(shapes, range(6)):
        tensor = torch.arange(max(1, torch.Size(shape).numel()), dtype=torch.int32).reshape(shape)
        offsets = tuple(random.randrange(size) for size in shape)
        lengths = tuple(random.randint(1, size - o) for size, o in zip(shape, offsets, strict=True))
        box = _gather(tensor, offsets, lengths, gap_bytes=gap_bytes, block_bytes=block_bytes, direct=direct)
        expected = tensor[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))]
        assert torch.equal(box, expected)


def test_case_64_a_run_of_rows_is_one_block_of_just_its_bytes() -> None:
    blocks = list(
        box_blocks((1000, 64), (250, 0), (125, 64), itemsize=4, gap_bytes=1 << 16, block_bytes=1 << 24, direct=True)
    )
    assert [(b.start_bytes, b.size_bytes, b.dense) for b in blocks] == [(250 * 256, 125 * 256, True)]


@pytest.mark.parametrize(
    ("row_bytes", "share", "blocks", "moved"),
    [
        (4096, 2, 1, 2.0),  # short rows: one block over the gaps
        (1 << 20, 2, 64, 1.0),  # long rows: each by itself
    ],
)
def test_column_slices_come_in_few_sensible_blocks(row_bytes: int, share: int, blocks: int, moved: float) -> None:
    found = list(
        box_blocks(
            (64, row_bytes),
            (0, 0),
            (64, row_bytes // share),
            itemsize=1,
            gap_bytes=64 << 10,
            block_bytes=1 << 30,
            direct=True,
        )
    )
    assert len(found) == blocks
    needed = 64 * row_bytes // share
    assert sum(b.size_bytes for b in found) / needed == pytest.approx(moved, rel=0.02)


def test_a_cover_of_a_quarter_more_is_read_as_one() -> None:
    found = list(
        box_blocks((8, 1 << 20), (0, 0), (8, 900_000), itemsize=1, gap_bytes=0, block_bytes=1 << 30, direct=False)
    )
    assert len(found) == 1
    assert not found[0].dense


def test_intersection() -> None:
    assert intersect_boxes((4, 0), (4, 8), (6, 2), (10, 3)) == ((2, 2), (0, 0), (2, 3))
    assert intersect_boxes((0,), (4,), (4,), (4,)) is None
    assert intersect_boxes((0,), (0,), (0,), (4,)) is None
    assert intersect_boxes((), (), (), ()) == ((), (), ())
    assert row_major_strides((2, 3, 4)) == (12, 4, 1)


def _check(requests: list[Request[int]], segments: list[Segment[int]], limits: RequestLimits) -> None:
    """Every byte of every segment arrives once and in order, and requests obey their limits."""
    got: dict[int, list[tuple[int, int, int]]] = {}
    for request in requests:
        assert request.start == min(s.start for s in request.segments)
        assert request.stop == max(s.stop for s in request.segments)
        if not request.staged:
            assert all(a.stop <= b.start for a, b in itertools.pairwise(request.segments))
        if len(request.segments) > 1:
            assert request.stop - request.start <= limits.request_bytes
        for segment in request.segments:
            got.setdefault(segment.destination, []).append((segment.start, segment.stop, segment.position))
    for segment in segments:
        pieces = sorted(got[segment.destination])
        assert pieces[0][0] == segment.start
        assert pieces[-1][1] == segment.stop
        assert all(a[1] == b[0] for a, b in itertools.pairwise(pieces))
        if segment.position < 0:
            assert len(pieces) == 1
        else:
            assert all(p[2] - segment.position == p[0] - segment.start for p in pieces)


@pytest.mark.parametrize("seed", range(20))
def test_requests_bring_every_segment_once(seed: int) -> None:
    random.seed(seed)
    limits = RequestLimits(
        random.choice([0, 100, 5000]), random.choice([1 << 17, 1 << 20]), random.choice([0, 1 << 16])
    )
    segments = []
    at = 0
    for number in range(random.randint(1, 200)):
        at += random.choice([0, 0, 10, 3000, 200_000, -500 if at > 1000 else 0])
        size = random.choice([1, 700, 40_000, 300_000, 2_000_000])
        segments.append(Segment(at, at + size, number, random.choice([-1, 0, 64])))
        at += size
    requests = plan_requests("f", list(segments), limits)
    _check(requests, segments, limits)


def test_case_70_many_small_tensors_are_few_staged_requests() -> None:
    limits = choose_limits(
        500 * 100_000,
        concurrency=32,
        gap_bytes=64 << 10,
        read_bytes=16 * _MIB,
        budget_bytes=512 * _MIB,
        ranged=True,
    )
    segments = [Segment(i * 101_000, i * 101_000 + 100_000, i, 0) for i in range(500)]
    requests = plan_requests("f", segments, limits)
    assert len(requests) <= 34
    assert all(r.staged for r in requests[:-1])


def test_a_full_load_takes_few_requests_and_moves_little_else() -> None:
    sizes = [64 * _MIB, 8 * _MIB, 8 * _MIB, 8192, 8192, 22 * _MIB] * 13
    segments = []
    at = 0
    for number, size in enumerate(sizes):
        segments.append(Segment(at + 1024, at + 1024 + size, number, 0))
        at += size + 1500
    total = sum(sizes)
    limits = choose_limits(
        total,
        concurrency=32,
        gap_bytes=64 << 10,
        read_bytes=16 * _MIB,
        budget_bytes=512 * _MIB,
        ranged=True,
    )
    requests = plan_requests("f", segments, limits)
    assert len(requests) <= 100 * total / 1.34e9
    assert sum(r.stop - r.start for r in requests) / total <= 1.01
    assert not any(r.staged for r in requests)


def test_a_store_without_ranges_is_asked_once_a_file() -> None:
    limits = choose_limits(10 * _MIB, concurrency=4, gap_bytes=0, read_bytes=_MIB, budget_bytes=_MIB, ranged=False)
    segments = [Segment(i * 2 * _MIB, i * 2 * _MIB + _MIB, i, 0) for i in range(10)]
    assert len(plan_requests("f", segments, limits)) == 1


# --- gaps beyond the limit


def _at(*ranges: tuple[int, int]) -> list[Segment[int]]:
    return [Segment(start, stop, number, 0) for number, (start, stop) in enumerate(ranges)]


_LIMITS = RequestLimits(gap_bytes=10, request_bytes=1 << 20, staged_bytes=0)


@pytest.mark.parametrize(
    ("gaps", "joined"),
    [
        ([30, 500, 20], [0, 2]),  # 50 of the 80 bytes that 2 % of 4000 are
        ([90], []),  # too far already
        ([5, 5], []),  # within the limit as it is
        ([30, 30, 30], [0, 1]),  # as many as it takes, of one width too
        ([8] * 9 + [30], []),  # what the gaps within the limit cost counts
    ],
)
def test_near_segments_are_joined_while_it_costs_two_percent(gaps: list[int], joined: list[int]) -> None:
    size = 4000 // (len(gaps) + 1)
    ranges = [(0, size)]
    for gap in gaps:
        start = ranges[-1][1] + gap
        ranges.append((start, start + size))
    joins = choose_joins({"f": _at(*ranges)}, _LIMITS)
    assert joins == ({"f": {ranges[number + 1][0] for number in joined}} if joined else {})
    requests = plan_requests("f", _at(*ranges), _LIMITS, joins.get("f", ()))
    assert len(requests) == 1 + sum(gap > 10 for gap in gaps) - len(joined)


def test_gaps_of_all_files_count_together_and_overlaps_once() -> None:
    first = _at((5000, 6000), (0, 2000), (1000, 2000), (2000, 4970))  # unsorted; a gap of 30
    second = _at((100, 1100), (1150, 2150))  # a gap of 50
    joins = choose_joins({"a": first, "b": second, "c": []}, _LIMITS)
    assert joins == {"a": {5000}, "b": {1150}}  # 80 of 2 % of 7970
    assert [segment.start for segment in first] == [0, 1000, 2000, 5000]
    assert choose_joins({}, _LIMITS) == {}


def test_no_gap_is_wider_than_half_a_request_or_a_round_trip() -> None:
    much = 1 << 40
    limits = _LIMITS._replace(request_bytes=64 * _MIB)
    assert choose_joins({"f": _at((0, much), (much + _MIB, 2 * much))}, limits) == {"f": {much + _MIB}}
    assert choose_joins({"f": _at((0, much), (much + _MIB + 1, 2 * much))}, limits) == {}
    assert choose_joins({"f": _at((0, much), (much + _MIB, 2 * much))}, _LIMITS) == {}


@pytest.mark.parametrize("seed", range(10))
def test_farther_gaps_never_cost_more_than_they_may(seed: int) -> None:
    random.seed(seed)
    segments = []
    at = 0
    for number in range(400):
        size = random.choice([500, 5_000, 400_000, 1_000_000])
        segments.append(Segment(at, at + size, number, 0))
        at += size + random.choice([0, 1_000, 70_000, 300_000])
    needed = sum(s.stop - s.start for s in segments)
    limits = choose_limits(needed, concurrency=8, gap_bytes=64 << 10, read_bytes=16 * _MIB, budget_bytes=512 * _MIB)
    before = plan_requests("f", list(segments), limits)
    joins = choose_joins({"f": list(segments)}, limits)
    after = plan_requests("f", list(segments), limits, joins["f"])
    _check(after, segments, limits)
    assert len(before) - 30 > len(after)
    assert sum(r.stop - r.start for r in after) <= 1.02 * needed
