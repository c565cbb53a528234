"""One block of host memory that a state is copied into, save after save.

Problem: copying a state into fresh memory at every save costs the first touch of every page, 1.0 to 1.5 GB/s where a
warm copy moves 13 (measured, see the anchors of the project), and lets resident memory grow save by save (case 62). A
buffer per tensor costs a descriptor per tensor once it is shared with another process (case 52).

Way taken: one block, cut into aligned slots, whatever their dtypes. It is kept while the list of slots stays the same
and made anew when that changes. Copies are values: detached, resolved, row-major, and every slot is written at every
save, so nothing of an older save can remain (cases 12 to 14).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Sequence

import torch

from dcpfs.background.copying import Copier, CopyToHost, Pair, copier_for, pin_block, unpin_block
from dcpfs.background.free_memory import available_bytes, require_memory

__all__ = ["Arena", "Layout", "cut_block", "layout_of", "plain_block", "size_of"]

_logger = logging.getLogger(__name__)

_ALIGNMENT_BYTES = 64
"""A cache line; also a multiple of every dtype's size."""


Layout = tuple[tuple[torch.dtype, torch.Size], ...]
"""Dtype and shape of each slot, in the order in which they lie."""


def layout_of(tensors: Sequence[torch.Tensor]) -> Layout:
    """The slots that copies of these tensors take."""
    return tuple((tensor.dtype, tensor.shape) for tensor in tensors)


def size_of(layout: Layout) -> int:
    """Size in bytes of a block for a layout."""
    return sum(_padded_bytes(dtype, shape) for dtype, shape in layout)


def cut_block(block: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """The slots of a flat uint8 block, as views."""
    slots, start = [], 0
    for dtype, shape in layout:
        size_bytes = shape.numel() * dtype.itemsize
        slots.append(block[start : start + size_bytes].view(dtype).view(shape))
        start += _padded_bytes(dtype, shape)
    return slots


def _padded_bytes(dtype: torch.dtype, shape: torch.Size) -> int:
    return -(-shape.numel() * dtype.itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def plain_block(size_bytes: int) -> torch.Tensor:
    """Ordinary memory: what a thread of the same process needs. Untouched pages are not resident yet.

    Raises:
        StorageFullError: There is not so much free memory.
    """
    require_memory(size_bytes)
    return torch.empty(size_bytes, dtype=torch.uint8, device="cpu")


class Arena:
    """A block and its slots. Belongs to one thread at a time, but for `wait`.

    Args:
        make_block: Makes a flat uint8 CPU tensor of a size in bytes.
        choose_copier: Says who copies tensors of a device.
    """

    def __init__(
        self,
        make_block: Callable[[int], torch.Tensor] = plain_block,
        choose_copier: Callable[[torch.device], Copier] = copier_for,
    ) -> None:
        self._make_block = make_block
        self._choose_copier = choose_copier
        self._copiers: dict[torch.device, Copier] = {}
        self._layout: Layout | None = None
        self._for_device = False
        self._slots: list[torch.Tensor] = []
        self._pinned: torch.Tensor | None = None
        self._pending: list[CopyToHost] = []
        self._size_bytes = 0

    @property
    def size_bytes(self) -> int:
        """Size of the block."""
        return self._size_bytes

    @property
    def is_pending(self) -> bool:
        """Whether copies may be at work still: `wait` has not been called since."""
        return bool(self._pending)

    def stage(self, tensors: Sequence[torch.Tensor], *, first: Collection[int] = ()) -> list[torch.Tensor]:
        """Begin to copy the values of the tensors. Nobody may read an earlier copy any more.

        Args:
            tensors: Not written again before `wait` returns, but for those of `first`.
            first: Positions of those that may be written at once: computing on their device waits for these copies.

        Returns:
            The copies: row-major CPU tensors of the same shapes and dtypes, valid after `wait` and until the next call.

        Raises:
            StorageFullError: There is no memory for a block of this size. The arena then has none.
        """
        layout = layout_of(tensors)
        self.wait()
        for_device = any(tensor.is_cuda for tensor in tensors)
        if layout != self._layout or for_device > self._for_device:
            self._cut(layout, pins=for_device)
        pairs = list(zip(self._slots, tensors, strict=True))
        if first:
            self._begin([pairs[position] for position in sorted(first)], holds_computing=True)
            pairs = [pair for position, pair in enumerate(pairs) if position not in first]
        self._begin(pairs)
        return list(self._slots)

    def wait(self) -> None:
        """Return when all copies are complete, and the sources may be written again. Any thread."""
        for copy in list(self._pending):
            copy.wait()
            with contextlib.suppress(ValueError):  # another thread has waited for it, too
                self._pending.remove(copy)

    def release(self) -> None:
        """Let go of the block. Copies that somebody still holds keep it alive. Idempotent."""
        self.wait()
        if self._pinned is not None:
            unpin_block(self._pinned)
        self._layout, self._slots, self._size_bytes, self._pinned = None, [], 0, None

    def _begin(self, pairs: Sequence[Pair], *, holds_computing: bool = False) -> None:
        by_device: dict[torch.device, list[Pair]] = {}
        for pair in pairs:
            by_device.setdefault(pair[1].device, []).append(pair)
        for device, of_device in by_device.items():
            copier = self._copiers.get(device)
            if copier is None:
                copier = self._copiers[device] = self._choose_copier(device)
            begun = copier.begin(of_device)
            if begun is None:
                continue
            self._pending.append(begun)
            if holds_computing:
                begun.hold_computing()

    def _cut(self, layout: Layout, *, pins: bool) -> None:
        self.release()  # before the new block is made, so that both are never held
        size_bytes, free_bytes = size_of(layout), available_bytes()
        block = self._make_block(size_bytes)
        if pins:
            if pin_block(block):
                self._pinned = block
            else:
                _logger.warning("%.1f MB of host memory could not be pinned: copies take longer", size_bytes / 1e6)
        self._slots = cut_block(block, layout)
        self._layout, self._size_bytes, self._for_device = layout, size_bytes, pins
        _logger.info(
            "made room for %d tensors: %.1f MB of %s memory, of which %s were free",
            len(layout),
            size_bytes / 1e6,
            "pinned" if self._pinned is not None else "plain",
            "an unknown number" if free_bytes is None else f"{free_bytes / 1e6:.0f} MB",
        )
