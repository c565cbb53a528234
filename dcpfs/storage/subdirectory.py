"""A directory of a store, as a store.

Problem: a step is one commit over several directories, each of which a storage writer takes for its own location. With
a store of its own each would open connections of its own, and nothing could be said about the requests of the whole.

Way taken: a view. Names are prefixed on their way in and cut on their way out; everything else is the store's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from dcpfs.storage.capabilities import Capabilities
from dcpfs.storage.leftovers import check_own_directory, sweep_leftovers
from dcpfs.storage.location import Location, check_name
from dcpfs.storage.store import Buffer, ObjectInfo, PartMemory, PartRange, Sink, Store

__all__ = ["Subdirectory"]


class Subdirectory:
    """A `dcpfs.storage.store.Store` of what lies below a directory of another one.

    Args:
        store: Does the work, and is still its owner's: `close` leaves it open.
        directory: Name within it, without slashes around it.

    Raises:
        ConfigError: The name leaves the store.
    """

    def __init__(self, store: Store, directory: str) -> None:
        self._store = store
        self._location = store.location.join(check_name(directory))
        self._directory = directory
        self._prefix = f"{directory}/"

    @property
    def location(self) -> Location:
        """Where the directory is."""
        return self._location

    @property
    def capabilities(self) -> Capabilities:
        """What the store can do."""
        return self._store.capabilities

    def get(self, path: str) -> bytes:
        """See `Store.get`."""
        return self._store.get(self._full(path))

    def get_tail(self, path: str, size_bytes: int) -> tuple[bytes, int]:
        """See `Store.get_tail`."""
        return self._store.get_tail(self._full(path), size_bytes)

    def read_into(self, path: str, start: int, buffers: Sequence[memoryview]) -> None:
        """See `Store.read_into`."""
        self._store.read_into(self._full(path), start, buffers)

    def put(self, path: str, buffers: Sequence[Buffer], *, if_absent: bool = False) -> ObjectInfo:
        """See `Store.put`."""
        return self._cut(self._store.put(self._full(path), buffers, if_absent=if_absent))

    def open_sink(self, path: str, size_bytes: int, *, memory: PartMemory = PartMemory.COPIED) -> Sink:
        """See `Store.open_sink`."""
        return _SubdirectorySink(self._store.open_sink(self._full(path), size_bytes, memory=memory), path)

    def head(self, path: str) -> ObjectInfo:
        """See `Store.head`."""
        return self._cut(self._store.head(self._full(path)))

    def exists(self, path: str) -> bool:
        """See `Store.exists`."""
        return self._store.exists(self._full(path))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """See `Store.list`."""
        return map(self._cut, self._store.list(self._full(prefix.rstrip("/"))))

    def list_directories(self, prefix: str = "") -> Iterator[str]:
        """See `Store.list_directories`."""
        return self._store.list_directories(self._full(prefix.rstrip("/")))

    def delete(self, paths: Iterable[str]) -> None:
        """See `Store.delete`."""
        self._store.delete(map(self._full, paths))

    def sweep_leftovers(self, directory: str) -> int:
        """See `dcpfs.storage.leftovers.LeavesLeftovers`."""
        return sweep_leftovers(self._store, self._full(check_own_directory(directory)))

    def close(self) -> None:
        """Leave the store open: it is not this view's."""

    def _full(self, path: str) -> str:
        return f"{self._prefix}{check_name(path)}" if path else self._directory

    def _cut(self, info: ObjectInfo) -> ObjectInfo:
        return replace(info, path=info.path.removeprefix(self._prefix))


class _SubdirectorySink:
    def __init__(self, sink: Sink, path: str) -> None:
        self._sink = sink
        self._path = path

    def parts(self) -> Sequence[PartRange]:
        return self._sink.parts()

    def write_part(self, part: PartRange, buffers: Sequence[Buffer]) -> None:
        self._sink.write_part(part, buffers)

    def commit(self) -> ObjectInfo:
        return replace(self._sink.commit(), path=self._path)

    def abort(self) -> None:
        self._sink.abort()
