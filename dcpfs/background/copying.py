"""Copies from tensors into host memory, by device.

Problem: a copy from a GPU that is waited for stops training for its whole time; one that is not waited for, on the
stream that computes, is overtaken by the next write to the parameters, or from memory that is not pinned waits all the
same without saying so.

Way taken: host tensors are copied at once, by torch's own threads. Those of a GPU on a stream of their own, which
begins after what the compute stream has been given so far; one event marks the end. Whoever writes the parameters
again, and whoever reads the copies, waits for it. What a forward pass writes (buffers, such as running means) is copied
first, and the compute stream itself waits for that: nobody would ask before a forward pass. The allocator is told that
the stream reads the sources, so their memory is not handed out while it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

__all__ = [
    "Copier",
    "CopyToHost",
    "CudaCopier",
    "HostCopier",
    "Pair",
    "copier_for",
    "copy_value",
    "pin_block",
    "unpin_block",
]

Pair = tuple[torch.Tensor, torch.Tensor]
"""Where to (row-major host memory), and what."""


class CopyToHost(Protocol):
    """Copies that have begun."""

    def wait(self) -> None:
        """Return when they are complete. Any thread; again at no cost."""
        ...

    def hold_computing(self) -> None:
        """Let what is computed on the device from here on wait for them. The thread that computes; returns at once."""
        ...


class Copier(Protocol):
    """Copies tensors of one device. Belongs to the thread that computes on it."""

    def begin(self, pairs: Sequence[Pair]) -> CopyToHost | None:
        """Begin to copy; None: they are complete."""
        ...


class HostCopier:
    """Copies host tensors, in the call."""

    def begin(self, pairs: Sequence[Pair]) -> CopyToHost | None:
        """Copy."""
        with torch.no_grad():
            for slot, tensor in pairs:
                copy_value(slot, tensor, non_blocking=False)
        return None


class _CudaCopy:
    def __init__(self, device: torch.device, event: torch.cuda.Event) -> None:
        self._device = device
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()

    def hold_computing(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


class CudaCopier:
    """Copies tensors of one GPU, on a stream of its own.

    Args:
        device: Of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's has no annotations

    def begin(self, pairs: Sequence[Pair]) -> CopyToHost | None:
        """Begin, after what the current stream has been given so far."""
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.no_grad(), torch.cuda.stream(stream):
            for slot, tensor in pairs:
                copy_value(slot, tensor, non_blocking=True)
                tensor.record_stream(stream)
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch's has no annotations
            event.record(stream)
        return _CudaCopy(self._device, event)


def copier_for(device: torch.device) -> Copier:
    """The copier for tensors of a device."""
    return CudaCopier(device) if device.type == "cuda" else HostCopier()


def copy_value(slot: torch.Tensor, tensor: torch.Tensor, *, non_blocking: bool) -> None:
    """Copy the value of a tensor into a row-major slot of its shape and dtype. Under `torch.no_grad`."""
    if tensor.dtype in _ORDINARY:
        slot.copy_(tensor, non_blocking=non_blocking)
        return
    source = tensor.detach().resolve_conj().resolve_neg()
    carrier = _CARRIERS[source.dtype.itemsize]
    slot.view(carrier).copy_(source.view(carrier), non_blocking=non_blocking)


_ORDINARY = frozenset(
    {torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128}
    | {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool}
)
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""What tensors of other dtypes (float8, float4, narrow and unsigned integers) are copied as, by bytes an element: not
every device copies them as what they are."""


def pin_block(block: torch.Tensor) -> bool:
    """Lock a block of host memory for fast copies from a GPU. False: it can't be, and copies are slower.

    Local; the block must be unpinned before its memory goes.
    """
    if block.numel() == 0 or not torch.cuda.is_available():
        return False
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch has no annotation there
    result = runtime.cudaHostRegister(block.data_ptr(), block.numel(), 0)
    return int(result) == 0


def unpin_block(block: torch.Tensor) -> None:
    """Undo `pin_block`."""
    torch.cuda.cudart().cudaHostUnregister(block.data_ptr())  # type: ignore[no-untyped-call]  # as above
