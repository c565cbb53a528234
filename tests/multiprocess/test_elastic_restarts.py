"""torchrun restarts a job whose ranks were killed in the middle of a save in the background."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import dcpfs
from dcpfs.checkpointer.layout import step_name
from tests.multiprocess import background_job as job
from tests.multiprocess.elastic_job import EVERY, LAST, Weights, name_of_seen

ROOT = Path(__file__).parents[2]
GONE_SECONDS = 120.0


class ElasticJob:
    """Two ranks under torchrun, and a thread that kills one of them in each attempt but the last.

    Args:
        directory: Made for it.
        kills: For each attempt that is to die: the iteration whose save is at work then, and the rank that is killed.
    """

    def __init__(self, directory: Path, kills: list[tuple[int, int]]) -> None:
        self.directory, self.kills = directory, kills
        self.save_dir = directory / "run"
        self.error: BaseException | None = None
        directory.mkdir()
        for iteration, rank in kills:
            job.make_gate(self.save_dir, iteration, rank)
        options = ["--standalone", "--nproc-per-node=2", f"--max-restarts={len(kills)}", "--monitor-interval=0.1"]
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", *options),
                *("-m", "tests.multiprocess.elastic_job", str(directory)),
            ],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.killer = threading.Thread(target=self._kill, daemon=True)
        self.killer.start()

    def seen(self, attempt: int, rank: int) -> dict[str, Any]:
        """What a rank began an attempt with."""
        return dict(json.loads((self.directory / name_of_seen(attempt, rank)).read_text()))

    def _kill(self) -> None:
        try:
            for attempt, (iteration, rank) in enumerate(self.kills):
                gate = job.script_of(self.save_dir) / f"gate-{iteration}-{rank}"
                with open(gate, "wb"):  # when the writer has come there; it goes on when this is closed
                    gate.unlink()
                    trainer = os.pidfd_open(self.seen(attempt, rank)["trainer"])
                    signal.pidfd_send_signal(trainer, signal.SIGKILL)
                    select.select([trainer], [], [])
                    os.close(trainer)
        except BaseException as error:
            self.error = error


def is_worker(pid: int) -> bool:
    """Whether a background process runs under this id."""
    try:
        return b"dcpfs.background.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pids: set[int]) -> set[int]:
    """Those that are still there past the deadline."""
    deadline_seconds = time.monotonic() + GONE_SECONDS
    while (left := {pid for pid in pids if is_worker(pid)}) and time.monotonic() < deadline_seconds:
        time.sleep(0.05)
    return left


def trained(until: int) -> Weights:
    """What an uninterrupted run has."""
    weights = Weights()
    for iteration in range(1, until + 1):
        weights.step(iteration)
    return weights


def check(done: ElasticJob) -> None:
    """That every attempt went on from a whole step, and that nothing but whole steps is there."""
    pids = set()
    for attempt in range(len(done.kills) + 1):
        resumed = done.kills[attempt - 1][0] - EVERY if attempt else 0  # the one before the step that was at work
        for rank in (0, 1):
            seen = done.seen(attempt, rank)
            assert seen["start"] == resumed, (attempt, rank)
            assert seen["position"] == resumed * (rank + 1)
            assert seen["weight"] == trained(resumed).weight[0, 0].item()
            pids.add(seen["child"])
    assert len(pids) == 2 * (len(done.kills) + 1)
    assert wait_until_gone(pids) == set()
    save_dir = done.save_dir
    steps = list(range(EVERY, LAST + 1, EVERY))
    assert sorted(path.name for path in save_dir.iterdir() if path.is_dir()) == [step_name(step) for step in steps]
    assert not list(save_dir.rglob(".writing"))
    config = dcpfs.CheckpointConfig(save_dir=str(save_dir), verify_on_resume=True)
    with dcpfs.DistributedCheckpointer(config, access="read_only") as checkpointer:
        assert checkpointer.steps() == steps
    for step in steps:
        found = dcpfs.read(save_dir / step_name(step) / "model")
        expected = trained(step)
        weight = found["weight"]
        assert isinstance(weight, torch.Tensor)
        assert torch.equal(weight, expected.weight)
        assert found["iteration"] == step


@pytest.mark.timeout(1200)
def test_cases_42_51_56_two_jobs_of_torchrun_at_once_each_go_on_after_their_ranks_were_killed_in_a_save(
    tmp_path: Path,
) -> None:
    """One job loses a rank, then the coordinator; the other one the coordinator in its first save."""
    jobs = [ElasticJob(tmp_path / "one", [(4, 1), (6, 0)]), ElasticJob(tmp_path / "two", [(2, 0)])]
    try:
        for each in jobs:
            output, _ = each.process.communicate(timeout=1000)
            assert each.error is None
            assert each.process.returncode == 0, output[-6000:]
    finally:
        for each in jobs:
            each.process.kill()
            each.process.wait()
    for each in jobs:
        check(each)
