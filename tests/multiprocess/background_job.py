"""Saves in the background whose every step the test decides: where they wait, and how they fail.

A writer of the model's key looks for a file named after its iteration and rank below ``<save_dir>.script``:

- ``gate-<iteration>-<rank>``: a FIFO; it waits until somebody opens it for writing (`open_gate`, which waits until the
  writer has come so far: both sides meet there, and nobody sleeps).
- ``fault-<iteration>-<rank>``: a word; it does what `fail` says.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult

import dcpfs

__all__ = [
    "Checkpointer",
    "State",
    "config",
    "expected",
    "find_fault",
    "make_gate",
    "open_gate",
    "plant",
    "read_step",
    "saved",
    "script_of",
]


class Checkpointer(dcpfs.DistributedCheckpointer):
    """With a writer that follows a script."""

    def get_storage_writer(self, url: str) -> StorageWriter:
        return _ScriptedWriter(url)


def config(save_dir: str | Path, mode: str, **settings: object) -> dcpfs.CheckpointConfig:
    """Settings; exchanges end within five minutes."""
    return dcpfs.CheckpointConfig.model_validate(
        {"save_dir": str(save_dir), "async_mode": mode, "timeout_seconds": 300, "rng": "none", **settings}
    )


class State:
    """Tensors that all hold one number, and a plain value: whatever is mixed up shows."""

    def __init__(self, tensors: int = 3, rows: int = 64) -> None:
        self.tensors = {f"w{number}": torch.zeros(rows, 16) for number in range(tensors)}
        self.number = 0

    def fill(self, number: int) -> None:
        """Overwrite all."""
        self.number = number
        for tensor in self.tensors.values():
            tensor.fill_(number)

    def state_dict(self) -> dict[str, object]:
        return {**self.tensors, "number": self.number}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, tensor in self.tensors.items():
            tensor.copy_(state_dict[name])
        self.number = state_dict["number"]


def expected(number: int, tensors: int = 3, rows: int = 64) -> dict[str, object]:
    """What a save of `State` filled with a number must read as."""
    state = State(tensors, rows)
    state.fill(number)
    return state.state_dict()


def read_step(save_dir: str | Path, iteration: int, key: str = "model") -> dict[str, Any]:
    """A key of a step, read without a checkpointer."""
    return dict(dcpfs.read(f"{save_dir}/iter_{iteration:09d}/{key}"))


def saved(save_dir: str | Path, iteration: int) -> bool:
    """Whether a step holds exactly its own number."""
    found, wanted = read_step(save_dir, iteration), expected(iteration)
    return found.keys() == wanted.keys() and all(
        torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value
        for name, value in wanted.items()
    )


# --- the script


def script_of(save_dir: str | Path) -> Path:
    """Where the script of a run lies."""
    path = Path(f"{save_dir}.script")
    path.mkdir(exist_ok=True)
    return path


def make_gate(save_dir: str | Path, iteration: int, rank: int = 0) -> None:
    """Let the save of an iteration wait on a rank."""
    os.mkfifo(script_of(save_dir) / f"gate-{iteration}-{rank}")


def open_gate(save_dir: str | Path, iteration: int, rank: int = 0) -> None:
    """Wait until the save has come to the gate, and let it pass."""
    path = script_of(save_dir) / f"gate-{iteration}-{rank}"
    with open(path, "wb"):
        path.unlink()


def plant(save_dir: str | Path, iteration: int, fault: str, rank: int = 0) -> None:
    """Let the save of an iteration fail on a rank."""
    (script_of(save_dir) / f"fault-{iteration}-{rank}").write_text(fault)


def find_fault(save_dir: str | Path, iteration: int, rank: int) -> str | None:
    """What was planted."""
    path = script_of(save_dir) / f"fault-{iteration}-{rank}"
    return path.read_text() if path.exists() else None


class _UnpicklableError(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.hold: Callable[[], int] = lambda: 1


def fail(fault: str) -> None:
    """What can happen to a save."""
    if fault == "unpicklable":
        raise _UnpicklableError("an error that holds a lambda")
    if fault == "os":
        raise OSError("the disk is on fire")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError(fault)


class _ScriptedWriter(dcpfs.FsspecStorageWriter):
    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._where = Path(url)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        if self._where.name == "model":
            save_dir = self._where.parent.parent
            iteration = int(self._where.parent.name.removeprefix("iter_"))
            rank = dist.get_rank() if dist.is_initialized() else 0
            gate = script_of(save_dir) / f"gate-{iteration}-{rank}"
            if gate.exists():
                with open(gate, "rb") as file:
                    file.read()
            fault = find_fault(save_dir, iteration, rank)
            if fault is not None:
                fail(fault)
        return super().write_data(plan, planner)
