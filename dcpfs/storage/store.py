"""The seam between bytes at a URL and everything above it.

Problem: fsspec filesystems differ in what is atomic, what is concurrent, what is cached and what is retried, and
their file objects copy every byte at least once. Code that talks to them directly inherits all of it.

Way taken: a store knows names and buffers, nothing else. Every verb is synchronous, thread-safe and complete: it
has been retried within its policy and raises an error of `dcpfs.errors` with the redacted URL, or it has happened.
Concurrency belongs to the caller (`dcpfs.dcp.transfer`), which calls these verbs from a bounded pool of threads.

Flow of a write: ``sink = store.open_sink(path, size)`` → ``sink.write_part(start, buffers)`` for every part of
``sink.parts()``, in any order and from several threads where the store can → ``sink.commit()`` (the object appears
under its name, its size checked) or ``sink.abort()`` (nothing is left, no orphan part).

A *path* is a name inside the store, ``/``-separated, relative to the store's location, never starting with ``/`` and
without ``.`` or ``..`` segments; ``""`` is the location itself. All names are literal: nothing expands globs.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from dcpfs.storage.capabilities import Capabilities
from dcpfs.storage.location import Location

__all__ = ["Buffer", "ObjectInfo", "PartMemory", "PartRange", "Sink", "Store"]

Buffer = bytes | bytearray | memoryview
"""Contiguous bytes. Where a store fills one it is a writable memoryview of format ``B``."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object as the store reports it.

    Attributes:
        path: Name relative to the store's location.
        size_bytes: Its length.
        etag: The store's opaque version tag, or None.
        modified_seconds: Last change, seconds since the epoch, or None.
    """

    path: str
    size_bytes: int
    etag: str | None = None
    modified_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class PartRange:
    """Half-open byte range of a part within its object."""

    start: int
    stop: int

    @property
    def size_bytes(self) -> int:
        """Length of the part."""
        return self.stop - self.start


class PartMemory(enum.Enum):
    """What a part of an object takes while it is being written, which is what bounds its size."""

    COPIED = "copied"
    """Memory of its size."""
    IN_PLACE = "in place"
    """Next to none: its bytes lie in memory already, and are written from there."""


class Sink(Protocol):
    """One object being written. Thread-safe where `Capabilities.parallel_parts`."""

    def parts(self) -> Sequence[PartRange]:
        """The parts that cover the object without gap or overlap, ascending. An empty object has one empty part."""
        ...

    def write_part(self, part: PartRange, buffers: Sequence[Buffer]) -> None:
        """Write one part from buffers whose sizes add up to it. They may be reused once it returns.

        A part can be written twice (a retry by the caller); the last one counts.
        """
        ...

    def commit(self) -> ObjectInfo:
        """Publish the object atomically under its name and return it as the store sees it.

        Raises:
            TransferSizeError: A part is missing or the store reports another size; nothing is left behind.
        """
        ...

    def abort(self) -> None:
        """Give up: leave no object, no part, no temporary file. Idempotent; safe after a failed `commit`."""
        ...


@runtime_checkable
class Store(Protocol):
    """Bytes at a location. Every verb is synchronous, thread-safe, retried, and raises `dcpfs.errors`."""

    @property
    def location(self) -> Location:
        """Where this store is."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""
        ...

    def get(self, path: str) -> bytes:
        """Read a whole (small) object.

        Raises:
            ObjectNotFoundError: There is none.
        """
        ...

    def get_tail(self, path: str, size_bytes: int) -> tuple[bytes, int]:
        """Read the last ``size_bytes`` of an object (all of it when smaller), and its full size.

        One request where possible.
        """
        ...

    def read_into(self, path: str, start: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers, in order, with the bytes from ``start`` on: one request for the whole contiguous range.

        Raises:
            ObjectNotFoundError: There is no such object.
            TransferSizeError: The object ends before the range does.
        """
        ...

    def put(self, path: str, buffers: Sequence[Buffer], *, if_absent: bool = False) -> ObjectInfo:
        """Write a whole object in one step: it appears entirely or not at all, replacing an old one.

        Args:
            path: Name of the object.
            buffers: Its content, joined.
            if_absent: Refuse when there is one already.

        Raises:
            ObjectExistsError: ``if_absent`` and there is one.
        """
        ...

    def open_sink(self, path: str, size_bytes: int, *, memory: PartMemory = PartMemory.COPIED) -> Sink:
        """Start an object of known size. Makes no object visible before `Sink.commit`.

        Args:
            path: Name of the object.
            size_bytes: Its length.
            memory: What its parts take: a hint for their size, where the user has set none.
        """
        ...

    def head(self, path: str) -> ObjectInfo:
        """Describe an object by its exact name, never from a cache.

        Raises:
            ObjectNotFoundError: There is none.
        """
        ...

    def exists(self, path: str) -> bool:
        """True when `head` finds it. Errors other than not-found are raised, never read as "no"."""
        ...

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """All objects below the directory ``prefix``, recursively, fresh, page by page, in no promised order.

        An absent directory is empty. Directory placeholders are not objects.
        """
        ...

    def list_directories(self, prefix: str = "") -> Iterator[str]:
        """Names (single segments) of the directories right below ``prefix``, fresh."""
        ...

    def delete(self, paths: Iterable[str]) -> None:
        """Delete objects by exact name, in batches where the store has them. Absent ones are no error."""
        ...

    def close(self) -> None:
        """Release connections. Idempotent. The store is unusable afterwards."""
        ...
