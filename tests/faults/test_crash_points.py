"""A save fails at each of its requests, before and after it takes effect: what loads is one whole step, bit for bit."""

from __future__ import annotations

import contextlib
import enum
import functools
import itertools
import logging
import os
import shutil
import signal
import threading
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import dcpfs
from dcpfs.checkpointer import save_step as save_step_module
from dcpfs.checkpointer.discovery import choose_step
from dcpfs.checkpointer.layout import step_name
from dcpfs.checkpointer.load_step import load_step
from dcpfs.checkpointer.phases import Phases
from dcpfs.checkpointer.rank_state import encode_rank_state
from dcpfs.checkpointer.save_context import SaveContext
from dcpfs.checkpointer.save_step import save_step
from dcpfs.checkpointer.step_plan import plan_step
from dcpfs.config import Durability, RetryConfig, TransferConfig
from dcpfs.errors import DcpfsError
from dcpfs.ranks import Ranks
from dcpfs.storage.local_store import LocalStore
from dcpfs.storage.location import Location
from dcpfs.storage.opening import open_store
from dcpfs.storage.store import Store
from dcpfs.testing.faulty import Aftermath, FaultPlan, FaultyStore, InjectedError, Moment
from dcpfs.testing.servers import SeaweedServer
from tests.conformance.step_scene import location_on
from tests.multiprocess.gloo import run_ranks, try_ranks

PARTS = TransferConfig(part_bytes=64 << 10, concurrency=1, local_concurrency=1, durability=Durability.PAGE_CACHE)
"""One request after the other, so that the n-th is always the same."""
RETRY = RetryConfig(attempts=5)
"""A busy server is asked again. What fails as planned fails above the store, which tries nothing of that twice."""
STEP, OLDER = 5, 4


class Before(enum.Enum):
    """What the save finds."""

    NOTHING = "nothing"
    SAME = "the same step, and an older one"
    REMAINS = "what a dead save left, and an older step"


def states(version: int, rank: int = 0, world_size: int = 1) -> dict[str, dict[str, Any]]:
    """A training state in which every value tells which save it is of."""
    model = {"large": torch.full((20_000,), float(version)), f"of_rank.{rank}": torch.full((7,), version * 10 + rank)}
    moments = {f"state.{name}.exp_avg": value[:9] + 0.5 for name, value in model.items()}
    trainer = {"iteration": version, "note": "x" * 1000, f"rng.rank_{rank}": [version] * 9}
    trainer["world"] = world_size
    return {"model": model, "optim": moments, "trainer": trainer}


def rank_file(version: int, rank: int = 0) -> bytes:
    return encode_rank_state({"position": [version, rank] * 20}, key="dataloader", rank=rank)


def save(
    store_of: Callable[[Store], Store] | None, place: Location, version: int, iteration: int, ranks: Ranks
) -> None:
    """Save a step on this rank, through a store that `store_of` wraps around the real one."""

    def open_wrapped(location: Location, **_: object) -> Store:
        store = open_store(location, transfer=PARTS, retry=RETRY)
        return store if store_of is None else store_of(store)

    step = plan_step(
        iteration,
        states(version, ranks.rank, ranks.world_size),
        rank_files={f"dataloader/rank_{ranks.rank}.pkl": rank_file(version, ranks.rank)},
        world_size=ranks.world_size,
    )
    context = SaveContext(place, ranks, transfer=PARTS, retry=RETRY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save_step_module, "open_store", open_wrapped)
        save_step(step, context, phases=Phases(rank=ranks.rank))


def loaded(place: Location) -> int | None:
    """Version of the whole step that a resume finds, or None for from scratch.

    Raises:
        AssertionError: It is not all of one save.
    """
    with opened(place) as store:
        status = choose_step(store).status
        if status is None:
            return None
        assert status.manifest is not None
        assert status.iteration is not None
        where, options = place.join(step_name(status.iteration)), place.storage_options
        found = {key: dcpfs.read(where.join(key).url, storage_options=options) for key in status.keys}
        version, world_size = found["trainer"]["iteration"], found["trainer"]["world"]
        assert isinstance(version, int)
        assert isinstance(world_size, int)
        for rank in range(world_size):
            for key, state in states(version, rank, world_size).items():
                for name, value in state.items():
                    assert equal(found[key][name], value), f"{key}/{name} of version {version}"
            name = f"dataloader/rank_{rank}.pkl"
            content = store.get(f"{step_name(status.iteration)}/{name}")
            assert content == rank_file(version, rank)
            assert zlib.crc32(content) == status.manifest.files[name].crc32
        return version


def equal(found: object, wanted: object) -> bool:
    if isinstance(wanted, torch.Tensor):
        return isinstance(found, torch.Tensor) and torch.equal(found, wanted)
    return found == wanted


def prepare(place: Location, before: Before) -> set[int | None]:
    """Make what the save finds.

    Returns:
        Versions that may load afterwards.
    """
    if before is Before.NOTHING:
        return {1, None}
    save(None, place, 40, OLDER, Ranks())
    if before is Before.SAME:
        save(None, place, 50, STEP, Ranks())
        return {1, 40, 50}
    if before is Before.REMAINS:
        with pytest.raises(InjectedError):
            save(wrapping(FaultPlan(mutation=9, aftermath=Aftermath.DEAD), []), place, 49, STEP, Ranks())
    return {1, 40}


def wrapping(plan: FaultPlan, made: list[FaultyStore]) -> Callable[[Store], Store]:
    def wrap(store: Store) -> Store:
        made.append(FaultyStore(store, plan))
        return made[-1]

    return wrap


def copy(content: Mapping[str, bytes], place: Location) -> None:
    """Put everything that was there."""
    with opened(place) as store:
        for path, data in content.items():
            store.put(path, [data])


@contextlib.contextmanager
def opened(place: Location) -> Iterator[Store]:
    store = open_store(place, transfer=PARTS, retry=RETRY)
    try:
        yield store
    finally:
        store.close()


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="dcpfs")


def check_crash_points(
    new_place: Callable[[], Location], before: Before, aftermaths: Sequence[Aftermath], *, stride: int = 1
) -> None:
    """Let the save fail at each, or each ``stride``-th, of its mutating calls, each time in a place of its own."""
    place, counted = new_place(), list[FaultyStore]()
    allowed = prepare(place, before)
    with opened(place) as store:
        content = {info.path: store.get(info.path) for info in store.list()}
    save(wrapping(FaultPlan(), counted), place, 1, STEP, Ranks())
    assert loaded(place) == 1
    mutations = counted[0].mutations
    assert mutations >= 15
    for mutation, moment, aftermath in itertools.product(range(1, mutations + 1, stride), Moment, aftermaths):
        plan = FaultPlan(mutation=mutation, moment=moment, aftermath=aftermath)
        place = new_place()
        copy(content, place)
        error: DcpfsError | None = None
        try:
            save(wrapping(plan, []), place, 1, STEP, Ranks())
        except DcpfsError as caught:
            error = caught
        version = loaded(place)
        assert version in allowed, plan
        if error is None:
            assert version == 1, plan
        elif aftermath is Aftermath.RECOVERED and "is complete" not in str(error):
            assert version != 1, f"{plan}: a save that failed is loaded"
        # A step that is the only complete one is not overwritten.
        save(None, place, 2, STEP + 1 if version == 1 and before is Before.NOTHING else STEP, Ranks())
        assert loaded(place) == 2, f"{plan}: the next save"


@pytest.mark.parametrize(
    ("backend", "before"),
    [
        ("local", Before.SAME),
        ("memory", Before.NOTHING),
        ("memory", Before.REMAINS),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name.lower(),
)
def test_cases_2_30_45_a_save_that_fails_anywhere_leaves_one_whole_step(
    backend: str, before: Before, tmp_path: Path
) -> None:
    def new_place() -> Location:
        return location_on(backend, tmp_path / uuid.uuid4().hex, lambda: pytest.fail("no server is needed"))

    check_crash_points(new_place, before, list(Aftermath))


def test_cases_2_30_the_same_on_s3(seaweed: SeaweedServer, tmp_path: Path) -> None:
    check_crash_points(lambda: location_on("s3", tmp_path, lambda: seaweed), Before.SAME, [Aftermath.DEAD], stride=2)


class DeadlyStore(FaultyStore):
    """Kills its process at the first change of an object of some name.

    Args:
        store: Does the work, until then.
        name: How the object's name ends.
        moment: Before or after the change.
    """

    def __init__(self, store: Store, name: str, moment: Moment) -> None:
        super().__init__(store)
        self._name = name
        self._moment = moment

    def mutate(self, verb: str, path: str, action: Callable[[], Any]) -> Any:
        if not path.endswith(self._name):
            return super().mutate(verb, path, action)
        if self._moment is Moment.AFTER:
            action()
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("still alive")


def _save_ranks(url: str, version: int, victim: int | None, wrap: Callable[[Store], Store] | None) -> str:
    """One save of two ranks, one of which has a store of its own kind. What became of it."""
    ranks = Ranks.current()
    try:
        save(wrap if ranks.rank == victim else None, Location(url), version, STEP, ranks)
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("victim", "name", "moment", "allowed"),
    [
        (1, ".distcp", Moment.BEFORE, {40}),
        (1, "rank_1.pkl", Moment.AFTER, {40}),
        (0, "model/.metadata", Moment.AFTER, {40}),
        (0, "manifest.json", Moment.BEFORE, {50}),
        (0, "latest_checkpoint.txt", Moment.BEFORE, {1}),
    ],
    ids=["in mid-write", "last write of a rank", "withdrawing", "before that", "after the commit"],
)
def test_case_30_a_killed_rank_leaves_one_whole_step(
    tmp_path: Path, victim: int, name: str, moment: Moment, allowed: set[int]
) -> None:
    place = Location(tmp_path)
    prepare(place, Before.SAME)
    wrap = functools.partial(DeadlyStore, name=name, moment=moment)
    outcomes = try_ranks(_save_ranks, 2, str(tmp_path), 1, victim, wrap, timeout_seconds=120)
    assert outcomes[victim].failed
    assert outcomes[1 - victim].value != "", "the other rank must hear of it"
    assert loaded(place) in allowed
    assert run_ranks(_save_ranks, 2, str(tmp_path), 2, None, None) == ["", ""]
    assert loaded(place) == 2


def test_case_2_a_rank_that_fails_while_a_step_is_overwritten_leaves_no_mix(tmp_path: Path) -> None:
    place = Location(tmp_path)
    prepare(place, Before.SAME)
    wrap = functools.partial(FaultyStore, plan=FaultPlan(mutation=1))
    texts = run_ranks(_save_ranks, 2, str(tmp_path), 1, 1, wrap)
    assert all("it fails, as planned" in text for text in texts)
    assert loaded(place) == 40
    left = [path for path in (tmp_path / step_name(STEP)).rglob("*") if path.is_file()]
    assert {path.name for path in left} <= {".writing"}, "nothing of the old save, nothing of the new"
    assert run_ranks(_save_ranks, 2, str(tmp_path), 2, None, None) == ["", ""]
    assert loaded(place) == 2


class Interruption:
    """Does something once, in between two requests of whoever reads local files."""

    def __init__(self, number: int, action: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
        self.happened = False
        self._number = number
        self._action = action
        self._lock = threading.Lock()
        for verb in ("get", "get_tail", "read_into", "head", "list"):
            patch.setattr(LocalStore, verb, self._around(getattr(LocalStore, verb)))

    def _around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def counted(*arguments: Any, **options: Any) -> Any:
            with self._lock:
                self._number -= 1
                due = self._number == 0
            if due:
                self.happened = True
                self._action()
            return call(*arguments, **options)

        return counted


def test_case_2_whoever_reads_while_the_step_is_overwritten_gets_one_whole_step_or_an_error(tmp_path: Path) -> None:
    prepare(Location(tmp_path / "made"), Before.SAME)
    read: set[int] = set()
    for number in itertools.count(1):
        place = Location(tmp_path / str(number))
        shutil.copytree(tmp_path / "made", place.path)
        parts: dict[str, dict[str, Any]] = {**states(0), "dataloader": {}}
        with pytest.MonkeyPatch.context() as patch:
            save_new = functools.partial(save, None, place, 1, STEP, Ranks())
            interruption = Interruption(number, save_new, patch)
            try:
                with opened(place) as store:
                    status = choose_step(store).status
                assert status is not None
                where = place.join(step_name(status.iteration or 0))
                load_step(parts, where, keys=tuple(parts), manifest=status.manifest, transfer=PARTS, retry=RETRY)
            except DcpfsError:
                continue  # half of the parts may be changed by now; the error says so
        version = parts["trainer"]["iteration"]
        read.add(version)
        for key, state in states(version).items():
            assert parts[key].keys() == state.keys()
            assert all(equal(parts[key][name], value) for name, value in state.items()), f"{number}: {key}"
        assert parts["dataloader"] == {"position": [version, 0] * 20}
        if not interruption.happened:
            break
    assert read >= {1, 50}
