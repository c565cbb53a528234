"""The metadata classes of torch on the allow-list, and the pickle of another writer's ``.metadata``.

Problem: that pickle names classes of torch that are dataclasses, whose state is set attribute by attribute, and an
enum and a path besides. Nothing else may stand in it.

Way taken: each class gets a `fill` that takes its own attributes alone. Values of its planner data and storage meta
may be anything on the general list; paths become pure ones, since the file may come from another system.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

from dcpfs.errors import CorruptCheckpointError, UntrustedDataError
from dcpfs.format.allowlist import Global, resolve_value
from dcpfs.format.unpickling import SafeUnpickler

__all__ = ["STRUCTURE_ATTRIBUTE", "load_metadata_pickle", "resolve_metadata"]

STRUCTURE_ATTRIBUTE = "dcpfs_structure"
"""Attribute of torch's ``Metadata`` that carries the structure of the state (`dcpfs.dcp.flatten`) from the planner to
the writer. A writer of torch's own pickles it with the rest."""


def _fill_with(*names: str) -> Callable[[Any, object], None]:
    allowed = frozenset(names)

    def fill(instance: Any, state: object) -> None:
        if type(state) is not dict or not allowed.issuperset(state):
            raise UntrustedDataError(f"a state of {type(instance).__qualname__} has attributes that it does not have")
        instance.__dict__.update(state)

    return fill


def _fill_index(instance: metadata.MetadataIndex, state: object) -> None:
    # It is a key and gets hashed as soon as it stands there.
    if (
        type(state) is not dict
        or not {"fqn", "offset", "index"}.issuperset(state)
        or type(state.get("fqn")) is not str
        or type(state.get("offset")) not in (torch.Size, type(None))
        or type(state.get("index")) not in (int, type(None))
    ):
        raise UntrustedDataError("a state of MetadataIndex is malformed")
    instance.__dict__.update(state)


def _fill_nothing(instance: object, state: object) -> None:
    if state not in (None, {}):
        raise UntrustedDataError(f"a state of {type(instance).__qualname__} has attributes that it does not have")


def _fill_properties(instance: metadata.TensorProperties, state: object) -> None:
    kinds = (torch.dtype, torch.layout, bool, metadata._MEM_FORMAT_ENCODING, bool)
    if (
        type(state) is not tuple
        or len(state) != len(kinds)
        or not all(isinstance(value, kind) for value, kind in zip(state, kinds, strict=True))
    ):
        raise UntrustedDataError("a state of TensorProperties is malformed")
    instance.__setstate__(state)  # type: ignore[no-untyped-call]  # torch has no annotation there


def _dataclass(kind: Any, *names: str) -> Global:
    return Global(kind, None, lambda: kind.__new__(kind), _fill_with(*names) if names else _fill_nothing)


_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
_CLASSES = {
    (_METADATA, "Metadata"): _dataclass(
        metadata.Metadata,
        *("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version", STRUCTURE_ATTRIBUTE),
    ),
    (_METADATA, "MetadataIndex"): Global(
        metadata.MetadataIndex, None, lambda: metadata.MetadataIndex.__new__(metadata.MetadataIndex), _fill_index
    ),
    (_METADATA, "TensorStorageMetadata"): _dataclass(metadata.TensorStorageMetadata, "properties", "size", "chunks"),
    (_METADATA, "BytesStorageMetadata"): _dataclass(metadata.BytesStorageMetadata),
    (_METADATA, "ChunkStorageMetadata"): _dataclass(metadata.ChunkStorageMetadata, "offsets", "sizes"),
    (_METADATA, "StorageMeta"): _dataclass(metadata.StorageMeta, "checkpoint_id", "save_id", "load_id", "modules"),
    (_METADATA, "TensorProperties"): Global(
        metadata.TensorProperties,
        None,
        lambda: metadata.TensorProperties.__new__(metadata.TensorProperties),
        _fill_properties,
    ),
    (_METADATA, "_MEM_FORMAT_ENCODING"): Global(metadata._MEM_FORMAT_ENCODING, metadata._MEM_FORMAT_ENCODING),
    (_FILESYSTEM, "_StorageInfo"): _dataclass(
        filesystem._StorageInfo, "relative_path", "offset", "length", "transform_descriptors"
    ),
    (_FILESYSTEM, "_StoragePrefix"): _dataclass(filesystem._StoragePrefix, "prefix"),
}

_PURE = {
    "PosixPath": pathlib.PurePosixPath,
    "PurePosixPath": pathlib.PurePosixPath,
    "WindowsPath": pathlib.PureWindowsPath,
    "PureWindowsPath": pathlib.PureWindowsPath,
    "Path": pathlib.PurePath,
    "PurePath": pathlib.PurePath,
}


def resolve_metadata(module: str, name: str) -> Global | None:
    """The entry for a name in ``.metadata``, or None when it is refused."""
    found = _CLASSES.get((module, name))
    if found is not None:
        return found
    found = resolve_value(module, name)
    if found is not None and module.partition(".")[0] == "pathlib":
        kind = _PURE[name]
        return Global(kind, lambda *parts: kind(*[str(part) for part in parts]))
    return found


def load_metadata_pickle(data: bytes | memoryview, *, where: str) -> tuple[object, int]:
    """Decode the pickle at the front of the file.

    Returns:
        What it holds, and its length in bytes.

    Raises:
        UntrustedDataError: It names a class that is not on the allow-list.
        CorruptCheckpointError: It is no well-formed pickle.
    """
    unpickler = SafeUnpickler(data, what=where, resolve=resolve_metadata)
    try:
        return unpickler.load(), unpickler.position_bytes
    except CorruptCheckpointError as error:
        error.file = ".metadata"
        raise
