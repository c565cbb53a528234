"""When a step becomes one, and what stood there before: the coordinator's part of a save.

Problem: a step is many files of many ranks. A marker that is there before the last of them, or still there when the
first of them is replaced, vouches for a mix (cases 2, 33-35, 45). Two incarnations of a job, each sure to be the only
one, can both put their marker on files of which each wrote some.

Way taken: nothing is loadable without ``manifest.json``, which lists every file; it comes last and goes first::

    claim_step     look at the step. Empty? → .writing, which makes the step this save's, and look again. Otherwise
                   nothing is touched yet: the ranks may still find that they can't save
    withdraw_step  .writing, now with this save's id → manifest away → every .metadata → old files. From the first of
                   these on nothing is loadable here, so another complete step is required
    (the ranks write; `ownership` says how names are kept apart)
    publish_step   still ours? → manifest, where none stands → still ours? → .writing away
    move_latest    the pointer, after the commit
    abandon_step   after a failure: this save's files away, manifest first, .writing last

Two saves of one step: who puts ``.writing`` last owns it. Let A be the older. If A puts its manifest before B puts
``.writing``, A's step is whole, and B withdraws it like any other. If A asks after that, it finds B and gives up.
Between these, A asks, B puts ``.writing``, A puts its manifest: all files of A were there when A asked. B lists after
it has put ``.writing``, so it sees them all, and asks once more before it deletes them, so that none can be of a still
later save. A's manifest then is whole and true, or lacks files and is no complete step; A asks once more, finds B and
reports that it lost. B, still the owner, replaces A's manifest by its own. At most one of them reports a commit, but
where the later one overwrites what the earlier one has committed. ``tests/faults/test_two_saves.py`` tries the orders.

On stores without conditional puts all this holds but for the time within a put between its own look and its write.
There an older manifest can replace a newer one, whose step then lacks files and isn't loaded: lost, never mixed.

A step is committed once its manifest stands. What fails after that (deleting ``.writing``) is logged; ``.writing``
beside a manifest means nothing. A pointer that could not be moved is an error of the save, which names the step as
complete: a resume that starts at an older one, without a word, is worse.
"""

from __future__ import annotations

import contextlib
import enum
import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace

from dcpfs.checkpointer.choices import OnExisting
from dcpfs.checkpointer.completeness import check_step
from dcpfs.checkpointer.layout import (
    KEYS,
    LATEST_NAME,
    MANIFEST_NAME,
    WRITING_NAME,
    check_iteration,
    parse_latest,
    parse_step_name,
    step_name,
)
from dcpfs.checkpointer.manifest import Manifest, decode_manifest, encode_manifest
from dcpfs.checkpointer.ownership import (
    FILE_BLOCK,
    first_file_number,
    read_owner,
    require_owner,
    superseded,
)
from dcpfs.checkpointer.presence import get_twice_unless
from dcpfs.checkpointer.step_files import is_data_file, is_metadata_file, is_own_file
from dcpfs.checkpointer.step_status import StepState, StepStatus
from dcpfs.errors import CheckpointError, CheckpointExistsError, ObjectExistsError, StorageError
from dcpfs.format.names import METADATA_NAME, parse_data_file_name
from dcpfs.storage.leftovers import sweep_leftovers
from dcpfs.storage.store import Store

__all__ = [
    "Claim",
    "ClaimState",
    "Stragglers",
    "abandon_step",
    "claim_step",
    "move_latest",
    "publish_step",
    "withdraw_step",
]

_logger = logging.getLogger(__name__)

_TRIES = 3


class Stragglers(enum.Enum):
    """Whether a rank of a failed save may still be writing."""

    NONE = "none"
    """All have said that they are done."""
    POSSIBLE = "possible"
    """One was not heard of: it may be dead, or just slow."""


class ClaimState(enum.Enum):
    """What a save found in its step."""

    FRESH = "fresh"
    """Nothing: the step is claimed, and ranks may write."""
    EXISTS = "exists"
    """A step, or what a save left that died: `withdraw_step` has to be called before the first byte."""
    SKIPPED = "skipped"
    """A complete step that is to be left as it is: there is nothing to save."""


@dataclass(frozen=True)
class Claim:
    """A save's hold on a step.

    Attributes:
        iteration: Of the step.
        save_id: Of the save.
        state: What was found.
        first_file_number: From which every rank numbers its data files of each key (`StepWriter`). 0 for a fresh step.
        predecessor: Save id of the commit that stands there, ``""`` for a step of another tool, None without a commit.
        latest: Content of ``latest_checkpoint.txt`` at the time, or None: `move_latest` leaves alone what someone else
            has changed since.
        on_existing: What the save was told to do about a complete step.
        exports: As for `claim_step`.
    """

    iteration: int
    save_id: str
    state: ClaimState
    first_file_number: int = 0
    predecessor: str | None = None
    latest: str | None = None
    on_existing: OnExisting = OnExisting.OVERWRITE
    exports: bool = False


def claim_step(
    store: Store,
    iteration: int,
    save_id: str,
    on_existing: OnExisting = OnExisting.OVERWRITE,
    *,
    exports: bool = False,
) -> Claim:
    """Look at a step, and make it this save's when nothing stands there. Coordinator.

    Four requests for an empty step: the pointer, a listing, ``.writing``, and a listing again, since another save may
    have committed in between.

    Args:
        store: Opened at ``save_dir``.
        iteration: Of the step.
        save_id: New for each save.
        on_existing: What to do about a complete step.
        exports: Training can't go on from what is saved: it takes the place of nothing that it can go on from.

    Raises:
        CheckpointExistsError: A step stands there and ``on_existing`` is `OnExisting.ERROR`, or it is the only complete
            one, or ``exports`` forbids it; nothing was touched.
        StorageError: The store failed.
    """
    check_iteration(iteration)
    latest = _read_latest(store)
    own = f"{step_name(iteration)}/{WRITING_NAME}"
    claimed = not _look(store, iteration) and _put_fresh(store, iteration, save_id)
    fresh = False
    try:
        fresh = claimed and _look(store, iteration) <= {own}
        if fresh:
            return Claim(iteration, save_id, ClaimState.FRESH, latest=latest)
        claim = Claim(iteration, save_id, ClaimState.EXISTS, latest=latest, on_existing=on_existing, exports=exports)
        return _claim_occupied(store, claim)
    finally:
        if claimed and not fresh:  # the step is not this save's before `withdraw_step`
            with contextlib.suppress(StorageError):
                if read_owner(store, iteration, save_id) == save_id:
                    store.delete([own])


def _claim_occupied(store: Store, claim: Claim) -> Claim:
    on_existing = claim.on_existing
    status = check_step(store, claim.iteration, named=True)
    step = store.location.join(step_name(claim.iteration)).redacted
    predecessor = _predecessor(status)
    if predecessor is not None and on_existing is OnExisting.ERROR:
        raise CheckpointExistsError(
            f"can't save {step}: the step stands there already; save another iteration, or set on_existing to "
            "'overwrite' or 'skip'"
        )
    if status.is_complete and on_existing is OnExisting.SKIP:
        _logger.warning("not saving %s: the step stands there already, and on_existing is 'skip'", step)
        return replace(claim, state=ClaimState.SKIPPED, predecessor=predecessor)
    if status.is_complete:
        _require_replaceable(claim, status)
        _require_another(store, claim.iteration, status)
        protected = ", although it is protected" if status.is_protected else ""
        _logger.warning("overwriting %s, which stands there already%s", step, protected)
    elif predecessor is not None:
        _logger.warning("overwriting %s, which can't be loaded: %s", step, status.reason)
    else:
        _logger.warning(
            "taking over %s from a save that left %d files and no manifest: it failed, or is still at work in another "
            "job, where it will fail",
            step,
            sum(is_own_file(name) and name != WRITING_NAME for name in status.files),
        )
    return replace(claim, first_file_number=first_file_number(claim.save_id), predecessor=predecessor)


def withdraw_step(store: Store, claim: Claim) -> None:
    """Remove what stands in a step, marker first, and make the step this save's. Coordinator, all others wait.

    Only names that dcpfs makes are touched, and never ``.protected``.

    Raises:
        CheckpointExistsError: It is the only complete step, or one that may not be overwritten; nothing was touched.
        SupersededError: Another save claimed the step at the same time; or has committed it since the claim, and
            ``on_existing`` is not `OnExisting.OVERWRITE`.
        StorageError: The store failed. The step may be withdrawn already.
    """
    iteration, save_id = claim.iteration, claim.save_id
    step = step_name(iteration)
    manifest, writing = f"{step}/{MANIFEST_NAME}", f"{step}/{WRITING_NAME}"
    owner = None
    for _ in range(_TRIES):
        _require_permission(store, claim)
        store.put(writing, [_encode_owner(save_id)])
        standing = _manifest_save_id(store, iteration, claim.predecessor)
        if standing not in (None, claim.predecessor) and claim.on_existing is not OnExisting.OVERWRITE:
            if read_owner(store, iteration, save_id) == save_id:
                store.delete([writing])
            raise superseded(store, iteration, save_id, standing, verb="start the save")
        names = _look(store, iteration)
        owner = read_owner(store, iteration, save_id)
        if owner == save_id:  # so no later save can have written any of these names yet
            store.delete([manifest])
            _delete_markers_first(store, names - {manifest, writing})
            owner = read_owner(store, iteration, save_id)
        if owner is not None:
            break
        # Whoever committed here in the meantime took the file for its own.
    if owner != save_id:
        raise superseded(store, iteration, save_id, owner, verb="start the save")


def publish_step(store: Store, claim: Claim, manifest: Manifest) -> None:
    """Commit: put the manifest, unless another save has taken over. Coordinator, when all files are there.

    Returns only when the step is committed.

    Raises:
        SupersededError: Another save owns the step.
        StorageError: The store failed; `abandon_step` comes next.
    """
    iteration, save_id = claim.iteration, claim.save_id
    writing = f"{step_name(iteration)}/{WRITING_NAME}"
    owner = read_owner(store, iteration, save_id)
    if owner is None and _is_ready(store, manifest) and _put_fresh(store, iteration, save_id):
        owner = save_id
    if owner != save_id:
        raise superseded(store, iteration, save_id, owner, verb="publish the save")
    _put_manifest(store, claim, encode_manifest(manifest))
    try:
        owner = read_owner(store, iteration, save_id)
    except StorageError as error:
        _logger.warning("can't ask whether %s was taken over: %s", store.location.join(writing).redacted, error)
        owner = save_id
    if owner is not None and owner != save_id:
        raise superseded(store, iteration, save_id, owner, verb="publish the save")
    if owner is None and not _is_committed(store, claim):
        raise superseded(store, iteration, save_id, owner, verb="publish the save")
    if owner == save_id:
        try:
            store.delete([writing])
        except StorageError as error:
            _logger.warning("the step is committed, but its %s is left: %s", WRITING_NAME, error)


def move_latest(store: Store, iteration: int, claim: Claim | None = None) -> None:
    """Let ``latest_checkpoint.txt`` name a committed step. Coordinator.

    Args:
        store: Opened at ``save_dir``.
        iteration: Of the step.
        claim: Of the save. Given, a pointer that someone else has moved since the claim is left alone, with a warning:
            a user who edited it, or a later incarnation of the job that this one must not set back.

    Raises:
        StorageError: It could not be moved; the step is complete all the same.
    """
    name = step_name(iteration)
    text = f"{name}\n"
    if claim is not None:
        before = None if claim.latest is None else parse_latest(claim.latest)
        current = _read_latest(store, before, iteration)
        if not _is_same_pointer(current, claim.latest) and not _is_same_pointer(current, text):
            _logger.warning(
                "leaving %s as it is: it was changed to %r while %s was saved",
                store.location.join(LATEST_NAME).redacted,
                (current or "")[:80].strip(),
                name,
            )
            return
    try:
        store.put(LATEST_NAME, [text.encode("ascii")])
    except StorageError as error:
        error.message = f"{error.message} ({name} is complete: load_step={iteration} loads it)"
        raise


def abandon_step(
    store: Store, claim: Claim, files: Iterable[str], *, stragglers: Stragglers = Stragglers.POSSIBLE
) -> None:
    """Delete what a failed save has written. Coordinator. Never raises.

    Args:
        store: Opened at ``save_dir``.
        claim: Of the save.
        files: Names, relative to the step, of files that its ranks have written, as far as known.
        stragglers: Whether a rank may still be writing. ``.writing`` then stays, so that the next save of the step does
            not take it for an empty one and give its files the names that the straggler writes to.
    """
    if claim.state is ClaimState.SKIPPED:
        return
    step = step_name(claim.iteration)
    try:
        _abandon(store, claim, {f"{step}/{name}" for name in files}, stragglers)
    except Exception as error:  # noqa: BLE001 - the failure of the save is what counts and is raised
        _logger.warning(
            "files of the failed save of %s are left, and are no step: %s", store.location.join(step).redacted, error
        )


def _abandon(store: Store, claim: Claim, names: set[str], stragglers: Stragglers) -> None:
    step = step_name(claim.iteration)
    own_data = {name for name in names if _is_own_data(name, claim)}
    if read_owner(store, claim.iteration, claim.save_id) != claim.save_id:
        # Another save's by now. Data files of ours have names of their own, unless both found the step empty.
        if own_data and (claim.first_file_number or store.capabilities.conditional_put):
            store.delete(sorted(own_data))
        return
    standing = _manifest_save_id(store, claim.iteration, claim.save_id, claim.predecessor)
    if standing is not None and standing == claim.predecessor:
        # Withdrawing broke off before its first effect: the step stands as it did, and nobody has written to it.
        store.delete([f"{step}/{WRITING_NAME}"])
        return
    if standing == claim.save_id:
        store.delete([f"{step}/{MANIFEST_NAME}"])
    if store.capabilities.listable:
        seen = _look(store, claim.iteration)
        names = names & seen | {name for name in seen if _is_own_data(name, claim) or not is_data_file(_in_step(name))}
    _delete_markers_first(store, names - {f"{step}/{WRITING_NAME}", f"{step}/{MANIFEST_NAME}"})
    if stragglers is Stragglers.NONE:
        sweep_leftovers(store, step)
        store.delete([f"{step}/{WRITING_NAME}"])


# --- what stands there


def _look(store: Store, iteration: int) -> set[str]:
    """Files of a step that dcpfs could have made, ``.protected`` excepted; where the store has no listing, markers."""
    step = step_name(iteration)
    if store.capabilities.listable:
        return {info.path for info in store.list(step) if is_own_file(_in_step(info.path))}
    names = [WRITING_NAME, MANIFEST_NAME, *(f"{key}/{METADATA_NAME}" for key in KEYS)]
    return {f"{step}/{name}" for name in names if store.exists(f"{step}/{name}")}


def _predecessor(status: StepStatus) -> str | None:
    """Save id of the commit that a step holds, ``""`` of a foreign or damaged one, None without one."""
    if status.manifest is not None:
        return status.manifest.save_id
    foreign = status.foreign and any(map(is_metadata_file, status.files))
    return "" if foreign or status.is_complete or status.state is StepState.DAMAGED else None


def _is_committed(store: Store, claim: Claim) -> bool:
    status = check_step(store, claim.iteration)
    return status.is_complete and status.manifest is not None and status.manifest.save_id == claim.save_id


def _is_ready(store: Store, manifest: Manifest) -> bool:
    """Whether all files of a manifest are there and none is put: nobody has withdrawn them.

    A save that had just committed when this one withdrew its step may have taken this one's ``.writing`` for its own.
    """
    step = step_name(manifest.iteration)
    if store.exists(f"{step}/{MANIFEST_NAME}") or not store.capabilities.listable:
        return False
    found = {_in_step(info.path): info.size_bytes for info in store.list(step)}
    return all(found.get(name) == record.size_bytes for name, record in manifest.files.items())


def _require_permission(store: Store, claim: Claim) -> None:
    """Look once more at what is to be withdrawn; nothing was touched yet."""
    status = check_step(store, claim.iteration, named=True)
    standing = None if status.manifest is None else status.manifest.save_id
    if standing not in (None, claim.predecessor):
        if claim.on_existing is not OnExisting.OVERWRITE:
            raise superseded(store, claim.iteration, claim.save_id, standing, verb="start the save")
        _logger.warning("overwriting %s, which another save has committed in the meantime", status.url)
    if status.is_complete:
        _require_replaceable(claim, status)
        _require_another(store, claim.iteration, status)


def _require_replaceable(claim: Claim, status: StepStatus) -> None:
    """Return when a complete step may be overwritten by what this save brings.

    Raises:
        CheckpointExistsError: Training can go on from the step, and not from what would stand there then.
    """
    others = status.beside_model
    if claim.exports and others:
        raise CheckpointExistsError(
            f"can't save the model alone to {status.url}: a step stands there that also holds {', '.join(others)}, and "
            "training could not go on from it any more; save the model under another iteration, or with "
            "save_checkpoint to a URL of its own"
        )


def _require_another(store: Store, iteration: int, standing: StepStatus) -> None:
    """Return when there is a complete step beside this one; where training can go on from this one, such a step.

    Raises:
        CheckpointExistsError: There is none.
    """
    latest = parse_latest(_read_latest(store) or "")
    others = {parse_step_name(name) for name in store.list_directories()} if store.capabilities.listable else {latest}
    for other in sorted((each for each in others if each not in (None, iteration)), reverse=True):
        found = check_step(store, other, named=other == latest)
        if found.is_complete and (found.beside_model or not standing.beside_model):
            return
    raise CheckpointExistsError(
        f"can't overwrite {store.location.join(step_name(iteration)).redacted}: it is the only complete step, and if "
        "the save failed there would be none; save another iteration first, or delete the step"
    )


def _manifest_save_id(store: Store, iteration: int, *expected: str | None) -> str | None:
    """Save id of a manifest, ``""`` of a damaged one, None when there is none. Another than expected is read twice."""
    url = store.location.join(step_name(iteration)).redacted

    def save_id_in(data: bytes) -> str:
        try:
            return decode_manifest(data, url=url).save_id
        except CheckpointError:
            return ""

    data = get_twice_unless(
        store, f"{step_name(iteration)}/{MANIFEST_NAME}", lambda found: save_id_in(found) in expected
    )
    return None if data is None else save_id_in(data)


def _read_latest(store: Store, *expected: int | None) -> str | None:
    """Text of the pointer. One that names no step, or none of those that are expected, is read twice."""

    def is_plausible(data: bytes) -> bool:
        named = parse_latest(data.decode("utf-8", "replace"))
        return named is not None and (not expected or named in expected)

    data = get_twice_unless(store, LATEST_NAME, is_plausible)
    return None if data is None else data.decode("utf-8", "replace")


def _is_same_pointer(one: str | None, other: str | None) -> bool:
    named = None if one is None else parse_latest(one)
    return one == other or (named is not None and other is not None and named == parse_latest(other))


# --- what is put


def _encode_owner(save_id: str) -> bytes:
    return f"{save_id}\n".encode()


def _put_fresh(store: Store, iteration: int, save_id: str) -> bool:
    """Put ``.writing`` where none stands. False: another save was quicker."""
    try:
        store.put(f"{step_name(iteration)}/{WRITING_NAME}", [_encode_owner(save_id)], if_absent=True)
    except ObjectExistsError:
        return False
    return store.capabilities.conditional_put or read_owner(store, iteration, save_id) == save_id


def _put_manifest(store: Store, claim: Claim, encoded: bytes) -> None:
    path = f"{step_name(claim.iteration)}/{MANIFEST_NAME}"
    try:
        store.put(path, [encoded], if_absent=True)
    except ObjectExistsError:
        if _manifest_save_id(store, claim.iteration, claim.save_id) == claim.save_id:
            return
        # Put by a save that had asked before this one owned the step, and that knows by now that it lost.
        require_owner(store, claim.iteration, claim.save_id, verb="publish the save")
        store.put(path, [encoded])
    except StorageError as error:
        if not _stands_after_all(store, claim):
            raise
        _logger.warning("the step is committed, although its manifest's put failed: %s", error)


def _stands_after_all(store: Store, claim: Claim) -> bool:
    """Whether a put that failed took effect: its answer alone may have been lost."""
    try:
        return _manifest_save_id(store, claim.iteration, claim.save_id) == claim.save_id
    except StorageError:
        return False


def _delete_markers_first(store: Store, names: Iterable[str]) -> None:
    """Delete files of a step: those whose names all saves use as early as can be, and ``.metadata`` before data."""
    batches: list[list[str]] = [[], [], []]
    for name in sorted(names):
        file = _in_step(name)
        batches[0 if is_metadata_file(file) else 2 if is_data_file(file) else 1].append(name)
    for batch in filter(None, batches):
        store.delete(batch)


# --- whose a name is


def _in_step(path: str) -> str:
    """A name below ``save_dir``, relative to its step."""
    return path.partition("/")[2]


def _is_own_data(path: str, claim: Claim) -> bool:
    name = parse_data_file_name(path.rpartition("/")[2])
    return name is not None and name.number // FILE_BLOCK == claim.first_file_number // FILE_BLOCK
