"""A training run that is small and has everything a checkpoint must bring back.

Dropout, a scheduler, a gradient scaler, a position in the data, states of the user's own, and draws from the generators
of Python, numpy and torch, different on each rank: whatever a checkpoint forgets shows in the next loss. Under FSDP2
where there is a mesh.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import dcpfs

__all__ = ["Job", "Loader", "Scaler", "World", "assert_same", "attempt"]


class World:
    """The first ranks of a job: their group and mesh; made by all ranks, used by its members."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.group: Any = dist.new_group(list(range(size)))
        self.mesh = DeviceMesh("cpu", torch.arange(size))
        self.is_member = dist.get_rank() < size


class Net(nn.Module):
    """Rows that few numbers of ranks divide, a buffer, and a layer without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.drop = nn.Dropout(0.3)
        self.down = nn.Linear(10, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.frozen(self.down(self.drop(torch.relu(self.up(values)))))
        return output


@dataclass
class Loader:
    """A rank's own position in its data."""

    rank: int = 0
    position: int = 0

    def next(self) -> torch.Tensor:
        self.position += 1
        generator = torch.Generator().manual_seed(1000 * self.rank + self.position)
        return torch.randn(4, 6, generator=generator)

    def state_dict(self) -> dict[str, object]:
        return {"position": self.position, "rank": self.rank}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.position, self.rank = state_dict["position"], state_dict["rank"]


class Scaler:
    """Stands in for a gradient scaler: a scale that grows by counts."""

    def __init__(self) -> None:
        self.scale = 4.0
        self.good_steps = 0

    def update(self) -> None:
        self.good_steps += 1
        if self.good_steps % 2 == 0:
            self.scale *= 2.0

    def state_dict(self) -> dict[str, object]:
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.scale, self.good_steps = float(state_dict["scale"]), int(state_dict["good_steps"])


@dataclass
class Job:
    """Everything that trains on one rank.

    Attributes:
        seed: What the parameters begin with, and the generators.
        world: Shards over it; None: one process.
        rank: Where the data comes from.
    """

    seed: int = 0
    world: World | None = None
    rank: int = 0
    iteration: int = 0
    extra: dict[str, object] = field(default_factory=lambda: {"tokens": 0, "mean": torch.zeros(3)})

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.net: Any = Net()
        if self.world is not None:
            fully_shard(self.net.up, mesh=self.world.mesh)
            fully_shard(self.net, mesh=self.world.mesh)
        trained = [parameter for parameter in self.net.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, gamma=0.5)
        self.scaler = Scaler()
        self.loader = Loader(self.rank)
        for generator_seed in (random.seed, np.random.seed, torch.manual_seed):
            generator_seed(100 * self.seed + self.rank)

    def load(self, checkpointer: dcpfs.DistributedCheckpointer, **changes: object) -> int:
        parts: dict[str, Any] = {**self._parts(), **changes}
        self.iteration = checkpointer.load(**parts)
        return self.iteration

    def save(
        self, checkpointer: dcpfs.DistributedCheckpointer, iteration: int | None = None, **changes: object
    ) -> None:
        arguments: dict[str, Any] = {**self._parts(), **changes}
        checkpointer.save(iteration=self.iteration if iteration is None else iteration, **arguments)

    def train(
        self,
        until: int,
        checkpointer: dcpfs.DistributedCheckpointer | None = None,
        *,
        every: int = 2,
        after: Callable[[int], object] | None = None,
    ) -> list[float]:
        """Train up to an iteration, and save on the way. This rank's losses."""
        losses = []
        while self.iteration < until:
            self.iteration += 1
            noise = random.random() + float(np.random.random()) + float(torch.rand(()))
            loss = self.net(self.loader.next() + noise).square().mean()
            self.optimizer.zero_grad()
            (loss * self.scaler.scale).backward()
            if checkpointer is not None:
                checkpointer.maybe_wait_for_staging()
            self.optimizer.step()
            self.scheduler.step()
            self.scaler.update()
            self.net.seen += 1
            tokens = self.extra["tokens"]
            assert isinstance(tokens, int)
            self.extra["tokens"] = tokens + 24
            mean = self.extra["mean"]
            assert isinstance(mean, torch.Tensor)
            mean += self.iteration
            losses.append(loss.item())
            if checkpointer is not None and self.iteration % every == 0:
                self.save(checkpointer)
            if after is not None:
                after(self.iteration)
        return losses

    def whole(self, *, shared: bool = False) -> dict[str, object]:
        """A copy of all states, tensors gathered: ``shared`` leaves out what belongs to this rank. Collective."""
        found: dict[str, object] = {}
        states = {
            "model": dcpfs.ModelWrapper(self.net).state_dict(),
            "optim": dcpfs.OptimizersWrapper([self.net], self.optimizer).state_dict(),
            "scheduler": dcpfs.SchedulersWrapper(self.scheduler).state_dict(),
            "scaler": self.scaler.state_dict(),
            "extra": self.extra,
            "loader": {} if shared else self.loader.state_dict(),
        }
        for key, state in states.items():
            for name, value in state.items():
                whole = value.full_tensor() if isinstance(value, DTensor) else value
                found[f"{key}/{name}"] = whole.detach().clone() if isinstance(whole, torch.Tensor) else whole
        return found

    def _parts(self) -> dict[str, object]:
        return {
            "model_parts": self.net,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "grad_scaler": self.scaler,
            "dataloader": self.loader,
            "trainer": self.extra,
        }


def assert_same(found: Mapping[str, object], expected: Mapping[str, object]) -> None:
    """Bit for bit."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        other = found[name]
        if isinstance(value, torch.Tensor):
            assert isinstance(other, torch.Tensor), name
            assert value.dtype is other.dtype, name
            assert torch.equal(value, other), name
        else:
            assert other == value, (name, other, value)


def attempt(call: Callable[[], object]) -> tuple[str, str]:
    """The type and text of what a call raises; empty when it returns."""
    try:
        call()
    except BaseException as error:
        return type(error).__name__, str(error)
    return "", ""
