"""How long training stands still for a save in the background, and how much slower it is beside one.

Problem: the time of a call is not what training loses: where copies go on after the call, it may not write its
parameters yet; and a thread that saves takes Python's lock from it. On a busy machine seconds mean nothing by
themselves.

Way taken: each contender in fresh processes (`stall_job`), in turns, several saves of one state in a row: seconds until
the call returns, and until the state may be overwritten. Between them the same state is copied into warm memory by the
same threads: what no save can do without, and what figures are divided by. Then a loop of small operations, as a
training step launches them, runs alone, beside one more save until that is stored, and alone again. How much slower it
is says little by itself, since a save that is over sooner harms for less time: so what is told is the time that the
loop has lost by then. No figure counts before the last save has been read back.

Flow: `measure` → repetitions × contenders → a process each → `StallFigure` | `Missing` → `markdown`.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from .figures import Entry, Missing
from .settings import PACKAGE_ROOT, PLACE_PREFIX, Setting, client_environment

__all__ = ["CASE", "CONTENDERS", "Blocked", "StallFigure", "StallOrder", "markdown", "measure"]

CASE = "stall"

CONTENDERS = ("dcpfs-async", "dcpfs-async_with_pinned_mem", "torch-thread", "torch-process")
"""`AsyncMode` of ours, and `AsyncCheckpointerType` of ``dcp.async_save`` with a `DefaultStager` that is kept."""

_TMPFS = "/dev/shm"
_REASON_CHARACTERS = 600


class StallOrder(BaseModel):
    """What a process measures.

    Attributes:
        rounds: Saves; those after the first are told together, by their median.
        threads: Of torch, for its copies as well.
        directory: Where it saves to.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    contender: str
    size_bytes: int
    rounds: int
    threads: int
    directory: str


class Blocked(BaseModel):
    """What training waits for.

    Attributes:
        call_seconds: Until the call that saves returns.
        total_seconds: Until the state may be overwritten.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    call_seconds: float
    total_seconds: float


class StallFigure(BaseModel):
    """One contender.

    Attributes:
        copy_seconds: Of a copy of the state into warm memory, the median of those between the saves.
        first: The first save, which has to find memory.
        later: The median of those after it.
        quiet_steps_per_second: Of the loop alone.
        saving_steps_per_second: Of the loop while a save runs.
        lost_seconds: By the loop to that save, beside those that it blocked for; None: of a version that did not say.
        seconds: That a later save blocks for.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["stall"] = "stall"
    case: str = CASE
    setting: Literal[Setting.TMPFS] | None = Setting.TMPFS
    """None: of a version that did not say it."""
    repetition: int = 0
    contender: str
    size_bytes: int
    threads: int
    copy_seconds: float
    first: Blocked
    later: Blocked
    quiet_steps_per_second: float
    saving_steps_per_second: float
    lost_seconds: float | None = None
    seconds: float | None = None
    cpu_seconds: None = None
    gigabytes: float | None = None
    peak_bytes: None = None
    requests: None = None
    moved_bytes: None = None

    @property
    def copies(self) -> float:
        """How many warm copies a later save blocks for."""
        return self.later.total_seconds / self.copy_seconds

    @property
    def slowdown(self) -> float:
        """Share of its steps that the loop loses beside a save."""
        return 1 - self.saving_steps_per_second / self.quiet_steps_per_second


def measure(
    *,
    size_bytes: int,
    rounds: int,
    tell: Callable[[str], None],
    contenders: Sequence[str] = CONTENDERS,
    threads: int = 2,
    repetitions: int = 1,
    timeout_seconds: float = 900.0,
) -> Iterator[StallFigure | Missing]:
    """All figures of the case, saved to memory; they come as they are there.

    Args:
        size_bytes: Of the state.
        rounds: Saves of each process, at least 2.
        tell: Shown what is being done.
        contenders: Of `CONTENDERS`.
        threads: Of torch.
        repetitions: Processes of each contender.
        timeout_seconds: Longest time of one process.
    """
    waiting = list(contenders)
    for repetition in range(repetitions):
        turn = repetition % max(1, len(waiting))
        for contender in waiting[turn:] + waiting[:turn]:
            tell(f"stall: {contender} #{repetition}, {size_bytes / 1e9:.2f} GB")
            with tempfile.TemporaryDirectory(
                prefix=PLACE_PREFIX, dir=_TMPFS if Path(_TMPFS).is_dir() else None
            ) as place:
                order = StallOrder(
                    contender=contender, size_bytes=size_bytes, rounds=rounds, threads=threads, directory=place
                )
                found = _run(order, timeout_seconds)
            if isinstance(found, StallFigure):
                yield found.model_copy(update={"repetition": repetition})
                continue
            waiting.remove(contender)
            tell(f"stall: {contender}: failed: {found}")
            entry = Entry(case=CASE, setting=Setting.TMPFS, contender=contender, repetition=repetition)
            yield Missing(kind="failed", entry=entry, reason=found)


def _run(order: StallOrder, timeout_seconds: float) -> StallFigure | str:
    """The figure of a process, or why there is none."""
    command = [sys.executable, "-m", f"{__package__}.stall_job", order.model_dump_json()]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            cwd=PACKAGE_ROOT,
            env=client_environment(),
            text=True,
            timeout=timeout_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "it did not end in time"
    if done.returncode == 0 and done.stdout:
        try:
            return StallFigure.model_validate_json(done.stdout.splitlines()[-1])
        except ValidationError:
            return "its process left no figure"
    tail = done.stderr.strip()[-_REASON_CHARACTERS:].splitlines()
    return f"its process ended with {done.returncode}: {tail[-1] if tail else 'without a word'}"


_QUESTION = (
    "Training waits for the call, and until it may write its parameters again; beside the rest of the save it is "
    "slower, and loses time for as long as that lasts. Saved to local files in memory; medians of the later saves of a "
    "process, of n processes with their range."
)
_HEADINGS = (
    "contender",
    "warm copy, s",
    "first save, s",
    "later: call, s",
    "later: blocked, s",
    "blocked ÷ copy",
    "steps/s alone",
    "beside a save",
    "slower by",
    "loop loses, s",
    "n",
)


def markdown(results: Iterable[StallFigure | Missing]) -> str:
    """The table of the case: medians of the processes, where there are several with their range."""
    lines = ["### stall", "", _QUESTION, ""]
    lines += [_row(_HEADINGS), _row(["---"] * len(_HEADINGS))]
    by_contender: dict[str, list[StallFigure | Missing]] = {}
    for each in results:
        name = each.contender if isinstance(each, StallFigure) else each.entry.contender
        by_contender.setdefault(name, []).append(each)
    for contender, own in by_contender.items():
        figures = [each for each in own if isinstance(each, StallFigure)]
        missing = next((each for each in own if isinstance(each, Missing)), None)
        if missing is not None:
            reason = missing.reason.replace("|", "/")
            lines.append(_row((contender, f"{missing.kind}: {reason}", *[""] * (len(_HEADINGS) - 2))))
            continue
        lines.append(
            _row(
                (
                    contender,
                    _spread([each.copy_seconds for each in figures], "{:.3f}"),
                    _spread([each.first.total_seconds for each in figures], "{:.3f}"),
                    _spread([each.later.call_seconds for each in figures], "{:.3f}"),
                    _spread([each.later.total_seconds for each in figures], "{:.3f}"),
                    _spread([each.copies for each in figures], "{:.2f}"),
                    _spread([each.quiet_steps_per_second for each in figures], "{:.1f}"),
                    _spread([each.saving_steps_per_second for each in figures], "{:.1f}"),
                    _spread([each.slowdown for each in figures], "{:.0%}"),
                    _spread([each.lost_seconds for each in figures if each.lost_seconds is not None], "{:.3f}"),
                    str(len(figures)),
                )
            )
        )
    return "\n".join(lines) + "\n\n"


def _spread(values: Sequence[float], form: str) -> str:
    if not values:
        return "–"
    middle = form.format(statistics.median(values))
    return middle if len(values) == 1 else f"{middle} ({form.format(min(values))}–{form.format(max(values))})"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
