"""Models that FSDP1 has sharded, and their optimizers, through torch's own functions.

Problem: FSDP1 keeps one flat parameter for many, and what a rank holds of a parameter is a piece of it without a shape.
Taken for what it looks like, the pieces of two ranks are replicas of one another, and one of them is lost.

Why not by hand: where a piece belongs is known to FSDP1 alone. Way taken: torch's ``get_model_state_dict`` and
``get_optimizer_state_dict``, which give whole shapes under clean names, with their faults: the optimizer is stepped
with zero gradients to make up its state, and frozen parameters are not told apart. Collective over the model's group.
They take one module, so of a model in parts each part goes by itself, with the optimizers that hold its parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from dcpfs.dcp.flatten import flatten
from dcpfs.errors import ConfigError

__all__ = ["FlatShardedOptimizers", "load_flat_model", "read_flat_model", "sort_by_part"]

_State = dict[str, Any]
"""What torch's functions take; their own types are not exported."""

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def read_flat_model(part: nn.Module) -> dict[str, object]:
    """Clean name to sharded tensor."""
    return cast("dict[str, object]", get_model_state_dict(part))


def load_flat_model(part: nn.Module, state: Mapping[str, object]) -> None:
    """Give a model what a state has for it."""
    set_model_state_dict(part, cast("_State", dict(state)), options=StateDictOptions(strict=False))


def sort_by_part(parts: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> list[FlatShardedOptimizers]:
    """The optimizers of each part that has some.

    Raises:
        ConfigError: One holds parameters of several parts, or of none.
    """
    by_part: dict[int, list[Optimizer]] = {}
    owners = {id(parameter): number for number, part in enumerate(parts) for parameter in part.parameters()}
    for optimizer in optimizers:
        found = {owners.get(id(parameter)) for group in optimizer.param_groups for parameter in group["params"]}
        (number, *others) = found or {0}
        if others or number is None:
            raise ConfigError(
                f"can't save the {type(optimizer).__name__} of a model that FSDP1 has sharded: it holds parameters of "
                "several parts of the model, or of none; make one for each part, or shard the model with fully_shard"
            )
        by_part.setdefault(number, []).append(optimizer)
    return [FlatShardedOptimizers(parts[number], found) for number, found in sorted(by_part.items())]


class FlatShardedOptimizers:
    """The optimizers of one part of a model, as one container.

    Args:
        part: The module.
        optimizers: Those that hold its parameters.
    """

    def __init__(self, part: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._model = part
        self.optimizers = list(optimizers)

    def state_dict(self) -> dict[str, object]:
        """Flat key to sharded tensor or value."""
        return cast("dict[str, object]", get_optimizer_state_dict(self._model, self.optimizers, options=_FLAT))

    def load_state_dict(self, state_dict: dict[str, object], /) -> None:
        """Take a state over."""
        leaves, _ = flatten(state_dict)
        set_optimizer_state_dict(self._model, self.optimizers, optim_state_dict=cast("_State", leaves), options=_FLAT)
