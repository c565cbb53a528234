"""Optimizers that keep scalars as plain tensors beside sharded moments go on after a resume as if never stopped."""

from __future__ import annotations

import tempfile

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import dcpfs
from tests.multiprocess.gloo import run_ranks


def start(seed: int, *, foreach: bool) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(model)
    first, second = model[0].parameters(), model[1].parameters()
    return model, [torch.optim.ASGD(first, foreach=foreach), torch.optim.NAdam(second, foreach=foreach)]


def train(model: nn.Module, optimizers: list[torch.optim.Optimizer], seed: int) -> None:
    for step in range(2):
        torch.manual_seed(seed + step)
        model(torch.randn(4, 8)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def resume(folder: str) -> list[str]:
    """What differs from the run that went on."""
    found = []
    for foreach in (False, True):
        config = dcpfs.CheckpointConfig(save_dir=f"{folder}/{foreach}", timeout_seconds=200)
        model, optimizers = start(0, foreach=foreach)
        train(model, optimizers, 1)
        fresh, others = start(9, foreach=foreach)
        with dcpfs.DistributedCheckpointer(config) as checkpointer:
            checkpointer.save(model, optimizers, iteration=1)
            checkpointer.load(fresh, others)
        for parts in ((model, optimizers), (fresh, others)):
            train(*parts, 5)
        for name, value in model.state_dict().items():
            if not torch.equal(value.full_tensor(), fresh.state_dict()[name].full_tensor()):
                found.append(f"{name}, foreach={foreach}")
        for one, other in zip(optimizers, others, strict=True):
            kinds = [
                {key: type(value) for key, value in optimizer.state_dict()["state"][0].items()}
                for optimizer in (one, other)
            ]
            found += [f"{type(one).__name__}: {kinds}"] if kinds[0] != kinds[1] else []
    return found


def test_scalars_beside_sharded_moments() -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert run_ranks(resume, 2, folder) == [[], []]
