"""One contender at work in a process of its own.

Problem: CPU time and peak memory belong to a process, so contenders that share one share their figures.

Way taken: a client runs one job, given as JSON on stdin, and writes its outcome to the file it is told.
Starting, importing and building the state come before the clock; every round is timed alone and proved right
after it. The first round of a process is told from the later ones, in which connections and buffers are warm
as in a trainer.

Flow: `run` → prepare | `_save_rounds` | `_load_rounds` → `Outcome`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .cases import CASES, Case, Operation, needed
from .contenders import Contender, Layout, Scope, find
from .job import Absent, Failed, Job, Measured, Outcome, Prepared, RoundFigures
from .measuring import Meter
from .settings import Setting, Target
from .sink_client import SinkConnection
from .verification import check_loaded, check_saved, remove
from .workloads import TensorSpec, build, poison, specs

__all__ = ["run"]

_REASON_CHARACTERS = 1000


class _WrongBytesError(Exception):
    """What was saved or loaded is not what was generated."""


def run(job: Job) -> Outcome:
    """Do the job. Whatever goes wrong becomes the outcome."""
    try:
        contender = find(job.contender)
        reason = contender.available()
        case = CASES[job.case]
        if reason is None and case.sharded and not contender.sharding:
            reason = "it takes whole tensors only"
        if reason is None and case.scope is Scope.PART and not contender.sharding:
            reason = "it loads whole states only"
        if reason is not None:
            return Outcome(result=Absent(reason=reason))
        world = case.save_world if job.prepare else case.world
        with _process_group(job, world) as mesh:
            return _run(job, case, contender, mesh)
    except (Exception, CheckpointException) as error:  # noqa: BLE001 - handed over as the outcome
        return Outcome(result=Failed(reason=_tell(error)))


def _tell(error: BaseException) -> str:
    # torch's CheckpointException prints every rank's trace; its first failure is the cause.
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {error}".strip()[:_REASON_CHARACTERS]


def _run(job: Job, case: Case, contender: Contender, mesh: DeviceMesh | None) -> Outcome:
    tensors = specs(case.workload, job.size_bytes)
    if job.prepare:
        contender.save(build(tensors, mesh), job.target)
        return Outcome(result=Prepared())
    if case.operation is Operation.SAVE:
        rounds = _save_rounds(job, contender, tensors, mesh)
        moved = tensors
    else:
        if job.target.setting is Setting.MEMORY:
            contender.save(build(tensors, mesh), job.target)
        moved = needed(case, tensors)
        rounds = _load_rounds(job, case, contender, moved, mesh)
    needed_bytes = sum(spec.size_bytes for spec in moved)
    return Outcome(result=Measured(verified=True, rounds=rounds, needed_bytes=needed_bytes))


def _save_rounds(
    job: Job, contender: Contender, tensors: tuple[TensorSpec, ...], mesh: DeviceMesh | None
) -> tuple[RoundFigures, ...]:
    state = build(tensors, mesh)
    figures: list[RoundFigures] = []
    for number in range(job.rounds):
        target = job.target.child(f"round-{number}")
        figures.append(_timed(job, partial(contender.save, state, target)))
        if contender.layout is Layout.DCP:
            wrong = check_saved(target, tensors) if job.rank == 0 else None
        else:
            template = build(tensors, mesh)
            poison(template)
            contender.load(template, target, Scope.WHOLE)
            wrong = check_loaded(template, tensors, mesh)
            del template
        _refuse(wrong, "saved")
        _barrier()
        if job.rank == 0:
            remove(target)
    return tuple(figures)


def _load_rounds(
    job: Job, case: Case, contender: Contender, tensors: tuple[TensorSpec, ...], mesh: DeviceMesh | None
) -> tuple[RoundFigures, ...]:
    template = build(tensors, mesh)
    figures: list[RoundFigures] = []
    for _ in range(job.rounds):
        poison(template)
        figures.append(_timed(job, partial(contender.load, template, job.target, case.scope)))
        _refuse(check_loaded(template, tensors, mesh), "loaded")
    return tuple(figures)


def _timed(job: Job, call: Callable[[], None]) -> RoundFigures:
    sink = _sink(job.target) if job.rank == 0 else None
    if sink is not None:
        sink.reset()
    _barrier()
    with Meter() as meter:
        call()
    _barrier()
    cost = meter.cost
    figures = RoundFigures(
        began_seconds=cost.began_seconds,
        ended_seconds=cost.ended_seconds,
        cpu_seconds=cost.cpu_seconds,
        peak_extra_bytes=cost.peak_extra_bytes,
    )
    if sink is None:
        return figures
    counted = sink.figures()
    sink.close()
    return figures.model_copy(
        update={
            "requests": counted.requests,
            "requests_by_verb": counted.requests_by_verb,
            "moved_bytes": counted.received_bytes + counted.sent_bytes,
            "connections": counted.connections,
            "server_cpu_seconds": counted.cpu_seconds,
        }
    )


def _sink(target: Target) -> SinkConnection | None:
    return None if target.port is None else SinkConnection(target.port, counted=False)


def _refuse(wrong: str | None, what: str) -> None:
    if wrong is not None:
        raise _WrongBytesError(f"what was {what} is not what it should be: {wrong}")


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


@contextlib.contextmanager
def _process_group(job: Job, world: int) -> Iterator[DeviceMesh | None]:
    if world == 1:
        yield None
        return
    if job.rendezvous is None:
        raise ValueError("ranks need a rendezvous")
    dist.init_process_group("gloo", init_method=f"file://{job.rendezvous}", rank=job.rank, world_size=world)
    try:
        yield init_device_mesh("cpu", (world,))
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Read a job from stdin, write its outcome to the file named on the command line."""
    outcome = run(Job.model_validate_json(sys.stdin.read()))
    Path(sys.argv[1]).write_text(outcome.model_dump_json())


if __name__ == "__main__":
    main()
