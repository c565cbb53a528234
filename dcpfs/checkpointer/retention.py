"""Which steps make room for new ones, and how they go.

Problem: retention that sorts directory names deletes users' backups (case 37), the step that an evaluation still reads
(case 38), a copy whose marker was lost on the way (case 44), or nothing at all, since a remote URL went through
``pathlib`` (case 39). One that counts steps which were never finished leaves none that loads (case 34).

Way taken: `choose_removals` decides, a pure function over facts that `check_step` found. Only committed steps count;
only steps of ours, by strict names, are touched; what nobody can vouch for stays. A step that is newer than the one
just saved comes from before a rollback: whoever rolled back may want it still, so it stays until training has passed
it. The step that ``latest_checkpoint.txt`` names stays whatever the rules say. Steps that hold the model alone take no
place of those that training can go on from: of these as many stay as if there were no others.

A step is removed so that it can't be taken for a whole one at any moment, and so that what is left after a crash is
swept the next time::

    last look: protected? named by latest? still what was counted? newest step still there?
    .writing  →  protected by now?  →  manifest.json away  →  every .metadata  →  data, and what killed writers left
    →  .writing away

Who protects a step puts the mark, and then looks for ``.writing`` and for the manifest; who removes one looks for the
mark after ``.writing``. One of both sees the other, so a step that was protected without an error is not removed.

Files below a step that dcpfs does not make are users' and stay. Whatever fails is a warning and is tried again after
the next save: room is never worth a run.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum

from dcpfs.checkpointer.choices import BestMode
from dcpfs.checkpointer.completeness import check_step
from dcpfs.checkpointer.discovery import list_steps, read_latest
from dcpfs.checkpointer.layout import (
    MANIFEST_NAME,
    PROTECTED_NAME,
    WRITING_NAME,
    step_name,
)
from dcpfs.checkpointer.ownership import read_owner
from dcpfs.checkpointer.step_files import is_data_file, is_metadata_file, is_own_file, is_rank_file
from dcpfs.checkpointer.step_status import StepState, StepStatus
from dcpfs.errors import CheckpointNotFoundError, ConfigError, PermissionDeniedError, StorageError
from dcpfs.storage.leftovers import sweep_leftovers
from dcpfs.storage.store import Store

__all__ = [
    "Retention",
    "RetentionPolicy",
    "RetentionReport",
    "StepFacts",
    "StepKind",
    "apply_retention",
    "choose_removals",
    "protect_step",
    "unprotect_step",
]

logger = logging.getLogger(__name__)

_ASKED_AT_ONCE = 8
_REMOVER = "removed by retention"
_PROTECTED = b"protected\n"


class StepKind(Enum):
    """What retention makes of a step."""

    COMMITTED = "committed"
    """Complete, with our manifest. Counts."""
    DAMAGED = "damaged"
    """Once committed, with a manifest that can be read, and no longer complete. Does not count, and goes with the steps
    of its age."""
    LEFTOVER = "leftover"
    """Of a save or a removal of ours that died. Goes once it is older than the newest commit."""
    UNKNOWN = "unknown"
    """Anything else: another tool's step, a copy without its manifest. Stays."""


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What the decision needs to know about a step.

    Attributes:
        iteration: Of the step.
        kind: What it is.
        metric: What it was saved with, or None.
        resumable: Training can go on from it: it holds more than the model.
    """

    iteration: int
    kind: StepKind
    metric: float | None = None
    resumable: bool = True


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """Which committed steps are kept: those that any of the rules keeps. Without a rule, all.

    The newest committed step and protected ones are kept in any case.

    Attributes:
        keep_last: The last so many, and the last so many of those that hold more than the model.
        keep_every: Those whose iteration is divisible by this.
        keep_best: The so many with the best metric. Steps without one are not among them.
        best_mode: Which metric is better.

    Raises:
        ConfigError: A number is not positive.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: int | None = None
    best_mode: BestMode = BestMode.MAX

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every", "keep_best"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} must be a positive integer or None, not {value!r}")

    @property
    def keeps_all(self) -> bool:
        """There is no rule, so nothing committed is removed."""
        return self.keep_last is None and self.keep_every is None and self.keep_best is None


@dataclass(frozen=True)
class RetentionReport:
    """What one run of retention did.

    Attributes:
        removed: Committed or damaged steps that were removed, ascending.
        swept: Leftovers of dead saves that were removed, ascending.
        spared: Steps that were to go, and why they stayed after a last look.
        failures: Steps that could not be removed whole, and why. -1: it failed before it came to a step.
        objects: Number of files deleted.
        size_bytes: Their length.
    """

    removed: tuple[int, ...] = ()
    swept: tuple[int, ...] = ()
    spared: Mapping[int, str] = field(default_factory=dict)
    failures: Mapping[int, str] = field(default_factory=dict)
    objects: int = 0
    size_bytes: int = 0


def choose_removals(
    steps: Iterable[StepFacts],
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
    keep_best: int | None = None,
    best_mode: BestMode = BestMode.MAX,
    protected: Collection[int] = (),
    newest: int | None = None,
    in_flight: Collection[int] = (),
) -> list[int]:
    """The iterations to remove, ascending. Pure.

    Args:
        steps: All steps that are known.
        keep_last: See `RetentionPolicy`, as for the next three.
        keep_every: As there.
        keep_best: As there.
        best_mode: As there.
        protected: Kept in any case.
        newest: The step committed last. None: the committed one with the highest iteration. Steps with a higher
            iteration stay: they are from before a rollback.
        in_flight: Being saved; neither counted nor touched.
    """
    busy = {*in_flight} - {newest}
    facts = [each for each in steps if each.iteration not in busy]
    committed = sorted((each for each in facts if each.kind is StepKind.COMMITTED), key=lambda each: -each.iteration)
    if newest is None and committed:
        newest = committed[0].iteration
    if newest is None or all(each.iteration != newest for each in committed):
        return []
    passed = [each for each in committed if each.iteration <= newest]
    kept = {newest, *protected}
    last = [each.iteration for each in passed[: keep_last or 1]]
    last_resumable = [each.iteration for each in passed if each.resumable][: keep_last or 1]
    kept.update(last, last_resumable)
    kept.update(each.iteration for each in facts if keep_every and each.iteration % keep_every == 0)
    kept.update(_choose_best(passed, keep_best or 0, best_mode))
    keeps_all = keep_last is None and keep_every is None and keep_best is None
    removals = []
    for each in facts:
        if each.kind is StepKind.LEFTOVER:
            goes = each.iteration < newest and each.iteration not in protected
        elif each.kind is StepKind.UNKNOWN or keeps_all:
            goes = False
        elif each.kind is StepKind.DAMAGED:
            # It does not count, so it must be older than all that are counted, and they must be enough.
            counted = last_resumable if each.resumable else last
            goes = each.iteration not in kept and len(counted) == (keep_last or 1) and each.iteration < counted[-1]
        else:
            goes = each.iteration not in kept and each.iteration < newest
        if goes:
            removals.append(each.iteration)
    return sorted(removals)


def _choose_best(steps: Sequence[StepFacts], count: int, mode: BestMode) -> list[int]:
    """Of equal metrics the newer step's is the better one."""
    sign = 1.0 if mode is BestMode.MAX else -1.0
    rated = [(sign * each.metric, each.iteration) for each in steps if each.metric is not None]
    return [iteration for _, iteration in sorted(rated, reverse=True)[:count]]


class Retention:
    """Applies a policy after each save, and remembers what it has seen. One thread's at a time; picklable.

    Steps that it once found complete, or another tool's, are not looked at again, but for those that ``keep_last``
    counts and those that are to go: a save then costs one listing of names and a few looks, however many are kept.

    Args:
        policy: Which steps are kept.
    """

    def __init__(self, policy: RetentionPolicy) -> None:
        self.policy = policy
        self._settled: dict[int, StepFacts] = {}

    def __call__(self, store: Store, iteration: int) -> None:
        """After the commit of ``iteration``: `apply`. Never raises."""
        self.apply(store, newest=iteration)

    def apply(self, store: Store, *, newest: int | None = None, in_flight: Collection[int] = ()) -> RetentionReport:
        """Remove what the policy does not keep, and sweep what dead saves left. Coordinator. Never raises.

        Args:
            store: Opened at ``save_dir``.
            newest: The step committed last. None: the one that ``latest_checkpoint.txt`` names when it is complete,
                else the complete one with the highest iteration.
            in_flight: Iterations that are being saved.
        """
        run = _Run(store, self.policy, self._settled, frozenset(each for each in in_flight if each != newest))
        try:
            run.run(newest)
        except Exception as error:  # noqa: BLE001 - room is not worth a run: handed over in the report and the log
            run.failures[-1] = f"{type(error).__name__}: {error}"
        report = run.report()
        _log(store, report)
        return report


def apply_retention(
    store: Store, policy: RetentionPolicy, *, newest: int | None = None, in_flight: Collection[int] = ()
) -> RetentionReport:
    """`Retention.apply`, once. Coordinator. Never raises."""
    return Retention(policy).apply(store, newest=newest, in_flight=in_flight)


def protect_step(store: Store, iteration: int) -> None:
    """Keep retention away from a step until `unprotect_step`. May be called from anywhere at any time.

    Raises:
        CheckpointNotFoundError: There is no such step, or it is being removed.
        StorageError: The store failed.
    """
    path = step_name(iteration)
    if next(iter(store.list(path)), None) is None:
        raise CheckpointNotFoundError(
            f"protecting {store.location.join(path)}: there is no such step; protect one that was saved"
        )
    mark, manifest = f"{path}/{PROTECTED_NAME}", f"{path}/{MANIFEST_NAME}"
    was_committed = store.exists(manifest)
    store.put(mark, [_PROTECTED])
    # In this order: a removal that begins after the first look finds the mark.
    if _is_marked(store, iteration) or (was_committed and not store.exists(manifest)):
        store.delete([mark])
        raise CheckpointNotFoundError(
            f"protecting {store.location.join(path)}: it is being removed, or was when retention died there; protect "
            "another step"
        )


def unprotect_step(store: Store, iteration: int) -> None:
    """Let retention have a step again. One that is not protected is left as it is.

    Raises:
        StorageError: The store failed.
    """
    store.delete([f"{step_name(iteration)}/{PROTECTED_NAME}"])


def _is_marked(store: Store, iteration: int) -> bool:
    """Whether ``.writing`` is retention's."""
    return read_owner(store, iteration, _REMOVER) == _REMOVER


class _Run:
    """One application of a policy."""

    def __init__(
        self, store: Store, policy: RetentionPolicy, settled: dict[int, StepFacts], in_flight: frozenset[int]
    ) -> None:
        self._store = store
        self._policy = policy
        self._settled = settled
        self._in_flight = in_flight
        self._newest = -1
        self._save_ids: dict[int, str] = {}
        self._protected: set[int] = set()
        self._removed: list[int] = []
        self._swept: list[int] = []
        self._spared: dict[int, str] = {}
        self._objects = 0
        self._size_bytes = 0
        self.failures: dict[int, str] = {}

    def report(self) -> RetentionReport:
        return RetentionReport(
            tuple(self._removed),
            tuple(self._swept),
            dict(self._spared),
            dict(self.failures),
            self._objects,
            self._size_bytes,
        )

    def run(self, newest: int | None) -> None:
        if not self._store.capabilities.listable:
            return
        iterations = [each for each in list_steps(self._store) if each not in self._in_flight]
        for gone in self._settled.keys() - set(iterations):
            del self._settled[gone]
        latest = read_latest(self._store)
        anchor = self._find_newest(iterations, latest if newest is None else newest, given=newest is not None)
        if anchor is None:
            return
        self._newest = anchor.iteration
        facts = {anchor.iteration: anchor}
        for each in self._gather(anchor, [each for each in reversed(iterations) if each < anchor.iteration]):
            facts[each.iteration] = each
        policy = self._policy
        removals = choose_removals(
            facts.values(),
            keep_last=policy.keep_last,
            keep_every=policy.keep_every,
            keep_best=policy.keep_best,
            best_mode=policy.best_mode,
            protected=self._protected if latest is None else {latest, *self._protected},
            newest=anchor.iteration,
            in_flight=self._in_flight,
        )
        for iteration in removals:
            self._try_to_remove(facts[iteration])

    # -- what there is

    def _find_newest(self, iterations: Sequence[int], wanted: int | None, *, given: bool) -> StepFacts | None:
        """The step that everything else is measured by."""
        if wanted is not None:
            facts = self._look(wanted)
            if facts.kind is StepKind.COMMITTED:
                return facts
            if given:
                self._spared[wanted] = "the step that was to be the newest is not complete, so nothing is removed"
                return None
        for iteration in reversed(iterations):
            facts = self._look(iteration)
            if facts.kind is StepKind.COMMITTED:
                return facts
        return None

    def _gather(self, anchor: StepFacts, iterations: Sequence[int]) -> Iterator[StepFacts]:
        """Facts of older steps, newest first, with a look at each that matters."""
        counted = int(anchor.resumable)
        with ThreadPoolExecutor(_ASKED_AT_ONCE, "dcpfs-retention") as pool:
            for start in range(0, len(iterations), _ASKED_AT_ONCE):
                batch = iterations[start : start + _ASKED_AT_ONCE]
                fresh = counted < (self._policy.keep_last or 1)
                looks = [each for each in batch if fresh or each not in self._settled]
                found = dict(zip(looks, pool.map(self._look, looks), strict=True))
                for iteration in batch:
                    facts = found[iteration] if iteration in found else self._settled[iteration]
                    counted += facts.kind is StepKind.COMMITTED and facts.resumable
                    yield facts

    def _look(self, iteration: int) -> StepFacts:
        try:
            status = check_step(self._store, iteration)
        except PermissionDeniedError as error:  # of this step alone: the names could be listed
            self.failures[iteration] = error.message
            return StepFacts(iteration, StepKind.UNKNOWN)
        if status.state is StepState.OUTSIDE:
            self.failures[iteration] = status.reason
            return StepFacts(iteration, StepKind.UNKNOWN)
        metric = status.manifest.metric if status.manifest else None
        facts = StepFacts(iteration, _kind_of(status), metric, bool(status.beside_model))
        if status.manifest is not None:
            self._save_ids[iteration] = status.manifest.save_id
        if status.is_protected:
            self._protected.add(iteration)
        if facts.kind in (StepKind.COMMITTED, StepKind.UNKNOWN) and not status.is_protected:
            self._settled[iteration] = facts
        else:
            self._settled.pop(iteration, None)
        return facts

    # -- removal

    def _try_to_remove(self, facts: StepFacts) -> None:
        try:
            self._remove(facts)
        except StorageError as error:
            self.failures[facts.iteration] = error.message

    def _remove(self, facts: StepFacts) -> None:
        iteration = facts.iteration
        expected = self._save_ids.get(iteration)
        status = check_step(self._store, iteration)
        reason = self._reason_to_spare(facts, status, expected)
        if reason:
            self._spared[iteration] = reason
            return
        step = step_name(iteration)
        writing, manifest = f"{step}/{WRITING_NAME}", f"{step}/{MANIFEST_NAME}"
        self._settled.pop(iteration, None)
        if facts.kind is not StepKind.LEFTOVER:
            # With its marker gone a step looks like another tool's. This one says that what is left of it is ours. A
            # full store may refuse it, and needs the room the more.
            try:
                self._store.put(writing, [f"{_REMOVER}\n".encode()])
            except StorageError as error:
                logger.debug("%s is removed without a mark: %s", step, error)
            if self._is_protected(iteration):
                if _is_marked(self._store, iteration):
                    self._store.delete([writing])
                self._spared[iteration] = "it is protected"
                return
            self._store.delete([manifest])
        own = set(status.manifest.files) if status.manifest is not None else set()
        listed = [name for name in status.files if name in own or is_own_file(name)]
        # What the manifest vouches for goes with it also where the listing is behind: nobody would know it afterwards.
        names = sorted({*listed, *own})
        markers = [f"{step}/{name}" for name in names if is_metadata_file(name)]
        rest = [f"{step}/{name}" for name in names if not is_metadata_file(name)]
        if markers:
            self._store.delete(markers)
        self._store.delete([path for path in rest if path not in (writing, manifest)])
        hidden = sweep_leftovers(self._store, step)
        self._store.delete([writing])
        self._objects += len(listed) + hidden
        self._size_bytes += sum(status.files[name] for name in listed)
        if facts.kind is not StepKind.LEFTOVER:
            self._removed.append(iteration)
        elif listed or hidden:
            self._swept.append(iteration)

    def _reason_to_spare(self, facts: StepFacts, status: StepStatus, expected: str | None) -> str:
        """Why a step stays after all, or ""."""
        iteration = facts.iteration
        found = status.manifest.save_id if status.manifest is not None else None
        if _kind_of(status) is not facts.kind or (expected is not None and found != expected):
            return "it changed since it was looked at"
        if read_latest(self._store) == iteration:
            return "latest_checkpoint.txt names it"
        newest = step_name(self._newest)
        if not self._store.exists(f"{newest}/{MANIFEST_NAME}") or self._store.exists(f"{newest}/{WRITING_NAME}"):
            return f"{newest} is being overwritten or removed"
        return "it is protected" if self._is_protected(iteration) else ""

    def _is_protected(self, iteration: int) -> bool:
        return self._store.exists(f"{step_name(iteration)}/{PROTECTED_NAME}")


def _kind_of(status: StepStatus) -> StepKind:
    if status.state is StepState.COMPLETE:
        return StepKind.COMMITTED if status.manifest is not None else StepKind.UNKNOWN
    if status.state is StepState.DAMAGED:
        return StepKind.DAMAGED if status.manifest is not None else StepKind.UNKNOWN
    if status.state in (StepState.WRITING, StepState.ABSENT):
        # A directory without any file may hold what a killed writer left, which no listing shows.
        return StepKind.LEFTOVER
    if (
        status.state is StepState.UNKNOWN
        and status.keys
        and all(is_data_file(name) or is_rank_file(name) for name in status.files)
    ):
        # Data files without any metadata, which no tool can load: what a save left that was swept while it wrote.
        return StepKind.LEFTOVER
    return StepKind.UNKNOWN


def _log(store: Store, report: RetentionReport) -> None:
    for iteration, reason in report.spared.items():
        logger.info("%s: %s stays: %s", store.location, step_name(iteration), reason)
    if report.removed or report.swept:
        logger.info(
            "%s: removed %s%s: %d files, %d bytes",
            store.location,
            ", ".join(map(step_name, report.removed)) or "no step",
            f" and what dead saves left of {', '.join(map(step_name, report.swept))}" if report.swept else "",
            report.objects,
            report.size_bytes,
        )
    for iteration, reason in report.failures.items():
        logger.warning(
            "%s: retention failed%s: %s; what is left is tried again after the next save",
            store.location,
            f" at {step_name(iteration)}" if iteration >= 0 else "",
            reason,
        )
