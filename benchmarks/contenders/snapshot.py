"""torchsnapshot: the library that first bounded a save's memory, no longer maintained.

0.1.0, the last release, still runs on torch 2.13 for whole tensors on local files, with a warning. Its S3 plugin takes
no endpoint, and its DTensor support knows torch's classes of 2023, so it takes no part in these. It does not sync
files; that is done for it.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from pathlib import Path

from ..files import sync_file
from ..settings import Target
from ..workloads import State
from . import Layout, Scope

__all__ = ["Snapshots"]


class Snapshots:
    """``Snapshot.take`` and ``restore`` of one flat state."""

    layout = Layout.PRIVATE
    sharding = False
    loads_parts = True

    def available(self) -> str | None:
        """Absent when the package is."""
        if importlib.util.find_spec("torchsnapshot") is None:
            return "torchsnapshot is not installed (extra: bench)"
        return None

    def import_modules(self, target: Target) -> None:
        """The package, with its warnings."""
        del target
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module("torchsnapshot")

    def save(self, state: State, target: Target) -> None:
        """Save."""
        from torchsnapshot import Snapshot, StateDict

        directory = _directory(target)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            Snapshot.take(directory, {"state": StateDict(**state)})
        for path in Path(directory).rglob("*"):
            if path.is_file():
                sync_file(path)

    def load(self, template: State, target: Target, scope: Scope) -> None:
        """Load into the template; part of it, by asking for its objects one by one."""
        from torchsnapshot import Snapshot, StateDict

        snapshot = Snapshot(_directory(target))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if scope is Scope.WHOLE:
                snapshot.restore({"state": StateDict(**template)})
                return
            for key, tensor in template.items():
                snapshot.read_object(f"0/state/{key}", obj_out=tensor)


def _directory(target: Target) -> str:
    if target.directory is None:
        raise ValueError(f"torchsnapshot is used for local files only, not {target.scheme}")
    return target.directory
