"""Keys of a state whose tensors share memory: what is loaded under one must be what is loaded under the other.

Problem: tied weights stand in a state under two keys. Where the checkpoint has two values for them, the one that
arrives last wins, in silence, and which one that is depends on the order of the requests.

Way taken: the targets of a load are sorted by address, and only those that overlap are looked at, exactly: columns of
one matrix lie between each other without sharing an element. Of two that share memory the metadata mostly knows: one
stored box or equal checksums are fine, other checksums are an error before a byte is read. Where it does not know
(another writer's entries, other views of the memory), the second is read beside the first and compared. Such pairs are
rare; they take as much memory again as their own tensors.

Flow: `find_aliases` → `require_agreeing` (in the step whose outcome all ranks agree on) → ``Fetch.add_aliases`` →
`Detours.settle` after the reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from dcpfs.dcp.host_memory import flat_bytes
from dcpfs.dcp.landing import TensorWant
from dcpfs.errors import KeyMismatchError

__all__ = ["Alias", "Detours", "find_aliases", "require_agreeing"]

_PAIRS_AT_MOST = 100_000
"""Compared exactly. A state with more tensors that lie between each other is none that was seen."""
_WORK_AT_MOST = 10_000
"""Of one exact comparison, in NumPy's unit. Views of one tensor take a few steps."""


class Alias(NamedTuple):
    """Two wants of different keys whose targets share memory, and which may get different values."""

    first: TensorWant
    second: TensorWant


def find_aliases(wants: Sequence[TensorWant]) -> list[Alias]:
    """The pairs that share memory and don't read what is known to be the same. About 0.5 µs per want."""
    spans: list[tuple[int, int, int]] = []
    for number, want in enumerate(wants):
        target = want.target
        size_bytes = target.nbytes
        if size_bytes:
            if not want.resident:
                start, size_bytes = _span(target)
            else:
                start = target.data_ptr()
            if start:
                spans.append((start, start + size_bytes, number))
    spans.sort()
    return [
        Alias(wants[first], wants[second])
        for first, second in _overlapping(spans, wants)
        if not _are_same(wants[first], wants[second])
    ]


def require_agreeing(aliases: Iterable[Alias], url: str) -> None:
    """Return when no pair is known to get different values.

    Raises:
        KeyMismatchError: One is.
    """
    for first, second in aliases:
        if _are_comparable(first, second) and first.location.crc32 != second.location.crc32:
            raise _conflict(first, second, url)


class Detours:
    """Wants that are read beside memory that another key fills too, and compared with it.

    Args:
        aliases: The pairs.
    """

    def __init__(self, aliases: Sequence[Alias]) -> None:
        self._partners: dict[int, list[TensorWant]] = {}
        self._wants: dict[int, tuple[TensorWant, TensorWant]] = {}
        for first, second in aliases:
            self._partners.setdefault(id(second), []).append(first)
            if id(second) not in self._wants:
                scratch = torch.empty_like(second.target, memory_format=torch.contiguous_format)
                self._wants[id(second)] = (second, second._replace(target=scratch, resident=False))

    def of(self, want: TensorWant) -> TensorWant:
        """The want to read instead."""
        found = self._wants.get(id(want))
        return want if found is None else found[1]

    def settle(self, url: str) -> None:
        """Compare what was read, and put it where it belongs. Everything has been read.

        Raises:
            KeyMismatchError: Two keys that share memory have different values in the checkpoint.
        """
        for want, beside in self._wants.values():
            partners = self._partners[id(want)]
            if all(_is_same_place(each.target, want.target) for each in partners):
                if not torch.equal(flat_bytes(want.target), flat_bytes(beside.target)):
                    raise _conflict(partners[0], want, url)
                continue
            before = [each.target.clone() for each in partners]
            want.target.copy_(beside.target)
            for each, copy in zip(partners, before, strict=True):
                if not torch.equal(flat_bytes(each.target), flat_bytes(copy)):
                    raise _conflict(each, want, url)


def _overlapping(spans: Sequence[tuple[int, int, int]], wants: Sequence[TensorWant]) -> Iterator[tuple[int, int]]:
    """Pairs of different keys that share an element, the lower number first. The spans are sorted."""
    left = _PAIRS_AT_MOST
    for cluster in _clusters(spans):
        if len({wants[number].key for _, _, number in cluster}) == 1:
            continue  # chunks of one tensor
        active: list[tuple[int, int]] = []
        for start, stop, number in cluster:
            active = [each for each in active if each[0] > start]
            for _, other in active:
                if wants[other].key == wants[number].key:
                    continue
                left -= 1
                if left < 0:
                    return
                if _share_memory(wants[other].target, wants[number].target):
                    yield min(other, number), max(other, number)
            active.append((stop, number))


def _clusters(spans: Sequence[tuple[int, int, int]]) -> Iterator[list[tuple[int, int, int]]]:
    """Runs of spans that overlap, of two and more."""
    first, end = 0, 0
    for position, (start, stop, _) in enumerate(spans):
        if start >= end:
            if position - first > 1:
                yield list(spans[first:position])
            first = position
        if stop > end:
            end = stop
    if len(spans) - first > 1:
        yield list(spans[first:])


def _span(target: torch.Tensor) -> tuple[int, int]:
    """Address and size of the memory between a tensor's first and last element; address 0 when it has none."""
    try:
        start = target.data_ptr()
    except RuntimeError:  # a tensor without memory of its own, which the load refuses by itself
        return 0, 0
    if target.is_contiguous():
        return start, target.nbytes
    last = sum((size - 1) * stride for size, stride in zip(target.shape, target.stride(), strict=True))
    return start, (last + 1) * target.itemsize


class _Layout:
    """A tensor's place in memory, as NumPy reads it. Nothing is read through it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        itemsize = tensor.itemsize
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{itemsize}",
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * itemsize for stride in tensor.stride()),
            "data": (tensor.data_ptr(), True),
        }


def _share_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.device != second.device:
        return False
    if first.is_contiguous() and second.is_contiguous():
        return True  # their spans overlap
    try:
        one, two = np.asarray(_Layout(first)), np.asarray(_Layout(second))
        return np.shares_memory(one, two, max_work=_WORK_AT_MOST)  # type: ignore[arg-type]  # hints lack other numbers
    except np.exceptions.TooHardError:
        return True  # compared after the reads


def _is_same_place(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Both are the same elements in the same order."""
    if first.data_ptr() != second.data_ptr() or first.dtype is not second.dtype:
        return False
    if first.shape == second.shape and first.stride() == second.stride():
        return first.is_conj() == second.is_conj() and first.is_neg() == second.is_neg()
    return first.nbytes == second.nbytes and first.is_contiguous() and second.is_contiguous()


def _are_same(first: TensorWant, second: TensorWant) -> bool:
    """They are known to get the same bytes."""
    if first.dtype is not second.dtype or not _is_same_place(first.target, second.target):
        return False
    one, two = first.location, second.location
    if first.lengths == second.lengths and first.offsets == second.offsets and first.sizes == second.sizes:
        if (one.file, one.offset_bytes) == (two.file, two.offset_bytes):
            return True
        if min(one.crc32, two.crc32) >= 0 and not (one.transforms or two.transforms):
            return one.crc32 == two.crc32
    return _are_comparable(first, second) and one.crc32 == two.crc32


def _are_comparable(first: TensorWant, second: TensorWant) -> bool:
    """Their checksums tell whether the same elements get the same bytes."""
    one, two = first.location, second.location
    return (
        first.whole
        and second.whole
        and first.dtype is second.dtype is first.target.dtype
        and math.prod(first.sizes) == math.prod(second.sizes)
        and min(one.crc32, two.crc32) >= 0
        and not (one.transforms or two.transforms)
        and _is_same_place(first.target, second.target)
    )


def _conflict(first: TensorWant, second: TensorWant, url: str) -> KeyMismatchError:
    return KeyMismatchError(
        f"loading {url}: {first.key!r} and {second.key!r} share memory in the state, and have different values in the "
        "checkpoint, of which it can hold one; give each a tensor of its own, or leave one of them out",
        mismatched={second.key: f"shares memory with {first.key!r}, which has another value"},
    )
