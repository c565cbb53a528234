"""Contenders that are fast and wrong, each in its own way. Saving is torch's, in torch's format, unless said."""

from __future__ import annotations

import os
import threading

import torch
import torch.distributed as dist

from benchmarks.contenders import Scope
from benchmarks.contenders.floors import PlainClient
from benchmarks.contenders.single_files import TorchSave
from benchmarks.contenders.torch_native import TorchFsspec
from benchmarks.settings import Target
from benchmarks.workloads import State, local


def _flip(tensor: torch.Tensor) -> None:
    local(tensor).reshape(-1).view(torch.uint8)[-1] ^= 1


class FlipsOnSave(TorchFsspec):
    def save(self, state: State, target: Target) -> None:
        copy = {key: tensor.clone() for key, tensor in state.items()}
        _flip(list(copy.values())[-1])
        super().save(copy, target)


class LosesOnSave(TorchFsspec):
    def save(self, state: State, target: Target) -> None:
        super().save(dict(list(state.items())[:-1]), target)


class CastsOnSave(TorchFsspec):
    def save(self, state: State, target: Target) -> None:
        super().save({key: tensor.float() for key, tensor in state.items()}, target)


class SavesNothing(TorchFsspec):
    def save(self, state: State, target: Target) -> None:
        pass


class FlipsOnLoad(TorchFsspec):
    def load(self, template: State, target: Target, scope: Scope) -> None:
        super().load(template, target, scope)
        _flip(next(iter(template.values())))


class LoadsNothing(TorchFsspec):
    def load(self, template: State, target: Target, scope: Scope) -> None:
        pass


class MixesOnLoad(TorchFsspec):
    def load(self, template: State, target: Target, scope: Scope) -> None:
        super().load(template, target, scope)
        shape = list(template.values())[1].shape
        alike = [tensor for tensor in template.values() if tensor.shape == shape]
        alike[0].copy_(alike[1])


class RightOnlyOnce(TorchFsspec):
    def __init__(self) -> None:
        self.calls = 0

    def load(self, template: State, target: Target, scope: Scope) -> None:
        self.calls += 1
        if self.calls == 1:
            super().load(template, target, scope)


class Raises(TorchFsspec):
    def save(self, state: State, target: Target) -> None:
        raise RuntimeError("no such luck")


class TellsItsOptions(TorchFsspec):
    def save(self, state: State, target: Target) -> None:
        raise RuntimeError(f"can't reach {target.root} with {target.storage_options()}")


class DiesTellingItsOptions(TorchFsspec):
    def save(self, state: State, target: Target) -> None:
        print(f"can't reach {target.root} with {target.storage_options()}", flush=True)
        os._exit(7)


class Dies(TorchFsspec):
    def save(self, state: State, target: Target) -> None:
        os._exit(7)


class Hangs(TorchFsspec):
    """Says that it has begun, and never ends."""

    def save(self, state: State, target: Target) -> None:
        with open(os.environ["DCPFS_TEST_BEGUN"], "w") as stream:
            stream.write("begun")
        threading.Event().wait()


class WrongOnSecondRank(TorchFsspec):
    def load(self, template: State, target: Target, scope: Scope) -> None:
        super().load(template, target, scope)
        if dist.get_rank() == 1:
            _flip(next(iter(template.values())))


class Missing(TorchFsspec):
    def available(self) -> str | None:
        return "not installed here"

    def save(self, state: State, target: Target) -> None:
        raise AssertionError("an absent contender was run")


class WritesSomethingElse(PlainClient):
    def save(self, state: State, target: Target) -> None:
        super().save({key: torch.zeros_like(tensor) for key, tensor in state.items()}, target)


class ForgetsToSettle(TorchSave):
    """Loads beside the template, as a copy of files does, and never puts it there."""

    def load(self, template: State, target: Target, scope: Scope) -> None:
        super().load({key: torch.empty_like(tensor) for key, tensor in template.items()}, target, scope)

    def arrange(self, state: State, target: Target) -> None:
        pass

    def settle(self, template: State, target: Target) -> None:
        pass
