"""One contender at work in a process of its own.

Problem: CPU time and peak memory belong to a process, so contenders that share one share their figures.

Way taken: a client runs one job, given as JSON on stdin, and writes its outcome to the file it is told.
Starting, importing and building the state come before the clock; every round is timed alone and proved right
after it. The first round of a process is told from the later ones, in which connections and buffers are warm
as in a trainer.

Flow: `run` → `_reason_to_be_absent` → prepare | rounds of the case's operation → `Outcome`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .cases import Case, Client, Operation, case_of, needed
from .contenders import (
    Checkpointing,
    Contender,
    Importing,
    Layout,
    LoadsParts,
    Remover,
    Role,
    Scope,
    Seeker,
    Staged,
    find,
    unreachable,
)
from .files import remove
from .job import Absent, Failed, Job, Measured, Outcome, Prepared, RoundFigures
from .measuring import Meter
from .settings import Target
from .sink_client import SinkConnection
from .step_files import check_kept, write_steps
from .training import Training, build_training, check_training, poison_training
from .verification import check_loaded, check_saved
from .workloads import State, TensorSpec, build, missing, poison, specs

__all__ = ["run"]

_REASON_CHARACTERS = 1000
_KEPT_STEPS = 3
_ORPHAN_EXIT_CODE = 75


class _WrongBytesError(Exception):
    """What was saved, loaded, found or left is not what it has to be."""


def run(job: Job) -> Outcome:
    """Do the job. Whatever goes wrong becomes the outcome."""
    try:
        case = case_of(job.case)
        contender = find(job.contender, case.role)
        reason = _reason_to_be_absent(job, case, contender)
        if reason is not None:
            return Outcome(result=Absent(reason=reason))
        if isinstance(contender, Importing):
            contender.import_modules(job.target)
        world = case.save_world if job.prepare else case.world
        with _process_group(job, world) as mesh:
            return _run(job, case, contender, mesh)
    except (Exception, CheckpointException) as error:  # noqa: BLE001 - handed over as the outcome
        return Outcome(result=Failed(reason=job.target.scrub(_tell(error))))


def _reason_to_be_absent(job: Job, case: Case, contender: object) -> str | None:
    available = contender.available() if isinstance(contender, Contender | Checkpointing | Seeker | Remover) else None
    reason = available or unreachable(job.contender, job.target)
    if reason is not None or not isinstance(contender, Contender) or case.role is not Role.STORAGE:
        return reason
    if case.sharded and not contender.sharding:
        return "it takes whole tensors only"
    loads_parts = contender.sharding or (isinstance(contender, LoadsParts) and contender.loads_parts)
    if case.scope is Scope.PART and not loads_parts:
        return "it loads whole states only"
    return missing(case.workload)


def _tell(error: BaseException) -> str:
    # torch's CheckpointException prints every rank's trace; its first failure is the cause.
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {error}".strip()[:_REASON_CHARACTERS]


def _run(job: Job, case: Case, contender: object, mesh: DeviceMesh | None) -> Outcome:
    if isinstance(contender, Checkpointing) and case.operation is Operation.CHECKPOINT:
        return _checkpoint_rounds(job, contender, mesh)
    if isinstance(contender, Seeker) and case.operation is Operation.DISCOVER:
        return _discovery_rounds(job, case, contender)
    if isinstance(contender, Remover) and case.operation is Operation.RETAIN:
        return _retention_rounds(job, case, contender)
    if not isinstance(contender, Contender):
        raise TypeError(f"{job.contender!r} has no part in {case.name}")
    tensors = specs(case.workload, job.size_bytes)
    if job.prepare:
        _save(contender, build(tensors, mesh), job.target)
        return Outcome(result=Prepared())
    if case.operation is Operation.SAVE:
        rounds = _save_rounds(job, contender, tensors, mesh)
        moved = tensors
    else:
        if job.target.in_process:
            _save(contender, build(tensors, mesh), job.target)
        moved = needed(case, tensors)
        rounds = _load_rounds(job, case, contender, moved, mesh)
    return _measured(rounds, sum(spec.size_bytes for spec in moved))


def _measured(rounds: tuple[RoundFigures, ...], needed_bytes: int) -> Outcome:
    return Outcome(result=Measured(verified=True, rounds=rounds, needed_bytes=needed_bytes))


# --- states


def _save(contender: Contender, state: State, target: Target) -> None:
    if isinstance(contender, Staged):
        contender.arrange(state, target)
    contender.save(state, target)


def _settle(contender: Contender, template: State, target: Target) -> None:
    if isinstance(contender, Staged):
        contender.settle(template, target)


def _save_rounds(
    job: Job, contender: Contender, tensors: tuple[TensorSpec, ...], mesh: DeviceMesh | None
) -> tuple[RoundFigures, ...]:
    state = build(tensors, mesh)
    figures: list[RoundFigures] = []
    for number in range(job.rounds):
        target = job.target.child(f"round-{number}")
        if isinstance(contender, Staged):
            contender.arrange(state, target)
        figures.append(_timed(job, partial(contender.save, state, target)))
        if contender.layout is Layout.DCP:
            wrong = check_saved(target, tensors) if job.rank == 0 else None
        else:
            template = build(tensors, mesh)
            poison(template)
            contender.load(template, target, Scope.WHOLE)
            _settle(contender, template, target)
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
        if case.client is Client.FRESH and job.target.directory is not None:
            _leave_page_cache(Path(job.target.directory))
        figures.append(_timed(job, partial(contender.load, template, job.target, case.scope)))
        _settle(contender, template, job.target)
        _refuse(check_loaded(template, tensors, mesh), "loaded")
    return tuple(figures)


def _leave_page_cache(directory: Path) -> None:
    """Ask the kernel to drop what it holds of these files; it can't where they live in memory."""
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


# --- steps


def _checkpoint_rounds(job: Job, contender: Checkpointing, mesh: DeviceMesh | None) -> Outcome:
    training = build_training(job.size_bytes, mesh)
    figures: list[RoundFigures] = []
    try:
        contender.open(job.target)
        for iteration in range(1, job.rounds + 1):
            blocked: list[float] = []

            def step(iteration: int = iteration, blocked: list[float] = blocked) -> None:
                began_seconds = time.monotonic()
                contender.save(training, iteration)
                contender.release()
                blocked.append(time.monotonic() - began_seconds)
                contender.finish()

            figure = _timed(job, step)
            figures.append(figure.model_copy(update={"blocked_seconds": blocked[0]}))
            poison_training(training)
            _check_step(contender, training, iteration)
        _prove_release(contender, training, job.rounds + 1)
    finally:
        contender.close()
    _barrier()
    if job.rank == 0:
        remove(job.target)
    return _measured(tuple(figures), training.size_bytes)


def _prove_release(contender: Checkpointing, training: Training, iteration: int) -> None:
    """One more step, not timed: training does write its state as soon as it may, and the step is whole all the same."""
    contender.save(training, iteration)
    contender.release()
    poison_training(training)
    contender.finish()
    _check_step(contender, training, iteration)


def _check_step(contender: Checkpointing, training: Training, iteration: int) -> None:
    found = contender.load(training)
    _refuse(None if found == iteration else f"step {found} instead of {iteration}", "loaded")
    _refuse(check_training(training), "saved and loaded")


def _discovery_rounds(job: Job, case: Case, contender: Seeker) -> Outcome:
    if job.prepare or job.target.in_process:
        write_steps(job.target, case.steps)
    if job.prepare:
        return Outcome(result=Prepared())
    figures: list[RoundFigures] = []
    for _ in range(job.rounds):
        found: list[int] = []
        figures.append(_timed(job, lambda found=found: found.extend(contender.seek(job.target))))  # type: ignore[misc] # bound at once
        expected = ([case.steps], list(range(1, case.steps + 1)))
        _refuse(None if found in expected else f"{found[:5]} of {case.steps} steps", "found")
    return _measured(tuple(figures), 0)


def _retention_rounds(job: Job, case: Case, contender: Remover) -> Outcome:
    figures: list[RoundFigures] = []
    steps = tuple(range(1, case.steps + 1))
    for number in range(job.rounds):
        target = job.target.child(f"round-{number}")
        write_steps(target, case.steps)
        figures.append(_timed(job, partial(contender.remove_all_but, target, _KEPT_STEPS, steps)))
        _refuse(check_kept(target, steps[-_KEPT_STEPS:]), "left")
        remove(target)
    return _measured(tuple(figures), 0)


# --- one call


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
    """Read a job, one line on stdin, and write its outcome to the file named on the command line.

    The process ends when stdin does: whoever asked is gone, and nobody would stop it.
    """
    job = Job.model_validate_json(_read_line())
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    outcome = run(job)
    Path(sys.argv[1]).write_text(outcome.model_dump_json())


def _read_line() -> bytes:
    # Past Python's buffers: a thread that waits in them keeps the interpreter from ending.
    line = b""
    while not line.endswith(b"\n") and (data := os.read(0, 1 << 16)):
        line += data
    return line


def _end_with_stdin() -> None:
    while os.read(0, 1 << 16):
        pass
    os._exit(_ORPHAN_EXIT_CODE)


if __name__ == "__main__":
    main()
