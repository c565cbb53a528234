"""Plans a run and carries it out: every contender in fresh processes, one at a time, in turns.

Problem: a shared machine is never the same twice, and what runs first finds it colder.

Way taken: repetitions go round all contenders, each time starting with another one, so that a slow minute
hits all. Checkpoints to load are saved beforehand, by the contender that will load them, in a process of its
own.

Flow: `Runner.run` → for each case: prepare → repetitions × contenders → processes of `benchmarks.client` →
`combine`.
"""

from __future__ import annotations

import enum
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from . import client
from .cases import CASES, Case, Operation
from .contenders import Scope, is_floor
from .figures import Entry, Figure, Missing, combine
from .job import Absent, Failed, Job, Outcome, Prepared
from .settings import PLACE_PREFIX, Setting, Target, client_environment
from .verification import remove

__all__ = ["Isolation", "Plan", "Runner", "order"]

_REPOSITORY = Path(__file__).resolve().parent.parent
_REASON_CHARACTERS = 600


class Isolation(str, enum.Enum):
    """Where a client runs."""

    PROCESS = "process"
    """In a process of its own: figures of CPU and memory are the contender's."""
    INLINE = "inline"
    """In this process where one rank is enough: for tests of the frame, not for figures."""


class Plan(BaseModel):
    """What to run in one setting."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    setting: Setting
    cases: tuple[str, ...]
    contenders: tuple[str, ...]
    size_bytes: int
    repetitions: int = 3
    rounds: int = 2
    timeout_seconds: float = 900.0
    isolation: Isolation = Isolation.PROCESS


class Runner:
    """Runs a plan at a place."""

    def __init__(self, plan: Plan, place: Target, tell: Callable[[str], None]) -> None:
        self._plan = plan
        self._place = place
        self._tell = tell
        self._prepared: dict[str, Target] = {}

    def run(self) -> Iterator[Figure | Missing]:
        """Carry the plan out; results come as they are there."""
        for name in self._plan.cases:
            yield from self._run_case(CASES[name])

    def _run_case(self, case: Case) -> Iterator[Figure | Missing]:
        if self._plan.setting is Setting.MEMORY and case.sharded:
            self._tell(f"{case.name}: memory:// lives in one process, so nothing is shared by ranks")
            return
        whole = not case.sharded and case.scope is Scope.WHOLE
        waiting = [name for name in self._plan.contenders if whole or not is_floor(name)]
        if case.operation is Operation.LOAD and self._plan.setting is not Setting.MEMORY:
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
                result = combine(entry, outcomes)
                if isinstance(result, Missing):
                    waiting.remove(contender)
                    self._tell(f"{case.name} {contender}: {result.kind}: {result.reason}")
                    yield result
                    continue
                last = result[-1]
                self._tell(
                    f"{case.name} {contender} #{repetition}: {last.gb_per_second:.2f} GB/s, "
                    f"{last.cpu_seconds_per_gb:.2f} CPU-s/GB"
                )
                yield from result
        self._drop_prepared()

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
        return Entry(case=case.name, setting=self._plan.setting, contender=contender, repetition=repetition)

    def _job(self, case: Case, contender: str, target: Target) -> Job:
        return Job(
            case=case.name,
            contender=contender,
            target=target,
            size_bytes=self._plan.size_bytes,
            rounds=self._plan.rounds,
        )

    def _clients(self, job: Job, world: int) -> list[Outcome]:
        if world == 1 and self._plan.isolation is Isolation.INLINE:
            return [client.run(job)]
        with tempfile.TemporaryDirectory(prefix=PLACE_PREFIX) as directory:
            return _run_processes(job, world, Path(directory), self._plan.timeout_seconds)


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
                    cwd=_REPOSITORY,
                    env=client_environment(),
                )
            processes.append(process)
            if process.stdin is not None:
                process.stdin.write(ranked.model_dump_json())
                process.stdin.close()
        deadline_seconds = time.monotonic() + timeout_seconds
        reasons = [_wait(process, deadline_seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [_outcome(directory / f"outcome-{rank}.json", reason, errors[rank]) for rank, reason in enumerate(reasons)]


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
    """Cases in the order of the table, each once.

    Raises:
        ValueError: There is no such case.
    """
    if unknown := [name for name in cases if name not in CASES]:
        raise ValueError(f"no case is called {', '.join(unknown)}; there are {', '.join(CASES)}")
    return tuple(name for name in CASES if not cases or name in cases)
