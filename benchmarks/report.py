"""Figures told in Markdown: median with its range, and the ratio to a named baseline of the same run.

Only figures go into a median. An absent or failed contender keeps its line, with the reason in place of
figures; one that failed once is reported as failed, whatever it measured before.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from .cases import case_of
from .figures import Figure, Missing, StepFigure, link_text
from .manifest import Manifest
from .records import Result, warm
from .settings import Setting

__all__ = ["circumstances", "markdown"]

_HEADINGS = (
    "contender",
    "GB/s (min–max)",
    "first round",
    "× {baseline}",
    "CPU-s/GB (min–max)",
    "extra MiB (min–max)",
    "requests",
    "moved ÷ needed",
    "n",
)
_PROXY = (
    "Latency and rate are those of a proxy before the server, which takes time of the same cores; opening a connection "
    "is not delayed."
)
_STEP_HEADINGS = (
    "contender",
    "seconds (min–max)",
    "first round",
    "training waits, s (min–max)",
    "CPU-s (min–max)",
    "extra MiB (min–max)",
    "requests",
    "n",
)
_REASON_CHARACTERS = 200
_HOW = (
    "Each figure is one call. Starting a process, importing, making the state and comparing what was saved or loaded, "
    "bit for bit, are outside of it; without that proof there is no figure. Contenders take turns. Of each of n fresh "
    'processes the last call counts, with connections and buffers as the calls before left them; "first round" is its '
    "first. Median (min–max) over the processes. GB are 10^9 bytes of payload, CPU s are the client's, extra MiB is "
    "its peak of memory above the state."
)
_F = TypeVar("_F", Figure, StepFigure)
_R = TypeVar("_R", Figure | Missing, StepFigure | Missing)


def markdown(manifest: Manifest, results: Iterable[Result], baselines: Mapping[str, str]) -> str:
    """A table for each case, place and size, and one of all places where there are several.

    Args:
        manifest: Of the run.
        results: Of the run.
        baselines: Contender that ratios are to, by place (`Entry.where`).
    """
    results = list(results)
    lines = [circumstances(manifest), ""]
    if results:
        settings = dict.fromkeys(result.entry.setting for result in results)
        told = [f"{setting.value}: {setting.told}." for setting in settings if setting.told]
        if any(result.entry.setting is Setting.URL and link_text(result.entry) for result in results):
            told.append(_PROXY)
        lines += [" ".join([_HOW, *told]), ""]
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.entry.case, result.entry.where), []).append(result)
    for (case, where), group in groups.items():
        steps = [result for result in group if isinstance(result, StepFigure | Missing)]
        if any(isinstance(result, StepFigure) for result in steps):
            lines += _step_table(case, where, steps)
            continue
        sizes = dict.fromkeys(result.needed_bytes for result in group if isinstance(result, Figure)) or {0: None}
        for size in sizes:
            own = [
                result
                for result in group
                if isinstance(result, Missing) or (isinstance(result, Figure) and result.needed_bytes == size)
            ]
            title = f"{case}, {where}, {_number(size / 1e9)} GB" if size else f"{case}, {where}"
            lines += _table(case, title, own, baselines.get(where))
    lines += _places([result for group in groups.values() for result in group])
    return "\n".join(lines)


def circumstances(manifest: Manifest) -> str:
    """Machine, commit and versions in one sentence."""
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items() if version)
    absent = ", ".join(name for name, version in manifest.versions.items() if not version)
    dirty = " with local changes" if manifest.git_dirty else ""
    processor = f" ({manifest.processor})" if manifest.processor else ""
    return (
        f"{manifest.cores} cores{processor} shared by all, {manifest.memory_bytes / 2**30:.0f} GiB, {manifest.system}, "
        f"load {manifest.load_average:.1f} at the start; commit {(manifest.git_sha or 'unknown')[:12]}{dirty}; "
        f"Python {manifest.python}, {versions}{f'; without {absent}' if absent else ''}."
    )


def _table(case: str, title: str, results: Sequence[Figure | Missing], baseline: str | None) -> list[str]:
    by_contender = _by_contender(results)
    reference = _median(warm(by_contender.get(baseline or "", ())), lambda figure: figure.gb_per_second)
    headings = [heading.format(baseline=baseline or "baseline") for heading in _HEADINGS]
    lines = _head(case, title, headings)
    for contender, own in by_contender.items():
        missing = _missing(own)
        cells = _cells(own, reference) if missing is None else [missing, *[""] * (len(headings) - 2)]
        lines.append(_row([contender, *cells]))
    return [*lines, ""]


def _cells(own: Sequence[Figure | Missing], reference: float | None) -> list[str]:
    last = warm(own)
    speed = statistics.median(figure.gb_per_second for figure in last)
    first = [figure for figure in own if isinstance(figure, Figure) and figure.round == 0]
    return [
        _spread([figure.gb_per_second for figure in last]),
        _show(_median(first, lambda figure: figure.gb_per_second)),
        _show(speed / reference if reference else None),
        _spread([figure.cpu_seconds_per_gb for figure in last]),
        _spread([figure.peak_extra_bytes / 2**20 for figure in last if figure.peak_extra_bytes is not None], _whole),
        _show(_median(last, lambda figure: figure.requests), _whole),
        _show(_median(last, lambda figure: figure.moved_per_needed), "{:.3f}".format),
        str(len(last)),
    ]


def _step_table(case: str, where: str, results: Sequence[StepFigure | Missing]) -> list[str]:
    lines = _head(case, f"{case}, {where}", _STEP_HEADINGS)
    for contender, own in _by_contender(results).items():
        missing = _missing(own)
        cells = _step_cells(own) if missing is None else [missing, *[""] * (len(_STEP_HEADINGS) - 2)]
        lines.append(_row([contender, *cells]))
    return [*lines, ""]


def _step_cells(own: Sequence[StepFigure | Missing]) -> list[str]:
    last = warm(own)
    first = [figure for figure in own if isinstance(figure, StepFigure) and figure.round == 0]
    return [
        _spread([figure.seconds for figure in last]),
        _show(_median(first, lambda figure: figure.seconds)),
        _spread([figure.blocked_seconds for figure in last if figure.blocked_seconds is not None]),
        _spread([figure.cpu_seconds for figure in last]),
        _spread([figure.peak_bytes / 2**20 for figure in last if figure.peak_bytes is not None], _whole),
        _show(_median(last, lambda figure: figure.requests), _whole),
        str(len(last)),
    ]


def _places(results: Sequence[Result]) -> list[str]:
    """One row a place, one column a case: GB/s of dcpfs, where several places were measured."""
    figures = [
        figure
        for figure in warm([result for result in results if isinstance(result, Figure | Missing)])
        if figure.entry.contender == "dcpfs"
    ]
    places = list(dict.fromkeys(figure.entry.where for figure in figures))
    cases = list(dict.fromkeys(figure.entry.case for figure in figures))
    if len(places) < 2:
        return []
    lines = ["### dcpfs at each place, GB/s (min–max)", "", _row(["where", *cases]), _row(["---"] * (len(cases) + 1))]
    for place in places:
        speeds = (
            [figure.gb_per_second for figure in figures if (figure.entry.where, figure.entry.case) == (place, case)]
            for case in cases
        )
        lines.append(_row([place, *(_spread(own) for own in speeds)]))
    return [*lines, ""]


def _head(case: str, title: str, headings: Sequence[str]) -> list[str]:
    try:
        question = [case_of(case).question, ""]
    except ValueError:  # of another version, or somebody's own
        question = []
    return [f"### {title}", "", *question, _row(headings), _row(["---"] * len(headings))]


def _by_contender(results: Sequence[_R]) -> dict[str, list[_R]]:
    found: dict[str, list[_R]] = {}
    for result in results:
        found.setdefault(result.entry.contender, []).append(result)
    return found


def _missing(own: Sequence[Result]) -> str | None:
    """Why a contender has no figures, on one line; None: it has."""
    missing = next((result for result in own if isinstance(result, Missing)), None)
    if missing is None:
        return None
    lines = missing.reason.splitlines() or ["no reason given"]
    return f"{missing.kind}: {lines[0].replace('|', '/')[:_REASON_CHARACTERS]}"


def _median(figures: Iterable[_F], of: Callable[[_F], float | None]) -> float | None:
    values = [value for figure in figures if (value := of(figure)) is not None]
    return statistics.median(values) if values else None


def _number(value: float) -> str:
    """Two digits behind the point, more where these are zeros."""
    if not value or abs(value) >= 0.1:
        return f"{value:.2f}"
    return f"{value:.{1 - math.floor(math.log10(abs(value)))}f}"


def _whole(value: float) -> str:
    return f"{value:.0f}"


def _spread(values: Sequence[float], form: Callable[[float], str] = _number) -> str:
    if not values:
        return "–"
    middle = form(statistics.median(values))
    return middle if len(values) == 1 else f"{middle} ({form(min(values))}–{form(max(values))})"


def _show(value: float | None, form: Callable[[float], str] = _number) -> str:
    return "–" if value is None else form(value)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
