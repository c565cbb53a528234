"""From the states of a training loop to what a save gets.

Problem: what belongs to one rank and what belongs to all are saved in different ways, and a value that turns out to be
neither, or can't be stored, must be found before a byte is written (cases 8, 109).

Way taken: the dataloader's state is pickled in memory, for a file of this rank alone; everything else must be a mapping
and is planned. Nothing is touched, and no other rank is asked.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from typing import SupportsFloat

from dcpfs.checkpointer.config import CheckpointConfig
from dcpfs.checkpointer.layout import DATALOADER, check_key, rank_file_name
from dcpfs.checkpointer.parts import StateHolder, find_topology, state_of
from dcpfs.checkpointer.rank_state import encode_rank_state
from dcpfs.checkpointer.step_plan import LocalStep, plan_step
from dcpfs.dcp.stateful import own_state
from dcpfs.errors import ConfigError

__all__ = ["plan_states"]

_logger = logging.getLogger(__name__)


def plan_states(
    states: Mapping[str, object],
    iteration: int,
    config: CheckpointConfig,
    *,
    world_size: int,
    rank: int,
    file_rank: int | None,
    metric: SupportsFloat | None,
    parameters: Mapping[str, Collection[str]] | None = None,
) -> LocalStep:
    """Plan a save of states by key. Local.

    Args:
        states: Key to mapping, or object with ``state_dict``; None is no state.
        iteration: Of the step.
        config: The settings.
        world_size: Number of ranks that save.
        rank: This process's rank in the job, by which its file is named.
        file_rank: Rank whose file is this rank's; None: its own.
        metric: What ``keep_best`` compares: a number of any library. One that is not finite counts as none, with a
            warning: a loss that has diverged must not cost the step.
        parameters: As for `plan_step`.

    Raises:
        ConfigError: A key is no name, a state no mapping, or the metric no number.
        UnsupportedValueError: A value can't be stored exactly; names its key.
    """
    rated = _as_number(metric, iteration)
    rank_files: dict[str, bytes] = {}
    relied_on: list[str] = []
    nested: dict[str, Mapping[str, object]] = {}
    for key, holder in states.items():
        if holder is None:
            continue
        state = state_of(holder) if isinstance(holder, (Mapping, StateHolder)) else holder
        if key == DATALOADER:
            if file_rank is None or file_rank == rank:
                name = f"{DATALOADER}/{rank_file_name(rank)}"
                rank_files[name] = encode_rank_state(state, key=DATALOADER, rank=rank, trust=config.trust)
            else:
                relied_on.append(f"{DATALOADER}/{rank_file_name(file_rank)}")
        elif isinstance(state, Mapping):
            nested[check_key(key)] = {name: own_state(value) for name, value in state.items()}
        else:
            raise ConfigError(f"can't save {key!r}: its state is a {type(state).__name__} and no mapping")
    return plan_step(
        iteration,
        nested,
        rank_files=rank_files,
        world_size=world_size,
        trust=config.trust,
        dedup=config.dedup,
        metric=rated,
        topology=find_topology(nested),
        relied_on=relied_on,
        parameters=parameters,
    )


def _as_number(metric: object, iteration: int) -> float | None:
    """The metric as JSON can hold it."""
    if metric is None:
        return None
    try:
        if isinstance(metric, (bool, str, bytes)) or not isinstance(metric, SupportsFloat):
            raise TypeError("it is no number")
        number = float(metric)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ConfigError(
            f"can't save iteration {iteration} with a {type(metric).__name__} as metric: give one number, or None"
        ) from error
    if math.isfinite(number):
        return number
    _logger.warning("the metric of iteration %d is %r: keep_best passes over this step", iteration, number)
    return None
