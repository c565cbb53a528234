"""One file for the whole state: what people have before they have a checkpoint library.

Neither syncs its file; that is done for them, as every contender's bytes are on the device when it returns. What is
loaded goes into the tensors that the caller has, as a trainer needs it.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

import torch

from ..files import import_filesystem, open_for, sync_file
from ..settings import Target
from ..workloads import State
from . import Layout, Scope

__all__ = ["Safetensors", "TorchSave"]


class TorchSave:
    """``torch.save`` and ``torch.load``, through fsspec where the place is not local."""

    layout = Layout.PRIVATE
    sharding = False

    def available(self) -> str | None:
        """Always: it is part of torch."""
        return None

    def import_modules(self, target: Target) -> None:
        """The filesystem, where the place is not local."""
        import_filesystem(target)

    def save(self, state: State, target: Target) -> None:
        """Save."""
        if target.directory is None:
            with open_for(target, "state.pt", "wb") as stream:
                torch.save(state, stream)
            return
        path = _file(target.directory, "state.pt")
        torch.save(state, path)
        sync_file(path)

    def load(self, template: State, target: Target, scope: Scope) -> None:
        """Load all of it; local files are mapped."""
        del scope
        if target.directory is None:
            with open_for(target, "state.pt", "rb") as stream:
                loaded = torch.load(stream, weights_only=True)
        else:
            loaded = torch.load(Path(target.directory) / "state.pt", weights_only=True, mmap=True)
        for key, tensor in template.items():
            tensor.copy_(loaded[key])


class Safetensors:
    """``save_file`` and ``safe_open``."""

    layout = Layout.PRIVATE
    sharding = False
    loads_parts = True

    def available(self) -> str | None:
        """Absent when the package is."""
        return None if importlib.util.find_spec("safetensors") else "safetensors is not installed"

    def import_modules(self, target: Target) -> None:
        """The package."""
        del target
        importlib.import_module("safetensors.torch")

    def save(self, state: State, target: Target) -> None:
        """Save."""
        from safetensors.torch import save_file

        if target.directory is None:
            raise ValueError(f"safetensors is used for local files only, not {target.scheme}")
        path = _file(target.directory, "state.safetensors")
        save_file(state, path)
        sync_file(path)

    def load(self, template: State, target: Target, scope: Scope) -> None:
        """Load the template's tensors."""
        from safetensors import safe_open

        del scope
        if target.directory is None:
            raise ValueError(f"safetensors is used for local files only, not {target.scheme}")
        with safe_open(Path(target.directory) / "state.safetensors", framework="pt") as stored:
            for key, tensor in template.items():
                tensor.copy_(stored.get_tensor(key))


def _file(directory: str, name: str) -> Path:
    Path(directory).mkdir(parents=True, exist_ok=True)
    return Path(directory) / name
