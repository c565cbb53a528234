"""Objects as local files: straight system calls, and no name before the file is whole and on the device.

Problem: file objects, and filesystem layers above them, copy each byte once more; a file that is written under its own
name is visible half-written (cases 30, 31); and flushing "everything" with ``os.sync()`` stalls the whole machine and
is still no promise about this file (case 32).

Way taken: bytes move between the caller's buffers and the file by positional calls, from many threads at once. How a
file comes under its name is the business of `dcpfs.storage.local_sink`. What a killed writer leaves has a hidden name
that no verb here ever shows; `LocalStore.sweep_leftovers` removes it, from a directory that is to go.

Names are literal. One that leads out of the location through a symbolic link is refused. Deleting the last file of a
directory below the location removes the directory too, so that local files look like an object store, which has no
directories. A read that a network filesystem fails for a moment is tried again; a write isn't, since nobody knows what
became of its bytes: the sink is given up. The store holds paths, no open files; it may be used after a fork.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from dcpfs.config import RetryConfig, TransferConfig
from dcpfs.errors import ConfigError, ObjectExistsError, ObjectNotFoundError, StorageError, TransferSizeError
from dcpfs.storage.capabilities import Capabilities
from dcpfs.storage.file_bytes import BounceBuffers, read_at
from dcpfs.storage.leftovers import check_own_directory
from dcpfs.storage.local_sink import LocalSink, file_info, is_temporary
from dcpfs.storage.local_tree import LocalTree, flush_directory
from dcpfs.storage.location import Location, check_name
from dcpfs.storage.retrying import RetryPolicy
from dcpfs.storage.store import Buffer, ObjectInfo, PartMemory
from dcpfs.storage.translate import FailedAttempt, FailureKind

__all__ = ["LocalStore"]

_T = TypeVar("_T")

_MOST_OPEN_FILES = 1024


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
            return file_info(path, status)

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
                    elif _is_file(entry) and not is_temporary(entry.name):
                        found.append(file_info(path, entry.stat()))
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

    def sweep_leftovers(self, directory: str) -> int:
        """See `dcpfs.storage.leftovers.LeavesLeftovers`. Links are neither followed nor removed."""
        swept = 0
        pending = [check_own_directory(directory)]
        while pending:
            current = pending.pop()
            entries = self._scan(current)
            with self._tree.explained("delete", current):
                pending += [f"{current}/{entry.name}" for entry in entries if entry.is_dir(follow_symlinks=False)]
                left = [each for each in entries if is_temporary(each.name) and each.is_file(follow_symlinks=False)]
                for entry in left:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(entry.path)
                        swept += 1
            if left or not entries:
                self._tree.prune(self._tree.file(current))
        return swept

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
