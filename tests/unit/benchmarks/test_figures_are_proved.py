"""A wrong result, a missing contender or a dead process can't pass as a figure."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from benchmarks.cli import app
from benchmarks.contenders import Role, contenders_for, find, unreachable
from benchmarks.figures import Entry, combine, combine_steps
from benchmarks.figures import Missing as MissingFigure
from benchmarks.job import Absent, Failed, Job, Measured, Outcome, RoundFigures
from benchmarks.place import open_place
from benchmarks.runner import Isolation
from benchmarks.settings import Setting, Target
from tests.unit.benchmarks.small_runs import TINY_BYTES, measure

BROKEN = "tests.unit.benchmarks.broken_contenders"
BROKEN_STEPS = "tests.unit.benchmarks.broken_steps"

pytestmark = [pytest.mark.usefixtures("client_variables"), pytest.mark.timeout(1800)]


@pytest.mark.parametrize(
    ("case", "contender", "said"),
    [
        ("save", "FlipsOnSave", "wrong bytes"),
        ("save", "LosesOnSave", "not in the checkpoint"),
        ("save", "CastsOnSave", "described as torch.float32"),
        ("save", "SavesNothing", "404"),
        ("save", "Raises", "no such luck"),
        ("load", "FlipsOnLoad", "wrong bytes"),
        ("load", "LoadsNothing", "wrong bytes"),
        ("load", "MixesOnLoad", "wrong bytes"),
        ("load", "RightOnlyOnce", "wrong bytes"),
        ("load", "Raises", "saving what is to be loaded"),
        ("partial", "FlipsOnLoad", "wrong bytes"),
        ("small-load", "LoadsNothing", "wrong bytes"),
        ("large-load", "FlipsOnLoad", "wrong bytes"),
        ("load-cold", "LoadsNothing", "wrong bytes"),
        ("moe-load", "MixesOnLoad", "wrong bytes"),
        ("moe-save", "LosesOnSave", "not in the checkpoint"),
        ("real-save", "FlipsOnSave", "wrong bytes, compared with the model's file"),
        ("real-load", "LoadsNothing", "wrong bytes, compared with the model's file"),
        ("save", "WritesSomethingElse", "wrong bytes"),
        ("save", "ForgetsToSettle", "wrong bytes"),
    ],
)
def test_wrong_bytes_are_no_figure(sink: Target, case: str, contender: str, said: str) -> None:
    (result,) = measure(sink, case, f"{BROKEN}:{contender}", rounds=2)
    assert isinstance(result, MissingFigure)
    assert result.kind == "failed"
    assert said in result.reason


@pytest.mark.parametrize(
    ("case", "contender", "said"),
    [
        ("discovery-6", "FindsAnOlderOne", "[5] of 6 steps"),
        ("discovery-6", "FindsNone", "[] of 6 steps"),
        ("discovery-6", "OverlooksOne", "[2, 3, 4, 5, 6] of 6 steps"),
        ("retention-6", "RemovesNothing", "steps [1, 2, 3] are there or gone"),
        ("retention-6", "RemovesOneTooMany", "steps [4] are there or gone"),
        ("retention-6", "RemovesPartOfAKeptOne", "iter_000000005/model/.metadata is not what it was"),
        ("retention-6", "TouchesAKeptOne", "iter_000000006/manifest.json is not what it was"),
        ("retention-6", "LeavesFilesBehind", "steps [1, 2, 3] are there or gone"),
    ],
)
def test_wrong_steps_are_no_figure(case: str, contender: str, said: str) -> None:
    with open_place(Setting.MEMORY, None, 0) as place:
        (result,) = measure(place, case, f"{BROKEN_STEPS}:{contender}")
    assert isinstance(result, MissingFigure), result
    assert result.kind == "failed"
    assert said in result.reason


@pytest.mark.parametrize(
    ("contender", "said"),
    [
        ("LoadsNothing", "wrong bytes"),
        ("SaysAnotherStep", "step 2 instead of 1"),
        ("ForgetsTheMoments", "exp_avg: wrong bytes"),
        ("FlipsOneBit", "wrong bytes"),
        ("ForgetsThePlaceInTheData", "the dataloader is at"),
        ("ForgetsTheScheduler", "the scheduler is at -1"),
        ("ReleasesBeforeItHasCopied", "wrong bytes"),
    ],
)
def test_wrong_training_states_are_no_figure(contender: str, said: str) -> None:
    with open_place(Setting.MEMORY, None, 0) as place:
        (result,) = measure(place, "checkpointer", f"{BROKEN_STEPS}:{contender}")
    assert isinstance(result, MissingFigure), result
    assert result.kind == "failed"
    assert said in result.reason


def test_wrong_second_rank_is_no_figure(sink: Target) -> None:
    (result,) = measure(sink, "reshard", f"{BROKEN}:WrongOnSecondRank")
    assert isinstance(result, MissingFigure)
    assert result.kind == "failed"


def test_dead_process_is_no_figure(sink: Target) -> None:
    (result,) = measure(sink, "save", f"{BROKEN}:Dies", isolation=Isolation.PROCESS)
    assert isinstance(result, MissingFigure)
    assert result.kind == "failed"
    assert "ended with 7" in result.reason


def test_a_client_ends_with_the_runner_that_asked_it(sink: Target, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    job = Job(case="save", contender=f"{BROKEN}:Hangs", target=sink, size_bytes=TINY_BYTES, rounds=1)
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.client", str(tmp_path / "outcome.json")],
        stdin=subprocess.PIPE,
        env={**os.environ, "DCPFS_TEST_BEGUN": str(begun)},
        text=True,
    ) as client:
        assert client.stdin is not None
        client.stdin.write(job.model_dump_json() + "\n")
        client.stdin.flush()
        deadline = time.monotonic() + 600
        while not begun.exists():
            assert client.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        client.stdin.close()  # as when the runner is killed
        assert client.wait(600) == 75
    assert not (tmp_path / "outcome.json").exists()


@pytest.mark.parametrize(
    ("case", "contender"),
    [
        ("save", f"{BROKEN}:Missing"),
        ("load", f"{BROKEN}:Missing"),
        ("discovery-2", f"{BROKEN_STEPS}:NoSeeker"),
        ("checkpointer", f"{BROKEN_STEPS}:NoCheckpointer"),
    ],
)
def test_absent_is_absent(sink: Target, case: str, contender: str) -> None:
    (result,) = measure(sink, case, contender)
    assert isinstance(result, MissingFigure)
    assert result.kind == "absent"
    assert "not installed here" in result.reason


PEERS = ("obstore", "s3torchconnector", "multistorageclient", "torchsnapshot", "safetensors")


def test_a_peer_whose_package_is_not_there_is_absent(
    sink: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in PEERS else found(name, *rest))
    names = ("dcpfs-obstore", "torch-obstore", "multi-storage-client", "s3torchconnector", "s3torchconnector-range")
    results = measure(sink, "save", *names, "s3torchconnector-sequential")
    with open_place(Setting.DISK, tmp_path, 0) as place:
        results += measure(place, "load", "torchsnapshot", "safetensors")
    assert len(results) == 8
    for result in results:
        assert isinstance(result, MissingFigure)
        assert result.kind == "absent"
        assert "not installed" in result.reason


def test_real_weights_that_are_not_there_are_said_to_be(sink: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if "minilm" in name else found(name, *rest)
    )
    (result,) = measure(sink, "real-load", "dcpfs")
    assert isinstance(result, MissingFigure)
    assert result.kind == "absent"
    assert "weights are not installed" in result.reason


def test_who_cannot_reach_a_place_is_absent_and_not_run(sink: Target, tmp_path: Path) -> None:
    results = measure(sink, "load", "torch-1", "safetensors", "floor-files", "floor-memcpy")
    with open_place(Setting.DISK, tmp_path, 0) as place:
        results += measure(place, "load", "s3torchconnector", "multi-storage-client", "floor-sockets")
    with open_place(Setting.MEMORY, None, 0) as place:
        results += measure(place, "checkpointer", "dcpfs-process")
    assert [isinstance(result, MissingFigure) and result.kind for result in results] == ["absent"] * 8


def test_every_contender_that_is_known_is_one() -> None:
    for setting in (Setting.FAST, Setting.DISK, Setting.MEMORY):
        for name in contenders_for(setting):
            roles = [role for role in Role if _is(name, role)]
            assert roles, name
            assert unreachable(name, Target(setting=setting, path="x", port=1)) is None


def _is(name: str, role: Role) -> bool:
    try:
        return find(name, role) is not None
    except ValueError:
        return False


def test_a_contender_of_another_kind_is_no_contender(sink: Target) -> None:
    (result,) = measure(sink, "discovery-2", f"{BROKEN}:LoadsNothing")
    assert isinstance(result, MissingFigure)
    assert "lacks part of" in result.reason


def test_one_rank_without_a_figure_leaves_none() -> None:
    figures = RoundFigures(began_seconds=1, ended_seconds=2, cpu_seconds=1, peak_extra_bytes=0)
    good = Outcome(result=Measured(verified=True, rounds=(figures,), needed_bytes=10**9))
    entry = Entry(case="save", setting=Setting.FAST, contender="x", repetition=0)
    assert isinstance(combine(entry, [good, good]), list)
    for bad in (Failed(reason="wrong"), Absent(reason="gone")):
        combined = combine(entry, [good, Outcome(result=bad)])
        assert isinstance(combined, MissingFigure)
        assert combined.kind == bad.kind
        assert isinstance(combine_steps(entry, "discovery", 3, [good, Outcome(result=bad)]), MissingFigure)
    assert isinstance(combine(entry, []), MissingFigure)
    assert isinstance(combine_steps(entry, "retention", 3, []), MissingFigure)


def test_figures_without_proof_cannot_be_made() -> None:
    unproved = {"kind": "measured", "verified": False, "rounds": [], "needed_bytes": 1}
    with pytest.raises(ValidationError):
        Outcome.model_validate({"result": unproved})


def test_report_shows_reasons_in_place_of_figures(tmp_path: Path) -> None:
    lines, table = tmp_path / "figures.jsonl", tmp_path / "figures.md"
    arguments = ["save", "--size-gb", "0.0004", "--repetitions", "1", "--rounds", "1"]
    arguments += ["--only", "floor-sockets", "--only", f"{BROKEN}:FlipsOnSave", "--only", f"{BROKEN}:Missing"]
    arguments += ["--baseline", "floor-sockets", "--json", str(lines), "--markdown", str(table)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1, result.output
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [record["kind"] for record in records] == ["manifest", "figure", "failed", "absent"]
    assert records[0]["versions"]["torch"]
    assert "not-a-secret" not in lines.read_text()
    rows = {row.split("|")[1].strip(): row for row in table.read_text().splitlines() if row.startswith("| ")}
    assert "1.00" in rows["floor-sockets"]
    assert "failed: " in rows[f"{BROKEN}:FlipsOnSave"]
    assert "absent: " in rows[f"{BROKEN}:Missing"]


def test_a_process_that_ends_before_it_has_read_its_job_is_a_failure(
    sink: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.runner.sys.executable", shutil.which("false"))
    longer_than_a_pipe = "x" * (1 << 20)  # so that writing it waits until the process has ended
    (result,) = measure(sink, "save", f"{BROKEN}:{longer_than_a_pipe}", isolation=Isolation.PROCESS)
    assert isinstance(result, MissingFigure)
    assert result.kind == "failed"
    assert "its process ended with 1" in result.reason
