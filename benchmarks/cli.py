"""The command line: ``python -m benchmarks [CASE]...`` runs cases; ``compare``, ``plot``, ``table``, ``tune`` do more.

Running is what is meant when the first word is no command, so cases stand right behind the module's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from pydantic import BaseModel
from rich.console import Console
from typer.core import TyperGroup

from dcpfs.cli.storage_options import parse_storage_options
from dcpfs.errors import ConfigError, DcpfsError
from dcpfs.storage.location import Location

from .bench import TuneOrder, tune_place
from .cases import CASES
from .compare import JUDGED, IncomparableError, Limits, compare, markdown
from .contenders import contenders_for, everybody
from .execution import (
    RecordStream,
    Stage,
    baseline_of,
    baselines_in,
    carry_out,
    check_contenders,
    ended_by_signals,
    manifest_of,
    units,
)
from .figures import Missing
from .planning import measure
from .plots import NothingToPlotError, draw
from .progress import RunProgress
from .publishing import Outputs, check_outputs, publish
from .records import Metric, UnreadableRecordError, read
from .runner import Plan, order
from .settings import Link, Setting
from .stall import measure as measure_stall
from .workloads import ANCHOR_BYTES

__all__ = ["app"]

PLANNING = "planning"
"""The case that stores nothing, and so has no setting."""
STALL = "stall"
"""The case about saves in the background: its setting is always local files in memory."""


_PLANNING_RANKS = (8, 64, 512, 1024, 4096)
_PLANNING_TORCH_RANKS = (2, 4, 8)


class _RunsByDefault(TyperGroup):
    """A group in which ``run`` need not be said."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override] # its own is private
        """Put ``run`` before what is no command."""
        if not args or args[0] not in self.commands:
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=_RunsByDefault, add_completion=False, pretty_exceptions_enable=False)


@app.command()
def run(
    cases: Annotated[
        list[str] | None, typer.Argument(help=f"Cases; all when none: {', '.join([*CASES, PLANNING, STALL])}.")
    ] = None,
    setting: Annotated[list[Setting] | None, typer.Option(help="Where; can be repeated.")] = None,
    url: Annotated[str | None, typer.Option(help="The URL of the setting url; implies it.")] = None,
    storage_options: Annotated[
        str, typer.Option(metavar="JSON|@FILE", help="Options of that URL's filesystem, as JSON or @file.")
    ] = "",
    only: Annotated[
        list[str] | None,
        typer.Option(help=f"Contender, or module:attribute; can be repeated: {', '.join(everybody())}."),
    ] = None,
    baseline: Annotated[str | None, typer.Option(help="Contender that ratios are to.")] = None,
    repetitions: Annotated[
        int, typer.Option(min=1, help="Fresh processes of each contender; 4 is the fewest that compare can tell by.")
    ] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Timed calls in each process; tables show the last.")] = 2,
    size_gb: Annotated[
        list[float] | None,
        typer.Option(
            help="Size of the Llama-shaped state; small tensors scale with it. Can be repeated, for costs over the "
            f"number of tensors. [default: {ANCHOR_BYTES / 1e9}]"
        ),
    ] = None,
    latency_ms: Annotated[
        list[float] | None,
        typer.Option(min=0, help="Put before each answer of an HTTP server. Can be repeated, e.g. 0, 10 and 50."),
    ] = None,
    mb_per_second_per_connection: Annotated[
        float | None, typer.Option(min=0, help="Rate that each connection to it is held to; 0: none.")
    ] = None,
    disk_directory: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="Where the disk setting writes.")
    ] = None,
    timeout_seconds: Annotated[float, typer.Option(help="Longest time of one process.")] = 900.0,
    planning_ranks: Annotated[
        list[int] | None, typer.Option(min=2, help="Ranks that the planning case simulates; can be repeated.")
    ] = None,
    planning_torch_ranks: Annotated[
        list[int] | None, typer.Option(min=2, help="The same for torch, which needs more.")
    ] = None,
    planning_tensors: Annotated[int, typer.Option(min=3, help="Sharded tensors of each rank of that case.")] = 5000,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write every figure as a JSON line.")] = None,
    markdown_path: Annotated[Path | None, typer.Option("--markdown", help="Write the tables.")] = None,
    plots: Annotated[Path | None, typer.Option(metavar="DIRECTORY", help="Draw the plots there.")] = None,
) -> None:
    """Measure dcpfs against its peers and the floor of the machine.

    Other commands: compare A.jsonl B.jsonl, plot A.jsonl, table A.jsonl, tune URL; each has its own --help.
    """
    plans_too = not cases or PLANNING in cases
    stalls_too = not cases or STALL in cases
    stored = [name for name in cases or [] if name not in (PLANNING, STALL)]
    sizes = [round(size * 1e9) for size in size_gb or [ANCHOR_BYTES / 1e9]]
    links = _links(latency_ms, mb_per_second_per_connection)
    try:
        names = order(stored) if stored or not cases else ()
        options = parse_storage_options(storage_options)
        settings = setting or ([Setting.URL] if url else [Setting.FAST])
        if (Setting.URL in settings) != (url is not None):
            raise typer.BadParameter("--setting url and --url go together")
        if any(links) and (without := [each.value for each in settings if not (each.is_s3 or each is Setting.URL)]):
            raise typer.BadParameter(f"there is no server to put a link in front of in {', '.join(without)}")
        for each in settings:
            check_contenders(only or (), contenders_for(each, url))
        stages = [
            Stage(
                Plan(
                    setting=each,
                    cases=names,
                    contenders=tuple(only or contenders_for(each, url if each is Setting.URL else None)),
                    size_bytes=size_bytes,
                    repetitions=repetitions,
                    rounds=rounds,
                    timeout_seconds=timeout_seconds,
                    place=Location(url or "").redacted if each is Setting.URL else "",
                    link=link,
                ),
                url=url if each is Setting.URL else None,
                storage_options=options if each is Setting.URL else {},
                disk_directory=disk_directory,
            )
            for each in (settings if names else [])
            for link in links
            for size_bytes in sizes
        ]
        check_outputs(json_path, Outputs(markdown_path, plots))
    except (ValueError, DcpfsError) as error:
        raise typer.BadParameter(str(error)) from error
    manifest = manifest_of(stages)
    results: list[BaseModel] = []
    console = Console(stderr=True)
    with (
        ended_by_signals(),
        RecordStream(json_path, manifest) as stream,
        RunProgress(_total(stages), console) as progress,
    ):
        results += carry_out(stages, stream, progress)
        if plans_too:
            for figure in measure(
                ranks=planning_ranks or _PLANNING_RANKS,
                tensors=planning_tensors,
                torch_ranks=planning_torch_ranks or _PLANNING_TORCH_RANKS,
                tell=progress.tell,
                repetitions=repetitions,
            ):
                results.append(figure)
                stream.write(figure)
        if stalls_too:
            for stall in measure_stall(
                size_bytes=sizes[0],
                rounds=max(3, rounds),
                tell=progress.tell,
                repetitions=repetitions,
                timeout_seconds=timeout_seconds,
            ):
                results.append(stall)
                stream.write(stall)
    chosen = {stage.where: baseline or baseline_of(stage.scheme) for stage in stages}
    publish(manifest, results, chosen, Outputs(markdown_path, plots))
    if any(isinstance(result, Missing) and result.kind == "failed" for result in results):
        raise typer.Exit(1)


@app.command(name="compare")
def compare_runs(
    old: Annotated[Path, typer.Argument(metavar="A.jsonl", help="The base.")],
    new: Annotated[Path, typer.Argument(metavar="B.jsonl", help="What may be worse.")],
    metric: Annotated[
        list[Metric] | None,
        typer.Option(help="Cost to judge; can be repeated. [default: all but peak]"),
    ] = None,
    contender: Annotated[list[str] | None, typer.Option(help="Only this one; can be repeated.")] = None,
    reference: Annotated[
        str | None,
        typer.Option(help="Contender of both whose time is the measure; needed where the machines differ."),
    ] = None,
    threshold: Annotated[float, typer.Option(min=0, help="Share by which times and memory must differ.")] = 0.05,
    count_threshold: Annotated[float, typer.Option(min=0, help="The same for requests and bytes.")] = 0.01,
    alpha: Annotated[
        float, typer.Option(min=1e-6, max=1, help="Largest probability of chance that counts as a difference.")
    ] = 0.05,
    markdown_path: Annotated[Path | None, typer.Option("--markdown", help="Write the table.")] = None,
) -> None:
    """Tell regressions from the spread of the runs. Ends with 1 where there is one, with 2 where none can be told."""
    try:
        check_outputs(None, Outputs(markdown_path))
        found = compare(
            read(old),
            read(new),
            metrics=metric or JUDGED,
            contenders=contender or (),
            reference=reference,
            limits=Limits(threshold, count_threshold, alpha),
        )
    except (IncomparableError, UnreadableRecordError, ConfigError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    text = markdown(found)
    typer.echo(text)
    if markdown_path is not None:
        markdown_path.write_text(text)
    if found.worse:
        raise typer.Exit(1)


@app.command()
def plot(
    figures: Annotated[Path, typer.Argument(metavar="FIGURES.jsonl")],
    directory: Annotated[Path, typer.Option(help="Where the plots go, each as PNG and SVG.")] = Path("plots"),
) -> None:
    """Draw what was recorded."""
    try:
        recording = read(figures)
        check_outputs(None, Outputs(plots_directory=directory))
        paths = draw(recording, directory)
    except (NothingToPlotError, UnreadableRecordError, ConfigError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    for path in paths:
        typer.echo(str(path))


@app.command()
def table(
    figures: Annotated[Path, typer.Argument(metavar="FIGURES.jsonl")],
    baseline: Annotated[str | None, typer.Option(help="Contender that ratios are to.")] = None,
    markdown_path: Annotated[Path | None, typer.Option("--markdown", help="Write the tables.")] = None,
) -> None:
    """Tell what was recorded as tables, of a run that was broken off as well."""
    try:
        recording = read(figures)
        check_outputs(None, Outputs(markdown_path))
    except (UnreadableRecordError, ConfigError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    chosen = {place: baseline or usual for place, usual in baselines_in(recording.manifest).items()}
    publish(recording.manifest, [*recording.results, *recording.others], chosen, Outputs(markdown_path))


@app.command()
def tune(
    url: Annotated[str | None, typer.Argument(metavar="[URL]", help="Where; a setting of our own when none.")] = None,
    storage_options: Annotated[
        str, typer.Option(metavar="JSON|@FILE", help="Options of that URL's filesystem, as JSON or @file.")
    ] = "",
    setting: Annotated[Setting, typer.Option(help="Where, when no URL is given.")] = Setting.S3LIKE,
    size_gb: Annotated[float, typer.Option(min=0.0001, help="Size of the state.")] = 0.5,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write every figure as a JSON line.")] = None,
    plots: Annotated[Path | None, typer.Option(metavar="DIRECTORY", help="Draw the grid there.")] = None,
) -> None:
    """Look for the part size, read size, concurrency and budget that fit a store, and print the settings to paste."""
    try:
        order = TuneOrder(
            url=url,
            storage_options=parse_storage_options(storage_options),
            setting=Setting.URL if url else setting,
            size_bytes=round(size_gb * 1e9),
            json_path=json_path,
            plots_directory=plots,
        )
        typer.echo(tune_place(order, Console(stderr=True)))
    except DcpfsError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None


def _links(latencies_ms: Sequence[float] | None, rate: float | None) -> list[Link | None]:
    if not latencies_ms and rate is None:
        return [None]
    return [Link(latency_ms=each, mb_per_second_per_connection=rate or 0.0) for each in latencies_ms or [0.0]]


def _total(stages: Sequence[Stage]) -> int:
    return sum(units(stage.plan) for stage in stages)
