"""The demo's parent: starts ranks as processes, reads their events, kills them, and compares what they say.

Flow: two FSDP2 ranks train the pretrained model and save → both are killed by SIGKILL in the middle of a later step →
two fresh processes resume; tensors and the losses of the next steps must be equal bit for bit → one and three ranks
load the same checkpoint → a process in which dcpfs can't be imported reads it with torch alone.
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

from dcpfs.cli.demo import torch_reader
from dcpfs.cli.demo.rank import Job

__all__ = ["DemoError", "Phase", "run_demo"]

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
    digests: dict[str, str] = field(default_factory=dict)
    transfer: dict[str, float] = field(default_factory=dict)


def run_demo(
    url: str,
    storage_options: Mapping[str, object],
    *,
    save_step: int = 3,
    last_step: int = 5,
) -> Iterator[Phase]:
    """Run the whole demo against ``url`` and yield a row as each phase ends.

    Args:
        url: Where the checkpoint goes; an older one of the demo there is overwritten.
        storage_options: For the URL.
        save_step: Steps before the save.
        last_step: Last step whose loss is compared.

    Raises:
        DemoError: A process failed; the text holds the end of what it wrote.
    """
    with tempfile.TemporaryDirectory(prefix="dcpfs-demo-") as folder:

        def job(role: str, world_size: int) -> Job:
            return Job(role, 0, world_size, "", url, save_step, last_step, dict(storage_options))

        trained = _run_ranks(job("train", 2), Path(folder) / "train")
        yield _phase("train and save, 2 ranks", trained, "then killed in a step", passed=True)
        resumed = _run_ranks(job("resume", 2), Path(folder) / "resume")
        same_tensors = resumed[0].digests == trained[0].digests
        after = range(save_step + 1, last_step + 1)
        same_losses = all(resumed[0].losses[step] == trained[0].losses[step] for step in after)
        verdict = f"{len(trained[0].digests)} tensors, {len(after)} losses"
        yield _phase("resume, 2 new ranks", resumed, verdict, passed=same_tensors and same_losses)
        for world_size in (1, 3):
            loaded = _run_ranks(job("check", world_size), Path(folder) / f"check{world_size}")
            plural = "rank" if world_size == 1 else "ranks"
            passed = loaded[0].digests == trained[0].digests
            yield _phase(f"load, {world_size} {plural}", loaded, f"{len(trained[0].digests)} tensors", passed=passed)
        started = time.monotonic()
        read = _read_with_torch_alone(url, storage_options)
        seconds = time.monotonic() - started
        yield Phase(
            "read by torch alone",
            None,
            seconds,
            None,
            f"{len(read)} tensors",
            read == trained[0].digests,
        )


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
            with process.stdin as stdin:
                stdin.write(ranked.to_json())
        watchdog = _Watchdog(processes)
        stack.callback(watchdog.cancel)
        watchdog.start()
        return [_follow(process, folder / f"rank{rank}.log") for rank, process in enumerate(processes)]


def _follow(process: subprocess.Popen[str], log: Path) -> _RankEvents:
    events = _RankEvents()
    for line in process.stdout or ():
        event = json.loads(line)
        kind = event.pop("event")
        if kind == "step":
            events.losses[event["step"]] = event["loss"]
        elif kind == "fingerprints":
            events.digests = event["digests"]
        elif kind == "transfer":
            events.transfer = event
        elif kind == "done":
            return events
    tail = log.read_text()[-3000:]
    raise DemoError(f"a rank of the demo ended with exit code {process.wait()} before its work was done:\n{tail}")


def _kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


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
