"""The demo's parent: starts ranks as processes, reads their events, kills them, and compares what they say.

Flow: two FSDP2 ranks train the pretrained model to the end, undisturbed → two others train it and save in the
background, and are killed by SIGKILL in the middle of a save → two fresh ones resume from the newest whole step; its
tensors, and the losses of all steps to the end, must be those of the first run, bit for bit → one and three ranks load
the same step → a process in which dcpfs can't be imported reads it with torch alone.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from dcpfs.checkpointer.discovery import list_steps
from dcpfs.checkpointer.layout import LATEST_NAME, step_name
from dcpfs.cli.demo import torch_reader
from dcpfs.cli.demo.rank import Job
from dcpfs.storage.location import Location
from dcpfs.storage.opening import open_store

__all__ = ["DemoError", "Losses", "Phase", "run_demo"]

_PHASE_TIMEOUT_SECONDS = 600


class DemoError(RuntimeError):
    """A process of the demo failed or said something that must not be."""


@dataclass
class Phase:
    """One row of the table: what happened, over all its ranks.

    Attributes:
        name: What it shows.
        bytes: Moved between ranks and store, summed over ranks; None where it isn't counted.
        seconds: The slowest rank's, for the transfer alone; for torch's reader the whole process.
        requests: Sent to the store, summed over ranks; None where it isn't counted.
        verdict: What was compared.
        passed: Whether it was equal.
    """

    name: str
    bytes: int | None
    seconds: float
    requests: int | None
    verdict: str
    passed: bool


@dataclass
class _RankEvents:
    losses: dict[int, float] = field(default_factory=dict)
    digests: dict[int, dict[str, str]] = field(default_factory=dict)
    transfer: dict[str, float] = field(default_factory=lambda: {"seconds": 0.0, "bytes": 0, "requests": 0})
    resumed: int = 0


@dataclass
class Losses:
    """The loss curves of the demo, by step.

    Attributes:
        undisturbed: Of the run that nobody killed.
        killed: Of the run that was killed, up to there.
        resumed: Of the run that went on from its checkpoint.
    """

    undisturbed: dict[int, float] = field(default_factory=dict)
    killed: dict[int, float] = field(default_factory=dict)
    resumed: dict[int, float] = field(default_factory=dict)


def run_demo(
    url: str,
    storage_options: Mapping[str, object],
    losses: Losses,
    *,
    save_every: int = 2,
    killed_save: int = 6,
    last_step: int = 8,
) -> Iterator[Phase]:
    """Run the whole demo against ``url`` and yield a row as each phase ends.

    Args:
        url: The ``save_dir``; steps of an older demo there are removed.
        storage_options: For the URL.
        losses: Filled as the phases end.
        save_every: Steps from save to save.
        killed_save: The step in whose save the job is killed.
        last_step: Last step whose loss is compared.

    Raises:
        DemoError: A process failed; the text holds the end of what it wrote.
    """
    _remove_steps(url, storage_options)
    with tempfile.TemporaryDirectory(prefix="dcpfs-demo-") as folder:

        def run(role: str, world_size: int) -> list[_RankEvents]:
            job = Job(role, 0, world_size, "", url, save_every, killed_save, last_step, dict(storage_options))
            return _run_ranks(job, Path(folder) / f"{role}{world_size}")

        undisturbed = run("train", 2)[0]
        losses.undisturbed = undisturbed.losses
        yield Phase("train, 2 ranks, undisturbed", None, 0.0, None, f"{len(losses.undisturbed)} losses", passed=True)
        killed = run("save", 2)
        losses.killed = killed[0].losses
        same = all(losses.undisturbed[step] == loss for step, loss in losses.killed.items())
        name = f"train and save, killed in save {killed_save}"
        yield _phase(name, killed, f"{len(losses.killed)} losses", passed=same)
        resumed = run("resume", 2)
        losses.resumed, step = resumed[0].losses, resumed[0].resumed
        expected = undisturbed.digests.get(step, {})
        same_losses = losses.resumed == {each: losses.undisturbed[each] for each in range(step + 1, last_step + 1)}
        verdict = f"{len(expected)} tensors, {len(losses.resumed)} losses"
        passed = bool(expected) and resumed[0].digests == _after(undisturbed.digests, step) and same_losses
        yield _phase(f"resume from step {step}, 2 new ranks", resumed, verdict, passed=passed)
        for world_size in (1, 3):
            loaded = run("check", world_size)
            plural = "rank" if world_size == 1 else "ranks"
            passed = loaded[0].digests == {step: expected}
            yield _phase(f"load, {world_size} {plural}", loaded, f"{len(expected)} tensors", passed=passed)
        started = time.monotonic()
        read: dict[str, str] = {}
        for key in ("model", "optim"):
            where = Location(url, storage_options).join(f"{step_name(step)}/{key}").url
            read |= {f"{key}/{name}": digest for name, digest in _read_with_torch_alone(where, storage_options).items()}
        seconds = time.monotonic() - started
        yield Phase("read by torch alone", None, seconds, None, f"{len(read)} tensors", read == expected)


def _after(digests: Mapping[int, dict[str, str]], step: int) -> dict[int, dict[str, str]]:
    return {each: found for each, found in digests.items() if each >= step}


def _remove_steps(url: str, storage_options: Mapping[str, object]) -> None:
    """Remove the steps of an earlier demo, and nothing else."""
    store = open_store(Location(url, storage_options))
    try:
        for iteration in list_steps(store):
            store.delete([info.path for info in store.list(step_name(iteration))])
        store.delete([LATEST_NAME])
    finally:
        store.close()


def _phase(name: str, ranks: list[_RankEvents], verdict: str, *, passed: bool) -> Phase:
    transfers = [rank.transfer for rank in ranks]
    return Phase(
        name,
        bytes=int(sum(transfer["bytes"] for transfer in transfers)),
        seconds=max(transfer["seconds"] for transfer in transfers),
        requests=int(sum(transfer["requests"] for transfer in transfers)),
        verdict=verdict,
        passed=passed,
    )


def _run_ranks(job: Job, folder: Path) -> list[_RankEvents]:
    """Run the job on all its ranks until each said it is done, then kill what still runs."""
    folder.mkdir()
    processes: list[subprocess.Popen[str]] = []
    with contextlib.ExitStack() as stack:
        for rank in range(job.world_size):
            log = stack.enter_context((folder / f"rank{rank}.log").open("w+"))
            process = subprocess.Popen(
                [sys.executable, "-m", "dcpfs.cli.demo.rank"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
            stack.callback(_kill, process)
            processes.append(process)
            ranked = replace(job, rank=rank, rendezvous=str(folder / "rendezvous"))
            if process.stdin is None:
                raise DemoError("a rank has no standard input")
            # It stays open: a rank stays until all are done, since one that leaves cuts its peers' last exchange off.
            process.stdin.write(ranked.to_json() + "\n")
            process.stdin.flush()
        watchdog = _Watchdog(processes)
        stack.callback(watchdog.cancel)
        watchdog.start()
        followed = [_follow(process, folder / f"rank{rank}.log") for rank, process in enumerate(processes[:1])]
        if job.role == "save":  # killed where they are: the first rank has said that its save began
            for process in processes:
                process.kill()
        return followed + [
            _follow(process, folder / f"rank{rank}.log", killed=job.role == "save")
            for rank, process in enumerate(processes[1:], start=1)
        ]


def _follow(process: subprocess.Popen[str], log: Path, *, killed: bool = False) -> _RankEvents:
    """Read a rank's events until it is done, or begins the save in which the job is killed."""
    events = _RankEvents()
    for line in process.stdout or ():
        event = json.loads(line)
        kind = event.pop("event")
        if kind == "step":
            events.losses[event["step"]] = event["loss"]
        elif kind == "fingerprints":
            events.digests[event["step"]] = event["digests"]
        elif kind == "transfer":
            events.transfer = event
        elif kind == "resumed":
            events.resumed = event["step"]
        elif kind in ("done", "saving"):
            return events
    if killed:
        return events
    tail = log.read_text()[-3000:]
    raise DemoError(f"a rank of the demo ended with exit code {process.wait()} before its work was done:\n{tail}")


def _kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


class _Watchdog:
    """Kills the ranks when a phase takes longer than it ever should, so that the demo can't hang."""

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        def kill_all() -> None:
            for process in processes:
                process.kill()

        self._timer = threading.Timer(_PHASE_TIMEOUT_SECONDS, kill_all)
        self._timer.daemon = True

    def start(self) -> None:
        self._timer.start()

    def cancel(self) -> None:
        self._timer.cancel()


def _read_with_torch_alone(url: str, storage_options: Mapping[str, object]) -> dict[str, str]:
    """Fingerprints from a process that runs the reader as a plain script, in isolated mode."""
    answer = subprocess.run(
        [sys.executable, "-I", str(torch_reader.__file__)],
        input=json.dumps({"url": url, "storage_options": dict(storage_options)}),
        capture_output=True,
        text=True,
        timeout=_PHASE_TIMEOUT_SECONDS,
        check=False,
    )
    if answer.returncode != 0:
        raise DemoError(f"torch alone could not read the checkpoint:\n{answer.stderr[-3000:]}")
    digests: dict[str, str] = json.loads(answer.stdout)
    return digests
