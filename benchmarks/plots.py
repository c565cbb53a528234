"""Plots of recorded runs, as PNG and SVG, that read the same on a light page and on a dark one.

Problem: a README is shown on white and on near-black; a plot made for one is unreadable on the other, and a plot with a
white card hurts on the dark page. Colours alone tell nothing to many.

Way taken: the background is transparent, and all text is of the one grey that stands out equally from both (4.3 : 1).
Every colour keeps 3 : 1 from either, and is doubled by a hatch, a marker or a label. Values are written beside their
bars and into their cells, so that nobody has to measure the picture. What is drawn is decided by pure functions first
(`bars_of`, `grids_of`, `curves_of`); only the last third of this module knows matplotlib, which is imported when asked.

Flow: `draw(recording, directory)` → panels → files: ``throughput-*``, ``cpu-*``, ``seconds-*``, ``waits-*``,
``grid-*``, ``stall``, ``over-tensors``, ``over-ranks``, ``over-steps``, as far as the recording has figures for them.
"""

from __future__ import annotations

import contextlib
import math
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .contenders import is_floor
from .figures import Figure, Missing, StepFigure
from .records import Metric, Recording, Sample, warm
from .stall import CASE as STALL
from .stall import StallFigure
from .tune import TuneFigure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

__all__ = [
    "DARK_PAGE",
    "INK",
    "LIGHT_PAGE",
    "PALETTE",
    "Bar",
    "Bars",
    "Curve",
    "Curves",
    "Grid",
    "NothingToPlotError",
    "Point",
    "bars_of",
    "curves_of",
    "draw",
    "draw_bars",
    "draw_curves",
    "draw_grids",
    "grids_of",
    "line_style",
    "stall_bars_of",
    "step_bars_of",
]

LIGHT_PAGE = "#ffffff"
DARK_PAGE = "#0d1117"
INK = "#747b85"
"""Of text and axes: in the middle between the two pages."""
PALETTE = ("#1f83c4", "#d55e00", "#009e73", "#8a63d2")
"""Apart for all common kinds of colour blindness, and from both pages."""
_FLOOR = "#808890"
_MARKERS = "osD^vPX"
_DOTS_PER_INCH = 150
_NAME_CHARACTERS = 30
_MOST_TICKS = 7
_CHARACTERS_PER_INCH = 10
_WAITS = "seconds that training waits, less is better"


class NothingToPlotError(ValueError):
    """A recording has no figures that a plot could show."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One contender: the median of its runs with their range, or why there is none."""

    label: str
    median: float | None
    least: float = 0.0
    most: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Bars:
    """One case: a panel of bars."""

    title: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class Grid:
    """Throughput in GB/s over request size and concurrency: a panel of cells.

    Attributes:
        title: What was done where.
        sizes: Of the parts or reads, in bytes; None is the default.
        concurrencies: Requests in flight; None is the default.
        cells: By position in both; None where nothing was measured.
    """

    title: str
    size_name: str
    sizes: tuple[int | None, ...]
    concurrencies: tuple[int | None, ...]
    cells: tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True, slots=True)
class Point:
    """Median and range at one place of a curve."""

    at: float
    median: float
    least: float
    most: float


@dataclass(frozen=True, slots=True)
class Curve:
    """One contender over a parameter."""

    label: str
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class Curves:
    """One question over a parameter: a panel of curves."""

    title: str
    across: str
    up: str
    curves: tuple[Curve, ...]


def draw(recording: Recording, directory: Path) -> list[Path]:
    """Draw all plots that a recording has figures for.

    Args:
        recording: What was measured.
        directory: Where the files go; made where it isn't there. Older ones of the same names are replaced.

    Returns:
        The files, PNG and SVG of each plot.

    Raises:
        NothingToPlotError: There are none.
    """
    directory.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for place in dict.fromkeys(result.entry.where for result in recording.results):
        here = [result for result in recording.results if result.entry.where == place]
        results = [result for result in here if isinstance(result, Figure | Missing)]
        steps = [result for result in here if isinstance(result, StepFigure | Missing)]
        for name, unit, panels in (
            ("throughput", "GB/s, more is better", bars_of(results, lambda figure: figure.gb_per_second)),
            ("cpu", "client CPU s/GB, less is better", bars_of(results, lambda figure: figure.cpu_seconds_per_gb)),
            ("seconds", "seconds, less is better", step_bars_of(steps, lambda figure: figure.seconds)),
            ("waits", _WAITS, step_bars_of(steps, lambda figure: figure.blocked_seconds)),
        ):
            if panels:
                paths += _write(draw_bars(panels, unit, place), directory / f"{name}-{_file_name(place)}")
    stalls = [figure for figure in recording.others if isinstance(figure, StallFigure)]
    if panels := stall_bars_of(stalls, [result for result in recording.results if isinstance(result, Missing)]):
        paths += _write(
            draw_bars(panels, _WAITS, "saves in the background, local files in memory"), directory / "stall"
        )
    tuned = [figure for figure in recording.others if isinstance(figure, TuneFigure)]
    for place in dict.fromkeys(figure.place for figure in tuned):
        if grids := grids_of([figure for figure in tuned if figure.place == place]):
            paths += _write(draw_grids(grids, place), directory / f"grid-{_file_name(place)}")
    for parameter in ("tensors", "ranks", "steps"):
        if curves := curves_of(recording.samples, parameter):
            paths += _write(draw_curves(curves), directory / f"over-{parameter}")
    if not paths:
        raise NothingToPlotError(f"Can't plot {recording.path}: it has no figures of the kinds that plots are made of.")
    return paths


# --- what is drawn


def bars_of(results: Sequence[Figure | Missing], of: Callable[[Figure], float]) -> list[Bars]:
    """A panel for each case and size that anybody has a figure in, of the last round of each process."""
    panels: list[Bars] = []
    sized = dict.fromkeys((each.entry.case, each.needed_bytes) for each in results if isinstance(each, Figure))
    for case, needed_bytes in sized:
        own = [
            result
            for result in results
            if result.entry.case == case and (isinstance(result, Missing) or result.needed_bytes == needed_bytes)
        ]
        values = [(figure.entry.contender, of(figure)) for figure in warm(own)]
        if values:
            panels.append(_panel(f"{case}, {_bytes(needed_bytes)}", own, values))
    return panels


def step_bars_of(results: Sequence[StepFigure | Missing], of: Callable[[StepFigure], float | None]) -> list[Bars]:
    """A panel for each case about steps, as far as anybody has such a cost in it."""
    panels: list[Bars] = []
    for case in dict.fromkeys(each.entry.case for each in results if isinstance(each, StepFigure)):
        own = [result for result in results if result.entry.case == case]
        values = [(figure.contender, value) for figure in warm(own) if (value := of(figure)) is not None]
        if values:
            gigabytes = next((each.gigabytes for each in own if isinstance(each, StepFigure)), None)
            panels.append(_panel(case if gigabytes is None else f"{case}, {_bytes(gigabytes * 1e9)}", own, values))
    return panels


def stall_bars_of(figures: Sequence[StallFigure], missing: Sequence[Missing]) -> list[Bars]:
    """A panel for each size of state that was saved in the background: what training waits for."""
    panels: list[Bars] = []
    gone = [each for each in missing if each.entry.case == STALL]
    without = {each.entry.contender for each in gone}
    for size_bytes in dict.fromkeys(figure.size_bytes for figure in figures):
        own = [figure for figure in figures if figure.size_bytes == size_bytes]
        values = [(each.contender, each.later.total_seconds) for each in own if each.contender not in without]
        if values:
            panels.append(_panel(f"{STALL}, {_bytes(size_bytes)}", [*own, *gone], values))
    return panels


def _panel(
    title: str, own: Sequence[Figure | StepFigure | StallFigure | Missing], values: Sequence[tuple[str, float]]
) -> Bars:
    """Bars of all contenders in the order that they came in, those without a figure last, with the reason."""
    by_contender: dict[str, list[float]] = {}
    reasons: dict[str, str] = {}
    for each in own:
        contender = each.contender if isinstance(each, StallFigure) else each.entry.contender
        by_contender.setdefault(contender, [])
        if isinstance(each, Missing):
            reasons[contender] = each.kind
    for contender, value in values:
        by_contender[contender].append(value)
    bars = [
        Bar(contender, statistics.median(found), min(found), max(found))
        if found
        else Bar(contender, None, reason=reasons[contender])
        for contender, found in by_contender.items()
        if found or contender in reasons
    ]
    return Bars(title, tuple(sorted(bars, key=lambda bar: bar.median is None)))


def grids_of(figures: Sequence[TuneFigure]) -> list[Grid]:
    """A panel for saving and one for loading, of the figures of the grid (not of the search for a budget)."""
    grids: list[Grid] = []
    for operation in ("save", "load"):
        own = [figure for figure in figures if figure.operation == operation and figure.stage == "grid"]
        sizes = sorted({figure.request_bytes for figure in own}, key=lambda size: size or 0)
        concurrencies = sorted({figure.concurrency for figure in own}, key=lambda count: count or 0)
        if not own:
            continue
        cells = tuple(
            tuple(
                _median([figure.gb_per_second for figure in own if (figure.request_bytes, figure.concurrency) == cell])
                for cell in ((size, count) for count in concurrencies)
            )
            for size in sizes
        )
        name = "part" if operation == "save" else "read"
        grids.append(Grid(f"{operation}, GB/s", name, tuple(sizes), tuple(concurrencies), cells))
    return grids


def curves_of(samples: Sequence[Sample], parameter: str) -> list[Curves]:
    """A panel for each question that was asked with at least two values of a parameter, all else being equal."""
    groups: dict[tuple[str, str, tuple[tuple[str, float], ...]], list[Sample]] = {}
    for sample in samples:
        if parameter in sample.parameters:
            others = tuple(sorted((name, value) for name, value in sample.parameters.items() if name != parameter))
            groups.setdefault((sample.family, sample.place, others), []).append(sample)
    panels: list[Curves] = []
    for (family, place, others), own in groups.items():
        metric = next((each for each in (Metric.CPU, Metric.WALL) if all(each in sample.costs for sample in own)), None)
        if metric is None or len({sample.parameters[parameter] for sample in own}) < 2:
            continue
        curves = [
            Curve(contender, _points([sample for sample in own if sample.contender == contender], parameter, metric))
            for contender in dict.fromkeys(sample.contender for sample in own)
        ]
        fixed = [place, *(f"{value:,.0f} {name}" for name, value in others if value > 1)]
        title = ", ".join(part for part in (family, *fixed) if part)
        up = "CPU s" if metric is Metric.CPU else "seconds"
        panels.append(Curves(title, f"number of {parameter}", up, tuple(curves)))
    return panels


def _points(samples: Sequence[Sample], parameter: str, metric: Metric) -> tuple[Point, ...]:
    points: list[Point] = []
    for at in sorted({sample.parameters[parameter] for sample in samples}):
        values = [sample.costs[metric] for sample in samples if sample.parameters[parameter] == at]
        points.append(Point(at, statistics.median(values), min(values), max(values)))
    return tuple(points)


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _bytes(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:.3g} GB" if size_bytes >= 1e8 else f"{size_bytes / 1e6:.3g} MB"


def _binary(size_bytes: int | None) -> str:
    if size_bytes is None:
        return "default"
    return f"{size_bytes >> 20} MiB" if size_bytes >= 1 << 20 else f"{size_bytes >> 10} KiB"


def _file_name(place: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", place.lower()).strip("-")[:60] or "place"


def _value(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 or not value else f"{value:.2g}"


def _short(label: str) -> str:
    # Of module:attribute the end tells more.
    return label if len(label) <= _NAME_CHARACTERS else f"…{label[1 - _NAME_CHARACTERS :]}"


# --- how it is drawn


def draw_bars(panels: Sequence[Bars], unit: str, title: str = "") -> Canvas:
    """Horizontal bars, a panel a case, with the range of the runs as a line and the figures in words.

    Args:
        panels: What is drawn.
        unit: Of all of them.
        title: Where it was measured.
    """
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    tallest = max(len(panel.bars) for panel in panels)
    with _style() as new_canvas:
        canvas = new_canvas(5.4 * columns, rows * (0.34 * tallest + 1.1) + (0.75 if title else 0.45))
        _set_title(canvas, title)
        grid = canvas.subplots(rows, columns, squeeze=False)
        for number, axes in enumerate(axes for row in grid for axes in row):
            if number >= len(panels):
                axes.set_axis_off()
                continue
            _draw_panel_of_bars(axes, panels[number], unit)
        handles = _role_handles({_role(bar.label) for panel in panels for bar in panel.bars})
        canvas.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    return canvas


def _draw_panel_of_bars(axes: Axes, panel: Bars, unit: str) -> None:
    longest = max((bar.most for bar in panel.bars), default=0.0) or 1.0
    for at, bar in enumerate(panel.bars):
        colour, hatch = _ROLES[_role(bar.label)]
        if bar.median is None:
            axes.text(longest * 0.01, at, f" {bar.reason}", va="center", style="italic")
            continue
        axes.barh(at, bar.median, height=0.62, color=colour, hatch=hatch, edgecolor=INK, linewidth=0.6)
        axes.errorbar(
            bar.median,
            at,
            xerr=[[bar.median - bar.least], [bar.most - bar.median]],
            fmt="none",
            ecolor=INK,
            elinewidth=1.6,
            capsize=3,
        )
        text = _value(bar.median)
        if bar.least != bar.most:
            text += f" ({_value(bar.least)}–{_value(bar.most)})"
        axes.text(bar.most + longest * 0.025, at, text, va="center", fontsize=9)
    axes.set_yticks(range(len(panel.bars)), [_short(bar.label) for bar in panel.bars])
    axes.set_ylim(len(panel.bars) - 0.45, -0.55)
    axes.set_xlim(0, longest * 1.9)
    axes.set_xlabel(unit)
    axes.set_title(panel.title, loc="left", fontweight="bold")
    axes.locator_params(axis="x", nbins=5)
    axes.tick_params(axis="y", length=0)


def draw_grids(grids: Sequence[Grid], title: str = "") -> Canvas:
    """Cells with their number, a panel for saving and one for loading; the title says where."""
    widest = max(len(grid.concurrencies) for grid in grids)
    tallest = max(len(grid.sizes) for grid in grids)
    with _style() as new_canvas:
        canvas = new_canvas((0.78 * widest + 1.5) * len(grids), 0.52 * tallest + 1.1 + (0.3 if title else 0))
        _set_title(canvas, title)
        for axes, grid in zip(canvas.subplots(1, len(grids), squeeze=False)[0], grids, strict=True):
            _draw_grid(axes, grid)
    return canvas


def _draw_grid(axes: Axes, grid: Grid) -> None:
    import matplotlib as mpl
    import numpy as np

    cells = np.array([[np.nan if cell is None else cell for cell in row] for row in grid.cells], dtype=float)
    most = float(np.nanmax(cells)) or 1.0
    colours = mpl.colormaps["cividis"]
    axes.imshow(cells, cmap=colours, vmin=0, vmax=most, aspect="auto")
    for down, row in enumerate(grid.cells):
        for across, cell in enumerate(row):
            if cell is None:
                continue
            red, green, blue, _ = colours(cell / most)
            ink = "#ffffff" if 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2 < 0.18 else "#000000"
            best = cell == most
            weight = "bold" if best else "normal"
            axes.text(across, down, f"{cell:.2f}", ha="center", va="center", color=ink, fontweight=weight)
    axes.set_xticks(range(len(grid.concurrencies)), [_count(count) for count in grid.concurrencies])
    axes.set_yticks(range(len(grid.sizes)), [_binary(size) for size in grid.sizes])
    axes.set_xlabel("requests in flight")
    axes.set_ylabel(f"{grid.size_name} size")
    axes.set_title(grid.title, loc="left", fontweight="bold")
    axes.spines[:].set_visible(False)
    axes.grid(visible=False)
    axes.tick_params(length=0)


def _count(value: int | None) -> str:
    return "default" if value is None else str(value)


def draw_curves(panels: Sequence[Curves]) -> Canvas:
    """Curves on logarithmic axes, a panel a question, with the range of the runs at each point."""
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    labels = list(dict.fromkeys(curve.label for panel in panels for curve in panel.curves))
    with _style() as new_canvas:
        canvas = new_canvas(5.2 * columns, 3.3 * rows + 0.5)
        grid = canvas.subplots(rows, columns, squeeze=False)
        for number, axes in enumerate(axes for row in grid for axes in row):
            if number >= len(panels):
                axes.set_axis_off()
                continue
            _draw_panel_of_curves(axes, panels[number], labels)
        from matplotlib.lines import Line2D

        handles = [
            Line2D([], [], label=_short(label), color=colour, marker=marker, linewidth=1.8, markersize=6)
            for label in labels
            for colour, marker in [line_style(label, labels)]
        ]
        canvas.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)), frameon=False)
    return canvas


def _draw_panel_of_curves(axes: Axes, panel: Curves, labels: Sequence[str]) -> None:
    from matplotlib.ticker import FixedLocator, NullFormatter

    for curve in panel.curves:
        colour, marker = line_style(curve.label, labels)
        across = [point.at for point in curve.points]
        spread = [
            [point.median - point.least for point in curve.points],
            [point.most - point.median for point in curve.points],
        ]
        medians = [point.median for point in curve.points]
        axes.errorbar(across, medians, yerr=spread, capsize=3, color=colour, marker=marker, linewidth=1.8, markersize=6)
    axes.set_xscale("log")
    axes.set_yscale("log")
    places = sorted({point.at for curve in panel.curves for point in curve.points})
    # Two numbers nearer than this share of the axis would be written over each other.
    span = places[-1] / places[0]
    shown = [places[0]]
    for place in places[1:]:
        if place / shown[-1] >= span**0.12:
            shown.append(place)
    axes.set_xticks(shown, [f"{place:,.0f}" for place in shown])
    axes.xaxis.set_minor_locator(FixedLocator([place for place in places if place not in shown]))
    axes.xaxis.set_minor_formatter(NullFormatter())
    least = min(point.least for curve in panel.curves for point in curve.points)
    most = max(point.most for curve in panel.curves for point in curve.points)
    ticks = _round_numbers(least, most)
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_ylim(min(ticks[0], least) / 1.1, max(ticks[-1], most) * 1.1)
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(panel.across)
    axes.set_ylabel(panel.up)
    axes.set_title(panel.title, loc="left", fontweight="bold")


def _round_numbers(least: float, most: float) -> list[float]:
    """1, 2 or 5 times powers of ten from below ``least`` to above ``most``; of many the powers, or some of them."""
    least = max(least, most / 1e9, 1e-9)
    first, last = math.floor(math.log10(least)), math.ceil(math.log10(max(most, least))) + 1
    numbers = [factor * 10.0**power for power in range(first, last + 1) for factor in (1, 2, 5)]
    below = max(number for number in numbers if number <= least * (1 + 1e-9))
    above = min(number for number in numbers if number >= most * (1 - 1e-9) and number > below)
    numbers = [number for number in numbers if below <= number <= above]
    if len(numbers) > _MOST_TICKS:
        powers = [10.0**power for power in range(first, last + 1) if 10.0**power <= above]
        numbers = powers[:: -(-len(powers) // _MOST_TICKS)]
    return numbers


def line_style(label: str, labels: Sequence[str]) -> tuple[str, str]:
    """Colour and marker: the first colour is dcpfs's alone."""
    ours = label.startswith("dcpfs")
    number = [each for each in labels if each.startswith("dcpfs") == ours].index(label)
    colour = PALETTE[0] if ours else PALETTE[1 + number % (len(PALETTE) - 1)]
    return colour, _MARKERS[number % len(_MARKERS) if ours else (number + 1) % len(_MARKERS)]


_ROLES = {
    "dcpfs": (PALETTE[0], ""),
    "peers": (PALETTE[1], "//"),
    "floors, which keep nothing safe": (_FLOOR, ".."),
}
"""Colour and hatch of a bar by whose it is."""


def _set_title(canvas: Canvas, title: str) -> None:
    """As much of it as there is room for."""
    if title:
        most = int(canvas.get_figwidth() * _CHARACTERS_PER_INCH)
        shown = title if len(title) <= most else f"{title[: most - 1]}…"
        canvas.suptitle(shown, x=0.012, ha="left", fontsize=11.5)


def _role(contender: str) -> str:
    dcpfs, peers, floors = _ROLES
    if is_floor(contender):
        return floors
    return dcpfs if contender.startswith("dcpfs") else peers


def _role_handles(roles: set[str]) -> list[object]:
    from matplotlib.patches import Patch

    return [
        Patch(facecolor=colour, hatch=hatch, edgecolor=INK, linewidth=0.6, label=name)
        for name, (colour, hatch) in _ROLES.items()
        if name in roles
    ]


@contextlib.contextmanager
def _style() -> Iterator[Callable[[float, float], Canvas]]:
    """Fonts, colours and lines of all plots; yields what makes a canvas of so many inches."""
    import matplotlib as mpl
    from matplotlib.figure import Figure as NewCanvas
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with mpl.rc_context(
        {
            "text.color": INK,
            "axes.labelcolor": INK,
            "axes.edgecolor": INK,
            "xtick.color": INK,
            "ytick.color": INK,
            "axes.facecolor": "none",
            "figure.facecolor": "none",
            "font.size": 10.5,
            "axes.titlesize": 11.5,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "hatch.linewidth": 0.8,
            "svg.hashsalt": "dcpfs",
        }
    ):

        def new_canvas(width: float, height: float) -> Canvas:
            layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12, wspace=0.02, hspace=0.02)
            return NewCanvas(figsize=(width, height), layout=layout)

        yield new_canvas


def _write(canvas: Canvas, stem: Path) -> list[Path]:
    paths = [stem.with_name(f"{stem.name}.{ending}") for ending in ("png", "svg")]
    with _style():
        for path in paths:
            # No date in the file: the same figures give the same bytes.
            metadata = {"Date": None} if path.suffix == ".svg" else {}
            canvas.savefig(path, transparent=True, dpi=_DOTS_PER_INCH, metadata=metadata)
    return paths
