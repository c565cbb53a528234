"""Proof that a figure stands for the right bytes.

Problem: a contender that loses or mixes tensors may be the fastest, and reading back with its own code shares
its mistakes.

Way taken: a checkpoint in torch's format is read here, entry by entry, with nothing but ``pickle``,
``torch.load`` and plain reads; every tensor must be covered once and equal what was generated, bit for bit.
What was loaded is compared directly.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh

from .files import Files, open_files
from .settings import Target
from .workloads import State, TensorSpec, differences, first_row, local

__all__ = ["check_loaded", "check_saved"]


def check_loaded(state: State, tensors: tuple[TensorSpec, ...], mesh: DeviceMesh | None) -> str | None:
    """Compare a loaded state with what was generated; the first difference in words, or None."""
    for spec in tensors:
        rows = local(state[spec.key])
        if (found := differences(spec, rows, first_row(spec, mesh))) is not None:
            return found
    return None


def check_saved(target: Target, tensors: tuple[TensorSpec, ...]) -> str | None:
    """Read a checkpoint in torch's format and compare it; the first difference in words, or None."""
    files = open_files(target)
    try:
        metadata = pickle.loads(files.read(".metadata"))
        if not isinstance(metadata, Metadata):
            return f".metadata holds a {type(metadata).__name__}"
        chunks: list[_Chunk] = []
        for spec in tensors:
            found = _find_chunks(metadata, spec)
            if isinstance(found, str):
                return found
            chunks += found
        # In the order of the files, so that a store far away is asked for long runs of bytes.
        for chunk in sorted(chunks, key=lambda each: (each.file, each.offset)):
            if (wrong := _check_chunk(files, chunk)) is not None:
                return wrong
        return None
    finally:
        files.close()


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Rows of a tensor, and the entry that holds them."""

    spec: TensorSpec
    first_row: int
    rows: int
    file: str
    offset: int
    size_bytes: int


def _find_chunks(metadata: Metadata, spec: TensorSpec) -> list[_Chunk] | str:
    """The chunks of a tensor, which together are all of its rows, each once; else what is wrong."""
    described = metadata.state_dict_metadata.get(spec.key)
    if not isinstance(described, TensorStorageMetadata):
        return f"{spec.key}: not in the checkpoint"
    if tuple(described.size) != spec.shape or described.properties.dtype != spec.dtype:
        return f"{spec.key}: described as {described.properties.dtype} {tuple(described.size)}"
    chunks = []
    for chunk in described.chunks:
        if any(chunk.offsets[1:]) or tuple(chunk.sizes[1:]) != spec.shape[1:]:
            return f"{spec.key}: a chunk is no run of rows"
        entry = metadata.storage_data[MetadataIndex(spec.key, chunk.offsets)]
        chunks.append(_Chunk(spec, chunk.offsets[0], chunk.sizes[0], entry.relative_path, entry.offset, entry.length))
    row = 0
    for each in sorted(chunks, key=lambda each: each.first_row):
        if each.rows and each.first_row != row:
            return f"{spec.key}: row {min(row, each.first_row)} is not stored exactly once"
        row += each.rows
    return chunks if row == spec.shape[0] else f"{spec.key}: {row} rows stored instead of {spec.shape[0]}"


def _check_chunk(files: Files, chunk: _Chunk) -> str | None:
    data = files.read_range(chunk.file, chunk.offset, chunk.size_bytes)
    rows = torch.load(io.BytesIO(data), weights_only=True)
    expected = (chunk.rows, *chunk.spec.shape[1:])
    if tuple(rows.shape) != expected:
        return f"{chunk.spec.key}: a chunk is of shape {tuple(rows.shape)} instead of {expected}"
    return differences(chunk.spec, rows, chunk.first_row)
