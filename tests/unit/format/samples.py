"""Metadata that the tests of the index share."""

from __future__ import annotations

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcpfs.format.index import EntryLocation


def chunk(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def make_metadata() -> Metadata:
    """Two tensors, one of them in two chunks of two files, a scalar, an empty tensor and a value."""
    own = TensorProperties(torch.float32)
    other = TensorProperties(torch.bfloat16, requires_grad=True)
    state: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
        "model.weight": TensorStorageMetadata(own, torch.Size((4, 3)), [chunk((0, 0), (1, 3)), chunk((1, 0), (3, 3))]),
        "model.bias": TensorStorageMetadata(other, torch.Size((300,)), [chunk((0,), (300,))]),
        "step": TensorStorageMetadata(own, torch.Size(()), [chunk((), ())]),
        "empty": TensorStorageMetadata(own, torch.Size((0, 5)), [chunk((0, 0), (0, 5))]),
        "größe/\u2028": BytesStorageMetadata(),
    }
    storage = {
        MetadataIndex("model.weight", torch.Size((0, 0)), 0): EntryLocation("__0_0.distcp", 0, 1600, 704, 5),
        MetadataIndex("model.weight", torch.Size((1, 0)), 1): EntryLocation(
            "__1_0.distcp", 0, 1650, 704, 7, ("zstd", "x")
        ),
        MetadataIndex("model.bias", torch.Size((0,)), 0): EntryLocation("__0_0.distcp", 1600, 2300, 768, 0xFFFFFFFF),
        MetadataIndex("step", torch.Size(()), 0): EntryLocation("sub/dir/__0_1.distcp", 1 << 40, 1500, 704, 0),
        MetadataIndex("empty", torch.Size((0, 0)), 0): EntryLocation("__0_0.distcp", 3900, 1500, 704, 0),
        MetadataIndex("größe/\u2028"): EntryLocation("__0_0.distcp", 5400, 900, 0, 9),
    }
    paths: dict[str, tuple[str | int, ...]] = {
        "model.weight": ("model", "weight"),
        "model.bias": ("model", 3, "bias"),
        "step": ("step",),
        "gone": ("gone", 1),
    }
    meta = StorageMeta("memory://bucket/run", "save-1", None, ["torch.distributed"])
    return Metadata(state, paths, storage, meta, "1.0.0")


def as_torch_holds_it(metadata: Metadata) -> Metadata:
    """The metadata with torch's storage records."""
    storage = {
        index: _StorageInfo(at.file, at.offset_bytes, at.length_bytes, list(at.transforms) or None)
        for index, at in metadata.storage_data.items()
    }
    return Metadata(
        metadata.state_dict_metadata, metadata.planner_data, storage, metadata.storage_meta, metadata.version
    )
