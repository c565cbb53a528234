"""The hands of preparation and verification: files of a place, read, written, listed and deleted plainly.

Problem: what is checked or made with dcpfs's own stores shares their mistakes, and asks a server for what is then
counted as the contender's.

Way taken: the sink is asked over one raw connection whose requests are neither delayed nor counted, everything else by
fsspec alone and past the proxy. Small reads of one file are served from blocks, so that a store far away is asked
seldom.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import IO, Literal, Protocol

import fsspec

from dcpfs.storage.filesystems import Publishing, open_filesystem
from dcpfs.storage.location import Location

from .settings import BUCKET, PLACE_PREFIX, Setting, Target
from .sink_client import SinkConnection

__all__ = [
    "Files",
    "filesystem_of",
    "import_filesystem",
    "open_files",
    "open_for",
    "remove",
    "sync_file",
    "writable_filesystem_of",
]

_BLOCK_BYTES = 16 << 20
_WRITERS = 16


class Files(Protocol):
    """Files below one target, by their names relative to it."""

    def read(self, name: str) -> bytes:
        """A whole file."""
        ...

    def read_range(self, name: str, start: int, size_bytes: int) -> bytes:
        """Part of one."""
        ...

    def write_all(self, files: dict[str, bytes]) -> None:
        """Write files, in no order."""
        ...

    def sizes(self) -> dict[str, int]:
        """Every file with its size in bytes."""
        ...

    def close(self) -> None:
        """Let go of what was opened."""
        ...


def open_files(target: Target) -> Files:
    """Open the files of a target; for one thread."""
    return _SinkFiles(target) if target.setting.is_s3 else _FsspecFiles(target.direct())


def remove(target: Target) -> None:
    """Delete a checkpoint. It need not be there.

    Raises:
        ValueError: It does not lie in a place of the benchmarks: nothing else is ever deleted.
    """
    if target.setting.is_s3:
        sink = _connect(target)
        sink.delete_below(f"{target.path}/")
        sink.close()
        return
    parts = PurePosixPath(target.path).parts
    # Below the user's URL the directory of a run is the first name of the path itself.
    marked = parts[:1] if target.setting is Setting.URL else parts[:-1]
    if ".." in parts or not any(part.startswith(PLACE_PREFIX) for part in marked):
        raise ValueError(f"{target.path} is no checkpoint of a benchmark")
    filesystem, path, _ = _open(target.direct())
    if filesystem.exists(path):
        filesystem.rm(path, recursive=True)


def sync_file(path: str | Path) -> None:
    """Bring a local file to the device, for a contender that does not."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _SinkFiles:
    def __init__(self, target: Target) -> None:
        self._sink = _connect(target)
        self._path = target.path

    def read(self, name: str) -> bytes:
        return self._sink.get(f"{self._path}/{name}")

    def read_range(self, name: str, start: int, size_bytes: int) -> bytes:
        data = bytearray(size_bytes)
        self._sink.get_into(f"{self._path}/{name}", [memoryview(data)], start)
        return bytes(data)

    def write_all(self, files: dict[str, bytes]) -> None:
        for name, content in files.items():
            self._sink.put(f"{self._path}/{name}", [memoryview(content)])

    def sizes(self) -> dict[str, int]:
        prefix = f"{self._path}/"
        return {name.removeprefix(prefix): size for name, size in self._sink.sizes(prefix).items()}

    def close(self) -> None:
        self._sink.close()


class _FsspecFiles:
    def __init__(self, target: Target) -> None:
        self._fs, self._path, self._has_directories = _open(target)
        self._block_name = ""
        self._block_start = 0
        self._block = b""

    def read(self, name: str) -> bytes:
        data: bytes = self._fs.cat_file(f"{self._path}/{name}")
        return data

    def read_range(self, name: str, start: int, size_bytes: int) -> bytes:
        at = start - self._block_start
        if name != self._block_name or at < 0 or at + size_bytes > len(self._block):
            end = start + max(size_bytes, _BLOCK_BYTES)
            self._block = self._fs.cat_file(f"{self._path}/{name}", start=start, end=end)
            self._block_name, self._block_start, at = name, start, 0
        return self._block[at : at + size_bytes]

    def write_all(self, files: dict[str, bytes]) -> None:
        if self._has_directories:
            for parent in {str(PurePosixPath(name).parent) for name in files}:
                self._fs.makedirs(f"{self._path}/{parent}", exist_ok=True)
        with ThreadPoolExecutor(_WRITERS) as pool:
            list(pool.map(lambda name: self._fs.pipe_file(f"{self._path}/{name}", files[name]), files))

    def sizes(self) -> dict[str, int]:
        self._fs.invalidate_cache()
        if not self._fs.exists(self._path):
            return {}
        root = self._fs._strip_protocol(self._path).rstrip("/")
        found = self._fs.find(root, detail=True)
        return {name.removeprefix(root).lstrip("/"): int(each["size"]) for name, each in found.items()}

    def close(self) -> None:
        """Nothing to do: connections of fsspec stay for the life of the process."""


def filesystem_of(target: Target) -> tuple[fsspec.AbstractFileSystem, str]:
    """A new filesystem for contenders, and the target's path in it: through the proxy, delayed and counted."""
    filesystem, path, _ = _open_for_contenders(target)
    return filesystem, path


def writable_filesystem_of(target: Target) -> tuple[fsspec.AbstractFileSystem, str]:
    """The same, with the target's directory made where the filesystem has directories."""
    filesystem, path, has_directories = _open_for_contenders(target)
    if has_directories:
        filesystem.makedirs(path, exist_ok=True)
    return filesystem, path


def import_filesystem(target: Target) -> None:
    """Import what fsspec would import at the first use of a target's scheme."""
    fsspec.get_filesystem_class(target.scheme)


def open_for(target: Target, name: str, mode: Literal["rb", "wb"]) -> IO[bytes]:
    """Open a file of a target as contenders without classes of their own do."""
    filesystem, root = filesystem_of(target) if mode == "rb" else writable_filesystem_of(target)
    stream: IO[bytes] = filesystem.open(f"{root}/{name}", mode)
    return stream


def _open_for_contenders(target: Target) -> tuple[fsspec.AbstractFileSystem, str, bool]:
    if not target.setting.is_s3:
        return _open(target)
    options = {"skip_instance_cache": True, "use_listings_cache": False, **target.storage_options()}
    return fsspec.filesystem("s3", **options), f"{BUCKET}/{target.path}", False


def _open(target: Target) -> tuple[fsspec.AbstractFileSystem, str, bool]:
    """Filesystem, path in it, and whether directories have to be made."""
    if target.setting is Setting.URL:
        opened = open_filesystem(Location(target.url, target.storage_options()))
        return opened.filesystem, opened.root, opened.traits.publishing is Publishing.MOVE
    memory = target.setting is Setting.MEMORY
    return fsspec.filesystem("memory" if memory else "file"), target.path, not memory


def _connect(target: Target) -> SinkConnection:
    if target.port is None:
        raise ValueError("the sink has no port")
    return SinkConnection(target.port, counted=False)
