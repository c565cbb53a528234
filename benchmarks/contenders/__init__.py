"""Who takes part: one small interface, and a registry by name.

Problem: a peer that is not installed, or that fails, must be seen as such; a figure must never come from
something else than its name says.

Way taken: a contender says itself whether it is available and why not. It is found by name here, or by
``module:attribute`` for anybody's own. Nothing is imported before it is asked for, so a client process holds
the code of one contender only.
"""

from __future__ import annotations

import enum
import importlib
from typing import Protocol, runtime_checkable

from ..settings import Setting, Target
from ..workloads import State

__all__ = ["Contender", "Layout", "Scope", "contenders_for", "find", "is_floor"]


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


_REGISTRY = {
    "dcpfs": ".ours:Dcpfs",
    "dcpfs-bare": ".ours:DcpfsUnderTorch",
    "dcpfs-bare-64mib": ".ours:DcpfsSmallBudget",
    "s3torchconnector": ".s3_connector:S3TorchConnector",
    "torch-fsspec": ".torch_native:TorchFsspec",
    "torch-1": ".torch_native:TorchOneThread",
    "torch-4": ".torch_native:TorchFourThreads",
    "floor-sockets": ".floors:Sockets",
    "floor-files": ".floors:Files",
    "floor-memcpy": ".floors:Memcpy",
}

_OURS = ("dcpfs", "dcpfs-bare", "dcpfs-bare-64mib")
_S3 = (*_OURS, "s3torchconnector", "torch-fsspec", "floor-sockets")
_LOCAL = (*_OURS, "torch-1", "torch-4", "floor-files")
_BY_SETTING = {
    Setting.FAST: _S3,
    Setting.S3LIKE: _S3,
    Setting.TMPFS: _LOCAL,
    Setting.DISK: _LOCAL,
    Setting.MEMORY: (*_OURS, "torch-fsspec", "floor-memcpy"),
}


def contenders_for(setting: Setting) -> tuple[str, ...]:
    """Names of those that can take part in a setting."""
    return _BY_SETTING[setting]


def is_floor(name: str) -> bool:
    """True for what takes whole states only: it has no part in cases about shards or parts."""
    return name.startswith("floor-")


def find(name: str) -> Contender:
    """Make a contender from its name or ``module:attribute``.

    Raises:
        ValueError: There is none of that name.
    """
    module, separator, attribute = _REGISTRY.get(name, name).partition(":")
    if not separator:
        raise ValueError(f"no contender is called {name!r}; there are {', '.join(_REGISTRY)}, or module:attribute")
    contender = getattr(importlib.import_module(module, __package__), attribute)()
    if not isinstance(contender, Contender):
        raise ValueError(f"{name!r} is not a contender: it lacks part of benchmarks.contenders.Contender")
    return contender
