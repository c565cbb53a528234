"""A user's own stores measured: contenders at several URLs, or the settings that fit one of them.

Problem: which backend, which library and which settings are fast depends on the user's machine, link and store, and
nobody likes to point a benchmark at a store with other things on it.

Way taken: everything happens below one directory at each URL, whose name is made anew for every run and is the only
thing that is ever deleted. A URL that can't be written is refused before anything is measured, with what the store says
to five bytes. How much is going to be written is said first, and nothing is asked.

Flow: `bench` or `tune_place` → refuse → announce → place → measure → tables, plots → the directory is gone.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import JsonValue, TypeAdapter
from rich.console import Console

from dcpfs.errors import ConfigError, UnsupportedOperationError
from dcpfs.storage.location import Location
from dcpfs.storage.opening import open_store

from .contenders import contenders_for
from .execution import (
    RecordStream,
    Stage,
    baseline_of,
    carry_out,
    check_contenders,
    ended_by_signals,
    manifest_of,
    most_bytes_at_once,
    units,
    written_bytes,
)
from .figures import Missing
from .manifest import RecordedPlan, mask_options, take
from .place import open_place
from .plots import NothingToPlotError, draw
from .progress import RunProgress
from .publishing import Outputs, check_outputs, publish
from .records import recording_of
from .runner import Plan, order
from .settings import PLACE_PREFIX, Setting, Target
from .tune import Axes, Rig, TuneFigure, advise, axes_for, bytes_to_write, search, tables

__all__ = ["BenchOrder", "TuneOrder", "bench", "tune_place"]

_OPTIONS: TypeAdapter[dict[str, JsonValue]] = TypeAdapter(dict[str, JsonValue])
_PEERS = {"s3": ("s3torchconnector", "torch-fsspec"), "file": ("torch-4",)}
"""What people use at such a URL; elsewhere torch's fsspec classes."""


@dataclass(frozen=True, slots=True)
class BenchOrder:
    """What to compare where.

    Attributes:
        urls: Stores or directories.
        storage_options: Of each URL, in the same order.
        cases: By name.
        contenders: By name; empty: dcpfs and what is commonly used at the URL; ``all``: whoever can reach it.
        size_bytes: Of the state.
        repetitions: Processes of each contender.
        rounds: Timed calls in each.
        timeout_seconds: Longest time of a process.
        json_path: Where figures go as JSON lines, or None.
        outputs: Where tables and plots go.
    """

    urls: Sequence[str] = field(repr=False)
    storage_options: Sequence[Mapping[str, object]] = field(repr=False)
    cases: Sequence[str]
    contenders: Sequence[str]
    size_bytes: int
    repetitions: int
    rounds: int
    timeout_seconds: float = 900.0
    json_path: Path | None = None
    outputs: Outputs = field(default_factory=Outputs)


@dataclass(frozen=True, slots=True)
class TuneOrder:
    """Which store to find settings for.

    Attributes:
        url: The user's; None: a place of the benchmarks' own, by ``setting``.
        storage_options: For that URL.
        setting: Kind of place.
        size_bytes: Of the state that is saved and loaded.
        axes: What is tried; None: what fits the kind of store.
        json_path: Where figures go as JSON lines, or None.
        plots_directory: Where the grid is drawn, or None.
    """

    url: str | None = field(repr=False)
    storage_options: Mapping[str, object] = field(repr=False)
    setting: Setting
    size_bytes: int
    axes: Axes | None = None
    json_path: Path | None = None
    plots_directory: Path | None = None


def bench(asked: BenchOrder, console: Console) -> bool:
    """Compare contenders at the URLs; False when one of them failed.

    Args:
        asked: What to compare.
        console: For what is said on the way; tables go to standard output.

    Raises:
        ConfigError: There is no such case or contender, options don't fit the URLs, or results can't be written.
        UnsupportedOperationError: A URL can only be read.
        StorageError: A URL can't be written.
    """
    stages = _stages(asked)
    check_outputs(asked.json_path, asked.outputs)
    for stage in stages:
        _refuse_read_only(Location(stage.url or "", stage.storage_options))
    for stage in stages:
        _say(
            console,
            f"{stage.where}: writes about {_amount(written_bytes(stage.plan))} in all, "
            f"{_amount(most_bytes_at_once(stage.plan))} of it at a time, in a directory {PLACE_PREFIX}… of its own, "
            "which is deleted at the end.",
        )
    manifest = manifest_of(stages)
    with (
        ended_by_signals(),
        _leaving_no_directory([stage.url or "" for stage in stages]),
        RecordStream(asked.json_path, manifest) as stream,
        RunProgress(sum(units(stage.plan) for stage in stages), console) as progress,
    ):
        results = carry_out(stages, stream, progress, check=_probe)
    publish(manifest, results, {stage.where: baseline_of(stage.scheme) for stage in stages}, asked.outputs)
    return not any(isinstance(result, Missing) and result.kind == "failed" for result in results)


def tune_place(asked: TuneOrder, console: Console) -> str:
    """Find settings for a store, and return the grids, what follows from them and the code to paste.

    Args:
        asked: Where.
        console: For what is said on the way.

    Raises:
        ConfigError: Results can't be written where they are wanted.
        UnsupportedOperationError: The URL can only be read.
        StorageError: The URL can't be written, or failed.
        WrongBytesError: What came back is not what was saved.
    """
    label = asked.setting.value
    check_outputs(asked.json_path, Outputs(plots_directory=asked.plots_directory))
    if asked.url is not None:
        location = Location(asked.url, asked.storage_options)
        label = location.redacted
        _refuse_read_only(location)
    options = _OPTIONS.validate_python(dict(asked.storage_options))
    figures: list[TuneFigure] = []
    with (
        ended_by_signals(),
        _leaving_no_directory([] if asked.url is None else [asked.url]),
        open_place(asked.setting, None, asked.size_bytes, url=asked.url, storage_options=options) as place,
    ):
        axes = asked.axes or axes_for(place)
        plan = RecordedPlan(
            setting=asked.setting.value,
            place=label if asked.url is not None else "",
            scheme=place.scheme if asked.url is not None else None,
            options=mask_options(asked.storage_options),
            cases=("tune",),
            contenders=("dcpfs",),
            size_bytes=asked.size_bytes,
            repetitions=axes.rounds,
            rounds=1,
        )
        manifest = take([plan])
        most = bytes_to_write(axes, asked.size_bytes)
        _say(
            console,
            f"{label}: writes and reads at most {_amount(most)} in all, {_amount(asked.size_bytes)} of it at a time, "
            f"in a directory {PLACE_PREFIX}… of its own, which is deleted at the end.",
        )
        _probe(place)
        rig = Rig(place, asked.size_bytes, remote=axes.remote)
        runs = most // asked.size_bytes
        with RecordStream(asked.json_path, manifest) as stream, RunProgress(runs, console) as progress:
            for figure in search(rig.run, axes, label, progress.tell):
                figures.append(figure)
                stream.write(figure)
                progress.reach(1 + len(figures) // 2)
            progress.reach(runs)
    if asked.plots_directory is not None:
        with contextlib.suppress(NothingToPlotError):
            for path in draw(recording_of(Path("this run"), manifest, figures), asked.plots_directory):
                _say(console, f"Plot: {path}")
    return tables(figures, advise(figures, axes))


def _stages(asked: BenchOrder) -> list[Stage]:
    if len(asked.storage_options) != len(asked.urls):
        raise ConfigError(
            f"Can't tell whose the storage options are: {len(asked.storage_options)} for {len(asked.urls)} URLs; give "
            "them once for all, or once for each in its order"
        )
    stages: list[Stage] = []
    labels: Counter[str] = Counter()
    for url, options in zip(asked.urls, asked.storage_options, strict=True):
        location = Location(url, options)
        labels[location.redacted] += 1
        again = f" #{labels[location.redacted]}" if labels[location.redacted] > 1 else ""
        try:
            names = order(asked.cases)
            reachable = contenders_for(Setting.URL, location.url)
            check_contenders([name for name in asked.contenders if name != "all"], reachable)
        except ValueError as error:
            raise ConfigError(f"Can't benchmark {location.redacted}: {error}") from error
        usual = ("dcpfs", *_PEERS.get(location.scheme, ("torch-fsspec",)))
        chosen = reachable if "all" in asked.contenders else asked.contenders or usual
        plan = Plan(
            setting=Setting.URL,
            cases=names,
            contenders=tuple(chosen),
            size_bytes=asked.size_bytes,
            repetitions=asked.repetitions,
            rounds=asked.rounds,
            timeout_seconds=asked.timeout_seconds,
            place=f"{location.redacted}{again}",
        )
        stages.append(Stage(plan, url=location.url, storage_options=options))
    return stages


def _refuse_read_only(location: Location) -> None:
    store = open_store(location)
    try:
        if not store.capabilities.writable:
            raise UnsupportedOperationError(
                f"Can't benchmark {location.redacted}: it can only be read; name a URL that can be written"
            )
    finally:
        store.close()


def _probe(place: Target) -> None:
    """Write a few bytes where the checkpoints will go. What the store says to that is told as it is."""
    target = place.direct().child("probe")
    store = open_store(Location(target.url, target.storage_options()))
    try:
        store.put("written", [b"dcpfs"])
        store.delete(["written"])
    finally:
        store.close()


@contextlib.contextmanager
def _leaving_no_directory(urls: Sequence[str]) -> Iterator[None]:
    """Take away local directories that were not there before, where they are empty."""
    fresh: list[Path] = []
    for url in urls:
        location = Location(url)
        if location.scheme == "file":
            path = Path(location.path)
            fresh += [each for each in (path, *path.parents) if not each.exists()]
    try:
        yield
    finally:
        for each in sorted(set(fresh), key=lambda path: len(path.parts), reverse=True):
            with contextlib.suppress(OSError):
                each.rmdir()


def _amount(size_bytes: int) -> str:
    if size_bytes >= 10**8:
        return f"{size_bytes / 1e9:.3g} GB ({size_bytes:,} bytes)"
    return f"{size_bytes / 1e6:.3g} MB ({size_bytes:,} bytes)"


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True, emoji=False)
