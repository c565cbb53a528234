"""Scratch memory for reads, reused while one load runs.

Problem: the first touch of fresh pages is slower than the network (1.0-2.5 GB/s, page by page), and ``bytearray``
touches them all at once, with the interpreter held: 32 readers that begin together wait for each other's zeros.

Way taken: a pool of buffers of one length, mapped and not cleared, in huge pages where the system gives some on request
(a first touch at 5-10 GB/s). What is much shorter than a buffer, or longer, gets memory of its own. The pool ends with
its load.
"""

from __future__ import annotations

import contextlib
import mmap

from dcpfs.storage.file_bytes import map_private

__all__ = ["ScratchPool"]

_MAPPED_FROM_BYTES = 1 << 20
"""Shorter ones come from the heap, which has touched them before."""


class ScratchPool:
    """Buffers of one length, for any thread.

    Attributes:
        size_bytes: Their length.
    """

    def __init__(self) -> None:
        self.size_bytes = 0
        self._free: list[memoryview] = []

    def cost_bytes(self, size_bytes: int) -> int:
        """The memory that a loan of that length takes."""
        return self.size_bytes if self._serves(size_bytes) else size_bytes

    def borrow(self, size_bytes: int) -> _Loan:
        """A buffer of that length for a ``with`` block. Its bytes are anything."""
        return _Loan(self, size_bytes)

    def take(self, size_bytes: int) -> memoryview:
        """A buffer of at least that length."""
        if not self._serves(size_bytes):
            return _fresh(size_bytes)
        while True:
            try:
                buffer = self._free.pop()
            except IndexError:
                return _fresh(self.size_bytes)
            if len(buffer) == self.size_bytes:
                return buffer

    def give_back(self, buffer: memoryview) -> None:
        """End a loan."""
        if len(buffer) == self.size_bytes:
            self._free.append(buffer)

    def _serves(self, size_bytes: int) -> bool:
        return self.size_bytes // 8 < size_bytes <= self.size_bytes


class _Loan:
    __slots__ = ("_buffer", "_pool", "_size_bytes")

    def __init__(self, pool: ScratchPool, size_bytes: int) -> None:
        self._pool = pool
        self._size_bytes = size_bytes
        self._buffer = memoryview(b"")

    def __enter__(self) -> memoryview:
        if self._size_bytes:
            self._buffer = self._pool.take(self._size_bytes)
        return self._buffer[: self._size_bytes]

    def __exit__(self, *_: object) -> None:
        if self._size_bytes:
            self._pool.give_back(self._buffer)


def _fresh(size_bytes: int) -> memoryview:
    if size_bytes < _MAPPED_FROM_BYTES:
        return memoryview(bytearray(size_bytes))
    memory = map_private(size_bytes)
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        with contextlib.suppress(OSError):  # a kernel that was built without
            memory.madvise(advice)
    return memoryview(memory)
