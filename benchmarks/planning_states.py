"""A training state as planners see it: keys, shapes, shardings and plain values; no byte of it is ever touched.

Problem: a job of 1,024 ranks does not fit on a desk, but what one of its ranks plans depends on its mesh alone.

Way taken: a process group that talks to nobody (torch's own, for its tests) says that it is any rank of any world, and
real DTensors are made on its mesh. Local tensors are views of one block that is never written, so that they cost no
memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

__all__ = ["SHAPES", "TrainingState", "as_rank", "training_state"]

TrainingState = dict[str, dict[str, object]]
"""Key to flat state."""

SHAPES = ((4096, 4096), (1024, 4096), (4096, 1024), (14336, 4096), (4096, 14336), (4096,), (8192, 64), (32768, 4096))
"""Of parameters, in turn, as a Llama has them."""

_MOMENTS = ("exp_avg", "exp_avg_sq")


@contextlib.contextmanager
def as_rank(rank: int, world_size: int) -> Generator[DeviceMesh, None, None]:
    """Within the block this process is a rank of a world without a network. Not where there is a group already."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield init_device_mesh("cpu", (world_size,))
    finally:
        dist.destroy_process_group()


def training_state(mesh: DeviceMesh, tensors: int, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> TrainingState:
    """Model, optimizer, scheduler and trainer of one rank.

    Args:
        mesh: Of one dimension; parameters are cut into rows over it.
        tensors: Sharded tensors of all keys: each parameter and its two moments. Beside them each parameter has a
            step and a learning rate, which are replicas.
        shapes: Of the parameters, in turn.
    """
    world_size, rank = mesh.size(), mesh.get_local_rank()
    rows = {shape: _rows(shape[0], rank, world_size) for shape in shapes}
    most = max([rows[shape] * _width(shape) for shape in shapes])
    block = torch.empty(most)

    def sharded(shape: tuple[int, ...]) -> DTensor:
        local = block[: rows[shape] * _width(shape)].view(rows[shape], *shape[1:])
        stride = (_width(shape), 1)[: len(shape)] if len(shape) == 2 else (1,)
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride)

    names = [f"model.layers.{n // 8}.block.{n % 8}.weight" for n in range(max(1, tensors // 3))]
    model: dict[str, object] = {}
    optim: dict[str, object] = {}
    for number, name in enumerate(names):
        shape = shapes[number % len(shapes)]
        model[name] = sharded(shape)
        for moment in _MOMENTS:
            optim[f"state.{name}.{moment}"] = sharded(shape)
        optim[f"state.{name}.step"] = torch.tensor(100.0)
        optim[f"param_groups.{name}.lr"] = 3e-4
    scheduler: dict[str, object] = {"last_epoch": 100, "base_lrs": [3e-4], "_last_lr": [3e-4]}
    trainer: dict[str, object] = {"iteration": 100, f"rng.rank_{rank}": b"\0" * 5056}
    return {"model": model, "optim": optim, "scheduler": scheduler, "trainer": trainer}


def _rows(rows: int, rank: int, world_size: int) -> int:
    each = -(-rows // world_size)
    return max(0, min(each, rows - rank * each))


def _width(shape: tuple[int, ...]) -> int:
    return shape[1] if len(shape) == 2 else 1
