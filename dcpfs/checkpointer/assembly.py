"""The parts of a checkpointer, made from its settings.

Problem: settings are read where they are used, so that nobody can say which of them matter to what, and a module that
needs three of them needs them all.

Way taken: the settings end here. What is made of them takes plain values, and can be used and tested without them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from enum import Enum

from dcpfs.checkpointer.choices import Access, AsyncMode, OnProcessLoss
from dcpfs.checkpointer.config import CheckpointConfig
from dcpfs.checkpointer.layout import KEYS
from dcpfs.checkpointer.load_step import Strictness, choose_strictness
from dcpfs.checkpointer.phases import Phases
from dcpfs.checkpointer.plan_cache import PlanCache
from dcpfs.checkpointer.process_saver import ProcessSaver
from dcpfs.checkpointer.resume import ResumeRules, ResumeSearch
from dcpfs.checkpointer.retention import Retention, RetentionPolicy
from dcpfs.checkpointer.save_context import MakeWriter, SaveContext
from dcpfs.checkpointer.saver import InlineSaver, Saver
from dcpfs.checkpointer.thread_saver import ThreadSaver
from dcpfs.errors import ConfigError
from dcpfs.ranks import Ranks

__all__ = ["make_phases", "make_saver", "make_search", "share_settings", "strictness_of"]

_SHARED = ("async_mode", "max_in_flight", "when_busy", "on_process_loss", "on_save_error", "max_consecutive_failures")


def make_phases(
    config: CheckpointConfig, rank: int, label: str, on_phase: Callable[[str, float, int], None] | None = None
) -> Phases:
    """What measures and watches a save or load.

    Args:
        config: The settings.
        rank: For the log.
        label: For the log.
        on_phase: Told name, seconds and bytes of each phase as it ends.
    """
    return Phases(rank=rank, deadline_seconds=config.phase_timeout_seconds, label=label, on_phase=on_phase)


def make_search(config: CheckpointConfig, ranks: Ranks, passed: Iterable[str] = ()) -> ResumeSearch:
    """A search for what to load.

    Args:
        config: The settings.
        ranks: Who loads.
        passed: Keys that the caller has parts for: those of its own are asked for as if ``extra_keys`` named them.
    """
    extra = dict.fromkeys((*config.extra_keys, *(key for key in passed if key not in KEYS)))
    rules = ResumeRules(
        load_training_state=config.load_training_state,
        only_load_scheduler_state=config.only_load_scheduler_state,
        keys_not_to_resume=tuple(config.keys_not_to_resume),
        extra_keys=tuple(extra),
        load_step=config.load_step,
        verify=config.verify_on_resume,
    )
    return ResumeSearch(
        config.save_location(),
        config.load_location(),
        rules,
        ranks=ranks,
        trust=config.trust,
        transfer=config.transfer,
        retry=config.retry,
    )


def strictness_of(config: CheckpointConfig, keys: Iterable[str]) -> dict[str, Strictness]:
    """What of each key must fit."""
    return {key: choose_strictness([key], strict=config.is_strict(key))[key] for key in dict.fromkeys(keys)}


def make_saver(
    config: CheckpointConfig,
    *,
    caller: Ranks,
    saving: Ranks,
    global_rank: int,
    file_rank: int | None,
    make_writer: MakeWriter | None,
    make_ranks: Callable[[], Ranks] | None = None,
) -> Saver:
    """Who saves, by ``async_mode``. Collective where that is a process.

    Args:
        config: The settings.
        caller: The ranks of the calling thread.
        saving: The same ranks, on a group for whoever saves in this process.
        global_rank: This process's rank in the job.
        file_rank: Global rank whose files this rank reads on a load; None: its own.
        make_writer: A user's storage writer; None: dcpfs's own.
        make_ranks: Makes another group like that of ``saving``, collectively, when that one is lost.
    """
    policy = RetentionPolicy(config.keep_last, config.keep_every, config.keep_best, config.best_mode)
    context = SaveContext(
        config.save_location(),
        saving,
        on_existing=config.on_existing,
        dedup=config.dedup,
        make_writer=make_writer,
        transfer=config.transfer,
        retry=config.retry,
        trust=config.trust,
        sweep=Retention(policy),
        global_rank=global_rank,
        file_rank=file_rank,
    )
    new_phases = functools.partial(_save_phases, config, caller.rank)
    if config.async_mode is AsyncMode.ASYNC_WITH_PINNED_MEM:
        stands_in = config.on_process_loss is OnProcessLoss.SAVE_IN_CALLER
        own = dataclasses.replace(context, plans=PlanCache())  # the process remembers plans of its own
        return ProcessSaver(
            context,
            caller,
            max_in_flight=config.max_in_flight,
            when_busy=config.when_busy,
            timeout_seconds=config.timeout_seconds,
            phase_timeout_seconds=config.phase_timeout_seconds,
            niceness=config.background_niceness,
            stand_in=InlineSaver(own, new_phases) if stands_in else None,
        )
    if config.async_mode is AsyncMode.DISABLED:
        return InlineSaver(context, new_phases)
    return ThreadSaver(
        context,
        new_phases,
        caller,
        make_ranks=make_ranks,
        max_in_flight=config.max_in_flight,
        when_busy=config.when_busy,
    )


def share_settings(
    config: CheckpointConfig, access: Access, ranks: Ranks, *, global_rank: int, data_rank: int | None
) -> int | None:
    """Find out that all ranks have the settings by which they decide apart what they do together. Collective.

    Args:
        config: The settings.
        access: What the checkpointer is used for.
        ranks: Of the calling thread.
        global_rank: This process's rank in the job.
        data_rank: Which part of the data this rank trains on; None: its own.

    Returns:
        Global rank whose dataloader file is this rank's: the lowest of those with the same part. None: its own.

    Raises:
        ConfigError: A setting differs; on all ranks.
    """
    settings: dict[str, object] = {name: getattr(config, name) for name in _SHARED}
    shared = {name: str(each.value if isinstance(each, Enum) else each) for name, each in settings.items()}
    load_location = config.load_location()
    shared.update(access=access.value, save_dir=config.save_location().redacted)
    shared.update(load_path="not given" if load_location is None else load_location.redacted)
    told = ranks.all_gather((data_rank, global_rank, shared))
    _, first, expected = told[0]
    for _, rank, theirs in told[1:]:
        for name, value in expected.items():
            if theirs[name] != value:
                raise ConfigError(
                    f"can't make a checkpointer: {name} is {value} on rank {first} and {theirs[name]} on rank {rank}; "
                    "give all ranks the same settings"
                )
    return None if data_rank is None else min(rank for part, rank, _ in told if part == data_rank)


def _save_phases(config: CheckpointConfig, rank: int, iteration: int) -> Phases:
    return make_phases(config, rank, f"save of iteration {iteration}")
