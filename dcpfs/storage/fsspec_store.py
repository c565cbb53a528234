"""Any fsspec filesystem, async or sync, as a `dcpfs.storage.store.Store`.

Problem: what fsspec offers is made for people at a prompt: names are globs, listings are remembered,
``exists`` takes every failure for "no", ``find`` leaves out what it could not list, a put makes directories
and buckets, and an instance that went through a fork hangs.

Way taken: only calls that take a name literally, one object each, on an instance that this process opened
itself and opens anew after a fork, when credentials expired, or when a call did not come back. Every call runs
under the one `RetryPolicy`, within its deadline (`dcpfs.storage.bounded_calls`: many clients have no time-out),
and every exception becomes an error of dcpfs. How an object gets under its name is the business of
`dcpfs.storage.fsspec_sink`; what a filesystem can do, that of `dcpfs.storage.filesystems`. On ``memory://``
bytes move between its buffers and the caller's directly.

Flow: ``FsspecStore(location)`` looks up the class, so that a missing package shows at once → the first verb
opens the filesystem → each verb: attempt, translate, wait, attempt.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, NoReturn, TypeVar, cast

from dcpfs.config import RetryConfig, TransferConfig
from dcpfs.errors import (
    BucketNotFoundError,
    ConfigError,
    DcpfsError,
    ObjectExistsError,
    ObjectNotFoundError,
    StorageError,
    TransferSizeError,
    UnsupportedOperationError,
)
from dcpfs.storage.bounded_calls import CallThreads, CallTimeoutError, in_bounded_call
from dcpfs.storage.capabilities import Capabilities
from dcpfs.storage.filesystems import OpenFilesystem, Publishing, open_filesystem, overrides, traits_of, uncached
from dcpfs.storage.fsspec_sink import (
    FileWriter,
    MemoryFileLike,
    MemorySink,
    PartLedger,
    StreamSink,
    WholeSink,
    as_bytes_view,
    copy_bytes,
    discard_file,
    parts_of,
    slices_of,
    temporary_name,
    write_all,
)
from dcpfs.storage.literal_calls import (
    disconnect,
    fill,
    list_directory,
    move_file,
    object_info,
    open_unbuffered,
    quote_marks,
    read_bytes,
    reads_ranges,
    remove_directory,
)
from dcpfs.storage.location import Location, check_name
from dcpfs.storage.retrying import RetryPolicy
from dcpfs.storage.store import Buffer, ObjectInfo, PartMemory, Sink
from dcpfs.storage.translate import Classified, FailedAttempt, FailureKind, Fault, classify, fault_of

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

__all__ = ["FsspecStore"]

_T = TypeVar("_T")
_DELETE_THREADS = 8
_DIRECTORY_FAULTS = frozenset({Fault.OTHER, Fault.UNSUPPORTED})
_WEB = frozenset({"http", "https"})
_ONE_CONNECTION = frozenset({"ftp", "ftps", "sftp", "smb", "ssh"})
_PARENTS: list[OpenFilesystem] = []
"""In a forked child, what its parent opened: kept, since the end of some (sshfs) hangs up the parent's line."""
_DAV = frozenset({"dav", "webdav", "webdavs"})


class FsspecStore:
    """A store on any fsspec filesystem. Thread-safe, picklable, usable in a forked child.

    Args:
        location: Where it is. The filesystem takes the options.
        transfer: Part size.
        retry: Attempts and deadline. A filesystem's own retries come below and are counted as one attempt. A call
            that does not come back ends half-way to the deadline, or after ``read_timeout_seconds`` where that is
            longer, and is tried again on a new connection.

    Raises:
        ConfigError: The scheme is unknown, or the URL holds a character that its client takes for syntax.
        MissingBackendError: The scheme's package is not installed.
    """

    def __init__(
        self, location: Location, *, transfer: TransferConfig | None = None, retry: RetryConfig | None = None
    ) -> None:
        self._location = location
        self._transfer = transfer or TransferConfig()
        self._retry = retry or RetryConfig()
        self._traits = traits_of(location)
        self._closed = threading.Event()
        self._policy = RetryPolicy(self._retry, cancelled=self._closed)
        self._plain = uncached(location)
        self._check_characters("open", self._plain.path, self._location.redacted)
        self._made: set[str] = set()
        self._generation = 0
        self._stalls = 0
        self._opened: OpenFilesystem | None = None
        self._start_in_this_process()

    def __reduce__(self) -> tuple[object, ...]:
        return partial(FsspecStore, transfer=self._transfer, retry=self._retry), (self._location,)

    def __repr__(self) -> str:
        return f"FsspecStore({self._location.redacted!r})"

    @property
    def location(self) -> Location:
        """Where this store is."""
        return self._location

    @property
    def capabilities(self) -> Capabilities:
        """What its filesystem can do, as far as known."""
        traits = self._traits
        return Capabilities(
            writable=traits.publishing is not Publishing.NEVER,
            listable=traits.listable,
            ranged_reads=traits.ranged_reads,
            parallel_parts=traits.publishing is Publishing.MEMORY,
            conditional_put=False,
            atomic_put=traits.atomic,
            remote=traits.remote,
            copies_reads=traits.publishing is not Publishing.MEMORY,
            refused_characters=traits.refused,
        )

    # -- reading

    def get(self, path: str) -> bytes:
        """Read a whole object."""
        return self._run("read", path, self._get)

    def _get(self, fs: AbstractFileSystem, name: str) -> bytes:
        with _directories_as_absent(fs, name):
            return read_bytes(fs, name)

    def get_tail(self, path: str, size_bytes: int) -> tuple[bytes, int]:
        """Read the end of an object: one request for its size, one for the bytes."""
        total = self.head(path).size_bytes
        start = max(0, total - max(0, size_bytes))
        tail = bytearray(total - start)
        self.read_into(path, start, [memoryview(tail)])
        return bytes(tail), total

    def read_into(self, path: str, start: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers with one request."""
        views = [as_bytes_view(buffer) for buffer in buffers]
        size_bytes = sum(map(len, views))
        if not size_bytes:
            return
        if self._traits.publishing is Publishing.MEMORY:
            self._run("read", path, lambda fs, name: self._read_memory(fs, name, path, start, views))
        else:
            # A call that was left behind may go on for long, and must not write into the caller's memory.
            _scatter(
                self._run("read", path, lambda fs, name: self._read_range(fs, name, path, start, size_bytes)), views
            )

    def _read_memory(
        self, fs: AbstractFileSystem, name: str, path: str, start: int, views: Sequence[memoryview]
    ) -> None:
        try:
            file = cast("MemoryFileLike", fs.open(name, "rb"))
        except FileExistsError:
            raise FileNotFoundError(f"{path!r} is below an object") from None
        with file.getbuffer() as whole:
            self._check_range(path, start, sum(map(len, views)), len(whole))
            for view in views:
                with whole[start : start + len(view)] as source:
                    copy_bytes(view, source)
                start += len(view)

    def _read_range(self, fs: AbstractFileSystem, name: str, path: str, start: int, size_bytes: int) -> memoryview:
        if reads_ranges(fs):
            try:
                with _directories_as_absent(fs, name):
                    content = memoryview(read_bytes(fs, name, start, start + size_bytes))
            except Exception as error:
                if fault_of(error) is Fault.OTHER:
                    # Some clients (obstore) have no word for a range that is not there.
                    self._check_range(path, start, size_bytes, self.head(path).size_bytes)
                raise
            return content if len(content) == size_bytes else self._explain_length(path, start, size_bytes, content)
        with _directories_as_absent(fs, name), contextlib.closing(open_unbuffered(fs, name)) as file:
            file.seek(start)
            # Each read of a file object is a request.
            content = memoryview(bytearray(size_bytes))
            filled = fill(file, content)
        if filled < size_bytes:
            self._explain_length(path, start, size_bytes, memoryview(b""))
        return content

    def _explain_length(self, path: str, start: int, size_bytes: int, content: memoryview) -> memoryview:
        """Bytes of another number than asked for: a range that was ignored, a short body or a short object."""
        total = self.head(path).size_bytes
        self._check_range(path, start, size_bytes, total)
        if len(content) == total:
            return content[start : start + size_bytes]
        error = TransferSizeError(
            f"Can't read {self._target(path)}: {len(content)} of {size_bytes} bytes arrived; check the network"
        )
        raise FailedAttempt(Classified(error, FailureKind.TRANSIENT))

    def _check_range(self, path: str, start: int, size_bytes: int, total: int) -> None:
        if start + size_bytes > total:
            raise TransferSizeError(
                f"Can't read {self._target(path)}: bytes [{start}, {start + size_bytes}) of an object of {total}; "
                "it is shorter than it should be"
            )

    def head(self, path: str) -> ObjectInfo:
        """Describe an object, never from a cache."""
        return self._run("describe", path, partial(self._head, path=path))

    def _head(self, fs: AbstractFileSystem, name: str, *, path: str) -> ObjectInfo:
        fs.invalidate_cache()
        details = fs.info(name)
        if details.get("type") == "directory":
            raise FileNotFoundError(f"{path!r} is a directory")
        return object_info(path, details)

    def exists(self, path: str) -> bool:
        """True when there is such an object; a missing bucket is an error."""
        try:
            self.head(path)
        except BucketNotFoundError:
            raise
        except ObjectNotFoundError:
            return False
        return True

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """All objects below a directory, one request a directory."""
        directories = [check_name(prefix)]
        while directories:
            directory = directories.pop()
            for name, details in self._entries(directory):
                path = f"{directory}/{name}" if directory else name
                if details.get("type") == "directory":
                    directories.append(path)
                else:
                    yield object_info(path, details)

    def list_directories(self, prefix: str = "") -> Iterator[str]:
        """Names of the directories right below one."""
        for name, details in self._entries(check_name(prefix)):
            if details.get("type") == "directory":
                yield name

    def _entries(self, directory: str) -> Sequence[tuple[str, Mapping[str, object]]]:
        if not self._traits.listable:
            raise UnsupportedOperationError(
                f"Can't list {self._target(directory)}: {self._location.scheme}:// has no listing"
            )
        return self._run("list", directory, list_directory)

    # -- writing

    def put(self, path: str, buffers: Sequence[Buffer], *, if_absent: bool = False) -> ObjectInfo:
        """Write a whole object; ``if_absent`` is a check followed by a put."""
        self._check_writable("write", path)
        if if_absent and self.exists(path):
            raise ObjectExistsError(
                f"Can't write {self._target(path)}: it exists; choose another name or allow overwriting"
            )
        only = buffers[0] if len(buffers) == 1 else None
        return self._put(path, only if isinstance(only, bytes) else b"".join(buffers))

    def _put(self, path: str, content: bytes) -> ObjectInfo:
        begun: list[_Writing] = []

        def attempt(fs: AbstractFileSystem, name: str) -> ObjectInfo:
            whole_put = overrides(type(fs), "pipe_file") or overrides(type(fs), "_pipe_file")
            if self._traits.publishing is not Publishing.MOVE and whole_put:
                fs.pipe_file(name, content)
                return self._published(fs, name, path, len(content))
            writing = _Writing(self, path, len(content))
            begun.append(writing)
            file = writing.open(fs, name)
            try:
                for view in slices_of([content]):
                    write_all(file, view)
                file.close()
                found = writing.publish(fs)
            except BaseException:
                # The failure itself is on its way.
                writing.drop_file(file)
                raise
            begun.remove(writing)
            return found

        try:
            return self._run("write", path, attempt)
        finally:
            # Not within the attempt: its connection may be gone.
            for writing in begun:
                writing.discard()

    def open_sink(
        self,
        path: str,
        size_bytes: int,
        *,
        memory: PartMemory = PartMemory.COPIED,  # noqa: ARG002 - fsspec copies whatever it writes
    ) -> Sink:
        """Start an object: into memory, whole, or as a stream of parts."""
        self._check_writable("write", path)
        parts = parts_of(self._target(path), size_bytes, self._transfer.part_bytes)
        if self._traits.publishing is Publishing.MEMORY:
            return self._run("write", path, lambda fs, name: self._memory_sink(fs, name, path, parts))
        if len(parts.ranges) == 1:
            return WholeSink(parts, lambda content: self._put(path, content))
        writing = _Writing(self, path, size_bytes)
        return StreamSink(
            parts,
            open_file=lambda: self._run("write", path, writing.open),
            guard=lambda call: self._once("write", path, call),
            publish=lambda: self._run("write", path, lambda fs, _name: writing.publish(fs)),
            drop_file=writing.drop_file,
            discard=writing.discard,
        )

    def _memory_sink(self, fs: AbstractFileSystem, name: str, path: str, parts: PartLedger) -> Sink:
        from fsspec.implementations.memory import MemoryFile

        if name in fs.pseudo_dirs:
            raise IsADirectoryError(f"{path!r} is a directory")
        # Bytes that nobody else refers to are taken over as the buffer, and fresh pages are not touched twice.
        return MemorySink(parts, lambda size: MemoryFile(fs, name, bytes(size)), lambda: self.head(path))

    def _published(self, fs: AbstractFileSystem, name: str, path: str, size_bytes: int) -> ObjectInfo:
        """Describe an object that was just written, or remove it when it is not what was sent."""
        found = self._head(fs, name, path=path)
        if found.size_bytes != size_bytes:
            with contextlib.suppress(Exception):  # the wrong size is what the caller must hear of
                fs.rm_file(name)
            raise TransferSizeError(
                f"Can't write {self._target(path)}: {size_bytes} bytes were sent and {found.size_bytes} are stored; "
                "check the endpoint's checksum settings"
            )
        return found

    def delete(self, paths: Iterable[str]) -> None:
        """Delete objects, a request each, several in flight on a remote store."""
        names = list(paths)
        for path in names:
            self._check_writable("delete", path)
        if len(names) < 2 or self._traits.serial or not self._traits.remote:
            for path in names:
                self._delete(path)
        else:
            with ThreadPoolExecutor(min(_DELETE_THREADS, len(names)), "dcpfs-delete") as pool:
                for done in [pool.submit(self._delete, path) for path in names]:
                    done.result()
        if self._traits.publishing is Publishing.MOVE:
            self._prune({path.rpartition("/")[0] for path in names})

    def _delete(self, path: str) -> None:
        with contextlib.suppress(ObjectNotFoundError):
            self._run("delete", path, self._remove)

    def _remove(self, fs: AbstractFileSystem, name: str) -> None:
        if self._traits.publishing is Publishing.MOVE:
            fs.invalidate_cache()
            if fs.info(name).get("type") == "directory":
                # Where there are directories, removing one by name can take all that is in it.
                return
        fs.rm_file(name)

    def _prune(self, directories: set[str]) -> None:
        """Remove directories that hold nothing any more: on an object store they would not be there either."""
        opened, _ = self._filesystem()
        for deepest in sorted(directories, key=len, reverse=True):
            directory = deepest
            while directory:
                name = self._name(opened, directory)
                self._made.discard(name)
                try:
                    with self._turn():
                        self._call(
                            partial(remove_directory, opened.filesystem, name),
                            what=f"remove {self._target(directory)}",
                            limit_seconds=self._retry.deadline_seconds,
                        )
                except Exception:  # noqa: BLE001 - it holds something, somebody was faster, or it can't be done
                    break
                directory = directory.rpartition("/")[0]

    def close(self) -> None:
        """Let the filesystem go. Idempotent."""
        self._closed.set()
        self._opened = None

    # -- one attempt after another

    def _run(self, verb: str, path: str, action: Callable[[AbstractFileSystem, str], _T]) -> _T:
        """Run an action on the filesystem and the full name of a path, under the retry policy."""
        self._check_path(verb, path)
        deadline = time.monotonic() + self._retry.deadline_seconds
        generation = 0

        def attempt() -> _T:
            nonlocal deadline, generation
            asked_seconds = time.monotonic()
            # Not before it is this call's turn: the one before may have lost the connection.
            with self._turn():
                deadline += time.monotonic() - asked_seconds  # others' time, which their own limits bound
                opened, generation = self._filesystem()
                name = self._name(opened, path)
                try:
                    return self._call(
                        lambda: action(opened.filesystem, name),
                        what=f"{verb} {self._target(path)}",
                        limit_seconds=self._limit_seconds(deadline),
                    )
                except Exception as error:
                    self._hang_up(error, opened, generation)
                    raise

        return self._policy.run(
            attempt,
            verb=verb,
            target=self._target(path),
            refresh=lambda: self._renew(generation),
            scrub=self._location.scrub,
        )

    def _once(self, verb: str, path: str, call: Callable[[], _T]) -> _T:
        """Run a call that can't be repeated."""
        opened, generation = self._opened, self._generation
        what = f"{verb} {self._target(path)}"
        try:
            with self._turn():
                try:
                    return self._call(call, what=what, limit_seconds=self._retry.deadline_seconds)
                except Exception as error:
                    if opened is not None:
                        self._hang_up(error, opened, generation)
                    raise
        except DcpfsError:
            raise
        except Exception as error:  # noqa: BLE001 - raised again as what it means
            self._raise(error, verb, path)

    def _tidy(self, what: str, call: Callable[[], object]) -> None:
        """Run a call whose failure nobody needs to hear of: what failed before it is on its way."""
        with contextlib.suppress(Exception), self._turn():
            self._call(call, what=what, limit_seconds=self._retry.connect_timeout_seconds)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """One call at a time where it has to be."""
        if self._pid != os.getpid():
            self._start_in_this_process()
        if not self._traits.serial or in_bounded_call():
            yield
            return
        stalls = self._stalls
        with self._serial:
            if stalls != self._stalls:
                raise TimeoutError("the server stopped answering while this call waited for its turn")
            yield

    def _call(self, call: Callable[[], _T], *, what: str, limit_seconds: float) -> _T:
        """Run a call of the filesystem, which ends in time where a server is asked."""
        if not self._traits.remote or in_bounded_call():
            return call()
        return self._bounded(call, what=what, limit_seconds=limit_seconds)

    def _bounded(self, call: Callable[[], _T], *, what: str, limit_seconds: float) -> _T:
        try:
            return self._threads.run(call, limit_seconds=limit_seconds, what=what)
        except CallTimeoutError:
            self._stalls += 1
            raise

    def _limit_seconds(self, deadline: float) -> float:
        """How long a call may take: so long that a second one still can help."""
        left = max(deadline - time.monotonic(), 0.001)
        return max(left / 2, min(left, self._retry.read_timeout_seconds))

    def _raise(self, error: Exception, verb: str, path: str) -> NoReturn:
        failure = classify(error, verb=verb, target=self._target(path), scrub=self._location.scrub)
        raise failure.error from failure.error.__cause__

    def _start_in_this_process(self) -> None:
        # A lock that was held as the process forked stays held in the child, and threads and sockets are the parent's.
        if self._opened is not None:
            _PARENTS.append(self._opened)
        self._opening, self._serial, self._threads = threading.Lock(), threading.Lock(), CallThreads()
        self._opened, self._pid = None, os.getpid()

    def _filesystem(self) -> tuple[OpenFilesystem, int]:
        """The filesystem of this process, and which one after how many renewals it is."""
        if self._pid != os.getpid():
            self._start_in_this_process()
        opened = self._opened
        if opened is not None:
            return opened, self._generation
        stalls = self._stalls
        with self._opening:
            if self._closed.is_set():
                raise StorageError(f"Can't use {self._location}: this store was closed")
            if self._opened is None:
                if stalls != self._stalls:
                    raise TimeoutError("the server stopped answering while this call waited for a connection")
                self._opened = self._open()
            return self._opened, self._generation

    def _open(self) -> OpenFilesystem:
        if not self._traits.remote:
            return open_filesystem(self._location)
        retry = self._retry
        return self._bounded(
            partial(open_filesystem, self._location),
            what=f"open {self._location.redacted}",
            limit_seconds=min(retry.connect_timeout_seconds + retry.read_timeout_seconds, retry.deadline_seconds),
        )

    def _renew(self, generation: int) -> None:
        """Let go of the filesystem whose credentials expired, unless another thread was faster."""
        with self._opening:
            if generation == self._generation:
                self._generation += 1
                self._opened = None

    def _hang_up(self, error: Exception, opened: OpenFilesystem, generation: int) -> None:
        """After a failure of the one connection that some filesystems have: they never open another."""
        stalled = isinstance(error, CallTimeoutError)
        if stalled:
            disconnect(opened.filesystem)
        if stalled or (self._plain.scheme in _ONE_CONNECTION and fault_of(error) is Fault.TRANSIENT):
            self._renew(generation)

    def _name(self, opened: OpenFilesystem, path: str) -> str:
        if not path:
            return opened.root
        if self._plain.scheme in _WEB:
            return self._plain.join(path).path
        if self._plain.scheme in _DAV:
            # webdav4 puts names into URLs as they are; what it answers is decoded.
            path = quote_marks(path)
        return f"{opened.root}/{path}" if opened.root else path

    def _target(self, path: str) -> str:
        return self._location.join(path).redacted if path else self._location.redacted

    def _check_path(self, verb: str, path: str) -> None:
        check_name(path)
        if self._traits.refused:
            self._check_characters(verb, path, self._target(path))

    def _check_characters(self, verb: str, text: str, target: str) -> None:
        found = sorted(set(text) & set(self._traits.refused))
        if found:
            named = " and ".join(map(repr, found))
            raise ConfigError(
                f"Can't {verb} {target}: the client of {self._plain.scheme}:// takes {named} in a name for syntax and "
                "would use another name; choose one without"
            )

    def _check_writable(self, verb: str, path: str) -> None:
        self._check_path(verb, path)
        if self._traits.publishing is Publishing.NEVER:
            raise UnsupportedOperationError(
                f"Can't {verb} {self._target(path)}: {self._location.scheme}:// is read-only here; "
                "save to a store that can be written"
            )


class _Writing:
    """One object on its way: where its bytes go and how they get under its name."""

    def __init__(self, store: FsspecStore, path: str, size_bytes: int) -> None:
        self._store = store
        self._path = path
        self._size_bytes = size_bytes
        self._moves = store._traits.publishing is Publishing.MOVE
        self._name = ""
        self._own_name = ""
        self._move_asked = False

    def open(self, fs: AbstractFileSystem, name: str) -> FileWriter:
        """Open the file object; in a directory tree, make the directories first."""
        self._name = name
        self._own_name = temporary_name(name) if self._moves else name
        if self._moves:
            directory = name.rpartition("/")[0]
            if directory and directory not in self._store._made:
                self._make(fs, directory)
            try:
                return cast("FileWriter", fs.open(self._own_name, "wb"))
            except FileNotFoundError:
                # Somebody removed the directory since, because it was empty.
                self._make(fs, directory)
        return cast("FileWriter", fs.open(self._own_name, "wb"))

    def _make(self, fs: AbstractFileSystem, directory: str) -> None:
        with contextlib.suppress(FileExistsError):
            fs.makedirs(directory, exist_ok=True)
        self._store._made.add(directory)

    def publish(self, fs: AbstractFileSystem) -> ObjectInfo:
        """After the close: check the size, move the file to its name, and look whether it is there."""
        try:
            found = self._store._published(fs, self._own_name, self._path, self._size_bytes)
        except FileNotFoundError:
            if not self._move_asked:
                raise
            # An attempt before this one has moved it, and its answer, or that to what followed, was lost.
            return self._moved(fs)
        if not self._moves:
            return found
        self._move_asked = True
        move_file(fs, self._own_name, self._name)
        return self._moved(fs)

    def _moved(self, fs: AbstractFileSystem) -> ObjectInfo:
        try:
            return self._store._published(fs, self._name, self._path, self._size_bytes)
        except FileNotFoundError:
            raise StorageError(
                f"Can't write {self._store._target(self._path)}: it was moved to its name and is not there; choose "
                "a name without characters that the server takes for syntax"
            ) from None

    def drop_file(self, file: FileWriter) -> None:
        """Get rid of the file object: under a temporary name it may be closed."""
        drop = file.close if self._moves else partial(discard_file, file)
        self._store._tidy(f"give up writing {self._store._target(self._path)}", drop)

    def discard(self) -> None:
        """Remove a file with a temporary name, on a new connection where that of the write is gone."""
        if not self._moves or not self._own_name:
            return
        with contextlib.suppress(Exception):
            # Nothing may be there, and what failed before is what the caller must hear of.
            opened, _ = self._store._filesystem()
            remove = partial(opened.filesystem.rm_file, self._own_name)
            self._store._tidy(f"tidy up after {self._store._target(self._path)}", remove)


@contextlib.contextmanager
def _directories_as_absent(fs: AbstractFileSystem, name: str) -> Iterator[None]:
    """Some servers have no word for what is wrong with reading a directory; to a store, it is no object."""
    try:
        yield
    except Exception as error:
        if fault_of(error) in _DIRECTORY_FAULTS and fs.info(name).get("type") == "directory":
            # Without its cause, which says something else.
            raise FileNotFoundError(f"{name!r} is a directory") from None
        raise


def _scatter(content: memoryview, views: Sequence[memoryview]) -> None:
    start = 0
    for view in views:
        view[:] = content[start : start + len(view)]
        start += len(view)
