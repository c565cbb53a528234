"""Plans a run and carries it out: every contender in fresh processes, one at a time, in turns.

Problem: a shared machine is never the same twice, and what runs first finds it colder.

Way taken: repetitions go round all contenders, each time starting with another one, so that a slow minute
hits all. Checkpoints to load are saved beforehand, by the contender that will load them, in a process of its
own.

Flow: `Runner.run` → for each case: prepare → repetitions × contenders → processes of `benchmarks.client` →
`combine`.
"""

from __future__ import annotations

import contextlib
import enum
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from . import client
from .cases import CASES, Case, Client, Operation, case_of
from .contenders import Role, Scope, is_floor, is_known
from .figures import Entry, Figure, Missing, StepFigure, combine, combine_steps
from .files import remove
from .job import Absent, Failed, Job, Outcome, Prepared
from .settings import PACKAGE_ROOT, PLACE_PREFIX, Link, Setting, Target, client_environment

__all__ = ["Isolation", "Plan", "Runner", "order"]

_REASON_CHARACTERS = 600


class Isolation(str, enum.Enum):
    """Where a client runs."""

    PROCESS = "process"
    """In a process of its own: figures of CPU and memory are the contender's."""
    INLINE = "inline"
    """In this process where one rank is enough: for tests of the frame, not for figures."""


class Plan(BaseModel):
    """What to run in one setting.

    Attributes:
        place: The redacted URL, where there is one; else empty.
        link: That was put in front of the server, beyond what the setting says.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    setting: Setting
    cases: tuple[str, ...]
    contenders: tuple[str, ...]
    size_bytes: int
    repetitions: int = 3
    rounds: int = 2
    timeout_seconds: float = 900.0
    isolation: Isolation = Isolation.PROCESS
    place: str = ""
    link: Link | None = None


class Runner:
    """Runs a plan at a place."""

    def __init__(self, plan: Plan, place: Target, tell: Callable[[str], None]) -> None:
        self._plan = plan
        self._place = place
        self._tell = tell
        self._prepared: dict[str, Target] = {}

    def run(self) -> Iterator[Figure | StepFigure | Missing]:
        """Carry the plan out; results come as they are there."""
        for name in self._plan.cases:
            yield from self._run_case(case_of(name))

    def _run_case(self, case: Case) -> Iterator[Figure | StepFigure | Missing]:
        if self._place.in_process and case.sharded:
            reason = "memory:// lives in one process, so nothing is shared by ranks"
            self._tell(f"{case.name}: {reason}")
            for contender in self._contenders(case):
                yield Missing(kind="absent", entry=self._entry(case, contender, 0), reason=reason)
            return
        waiting = self._contenders(case)
        if not waiting:
            self._tell(f"{case.name}: none of the contenders is about such a case")
        if case.operation in (Operation.LOAD, Operation.DISCOVER) and not self._place.in_process:
            for contender in list(waiting):
                if (missing := self._prepare(case, contender)) is not None:
                    waiting.remove(contender)
                    yield missing
        for repetition in range(self._plan.repetitions):
            turn = repetition % max(1, len(waiting))
            for contender in waiting[turn:] + waiting[:turn]:
                entry = self._entry(case, contender, repetition)
                target = self._prepared.get(contender, self._place.child(f"{case.name}-{contender}"))
                outcomes = self._clients(self._job(case, contender, target), case.world)
                result = self._combine(case, entry, outcomes)
                if isinstance(result, Missing):
                    waiting.remove(contender)
                    self._tell(f"{case.name} {contender}: {result.kind}: {result.reason}")
                    yield result
                    continue
                self._tell(f"{case.name} {contender} #{repetition}: {_summary(result[-1])}")
                yield from result
        self._drop_prepared()

    def _contenders(self, case: Case) -> list[str]:
        known = [name for name in self._plan.contenders if is_known(name, case.role)]
        if case.role is not Role.STORAGE or not (case.sharded or case.scope is Scope.PART):
            return known
        return [name for name in known if not is_floor(name)]

    def _combine(
        self, case: Case, entry: Entry, outcomes: Sequence[Outcome]
    ) -> Sequence[Figure | StepFigure] | Missing:
        if case.operation is Operation.CHECKPOINT:
            return combine_steps(entry, "checkpointer", 0, outcomes)
        if case.operation is Operation.DISCOVER:
            return combine_steps(entry, "discovery", case.steps, outcomes)
        if case.operation is Operation.RETAIN:
            return combine_steps(entry, "retention", case.steps, outcomes)
        return combine(entry, outcomes)

    def _prepare(self, case: Case, contender: str) -> Missing | None:
        target = self._place.child(f"{case.name}-{contender}-prepared")
        job = self._job(case, contender, target).model_copy(update={"prepare": True})
        for outcome in self._clients(job, case.save_world):
            if isinstance(outcome.result, Absent | Failed):
                reason = f"saving what is to be loaded: {outcome.result.reason}"
                self._tell(f"{case.name} {contender}: {outcome.result.kind}: {reason}")
                entry = self._entry(case, contender, 0)
                return Missing(kind=outcome.result.kind, entry=entry, reason=reason)
            if not isinstance(outcome.result, Prepared):
                raise TypeError("a client that was to prepare did something else")
        self._prepared[contender] = target
        return None

    def _drop_prepared(self) -> None:
        for target in self._prepared.values():
            remove(target)
        self._prepared.clear()

    def _entry(self, case: Case, contender: str, repetition: int) -> Entry:
        link = self._plan.link
        return Entry(
            case=case.name,
            setting=self._plan.setting,
            contender=contender,
            repetition=repetition,
            place=self._plan.place,
            latency_ms=None if link is None else link.latency_ms,
            mb_per_second_per_connection=None if link is None else link.mb_per_second_per_connection,
        )

    def _job(self, case: Case, contender: str, target: Target) -> Job:
        return Job(
            case=case.name,
            contender=contender,
            target=target,
            size_bytes=self._plan.size_bytes,
            rounds=1 if case.client is Client.FRESH else self._plan.rounds,
        )

    def _clients(self, job: Job, world: int) -> list[Outcome]:
        if world == 1 and self._plan.isolation is Isolation.INLINE:
            return [client.run(job)]
        with tempfile.TemporaryDirectory(prefix=PLACE_PREFIX) as directory:
            return _run_processes(job, world, Path(directory), self._plan.timeout_seconds)


def _summary(last: Figure | StepFigure) -> str:
    if isinstance(last, Figure):
        return f"{last.gb_per_second:.2f} GB/s, {last.cpu_seconds_per_gb:.2f} CPU-s/GB"
    requests = "" if last.requests is None else f", {last.requests} requests"
    blocked = "" if last.blocked_seconds is None else f", training waits {last.blocked_seconds:.3f} s"
    return f"{last.seconds:.3f} s, {last.cpu_seconds:.2f} CPU-s{blocked}{requests}"


def _run_processes(job: Job, world: int, directory: Path, timeout_seconds: float) -> list[Outcome]:
    processes: list[subprocess.Popen[str]] = []
    errors: list[Path] = []
    try:
        for rank in range(world):
            ranked = job.model_copy(update={"rank": rank, "rendezvous": str(directory / "rendezvous")})
            command = [sys.executable, "-m", f"{__package__}.client", str(directory / f"outcome-{rank}.json")]
            errors.append(directory / f"stderr-{rank}")
            with errors[-1].open("w") as stream:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=stream,
                    stderr=stream,
                    text=True,
                    cwd=PACKAGE_ROOT,
                    env=client_environment(job.target),
                )
            processes.append(process)
            if process.stdin is not None:
                # It stays open: a client ends with it, so none outlives this process.
                with contextlib.suppress(BrokenPipeError):  # it has ended already; its exit status says so
                    process.stdin.write(ranked.model_dump_json() + "\n")
                    process.stdin.flush()
        deadline_seconds = time.monotonic() + timeout_seconds
        reasons = [_wait(process, deadline_seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
    outcomes = [
        _outcome(directory / f"outcome-{rank}.json", reason, errors[rank]) for rank, reason in enumerate(reasons)
    ]
    return [_scrubbed(outcome, job.target) for outcome in outcomes]


def _scrubbed(outcome: Outcome, target: Target) -> Outcome:
    result = outcome.result
    if isinstance(result, Failed):
        return Outcome(result=Failed(reason=target.scrub(result.reason)))
    return outcome


def _wait(process: subprocess.Popen[str], deadline_seconds: float) -> str | None:
    try:
        code = process.wait(max(0.0, deadline_seconds - time.monotonic()))
    except subprocess.TimeoutExpired:
        return "it did not end in time"
    return None if code == 0 else f"its process ended with {code}"


def _outcome(path: Path, reason: str | None, errors: Path) -> Outcome:
    if reason is None:
        try:
            return Outcome.model_validate_json(path.read_text())
        except (OSError, ValidationError):
            reason = "its process left no outcome"
    tail = errors.read_text(errors="replace").strip()[-_REASON_CHARACTERS:]
    return Outcome(result=Failed(reason=f"{reason}: {tail}" if tail else reason))


def order(cases: Sequence[str]) -> tuple[str, ...]:
    """Cases in the order of the table, each once; after them those with other numbers of ranks or steps.

    Raises:
        ValueError: There is no such case.
    """
    named = {name: case_of(name) for name in cases}
    return (*(name for name in CASES if not cases or name in named), *(name for name in named if name not in CASES))
