"""How long training stands still for a save in the background, and how much slower it is beside one.

Problem: the time of a call is not what training loses: where copies go on after the call, it may not write its
parameters yet; and a thread that saves takes Python's lock from it. On a busy machine seconds mean nothing by
themselves.

Way taken: each contender in a fresh process (`stall_job`), several saves of one state in a row: seconds until the call
returns, and until the state may be overwritten. Between them the same state is copied into warm memory by the same
threads: what no save can do without, and what figures are divided by. Then a loop of small operations, as a training
step launches them, runs alone and beside one more save. No figure counts before the last save has been read back.

Flow: `measure` → a process per contender → `StallFigure` → `markdown`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from .settings import PACKAGE_ROOT, PLACE_PREFIX, client_environment

__all__ = ["CONTENDERS", "Blocked", "StallFigure", "StallOrder", "markdown", "measure"]

CONTENDERS = ("dcpfs-async", "dcpfs-async_with_pinned_mem", "torch-thread", "torch-process")
"""`AsyncMode` of ours, and `AsyncCheckpointerType` of ``dcp.async_save`` with a `DefaultStager` that is kept."""

_TMPFS = "/dev/shm"


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
        seconds: That a later save blocks for.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["stall"] = "stall"
    case: str = "stall"
    setting: None = None
    repetition: int = 0
    contender: str
    size_bytes: int
    threads: int
    copy_seconds: float
    first: Blocked
    later: Blocked
    quiet_steps_per_second: float
    saving_steps_per_second: float
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
    timeout_seconds: float = 900.0,
) -> list[StallFigure]:
    """All figures of the case, saved to memory.

    Args:
        size_bytes: Of the state.
        rounds: Saves of each contender, at least 2.
        tell: Shown what is being done.
        contenders: Of `CONTENDERS`.
        threads: Of torch.
        timeout_seconds: Longest time of one process.
    """
    figures = []
    for contender in contenders:
        tell(f"stall: {contender}, {size_bytes / 1e9:.2f} GB")
        with tempfile.TemporaryDirectory(prefix=PLACE_PREFIX, dir=_TMPFS if Path(_TMPFS).is_dir() else None) as place:
            order = StallOrder(
                contender=contender, size_bytes=size_bytes, rounds=rounds, threads=threads, directory=place
            )
            done = subprocess.run(
                [sys.executable, "-m", f"{__package__}.stall_job", order.model_dump_json()],
                stdout=subprocess.PIPE,
                cwd=PACKAGE_ROOT,
                env=client_environment(),
                text=True,
                timeout=timeout_seconds,
                check=True,
            )
        figures.append(StallFigure.model_validate_json(done.stdout.splitlines()[-1]))
    return figures


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
)


def markdown(figures: Iterable[StallFigure]) -> str:
    """The table of the case."""
    lines = ["### stall", "", "Training waits for the call, and until it may write its parameters again.", ""]
    lines += [_row(_HEADINGS), _row(["---"] * len(_HEADINGS))]
    for each in figures:
        lines.append(
            _row(
                (
                    each.contender,
                    f"{each.copy_seconds:.3f}",
                    f"{each.first.total_seconds:.3f}",
                    f"{each.later.call_seconds:.3f}",
                    f"{each.later.total_seconds:.3f}",
                    f"{each.copies:.2f}",
                    f"{each.quiet_steps_per_second:.1f}",
                    f"{each.saving_steps_per_second:.1f}",
                    f"{each.slowdown:.0%}",
                )
            )
        )
    return "\n".join(lines) + "\n\n"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
