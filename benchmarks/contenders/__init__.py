"""Who takes part: small interfaces, and a registry by name.

Problem: a peer that is not installed, that can't reach a place, or that fails, must be seen as such; a figure must
never come from something else than its name says.

Way taken: a contender says itself whether it is available and why not; what it can reach stands in one table. It is
found by name here, or by ``module:attribute`` for anybody's own. Nothing is imported before it is asked for, so a
client process holds the code of one contender only.

Storage contenders save and load a flat state. Cases about steps have contenders of their own, since a storage class
does not know what a step is; the same name may stand for both.
"""

from __future__ import annotations

import enum
import importlib
from typing import Protocol, runtime_checkable

from ..settings import Setting, Target
from ..training import Training
from ..workloads import State

__all__ = [
    "Checkpointing",
    "Contender",
    "Importing",
    "Layout",
    "LoadsParts",
    "Remover",
    "Role",
    "Scope",
    "Seeker",
    "Staged",
    "contenders_for",
    "everybody",
    "find",
    "is_floor",
    "is_known",
    "unreachable",
]


class Role(str, enum.Enum):
    """What a contender does."""

    STORAGE = "storage"
    CHECKPOINTER = "checkpointer"
    SEEKER = "seeker"
    REMOVER = "remover"


class Layout(str, enum.Enum):
    """What a contender leaves behind."""

    DCP = "dcp"
    """A checkpoint that torch can read: checked entry by entry."""
    PRIVATE = "private"
    """Something that only the contender reads: checked by its own load."""


class Scope(str, enum.Enum):
    """How much of a checkpoint a template holds."""

    WHOLE = "whole"
    PART = "part"


@runtime_checkable
class Contender(Protocol):
    """One way to save and load. Collective over ranks when there is a process group."""

    layout: Layout
    sharding: bool
    """It can take DTensors and part of a checkpoint."""

    def available(self) -> str | None:
        """None when it can run here, else the reason why not."""
        ...

    def save(self, state: State, target: Target) -> None:
        """Save the state; everything is stored when it returns."""
        ...

    def load(self, template: State, target: Target, scope: Scope) -> None:
        """Fill the template's tensors in place."""
        ...


@runtime_checkable
class LoadsParts(Protocol):
    """A contender that takes whole tensors only, and can load some of them."""

    loads_parts: bool


@runtime_checkable
class Importing(Protocol):
    """A contender of any role whose calls import modules when they are first made."""

    def import_modules(self, target: Target) -> None:
        """Import them all; before the clock starts."""
        ...


@runtime_checkable
class Staged(Protocol):
    """A contender that needs something before the clock starts, or after it has stopped: a copy of files, mostly."""

    def arrange(self, state: State, target: Target) -> None:
        """Before each timed call, with what will be saved or filled."""
        ...

    def settle(self, template: State, target: Target) -> None:
        """After each timed load: put what was loaded into the template."""
        ...


@runtime_checkable
class Checkpointing(Protocol):
    """One way to save the whole state of a trainer. Collective over ranks."""

    def available(self) -> str | None:
        """None when it can run here, else the reason why not."""
        ...

    def open(self, target: Target) -> None:
        """Begin to work below the target; not timed."""
        ...

    def save(self, training: Training, iteration: int) -> None:
        """Save a step, or begin to."""
        ...

    def release(self) -> None:
        """Return when training may write its state again."""
        ...

    def finish(self) -> None:
        """Return when the step is stored and committed."""
        ...

    def load(self, training: Training) -> int:
        """Fill the training state from the newest step and say its iteration."""
        ...

    def close(self) -> None:
        """End, whatever happened before."""
        ...


@runtime_checkable
class Seeker(Protocol):
    """One way to find the steps that are there."""

    def available(self) -> str | None:
        """None when it can run here, else the reason why not."""
        ...

    def seek(self, target: Target) -> tuple[int, ...]:
        """The newest step, or all of them, ascending; the newest is last."""
        ...


@runtime_checkable
class Remover(Protocol):
    """One way to remove old steps."""

    def available(self) -> str | None:
        """None when it can run here, else the reason why not."""
        ...

    def remove_all_but(self, target: Target, keep: int, steps: tuple[int, ...]) -> None:
        """Remove all but the newest ``keep`` steps; ``steps`` are those that are there, ascending."""
        ...


_STORAGE = {
    "dcpfs": ".ours:Dcpfs",
    "dcpfs-bare": ".ours:DcpfsUnderTorch",
    "dcpfs-bare-64mib": ".ours:DcpfsSmallBudget",
    "dcpfs-obstore": ".obstore_classes:DcpfsOnObstore",
    "s3torchconnector": ".s3_connector:S3TorchConnector",
    "s3torchconnector-sequential": ".s3_connector:S3TorchConnectorSequential",
    "s3torchconnector-range": ".s3_connector:S3TorchConnectorRangeBased",
    "multi-storage-client": ".multi_storage:MultiStorageClient",
    "torch-fsspec": ".torch_native:TorchFsspec",
    "torch-obstore": ".obstore_classes:TorchOnObstore",
    "torch-1": ".torch_native:TorchOneThread",
    "torch-2": ".torch_native:TorchTwoThreads",
    "torch-4": ".torch_native:TorchFourThreads",
    "torchsnapshot": ".snapshot:Snapshots",
    "torch-save": ".single_files:TorchSave",
    "safetensors": ".single_files:Safetensors",
    "floor-sockets": ".floors:Sockets",
    "floor-client": ".floors:PlainClient",
    "floor-files": ".floors:Files",
    "floor-cp": ".floors:FileCopy",
    "floor-memcpy": ".floors:Memcpy",
}
_CHECKPOINTERS = {
    "dcpfs-sync": ".trainers:DcpfsSync",
    "dcpfs-thread": ".trainers:DcpfsThread",
    "dcpfs-process": ".trainers:DcpfsProcess",
    "torch-keys": ".trainers:TorchKeyByKey",
    "s3torchconnector-keys": ".trainers:ConnectorKeyByKey",
    "torch-keys-4": ".trainers:TorchKeyByKeyFourThreads",
}
_SEEKERS = {
    "dcpfs": ".step_directories:DcpfsNewest",
    "dcpfs-all-steps": ".step_directories:DcpfsAllSteps",
    "floor-listing": ".step_directories:Listing",
}
_REMOVERS = {
    "dcpfs": ".step_directories:DcpfsRetention",
    "floor-delete": ".step_directories:RecursiveDelete",
}
_ROLES: dict[Role, tuple[dict[str, str], type]] = {
    Role.STORAGE: (_STORAGE, Contender),
    Role.CHECKPOINTER: (_CHECKPOINTERS, Checkpointing),
    Role.SEEKER: (_SEEKERS, Seeker),
    Role.REMOVER: (_REMOVERS, Remover),
}
_ONLY_S3 = (
    "dcpfs-obstore",
    "multi-storage-client",
    "s3torchconnector",
    "s3torchconnector-keys",
    "s3torchconnector-range",
    "s3torchconnector-sequential",
    "torch-obstore",
)
_ONLY_FILES = (
    "floor-cp",
    "floor-files",
    "safetensors",
    "torch-1",
    "torch-2",
    "torch-4",
    "torch-keys-4",
    "torchsnapshot",
)


def contenders_for(setting: Setting, url: str | None = None) -> tuple[str, ...]:
    """Names of those that can take part in a setting, or at the user's URL, for all kinds of case."""
    target = Target(setting=setting, path="x", root=url)
    if setting is Setting.URL and url is None:
        raise ValueError("Who takes part at a URL depends on the URL; name it")
    return tuple(name for name in everybody() if unreachable(name, target) is None)


def everybody() -> tuple[str, ...]:
    """All names that are known here, for all kinds of case and place."""
    return tuple(dict.fromkeys(name for names, _ in _ROLES.values() for name in names))


def unreachable(name: str, target: Target) -> str | None:
    """Why a contender can't work at a place, or None; only of those that are known here."""
    if name in _ONLY_S3 and target.scheme != "s3":
        return f"it speaks S3 only, not {target.scheme}"
    if name in _ONLY_FILES and target.scheme != "file":
        return f"it takes local files only, not {target.scheme}"
    if name == "dcpfs-process" and target.in_process:
        return "memory:// lives in one process, and it saves from another"
    if name == "floor-sockets" and not target.setting.is_s3:
        return "it speaks to the sink only"
    if name == "floor-memcpy" and target.setting is not Setting.MEMORY:
        return "it copies within one process only"
    return None


def is_floor(name: str) -> bool:
    """True for what takes whole states only: it has no part in cases about shards or parts."""
    return name.startswith("floor-")


def is_known(name: str, role: Role) -> bool:
    """Whether a name stands for a contender of that role; ``module:attribute`` may be any."""
    return ":" in name or name in _ROLES[role][0]


def find(name: str, role: Role = Role.STORAGE) -> object:
    """Make a contender from its name or ``module:attribute``; it has what its role's protocol asks for.

    Raises:
        ValueError: There is none of that name.
    """
    registry, protocol = _ROLES[role]
    module, separator, attribute = registry.get(name, name).partition(":")
    if not separator:
        raise ValueError(f"no contender is called {name!r}; there are {', '.join(registry)}, or module:attribute")
    contender: object = getattr(importlib.import_module(module, __package__), attribute)()
    if not isinstance(contender, protocol):
        raise ValueError(f"{name!r} is not a contender: it lacks part of benchmarks.contenders.{protocol.__name__}")
    return contender
