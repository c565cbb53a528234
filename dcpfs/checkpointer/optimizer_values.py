"""An optimizer's own ``load_state_dict``, with what it gets coming out as it went in.

Problem: torch's ``Optimizer.load_state_dict`` makes every value anew: moments are cast to the type of their parameter
without a word, and whatever can be iterated over is put together from its parts, so a text becomes the repr of a
generator, and an array or a named tuple an error.

Way taken: the method is called, so that an optimizer's hooks run. Values that it would take apart are sealed in an
object that it can't; where it has cast a tensor, the exact one is put back. Optimizers with a method of their own are
left to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

import torch
from torch.optim import Optimizer

__all__ = ["load_exactly"]


def load_exactly(optimizer: Optimizer, packed: dict[str, object]) -> None:
    """``load_state_dict``, with values as they were saved where torch's own would cast them or take them apart."""
    if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
        optimizer.load_state_dict(packed)
        return
    saved = cast("dict[int, dict[object, object]]", packed["state"])
    optimizer.load_state_dict({**packed, "state": _sealed(saved)})
    for parameter, values in optimizer.state.items():
        optimizer.state[parameter] = _unsealed(values)
    groups = cast("list[dict[str, list[int]]]", packed["param_groups"])
    for group, live_group in zip(groups, optimizer.param_groups, strict=True):
        for index, parameter in zip(group["params"], live_group["params"], strict=True):
            if index in saved and parameter in optimizer.state:
                _restored(optimizer.state[parameter], saved[index], parameter)


class _Sealed:
    """A value that torch's ``load_state_dict`` would iterate over and make anew, such as a text."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value


def _sealed(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, dict):
        return {name: _sealed(each) for name, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_sealed, value))  # type: ignore[call-arg, call-overload]  # mypy forgets which types
    return _Sealed(value) if isinstance(value, Iterable) else value


def _unsealed(value: object) -> object:
    """The same container with what was sealed, or the value."""
    if isinstance(value, _Sealed):
        return value.value
    if isinstance(value, dict):
        for name, each in value.items():
            value[name] = _unsealed(each)
    elif type(value) in (list, tuple):
        return type(value)(map(_unsealed, value))  # type: ignore[call-arg, call-overload]  # mypy forgets which types
    return value


def _restored(found: object, saved: object, parameter: torch.Tensor) -> object:
    """What is to stand for ``found``: itself, with the tensors in it that were cast as they were saved."""
    if isinstance(saved, torch.Tensor) and isinstance(found, torch.Tensor):
        was_cast = found.dtype is not saved.dtype and found.dtype is parameter.dtype
        return saved.to(device=found.device) if was_cast else found
    if isinstance(saved, Mapping) and isinstance(found, dict):
        for name, value in saved.items():
            if name in found and name != "step":  # which an optimizer may keep as it likes
                found[name] = _restored(found[name], value, parameter)
    elif type(found) in (list, tuple) and type(saved) is type(found):
        pairs = zip(cast("list[object]", found), cast("list[object]", saved), strict=True)
        return type(found)([_restored(each, value, parameter) for each, value in pairs])  # type: ignore[call-arg]  # mypy forgets which types
    return found
