"""A failure of one rank, in any phase of a save, is that of all; nothing is published, and the next save works."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcpfs
from tests.multiprocess.gloo import run_ranks
from tests.multiprocess.training_job import Job, World, assert_same, attempt

Outcomes = dict[str, tuple[str, str]]


def config(save_dir: str, **settings: object) -> dcpfs.CheckpointConfig:
    return dcpfs.CheckpointConfig.model_validate({"save_dir": save_dir, "timeout_seconds": 200, **settings})


class Broken:
    """A state that can't be had, or can't be stored."""

    def __init__(self, value: object = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, object]:
        if self.value is None:
            raise OSError("the user's state is broken")
        return {"value": self.value}

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        self.value = state_dict["value"]


class Callback:
    """Raises where it is told to, and notes what it hears."""

    def __init__(self) -> None:
        self.fails_in = ""
        self.heard: list[str] = []

    def hear(self, name: str) -> None:
        self.heard.append(name)
        if self.fails_in == name:
            self.fails_in = ""
            raise RuntimeError(f"the callback fails in {name}")

    def on_save_checkpoint_start(self, iteration: int) -> None:
        self.hear(f"start {iteration}")

    def on_save_checkpoint(self, state_dict: dict[str, object]) -> None:
        self.hear("state")
        assert "model" in state_dict

    def on_save_checkpoint_success(self, iteration: int, elapsed_seconds: float) -> None:
        assert elapsed_seconds > 0
        self.hear(f"success {iteration}")

    def on_save_checkpoint_error(self, iteration: int, error: BaseException) -> None:
        assert str(error)
        self.hear(f"error {iteration}")


def fail_in_every_phase(root: str, mode: str) -> tuple[Outcomes, list[int], list[str]]:
    rank = dist.get_rank()
    job, fresh = (Job(seed=seed, world=World(2), rank=rank) for seed in (1, 2))
    callback = Callback()
    outcomes: Outcomes = {}
    with dcpfs.DistributedCheckpointer(config(root, async_mode=mode), [callback]) as checkpointer:
        job.train(2, checkpointer)
        checkpointer.wait()
        iteration = 10

        def fail(name: str, act: Callable[[], object] = lambda: None, *, at: int = 1, **changes: object) -> None:
            """One save with a fault on one rank, then one without."""
            nonlocal iteration
            iteration += 1
            before = checkpointer.steps()
            if rank == at:
                act()
            dist.barrier()

            def save() -> None:
                job.save(checkpointer, iteration, **(changes if rank == at else {}))
                checkpointer.wait()

            outcomes[name] = attempt(save)
            dist.barrier()
            assert checkpointer.steps() == before, name
            assert checkpointer.latest() == before[-1], name
            left = {path.name for path in Path(root, f"iter_{iteration:09}").rglob("*") if path.is_file()}
            assert left <= {".writing"}, (name, left)
            dist.barrier()

        def block(name: str) -> Callable[[], None]:
            """A directory where a file is to be: the store's own error, in the middle of the save."""
            return lambda: os.makedirs(f"{root}/iter_{iteration:09}/{name}")

        fail("state", trainer=Broken())
        fail("value", trainer={**job.extra, "callable": lambda: None})
        fail("dataloader", dataloader={"callable": lambda: None})
        fail("differs", trainer={**job.extra, "tokens": 7})
        fail("write", block("optim/__1_0.distcp"))
        fail("rank file", block("dataloader/rank_1.pkl"))
        fail("claim", block(".writing"), at=0)
        fail("metadata", block("model/.metadata"), at=0)
        fail("commit", block("manifest.json"), at=0)
        fail("start", lambda: setattr(callback, "fails_in", f"start {iteration}"))
        fail("callback", lambda: setattr(callback, "fails_in", "state"))

        def save_at(iteration: int, metric: float | None = None) -> None:
            job.save(checkpointer, iteration, metric=metric)
            checkpointer.wait()

        outcomes["iterations"] = attempt(lambda: save_at(50 + rank))
        outcomes["negative"] = attempt(lambda: save_at(-rank))
        outcomes["metrics"] = attempt(lambda: save_at(52, (-0.5, -2.25)[rank]))
        assert checkpointer.steps() == [2]
        # What a callback raises about a step that is committed comes with the next collective call.
        callback.fails_in = "success 60" if rank else ""
        job.save(checkpointer, 60, metric=(-0.0, 0.0)[rank])
        outcomes["success"] = attempt(checkpointer.wait)
        save_at(61, (1.5, None)[rank])
        steps = checkpointer.steps()
        assert fresh.load(checkpointer) == 61
        assert_same(fresh.whole(), job.whole())
    return outcomes, steps, callback.heard


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_cases_2_49_101_109_a_failure_of_one_rank_in_any_phase_is_that_of_all(tmp_path: Path, mode: str) -> None:
    (first, steps, heard), (second, other_steps, _) = run_ranks(fail_in_every_phase, 2, str(tmp_path), mode)
    assert steps == other_steps == [2, 60, 61]
    manifests = [json.loads((tmp_path / f"iter_{step:09}" / "manifest.json").read_text()) for step in steps]
    assert [manifest["metric"] for manifest in manifests] == [None, 0.0, 1.5]
    words = {
        "state": "the user's state is broken",
        "value": "callable",
        "dataloader": "dataloader",
        "differs": "user.tokens",
        "write": "__1_0.distcp",
        "rank file": "rank_1.pkl",
        "claim": ".writing",
        "metadata": ".metadata",
        "commit": "manifest.json",
        "start": "the callback fails in start",
        "callback": "the callback fails in state",
        "iterations": "one rank saves iteration 50 and another 51",
        "negative": "-1",
        "metrics": "one rank gives the metric -2.25 and another -0.5; give the same on all ranks",
        "success": "the callback fails in success 60",
    }
    assert first.keys() == words.keys()
    for name, word in words.items():
        for kind, text in (first[name], second[name]):
            assert kind, name
            assert word in text, (name, text)
    assert second["state"][0] == "OSError"
    assert first["state"][0] == "RankError"
    assert {first[name][0] for name in ("value", "dataloader")} == {"UnsupportedValueError"}
    assert {outcomes["differs"][0] for outcomes in (first, second)} == {"ReplicaMismatchError"}
    assert heard.count("error 11") == 1
    assert [name for name in heard if name.startswith("success")] == ["success 2", "success 60", "success 61"]


def warn(root: str) -> tuple[list[int], tuple[str, str], list[str]]:
    """Two failures in a row are logged, a success starts the count anew, the third in a row is raised."""
    rank = dist.get_rank()
    settings = {"on_save_error": "warn", "max_consecutive_failures": 3}
    callback = Callback()
    job = Job(world=World(2), rank=rank)
    raised = ("", "")
    with dcpfs.DistributedCheckpointer(config(root, **settings), callback) as checkpointer:
        for iteration, works in enumerate([False, False, True, False, False], start=1):
            callback.fails_in = "success 3" if rank else ""  # of a step that is committed: no reason to save no more
            job.save(checkpointer, iteration, **({} if works or rank == 0 else {"trainer": Broken()}))
        raised = attempt(lambda: job.save(checkpointer, 6, **({} if rank == 0 else {"trainer": Broken()})))
        job.save(checkpointer, 7)
        return checkpointer.steps(), raised, callback.heard


def test_case_107_failed_saves_are_logged_until_there_are_too_many_in_a_row(tmp_path: Path) -> None:
    for steps, raised, heard in run_ranks(warn, 2, str(tmp_path)):
        assert steps == [3, 7]
        assert "the user's state is broken" in raised[1]
        assert [name for name in heard if name.startswith("error")] == [f"error {n}" for n in (1, 2, 4, 5, 6)]


def refuse(root: str) -> Outcomes:
    rank = dist.get_rank()
    second = rank == 1
    make: Any = dcpfs.DistributedCheckpointer
    fine = config(f"{root}/run")
    outcomes = {
        "callback": attempt(lambda: make(fine, [object()] if second else [])),
        "config": attempt(lambda: make({"save_dir": root} if second else fine)),
        "access": attempt(lambda: make(fine, access="read_only" if second else "read_write")),
        "unknown access": attempt(lambda: make(fine, access="write_only" if second else "read_write")),
        "mode": attempt(lambda: make(config(f"{root}/run", async_mode="async" if second else "disabled"))),
        "save_dir": attempt(lambda: make(config(f"{root}/{rank}"))),
        "credentials": attempt(
            lambda: make(
                config("s3://bucket/run", credentials=f"{root}/missing.json")
                if second
                else config("s3://bucket/run", storage_options={"key": "k", "secret": "s"})
            )
        ),
    }
    with make(fine) as first, make(config(f"{root}/other"), access="read_write") as other:
        job = Job(world=World(2), rank=rank)
        for iteration, checkpointer in enumerate((first, other, first), start=1):  # two in one process
            job.save(checkpointer, iteration)
        assert (first.steps(), other.steps()) == ([1, 3], [2])
    outcomes["closed"] = attempt(lambda: job.save(first, 4))
    first.close()
    with make(fine, access="read_only") as reader:
        outcomes["read only"] = attempt(lambda: job.save(reader, 4))
        assert Job(seed=3, world=World(2), rank=rank).load(reader) == 3
    return outcomes


def test_case_49_what_one_rank_can_not_be_given_is_refused_on_all(tmp_path: Path) -> None:
    words = {
        "callback": "as a callback",
        "config": "a dict: give a CheckpointConfig",
        "access": "access is read_write on rank 0 and read_only on rank 1",
        "unknown access": "no Access",
        "mode": "async_mode is disabled on rank 0 and async on rank 1",
        "save_dir": "save_dir is ",
        "credentials": "missing.json",
        "closed": "the checkpointer is closed",
        "read only": "read_only",
    }
    for outcomes in run_ranks(refuse, 2, str(tmp_path)):
        assert outcomes.keys() == words.keys()
        for name, word in words.items():
            assert word in outcomes[name][1], (name, outcomes[name])
    assert not (tmp_path / "0").exists()


def save_with_some(root: str) -> dict[str, object]:
    """Ranks 1 and 3 of four save together, then all with the data shared by two and two."""
    rank = dist.get_rank()
    some: Any = dist.new_group([1, 3])
    found: dict[str, object] = {}
    if rank in (1, 3):
        state = {"w": torch.arange(4.0) + 1}
        with dcpfs.DistributedCheckpointer(config(f"{root}/some"), process_group=some) as checkpointer:
            checkpointer.save_state(1, {"model": state, "dataloader": {"at": rank}})
            fresh: dict[str, object] = {"w": torch.zeros(4)}
            position: dict[str, object] = {}
            assert checkpointer.load_state({"model": fresh, "dataloader": position}) == 1
            assert torch.equal(state["w"], fresh["w"])  # type: ignore[arg-type]  # a tensor still
            found["some"] = position["at"]
    dist.barrier()
    with dcpfs.DistributedCheckpointer(config(f"{root}/all"), data_rank=rank // 2) as checkpointer:
        loader = {"at": 100 + rank}
        checkpointer.save_state(1, {"dataloader": loader})
        loader.clear()
        checkpointer.load_state({"dataloader": loader})
        found["shared"] = loader["at"]
    return found


def test_case_10_files_are_named_by_global_rank_and_found_by_it(tmp_path: Path) -> None:
    found = run_ranks(save_with_some, 4, str(tmp_path))
    assert [each.get("some") for each in found] == [None, 1, None, 3]
    assert [each["shared"] for each in found] == [100, 100, 102, 102]
    for run, names in {"some": {"rank_1.pkl", "rank_3.pkl"}, "all": {"rank_0.pkl", "rank_2.pkl"}}.items():
        assert {path.name for path in (tmp_path / run / "iter_000000001/dataloader").iterdir()} == names


def be_preempted(root: str) -> tuple[list[bool], list[int], int]:
    """A signal to one rank is a save of all; one that comes during a save asks for another."""
    rank = dist.get_rank()
    chained: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: chained.append(number))
    job = Job(world=World(2), rank=rank)
    asked = []
    with dcpfs.DistributedCheckpointer(config(root)) as checkpointer:
        with checkpointer.install_signal_handler(signal.SIGUSR1):
            asked.append(checkpointer.should_save(1))
            if rank == 1:
                signal.raise_signal(signal.SIGUSR1)
            asked.append(checkpointer.should_save(2))
            job.save(checkpointer, 2)
            asked.append(checkpointer.should_save(3))
            if rank == 1:
                signal.raise_signal(signal.SIGUSR1)  # as before the handler was installed
            asked.append(checkpointer.should_save(4))
        checkpointer.request_save()
        attempt(lambda: job.save(checkpointer, 5, **({} if rank == 0 else {"trainer": Broken()})))
        asked.append(checkpointer.should_save(5))  # that save failed: it is wanted still
        job.save(checkpointer, 6, trainer=_Asking(checkpointer))
        asked.append(checkpointer.should_save(6))
        job.save(checkpointer, 7)
        asked.append(checkpointer.should_save(7))
        return asked, checkpointer.steps(), len(chained)


class _Asking(Broken):
    """Asks for a save while its state is read for another."""

    def __init__(self, checkpointer: dcpfs.DistributedCheckpointer) -> None:
        super().__init__(1)
        self._checkpointer = checkpointer

    def state_dict(self) -> dict[str, object]:
        self._checkpointer.request_save()
        return super().state_dict()


def test_case_42_a_signal_to_one_rank_is_a_save_of_all(tmp_path: Path) -> None:
    first, second = run_ranks(be_preempted, 2, str(tmp_path))
    assert first[0] == second[0] == [False, True, False, False, True, False, False]
    assert first[1] == second[1] == [2, 6, 7]
    assert (first[2], second[2]) == (0, 2)


def count_collectives(root: str, mode: str) -> tuple[list[str], list[str]]:
    """What a first and a later save say to the other rank."""
    rank = dist.get_rank()
    job = Job(world=World(2), rank=rank)
    calls: list[str] = []
    with dcpfs.DistributedCheckpointer(config(root, async_mode=mode)) as checkpointer:
        for name in dir(dist):
            if name in _COLLECTIVES or name.endswith("_object_list"):
                _count(name, calls)
        found = []
        for iteration in (1, 2):
            calls.clear()
            job.save(checkpointer, iteration)
            found.append(sorted(calls))
    return found[0], found[1]


_COLLECTIVES = {"all_reduce", "all_gather_object", "gather_object", "all_gather", "gather", "broadcast", "scatter"}
_COLLECTIVES |= {"barrier", "monitored_barrier", "reduce", "reduce_scatter", "all_to_all", "send", "recv"}


def _count(name: str, calls: list[str]) -> None:
    function = getattr(dist, name)

    def counted(*arguments: object, **named: object) -> object:
        calls.append(name)
        return function(*arguments, **named)

    setattr(dist, name, counted)


def test_case_74_a_later_save_is_one_word_one_gathering_and_one_verdict(tmp_path: Path) -> None:
    for first, later in run_ranks(count_collectives, 2, str(tmp_path), "disabled"):
        assert later == ["all_reduce", "broadcast_object_list", "gather_object"]
        assert first == sorted([*later, "gather_object", "scatter_object_list"])


def save_slowly(root: str) -> bool:
    """Rank 1 writes late: the pointer waits for it, while training meets on its own group."""
    rank = dist.get_rank()
    gate = Path(root, "gate")
    if rank == 0:
        os.mkfifo(gate)
    dist.barrier()
    state = {"model": {"w": torch.ones(3)}}
    with _Late(config(root, async_mode="async")) as checkpointer:
        checkpointer.save_state(1, state)
        checkpointer.wait()
        checkpointer.gate = gate if rank == 1 else None
        checkpointer.save_state(2, state)
        for _ in range(3):
            dist.barrier()
        unpublished = True
        if rank == 0:  # its own files are there, and nothing vouches for the step
            assert checkpointer.written.wait(180)
            unpublished = Path(root, "latest_checkpoint.txt").read_text() == "iter_000000001\n"
            unpublished &= not Path(root, "iter_000000002/manifest.json").exists() and checkpointer.latest() == 1
            gate.write_text("go on")
        checkpointer.wait()
        assert checkpointer.latest() == 2
    return unpublished


class _Late(dcpfs.DistributedCheckpointer):
    """Its writers wait at a gate, or say when they are done."""

    gate: Path | None = None

    def get_storage_writer(self, url: str) -> Any:
        if not url.endswith("/model"):
            return super().get_storage_writer(url)
        self.written = threading.Event()
        return _LateWriter(url, self.gate, self.written)


class _LateWriter(dcpfs.FsspecStorageWriter):
    def __init__(self, url: str, gate: Path | None, done: threading.Event) -> None:
        super().__init__(url)
        self._gate = gate
        self._done = done

    def write_data(self, plan: Any, planner: Any) -> Any:
        if self._gate is not None:
            self._gate.read_text()
        result = super().write_data(plan, planner)
        self._done.set()
        return result


def test_cases_34_35_50_the_pointer_waits_for_the_last_rank(tmp_path: Path) -> None:
    assert all(run_ranks(save_slowly, 2, str(tmp_path)))
