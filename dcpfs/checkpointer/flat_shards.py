"""Models that FSDP1 has sharded, and their optimizers, through torch's own functions.

Problem: FSDP1 keeps one flat parameter for many, and what a rank holds of a parameter is a piece of it without a shape.
Taken for what it looks like, the pieces of two ranks are replicas of one another, and one of them is lost.

Why not by hand: where a piece belongs is known to FSDP1 alone. Way taken: torch's ``get_model_state_dict`` and
``get_optimizer_state_dict``, which give whole shapes under clean names, with their faults: the optimizer is stepped
with zero gradients to make up its state, and frozen parameters are not told apart. Collective over the model's group.
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

__all__ = ["FlatShardedOptimizers", "load_flat_model", "read_flat_model"]

_State = dict[str, Any]
"""What torch's functions take; their own types are not exported."""

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def read_flat_model(part: nn.Module) -> dict[str, object]:
    """Clean name to sharded tensor."""
    return cast("dict[str, object]", get_model_state_dict(part))


def load_flat_model(part: nn.Module, state: Mapping[str, object]) -> None:
    """Give a model what a state has for it."""
    set_model_state_dict(part, cast("_State", dict(state)), options=StateDictOptions(strict=False))


class FlatShardedOptimizers:
    """The optimizers of one model, as one container.

    Args:
        parts: The model: one part, since torch can't say which of several an optimizer belongs to.
        optimizers: Its optimizers.

    Raises:
        ConfigError: There are several parts.
    """

    def __init__(self, parts: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        if len(parts) > 1:
            raise ConfigError(
                "optimizers of a model of several parts can't be saved when FSDP1 has sharded it: shard it with "
                "fully_shard, or save each part by itself"
            )
        self._model = parts[0]
        self.optimizers = list(optimizers)

    def state_dict(self) -> dict[str, object]:
        """Flat key to sharded tensor or value."""
        return cast("dict[str, object]", get_optimizer_state_dict(self._model, self.optimizers, options=_FLAT))

    def load_state_dict(self, state_dict: dict[str, object], /) -> None:
        """Take a state over."""
        leaves, _ = flatten(state_dict)
        set_optimizer_state_dict(self._model, self.optimizers, optim_state_dict=cast("_State", leaves), options=_FLAT)
