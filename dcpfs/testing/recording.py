"""A store that notes what is asked of it.

Promises such as "one request", "only these bytes" or "never listed" are about calls, not about results.
Wrapping the store of a writer or reader shows them, for every kind of store alike.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from dcpfs.storage.capabilities import Capabilities
from dcpfs.storage.leftovers import LeavesLeftovers, sweep_leftovers
from dcpfs.storage.location import Location
from dcpfs.storage.store import Buffer, ObjectInfo, PartMemory, PartRange, Sink, Store

__all__ = ["RecordedCall", "RecordingStore"]


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call of a store or of one of its sinks, noted before it is made.

    Attributes:
        verb: Name of the method; those of a sink are ``write_part``, ``commit`` and ``abort``.
        path: The object or directory; the first one of a batch.
        start: First byte of a range, or 0.
        size_bytes: Bytes asked for or given; for `get`, `get_tail`: those that came.
    """

    verb: str
    path: str
    start: int = 0
    size_bytes: int = 0


class RecordingStore:
    """A `dcpfs.storage.store.Store` around another one. Thread-safe.

    Args:
        store: Does the work.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._calls: list[RecordedCall] = []

    @property
    def location(self) -> Location:
        """Where the store is."""
        return self._store.location

    @property
    def capabilities(self) -> Capabilities:
        """What the store can do."""
        return self._store.capabilities

    @property
    def calls(self) -> list[RecordedCall]:
        """A copy of what was asked so far, in order of start (of `get` and `get_tail`: of end)."""
        with self._lock:
            return list(self._calls)

    @property
    def verbs(self) -> Counter[str]:
        """How often each verb was called."""
        return Counter(call.verb for call in self.calls)

    @property
    def bytes_read(self) -> int:
        """Bytes of all reads."""
        return sum(call.size_bytes for call in self.calls if call.verb in ("get", "get_tail", "read_into"))

    @property
    def bytes_written(self) -> int:
        """Bytes of all puts and parts."""
        return sum(call.size_bytes for call in self.calls if call.verb in ("put", "write_part"))

    def paths(self, verb: str) -> list[str]:
        """What a verb was called with, in order."""
        return [call.path for call in self.calls if call.verb == verb]

    def clear(self) -> None:
        """Forget the calls."""
        with self._lock:
            self._calls.clear()

    def note(self, verb: str, path: str, start: int = 0, size_bytes: int = 0) -> None:
        """Add a call."""
        with self._lock:
            self._calls.append(RecordedCall(verb, path, start, size_bytes))

    def get(self, path: str) -> bytes:
        """See `Store.get`."""
        content = self._store.get(path)
        self.note("get", path, 0, len(content))
        return content

    def get_tail(self, path: str, size_bytes: int) -> tuple[bytes, int]:
        """See `Store.get_tail`."""
        tail, total = self._store.get_tail(path, size_bytes)
        self.note("get_tail", path, total - len(tail), len(tail))
        return tail, total

    def read_into(self, path: str, start: int, buffers: Sequence[memoryview]) -> None:
        """See `Store.read_into`."""
        self.note("read_into", path, start, sum(view.nbytes for view in buffers))
        self._store.read_into(path, start, buffers)

    def put(self, path: str, buffers: Sequence[Buffer], *, if_absent: bool = False) -> ObjectInfo:
        """See `Store.put`."""
        self.note("put", path, 0, sum(memoryview(buffer).nbytes for buffer in buffers))
        return self._store.put(path, buffers, if_absent=if_absent)

    def open_sink(self, path: str, size_bytes: int, *, memory: PartMemory = PartMemory.COPIED) -> Sink:
        """See `Store.open_sink`."""
        self.note("open_sink", path, 0, size_bytes)
        return _RecordingSink(self, path, self._store.open_sink(path, size_bytes, memory=memory))

    def head(self, path: str) -> ObjectInfo:
        """See `Store.head`."""
        self.note("head", path)
        return self._store.head(path)

    def exists(self, path: str) -> bool:
        """See `Store.exists`."""
        self.note("exists", path)
        return self._store.exists(path)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """See `Store.list`."""
        self.note("list", prefix)
        return self._store.list(prefix)

    def list_directories(self, prefix: str = "") -> Iterator[str]:
        """See `Store.list_directories`."""
        self.note("list_directories", prefix)
        return self._store.list_directories(prefix)

    def delete(self, paths: Iterable[str]) -> None:
        """See `Store.delete`; each object is noted."""
        names = [*paths]
        for path in names:
            self.note("delete", path)
        self._store.delete(names)

    def sweep_leftovers(self, directory: str) -> int:
        """See `dcpfs.storage.leftovers.LeavesLeftovers`; noted where the store can leave any."""
        if isinstance(self._store, LeavesLeftovers):
            self.note("sweep_leftovers", directory)
        return sweep_leftovers(self._store, directory)

    def close(self) -> None:
        """See `Store.close`."""
        self.note("close", "")
        self._store.close()


class _RecordingSink:
    def __init__(self, record: RecordingStore, path: str, sink: Sink) -> None:
        self._record = record
        self._path = path
        self._sink = sink

    def parts(self) -> Sequence[PartRange]:
        return self._sink.parts()

    def write_part(self, part: PartRange, buffers: Sequence[Buffer]) -> None:
        self._record.note("write_part", self._path, part.start, part.size_bytes)
        self._sink.write_part(part, buffers)

    def commit(self) -> ObjectInfo:
        self._record.note("commit", self._path)
        return self._sink.commit()

    def abort(self) -> None:
        self._record.note("abort", self._path)
        self._sink.abort()
