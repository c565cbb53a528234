"""What a trainer saves in one step: model, optimizer, scheduler, its own counters, and its place in the data.

A Llama-shaped model with AdamW, all in fp32, so that loading has nothing to cast. Every value is generated, so what a
load brings back is compared without a second copy, as in `benchmarks.workloads`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .modules import make_module
from .workloads import State, TensorSpec, Workload, differences, fill, first_row, local, specs
from .workloads import poison as poison_state

__all__ = ["Training", "build_training", "check_training", "poison_training"]

_MODEL = "model."
_MOMENTS = ("exp_avg", "exp_avg_sq")
_STEP = 7.0
_EPOCH = 5
_POSITION = {"next": 12_345, "epoch": 2}
_PROGRESS = {"tokens": 987_654_321}
_BYTES_PER_PARAMETER = 12
_ANCHOR_BYTES_PER_PARAMETER = 10


@dataclass
class Training:
    """One rank's part.

    Attributes:
        tensors: What the parameters, and the moments under their names in the optimizer's state, hold.
        mesh: That the parameters are sharded over by FSDP2, or None.
        dataloader: The rank's own.
        progress: The trainer's, the same on all ranks.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    tensors: tuple[TensorSpec, ...]
    mesh: DeviceMesh | None
    dataloader: dict[str, int] = field(default_factory=dict)
    progress: dict[str, int] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Of all ranks' tensors together."""
        return sum(spec.size_bytes for spec in self.tensors)


def build_training(size_bytes: int, mesh: DeviceMesh | None) -> Training:
    """Make the training state of this rank.

    Args:
        size_bytes: Of model and optimizer together, about.
        mesh: To shard over, or None.
    """
    scaled = size_bytes * _ANCHOR_BYTES_PER_PARAMETER // _BYTES_PER_PARAMETER
    tensors = tuple(replace(spec, dtype=torch.float32) for spec in specs(Workload.LLAMA, scaled))
    parameters = [
        (spec.key.removeprefix(_MODEL), spec.dtype, spec.shape) for spec in tensors if spec.key.startswith(_MODEL)
    ]
    model = make_module(parameters, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        optimizer.state[parameter] = {"step": torch.tensor(0.0)} | {
            moment: torch.zeros_like(parameter.detach()) for moment in _MOMENTS
        }
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)
    training = Training(model, optimizer, scheduler, tensors, mesh)
    state = _tensors(training)
    for spec in tensors:
        fill(spec, local(state[spec.key]), first_row(spec, mesh))
    _set(training, _STEP, _EPOCH, _POSITION, _PROGRESS)
    return training


def poison_training(training: Training) -> None:
    """Overwrite all of it, so that an old value is no success."""
    poison_state(_tensors(training))
    wrong = dict.fromkeys((*_POSITION, *_PROGRESS), -1)
    _set(training, -1.0, -1, {name: wrong[name] for name in _POSITION}, {name: wrong[name] for name in _PROGRESS})


def check_training(training: Training) -> str | None:
    """Compare with what was generated; the first difference in words, or None."""
    state = _tensors(training)
    for spec in training.tensors:
        found = differences(spec, local(state[spec.key]), first_row(spec, training.mesh))
        if found is not None:
            return found
    for each in training.optimizer.state.values():
        if float(each["step"]) != _STEP:
            return f"the optimizer's step is {float(each['step'])}"
    if training.scheduler.last_epoch != _EPOCH:
        return f"the scheduler is at {training.scheduler.last_epoch}"
    if training.dataloader != _POSITION:
        return f"the dataloader is at {training.dataloader}"
    return None if training.progress == _PROGRESS else f"the trainer is at {training.progress}"


def _tensors(training: Training) -> State:
    state: State = {}
    for name, parameter in training.model.named_parameters():
        state[f"{_MODEL}{name}"] = parameter.detach()
        for moment in _MOMENTS:
            state[f"optim.state.{name}.{moment}"] = training.optimizer.state[parameter][moment]
    return state


def _set(training: Training, step: float, epoch: int, position: dict[str, int], progress: dict[str, int]) -> None:
    for each in training.optimizer.state.values():
        each["step"].fill_(step)
    training.scheduler.last_epoch = epoch
    training.dataloader.update(position)
    training.progress.update(progress)
