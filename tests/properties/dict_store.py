"""A store in a dict, for thousands of short runs: what `memory://` keeps is shared by the whole process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from dcpfs.errors import ObjectExistsError, ObjectNotFoundError, TransferSizeError
from dcpfs.storage.capabilities import Capabilities
from dcpfs.storage.location import Location
from dcpfs.storage.store import Buffer, ObjectInfo, PartMemory, Sink

__all__ = ["DictStore"]


class DictStore:
    """Objects by name."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    @property
    def location(self) -> Location:
        return Location("memory://dict")

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(conditional_put=True)

    def get(self, path: str) -> bytes:
        try:
            return self.objects[path]
        except KeyError:
            raise ObjectNotFoundError(f"no {path}") from None

    def get_tail(self, path: str, size_bytes: int) -> tuple[bytes, int]:
        content = self.get(path)
        return content[max(0, len(content) - size_bytes) :], len(content)

    def read_into(self, path: str, start: int, buffers: Sequence[memoryview]) -> None:
        content = self.get(path)
        for buffer in buffers:
            piece = content[start : start + len(buffer)]
            if len(piece) != len(buffer):
                raise TransferSizeError(f"{path} is shorter")
            buffer[:] = piece
            start += len(buffer)

    def put(self, path: str, buffers: Sequence[Buffer], *, if_absent: bool = False) -> ObjectInfo:
        if if_absent and path in self.objects:
            raise ObjectExistsError(f"{path} exists")
        self.objects[path] = b"".join(buffers)
        return self.head(path)

    def open_sink(self, path: str, size_bytes: int, *, memory: PartMemory = PartMemory.COPIED) -> Sink:
        raise NotImplementedError

    def head(self, path: str) -> ObjectInfo:
        return ObjectInfo(path, len(self.get(path)))

    def exists(self, path: str) -> bool:
        return path in self.objects

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        below = f"{prefix}/" if prefix else ""
        return iter([ObjectInfo(path, len(data)) for path, data in self.objects.items() if path.startswith(below)])

    def list_directories(self, prefix: str = "") -> Iterator[str]:
        below = f"{prefix}/" if prefix else ""
        names = [path[len(below) :] for path in self.objects if path.startswith(below)]
        return iter({name.split("/", maxsplit=1)[0] for name in names if "/" in name})

    def delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            self.objects.pop(path, None)

    def close(self) -> None:
        pass
