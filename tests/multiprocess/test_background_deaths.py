"""A trainer that dies when its data is written: the step is committed whole or not at all, and nobody waits for it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

import dcpfs
from dcpfs.checkpointer.process_saver import ProcessSaver
from tests.multiprocess import background_job as job
from tests.multiprocess.gloo import try_ranks

SOON_SECONDS = 150.0
"""Half the time-out of a group, 300 s here; nothing below waits for that."""


class GatedFinish(dcpfs.FsspecStorageWriter):
    """Waits at a gate before it publishes: by then every rank's data is written, and the coordinator knows it."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._where = Path(url)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        gate = finish_gate(self._where.parent.parent)
        if self._where.name == "model" and gate.exists():
            with open(gate, "rb") as file:
                file.read()
        super().finish(metadata, results)


class Checkpointer(dcpfs.DistributedCheckpointer):
    def get_storage_writer(self, url: str) -> StorageWriter:
        return GatedFinish(url)


def finish_gate(save_dir: str | Path) -> Path:
    return job.script_of(save_dir) / "finish"


def kill(pids: list[int]) -> None:
    """And wait until they are gone."""
    opened = [os.pidfd_open(pid) for pid in pids]
    for process in opened:
        signal.pidfd_send_signal(process, signal.SIGKILL)
    for process in opened:
        select.select([process], [], [])
        os.close(process)


def attempt(call: Callable[[], object]) -> str:
    started_seconds = time.monotonic()
    try:
        call()
        text = ""
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    assert time.monotonic() - started_seconds < SOON_SECONDS
    return text


def lose_two_trainers(save_dir: str) -> list[str]:
    """Ranks 1 and 2 are gone between their last byte and the commit of step 2; rank 2 with its background process."""
    rank, state = dist.get_rank(), job.State()
    if rank == 0:
        job.script_of(save_dir)
    dist.barrier()
    checkpointer = Checkpointer(job.config(save_dir, "async_with_pinned_mem"))
    saver = checkpointer._saver
    assert isinstance(saver, ProcessSaver)
    assert saver.pid is not None
    pids: list[list[int]] = [[]] * dist.get_world_size()
    dist.all_gather_object(pids, [os.getpid(), saver.pid])
    state.fill(1)
    checkpointer.save_state(1, {"model": state})
    checkpointer.wait()
    if rank == 0:
        os.mkfifo(finish_gate(save_dir))
    dist.barrier()
    state.fill(2)
    checkpointer.save_state(2, {"model": state})
    if rank == 0:
        with open(finish_gate(save_dir), "wb"):
            finish_gate(save_dir).unlink()
            kill([*pids[1][:1], *pids[2]])
    texts = [attempt(checkpointer.wait), attempt(lambda: checkpointer.save_state(3, {"model": state}))]
    with contextlib.suppress(Exception):
        checkpointer.close()
    return texts


def test_cases_30_49_60_a_trainer_that_dies_after_its_data_was_written_hangs_nobody_and_the_step_is_whole(
    tmp_path: Path,
) -> None:
    """The step lacked nothing but its manifest, so it is committed; the other ranks learn at once that two are gone."""
    save_dir = tmp_path / "run"
    outcomes = try_ranks(lose_two_trainers, 4, str(save_dir))
    assert [outcome.error_type for outcome in outcomes[1:3]] == ["ProcessDied"] * 2
    for outcome in (outcomes[0], outcomes[3]):
        assert not outcome.failed, outcome.traceback_text
        assert outcome.value is not None
        assert all(text.startswith("LostRankError") for text in outcome.value), outcome.value
    config = dcpfs.CheckpointConfig(save_dir=str(save_dir), verify_on_resume=True)
    with dcpfs.DistributedCheckpointer(config, access="read_only") as reader:
        assert reader.steps() == [1, 2]
        assert reader.load_state({"model": job.State()}) == 2
    assert job.saved(save_dir, 2)
