"""Containers that bring a state of their own, beside torch's optimizers.

Problem: a trainer may keep its optimizers in a container that names its state itself. Such a state is saved as it is;
but where the container makes it up by torch's functions, it is empty as soon as there are gradients (case 6), and a
load would ask for nothing.

Way taken: what is no plain optimizer and has ``state_dict`` and ``load_state_dict`` is passed through. When its state
lacks all that a checkpoint holds, it is asked once more with the gradients out of the way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

import torch
from torch import nn
from torch.optim import Optimizer

from dcpfs.checkpointer.stored_value import StoredValue
from dcpfs.dcp.flatten import flatten
from dcpfs.errors import ConfigError

__all__ = ["StateHolder", "container_template", "sort_optimizers"]


@runtime_checkable
class StateHolder(Protocol):
    """Anything that gives and takes a state, such as a trainer's container of optimizers."""

    def state_dict(self) -> dict[str, object]:
        """The state."""
        ...

    def load_state_dict(self, state_dict: dict[str, object], /) -> object:
        """Take a state over."""
        ...


def sort_optimizers(given: object) -> tuple[list[Optimizer], list[StateHolder]]:
    """Torch's optimizers, and the containers, among what a caller gave.

    Raises:
        ConfigError: Something is neither, or is given twice.
    """
    optimizers: list[Optimizer] = []
    containers: list[StateHolder] = []
    members: Iterable[object] = (given,)
    if not isinstance(given, StateHolder) and isinstance(given, Iterable) and not isinstance(given, (str, Mapping)):
        members = tuple(given)
    for member in members:
        if isinstance(member, Optimizer) and not hasattr(member, "optimizers"):
            optimizers.append(member)
        elif isinstance(member, StateHolder) and not isinstance(member, nn.Module):
            containers.append(member)
        else:
            raise ConfigError(
                f"an optimizer must have state_dict and load_state_dict, a {type(member).__name__} has not; give one "
                "or a sequence of them"
            )
    if len({id(member) for member in (*optimizers, *containers)}) < len(optimizers) + len(containers):
        raise ConfigError("an optimizer is given twice: give each once")
    return optimizers, containers


def container_template(container: StateHolder, stored: Mapping[str, StoredValue]) -> dict[str, object]:
    """A container's own state; once more without gradients where these keep it from making up what is stored."""
    state = container.state_dict()
    wanted = [key for key in stored if key.startswith("state.")]
    if wanted and not any(key in flatten(state)[0] for key in wanted):
        with _hidden_gradients(_optimizers_in(container)):
            state = container.state_dict()
    return dict(state)


def _optimizers_in(container: object) -> list[Optimizer]:
    inner = getattr(container, "optimizers", None)
    if inner is None and isinstance(container, Iterable):
        inner = container
    return [member for member in inner if isinstance(member, Optimizer)] if isinstance(inner, Iterable) else []


@contextmanager
def _hidden_gradients(optimizers: list[Optimizer]) -> Iterator[None]:
    gradients: dict[torch.Tensor, torch.Tensor] = {
        parameter: parameter.grad
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    }
    for parameter in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
