"""Memory for what a load fills, where the fresh state has none; and whether two tensors are one memory.

Problem: parameters on the meta device and moments of an optimizer that never stepped have no memory to load into, and
torch makes it by stepping the optimizer with zero gradients, which gives up as soon as there are gradients (case 6).

Way taken: memory is made like the parameter it belongs to: its device, its mesh and its placements, in the dtype that
the checkpoint has. It is zeroed, which costs nothing on the CPU: what a lenient load leaves unfilled is no garbage. A
parameter on the meta device gets its memory without losing its identity, which optimizers and ties depend on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from dcpfs import torch_private
from dcpfs.dcp.host_memory import tensor_bytes, to_host

__all__ = ["adopt_memory", "has_same_bits", "home_device", "is_same_memory", "zeros_like_part", "zeros_of_shape"]

_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)


def home_device(tensors: Iterable[torch.Tensor]) -> torch.device:
    """Where the first tensor that has memory lies; the default device when none has."""
    for tensor in tensors:
        if not torch_private.is_on_meta(tensor):
            return tensor.device
    return torch.get_default_device()


def zeros_like_part(
    tensor: torch.Tensor, *, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> torch.Tensor:
    """Zeros of a tensor's shape; of a DTensor, this rank's part of its mesh and placements.

    Args:
        tensor: What to be like; on the meta device too.
        dtype: None: the tensor's.
        device: None: the tensor's; for a DTensor on meta that of its mesh, for another one torch's default.
    """
    if device is None:
        if not torch_private.is_on_meta(tensor):
            device = tensor.device
        elif isinstance(tensor, DTensor):
            device = torch.device(tensor.device_mesh.device_type)
        else:
            device = torch.get_default_device()
    with torch.no_grad():
        plain = tensor.detach()
        return torch.zeros_like(plain, dtype=dtype or tensor.dtype, device=device)


def zeros_of_shape(parameter: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that belong to a parameter and have another shape than it: each rank of its mesh holds all of them.

    One without dimensions is a plain tensor, as torch's optimizers make it (NAdam's ``mu_product``, ASGD's ``eta``):
    DTensors take these for scalars, while their ``foreach`` functions are missing some for DTensors themselves.
    """
    device = None if torch_private.is_on_meta(parameter) else parameter.device
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        local = torch.zeros(shape, dtype=dtype, device=device or torch.device(mesh.device_type))
        if not shape:
            return local
        placements = [Replicate()] * mesh.ndim
        return DTensor.from_local(local, mesh, placements, run_check=False)
    return torch.zeros(shape, dtype=dtype, device=device or torch.get_default_device())


def is_same_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether writing one writes the other, element for element. False where that can't be told cheaply."""
    if first is second:
        return True
    if isinstance(first, DTensor) and isinstance(second, DTensor):
        return torch_private.sharding_of(first) == torch_private.sharding_of(second) and is_same_memory(
            torch_private.local_part(first), torch_private.local_part(second)
        )
    if torch_private.has_shards(first) or torch_private.has_shards(second):
        return False
    if torch_private.is_wrapper(first) or torch_private.is_wrapper(second):
        return False
    if first.layout is not torch.strided or second.layout is not torch.strided:
        return False
    return (
        not first.is_meta
        and first.device == second.device
        and first.dtype == second.dtype
        and first.shape == second.shape
        and first.stride() == second.stride()
        and first.is_conj() == second.is_conj()
        and first.is_neg() == second.is_neg()
        and first.data_ptr() == second.data_ptr()
    )


def has_same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits; of DTensors, whether this rank's parts do. Copies device tensors."""
    if isinstance(first, DTensor) and isinstance(second, DTensor):
        if torch_private.sharding_of(first) != torch_private.sharding_of(second):
            return False
        return has_same_bits(torch_private.local_part(first), torch_private.local_part(second))
    if type(first) not in _PLAIN or type(second) not in _PLAIN or first.is_meta or second.is_meta:
        return False
    if first.dtype is not second.dtype or first.shape != second.shape or first.layout is not second.layout:
        return False
    return tensor_bytes(to_host(first.detach())) == tensor_bytes(to_host(second.detach()))


def adopt_memory(tensor: torch.Tensor, filled: torch.Tensor) -> bool:
    """Give a parameter or buffer on the meta device the memory of a filled tensor; it stays the same object.

    So optimizers that hold it, and modules that share it, need not be told. Attributes that were set on it stay.

    Returns:
        False when something else in the process holds on to it (a weak reference, a graph), so nothing was done.
    """
    attributes = dict(vars(tensor))
    own = filled.detach()
    if isinstance(tensor, nn.Parameter):
        own = nn.Parameter(own, requires_grad=tensor.requires_grad)
    try:
        torch.utils.swap_tensors(tensor, own)  # type: ignore[no-untyped-call]  # torch's has no annotations
    except RuntimeError:
        return False
    kept = cast("dict[str, object]", vars(tensor))
    for name, value in attributes.items():
        kept.setdefault(name, value)
    return True
