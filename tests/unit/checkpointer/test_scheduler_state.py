"""Schedulers: keys, milestones, versions of torch, the order of restoring."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from dcpfs.checkpointer.scheduler_state import SchedulersWrapper
from dcpfs.checkpointer.stored_value import TemplatePart
from dcpfs.errors import ConfigError, KeyMismatchError
from tests.unit.checkpointer.part_exchange import equal_states, exchange

MakeScheduler = Callable[[torch.optim.Optimizer], Any]

SCHEDULERS: dict[str, MakeScheduler] = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=10),
    "multi-step": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "one-cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=10),
    "plateau": lr_scheduler.ReduceLROnPlateau,
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.CosineAnnealingLR(o, 8)], [2]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ExponentialLR(o, 0.9)]),
}


def new_optimizer(rate: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=rate, momentum=0.9)


def advance(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[float]:
    rates = []
    for step in range(steps):
        optimizer.step()
        scheduler.step(1.0 + step) if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("paths", [True, False], ids=["own checkpoint", "without paths"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_case_95_a_fresh_scheduler_goes_on_where_the_saved_one_stood(name: str, paths: bool) -> None:
    optimizer = new_optimizer()
    scheduler = SCHEDULERS[name](optimizer)
    advance(optimizer, scheduler, 3)
    wrapper = SchedulersWrapper(scheduler)
    assert isinstance(wrapper, TemplatePart)
    assert set(wrapper.state_dict()) == set(scheduler.state_dict())
    other_optimizer = new_optimizer(0.1)
    other = SCHEDULERS[name](other_optimizer)
    outcome = exchange(wrapper.state_dict(), SchedulersWrapper(other), paths=paths)
    assert not outcome.missing
    assert not outcome.unexpected
    assert equal_states(other.state_dict(), scheduler.state_dict())
    other_optimizer.load_state_dict(optimizer.state_dict())
    assert advance(optimizer, scheduler, 4) == advance(other_optimizer, other, 4)


@pytest.mark.parametrize("paths", [True, False], ids=["own checkpoint", "without paths"])
def test_other_milestones_are_taken_from_the_checkpoint(paths: bool) -> None:
    scheduler = lr_scheduler.MultiStepLR(new_optimizer(), [2, 4, 4])
    other = lr_scheduler.MultiStepLR(new_optimizer(), [7])
    outcome = exchange(SchedulersWrapper(scheduler).state_dict(), SchedulersWrapper(other), paths=paths)
    assert not outcome.missing
    assert not outcome.unexpected
    assert other.milestones == Counter([2, 4, 4])
    assert all(type(step) is int for step in other.milestones)


def test_another_kind_of_scheduler_is_a_mismatch_in_both_directions() -> None:
    cosine, step = lr_scheduler.CosineAnnealingLR(new_optimizer(), 10), lr_scheduler.StepLR(new_optimizer(), 3)
    outcome = exchange(SchedulersWrapper(cosine).state_dict(), SchedulersWrapper(step))
    assert outcome.missing == {"step_size", "gamma"}
    assert outcome.unexpected == {"T_max", "eta_min"}


def test_private_attributes_of_another_torch_are_no_mismatch(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = lr_scheduler.StepLR(new_optimizer(), 3)
    state = {**scheduler.state_dict(), "verbose": False, "_old_flag": True}
    state.pop("_step_count")
    other = lr_scheduler.StepLR(new_optimizer(), 3)
    advance(other.optimizer, other, 2)
    with caplog.at_level(logging.DEBUG):
        outcome = exchange(state, SchedulersWrapper(other))
    assert not outcome.missing
    assert not outcome.unexpected
    assert other.last_epoch == 0
    assert other._step_count == 3
    assert "StepLR keeps its own _step_count" in caplog.text


def test_several_schedulers_are_numbered_and_one_in_a_list_is_several() -> None:
    optimizer = new_optimizer()
    pair = [lr_scheduler.StepLR(optimizer, 3), lr_scheduler.MultiStepLR(optimizer, [2])]
    advance(optimizer, pair[0], 2)
    state = SchedulersWrapper(pair).state_dict()
    assert list(state) == ["0", "1"]
    others = [lr_scheduler.StepLR(new_optimizer(), 5), lr_scheduler.MultiStepLR(new_optimizer(), [9])]
    outcome = exchange(state, SchedulersWrapper(others))
    assert not outcome.missing
    assert not outcome.unexpected
    assert [each.state_dict() for each in others] == [each.state_dict() for each in pair]
    assert list(SchedulersWrapper(pair[:1]).state_dict()) == ["0"]
    with pytest.raises(KeyMismatchError, match="another number of schedulers"):
        SchedulersWrapper(others[:1]).load_state_dict(state)


def test_case_14_the_state_is_read_at_each_call() -> None:
    optimizer = new_optimizer()
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    wrapper = SchedulersWrapper(scheduler)
    before = wrapper.state_dict()["_last_lr"]
    advance(optimizer, scheduler, 1)
    assert wrapper.state_dict()["_last_lr"] != before


@pytest.mark.parametrize("name", ["multi-step", "sequential", "chained"])
def test_a_tensor_as_the_learning_rate(name: str) -> None:
    def make() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.AdamW(nn.Linear(1, 1).parameters(), lr=torch.tensor(0.1))
        return optimizer, SCHEDULERS[name](optimizer)

    optimizer, scheduler = make()
    advance(optimizer, scheduler, 3)
    other_optimizer, other = make()
    before = other_optimizer.param_groups[0]["lr"].clone()
    assert not exchange(SchedulersWrapper(scheduler).state_dict(), SchedulersWrapper(other)).unexpected
    assert equal_states(other.state_dict(), scheduler.state_dict())
    assert torch.equal(other_optimizer.param_groups[0]["lr"], before)


def test_wrong_use_is_told_by_name() -> None:
    with pytest.raises(ConfigError, match="a int has not"):
        SchedulersWrapper([3])  # type: ignore[list-item]
