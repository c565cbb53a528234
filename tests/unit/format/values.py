"""Tensors and bytes that the tests of the format share."""

from __future__ import annotations

import io

import torch

_NAMES = (
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32",
    "uint64", "bool", "complex128", "complex64", "complex32", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2", "bits8", "bits16",
)  # fmt: skip
ALL_DTYPES: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in _NAMES if hasattr(torch, name))
"""Every dtype of this torch that ``torch.save`` stores."""


def filled(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A row-major tensor whose bytes all differ from their neighbours'; bools stay 0 and 1."""
    count = torch.Size(shape).numel() * dtype.itemsize
    numbers = torch.arange(count, dtype=torch.int64) * 37 + 11
    raw = (numbers % (2 if dtype is torch.bool else 251)).to(torch.uint8)
    return raw.view(dtype).reshape(shape)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """The row-major bytes of a tensor, of any dtype."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if plain.numel() == 0:
        return b""
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes()


def torch_save(value: object) -> bytes:
    """The bytes of ``torch.save``."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
