"""What a save in the background holds, in all modes: values of its own call, whatever training does next."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.storage import StorageWriter
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import dcpfs
from dcpfs.checkpointer.process_saver import ProcessSaver
from dcpfs.errors import ConfigError, UnsupportedValueError
from tests.multiprocess import background_job as job
from tests.multiprocess.gloo import run_ranks
from tests.peers.sample_state import assert_same
from tests.unit.dcp.test_exactness import Wrapper

MODES = ["disabled", "async", "async_with_pinned_mem"]


class Net(nn.Module):
    """Has what is easily staged wrong: tied weights, views, a transposed one, a 0-dim buffer, and a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16, bias=False)
        self.second.weight = self.first.weight
        self.whole = torch.zeros(8, 6)
        self.register_buffer("rows", self.whole[2:5])
        self.register_buffer("turned", self.whole.t())
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("brief", torch.zeros(5, dtype=torch.bfloat16))
        self.register_state_dict_post_hook(add_clone)  # type: ignore[no-untyped-call]  # torch's has no annotations

    def overwrite(self, number: int) -> None:
        with torch.no_grad():
            for tensor in (*self.parameters(), self.whole, self.get_buffer("count"), self.get_buffer("brief")):
                tensor.fill_(number)


def add_clone(module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
    state[f"{prefix}cloned"] = state[f"{prefix}first.weight"].clone() * 2  # another tensor at every call


@pytest.mark.parametrize("mode", MODES)
def test_cases_12_13_14_16_each_save_holds_the_values_of_its_own_call(tmp_path: Path, mode: str) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.9)
    extra: dict[str, Any] = {"tokens": 0, "list": [0]}
    kept = {}
    with dcpfs.DistributedCheckpointer(job.config(tmp_path / "run", mode)) as checkpointer:
        for number in range(1, 7):
            net.overwrite(number)
            optimizer.param_groups[0]["lr"] = number / 8
            extra["tokens"], extra["list"][0] = number, number
            if number == 4:
                net.register_buffer("late", torch.full((3,), 4.0))  # another structure: the memory is made anew
            kept[number] = {name: value.clone() for name, value in net.state_dict().items()}
            checkpointer.save(net, optimizer, iteration=number, trainer=extra)
            checkpointer.maybe_wait_for_staging()
            net.overwrite(-1)
            optimizer.param_groups[0]["lr"] = -1.0
            extra["tokens"], extra["list"][0] = -1, -1
        assert checkpointer.health() is None
        net.overwrite(77)
        assert checkpointer.load(net, optimizer, trainer=extra) == 6  # waits for what is being saved
        assert checkpointer.steps() == [1, 2, 3, 4, 5, 6]
        assert float(net.first.weight[0, 0].detach()) == 6
        assert optimizer.param_groups[0]["lr"] == 6 / 8
        assert extra["tokens"] == 6
    for number, values in kept.items():
        assert_same(job.read_step(tmp_path / "run", number), values)
        user = {"tokens": number, "list": [number]}
        assert job.read_step(tmp_path / "run", number, "trainer") == {"iteration": number, "user": user}
        optim = job.read_step(tmp_path / "run", number, "optim")
        assert {value for name, value in optim.items() if name.endswith(".lr")} == {number / 8}


def save_shards(save_dir: str, mode: str) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(16, 11), nn.Linear(11, 3))
    fully_shard(net, mesh=DeviceMesh("cpu", torch.arange(2)))
    kept = []
    with dcpfs.DistributedCheckpointer(job.config(save_dir, mode, background_niceness=3)) as checkpointer:
        saver = checkpointer._saver
        if isinstance(saver, ProcessSaver) and saver.pid is not None:
            own = os.getpriority(os.PRIO_PROCESS, 0)
            assert os.getpriority(os.PRIO_PROCESS, saver.pid) == min(19, own + 3)
            assert b"\0CUDA_VISIBLE_DEVICES=\0" in b"\0" + Path(f"/proc/{saver.pid}/environ").read_bytes()
        for number in (1, 2, 3):
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.copy_(torch.full_like(parameter, number))
            kept.append({name: value.full_tensor() for name, value in net.state_dict().items()})
            checkpointer.save(net, iteration=number)
            checkpointer.maybe_wait_for_staging()
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.zero_()
        assert checkpointer.load(net) == 3
    return kept


@pytest.mark.parametrize("mode", MODES[1:])
def test_cases_12_16_50_shards_of_two_ranks(tmp_path: Path, mode: str) -> None:
    first, _ = run_ranks(save_shards, 2, str(tmp_path / "run"), mode)
    for number, values in enumerate(first, 1):
        assert_same(job.read_step(tmp_path / "run", number), values)


class _OfAScript(dcpfs.DistributedCheckpointer):
    def get_storage_writer(self, url: str) -> StorageWriter:
        raise NotImplementedError


def test_a_writer_that_no_other_process_can_make_is_refused_at_once(tmp_path: Path) -> None:
    class Local(_OfAScript):
        pass

    for kind, reason in ((Local, "Local"), (_OfAScript, "it belongs to the script that runs")):
        if kind is _OfAScript:
            kind.__module__ = "__main__"
            setattr(sys.modules["__main__"], kind.__name__, kind)
        with pytest.raises(ConfigError, match="can't save in a background process.*" + reason):
            kind(job.config(tmp_path / "run", MODES[2]))


@pytest.mark.parametrize("mode", MODES[1:])
def test_case_17_what_only_wraps_tensors_is_refused_before_anything_is_touched(tmp_path: Path, mode: str) -> None:
    with dcpfs.DistributedCheckpointer(job.config(tmp_path / "run", mode)) as checkpointer:
        state: dict[str, object] = {"wrapped": Wrapper.wrap(torch.ones(3))}
        with pytest.raises(UnsupportedValueError, match="wrapped"):
            checkpointer.save_state(1, {"model": state})
        checkpointer.save_state(2, {"model": {"plain": torch.ones(3)}})
    assert checkpointer.steps() == [2]
