"""Proof that a figure stands for the right bytes.

Problem: a contender that loses or mixes tensors may be the fastest, and reading back with its own code shares
its mistakes.

Way taken: a checkpoint in torch's format is read here, entry by entry, with nothing but ``pickle``,
``torch.load`` and plain reads; every tensor must be covered once and equal what was generated, bit for bit.
What was loaded is compared directly.
"""

from __future__ import annotations

import io
import math
import pickle
from pathlib import PurePosixPath
from typing import Protocol

import fsspec
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh

from .settings import PLACE_PREFIX, Setting, Target
from .sink_client import SinkConnection
from .workloads import State, TensorSpec, differences, first_row, local

__all__ = ["check_loaded", "check_saved", "remove"]


class _Files(Protocol):
    def read(self, name: str) -> bytes: ...

    def read_range(self, name: str, start: int, size_bytes: int) -> bytes: ...


class _SinkFiles:
    def __init__(self, target: Target) -> None:
        if target.port is None:
            raise ValueError("the sink has no port")
        self._sink = SinkConnection(target.port, counted=False)
        self._path = target.path

    def read(self, name: str) -> bytes:
        return self._sink.get(f"{self._path}/{name}")

    def read_range(self, name: str, start: int, size_bytes: int) -> bytes:
        data = bytearray(size_bytes)
        self._sink.get_into(f"{self._path}/{name}", [memoryview(data)], start)
        return bytes(data)


class _FsspecFiles:
    def __init__(self, target: Target) -> None:
        self._fs = fsspec.filesystem("memory" if target.setting is Setting.MEMORY else "file")
        self._path = target.path

    def read(self, name: str) -> bytes:
        data: bytes = self._fs.cat_file(f"{self._path}/{name}")
        return data

    def read_range(self, name: str, start: int, size_bytes: int) -> bytes:
        data: bytes = self._fs.cat_file(f"{self._path}/{name}", start=start, end=start + size_bytes)
        return data


def check_loaded(state: State, tensors: tuple[TensorSpec, ...], mesh: DeviceMesh | None) -> str | None:
    """Compare a loaded state with what was generated; the first difference in words, or None."""
    for spec in tensors:
        rows = local(state[spec.key])
        if (found := differences(spec, rows, first_row(spec, mesh))) is not None:
            return found
    return None


def check_saved(target: Target, tensors: tuple[TensorSpec, ...]) -> str | None:
    """Read a checkpoint in torch's format and compare it; the first difference in words, or None."""
    files: _Files = _SinkFiles(target) if target.setting.is_s3 else _FsspecFiles(target)
    metadata = pickle.loads(files.read(".metadata"))
    if not isinstance(metadata, Metadata):
        return f".metadata holds a {type(metadata).__name__}"
    for spec in tensors:
        if (found := _check_tensor(files, metadata, spec)) is not None:
            return found
    return None


def remove(target: Target) -> None:
    """Delete a checkpoint. It need not be there.

    Raises:
        ValueError: It does not lie in a place of the benchmarks: nothing else is ever deleted.
    """
    if target.setting.is_s3:
        if target.port is None:
            raise ValueError("the sink has no port")
        sink = SinkConnection(target.port, counted=False)
        sink.delete_below(f"{target.path}/")
        sink.close()
        return
    filesystem = fsspec.filesystem("memory" if target.setting is Setting.MEMORY else "file")
    if not any(part.startswith(PLACE_PREFIX) for part in PurePosixPath(target.path).parts[:-1]):
        raise ValueError(f"{target.path} is no checkpoint of a benchmark")
    if filesystem.exists(target.path):
        filesystem.rm(target.path, recursive=True)


def _check_tensor(files: _Files, metadata: Metadata, spec: TensorSpec) -> str | None:
    described = metadata.state_dict_metadata.get(spec.key)
    if not isinstance(described, TensorStorageMetadata):
        return f"{spec.key}: not in the checkpoint"
    if tuple(described.size) != spec.shape or described.properties.dtype != spec.dtype:
        return f"{spec.key}: described as {described.properties.dtype} {tuple(described.size)}"
    elements = 0
    for chunk in described.chunks:
        if any(chunk.offsets[1:]) or tuple(chunk.sizes[1:]) != spec.shape[1:]:
            return f"{spec.key}: a chunk is no run of rows"
        entry = metadata.storage_data[MetadataIndex(spec.key, chunk.offsets)]
        data = files.read_range(entry.relative_path, entry.offset, entry.length)
        rows = torch.load(io.BytesIO(data), weights_only=True)
        if tuple(rows.shape) != tuple(chunk.sizes):
            return f"{spec.key}: a chunk is of shape {tuple(rows.shape)} instead of {tuple(chunk.sizes)}"
        if (found := differences(spec, rows, chunk.offsets[0])) is not None:
            return found
        elements += math.prod(chunk.sizes)
    if elements != math.prod(spec.shape):
        return f"{spec.key}: {elements} elements stored instead of {math.prod(spec.shape)}"
    return None
