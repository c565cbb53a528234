"""Schedulers as a part of a training state.

Problem: a scheduler's state is its attributes, milestones under int keys included, and which they are changes with the
version of torch; so an exact match fails after an upgrade, and a lenient one lets a cosine schedule resume a linear one
without a word. A state that was kept from an earlier save brings back an old learning rate (case 14).

Way taken: asked anew at each call. The template is the scheduler's own state, with what it holds under each attribute
taken from the checkpoint: other milestones are no mismatch, another set of attributes is. Only attributes that begin
with an underscore, which are torch's own bookkeeping, may be absent on one side: the checkpoint's are taken over, the
scheduler's are kept. Tensors (a learning rate can be one) are not filled in place: in a fresh ``SequentialLR`` two
places share one, and what was saved after the first milestone differs there. One scheduler's keys stand at the top
level; of several each has its number.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Mapping
from typing import Protocol, cast, runtime_checkable

import torch

from dcpfs.checkpointer.stored_value import StoredValue
from dcpfs.checkpointer.template_tree import below, build_tree, starts_with_name
from dcpfs.errors import ConfigError, KeyMismatchError

__all__ = ["Scheduler", "SchedulersWrapper"]

_logger = logging.getLogger(__name__)

_RETIRED = frozenset({"verbose"})
"""Attributes that torch's schedulers had once."""


@runtime_checkable
class Scheduler(Protocol):
    """Anything that gives and takes a state, such as torch's schedulers."""

    def state_dict(self) -> dict[str, object]:
        """The state."""
        ...

    def load_state_dict(self, state_dict: dict[str, object], /) -> object:
        """Take a state over."""
        ...


class SchedulersWrapper:
    """The state of schedulers. Can be given to `dcpfs.save`, `dcpfs.load` and torch's ``dcp``.

    Restore it after the optimizers were made and before they are stepped; the learning rate itself travels with the
    optimizers' ``param_groups``. Not thread-safe; no method is collective.

    Args:
        schedulers: A scheduler, or a sequence of them; each has ``state_dict`` and ``load_state_dict``.

    Raises:
        ConfigError: One has not.
    """

    def __init__(self, schedulers: Scheduler | Iterable[Scheduler]) -> None:
        self._single = isinstance(schedulers, Scheduler)
        members: list[object] = [schedulers]
        if not self._single and isinstance(schedulers, Iterable) and not isinstance(schedulers, (str, Mapping)):
            members = list(schedulers)
        for member in members:
            if not isinstance(member, Scheduler):
                raise ConfigError(
                    f"a scheduler must have state_dict and load_state_dict, a {type(member).__name__} has not; give "
                    "one or a sequence of them"
                )
        self._schedulers = cast("list[Scheduler]", members)

    def state_dict(self) -> dict[str, object]:
        """The state of the only scheduler, or number, as text, to state."""
        if self._single:
            return dict(self._schedulers[0].state_dict())
        return {str(number): dict(each.state_dict()) for number, each in enumerate(self._schedulers)}

    def template(self, stored: Mapping[str, StoredValue]) -> dict[str, object]:
        """What a load fills: the attributes that scheduler and checkpoint have, as the checkpoint has them."""
        if self._single:
            return _template(self._schedulers[0].state_dict(), stored)
        return {
            str(number): _template(each.state_dict(), below(stored, str(number)))
            for number, each in enumerate(self._schedulers)
        }

    def left_out(self, stored: Mapping[str, StoredValue]) -> dict[str, str]:  # noqa: ARG002 - part of the protocol
        """Nothing: what a scheduler has no attribute for is a mismatch."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Take over a filled template. Attributes that it lacks keep their values.

        Raises:
            KeyMismatchError: It is the state of another number of schedulers. Nothing was changed.
        """
        if self._single:
            _load(self._schedulers[0], state_dict)
            return
        names = [str(number) for number in range(len(self._schedulers))]
        unknown = [key for key in state_dict if key not in names]
        if unknown:
            raise KeyMismatchError(
                f"loading {len(names)} schedulers: the state has {', '.join(unknown)} beside theirs, so it is that of "
                "another number of schedulers; nothing was changed",
                unexpected=unknown,
            )
        for name, each in zip(names, self._schedulers, strict=True):
            part = state_dict.get(name, {})
            _load(each, cast("Mapping[str, object]", part))


def _template(live: Mapping[str, object], stored: Mapping[str, StoredValue]) -> dict[str, object]:
    wanted: dict[str, StoredValue] = {}
    rest: dict[str, object] = {}
    for name, value in live.items():
        found = {key: entry for key, entry in stored.items() if starts_with_name(key, name)}
        if found:
            wanted.update(found)
        elif not name.startswith("_"):
            rest[name] = value
    known = tuple(live)
    for key, entry in stored.items():
        name = key.partition(".")[0]
        if name not in known and (name.startswith("_") or name in _RETIRED):
            wanted[key] = entry
    return {**build_tree(wanted, {name: _apart(value) for name, value in live.items()}), **rest}


def _apart(value: object) -> object:
    """The same, with tensors that share memory with nothing."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, list):
        return [_apart(each) for each in value]
    if isinstance(value, dict):
        own = copy.copy(value)
        for name, each in value.items():  # a Counter would add in an update
            own[name] = _apart(each)
        return own
    return value


def _load(scheduler: Scheduler, given: Mapping[str, object]) -> None:
    kept = {name: value for name, value in scheduler.state_dict().items() if name not in given}
    if kept:
        _logger.debug("%s keeps its own %s", type(scheduler).__name__, ", ".join(kept))
    scheduler.load_state_dict({**kept, **given})
