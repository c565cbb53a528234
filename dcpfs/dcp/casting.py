"""Which dtype differences a load may bridge.

Problem: torch's load copies whatever is stored into whatever the template has: fp32 into bf16 loses precision, floats
into ints truncate and wrap, complex into real drops the imaginary part, all in silence (case 3).

Way taken: a difference is a mismatch unless the caller's `CastPolicy` names its kind. What a wider dtype is comes from
the limits of both, not from a table: every value of the stored one must have an exact equal in the other.
"""

from __future__ import annotations

import functools

import torch

from dcpfs.config import CastPolicy

__all__ = ["allows_cast"]

_NEVER_TARGETS = frozenset(
    getattr(torch, name)
    for name in ("float8_e8m0fnu", "float4_e2m1fn_x2")
    if isinstance(getattr(torch, name, None), torch.dtype)
)
"""Dtypes without a sign or a zero, or with two values to an element: nothing is cast to them."""


@functools.lru_cache(maxsize=1024)
def allows_cast(policy: CastPolicy, stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether values of ``stored`` may be loaded into a tensor of ``wanted``, two different dtypes."""
    if policy is CastPolicy.NEVER or wanted in _NEVER_TARGETS or stored.itemsize == 0:
        return False
    if _is_widening(stored, wanted):
        return True
    return policy is CastPolicy.FLOATING and stored.is_floating_point and wanted.is_floating_point


def _is_widening(stored: torch.dtype, wanted: torch.dtype) -> bool:
    if wanted is torch.bool or (stored.is_complex and not wanted.is_complex):
        return False
    if stored is torch.bool:
        return wanted.is_floating_point or wanted.is_complex or _is_integer(wanted)
    stored, wanted = _real(stored), _real(wanted)
    if stored is wanted:
        return True
    if _is_integer(stored):
        info = torch.iinfo(stored)
        if _is_integer(wanted):
            other = torch.iinfo(wanted)
            return other.min <= info.min and info.max <= other.max
        if wanted.is_floating_point:
            exact = round(2 / torch.finfo(wanted).eps)  # all integers up to here are exact
            return max(-info.min, info.max) <= exact and info.max <= torch.finfo(wanted).max
        return False
    if not (stored.is_floating_point and wanted.is_floating_point) or stored in _NEVER_TARGETS:
        return False
    if wanted.itemsize <= stored.itemsize:
        return False  # no float of as many bits has all values of another, whatever torch says of its limits
    narrow, wide = torch.finfo(stored), torch.finfo(wanted)
    least_narrow, least_wide = narrow.smallest_normal * narrow.eps, wide.smallest_normal * wide.eps
    return wide.eps <= narrow.eps and wide.max >= narrow.max and least_wide <= least_narrow


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool) and dtype in _INTEGERS


_INTEGERS = frozenset(
    (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)
)


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype
