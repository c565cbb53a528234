from __future__ import annotations

import pytest
import torch

from dcpfs.config import CastPolicy
from dcpfs.dcp.casting import allows_cast

_NEVER, _WIDEN, _FLOATING = CastPolicy.NEVER, CastPolicy.WIDEN, CastPolicy.FLOATING


@pytest.mark.parametrize(
    ("stored", "wanted", "policies"),
    [
        (torch.bfloat16, torch.float32, {_WIDEN, _FLOATING}),
        (torch.float16, torch.float32, {_WIDEN, _FLOATING}),
        (torch.float8_e4m3fn, torch.bfloat16, {_WIDEN, _FLOATING}),
        (torch.float8_e5m2, torch.float16, {_WIDEN, _FLOATING}),
        (torch.int32, torch.int64, {_WIDEN, _FLOATING}),
        (torch.uint8, torch.int16, {_WIDEN, _FLOATING}),
        (torch.bool, torch.int8, {_WIDEN, _FLOATING}),
        (torch.int8, torch.bfloat16, {_WIDEN, _FLOATING}),
        (torch.float32, torch.complex64, {_WIDEN, _FLOATING}),
        (torch.complex64, torch.complex128, {_WIDEN, _FLOATING}),
        (torch.float32, torch.bfloat16, {_FLOATING}),
        (torch.float16, torch.bfloat16, {_FLOATING}),
        (torch.bfloat16, torch.float16, {_FLOATING}),
        (torch.int64, torch.float32, set()),
        (torch.int32, torch.int16, set()),
        (torch.int8, torch.uint8, set()),
        (torch.float32, torch.float8_e8m0fnu, set()),
        (torch.float32, torch.int32, set()),
        (torch.float32, torch.bool, set()),
        (torch.complex64, torch.float32, set()),
        (torch.complex64, torch.float64, set()),
    ],
)
def test_case_3_only_named_casts_are_allowed(
    stored: torch.dtype, wanted: torch.dtype, policies: set[CastPolicy]
) -> None:
    assert {policy for policy in CastPolicy if allows_cast(policy, stored, wanted)} == policies


def test_widening_keeps_every_value() -> None:
    """Checked against the conversion itself, on all bit patterns of the small dtypes."""
    small = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.int8, torch.uint8]
    targets = [*small, torch.float32, torch.float64, torch.int16]
    for stored in small:
        bits = torch.arange(1 << (8 * stored.itemsize), dtype=torch.int32)
        carrier = bits.to(torch.uint8 if stored.itemsize == 1 else torch.int16)
        if stored.is_floating_point:
            carrier = carrier[carrier.view(stored).to(torch.float64).isfinite()]
        values = carrier.view(stored)
        for wanted in targets:
            if wanted is not stored and allows_cast(CastPolicy.WIDEN, stored, wanted):
                assert torch.equal(values.to(wanted).to(torch.float64), values.to(torch.float64)), (stored, wanted)


def test_case_3_no_float_is_widened_to_one_of_as_many_bits() -> None:
    """torch gives limits of float8_e5m2fnuz by which it would be as fine as others; it has no infinity and no -0."""
    floats = [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz]
    for stored in floats:
        assert not any(allows_cast(CastPolicy.WIDEN, stored, wanted) for wanted in floats if wanted is not stored)


def test_truth_values_are_cast_to_numbers_alone() -> None:
    for wanted in (torch.bits8, torch.bits16, torch.qint8, torch.quint4x2):
        assert not any(allows_cast(policy, torch.bool, wanted) for policy in CastPolicy), wanted
    for wanted in (torch.uint8, torch.uint64, torch.float8_e4m3fn, torch.complex64):
        assert allows_cast(CastPolicy.WIDEN, torch.bool, wanted), wanted
