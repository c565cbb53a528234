"""What is going on while a run goes on: a bar with what is left on a terminal, plain lines elsewhere.

Problem: a run takes minutes to hours, and a log file full of control characters can't be read.

Way taken: work is counted in units that are known beforehand, one for each repetition of a contender in a case. One
that has failed or is absent takes the units of its later repetitions with it. On a terminal the bar stays below the
lines; elsewhere every line begins with the count.
"""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as Remaining
from typing_extensions import Self

from .figures import Figure, Missing, StepFigure

__all__ = ["RunProgress"]

_MOST_CHARACTERS = 400


class RunProgress:
    """Context manager; call it from one thread.

    Args:
        total: Units of the whole run.
        console: Where to; its own kind decides between bar and lines.
    """

    def __init__(self, total: int, console: Console) -> None:
        self._console = console
        self._total = total
        self._done = 0
        self._seen: set[tuple[str, str, str, int]] = set()
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    @property
    def done(self) -> int:
        """Units that are done or have fallen away."""
        return self._done

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar = Progress(
                SpinnerColumn(),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                Remaining(),
                console=self._console,
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=self._total)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = self._task = None

    def tell(self, text: str) -> None:
        """Show a line."""
        text = text[:_MOST_CHARACTERS]
        if self._bar is None:
            count = f"[{self._done}/{self._total}] " if self._total else ""
            self._console.print(f"{count}{text}", markup=False, highlight=False, soft_wrap=True, emoji=False)
        else:
            self._bar.console.print(text, markup=False, highlight=False, emoji=False)

    def count(self, result: Figure | StepFigure | Missing, repetitions: int) -> None:
        """A result is there. Further rounds of a process that was counted change nothing.

        Args:
            result: A figure, or why there is none.
            repetitions: Of the plan: those after a missing one are not run.
        """
        entry = result.entry
        last = repetitions if isinstance(result, Missing) else entry.repetition + 1
        for repetition in range(entry.repetition, last):
            unit = (entry.where, entry.case, entry.contender, repetition)
            if unit not in self._seen:
                self._seen.add(unit)
                self._advance_to(self._done + 1)

    def reach(self, units: int) -> None:
        """So many units are behind, whether they gave results or not. The same ones may come again, in another size."""
        self._seen.clear()
        self._advance_to(max(self._done, units))

    def _advance_to(self, units: int) -> None:
        self._done = min(units, self._total)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self._done)
