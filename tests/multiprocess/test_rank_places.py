"""What belongs to one rank: given by some alone, shared by several, or found under another sharing of the data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcpfs
from dcpfs.storage.location import Location
from dcpfs.storage.opening import open_store
from tests.multiprocess.gloo import run_ranks
from tests.multiprocess.training_job import attempt


def config(save_dir: str, **settings: object) -> dcpfs.CheckpointConfig:
    fixed = {"save_dir": save_dir, "timeout_seconds": 200, "rng": "none"}
    return dcpfs.CheckpointConfig.model_validate({**fixed, **settings})


def rate_on_the_last_rank(root: str) -> list[int]:
    rank = dist.get_rank()
    with dcpfs.DistributedCheckpointer(config(root, keep_best=1, best_mode="min")) as checkpointer:
        for iteration, loss in enumerate([3.0, 1.0, 2.0, 4.0], start=1):
            state = {"model": {"w": torch.full((3,), float(iteration))}}
            checkpointer.save_state(iteration, state, metric=loss if rank == 1 else None)
        dist.barrier()  # retention runs on one rank, beside what the others do next
        return checkpointer.steps()


def test_case_38_a_metric_that_one_rank_alone_knows_counts(tmp_path: Path) -> None:
    """The last stage of a pipeline computes the loss."""
    assert run_ranks(rate_on_the_last_rank, 2, str(tmp_path)) == [[2, 4]] * 2
    manifest = json.loads((tmp_path / "iter_000000002" / "manifest.json").read_text())
    assert manifest["metric"] == 1.0


def save_without_the_leader(root: str) -> tuple[tuple[str, str], list[int], list[int], object]:
    rank = dist.get_rank()
    with dcpfs.DistributedCheckpointer(config(root), data_rank=0) as checkpointer:
        model = {"w": torch.ones(3)}

        def save(iteration: int, passes: tuple[int, ...]) -> None:
            loader = {"dataloader": {"at": 7}} if rank in passes else {}
            checkpointer.save_state(iteration, {"model": model, **loader})

        refused = attempt(lambda: save(1, (1,)))
        before = checkpointer.steps()
        dist.barrier()
        save(2, (0,))
        position: dict[str, object] = {}
        checkpointer.load_state({"model": model, "dataloader": position})
        return refused, before, checkpointer.steps(), position["at"]


def test_case_10_a_position_that_another_rank_was_to_save_is_not_left_out(tmp_path: Path) -> None:
    for refused, before, after, position in run_ranks(save_without_the_leader, 2, str(tmp_path)):
        assert "'dataloader' of rank 1: rank 0, the lowest with the same part of the data" in refused[1]
        assert (before, after, position) == ([], [2], 7)


def load_under_another_sharing(root: str) -> dict[str, tuple[object, str]]:
    """Four ranks with two parts of the data, then with four, then with two again."""
    rank = dist.get_rank()

    def save(run: str, position: int, data_rank: int | None) -> None:
        with dcpfs.DistributedCheckpointer(config(f"{root}/{run}"), data_rank=data_rank) as checkpointer:
            checkpointer.save_state(1, {"dataloader": {"at": position}})

    def load(run: str, data_rank: int | None = None, policy: str = "error", **more: Any) -> tuple[object, str]:
        position: dict[str, object] = {"at": -1}
        settings = config(f"{root}/{run}", on_world_size_change=policy)
        with dcpfs.DistributedCheckpointer(settings, data_rank=data_rank, **more) as checkpointer:
            text = attempt(lambda: checkpointer.load_state({"dataloader": position}))[1]
        return position["at"], text

    save("pairs", 100 + rank // 2, rank // 2)
    save("own", 100 + rank, None)
    save("alike", 100 + rank // 2, None)
    return {
        "as saved": load("pairs", rank // 2),
        "apart": load("pairs"),
        "apart by name": load("pairs", rank),
        "together": load("own", rank // 2),
        "together, alike": load("alike", rank // 2),
        "own": load("own"),
        "own by name": load("own", rank),
        "skip": load("pairs", policy="skip"),
        "hook": load("pairs", reshard_dataloader=lambda states, resize: {"at": sorted(states)[resize.rank]}),
    }


def test_cases_10_11_positions_under_another_sharing_of_the_data_are_refused(tmp_path: Path) -> None:
    found = run_ranks(load_under_another_sharing, 4, str(tmp_path))
    for rank, each in enumerate(found):
        for name in ("as saved", "together, alike"):
            assert each[name] == (100 + rank // 2, ""), name
        for name in ("own", "own by name"):
            assert each[name] == (100 + rank, ""), name
        for name in ("apart", "apart by name", "together"):
            position, text = each[name]
            assert position == -1, name
            assert "part of the data" in text, (name, text)
            assert "data_rank" in text
        assert each["skip"] == (-1, "")
        assert each["hook"] == (rank, "")


def load_on_another_mesh(root: str) -> dict[str, tuple[object, bool, str]]:
    rank = dist.get_rank()
    whole = torch.arange(32.0).view(8, 4)
    meshes = {
        "dp": init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)),
        "plain": init_device_mesh("cpu", (4,)),
        "dp × tp": init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")),
    }

    def state(mesh: str, tensor: torch.Tensor) -> dict[str, object]:
        dims = [Shard(0)] if meshes[mesh].ndim == 1 else [Shard(0), Shard(1)]
        return {"w": distribute_tensor(tensor, meshes[mesh], dims)}

    with dcpfs.DistributedCheckpointer(config(root)) as checkpointer:
        checkpointer.save_state(1, {"model": state("dp", whole), "dataloader": {"at": rank}})

    def load(mesh: str, data_rank: int | None = None, *, passes: bool = True) -> tuple[object, bool, str]:
        position: dict[str, object] = {"at": -1}
        model = state(mesh, torch.zeros(8, 4))
        parts = {"model": model, **({"dataloader": position} if passes else {})}
        with dcpfs.DistributedCheckpointer(config(root), data_rank=data_rank) as checkpointer:
            text = attempt(lambda: checkpointer.load_state(parts))[1]
        tensor: Any = model["w"]
        return position["at"], bool(torch.equal(tensor.full_tensor(), whole)), text

    return {
        "same": load("dp"),
        "no names": load("plain"),
        "other": load("dp × tp"),
        "other, named": load("dp × tp", rank),
        "other, not passed": load("dp × tp", passes=False),
    }


def test_case_10_positions_of_another_mesh_are_refused_until_somebody_says_whose_they_are(tmp_path: Path) -> None:
    for rank, each in enumerate(run_ranks(load_on_another_mesh, 4, str(tmp_path))):
        assert each["same"] == each["no names"] == each["other, named"] == (rank, True, "")
        position, equal, text = each["other"]
        assert (position, equal) == (-1, False)
        assert "a mesh of dp 4, and lies on one of dp 2 × tp 2" in text
        assert "data_rank" in text
        assert each["other, not passed"] == (-1, True, "")


def save_to_memories(root: str, mode: str) -> tuple[tuple[str, str], tuple[str, str], list[int]]:
    rank = dist.get_rank()
    with dcpfs.DistributedCheckpointer(config("memory://a-place-for-each/run", async_mode=mode)) as checkpointer:

        def save(iteration: int) -> None:
            checkpointer.save_state(iteration, {"model": {f"w{rank}": torch.ones(3)}})
            checkpointer.wait()

        first, second = attempt(lambda: save(1)), attempt(lambda: save(2))
        store = open_store(Location("memory://a-place-for-each/run"))
        left = {info.path.rpartition("/")[2] for info in store.list("")}
        store.close()
        assert not left, left
        return first, second, checkpointer.steps()


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_case_100_a_place_that_ranks_do_not_share_is_found_at_the_first_save(tmp_path: Path, mode: str) -> None:
    """As the local disk of each machine: all ranks write, and nothing that is committed can be loaded."""
    for first, second, steps in run_ranks(save_to_memories, 2, str(tmp_path), mode):
        assert "rank 1 does not find there what rank 0 has just put" in first[1]
        assert "not one place for all ranks" in second[1]
        assert steps == []
