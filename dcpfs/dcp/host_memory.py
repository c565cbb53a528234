"""Tensor memory as bytes, and the bounded way of device tensors through the host.

Problem: storage moves bytes, not tensors. The usual bridges cost a copy or a dependency (``tensor.numpy()``
knows no bfloat16 and needs numpy; ``bytes(storage)`` copies). A tensor on a device has to be copied to the
host first, and copying a whole state at once doubles its memory, while pageable host memory makes each copy
slow and synchronous.

Way taken: `tensor_bytes` shows a CPU tensor's own memory as a flat writable memoryview, for every dtype.
`to_host` gives the row-major, resolved value of any tensor on the CPU, with no copy where the tensor already
is that. `HostStaging` is a bounded set of reusable host buffers, page-locked where the device can use that,
through which device tensors pass piece by piece: copies are queued on a stream of their own, so the copy of
one part overlaps with the upload of the parts before it.

::

    calling thread                                    worker
    buffer = staging.acquire()       (waits for a free one)
    buffer.copy_in(0, flat_bytes(tensor)[a:b])  ──►   view = buffer.view()   (waits for this buffer's copies)
    buffer.copy_in(...)                               sink.write_part(part, [view]); buffer.release()
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections import deque

import torch

__all__ = [
    "HostBuffer",
    "HostStaging",
    "flat_bytes",
    "is_resident",
    "known_bytes",
    "resident_bytes",
    "tensor_bytes",
    "to_host",
]

_logger = logging.getLogger(__name__)

_PY_BUF_WRITE = 0x200
_view_of_memory = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)

# Integers of one element's width: dtypes without a strided copy of their own are copied as these, bit by bit.
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Show the memory of a dense, contiguous CPU tensor as a flat writable memoryview of format ``B``.

    No copy is made and nothing is kept alive: the caller holds the tensor for as long as it, or anyone it
    handed the view to, uses the view. Writing through the view changes the tensor without autograd's
    knowledge.

    Raises:
        ValueError: The tensor is not its own plain memory: not on the CPU, not contiguous, not dense, a lazy
            conjugate or negative, or a subclass that only wraps other tensors.
    """
    if not tensor.is_cpu or tensor.layout is not torch.strided:
        raise ValueError(f"only a dense CPU tensor has bytes to show, not {_kind(tensor)}")
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError("a lazy conjugate or negative has other bytes than its values: resolve it first")
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of strides {tensor.stride()} is not contiguous: copy it first")
    return _memory_of(tensor)


def resident_bytes(tensor: torch.Tensor) -> memoryview | None:
    """What `tensor_bytes` shows, for a plain dense tensor; None where row-major CPU memory doesn't hold its values.

    One look at each attribute: for thousands of small tensors that is what counts.
    """
    return _memory_of(tensor) if tensor.is_contiguous() and is_resident(tensor) else None


def is_resident(tensor: torch.Tensor) -> bool:
    """True when CPU memory holds the values of a dense tensor as they are, in whatever order."""
    return tensor.is_cpu and not tensor.is_neg() and not (tensor.dtype.is_complex and tensor.is_conj())


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether all elements of a dense tensor lie within its storage.

    Those of a storage that was freed or made smaller by ``resize_`` don't (FSDP does so to parameters that are not
    gathered), and of a view that begins further on not even the address tells: it is a number near 0.
    """
    size_bytes = tensor.nbytes
    try:
        held_bytes = tensor.untyped_storage().nbytes()
    except RuntimeError:  # a device that does not show its storages
        return True
    start_bytes = tensor.storage_offset() * tensor.itemsize
    if start_bytes + size_bytes <= held_bytes and tensor.is_contiguous():
        return True
    if not size_bytes:
        return True
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start_bytes + (reach + 1) * tensor.itemsize <= held_bytes


def known_bytes(tensor: torch.Tensor, size_bytes: int) -> memoryview:
    """What `resident_bytes` shows, of a tensor that is known to be such and to have that many bytes, not 0."""
    address = tensor.data_ptr()
    if address == 0:
        raise ValueError(f"{_kind(tensor)} has no memory of its own")
    view: memoryview = _view_of_memory(address, size_bytes, _PY_BUF_WRITE)
    return view


def _memory_of(tensor: torch.Tensor) -> memoryview:
    size_bytes = tensor.nbytes
    return known_bytes(tensor, size_bytes) if size_bytes else memoryview(bytearray())


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The exact value of a tensor as a detached, resolved, row-major CPU tensor.

    It shares memory with ``tensor`` where that already is all of this; otherwise it is a new tensor that the
    caller owns. A device tensor is waited for.
    """
    plain = _resolve(tensor)
    if not plain.is_cpu:
        plain = plain.to("cpu")
    return _make_contiguous(plain)


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The exact value of a tensor as flat row-major uint8 on its own device; a copy only where it must be."""
    return _make_contiguous(_resolve(tensor)).reshape(-1).view(torch.uint8)


def _resolve(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach()
    if plain.is_conj():
        plain = plain.resolve_conj()
    if plain.is_neg():
        plain = plain.resolve_neg()
    return plain


def _make_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_contiguous():
        return tensor
    carrier = _CARRIERS.get(tensor.element_size())
    if carrier is None:
        return tensor.contiguous()
    return tensor.view(carrier).contiguous().view(tensor.dtype)


def _kind(tensor: torch.Tensor) -> str:
    return f"a {type(tensor).__name__} on {tensor.device} with layout {tensor.layout}"


class HostBuffer:
    """One reusable host buffer, on loan from a `HostStaging` until `release`.

    `copy_in` is called by the thread that acquired it; `view` and `release` by any one thread after that.
    """

    def __init__(self, staging: HostStaging, memory: torch.Tensor) -> None:
        self._staging = staging
        self._memory = memory
        self._copied: torch.cuda.Event | None = None
        self._used_bytes = 0

    def copy_in(self, start: int, source: torch.Tensor) -> None:
        """Queue the copy of a flat uint8 tensor to ``start`` of this buffer; the source may be freed at once.

        Its values count as of the work queued on the current stream when this is called.
        """
        stop = start + source.numel()
        if stop > self._memory.numel():
            raise ValueError(f"{source.numel()} bytes at {start} do not fit a buffer of {self._memory.numel()}")
        target = self._memory[start:stop]
        self._used_bytes = max(self._used_bytes, stop)
        stream = self._staging.stream
        if stream is None or not source.is_cuda:
            target.copy_(source)
            return
        stream.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            self._copied = self._copied or torch.cuda.Event()  # type: ignore[no-untyped-call] # torch has no hints here
            self._copied.record(stream)
        source.record_stream(stream)

    def view(self) -> memoryview:
        """Wait for the copies into this buffer and show its used bytes; valid until `release`."""
        if self._copied is not None:
            self._copied.synchronize()
        return tensor_bytes(self._memory)[: self._used_bytes]

    def release(self) -> None:
        """Give the buffer back. Its copies are waited for, so that the next borrower can't be overwritten."""
        if self._copied is not None:
            self._copied.synchronize()
        self._used_bytes = 0
        self._staging._give_back(self)


class HostStaging:
    """A bounded set of equal host buffers for tensors of one device. Thread-safe.

    Buffers are made when first needed and reused, so memory stays at ``buffers * buffer_bytes`` and pages are
    touched for the first time once only. With a CUDA device they are page-locked; where that fails, and on
    every other device, they are plain memory and copies are synchronous, with one log line if page-locking
    was wanted.

    Attributes:
        buffer_bytes: Size of each buffer.
        pinned: Buffers are page-locked.
        stream: The stream that copies run on, or None where copies are synchronous.
    """

    def __init__(self, device: torch.device, *, buffer_bytes: int, buffers: int) -> None:
        if buffer_bytes < 1 or buffers < 1:
            raise ValueError(f"staging needs a positive size and number, not {buffer_bytes} and {buffers}")
        self.buffer_bytes = buffer_bytes
        self.pinned = device.type != "cpu"
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda" and torch.cuda.is_available():
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch has no hints here
        self._condition = threading.Condition()
        self._free: deque[HostBuffer] = deque()
        self._buffers = buffers
        self._unmade = buffers

    @property
    def made(self) -> int:
        """Buffers that exist: `made` times `buffer_bytes` is the memory in use."""
        return self._buffers - self._unmade

    def acquire(self) -> HostBuffer:
        """Borrow a buffer, waiting until one is free.

        Every buffer must be released by someone who does not wait for this call: tasks that hold one release
        it in `Task.run`, or in `Task.discard` when they never run.
        """
        with self._condition:
            while not self._free and self._unmade == 0:
                self._condition.wait()
            if self._free:
                return self._free.pop()
            self._unmade -= 1
        try:
            return HostBuffer(self, self._allocate())
        except BaseException:
            with self._condition:
                self._unmade += 1
                self._condition.notify()
            raise

    def _allocate(self) -> torch.Tensor:
        if self.pinned:
            try:
                return torch.empty(self.buffer_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
            except RuntimeError as error:  # no accelerator to pin for, or the limit of locked memory is reached
                self.pinned = False
                _logger.info("page-locked host memory is not available (%s): using plain memory", error)
        return torch.empty(self.buffer_bytes, dtype=torch.uint8, device="cpu")

    def _give_back(self, buffer: HostBuffer) -> None:
        with self._condition:
            self._free.append(buffer)
            self._condition.notify()
