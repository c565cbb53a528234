"""Workloads are what they are said to be, and any wrong bit in them is found."""

from __future__ import annotations

import pytest
import torch

from benchmarks.verification import check_loaded
from benchmarks.workloads import ANCHOR_BYTES, Workload, build, differences, poison, specs


def test_anchor_sizes() -> None:
    llama = specs(Workload.LLAMA, ANCHOR_BYTES)
    assert len(llama) == 333
    assert sum(spec.size_bytes for spec in llama) == pytest.approx(ANCHOR_BYTES, rel=0.01)
    assert {spec.dtype for spec in llama} == {torch.bfloat16, torch.float32}
    small = specs(Workload.SMALL, ANCHOR_BYTES)
    assert len(small) == 20_000
    assert sum(spec.size_bytes for spec in small) == pytest.approx(0.44e9, rel=0.03)
    assert all(4_000 <= spec.size_bytes <= 65_536 for spec in small)


@pytest.mark.parametrize("workload", Workload)
def test_states_are_finite_and_no_two_tensors_alike(workload: Workload) -> None:
    state = build(specs(workload, 2_000_000), None)
    seen = {bytes(tensor.reshape(-1).view(torch.uint8).numpy()[:32]) for tensor in state.values()}
    assert len(seen) == len(state)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in state.values())


def test_every_flipped_bit_is_found() -> None:
    tensors = specs(Workload.LLAMA, 1_000_000)
    state = build(tensors, None)
    assert check_loaded(state, tensors, None) is None
    for spec in tensors[::50]:
        payload = state[spec.key].reshape(-1).view(torch.uint8)
        for at in (0, len(payload) // 2, len(payload) - 1):
            payload[at] ^= 4
            assert spec.key in (check_loaded(state, tensors, None) or "")
            payload[at] ^= 4
    poison(state)
    assert check_loaded(state, tensors, None) is not None


def test_rows_can_be_made_and_compared_alone() -> None:
    (spec, *_) = specs(Workload.LLAMA, ANCHOR_BYTES)
    whole = build((spec,), None)[spec.key]
    half = spec.shape[0] // 2
    assert differences(spec, whole[half:], half) is None
    assert differences(spec, whole[half:], half - 1) is not None
    assert differences(spec, whole.float(), 0) is not None
