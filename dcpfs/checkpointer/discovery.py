"""Which step of a run to resume from.

Problem: resuming from the highest directory picks one that was never finished (case 40); resuming from whatever
``latest_checkpoint.txt`` says picks one that was removed or damaged since; and starting from scratch in silence, since
nothing could be found, costs weeks.

Way taken: ``latest_checkpoint.txt``, one GET, decides when it names a complete step, for people edit it to roll back.
Else the newest complete step wins, of which training can go on: one that holds the model alone, as a closing save
leaves it, comes after all others. What was passed over is said by name. Nothing usable is only "from scratch" when
nothing was ever committed; when something was, it is an error.

`StepSearch` hands out candidates one after the other, best first, so that a step whose checksums turn out wrong, in the
middle of a load too, is followed by the next best. One rank searches and tells the others: two ranks that look at a
store a second apart can see different steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import Enum

from dcpfs.checkpointer.completeness import (
    FileFault,
    StepState,
    StepStatus,
    check_key_directory,
    check_step,
    check_step_at,
    segments_of,
)
from dcpfs.checkpointer.layout import LATEST_NAME, MANIFEST_NAME, parse_latest, parse_step_name, step_name
from dcpfs.checkpointer.presence import get_twice_unless
from dcpfs.checkpointer.step_files import is_key
from dcpfs.config import Trust
from dcpfs.errors import CheckpointNotFoundError, ConfigError, CorruptCheckpointError, IncompleteCheckpointError
from dcpfs.format.names import METADATA_NAME, rank_metadata_name
from dcpfs.storage.store import Store

__all__ = [
    "Choice",
    "Found",
    "Place",
    "StepSearch",
    "check_location",
    "choose_step",
    "list_statuses",
    "list_steps",
    "read_latest",
]

logger = logging.getLogger(__name__)

_ASKED_AT_ONCE = 8
_ASKED_AT_MOST = 256
_NAMED_AT_MOST = 8
_RUN_SUBDIRECTORY = "checkpoints"

Verify = Callable[[StepStatus], Sequence[FileFault]]


def list_steps(store: Store) -> list[int]:
    """Iterations of the directories that bear a step's name, ascending, whatever lies in them. One listing.

    Raises:
        StorageError: The store could not be asked.
    """
    return _list_names(store, "")[0]


def _list_names(store: Store, root: str) -> tuple[list[int], list[str]]:
    """Iterations of steps, and names that only look like steps."""
    found: set[int] = set()
    alike = []
    for name in store.list_directories(root):
        iteration = parse_step_name(name)
        if iteration is not None:
            found.add(iteration)
        elif name.startswith("iter"):
            alike.append(name)
    return sorted(found), sorted(alike)


def read_latest(store: Store, root: str = "") -> int | None:
    """The iteration that ``latest_checkpoint.txt`` names, or None. One GET. What it names need not be there.

    A file that names no step is a warning.

    Args:
        store: Only read.
        root: The ``save_dir``, relative to the store.

    Raises:
        StorageError: The store could not be asked.
    """
    return _read_pointer(store, root)[0]


def _read_pointer(store: Store, root: str) -> tuple[int | None, bool]:
    """What the file names, as `read_latest`; and whether there is one."""
    path = _join(root, LATEST_NAME)
    data = get_twice_unless(store, path, lambda found: _named_in(found) is not None)
    if data is None:
        return None, False
    iteration = _named_in(data)
    if iteration is None:
        logger.warning(
            "%s names no step (%r): ignored; write the name of one into it, such as %s",
            store.location.join(path),
            data[:80],
            step_name(5),
        )
    return iteration, True


def _named_in(data: bytes) -> int | None:
    return parse_latest(data[:4096].decode("utf-8", "replace"))


def list_statuses(
    store: Store, iterations: Collection[int] | None = None, *, trust: Trust = Trust.ALLOWLIST
) -> list[StepStatus]:
    """A look at steps, ascending; at all of them by default, absent ones left out. Several are asked for at once.

    Args:
        store: Opened at ``save_dir``.
        iterations: Which ones; None: all.
        trust: As for `check_step`.

    Raises:
        StorageError: The store could not be asked.
    """
    latest = read_latest(store)
    wanted = sorted(list_steps(store) if iterations is None else iterations)
    with ThreadPoolExecutor(min(_ASKED_AT_ONCE, len(wanted) or 1), "dcpfs-look") as pool:
        found = list(pool.map(lambda each: check_step(store, each, named=each == latest, trust=trust), wanted))
    for status in found:
        if status.state is StepState.OUTSIDE:
            logger.warning("%s: %s is passed over", store.location, status.describe())
    return [status for status in found if status.state is not StepState.ABSENT]


class StepSearch:
    """Candidates to resume from, best first. One rank's; not thread-safe.

    Every look is fresh. What is handed out and does not serve is told with `reject`, and the next call of `find` gives
    the next best.

    Args:
        store: Opened at ``save_dir``. Only read.
        load_step: The user's choice: this step or none.
        trust: What may be unpickled from the ``.metadata`` of a foreign step.
        root: The ``save_dir``, relative to the store.

    Attributes:
        skipped: What was passed over so far, in the order in which it was looked at.
        latest: What ``latest_checkpoint.txt`` names, once asked.
        committed_ever: Whether there is a sign that any save ever finished there.
    """

    def __init__(
        self, store: Store, *, load_step: int | None = None, trust: Trust = Trust.ALLOWLIST, root: str = ""
    ) -> None:
        self._store = store
        self._root = root
        self._location = store.location.join(root)
        self._load_step = load_step
        self._trust = trust
        self._candidates = self._search()
        self._current: StepStatus | None = None
        self.skipped: list[StepStatus] = []
        self.latest: int | None = None
        self.committed_ever = False

    def find(self) -> StepStatus | None:
        """The next candidate, or None when nothing was ever committed there.

        Raises:
            CheckpointNotFoundError: ``load_step`` is not there.
            IncompleteCheckpointError: There were committed steps, and none is usable any more.
            StorageError: The store could not be asked.
        """
        self._current = next(self._candidates, None)
        if self._current is not None:
            return self._current
        if self._load_step is not None:
            raise self._unusable_choice()
        if self.committed_ever:
            raise self._none_usable()
        logger.warning(
            "%s has no committed step: there is nothing to resume, and without a load_path a run starts from scratch%s",
            self._location,
            f". To resume from a step that was passed over, write its name into {LATEST_NAME} or set load_step"
            if self.skipped
            else "",
        )
        return None

    def reject(self, reason: str) -> None:
        """The last candidate does not serve, for the reason given."""
        if self._current is not None:
            self._skip(replace(self._current, state=StepState.DAMAGED, reason=reason))
            self._current = None

    def _search(self) -> Iterator[StepStatus]:
        if self._load_step is not None:
            status = self._look(self._load_step, named=True)
            if status.is_complete:
                self._note_rolled_back(self._load_step)
                yield status
            else:
                self.skipped.append(status)
            return
        self.latest, has_pointer = _read_pointer(self._store, self._root)
        # A store without a listing, such as a web server, serves the step that is named.
        listable = self.latest is None or self._store.capabilities.listable
        iterations, alike = _list_names(self._store, self._root) if listable else ([], [])
        if alike:
            logger.warning(
                "%s: not taken for steps, by their names: %s", self._location, ", ".join(alike[:_NAMED_AT_MOST])
            )
        looked_at: dict[int, StepStatus] = {}
        if self.latest is not None:
            self.committed_ever = True
            status = self._look(self.latest, named=True)
            if not status.is_complete:
                again, _ = _read_pointer(self._store, self._root)
                if again not in (None, self.latest):
                    logger.warning(
                        "%s names %s, not %s, as it was read at first",
                        self._location.join(LATEST_NAME),
                        step_name(again),
                        step_name(self.latest),
                    )
                    self.latest = again
                    status = self._look(again, named=True)
            looked_at[self.latest] = status
            if status.is_complete:
                looked_at.update(self._note_newer(self.latest, iterations))
                yield status
            else:
                self._skip(status)
        exports: dict[int, StepStatus] = {}
        for iteration in reversed(iterations):
            if iteration == self.latest:
                continue
            found = looked_at.get(iteration)
            status = self._look(iteration, named=False) if found is None else found
            self.committed_ever = self.committed_ever or status.was_committed
            if status.is_complete and not status.beside_model:
                exports[iteration] = status
            elif status.is_complete:
                self._note_instead(iteration, next(iter(exports), None), has_pointer=has_pointer)
                yield status
            elif status.state is not StepState.ABSENT:
                # A pointer was put by a save that had ended, also one that is cut off or edited to nothing.
                self.committed_ever |= has_pointer and status.state is StepState.UNKNOWN
                self._skip(status)
        for iteration, status in exports.items():
            self._note_instead(iteration, None, has_pointer=has_pointer)
            yield status

    def _note_instead(self, iteration: int, export: int | None, *, has_pointer: bool) -> None:
        """Say that a step is taken that is not the one that is named, or not the newest one."""
        if has_pointer:
            logger.warning(
                "%s: %s is taken instead, the newest usable step; %s names %s",
                self._location,
                step_name(iteration),
                LATEST_NAME,
                "none" if self.latest is None else step_name(self.latest),
            )
        if export is not None:
            logger.warning(
                "%s: %s is taken although %s is newer, which holds the model alone; to start from that, set load_step "
                "or load_path",
                self._location,
                step_name(iteration),
                step_name(export),
            )

    def _note_rolled_back(self, load_step: int) -> None:
        """Say that the run has come further than the step that is chosen: a setting that is left sets it back again."""
        self.latest, _ = _read_pointer(self._store, self._root)
        if self.latest is not None and self.latest > load_step:
            logger.warning(
                "%s: load_step is %d, so that is loaded, although %s names %s; take load_step out of the settings once "
                "the run has been rolled back, or every restart begins there anew",
                self._location,
                load_step,
                LATEST_NAME,
                step_name(self.latest),
            )

    def _note_newer(self, latest: int, iterations: Sequence[int]) -> dict[int, StepStatus]:
        """Say that there is a newer complete step than the one that is named."""
        looked_at: dict[int, StepStatus] = {}
        for iteration in reversed(iterations):
            if iteration <= latest:
                break
            status = looked_at[iteration] = self._look(iteration, named=False)
            if status.is_complete:
                logger.warning(
                    "%s names %s, so that is resumed from, although %s is complete and newer",
                    self._location.join(LATEST_NAME),
                    step_name(latest),
                    step_name(iteration),
                )
                break
        return looked_at

    def _look(self, iteration: int, *, named: bool) -> StepStatus:
        path = _join(self._root, step_name(iteration))
        return check_step_at(self._store, path, named=named, trust=self._trust)

    def _skip(self, status: StepStatus) -> None:
        self.skipped.append(status)
        level = logging.WARNING if len(self.skipped) <= _NAMED_AT_MOST else logging.DEBUG
        logger.log(level, "%s: %s is passed over", self._location, status.describe())

    def _unusable_choice(self) -> IncompleteCheckpointError | CheckpointNotFoundError:
        status = self.skipped[-1]
        remedy = "choose another load_step"
        if status.state is StepState.ABSENT:
            there = [step_name(iteration) for iteration in _list_names(self._store, self._root)[0][-_NAMED_AT_MOST:]]
            return CheckpointNotFoundError(
                f"resuming from {status.url}: there is no such step; {remedy}"
                + (f" (the newest are {', '.join(there)})" if there else f", or correct {self._location}")
            )
        return IncompleteCheckpointError(
            f"resuming from {status.url}: it can't be used, {status.reason}; {remedy}", missing=status.missing
        )

    def _none_usable(self) -> IncompleteCheckpointError:
        named = "; ".join(status.describe() for status in self.skipped[:_NAMED_AT_MOST])
        more = len(self.skipped) - _NAMED_AT_MOST
        return IncompleteCheckpointError(
            f"resuming from {self._location}: steps were committed there and none can be used: {named}"
            + (f"; and {more} more" if more > 0 else "")
            + f"; repair one, write the name of one that is whole into {LATEST_NAME}, or remove that and the steps to "
            "start from scratch",
            missing=[name for status in self.skipped for name in status.missing],
        )


@dataclass(frozen=True)
class Choice:
    """What a search came to.

    Attributes:
        status: The step, or None: from scratch.
        skipped: What was passed over.
        committed_ever: Whether there is a sign that any save ever finished there.
        latest: What ``latest_checkpoint.txt`` names.
    """

    status: StepStatus | None
    skipped: tuple[StepStatus, ...] = ()
    committed_ever: bool = False
    latest: int | None = field(default=None)


def choose_step(
    store: Store,
    *,
    load_step: int | None = None,
    verify: Verify | None = None,
    trust: Trust = Trust.ALLOWLIST,
    root: str = "",
) -> Choice:
    """The step to resume from. One rank asks, and broadcasts what it got.

    Args:
        store: Opened at ``save_dir``. Only read.
        load_step: The user's choice: this step or an error.
        verify: Called with a complete step; what it finds wrong makes the next best step the choice. Usually
            `verify_step` with the files dealt out over ranks.
        trust: What may be unpickled from the ``.metadata`` of a foreign step.
        root: The ``save_dir``, relative to the store.

    Raises:
        CheckpointNotFoundError: ``load_step`` is not there.
        IncompleteCheckpointError: There were committed steps, and none is usable any more.
        StorageError: The store could not be asked.
    """
    search = StepSearch(store, load_step=load_step, trust=trust, root=root)
    while True:
        status = search.find()
        faults = verify(status) if verify is not None and status is not None else ()
        if not faults:
            return Choice(status, tuple(search.skipped), search.committed_ever, search.latest)
        search.reject("; ".join(str(fault) for fault in faults[:_NAMED_AT_MOST]))


class Place(str, Enum):
    """What a ``load_path`` names."""

    STEP = "step"
    """A step's directory, ours or another tool's."""
    RUN = "run"
    """A ``save_dir``, or the directory above one called ``checkpoints``: its latest complete step."""
    KEY = "key"
    """One key's directory: a checkpoint of torch's own."""


@dataclass(frozen=True)
class Found:
    """What lies at a ``load_path``.

    Attributes:
        place: What it names.
        status: The step, complete; for a key's directory a status of that directory alone. Its ``path`` is relative to
            the store. Its ``iteration`` is None where neither a name nor a manifest tells.
        key: Last segment of the location, for a key's directory.
    """

    place: Place
    status: StepStatus
    key: str | None = None


def check_location(
    store: Store, *, verify: Verify | None = None, trust: Trust = Trust.ALLOWLIST, load_step: int | None = None
) -> Found:
    """Find out what a ``load_path`` names, and that it can be loaded. One rank asks, and broadcasts what it got.

    Args:
        store: Opened at the ``load_path``. Only read.
        verify: As for `choose_step`; of a step or key that is named itself, a fault is an error.
        trust: What may be unpickled from a foreign ``.metadata``.
        load_step: Which step of a run directory.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        IncompleteCheckpointError: There is one that can't be used.
        CorruptCheckpointError: ``verify`` found a fault in what the path names.
        ConfigError: ``load_step`` was given for what is no run directory.
        StorageError: The store could not be asked.
    """
    found = _find_place(store, verify, trust, load_step)
    status = found.status
    if status.state is StepState.ABSENT:
        raise CheckpointNotFoundError(
            f"loading from {status.url}: there is no checkpoint; it has no {MANIFEST_NAME}, no {METADATA_NAME}, and "
            "no step; correct load_path"
        )
    if not status.is_complete:
        raise IncompleteCheckpointError(
            f"loading from {status.url}: it can't be used, {status.reason}; correct load_path", missing=status.missing
        )
    if load_step is not None and found.place is not Place.RUN:
        raise ConfigError(
            f"load_step {load_step} was given, and {store.location} is a {found.place.value}, not a directory of steps"
        )
    if verify is not None and found.place is not Place.RUN:
        faults = verify(status)
        if faults:
            raise CorruptCheckpointError(
                f"loading from {status.url}: {'; '.join(map(str, faults[:_NAMED_AT_MOST]))}; load another checkpoint",
                file=faults[0].file,
                key=faults[0].key,
            )
    return found


def _find_place(store: Store, verify: Verify | None, trust: Trust, load_step: int | None) -> Found:
    if store.exists(MANIFEST_NAME):
        return Found(Place.STEP, check_step_at(store, trust=trust))
    if store.exists(METADATA_NAME):
        return _as_key(store, trust)
    root = _find_run(store)
    if root is not None:
        choice = choose_step(store, load_step=load_step, verify=verify, trust=trust, root=root)
        if choice.status is not None:
            return Found(Place.RUN, choice.status)
        raise IncompleteCheckpointError(
            f"loading from {store.location.join(root)}: none of its steps was committed; name one of them in load_path"
        )
    if store.exists(rank_metadata_name(0)):
        return _as_key(store, trust)
    if _has_keys(store):
        return Found(Place.STEP, check_step_at(store, trust=trust))
    return Found(Place.STEP, StepStatus(None, StepState.ABSENT, url=store.location.redacted))


def _as_key(store: Store, trust: Trust) -> Found:
    *_, parent, key = ["", *segments_of(store.location)]
    return Found(Place.KEY, replace(check_key_directory(store, trust=trust), iteration=parse_step_name(parent)), key)


def _has_keys(store: Store) -> bool:
    """Whether a directory right below holds metadata.

    Asked before everything is listed: a path that was mistyped can hold millions of other files.
    """
    if not store.capabilities.listable:
        return True
    names = [name for name in store.list_directories("") if is_key(name)]
    wanted = [f"{name}/{file}" for name in names for file in (METADATA_NAME, rank_metadata_name(0))]
    with ThreadPoolExecutor(_ASKED_AT_ONCE, "dcpfs-look") as pool:
        return any(pool.map(store.exists, wanted[:_ASKED_AT_MOST]))


def _find_run(store: Store) -> str | None:
    """The directory of steps at a location, or right below it; None when it is none."""
    if store.exists(LATEST_NAME):
        return ""
    if store.capabilities.listable:
        names = list(store.list_directories(""))
        if any(parse_step_name(name) is not None for name in names):
            return ""
        if _RUN_SUBDIRECTORY in names and _find_run_in(store, _RUN_SUBDIRECTORY):
            return _RUN_SUBDIRECTORY
    return None


def _find_run_in(store: Store, root: str) -> bool:
    if store.exists(_join(root, LATEST_NAME)):
        return True
    return any(parse_step_name(name) is not None for name in store.list_directories(root))


def _join(root: str, name: str) -> str:
    return f"{root}/{name}" if root else name
