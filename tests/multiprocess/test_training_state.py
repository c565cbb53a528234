"""Model, optimizer and trainer states of FSDP2 ranks: saved by two, loaded by one to three, into any fresh parts.

Three processes start once per kind of optimizer; the worlds are sub-groups of them.
"""

from __future__ import annotations

import random
import tempfile
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

import dcpfs
from dcpfs.checkpointer.model_state import ModelWrapper
from dcpfs.checkpointer.optimizer_state import OptimizersWrapper
from dcpfs.checkpointer.stored_value import StoredValue, TemplatePart
from dcpfs.checkpointer.trainer_state import TrainerState
from dcpfs.dcp.flatten import flatten
from dcpfs.dcp.source import CheckpointSource
from dcpfs.format.index import TensorRecord
from dcpfs.storage.location import Location
from tests.multiprocess.gloo import run_ranks

SAVED_BY = 2
LOADED_BY = (1, 2, 3)
FRESH = ("as new", "on meta", "gradients there", "stepped")
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


class World:
    """A sub-group of all ranks and its mesh; made by all, used by its members."""

    def __init__(self, size: int) -> None:
        self.group = dist.new_group(list(range(size)))
        self.mesh = DeviceMesh("cpu", torch.arange(size))
        self.member = dist.get_rank() < size


def make_net(world: World, *, seed: int = 0, meta: bool = False) -> Any:
    """Rows that no number of ranks divides, a frozen layer, a parameter without gradient."""
    torch.manual_seed(seed)
    with torch.device("meta" if meta else "cpu"):
        net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 7), nn.Linear(7, 3))
    net[1].requires_grad_(False)
    for layer in net:
        fully_shard(layer, mesh=world.mesh)
    return fully_shard(net, mesh=world.mesh)


def train(net: Any, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        net(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(state: Mapping[str, object]) -> dict[str, object]:
    """A copy of the state without sharding. Collective over its mesh."""
    return {key: full(value) if isinstance(value, torch.Tensor) else value for key, value in state.items()}


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def assert_equal(found: Mapping[str, object], expected: Mapping[str, object]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        other = found[key]
        if isinstance(value, torch.Tensor):
            assert isinstance(other, torch.Tensor), key
            assert torch.equal(value, other), key
            assert value.dtype is other.dtype, key
        else:
            assert other == value, key


def load_part(part: TemplatePart, url: str, group: Any) -> dcpfs.LoadReport:
    source = CheckpointSource(Location(url))
    records = source.decode_index(source.read_metadata()).records
    source.close()
    stored = {
        key: StoredValue(record.dtype, record.shape) if isinstance(record, TensorRecord) else StoredValue(None, None)
        for key, record in records.items()
    }
    template = part.template(stored)
    assert flatten(template)[0].keys() | part.left_out(stored).keys() >= stored.keys()
    report = dcpfs.load(template, url, process_group=group, strict=not part.left_out(stored))
    part.load_state_dict(template)
    return report


def save_and_load(kind: str, url: str) -> str:
    worlds = {size: World(size) for size in LOADED_BY}
    make = OPTIMIZERS[kind]
    saver = worlds[SAVED_BY]
    expected: dict[str, dict[str, object]] = {}
    if saver.member:
        net = make_net(saver)
        optimizer = make(list(net.parameters()))
        train(net, optimizer)
        for parameter in optimizer.state:  # a value that is not shaped like its parameter
            extra = DTensor.from_local(torch.rand(2, 3, generator=torch.manual_seed(3)), saver.mesh, [Replicate()])
            optimizer.state[parameter]["extra"] = extra
        model, optim = ModelWrapper(net), OptimizersWrapper(net, optimizer)
        dcpfs.save(model.state_dict(), f"{url}/model", process_group=saver.group)
        dcpfs.save(optim.state_dict(), f"{url}/optim", process_group=saver.group)
        expected = {"model": whole(model.state_dict()), "optim": whole(optim.state_dict())}
        train(net, optimizer)
        expected["later"] = whole(model.state_dict())
    box = [expected]
    dist.broadcast_object_list(box, src=0)
    expected = box[0]
    assert any(key.endswith((".exp_avg", ".momentum_buffer")) for key in expected["optim"])
    for size in LOADED_BY:
        for fresh in FRESH:
            world = worlds[size]
            if world.member:
                net = make_net(world, seed=5, meta=fresh == "on meta")
                optimizer = make(list(net.parameters()))
                if fresh == "gradients there":
                    net(torch.ones(2, 4)).sum().backward()
                elif fresh == "stepped":
                    train(net, optimizer, 1)
                model, optim = ModelWrapper(net), OptimizersWrapper(net, optimizer)
                assert not load_part(model, f"{url}/model", world.group).unexpected
                assert not load_part(optim, f"{url}/optim", world.group).unexpected
                assert_equal(whole(model.state_dict()), expected["model"])
                assert_equal(whole(optim.state_dict()), expected["optim"])
                optimizer.zero_grad()
                train(net, optimizer)
                if size == SAVED_BY:
                    assert_equal(whole(model.state_dict()), expected["later"])
            dist.barrier()
    return "done"


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_case_91_states_of_two_ranks_load_on_any_number_into_any_fresh_parts(kind: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert run_ranks(save_and_load, 3, kind, folder) == ["done"] * 3


def load_into_ddp(url: str) -> list[str]:
    """A bare model and its optimizer, saved by rank 0, load into DDP around a compiled model, and back."""
    bare: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(bare.parameters())
    train(bare, optimizer)
    wrapped: Any = DistributedDataParallel(torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))))
    other = torch.optim.AdamW(wrapped.parameters())
    for key, source, target in (
        ("model", ModelWrapper(bare), ModelWrapper(wrapped)),
        ("optim", OptimizersWrapper(bare, optimizer), OptimizersWrapper(wrapped, other)),
    ):
        dcpfs.save(source.state_dict(), f"{url}/{key}")
        assert not load_part(target, f"{url}/{key}", None).unexpected
        if dist.get_rank() == 0:
            assert_equal(target.state_dict(), source.state_dict())
    return list(ModelWrapper(wrapped).state_dict())


def test_a_bare_state_loads_into_ddp() -> None:
    with tempfile.TemporaryDirectory() as folder:
        names = run_ranks(load_into_ddp, 2, folder)
    assert names == [["0.weight", "0.bias", "1.weight", "1.bias"]] * 2


def load_fsdp1(url: str) -> str:
    """FSDP1 shards parameters as pieces of a flat one."""

    def make(seed: int) -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        net: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mesh = DeviceMesh("cpu", torch.arange(2))
            net = FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True, device_mesh=mesh)
        return net, torch.optim.AdamW(net.parameters(), lr=0.1)

    net, optimizer = make(0)
    train(net, optimizer)
    dcpfs.save(ModelWrapper(net).state_dict(), f"{url}/model")
    dcpfs.save(OptimizersWrapper(net, optimizer).state_dict(), f"{url}/optim")
    expected = whole(ModelWrapper(net).state_dict()), whole(OptimizersWrapper(net, optimizer).state_dict())
    assert expected[0]["0.weight"].shape == (4, 4)  # type: ignore[attr-defined]
    other, fresh = make(1)
    other(torch.ones(2, 4)).sum().backward()
    assert not load_part(ModelWrapper(other), f"{url}/model", None).unexpected
    assert not load_part(OptimizersWrapper(other, fresh), f"{url}/optim", None).unexpected
    assert_equal(whole(ModelWrapper(other).state_dict()), expected[0])
    assert_equal(whole(OptimizersWrapper(other, fresh).state_dict()), expected[1])
    fresh.zero_grad()
    train(net, optimizer)
    train(other, fresh)
    assert_equal(whole(ModelWrapper(other).state_dict()), whole(ModelWrapper(net).state_dict()))
    return "done"


def load_fsdp1_in_parts(url: str) -> str:
    """Two parts of a pipeline that FSDP1 has sharded, and one that nobody has, with an optimizer each."""

    def make(seed: int) -> tuple[list[Any], list[torch.optim.Optimizer]]:
        torch.manual_seed(seed)
        parts: list[Any] = [nn.Sequential(OrderedDict({name: nn.Linear(4, 4)})) for name in ("in", "mid", "out")]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mesh = DeviceMesh("cpu", torch.arange(2))
            for number in (0, 2):
                parts[number] = FullyShardedDataParallel(
                    parts[number], device_id=torch.device("cpu"), use_orig_params=True, device_mesh=mesh
                )
        return parts, [torch.optim.AdamW(part.parameters(), lr=0.1) for part in parts]

    def train_parts(parts: list[Any], optimizers: list[torch.optim.Optimizer]) -> None:
        train(nn.Sequential(*parts), optimizers[0])
        for optimizer in optimizers[1:]:
            optimizer.step()
            optimizer.zero_grad()

    parts, optimizers = make(0)
    train_parts(parts, optimizers)
    dcpfs.save(ModelWrapper(parts).state_dict(), f"{url}/model")
    dcpfs.save(OptimizersWrapper(parts, optimizers).state_dict(), f"{url}/optim")
    expected = whole(ModelWrapper(parts).state_dict()), whole(OptimizersWrapper(parts, optimizers).state_dict())
    assert list(expected[0]) == [f"{name}.{what}" for name in ("in", "mid", "out") for what in ("weight", "bias")]
    assert {name.split(".")[1] for name in expected[1]} == {"in", "mid", "out"}
    others, fresh = make(1)
    assert not load_part(ModelWrapper(others), f"{url}/model", None).unexpected
    assert not load_part(OptimizersWrapper(others, fresh), f"{url}/optim", None).unexpected
    assert_equal(whole(ModelWrapper(others).state_dict()), expected[0])
    assert_equal(whole(OptimizersWrapper(others, fresh).state_dict()), expected[1])
    spanning = torch.optim.SGD([*parts[0].parameters(), *parts[1].parameters()], lr=0.1)
    with pytest.raises(dcpfs.ConfigError, match=r"the SGD of a model that FSDP1 has sharded: .* one for each part"):
        OptimizersWrapper(parts, [spanning])
    with pytest.raises(dcpfs.ConfigError, match="or of none"):
        OptimizersWrapper(parts, torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1))
    return "done"


@pytest.mark.parametrize("load", [load_fsdp1, load_fsdp1_in_parts])
def test_pieces_of_flat_parameters_are_no_replicas(load: Callable[[str], str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert run_ranks(load, 2, folder) == ["done"] * 2


def save_and_load_random_states(url: str) -> list[float]:
    rank = dist.get_rank()
    two = dist.new_group([0, 1])
    random.seed(rank)
    torch.manual_seed(rank)
    if rank < 2:
        state = TrainerState(4, user={"epoch": 1}, rank=rank).state_dict()
        expected = [random.random(), torch.rand(()).item()]
        dcpfs.save(state, url, process_group=two)
    dist.barrier()
    random.seed(77)
    torch.manual_seed(77)
    user: dict[str, object] = {}
    part = TrainerState(user=user, rank=rank)
    load_part(part, url, dist.group.WORLD)
    assert part.iteration == 4
    found = [random.random(), torch.rand(()).item()]
    if rank < 2:
        assert found == expected
    return found


def test_case_8_each_rank_goes_on_with_its_own_random_numbers() -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(save_and_load_random_states, 3, folder)
    assert len({tuple(each) for each in found}) == 3
