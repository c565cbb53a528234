"""Which values of a state have a state of their own.

Problem: DCP asks whatever has ``state_dict`` and ``load_state_dict`` for its state. A loader that takes each mapping
for plain data stores the items of a dict subclass that has both, and drops what its state says beside them; one that
asks each attribute of an instance takes a dict whose attributes are its keys for one that has everything.

Way taken: one answer, for saving as for loading. Plain containers are never asked, subclasses of containers by their
class, and everything else by the instance, as DCP does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeGuard

import torch
from torch.distributed.checkpoint.stateful import Stateful

__all__ = ["is_stateful", "own_state"]

_NEVER = frozenset({dict, list, tuple, str, bytes, int, float, bool, type(None)})
_METHODS = ("state_dict", "load_state_dict")


def is_stateful(value: object) -> TypeGuard[Stateful]:
    """Whether a top-level value is asked for its state, and given it."""
    if type(value) in _NEVER or isinstance(value, torch.Tensor):
        return False
    owner = type(value) if isinstance(value, (Mapping, list, tuple)) else value
    return all(callable(getattr(owner, name, None)) for name in _METHODS)


def own_state(value: object) -> object:
    """What is saved of a top-level value: the state it gives when asked, or itself."""
    return value.state_dict() if is_stateful(value) else value
