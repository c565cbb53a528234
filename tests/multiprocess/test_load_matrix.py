"""Every (save world, load world) of 1 to 4 ranks, for every kind of sharding, in real processes.

Four processes start once per kind of sharding; smaller worlds are sub-groups of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import tempfile
from collections.abc import Iterator
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
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement

import dcpfs
from tests.multiprocess.gloo import run_ranks

_WORLDS = (1, 2, 3, 4)
_SHAPES = {"even": (12, 4), "uneven": (6, 3), "odd": (13, 5), "thin": (1, 7), "short": (3,), "wide": (2, 9)}


def _reference(key: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Different values for every key and element."""
    base = int.from_bytes(hashlib.sha256(key.encode()).digest()[:2], "little")
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float32) + base).reshape(shape)


def _local(reference: torch.Tensor, tensor: DTensor) -> torch.Tensor:
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return reference[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]


class _World:
    """A sub-world: its group and meshes, made by all ranks, used by its members."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.group = dist.new_group(list(range(size)))
        self.line = DeviceMesh("cpu", torch.arange(size))
        rows = 2 if size == 4 else 1
        self.grid = DeviceMesh("cpu", torch.arange(size).reshape(rows, -1), mesh_dim_names=("dp", "tp"))
        self.member = dist.get_rank() < size


def _placed(world: _World, kind: str) -> dict[str, torch.Tensor]:
    """DTensors of all shapes with one placement, filled with the reference."""
    state: dict[str, torch.Tensor] = {}
    for name, shape in _SHAPES.items():
        mesh, placements = _placements(world, kind, len(shape))
        state[name] = distribute_tensor(_reference(name, shape), mesh, placements)
    state["plain"] = _reference("plain", (5, 2))
    return state


def _placements(world: _World, kind: str, dims: int) -> tuple[DeviceMesh, list[Placement]]:
    if kind == "rows":
        return world.line, [Shard(0)]
    if kind == "columns":
        return world.line, [Shard(dims - 1)]
    if kind == "hybrid":
        return world.grid, [Replicate(), Shard(0)]
    if kind == "blocks":
        return world.grid, [Shard(0), Shard(dims - 1)]
    return world.line, [Replicate()]


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6, bias=False)
        self.norm = nn.LayerNorm(6)
        self.register_buffer("steps", torch.zeros(3, dtype=torch.int64))


def _sharded_model(world: _World, kind: str) -> dict[str, torch.Tensor]:
    """The state of a real module under FSDP2, or under TP and FSDP2 (strided shards), filled with the reference."""
    model = _Model()
    if kind == "fsdp_tp":
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, world.grid["tp"], plan)
        fully_shard(model, mesh=world.grid["dp"])
    else:
        fully_shard(model.up, mesh=world.line)
        fully_shard(model, mesh=world.line)
    state: dict[str, torch.Tensor] = {}
    for key, value in model.state_dict().items():
        reference = _reference(key, tuple(value.shape)).to(value.dtype)
        if isinstance(value, DTensor):
            value.to_local().copy_(_local(reference, value))
        else:
            value.copy_(reference)
        state[key] = value
    return state


def _make(world: _World, kind: str) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return _sharded_model(world, kind) if kind.startswith("fsdp") else _placed(world, kind)


def _zero(state: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for value in state.values():
            (value.to_local() if isinstance(value, DTensor) else value).zero_()


def _check(state: dict[str, torch.Tensor], context: str) -> None:
    for key, value in state.items():
        reference = _reference(key, tuple(value.shape)).to(value.dtype)
        if isinstance(value, DTensor):
            assert torch.equal(value.to_local(), _local(reference, value)), (context, key)
        else:
            assert torch.equal(value, reference), (context, key)


def _check_assembled(state: dict[str, torch.Tensor]) -> None:
    """What the shards make together, by torch's own collectives, is the reference."""
    for key, value in state.items():
        if isinstance(value, DTensor):
            assert torch.equal(value.full_tensor(), _reference(key, tuple(value.shape)).to(value.dtype)), key


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    box = [tempfile.mkdtemp(prefix="matrix-")] if dist.get_rank() == 0 else [""]
    made = box[0]
    dist.broadcast_object_list(box, src=0)
    try:
        yield box[0]
    finally:
        dist.barrier()
        if made:
            shutil.rmtree(made)


def _run_matrix(kind: str, replicas: str) -> int:
    """Save in each world, load in each. Returns how many loads this rank checked."""
    loads = 0
    worlds = [_World(size) for size in _WORLDS]
    with _folder() as folder:
        for world in worlds:
            if world.member:
                state = _make(world, kind)
                _check_assembled(state)
                whole = {"model": state, "step": world.size}
                dcpfs.save(whole, f"{folder}/{world.size}", process_group=world.group)
            dist.barrier()
        for world in worlds:
            if not world.member:
                continue
            state = _make(world, kind)
            for saved in _WORLDS:
                _zero(state)
                target: dict[str, object] = {"model": state, "step": 0}
                report = dcpfs.load(target, f"{folder}/{saved}", process_group=world.group, replicas=replicas)
                assert len(report.loaded) == len(state) + 1
                assert target["step"] == saved
                _check(state, f"{kind} {saved} to {world.size}")
                loads += 1
        dist.barrier()
        for saved in _WORLDS if dist.get_rank() == 0 else ():
            read = dcpfs.read(f"{folder}/{saved}")["model"]
            assert isinstance(read, dict)
            for key, value in read.items():
                assert torch.equal(value, _reference(key, tuple(value.shape)).to(value.dtype)), (saved, key)
    return loads


@pytest.mark.parametrize("kind", ["rows", "columns", "hybrid", "blocks", "replicated", "fsdp", "fsdp_tp"])
def test_case_22_91_every_world_loads_what_every_world_saved(kind: str) -> None:
    replicas = "broadcast" if kind in ("hybrid", "replicated") else "each"
    loads = run_ranks(_run_matrix, 4, kind, replicas)
    assert loads == [16, 12, 8, 4]


def _load_torch_made(folder: str) -> None:
    """A checkpoint that torch's writer made with 4 ranks, by dcpfs.load and by dcp.load with our reader."""
    world = _World(4)
    two = _World(2)
    state = _make(world, "rows") | _prefixed(_make(world, "columns"))
    dcp_save({"model": state}, storage_writer=FileSystemWriter(folder))
    for kind in ("rows", "columns"):
        target = _make(world, kind) | _prefixed(_make(world, kind))
        _zero(target)
        dcpfs.load({"model": target}, folder)
        _check_prefixed(target)
        for planner in (None, dcpfs.LoadPlanner()):
            _zero(target)
            reader = dcpfs.FsspecStorageReader(folder)
            dcp_load({"model": target}, storage_reader=reader, planner=planner)
            _check_prefixed(target)
    if two.member:
        target = _make(two, "rows") | _prefixed(_make(two, "columns"))
        _zero(target)
        dcpfs.load({"model": target}, folder, process_group=two.group)
        _check_prefixed(target)


def _prefixed(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"c_{key}": value for key, value in state.items()}


def _check_prefixed(state: dict[str, torch.Tensor]) -> None:
    _check({key: value for key, value in state.items() if not key.startswith("c_")}, "torch")
    _check({key.removeprefix("c_"): value for key, value in state.items() if key.startswith("c_")}, "torch")


def test_torch_made_shards(tmp_path: Path) -> None:
    run_ranks(_load_torch_made, 4, str(tmp_path / "c"))
