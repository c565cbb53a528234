"""Bytes between buffers and an open local file: whole, positional, and past the page cache where that pays.

Problem: one system call may move fewer bytes than asked, takes at most 1,024 buffers, and a file's own
position can't be shared by threads. Written the ordinary way, a large file also fills the page cache with
bytes that nobody reads again soon: the kernel copies them, then stalls the writer while it writes them back,
at half the speed of the device. O_DIRECT avoids that, but wants memory, offset and length aligned, which
tensors are not.

Way taken: loops over positional, vectored calls. Direct writes go through small aligned buffers that are
reused, so their pages are touched for the first time once only: one warm copy is far cheaper than the page
cache. The last, unaligned block is padded and the file cut to its size afterwards. Only filesystems on a
block device that are known to gain are asked (newer kernels accept O_DIRECT on tmpfs and gain nothing), and
one that refuses in the middle is written the ordinary way from there on.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import logging
import mmap
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from dcpfs.storage.store import Buffer

__all__ = [
    "BLOCK_BYTES",
    "BounceBuffers",
    "DirectWriter",
    "gains_from_direct_writes",
    "map_private",
    "read_at",
    "reserve",
    "write_at",
]

_logger = logging.getLogger(__name__)

BLOCK_BYTES = 4096
"""Alignment of direct writes: a multiple of every common device's block."""
_BOUNCE_BYTES = 4 << 20
"""4 MiB keeps a device busy from two threads on, and stays near the cache."""
_IOV_MAX = 1024
_DIRECT_FILESYSTEMS = frozenset(
    {
        0xEF53,  # ext4
        0x58465342,  # XFS
        0x9123683E,  # btrfs
        0xF2F52010,  # F2FS
        0x794C7630,  # overlayfs, on one of them
    }
)
_O_DIRECT: int = getattr(os, "O_DIRECT", 0)


def read_at(fd: int, start: int, buffers: Sequence[memoryview]) -> int:
    """Fill writable buffers with a file's bytes from ``start`` on; returns how many there were."""
    views = [view if view.format == "B" else view.cast("B") for view in buffers if view.nbytes]
    return _move(os.preadv, fd, start, views)


def write_at(fd: int, start: int, buffers: Sequence[Buffer]) -> None:
    """Write buffers one after the other from ``start`` on."""
    views = [view for view in map(_as_bytes, buffers) if view.nbytes]
    wanted = sum(view.nbytes for view in views)
    written = _move(os.pwritev, fd, start, views)
    if written != wanted:
        raise OSError(errno.EIO, f"the file took {written} of {wanted} bytes")


def reserve(fd: int, size_bytes: int) -> None:
    """Give a file its final size, with its blocks where the filesystem can reserve them without writing.

    A full disk then says so before the first byte, and writers of different ranges need not wait for each
    other to extend the file. (``os.posix_fallocate`` would write a byte into every block where reserving is
    unknown.)
    """
    if size_bytes == 0:
        return
    number = _allocate(fd, size_bytes)
    if number in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}:
        raise OSError(number, os.strerror(number))
    if number != 0:
        try:
            os.ftruncate(fd, size_bytes)
        except OSError as error:
            if error.errno not in {errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}:  # then writing makes it grow
                raise


def map_private(size_bytes: int) -> mmap.mmap:
    """Fresh memory, aligned to pages and not touched yet.

    Shared memory, the default, would let a forked process write into its parent's buffers.
    """
    return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class BounceBuffers:
    """Aligned buffers for direct writes, reused. Thread-safe; as many as threads that write at once.

    A forked process has copies of its own; a pickled one comes back empty.
    """

    def __init__(self) -> None:
        self._free: deque[memoryview] = deque()

    def __reduce__(self) -> tuple[type[BounceBuffers], tuple[()]]:
        return BounceBuffers, ()

    def borrow(self) -> memoryview:
        """An aligned buffer of a few MiB, not cleared; give it back when done."""
        try:
            return self._free.pop()
        except IndexError:
            return memoryview(map_private(_BOUNCE_BYTES))

    def give_back(self, buffer: memoryview) -> None:
        """Return a borrowed buffer."""
        self._free.append(buffer)

    def clear(self) -> None:
        """Free the memory of all buffers that are not borrowed."""
        self._free.clear()


class DirectWriter:
    """Writes of aligned ranges of one file past the page cache, or the ordinary way where that is refused.

    Thread-safe for ranges that don't overlap.

    Attributes:
        padded: A last block was padded with zeros: cut the file to its size.
    """

    def __init__(self, fd: int, directory: str, bounce: BounceBuffers) -> None:
        self.padded = False
        self._fd = fd
        self._bounce = bounce
        self._direct = gains_from_direct_writes(directory) and self._switch_on()

    def write_at(self, start: int, buffers: Sequence[Buffer]) -> None:
        """Write buffers from ``start`` on.

        ``start`` is a multiple of a block, and so is their total size unless they reach the end of the file.
        """
        if not self._direct or start % BLOCK_BYTES:
            write_at(self._fd, start, buffers)
            return
        block = self._bounce.borrow()
        try:
            for filled in _filled(block, buffers):
                self._write_block(start, block, filled)
                start += filled
        finally:
            self._bounce.give_back(block)

    def _write_block(self, start: int, block: memoryview, filled: int) -> None:
        if self._direct:
            whole = -(-filled // BLOCK_BYTES) * BLOCK_BYTES
            if whole != filled:
                block[filled:whole] = bytes(whole - filled)
                self.padded = True
            try:
                write_at(self._fd, start, [block[:whole]])
            except OSError as error:
                if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP}:
                    raise
                self._switch_off(error)
            else:
                return
        write_at(self._fd, start, [block[:filled]])

    def _switch_on(self) -> bool:
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) | _O_DIRECT)
        except OSError as error:
            _logger.debug("the filesystem takes no direct writes (%s): writing through the page cache", error)
            return False
        return True

    def _switch_off(self, error: OSError) -> None:
        fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~_O_DIRECT)
        self._direct = False
        _logger.debug("a direct write was refused (%s): writing through the page cache", error)


def _as_bytes(buffer: Buffer) -> memoryview:
    view = buffer if isinstance(buffer, memoryview) else memoryview(buffer)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _move(call: Callable[[int, list[memoryview], int], int], fd: int, start: int, views: list[memoryview]) -> int:
    """Repeat a vectored call until every view is done or it moves nothing; returns the bytes moved."""
    moved = 0
    first = 0
    while first < len(views):
        count = call(fd, views[first : first + _IOV_MAX], start + moved)
        if count == 0:
            break
        moved += count
        while first < len(views) and count >= views[first].nbytes:
            count -= views[first].nbytes
            first += 1
        if count:
            views[first] = views[first][count:]
    return moved


def _filled(block: memoryview, buffers: Sequence[Buffer]) -> Iterator[int]:
    """Copy buffers into a block again and again; yields how far it is filled, full but for the last time."""
    filled = 0
    for view in map(_as_bytes, buffers):
        taken = 0
        while taken < view.nbytes:
            count = min(view.nbytes - taken, block.nbytes - filled)
            block[filled : filled + count] = view[taken : taken + count]
            taken += count
            filled += count
            if filled == block.nbytes:
                yield filled
                filled = 0
    if filled:
        yield filled


def _allocate(fd: int, size_bytes: int) -> int:
    """Reserve blocks; returns an error number, 0 when they are reserved."""
    fallocate = getattr(_libc(), "fallocate", None) if sys.platform == "linux" else None
    if fallocate is None:
        return errno.ENOSYS
    while fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size_bytes)) != 0:
        number = ctypes.get_errno()
        if number != errno.EINTR:
            return number
    return 0


def gains_from_direct_writes(directory: str) -> bool:
    """True on a block device's filesystem that is known to be faster past the page cache."""
    if not _O_DIRECT or sys.platform != "linux":
        return False
    status = (ctypes.c_long * 64)()  # struct statfs, with room to spare; its first word is the filesystem's kind
    if _libc().statfs(os.fsencode(directory), status) != 0:
        return False
    return (status[0] & 0xFFFFFFFF) in _DIRECT_FILESYSTEMS


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
