"""One rank of the planning case with real ranks: saves a state of next to no bytes, and counts how often ranks meet.

Collectives are counted where torch starts them, so that an object collective, which is two or three of tensors, counts
as what it really is, for both contenders.
"""

from __future__ import annotations

import functools
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh

from dcpfs.checkpointer.phases import Phases
from dcpfs.checkpointer.save_context import SaveContext
from dcpfs.checkpointer.save_step import save_step
from dcpfs.checkpointer.step_plan import plan_step
from dcpfs.ranks import Ranks
from dcpfs.storage.location import Location

from .measuring import Meter
from .planning import RanksFigure
from .planning_states import TrainingState, training_state

_COLLECTIVES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "scatter",
)
_SHAPES = ((64, 4), (32, 2), (128,))


class _Counter:
    """Counts the collectives of tensors that this process starts."""

    def __init__(self) -> None:
        self.count = 0
        for name in _COLLECTIVES:
            wrapped = self._wrap(getattr(distributed_c10d, name))
            setattr(distributed_c10d, name, wrapped)
            setattr(dist, name, wrapped)

    def _wrap(self, function: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(function)
        def counted(*args: object, **kwargs: object) -> object:
            self.count += 1
            return function(*args, **kwargs)

        return counted


def main(directory: Path, rank: int, world_size: int, tensors: int) -> None:
    """Save with each contender twice, and print a figure for each save at rank 0."""
    meeting = f"file://{directory / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size)
    state = training_state(init_device_mesh("cpu", (world_size,)), tensors, _SHAPES)
    counter = _Counter()
    context = SaveContext(Location(directory / "dcpfs"), Ranks.current())
    turns: tuple[Literal["first", "later"], ...] = ("first", "later")
    for iteration, turn in enumerate(turns):
        phases = Phases(rank=rank)
        before = counter.count
        with Meter() as meter:
            save_step(plan_step(iteration, state, world_size=world_size), context, phases=phases)
        planning = sum(record.seconds for record in phases.records if record.name == "plan")
        _tell("dcpfs", turn, counter.count - before, meter, planning, rank, world_size, tensors)
    for turn in turns:
        before = counter.count
        with Meter() as meter:
            _save_with_torch(state, directory / f"torch-{turn}")
        _tell("torch", turn, counter.count - before, meter, None, rank, world_size, tensors)
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        shutil.rmtree(directory / "dcpfs")


def _save_with_torch(state: TrainingState, directory: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for key, each in state.items():
            save(each, checkpoint_id=directory / key, planner=DefaultSavePlanner(enable_plan_caching=True))


def _tell(
    contender: str,
    turn: Literal["first", "later"],
    collectives: int,
    meter: Meter,
    plan_seconds: float | None,
    rank: int,
    world_size: int,
    tensors: int,
) -> None:
    if rank == 0:
        cost = meter.cost
        figure = RanksFigure(
            contender=contender,
            ranks=world_size,
            tensors=tensors,
            save=turn,
            collectives=collectives,
            wall_seconds=cost.ended_seconds - cost.began_seconds,
            cpu_seconds=cost.cpu_seconds,
            plan_seconds=plan_seconds,
            seconds=cost.ended_seconds - cost.began_seconds,
        )
        print(figure.model_dump_json(), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
