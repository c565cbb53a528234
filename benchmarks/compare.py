"""Two recordings compared: what got worse by more than runs differ among themselves.

Problem: the same code on the same machine is never as fast twice. A single pair of figures, or two medians, calls noise
a regression on one day and hides one on the next.

Way taken: the repetitions of both sides are put to an exact rank test (Mann-Whitney, both sides), which asks nothing of
how they are distributed: could these two sets come from one? A cost counts as worse only when the test says no and the
medians differ by more than a threshold. With so few runs that the test could never say no, that is the verdict. Counts
that hardly vary within a side (requests, bytes) need no test. A contender that failed where it had figures is
worse whatever it cost.

On different machines seconds mean nothing; there each run is divided by that of a reference contender with the same
number, which met the same minutes of the same machine. What was not the same work is not compared at all.

Flow: `compare` → `_refuse_other_work`, `_refuse_other_machine` → `judge` per case, contender and cost → `Comparison` →
`markdown`.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .figures import Missing
from .manifest import Manifest, RecordedPlan
from .rank_test import least_probability, rank_test, runs_needed
from .records import Metric, Recording, Sample

__all__ = [
    "JUDGED",
    "Comparison",
    "IncomparableError",
    "Judgement",
    "Limits",
    "Row",
    "Verdict",
    "compare",
    "judge",
    "markdown",
]

JUDGED = (Metric.WALL, Metric.CPU, Metric.REQUESTS, Metric.MOVED, Metric.BLOCKED)
"""Costs that are judged unless others are asked for."""
_Key = tuple[str, str, str]
_COUNTS = frozenset({Metric.REQUESTS, Metric.MOVED})
_TIMES = frozenset({Metric.WALL, Metric.CPU, Metric.BLOCKED})
_FLOORS = {Metric.PEAK: 8 * 2**20}
"""Below this a cost is noise: a few MiB of memory more are no regression."""


class IncomparableError(ValueError):
    """The recordings are not of the same work, or not of the same machine."""


class Verdict(str, enum.Enum):
    """What the runs say about one cost."""

    WORSE = "worse"
    BETTER = "better"
    WITHIN_NOISE = "within noise"
    TOO_FEW_RUNS = "too few runs to tell"
    NOW_FAILS = "now fails"


@dataclass(frozen=True, slots=True)
class Limits:
    """From where on a difference counts.

    Attributes:
        threshold: Share by which the median of a time or of memory must differ.
        count_threshold: The same for requests and bytes, which hardly vary.
        alpha: Largest probability that runs of the same thing differ as much by chance.
    """

    threshold: float = 0.05
    count_threshold: float = 0.01
    alpha: float = 0.05

    def of(self, metric: Metric) -> float:
        """The threshold of a cost."""
        return self.count_threshold if metric in _COUNTS else self.threshold


@dataclass(frozen=True, slots=True)
class Judgement:
    """One cost, old and new.

    Attributes:
        ratio: Median of the new runs by that of the old ones; above 1 is worse.
        probability: Of a difference as large by chance; None where nothing was tested.
        verdict: What follows.
    """

    ratio: float
    probability: float | None
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a comparison: costs of the runs on both sides, divided by the reference's where there is one."""

    case: str
    place: str
    contender: str
    metric: Metric | None
    old: tuple[float, ...]
    new: tuple[float, ...]
    judgement: Judgement


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything that both recordings have.

    Attributes:
        rows: In the order of the old recording.
        notes: What else differs, and what only one side has.
        reference: Whose runs times were divided by, or None.
        limits: That were applied.
    """

    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    reference: str | None
    limits: Limits

    @property
    def worse(self) -> tuple[Row, ...]:
        """The regressions."""
        return tuple(row for row in self.rows if row.judgement.verdict in (Verdict.WORSE, Verdict.NOW_FAILS))


def compare(
    old: Recording,
    new: Recording,
    *,
    metrics: Sequence[Metric] = JUDGED,
    contenders: Sequence[str] = (),
    reference: str | None = None,
    limits: Limits | None = None,
) -> Comparison:
    """Compare two recordings.

    Args:
        old: The base.
        new: What may be worse.
        metrics: Costs to judge.
        contenders: Only these; all when empty.
        reference: Contender on both sides whose times are taken as the measure of the machine.
        limits: From where on a difference counts.

    Raises:
        IncomparableError: The work or the machine isn't the same; says what differs.
    """
    limits = limits or Limits()
    old_runs, new_runs = _by_key(old.samples), _by_key(new.samples)
    common = [key for key in old_runs if key in new_runs]
    broken = [key for key in old_runs if key not in new_runs and any(_fails(result, key) for result in new.results)]
    _refuse_other_work(old, new, common)
    _refuse_other_machine(old.manifest, new.manifest, reference)
    if not common and not broken:
        raise IncomparableError(
            f"Can't compare {old.path} with {new.path}: no case and contender has figures in both of them."
        )
    rows: list[Row] = []
    for key in old_runs:
        if contenders and key[2] not in contenders:
            continue
        if key in broken:
            rows.append(Row(*key, None, (), (), Judgement(math.inf, None, Verdict.NOW_FAILS)))
        if key not in new_runs:
            continue
        for metric in metrics:
            divided = reference if metric in _TIMES else None
            if divided == key[2]:
                continue
            before, after = _costs(old_runs, key, metric, divided), _costs(new_runs, key, metric, divided)
            if before and after:
                rows.append(Row(*key, metric, before, after, judge(before, after, metric=metric, limits=limits)))
    if not rows:
        raise IncomparableError(_nothing_to_judge(contenders, reference))
    return Comparison(tuple(rows), tuple(_notes(old, new, old_runs, new_runs)), reference, limits)


def judge(old: Sequence[float], new: Sequence[float], *, metric: Metric, limits: Limits) -> Judgement:
    """Say whether new runs cost more than old ones by more than runs differ among themselves."""
    floor = _FLOORS.get(metric, 0.0)
    old, new = [max(floor, value) for value in old], [max(floor, value) for value in new]
    before, after = statistics.median(old), statistics.median(new)
    ratio = after / before if before else (math.inf if after else 1.0)
    if metric in _COUNTS and all(len(side) > 1 and _steady(side, limits.count_threshold) for side in (old, new)):
        return Judgement(ratio, None, _direction(ratio, limits.of(metric)))
    if least_probability(len(old), len(new)) > limits.alpha:
        return Judgement(ratio, None, Verdict.TOO_FEW_RUNS)
    probability = rank_test(old, new)
    if probability > limits.alpha:
        return Judgement(ratio, probability, Verdict.WITHIN_NOISE)
    return Judgement(ratio, probability, _direction(ratio, limits.of(metric)))


def markdown(comparison: Comparison) -> str:
    """Tell a comparison as a table, with what follows from it in words first."""
    rows, limits = comparison.rows, comparison.limits
    tested = sum(row.judgement.probability is not None for row in rows)
    unclear = sum(row.judgement.verdict is Verdict.TOO_FEW_RUNS for row in rows)
    worse = comparison.worse
    lines = [f"{len(worse)} of {len(rows)} costs are worse by more than the runs differ among themselves."]
    if tested:
        lines.append(
            f"{tested} were tested at {limits.alpha:g}: of that many, up to {tested * limits.alpha / 2:.1f} look worse "
            f"by chance where nothing changed and runs differ by more than {limits.threshold:.0%}."
        )
    if unclear:
        needed = runs_needed(limits.alpha)
        lines.append(
            f"{unclear} have too few runs to tell: at {limits.alpha:g} it takes {needed} on each side "
            f"(--repetitions {needed})."
        )
    unit = f", as multiples of {comparison.reference}'s in the same repetition" if comparison.reference else ""
    headings = (
        "case",
        "where",
        "contender",
        f"cost{unit}",
        "A (min–max), n",
        "B (min–max), n",
        "B ÷ A",
        "p",
        "verdict",
    )
    lines += ["", _line(headings), _line(["---"] * len(headings))]
    lines += [_line(_cells(row, comparison.reference)) for row in rows]
    if comparison.notes:
        lines += ["", *(f"- {note}" for note in comparison.notes)]
    return "\n".join([*lines, ""])


def _steady(counts: Sequence[float], threshold: float) -> bool:
    """A name's digit more or less changes no verdict."""
    return max(counts) <= min(counts) * (1 + threshold / 4)


def _direction(ratio: float, threshold: float) -> Verdict:
    if ratio > 1 + threshold:
        return Verdict.WORSE
    return Verdict.BETTER if ratio < 1 / (1 + threshold) else Verdict.WITHIN_NOISE


# --- which runs


def _by_key(samples: Sequence[Sample]) -> dict[_Key, list[Sample]]:
    found: dict[_Key, list[Sample]] = {}
    for sample in samples:
        found.setdefault((sample.case, sample.place, sample.contender), []).append(sample)
    return found


def _costs(
    runs: Mapping[_Key, Sequence[Sample]], key: _Key, metric: Metric, reference: str | None
) -> tuple[float, ...]:
    own = [sample for sample in runs[key] if metric in sample.costs]
    if reference is None:
        return tuple(sample.costs[metric] for sample in own)
    measure: dict[int, float] = {
        sample.repetition: sample.costs[metric]
        for sample in runs.get((key[0], key[1], reference), ())
        if sample.costs.get(metric)
    }
    return tuple(sample.costs[metric] / measure[sample.repetition] for sample in own if sample.repetition in measure)


def _fails(result: object, key: _Key) -> bool:
    if not isinstance(result, Missing) or result.kind != "failed":
        return False
    # Behind the name of a case its size or parameters may stand, which one that failed does not tell.
    of_case = key[0] == result.entry.case or key[0].startswith((f"{result.entry.case}, ", f"{result.entry.case} ("))
    return of_case and key[1] in ("", result.entry.where) and key[2] == result.entry.contender


# --- what may be compared


def _refuse_other_work(old: Recording, new: Recording, common: Sequence[_Key]) -> None:
    differing: list[str] = []
    before, after = _conditions(old.manifest), _conditions(new.manifest)
    for place in before:
        if place in after and before[place] != after[place]:
            names = sorted(
                name
                for name in before[place].keys() | after[place].keys()
                if before[place].get(name) != after[place].get(name)
            )
            differing += [
                f"{name} of {place}: {_told(before[place], name)} and {_told(after[place], name)}" for name in names
            ]
    old_runs, new_runs = _by_key(old.samples), _by_key(new.samples)
    if not differing:
        for key in common:
            left = sorted({sample.work for sample in old_runs[key]})
            right = sorted({sample.work for sample in new_runs[key]})
            if left != right:
                differing.append(f"{key[0]}, {key[2]}: {'; '.join(left)} and {'; '.join(right)}")
    if differing:
        raise IncomparableError(
            f"Can't compare {old.path} with {new.path}, which did other work: {'. '.join(differing)}."
        )


def _conditions(manifest: Manifest) -> dict[str, dict[str, frozenset[str]]]:
    found: dict[str, dict[str, frozenset[str]]] = {}
    for plan in manifest.plans:
        told = found.setdefault(f"{plan.setting} {plan.scheme}" if plan.scheme else plan.setting, {})
        for name, value in _fixed(plan):
            told[name] = told.get(name, frozenset()) | {value}
    return found


def _fixed(plan: RecordedPlan) -> list[tuple[str, str]]:
    conditions = [(name, str(value)) for name, value in plan.conditions.items()]
    return [("size_bytes", str(plan.size_bytes)), ("rounds", str(plan.rounds)), *conditions]


def _told(conditions: Mapping[str, frozenset[str]], name: str) -> str:
    return "/".join(sorted(conditions.get(name, frozenset({"not said"}))))


def _refuse_other_machine(old: Manifest, new: Manifest, reference: str | None) -> None:
    if reference is not None:
        return
    facts: tuple[tuple[str, Callable[[Manifest], object]], ...] = (
        ("processor", lambda manifest: manifest.processor or "unknown"),
        ("cores", lambda manifest: manifest.cores),
        ("GiB of memory", lambda manifest: round(manifest.memory_bytes / 2**30)),
    )
    differing = [f"{name}: {of(old)} and {of(new)}" for name, of in facts if of(old) != of(new)]
    if differing:
        raise IncomparableError(
            f"Can't compare seconds of different machines ({', '.join(differing)}): name a contender that both have "
            "with --reference."
        )


def _nothing_to_judge(contenders: Sequence[str], reference: str | None) -> str:
    asked = f"contender {', '.join(contenders)}" if contenders else "a contender"
    against = f" beside one of {reference} in the same repetition" if reference else ""
    return f"Can't compare: no run of {asked} has the costs asked for{against} in both recordings."


def _notes(
    old: Recording, new: Recording, old_runs: Mapping[_Key, object], new_runs: Mapping[_Key, object]
) -> list[str]:
    notes = [f"A: {_version_of(old.manifest)}", f"B: {_version_of(new.manifest)}"]
    before, after = old.manifest, new.manifest
    changed = [
        f"{name} {before.versions.get(name) or 'absent'} → {after.versions.get(name) or 'absent'}"
        for name in sorted(before.versions.keys() | after.versions.keys())
        if before.versions.get(name) != after.versions.get(name)
    ]
    changed += [f"Python {before.python} → {after.python}"] if before.python != after.python else []
    changed += [f"{before.system} → {after.system}"] if before.system != after.system else []
    if changed:
        notes.append(f"Changed from A to B: {', '.join(changed)}.")
    for name, mine, other in (("A", old_runs, new_runs), ("B", new_runs, old_runs)):
        if only := [" ".join(part for part in (key[0], key[1], key[2]) if part) for key in mine if key not in other]:
            notes.append(f"Only in {name}: {'; '.join(only)}.")
    return notes


def _version_of(manifest: Manifest) -> str:
    dirty = " with local changes" if manifest.git_dirty else ""
    taken = f"{manifest.taken_at:%Y-%m-%d %H:%M} UTC"
    return (
        f"commit {(manifest.git_sha or 'unknown')[:12]}{dirty}, {taken}, load {manifest.load_average:.1f} at its start."
    )


# --- table


def _cells(row: Row, reference: str | None) -> list[str]:
    judgement = row.judgement
    named = [row.case, row.place, row.contender]
    if row.metric is None:
        return [*named, "", "", "", "", "", f"**{judgement.verdict.value}**"]
    form = _divided if reference is not None and row.metric in _TIMES else _FORMS[row.metric]
    probability = "–" if judgement.probability is None else f"{judgement.probability:.3f}"
    verdict = judgement.verdict.value
    return [
        *named,
        row.metric.value,
        _spread(row.old, form),
        _spread(row.new, form),
        f"{judgement.ratio:.3f}",
        probability,
        f"**{verdict}**" if judgement.verdict is Verdict.WORSE else verdict,
    ]


def _spread(values: Sequence[float], form: Callable[[float], str]) -> str:
    return f"{form(statistics.median(values))} ({form(min(values))}–{form(max(values))}), {len(values)}"


def _divided(value: float) -> str:
    return f"{value:.3g}"


def _seconds(value: float) -> str:
    return f"{value:.3g} s"


def _megabytes(value: float) -> str:
    return f"{value / 1e6:,.1f} MB"


def _count(value: float) -> str:
    return f"{value:,.0f}"


_FORMS: dict[Metric, Callable[[float], str]] = {
    Metric.WALL: _seconds,
    Metric.CPU: _seconds,
    Metric.BLOCKED: _seconds,
    Metric.PEAK: _megabytes,
    Metric.MOVED: _megabytes,
    Metric.REQUESTS: _count,
}


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
