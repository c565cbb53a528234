"""Plots show what was measured, read on light and dark, and nothing in them lies over anything else."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure as Canvas
from matplotlib.image import imread
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from typer.testing import CliRunner

from benchmarks import plots
from benchmarks.cli import app
from benchmarks.figures import Figure, Missing
from benchmarks.planning import SimulationFigure
from benchmarks.plots import (
    DARK_PAGE,
    INK,
    LIGHT_PAGE,
    PALETTE,
    Curve,
    Curves,
    Grid,
    NothingToPlotError,
    Point,
    bars_of,
    curves_of,
    draw,
    draw_bars,
    draw_curves,
    draw_grids,
    grids_of,
    stall_bars_of,
    step_bars_of,
)
from benchmarks.tune import TuneFigure
from tests.unit.benchmarks.recordings import STALLED, figure, figures, missing, recording, step_figure, write

CONTENDERS = (
    "dcpfs",
    "dcpfs-bare-64mib",
    "s3torchconnector-sequential",
    "torch-fsspec",
    "some.package.of.mine:AContenderWithALongName",
    "floor-sockets",
)
CASES = ("save", "load", "partial", "small-save", "discovery")


def luminance(colour: str) -> float:
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgb(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def results() -> list[Figure | Missing]:
    """Five contenders in four cases, from very slow to very fast, one of them absent."""
    found: list[Figure | Missing] = []
    for case, (number, contender) in itertools.product(CASES[:4], enumerate(CONTENDERS)):
        seconds = 4.0 / (number + 1) ** 2
        own = [figure(seconds * factor, case=case, contender=contender, repetition=repetition)
               for repetition, factor in enumerate((0.7, 1.0, 1.4))]  # fmt: skip
        found += own
    return [*found, *(missing("not installed", contender="absent-one", kind="absent", case=case) for case in CASES[:4])]


def tuned(operation: str, size: int | None, concurrency: int, speed: float) -> TuneFigure:
    return TuneFigure.model_validate(
        {
            "place": "s3://bucket/run",
            "stage": "grid",
            "operation": operation,
            "request_bytes": size,
            "concurrency": concurrency,
            "budget_bytes": 1 << 29,
            "repetition": 0,
            "needed_bytes": 10**9,
            "wall_seconds": 1 / speed,
            "gb_per_second": speed,
            "cpu_seconds_per_gb": 1,
        }
    )


def simulated(contender: str, ranks: int) -> SimulationFigure:
    return SimulationFigure(
        contender=contender,
        ranks=ranks,
        tensors=500,
        local_cpu_seconds=0.1,
        sent_bytes=10,
        coordinator_cpu_seconds=0.001 * ranks,
        coordinator_extra_bytes=None,
        assigned_bytes=1,
        decode_cpu_seconds=0.1,
    )


def texts(canvas: Canvas) -> Iterator[tuple[Text, Bbox]]:
    """All that is drawn; ticks beyond the ends of an axis are not."""
    canvas.draw_without_rendering()
    beyond = {
        id(label)
        for axes in canvas.axes
        for axis in (axes.xaxis, axes.yaxis)
        for place, label in zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=True)
        if not min(axis.get_view_interval()) <= place <= max(axis.get_view_interval())
    }
    for text in canvas.findobj(Text):
        if text.get_visible() and text.get_text().strip() and id(text) not in beyond:
            box = text.get_window_extent()
            if box.width and box.height:
                yield text, box


@pytest.fixture(scope="module")
def canvases() -> dict[str, Canvas]:
    speeds = bars_of(results(), lambda each: each.gb_per_second)
    grid = [
        tuned(operation, size, concurrency, 0.01 * concurrency + (size or 0) / 2**26)
        for operation in ("save", "load")
        for size in (None, 4 << 20, 64 << 20)
        for concurrency in (8, 16, 32, 64, 128)
    ]
    simulations = [simulated(name, ranks) for name in ("dcpfs", "torch") for ranks in (8, 64, 512, 600, 4096)]
    steps = [step_figure(0.01 * count, case=f"discovery-{count}", steps=count) for count in (1, 100, 1000)]
    samples = recording([*simulations, *steps]).samples
    waits = step_bars_of(steps, lambda each: each.seconds)
    stalls = stall_bars_of([STALLED], [missing("no", contender="dcpfs-async", case="stall")])
    return {
        "bars": draw_bars(speeds, "GB/s, more is better", "s3://bucket/run/" + "with-a-long-name/" * 12),
        "steps' bars": draw_bars(waits, "seconds, less is better", "fast +10 ms, 80 MB/s a connection"),
        "stall": draw_bars(stalls, "seconds that training waits, less is better", "local files in memory"),
        "titled grid": draw_grids(grids_of(grid[:4]), "s3://bucket/run/" + "with-a-long-name/" * 12),
        "one bar": draw_bars(speeds[:1], "GB/s"),
        "grid": draw_grids(grids_of(grid)),
        "ranks": draw_curves(curves_of(samples, "ranks")),
        "steps": draw_curves(curves_of(samples, "steps")),
    }


@pytest.mark.parametrize("page", [LIGHT_PAGE, DARK_PAGE])
def test_text_and_colours_stand_out_from_either_page(page: str) -> None:
    assert contrast(INK, page) >= 4.2
    for colour in PALETTE:
        assert contrast(colour, page) >= 3


def test_no_text_lies_over_another_or_outside(canvases: dict[str, Canvas]) -> None:
    for name, canvas in canvases.items():
        found = list(texts(canvas))
        assert len(found) > 6, name
        for text, box in found:
            assert box.x0 >= -0.5, (name, text)
            assert box.y0 >= -0.5, (name, text)
            assert box.x1 <= canvas.bbox.x1 + 0.5, (name, text)
            assert box.y1 <= canvas.bbox.y1 + 0.5, (name, text)
        for (one, its), (other, others) in itertools.combinations(found, 2):
            width = min(its.x1, others.x1) - max(its.x0, others.x0)
            height = min(its.y1, others.y1) - max(its.y0, others.y0)
            assert min(width, height) <= 1, f"{name}: {one.get_text()!r} lies over {other.get_text()!r}"


def test_text_is_of_the_one_grey_but_in_cells_where_it_stands_out(canvases: dict[str, Canvas]) -> None:
    for name, canvas in canvases.items():
        for text, _ in texts(canvas):
            colour = text.get_color()
            assert isinstance(colour, str)
            if "grid" in name and text.get_text().replace(".", "").isdigit() and colour != INK:
                assert colour in ("#ffffff", "#000000")
            else:
                assert colour == INK, (name, text)


def test_numbers_in_cells_can_be_read() -> None:
    import matplotlib as mpl
    from matplotlib.colors import to_hex

    speeds = tuple(tuple(0.05 * (5 * row + column + 1) for column in range(5)) for row in range(4))
    canvas = draw_grids([Grid("save", "part", (1, 2, 3, 4), (1, 2, 3, 4, 5), speeds)])
    colours = mpl.colormaps["cividis"]
    inks = {text.get_text(): text.get_color() for text, _ in texts(canvas) if text.get_color() != INK}
    for speed in itertools.chain.from_iterable(speeds):
        ink = inks[f"{speed:.2f}"]
        assert isinstance(ink, str)
        assert contrast(ink, to_hex(colours(speed / 1.0))) >= 4.3


def test_bars_are_medians_with_their_range_and_the_absent_has_none() -> None:
    found: list[Figure | Missing] = [*figures([1.0, 4.0, 2.0]), missing("gone", contender="torch-4", kind="absent")]
    (panel,) = bars_of(found, lambda each: each.wall_seconds)
    ours, theirs = panel.bars
    assert (ours.label, ours.median, ours.least, ours.most) == ("dcpfs", 2.0, 1.0, 4.0)
    assert (theirs.label, theirs.median, theirs.reason) == ("torch-4", None, "absent")


def test_who_failed_once_has_no_bar() -> None:
    found: list[Figure | Missing] = [
        *figures([1.0]),
        *figures([1.0], contender="torch-4"),
        missing("wrong bytes", contender="torch-4"),
    ]
    (panel,) = bars_of(found, lambda each: each.wall_seconds)
    assert [(bar.label, bar.median is None) for bar in panel.bars] == [("dcpfs", False), ("torch-4", True)]


def test_sizes_are_not_mixed() -> None:
    panels = bars_of([figure(1.0, size_bytes=10**8), figure(9.0, size_bytes=10**9)], lambda each: each.wall_seconds)
    assert [(panel.title, panel.bars[0].median) for panel in panels] == [("save, 0.1 GB", 1.0), ("save, 1 GB", 9.0)]


def test_a_case_that_all_failed_in_has_no_panel() -> None:
    assert not bars_of([missing("no", contender="dcpfs")], lambda each: each.wall_seconds)


def test_steps_have_bars_of_what_they_cost_and_the_absent_have_none() -> None:
    found = [step_figure(each, case="discovery-9", steps=9, repetition=number) for number, each in enumerate((3, 1, 2))]
    gone = missing("no", contender="torch-4", case="discovery-9")
    (panel,) = step_bars_of([*found, gone], lambda each: each.seconds)
    assert panel.title == "discovery-9"
    assert [(bar.label, bar.median, bar.least, bar.most, bar.reason) for bar in panel.bars] == [
        ("dcpfs", 2, 1, 3, ""),
        ("torch-4", None, 0, 0, "failed"),
    ]
    assert not step_bars_of(found, lambda each: each.blocked_seconds), "nobody is blocked by looking"


def test_saves_in_the_background_have_bars_of_what_training_waits_for() -> None:
    (panel,) = stall_bars_of([STALLED], [missing("no", contender="dcpfs-async", case="stall")])
    assert [(bar.label, bar.median, bar.reason) for bar in panel.bars] == [
        ("torch-thread", 0.2, ""),
        ("dcpfs-async", None, "failed"),
    ]
    assert not stall_bars_of([STALLED], [missing("no", contender="torch-thread", case="stall")])


def test_a_small_figure_is_not_told_as_nothing() -> None:
    canvas = draw_bars(
        step_bars_of([step_figure(0.00123, case="discovery-1", steps=1)], lambda each: each.seconds), "s"
    )
    assert "0.0012" in {text.get_text() for text, _ in texts(canvas)}


def test_where_it_was_measured_stands_above() -> None:
    canvas = draw_bars(bars_of(figures([1.0]), lambda each: each.gb_per_second), "GB/s", "s3://bucket/run")
    assert canvas.get_suptitle() == "s3://bucket/run"


def test_grids_hold_medians_by_size_and_concurrency() -> None:
    speeds = [(None, 8, 1.0), (None, 8, 3.0), (None, 16, 5.0), (1 << 20, 8, 7.0)]
    (grid,) = grids_of([tuned("load", *each) for each in speeds])
    assert grid.sizes == (None, 1 << 20)
    assert grid.concurrencies == (8, 16)
    assert grid.cells == ((2.0, 5.0), (7.0, None))


def test_curves_need_two_values_and_all_else_equal() -> None:
    samples = recording([simulated("dcpfs", 8), simulated("dcpfs", 64), simulated("torch", 8)]).samples
    (panel,) = curves_of(samples, "ranks")
    assert panel.title == "planning, the coordinator, 500 tensors"
    assert [(curve.label, [point.at for point in curve.points]) for curve in panel.curves] == [
        ("dcpfs", [8, 64]),
        ("torch", [8]),
    ]
    assert not curves_of(samples, "tensors"), "one number of tensors is no curve"


def test_all_plots_are_drawn_as_png_and_svg_and_again_the_same(tmp_path: Path) -> None:
    grid = [tuned(operation, size, 8, 1.0) for operation in ("save", "load") for size in (1 << 20, 4 << 20)]
    about = recording([*figures([1.0, 1.2]), *grid, simulated("dcpfs", 8), simulated("dcpfs", 64)])
    paths = draw(about, tmp_path / "first")
    assert {path.name for path in paths} == {
        f"{name}.{kind}"
        for name in ("throughput-fast", "cpu-fast", "grid-s3-bucket-run", "over-ranks")
        for kind in ("png", "svg")
    }
    again = draw(about, tmp_path / "again")
    for one, other in zip(paths, again, strict=True):
        assert one.read_bytes() == other.read_bytes(), one.name
    for path in paths:
        if path.suffix == ".png":
            pixels = imread(path)
            assert pixels.shape[2] == 4
            assert pixels[0, 0, 3] == 0, "the corner lets the page through"
            assert (pixels[..., 3] > 0).mean() > 0.01, "and something is drawn"
        else:
            assert "<svg" in path.read_text()


def test_nothing_to_plot_is_said(tmp_path: Path) -> None:
    with pytest.raises(NothingToPlotError, match="has no figures of the kinds"):
        draw(recording([missing("gone", contender="dcpfs")]), tmp_path)


def test_the_command_plots_a_file(tmp_path: Path) -> None:
    path = write(tmp_path / "run.jsonl", figures([1.0, 1.1]))
    result = CliRunner().invoke(app, ["plot", str(path), "--directory", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert sorted(each.name for each in (tmp_path / "out").iterdir()) == [
        "cpu-fast.png",
        "cpu-fast.svg",
        "throughput-fast.png",
        "throughput-fast.svg",
    ]
    empty = write(tmp_path / "empty.jsonl", [])
    result = CliRunner().invoke(app, ["plot", str(empty), "--directory", str(tmp_path / "none")])
    assert result.exit_code == 2


@pytest.mark.parametrize("span", [1.0, 1.01, 3.0, 40.0, 1e4, 1e12])
@pytest.mark.parametrize("least", [0.013, 0.1, 7.7])
def test_an_axis_has_a_few_numbers_however_wide_it_is(least: float, span: float) -> None:
    canvas = draw_curves([Curves("x", "steps", "s", (Curve("dcpfs", points(least, least * span)),))])
    labels = [text.get_text() for text in canvas.axes[0].get_yticklabels()]
    assert 2 <= len(labels) <= 7
    assert len(set(labels)) == len(labels)


def points(*values: float) -> tuple[Point, ...]:
    return tuple(Point(10.0**number, value, value, value) for number, value in enumerate(values))


def test_dcpfs_has_a_colour_of_its_own() -> None:
    labels = ["torch-1", "dcpfs", "torch-2", "torch-4", "safetensors", "dcpfs-bare", "torch-fsspec"]
    styles = {label: plots.line_style(label, labels) for label in labels}
    assert {label for label, (colour, _) in styles.items() if colour == PALETTE[0]} == {"dcpfs", "dcpfs-bare"}
    assert len(set(styles.values())) == len(labels)
