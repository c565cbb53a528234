"""Plans carried out one after the other, each at its place, with everything kept as it comes.

Problem: a run of hours that is broken off, or fails in its last case, should not have measured for nothing.

Way taken: the manifest is written before the first measurement and every result as a JSON line at once, so that tables
and plots can be made of a file of any length. What a plan may be told is in its manifest; URL and options, which can
hold secrets, stay beside it, in the `Stage`.

Flow: `carry_out(stages)` → for each: `open_place` → `Runner.run` → stream, progress, list of results.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from pydantic import BaseModel, JsonValue, TypeAdapter
from typing_extensions import Self

from dcpfs.storage.location import Location

from .cases import Case, Operation, case_of
from .contenders import Role, is_known
from .figures import Entry, Figure, Missing, StepFigure
from .manifest import Manifest, RecordedPlan, take
from .place import open_place
from .progress import RunProgress
from .runner import Plan, Runner
from .settings import Setting, Target
from .workloads import specs

__all__ = [
    "RecordStream",
    "Stage",
    "baseline_of",
    "baselines_in",
    "carry_out",
    "check_contenders",
    "ended_by_signals",
    "manifest_of",
    "most_bytes_at_once",
    "units",
    "written_bytes",
]

_OPTIONS: TypeAdapter[dict[str, JsonValue]] = TypeAdapter(dict[str, JsonValue])
_STEP_BYTES = 1 << 20
"""More than a step takes in the cases that count steps."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A plan and where it is carried out.

    Attributes:
        plan: What to run.
        url: The user's, for the setting ``url``.
        storage_options: For that URL. They can hold secrets.
        disk_directory: For the setting ``disk``.
    """

    plan: Plan
    url: str | None = field(default=None, repr=False)
    storage_options: Mapping[str, object] = field(default_factory=dict, repr=False)
    disk_directory: Path | None = None

    @property
    def where(self) -> str:
        """As in its figures."""
        link = self.plan.link
        return Entry(
            case="",
            setting=self.plan.setting,
            contender="",
            repetition=0,
            place=self.plan.place,
            latency_ms=None if link is None else link.latency_ms,
            mb_per_second_per_connection=None if link is None else link.mb_per_second_per_connection,
        ).where

    @property
    def scheme(self) -> str:
        """Of its URL or setting."""
        return self.plan.setting.scheme if self.url is None else Location(self.url).scheme


class RecordStream:
    """The stream of JSON lines of a run. Context manager; the manifest is its first line.

    Args:
        path: Of the file, or None.
        manifest: Of the run.
    """

    def __init__(self, path: Path | None, manifest: Manifest) -> None:
        self._stream = None if path is None else path.open("w")
        self.write(manifest)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.close()

    def write(self, record: BaseModel) -> None:
        """Write a line, whole, at once."""
        if self._stream is not None:
            self._stream.write(record.model_dump_json() + "\n")
            self._stream.flush()


def manifest_of(stages: Sequence[Stage]) -> Manifest:
    """Circumstances of a run of these stages, without a word that may not be told."""
    plans: list[RecordedPlan] = []
    for stage in stages:
        given = stage.plan.setting is Setting.URL
        scheme = stage.scheme if given else None
        plans.append(RecordedPlan.of(stage.plan, scheme=scheme, storage_options=stage.storage_options))
    return take(plans)


def check_contenders(names: Sequence[str], everybody: Sequence[str]) -> None:
    """Refuse a name that stands for nobody: a run without it would look as if it had no figures to give.

    Args:
        names: That were asked for.
        everybody: Who could take part, for the text.

    Raises:
        ValueError: A name is unknown.
    """
    if unknown := [name for name in names if not any(is_known(name, role) for role in Role)]:
        raise ValueError(
            f"no contender is called {', '.join(unknown)}; here there are {', '.join(everybody)}, or module:attribute"
        )


def units(plan: Plan) -> int:
    """Units of progress of a plan."""
    return sum(len(_taking_part(case_of(name), plan)) for name in plan.cases) * plan.repetitions


def written_bytes(plan: Plan) -> int:
    """About how much a plan writes in all; it is never there all at once."""
    return sum(_case_bytes(name, plan) for name in plan.cases)


def most_bytes_at_once(plan: Plan) -> int:
    """About how much of it is there at a time: what is to be loaded is there for all contenders of a case."""
    return max((_case_bytes_at_once(name, plan) for name in plan.cases), default=0)


def _case_bytes(name: str, plan: Plan) -> int:
    case = case_of(name)
    if case.operation is Operation.SAVE:
        return _state_bytes(case, plan) * len(_taking_part(case, plan)) * plan.repetitions * plan.rounds
    if case.operation is Operation.CHECKPOINT:
        return _case_bytes_at_once(name, plan) * len(_taking_part(case, plan)) * plan.repetitions
    return _case_bytes_at_once(name, plan)


def _case_bytes_at_once(name: str, plan: Plan) -> int:
    case = case_of(name)
    if case.operation is Operation.LOAD:
        return _state_bytes(case, plan) * len(_taking_part(case, plan))
    if case.operation is Operation.SAVE:
        return _state_bytes(case, plan)
    if case.operation is Operation.CHECKPOINT:
        return _state_bytes(case, plan) * (plan.rounds + 1)  # its steps stay, and one more proves them
    return _STEP_BYTES * case.steps * len(_taking_part(case, plan))


def _taking_part(case: Case, plan: Plan) -> list[str]:
    return [name for name in plan.contenders if is_known(name, case.role)]


def _state_bytes(case: Case, plan: Plan) -> int:
    return sum(spec.size_bytes for spec in specs(case.workload, plan.size_bytes))


def baseline_of(scheme: str) -> str:
    """The contender that is commonly used at places of a scheme."""
    if scheme == "s3":
        return "s3torchconnector"
    return "torch-4" if scheme == "file" else "torch-fsspec"


def baselines_in(manifest: Manifest) -> dict[str, str]:
    """The same for each place of a recorded run (`Entry.where`)."""
    found: dict[str, str] = {}
    for plan in manifest.plans:
        link = {name: plan.conditions.get(name) for name in ("latency_ms", "mb_per_second_per_connection")}
        told = {"case": "", "setting": plan.setting, "contender": "", "repetition": 0, "place": plan.place, **link}
        entry = Entry.model_validate(told)
        found[entry.where] = baseline_of(plan.scheme or entry.setting.scheme)
    return found


def carry_out(
    stages: Sequence[Stage],
    stream: RecordStream,
    progress: RunProgress,
    check: Callable[[Target], None] | None = None,
) -> list[Figure | StepFigure | Missing]:
    """Carry the stages out and return all results, in their order.

    Args:
        stages: What to run where.
        stream: Results are written there at once.
        progress: Told what is going on.
        check: Called with each place before anything else is done there; its exception ends the run.
    """
    results: list[Figure | StepFigure | Missing] = []
    behind = 0
    for stage in stages:
        plan = stage.plan
        options = _OPTIONS.validate_python(dict(stage.storage_options))
        with open_place(
            plan.setting, stage.disk_directory, plan.size_bytes, link=plan.link, url=stage.url, storage_options=options
        ) as place:
            if check is not None:
                check(place)
            for result in Runner(plan, place, progress.tell).run():
                results.append(result)
                stream.write(result)
                progress.count(result, plan.repetitions)
        behind += units(plan)
        progress.reach(behind)
    return results


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM ends the run in the orderly way, so that what was written is deleted."""

    def leave(number: int, frame: FrameType | None) -> None:
        del frame
        raise SystemExit(128 + number)

    try:
        before = signal.signal(signal.SIGTERM, leave)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
