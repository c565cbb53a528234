"""`dcp.async_save`, plan caching, saves without collectives and several threads at once, with our writer."""

from __future__ import annotations

import copy
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import AsyncStager, BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import WriteResult

import dcpfs
from dcpfs.storage.location import Location
from tests.peers.sample_state import assert_same, make_tensor, template_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def _training_state() -> dict[str, Any]:
    """What changes during training: parameters, views that share memory, tied ones, numbers, lists."""
    base = make_tensor((64, 32))
    weight = torch.nn.Parameter(make_tensor((300, 70), torch.float32, 3))
    return {
        "base": base,
        "view": base[3:9],
        "column": base[:, 5],
        "weight": weight,
        "tied": weight,
        "transposed": weight.detach().t(),
        "counter": torch.tensor(3, dtype=torch.int64),
        "flags": torch.tensor([True, False]),
        "half": make_tensor((9,), torch.bfloat16, 5),
        "nested": {"list": [make_tensor((4,)), {"x": make_tensor((2, 2), torch.int32)}], "lr": 0.5},
        "epoch": 1,
        "history": [1.0, 2.0],
    }


def _train(state: dict[str, Any]) -> None:
    """Change every value, in place where it can be."""
    with torch.no_grad():
        state["base"].add_(1)
        state["weight"].mul_(2)
        state["counter"].add_(1)
        state["flags"].logical_not_()
        state["half"].neg_()
        state["nested"]["list"][0].sub_(1)
        state["nested"]["list"][1]["x"].add_(7)
    state["nested"]["lr"] /= 2
    state["epoch"] += 1
    state["history"].append(float(state["epoch"]))


def _kept(state: dict[str, Any]) -> dict[str, Any]:
    with torch.no_grad():
        return copy.deepcopy({**state, "weight": state["weight"].detach(), "tied": state["tied"].detach()})


class _HeldWriter(dcpfs.FsspecStorageWriter):
    """Writes nothing before it is told to."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(url, **options)
        self.go = threading.Event()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        assert self.go.wait(180)
        self.go.clear()
        return super().write_data(plan, planner)


_STAGERS: dict[str, Callable[[], AsyncStager | None]] = {
    "none given": lambda: None,
    "plain": lambda: DefaultStager(StagingOptions(False, False, False, False)),
    "shared memory": lambda: DefaultStager(StagingOptions(False, True, False, False)),
    "staged in a thread": lambda: DefaultStager(StagingOptions(False, False, True, False)),
    "blocking": BlockingAsyncStager,
}


@pytest.fixture(params=list(_STAGERS))
def stager(request: pytest.FixtureRequest) -> Iterator[AsyncStager | None]:
    made = _STAGERS[request.param]()
    yield made
    if made is not None:
        made.close()


@pytest.mark.parametrize("planner", [None, dcpfs.SavePlanner])
def test_case_16_55_three_saves_with_one_writer_and_one_stager_hold_the_values_of_their_call(
    tmp_path: Path, stager: AsyncStager | None, planner: type[dcpfs.SavePlanner] | None
) -> None:
    state = _training_state()
    writer = _HeldWriter(str(tmp_path / "first"))
    expected = {}
    for number in range(3):
        url = str(tmp_path / f"c{number}")
        expected[url] = _kept(state)
        response = async_save(
            state,
            checkpoint_id=url,
            storage_writer=writer,
            async_stager=stager,
            planner=planner() if planner is not None else None,
        )
        if isinstance(response, AsyncSaveResponse):
            response.staging_completion.result(180)
        _train(state)  # while the writer has not written a byte
        writer.go.set()
        _upload(response).result(180)
    for url, kept in expected.items():
        template = template_of(kept)
        assert isinstance(template, dict)
        dcpfs.load(template, url)
        assert_same(template, kept)
    assert not (tmp_path / "first").exists()


def _upload(response: Future[Any] | AsyncSaveResponse) -> Future[Any]:
    return response.upload_completion if isinstance(response, AsyncSaveResponse) else response


def test_case_76_async_saves_to_s3_keep_the_options(s3_prefix: Location) -> None:
    state = _training_state()
    writer = dcpfs.FsspecStorageWriter(s3_prefix.url, storage_options=s3_prefix.storage_options)
    expected = {}
    for number in range(3):
        location = s3_prefix.join(f"c{number}")
        expected[location.url] = _kept(state)
        future = _upload(async_save(state, checkpoint_id=location.url, storage_writer=writer))
        _train(state)
        future.result(180)
    for url, kept in expected.items():
        template = template_of(kept)
        assert isinstance(template, dict)
        dcpfs.load(template, url, storage_options=s3_prefix.storage_options)
        assert_same(template, kept)


def test_a_failed_async_save_raises_and_the_writer_goes_on(tmp_path: Path) -> None:
    writer = dcpfs.FsspecStorageWriter(str(tmp_path / "c"))
    _upload(async_save({"w": torch.ones(3)}, storage_writer=writer)).result(180)
    failing = _upload(async_save({"w": torch.zeros(3)}, storage_writer=writer))
    with pytest.raises(CheckpointException, match="CheckpointExistsError"):
        failing.result(180)
    assert_same(dcpfs.read(tmp_path / "c"), {"w": torch.ones(3)})
    _upload(async_save({"w": torch.zeros(3)}, storage_writer=writer, checkpoint_id=str(tmp_path / "d"))).result(180)
    assert_same(dcpfs.read(tmp_path / "d"), {"w": torch.zeros(3)})


# --- plan caching


@pytest.fixture
def empty_plan_cache() -> Iterator[None]:
    """torch keeps its plans in the class, for the life of the process."""
    caches = [value for name, value in vars(SavePlanner).items() if name.startswith("_cached_")]

    def clear() -> None:
        for cache in caches:
            cache.clear()

    clear()
    yield
    clear()


_Planner = Callable[[], SavePlanner]
_PLANNERS: dict[str, _Planner] = {
    "torch": lambda: DefaultSavePlanner(enable_plan_caching=True),
    "own": lambda: dcpfs.SavePlanner(enable_plan_caching=True),
}


@pytest.mark.usefixtures("empty_plan_cache")
@pytest.mark.parametrize("anew", [True, False], ids=["a planner each", "one planner"])
@pytest.mark.parametrize("kind", list(_PLANNERS))
def test_cached_plans_never_carry_old_values(tmp_path: Path, kind: str, anew: bool) -> None:
    planner = _PLANNERS[kind]()
    writer = dcpfs.FsspecStorageWriter(tmp_path / "c")
    changes: list[Callable[[dict[str, Any]], object]] = [
        lambda state: None,
        lambda state: state["w"].add_(1),
        lambda state: state.update(step=2),
        lambda state: state.update(new=torch.ones(5)),
        lambda state: state["new"].mul_(3),
        lambda state: state.pop("w"),
        lambda state: state.update(new=torch.ones(6)),
        lambda state: state.update(new="no tensor any more"),
        lambda state: state.update(new=torch.ones(6)),
    ]
    state: dict[str, Any] = {"w": make_tensor((20, 3)), "step": 1, "s": {"x": torch.tensor(1.0)}}
    for number, change in enumerate(changes):
        change(state)
        url = tmp_path / f"c{number}"
        dcp_save(
            state,
            storage_writer=writer,
            checkpoint_id=url,
            planner=_PLANNERS[kind]() if anew else planner,
        )
        assert_same(dcpfs.read(url), state)
        template = template_of(state)
        assert isinstance(template, dict)
        dcp_load(template, storage_reader=FileSystemReader(url))
        assert_same(template, state)


@pytest.mark.usefixtures("empty_plan_cache")
@pytest.mark.parametrize("kind", list(_PLANNERS))
@pytest.mark.parametrize(
    "changed",
    [
        {"w": torch.arange(6.0, dtype=torch.float64), "v": torch.ones(4)},
        {"w": torch.arange(6, dtype=torch.int32), "v": torch.ones(4)},
        {"w": torch.arange(6.0), "v": torch.ones(4, dtype=torch.bfloat16)},
        {"w": torch.arange(6.0).reshape(2, 3), "v": torch.ones(4)},
        {"w": torch.arange(6.0), "v": torch.ones(5)},
        {"v": torch.ones(4), "w": torch.arange(6.0) + 1},
    ],
    ids=["wider", "int", "narrower", "reshaped", "longer", "reordered"],
)
def test_a_change_that_torchs_plan_cache_does_not_see_is_refused_or_right(
    tmp_path: Path, kind: str, changed: dict[str, torch.Tensor]
) -> None:
    writer = dcpfs.FsspecStorageWriter(tmp_path / "c0")
    dcp_save({"w": torch.zeros(6), "v": torch.zeros(4)}, storage_writer=writer, planner=_PLANNERS[kind]())
    failure: CheckpointException | None = None
    try:
        dcp_save(changed, storage_writer=writer, checkpoint_id=tmp_path / "c1", planner=_PLANNERS[kind]())
    except CheckpointException as error:
        failure = error
    if failure is None:
        found = dcpfs.read(tmp_path / "c1")
        assert_same({key: found[key] for key in changed}, changed)
        return
    assert kind == "torch"
    assert "UnsupportedValueError" in str(failure)
    assert not (tmp_path / "c1").exists() or not list((tmp_path / "c1").iterdir())


# --- without collectives


@pytest.mark.parametrize("writer", ["own", "torch"])
@pytest.mark.parametrize("reader", ["own", "own_planner", "torch", "load", "read"])
def test_no_dist_in_both_directions(tmp_path: Path, writer: str, reader: str) -> None:
    state = _kept(_training_state())
    url = str(tmp_path / "c")
    own = dcpfs.FsspecStorageWriter(url) if writer == "own" else FileSystemWriter(url)
    dcp_save(state, storage_writer=own, no_dist=True)
    template = template_of(state)
    assert isinstance(template, dict)
    if reader == "read":
        template = dcpfs.read(url)
    elif reader == "load":
        dcpfs.load(template, url)
    else:
        planner = dcpfs.LoadPlanner() if reader == "own_planner" else None
        storage = FileSystemReader(url) if reader == "torch" else dcpfs.FsspecStorageReader(url)
        dcp_load(template, storage_reader=storage, planner=planner, no_dist=True)
    assert_same(template, state)


# --- threads


def _run_threads(works: list[Callable[[], None]]) -> None:
    """Run all at once; raise the first failure."""
    failures: list[BaseException] = []
    barrier = threading.Barrier(len(works))

    def run(work: Callable[[], None]) -> None:
        try:
            barrier.wait(60)
            work()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_several_writers_in_threads_at_once(tmp_path: Path, kind: str) -> None:
    states = [{"n": {"w": torch.full((50_000,), float(number)), "x": number}} for number in range(4)]
    root = str(tmp_path) if kind == "local" else f"memory://{uuid.uuid4().hex}"

    def work(number: int) -> Callable[[], None]:
        def run() -> None:
            for turn in range(3):
                url = f"{root}/c{number}-{turn}"
                if turn % 2:
                    dcp_save(states[number], storage_writer=dcpfs.FsspecStorageWriter(url), no_dist=True)
                else:
                    dcpfs.save(states[number], url)
                assert_same(dcpfs.read(url), states[number])

        return run

    _run_threads([work(number) for number in range(4)])


def test_saving_while_torchs_planner_loads_in_another_thread(tmp_path: Path) -> None:
    """torch's load planner flips how torch flattens, for the whole process, while it meets unknown keys."""
    state = {"deep": {"a": {"x": 1, "y": [1, 2]}, "w": torch.ones(4)}, "empty": {"b": {}}}
    dcpfs.save({**state, "more": 1}, tmp_path / "source")
    done = threading.Event()

    def load() -> None:
        try:
            for _ in range(40):
                template: dict[str, Any] = {"deep": {"a": {"x": 0}, "w": torch.zeros(4)}}
                reader = dcpfs.FsspecStorageReader(tmp_path / "source")
                dcp_load(template, storage_reader=reader, planner=DefaultLoadPlanner(), no_dist=True)
        finally:
            done.set()

    def save() -> None:
        number = 0
        while not done.is_set() or number == 0:
            dcpfs.save(state, tmp_path / f"c{number}")
            assert_same(dcpfs.read(tmp_path / f"c{number}"), state)
            number += 1

    _run_threads([load, save])
