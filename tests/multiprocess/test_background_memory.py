"""Fifty saves in a row cost no more than three: memory, descriptors, threads, shared memory."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import dcpfs
from dcpfs.checkpointer.process_saver import ProcessSaver
from tests.multiprocess import background_job as job

THREAD, PROCESS = "async", "async_with_pinned_mem"
MB = 1 << 20


def held(pid: int) -> dict[str, int]:
    """What a process holds."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        "resident": int(status["VmRSS"].split()[0]) * 1024,
        "threads": int(status["Threads"]),
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "shared mappings": Path(f"/proc/{pid}/maps").read_text().count("dcpfs-staging"),
        "names in /dev/shm": sum(name.startswith("dcpfs-") for name in os.listdir("/dev/shm")),
    }


def assert_flat(pid: int, before: dict[str, int]) -> None:
    """It holds no more than before, at the latest a while after the last save: a thread may be about to end.

    Looked at again and again, since nobody is told of the end of another process's thread.
    """
    most = {**before, "resident": before["resident"] + 128 * MB}  # one state a save would be 376
    deadline_seconds = time.monotonic() + 10
    while more := {name: (count, most[name]) for name, count in held(pid).items() if count > most[name]}:
        assert time.monotonic() < deadline_seconds, more
        time.sleep(0.05)


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    """What `ulimit -n 256` sets, or some more than there are here, for this process and those started from here."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(256, highest + 128), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("few_descriptors")
@pytest.mark.parametrize("mode", [THREAD, PROCESS])
def test_cases_46_52_62_68_ten_thousand_tensors_and_fifty_saves(tmp_path: Path, mode: str) -> None:
    many = {f"w{number}": torch.full((number % 5 + 1,), float(number)) for number in range(10_000)}
    state = job.State(tensors=8, rows=16_384)  # 8 MB
    with dcpfs.DistributedCheckpointer(job.config(tmp_path / "run", mode, keep_last=1)) as checkpointer:
        saver = checkpointer._saver
        pids = [os.getpid(), *([saver.pid] if isinstance(saver, ProcessSaver) and saver.pid is not None else [])]
        checkpointer.save_state(1, {"model": many})
        checkpointer.maybe_wait_for_staging()
        kept = {name: tensor.clone() for name, tensor in many.items()}
        for tensor in many.values():
            tensor.fill_(-1)
        checkpointer.wait()
        stored = job.read_step(tmp_path / "run", 1)
        assert all(stored[name].equal(tensor) for name, tensor in kept.items())
        before: list[dict[str, int]] = []
        for number in range(2, 54):
            state.fill(number)
            checkpointer.save_state(number, {"model": state})
            if number == 8:
                checkpointer.wait()
                before = [held(pid) for pid in pids]
        checkpointer.wait()
        for pid, earlier in zip(pids, before, strict=True):
            assert_flat(pid, earlier)
        assert checkpointer.steps() == [53]
    stored = job.read_step(tmp_path / "run", 53)
    assert all(tensor.eq(53).all() for name, tensor in stored.items() if name != "number")
