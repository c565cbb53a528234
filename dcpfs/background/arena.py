"""One block of host memory that a state is copied into, save after save.

Problem: copying a state into fresh memory at every save costs the first touch of every page, 1.0 to 1.5 GB/s where a
warm copy moves 13 (measured, see the anchors of the project), and lets resident memory grow save by save (case 62). A
buffer per tensor costs a descriptor per tensor once it is shared with another process (case 52).

Way taken: one block, cut into aligned slots, whatever their dtypes. It is kept while the list of slots stays the same
and made anew when that changes. Copies are values: detached, resolved, row-major, and every slot is written at every
save, so nothing of an older save can remain (cases 12 to 14).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

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
    """Ordinary memory: what a thread of the same process needs. Untouched pages are not resident yet."""
    return torch.empty(size_bytes, dtype=torch.uint8)


class Arena:
    """A block and its slots. Belongs to one thread at a time; the slots handed out live as long as their readers.

    Args:
        make_block: Makes a flat uint8 CPU tensor of a size in bytes.
    """

    def __init__(self, make_block: Callable[[int], torch.Tensor] = plain_block) -> None:
        self._make_block = make_block
        self._layout: Layout = ()
        self._slots: list[torch.Tensor] = []
        self._size_bytes = 0

    @property
    def size_bytes(self) -> int:
        """Size of the block."""
        return self._size_bytes

    def stage(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy the values of the tensors, and return the copies: row-major CPU tensors of the same shapes and dtypes.

        They stay as they are until the next call. Copies from a device are complete when it returns.
        """
        layout = layout_of(tensors)
        if layout != self._layout:
            self._cut(layout)
        for slot, tensor in zip(self._slots, tensors, strict=True):
            _copy(slot, tensor)
        return list(self._slots)

    def release(self) -> None:
        """Let go of the block. Copies that somebody still holds keep it alive. Idempotent."""
        self._layout, self._slots, self._size_bytes = (), [], 0

    def _cut(self, layout: Layout) -> None:
        self.release()  # before the new block is made, so that both are never held
        size_bytes = size_of(layout)
        self._slots = cut_block(self._make_block(size_bytes), layout)
        self._layout, self._size_bytes = layout, size_bytes
        _logger.info("made room for %d tensors, %.1f MB", len(layout), size_bytes / 1e6)


def _copy(slot: torch.Tensor, tensor: torch.Tensor) -> None:
    source = tensor.detach()
    if source.is_contiguous() and not source.is_conj() and not source.is_neg():
        # As bytes: some dtypes (float4) can't be copied as what they are.
        if source.dim() == 0:
            source, slot = source.reshape(1), slot.reshape(1)
        slot.reshape(-1).view(torch.uint8).copy_(source.reshape(-1).view(torch.uint8))
    else:
        slot.copy_(source)
