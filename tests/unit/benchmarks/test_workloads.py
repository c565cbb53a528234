"""Workloads are what they are said to be, and any wrong bit in them is found."""

from __future__ import annotations

import pytest
import torch

from benchmarks.training import build_training, check_training, poison_training
from benchmarks.verification import check_loaded
from benchmarks.workloads import ANCHOR_BYTES, Origin, Workload, build, differences, poison, specs


def test_anchor_sizes() -> None:
    llama = specs(Workload.LLAMA, ANCHOR_BYTES)
    assert len(llama) == 333
    assert sum(spec.size_bytes for spec in llama) == pytest.approx(ANCHOR_BYTES, rel=0.01)
    assert {spec.dtype for spec in llama} == {torch.bfloat16, torch.float32}
    small = specs(Workload.SMALL, ANCHOR_BYTES)
    assert len(small) == 20_000
    assert sum(spec.size_bytes for spec in small) == pytest.approx(0.44e9, rel=0.03)
    assert all(4_000 <= spec.size_bytes <= 65_536 for spec in small)
    (large,) = specs(Workload.LARGE, ANCHOR_BYTES)
    assert large.size_bytes == pytest.approx(ANCHOR_BYTES, rel=0.01)
    mixture = specs(Workload.MIXTURE, ANCHOR_BYTES)
    assert sum(spec.size_bytes for spec in mixture) == pytest.approx(ANCHOR_BYTES, rel=0.06)
    assert sum(".experts." in spec.key for spec in mixture) == 8 * 64 * 3 * 3
    assert len({spec.key for spec in mixture}) == len(mixture)


def test_real_weights_are_those_of_the_file() -> None:
    tensors = specs(Workload.REAL, ANCHOR_BYTES)
    assert sum(spec.size_bytes for spec in tensors) == pytest.approx(90.9e6, rel=0.01)
    assert {spec.origin for spec in tensors} == {Origin.MODEL}
    few = specs(Workload.REAL, 300_000)
    assert 0 < sum(spec.size_bytes for spec in few) <= 300_000
    state = build(few, None)
    assert check_loaded(state, few, None) is None
    last = state[few[-1].key]
    last.reshape(-1).view(torch.uint8)[-1] ^= 1
    assert few[-1].key in (check_loaded(state, few, None) or "")


def test_a_training_state_is_compared_to_the_last_value() -> None:
    training = build_training(400_000, None)
    assert check_training(training) is None
    assert training.size_bytes == sum(
        tensor.nbytes
        for parameter in training.model.parameters()
        for tensor in (parameter, *(training.optimizer.state[parameter][name] for name in ("exp_avg", "exp_avg_sq")))
    )
    training.progress["tokens"] += 1
    assert "the trainer is at" in (check_training(training) or "")
    training.progress["tokens"] -= 1
    *_, last = training.optimizer.state.values()
    last["step"].add_(1)
    assert "the optimizer's step is" in (check_training(training) or "")
    poison_training(training)
    assert "wrong bytes" in (check_training(training) or "")


@pytest.mark.parametrize("workload", [each for each in Workload if each is not Workload.REAL])
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
