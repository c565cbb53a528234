"""Two and four ranks that save in the background: what happens when there is no room, and when somebody is gone."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

import dcpfs
from dcpfs.checkpointer.linked_ranks import LinkedRanks
from dcpfs.checkpointer.process_saver import ProcessSaver
from dcpfs.checkpointer.thread_saver import ThreadSaver
from tests.multiprocess import background_job as job
from tests.multiprocess.gloo import run_ranks, try_ranks

THREAD, PROCESS = "async", "async_with_pinned_mem"
SOON_SECONDS = 150.0
"""Half the time-out of a group, 300 s here; nothing below waits for that."""


def attempt(call: Callable[..., object], *arguments: object) -> str:
    """What a call raises, in one line; and that it does so long before the group's time-out."""
    started_seconds = time.monotonic()
    try:
        call(*arguments)
        text = ""
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    assert time.monotonic() - started_seconds < SOON_SECONDS
    return text


def save(checkpointer: dcpfs.DistributedCheckpointer, state: job.State, number: int) -> None:
    state.fill(number)
    checkpointer.save_state(number, {"model": state})
    checkpointer.maybe_wait_for_staging()
    state.fill(-1)


def is_coordinator() -> bool:
    return dist.get_rank() == 0


# --- no room


def save_when_busy(root: str, mode: str) -> dict[str, tuple[list[int], str]]:
    """For each policy: which steps there are after a `save` for which there was no room, and what it raised."""
    found: dict[str, tuple[list[int], str]] = {}
    state = job.State()
    for when_busy, room in (("wait", 1), ("skip", 1), ("error", 2)):
        save_dir = f"{root}/{when_busy}"
        if is_coordinator():
            for number in range(1, room + 1):
                job.make_gate(save_dir, number)
        dist.barrier()
        config = job.config(save_dir, mode, max_in_flight=room, when_busy=when_busy)
        with job.Checkpointer(config) as checkpointer:
            for number in range(1, room + 1):
                save(checkpointer, state, number)
            dist.barrier()  # on the training group, while saves exchange on theirs (case 50)
            assert checkpointer.steps() == []
            text = ""
            if when_busy == "wait":
                if is_coordinator():
                    job.open_gate(save_dir, 1)
                save(checkpointer, state, room + 1)
            else:
                text = attempt(save, checkpointer, state, room + 1)
                if is_coordinator():
                    for number in range(1, room + 1):
                        job.open_gate(save_dir, number)
                checkpointer.wait()
                save(checkpointer, state, room + 2)
            checkpointer.wait()
            found[when_busy] = (checkpointer.steps(), text)
        dist.barrier()
        assert all(job.saved(save_dir, number) for number in found[when_busy][0])
    return found


@pytest.mark.parametrize("mode", [THREAD, PROCESS])
def test_cases_15_50_a_busy_saver_lets_wait_skips_or_refuses_on_all_ranks(tmp_path: Path, mode: str) -> None:
    for found in run_ranks(save_when_busy, 2, str(tmp_path), mode):
        assert found["wait"] == ([1, 2], "")
        assert found["skip"] == ([1, 3], "")
        steps, text = found["error"]
        assert steps == [1, 2, 4]
        assert text.startswith("CheckpointError: can't save iteration 3: iteration 1, 2 is still being saved to")


# --- somebody is gone


def lose_processes(save_dir: str) -> list[tuple[str, str]]:
    """Kill the process of one rank: idle, saving, and by an error that can't be pickled; then warn instead of raise."""
    heard = []
    state = job.State()
    rank = dist.get_rank()
    with job.Checkpointer(job.config(save_dir, PROCESS)) as checkpointer:
        saver = saver_of(checkpointer)
        pids = []

        def note(what: str, call: Callable[[], object]) -> None:
            heard.append((what, attempt(call)))
            pids.append(saver.pid)

        save(checkpointer, state, 1)
        checkpointer.wait()
        pids.append(saver.pid)
        if rank == 1:
            kill(saver)
        dist.barrier()
        note("idle", lambda: save(checkpointer, state, 2))
        save(checkpointer, state, 3)

        if is_coordinator():
            job.make_gate(save_dir, 4, rank=1)
        dist.barrier()
        save(checkpointer, state, 4)
        if rank == 1:
            kill(saver)
            (job.script_of(save_dir) / "gate-4-1").unlink()
        note("saving", checkpointer.wait)
        assert checkpointer.health() is None  # it has been told
        save(checkpointer, state, 5)

        if is_coordinator():
            job.plant(save_dir, 6, "kill", rank=0)
            job.plant(save_dir, 7, "unpicklable", rank=1)
        dist.barrier()
        save(checkpointer, state, 6)
        note("of the coordinator", lambda: checkpointer.load_state({"model": job.State()}))
        save(checkpointer, state, 7)
        note("unpicklable", checkpointer.wait)
        save(checkpointer, state, 8)
        checkpointer.wait()
        assert checkpointer.steps() == [1, 3, 5, 8]
        assert len(set(pids)) == 4  # the first, and one after each that was killed: idle, saving, of the coordinator
    assert all(job.saved(save_dir, number) for number in (1, 3, 5, 8))
    return heard


def saver_of(checkpointer: dcpfs.DistributedCheckpointer) -> ProcessSaver:
    saver = checkpointer._saver
    assert isinstance(saver, ProcessSaver)
    return saver


def kill(saver: ProcessSaver) -> None:
    """And wait until this process has noticed."""
    assert saver.pid is not None
    os.kill(saver.pid, signal.SIGKILL)
    saver._crew.joined.wait()
    reader = saver._crew.process._reader if saver._crew.process is not None else None
    assert reader is not None
    reader.join(SOON_SECONDS)
    assert saver.failure() is not None


def test_cases_49_53_54_60_a_lost_process_is_told_to_all_ranks_and_replaced(tmp_path: Path) -> None:
    for heard in run_ranks(lose_processes, 2, str(tmp_path / "run")):
        texts = dict(heard)
        assert "the background process of rank 1 was killed by SIGKILL" in texts["idle"]
        assert "the background process of rank 1 was killed by SIGKILL" in texts["saving"]
        assert "the background process of rank 0 was killed by SIGKILL" in texts["of the coordinator"]
        assert "_UnpicklableError: an error that holds a lambda" in texts["unpicklable"]


def cannot_replace(root: str, policy: str) -> list[str]:
    """No process can be started any more on the last rank, for two saves, in the place of one that was killed."""
    state, python = job.State(), sys.executable
    is_last = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
    with job.Checkpointer(job.config(f"{root}/run", PROCESS, on_process_loss=policy)) as checkpointer:
        save(checkpointer, state, 1)
        checkpointer.wait()
        if is_last:
            kill(saver_of(checkpointer))
            sys.executable = f"{root}/no python"
        if dist.is_initialized():
            dist.barrier()
        texts = [attempt(save, checkpointer, state, number) for number in (2, 3)]
        assert checkpointer.health() is None  # it has been told
        sys.executable = python
        texts.append(attempt(save, checkpointer, state, 4))
        texts.append(attempt(checkpointer.wait))
        assert checkpointer.last_save is not None
        assert checkpointer.last_save.iteration == 4
        return [*texts, f"steps {checkpointer.steps()}"]


def test_case_53_without_a_process_a_save_raises_and_a_later_one_works(tmp_path: Path) -> None:
    killed, not_started, *rest = cannot_replace(str(tmp_path), "raise")
    assert "the background process of rank 0 was killed by SIGKILL" in killed
    assert "no python" in not_started
    assert rest == ["", "", "steps [1, 4]"]


def test_case_53_without_a_process_ranks_save_in_the_caller_where_that_is_asked_for(tmp_path: Path) -> None:
    heard = run_ranks(cannot_replace, 2, str(tmp_path), "save_in_caller")
    assert heard == [["", "", "", "", "steps [1, 2, 3, 4]"]] * 2
    for number in (1, 2, 3, 4):
        assert job.saved(tmp_path / "run", number)


def go_on_with_warnings(save_dir: str, mode: str) -> list[str]:
    state = job.State()
    config = job.config(save_dir, mode, on_save_error="warn", max_consecutive_failures=2)
    if is_coordinator():
        for number in (2, 4, 5):
            job.plant(save_dir, number, "os" if mode == THREAD else "kill", rank=1)
    dist.barrier()
    checkpointer = job.Checkpointer(config)
    texts = [attempt(save, checkpointer, state, number) for number in range(1, 6)]
    texts.append(attempt(checkpointer.close))
    assert checkpointer.steps() == [1, 3]
    return texts


@pytest.mark.parametrize("mode", [THREAD, PROCESS])
def test_case_107_failures_in_the_background_are_logged_until_there_are_too_many(tmp_path: Path, mode: str) -> None:
    for texts in run_ranks(go_on_with_warnings, 2, str(tmp_path / "run"), mode):
        assert texts[:5] == [""] * 5
        assert ("the disk is on fire" if mode == THREAD else "was killed by SIGKILL") in texts[5]


def lose_a_rank(save_dir: str, mode: str) -> list[str]:
    """Rank 2 of 4 is killed while a save is at work: its neighbours notice, and so must the one that is none."""
    state = job.State()
    rank = dist.get_rank()
    if is_coordinator():
        job.make_gate(save_dir, 2, rank=2)
    dist.barrier()
    checkpointer = job.Checkpointer(job.config(save_dir, mode))
    save(checkpointer, state, 1)
    checkpointer.wait()
    save(checkpointer, state, 2)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    texts = [attempt(checkpointer.wait), attempt(save, checkpointer, state, 3)]
    with contextlib.suppress(Exception):
        checkpointer.close()
    assert checkpointer.steps() == [1]
    return texts


@pytest.mark.parametrize("mode", [THREAD, PROCESS])
def test_cases_30_49_60_a_rank_that_is_gone_is_noticed_by_all_others_at_once(tmp_path: Path, mode: str) -> None:
    outcomes = try_ranks(lose_a_rank, 4, str(tmp_path / "run"), mode)
    assert outcomes[2].error_type == "ProcessDied"
    for outcome in (*outcomes[:2], outcomes[3]):
        assert not outcome.failed, outcome.traceback_text
        assert outcome.value is not None
        assert all(text for text in outcome.value)
    assert job.saved(tmp_path / "run", 1)


def lose_the_group(save_dir: str) -> str:
    """The connections of the threads break, those of the callers don't."""
    state = job.State()
    with job.Checkpointer(job.config(save_dir, THREAD)) as checkpointer:
        save(checkpointer, state, 1)
        checkpointer.wait()
        saver = checkpointer._saver
        assert isinstance(saver, ThreadSaver)
        ranks = saver._context.ranks
        assert isinstance(ranks, LinkedRanks)
        if not is_coordinator():
            job.make_gate(save_dir, 2, rank=1)
        dist.barrier()
        save(checkpointer, state, 2)
        if not is_coordinator():
            with open(job.script_of(save_dir) / "gate-2-1", "wb"):  # when the save has come there
                ranks._take_down(ConnectionError("the cable was pulled"))
        text = attempt(checkpointer.wait)
        save(checkpointer, state, 3)
        checkpointer.wait()
        assert checkpointer.steps() == [1, 3]
    return text


def test_cases_50_60_a_broken_group_of_the_threads_is_made_anew(tmp_path: Path) -> None:
    for text in run_ranks(lose_the_group, 2, str(tmp_path / "run")):
        assert text.startswith("LostRankError: rank ")
        assert "can't reach the other ranks any more" in text
    assert job.saved(tmp_path / "run", 3)
