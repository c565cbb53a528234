"""Recorded runs: a file of JSON lines, the manifest first, read back for tables, plots and comparisons.

Problem: cases measure different things, so their figures are of different kinds, and a reader of files should not have
to know all of them, nor those that a later version adds.

Way taken: every line says its ``kind``. What only some readers need stays the figure that it is; what all cases have in
common is made a `Sample`: whose it is, and what it cost. A cost is always the lower the better. Lines of a kind that
isn't known here give a sample when they have the common fields, and are counted as left out when they don't.

Flow: `read` → `Recording` (manifest, figures, missing, samples).
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from .cases import Case, Client, Operation, case_of, needed
from .contenders import Role, Scope
from .figures import Figure, Missing, StepFigure
from .manifest import Manifest
from .planning import RanksFigure, SimulationFigure
from .stall import StallFigure
from .tune import TuneFigure
from .workloads import specs

__all__ = [
    "Metric",
    "Recording",
    "Result",
    "Sample",
    "UnreadableRecordError",
    "read",
    "recording_of",
    "samples_of",
    "warm",
]


Result = Figure | StepFigure | Missing
"""What the runner gives."""
_Timed = TypeVar("_Timed", Figure, StepFigure, Figure | StepFigure)


class Metric(str, enum.Enum):
    """A cost of one run."""

    WALL = "wall"
    """Seconds that the call took."""
    CPU = "cpu"
    """CPU seconds of the client's processes."""
    PEAK = "peak"
    """Bytes of memory above the state, at the peak."""
    REQUESTS = "requests"
    """Requests that the server counted."""
    MOVED = "moved"
    """Bytes that the server sent and received."""
    BLOCKED = "blocked"
    """Seconds that training stood still."""


class UnreadableRecordError(ValueError):
    """A file is no recording of these benchmarks."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What one run cost.

    Attributes:
        case: The question, with its parameters.
        place: Where: a setting, or a redacted URL.
        contender: Whose.
        repetition: Runs of the same number alternated, so they met the same minutes of the machine.
        work: What the run had to do, as text: only equal work can be compared.
        costs: Those that were measured.
        family: The question without its parameters.
        parameters: Its numbers, e.g. of tensors, ranks or steps.
    """

    case: str
    place: str
    contender: str
    repetition: int
    work: str
    costs: Mapping[Metric, float]
    family: str
    parameters: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Recording:
    """One file.

    Attributes:
        path: Of the file.
        manifest: Its circumstances.
        results: Figures and missing ones of the cases at a place, in their order.
        others: Figures of the other cases that are known here.
        samples: What all cases have in common. Of each process its last round alone, in which connections and
            buffers are warm.
        left_out: Kinds of lines that gave nothing, with their number.
    """

    path: Path
    manifest: Manifest
    results: tuple[Result, ...]
    others: tuple[BaseModel, ...]
    samples: tuple[Sample, ...]
    left_out: Mapping[str, int]


_OTHERS: dict[str, type[SimulationFigure | RanksFigure | StallFigure | TuneFigure]] = {
    "planning-simulated": SimulationFigure,
    "planning-ranks": RanksFigure,
    "stall": StallFigure,
    "tuning": TuneFigure,
}
_STEPS = ("checkpointer", "discovery", "retention")
_COMMON = {
    Metric.WALL: ("seconds", "wall_seconds"),
    Metric.CPU: ("coordinator_cpu_seconds", "cpu_seconds"),
    Metric.PEAK: ("coordinator_extra_bytes", "peak_bytes", "peak_extra_bytes"),
    Metric.REQUESTS: ("requests",),
    Metric.MOVED: ("moved_bytes",),
}
"""Under which names kinds of figures tell a cost."""
_WORK = ("ranks", "steps", "tensors", "save", "mode", "size_bytes", "gigabytes", "threads")
"""Names of what a run is told to do, beside its case."""
_NAMED = ("ranks", "steps", "save", "mode")
"""Those that there are several of in one run."""
_FAMILIES = {"planning-simulated": "planning, the coordinator", "planning-ranks": "planning, rank 0"}
_NUMBERS = ("ranks", "steps", "tensors")


def read(path: Path) -> Recording:
    """Read a recording.

    Raises:
        UnreadableRecordError: It isn't one, or of another version; names file and line.
    """
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise UnreadableRecordError(f"Can't read figures from {path}: {reason}.") from error
    manifest: Manifest | None = None
    gathered = _Gathered()
    number = 0
    try:
        for number, line in enumerate(lines, start=1):
            values = json.loads(line)
            if number == 1:
                manifest = Manifest.model_validate(values)
            else:
                gathered.add(values)
    except ValidationError as error:
        what = "the manifest of a run" if number == 1 else "a figure"
        fields = ", ".join(sorted({str(each["loc"][0]) for each in error.errors() if each["loc"]}))
        raise UnreadableRecordError(
            f"Can't read line {number} of {path} as {what}, another version may have written it: {fields}."
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise UnreadableRecordError(f"Can't read line {number} of {path}: it is no figure in JSON.") from error
    if manifest is None:
        raise UnreadableRecordError(f"Can't read figures from {path}: it is empty.")
    return gathered.recording(path, manifest)


def recording_of(path: Path, manifest: Manifest, results: Sequence[BaseModel]) -> Recording:
    """What `read` would make of a run's results, had they been written to ``path``."""
    gathered = _Gathered()
    for result in results:
        gathered.add(result.model_dump(mode="json"))
    return gathered.recording(path, manifest)


class _Gathered:
    """Lines after the manifest, sorted by what they are good for."""

    def __init__(self) -> None:
        self._results: list[Result] = []
        self._others: list[BaseModel] = []
        self._raw: list[Mapping[str, object]] = []
        self._left_out: dict[str, int] = {}

    def add(self, values: Mapping[str, object]) -> None:
        kind = str(values["kind"])
        if kind in ("absent", "failed"):
            self._results.append(Missing.model_validate(values))
        elif kind == "figure":
            self._results.append(Figure.model_validate(values))
        elif kind in _STEPS:
            self._results.append(StepFigure.model_validate(values))
        elif kind in _OTHERS:
            self._others.append(_OTHERS[kind].model_validate(values))
            self._raw.append(values)
        elif "contender" in values and any(name in values for names in _COMMON.values() for name in names):
            self._raw.append(values)
        else:
            self._left_out[kind] = self._left_out.get(kind, 0) + 1

    def recording(self, path: Path, manifest: Manifest) -> Recording:
        samples = samples_of(warm(self._results), [plan.size_bytes for plan in manifest.plans])
        gone = {(each.entry.case, each.entry.contender) for each in self._results if isinstance(each, Missing)}
        samples += [
            _sample(values)
            for values in self._raw
            if values["kind"] != "tuning" and (str(values.get("case")), str(values["contender"])) not in gone
        ]
        return Recording(
            path, manifest, tuple(self._results), tuple(self._others), tuple(samples), dict(self._left_out)
        )


def warm(results: Iterable[_Timed | Missing]) -> list[_Timed]:
    """The last round of each contender's processes; of one that failed or was absent at any time nothing."""
    results = list(results)
    gone = {_whose(result) for result in results if isinstance(result, Missing)}
    figures = [result for result in results if not isinstance(result, Missing) and _whose(result) not in gone]
    last: dict[tuple[str, str, str], int] = {}
    for figure in figures:
        last[_whose(figure)] = max(figure.round, last.get(_whose(figure), 0))
    return [figure for figure in figures if figure.round == last[_whose(figure)]]


def samples_of(figures: Sequence[Figure | StepFigure], sizes_bytes: Sequence[int]) -> list[Sample]:
    """What figures of cases at a place cost.

    Args:
        figures: Of one run.
        sizes_bytes: That its states were scaled to. With several of them a case's name says which it is.
    """
    amounts: dict[str, set[str]] = {}
    for figure in figures:
        amounts.setdefault(figure.entry.case, set()).add(_work(figure))
    counts = {
        (name, f"{sum(spec.size_bytes for spec in moved)} bytes"): len(moved)
        for name in amounts
        if (known := _case(name)) is not None and known.role is Role.STORAGE
        for size_bytes in set(sizes_bytes)
        for moved in [needed(known, specs(known.workload, size_bytes))]
    }
    samples: list[Sample] = []
    for figure in figures:
        case, place, contender = _whose(figure)
        work = _work(figure)
        parameters: dict[str, float] = {"ranks": figure.ranks}
        if isinstance(figure, StepFigure) and figure.steps:
            parameters["steps"] = figure.steps
        if (case, work) in counts:
            parameters["tensors"] = counts[case, work]
        samples.append(
            Sample(
                case=f"{case}, {work}" if len(amounts[case]) > 1 else case,
                place=place,
                contender=contender,
                repetition=figure.entry.repetition,
                work=work,
                costs=_costs(figure),
                family=_family(case),
                parameters=parameters,
            )
        )
    return samples


def _whose(result: Result) -> tuple[str, str, str]:
    return result.entry.case, result.entry.where, result.entry.contender


def _work(figure: Figure | StepFigure) -> str:
    if isinstance(figure, Figure):
        return f"{figure.needed_bytes} bytes"
    return f"{figure.steps} steps" if figure.gigabytes is None else f"{round(figure.gigabytes * 1e9)} bytes"


def _costs(figure: Figure | StepFigure) -> dict[Metric, float]:
    if isinstance(figure, Figure):
        gigabytes = figure.needed_bytes / 1e9
        moved = None if figure.moved_per_needed is None else figure.moved_per_needed * figure.needed_bytes
        found = {
            Metric.WALL: figure.wall_seconds,
            Metric.CPU: figure.cpu_seconds_per_gb * gigabytes,
            Metric.PEAK: figure.peak_extra_bytes,
            Metric.REQUESTS: figure.requests,
            Metric.MOVED: moved,
        }
    else:
        found = {
            Metric.WALL: figure.seconds,
            Metric.CPU: figure.cpu_seconds,
            Metric.PEAK: figure.peak_bytes,
            Metric.REQUESTS: figure.requests,
            Metric.MOVED: figure.moved_bytes,
            Metric.BLOCKED: figure.blocked_seconds,
        }
    return {metric: value for metric, value in found.items() if value is not None}


def _family(name: str) -> str:
    """Cases that differ in the number of ranks or steps alone are one question."""
    case = _case(name)
    if case is None:
        return name
    if case.role is not Role.STORAGE:
        return name.partition("-")[0]
    part = ", every 20th key" if case.scope is Scope.PART else ""
    before = f", saved by {case.save_world}" if case.operation is Operation.LOAD and case.sharded else ""
    cold = ", cold" if case.client is Client.FRESH else ""
    return f"{case.operation.value}, {case.workload.value}{part}{before}{cold}"


def _case(name: str) -> Case | None:
    try:
        return case_of(name)
    except ValueError:
        return None


def _sample(values: Mapping[str, object]) -> Sample:
    costs: dict[Metric, float] = {}
    for metric, names in _COMMON.items():
        for name in names:
            found = values.get(name)
            if isinstance(found, int | float) and math.isfinite(found):
                costs[metric] = found
                break
    later = values.get("later")
    if isinstance(later, Mapping) and isinstance(later.get("total_seconds"), int | float):
        costs[Metric.BLOCKED] = later["total_seconds"]
    repetition = values.get("repetition")
    kind = str(values["kind"])
    case = str(values.get("case") or kind)
    named = ", ".join(f"{name}={values[name]}" for name in _NAMED if values.get(name) is not None)
    texts = ", ".join(f"{name}={values[name]}" for name in ("save", "mode") if values.get(name) is not None)
    numbers = {name: float(found) for name in _NUMBERS if isinstance(found := values.get(name), int | float)}
    return Sample(
        case=f"{case} ({named})" if named else case,
        place=str(values.get("place") or values.get("setting") or ""),
        contender=str(values["contender"]),
        repetition=repetition if isinstance(repetition, int) else 0,
        work=", ".join(f"{name}={values[name]}" for name in _WORK if values.get(name) is not None),
        costs=costs,
        family=f"{_FAMILIES.get(kind, case)} ({texts})" if texts else _FAMILIES.get(kind, case),
        parameters=numbers,
    )
