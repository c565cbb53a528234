"""How much of a step must fit, and what a load of it did. Values only.

Problem: one switch for "strict" is either fatal for a key of the trainer's that another world wrote, or blind to an
optimizer that lost its state (case 93); and a load that returns nothing leaves people to guess what was loaded.

Way taken: strictness is chosen by key, and a report has every name, key by key.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dcpfs.checkpointer.layout import TRAINER

__all__ = ["KeyReport", "StepLoadReport", "Strictness", "choose_strictness"]


class Strictness(enum.Enum):
    """What of a key must fit."""

    EXACT = "exact"
    """Everything: what is missing, mismatched, or in the checkpoint without a place on any rank, is an error."""
    REQUIRED = "required"
    """What the state asks for; what else the checkpoint has is left alone, with a warning."""
    LOOSE = "loose"
    """Nothing: what fits is loaded, and the log says what did not."""


def choose_strictness(keys: Iterable[str], *, strict: bool | Mapping[str, bool]) -> dict[str, Strictness]:
    """The strictness of each key. ``trainer`` holds the states of other ranks and of parts that this run may not have.

    Args:
        keys: The keys.
        strict: As configured, for all or by key (those that are not named are strict). False: what fits is loaded.
    """
    chosen = {}
    for key in keys:
        if not (strict if isinstance(strict, bool) else strict.get(key, True)):
            chosen[key] = Strictness.LOOSE
        else:
            chosen[key] = Strictness.REQUIRED if key == TRAINER else Strictness.EXACT
    return chosen


@dataclass(frozen=True, slots=True)
class KeyReport:
    """What a load did with one key on this rank, by the names that the state has.

    Attributes:
        loaded: Loaded.
        missing: The checkpoint lacks them; left as they were.
        unexpected: The checkpoint has them, and no rank a place.
        mismatched: Name to how kind, shape or dtype differ; left as they were.
        skipped: Left as they were, by a skip pattern.
        renamed: Name in the state to name in the checkpoint, where they differ.
        left_out: Stored name to the reason why the part did not ask for it.
    """

    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: Mapping[str, str] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepLoadReport:
    """What a load of a step did on this rank.

    Attributes:
        keys: Key in torch's format to its report.
        states: Key to the state that was loaded: as it was handed to the part, whole for keys that were read without
            one, and for rank files what this rank's held.
        absent: Keys that were asked for, are optional, and the step lacks.
        left: Keys that the step holds and nobody asked for, as far as its manifest tells.
        read_bytes: Bytes that this rank needed.
        moved_bytes: Bytes that this rank asked of the store, gaps included.
        requests: Requests that took.
        seconds: Wall time.
    """

    keys: Mapping[str, KeyReport] = field(default_factory=dict)
    states: Mapping[str, object] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    read_bytes: int = 0
    moved_bytes: int = 0
    requests: int = 0
    seconds: float = 0.0
