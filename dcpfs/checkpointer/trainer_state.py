"""The ``trainer`` key: the iteration, the gradient scaler, each rank's random states, and what the user adds.

Problem: what counts steps is the same on all ranks, what draws numbers is not; stored alike, one of the two is lost
(case 8). And what a checkpoint has of it need not be what this run has: an old one lacks the scaler, another world had
other ranks.

Way taken: a fixed layout, whose names say what belongs to one rank::

    iteration                 int
    grad_scaler.*             as its state_dict() has it
    rng.rank_3                the generators of global rank 3, one value
    user.*                    as the user's mapping or object has it

The template asks for what both sides have. What only this run has is left as it is, with a warning; what only the
checkpoint has is left out, with the reason. ``rng`` is the exception: a rank that did not exist starts its own stream.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from typing import Protocol, runtime_checkable

from dcpfs.checkpointer.choices import RngPolicy
from dcpfs.checkpointer.layout import check_iteration
from dcpfs.checkpointer.model_state import list_names
from dcpfs.checkpointer.random_state import capture_random_state, restore_random_state
from dcpfs.checkpointer.stored_value import StoredValue
from dcpfs.checkpointer.template_tree import below, build_tree, starts_with_name
from dcpfs.dcp.flatten import flatten
from dcpfs.errors import ConfigError, CorruptCheckpointError

__all__ = ["EXPECTED_REASONS", "TrainerState", "UserState"]

_logger = logging.getLogger(__name__)

_ITERATION = "iteration"
_GRAD_SCALER = "grad_scaler"
_RNG = "rng"
_USER = "user"
_NOT_ASKED = "random states are not asked for"
_ANOTHER_RANK = "it belongs to another rank"

EXPECTED_REASONS = frozenset({_NOT_ASKED, _ANOTHER_RANK})
"""Why something is left out that nobody needs to hear of."""


@runtime_checkable
class UserState(Protocol):
    """An object that gives and takes a state, such as a gradient scaler or a user's own."""

    def state_dict(self) -> dict[str, object]:
        """The state."""
        ...

    def load_state_dict(self, state_dict: dict[str, object], /) -> object:
        """Take a state over."""
        ...


class TrainerState:
    """The state of the trainer around model and optimizer, on one rank. Not thread-safe; no method is collective.

    Args:
        iteration: What a save stores. After a load: what was stored.
        grad_scaler: Saved and restored when given.
        user: A mapping, updated in place by a load, or an object with ``state_dict`` and ``load_state_dict``. Plain
            values must be equal on all ranks.
        rank: This global rank, after which its random states are named.
        rng: Whether they travel.

    Attributes:
        iteration: See above.
        loaded_iteration: Whether a load has found one.

    Raises:
        ConfigError: An argument is something else.
    """

    def __init__(
        self,
        iteration: int = 0,
        *,
        grad_scaler: UserState | None = None,
        user: UserState | MutableMapping[str, object] | None = None,
        rank: int = 0,
        rng: RngPolicy = RngPolicy.PER_RANK,
    ) -> None:
        self.iteration = check_iteration(iteration)
        self.loaded_iteration = False
        if grad_scaler is not None and not isinstance(grad_scaler, UserState):
            raise ConfigError(
                f"a grad scaler must have state_dict and load_state_dict, a {type(grad_scaler).__name__} has not"
            )
        if user is not None and not isinstance(user, (UserState, MutableMapping)):
            raise ConfigError(
                f"trainer state must be a dict, or have state_dict and load_state_dict, a {type(user).__name__} is "
                "neither"
            )
        self._grad_scaler = grad_scaler
        self._user = user
        self._rank = rank
        self._rng = RngPolicy(rng)
        self._loaded_rng: object = None

    def state_dict(self) -> dict[str, object]:
        """What a save stores, read anew. The random states are those of this moment, when all else has been read.

        An object may draw numbers when it is asked, as a data loader does that has no iterator yet: training goes on
        behind these, and so must a run that is resumed.
        """
        state: dict[str, object] = {_ITERATION: self.iteration}
        user = None if self._user is None else _state_of(self._user)
        if self._grad_scaler is not None:
            state[_GRAD_SCALER] = dict(self._grad_scaler.state_dict())
        if self._rng is RngPolicy.PER_RANK:
            state[_RNG] = {self._rank_name: capture_random_state()}
        if user is not None:
            state[_USER] = user
        return state

    def template(self, stored: Mapping[str, StoredValue]) -> dict[str, object]:
        """What a load fills: what both the checkpoint and this run have."""
        template: dict[str, object] = {}
        if _ITERATION in stored:
            template[_ITERATION] = self.iteration
        if self._grad_scaler is not None:
            self._add_scaler(template, below(stored, _GRAD_SCALER), self._grad_scaler.state_dict())
        if self._rng is RngPolicy.PER_RANK:
            if f"{_RNG}.{self._rank_name}" in stored:
                template[_RNG] = {self._rank_name: None}
            else:
                _logger.warning(
                    "no random states of rank %d were saved: its generators are left as they are", self._rank
                )
        if self._user is not None:
            found, live = below(stored, _USER), _state_of(self._user)
            template[_USER] = build_tree(found, live)
            unsaved = [key for key in flatten(live)[0] if key not in found]
            if unsaved:
                _logger.warning("of the trainer state no %s was saved: left as it is", list_names(unsaved))
        return template

    def left_out(self, stored: Mapping[str, StoredValue]) -> dict[str, str]:
        """What the checkpoint has and this run has not: states of other ranks, a scaler, the user's."""
        own = f"{_RNG}.{self._rank_name}"
        reasons: dict[str, str] = {}
        for key in stored:
            if starts_with_name(key, _RNG):
                if self._rng is RngPolicy.NONE:
                    reasons[key] = _NOT_ASKED
                elif key != own:
                    reasons[key] = _ANOTHER_RANK
            elif starts_with_name(key, _GRAD_SCALER) and not self._scaler_is_on():
                reasons[key] = "there is no grad scaler, or it is disabled"
            elif starts_with_name(key, _USER) and self._user is None:
                reasons[key] = "no trainer state was passed"
        return reasons

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Take over a filled template. The random states come last, so that nothing is drawn after them.

        Raises:
            CorruptCheckpointError: The iteration is no iteration, or the random states are none.
        """
        if _ITERATION in state_dict:
            try:
                self.iteration = check_iteration(state_dict[_ITERATION])
            except ConfigError as error:
                raise CorruptCheckpointError(
                    f"the trainer state that was saved has the iteration {state_dict[_ITERATION]!r}, which is none; "
                    "load another step",
                    key=_ITERATION,
                ) from error
            self.loaded_iteration = True
        scaler = state_dict.get(_GRAD_SCALER)
        if self._grad_scaler is not None and isinstance(scaler, Mapping) and scaler:
            self._grad_scaler.load_state_dict({**self._grad_scaler.state_dict(), **scaler})
        user = state_dict.get(_USER)
        if self._user is not None and isinstance(user, Mapping):
            _give(self._user, user)
        rng = state_dict.get(_RNG)
        if self._rng is RngPolicy.PER_RANK and isinstance(rng, Mapping) and self._rank_name in rng:
            self._loaded_rng = rng[self._rank_name]
            self.restore_random_states()

    def restore_random_states(self) -> None:
        """Put the generators to the states that the last load found, if any: for when what came after it drew numbers.

        Raises:
            CorruptCheckpointError: They are no states.
        """
        if self._loaded_rng is not None:
            restore_random_state(self._loaded_rng)

    @property
    def _rank_name(self) -> str:
        return f"rank_{self._rank}"

    def _scaler_is_on(self) -> bool:
        return self._grad_scaler is not None and bool(self._grad_scaler.state_dict())

    def _add_scaler(
        self, template: dict[str, object], found: Mapping[str, StoredValue], live: Mapping[str, object]
    ) -> None:
        if not live:
            return  # disabled: it takes nothing
        if found:
            template[_GRAD_SCALER] = build_tree(found, live)
        else:
            _logger.warning("no grad scaler was saved: this one is left as it is")


def _state_of(owner: UserState | MutableMapping[str, object]) -> dict[str, object]:
    """The state of an object, or a mapping with the states of the objects in it."""
    if not isinstance(owner, MutableMapping):
        return dict(owner.state_dict())
    return {name: _state_of(value) if isinstance(value, UserState) else value for name, value in owner.items()}


def _give(owner: UserState | MutableMapping[str, object], state: Mapping[str, object]) -> None:
    """Give an object its state; a mapping is updated in place, and so are mappings and objects in it."""
    if not isinstance(owner, MutableMapping):
        owner.load_state_dict(dict(state))
        return
    for name, value in state.items():
        found = owner.get(name)
        if isinstance(value, Mapping) and isinstance(found, (UserState, MutableMapping)):
            _give(found, value)
        else:
            owner[name] = value
