"""A store that is a dict, and a log of what was read: for tests without I/O."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence

from dcpfs.errors import ObjectNotFoundError, TransferSizeError
from dcpfs.storage.capabilities import Capabilities
from dcpfs.storage.location import Location
from dcpfs.storage.store import Buffer, ObjectInfo, PartMemory, Sink

__all__ = ["BytesStore"]


class BytesStore:
    """Objects in memory."""

    def __init__(self, objects: dict[str, bytes], *, remote: bool = True, ranged_reads: bool = True) -> None:
        self.objects = objects
        self.reads: list[tuple[str, int, int]] = []
        self.heads: list[str] = []
        self._capabilities = Capabilities(remote=remote, ranged_reads=ranged_reads)
        self._location = Location("memory://checkpoint")
        self._lock = threading.Lock()

    @property
    def location(self) -> Location:
        return self._location

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def get(self, path: str) -> bytes:
        if path not in self.objects:
            raise ObjectNotFoundError(f"no {path}")
        return self.objects[path]

    def get_tail(self, path: str, size_bytes: int) -> tuple[bytes, int]:
        data = self.get(path)
        return data[-size_bytes:], len(data)

    def read_into(self, path: str, start: int, buffers: Sequence[memoryview]) -> None:
        data = self.get(path)
        size = sum(len(buffer) for buffer in buffers)
        with self._lock:
            self.reads.append((path, start, start + size))
        if start + size > len(data):
            raise TransferSizeError(f"{path} ends at {len(data)}")
        for buffer in buffers:
            buffer[:] = data[start : start + len(buffer)]
            start += len(buffer)

    def put(self, path: str, buffers: Sequence[Buffer], *, if_absent: bool = False) -> ObjectInfo:
        self.objects[path] = b"".join(buffers)
        return self.head(path)

    def open_sink(self, path: str, size_bytes: int, *, memory: PartMemory = PartMemory.COPIED) -> Sink:
        raise NotImplementedError

    def head(self, path: str) -> ObjectInfo:
        self.heads.append(path)
        return ObjectInfo(path, len(self.get(path)))

    def exists(self, path: str) -> bool:
        return path in self.objects

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return iter(ObjectInfo(path, len(data)) for path, data in self.objects.items())

    def list_directories(self, prefix: str = "") -> Iterator[str]:
        return iter(())

    def delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            self.objects.pop(path, None)

    def close(self) -> None:
        pass
