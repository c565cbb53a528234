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

__all__ = ["Arena", "plain_block"]

_logger = logging.getLogger(__name__)

_ALIGNMENT_BYTES = 64
"""A cache line; also a multiple of every dtype's size."""


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
        self._layout: tuple[tuple[torch.dtype, torch.Size], ...] = ()
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
        layout = tuple((tensor.dtype, tensor.shape) for tensor in tensors)
        if layout != self._layout:
            self._cut(layout)
        for slot, tensor in zip(self._slots, tensors, strict=True):
            _copy(slot, tensor)
        return list(self._slots)

    def release(self) -> None:
        """Let go of the block. Copies that somebody still holds keep it alive. Idempotent."""
        self._layout, self._slots, self._size_bytes = (), [], 0

    def _cut(self, layout: tuple[tuple[torch.dtype, torch.Size], ...]) -> None:
        self.release()  # before the new block is made, so that both are never held
        starts, stop = [], 0
        for dtype, shape in layout:
            starts.append(stop)
            size_bytes = shape.numel() * dtype.itemsize
            stop += -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        block = self._make_block(stop)
        self._slots = [
            block[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for start, (dtype, shape) in zip(starts, layout, strict=True)
        ]
        self._layout, self._size_bytes = layout, stop
        _logger.info("made room for %d tensors, %.1f MB", len(layout), stop / 1e6)


def _copy(slot: torch.Tensor, tensor: torch.Tensor) -> None:
    source = tensor.detach()
    if source.is_contiguous() and not source.is_conj() and not source.is_neg():
        # As bytes: some dtypes (float4) can't be copied as what they are.
        if source.dim() == 0:
            source, slot = source.reshape(1), slot.reshape(1)
        slot.reshape(-1).view(torch.uint8).copy_(source.reshape(-1).view(torch.uint8))
    else:
        slot.copy_(source)
