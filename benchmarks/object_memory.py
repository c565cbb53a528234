"""Memory of the sink's objects: blocks that are touched once and used again and again.

Problem: a fresh page costs more than the copy into it (1.0-1.5 GB/s against 13 GB/s), so a server that
allocates per object measures the kernel's page zeroing instead of the client.

Way taken: objects lie in blocks of 1 MiB cut from large anonymous mappings. A block goes back to the pool when
its object has been replaced or deleted and no response still reads it, and the next upload fills it anew.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator, Sequence

__all__ = ["BLOCK_BYTES", "BlockPool", "StoredObject", "UploadBuffer"]

BLOCK_BYTES = 1 << 20
_ARENA_BYTES = 64 << 20
_SMALL_BYTES = 128 << 10
_PAGE_BYTES = 4096


class BlockPool:
    """Blocks for reuse, last in first out, so that the warmest is used next. Thread-safe."""

    def __init__(self) -> None:
        self._free: list[memoryview] = []
        self._lock = threading.Lock()
        self.allocated_bytes = 0

    def reserve(self, size_bytes: int) -> None:
        """Make blocks of this total size and touch every page of them."""
        blocks = [self.take() for _ in range(-(-size_bytes // BLOCK_BYTES))]
        for block in blocks:
            block[::_PAGE_BYTES] = bytes(len(block) // _PAGE_BYTES)
        self.give(blocks)

    def take(self) -> memoryview:
        """Return a block that nobody else uses."""
        with self._lock:
            if not self._free:
                arena = mmap.mmap(-1, _ARENA_BYTES)
                if hasattr(mmap, "MADV_HUGEPAGE"):
                    arena.madvise(mmap.MADV_HUGEPAGE)
                view = memoryview(arena)
                self._free = [view[at : at + BLOCK_BYTES] for at in range(0, _ARENA_BYTES, BLOCK_BYTES)]
                self.allocated_bytes += _ARENA_BYTES
            return self._free.pop()

    def give(self, blocks: Sequence[memoryview]) -> None:
        """Take blocks back."""
        with self._lock:
            self._free.extend(blocks)


class UploadBuffer:
    """Where the body of one upload lands. Used by one thread."""

    def __init__(self, pool: BlockPool, expected_bytes: int | None) -> None:
        self.pool = pool
        self._spare: memoryview | None = None
        self._small = expected_bytes is not None and expected_bytes <= _SMALL_BYTES
        self._expected_bytes = expected_bytes or 0
        self.blocks: list[memoryview] = []
        self.segments: list[memoryview] = []
        self.size_bytes = 0

    def space(self, size_bytes: int) -> Iterator[memoryview]:
        """Views that together take ``size_bytes`` more bytes; fill each before asking for the next."""
        while size_bytes > 0:
            if self._spare is None or not self._spare:
                if self._small and not self.segments:
                    self._spare = memoryview(bytearray(max(self._expected_bytes, 1)))
                else:
                    self._spare = self.pool.take()
                    self.blocks.append(self._spare)
            view = self._spare[:size_bytes]
            self._spare = self._spare[len(view) :]
            size_bytes -= len(view)
            self.size_bytes += len(view)
            self.segments.append(view)
            yield view

    def discard(self) -> None:
        """Give the blocks back."""
        self.pool.give(self.blocks)
        self.blocks, self.segments, self.size_bytes, self._spare = [], [], 0, None


class StoredObject:
    """A finished object. Its blocks go back to the pool when it is dropped and nobody reads it any more."""

    def __init__(self, pool: BlockPool, uploads: Sequence[UploadBuffer], etag: str, modified_seconds: float) -> None:
        self._pool = pool
        self._blocks = [block for upload in uploads for block in upload.blocks]
        self._segments = [segment for upload in uploads for segment in upload.segments]
        self._holders = 1
        self._lock = threading.Lock()
        self.size_bytes = sum(upload.size_bytes for upload in uploads)
        self.etag = etag
        self.modified_seconds = modified_seconds

    def acquire(self) -> bool:
        """Hold the object while reading; False when it is gone already."""
        with self._lock:
            if self._holders == 0:
                return False
            self._holders += 1
            return True

    def release(self) -> None:
        """Let go; the last one to do so frees the blocks."""
        with self._lock:
            self._holders -= 1
            if self._holders:
                return
            blocks, self._blocks, self._segments = self._blocks, [], []
        self._pool.give(blocks)

    def views(self, start: int, stop: int) -> Iterator[memoryview]:
        """The bytes of a half-open range, as stored. Only while held."""
        position = 0
        for segment in self._segments:
            end = position + len(segment)
            if end > start:
                if position >= stop:
                    return
                yield segment[max(0, start - position) : min(len(segment), stop - position)]
            position = end
