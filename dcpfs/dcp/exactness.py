"""Which tensors a checkpoint can hold exactly. Pure.

Problem: torch's writer takes whatever ``torch.save`` takes. A wrapper subclass without memory of its own is written
as garbage (case 17); a sparse or quantized tensor becomes an entry that a load copies into a dense template, or not
at all; a meta tensor is written without values. And torch's plan cache ignores dtypes, so a tensor can be written
under a metadata that promises another.

Way taken: only dense strided memory with values is stored; everything else is refused by name, before a byte of the
rank is written, and the text says what to do instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from dcpfs.dcp.host_memory import has_memory
from dcpfs.errors import UnsupportedValueError
from dcpfs.torch_private import is_wrapper

__all__ = ["check_matches", "check_storable_tensor"]

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def check_storable_tensor(key: str, tensor: torch.Tensor) -> None:
    """Return when the tensor is dense memory with values.

    Raises:
        UnsupportedValueError: It is not; names key, kind and remedy.
    """
    if type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_meta:
        if tensor.is_quantized or tensor.is_nested or not has_memory(tensor):
            raise _refusal(key, tensor)
        return
    kind = _hindrance(tensor)
    if kind is not None:
        raise _refusal(key, tensor)


def check_matches(key: str, tensor: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> None:
    """Return when the tensor is what its write item promises.

    Raises:
        UnsupportedValueError: Another dtype or shape, e.g. because a cached plan is older than the state.
    """
    if tensor.dtype is dtype and tensor.shape == shape:
        return
    raise UnsupportedValueError(
        f"can't save {key!r}: it is {tensor.dtype} of shape {tuple(tensor.shape)}, but was planned as {dtype} of "
        f"shape {tuple(shape)}; a cached plan is older than the state, or the planner changed the tensor without "
        "changing its write item"
    )


def _hindrance(tensor: torch.Tensor) -> str | None:
    if isinstance(tensor, (UninitializedBuffer, UninitializedParameter)):
        return "it is not initialised yet; run the module once, or leave the key out"
    if tensor.is_nested:
        return "it is a nested tensor; save its values() and offsets() as two dense tensors"
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}; save its parts, or to_dense()"
    if tensor.is_meta:
        return "it is on the meta device and has no values; materialise it first, or leave the key out"
    if tensor.is_quantized:
        return "it is quantized and has scales beside its values; save int_repr() and the scales, or dequantize()"
    if type(tensor) in _PLAIN and _lacks_memory(tensor):
        return "its memory has been freed (as of a sharded parameter that is not gathered); gather it first"
    if is_wrapper(tensor) or _lacks_memory(tensor):
        return (
            f"{type(tensor).__name__} wraps other tensors and has no memory of its own; save the inner tensors "
            "under keys of their own, or dequantize it"
        )
    return None


def _refusal(key: str, tensor: torch.Tensor) -> UnsupportedValueError:
    return UnsupportedValueError(f"can't save {key!r} exactly: {_hindrance(tensor)}")


def _lacks_memory(tensor: torch.Tensor) -> bool:
    if tensor.numel() == 0:
        return False
    try:
        return not has_memory(tensor) or tensor.data_ptr() == 0
    except (RuntimeError, NotImplementedError):
        return True
