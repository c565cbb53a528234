"""The command line: ``python -m benchmarks [CASE]...``."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from .cases import CASES
from .contenders import contenders_for
from .figures import Figure, Missing
from .manifest import take
from .place import open_place
from .planning import RanksFigure, SimulationFigure, measure
from .planning import markdown as planning_markdown
from .report import markdown
from .runner import Plan, Runner, order
from .settings import Setting
from .stall import StallFigure
from .stall import markdown as stall_markdown
from .stall import measure as measure_stall
from .workloads import ANCHOR_BYTES

__all__ = ["app"]

PLANNING = "planning"
"""The case that stores nothing, and so has no setting."""
STALL = "stall"
"""The case about saves in the background: its setting is always local files in memory."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_BASELINES = {
    Setting.FAST: "s3torchconnector",
    Setting.S3LIKE: "s3torchconnector",
    Setting.TMPFS: "torch-4",
    Setting.DISK: "torch-4",
    Setting.MEMORY: "torch-fsspec",
}


@app.command()
def run(
    cases: Annotated[
        list[str] | None, typer.Argument(help=f"Cases; all when none: {', '.join([*CASES, PLANNING, STALL])}.")
    ] = None,
    setting: Annotated[list[Setting] | None, typer.Option(help="Where; can be repeated.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Contender, or module:attribute; can be repeated.")] = None,
    baseline: Annotated[str | None, typer.Option(help="Contender that ratios are to.")] = None,
    repetitions: Annotated[int, typer.Option(min=1, help="Fresh processes of each contender.")] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="Timed calls in each process; tables show the last.")] = 2,
    size_gb: Annotated[
        float, typer.Option(help="Size of the Llama-shaped state; small tensors scale with it.")
    ] = ANCHOR_BYTES / 1e9,
    disk_directory: Annotated[Path | None, typer.Option(help="Where the disk setting writes.")] = None,
    timeout_seconds: Annotated[float, typer.Option(help="Longest time of one process.")] = 900.0,
    planning_ranks: Annotated[int, typer.Option(min=2, help="Ranks that the planning case simulates.")] = 1024,
    planning_torch_ranks: Annotated[int, typer.Option(min=2, help="The same for torch, which needs more.")] = 8,
    planning_tensors: Annotated[int, typer.Option(min=3, help="Sharded tensors of each rank of that case.")] = 5000,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write every figure as a JSON line.")] = None,
    markdown_path: Annotated[Path | None, typer.Option("--markdown", help="Write the tables.")] = None,
) -> None:
    """Measure dcpfs against its peers and the floor of the machine."""
    plans_too = not cases or PLANNING in cases
    stalls_too = not cases or STALL in cases
    stored = [name for name in cases or [] if name not in (PLANNING, STALL)]
    try:
        names = order(stored) if stored or not cases else ()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    plans = tuple(
        Plan(
            setting=each,
            cases=names,
            contenders=tuple(only or contenders_for(each)),
            size_bytes=round(size_gb * 1e9),
            repetitions=repetitions,
            rounds=rounds,
            timeout_seconds=timeout_seconds,
        )
        for each in (setting or [Setting.FAST] if names else [])
    )
    manifest = take(plans)
    results: list[Figure | Missing] = []
    planning: list[SimulationFigure | RanksFigure] = []
    stalls: list[StallFigure] = []
    with contextlib.ExitStack() as stack:
        stream = stack.enter_context(json_path.open("w")) if json_path else None
        if stream is not None:
            stream.write(manifest.model_dump_json() + "\n")
        for plan in plans:
            with open_place(plan.setting, disk_directory, plan.size_bytes) as place:
                for result in Runner(plan, place, lambda text: typer.echo(text, err=True)).run():
                    results.append(result)
                    if stream is not None:
                        stream.write(result.model_dump_json() + "\n")
                        stream.flush()
        if plans_too:
            planning = measure(
                ranks=planning_ranks,
                tensors=planning_tensors,
                torch_ranks=planning_torch_ranks,
                tell=lambda text: typer.echo(text, err=True),
            )
            if stream is not None:
                stream.writelines(figure.model_dump_json() + "\n" for figure in planning)
        if stalls_too:
            stalls = measure_stall(
                size_bytes=round(size_gb * 1e9),
                rounds=max(3, rounds),
                tell=lambda text: typer.echo(text, err=True),
                timeout_seconds=timeout_seconds,
            )
            if stream is not None:
                stream.writelines(figure.model_dump_json() + "\n" for figure in stalls)
    chosen = {each: baseline or name for each, name in _BASELINES.items()}
    text = markdown(manifest, results, chosen)
    if planning:
        text += planning_markdown(planning)
    if stalls:
        text += stall_markdown(stalls)
    typer.echo(text)
    if markdown_path is not None:
        markdown_path.write_text(text)
    if any(isinstance(result, Missing) and result.kind == "failed" for result in results):
        raise typer.Exit(1)
