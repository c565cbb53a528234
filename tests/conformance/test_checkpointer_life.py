"""A checkpointer over many saves: what stands already, what makes room, the closing save, writers of others, exits."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import _fsspec_filesystem
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

import dcpfs
from dcpfs.storage.location import Location
from dcpfs.storage.opening import open_store
from dcpfs.testing.recording import RecordingStore
from tests.conformance.test_checkpointer_starts import config, open_run, root
from tests.multiprocess.training_job import Job, assert_same, attempt

__all__ = ["root"]

MODES = ["disabled", "async"]


def weights(number: float) -> dict[str, object]:
    return {"model": {"w": torch.full((5,), float(number))}}


def read_weights(checkpointer: dcpfs.DistributedCheckpointer) -> tuple[int, float]:
    state: dict[str, object] = {"w": torch.zeros(5)}
    iteration = checkpointer.load_state({"model": state})
    found = state["w"]
    assert isinstance(found, torch.Tensor)
    assert bool((found == found[0]).all())
    return iteration, float(found[0])


def save(checkpointer: dcpfs.DistributedCheckpointer, iteration: int, number: float, **more: Any) -> None:
    checkpointer.save_state(iteration, weights(number), **more)
    checkpointer.wait()


@pytest.mark.parametrize("mode", MODES)
def test_case_106_a_step_that_stands_already(root: Location, mode: str, caplog: pytest.LogCaptureFixture) -> None:
    with open_run(root, async_mode=mode) as checkpointer:
        save(checkpointer, 1, 1)
        with pytest.raises(dcpfs.CheckpointExistsError):  # the only one
            save(checkpointer, 1, 1.5)
        assert read_weights(checkpointer) == (1, 1)
        save(checkpointer, 2, 2)
        save(checkpointer, 2, 2.5)
        assert "overwriting" in caplog.text
        assert read_weights(checkpointer) == (2, 2.5)
        save(checkpointer, 1, 1.5)  # a roll back: the older one is written anew, and is the latest now
        assert checkpointer.latest() == 1
        assert read_weights(checkpointer) == (1, 1.5)
    with open_run(root, async_mode=mode, on_existing="skip") as checkpointer:
        save(checkpointer, 2, 3)
        save(checkpointer, 3, 3)
        assert checkpointer.steps() == [1, 2, 3]
    with open_run(root, async_mode=mode, on_existing="error", load_step=2) as checkpointer:
        with pytest.raises(dcpfs.CheckpointExistsError, match="iter_000000002"):
            save(checkpointer, 2, 4)
        assert read_weights(checkpointer) == (2, 2.5)
        save(checkpointer, 4, 4)


@pytest.mark.parametrize("mode", MODES)
def test_cases_38_39_what_is_kept(root: Location, mode: str) -> None:
    settings: dict[str, Any] = {"async_mode": mode, "keep_last": 2, "keep_every": 5, "keep_best": 1}
    with open_run(root, best_mode="min", **settings) as checkpointer:
        for iteration, loss in enumerate([5, 4, 1, 3, 3, 3, 3, 3, 3], start=1):
            save(checkpointer, iteration, iteration, metric=loss)
            if iteration == 4:
                checkpointer.protect(4)
            assert checkpointer.latest() == iteration
        checkpointer.wait()
        assert checkpointer.steps() == [3, 4, 5, 8, 9]
        checkpointer.unprotect(4)
        save(checkpointer, 10, 10, metric=2)
        assert checkpointer.steps() == [3, 5, 9, 10]
        assert read_weights(checkpointer) == (10, 10)


def test_case_105_the_closing_save_is_the_model_alone(tmp_path: Path) -> None:
    here = Location(str(tmp_path))
    job = Job(seed=5)
    with open_run(here, last_save_model_only=True, export_dtype="bfloat16", keep_last=1) as checkpointer:
        job.train(2, checkpointer)
        job.save(checkpointer, 3, last=True)
        assert checkpointer.latest() == 2  # what training goes on from
        assert checkpointer.steps() == [2, 3]
        fresh = Job(seed=8)
        assert fresh.load(checkpointer) == 2
        assert_same(fresh.whole(), job.whole())
    exported = dcpfs.read(f"{tmp_path}/run/iter_000000003/model")
    for name, value in job.net.state_dict().items():
        found = exported[name]
        assert isinstance(found, torch.Tensor)
        assert found.dtype is (torch.bfloat16 if value.is_floating_point() else value.dtype)
        assert torch.equal(found, value.to(found.dtype))
    assert {path.name for path in (tmp_path / "run/iter_000000003").iterdir()} == {"model", "manifest.json"}
    other = Job(seed=8)
    other.net.bfloat16()
    with open_run(here, "next", load_path="run/iter_000000003") as checkpointer:
        assert other.load(checkpointer) == 0
    with open_run(here, "plain") as checkpointer:
        job.save(checkpointer, 3, last=True)
        assert fresh.load(checkpointer) == 3


@pytest.mark.parametrize("mode", MODES)
def test_the_closing_save_takes_the_place_of_no_step_that_training_can_go_on_from(tmp_path: Path, mode: str) -> None:
    here = Location(str(tmp_path))
    job = Job(seed=5)
    fresh = Job(seed=8)
    with open_run(here, last_save_model_only=True, async_mode=mode) as checkpointer:
        job.train(2, checkpointer)
        job.save(checkpointer, 3)
        checkpointer.wait()

        def close_over() -> None:
            job.save(checkpointer, 3, last=True)
            checkpointer.wait()

        kind, text = attempt(close_over)
        assert kind == "CheckpointExistsError"
        assert "also holds optim, scheduler, trainer, dataloader" in text
        assert fresh.load(checkpointer) == 3
        assert_same(fresh.whole(), job.whole())
        job.save(checkpointer, 4, last=True)
        job.save(checkpointer, 4, last=True)  # over one of its own kind
        checkpointer.wait()
        assert (checkpointer.latest(), checkpointer.steps()) == (3, [2, 3, 4])
    with open_run(here, last_save_model_only=True, on_existing="skip") as checkpointer:
        job.save(checkpointer, 3, last=True)
        assert fresh.load(checkpointer) == 3


@pytest.mark.parametrize("mode", MODES)
def test_cases_12_13_14_each_save_has_the_values_of_its_moment(tmp_path: Path, mode: str) -> None:
    """A hook that makes copies, a scheduler between two saves, a value changed right after the call."""
    here = Location(str(tmp_path))
    net: Any = nn.Linear(3, 3)
    net.register_state_dict_post_hook(lambda module, state, *_: state.update(weight=module.weight.detach().clone()))
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    extra = {"list": [0], "number": 0}
    with open_run(here, async_mode=mode) as checkpointer:
        for iteration in (1, 2, 3):
            optimizer.zero_grad()
            net(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            scheduler.step()
            extra["list"], extra["number"] = [iteration], iteration
            checkpointer.save(net, optimizer, scheduler, iteration=iteration, trainer=extra)
            with torch.no_grad():
                checkpointer.maybe_wait_for_staging()
                net.weight.fill_(iteration)
            cast_list: Any = extra["list"]
            cast_list[0] = -1
    for iteration in (1, 2, 3):
        with open_run(here, load_step=iteration) as checkpointer:
            other: Any = nn.Linear(3, 3)
            other_optimizer = torch.optim.SGD(other.parameters(), lr=1.0, momentum=0.9)
            other_scheduler = torch.optim.lr_scheduler.StepLR(other_optimizer, 1, gamma=0.5)
            found: dict[str, object] = {}
            assert checkpointer.load(other, other_optimizer, other_scheduler, trainer=found) == iteration
        assert found == {"list": [iteration], "number": iteration}
        assert other_optimizer.param_groups[0]["lr"] == other_scheduler.get_last_lr()[0] == 0.5**iteration
        first = (net.weight[0, 0] * 0 + iteration - 1) if iteration > 1 else None
        momentum = sum(0.9**power for power in range(iteration))
        if first is not None:
            expected = float(first) - 0.5 ** (iteration - 1) * momentum
            assert float(other.weight[0, 0]) == pytest.approx(expected)


class TorchWriters(dcpfs.DistributedCheckpointer):
    """Keys are written by torch's own storage writers, and one by what stands for a user's own."""

    def get_storage_writer(self, url: str) -> Any:
        if url.endswith("/trainer"):
            return super().get_storage_writer(url)
        if url.endswith("/optim"):
            return _fsspec_filesystem.FsspecWriter(url)
        return FileSystemWriter(url)


@pytest.mark.parametrize("mode", MODES)
def test_writers_of_a_subclass_commit_and_load(tmp_path: Path, mode: str) -> None:
    here = Location(str(tmp_path))
    job = Job(seed=5)
    with TorchWriters(config(here, async_mode=mode)) as writing:
        job.train(4, writing)
    manifest = json.loads((tmp_path / "run/iter_000000004/manifest.json").read_text())
    files = {str(path.relative_to(tmp_path / "run/iter_000000004")) for path in _files(tmp_path / "run/iter_000000004")}
    assert set(manifest["files"]) == files - {"manifest.json"}
    fresh = Job(seed=8)
    with open_run(here, verify_on_resume=True) as checkpointer:
        assert fresh.load(checkpointer) == 4
    assert_same(fresh.whole(), job.whole())
    state: dict[str, Any] = {"up.weight": torch.zeros(10, 6)}
    dcp_load(state, storage_reader=checkpointer.get_storage_reader(f"{tmp_path}/run/iter_000000004/model"))
    assert torch.equal(state["up.weight"], job.net.up.weight)
    dcp_load(state, storage_reader=FileSystemReader(tmp_path / "run/iter_000000004/model"))
    trained = dcpfs.read(f"{tmp_path}/run/iter_000000004/scheduler")
    assert trained["last_epoch"] == 4
    assert type(trained["_last_lr"]) is list
    with TorchWriters(config(here, async_mode=mode)) as writing:  # over what stands there
        job.train(6, writing)
        job.save(writing, 4)
        assert Job(seed=8).load(writing) == 4


class LostWriter(dcpfs.DistributedCheckpointer):
    def get_storage_writer(self, url: str) -> Any:
        return FileSystemWriter(url.replace("iter_", "other_"))


def test_a_writer_that_writes_elsewhere_commits_nothing(tmp_path: Path) -> None:
    with LostWriter(config(Location(str(tmp_path)))) as checkpointer:
        with pytest.raises(dcpfs.IncompleteCheckpointError, match="get_storage_writer"):
            save(checkpointer, 1, 1)
        assert checkpointer.steps() == []


class AskingWriter(dcpfs.DistributedCheckpointer):
    """Somebody asks for a save while another one is written."""

    def get_storage_writer(self, url: str) -> Any:
        self.request_save()
        return super().get_storage_writer(url)


def test_a_save_that_is_asked_for_while_another_is_written_is_not_forgotten(tmp_path: Path) -> None:
    with AskingWriter(config(Location(str(tmp_path)))) as checkpointer:
        checkpointer.request_save()
        assert checkpointer.should_save(1)
        save(checkpointer, 1, 1)
        assert checkpointer.should_save(2)
    with open_run(Location(str(tmp_path))) as checkpointer:
        checkpointer.request_save()
        save(checkpointer, 2, 2)
        assert not checkpointer.should_save(3)


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("when_busy", ["wait", "skip", "error"])
def test_a_save_while_another_is_at_work(tmp_path: Path, when_busy: str) -> None:
    gate = threading.Event()

    class Held(dcpfs.DistributedCheckpointer):
        def get_storage_writer(self, url: str) -> Any:
            gate.wait(60)
            return super().get_storage_writer(url)

    with Held(config(Location(str(tmp_path)), async_mode="async", when_busy=when_busy)) as checkpointer:
        checkpointer.save_state(1, weights(1))
        if when_busy == "wait":
            threading.Timer(0.05, gate.set).start()
        second = attempt(lambda: checkpointer.save_state(2, weights(2)))
        assert checkpointer.health() is None
        gate.set()
        checkpointer.wait()
        assert checkpointer.steps() == ([1, 2] if when_busy == "wait" else [1])
        assert (second[0] == "CheckpointError") == (when_busy == "error")
        save(checkpointer, 3, 3)


def test_case_48_a_failed_save_in_the_background_is_told(tmp_path: Path) -> None:
    """By health, at the next call, and by close; a with block that fails already does not hide its own error."""
    settings = config(Location(str(tmp_path)), async_mode="async")

    def fail(checkpointer: dcpfs.DistributedCheckpointer, iteration: int) -> None:
        (tmp_path / f"run/iter_{iteration:09}/manifest.json").mkdir(parents=True)
        checkpointer.save_state(iteration, weights(1))

    others = set(threading.enumerate())
    checkpointer = dcpfs.DistributedCheckpointer(settings)
    save(checkpointer, 1, 1)
    fail(checkpointer, 2)
    for thread in set(threading.enumerate()) - others:
        if thread.name.startswith("dcpfs-save"):
            thread.join()
    assert "manifest.json" in str(checkpointer.health())
    checkpointer.maybe_wait_for_staging()
    with pytest.raises(dcpfs.StorageError, match=r"manifest\.json"):
        checkpointer.save_state(3, weights(3))
    fail(checkpointer, 4)
    with pytest.raises(dcpfs.StorageError, match=r"manifest\.json"):
        checkpointer.close()
    checkpointer.close()

    def leave_by_an_error() -> None:
        with dcpfs.DistributedCheckpointer(settings) as other:
            fail(other, 5)
            raise ZeroDivisionError

    assert attempt(leave_by_an_error)[0] == "ZeroDivisionError"
    with dcpfs.DistributedCheckpointer(settings) as other:
        assert other.steps() == [1]
        assert read_weights(other) == (1, 1)


SCRIPT = """
    import os, sys, torch, dcpfs
    root, fails = sys.argv[1], sys.argv[2] == "fails"
    checkpointer = dcpfs.DistributedCheckpointer(dcpfs.CheckpointConfig(save_dir=root, async_mode="async"))
    if fails:
        os.makedirs(root + "/iter_000000001/manifest.json")
    checkpointer.save_state(1, {"model": {"w": torch.ones(1000)}})
    print("the end")
"""


@pytest.mark.parametrize("how", ["works", "fails"])
def test_cases_48_100_a_script_that_does_not_close_saves_all_the_same_or_fails(tmp_path: Path, how: str) -> None:
    nowhere = tmp_path / "working directory"
    nowhere.mkdir()
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path / "run"), how],
        capture_output=True,
        text=True,
        check=False,
        cwd=nowhere,
        timeout=280,
    )
    assert "the end" in result.stdout
    assert not list(nowhere.iterdir())
    if how == "works":
        assert result.returncode == 0, result.stderr
        assert (tmp_path / "run/iter_000000001/manifest.json").is_file()
    else:
        assert result.returncode != 0
        assert "manifest.json" in result.stderr


def test_case_34_the_pointer_moves_after_the_commit_and_room_is_made_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 34: commit, then pointer, then room is made: in the order of the requests to the store."""
    stores: list[RecordingStore] = []

    def recorded(*arguments: Any, **named: Any) -> Any:
        stores.append(RecordingStore(open_store(*arguments, **named)))
        return stores[-1]

    monkeypatch.setattr("dcpfs.checkpointer.save_step.open_store", recorded)
    with open_run(Location(str(tmp_path)), keep_last=1) as checkpointer:
        save(checkpointer, 1, 1)
        save(checkpointer, 2, 2)
    calls = [f"{call.verb} {call.path}" for call in stores[-1].calls if call.verb in ("put", "delete")]
    committed = calls.index("put iter_000000002/manifest.json")
    pointed = calls.index("put latest_checkpoint.txt")
    removed = calls.index("delete iter_000000001/manifest.json")
    assert committed < pointed < removed
    assert max(index for index, call in enumerate(calls) if call.endswith(".metadata") and "put" in call) < committed


def test_a_grad_scaler_of_torchs_own_comes_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make(**settings: Any) -> tuple[Any, Any, Any]:
        net: Any = nn.Linear(2, 2)
        return net, torch.optim.SGD(net.parameters(), lr=0.1), torch.amp.GradScaler("cpu", **settings)

    net, optimizer, scaler = make(init_scale=8.0, growth_interval=1)
    scaler.scale(net(torch.ones(1, 2)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    with open_run(Location(str(tmp_path))) as checkpointer:
        checkpointer.save(net, optimizer, None, scaler, 1)
        checkpointer.save(net, optimizer, None, None, 2)
        other = make()
        assert checkpointer.load(other[0], other[1], None, other[2]) == 2
        assert "no grad scaler was saved" in caplog.text
        assert other[2].get_scale() != 16.0
    with open_run(Location(str(tmp_path)), load_step=1) as checkpointer:
        assert checkpointer.load(other[0], other[1], None, other[2]) == 1
        assert other[2].state_dict() == scaler.state_dict()
        assert checkpointer.load(*make(enabled=False)[:2], None, make(enabled=False)[2]) == 1
        assert checkpointer.load(*make()[:2]) == 1
