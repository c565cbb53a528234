"""A save and a load of one part without a checkpoint between them: values go from state to template by flat key."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch

from dcpfs.checkpointer.stored_value import StoredValue, TemplatePart
from dcpfs.dcp.flatten import flatten
from dcpfs.dcp.places import put_value

__all__ = ["Exchange", "equal_states", "exchange", "stored_values", "warnings_of"]


@dataclass(frozen=True)
class Exchange:
    """What a load would have said."""

    missing: set[str]
    unexpected: set[str]
    left_out: dict[str, str]


def stored_values(state: Mapping[str, object], *, paths: bool = True) -> dict[str, StoredValue]:
    """What the checkpoint of a state says; without paths, as an unknown writer leaves them."""
    leaves, structure = flatten(state)
    stored = {}
    for key, leaf in leaves.items():
        dtype, shape = (leaf.dtype, tuple(leaf.shape)) if isinstance(leaf, torch.Tensor) else (None, None)
        stored[key] = (
            StoredValue(dtype, shape, structure.paths[key], structure.real_path(key))
            if paths
            else StoredValue(dtype, shape)
        )
    return stored


def exchange(state: Mapping[str, object], target: TemplatePart, *, paths: bool = True) -> Exchange:
    """Load a state, copied, into a part, and say what did not fit."""
    leaves, _ = flatten(state)
    leaves = copy.deepcopy({k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in leaves.items()})
    stored = stored_values(state, paths=paths)
    left_out = target.left_out(stored)
    template = target.template(stored)
    wanted, structure = flatten(template)
    for key, leaf in wanted.items():
        if key not in leaves:
            continue
        value = leaves[key]
        assert isinstance(leaf, torch.Tensor) == isinstance(value, torch.Tensor), key
        if isinstance(leaf, torch.Tensor) and isinstance(value, torch.Tensor):
            assert leaf.shape == value.shape, key
            assert leaf.dtype is value.dtype, key
            with torch.no_grad():
                leaf.copy_(value)
        else:
            put_value(template, structure.real_path(key), value)
    target.load_state_dict(template)
    missing = set(wanted) - set(leaves)
    return Exchange(missing, set(leaves) - set(wanted) - set(left_out), left_out)


def equal_states(first: object, second: object) -> bool:
    """Deep equality of values, types, dtypes and bits."""
    if isinstance(first, torch.Tensor):
        if not isinstance(second, torch.Tensor):
            return False
        same = first.dtype is second.dtype and first.shape == second.shape
        return same and torch.equal(first.detach(), second.detach())
    if isinstance(first, Mapping):
        if not isinstance(second, Mapping) or first.keys() != second.keys():
            return False
        return all(equal_states(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        alike = type(first) is type(second) and len(first) == len(second)
        return alike and all(map(equal_states, first, second))
    return type(first) is type(second) and first == second


def warnings_of(caplog: pytest.LogCaptureFixture) -> str:
    """The warnings that were logged."""
    return "\n".join(each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING)
