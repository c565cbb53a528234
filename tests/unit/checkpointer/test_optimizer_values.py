"""States of unusual optimizers come back as they were: containers, keys, texts, and shapes that look like others."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from dcpfs.checkpointer.optimizer_state import OptimizersWrapper
from dcpfs.checkpointer.stored_value import StoredValue
from dcpfs.dcp.flatten import flatten, unflatten


class OddOptimizer(torch.optim.Optimizer):
    """Keeps whatever it is told to."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {"lr": 0.1})

    def fill(self, make: Callable[[], dict[object, object]]) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = make()


def stored_values(state: Mapping[str, object]) -> dict[str, StoredValue]:
    """What a checkpoint of the state says of it."""
    leaves, structure = flatten(state)
    return {
        key: StoredValue(
            leaf.dtype if isinstance(leaf, torch.Tensor) else None,
            tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None,
            structure.paths[key],
            structure.real_path(key),
        )
        for key, leaf in leaves.items()
    }


def carry(saved: OptimizersWrapper, fresh: OptimizersWrapper) -> None:
    """Save and load, as far as the optimizers are concerned."""
    state = saved.state_dict()
    leaves, structure = flatten(state)
    template = fresh.template(stored_values(state))
    wanted, _ = flatten(template)
    assert wanted.keys() == leaves.keys()
    assert all(
        leaf.shape == wanted[key].shape  # type: ignore[attr-defined]  # its kind is that of the leaf
        for key, leaf in leaves.items()
        if isinstance(leaf, torch.Tensor)
    )
    emptied = unflatten({}, structure)
    fresh.load_state_dict({**{key: value for key, value in emptied.items() if isinstance(key, str)}, **leaves})


def describe(value: object) -> object:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return (type(value).__name__, str(value.dtype), value.tolist())
    if isinstance(value, dict):
        return {(type(key), key): describe(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return (type(value), *map(describe, value))
    return (type(value), value)


ODD_STATES: dict[str, Callable[[], dict[object, object]]] = {
    "texts": lambda: {"mode": "warm", "names": ["a", "b"], "pair": ("x", torch.ones(1))},
    "int keys": lambda: {"factors": {0: torch.ones(3), 1: torch.zeros(1)}, "deep": {"a": {5: {7: 1}}}},
    "text keys that are numbers": lambda: {"factors": {"0": torch.ones(3), "1": 2}},
    "keys with dots": lambda: {"a.b": torch.ones(3), "c": {"d.e": 2}},
    "top keys that are no text": lambda: {0: torch.ones(3), "x": 1},
    "plain mappings": lambda: {"a": {"b": {"c": torch.ones(3)}}},
    "lists": lambda: {"factors": [torch.ones(3), [], {3: torch.ones(1)}], "none": [], "nothing": None},
    "arrays and sets": lambda: {"array": np.arange(3), "set": {1, 2}, "range": range(3), "size": torch.Size([1])},
    "types": lambda: {"double": torch.ones(2, 5, dtype=torch.float64), "flag": True, "type": torch.bfloat16},
    "types in lists": lambda: {"factors": [torch.ones(3, dtype=torch.float64), (torch.ones(1, dtype=torch.float64),)]},
}


@pytest.mark.parametrize("name", ODD_STATES)
@pytest.mark.parametrize("has_state", [False, True])
def test_odd_states_come_back_as_they_were(name: str, has_state: bool) -> None:
    model, other = nn.Linear(5, 2), nn.Linear(5, 2)
    saved, fresh = OddOptimizer(model), OddOptimizer(other)
    saved.fill(ODD_STATES[name])
    if has_state:
        fresh.fill(ODD_STATES[name])
    carry(OptimizersWrapper(model, saved), OptimizersWrapper(other, fresh))
    assert describe(fresh.state_dict()["state"]) == describe(saved.state_dict()["state"])


def test_empty_mappings_come_back() -> None:
    model, other = nn.Linear(5, 2), nn.Linear(5, 2)
    saved, fresh = OddOptimizer(model), OddOptimizer(other)
    saved.fill(lambda: {"empty": {}, "nested": {"a": {}, "b": 1}})
    OptimizersWrapper(other, fresh).load_state_dict(OptimizersWrapper(model, saved).state_dict())
    assert describe(fresh.state_dict()["state"]) == describe(saved.state_dict()["state"])


@pytest.mark.skipif(torch.__version__ < "2.10", reason="torch 2.9 flattens no optimizer state that holds a dict")
def test_nested_states_have_the_keys_of_torch() -> None:
    model = nn.Linear(5, 2)
    optimizer = OddOptimizer(model)
    optimizer.fill(lambda: {"a": {"b": torch.ones(1)}, "factors": {0: torch.ones(3), 1: torch.ones(2)}})
    ours, _ = flatten(OptimizersWrapper(model, optimizer).state_dict())
    torchs = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    assert ours.keys() == torchs.keys()


@pytest.mark.parametrize("shapes", [[(8, 8), (1, 8)], [(1, 8), (1, 8), (8, 8)], [(8, 1), (8, 8), (3, 8)]])
def test_factors_that_look_like_a_parameter_by_chance_are_loaded(shapes: list[tuple[int, int]]) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Module()
        for number, shape in enumerate(shapes):
            model.register_parameter(f"p{number}", nn.Parameter(torch.rand(shape)))
        return model, torch.optim.Adafactor(model.parameters())

    (model, saved), (other, fresh) = make(), make()
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
    saved.step()
    carry(OptimizersWrapper(model, saved), OptimizersWrapper(other, fresh))
    assert describe(fresh.state_dict()["state"]) == describe(saved.state_dict()["state"])
