"""What one call costs this process: time, CPU, and memory beyond what it held before.

Problem: a process's peak counts its imports and its state; ``getrusage`` cannot forget an old peak, and knows of
children only once they are gone, while a save in the background is the work of one that stays.

Way taken: Linux resets ``VmHWM`` when ``5`` is written to ``/proc/self/clear_refs``. Freed memory is given
back to the kernel before, so that a buffer of the last round neither hides in the baseline nor is found there
for free. CPU time and memory are this process's and its descendants': a background process that reads what it saves
costs what it costs. Peaks are added up even where they were not at the same moment, and a page that two processes map
anew counts for both, so the sum errs on the side of more.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import Self

__all__ = ["Cost", "Meter"]


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one call.

    Attributes:
        began_seconds: Monotonic clock of the machine, comparable between its processes.
        ended_seconds: The same.
        cpu_seconds: User and system time of all threads of this process and of its descendants, of children that ended
            within the call as well.
        peak_extra_bytes: Peak of resident memory above that at the start, of this process and each descendant that is
            alive at the end; None where it can't be measured.
    """

    began_seconds: float
    ended_seconds: float
    cpu_seconds: float
    peak_extra_bytes: int | None


class Meter:
    """Context manager around the call; `cost` is there afterwards."""

    cost: Cost

    def __enter__(self) -> Self:
        gc.collect()
        _trim()
        self._children = _cpu_of_descendants()
        self._ended_children_seconds = _cpu_of_ended_children()
        self._resident_bytes = {process: _reset_peak(process) for process in (os.getpid(), *self._children)}
        self._cpu_seconds = time.process_time()
        self._began_seconds = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        ended_seconds, cpu_seconds = time.monotonic(), time.process_time() - self._cpu_seconds
        children = _cpu_of_descendants()
        cpu_seconds += sum(seconds - self._children.get(process, 0.0) for process, seconds in children.items())
        before_seconds = sum(seconds for process, seconds in self._children.items() if process not in children)
        cpu_seconds += max(0.0, _cpu_of_ended_children() - self._ended_children_seconds - before_seconds)
        self.cost = Cost(self._began_seconds, ended_seconds, cpu_seconds, self._peak_bytes(children))

    def _peak_bytes(self, children: Iterable[int]) -> int | None:
        extra_bytes = 0
        for process in (os.getpid(), *children):
            before, peak = self._resident_bytes.get(process, 0), _status(process, "VmHWM")
            if before is None:
                return None
            extra_bytes += max(0, (peak or 0) - before)
        return extra_bytes


def _cpu_of_descendants() -> dict[int, float]:
    """CPU seconds of each living descendant; empty where the system does not tell."""
    found: dict[int, float] = {}
    ticks, waiting = os.sysconf("SC_CLK_TCK"), [os.getpid()]
    while waiting:
        parent = waiting.pop()
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            for child in _read(task).split():
                # The name in parentheses may hold anything, spaces too; user and system time are 12 fields after it.
                fields = _read(Path(f"/proc/{child}/stat")).rpartition(")")[2].split()
                if len(fields) > 12:
                    found[int(child)] = (int(fields[11]) + int(fields[12])) / ticks
                    waiting.append(int(child))
    return found


def _cpu_of_ended_children() -> float:
    """CPU seconds of all children that have ended and been waited for, with theirs."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # it has just ended
        return ""


def _reset_peak(process: int) -> int | None:
    """Let the peak of a process begin anew, and say what it holds now; None where the system does not let."""
    try:
        Path(f"/proc/{process}/clear_refs").write_text("5")
    except OSError:
        return None
    return _status(process, "VmRSS")


def _status(process: int, name: str) -> int | None:
    for line in _read(Path(f"/proc/{process}/status")).splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


def _trim() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
