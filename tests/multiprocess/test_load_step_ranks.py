"""Loading steps on several ranks: other worlds, stages of a pipeline, dataloaders, and failures of one rank."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dcpfs.checkpointer.choices import WorldSizePolicy
from dcpfs.checkpointer.load_step import load_step
from dcpfs.checkpointer.manifest import Manifest
from dcpfs.checkpointer.model_state import ModelWrapper
from dcpfs.checkpointer.optimizer_state import OptimizersWrapper
from dcpfs.checkpointer.rename_planner import RenameLoadPlanner
from dcpfs.checkpointer.resume import ResumeRules, ResumeSearch, load_with_fallback
from dcpfs.config import ReplicaReads
from dcpfs.dcp.reader import FsspecStorageReader
from dcpfs.errors import (
    CheckpointError,
    CorruptCheckpointError,
    DcpfsError,
    KeyMismatchError,
    RankError,
)
from dcpfs.ranks import Ranks
from dcpfs.storage.location import Location
from tests.multiprocess.gloo import run_ranks
from tests.peers.step_making import flip_byte, make_step, read_manifest, same

KEYS = ("model", "optim", "scheduler", "trainer", "dataloader")


# World that saved, world that loads, whether torch saved it.
_LOADS = [(1, 1, False), (1, 4, False), (2, 3, False), (2, 4, False), (3, 2, False), (3, 3, False), (4, 1, False)]
_LOADS += [(4, 4, False), (3, 2, True), (3, 4, True)]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 3, bias=False)  # 3 rows: some of 4 ranks have none
        self.norm = nn.LayerNorm(3)
        self.register_buffer("steps", torch.zeros(2, dtype=torch.int64))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.norm(self.down(self.up(values)))
        return output


class World:
    """A sub-world: its group and mesh, made by all ranks, used by its members."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.group = dist.new_group(list(range(size)))
        self.mesh = DeviceMesh("cpu", torch.arange(size))
        self.is_member = dist.get_rank() < size

    @property
    def ranks(self) -> Ranks:
        return Ranks.current(self.group)


class Job:
    """A model under FSDP2 with its optimizer."""

    def __init__(self, world: World, seed: int) -> None:
        torch.manual_seed(seed)
        self.net = Net()
        fully_shard(self.net.up, mesh=world.mesh)
        fully_shard(self.net, mesh=world.mesh)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.1, amsgrad=True)
        self.position = {"at": -1}

    def train(self) -> None:
        torch.manual_seed(5)
        for _ in range(2):
            self.net(torch.randn(4, 6)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        assert isinstance(self.net.steps, torch.Tensor)
        self.net.steps += 2

    def parts(self) -> dict[str, object]:
        return {"model": ModelWrapper(self.net), "optim": OptimizersWrapper(self.net, self.optimizer)}

    def states(self) -> dict[str, dict[str, object]]:
        return {
            "model": ModelWrapper(self.net).state_dict(),
            "optim": OptimizersWrapper(self.net, self.optimizer).state_dict(),
        }

    def whole(self) -> dict[str, object]:
        """Everything, gathered. Collective."""
        found: dict[str, object] = {}
        for key, state in self.states().items():
            for name, value in state.items():
                if isinstance(value, DTensor):
                    value = value.full_tensor()  # noqa: PLW2901 - the same value, whole
                found[f"{key}/{name}"] = value.detach().clone() if isinstance(value, torch.Tensor) else value
        return found


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    box = [tempfile.mkdtemp(prefix="load-step-")] if dist.get_rank() == 0 else [""]
    made = box[0]
    dist.broadcast_object_list(box, src=0)
    try:
        yield Path(box[0])
    finally:
        dist.barrier()
        if made:
            shutil.rmtree(made)


def manifest_of(step: Location, ranks: Ranks) -> Manifest | None:
    return read_manifest(step) if ranks.is_coordinator else None


def reshard() -> int:
    worlds = [World(size) for size in (1, 2, 3, 4)]
    loads = 0
    with folder() as root:
        saved: dict[int, dict[str, object]] = {}
        for world in worlds:
            if not world.is_member:
                continue
            job = Job(world, seed=world.size)
            job.train()
            saved[world.size] = job.whole()
            make_step(root, world.size, job.states(), ranks=world.ranks, rank_state={"at": dist.get_rank()})
            for key, state in job.states().items() if world.size == 3 else ():
                writer = FileSystemWriter(root / f"foreign_{world.size}" / key)
                dcp_save(state, storage_writer=writer, process_group=world.group)
        boxes: list[dict[int, dict[str, object]]] = [saved]
        dist.broadcast_object_list(boxes, src=0)
        for source, size, foreign in _LOADS:
            world = worlds[size - 1]
            if world.is_member:
                step = Location(str(root / (f"foreign_{source}" if foreign else f"iter_00000000{source}")))
                job = Job(world, seed=99)
                parts = job.parts()
                if source == world.size and not foreign:
                    parts["dataloader"] = job.position
                load_step(
                    parts,
                    step,
                    keys=KEYS,
                    manifest=None if foreign else manifest_of(step, world.ranks),
                    ranks=world.ranks,
                    replicas=ReplicaReads.BROADCAST if source % 2 else ReplicaReads.EACH,
                )
                same(job.whole(), boxes[0][source])
                assert job.position == {"at": dist.get_rank() if "dataloader" in parts else -1}
                loads += 1
    return loads


def test_cases_6_91_every_world_loads_every_other_with_its_optimizer() -> None:
    counts = [sum(size > rank for _, size, _ in _LOADS) for rank in range(4)]
    assert run_ranks(reshard, 4) == counts


def pipeline() -> tuple[list[str], list[str]]:
    """Each rank has a stage; the dataloader is on rank 1 alone."""
    ranks = Ranks.current()
    with folder() as root:
        torch.manual_seed(ranks.rank)
        stage = nn.Linear(2, 2)
        model = nn.ModuleDict({f"layer{ranks.rank}": stage, "shared": nn.Identity()})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        stage(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        states: dict[str, dict[str, object]] = {"model": ModelWrapper(model).state_dict()}
        states["optim"] = OptimizersWrapper(model, optimizer).state_dict()
        step = make_step(root, 1, states, ranks=ranks, rank_state={"at": ranks.rank})
        fresh = nn.ModuleDict({f"layer{ranks.rank}": nn.Linear(2, 2)})
        other = torch.optim.SGD(fresh.parameters(), lr=0.3, momentum=0.9)
        parts: dict[str, object] = {"model": ModelWrapper(fresh), "optim": OptimizersWrapper(fresh, other)}
        position: dict[str, int] = {}
        if ranks.rank == 1:
            parts["dataloader"] = position
        report = load_step(parts, step, keys=KEYS, manifest=manifest_of(step, ranks), ranks=ranks)
        same(dict(fresh.state_dict()), dict(states["model"]))
        same(OptimizersWrapper(fresh, other).state_dict(), states["optim"])
        assert position == ({"at": 1} if ranks.rank == 1 else {})
        assert report.states["dataloader"] == {"at": ranks.rank}
        # A stage that nobody has is an error on all ranks, in the words of what the checkpoint has.
        lacking: list[str] = []
        if ranks.rank == 0:
            del parts["model"]
        try:
            load_step(parts, step, keys=["model"], manifest=manifest_of(step, ranks), ranks=ranks)
        except KeyMismatchError as error:
            lacking = list(error.unexpected)
        return list(report.keys["model"].loaded), lacking


def test_stages_of_a_pipeline_each_load_their_own() -> None:
    found = run_ranks(pipeline, 2)
    assert found[0] == (["layer0.weight", "layer0.bias"], ["model/layer0.weight", "model/layer0.bias"])
    assert found[1] == (["layer1.weight", "layer1.bias"], ["model/layer0.weight", "model/layer0.bias"])


class Stubborn:
    """A part that fails on one rank, in one of its methods."""

    def __init__(self, where: str, error: type[BaseException]) -> None:
        self._where = where
        self._error = error

    def state_dict(self) -> dict[str, object]:
        if self._where == "ask":
            raise self._error("asked in vain")
        return {"iteration": 0}

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        if self._where == "give":
            raise self._error(f"given in vain: {len(state_dict)}")


def outcome(call: Callable[[], object]) -> tuple[str, str, tuple[str, ...]]:
    try:
        call()
    except DcpfsError as error:
        return type(error).__name__, error.message, error.written_keys
    except BaseException as error:
        return type(error).__name__, str(error), ()
    return "", "", ()


def failures() -> dict[str, tuple[str, str, tuple[str, ...]]]:
    ranks = Ranks.current()
    world = World(2)
    found = {}
    with folder() as root:
        job = Job(world, seed=1)
        job.train()
        step = make_step(
            root, 1, {**job.states(), "trainer": {"iteration": 1}}, ranks=ranks, rank_state={"at": ranks.rank}
        )

        def load(keys: tuple[str, ...] = KEYS, **parts: object) -> Callable[[], object]:
            mine = {**job.parts(), "trainer": {"iteration": 0}, **parts}
            return lambda: load_step(mine, step, keys=keys, manifest=manifest_of(step, ranks), ranks=ranks)

        second = ranks.rank == 1
        found["no part"] = outcome(load(model=3 if second else None))
        for where, error in itertools.product(("ask", "give"), (OSError, KeyboardInterrupt)):
            trainer: object = Stubborn(where, error) if second else {"iteration": 0}
            found[f"{where} {error.__name__}"] = outcome(load(trainer=trainer))
        found["missing"] = outcome(load(trainer={"iteration": 0, "more": 1} if second else {"iteration": 0}))
        found["key"] = outcome(load((*KEYS, "ema"), **({"ema": {"x": 1}} if second else {})))
        dist.barrier()
        if ranks.rank == 0:
            flip_byte(Path(step.path) / "dataloader/rank_1.pkl")
        dist.barrier()
        found["rank file"] = outcome(load())
        dist.barrier()
        if ranks.rank == 0:
            flip_byte(Path(step.path) / "dataloader/rank_1.pkl")
            damage(step, "model", job.states()["model"]["up.weight"])
        dist.barrier()
        found["shard"] = outcome(load())
    return found


def damage(step: Location, key: str, tensor: object) -> None:
    """Flip a bit in this rank's shard of a tensor."""
    assert isinstance(tensor, DTensor)
    data = tensor.to_local().detach().contiguous().numpy().tobytes()
    for path in sorted((Path(step.path) / key).glob("*.distcp")):
        at = path.read_bytes().find(data)
        if at >= 0:
            flip_byte(path, at + 3)
            return
    raise AssertionError("the shard is in no file")


def test_cases_49_101_102_a_failure_of_one_rank_is_that_of_all_and_says_what_was_changed() -> None:
    first, second = run_ranks(failures, 2)
    changed = ("model", "optim", "trainer")
    assert [found["no part"][0] for found in (first, second)] == ["ConfigError"] * 2
    for name in ("OSError", "KeyboardInterrupt"):
        assert second[f"ask {name}"][:2] == (name, "asked in vain")
        assert first[f"ask {name}"][0] == RankError.__name__
        assert f"rank 1 failed: {name}: asked in vain" in first[f"ask {name}"][1]
    assert [found["give OSError"][0] for found in (first, second)] == [CheckpointError.__name__] * 2
    assert all("given in vain: 1" in found["give OSError"][1] for found in (first, second))
    assert [found["give OSError"][2] for found in (first, second)] == [changed] * 2
    assert second["give KeyboardInterrupt"][0] == "KeyboardInterrupt"
    assert first["give KeyboardInterrupt"][2] == changed
    for name, word in {"missing": "trainer/more", "key": "'ema'"}.items():
        assert [found[name][0] for found in (first, second)] == [KeyMismatchError.__name__] * 2
        assert all(word in found[name][1] and not found[name][2] for found in (first, second))
    assert [found["rank file"][0] for found in (first, second)] == [CorruptCheckpointError.__name__] * 2
    assert first["rank file"][1] == second["rank file"][1]
    assert first["rank file"][2] == second["rank file"][2] == ()
    assert [found["shard"][0] for found in (first, second)] == [CorruptCheckpointError.__name__] * 2
    assert "model" in first["shard"][2]
    assert first["shard"][2] == second["shard"][2]


def fall_back(verify: bool) -> tuple[int, dict[str, int]]:
    """One rank's shard of the newest step is damaged, another's file of the second newest is gone."""
    ranks = Ranks.current()
    world = World(2)
    with folder() as root:
        wholes = {}
        for iteration in (1, 2, 3):
            job = Job(world, seed=iteration)
            job.train()
            wholes[iteration] = job.whole()
            step = make_step(root, iteration, job.states(), ranks=ranks, rank_state={"at": iteration})
            dist.barrier()
            if iteration == 3 and ranks.rank == 1:
                damage(step, "optim", job.states()["optim"]["state.up.weight.exp_avg"])
            if iteration == 2 and ranks.rank == 1:
                damage(step, "model", job.states()["model"]["up.weight"])
            dist.barrier()
        fresh = Job(world, seed=9)
        with ResumeSearch(Location(str(root)), None, ResumeRules(verify=verify), ranks=ranks) as search:
            parts = {**fresh.parts(), "dataloader": fresh.position}
            plan, _ = load_with_fallback(parts, search, search.find(), on_world_size_change=WorldSizePolicy.ERROR)
        same(fresh.whole(), wholes[1])
        return plan.iteration, fresh.position


@pytest.mark.parametrize("verify", [False, True])
def test_case_113_all_ranks_fall_back_together(*, verify: bool) -> None:
    assert run_ranks(fall_back, 2, verify) == [(1, {"at": 1})] * 2


def read_slices(replicas: ReplicaReads) -> tuple[int, int]:
    """A tensor that one rank saved whole, loaded in two halves; and one that both need whole."""
    ranks = Ranks.current()
    mesh = DeviceMesh("cpu", torch.arange(2))
    with folder() as root:
        state: dict[str, object] = {"w": torch.arange(1 << 20).float(), "shared": torch.ones(1 << 18)}
        step = make_step(root, 1, {"model": state}, ranks=ranks)
        half = distribute_tensor(torch.zeros(1 << 20), mesh, [Shard(0)])
        shared = torch.zeros(1 << 18)
        report = load_step(
            {"model": {"w": half, "shared": shared}},
            step,
            keys=["model"],
            manifest=manifest_of(step, ranks),
            ranks=ranks,
            replicas=replicas,
        )
        assert torch.equal(half.to_local(), torch.arange(1 << 20).float().chunk(2)[ranks.rank])
        assert shared.sum() == 1 << 18
        return report.read_bytes, report.moved_bytes


def test_cases_64_72_each_rank_reads_its_slice_and_replicas_once() -> None:
    half, shared = 2 << 20, 1 << 20
    each = run_ranks(read_slices, 2, ReplicaReads.EACH)
    assert [needed for needed, _ in each] == [half + shared] * 2
    assert all(moved <= needed + (128 << 10) for needed, moved in each)
    once = run_ranks(read_slices, 2, ReplicaReads.BROADCAST)
    assert sum(needed for needed, _ in once) == 2 * half + shared


def rename_shards() -> tuple[list[float], dict[str, str]]:
    mesh = DeviceMesh("cpu", torch.arange(2))
    with folder() as root:
        dcp_save({"old.w": torch.arange(6.0)}, storage_writer=FileSystemWriter(root))
        state = {"new.w": distribute_tensor(torch.zeros(6), mesh, [Shard(0)]), "new.head": torch.ones(2)}
        planner = RenameLoadPlanner({"^old": "new"}, skip=["head"])
        dcp_load(state, storage_reader=FsspecStorageReader(root), planner=planner)
        local = state["new.w"]
        assert isinstance(local, DTensor)
        return local.to_local().tolist(), planner.renamed


def test_the_renaming_planner_fills_shards() -> None:
    renamed = {"new.w": "old.w"}
    assert run_ranks(rename_shards, 2) == [([0.0, 1.0, 2.0], renamed), ([3.0, 4.0, 5.0], renamed)]
