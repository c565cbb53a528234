"""What a run starts from, on a local disk and on S3: its own steps, a ``load_path`` of any kind, or nothing."""

from __future__ import annotations

import contextlib
import logging
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import dcpfs
from dcpfs.storage.location import Location
from dcpfs.storage.opening import open_store
from dcpfs.testing.s3_faults import Answer
from dcpfs.testing.scripted_s3 import ScriptedS3Server
from tests.multiprocess.training_job import Job, assert_same, attempt

EVERY = dcpfs.DistributedCheckpointer.KEYS_TO_SAVE


@pytest.fixture(params=["local", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    found = request.getfixturevalue("s3_prefix") if request.param == "s3" else Location(str(tmp_path))
    assert isinstance(found, Location)
    return found


def config(root: Location, run: str = "run", **settings: object) -> dcpfs.CheckpointConfig:
    """Settings of a run below the root; a ``load_path`` is relative to it."""
    if "load_path" in settings:
        settings["load_path"] = root.join(str(settings["load_path"])).url
    options = dict(root.storage_options)
    return dcpfs.CheckpointConfig.model_validate(
        {"save_dir": root.join(run).url, "storage_options": options, **settings}
    )


def open_run(root: Location, run: str = "run", **settings: object) -> dcpfs.DistributedCheckpointer:
    return dcpfs.DistributedCheckpointer(config(root, run, **settings))


def make_run(root: Location, run: str = "source", until: int = 4) -> Job:
    """A run with steps 2 and 4."""
    job = Job(seed=5)
    with open_run(root, run) as checkpointer:
        job.train(until, checkpointer)
    return job


def keys_of(checkpointer: dcpfs.DistributedCheckpointer) -> tuple[str, ...]:
    return checkpointer.keys_to_resume_during_load()[0]


def changed(job: Job, before: Mapping[str, object]) -> set[str]:
    """Keys of which a load has changed something."""
    now = job.whole()
    different = set()
    for name, value in before.items():
        same = torch.equal(value, now[name]) if isinstance(value, torch.Tensor) else value == now[name]  # type: ignore[arg-type]  # the same name, so a tensor too
        if not same or name not in now:
            different.add(name.partition("/")[0])
    return different | {name.partition("/")[0] for name in now.keys() - before.keys()}


def test_the_rules_of_a_start(root: Location, caplog: pytest.LogCaptureFixture) -> None:
    """(1) a step of its own, else (2) load_path, else (3) nothing; each as the settings say."""
    source = make_run(root)
    fresh = Job(seed=8)
    before = fresh.whole()
    with open_run(root) as checkpointer:
        assert checkpointer.keys_to_resume_during_load() == ((), None)
        assert fresh.load(checkpointer) == 0
        assert "there is nothing to resume" in caplog.text
        assert not checkpointer.has_resumable_checkpoint()
    assert not changed(fresh, before)

    loaded: dict[tuple[str, ...], tuple[dict[str, Any], int, set[str]]] = {
        ("model",): ({}, 0, {"model"}),
        ("model", "scheduler"): ({"only_load_scheduler_state": True}, 0, {"model", "scheduler"}),
        EVERY: ({"load_training_state": True}, 4, {"model", "optim", "scheduler", "scaler", "extra", "loader"}),
        ("model", "scheduler", "trainer"): (
            {"load_training_state": True, "keys_not_to_resume": ["optim", "dataloader"]},
            4,
            {"model", "scheduler", "scaler", "extra"},
        ),
        ("optim", "scheduler", "dataloader"): (
            {"load_training_state": True, "keys_not_to_resume": ["trainer", "model"]},
            4,
            {"optim", "scheduler", "loader"},
        ),
    }
    for keys, (settings, iteration, parts) in loaded.items():
        job = Job(seed=8)
        with open_run(root, load_path="source", **settings) as checkpointer:
            found, url = checkpointer.keys_to_resume_during_load()
            assert found == keys
            assert url is not None
            assert url.endswith("source/iter_000000004")
            assert job.load(checkpointer) == iteration, keys
            assert checkpointer.steps() == []
        assert changed(job, before) == parts, keys

    own = Job(seed=6)  # rule 1 goes before rule 2
    with open_run(root) as checkpointer:
        own.train(2, checkpointer)
    job = Job(seed=8)
    with open_run(root, load_path="source", only_load_scheduler_state=True) as checkpointer:
        assert keys_of(checkpointer) == EVERY
        assert job.load(checkpointer) == 2
    assert_same(job.whole(), own.whole())
    with open_run(root, "source", load_step=2) as checkpointer:
        assert Job(seed=8).load(checkpointer) == 2
    with open_run(root, "source", load_step=3) as checkpointer, pytest.raises(dcpfs.CheckpointNotFoundError, match="3"):
        job.load(checkpointer)
    with open_run(root, "new", load_path="source", load_step=2, load_training_state=True) as checkpointer:
        assert job.load(checkpointer) == 2
    assert source.iteration == 4


@pytest.mark.parametrize(
    ("path", "settings", "iteration", "step"),
    [
        ("source", {"load_training_state": True}, 4, 4),
        ("source/iter_000000002", {}, 0, 2),
        ("source/iter_000000002", {"load_training_state": True}, 2, 2),
        ("source/iter_000000002/model", {}, 0, 2),
        ("source/iter_000000002/model", {"only_load_scheduler_state": True}, 0, 2),
    ],
)
def test_a_load_path_is_a_run_a_step_or_a_key(
    tmp_path: Path, path: str, settings: dict[str, Any], iteration: int, step: int
) -> None:
    root = Location(str(tmp_path))
    make_run(root)
    job, expected = Job(seed=8), dcpfs.read(f"{tmp_path}/source/iter_{step:09}/model")
    only_key = path.endswith("model") and settings
    with open_run(root, load_path=path, **settings) as checkpointer:
        if only_key:  # one key's directory has no scheduler
            with pytest.raises(dcpfs.KeyMismatchError, match="scheduler"):
                job.load(checkpointer)
            return
        assert job.load(checkpointer) == iteration
    assert_same(dcpfs.ModelWrapper(job.net).state_dict(), expected)


def test_a_load_path_that_does_not_serve_is_an_error(tmp_path: Path) -> None:
    root = Location(str(tmp_path))
    make_run(root)
    (tmp_path / "copy").mkdir()
    subprocess.run(["cp", "-r", f"{tmp_path}/source/iter_000000002", f"{tmp_path}/copy/best"], check=True)
    with open_run(root, load_path="copy/best", load_training_state=True) as checkpointer:
        assert Job(seed=8).load(checkpointer) == 2  # not named iter_N: the manifest says it
    (tmp_path / "copy/best/manifest.json").unlink()
    for path, settings, error in (
        ("copy/best", {"load_training_state": True}, "neither its name nor a manifest says its iteration"),
        ("nothing", {}, "there is no checkpoint"),
        ("source/iter_000000003", {}, "there is no checkpoint"),
        ("source/iter_000000002", {"load_step": 4}, "load_step 4 was given"),
    ):
        job = Job(seed=8)
        before = job.whole()
        with open_run(root, load_path=path, **settings) as checkpointer:
            kind, text = attempt(lambda job=job, checkpointer=checkpointer: job.load(checkpointer))  # type: ignore[misc]  # bound at once
        assert error in text, (path, kind, text)
        assert not changed(job, before)


def test_what_a_step_lacks(root: Location, caplog: pytest.LogCaptureFixture) -> None:
    """A missing optimizer is a warning on a warm start alone; any other key that is asked for is an error before."""
    job = Job(seed=5)
    with open_run(root, "weights") as checkpointer:
        job.save(checkpointer, 3, optimizer=None, grad_scaler=None, dataloader=None)
    fresh = Job(seed=8)
    with open_run(
        root, load_path="weights", load_training_state=True, keys_not_to_resume=["dataloader"]
    ) as checkpointer:
        assert fresh.load(checkpointer) == 3
    assert "has no 'optim'" in caplog.text
    assert "no grad scaler was saved" in caplog.text
    assert_same(dcpfs.ModelWrapper(fresh.net).state_dict(), dcpfs.ModelWrapper(job.net).state_dict())
    for settings, run, key in (
        ({"load_path": "weights", "load_training_state": True}, "run", "dataloader"),
        ({"keys_not_to_resume": ["dataloader"]}, "weights", "optim"),
    ):
        fresh = Job(seed=8)
        before = fresh.whole()
        with open_run(root, run, **settings) as checkpointer, pytest.raises(dcpfs.KeyMismatchError, match=key):
            fresh.load(checkpointer)
        assert not changed(fresh, before)
    with open_run(root, "weights") as checkpointer:  # what is not passed is not asked for
        assert fresh.load(checkpointer, optimizer=None, dataloader=None) == 3


class Notes:
    """A callback that keeps what it hears of a load, and adds a key to a save."""

    def __init__(self) -> None:
        self.loaded: dict[str, object] = {}
        self.ended: list[tuple[int, str | None]] = []
        self.phases: dict[str, int] = {}

    def on_save_checkpoint(self, state_dict: dict[str, object]) -> None:
        state_dict["ema"] = {"weight": torch.full((3,), 2.0), "updates": 7}

    def on_load_checkpoint(self, state_dict: Mapping[str, object]) -> None:
        self.loaded = dict(state_dict)

    def on_load_checkpoint_end(self, iteration: int, checkpoint_path: str | None) -> None:
        self.ended.append((iteration, checkpoint_path))

    def on_phase(self, name: str, seconds: float, bytes: int) -> None:  # noqa: A002 - the name is the contract
        assert seconds >= 0
        self.phases[name] = self.phases.get(name, 0) + bytes


def test_extra_keys_and_rank_files_reach_callbacks(root: Location) -> None:
    job, notes = Job(seed=5), Notes()
    with dcpfs.DistributedCheckpointer(config(root), [notes]) as checkpointer:
        job.train(2, checkpointer)
    assert notes.phases["write"] > 1000
    later = Notes()
    fresh = Job(seed=8)
    with dcpfs.DistributedCheckpointer(config(root), [later]) as checkpointer:
        assert fresh.load(checkpointer, dataloader=None) == 2
        assert later.loaded["dataloader"] == {"position": 2, "rank": 0}
        ema: Any = later.loaded["ema"]
        assert torch.equal(ema["weight"], torch.full((3,), 2.0))
        assert ema["updates"] == 7
        assert later.ended == [(2, root.join("run/iter_000000002").redacted)]
        assert later.phases["read"] > 1000
        passed: dict[str, object] = {"weight": torch.zeros(3), "updates": 0}
        assert checkpointer.load_state({"ema": passed}) == 2
        assert torch.equal(passed["weight"], torch.full((3,), 2.0))  # type: ignore[arg-type]  # a tensor still
        assert passed["updates"] == 7
    with open_run(root, extra_keys=["ema"], keys_not_to_resume=["ema"]) as checkpointer:
        assert keys_of(checkpointer) == EVERY


def test_strict_loose_and_by_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = Location(str(tmp_path))
    make_run(root)

    def other_job() -> Job:
        job = Job(seed=8)
        job.net.head = nn.Linear(3, 2)  # what the checkpoint has not
        job.net.down = nn.Linear(10, 4)  # what it has in another shape
        job.optimizer = torch.optim.AdamW(job.net.parameters(), lr=0.1)
        return job

    job = other_job()
    before = job.whole()
    with open_run(root, "source") as checkpointer, pytest.raises(dcpfs.KeyMismatchError) as caught:
        job.load(checkpointer)
    assert "model/head.weight" in caught.value.missing
    assert "model/down.weight" in caught.value.mismatched
    assert caught.value.written_keys == ()
    assert not changed(job, before)
    with open_run(root, "source", strict_resume={"model": False}) as checkpointer:
        with pytest.raises(dcpfs.KeyMismatchError, match="optim/"):
            job.load(checkpointer)
        assert job.load(checkpointer, optimizer=None, scheduler=None) == 4
    caplog.clear()
    job = other_job()
    with open_run(root, "source", strict_resume=False) as checkpointer:
        assert job.load(checkpointer, scheduler=None) == 4
    stored: dict[str, Any] = dcpfs.read(f"{tmp_path}/source/iter_000000004/model")
    assert torch.equal(job.net.up.weight, stored["up.weight"])
    assert "head.weight" in caplog.text
    assert "down.weight" in caplog.text


def test_case_93_rename_and_skip_apply_to_a_warm_start_with_its_optimizer(tmp_path: Path) -> None:
    root = Location(str(tmp_path))
    source = make_run(root)
    stored: dict[str, Any] = dcpfs.read(f"{tmp_path}/source/iter_000000004/model")

    class Renamed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.ModuleDict({"up": nn.Linear(6, 10), "down": nn.Linear(10, 5)})
            self.frozen = nn.Linear(3, 3)
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    net: Any = Renamed()
    optimizer = torch.optim.AdamW([*net.body.parameters()])
    untouched = net.body["down"].weight.detach().clone()
    settings: dict[str, Any] = {
        "load_path": "source",
        "load_training_state": True,
        "rename": {r"^(up|down)\.": r"body.\1."},
        "keys_to_skip_loading": ["down"],
    }
    with open_run(root, **settings) as checkpointer:
        assert checkpointer.load(net, optimizer) == 4
        checkpointer.save(net, optimizer, iteration=5)
    assert torch.equal(net.body["up"].weight, stored["up.weight"])
    assert torch.equal(net.body["down"].weight, untouched)
    moments = optimizer.state[net.body["up"].weight]["exp_avg"]
    assert torch.equal(moments, source.optimizer.state[source.net.up.weight]["exp_avg"])
    assert net.body["down"].weight not in optimizer.state
    # A resume takes its own names as they are.
    again: Any = Renamed()
    with open_run(root, **settings) as checkpointer:
        assert checkpointer.load(again, torch.optim.AdamW([*again.body.parameters()])) == 5
    assert torch.equal(again.body["down"].weight, untouched)


def test_the_users_edit_of_latest_rolls_back(root: Location, caplog: pytest.LogCaptureFixture) -> None:
    make_run(root, "run", 6)
    with contextlib.closing(open_store(root)) as store:
        store.put("run/latest_checkpoint.txt", [b"iter_000000004"])
        with open_run(root) as checkpointer:
            assert checkpointer.latest() == 4
            assert Job(seed=8).load(checkpointer) == 4
            assert "iter_000000006 is complete and newer" in caplog.text
        # A step that another client has damaged is passed over by all of these alike (cases 41, 78).
        store.put("run/iter_000000004/model/__0_0.distcp", [b"short"])
        with open_run(root) as checkpointer:
            assert checkpointer.steps() == [2, 6]
            assert checkpointer.latest() == 6
            store.delete(["run/iter_000000006/manifest.json"])
            assert checkpointer.latest() == 2
            assert Job(seed=8).load(checkpointer) == 2
            store.delete(["run/iter_000000002/model/.metadata"])
            for call in (checkpointer.latest, checkpointer.keys_to_resume_during_load):
                with pytest.raises(dcpfs.IncompleteCheckpointError, match="none can be used"):
                    call()
            with pytest.raises(dcpfs.IncompleteCheckpointError, match="iter_000000002"):
                Job(seed=8).load(checkpointer)


def test_a_damaged_step_is_followed_by_the_next_best(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = Location(str(tmp_path))
    job = Job(seed=5)
    wholes: dict[int, dict[str, object]] = {}
    with open_run(root) as checkpointer:
        job.train(4, checkpointer, after=lambda iteration: wholes.setdefault(iteration, job.whole()))
    file = tmp_path / "run/iter_000000004/optim/__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[data.find(job.optimizer.state[job.net.up.weight]["exp_avg"].numpy().tobytes()) + 2] ^= 1
    file.write_bytes(data)
    for verify in (False, True):
        fresh = Job(seed=8)
        caplog.clear()
        with open_run(root, verify_on_resume=verify) as checkpointer:
            assert fresh.load(checkpointer) == 2
        assert_same(fresh.whole(), wholes[2])
        assert "__0_0.distcp" in caplog.text
    fresh = Job(seed=8)
    with open_run(root, load_step=4) as checkpointer, pytest.raises(dcpfs.CorruptCheckpointError) as caught:
        fresh.load(checkpointer)
    assert "optim" in caught.value.written_keys


def test_steps_of_plain_dcp_and_of_other_tools_resume(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(seed=5)
    job.train(3)
    states = {
        "model": dcpfs.ModelWrapper(job.net).state_dict(),
        "optim": dcpfs.OptimizersWrapper([job.net], job.optimizer).state_dict(),
        "scheduler": job.scheduler.state_dict(),
    }
    for key, state in states.items():
        dcp_save(state, storage_writer=FileSystemWriter(tmp_path / "run/iter_000000003" / key), no_dist=True)
    root = Location(str(tmp_path))
    with open_run(root) as checkpointer:
        assert not checkpointer.has_resumable_checkpoint()  # nobody has named it
    (tmp_path / "run/latest_checkpoint.txt").write_text("iter_000000003")
    fresh = Job(seed=8)
    with open_run(root) as checkpointer:
        assert checkpointer.steps() == [3]
        assert fresh.load(checkpointer) == 3
        expected = {name: value for name, value in job.whole().items() if name.split("/")[0] in states}
        assert_same({name: value for name, value in fresh.whole().items() if name.split("/")[0] in states}, expected)
        assert "has no 'dataloader'" in caplog.text
        fresh.train(4, checkpointer)
        assert checkpointer.steps() == [4]  # nothing names the other tool's step any more


def test_case_90_a_read_only_store_is_read_and_never_written(scripted_s3: ScriptedS3Server) -> None:
    root = Location(scripted_s3.url("runs"), scripted_s3.storage_options)
    make_run(root, "run")
    writing = re.compile("Put|Post|Create|Upload|Complete|Delete|Copy")
    denied = scripted_s3.fail("PutObject", Answer(403, "AccessDenied", "you may only read"), times=None)
    scripted_s3.forget()
    for access in ("read_only", "read_write"):
        fresh = Job(seed=8)
        with dcpfs.DistributedCheckpointer(config(root), access=access) as checkpointer:
            assert fresh.load(checkpointer) == 4
            assert checkpointer.steps() == [2, 4]
            assert not [name for name in scripted_s3.operations() if writing.match(name)]
            if access == "read_write":
                with pytest.raises(dcpfs.PermissionDeniedError, match="could work"):
                    fresh.save(checkpointer, 5)
                assert checkpointer.steps() == [2, 4]
    assert denied.hits == 1


def test_case_114_secrets_are_in_no_text(scripted_s3: ScriptedS3Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="dcpfs")
    options = dict(scripted_s3.storage_options)
    secret = str(options["secret"])
    root = Location(scripted_s3.url("runs"), options)
    make_run(root, "run")
    settings = config(root, load_path="run")
    with dcpfs.DistributedCheckpointer(settings) as checkpointer:
        Job(seed=8).load(checkpointer)
        said = [repr(settings), settings.model_dump_json(), repr(checkpointer), caplog.text]
        scripted_s3.fail("PutObject", Answer(403, "AccessDenied"), times=None)
        said.append(attempt(lambda: Job(seed=8).save(checkpointer, 9))[1])
    assert not [text for text in said if secret in text]
    assert not [key for key in scripted_s3.stored_keys() if secret.encode() in scripted_s3.read(key)]
