"""The metadata classes of torch on the allow-list, and the pickle of another writer's ``.metadata``.

Problem: that pickle names classes of torch that are dataclasses, whose state is set attribute by attribute, and an
enum and a path besides. Nothing else may stand in it.

Way taken: each class gets a `fill` that takes its own attributes alone. Values of its planner data and storage meta
may be anything on the general list; paths become pure ones, since the file may come from another system.

One thing of a writer's own does stand in it: the place that it was told to write to (``StorageMeta.checkpoint_id``),
which is a path of whatever class its library has for paths, and which nobody needs to read the checkpoint. So a name
that is not on the list yields a `_Foreign`, which remembers what it stands for and runs nothing. Where it is that
place, or a part of it, the place becomes None; anywhere else it is refused as before.
"""

from __future__ import annotations

import gc
import pathlib
import sys
import types
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

from dcpfs.errors import CorruptCheckpointError, UntrustedDataError
from dcpfs.format.allowlist import Global, Resolver, resolve_value
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


class _Foreign:
    """Stands for a global that is not on the list, or for what is made with one. Runs nothing.

    Attributes:
        name: The global, as text.
        parts: What it was called with or filled with.
    """

    def __init__(self, name: str, *parts: object) -> None:
        self.name = name
        self.parts: list[object] = list(parts)

    def make(self, *arguments: object) -> _Foreign:
        """What a call of it, or a new instance of it, yields."""
        return _Foreign(self.name, *arguments)


def _fill_foreign(instance: _Foreign, state: object) -> None:
    instance.parts.append(state)


_CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
"""What no pickle has made, and what leads from there to all of the program."""


def _foreign_names(value: object) -> set[str]:
    """The globals that a value and its parts stand for. Each part is looked at once, however often it is named.

    Parts are what the collector knows of, and the objects of numpy's arrays, of which it knows nothing: none is hidden
    by the kind of container or object that holds it.
    """
    numpy: Any = sys.modules.get("numpy")
    names, seen, left = set(), set(), [value]
    while left:
        part = left.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, _Foreign):
            names.add(part.name)
            left += part.parts
        elif numpy is not None and isinstance(part, numpy.ndarray) and part.dtype.hasobject:
            left += part.flat
        elif not isinstance(part, _CODE):
            left += gc.get_referents(part)
    return names


class _ForeignNames:
    """An allow-list that answers a name which is not on it by a `_Foreign`, and remembers it.

    Attributes:
        met: Module and name of each, by both as text.
    """

    def __init__(self, resolve: Resolver) -> None:
        self._resolve = resolve
        self.met: dict[str, tuple[str, str]] = {}

    def __call__(self, module: str, name: str) -> Global | None:
        found = self._resolve(module, name)
        if found is not None or module == "torch":
            return found
        text = f"{module}.{name}"
        self.met[text] = (module, name)
        foreign = _Foreign(text)
        return Global(foreign, foreign.make, foreign.make)


class _MetadataUnpickler(SafeUnpickler):
    """Lets the place that a writer noted be of a class that nobody here knows."""

    def __init__(self, data: bytes | memoryview, *, where: str) -> None:
        self._foreign = _ForeignNames(resolve_metadata)
        super().__init__(data, what=where, resolve=self._foreign)
        self._globals[id(_Foreign)] = Global(_Foreign, None, None, _fill_foreign)

    def load(self) -> Any:
        """Decode the pickle.

        Raises:
            UntrustedDataError: A name that is not on the list stands elsewhere than in the place.
            CorruptCheckpointError: It is no well-formed pickle.
        """
        try:
            loaded = super().load()
        except CorruptCheckpointError:
            self._refuse_foreign(())
            raise
        if self._foreign.met:
            self._forget_place(loaded)
        return loaded

    def _forget_place(self, loaded: object) -> None:
        meta = loaded.__dict__.get("storage_meta") if type(loaded) is metadata.Metadata else None
        if type(meta) is not metadata.StorageMeta:
            self._refuse_foreign(())
            return
        names = _foreign_names(meta.__dict__.get("checkpoint_id"))
        meta.checkpoint_id = None
        self._refuse_foreign(names - _foreign_names([vars(loaded), vars(meta)]))

    def _refuse_foreign(self, allowed: Collection[str]) -> None:
        self._resolve = resolve_metadata
        for text, (module, name) in self._foreign.met.items():
            if text not in allowed:
                self.find_class(module, name)  # which raises


def load_metadata_pickle(data: bytes | memoryview, *, where: str) -> tuple[object, int]:
    """Decode the pickle at the front of the file.

    Returns:
        What it holds, and its length in bytes.

    Raises:
        UntrustedDataError: It names a class that is not on the allow-list.
        CorruptCheckpointError: It is no well-formed pickle.
    """
    unpickler = _MetadataUnpickler(data, where=where)
    try:
        return unpickler.load(), unpickler.position_bytes
    except CorruptCheckpointError as error:
        error.file = ".metadata"
        raise
