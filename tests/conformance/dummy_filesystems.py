"""Two small fsspec filesystems that nobody has listed: one async, like an object store, and one sync, like a tree.

They hold bytes in a dictionary and refuse what dcpfs must never do: glob in names, make a directory on the object
store, copy there. They remember listings, as real ones do.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar

from fsspec import AbstractFileSystem, register_implementation
from fsspec.asyn import AsyncFileSystem
from fsspec.spec import AbstractBufferedFile


class DummyError(AssertionError):
    """Something was called that must not be."""


class _UploadFile(AbstractBufferedFile):  # type: ignore[misc] # fsspec has no types
    """A multipart upload: nothing is there before the close."""

    def _initiate_upload(self) -> None:
        self.parts: list[bytes] = []

    def write(self, data: bytes | memoryview) -> int:
        self.fs.noted.append(len(data))
        return int(super().write(data))

    def _upload_chunk(self, final: bool = False) -> bool:
        self.buffer.seek(0)
        piece = self.buffer.read()
        if type(self.fs).failing_uploads > 0:
            type(self.fs).failing_uploads -= 1
            raise ConnectionResetError("the upload broke")
        self.parts.append(piece)
        if final and self.autocommit:
            self.fs.objects[self.path] = b"".join(self.parts)
            self.fs.published.append(self.path)
        return True

    def _fetch_range(self, start: int, end: int) -> bytes:
        self.fs.ranges.append((start, end))
        return bytes(self.fs.objects[self.path][start:end])


class DummyObjectStore(AsyncFileSystem):  # type: ignore[misc] # fsspec has no types
    """Like s3fs or gcsfs: flat names, async calls, file objects that upload."""

    protocol = "dummyobj"
    objects: ClassVar[dict[str, bytes]] = {}
    published: ClassVar[list[str]] = []
    ranges: ClassVar[list[tuple[int, int]]] = []
    calls: ClassVar[list[str]] = []
    noted: ClassVar[list[int]] = []
    answers: ClassVar[list[Callable[[], bytes] | None]] = []
    """What the next reads answer instead; None for the truth. (fsspec binds methods when an instance is made.)"""
    failing_uploads = 0
    instances = 0

    def __init__(self, token: str = "", **options: object) -> None:
        super().__init__(**options)
        type(self).instances += 1
        self.token = token

    async def _info(self, path: str, **_: object) -> dict[str, object]:
        self.calls.append("info")
        path = self._strip_protocol(path)
        for known in (path, self._parent(path)):
            # What a listing cache would do, if it were on.
            if known in self.dircache:
                raise DummyError("a remembered listing was used")
        if path in self.objects:
            return {"name": path, "size": len(self.objects[path]), "type": "file", "ETag": "e"}
        if any(name.startswith(f"{path}/") for name in self.objects):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    async def _ls(self, path: str, detail: bool = True, **_: object) -> list[object]:
        self.calls.append("ls")
        path = self._strip_protocol(path)
        prefix = f"{path}/" if path else ""
        found: dict[str, dict[str, object]] = {}
        for name, content in list(self.objects.items()):
            if name.startswith(prefix):
                child, slash, _rest = name[len(prefix) :].partition("/")
                kind = "directory" if slash else "file"
                size = 0 if slash else len(content)
                found[prefix + child] = {"name": prefix + child, "size": size, "type": kind}
        self.dircache[path] = list(found.values())
        if not found:
            raise FileNotFoundError(path)
        return list(found.values()) if detail else list(found)

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: object) -> bytes:
        self.calls.append("cat_file")
        answer = self.answers.pop(0) if self.answers else None
        if answer is not None:
            return answer()
        path = self._strip_protocol(path)
        if path not in self.objects:
            raise FileNotFoundError(path)
        return self.objects[path][start:end]

    async def _pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: object) -> None:
        self.calls.append("pipe_file")
        self.objects[self._strip_protocol(path)] = bytes(value)

    async def _rm_file(self, path: str, **_: object) -> None:
        self.calls.append("rm_file")
        path = self._strip_protocol(path)
        if path not in self.objects:
            raise FileNotFoundError(path)
        del self.objects[path]

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **options: object) -> _UploadFile:
        return _UploadFile(self, path, mode, block_size, **options)

    def mkdir(self, path: str, create_parents: bool = True, **_: object) -> None:
        raise DummyError(f"mkdir of {path} on an object store")

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        raise DummyError(f"makedirs of {path} on an object store")

    async def _mkdir(self, path: str, **_: object) -> None:
        raise DummyError(f"mkdir of {path} on an object store")

    async def _makedirs(self, path: str, exist_ok: bool = False) -> None:
        raise DummyError(f"makedirs of {path} on an object store")

    async def _cp_file(self, path1: str, path2: str, **_: object) -> None:
        raise DummyError(f"copy of {path1} on an object store")

    async def _glob(self, path: str, **_: object) -> None:
        raise DummyError(f"glob of {path}")

    async def _expand_path(self, path: str, **_: object) -> None:
        raise DummyError(f"expansion of {path}")


class _TreeFile(io.BytesIO):
    """A file of a tree: what is written shows at once, whole or not."""

    def __init__(self, fs: DummyTree, path: str) -> None:
        super().__init__()
        self.fs, self.path = fs, path
        fs.files[path] = b""

    def write(self, data: bytes | memoryview) -> int:  # type: ignore[override] # what dcpfs hands over
        piece = bytes(data)
        self.fs.noted.append(len(piece))
        if type(self.fs).failing_writes > 0:
            type(self.fs).failing_writes -= 1
            raise BrokenPipeError("the connection broke")
        written = super().write(piece)
        self.fs.files[self.path] = self.getvalue()
        return written


class DummyTree(AbstractFileSystem):  # type: ignore[misc] # fsspec has no types
    """Like sftp, ftp, smb and webdav at their worst.

    Half a file is visible, a rename replaces nothing, removing a directory by name takes what is in it, and a
    file is listed as if it held itself.
    """

    protocol = "dummytree"
    root_marker = "/"
    files: ClassVar[dict[str, bytes]] = {}
    directories: ClassVar[set[str]] = {"/"}
    noted: ClassVar[list[int]] = []
    lock: ClassVar[threading.RLock] = threading.RLock()
    failing_writes = 0

    def _require_directory(self, path: str) -> None:
        if self._parent(path) not in self.directories:
            raise FileNotFoundError(self._parent(path))

    def info(self, path: str, **_: object) -> dict[str, object]:
        path = self._strip_protocol(path)
        if path in self.files:
            return {"name": path, "size": len(self.files[path]), "type": "file", "mtime": 1.5}
        if path in self.directories:
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def ls(self, path: str, detail: bool = True, **_: object) -> list[object]:
        path = self._strip_protocol(path)
        if path in self.files:
            return [{**self.info(path), "name": f"{path}/{path.rpartition('/')[2]}"}]
        if path not in self.directories:
            raise FileNotFoundError(path)
        names = [name for name in [*self.files, *self.directories] if name != "/" and self._parent(name) == path]
        return [self.info(name) if detail else name for name in names]

    def mkdir(self, path: str, create_parents: bool = True, **_: object) -> None:
        raise DummyError("makedirs is used")

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        with self.lock:
            path = self._strip_protocol(path)
            while path != "/":
                self.directories.add(path)
                path = self._parent(path)

    def rmdir(self, path: str) -> None:
        with self.lock:
            if self.ls(path):
                raise OSError(39, "Directory not empty")
            self.directories.discard(self._strip_protocol(path))

    def rm_file(self, path: str) -> None:
        path = self._strip_protocol(path)
        if path in self.directories:
            for name in [name for name in self.files if name.startswith(f"{path}/")]:
                del self.files[name]
            return
        try:
            del self.files[path]
        except KeyError:
            raise FileNotFoundError(path) from None

    def mv(self, path1: str, path2: str, **_: object) -> None:
        with self.lock:
            if path2 in self.files:
                raise FileExistsError(path2)
            self.files[path2] = self.files.pop(path1)

    def _open(self, path: str, mode: str = "rb", **_: object) -> io.BytesIO:
        with self.lock:
            if mode == "rb":
                if path not in self.files:
                    raise FileNotFoundError(path)
                return io.BytesIO(self.files[path])
            self._require_directory(path)
            return _TreeFile(self, path)

    def glob(self, path: str, **_: object) -> None:
        raise DummyError(f"glob of {path}")

    def expand_path(self, path: str, **_: object) -> None:
        raise DummyError(f"expansion of {path}")


@contextmanager
def registered_dummies() -> Iterator[None]:
    """Make ``dummyobj://`` and ``dummytree://`` known and empty."""
    register_implementation("dummyobj", DummyObjectStore, clobber=True)
    register_implementation("dummytree", DummyTree, clobber=True)
    for kept in (
        DummyObjectStore.objects,
        DummyObjectStore.published,
        DummyObjectStore.ranges,
        DummyObjectStore.calls,
        DummyObjectStore.answers,
        DummyTree.files,
    ):
        kept.clear()
    DummyTree.directories.clear()
    DummyTree.directories.add("/")
    yield
