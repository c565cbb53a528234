"""A store in memory that is strict about the seam, records every call, and fails where it is told to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

from dcpfs.errors import ObjectExistsError, ObjectNotFoundError, TransferSizeError
from dcpfs.storage.capabilities import Capabilities
from dcpfs.storage.location import Location
from dcpfs.storage.store import Buffer, ObjectInfo, PartMemory, PartRange

__all__ = ["MemoryStore"]

Hook = Callable[[str, str], None]


class MemoryStore:
    """Objects in a dict.

    Attributes:
        objects: What is visible, by name.
        calls: Verb and name of every mutating call, in order.
        open_sinks: Sinks neither committed nor aborted.
        sink_memory: What the parts of each object were said to take.
    """

    def __init__(self, *, part_bytes: int = 1 << 16, parallel_parts: bool = True, hook: Hook | None = None) -> None:
        self.objects: dict[str, bytes] = {}
        self.calls: list[tuple[str, str]] = []
        self.open_sinks: set[MemorySink] = set()
        self.sink_memory: dict[str, PartMemory] = {}
        self.part_bytes = part_bytes
        self.hook = hook
        self.closed = False
        self.lock = threading.Lock()
        self._capabilities = Capabilities(parallel_parts=parallel_parts, remote=True)

    @property
    def location(self) -> Location:
        return Location("memory://fake")

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def note(self, verb: str, path: str) -> None:
        with self.lock:
            self.calls.append((verb, path))
        if self.hook is not None:
            self.hook(verb, path)

    def get(self, path: str) -> bytes:
        if path not in self.objects:
            raise ObjectNotFoundError(f"no {path}")
        return self.objects[path]

    def get_tail(self, path: str, size_bytes: int) -> tuple[bytes, int]:
        data = self.get(path)
        return data[max(0, len(data) - size_bytes) :], len(data)

    def read_into(self, path: str, start: int, buffers: Sequence[memoryview]) -> None:
        data = self.get(path)
        for buffer in buffers:
            buffer[:] = data[start : start + len(buffer)]
            start += len(buffer)

    def put(self, path: str, buffers: Sequence[Buffer], *, if_absent: bool = False) -> ObjectInfo:
        self.note("put", path)
        if if_absent and path in self.objects:
            raise ObjectExistsError(f"{path} exists")
        self.objects[path] = b"".join(buffers)
        return self.head(path)

    def open_sink(self, path: str, size_bytes: int, *, memory: PartMemory = PartMemory.COPIED) -> MemorySink:
        self.note("open", path)
        self.sink_memory[path] = memory
        sink = MemorySink(self, path, size_bytes)
        self.open_sinks.add(sink)
        return sink

    def head(self, path: str) -> ObjectInfo:
        return ObjectInfo(path, len(self.get(path)))

    def exists(self, path: str) -> bool:
        return path in self.objects

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        assert prefix == ""
        return iter([ObjectInfo(path, len(data)) for path, data in self.objects.items()])

    def list_directories(self, prefix: str = "") -> Iterator[str]:
        return iter(())

    def delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            self.note("delete", path)
            self.objects.pop(path, None)

    def close(self) -> None:
        self.closed = True


class MemorySink:
    """One object being written."""

    def __init__(self, store: MemoryStore, path: str, size_bytes: int) -> None:
        self._store = store
        self._path = path
        self._data = bytearray(size_bytes)
        self._written: set[PartRange] = set()
        self._next = 0
        size = store.part_bytes
        self._parts = [PartRange(at, min(at + size, size_bytes)) for at in range(0, size_bytes, size)]
        self._parts = self._parts or [PartRange(0, 0)]

    def parts(self) -> Sequence[PartRange]:
        return self._parts

    def write_part(self, part: PartRange, buffers: Sequence[Buffer]) -> None:
        assert part in self._parts
        if not self._store.capabilities.parallel_parts:
            assert part == self._parts[self._next], "parts must come in order"
            self._next += 1
        self._store.note("part", self._path)
        data = b"".join(buffers)
        assert len(data) == part.size_bytes
        self._data[part.start : part.stop] = data
        self._written.add(part)

    def commit(self) -> ObjectInfo:
        self._store.note("commit", self._path)
        if len(self._written) != len(self._parts):
            raise TransferSizeError(f"{self._path} lacks parts")
        self._store.objects[self._path] = bytes(self._data)
        self._store.open_sinks.discard(self)
        return self._store.head(self._path)

    def abort(self) -> None:
        self._store.note("abort", self._path)
        self._store.open_sinks.discard(self)
