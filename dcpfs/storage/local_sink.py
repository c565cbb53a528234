"""A local file that becomes an object: written under no name, or a hidden one, until it is whole and on the device.

Problem: a file that is written under its own name is visible half-written, and stays so when the process is killed
(cases 30, 31); a file that is whole and was not flushed is gone after a power cut (case 32).

Way taken: a large object is a file without a name, of its final size from the start; commit flushes that one file,
gives it a hidden temporary name, renames it over the final one, and flushes the directory. A killed process leaves
nothing: the kernel frees a file without a name. Small objects, and filesystems that know no nameless files, have the
temporary name from the start; a kill leaves that.

::

    LocalSink     make directories → a file, its space reserved
    write_part    positional writes, any order, any thread; large files past the page cache
    commit        check parts and size → .NAME.RANDOM.dcpfs-tmp → fsync file → rename over NAME → fsync directory
    abort         close, unlink; nothing is left

A writer that loses its new directory to someone's clean-up makes it again.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import re
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from dcpfs.config import DirectIO, TransferConfig
from dcpfs.errors import ObjectExistsError, StorageError, TransferSizeError
from dcpfs.storage.file_bytes import BLOCK_BYTES, BounceBuffers, DirectWriter, reserve, write_at
from dcpfs.storage.local_tree import LocalTree, flush_directory
from dcpfs.storage.store import Buffer, ObjectInfo, PartRange

__all__ = ["LocalSink", "file_info", "is_temporary", "temporary_name"]

_T = TypeVar("_T")

_PART_BYTES = 16 << 20
_DIRECT_FROM_BYTES = 32 << 20
"""Smaller files are read back soon, or gone before the kernel writes them: the page cache serves them
better."""
_LARGE_FROM_BYTES = 1 << 20
"""Larger ones have their space reserved and no name while they are written; for smaller ones that costs too much."""
_O_TMPFILE: int = getattr(os, "O_TMPFILE", 0)
_NAME_MAX_BYTES = 255
_TEMPORARY = re.compile(r"\..*\.[0-9a-f]{16}\.dcpfs-tmp", re.DOTALL)
_NO_HARD_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL})
_DESCRIPTORS = "/proc/self/fd"
_TRIES = 16
"""How often a directory is made again that someone else's clean-up removed."""


class _State(enum.Enum):
    OPEN = "open"
    COMMITTING = "being committed"
    COMMITTED = "committed"
    ABORTED = "aborted"


class LocalSink:
    """A temporary file that becomes an object. Thread-safe; parts may be written in any order at once."""

    def __init__(
        self, tree: LocalTree, path: str, size_bytes: int, transfer: TransferConfig, bounce: BounceBuffers
    ) -> None:
        if size_bytes < 0:
            raise ValueError(f"an object can't have {size_bytes} bytes")
        self._tree = tree
        self._path = path
        self._size_bytes = size_bytes
        self._part_bytes = -(-(transfer.part_bytes or _PART_BYTES) // BLOCK_BYTES) * BLOCK_BYTES
        self._file = tree.file(path)
        self._directory = os.path.dirname(self._file)
        self._lock = threading.Lock()
        self._state = _State.OPEN
        self._writing = 0
        self._written: set[int] = set()
        with tree.explained("write", path):
            if not path:
                raise IsADirectoryError(errno.EISDIR, "the location itself is no object")
            tree.check_directory_inside(self._directory, path)
            self._temporary = temporary_name(self._file)
            self._named = False
            self._fd = self._create()
            try:
                if size_bytes >= _LARGE_FROM_BYTES:
                    reserve(self._fd, size_bytes)
                direct = transfer.direct_io is DirectIO.AUTO and size_bytes >= _DIRECT_FROM_BYTES
                self._direct = DirectWriter(self._fd, self._directory, bounce) if direct else None
            except BaseException:
                self.abort()
                raise

    def parts(self) -> Sequence[PartRange]:
        """The parts that cover the object, of equal size but for the last, each starting at a whole block."""
        size, step = self._size_bytes, self._part_bytes
        return [PartRange(start, min(start + step, size)) for start in range(0, size, step)] or [PartRange(0, 0)]

    def write_part(self, part: PartRange, buffers: Sequence[Buffer]) -> None:
        """Write one of `parts` from buffers whose sizes add up to it."""
        if part.start % self._part_bytes or part.stop != min(part.start + self._part_bytes, self._size_bytes):
            raise ValueError(f"{part} is not a part of {self._tree.target(self._path)}")
        self._write(part, buffers)
        with self._lock:
            self._written.add(part.start)

    def write_all(self, buffers: Sequence[Buffer]) -> None:
        """Write the whole object from buffers whose sizes add up to it."""
        self._write(PartRange(0, self._size_bytes), buffers)
        with self._lock:
            self._written.update(range(0, self._size_bytes, self._part_bytes))

    def commit(self) -> ObjectInfo:
        """Publish the object under its name, replacing an old one."""
        return self.publish(if_absent=False)

    def publish(self, *, if_absent: bool) -> ObjectInfo:
        """`commit`, or refuse when an object of that name exists.

        An error from flushing the directory, after the rename, leaves the object there, whole.
        """
        with self._lock:
            self._check_open()
            if self._writing:
                raise StorageError(f"Can't commit {self._tree.target(self._path)} while a part is being written")
            self._state = _State.COMMITTING
        try:
            with self._tree.explained("write", self._path):
                return self._publish(if_absent=if_absent)
        finally:
            self.abort()

    def abort(self) -> None:
        """Give up: remove the temporary file, and the directories above it that are empty then. Idempotent.

        A part that another thread is still writing goes nowhere; the file closes when that ends.
        """
        with self._lock:
            if self._state in {_State.COMMITTED, _State.ABORTED}:
                return
            self._state = _State.ABORTED
            if self._writing == 0:
                self._let_go()
        with contextlib.suppress(OSError):
            os.unlink(self._temporary)
        self._tree.prune(self._directory)

    def _create(self) -> int:
        """Create the file, and its directories when they are missing."""
        flags = os.O_RDWR | os.O_CLOEXEC
        if _O_TMPFILE and self._size_bytes >= _LARGE_FROM_BYTES and os.path.isdir(_DESCRIPTORS):
            with contextlib.suppress(OSError):  # not known here; whatever else it is, the next call says it too
                return self._in_directory(lambda: os.open(self._directory, flags | _O_TMPFILE, 0o666))
        self._named = True
        flags |= os.O_CREAT | os.O_EXCL
        return self._in_directory(lambda: os.open(self._temporary, flags, 0o666))

    def _give_name(self) -> None:
        """Give the file its temporary name. Linking the descriptor itself would need a privilege."""
        descriptors = os.open(_DESCRIPTORS, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._in_directory(
                lambda: os.link(str(self._fd), self._temporary, src_dir_fd=descriptors, follow_symlinks=True)
            )
        finally:
            os.close(descriptors)
        self._named = True

    def _in_directory(self, call: Callable[[], _T]) -> _T:
        """Make a name in the object's directory; again when that is missing, or someone's clean-up removed it."""
        for _ in range(_TRIES):
            with contextlib.suppress(FileNotFoundError):
                return call()
            with contextlib.suppress(FileNotFoundError):
                self._tree.make_directory(self._directory)
        return call()

    def _write(self, part: PartRange, buffers: Sequence[Buffer]) -> None:
        given = sum(memoryview(buffer).nbytes for buffer in buffers)
        if given != part.size_bytes:
            raise TransferSizeError(
                f"Can't write {self._tree.target(self._path)}: {given} bytes were given for {part}; "
                "the state changed while it was saved"
            )
        with self._lock:
            self._check_open()
            self._writing += 1
        try:
            with self._tree.explained("write", self._path):
                if self._direct is not None:
                    self._direct.write_at(part.start, buffers)
                else:
                    write_at(self._fd, part.start, buffers)
        finally:
            with self._lock:
                self._writing -= 1
                if self._state is not _State.OPEN and self._writing == 0:
                    self._let_go()

    def _publish(self, *, if_absent: bool) -> ObjectInfo:
        missing = [part for part in self.parts() if part.size_bytes and part.start not in self._written]
        if missing:
            raise TransferSizeError(
                f"Can't commit {self._tree.target(self._path)}: {len(missing)} of its parts were not written, "
                f"the first at byte {missing[0].start}"
            )
        if self._direct is not None and self._direct.padded:
            os.ftruncate(self._fd, self._size_bytes)
        if self._tree.durable:
            os.fsync(self._fd)
        if not self._named:
            self._give_name()
            if self._tree.durable:
                os.fsync(self._fd)  # the bytes are there already; now the file itself
        status = os.fstat(self._fd)
        if status.st_size != self._size_bytes:
            raise TransferSizeError(
                f"Can't commit {self._tree.target(self._path)}: the file has {status.st_size} bytes "
                f"instead of {self._size_bytes}; the filesystem lost a write"
            )
        self._close()  # before the name: network filesystems report what they could not write when a file closes
        self._rename(status, if_absent=if_absent)
        with self._lock:
            self._state = _State.COMMITTED
        if self._tree.durable:
            flush_directory(self._directory)
        return file_info(self._path, status)

    def _rename(self, status: os.stat_result, *, if_absent: bool) -> None:
        """Give the file its own name.

        A network filesystem whose answer is lost asks again, and then says that the name is taken, or that the
        temporary one is gone: by this very file.
        """
        if if_absent:
            try:
                os.link(self._temporary, self._file)
            except FileExistsError:
                if not self._has_its_name(status):
                    raise ObjectExistsError(
                        f"Can't create {self._tree.target(self._path)}: there is one already"
                    ) from None
            except OSError as error:
                if error.errno not in _NO_HARD_LINKS:
                    raise
                self._claim_name()
                return
            os.unlink(self._temporary)
            return
        try:
            os.replace(self._temporary, self._file)
        except FileNotFoundError:
            if not self._has_its_name(status):
                raise

    def _claim_name(self) -> None:
        """Without hard links: claim the name with an empty file, which others see for an instant."""
        os.close(os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        try:
            os.replace(self._temporary, self._file)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(self._file)
            raise

    def _has_its_name(self, status: os.stat_result) -> bool:
        try:
            return os.path.samestat(os.lstat(self._file), status)
        except OSError:
            return False

    def _check_open(self) -> None:
        if self._state is not _State.OPEN:
            raise StorageError(f"Can't write {self._tree.target(self._path)}: its sink was {self._state.value}")

    def _let_go(self) -> None:
        """Close a file that is given up. What a network filesystem could not write of it is no news any more."""
        with contextlib.suppress(OSError):
            self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def temporary_name(file: str) -> str:
    """A name that nobody has, in the same directory as a file: ``.NAME.RANDOM.dcpfs-tmp``."""
    directory, last = os.path.split(file)
    suffix = f".{secrets.token_hex(8)}.dcpfs-tmp"
    shortened = os.fsdecode(os.fsencode(last)[: _NAME_MAX_BYTES - len(suffix) - 1])
    return os.path.join(directory, f".{shortened}{suffix}")


def is_temporary(name: str) -> bool:
    """True for the last segment of a `temporary_name`."""
    return _TEMPORARY.fullmatch(name) is not None


def file_info(path: str, status: os.stat_result) -> ObjectInfo:
    """What the kernel says of a file, as an object."""
    etag = f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"
    return ObjectInfo(path, status.st_size, etag, status.st_mtime)
