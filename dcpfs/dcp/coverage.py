"""Chunks of a tensor cover it, without gap or overlap. Pure.

Problem: torch checks this for every tensor, 20,000 whole ones included, and until 2.9 compares all chunks with all.

Way taken: one chunk that is the whole tensor needs no look. Else bounds, overlaps, and volume; overlaps by a sweep
along the dimension in which the chunks differ most: sorted by their start there, a chunk only meets those that have
not ended.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["find_fault"]

Box = tuple[Sequence[int], Sequence[int]]
"""Offsets and sizes in elements."""


def find_fault(shape: Sequence[int], boxes: Sequence[Box], *, complete: bool) -> str | None:
    """What is wrong with the boxes as chunks of a tensor, in words, or None.

    Args:
        shape: Of the whole tensor.
        boxes: Its chunks.
        complete: They must cover all of it (False: chunks of other ranks are not known here).
    """
    if _is_cut_once(shape, boxes):
        return None
    for offsets, sizes in boxes:
        if len(offsets) != len(shape) or any(
            offset < 0 or size < 0 or offset + size > whole
            for offset, size, whole in zip(offsets, sizes, shape, strict=False)
        ):
            return f"the chunk at {tuple(offsets)} of shape {tuple(sizes)} lies outside the shape {tuple(shape)}"
    filled = [box for box in boxes if math.prod(box[1])]
    volume = sum(math.prod(sizes) for _, sizes in filled)
    overlap = _find_overlap(filled) if len(filled) > 1 else None
    if overlap is not None:
        (first, first_sizes), (second, second_sizes) = overlap
        return (
            f"the chunks at {tuple(first)} of shape {tuple(first_sizes)} and at {tuple(second)} of shape "
            f"{tuple(second_sizes)} overlap"
        )
    if complete and volume != math.prod(shape):
        return f"its chunks hold {volume} of {math.prod(shape)} elements"
    return None


def _is_cut_once(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """True for slices along one dimension, in order, that make up the whole. So is nearly every tensor that is cut."""
    if not boxes or not shape:
        return False
    first = boxes[0][1]
    if len(first) != len(shape):
        return False
    cut = next((dim for dim, size in enumerate(first) if size != shape[dim]), 0)
    before, after = [0] * cut, [0] * (len(shape) - cut - 1)
    rest_before, rest_after = list(shape[:cut]), list(shape[cut + 1 :])
    stop = 0
    for offsets, sizes in boxes:
        if offsets[cut] != stop or sizes[cut] < 0:
            return False
        stop += sizes[cut]
        if cut and (list(offsets[:cut]) != before or list(sizes[:cut]) != rest_before):
            return False
        if list(offsets[cut + 1 :]) != after or list(sizes[cut + 1 :]) != rest_after:
            return False
    return stop == shape[cut]


def _find_overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    dims = len(boxes[0][0])
    if dims == 0:
        return boxes[0], boxes[1]
    sweep = max(range(dims), key=lambda dim: len({offsets[dim] for offsets, _ in boxes}))
    active: list[Box] = []
    for box in sorted(boxes, key=lambda each: each[0][sweep]):
        start = box[0][sweep]
        active = [other for other in active if other[0][sweep] + other[1][sweep] > start]
        for other in active:
            if _overlap(box, other):
                return other, box
        active.append(box)
    return None


def _overlap(first: Box, second: Box) -> bool:
    return all(
        start < other + other_size and other < start + size
        for start, size, other, other_size in zip(first[0], first[1], second[0], second[1], strict=True)
    )
