"""Any fsspec filesystem, async or sync, as a `dcpfs.storage.store.Store`.

Problem: what fsspec offers is made for people at a prompt: names are globs, listings are remembered,
``exists`` takes every failure for "no", ``find`` leaves out what it could not list, a put makes directories
and buckets, and an instance that went through a fork hangs.

Way taken: only calls that take a name literally, one object each, on an instance that this process opened
itself and opens anew after a fork, when credentials expired, or when a call did not come back
(`dcpfs.storage.fsspec_connection`). Every call runs under the one `RetryPolicy`, within its deadline, and every
exception becomes an error of dcpfs. How an object gets under its name is the business of
`dcpfs.storage.fsspec_sink` and `dcpfs.storage.fsspec_writing`; what a filesystem can do, that of
`dcpfs.storage.filesystems`. On ``memory://`` bytes move between its buffers and the caller's directly.

Flow: ``FsspecStore(location)`` looks up the class, so that a missing package shows at once → the first verb
opens the filesystem → each verb: attempt, translate, wait, attempt.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

from dcpfs.config import RetryConfig, TransferConfig
from dcpfs.errors import (
    BucketNotFoundError,
    ConfigError,
    DcpfsError,
    ObjectExistsError,
    ObjectNotFoundError,
    TransferSizeError,
    UnsupportedOperationError,
)
from dcpfs.storage.capabilities import Capabilities
from dcpfs.storage.filesystems import OpenFilesystem, Publishing, overrides, traits_of, uncached
from dcpfs.storage.fsspec_connection import FsspecConnection
from dcpfs.storage.fsspec_sink import (
    MemoryFileLike,
    MemorySink,
    PartLedger,
    StreamSink,
    WholeSink,
    as_bytes_view,
    copy_bytes,
    is_temporary,
    parts_of,
    slices_of,
    write_all,
)
from dcpfs.storage.fsspec_writing import FsspecWriting, check_written
from dcpfs.storage.leftovers import check_own_directory
from dcpfs.storage.literal_calls import (
    describe_file,
    fill,
    list_directory,
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
_DAV = frozenset({"dav", "webdav", "webdavs"})


class FsspecStore:
    """A store on any fsspec filesystem. Thread-safe, picklable, usable in a forked child.

    Args:
        location: Where it is. The filesystem takes the options.
        transfer: Part size.
        retry: Attempts and deadline. A filesystem's own retries come below and are counted as one attempt. A call
            that does not come back ends half-way to the deadline, or after ``read_timeout_seconds`` where that is
            longer, and is tried again on a new connection; a copy in place of a move gets more, by its size.

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
        self._policy = RetryPolicy(self._retry, cancelled=self._closed, location=location)
        self._plain = uncached(location)
        self._check_characters("open", self._plain.path, self._location.redacted)
        self._made: set[str] = set()
        self._connection = FsspecConnection(location, self._traits, self._retry)

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
        return self._run("describe", path, lambda fs, name: describe_file(fs, name, path))

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
        directories = [check_name(prefix.rstrip("/"))]
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
        for name, details in self._entries(check_name(prefix.rstrip("/"))):
            if details.get("type") == "directory":
                yield name

    def _entries(self, directory: str) -> Sequence[tuple[str, Mapping[str, object]]]:
        return [entry for entry in self._all_entries(directory) if not is_temporary(entry[0])]

    def _all_entries(self, directory: str) -> Sequence[tuple[str, Mapping[str, object]]]:
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
        begun: list[FsspecWriting] = []

        def attempt(fs: AbstractFileSystem, name: str) -> ObjectInfo:
            whole_put = overrides(type(fs), "pipe_file") or overrides(type(fs), "_pipe_file")
            if self._traits.publishing is not Publishing.MOVE and whole_put:
                fs.pipe_file(name, content)
                return check_written(fs, name, path, self._target(path), len(content))
            writing = self._writing(path, len(content))
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
            extra_seconds = self._writing(path, len(content)).extra_seconds
            return self._run("write", path, attempt, extra_seconds=extra_seconds)
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
        writing = self._writing(path, size_bytes)
        return StreamSink(
            parts,
            open_file=lambda: self._run("write", path, writing.open),
            guard=lambda call: self._once("write", path, call),
            publish=lambda: self._run(
                "write", path, lambda fs, _name: writing.publish(fs), extra_seconds=writing.extra_seconds
            ),
            drop_file=writing.drop_file,
            discard=writing.discard,
        )

    def _writing(self, path: str, size_bytes: int) -> FsspecWriting:
        return FsspecWriting(self._connection, self._traits, self._made, path, self._target(path), size_bytes)

    def _memory_sink(self, fs: AbstractFileSystem, name: str, path: str, parts: PartLedger) -> Sink:
        from fsspec.implementations.memory import MemoryFile

        if name in fs.pseudo_dirs:
            raise IsADirectoryError(f"{path!r} is a directory")
        # Bytes that nobody else refers to are taken over as the buffer, and fresh pages are not touched twice.
        return MemorySink(parts, lambda size: MemoryFile(fs, name, bytes(size)), lambda: self.head(path))

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
        opened = self._connection.filesystem()
        for deepest in sorted(directories, key=len, reverse=True):
            directory = deepest
            while directory:
                name = self._name(opened, directory)
                self._made.discard(name)
                try:
                    self._connection.once(
                        f"remove {self._target(directory)}", partial(remove_directory, opened.filesystem, name)
                    )
                except Exception:  # noqa: BLE001 - it holds something, somebody was faster, or it can't be done
                    break
                directory = directory.rpartition("/")[0]

    def sweep_leftovers(self, directory: str) -> int:
        """See `dcpfs.storage.leftovers.LeavesLeftovers`. Only directory trees have any."""
        pending = [check_own_directory(directory)]
        if self._traits.publishing is not Publishing.MOVE or not self._traits.listable:
            return 0
        left: list[str] = []
        emptied: set[str] = set()
        while pending:
            current = pending.pop()
            entries = self._all_entries(current)
            pending += [f"{current}/{name}" for name, details in entries if details.get("type") == "directory"]
            found = [f"{current}/{name}" for name, details in entries if _is_leftover(name, details)]
            left += found
            if found or not entries:
                emptied.add(current)
        self.delete(left)
        self._prune(emptied)
        return len(left)

    def close(self) -> None:
        """Let the filesystem go. Idempotent."""
        self._closed.set()
        self._connection.close()

    # -- one attempt after another

    def _run(
        self,
        verb: str,
        path: str,
        action: Callable[[AbstractFileSystem, str], _T],
        *,
        extra_seconds: Callable[[OpenFilesystem], float] | None = None,
    ) -> _T:
        """Run an action on the filesystem and the full name of a path, under the retry policy."""
        self._check_path(verb, path)
        target = self._target(path)
        attempts = self._connection.attempts(f"{verb} {target}", extra_seconds)

        def attempt() -> _T:
            return attempts.make(lambda opened: action(opened.filesystem, self._name(opened, path)))

        return self._policy.run(attempt, verb=verb, target=target, refresh=attempts.renew, scrub=self._location.scrub)

    def _once(self, verb: str, path: str, call: Callable[[], _T]) -> _T:
        """Run a call that can't be repeated."""
        target = self._target(path)
        try:
            return self._connection.once(f"{verb} {target}", call)
        except DcpfsError:
            raise
        except Exception as error:  # noqa: BLE001 - raised again as what it means
            failure = classify(error, verb=verb, target=target, scrub=self._location.scrub)
            raise failure.error from failure.error.__cause__

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
        return self._location.describe(path)

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


def _is_leftover(name: str, details: Mapping[str, object]) -> bool:
    return is_temporary(name) and details.get("type") != "directory"


def _scatter(content: memoryview, views: Sequence[memoryview]) -> None:
    start = 0
    for view in views:
        view[:] = content[start : start + len(view)]
        start += len(view)
