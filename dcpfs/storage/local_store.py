"""Objects as local files: straight system calls, and no name before the file is whole and on the device.

Problem: a file that is written under its own name is visible half-written, and stays so when the process is
killed (cases 30, 31). Flushing "everything" with ``os.sync()`` stalls the whole machine and is still no
promise about this file (case 32). File objects, and filesystem layers above them, copy each byte once more.

Way taken: bytes move between the caller's buffers and the file by positional calls, from many threads at once. A
new object is a file without a name, of its final size from the start; commit flushes that one file, gives it a hidden
temporary name, renames it over the final one, and flushes the directory. A killed process leaves nothing: the kernel
frees a file without a name. Small objects, and filesystems that know no nameless files, have the temporary name from
the start; a kill leaves that, and no verb here ever shows it.

::

    open_sink     make directories → a file, its space reserved
    write_part    positional writes, any order, any thread; large files past the page cache
    commit        check parts and size → .NAME.RANDOM.dcpfs-tmp → fsync file → rename over NAME → fsync directory
    abort         close, unlink; nothing is left

Names are literal. One that leads out of the location through a symbolic link is refused. Deleting the last file of a
directory below the location removes the directory too, so that local files look like an object store, which has no
directories; a writer that loses its new directory to that makes it again. A read that a network filesystem fails for
a moment is tried again; a write isn't, since nobody knows what became of its bytes: the sink is given up. The store
holds paths, no open files; it may be used after a fork.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import re
import resource
import secrets
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from dcpfs.config import DirectIO, RetryConfig, TransferConfig
from dcpfs.errors import ConfigError, ObjectExistsError, ObjectNotFoundError, StorageError, TransferSizeError
from dcpfs.storage.capabilities import Capabilities
from dcpfs.storage.file_bytes import BLOCK_BYTES, BounceBuffers, DirectWriter, read_at, reserve, write_at
from dcpfs.storage.local_tree import LocalTree, flush_directory
from dcpfs.storage.location import Location, check_name
from dcpfs.storage.retrying import RetryPolicy
from dcpfs.storage.store import Buffer, ObjectInfo, PartMemory, PartRange
from dcpfs.storage.translate import FailedAttempt, FailureKind

__all__ = ["LocalSink", "LocalStore"]

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
_MOST_OPEN_FILES = 1024
_TRIES = 16
"""How often a directory is made again that someone else's clean-up removed."""


class LocalStore:
    """A directory of this machine, or of a network filesystem that is mounted here.

    Thread-safe. The directory need not exist; the first write makes it. Storage options, such as the
    ``auto_mkdir`` of fsspec's local filesystem, are accepted and have no effect.

    Args:
        location: A local one.
        transfer: Part size, durability and direct I/O.
        retry: For reads of network filesystems that fail for a moment.

    Raises:
        ConfigError: The location is not local.
    """

    def __init__(
        self, location: Location, *, transfer: TransferConfig | None = None, retry: RetryConfig | None = None
    ) -> None:
        if location.scheme != "file" or len(location.components) != 1:
            raise ConfigError(f"{location} is not a local path; open it with the store of its scheme")
        self._location = location
        self._transfer = transfer or TransferConfig()
        self._retry = retry or RetryConfig()
        self._tree = LocalTree(location, self._transfer.durability)
        self._bounce = BounceBuffers()

    @property
    def location(self) -> Location:
        """Where this store is."""
        return self._location

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""
        return Capabilities(
            parallel_parts=True, conditional_put=True, atomic_put=True, remote=False, max_open_sinks=_max_open_files()
        )

    def get(self, path: str) -> bytes:
        """Read a whole (small) object."""
        return self._read(path, lambda fd, size_bytes: _read_bytes(fd, 0, size_bytes))

    def get_tail(self, path: str, size_bytes: int) -> tuple[bytes, int]:
        """Read the last ``size_bytes`` of an object, or all of it when smaller, and its full size."""

        def read(fd: int, object_bytes: int) -> tuple[bytes, int]:
            start = max(0, object_bytes - size_bytes)
            return _read_bytes(fd, start, object_bytes - start), object_bytes

        return self._read(path, read)

    def read_into(self, path: str, start: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers, in order, with the bytes from ``start`` on."""
        found = self._read(path, lambda fd, _: read_at(fd, start, buffers))
        wanted = sum(buffer.nbytes for buffer in buffers)
        if found != wanted:
            raise TransferSizeError(
                f"Can't read bytes {start} to {start + wanted} of {self._tree.target(path)}: the file ends at "
                f"{start + found}; it was cut short, restore it or use another checkpoint"
            )

    def put(self, path: str, buffers: Sequence[Buffer], *, if_absent: bool = False) -> ObjectInfo:
        """Write a whole object in one step, replacing an old one."""
        if if_absent and os.path.lexists(self._tree.file(path)):
            raise ObjectExistsError(f"Can't create {self._tree.target(path)}: there is one already")
        sink = self.open_sink(path, sum(memoryview(buffer).nbytes for buffer in buffers))
        try:
            sink.write_all(buffers)
            return sink.publish(if_absent=if_absent)
        except BaseException:
            sink.abort()
            raise

    def open_sink(
        self,
        path: str,
        size_bytes: int,
        *,
        memory: PartMemory = PartMemory.COPIED,  # noqa: ARG002 - larger parts are no faster on a file
    ) -> LocalSink:
        """Start an object of known size: its directory exists and its space is reserved."""
        return LocalSink(self._tree, path, size_bytes, self._transfer, self._bounce)

    def head(self, path: str) -> ObjectInfo:
        """Describe an object by its exact name."""
        file = self._tree.file(path)

        def describe() -> ObjectInfo:
            status = os.stat(file)
            if not stat.S_ISREG(status.st_mode):
                raise IsADirectoryError(errno.EISDIR, "not a file")
            self._tree.check_inside(os.path.realpath(file), path)
            return _describe(path, status)

        return self._retried(describe, "find", path)

    def exists(self, path: str) -> bool:
        """True when `head` finds it; errors other than not-found are raised."""
        try:
            self.head(path)
        except ObjectNotFoundError:
            return False
        return True

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """All objects below the directory ``prefix``, directory by directory.

        Symbolic links to directories are not followed, except by ``prefix`` itself within the location.
        """
        pending = [check_name(prefix.rstrip("/"))]
        while pending:
            directory = pending.pop()
            found = []
            for entry in self._scan(directory):
                path = f"{directory}/{entry.name}" if directory else entry.name
                with self._tree.explained("list", path), contextlib.suppress(FileNotFoundError):
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(path)
                    elif _is_file(entry) and not _TEMPORARY.fullmatch(entry.name):
                        found.append(_describe(path, entry.stat()))
            yield from found

    def list_directories(self, prefix: str = "") -> Iterator[str]:
        """Names of the directories right below ``prefix``, and of links to what can't be looked at."""
        for entry in self._scan(check_name(prefix.rstrip("/"))):
            if _is_directory(entry):
                yield entry.name

    def delete(self, paths: Iterable[str]) -> None:
        """Delete objects by exact name, and directories below the location that this empties.

        With `Durability.FSYNC` the deletions are on the device when it returns: a withdrawn commit marker
        does not come back after a power cut.
        """
        touched: dict[str, str] = {}
        for path in paths:
            file = self._tree.file(path)
            directory = os.path.dirname(file)
            with self._tree.explained("delete", path):
                try:
                    self._tree.check_directory_inside(directory, path)
                    os.unlink(file)
                except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                    continue
            touched[directory] = path
        for directory, path in touched.items():
            if self._tree.durable:
                with self._tree.explained("delete", path), contextlib.suppress(FileNotFoundError):
                    flush_directory(directory)
            self._tree.prune(directory)

    def close(self) -> None:
        """Free the buffers of direct writes. Idempotent."""
        self._bounce.clear()

    def _read(self, path: str, read: Callable[[int, int], _T]) -> _T:
        """Open an object, give its descriptor and size to ``read``, and close it."""
        file = self._tree.file(path)

        def attempt() -> _T:
            fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                self._tree.check_open_file_inside(fd, file, path)
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode):
                    raise IsADirectoryError(errno.EISDIR, "not a file")
                return read(fd, status.st_size)
            finally:
                os.close(fd)

        return self._retried(attempt, "read", path)

    def _retried(self, attempt: Callable[[], _T], verb: str, path: str) -> _T:
        """Do what may be done twice. The retry policy costs more than a local read, so it comes in when one fails."""
        try:
            return attempt()
        except StorageError:
            raise
        except OSError as error:
            failure = self._tree.classify(error, verb=verb, path=path, reading=True)
            if failure.kind is FailureKind.PERMANENT or self._retry.attempts == 1:
                try:
                    raise failure.error from error
                finally:
                    del failure  # which holds this call, by its traceback

        def again() -> _T:
            try:
                return attempt()
            except StorageError:
                raise
            except OSError as error:
                raise FailedAttempt(self._tree.classify(error, verb=verb, path=path, reading=True)) from error

        further = self._retry.model_copy(update={"attempts": self._retry.attempts - 1})
        return RetryPolicy(further).run(again, verb=verb, target=self._tree.target(path))

    def _scan(self, directory: str) -> Sequence[os.DirEntry[str]]:
        name = self._tree.file(directory)
        with self._tree.explained("list", directory):
            try:
                self._tree.check_directory_inside(name, directory)
                with os.scandir(name) as entries:
                    return list(entries)
            except FileNotFoundError:
                return []
            except NotADirectoryError:
                if directory:
                    return []  # an object bears the name
                raise  # the location itself is a file, or below one: not a place where nothing has been put yet
            except OSError as error:
                if directory and error.errno == errno.ELOOP:
                    return []
                raise


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
            self._temporary = self._temporary_name()
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
                self._close()
        with contextlib.suppress(OSError):
            os.unlink(self._temporary)
        self._tree.prune(self._directory)

    def _temporary_name(self) -> str:
        name = os.fsencode(os.path.basename(self._file))
        suffix = f".{secrets.token_hex(8)}.dcpfs-tmp"
        shortened = os.fsdecode(name[: _NAME_MAX_BYTES - len(suffix) - 1])
        return os.path.join(self._directory, f".{shortened}{suffix}")

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
                    self._close()

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
        self._rename(if_absent=if_absent)
        with self._lock:
            self._state = _State.COMMITTED
        if self._tree.durable:
            flush_directory(self._directory)
        return _describe(self._path, status)

    def _rename(self, *, if_absent: bool) -> None:
        if if_absent:
            try:
                os.link(self._temporary, self._file)
                os.unlink(self._temporary)
                return
            except FileExistsError:
                raise ObjectExistsError(f"Can't create {self._tree.target(self._path)}: there is one already") from None
            except OSError as error:
                if error.errno not in _NO_HARD_LINKS:
                    raise
            # No hard links here: claim the name with an empty file, which others then see for an instant.
            os.close(os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
        os.replace(self._temporary, self._file)

    def _check_open(self) -> None:
        if self._state is not _State.OPEN:
            raise StorageError(f"Can't write {self._tree.target(self._path)}: its sink was {self._state.value}")

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _max_open_files() -> int:
    """A quarter of the descriptors that this process may have: the rest is for whatever else it does."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _MOST_OPEN_FILES if limit == resource.RLIM_INFINITY else max(1, min(_MOST_OPEN_FILES, limit // 4))


def _read_bytes(fd: int, start: int, size_bytes: int) -> bytes:
    data = os.pread(fd, size_bytes, start)
    while len(data) < size_bytes:
        more = os.pread(fd, size_bytes - len(data), start + len(data))
        if not more:
            break
        data += more
    return data


def _describe(path: str, status: os.stat_result) -> ObjectInfo:
    etag = f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"
    return ObjectInfo(path, status.st_size, etag, status.st_mtime)


def _is_file(entry: os.DirEntry[str]) -> bool:
    """Whether it is a file or leads to one. A link that leads to itself is nothing, like one that leads nowhere."""
    try:
        return entry.is_file()
    except OSError as error:
        if error.errno == errno.ELOOP:
            return False
        raise


def _is_directory(entry: os.DirEntry[str]) -> bool:
    """Whether it is a directory or may lead to one: whoever looks into a forbidden one is told, and no one else."""
    try:
        return entry.is_dir()
    except OSError as error:
        return error.errno != errno.ELOOP
