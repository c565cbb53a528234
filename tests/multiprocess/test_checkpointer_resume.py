"""A run that is interrupted and resumed is the run that was not: losses and all tensors, bit for bit."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch.distributed as dist

import dcpfs
from dcpfs.storage.location import Location
from dcpfs.storage.opening import open_store
from tests.multiprocess.gloo import run_ranks, try_ranks
from tests.multiprocess.training_job import Job, World, assert_same

UNTIL = 6
STOPPED_AT = 4


def make_config(save_dir: str, mode: str = "disabled", **settings: object) -> dcpfs.CheckpointConfig:
    return dcpfs.CheckpointConfig.model_validate({"save_dir": save_dir, "async_mode": mode, **settings})


def interrupted(root: str, mode: str, options: Mapping[str, object] | None = None) -> list[int]:
    """Train to the end; train again and stop; go on from the checkpoint with everything fresh, twice."""
    world, rank = World(2), dist.get_rank()
    config = functools.partial(make_config, storage_options=options)
    uninterrupted = Job(world=world, rank=rank)
    with dcpfs.DistributedCheckpointer(config(f"{root}/whole")) as checkpointer:
        losses = uninterrupted.train(UNTIL, checkpointer)
    expected = uninterrupted.whole()

    first = Job(world=world, rank=rank)
    with dcpfs.DistributedCheckpointer(config(f"{root}/parts", mode)) as checkpointer:
        assert first.load(checkpointer) == 0
        assert first.train(STOPPED_AT, checkpointer) == losses[:STOPPED_AT]
        assert checkpointer.keys_to_resume_during_load()[0] == checkpointer.KEYS_TO_SAVE
    starts = []
    for _ in range(2):  # the second resumes from what a resumed run has saved
        job = Job(seed=9, world=world, rank=rank)
        later = "disabled" if mode == "async_with_pinned_mem" else mode  # its processes take long to start
        with dcpfs.DistributedCheckpointer(config(f"{root}/parts", later)) as checkpointer:
            starts.append(job.load(checkpointer))
            assert job.train(UNTIL, checkpointer) == losses[starts[-1] :]
            checkpointer.wait()
            assert checkpointer.steps() == [2, 4, 6]
            assert checkpointer.latest() == UNTIL
            assert checkpointer.has_resumable_checkpoint()
            assert checkpointer.health() is None
        assert_same(job.whole(), expected)
    return starts


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_cases_5_8_20_95_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path: Path, mode: str) -> None:
    assert run_ranks(interrupted, 2, str(tmp_path), mode) == [[STOPPED_AT, UNTIL]] * 2
    for key in ("model", "optim", "scheduler"):
        whole, parts = (dcpfs.read(str(tmp_path / name / "iter_000000006" / key)) for name in ("whole", "parts"))
        assert_same(parts, whole)
    names = {file.name for file in (tmp_path / "parts/iter_000000006/dataloader").iterdir()}
    assert names == {"rank_0.pkl", "rank_1.pkl"}
    assert (tmp_path / "parts/latest_checkpoint.txt").read_text() == "iter_000000006\n"


def test_a_run_on_s3_resumes_as_on_a_disk(s3_prefix: Location) -> None:
    assert run_ranks(interrupted, 2, s3_prefix.url, "async", s3_prefix.storage_options) == [[STOPPED_AT, UNTIL]] * 2
    with contextlib.closing(open_store(s3_prefix)) as store:
        names = {info.path for info in store.list("parts")}
    assert {"parts/latest_checkpoint.txt", "parts/iter_000000006/dataloader/rank_1.pkl"} <= names
    assert not [name for name in names if name.endswith(".writing")]


def die_in_the_middle(root: str, mode: str, dying_rank: int, at: int) -> None:
    """A rank is killed at its n-th file of the second step."""
    rank = dist.get_rank()
    job = Job(world=World(2), rank=rank)
    replace, count = os.replace, 0

    def kill(source: str, target: str) -> None:
        nonlocal count
        count += "iter_000000004" in str(target)
        if count >= at:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    with dcpfs.DistributedCheckpointer(make_config(root, mode)) as checkpointer:
        job.train(2, checkpointer)
        checkpointer.wait()
        if rank == dying_rank:
            os.replace = kill  # type: ignore[assignment]  # one of its many signatures
        job.train(4, checkpointer)
        checkpointer.wait()


def go_on(root: str) -> tuple[int, list[int]]:
    world, rank = World(2), dist.get_rank()
    uninterrupted = Job(world=world, rank=rank)
    losses = uninterrupted.train(UNTIL)
    job = Job(seed=9, world=world, rank=rank)
    with dcpfs.DistributedCheckpointer(make_config(root)) as checkpointer:
        start = job.load(checkpointer)
        assert job.train(UNTIL, checkpointer) == losses[start:]
        assert_same(job.whole(), uninterrupted.whole())
        return start, checkpointer.steps()


@pytest.mark.parametrize(("mode", "dying_rank", "at"), [("disabled", 1, 2), ("async", 0, 3)])
def test_case_30_a_run_killed_in_mid_save_resumes_from_the_step_before(
    tmp_path: Path, mode: str, dying_rank: int, at: int
) -> None:
    root = str(tmp_path)
    outcomes = try_ranks(die_in_the_middle, 2, root, mode, dying_rank, at)
    assert outcomes[dying_rank].error_type == "ProcessDied", outcomes[dying_rank].traceback_text
    assert outcomes[1 - dying_rank].error_type not in (None, "TimeoutError")
    left = {path.name for path in (tmp_path / "iter_000000004").rglob("*")}
    assert "manifest.json" not in left
    assert (tmp_path / "latest_checkpoint.txt").read_text() == "iter_000000002\n"
    assert run_ranks(go_on, 2, root) == [(2, [2, 4, 6])] * 2
    assert not list((tmp_path / "iter_000000004").rglob(".writing"))


def reshard(root: str) -> int:
    """Runs of 1 to 4 of the job's ranks; each loads what others saved, into everything fresh, and trains on."""
    worlds = {size: World(size) for size in (1, 2, 3, 4)}
    loads = 0

    def checkpointer_of(world: World, name: object) -> dcpfs.DistributedCheckpointer:
        return dcpfs.DistributedCheckpointer(
            make_config(f"{root}/{name}", on_world_size_change="skip"), process_group=world.group
        )

    for source, targets in {2: (1, 3, 4), 4: (2,), 3: (4,), 1: (2,)}.items():
        saver = worlds[source]
        saved: list[object] = [None]
        if saver.is_member:
            job = Job(seed=source, world=saver, rank=dist.get_rank())
            with checkpointer_of(saver, source) as checkpointer:
                job.train(2, checkpointer)
            saved = [job.whole(shared=True)]
        dist.broadcast_object_list(saved, src=0)
        expected = saved[0]
        assert isinstance(expected, dict)
        for size in targets:
            world = worlds[size]
            if world.is_member:
                other = Job(seed=99, world=world, rank=dist.get_rank())
                with checkpointer_of(world, source) as checkpointer:
                    assert other.load(checkpointer) == 2
                    assert_same(other.whole(shared=True), expected)
                    assert other.loader.position == 0
                    other.train(3)
                loads += 1
            dist.barrier()
    return loads


def test_cases_11_91_a_run_resumes_on_any_number_of_ranks(tmp_path: Path) -> None:
    assert run_ranks(reshard, 4, str(tmp_path)) == [6, 5, 3, 2]


def resize_data(root: str, action: Callable[..., object] | str | None) -> object:
    rank = dist.get_rank()
    world = World(1)
    job = Job(rank=rank)
    with dcpfs.DistributedCheckpointer(make_config(root)) as checkpointer:
        job.loader.position = 10 + rank
        job.save(checkpointer, 1)
    if not world.is_member:
        return None
    settings = {"on_world_size_change": action} if isinstance(action, str) else {}
    hook = action if callable(action) else None
    before = Job(seed=3, rank=7)
    with dcpfs.DistributedCheckpointer(
        make_config(root, **settings), process_group=world.group, reshard_dataloader=hook
    ) as checkpointer:
        try:
            before.load(checkpointer)
        except dcpfs.CheckpointError as error:
            return str(error)
    return before.loader.position


def add_positions(states: dict[int, dict[str, int]], resize: object) -> dict[str, int]:
    assert "saved_world_size=2" in repr(resize)
    return {"position": sum(state["position"] for state in states.values()), "rank": 0}


def test_case_11_positions_of_another_number_of_ranks_are_a_decision(tmp_path: Path) -> None:
    said = run_ranks(resize_data, 2, str(tmp_path / "error"), None)[0]
    assert isinstance(said, str)
    assert "2 ranks saved it and 1 load it" in said
    assert run_ranks(resize_data, 2, str(tmp_path / "hook"), add_positions)[0] == 21
