"""Objects being written to an fsspec filesystem, one class a way of publishing.

Problem: fsspec writes through file objects whose ``close()`` publishes whatever was written so far, also from
a ``with`` block that is left by an exception: a failed save leaves a truncated object under its final name.
And a file object buffers all of what one ``write`` hands it, so that a large tensor exists twice or three
times.

Way taken: nothing is ever written in a ``with`` block. A part goes to the file object in slices. On failure
the file object is discarded, its close disarmed. Where a file is visible while it is written, it is written
under a temporary name beside its own, its size checked, then moved. An object of one part is put whole, which
can be repeated; a stream can't, so its parts come in order and a failure is final.

Flow: ``sink_for(...)`` → `MemorySink`, `WholeSink` or `StreamSink` → ``write_part`` … → ``commit`` or
``abort``.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

from dcpfs.errors import StorageError, TransferSizeError
from dcpfs.storage.store import Buffer, ObjectInfo, PartRange

__all__ = [
    "DEFAULT_PART_BYTES",
    "FileWriter",
    "MemoryFileLike",
    "MemorySink",
    "PartLedger",
    "StreamSink",
    "WholeSink",
    "as_bytes_view",
    "copy_bytes",
    "discard_file",
    "is_temporary",
    "part_ranges",
    "parts_of",
    "slices_of",
    "temporary_name",
    "write_all",
]

DEFAULT_PART_BYTES = 16 << 20
_SLICE_BYTES = 4 << 20
"""Most bytes given to a file object at once: it buffers them all before it looks whether a block is full."""
_PREFIX, _SUFFIX = ".dcpfs-", ".tmp"
_LARGE_COPY_BYTES = 256 << 10
"""From here on a copy that leaves the GIL to other threads is worth its set-up."""


class FileWriter(Protocol):
    """What is used of a file object that is written."""

    def write(self, data: memoryview, /) -> int | None:
        """Take the bytes; None counts as all of them."""
        ...

    def close(self) -> None:
        """Publish what was written."""
        ...


class MemoryFileLike(Protocol):
    """What is used of a file of ``memory://``."""

    def getbuffer(self) -> memoryview:
        """Its bytes in place."""
        ...

    def commit(self) -> None:
        """Put it under its name."""
        ...


def part_ranges(size_bytes: int, part_bytes: int) -> list[PartRange]:
    """Parts of equal size, the last one shorter; one empty part for an empty object."""
    starts = range(0, max(size_bytes, 1), part_bytes)
    return [PartRange(start, min(start + part_bytes, size_bytes)) for start in starts]


def temporary_name(path: str) -> str:
    """A name that nobody has, in the same directory as a path."""
    directory, slash, _ = path.rpartition("/")
    return f"{directory}{slash}{_PREFIX}{uuid.uuid4().hex}{_SUFFIX}"


def is_temporary(name: str) -> bool:
    """True for the last segment of a `temporary_name`."""
    return name.startswith(_PREFIX) and name.endswith(_SUFFIX) and len(name) == len(_PREFIX + _SUFFIX) + 32


def as_bytes_view(buffer: Buffer) -> memoryview:
    """The buffer as a view of bytes."""
    view = memoryview(buffer)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def slices_of(buffers: Sequence[Buffer]) -> Iterator[memoryview]:
    """The bytes of the buffers in bounded slices."""
    for buffer in buffers:
        view = as_bytes_view(buffer)
        for start in range(0, len(view), _SLICE_BYTES):
            yield view[start : start + _SLICE_BYTES]


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy bytes between views of equal size, with the GIL released for large ones."""
    size_bytes = len(source)
    if size_bytes < _LARGE_COPY_BYTES or source.readonly:
        target[:] = source
        return
    kind = ctypes.c_char * size_bytes
    ctypes.memmove(kind.from_buffer(target), kind.from_buffer(source), size_bytes)


def discard_file(file: FileWriter) -> None:
    """Get rid of a file object without publishing what was written to it.

    A multipart upload is aborted at the store. The close that the garbage collector would call is disarmed.
    """
    discard = getattr(file, "discard", None)
    try:
        if callable(discard):
            discard()
    finally:
        # Files made from fsspec's template have ``closed`` as an ordinary attribute for this.
        with contextlib.suppress(AttributeError):
            file.closed = True  # type: ignore[attr-defined] # not in the protocol: io's own files lack it


class PartLedger:
    """Which parts of an object have been written."""

    def __init__(self, target: str, size_bytes: int, part_bytes: int) -> None:
        self.target = target
        self.size_bytes = size_bytes
        self.ranges = part_ranges(size_bytes, part_bytes)
        self._missing = {part.start for part in self.ranges}

    def check(self, part: PartRange, buffers: Sequence[Buffer]) -> None:
        """Refuse a part that is none of the object's, or buffers of another size."""
        given = sum(memoryview(buffer).nbytes for buffer in buffers)
        if part not in self.ranges:
            raise TransferSizeError(
                f"Can't write {self.target}: [{part.start}, {part.stop}) is none of its parts; use those of parts()"
            )
        if given != part.size_bytes:
            raise TransferSizeError(
                f"Can't write {self.target}: {given} bytes were given for the part "
                f"[{part.start}, {part.stop}) of {part.size_bytes}"
            )

    def written(self, part: PartRange) -> None:
        """Note that a part is there."""
        self._missing.discard(part.start)

    def check_complete(self) -> None:
        """Refuse to publish while parts are missing."""
        if self._missing:
            raise TransferSizeError(
                f"Can't write {self.target}: {len(self._missing)} of {len(self.ranges)} parts are missing, "
                f"the first from byte {min(self._missing)} on"
            )


class MemorySink:
    """An object of ``memory://``: parts are copied once, into the buffer that will be the object. Thread-safe."""

    def __init__(
        self, parts: PartLedger, make_file: Callable[[int], MemoryFileLike], head: Callable[[], ObjectInfo]
    ) -> None:
        self._parts = parts
        self._head = head
        self._file: MemoryFileLike | None = make_file(parts.size_bytes)

    def parts(self) -> Sequence[PartRange]:
        """The parts of the object."""
        return self._parts.ranges

    def write_part(self, part: PartRange, buffers: Sequence[Buffer]) -> None:
        """Copy a part to its place."""
        self._parts.check(part, buffers)
        if self._file is None:
            raise StorageError(f"Can't write {self._parts.target}: the write has ended")
        with self._file.getbuffer() as whole:
            start = part.start
            for buffer in buffers:
                view = as_bytes_view(buffer)
                with whole[start : start + len(view)] as place:
                    copy_bytes(place, view)
                start += len(view)
        self._parts.written(part)

    def commit(self) -> ObjectInfo:
        """Put the buffer under the object's name."""
        self._parts.check_complete()
        file, self._file = self._file, None
        if file is None:
            raise StorageError(f"Can't write {self._parts.target}: the write has ended")
        file.commit()
        return self._head()

    def abort(self) -> None:
        """Forget the buffer."""
        self._file = None


class WholeSink:
    """An object of one part: kept until ``commit``, then put whole, with retries."""

    def __init__(self, parts: PartLedger, put: Callable[[bytes], ObjectInfo]) -> None:
        self._parts = parts
        self._put = put
        self._content: bytes | None = None

    def parts(self) -> Sequence[PartRange]:
        """The one part of the object."""
        return self._parts.ranges

    def write_part(self, part: PartRange, buffers: Sequence[Buffer]) -> None:
        """Keep the part."""
        self._parts.check(part, buffers)
        self._content = b"".join(buffers)
        self._parts.written(part)

    def commit(self) -> ObjectInfo:
        """Put it."""
        self._parts.check_complete()
        content, self._content = self._content, None
        if content is None:
            raise StorageError(f"Can't write {self._parts.target}: the write has ended")
        return self._put(content)

    def abort(self) -> None:
        """Forget the part."""
        self._content = None


class StreamSink:
    """An object of many parts, written in ascending order to one file object.

    Args:
        parts: Its parts.
        open_file: Opens the file object, with retries.
        guard: Runs a call of the file object: one thread at a time where needed, bounded, errors translated.
        publish: After the file was closed: checks the size, moves it where it belongs, describes it.
        drop_file: Gets rid of the file object: `discard_file`, or its close where it has a temporary name. Raises
            nothing.
        discard: Afterwards: removes what may be left.
    """

    def __init__(
        self,
        parts: PartLedger,
        open_file: Callable[[], FileWriter],
        guard: Callable[[Callable[[], None]], None],
        publish: Callable[[], ObjectInfo],
        drop_file: Callable[[FileWriter], None],
        discard: Callable[[], None],
    ) -> None:
        self._parts = parts
        self._open_file = open_file
        self._guard = guard
        self._publish = publish
        self._drop_file = drop_file
        self._discard = discard
        self._lock = threading.Lock()
        self._file: FileWriter | None = None
        self._position = 0
        self._ended = False

    def parts(self) -> Sequence[PartRange]:
        """The parts of the object."""
        return self._parts.ranges

    def write_part(self, part: PartRange, buffers: Sequence[Buffer]) -> None:
        """Write the next part."""
        self._parts.check(part, buffers)
        with self._lock:
            if self._ended:
                raise StorageError(f"Can't write {self._parts.target}: the write has ended or failed")
            if part.start != self._position:
                raise StorageError(
                    f"Can't write {self._parts.target}: part {part.start} came where {self._position} is due; "
                    "this store takes parts in ascending order"
                )
            try:
                if self._file is None:
                    self._file = self._open_file()
                for view in slices_of(buffers):
                    self._guard(partial(write_all, self._file, view))
            except BaseException:
                self._drop()
                raise
            self._position = part.stop
            self._parts.written(part)

    def commit(self) -> ObjectInfo:
        """Close the file object, which publishes it, or move it to its name."""
        with self._lock:
            try:
                self._parts.check_complete()
                if self._ended or self._file is None:
                    raise StorageError(f"Can't write {self._parts.target}: the write has ended or failed")
                self._guard(self._file.close)
                self._file = None
                info = self._publish()
            except BaseException:
                self._drop()
                raise
            self._ended = True
            return info

    def abort(self) -> None:
        """Discard the file object and what it left."""
        with self._lock:
            if not self._ended:
                self._drop()

    def _drop(self) -> None:
        self._ended = True
        file, self._file = self._file, None
        if file is not None:
            self._drop_file(file)
        self._discard()


def write_all(file: FileWriter, view: memoryview) -> None:
    """Write until the file object has taken all of it."""
    while len(view):
        written = file.write(view)
        if written is None or written >= len(view):
            return
        if written <= 0:
            raise OSError("the file object takes no more bytes")
        view = view[written:]


def parts_of(target: str, size_bytes: int, part_bytes: int | None) -> PartLedger:
    """The bookkeeping of an object that will be written.

    Args:
        target: Redacted URL for errors.
        size_bytes: Size of the object.
        part_bytes: Size of a part, or None for the default.
    """
    return PartLedger(target, size_bytes, part_bytes or DEFAULT_PART_BYTES)
