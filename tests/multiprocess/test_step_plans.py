"""Plans of a step on real ranks: exchanged once, remembered, dropped; read by torch alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dcpfs.checkpointer.choices import OnExisting
from dcpfs.checkpointer.save_context import SaveContext
from dcpfs.checkpointer.save_step import save_step
from dcpfs.checkpointer.step_plan import plan_step
from dcpfs.errors import ReplicaMismatchError
from dcpfs.ranks import Ranks
from dcpfs.storage.location import Location
from tests.multiprocess.gloo import run_ranks

ROWS = 7
"""Not a multiple of the ranks: the last has fewer, or none."""


def whole_state(scale: float) -> dict[str, torch.Tensor]:
    """What the ranks hold together."""
    weights = {f"layers.{n}.weight": torch.arange(ROWS * 3.0).view(ROWS, 3) * scale + n for n in range(3)}
    return {**weights, "bias": torch.arange(float(ROWS)) * scale, "scale": torch.tensor(scale)}


def states_of_rank(scale: float, **trainer: object) -> dict[str, dict[str, object]]:
    """The part of this rank: rows of weights on a mesh, and replicas of both kinds."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    whole = whole_state(scale)
    model: dict[str, object] = {}
    for fqn, value in whole.items():
        placements = [Shard(0)] if fqn.startswith("layers") else [Replicate()]
        model[fqn] = value if fqn == "scale" else distribute_tensor(value, mesh, placements)
    optim: dict[str, object] = {"param_groups.layers.0.lr": scale, "param_groups.layers.0.betas": (0.9, 0.999)}
    rng = {"rng": {f"rank_{rank}": torch.tensor([rank])}}
    return {"model": model, "optim": optim, "trainer": {"iteration": 5, **rng, **trainer}}


def save_twice_and_read(directory: str) -> tuple[list[bool], list[bool]]:
    context = SaveContext(Location(directory), Ranks.current())
    planned = []
    for iteration, scale in ((1, 1.0), (2, 2.0)):
        step = plan_step(iteration, states_of_rank(scale), world_size=dist.get_world_size())
        planned.append(save_step(step, context).planned)
    equal = []
    for iteration, scale in ((1, 1.0), (2, 2.0)):
        template = states_of_rank(0.0)["model"]
        load(template, checkpoint_id=f"{directory}/iter_{iteration:09}/model")
        for fqn, value in template.items():
            full = value.full_tensor() if isinstance(value, DTensor) else value
            equal.append(bool(torch.equal(full, whole_state(scale)[fqn])))  # type: ignore[arg-type]  # tensors all
    return planned, equal


@pytest.mark.parametrize("world_size", [2, 4])
def test_case_74_plans_are_exchanged_once_and_torch_reads_both_steps(tmp_path: Path, world_size: int) -> None:
    for planned, equal in run_ranks(save_twice_and_read, world_size, str(tmp_path)):
        assert planned == [True, False]
        assert all(equal)
    manifest = json.loads((tmp_path / "iter_000000002" / "manifest.json").read_text())
    files = [name for name in manifest["files"] if name.startswith("optim/__")]
    assert len(files) == 1, "case 71: small replicas lie in one file"
    assert sum(name.startswith("trainer/__") for name in manifest["files"]) == world_size, "each rank's own state"


def save_after_changes(directory: str) -> list[object]:
    context = SaveContext(Location(directory), Ranks.current(), on_existing=OnExisting.ERROR)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    seen: list[object] = []

    def attempt(iteration: int, states: dict[str, dict[str, object]]) -> None:
        try:
            seen.append(save_step(plan_step(iteration, states, world_size=world_size), context).planned)
        except ReplicaMismatchError as error:
            seen.append("'draws' under the key 'trainer' differ" in str(error))

    attempt(1, states_of_rank(1.0, draws=7))
    attempt(2, states_of_rank(1.0, draws=7 + rank))  # plans fit, values don't
    attempt(3, states_of_rank(1.0, draws=8))  # nothing is remembered after a failure
    attempt(4, states_of_rank(1.0, draws=9))
    changed = states_of_rank(1.0, draws=9)
    changed["trainer"][f"of rank {rank}"] = torch.ones(rank + 1)
    if rank:
        changed["model"]["only here"] = torch.ones(2)
    attempt(5, changed)  # on one rank the structure has changed
    attempt(6, changed)
    return seen


def test_case_8_and_74_differing_values_and_other_structures_on_cached_plans(tmp_path: Path) -> None:
    for seen in run_ranks(save_after_changes, 2, str(tmp_path)):
        assert seen == [True, True, True, False, True, False]
    assert sorted(path.name for path in tmp_path.glob("iter_*/manifest.json")) == ["manifest.json"] * 5
    assert not (tmp_path / "iter_000000002" / "manifest.json").exists()
