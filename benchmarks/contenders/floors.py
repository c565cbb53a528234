"""What the machine allows: the same bytes with no library, no format, no checksum and no plan in between.

The state is taken as one run of bytes in the order of its keys, cut into parts of 16 MiB that name tensor
memory directly. Sockets: four threads, a connection each, kept between calls. A plain client: the filesystem's own
put and get, four at a time, which take and give parts as bytes. Files: two threads of pwritev and preadv. A copy: one
file, by the kernel, as ``cp`` does it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from ..files import filesystem_of, import_filesystem, sync_file, writable_filesystem_of
from ..settings import Target
from ..sink_client import SinkConnection
from ..workloads import State
from . import Layout, Scope

__all__ = ["FileCopy", "Files", "Memcpy", "PlainClient", "Sockets"]

_PART_BYTES = 16 << 20
_VECTOR = 512
_SOCKETS = 4
_FILE_THREADS = 2


@dataclass
class _Part:
    number: int
    start: int
    views: list[memoryview] = field(default_factory=list)
    size_bytes: int = 0


def _parts(state: State) -> Iterator[_Part]:
    part = _Part(0, 0)
    for tensor in state.values():
        array = tensor.detach().reshape(-1).view(torch.uint8).numpy()
        view = memoryview(array)  # type: ignore[arg-type] # numpy declares the buffer protocol from 3.12 on
        while view:
            piece = view[: _PART_BYTES - part.size_bytes]
            part.views.append(piece)
            part.size_bytes += len(piece)
            view = view[len(piece) :]
            if part.size_bytes == _PART_BYTES:
                yield part
                part = _Part(part.number + 1, part.start + part.size_bytes)
    if part.size_bytes:
        yield part


class Sockets:
    """Raw PUT and GET to the sink, one object a part."""

    layout = Layout.PRIVATE
    sharding = False

    def __init__(self) -> None:
        self._idle: list[SinkConnection] = []

    def available(self) -> str | None:
        """Always."""
        return None

    def save(self, state: State, target: Target) -> None:
        """PUT every part."""
        self._each(state, target, lambda sink, key, views: sink.put(key, views))

    def load(self, template: State, target: Target, scope: Scope) -> None:
        """GET every part."""
        del scope
        self._each(template, target, lambda sink, key, views: sink.get_into(key, views))

    def _each(
        self, state: State, target: Target, move: Callable[[SinkConnection, str, list[memoryview]], None]
    ) -> None:
        if target.port is None:
            raise ValueError("the sink has no port")
        port = target.port

        def run(part: _Part) -> None:
            sink = self._idle.pop() if self._idle else SinkConnection(port, counted=True)
            move(sink, f"{target.path}/{part.number:05d}", part.views)
            self._idle.append(sink)

        with ThreadPoolExecutor(_SOCKETS) as pool:
            list(pool.map(run, _parts(state)))


class PlainClient:
    """The filesystem's own ``pipe_file`` and ``cat_file``, one object a part."""

    layout = Layout.PRIVATE
    sharding = False

    def available(self) -> str | None:
        """Always."""
        return None

    def import_modules(self, target: Target) -> None:
        """The filesystem."""
        import_filesystem(target)

    def save(self, state: State, target: Target) -> None:
        """Put every part."""
        filesystem, root = writable_filesystem_of(target)

        def put(part: _Part) -> None:
            filesystem.pipe_file(f"{root}/{part.number:05d}", b"".join(part.views))

        with ThreadPoolExecutor(_SOCKETS) as pool:
            list(pool.map(put, _parts(state)))

    def load(self, template: State, target: Target, scope: Scope) -> None:
        """Get every part."""
        del scope
        filesystem, root = filesystem_of(target)

        def get(part: _Part) -> None:
            data = memoryview(filesystem.cat_file(f"{root}/{part.number:05d}"))
            for view in part.views:
                view[:] = data[: len(view)]
                data = data[len(view) :]

        with ThreadPoolExecutor(_SOCKETS) as pool:
            list(pool.map(get, _parts(template)))


class Files:
    """One file, positioned vectored I/O, an fsync at the end."""

    layout = Layout.PRIVATE
    sharding = False

    def available(self) -> str | None:
        """None where the system has pwritev."""
        return None if hasattr(os, "pwritev") else "no pwritev on this system"

    def save(self, state: State, target: Target) -> None:
        """Write every part."""
        _write(state, f"{_directory(target)}/data")

    def load(self, template: State, target: Target, scope: Scope) -> None:
        """Read every part."""
        del scope
        _read(template, f"{_directory(target)}/data")


class FileCopy:
    """``cp`` of one file with the same bytes. It is written before the clock starts, and read after it has stopped."""

    layout = Layout.PRIVATE
    sharding = False

    def available(self) -> str | None:
        """None where the system has pwritev."""
        return None if hasattr(os, "pwritev") else "no pwritev on this system"

    def arrange(self, state: State, target: Target) -> None:
        """Write what will be copied."""
        _write(state, f"{_directory(target)}/source")

    def save(self, state: State, target: Target) -> None:
        """Copy it, and see to it that the copy is on the device."""
        del state
        _copy(f"{_directory(target)}/source", f"{_directory(target)}/data")

    def load(self, template: State, target: Target, scope: Scope) -> None:
        """Copy it back."""
        del template, scope
        _copy(f"{_directory(target)}/data", f"{_directory(target)}/copy")

    def settle(self, template: State, target: Target) -> None:
        """Read the second copy."""
        _read(template, f"{_directory(target)}/copy")
        os.unlink(f"{_directory(target)}/copy")


def _copy(source: str, target: str) -> None:
    shutil.copyfile(source, target)
    sync_file(target)


def _write(state: State, path: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
    try:
        _in_parts(state, lambda part: _move(os.pwritev, descriptor, part))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read(template: State, path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _in_parts(template, lambda part: _move(os.preadv, descriptor, part))
    finally:
        os.close(descriptor)


def _in_parts(state: State, run: Callable[[_Part], None]) -> None:
    with ThreadPoolExecutor(_FILE_THREADS) as pool:
        list(pool.map(run, _parts(state)))


def _directory(target: Target) -> str:
    if target.directory is None:
        raise ValueError(f"this floor is about local files, not {target.scheme}")
    return target.directory


def _move(call: Callable[[int, list[memoryview], int], int], descriptor: int, part: _Part) -> None:
    views, at = part.views, part.start
    while views:
        moved = call(descriptor, views[:_VECTOR], at)
        if not moved:
            raise EOFError(f"the file ends at byte {at}")
        at += moved
        while views and moved >= len(views[0]):
            moved -= len(views[0])
            views = views[1:]
        if moved:
            views = [views[0][moved:], *views[1:]]


class Memcpy:
    """A copy into memory that has been touched before, by two threads. Save and load within one process."""

    layout = Layout.PRIVATE
    sharding = False

    def __init__(self) -> None:
        self._copy: State = {}

    def available(self) -> str | None:
        """Always."""
        return None

    def save(self, state: State, target: Target) -> None:
        """Copy out; the first call also allocates."""
        del target
        if not self._copy:
            self._copy = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
        self._run(self._copy, state)

    def load(self, template: State, target: Target, scope: Scope) -> None:
        """Copy back."""
        del target, scope
        self._run(template, self._copy)

    def _run(self, to: State, source: State) -> None:
        with ThreadPoolExecutor(_FILE_THREADS) as pool:
            list(pool.map(lambda key: to[key].copy_(source[key]), to))
