"""What a run starts from: its own newest step, another checkpoint, or nothing; and the next best when that fails.

Problem: whether a restarted job resumes or starts over is decided by whatever a listing shows each rank, a missing
optimizer of a warm start is fatal in one tool and unnoticed in the next, and a damaged newest step stops a run that has
a good one beside it, or leaves it half loaded.

Way taken: which keys are asked for is a pure function of the settings and of what was found. One rank looks and tells
the others, so all load the same step. A step whose bytes turn out wrong, by reading it whole before (`verify`) or in
the middle of the load, is followed by the next best, which must bring every value that was changed by then.

Flow: ``ResumeSearch(...)`` → ``find()`` → ``load_with_fallback(parts, search, ...)`` → ``plan.iteration``::

    save_dir has a committed step    RESUME      all keys
    else load_path                   WARM_START  model, or all with load_training_state; scheduler when asked
    else                             SCRATCH     nothing
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from dcpfs.checkpointer.choices import WorldSizePolicy
from dcpfs.checkpointer.completeness import StepStatus, share_files, verify_step
from dcpfs.checkpointer.discovery import Found, Place, StepSearch, check_location, list_steps
from dcpfs.checkpointer.layout import KEYS, MODEL, OPTIM, SCHEDULER, TRAINER
from dcpfs.checkpointer.load_step import StepLoadReport, Strictness, load_step
from dcpfs.checkpointer.manifest import Manifest
from dcpfs.checkpointer.phases import Phases
from dcpfs.checkpointer.rank_file_loading import ReshardHook
from dcpfs.checkpointer.renaming import Renaming
from dcpfs.config import CastPolicy, ReplicaReads, RetryConfig, TransferConfig, Trust, VerifyMode
from dcpfs.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    DcpfsError,
    IncompleteCheckpointError,
)
from dcpfs.ranks import Ranks
from dcpfs.storage.location import Location
from dcpfs.storage.opening import open_store
from dcpfs.storage.store import Store

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Origin", "ResumePlan", "ResumeRules", "ResumeSearch", "choose_keys", "load_with_fallback"]

_logger = logging.getLogger(__name__)
_TRIES = 2
"""Readings of a step whose bytes are wrong."""


class Origin(str, enum.Enum):
    """What a run starts from."""

    RESUME = "resume"
    """A step of its own ``save_dir``."""
    WARM_START = "warm_start"
    """Its ``load_path``."""
    SCRATCH = "scratch"
    """Nothing."""


@dataclass(frozen=True)
class ResumeRules:
    """The settings that decide what is loaded.

    Attributes:
        load_training_state: A start from ``load_path`` takes all keys, and its iteration.
        only_load_scheduler_state: A start from ``load_path`` takes the scheduler beside the model.
        keys_not_to_resume: Keys that are left as they are.
        extra_keys: Keys beyond the five that are asked for.
        load_step: The step to load instead of the latest.
        verify: Read a step whole, and compare checksums, before it is loaded.
    """

    load_training_state: bool = False
    only_load_scheduler_state: bool = False
    keys_not_to_resume: tuple[str, ...] = ()
    extra_keys: tuple[str, ...] = ()
    load_step: int | None = None
    verify: bool = False


@dataclass(frozen=True)
class ResumePlan:
    """What to load. The same on all ranks, but for ``manifest`` and ``status``, which only the coordinator has.

    Attributes:
        origin: What the run starts from.
        iteration: What the load returns: 0 from scratch and for a warm start without training state.
        keys: Keys to ask for, in the order in which parts take over.
        extra_keys: Those of them that the checkpoint holds beyond the five: read whole for callbacks when nobody
            passes them.
        optional: Those of them whose absence is a warning.
        location: The step, or one key's directory; None from scratch.
        directories: Key to directory relative to ``location``, where that is not the key.
        step: Iteration of the step that is read, where it is known.
        manifest: Of the step.
        status: Of the step.
    """

    origin: Origin
    iteration: int = 0
    keys: tuple[str, ...] = ()
    extra_keys: tuple[str, ...] = ()
    optional: frozenset[str] = frozenset()
    location: Location | None = None
    directories: Mapping[str, str] = field(default_factory=dict)
    step: int | None = None
    manifest: Manifest | None = field(default=None, repr=False, compare=False)
    status: StepStatus | None = field(default=None, repr=False, compare=False)

    @property
    def url(self) -> str | None:
        """Redacted URL of what is loaded, or None."""
        return None if self.location is None else self.location.redacted


def choose_keys(origin: Origin, rules: ResumeRules, held: Iterable[str] = ()) -> tuple[str, ...]:
    """Which keys to ask for. Pure.

    Args:
        origin: What the run starts from.
        rules: The settings.
        held: Keys that the checkpoint holds, as far as known: those beyond the five belong to "all".
    """
    every = tuple(dict.fromkeys((*KEYS, *rules.extra_keys, *held)))
    if origin is Origin.SCRATCH:
        keys: tuple[str, ...] = ()
    elif origin is Origin.RESUME or rules.load_training_state:
        keys = every
    elif rules.only_load_scheduler_state:
        keys = (MODEL, SCHEDULER)
    else:
        keys = (MODEL,)
    return tuple(key for key in keys if key not in rules.keys_not_to_resume)


@dataclass(frozen=True)
class _Told:
    """A plan as it travels: where it is by a path, since each rank opens stores by its own options."""

    plan: ResumePlan
    path: str = ""
    checked: StepStatus | None = None


class ResumeSearch:
    """Candidates to start from, best first. Made by all ranks with the same settings; not thread-safe.

    Args:
        save_dir: Where the run saves.
        load_path: What it starts from when nothing is there.
        rules: The settings.
        ranks: Who loads; None: this process alone.
        trust: What may be unpickled.
        transfer: Concurrency and memory of looking and verifying.
        retry: When a request is tried again.
    """

    def __init__(
        self,
        save_dir: Location,
        load_path: Location | None = None,
        rules: ResumeRules | None = None,
        *,
        ranks: Ranks | None = None,
        trust: Trust = Trust.ALLOWLIST,
        transfer: TransferConfig | None = None,
        retry: RetryConfig | None = None,
    ) -> None:
        self.rules = ResumeRules() if rules is None else rules
        self.ranks = Ranks() if ranks is None else ranks
        self._save_dir = save_dir
        self._load_path = load_path
        self._trust = trust
        self._transfer = transfer
        self._retry = retry
        self._stores: dict[Location, Store] = {}
        self._steps: StepSearch | None = None
        self._warm = False
        self._warm_found: Found | None = None
        self._warm_steps: StepSearch | None = None
        self._rejected: set[int | None] = set()
        self._reason = ""
        self._damage: CorruptCheckpointError | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the stores that were looked into. Idempotent; the search can go on."""
        while self._stores:
            self._stores.popitem()[1].close()

    def find(self) -> ResumePlan:
        """The next best plan. Collective.

        Raises:
            CheckpointNotFoundError: ``load_path`` or ``load_step`` is not there.
            IncompleteCheckpointError: Steps were committed and none is usable.
            CorruptCheckpointError: Likewise, and one turned out damaged; or what ``load_path`` names is.
            CheckpointError: A ``load_path`` with training state does not say its iteration.
            StorageError: A store could not be asked.
        """
        while True:
            told: _Told | None = None
            own: ResumePlan | None = None
            failure: BaseException | None = None
            if self.ranks.is_coordinator:
                try:
                    own, path = self._next()
                    checked = own.status if self.rules.verify else None
                    told = _Told(replace(own, location=None, manifest=None, status=None), path, checked)
                except BaseException as error:  # noqa: BLE001 - broadcast to all ranks, which raise it
                    failure = self._none_left(error)
            told = self.ranks.broadcast_outcome(told, failure, None)
            if told is None:
                raise RuntimeError("the coordinator has neither an error nor a plan")
            plan = own or replace(told.plan, location=self._locate(told.plan.origin, told.path))
            faults = self._verify(plan, told.checked) if told.checked is not None else ""
            if faults and told.checked is not None:
                _logger.warning("%s; reading it once more", faults)
                faults = self._verify(plan, told.checked)
            if not faults:
                return plan
            self.reject(CorruptCheckpointError(faults))

    def reject(self, reason: CheckpointError) -> None:
        """What was found last does not serve. Every rank says so before the next `find`."""
        if self._steps is not None and not self._warm:
            self._steps.reject(str(reason))
        self._reason = str(reason)
        if isinstance(reason, CorruptCheckpointError):
            self._damage = reason

    # --- the coordinator's part

    def _none_left(self, error: BaseException) -> BaseException:
        """That no step can be used, as what it is where one turned out damaged (G5)."""
        damage = self._damage
        if damage is None or not isinstance(error, IncompleteCheckpointError):
            return error
        return CorruptCheckpointError(error.message, file=damage.file, key=damage.key)

    def _next(self) -> tuple[ResumePlan, str]:
        if not self._warm:
            status = self._find_own()
            if status is not None:
                return self._plan(Origin.RESUME, status, status.locate(self._save_dir)), status.path
            self._warm = True
            self._reason = ""
        if self._load_path is None:
            return ResumePlan(Origin.SCRATCH), ""
        found = self._find_warm(self._load_path)
        status = found.status
        key = None
        if found.place is Place.KEY:
            known = (*KEYS, *self.rules.extra_keys)
            key = found.key if found.key in known else MODEL
        return self._plan(Origin.WARM_START, status, status.locate(self._load_path), key), status.path

    def _find_own(self) -> StepStatus | None:
        store = self._store(self._save_dir)
        if self._steps is None:
            self._steps = StepSearch(store, load_step=self.rules.load_step, trust=self._trust)
        try:
            return self._steps.find()
        except CheckpointNotFoundError:
            # The step that was asked for may be one of load_path, when this run has none yet.
            if self._load_path is None or self.rules.load_step is None or list_steps(store):
                raise
        return None

    def _find_warm(self, load_path: Location) -> Found:
        store = self._store(load_path)
        found = self._warm_found
        if found is None:
            found = self._warm_found = check_location(store, trust=self._trust, load_step=self.rules.load_step)
            return found
        if found.place is not Place.RUN:
            raise CorruptCheckpointError(
                f"loading from {found.status.url}: {self._reason}; load another checkpoint, or correct load_path"
            )
        if self._warm_steps is None:
            root = found.status.path.rpartition("/")[0]
            self._warm_steps = StepSearch(store, load_step=self.rules.load_step, trust=self._trust, root=root)
            self._warm_steps.find()  # the one that was rejected: it comes first again
        self._warm_steps.reject(self._reason)
        status = self._warm_steps.find()
        if status is None:
            raise IncompleteCheckpointError(f"loading from {load_path}: none of its steps can be used: {self._reason}")
        return Found(Place.RUN, status)

    def _plan(self, origin: Origin, status: StepStatus, location: Location, key: str | None = None) -> ResumePlan:
        held = (*status.keys, *status.rank_files) if key is None else (key,)
        keys = choose_keys(origin, self.rules, held)
        iteration = 0
        if origin is Origin.RESUME or self.rules.load_training_state:
            if status.iteration is None:
                raise CheckpointError(
                    f"loading the training state of {location}: neither its name nor a manifest says its iteration; "
                    "rename it to iter_ and nine digits, or load it without load_training_state"
                )
            iteration = status.iteration
        return ResumePlan(
            origin,
            iteration,
            keys,
            tuple(each for each in keys if each not in KEYS and each in held),
            _optional_keys(origin, status),
            location,
            {} if key is None else {key: ""},
            status.iteration,
            status.manifest,
            status,
        )

    # --- every rank's part

    def _verify(self, plan: ResumePlan, status: StepStatus) -> str:
        """Read a step whole, each rank its share. Collective. What is wrong, or ""."""
        ranks = self.ranks
        faults: list[str] = []
        error: BaseException | None = None
        try:
            root = self._save_dir if plan.origin is Origin.RESUME or self._load_path is None else self._load_path
            files = share_files(status, ranks.rank, ranks.world_size)
            store = self._store(root)
            found = verify_step(store, status, files=files, transfer=self._transfer, trust=self._trust)
            faults = [str(fault) for fault in found]
        except BaseException as failure:  # noqa: BLE001 - brought to the agreement below, which raises it
            error = failure
        together = [text for each in ranks.agree_and_gather(error, faults) for text in each]
        return "; ".join(together[:8])

    def _locate(self, origin: Origin, path: str) -> Location | None:
        root = {Origin.RESUME: self._save_dir, Origin.WARM_START: self._load_path, Origin.SCRATCH: None}[origin]
        return root.join(path) if root is not None and path else root

    def _store(self, location: Location) -> Store:
        store = self._stores.get(location)
        if store is None:
            store = self._stores[location] = open_store(location, transfer=self._transfer, retry=self._retry)
        return store


def load_with_fallback(
    parts: Mapping[str, object],
    search: ResumeSearch,
    plan: ResumePlan,
    *,
    strict: Mapping[str, Strictness] | bool = True,
    read_extra: bool = True,
    renaming: Renaming | None = None,
    on_world_size_change: WorldSizePolicy | ReshardHook = WorldSizePolicy.ERROR,
    file_rank: int | None = None,
    verify: VerifyMode = VerifyMode.CHECKSUMS,
    trust: Trust = Trust.ALLOWLIST,
    allow_cast: CastPolicy = CastPolicy.NEVER,
    replicas: ReplicaReads = ReplicaReads.EACH,
    transfer: TransferConfig | None = None,
    retry: RetryConfig | None = None,
    new_phases: Callable[[], Phases] | None = None,
) -> tuple[ResumePlan, StepLoadReport]:
    """Load a plan, and when its bytes turn out wrong, twice, the next best one. Collective.

    Bytes that were damaged on the way are none of the step's, so it is read once more before it is passed over.
    A step that is chosen by ``load_step``, and a checkpoint that ``load_path`` names itself, has no next best. What a
    failed attempt had changed must be brought by the step that follows, name by name; else its error is raised.

    Args:
        parts: Key to part, as for `load_step`.
        search: That found the plan.
        plan: Not one from scratch.
        strict: As for `load_step`.
        read_extra: Keys beyond the five that nobody passes are read whole.
        renaming: Applied on a warm start alone.
        on_world_size_change: As for `load_step`.
        file_rank: As for `load_step`.
        verify: As for `load_step`.
        trust: As for `load_step`.
        allow_cast: As for `load_step`.
        replicas: As for `load_step`.
        transfer: As for `load_step`.
        retry: As for `load_step`.
        new_phases: Makes what measures and watches an attempt.

    Returns:
        The plan that was loaded, and what was done.

    Raises:
        DcpfsError: As `load_step`, and `ResumeSearch.find`.
    """
    changed: dict[str, set[str]] = {}
    written: dict[str, None] = {}
    tries = 0
    while True:
        tries += 1
        if plan.location is None:
            raise ValueError("there is nothing to load from scratch")
        try:
            report = load_step(
                parts,
                plan.location,
                keys=plan.keys,
                manifest=plan.manifest,
                ranks=search.ranks,
                strict=strict,
                optional=plan.optional,
                read_whole=plan.extra_keys if read_extra else (),
                renaming=renaming if plan.origin is Origin.WARM_START else None,
                directories=plan.directories,
                on_world_size_change=on_world_size_change,
                file_rank=file_rank,
                verify=verify,
                trust=trust,
                allow_cast=allow_cast,
                replicas=replicas,
                transfer=transfer,
                retry=retry,
                phases=None if new_phases is None else new_phases(),
                changed=changed,
            )
        except Exception as error:
            _add_written(error, written)
            damage = error if isinstance(error, (CorruptCheckpointError, IncompleteCheckpointError)) else None
            # Several ranks may have failed, each for a reason of its own: all must take the same way now.
            if not all(search.ranks.all_gather(damage is not None)) or damage is None:
                raise
            if tries < _TRIES:
                _logger.warning("%s; reading it once more", error)
                continue
            _logger.warning("%s; trying the next best", error)
            tries = 0
            search.reject(damage)
            try:
                plan = search.find()
            except CheckpointError as none_left:
                _add_written(none_left, written)
                raise none_left from error
        else:
            return plan, report


def _optional_keys(origin: Origin, status: StepStatus) -> frozenset[str]:
    """A warm start goes without an optimizer, and another tool's step need not know what a trainer is."""
    optional = {OPTIM} if origin is Origin.WARM_START else set()
    return frozenset(optional | {TRAINER} if status.foreign else optional)


def _add_written(error: Exception, written: dict[str, None]) -> None:
    """Note what this attempt has changed, and let its error name what earlier ones had."""
    if isinstance(error, DcpfsError):
        written.update(dict.fromkeys(error.written_keys))
        error.written_keys = tuple(written)
