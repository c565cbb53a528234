"""Which part size, read size, concurrency and budget fit a store: a bounded search, and the settings to paste.

Problem: the best settings depend on the store, the link and the machine. Looking for them by hand takes a day; taking
the best of many noisy runs finds a lucky one, not a better one.

Way taken: one state is saved and loaded over a grid of request size × requests in flight, several times round, every
load compared bit for bit with what was saved. The best row and column go on: the budgets are tried with them, and then
the winner meets the defaults again, in turns, in runs that had no say in its choice. Only a gain of these that an exact
rank test does not take for chance is recommended, and only fields that differ from the defaults. How much is written at
most is known before the first byte.

Flow: `search` → grid → (one more column where the best is at the edge) → budgets → confirmation, each a `TuneFigure` →
`advise` → `Advice`. `Rig` does the saving and loading; the search itself knows no store.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict

import dcpfs
from dcpfs.config import TransferConfig
from dcpfs.storage.location import Location
from dcpfs.storage.opening import open_store

from .files import remove
from .rank_test import rank_test
from .settings import Target
from .verification import check_loaded
from .workloads import State, TensorSpec, Workload, build, poison, specs

__all__ = [
    "Advice",
    "Axes",
    "Candidate",
    "Rig",
    "Timed",
    "TuneFigure",
    "WrongBytesError",
    "advise",
    "axes_for",
    "bytes_to_write",
    "search",
    "tables",
]

Operation = Literal["save", "load"]
Stage = Literal["grid", "budget", "confirmation"]

_Value = TypeVar("_Value", int, "int | None")
_MIB = 1 << 20
_DEFAULTS = TransferConfig()
_SURE = 0.05
"""Largest probability that what is recommended is chance."""
_LEAST_GAIN = 0.03
"""A gain below this is not worth a setting."""


class WrongBytesError(RuntimeError):
    """What came back from the store is not what was saved."""


class TuneFigure(BaseModel):
    """One timed save or load.

    Attributes:
        place: Redacted URL or setting.
        stage: Part of the search.
        request_bytes: Size of a part or a read; None: the default.
        concurrency: Requests in flight.
        budget_bytes: Memory for them.
        repetition: Runs of a stage with the same number met the same minutes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["tuning"] = "tuning"
    contender: Literal["dcpfs"] = "dcpfs"
    place: str
    stage: Stage
    operation: Operation
    request_bytes: int | None
    concurrency: int
    budget_bytes: int
    repetition: int
    needed_bytes: int
    wall_seconds: float
    gb_per_second: float
    cpu_seconds_per_gb: float


@dataclass(frozen=True, slots=True)
class Axes:
    """What is tried.

    Attributes:
        remote: Whether requests cost a round trip: which of the two fields says how many are in flight.
        part_sizes: For saving; None is the default, which depends on the state.
        read_sizes: For loading.
        concurrencies: Requests or threads.
        beyond: One more of them, tried only where the best is the last.
        budgets: Tried with the best of the above.
        rounds: Times round the grid and round the budgets.
        confirmations: Runs of the winner and of the defaults each, at the end.
    """

    remote: bool
    part_sizes: tuple[int | None, ...] = (None, 8 * _MIB, 16 * _MIB, 32 * _MIB, 64 * _MIB)
    read_sizes: tuple[int, ...] = (4 * _MIB, 8 * _MIB, 16 * _MIB, 32 * _MIB, 64 * _MIB)
    concurrencies: tuple[int, ...] = (8, 16, 32, 64)
    beyond: int | None = 128
    budgets: tuple[int, ...] = (64 * _MIB, 256 * _MIB, 512 * _MIB, 1024 * _MIB)
    rounds: int = 2
    confirmations: int = 5

    @property
    def default_concurrency(self) -> int:
        """That of `TransferConfig` for a store of this kind."""
        return _DEFAULTS.concurrency if self.remote else _DEFAULTS.local_concurrency


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings of one run: of a save its part size, of the load after it its read size; the rest is shared."""

    part_bytes: int | None
    read_bytes: int
    concurrency: int
    budget_bytes: int

    def transfer(self, remote: bool) -> TransferConfig:
        """As dcpfs takes them."""
        concurrency = _DEFAULTS.concurrency if not remote else self.concurrency
        threads = _DEFAULTS.local_concurrency if remote else self.concurrency
        return TransferConfig(
            budget_bytes=self.budget_bytes,
            concurrency=concurrency,
            local_concurrency=threads,
            part_bytes=self.part_bytes,
            read_bytes=self.read_bytes,
        )


@dataclass(frozen=True, slots=True)
class Timed:
    """One save or load."""

    needed_bytes: int
    wall_seconds: float
    cpu_seconds: float


@dataclass(frozen=True, slots=True)
class Advice:
    """What to set.

    Attributes:
        fields: Of `TransferConfig`, only those that differ from the defaults.
        save_gain: Median GB/s of the winner by that of the defaults in the confirmation, less 1; None: not measured.
        load_gain: The same of loading.
        sentences: Why, and what else was found.
    """

    fields: dict[str, int]
    save_gain: float | None
    load_gain: float | None
    sentences: tuple[str, ...]

    @property
    def code(self) -> str:
        """What to paste."""
        inner = ", ".join(f"{name}={_code(name, value)}" for name, value in self.fields.items())
        return f"TransferConfig({inner})"


def axes_for(target: Target) -> Axes:
    """What is worth trying at a place: many requests at a remote store, few threads at a local one."""
    store = open_store(Location(target.url, target.storage_options()))
    try:
        remote = store.capabilities.remote
    finally:
        store.close()
    return Axes(remote=True) if remote else Axes(remote=False, concurrencies=(1, 2, 4, 8), beyond=16)


def bytes_to_write(axes: Axes, size_bytes: int) -> int:
    """The most that a search writes, all runs together; it is never there all at once."""
    columns = len(axes.concurrencies) + (axes.beyond is not None)
    grid = max(len(axes.part_sizes), len(axes.read_sizes)) * columns * axes.rounds
    return (1 + grid + len(axes.budgets) * axes.rounds + 2 * axes.confirmations) * size_bytes


# --- the search


def search(
    run: Callable[[Candidate], tuple[Timed, Timed]], axes: Axes, place: str, tell: Callable[[str], None]
) -> Iterator[TuneFigure]:
    """Try what there is to try; figures come as they are there.

    Args:
        run: Saves and loads with the settings, proves the result, and says what both took.
        axes: What is tried.
        place: Named in the figures.
        tell: Shown what is being done.
    """
    found: list[TuneFigure] = []

    def measure(stage: Stage, repetition: int, candidate: Candidate) -> Iterator[TuneFigure]:
        timed = dict(zip(("save", "load"), run(candidate), strict=True))
        for operation in ("save", "load"):
            figure = _figure(place, stage, operation, repetition, candidate, timed[operation])
            found.append(figure)
            yield figure
        save, load = found[-2:]
        tell(
            f"tune {stage}: {_described(candidate)}: save {save.gb_per_second:.2f}, load {load.gb_per_second:.2f} GB/s"
        )

    run(_default(axes))  # the first save and load of a process find no connection and no buffer
    for repetition in range(axes.rounds):
        for candidate in _turned(_cells(axes, axes.concurrencies), repetition):
            yield from measure("grid", repetition, candidate)
    if axes.beyond is not None and _best_concurrency(found, axes) == max(axes.concurrencies):
        for repetition in range(axes.rounds):
            for candidate in _turned(_cells(axes, (axes.beyond,)), repetition):
                yield from measure("grid", repetition, candidate)
    best = _best(found, axes)
    budgets = [Candidate(best.part_bytes, best.read_bytes, best.concurrency, budget) for budget in axes.budgets]
    budgets = [each for each in budgets if (each.part_bytes or 0) <= each.budget_bytes]
    for repetition in range(axes.rounds):
        for candidate in _turned(budgets, repetition):
            yield from measure("budget", repetition, candidate)
    winner = _with_budget(best, found, axes)
    if winner == _default(axes):
        return
    for repetition in range(axes.confirmations):
        for candidate in _turned([_default(axes), winner], repetition):
            yield from measure("confirmation", repetition, candidate)


def advise(figures: Sequence[TuneFigure], axes: Axes) -> Advice:
    """What follows from the figures of a search."""
    best = _best(figures, axes)
    winner = _with_budget(best, figures, axes)
    default = _default(axes)
    sentences = [_budget_sentence(figures, best)]
    confirmed = [figure for figure in figures if figure.stage == "confirmation"]
    if winner == default or not confirmed:
        return Advice({}, None, None, ("The defaults are the best of all that was tried.", *sentences))
    gains: dict[str, float] = {}
    wins: dict[str, bool] = {}
    losses: dict[str, bool] = {}
    for operation in ("save", "load"):
        old = [figure.gb_per_second for figure in confirmed if _is(figure, operation, default)]
        new = [figure.gb_per_second for figure in confirmed if _is(figure, operation, winner)]
        if not old or not new or _same_settings(operation, winner, default):
            continue
        gains[operation] = statistics.median(new) / statistics.median(old) - 1
        sure = rank_test(old, new) <= _SURE
        wins[operation] = sure and gains[operation] >= _LEAST_GAIN
        losses[operation] = sure and gains[operation] <= -_LEAST_GAIN
        word = "beyond" if sure else "within"
        sentences.append(
            f"{operation}: {_spread(new)} GB/s with {_described(winner)}, {_spread(old)} with the defaults, "
            f"{gains[operation]:+.0%}: {word} the spread of {len(old)} runs each."
        )
    fields = _fields(winner, axes, wins, losses)
    if any(losses.values()) and any(wins.values()):
        better = next(operation for operation, won in wins.items() if won)
        sentences.append(f"What helps to {better} harms the other way: give these settings to the {better} alone.")
        fields = _fields(winner, axes, wins, {})
    if not fields:
        sentences.append("No gain is beyond the spread: keep the defaults.")
    return Advice(fields, gains.get("save"), gains.get("load"), tuple(sentences))


def _fields(winner: Candidate, axes: Axes, wins: dict[str, bool], losses: dict[str, bool]) -> dict[str, int]:
    fields: dict[str, int] = {}
    if not any(wins.values()) or any(losses.values()):
        return fields
    if winner.budget_bytes != _DEFAULTS.budget_bytes:
        fields["budget_bytes"] = winner.budget_bytes
    if winner.concurrency != axes.default_concurrency:
        fields["concurrency" if axes.remote else "local_concurrency"] = winner.concurrency
    if wins.get("save") and winner.part_bytes is not None:
        fields["part_bytes"] = winner.part_bytes
    if wins.get("load") and winner.read_bytes != _DEFAULTS.read_bytes:
        fields["read_bytes"] = winner.read_bytes
    return fields


def _default(axes: Axes) -> Candidate:
    return Candidate(None, _DEFAULTS.read_bytes, axes.default_concurrency, _DEFAULTS.budget_bytes)


def _cells(axes: Axes, concurrencies: Sequence[int]) -> list[Candidate]:
    rows = max(len(axes.part_sizes), len(axes.read_sizes))
    return [
        Candidate(
            axes.part_sizes[row % len(axes.part_sizes)],
            axes.read_sizes[row % len(axes.read_sizes)],
            concurrency,
            _DEFAULTS.budget_bytes,
        )
        for concurrency in concurrencies
        for row in range(rows)
    ]


def _turned(candidates: Sequence[Candidate], repetition: int) -> list[Candidate]:
    """Another one first, and every other time backwards: a slow minute is nobody's own."""
    turn = repetition % max(1, len(candidates))
    turned = [*candidates[turn:], *candidates[:turn]]
    return turned[::-1] if repetition % 2 else turned


def _medians(figures: Sequence[TuneFigure], operation: str) -> dict[tuple[int | None, int], float]:
    """Of the grid, by request size and concurrency."""
    cells: dict[tuple[int | None, int], list[float]] = {}
    for figure in figures:
        if figure.stage == "grid" and figure.operation == operation:
            cells.setdefault((figure.request_bytes, figure.concurrency), []).append(figure.gb_per_second)
    return {cell: statistics.median(speeds) for cell, speeds in cells.items()}


def _best_concurrency(figures: Sequence[TuneFigure], axes: Axes) -> int:
    """The one with the best save and the best load together, since one field serves both."""
    saves, loads = _medians(figures, "save"), _medians(figures, "load")
    scores = {
        concurrency: math.sqrt(
            max(speed for (_, count), speed in saves.items() if count == concurrency)
            * max(speed for (_, count), speed in loads.items() if count == concurrency)
        )
        for concurrency in dict.fromkeys(count for _, count in saves)
    }
    return _modest(scores, axes.default_concurrency)


def _best(figures: Sequence[TuneFigure], axes: Axes) -> Candidate:
    concurrency = _best_concurrency(figures, axes)
    saves = {size: speed for (size, count), speed in _medians(figures, "save").items() if count == concurrency}
    loads = {size: speed for (size, count), speed in _medians(figures, "load").items() if count == concurrency}
    part_bytes = _modest(saves, None)
    read_bytes = _modest(loads, _DEFAULTS.read_bytes)
    return Candidate(part_bytes, read_bytes or _DEFAULTS.read_bytes, concurrency, _DEFAULTS.budget_bytes)


def _modest(scores: Mapping[_Value, float], default: _Value) -> _Value:
    """Of those that are as good as the best, but for what isn't worth a setting: the default, or the smallest."""
    enough = max(scores.values()) / (1 + _LEAST_GAIN)
    good = [value for value, score in scores.items() if score >= enough]
    return default if default in good else min(good, key=lambda value: value or 0)


def _budget_speeds(figures: Sequence[TuneFigure]) -> dict[int, list[float]]:
    """Speeds of both directions by budget: save × load, rooted, of each time round."""
    speeds: dict[int, list[float]] = {}
    saves = [figure for figure in figures if figure.stage == "budget" and figure.operation == "save"]
    loads = [figure for figure in figures if figure.stage == "budget" and figure.operation == "load"]
    for save, load in zip(saves, loads, strict=True):
        speeds.setdefault(save.budget_bytes, []).append(math.sqrt(save.gb_per_second * load.gb_per_second))
    return speeds


def _with_budget(best: Candidate, figures: Sequence[TuneFigure], axes: Axes) -> Candidate:
    """The budget only leaves its default where every run with another was faster than every one with the default."""
    del axes
    speeds = _budget_speeds(figures)
    default = speeds.get(_DEFAULTS.budget_bytes)
    if not default:
        return best
    faster = {
        budget: statistics.median(own)
        for budget, own in speeds.items()
        if budget > _DEFAULTS.budget_bytes and min(own) > max(default) * (1 + _LEAST_GAIN)
    }
    if not faster:
        return best
    return Candidate(best.part_bytes, best.read_bytes, best.concurrency, max(faster, key=lambda each: faster[each]))


def _budget_sentence(figures: Sequence[TuneFigure], best: Candidate) -> str:
    speeds = {budget: statistics.median(own) for budget, own in sorted(_budget_speeds(figures).items())}
    if not speeds:
        return "No budget was tried."
    told = ", ".join(f"{budget >> 20} MiB {speed:.2f} GB/s" for budget, speed in speeds.items())
    return f"Budgets with {_described(best, budget=False)}, save and load together: {told}."


def _spread(speeds: Sequence[float]) -> str:
    return f"{statistics.median(speeds):.2f} ({min(speeds):.2f}–{max(speeds):.2f})"


def _same_settings(operation: str, one: Candidate, other: Candidate) -> bool:
    request = "part_bytes" if operation == "save" else "read_bytes"
    return all(getattr(one, name) == getattr(other, name) for name in (request, "concurrency", "budget_bytes"))


def _is(figure: TuneFigure, operation: str, candidate: Candidate) -> bool:
    request = candidate.part_bytes if operation == "save" else candidate.read_bytes
    return (figure.operation, figure.request_bytes, figure.concurrency, figure.budget_bytes) == (
        operation,
        request,
        candidate.concurrency,
        candidate.budget_bytes,
    )


def _figure(
    place: str, stage: Stage, operation: Operation, repetition: int, candidate: Candidate, timed: Timed
) -> TuneFigure:
    gigabytes = timed.needed_bytes / 1e9
    return TuneFigure(
        place=place,
        stage=stage,
        operation=operation,
        request_bytes=candidate.part_bytes if operation == "save" else candidate.read_bytes,
        concurrency=candidate.concurrency,
        budget_bytes=candidate.budget_bytes,
        repetition=repetition,
        needed_bytes=timed.needed_bytes,
        wall_seconds=timed.wall_seconds,
        gb_per_second=gigabytes / timed.wall_seconds,
        cpu_seconds_per_gb=timed.cpu_seconds / gigabytes,
    )


def _described(candidate: Candidate, *, budget: bool = True) -> str:
    parts = "parts by default" if candidate.part_bytes is None else f"parts of {candidate.part_bytes >> 20} MiB"
    limit = f", {candidate.budget_bytes >> 20} MiB" if budget else ""
    return f"{parts}, reads of {candidate.read_bytes >> 20} MiB, {candidate.concurrency} in flight{limit}"


def _code(name: str, value: int) -> str:
    return f"{value >> 20} << 20" if name.endswith("_bytes") and value % _MIB == 0 else str(value)


# --- told


def tables(figures: Sequence[TuneFigure], advice: Advice) -> str:
    """The grids, what follows from them, and the settings to paste, in Markdown."""
    lines: list[str] = []
    for operation in ("save", "load"):
        cells = _medians(figures, operation)
        concurrencies = sorted({count for _, count in cells})
        sizes = sorted({size for size, _ in cells}, key=lambda size: size or 0)
        name = "part" if operation == "save" else "read"
        lines += [f"### {operation}, GB/s: {name} size by requests in flight", ""]
        lines += [_row(["", *map(str, concurrencies)]), _row(["---"] * (len(concurrencies) + 1))]
        for size in sizes:
            label = "default" if size is None else f"{size >> 20} MiB"
            speeds = [cells.get((size, count)) for count in concurrencies]
            lines.append(_row([label, *("–" if speed is None else f"{speed:.2f}" for speed in speeds)]))
        lines.append("")
    lines += [*(f"- {sentence}" for sentence in (*advice.sentences, *_limits(figures))), ""]
    return "\n".join(
        [
            *lines,
            f"transfer = dcpfs.{advice.code}" if advice.fields else "transfer = dcpfs.TransferConfig()  # the defaults",
            "",
        ]
    )


def _limits(figures: Sequence[TuneFigure]) -> list[str]:
    """Where cells of the grid are not what their row and column say."""
    sentences: list[str] = []
    cells = [
        (figure.request_bytes * figure.concurrency, figure)
        for figure in figures
        if figure.stage == "grid" and figure.request_bytes
    ]
    if any(in_flight > figure.budget_bytes for in_flight, figure in cells):
        budget = f"{cells[0][1].budget_bytes >> 20} MiB"
        sentences.append(f"Where size × requests is more than the budget of {budget}, fewer are in flight.")
    if any(in_flight > figure.needed_bytes for in_flight, figure in cells):
        size = f"{cells[0][1].needed_bytes / 1e9:.3g} GB"
        sentences.append(
            f"Where it is more than the state ({size}), there are not so many requests: a size like that of one of "
            "your ranks (--size-gb) tells more."
        )
    return sentences


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


# --- at a store


class Rig:
    """Saves and loads one state at a place, with any settings, in this process. Not thread-safe.

    Args:
        target: Where; each checkpoint is a child of it and deleted after its load.
        size_bytes: Of the Llama-shaped state.
        remote: As in `Axes`.
    """

    def __init__(self, target: Target, size_bytes: int, *, remote: bool) -> None:
        self._target = target
        self._remote = remote
        self._tensors: tuple[TensorSpec, ...] = specs(Workload.LLAMA, size_bytes)
        self._needed_bytes = sum(spec.size_bytes for spec in self._tensors)
        self._state: State = build(self._tensors, None)
        self._template: State = build(self._tensors, None)
        self._number = 0

    def run(self, candidate: Candidate) -> tuple[Timed, Timed]:
        """Save, load, compare, delete.

        Raises:
            WrongBytesError: What was loaded is not what was saved.
        """
        transfer = candidate.transfer(self._remote)
        self._number += 1
        place = self._target.child(f"tune-{self._number}")
        options = place.storage_options()
        try:
            save = self._timed(lambda: dcpfs.save(self._state, place.url, storage_options=options, transfer=transfer))
            poison(self._template)
            values: dict[str, object] = dict(self._template)
            load = self._timed(lambda: dcpfs.load(values, place.url, storage_options=options, transfer=transfer))
            if (wrong := check_loaded(self._template, self._tensors, None)) is not None:
                raise WrongBytesError(f"What was loaded with {_described(candidate)} is not what was saved: {wrong}.")
        finally:
            remove(place.direct())
        return save, load

    def _timed(self, call: Callable[[], object]) -> Timed:
        cpu_seconds, began_seconds = time.process_time(), time.monotonic()
        call()
        wall_seconds = time.monotonic() - began_seconds
        return Timed(self._needed_bytes, wall_seconds, time.process_time() - cpu_seconds)
