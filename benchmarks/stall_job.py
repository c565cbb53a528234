"""One contender of the stall case, in a process of its own: ``python -m benchmarks.stall_job JSON``.

Copies of the state into warm memory, by the same threads, are timed between the saves, so that a busy machine shows in
both. The state is overwritten as soon as the contender allows it, and what the last save stored is compared bit for
bit: a contender that copies less than everything proves nothing.
"""

from __future__ import annotations

import contextlib
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse, async_save

import dcpfs

from .stall import Blocked, StallFigure, StallOrder
from .workloads import State, Workload, build, differences, poison, specs

__all__ = ["run"]

_COPIES = 3
_LOOP_SECONDS = 1.0
_LOOP_WIDTH = 192
_LOOP_CALLS = 60


class Contender(Protocol):
    """Saves in the background."""

    def save(self, state: State, number: int) -> Blocked:
        """Begin a save: until the call returns, and until the state may be overwritten."""
        ...

    def finish(self) -> None:
        """Wait until it is stored."""
        ...

    def read(self, number: int) -> State:
        """What a save stored."""
        ...


def run(order: StallOrder) -> StallFigure:
    """Measure."""
    torch.set_num_threads(order.threads)
    tensors = specs(Workload.LLAMA, order.size_bytes)
    state = build(tensors, None)
    copies = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    with _open(order) as contender:
        blocked: list[Blocked] = []
        copy_seconds: list[float] = []
        _copy(state, copies)
        for number in range(1, order.rounds + 1):
            copy_seconds += [_copy(state, copies) for _ in range(_COPIES)]
            blocked.append(contender.save(state, number))
            if number < order.rounds:
                contender.finish()
        poison(state)
        contender.finish()
        stored = contender.read(order.rounds)
        for spec in tensors:
            wrong = differences(spec, stored[spec.key], 0)
            if wrong is not None:
                raise RuntimeError(f"{order.contender} stored something else: {wrong}")
        del stored
        quiet = _run_steps(lambda seconds: seconds >= _LOOP_SECONDS)
        contender.save(state, order.rounds + 1)
        waited: list[bool] = []
        done = _in_thread(contender.finish, waited)
        beside = _run_steps(lambda _: bool(waited))
        done()
        stored = contender.read(order.rounds + 1)
        for name, tensor in state.items():
            if not torch.equal(stored[name].view(torch.uint8), tensor.view(torch.uint8)):
                raise RuntimeError(f"{order.contender} stored something else beside the loop: {name} differs")
        del stored
        quiet += _run_steps(lambda seconds: seconds >= _LOOP_SECONDS)
    later = blocked[1:]
    return StallFigure(
        contender=order.contender,
        size_bytes=sum(spec.size_bytes for spec in tensors),
        threads=order.threads,
        copy_seconds=statistics.median(copy_seconds),
        first=blocked[0],
        later=Blocked(
            call_seconds=statistics.median(each.call_seconds for each in later),
            total_seconds=statistics.median(each.total_seconds for each in later),
        ),
        quiet_steps_per_second=quiet.per_second,
        saving_steps_per_second=beside.per_second,
        lost_seconds=beside.seconds - beside.count / quiet.per_second,
        seconds=statistics.median(each.total_seconds for each in later),
        gigabytes=sum(spec.size_bytes for spec in tensors) / 1e9,
    )


def _copy(state: State, copies: State) -> float:
    started_seconds = time.monotonic()
    for name, tensor in state.items():
        copies[name].copy_(tensor)
    return time.monotonic() - started_seconds


def _in_thread(call: Callable[[], None], waited: list[bool]) -> Callable[[], None]:
    def work() -> None:
        call()
        waited.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    return thread.join


@dataclass(frozen=True, slots=True)
class _Steps:
    """Steps of the loop, and the seconds that they took."""

    count: int
    seconds: float

    @property
    def per_second(self) -> float:
        return self.count / self.seconds

    def __add__(self, other: _Steps) -> _Steps:
        return _Steps(self.count + other.count, self.seconds + other.seconds)


def _run_steps(is_over: Callable[[float], bool]) -> _Steps:
    """A training loop as far as a save notices: Python that launches many small operations, all threads at work."""
    left, right = torch.randn(_LOOP_WIDTH, _LOOP_WIDTH), torch.randn(_LOOP_WIDTH, _LOOP_WIDTH) / _LOOP_WIDTH
    started_seconds, steps = time.monotonic(), 0
    while True:
        for _ in range(_LOOP_CALLS):
            left = torch.tanh(left @ right)
        steps += 1
        seconds = time.monotonic() - started_seconds
        if is_over(seconds):
            return _Steps(steps, seconds)


class _Ours:
    """`DistributedCheckpointer` in one of its modes."""

    def __init__(self, order: StallOrder) -> None:
        self._directory = order.directory
        config = dcpfs.CheckpointConfig.model_validate(
            {"save_dir": order.directory, "async_mode": order.contender.removeprefix("dcpfs-"), "rng": "none"}
        )
        self._checkpointer = dcpfs.DistributedCheckpointer(config)

    def save(self, state: State, number: int) -> Blocked:
        started_seconds = time.monotonic()
        self._checkpointer.save_state(number, {"model": state})
        returned_seconds = time.monotonic()
        self._checkpointer.maybe_wait_for_staging()
        return Blocked(
            call_seconds=returned_seconds - started_seconds, total_seconds=time.monotonic() - started_seconds
        )

    def finish(self) -> None:
        self._checkpointer.wait()
        _drop_others(self._directory)

    def read(self, number: int) -> State:
        return _tensors(dcpfs.read(f"{self._directory}/iter_{number:09d}/model"))

    def close(self) -> None:
        self._checkpointer.close()


class _Torch:
    """``dcp.async_save``: a writer of torch, and a stager that keeps its buffers."""

    def __init__(self, order: StallOrder) -> None:
        self._directory = order.directory
        kind = order.contender.removeprefix("torch-")
        self._kind = AsyncCheckpointerType(kind)
        self._stager = DefaultStager(StagingOptions(False, kind == "process", False, False))
        # torch's background process refuses to do without a group.
        dist.init_process_group("gloo", init_method=f"file://{self._directory}/group", rank=0, world_size=1)
        self._upload: Future[Any] | None = None

    def save(self, state: State, number: int) -> Blocked:
        started_seconds = time.monotonic()
        response = async_save(
            dict(state),
            storage_writer=FileSystemWriter(f"{self._directory}/{number}", thread_count=2, sync_files=False),
            async_checkpointer_type=self._kind,
            async_stager=self._stager,
        )
        call_seconds = total_seconds = time.monotonic() - started_seconds
        if isinstance(response, AsyncSaveResponse):
            response.staging_completion.result()
            total_seconds = time.monotonic() - started_seconds
            self._upload = response.upload_completion
        else:
            self._upload = response
        return Blocked(call_seconds=call_seconds, total_seconds=total_seconds)

    def finish(self) -> None:
        if self._upload is not None:
            self._upload.result()
        _drop_others(self._directory)

    def read(self, number: int) -> State:
        return _tensors(dcpfs.read(f"{self._directory}/{number}"))

    def close(self) -> None:
        self._stager.close()
        dist.destroy_process_group()


def _tensors(stored: Mapping[str, object]) -> State:
    return {name: value for name, value in stored.items() if isinstance(value, torch.Tensor)}


def _drop_others(directory: str) -> None:
    """Keep the newest: several don't fit into memory."""
    steps = sorted((path for path in Path(directory).iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    for path in steps[:-1]:
        shutil.rmtree(path)


@contextlib.contextmanager
def _open(order: StallOrder) -> Iterator[Contender]:
    contender = _Ours(order) if order.contender.startswith("dcpfs-") else _Torch(order)
    try:
        yield contender
    finally:
        contender.close()


if __name__ == "__main__":
    print(run(StallOrder.model_validate_json(sys.argv[1])).model_dump_json())
