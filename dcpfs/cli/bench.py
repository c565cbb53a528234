"""``dcpfs bench``: the benchmarks, at the user's own URLs.

Problem: the benchmarks are a package of their own beside dcpfs, so that nothing of dcpfs can lean on them; who has
installed the wheel alone should have them all the same.

Way taken: the wheel carries them as ``dcpfs.benchmarks``, a source checkout has ``benchmarks``. They are looked up by
name when the command runs, which also keeps them, and torch, out of every other command.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer
from rich.console import Console

from dcpfs.cli.storage_options import parse_storage_options
from dcpfs.errors import ConfigError, MissingBackendError

__all__ = ["bench", "benchmarks_module"]

_CASES = ("save", "load")


def bench(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="URL... [CASE]...",
            help="Stores or directories, and cases by name (save and load when none are named).",
        ),
    ],
    storage_options: Annotated[
        list[str] | None,
        typer.Option(
            metavar="JSON|@FILE", help="Options of the URLs' filesystems: once for all, or once for each URL."
        ),
    ] = None,
    contender: Annotated[
        list[str] | None,
        typer.Option(
            help="Who takes part; can be repeated, 'all' for everybody. [default: dcpfs and its common peers]"
        ),
    ] = None,
    size_gb: Annotated[float, typer.Option(min=0.0001, help="Size of the state that is saved and loaded.")] = 0.25,
    repetitions: Annotated[
        int, typer.Option(min=1, help="Fresh processes of each contender; 4 is the fewest that compare can tell by.")
    ] = 4,
    rounds: Annotated[int, typer.Option(min=1, help="Timed calls in each process; tables show the last.")] = 2,
    timeout_seconds: Annotated[float, typer.Option(min=1, help="Longest time of one process.")] = 900.0,
    tune: Annotated[
        bool,
        typer.Option("--tune", help="Find part size, concurrency and budget for one URL, and print what to paste."),
    ] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write every figure as a JSON line.")] = None,
    markdown_path: Annotated[Path | None, typer.Option("--markdown", help="Write the tables.")] = None,
    plots: Annotated[
        Path | None, typer.Option(metavar="DIRECTORY", help="Draw the plots there (needs matplotlib).")
    ] = None,
) -> None:
    """Compare backends and libraries at your own URLs, or tune dcpfs for one of them.

    Works in a directory of its own at each URL, deletes that and nothing else, and says first how much it will write.
    """
    found = benchmarks_module("bench")
    cases = benchmarks_module("cases")
    asked = [target for target in targets if _is_case(target, cases)]
    urls = [target for target in targets if target not in asked]
    for url in urls:
        if "/" not in url and ":" not in url:
            raise ConfigError(
                f"There is no case {url!r}, and a directory of that name is written ./{url}; the cases are "
                f"{', '.join(cases.CASES)}"
            )
    if not urls:
        raise ConfigError("Can't benchmark without a URL or directory: name at least one")
    if plots is not None and importlib.util.find_spec("matplotlib") is None:
        raise MissingBackendError("Can't draw plots without matplotlib: pip install 'dcpfs[bench]'")
    options = [parse_storage_options(each) for each in storage_options or [""]]
    console = Console(stderr=True)
    if tune:
        if len(urls) != 1 or asked or contender:
            raise ConfigError("Can't tune for several URLs, cases or contenders: give --tune one URL")
        order = found.TuneOrder(
            url=urls[0],
            storage_options=options[0],
            setting=benchmarks_module("settings").Setting.URL,
            size_bytes=round(size_gb * 1e9),
            json_path=json_path,
            plots_directory=plots,
        )
        typer.echo(found.tune_place(order, console))
        return
    done = found.bench(
        found.BenchOrder(
            urls=urls,
            storage_options=options * len(urls) if len(options) == 1 else options,
            cases=asked or list(_CASES),
            contenders=contender or [],
            size_bytes=round(size_gb * 1e9),
            repetitions=repetitions,
            rounds=rounds,
            timeout_seconds=timeout_seconds,
            json_path=json_path,
            outputs=benchmarks_module("publishing").Outputs(markdown_path, plots),
        ),
        console,
    )
    if not done:
        raise typer.Exit(1)


def _is_case(name: str, cases: ModuleType) -> bool:
    try:
        cases.case_of(name)
    except ValueError:
        return False
    return True


def benchmarks_module(name: str) -> ModuleType:
    """A module of the benchmarks, wherever they are.

    Raises:
        MissingBackendError: They are neither in this installation nor beside it.
    """
    for package in ("dcpfs.benchmarks", "benchmarks"):
        # Some other package of this name is not meant, so the module itself is asked for.
        try:
            found = importlib.util.find_spec(f"{package}.bench")
        except ModuleNotFoundError:
            continue
        if found is not None:
            return importlib.import_module(f"{package}.{name}")
    raise MissingBackendError(
        "Can't find the benchmarks: they come with dcpfs's wheel, and lie beside it in its sources"
    )
