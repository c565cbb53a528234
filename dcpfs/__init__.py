"""dcpfs: PyTorch Distributed Checkpoint on any fsspec URL.

``import dcpfs`` is cheap: torch and the storage clients are imported when a name that needs them is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from dcpfs._version import __version__

if TYPE_CHECKING:
    from dcpfs.config import (
        CastPolicy,
        DirectIO,
        Durability,
        ReplicaReads,
        RetryConfig,
        TransferConfig,
        Trust,
        VerifyMode,
    )
    from dcpfs.dcp.load import LoadReport, load, read
    from dcpfs.dcp.load_planner import LoadPlanner
    from dcpfs.dcp.reader import FsspecStorageReader
    from dcpfs.dcp.save import SaveReport, save
    from dcpfs.dcp.save_planner import SavePlanner
    from dcpfs.dcp.writer import FsspecStorageWriter
    from dcpfs.errors import (
        BucketNotFoundError,
        CheckpointError,
        CheckpointExistsError,
        CheckpointNotFoundError,
        ConfigError,
        CorruptCheckpointError,
        CredentialsError,
        DcpfsError,
        IncompleteCheckpointError,
        KeyMismatchError,
        MissingBackendError,
        ObjectExistsError,
        ObjectNotFoundError,
        PermissionDeniedError,
        RankError,
        ReplicaMismatchError,
        StorageError,
        StorageFullError,
        StorageTimeoutError,
        TransferSizeError,
        UnsupportedOperationError,
        UnsupportedValueError,
        UntrustedDataError,
    )
    from dcpfs.storage.location import Location

_HOMES = {
    "dcpfs.config": (
        "CastPolicy",
        "DirectIO",
        "Durability",
        "ReplicaReads",
        "RetryConfig",
        "TransferConfig",
        "Trust",
        "VerifyMode",
    ),
    "dcpfs.dcp.load": ("LoadReport", "load", "read"),
    "dcpfs.dcp.load_planner": ("LoadPlanner",),
    "dcpfs.dcp.reader": ("FsspecStorageReader",),
    "dcpfs.dcp.save": ("SaveReport", "save"),
    "dcpfs.dcp.save_planner": ("SavePlanner",),
    "dcpfs.dcp.writer": ("FsspecStorageWriter",),
    "dcpfs.errors": (
        "BucketNotFoundError",
        "CheckpointError",
        "CheckpointExistsError",
        "CheckpointNotFoundError",
        "ConfigError",
        "CorruptCheckpointError",
        "CredentialsError",
        "DcpfsError",
        "IncompleteCheckpointError",
        "KeyMismatchError",
        "MissingBackendError",
        "ObjectExistsError",
        "ObjectNotFoundError",
        "PermissionDeniedError",
        "RankError",
        "ReplicaMismatchError",
        "StorageError",
        "StorageFullError",
        "StorageTimeoutError",
        "TransferSizeError",
        "UnsupportedOperationError",
        "UnsupportedValueError",
        "UntrustedDataError",
    ),
    "dcpfs.storage.location": ("Location",),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "BucketNotFoundError",
    "CastPolicy",
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "ConfigError",
    "CorruptCheckpointError",
    "CredentialsError",
    "DcpfsError",
    "DirectIO",
    "Durability",
    "FsspecStorageReader",
    "FsspecStorageWriter",
    "IncompleteCheckpointError",
    "KeyMismatchError",
    "LoadPlanner",
    "LoadReport",
    "Location",
    "MissingBackendError",
    "ObjectExistsError",
    "ObjectNotFoundError",
    "PermissionDeniedError",
    "RankError",
    "ReplicaMismatchError",
    "ReplicaReads",
    "RetryConfig",
    "SavePlanner",
    "SaveReport",
    "StorageError",
    "StorageFullError",
    "StorageTimeoutError",
    "TransferConfig",
    "TransferSizeError",
    "Trust",
    "UnsupportedOperationError",
    "UnsupportedValueError",
    "UntrustedDataError",
    "VerifyMode",
    "__version__",
    "load",
    "read",
    "save",
]


def __getattr__(name: str) -> object:
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'dcpfs' has no attribute {name!r}")
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
