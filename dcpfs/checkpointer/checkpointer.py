"""The checkpointer: what a training loop calls.

Problem: between the loop and the storage stand a dozen decisions (what to resume from, who saves when, what to do when
a save fails), and each trainer writes them anew, with the same faults.

Way taken: this module decides nothing itself. It holds the settings, the two process groups (one for the calling
thread, one for whoever saves) and the life cycle, and hands values from one part to the next::

    load   parts → ResumeSearch → load_with_fallback → iteration
    save   make room → states → plan_step → Saver → save_step (there: claim, write, commit, pointer, retention)
    wait   Saver.settle → outcomes → raise, or warn

What became of a save is told at a collective call, on all ranks alike: at once when it ran in the caller, else at the
next ``save``, ``wait`` or ``close``.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from dcpfs.checkpointer.arguments import check_arguments
from dcpfs.checkpointer.assembly import make_phases, make_saver, make_search, share_settings, strictness_of
from dcpfs.checkpointer.callbacks import CheckpointCallbacks
from dcpfs.checkpointer.choices import Access, AsyncMode, WorldSizePolicy
from dcpfs.checkpointer.config import CheckpointConfig
from dcpfs.checkpointer.exit_hook import ExitHook
from dcpfs.checkpointer.groups import close_group, global_rank, make_group
from dcpfs.checkpointer.layout import KEYS, MODEL, TRAINER, check_iteration
from dcpfs.checkpointer.load_step import StepLoadReport
from dcpfs.checkpointer.model_only import cast_floating
from dcpfs.checkpointer.parts import Parts
from dcpfs.checkpointer.preemption import SaveFlag, SignalHandlers, install_signal_handler
from dcpfs.checkpointer.rank_file_loading import ReshardHook
from dcpfs.checkpointer.resume import Origin, load_with_fallback
from dcpfs.checkpointer.save_context import StepReport
from dcpfs.checkpointer.save_directory import SaveDirectory
from dcpfs.checkpointer.saver import SaveOutcome, Saver, SaveRequest
from dcpfs.checkpointer.state_plan import plan_states
from dcpfs.checkpointer.step_plan import LocalStep
from dcpfs.checkpointer.verdicts import Verdicts
from dcpfs.checkpointer.writer_maker import WriterMaker
from dcpfs.dcp.reader import FsspecStorageReader
from dcpfs.dcp.writer import FsspecStorageWriter
from dcpfs.errors import CheckpointError, ConfigError, DcpfsError
from dcpfs.ranks import Ranks, attempt, warn_if_not_joined
from dcpfs.storage.location import Location
from dcpfs.storage.opening import require_shared, require_writable
from dcpfs.worker_deaths import undisturbed_by_workers

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.storage import StorageReader, StorageWriter
    from typing_extensions import Self

__all__ = ["DistributedCheckpointer"]

_logger = logging.getLogger(__name__)

_REFUSAL_SECONDS = 60.0


class _Life(enum.Enum):
    OPEN = "open"
    CLOSED = "closed"


class DistributedCheckpointer:
    """Saves and loads a whole training state, one commit over all keys.

    Collective, to be called by all ranks in the same order: the constructor, `keys_to_resume_during_load`, `load`,
    `load_state`, `save`, `save_state`, `wait`, `close` (`finalize`), `should_save`. Local: `steps`, `latest`,
    `has_resumable_checkpoint`, `protect`, `unprotect`, `probe`, `health`, `maybe_wait_for_staging`, `request_save`,
    `install_signal_handler`. All from one thread, but for `request_save`. Several checkpointers in one process don't
    disturb each other.

    Args:
        config: The settings; the same on all ranks.
        callbacks: Objects with any of the methods of `CheckpointCallback`.
        process_group: The ranks that save and load together; None: all, or this process alone where there is no group.
            The checkpointer makes gloo groups of its own from it.
        access: `Access.READ_ONLY`: only loads; nothing is written, nothing started.
        data_rank: Which part of the data this rank trains on, where several ranks (tensor or pipeline parallel) share
            one: the lowest rank of each part saves the dataloader, the others load that file. None: every rank its own.
        reshard_dataloader: Makes a rank's dataloader state of those of all ranks, when another number of ranks saved
            it, or ranks that shared the data otherwise; called with the states by saving rank, and a `RankResize`.
            None: `config.on_world_size_change` decides.

    Raises:
        ConfigError: A callback or argument can't be used.
        UnsupportedOperationError: ``save_dir`` can only be read, and ``access`` is another.
        DcpfsError: Another rank failed.
    """

    KEYS_TO_SAVE = KEYS

    @undisturbed_by_workers()
    def __init__(
        self,
        config: CheckpointConfig,
        callbacks: object = (),
        *,
        process_group: ProcessGroup | None = None,
        access: Access | str = Access.READ_WRITE,
        data_rank: int | None = None,
        reshard_dataloader: ReshardHook | None = None,
    ) -> None:
        self._life = _Life.OPEN
        self._pid = os.getpid()
        self._last_load: StepLoadReport | None = None
        self._caller = make_group(process_group, timeout_seconds=_timeout_of(config))
        self._saving = Ranks()
        try:
            self._open(config, callbacks, process_group, access, data_rank)
        except BaseException:
            close_group(self._saving)
            close_group(self._caller)
            raise
        self._reshard: WorldSizePolicy | ReshardHook = reshard_dataloader or config.on_world_size_change

    def _open(
        self,
        config: CheckpointConfig,
        callbacks: object,
        process_group: ProcessGroup | None,
        access: Access | str,
        data_rank: int | None,
    ) -> None:
        """Collective. What fails on one rank, or is not the same on all, fails on all."""
        self._access = Access.READ_WRITE
        self._callbacks = CheckpointCallbacks()

        def check() -> None:
            if not isinstance(config, CheckpointConfig):
                raise ConfigError(f"can't make a checkpointer of a {type(config).__name__}: give a CheckpointConfig")
            self._callbacks = CheckpointCallbacks(callbacks)
            self._access = Access(access)
            location, _ = config.save_location(), config.load_location()
            if self._access is Access.READ_WRITE:
                require_writable(location)
                if config.async_mode is AsyncMode.ASYNC_WITH_PINNED_MEM:
                    require_shared(location)

        self._caller.confirm(attempt(check))
        self._config = config
        self._directory = SaveDirectory(config)
        self._global_rank = global_rank(self._caller)
        self._file_rank = share_settings(
            config, self._access, self._caller, global_rank=self._global_rank, data_rank=data_rank
        )
        self._saver: Saver | None = None
        self._exit_hook: ExitHook | None = None
        self._preemption = SaveFlag()
        self._verdicts = Verdicts(self._callbacks, self._caller, config.on_save_error, config.max_consecutive_failures)
        if self._access is Access.READ_WRITE:
            warn_if_not_joined(self._caller)
            self._saving = make_group(process_group, timeout_seconds=config.timeout_seconds)
            overridden = type(self).get_storage_writer is not DistributedCheckpointer.get_storage_writer
            self._saver = make_saver(
                config,
                caller=self._caller,
                saving=self._saving,
                global_rank=self._global_rank,
                file_rank=self._file_rank,
                make_writer=self._writer_maker() if overridden else None,
                make_ranks=functools.partial(make_group, process_group, timeout_seconds=config.timeout_seconds),
            )
            self._exit_hook = ExitHook(self._saver, config.timeout_seconds)

    @property
    def config(self) -> CheckpointConfig:
        """The settings."""
        return self._config

    @property
    def last_load(self) -> StepLoadReport | None:
        """What the last `load` did on this rank: keys, bytes, requests. None before, and from scratch."""
        return self._last_load

    @property
    def last_save(self) -> StepReport | None:
        """What the last save did on this rank that is known to have succeeded; None before."""
        return self._verdicts.last_report

    # --- loading

    @undisturbed_by_workers()
    def keys_to_resume_during_load(self) -> tuple[tuple[str, ...], str | None]:
        """What `load` would load: the keys, and the redacted URL of the step, or None from scratch. Collective.

        Raises:
            CheckpointNotFoundError: ``load_path`` or ``load_step`` is not there.
            IncompleteCheckpointError: Steps were committed, and none is usable.
            StorageError: The store could not be asked.
        """
        self._require_open("look for a checkpoint")
        with make_search(self._config, self._caller) as search:
            plan = search.find()
        return plan.keys, plan.url

    def load(
        self,
        model_parts: nn.Module | Sequence[nn.Module] | None = None,
        optimizer: object = None,
        scheduler: object = None,
        grad_scaler: object = None,
        *,
        dataloader: object = None,
        trainer: object = None,
    ) -> int:
        """Load the newest usable step, or what the settings say to start from. Collective.

        Tensors are filled in place. A part that is not passed is left alone. When a step turns out damaged, the next
        best is loaded, covering everything that was changed by then.

        Args:
            model_parts: A module, or a list of them (pipeline stages on this rank).
            optimizer: One, several, or any object with ``state_dict`` and ``load_state_dict``.
            scheduler: Likewise.
            grad_scaler: A ``torch.amp.GradScaler``.
            dataloader: An object with ``state_dict`` and ``load_state_dict``, or a mapping; this rank's own.
            trainer: The user's own state, likewise; the same on all ranks.

        Returns:
            The iteration to go on from; 0 from scratch, and for a start from weights alone.

        Raises:
            KeyMismatchError: Something asked for is not in the step, or does not fit; nothing was changed. Or tensors
                that share memory have different values there; ``written_keys`` says what was changed.
            CorruptCheckpointError: No step could be read whole; ``written_keys`` says what was changed.
            IncompleteCheckpointError: Steps were committed, and none is usable.
            CheckpointNotFoundError: ``load_path`` or ``load_step`` is not there.
            StorageError: The store failed.
        """
        return self._load(
            lambda: self._training(0, model_parts, optimizer, scheduler, grad_scaler, dataloader, trainer)
        )

    def load_state(self, states: Mapping[str, object]) -> int:
        """`load` for any keys: key to an object with ``state_dict`` and ``load_state_dict``, or to a mapping.

        Mappings are updated in place. Collective. Returns and raises as `load`.
        """
        return self._load(lambda: self._stated(0, states))

    @undisturbed_by_workers()
    def _load(self, gather: Callable[[], Parts]) -> int:
        self._require_open("load")
        parts = Parts()

        def begin() -> None:
            nonlocal parts
            parts = gather()
            self._callbacks.on_load_checkpoint_start(parts.model_parts)

        error = attempt(begin)
        told = self._caller.agree_and_gather(error, tuple(parts.holders))
        passed = dict.fromkeys(key for keys in told for key in keys)
        self._verdicts.handle(self._saver.settle() if self._saver is not None else [])
        config = self._config
        report: StepLoadReport | None = None
        with make_search(config, self._caller, passed) as search:
            plan = search.find()
            if plan.origin is not Origin.SCRATCH:
                plan, report = load_with_fallback(
                    parts.holders,
                    search,
                    plan,
                    strict=strictness_of(config, plan.keys),
                    read_extra=self._callbacks.listens("on_load_checkpoint"),
                    renaming=config.renaming(),
                    on_world_size_change=self._reshard,
                    file_rank=self._file_rank,
                    trust=config.trust,
                    transfer=config.transfer,
                    retry=config.retry,
                    new_phases=lambda: make_phases(config, self._caller.rank, "load", self._callbacks.on_phase),
                )

        def end() -> None:
            if report is None:
                parts.check()
            else:
                self._callbacks.on_load_checkpoint(parts.model_parts, dict(report.states))
            self._callbacks.on_load_checkpoint_end(parts.model_parts, plan.iteration, plan.url)
            if report is not None and parts.trainer is not None:
                parts.trainer.restore_random_states()  # again: what took its state since then may have drawn numbers

        self._last_load = report
        self._caller.confirm(attempt(end))
        if plan.origin is not Origin.SCRATCH:
            _logger.info("rank %d loaded %s: iteration %d", self._caller.rank, plan.url, plan.iteration)
        return plan.iteration

    # --- saving

    def save(
        self,
        model_parts: nn.Module | Sequence[nn.Module] | None,
        optimizer: object = None,
        scheduler: object = None,
        grad_scaler: object = None,
        iteration: int = 0,
        *,
        dataloader: object = None,
        trainer: object = None,
        metric: float | None = None,
        last: bool = False,
    ) -> None:
        """Save a step. Collective.

        With ``async_mode`` the call returns when the values are copied; a save that failed is raised by the next
        collective call, and nothing is then begun.

        Args:
            model_parts: As for `load`; likewise for the next five.
            optimizer: As for `load`.
            scheduler: As for `load`.
            grad_scaler: As for `load`.
            iteration: Of the step; the same on all ranks.
            dataloader: As for `load`.
            trainer: As for `load`; plain values must be equal on all ranks.
            metric: What ``keep_best`` compares, e.g. a validation loss; the same on all ranks, or None on those that
                don't know it. NaN or infinite: the step is saved without one.
            last: This is the closing save: with ``last_save_model_only`` the model alone, in ``export_dtype``. Such a
                step can't be resumed from, so ``latest_checkpoint.txt`` goes on naming the one before.

        Raises:
            CheckpointExistsError: The step stands, and may not be overwritten.
            UnsupportedValueError: A value can't be stored exactly; nothing was touched.
            ReplicaMismatchError: Ranks disagree about a value that they share; nothing was touched.
            StorageError: The store failed; nothing was published.
            CheckpointError: Too many saves are in flight, and ``when_busy`` is ``error``.
        """
        only_model = last and self._config.last_save_model_only

        def gather() -> Parts:
            if only_model:
                check_arguments({"model_parts": model_parts, "iteration": iteration})
                return Parts.of_training(model_parts, None, None, None)
            return self._training(iteration, model_parts, optimizer, scheduler, grad_scaler, dataloader, trainer)

        self._save(gather, iteration, metric, exports=only_model, last=last)

    def save_state(self, iteration: int, states: Mapping[str, object], *, metric: float | None = None) -> None:
        """`save` for any keys: key to an object with ``state_dict`` and ``load_state_dict``, or to a mapping.

        What is passed under ``dataloader`` is this rank's own. Where no ``trainer`` is passed, the iteration and the
        random number generators are saved under it. Collective; raises as `save`.
        """
        self._save(lambda: self._stated(iteration, states), iteration, metric)

    @undisturbed_by_workers()
    def _save(
        self,
        gather: Callable[[], Parts],
        iteration: int,
        metric: float | None,
        *,
        exports: bool = False,
        last: bool = False,
    ) -> None:
        self._require_open("save")
        saver = self._saver
        if saver is None:
            raise ConfigError("can't save: this checkpointer was made with access='read_only'")
        with contextlib.suppress(ConfigError):  # raised below, on all ranks
            iteration = check_iteration(iteration)
        outcomes, has_room = saver.make_room(iteration, waits=last or self._preemption.requested)
        self._verdicts.handle(outcomes)
        if not has_room:
            return
        asked = self._preemption.requested
        step: LocalStep | None = None
        error: BaseException | None = None
        parts = Parts()
        try:
            self._verdicts.raise_own_late()
            parts = gather()
            check_iteration(iteration)
            if not self._directory.probed:
                self.probe()
            self._callbacks.on_save_checkpoint_start(parts.model_parts, iteration)
            states = self._states(parts, exports=exports)
            step = plan_states(
                states,
                iteration,
                self._config,
                world_size=self._caller.world_size,
                rank=self._global_rank,
                file_rank=self._file_rank,
                metric=metric,
                parameters=self._parameters(parts),
            )
        except BaseException as caught:  # noqa: BLE001 - handed to the save, which raises it on all ranks
            error = caught
        last_request = self._preemption.last_request
        try:
            outcomes = saver.submit(SaveRequest(iteration, step, error, moves_latest=not exports))
        except Exception as failure:  # noqa: BLE001 - handled as what became of the save
            outcomes = [SaveOutcome(iteration, None, failure, 0.0)]
        if asked and all(outcome.error is None for outcome in outcomes):
            self._preemption.clear(last_request)  # who asked since then may want what comes after these values
        self._verdicts.handle(outcomes)
        self._verdicts.tell(lambda: self._callbacks.on_save_checkpoint_end(parts.model_parts, iteration))

    def _states(self, parts: Parts, *, exports: bool) -> dict[str, object]:
        states = parts.states()
        if exports and self._config.export_dtype is not None:
            states[MODEL] = cast_floating(cast("Mapping[str, object]", states[MODEL]), self._config.export_dtype)
        self._callbacks.on_save_checkpoint(parts.model_parts, states)
        return states

    def _parameters(self, parts: Parts) -> dict[str, frozenset[str]]:
        """What an optimizer alone writes; not asked for where all copies are complete when a save returns."""
        if self._config.async_mode is AsyncMode.DISABLED or not torch.cuda.is_available():
            return {}
        names = parts.parameter_names()
        return {MODEL: names} if names else {}

    @undisturbed_by_workers()
    def maybe_wait_for_staging(self) -> None:
        """Return when training may write its parameters again: the values of the last `save` are copied. Local.

        Buffers that a forward pass writes are safe before.

        Never raises for a save that failed: that is for the next collective call, since one rank that left alone would
        hang the others.
        """
        if self._saver is not None:
            self._saver.wait_for_staging()

    @undisturbed_by_workers()
    def wait(self) -> None:
        """Wait for what is in flight, and raise what failed. Collective."""
        self._require_open("wait")
        if self._saver is not None:
            self._verdicts.handle(self._saver.settle())
        self._verdicts.raise_late()

    def health(self) -> DcpfsError | None:
        """Why a save in the background has failed, as far as this rank knows; None while all is well. Local, instant.

        The next collective call raises it, on all ranks; this one never does.
        """
        failure = None if self._saver is None else self._saver.failure()
        if failure is None or isinstance(failure, DcpfsError):
            return failure
        return CheckpointError(f"a save in the background failed: {type(failure).__name__}: {failure}")

    @undisturbed_by_workers()
    def close(self) -> None:
        """Wait for what is in flight, release everything, and raise what failed. Collective; idempotent."""
        if self._life is _Life.CLOSED:
            return
        self._life = _Life.CLOSED
        if self._is_forked:
            return
        saver = self._saver
        if self._exit_hook is not None:
            self._exit_hook.cancel()
        try:
            if saver is not None:
                self._verdicts.handle(saver.settle())
            self._verdicts.raise_late()
        finally:
            if saver is not None:
                saver.close()
            close_group(self._saving)
            close_group(self._caller)

    finalize = close

    def __enter__(self) -> Self:
        return self

    @undisturbed_by_workers()
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            # The other ranks may never come to a collective call: what this rank has in flight ends by itself.
            self._abandon()
        except Exception:
            _logger.exception("closing the checkpointer failed as well")

    def _abandon(self) -> None:
        if self._life is _Life.OPEN:
            self._life = _Life.CLOSED
            if self._is_forked:
                return
            if self._exit_hook is not None:
                self._exit_hook.cancel()
            if self._saver is not None:
                for failure in self._saver.drain(self._config.timeout_seconds):
                    _logger.error("a save in the background had failed: %s", failure)
                self._saver.close()

    # --- around it

    def get_storage_writer(self, url: str) -> StorageWriter:
        """A storage writer for the directory of a key. Local. A subclass may return another.

        With ``async_with_pinned_mem`` it is called in the background process, on an object that has `config` alone,
        and the subclass must be importable there.
        """
        config = self._config
        return FsspecStorageWriter(
            url,
            storage_options=config.save_location().storage_options,
            transfer=config.transfer,
            retry=config.retry,
            trust=config.trust,
        )

    def get_storage_reader(self, url: str) -> StorageReader:
        """A storage reader for the directory of a key, e.g. for ``dcp.load``. Local."""
        config = self._config
        return FsspecStorageReader(
            url,
            storage_options=config.save_location().storage_options,
            trust=config.trust,
            transfer=config.transfer,
            retry=config.retry,
        )

    def steps(self) -> list[int]:
        """Iterations of the complete steps in ``save_dir``, ascending. Local; asks the store."""
        return self._directory.steps()

    def latest(self) -> int | None:
        """The iteration that a resume would start from, or None. Local; asks the store.

        Raises:
            IncompleteCheckpointError: Steps were committed, and none is usable.
        """
        return self._directory.latest()

    def has_resumable_checkpoint(self) -> bool:
        """Whether ``save_dir`` has a step to resume from. Local; asks the store. Raises as `latest`."""
        return self._directory.latest() is not None

    def protect(self, step: int) -> None:
        """Keep retention away from a step, until `unprotect`. Local; any one rank."""
        self._directory.protect(step)

    def unprotect(self, step: int) -> None:
        """Let retention have a step again. Local; any one rank."""
        self._directory.unprotect(step)

    def probe(self) -> None:
        """Write and delete a small object below ``save_dir``, to learn now whether a save could. Local.

        The first `save` does so by itself.

        Raises:
            StorageError: With the store's own reason.
        """
        self._directory.probe()

    def request_save(self) -> None:
        """Ask for a save at the next `should_save`. Local; from any thread, and from signal handlers."""
        self._preemption.request()

    def install_signal_handler(self, *signals: int) -> SignalHandlers:
        """Let signals ask for a save, by default SIGTERM and SIGUSR1. Local; main thread. See `preemption`."""
        return (
            install_signal_handler(self._preemption, signals) if signals else install_signal_handler(self._preemption)
        )

    @undisturbed_by_workers()
    def should_save(self, iteration: int) -> bool:
        """Whether any rank was asked for a save. Collective: one word.

        Args:
            iteration: The current one, for the log.
        """
        self._require_open("ask for a save")
        (wanted,) = self._caller.largest([self._preemption.requested])
        if wanted:
            _logger.warning("a save was asked for at iteration %d", iteration)
        return bool(wanted)

    # --- within

    def _training(
        self,
        iteration: int,
        model: nn.Module | Sequence[nn.Module] | None,
        optimizer: object,
        scheduler: object,
        grad_scaler: object,
        dataloader: object,
        trainer: object,
    ) -> Parts:
        check_arguments(
            {
                "model_parts": model,
                "optimizer": optimizer,
                "scheduler": scheduler,
                "grad_scaler": grad_scaler,
                "iteration": iteration,
            }
        )
        parts = Parts.of_training(model, optimizer, scheduler, dataloader)
        self._add_trainer(parts, iteration, trainer, grad_scaler)
        return parts

    def _stated(self, iteration: int, states: Mapping[str, object]) -> Parts:
        parts = Parts.of_states(states)
        self._add_trainer(parts, iteration, parts.holders.pop(TRAINER, None))
        return parts

    def _add_trainer(self, parts: Parts, iteration: int, user: object, grad_scaler: object = None) -> None:
        parts.add_trainer(
            iteration=iteration, rank=self._global_rank, rng=self._config.rng, grad_scaler=grad_scaler, user=user
        )

    def _require_open(self, verb: str) -> None:
        if self._life is _Life.CLOSED:
            raise CheckpointError(f"can't {verb}: the checkpointer is closed; make a new one")
        if self._is_forked:
            raise CheckpointError(
                f"can't {verb}: the checkpointer belongs to process {self._pid}, of which this one is a fork; make "
                "a new one"
            )

    @property
    def _is_forked(self) -> bool:
        """Whether this is a copy in a forked child: groups, threads and processes are the parent's, who goes on."""
        return os.getpid() != self._pid

    def _writer_maker(self) -> Callable[[Location], StorageWriter]:
        if self._config.async_mode is AsyncMode.ASYNC_WITH_PINNED_MEM:
            return WriterMaker(type(self), self._config)
        return lambda location: self.get_storage_writer(location.url)


def _timeout_of(config: object) -> float:
    """The groups are made before anything is refused: a rank that leaves alone would hang the others."""
    return config.timeout_seconds if isinstance(config, CheckpointConfig) else _REFUSAL_SECONDS
