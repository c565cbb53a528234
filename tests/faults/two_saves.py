"""Saves of one step whose every request waits for its turn.

Problem: what an old job does when it wakes up in mid-save can't be had by waiting, and threads that merely run at the
same time meet in few of the possible orders.

Way taken: each save runs in a thread of its own, on a view of one store that gives up the turn before each request.
Who goes on is what the schedule says, so that every order can be named, tried, and tried again.
"""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from dcpfs.checkpointer.choices import OnExisting
from dcpfs.checkpointer.commit import (
    Claim,
    ClaimState,
    abandon_step,
    claim_step,
    move_latest,
    publish_step,
    withdraw_step,
)
from dcpfs.checkpointer.completeness import check_step
from dcpfs.checkpointer.layout import step_name
from dcpfs.checkpointer.manifest import FileRecord, Manifest
from dcpfs.checkpointer.ownership import put_owned
from dcpfs.errors import DcpfsError, ObjectExistsError, ObjectNotFoundError
from dcpfs.storage.capabilities import Capabilities
from dcpfs.storage.location import Location
from dcpfs.storage.store import Buffer, ObjectInfo, PartMemory, Sink

__all__ = ["READ_WHOLE", "STEP", "Objects", "Outcome", "SharedStore", "Turns", "check_unmixed", "run_saves", "save_all"]

STEP = 5
READ_WHOLE = (".metadata", ".pkl")
RANKS = 2


@dataclass
class Objects:
    """What is in the bucket."""

    content: dict[str, bytes] = field(default_factory=dict)
    conditional: bool = True
    splits_puts: bool = False
    """Without conditional puts: the look of a put and its write are two turns."""
    changes: int = 0


class Turns:
    """Lets one of several threads at a time go on, in a given order; when that ends, each to its end in turn.

    Args:
        schedule: Names, one for each request.
        on_turn: Called between requests, while everyone waits.
    """

    def __init__(self, names: Sequence[str], schedule: Iterable[str], on_turn: Callable[[], None]) -> None:
        self._schedule = iter(schedule)
        self._alive = list(names)
        self._on_turn = on_turn
        self._changed = threading.Condition()
        self._current: str | None = None
        self._waiting: set[str] = set()
        self.error: BaseException | None = None
        self.taken: list[tuple[str, str]] = []

    def wait(self, name: str, request: str) -> None:
        """Wait until it is this one's turn for one more request."""
        with self._changed:
            if self._current == name:
                self._current = None
            self._waiting.add(name)
            self._choose()
            while self._current != name:
                self._changed.wait()
            self._waiting.discard(name)
            self.taken.append((name, request))

    def leave(self, name: str) -> None:
        """This one makes no more requests."""
        with self._changed:
            self._alive.remove(name)
            if self._current == name:
                self._current = None
            self._choose()

    def _choose(self) -> None:
        if self._current is not None or self._waiting != set(self._alive) or not self._alive:
            return
        try:
            self._on_turn()
        except BaseException as error:
            self.error = self.error or error
        self._current = next((each for each in self._schedule if each in self._alive), self._alive[0])
        self._changed.notify_all()


class SharedStore:
    """A view of the bucket for one save. Without ``turns``, requests simply happen."""

    def __init__(self, objects: Objects, name: str = "", turns: Turns | None = None) -> None:
        self._objects = objects
        self._name = name
        self._turns = turns

    @property
    def location(self) -> Location:
        return Location("memory://bucket/run")

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(conditional_put=self._objects.conditional)

    def _turn(self, request: str) -> dict[str, bytes]:
        if self._turns is not None:
            self._turns.wait(self._name, request)
        return self._objects.content

    def get(self, path: str) -> bytes:
        content = self._turn(f"get {path}")
        if path not in content:
            raise ObjectNotFoundError(f"no {path}")
        return content[path]

    def get_tail(self, path: str, size_bytes: int) -> tuple[bytes, int]:
        data = self.get(path)
        return data[-size_bytes:], len(data)

    def read_into(self, path: str, start: int, buffers: Sequence[memoryview]) -> None:
        raise NotImplementedError

    def put(self, path: str, buffers: Sequence[Buffer], *, if_absent: bool = False) -> ObjectInfo:
        content = self._turn(f"put {path}")
        if if_absent and path in content:
            raise ObjectExistsError(f"{path} exists")
        if if_absent and self._objects.splits_puts:
            content = self._turn(f"put {path} after the look")  # a look, and a put that no longer asks
        self._objects.changes += 1
        content[path] = b"".join(buffers)
        return ObjectInfo(path, len(content[path]))

    def open_sink(self, path: str, size_bytes: int, *, memory: PartMemory = PartMemory.COPIED) -> Sink:
        raise NotImplementedError

    def head(self, path: str) -> ObjectInfo:
        return ObjectInfo(path, len(self.get(path)))

    def exists(self, path: str) -> bool:
        return path in self._turn(f"head {path}")

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        content = self._turn(f"list {prefix}")
        found = [ObjectInfo(path, len(data)) for path, data in content.items() if path.startswith(f"{prefix}/")]
        return iter(found)

    def list_directories(self, prefix: str = "") -> Iterator[str]:
        return iter(sorted({path.partition("/")[0] for path in self._turn("list") if "/" in path}))

    def delete(self, paths: Iterable[str]) -> None:
        for path in paths:  # a batch can break off anywhere
            self._turn(f"delete {path}").pop(path, None)
            self._objects.changes += 1

    def close(self) -> None: ...


@dataclass
class Outcome:
    """How a save ended."""

    claim: Claim | None = None
    error: DcpfsError | None = None

    @property
    def committed(self) -> bool:
        return self.error is None


def save_all(store: SharedStore, save_id: str, on_existing: OnExisting = OnExisting.OVERWRITE) -> Outcome:
    """What `save_step` does to the store, coordinator and ranks alike. Every save's files have the same sizes."""
    outcome = Outcome()
    written: dict[str, FileRecord] = {}
    step = step_name(STEP)
    try:
        outcome.claim = claim = claim_step(store, STEP, save_id, on_existing)
        if claim.state is ClaimState.SKIPPED:
            return outcome
        if claim.state is ClaimState.EXISTS:
            withdraw_step(store, claim)
        for rank in range(RANKS):
            name = f"model/__{rank}_{claim.first_file_number}.distcp"
            data = f"{save_id} data {rank}".encode()
            written[name] = FileRecord(len(data), zlib.crc32(data))
            store.put(f"{step}/{name}", [data])
        for name in ("dataloader/rank_0.pkl", "model/.metadata"):
            data = f"{save_id} {name}".encode()
            written[name] = FileRecord(len(data), zlib.crc32(data))
            put_owned(store, f"{step}/{name}", [data], iteration=STEP, save_id=save_id)
        manifest = Manifest(save_id, STEP, RANKS, written, keys=("model",))
        publish_step(store, claim, manifest)
    except DcpfsError as error:
        outcome.error = error
        if outcome.claim is not None:
            abandon_step(store, outcome.claim, written)
        return outcome
    move_latest(store, STEP, claim)
    return outcome


def check_unmixed(objects: Objects, *, strictly: bool = True) -> str | None:
    """Id of the save whose whole step would be loaded now, or None.

    Args:
        objects: The bucket.
        strictly: Files that every load reads whole, and checks against the manifest, must not be mixed either. Else a
            step that has such a one is none that loads.

    Raises:
        AssertionError: What would be loaded is not all of one save.
    """
    store = SharedStore(objects)
    status = check_step(store, STEP)
    if not status.is_complete or status.manifest is None:
        return None
    for name, record in status.manifest.files.items():
        data = objects.content[f"{step_name(STEP)}/{name}"]
        if zlib.crc32(data) == record.crc32:
            continue
        told = not strictly and name.endswith(READ_WHOLE)
        assert told, f"{name} of {status.manifest.save_id} is {data!r}"
        return None
    return status.manifest.save_id


def run_saves(
    objects: Objects, names: Sequence[str], schedule: Iterable[str], *, strictly: bool = True
) -> tuple[dict[str, Outcome], list[tuple[str, str]]]:
    """Run saves of one step in a given order of requests; what would be loaded is checked after each.

    Returns:
        How each ended, and the order of requests.
    """
    checked = -1

    def check() -> None:
        nonlocal checked
        if objects.changes != checked:
            checked = objects.changes
            check_unmixed(objects, strictly=strictly)

    turns = Turns(names, schedule, check)
    outcomes: dict[str, Outcome] = {}

    def run(name: str) -> None:
        try:
            outcomes[name] = save_all(SharedStore(objects, name, turns), name)
        finally:
            with contextlib.suppress(ValueError):
                turns.leave(name)

    threads = [threading.Thread(target=run, args=(name,), daemon=True) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    if turns.error is not None:
        raise AssertionError(f"{turns.error} after {turns.taken}") from turns.error
    assert set(outcomes) == set(names), "a save ended by another error than its own"
    return outcomes, turns.taken
