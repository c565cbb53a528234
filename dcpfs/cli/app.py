"""The command line. Every command works on any URL, with ``--storage-options`` as JSON or ``@file``.

Options can hold secrets: a file keeps them out of the process list, and no command ever prints them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from dcpfs._version import __version__
from dcpfs.cli.bench import bench
from dcpfs.cli.storage_options import parse_storage_options
from dcpfs.errors import DcpfsError

__all__ = ["app", "main"]

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

_StorageOptions = Annotated[
    str,
    typer.Option("--storage-options", metavar="JSON|@FILE", help="Options of the URL's filesystem, as JSON or @file."),
]


def _show_version(wanted: bool) -> None:
    if wanted:
        Console().print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """PyTorch Distributed Checkpoint on any fsspec URL."""


app.command()(bench)


@app.command()
def demo(
    save_dir: Annotated[str, typer.Option(metavar="URL", help="Where the checkpoint goes.")] = "dcpfs-demo",
    storage_options: _StorageOptions = "",
    with_s3: Annotated[bool, typer.Option(help="Start the bundled S3 server and save there.")] = False,
    plot: Annotated[Path, typer.Option(help="Where the loss curves go, as PNG.")] = Path("dcpfs-demo-loss.png"),
) -> None:
    """Train a real model on 2 ranks, kill the job in a save, resume, reshard, and prove that every bit is the same."""
    from dcpfs.cli.demo.job import DemoError, Losses, run_demo
    from dcpfs.cli.demo.loss_plot import draw_losses

    console = Console()
    table = Table(title="dcpfs demo", title_justify="left")
    table.add_column("phase")
    for column in ("MB", "seconds", "MB/s", "requests"):
        table.add_column(column, justify="right")
    table.add_column("compared")
    table.add_column("result")
    passed, losses = True, Losses()
    with _destination(save_dir, parse_storage_options(storage_options), with_s3) as (url, options):
        from dcpfs.storage.location import Location

        target = Location(url, options).join("checkpoints")
        console.print(f"Checkpoints: {target.redacted}")
        try:
            for phase in run_demo(target.url, options, losses):
                console.print(f"  {'ok ' if phase.passed else 'BAD'} {phase.name}: {phase.verdict}")
                passed = passed and phase.passed
                megabytes = None if phase.bytes is None else phase.bytes / 1e6
                table.add_row(
                    phase.name,
                    "-" if megabytes is None else f"{megabytes:.1f}",
                    f"{phase.seconds:.2f}" if phase.seconds else "-",
                    "-" if not megabytes or not phase.seconds else f"{megabytes / phase.seconds:.0f}",
                    "-" if phase.requests is None else str(phase.requests),
                    phase.verdict,
                    "equal" if phase.passed else "DIFFERS",
                )
        except DemoError as error:
            console.print(str(error), style="red", markup=False)
            raise typer.Exit(1) from None
    console.print(table)
    draw_losses(losses, plot)
    console.print(f"Loss curves: {plot}")
    if not passed:
        console.print("FAILED: what was loaded differs from what was saved.", style="bold red")
        raise typer.Exit(1)
    console.print("PASSED: every tensor and every loss is equal bit for bit.", style="bold green")


@contextlib.contextmanager
def _destination(save_dir: str, options: dict[str, object], with_s3: bool) -> Iterator[tuple[str, dict[str, object]]]:
    if not with_s3:
        yield save_dir, options
        return
    from dcpfs.testing.servers import SeaweedServer

    with SeaweedServer() as server:
        yield server.url("demo"), dict(server.storage_options)


def main() -> None:
    """Run the command line; an error of dcpfs is one line, not a trace."""
    try:
        app()
    except DcpfsError as error:
        Console(stderr=True).print(str(error), style="red", markup=False)
        raise SystemExit(1) from None
