"""Figures told in Markdown: median with its range, and the ratio to a named baseline of the same run.

Only figures go into a median. An absent or failed contender keeps its line, with the reason in place of
figures; one that failed once is reported as failed, whatever it measured before.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence

from .cases import CASES
from .figures import Figure, Missing
from .manifest import Manifest
from .settings import Setting

__all__ = ["markdown"]

_HEADINGS = (
    "contender",
    "GB/s (min–max)",
    "first round",
    "× {baseline}",
    "CPU-s/GB",
    "extra MiB",
    "requests",
    "moved ÷ needed",
    "n",
)


def markdown(manifest: Manifest, results: Iterable[Figure | Missing], baselines: dict[Setting, str]) -> str:
    """A table for each case and setting."""
    versions = ", ".join(f"{name} {version or 'absent'}" for name, version in manifest.versions.items())
    dirty = " with local changes" if manifest.git_dirty else ""
    circumstances = (
        f"{manifest.cores} cores shared by client and server, load {manifest.load_average:.1f} at the start; "
        f"commit {(manifest.git_sha or 'unknown')[:12]}{dirty}; Python {manifest.python}, {versions}."
    )
    lines = [circumstances, ""]
    groups: dict[tuple[str, Setting], list[Figure | Missing]] = {}
    for result in results:
        groups.setdefault((result.entry.case, result.entry.setting), []).append(result)
    for (case, setting), group in groups.items():
        lines += _table(case, setting, group, baselines[setting])
    return "\n".join(lines)


def _table(case: str, setting: Setting, results: Sequence[Figure | Missing], baseline: str) -> list[str]:
    by_contender: dict[str, list[Figure | Missing]] = {}
    for result in results:
        by_contender.setdefault(result.entry.contender, []).append(result)
    reference = _median(_warm(by_contender.get(baseline, ())), lambda figure: figure.gb_per_second)
    headings = [heading.format(baseline=baseline) for heading in _HEADINGS]
    lines = [f"### {case}, {setting.value}", "", CASES[case].question, ""]
    lines += [_row(headings), _row(["---"] * len(headings))]
    for contender, own in by_contender.items():
        missing = next((result for result in own if isinstance(result, Missing)), None)
        if missing is not None:
            reason = missing.reason.splitlines()[0].replace("|", "/")[:200]
            lines.append(_row([contender, f"{missing.kind}: {reason}", *[""] * (len(headings) - 2)]))
            continue
        lines.append(_row([contender, *_cells(own, reference)]))
    return [*lines, ""]


def _cells(own: Sequence[Figure | Missing], reference: float | None) -> list[str]:
    warm = _warm(own)
    speeds = [figure.gb_per_second for figure in warm]
    speed = statistics.median(speeds)
    cold = [figure for figure in own if isinstance(figure, Figure) and figure.round == 0]
    return [
        f"{speed:.2f} ({min(speeds):.2f}–{max(speeds):.2f})",
        _show(_median(cold, lambda figure: figure.gb_per_second), "{:.2f}"),
        _show(None if reference is None else speed / reference, "{:.2f}"),
        _show(_median(warm, lambda figure: figure.cpu_seconds_per_gb), "{:.2f}"),
        _show(_median(warm, lambda figure: _mebibytes(figure.peak_extra_bytes)), "{:.0f}"),
        _show(_median(warm, lambda figure: figure.requests), "{:.0f}"),
        _show(_median(warm, lambda figure: figure.moved_per_needed), "{:.3f}"),
        str(len(warm)),
    ]


def _warm(own: Iterable[Figure | Missing]) -> list[Figure]:
    """The last round of each process: connections and buffers are there, as in a trainer's second save."""
    figures = [result for result in own if isinstance(result, Figure)]
    last = max((figure.round for figure in figures), default=0)
    return [figure for figure in figures if figure.round == last]


def _median(figures: Iterable[Figure], of: Callable[[Figure], float | None]) -> float | None:
    values = [value for figure in figures if (value := of(figure)) is not None]
    return statistics.median(values) if values else None


def _mebibytes(size_bytes: int | None) -> float | None:
    return None if size_bytes is None else size_bytes / (1 << 20)


def _show(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
