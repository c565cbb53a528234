"""Modules made of names and shapes, as FSDP2 shards them: they hold parameters and compute nothing."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

__all__ = ["make_module"]

_LAYERS = "layers"


def make_module(parameters: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], mesh: DeviceMesh | None) -> nn.Module:
    """A tree of modules with these parameters; values are not set.

    Args:
        parameters: Name, type and shape of each.
        mesh: To shard over with FSDP2, each member of a ``layers`` as a group of its own; None: whole tensors.
    """
    root = nn.Module()
    for key, dtype, shape in parameters:
        *path, name = key.split(".")
        module = root
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")))
    if mesh is not None:
        for name, module in root.named_modules():
            if name.split(".")[-2:-1] == [_LAYERS]:
                fully_shard(module, mesh=mesh)
        fully_shard(root, mesh=mesh)
    root.to_empty(device="cpu")
    return root
