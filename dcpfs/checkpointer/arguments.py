"""Whether what a trainer passes to `save` and `load` stands where it is meant to.

Problem: five arguments may be given by position, and all of them have a ``state_dict`` of some kind. One that is left
out moves all after it, and the error then speaks of what an optimizer lacks, or comes at the next load.

Way taken: torch's own kinds are known by their classes. One under the name of another is refused, with the name that it
seems to be meant for. What is of no known kind is left to whoever takes it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from dcpfs.errors import ConfigError

__all__ = ["check_arguments"]

_KINDS: tuple[tuple[str, type], ...] = (
    ("model_parts", nn.Module),
    ("optimizer", torch.optim.Optimizer),
    ("scheduler", LRScheduler),
    ("grad_scaler", torch.amp.GradScaler),
    ("iteration", int),
)
"""Argument to what can be meant for it alone, in the order of the arguments."""
_ORDER = ", ".join(name for name, _ in _KINDS)


def check_arguments(given: Mapping[str, object]) -> None:
    """Return when nothing stands in the place of something else.

    Args:
        given: Name of an argument to what was passed.

    Raises:
        ConfigError: Something does.
    """
    for name, value in given.items():
        meant = _meant_for(value)
        if meant is not None and meant != name:
            raise ConfigError(
                f"{name} was given a value of type {type(value).__name__}, which seems to be meant for {meant}: pass "
                f"it by name, {meant}=...; by position the arguments are {_ORDER}"
            )


def _meant_for(value: object) -> str | None:
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    if isinstance(first, bool):
        return None
    return next((name for name, kind in _KINDS if isinstance(first, kind)), None)
