"""dcpfs: PyTorch Distributed Checkpoint on any fsspec URL.

``import dcpfs`` is cheap: torch and the storage clients are imported when a name that needs them is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from dcpfs._version import __version__

if TYPE_CHECKING:
    from dcpfs.checkpointer.callbacks import CheckpointCallback
    from dcpfs.checkpointer.checkpointer import DistributedCheckpointer
    from dcpfs.checkpointer.choices import (
        Access,
        AsyncMode,
        BestMode,
        DedupPolicy,
        OnExisting,
        OnProcessLoss,
        OnSaveError,
        RngPolicy,
        WhenBusy,
        WorldSizePolicy,
    )
    from dcpfs.checkpointer.config import CheckpointConfig
    from dcpfs.checkpointer.model_only import load_checkpoint, save_checkpoint
    from dcpfs.checkpointer.model_state import ModelWrapper
    from dcpfs.checkpointer.optimizer_state import OptimizersWrapper
    from dcpfs.checkpointer.preemption import shield_worker
    from dcpfs.checkpointer.rank_state import RankResize
    from dcpfs.checkpointer.rename_planner import RenameLoadPlanner
    from dcpfs.checkpointer.scheduler_state import SchedulersWrapper
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
        DamagedObjectError,
        DcpfsError,
        IncompleteCheckpointError,
        KeyMismatchError,
        LinkOutsideError,
        MissingBackendError,
        ObjectExistsError,
        ObjectNotFoundError,
        PermissionDeniedError,
        RankError,
        ReplicaMismatchError,
        StorageError,
        StorageFullError,
        StorageTimeoutError,
        SupersededError,
        TransferSizeError,
        UnsupportedOperationError,
        UnsupportedValueError,
        UntrustedDataError,
    )
    from dcpfs.storage.location import Location

_HOMES = {
    "dcpfs.checkpointer.callbacks": ("CheckpointCallback",),
    "dcpfs.checkpointer.checkpointer": ("DistributedCheckpointer",),
    "dcpfs.checkpointer.choices": (
        "Access",
        "AsyncMode",
        "BestMode",
        "DedupPolicy",
        "OnExisting",
        "OnProcessLoss",
        "OnSaveError",
        "RngPolicy",
        "WhenBusy",
        "WorldSizePolicy",
    ),
    "dcpfs.checkpointer.config": ("CheckpointConfig",),
    "dcpfs.checkpointer.model_only": (
        "load_checkpoint",
        "save_checkpoint",
    ),
    "dcpfs.checkpointer.model_state": ("ModelWrapper",),
    "dcpfs.checkpointer.optimizer_state": ("OptimizersWrapper",),
    "dcpfs.checkpointer.preemption": ("shield_worker",),
    "dcpfs.checkpointer.rank_state": ("RankResize",),
    "dcpfs.checkpointer.rename_planner": ("RenameLoadPlanner",),
    "dcpfs.checkpointer.scheduler_state": ("SchedulersWrapper",),
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
        "DamagedObjectError",
        "DcpfsError",
        "IncompleteCheckpointError",
        "KeyMismatchError",
        "LinkOutsideError",
        "MissingBackendError",
        "ObjectExistsError",
        "ObjectNotFoundError",
        "PermissionDeniedError",
        "RankError",
        "ReplicaMismatchError",
        "StorageError",
        "StorageFullError",
        "StorageTimeoutError",
        "SupersededError",
        "TransferSizeError",
        "UnsupportedOperationError",
        "UnsupportedValueError",
        "UntrustedDataError",
    ),
    "dcpfs.storage.location": ("Location",),
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Access",
    "AsyncMode",
    "BestMode",
    "BucketNotFoundError",
    "CastPolicy",
    "CheckpointCallback",
    "CheckpointConfig",
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "ConfigError",
    "CorruptCheckpointError",
    "CredentialsError",
    "DamagedObjectError",
    "DcpfsError",
    "DedupPolicy",
    "DirectIO",
    "DistributedCheckpointer",
    "Durability",
    "FsspecStorageReader",
    "FsspecStorageWriter",
    "IncompleteCheckpointError",
    "KeyMismatchError",
    "LinkOutsideError",
    "LoadPlanner",
    "LoadReport",
    "Location",
    "MissingBackendError",
    "ModelWrapper",
    "ObjectExistsError",
    "ObjectNotFoundError",
    "OnExisting",
    "OnProcessLoss",
    "OnSaveError",
    "OptimizersWrapper",
    "PermissionDeniedError",
    "RankError",
    "RankResize",
    "RenameLoadPlanner",
    "ReplicaMismatchError",
    "ReplicaReads",
    "RetryConfig",
    "RngPolicy",
    "SavePlanner",
    "SaveReport",
    "SchedulersWrapper",
    "StorageError",
    "StorageFullError",
    "StorageTimeoutError",
    "SupersededError",
    "TransferConfig",
    "TransferSizeError",
    "Trust",
    "UnsupportedOperationError",
    "UnsupportedValueError",
    "UntrustedDataError",
    "VerifyMode",
    "WhenBusy",
    "WorldSizePolicy",
    "__version__",
    "load",
    "load_checkpoint",
    "read",
    "save",
    "save_checkpoint",
    "shield_worker",
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
