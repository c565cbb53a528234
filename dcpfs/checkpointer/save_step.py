"""One save of one step: every key, every rank, one commit.

Problem: a trainer that saves its keys one after another, each with its own marker, has, when something dies in between,
a model of one step beside an optimizer of another, and a ``latest`` that names both (cases 34, 35). Each key's plans
travel in collectives of their own, on the training group, where a slow store trips the watchdog (cases 50, 74, 108).

Way taken: one function for the whole step, the same in the trainer, in a thread and in another process. It gets plain
data (`LocalStep`), knows neither models nor DTensors, and moves all keys together. While the structure of the state
stays the same, ranks meet three times: a status word, the results, the verdict. Whatever fails on any rank before the
manifest is put reaches every rank in the next meeting, and nothing is published::

    coordinator   claim the step: .writing
    all           status word: failed? plans wanted? another step in the way?       one reduction
    [all          plans to the coordinator, assigned ones back]                     only when the structure changed
    all           write data files and rank files
    all           results, or the error, to the coordinator                         one gathering
    coordinator   .metadata of each key → manifest.json → latest_checkpoint.txt
    all           verdict                                                           one broadcast
    coordinator   retention, beside what the others do next
"""

from __future__ import annotations

import functools
import logging
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

from dcpfs._version import __version__
from dcpfs.checkpointer.commit import (
    Claim,
    ClaimState,
    Stragglers,
    abandon_step,
    claim_step,
    move_latest,
    publish_step,
    withdraw_step,
)
from dcpfs.checkpointer.layout import MANIFEST_NAME, parse_rank_file_name, step_name
from dcpfs.checkpointer.linked_ranks import LostRankError
from dcpfs.checkpointer.local_step import LocalStep
from dcpfs.checkpointer.manifest import FileRecord, Manifest
from dcpfs.checkpointer.opening_words import OpeningWords, TogetherWords
from dcpfs.checkpointer.ownership import put_owned, read_owner, superseded
from dcpfs.checkpointer.phases import Phases
from dcpfs.checkpointer.save_context import SaveContext, StepReport
from dcpfs.checkpointer.step_plan import (
    GlobalPlan,
    decode_results,
    encode_local_plans,
    encode_results,
    plan_globally,
)
from dcpfs.checkpointer.step_writer import StepWriter, join_fingerprints
from dcpfs.dcp.transfer import ByteBudget, Task, run_tasks
from dcpfs.dcp.writer import FsspecStorageWriter
from dcpfs.errors import CheckpointError, ConfigError, DcpfsError, IncompleteCheckpointError
from dcpfs.format.checksum import crc32
from dcpfs.format.names import METADATA_NAME
from dcpfs.ranks import attempt
from dcpfs.storage.opening import open_store
from dcpfs.storage.store import Store

__all__ = ["save_step"]

_logger = logging.getLogger(__name__)

_STATES = tuple(ClaimState)


def save_step(
    step: LocalStep | None,
    context: SaveContext,
    *,
    error: BaseException | None = None,
    phases: Phases | None = None,
    moves_latest: bool = True,
    clock: Callable[[], float] = time.monotonic,
) -> StepReport:
    """Save a step. Collective over the ranks of the context.

    Args:
        step: This rank's part; its tensors are read until the call returns. None with an ``error``.
        context: Where, with whom, and how.
        error: Why this rank has nothing to save; raised here, and told to all ranks, which raise it too.
        phases: Measures and watches; None: nobody does.
        moves_latest: Whether ``latest_checkpoint.txt`` is to name this step, and older ones make room for it.
        clock: Seconds that only go up, of this rank.

    Raises:
        CheckpointExistsError: The step stands and is not to be overwritten, or is the only complete one.
        ReplicaMismatchError: Ranks disagree about what they share; nothing was touched.
        SupersededError: Another save took the step over.
        StorageError: The store failed; nothing was published, unless the text says that the step is complete.
        DcpfsError: Another rank failed; its text and rank.
    """
    started_seconds = clock()
    watched = phases if phases is not None else Phases(rank=context.ranks.rank)
    save = _Save(step, context, error, watched, moves_latest=moves_latest, clock=clock)
    try:
        committed = save.run()
    except BaseException:
        context.plans.drop()
        save.take_back()
        raise
    finally:
        save.close()
    seconds = clock() - started_seconds
    report = StepReport(
        save.step.iteration, save.save_id, committed, seconds, save.bytes_written, save.requests, save.planned
    )
    if committed:
        _logger.info(
            "rank %d saved %s in %.2f s: %s",
            context.ranks.rank,
            context.save_dir.join(step_name(report.iteration)).redacted,
            seconds,
            watched.summary(),
        )
    return report


@dataclass
class _Written:
    """What a rank tells the coordinator after writing. File names are relative to the step."""

    global_rank: int
    file_rank: int
    results: bytes = b""
    files: dict[str, FileRecord] = field(default_factory=dict)
    fingerprint: dict[str, int] = field(default_factory=dict)
    relied_on: tuple[str, ...] = ()
    """`LocalStep.relied_on`."""
    worked_seconds: float = 0.0
    """From the first exchange, until it had this to tell."""


class _Save:
    """One save of one rank. What is not said to be the coordinator's is called by all ranks."""

    def __init__(
        self,
        step: LocalStep | None,
        context: SaveContext,
        error: BaseException | None,
        phases: Phases,
        *,
        moves_latest: bool,
        clock: Callable[[], float],
    ) -> None:
        self.save_id = uuid.uuid4().hex
        self.bytes_written = 0
        self.requests = 0
        self.planned = False
        self._step = step
        self._context = context
        self._ranks = context.ranks
        self._error = error
        self._phases = phases
        self._moves_latest = moves_latest
        self._store: Store | None = None
        self._claim: Claim | None = None
        self._global: GlobalPlan | None = None
        self._writers: dict[str, StorageWriter] = {}
        own = self._ranks.rank if context.global_rank is None else context.global_rank
        self._written = _Written(own, own if context.file_rank is None else context.file_rank)
        self._first_file_number = 0
        self._metric: float | None = None
        self._stands = False
        self._taken_back = False
        self._stragglers = Stragglers.POSSIBLE
        self._clock = clock
        self._came_seconds = self._met_seconds = self._awaited_since_seconds = clock()

    @property
    def step(self) -> LocalStep:
        """This rank's part; there is one once all ranks have agreed."""
        if self._step is None:
            raise RuntimeError("this rank has nothing to save, so it must have failed before")
        return self._step

    @property
    def store(self) -> Store:
        """The store at ``save_dir``."""
        if self._store is None:
            self._store = open_store(self._context.save_dir, transfer=self._context.transfer, retry=self._context.retry)
        return self._store

    def run(self) -> bool:
        """Save; False when the step was left as it stood."""
        with self._phases.phase("claim"):
            if self._ranks.is_coordinator and self._error is None:
                self._error = attempt(self._claim_step)
            state, plans_fit = self._meet()
        if state is ClaimState.SKIPPED:
            return False
        with self._phases.phase("plan"):
            assigned = self._assign(plans_fit=plans_fit, withdraws=state is ClaimState.EXISTS)
        with self._phases.phase("write") as phase:
            error = attempt(lambda: self._write(assigned))
            phase.add_bytes(self.bytes_written)
        with self._phases.phase("commit"):
            verdict = self._commit_together(error)
        if verdict is not None:
            raise verdict
        return True

    def _commit_together(self, error: BaseException | None) -> BaseException | None:
        """Why the step is not committed, or not known to be; None: it is.

        Args:
            error: Why this rank could not write.
        """
        failure: BaseException | None = None
        try:
            told_seconds = self._clock()
            self._written.worked_seconds = told_seconds - self._met_seconds
            collected = self._ranks.gather_outcomes(self._written, error)
            if isinstance(collected, DcpfsError):
                failure = collected
            elif collected is not None:
                slowest_seconds = max(each.worked_seconds for each in collected)
                self._awaited_since_seconds = max(told_seconds, self._came_seconds + slowest_seconds)
                failure = attempt(lambda: self._commit(collected))
            if collected is not None:
                self._stragglers = Stragglers.NONE
            if failure is not None:
                self.take_back()  # before any rank can begin another save
            return self._ranks.broadcast_verdict(None, failure, error)[1]
        except LostRankError as lost:
            cause = error or failure
            if isinstance(cause, DcpfsError):  # may be of a rank that was stopped so long that others cleared up
                cause.message = f"{cause.message} (and {lost.message})"
            return cause or lost

    def take_back(self) -> None:
        """Coordinator: delete what all ranks wrote, unless a manifest vouches for it. Idempotent; never raises."""
        claim = self._claim
        if claim is None or self._stands or self._taken_back:
            return
        self._taken_back = True
        abandon_step(self.store, claim, list(self._written.files), stragglers=self._stragglers)

    def close(self) -> None:
        """Release connections; at the coordinator of a committed step, make room first. Never raises."""
        try:
            if self._stands and self._moves_latest and self._context.sweep is not None and self._step is not None:
                with self._phases.phase("retention"):
                    self._context.sweep(self.store, self._step.iteration)
        finally:
            for writer in self._writers.values():
                if isinstance(writer, FsspecStorageWriter):
                    writer.close()
            if self._store is not None:
                self._store.close()

    # --- the phases

    def _claim_step(self) -> None:
        self._claim = claim_step(
            self.store,
            self.step.iteration,
            self.save_id,
            self._context.on_existing,
            exports=not self._moves_latest,
        )

    def _meet(self) -> tuple[ClaimState, bool]:
        """What the coordinator found, and whether all ranks remember plans that fit. Raises what any rank brings."""
        claim, context, step = self._claim, self._context, self._step
        words = OpeningWords(
            failed=self._error is not None,
            state=0 if claim is None else _STATES.index(claim.state),
            token=0 if step is None else context.plans.token(step),
            iteration=0 if step is None else step.iteration,
            save_id=self.save_id if self._ranks.is_coordinator else "",
            first_file_number=0 if claim is None else claim.first_file_number,
            metric=None if step is None else step.metric,
        )
        self._came_seconds = self._clock()
        told = TogetherWords.decode(self._ranks.largest(words.encode()))
        self._met_seconds = self._clock()
        self._first_file_number = told.first_file_number
        first, last = told.iterations
        if told.failed or last != first or len(told.metrics) > 1:
            self._stragglers = Stragglers.NONE  # all ranks know that there is nothing to write
        if told.failed:
            self._ranks.agree(self._error)
        if last != first:
            raise ConfigError(
                f"can't save to {context.save_dir.redacted}: one rank saves iteration {first} and another {last}; "
                "call save with the same iteration on all ranks"
            )
        if len(told.metrics) > 1:
            one, other = told.metrics
            raise ConfigError(
                f"can't save iteration {first} to {context.save_dir.redacted}: one rank gives the metric {one} and "
                f"another {other}; give the same on all ranks, e.g. their mean, or None on all but the first"
            )
        self.save_id = told.save_id
        self._metric = told.metrics[0] if told.metrics else None
        return _STATES[told.state], told.plans_fit

    def _assign(self, *, plans_fit: bool, withdraws: bool) -> dict[str, SavePlan]:
        """What this rank writes. When it returns, nothing stands in the step, and all ranks may write."""
        step, plans = self.step, self._context.plans
        if withdraws and self._context.make_writer is not None:
            # Such a writer may make its directory when it is set up, which what is removed would take along.
            self._withdraw_together()
            withdraws = False
        error = attempt(self._make_writers)
        if plans_fit:
            self._global = plans.planned
            if withdraws:
                self._withdraw_together()
            self._error = error  # raised where the write begins, whose failures all ranks learn
            return plans.assigned(step)
        self.planned = True
        encoded: list[bytes] = []
        error = error or attempt(lambda: encoded.append(encode_local_plans(step)))
        gathered = self._ranks.gather_outcomes(encoded[0] if encoded else b"", error)
        assigned: Sequence[bytes] | None = None
        failure: BaseException | None = gathered if isinstance(gathered, DcpfsError) else None
        if isinstance(gathered, list):
            failure = attempt(lambda: self._plan(gathered, withdraws=withdraws))
            assigned = self._global.assigned if self._global is not None else None
        if failure is not None:
            self._stragglers = Stragglers.NONE
        mine = self._ranks.scatter_outcome(assigned, failure, error)
        plans.remember(step, mine, self._global)
        return plans.assigned(step)

    def _make_writers(self) -> None:
        context, step = self._context, self.step
        where = context.save_dir.join(step_name(step.iteration))
        for key, local in step.keys.items():
            writer: StorageWriter
            if context.make_writer is not None:
                writer = context.make_writer(where.join(key))
            else:
                writer = StepWriter(
                    self.store,
                    step.iteration,
                    key,
                    save_id=self.save_id,
                    first_file_number=self._first_file_number,
                    transfer=context.transfer,
                    trust=context.trust,
                )
            self._writers[key] = writer
            writer.set_up_storage_writer(self._ranks.is_coordinator, rank=self._ranks.rank, use_collectives=True)
            local.plan = writer.prepare_local_plan(local.plan)

    def _plan(self, gathered: Sequence[bytes], *, withdraws: bool) -> None:
        """Coordinator. What stands in the step goes once it is known that the ranks can save."""
        planned = plan_globally(gathered, self._writers, self._context.dedup)
        if withdraws:
            self._withdraw()
        self._global = planned

    def _withdraw_together(self) -> None:
        failure = attempt(self._withdraw) if self._ranks.is_coordinator else None
        if failure is not None:
            self._stragglers = Stragglers.NONE
        self._ranks.broadcast_outcome(None, failure, None)

    def _withdraw(self) -> None:
        """Coordinator."""
        withdraw_step(self.store, self._claimed)

    def _write(self, assigned: Mapping[str, SavePlan]) -> None:
        if self._error is not None:
            raise self._error
        step, written = self.step, self._written
        written.relied_on = step.relied_on
        results: dict[str, list[WriteResult]] = {}
        for key, plan in assigned.items():
            writer = self._writers[key]
            future = writer.write_data(plan, step.keys[key].values)
            results[key] = future.wait()
            if isinstance(writer, StepWriter):
                written.files.update(writer.files)
                written.fingerprint[key] = writer.fingerprint
            self.bytes_written += sum(result.size_in_bytes for result in results[key])
            if isinstance(writer, FsspecStorageWriter):
                self.requests += writer.written.requests
        self._write_rank_files()
        self._require_shared_place()
        if self._context.still_wanted is not None:
            self._context.still_wanted()
        written.results = encode_results(results, step, assigned)

    def _require_shared_place(self) -> None:
        """Return when this rank finds what the coordinator has put. One request, in the first save alone.

        Where each machine has a disk of its own below the same path, every rank writes, all of them succeed, and no
        step that is committed can ever be loaded. Asked when this rank has written: a mount that remembers what a
        directory held (rclone's) knows the step then.

        Raises:
            ConfigError: ``save_dir`` is another place for this rank than for the coordinator.
            SupersededError: Another save has taken over the step.
        """
        context, step = self._context, self.step
        if context.is_shared_place or self._ranks.is_coordinator:
            return
        owner = read_owner(self.store, step.iteration, self.save_id)
        where = context.save_dir.join(step_name(step.iteration)).redacted
        if owner is None and not self.store.exists(f"{step_name(step.iteration)}/{MANIFEST_NAME}"):
            # The coordinator, which takes back what a failed save has left, does not see these.
            self.store.delete([f"{step_name(step.iteration)}/{name}" for name in self._written.files])
            raise ConfigError(
                f"can't save to {where}: rank {self._ranks.rank} does not find there what rank 0 has just put, so that "
                "save_dir is not one place for all ranks (a disk of each machine, or memory of each process); give one "
                "that all of them share"
            )
        if owner != self.save_id:
            raise superseded(self.store, step.iteration, self.save_id, owner, verb="write the save")
        context.is_shared_place = True

    def _write_rank_files(self) -> None:
        """What belongs to this rank: pickled before the save began, so nothing but the store can fail here."""
        for name, content in self.step.rank_files.items():
            path = f"{step_name(self.step.iteration)}/{name}"
            put_owned(self.store, path, [content], iteration=self.step.iteration, save_id=self.save_id)
            self._written.files[name] = FileRecord(len(content), crc32(content))
            self.bytes_written += len(content)
            self.requests += 1

    def _commit(self, collected: Sequence[_Written]) -> None:
        """Coordinator: every key's ``.metadata``, the manifest, the pointer."""
        planned, step, claim = self._global, self.step, self._claimed
        if planned is None:
            raise RuntimeError("the coordinator has no plan")
        planned.check_values([each.results for each in collected])
        results: dict[str, list[list[WriteResult]]] = {key: [] for key in self._writers}
        for rank, each in enumerate(collected):
            for key, mine in decode_results(each.results, planned, rank).items():
                results[key].append(mine)
        files: dict[str, FileRecord] = {}
        for each in collected:
            files.update(each.files)
        self._require_relied_on(collected, files)
        files.update(self._publish_keys(planned.metadata(), results))
        manifest = Manifest(
            save_id=self.save_id,
            iteration=step.iteration,
            world_size=self._ranks.world_size,
            files=files,
            keys=tuple(self._writers),
            rank_files=_rank_files_of(collected),
            metric=self._metric,
            created_seconds=time.time(),
            versions={"dcpfs": __version__, "torch": torch.__version__, "python": sys.version.split()[0]},
            topology=step.topology,
            fingerprint=_add_fingerprints(collected),
        )
        if self._context.still_wanted is not None:
            self._context.still_wanted()
        self._require_awaited()
        publish_step(self.store, claim, manifest)
        self._stands = True
        if self._moves_latest:
            move_latest(self.store, step.iteration, claim)

    def _require_relied_on(self, collected: Sequence[_Written], files: Mapping[str, FileRecord]) -> None:
        """Coordinator: return when the files are there that ranks leave to another one to write."""
        for each in collected:
            for name in each.relied_on:
                if name not in files:
                    key, _, _ = name.partition("/")
                    raise ConfigError(
                        f"can't save {key!r} of rank {each.global_rank}: rank {each.file_rank}, the lowest with the "
                        "same part of the data, saves it for all of them, and was given none; pass one on that rank, "
                        "or give each rank a data_rank of its own"
                    )

    def _require_awaited(self) -> None:
        """Coordinator: publish nothing that another rank, by now, may have given up waiting for.

        A process that was stopped, or whose store took too long, does not know that the others have raised. They may
        have gone on to wait for the verdict as soon as the last of them, or this rank, had told its results: whoever
        tells them first waits within the same exchange, which has a time-out of its own. When this rank had heard them
        all says nothing about that. Clocks differ, so each says how long it has worked since the first exchange, and
        none has left that before this rank came to it.
        """
        limit_seconds = self._ranks.timeout_seconds
        waited_seconds = self._clock() - self._awaited_since_seconds
        if self._ranks.world_size > 1 and limit_seconds is not None and waited_seconds >= limit_seconds:
            raise CheckpointError(
                f"can't publish {self._context.save_dir.join(step_name(self.step.iteration)).redacted}: the other "
                f"ranks have given up rank {self._ranks.rank}, which came to the commit {waited_seconds:.0f} s "
                "after their results; raise timeout_seconds where the store needs that long",
                rank=self._ranks.rank,
            )

    def _publish_keys(
        self, metadata: Mapping[str, Metadata], results: Mapping[str, list[list[WriteResult]]]
    ) -> dict[str, FileRecord]:
        """Put every key's ``.metadata``; what lies in the directories of writers that don't say so themselves."""
        transfer = self._context.transfer
        concurrency = transfer.concurrency if self.store.capabilities.remote else 1
        found: dict[str, FileRecord] = {}
        tasks = [
            Task(0, functools.partial(self._publish_key, key, each, results[key], found))
            for key, each in metadata.items()
        ]
        run_tasks(tasks, concurrency=concurrency, budget=ByteBudget(1), name="dcpfs-markers")
        return found

    def _publish_key(
        self, key: str, metadata: Metadata, results: list[list[WriteResult]], found: dict[str, FileRecord]
    ) -> None:
        writer = self._writers[key]
        if isinstance(writer, StepWriter):
            writer.publish(metadata, results)
            record = writer.metadata_file
            if record is None:
                raise RuntimeError("a writer published and does not say what")
            found[f"{key}/{METADATA_NAME}"] = record
            return
        writer.finish(metadata, results)
        step = step_name(self.step.iteration)
        listed = {info.path: info.size_bytes for info in self.store.list(f"{step}/{key}")}
        if f"{step}/{key}/{METADATA_NAME}" not in listed:
            raise IncompleteCheckpointError(
                f"can't commit {self._context.save_dir.join(step).redacted}: the writer of {key!r} left "
                f"no {METADATA_NAME} there; let get_storage_writer return a writer for the URL that it is given"
            )
        found.update({path.removeprefix(f"{step}/"): FileRecord(size) for path, size in listed.items()})
        content = self.store.get(f"{step}/{key}/{METADATA_NAME}")  # its checksum ties it to this manifest
        found[f"{key}/{METADATA_NAME}"] = FileRecord(len(content), crc32(content))

    @property
    def _claimed(self) -> Claim:
        if self._claim is None:
            raise RuntimeError("the step was not claimed")
        return self._claim


def _rank_files_of(collected: Sequence[_Written]) -> dict[str, dict[int, str]]:
    """Key to global rank to the file that this rank reads on a load."""
    own: dict[str, dict[int, str]] = {}
    for each in collected:
        for name in each.files:
            key, _, file = name.rpartition("/")
            rank = parse_rank_file_name(file)
            if rank is not None:
                own.setdefault(key, {})[rank] = name
    shared = {each.global_rank: each.file_rank for each in collected}
    return {
        key: {rank: names[file_rank] for rank, file_rank in shared.items() if file_rank in names}
        for key, names in own.items()
    }


def _add_fingerprints(collected: Sequence[_Written]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for each in collected:
        for key, value in each.fingerprint.items():
            totals[key] = join_fingerprints((totals.get(key, 0), value))
    return totals
