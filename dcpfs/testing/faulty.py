"""A store that fails where it is told to.

What happens when the third upload fails, when the machine dies right after the commit, when a bit flips or
when the store hangs can't be waited for; it is enumerated. A run without faults counts the mutating calls;
then one run for each of them fails there, before it takes effect and after.

Flow: ``FaultyStore(store)`` → run → ``mutations`` → for each number and moment: ``FaultyStore(store,
FaultPlan(...))``.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from dcpfs.errors import StorageError, TransferSizeError
from dcpfs.storage.capabilities import Capabilities
from dcpfs.storage.leftovers import LeavesLeftovers
from dcpfs.storage.location import Location
from dcpfs.storage.store import Buffer, ObjectInfo, PartMemory, PartRange, Sink, Store

__all__ = ["Aftermath", "FaultPlan", "FaultyStore", "InjectedError", "Moment"]

_T = TypeVar("_T")


class InjectedError(StorageError):
    """The failure that was asked for."""


class Moment(enum.Enum):
    """When a call fails."""

    BEFORE = "before"
    """Nothing of it happens."""
    AFTER = "after"
    """It takes effect, and its caller does not hear of it."""


class Aftermath(enum.Enum):
    """What the store does after the failure."""

    RECOVERED = "recovered"
    """It works again."""
    DEAD = "dead"
    """Nothing works any more, tidying up included: the process or machine is gone."""


@dataclass(frozen=True)
class FaultPlan:
    """What goes wrong.

    Attributes:
        mutation: Number, from 1, of the mutating call that fails (`put`, `delete`, and a sink's
            ``write_part`` and ``commit``); None for none.
        moment: Whether that call takes effect.
        aftermath: What happens to later calls.
        read: Number, from 1, of the read that fails (`get`, `get_tail`, `read_into`).
        flipped_bits: Path to the number of the bit, within the object, that is read wrong.
        shortened: Path to the size at which the object seems to end.
        hang: The failing call waits for this event, then goes on without an error.
        error: Makes the failure.
    """

    mutation: int | None = None
    moment: Moment = Moment.BEFORE
    aftermath: Aftermath = Aftermath.RECOVERED
    read: int | None = None
    flipped_bits: Mapping[str, int] = field(default_factory=dict)
    shortened: Mapping[str, int] = field(default_factory=dict)
    hang: threading.Event | None = None
    error: Callable[[str], Exception] = InjectedError


class FaultyStore:
    """A `dcpfs.storage.store.Store` around another one, with faults. Thread-safe.

    Args:
        store: Does the work.
        plan: What goes wrong; nothing by default.
    """

    def __init__(self, store: Store, plan: FaultPlan | None = None) -> None:
        self._store = store
        self._plan = plan or FaultPlan()
        self._lock = threading.Lock()
        self._mutations = 0
        self._reads = 0
        self._dead = False
        self.reached = threading.Event()
        """Set as soon as the fault has come: a test waits for it instead of sleeping."""

    @property
    def location(self) -> Location:
        """Where the store is."""
        return self._store.location

    @property
    def capabilities(self) -> Capabilities:
        """What the store can do."""
        return self._store.capabilities

    @property
    def mutations(self) -> int:
        """Mutating calls so far."""
        return self._mutations

    @property
    def reads(self) -> int:
        """Reads so far."""
        return self._reads

    def get(self, path: str) -> bytes:
        """See `Store.get`."""
        content = self._read(path, lambda: self._store.get(path))
        return self._altered(path, 0, content[: self._plan.shortened.get(path)])

    def get_tail(self, path: str, size_bytes: int) -> tuple[bytes, int]:
        """See `Store.get_tail`."""
        tail, total = self._read(path, lambda: self._store.get_tail(path, size_bytes))
        end = self._plan.shortened.get(path)
        if end is not None and end < total:
            whole = self._store.get(path)[:end]
            tail, total = whole[max(0, end - size_bytes) :], end
        return self._altered(path, total - len(tail), tail), total

    def read_into(self, path: str, start: int, buffers: Sequence[memoryview]) -> None:
        """See `Store.read_into`."""
        stop = start + sum(view.nbytes for view in buffers)
        end = self._plan.shortened.get(path)
        if end is not None and stop > end:
            raise TransferSizeError(f"Can't read {self._target(path)}: bytes [{start}, {stop}) of {end}")
        self._read(path, lambda: self._store.read_into(path, start, buffers))
        bit = self._plan.flipped_bits.get(path)
        if bit is not None:
            for view in buffers:
                if start <= bit // 8 < start + view.nbytes:
                    view.cast("B")[bit // 8 - start] ^= 1 << bit % 8
                start += view.nbytes

    def put(self, path: str, buffers: Sequence[Buffer], *, if_absent: bool = False) -> ObjectInfo:
        """See `Store.put`."""
        return self.mutate("write", path, lambda: self._store.put(path, buffers, if_absent=if_absent))

    def open_sink(self, path: str, size_bytes: int, *, memory: PartMemory = PartMemory.COPIED) -> Sink:
        """See `Store.open_sink`."""
        self.check_alive(path)
        return _FaultySink(self, path, self._store.open_sink(path, size_bytes, memory=memory))

    def head(self, path: str) -> ObjectInfo:
        """See `Store.head`."""
        self.check_alive(path)
        found = self._store.head(path)
        end = self._plan.shortened.get(path, found.size_bytes)
        return ObjectInfo(path, min(end, found.size_bytes), found.etag, found.modified_seconds)

    def exists(self, path: str) -> bool:
        """See `Store.exists`."""
        self.check_alive(path)
        return self._store.exists(path)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """See `Store.list`."""
        self.check_alive(prefix)
        for found in self._store.list(prefix):
            end = self._plan.shortened.get(found.path, found.size_bytes)
            yield ObjectInfo(found.path, min(end, found.size_bytes), found.etag, found.modified_seconds)

    def list_directories(self, prefix: str = "") -> Iterator[str]:
        """See `Store.list_directories`."""
        self.check_alive(prefix)
        return self._store.list_directories(prefix)

    def delete(self, paths: Iterable[str]) -> None:
        """See `Store.delete`; each object is a mutating call of its own, so that a batch can break off."""
        for path in paths:
            self.mutate("delete", path, partial(self._store.delete, [path]))

    def sweep_leftovers(self, directory: str) -> int:
        """See `dcpfs.storage.leftovers.LeavesLeftovers`; a mutating call where the store can leave any."""
        if not isinstance(self._store, LeavesLeftovers):
            return 0
        return self.mutate("sweep", directory, partial(self._store.sweep_leftovers, directory))

    def close(self) -> None:
        """See `Store.close`."""
        self._store.close()

    @property
    def is_dead(self) -> bool:
        """True after a fault whose aftermath is `Aftermath.DEAD`."""
        return self._dead

    def check_alive(self, path: str) -> None:
        """Raise when the store is dead."""
        if self._dead:
            raise self._plan.error(f"Can't reach {self._target(path)}: the store is dead, as planned")

    def mutate(self, verb: str, path: str, action: Callable[[], _T]) -> _T:
        """Count and do a mutating call, or let it fail."""
        self.check_alive(path)
        with self._lock:
            self._mutations += 1
            hit = self._mutations == self._plan.mutation
        if not hit:
            return action()
        if self._plan.hang is not None:
            self.reached.set()
            self._plan.hang.wait()
            return action()
        if self._plan.moment is Moment.AFTER:
            action()
        raise self._failure(verb, path)

    def _read(self, path: str, action: Callable[[], _T]) -> _T:
        self.check_alive(path)
        with self._lock:
            self._reads += 1
            hit = self._reads == self._plan.read
        if hit and self._plan.hang is None:
            raise self._failure("read", path)
        if hit and self._plan.hang is not None:
            self.reached.set()
            self._plan.hang.wait()
        return action()

    def _failure(self, verb: str, path: str) -> Exception:
        self._dead = self._plan.aftermath is Aftermath.DEAD
        self.reached.set()
        return self._plan.error(f"Can't {verb} {self._target(path)}: it fails, as planned")

    def _altered(self, path: str, start: int, content: bytes) -> bytes:
        bit = self._plan.flipped_bits.get(path)
        if bit is None or not start <= bit // 8 < start + len(content):
            return content
        changed = bytearray(content)
        changed[bit // 8 - start] ^= 1 << bit % 8
        return bytes(changed)

    def _target(self, path: str) -> str:
        return self.location.join(path).redacted


class _FaultySink:
    def __init__(self, store: FaultyStore, path: str, sink: Sink) -> None:
        self._store = store
        self._path = path
        self._sink = sink

    def parts(self) -> Sequence[PartRange]:
        return self._sink.parts()

    def write_part(self, part: PartRange, buffers: Sequence[Buffer]) -> None:
        self._store.mutate("write", self._path, lambda: self._sink.write_part(part, buffers))

    def commit(self) -> ObjectInfo:
        return self._store.mutate("commit", self._path, self._sink.commit)

    def abort(self) -> None:
        if not self._store.is_dead:
            self._sink.abort()
