"""What a trainer hands to `save` and `load`, sorted into the keys of a step.

Problem: a trainer's objects come one or many, as modules, optimizers, containers or plain dicts, and not all on every
rank. Each checkpointer that sorts them anew for save and for load ends with two lists of keys that differ.

Way taken: one value that says what was passed, and is asked for the states of a save or the parts of a load. What was
left out (None) is no key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

import torch
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

from dcpfs.checkpointer.choices import RngPolicy
from dcpfs.checkpointer.layout import DATALOADER, KEYS, MODEL, OPTIM, SCHEDULER, TRAINER, check_key
from dcpfs.checkpointer.model_state import ModelWrapper, model_parts_of
from dcpfs.checkpointer.optimizer_state import OptimizersWrapper
from dcpfs.checkpointer.parameter_names import ModuleNames
from dcpfs.checkpointer.scheduler_state import Scheduler, SchedulersWrapper
from dcpfs.checkpointer.trainer_state import TrainerState
from dcpfs.checkpointer.whole_state import WholeState
from dcpfs.errors import ConfigError

if TYPE_CHECKING:
    from torch.optim import Optimizer

__all__ = ["Parts", "StateHolder", "find_topology", "state_of", "topology_of"]


@runtime_checkable
class StateHolder(Protocol):
    """Anything with a state that can be asked for and given back."""

    def state_dict(self) -> dict[str, object]:
        """The state."""
        ...

    def load_state_dict(self, state_dict: dict[str, object]) -> object:
        """Take over a state."""
        ...


@dataclass
class Parts:
    """What one call was given, by key.

    Attributes:
        model_parts: The modules, for callbacks; empty where none were passed.
        holders: Key to what has its state: a wrapper, a `StateHolder`, or a mapping.
        trainer: What `add_trainer` made.
    """

    model_parts: list[nn.Module] = field(default_factory=list)
    holders: dict[str, object] = field(default_factory=dict)
    trainer: TrainerState | None = None

    @classmethod
    def of_training(
        cls,
        model: nn.Module | Sequence[nn.Module] | None,
        optimizer: object,
        scheduler: object,
        dataloader: object,
    ) -> Parts:
        """The parts of a training loop, without ``trainer``.

        Raises:
            ConfigError: One is nothing that has a state.
        """
        parts = cls()
        if model is not None:
            parts.model_parts = list(model_parts_of(model))
            parts.holders[MODEL] = ModelWrapper(parts.model_parts)
        if optimizer is not None:
            parts.holders[OPTIM] = OptimizersWrapper(parts.model_parts, cast("Optimizer", optimizer))
        if scheduler is not None:
            parts.holders[SCHEDULER] = SchedulersWrapper(cast("Scheduler", scheduler))
        if dataloader is not None:
            parts.holders[DATALOADER] = _check_holder(DATALOADER, dataloader)
        return parts

    @classmethod
    def of_states(cls, states: Mapping[str, object]) -> Parts:
        """Any keys; a module, optimizer or scheduler under its own key is taken as what it is.

        Raises:
            ConfigError: A key is no name, or a value nothing that has a state.
        """
        parts = cls()
        given = {check_key(key): value for key, value in states.items() if value is not None}
        model = given.get(MODEL)
        if _is_modules(model):
            parts.model_parts = list(model_parts_of(cast("nn.Module", model)))
        for key, value in given.items():
            if key == MODEL and parts.model_parts:
                parts.holders[key] = ModelWrapper(parts.model_parts)
            elif key == OPTIM and parts.model_parts and _are(value, torch.optim.Optimizer):
                parts.holders[key] = OptimizersWrapper(parts.model_parts, cast("Optimizer", value))
            elif key == SCHEDULER and not isinstance(value, Mapping):
                parts.holders[key] = SchedulersWrapper(cast("Scheduler", value))
            else:
                holder = _check_holder(key, value)
                parts.holders[key] = _growing(holder) if key not in KEYS else holder
        return parts

    def add_trainer(
        self, *, iteration: int, rank: int, rng: RngPolicy, grad_scaler: object = None, user: object = None
    ) -> None:
        """Add what is always saved: the iteration, the random number generators, the grad scaler, the user's state."""
        if user is not None:
            _check_holder(TRAINER, user)
        self.trainer = self.holders[TRAINER] = TrainerState(
            iteration=iteration,
            rank=rank,
            rng=rng,
            grad_scaler=cast("StateHolder | None", grad_scaler),
            user=cast("StateHolder | None", user),
        )

    def check(self) -> None:
        """Return when model and optimizer could be saved as far as their names go: better said now than at a save.

        Raises:
            ConfigError: Names clash, or the optimizer holds a parameter that the model lacks.
        """
        for key in (MODEL, OPTIM):
            holder = self.holders.get(key)
            if isinstance(holder, (ModelWrapper, OptimizersWrapper)):
                holder.state_dict()

    def parameter_names(self) -> frozenset[str]:
        """Names of the parameters of the model; of what else its state has, a forward pass may write all."""
        return frozenset(name for part in self.model_parts for name in ModuleNames.of(part).parameters)

    def states(self) -> dict[str, object]:
        """The state of each key, read now, for a save."""
        return {key: state_of(holder) for key, holder in self.holders.items()}


def state_of(holder: object) -> object:
    """The state of a holder; a mapping is its own."""
    if isinstance(holder, Mapping):
        return holder
    return cast("StateHolder", holder).state_dict()


def find_topology(states: Mapping[str, object]) -> dict[str, object]:
    """The device mesh of the first DTensor of the model: shape and names of its dimensions. Empty without one."""
    model = states.get(MODEL)
    if not isinstance(model, Mapping):
        return {}
    return _mesh_of(model.values())


def topology_of(model: object) -> dict[str, object]:
    """As `find_topology`, of what a model is loaded into."""
    if isinstance(model, ModelWrapper):
        return _mesh_of(chain.from_iterable(part.parameters() for part in model.parts))
    return _mesh_of(model.values()) if isinstance(model, Mapping) else {}


def _mesh_of(values: Iterable[object]) -> dict[str, object]:
    for value in values:
        if isinstance(value, DTensor):
            mesh = value.device_mesh
            names = mesh.mesh_dim_names
            return {"mesh_shape": list(mesh.shape), "mesh_dim_names": list(names) if names is not None else None}
    return {}


def _check_holder(key: str, value: object) -> object:
    if isinstance(value, Mapping) or (
        callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
    ):
        return value
    raise ConfigError(
        f"can't save or load a {type(value).__name__} under the key {key!r}: give a mapping, or an object with "
        "state_dict and load_state_dict"
    )


def _growing(holder: object) -> object:
    """A holder of the user's own that takes over what was saved, although it is empty by now."""
    if isinstance(holder, (nn.Module, Mapping)) and not (isinstance(holder, MutableMapping) and not holder):
        return holder
    return WholeState(cast("Stateful", holder))


def _is_modules(value: object) -> bool:
    return value is not None and _are(value, nn.Module)


def _are(value: object, kind: type) -> bool:
    if isinstance(value, kind):
        return True
    return isinstance(value, (list, tuple)) and len(value) > 0 and all(isinstance(each, kind) for each in value)
