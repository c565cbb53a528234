"""A training script for torchrun: ``python -m torch.distributed.run … -m tests.multiprocess.elastic_job DIRECTORY``.

It trains to the last iteration, and saves every second one in the background, with the writer of `background_job`. What
each attempt begins with is written to ``DIRECTORY/seen-<attempt>-<rank>.json``.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from dcpfs.checkpointer.process_saver import ProcessSaver
from tests.multiprocess import background_job as job

__all__ = ["EVERY", "LAST", "Weights", "name_of_seen"]

LAST = 6
EVERY = 2
_TIMEOUT = timedelta(seconds=300)


class Weights:
    """What is trained: every iteration depends on all before it, and on this rank's draws."""

    def __init__(self) -> None:
        self.weight = torch.zeros(64, 16, dtype=torch.float64)
        self.iteration = 0

    def step(self, iteration: int) -> None:
        """Train."""
        self.weight.mul_(0.5).add_(iteration)
        self.iteration = iteration

    def state_dict(self) -> dict[str, object]:
        return {"weight": self.weight, "iteration": self.iteration}

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        assert state_dict["weight"] is self.weight
        iteration = state_dict["iteration"]
        assert isinstance(iteration, int)
        self.iteration = iteration


def name_of_seen(attempt: int, rank: int) -> str:
    """Where a rank writes what it begins with."""
    return f"seen-{attempt}-{rank}.json"


def main(directory: Path) -> None:
    """Train, in this attempt."""
    attempt, rank, world_size = (int(os.environ[name]) for name in ("TORCHELASTIC_RESTART_COUNT", "RANK", "WORLD_SIZE"))
    # The agent's store outlives the attempts, with the addresses that each has left in it.
    agent = dist.TCPStore(  # type: ignore[attr-defined]  # torch does not say that it exports it
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=_TIMEOUT
    )
    store = dist.PrefixStore(f"attempt_{attempt}", agent)  # type: ignore[attr-defined]  # likewise
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=_TIMEOUT)
    weights, position = Weights(), {"next": 0}
    with job.Checkpointer(job.config(directory / "run", "async_with_pinned_mem")) as checkpointer:
        saver = checkpointer._saver
        assert isinstance(saver, ProcessSaver)
        start = checkpointer.load_state({"model": weights, "dataloader": position})
        seen = {
            "start": start,
            "position": position["next"],
            "weight": weights.weight[0, 0].item(),
            "trainer": os.getpid(),
            "child": saver.pid,
        }
        (directory / name_of_seen(attempt, rank)).write_text(json.dumps(seen))
        for iteration in range(start + 1, LAST + 1):
            checkpointer.maybe_wait_for_staging()
            weights.step(iteration)
            position["next"] += rank + 1
            if iteration % EVERY == 0:
                checkpointer.save_state(iteration, {"model": weights, "dataloader": position})
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
