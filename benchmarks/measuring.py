"""What one call costs this process: time, CPU, and memory beyond what it held before.

Problem: a process's peak counts its imports and its state; ``getrusage`` cannot forget an old peak, and knows of
children only once they are gone, while a save in the background is the work of one that stays.

Way taken: Linux resets ``VmHWM`` when ``5`` is written to ``/proc/self/clear_refs``. Freed memory is given
back to the kernel before, so that a buffer of the last round neither hides in the baseline nor is found there
for free. CPU time is this process's and that of its living descendants; memory is this process's alone.
"""

from __future__ import annotations

import ctypes
import gc
import os
import time
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import Self

__all__ = ["Cost", "Meter"]

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one call.

    Attributes:
        began_seconds: Monotonic clock of the machine, comparable between its processes.
        ended_seconds: The same.
        cpu_seconds: User and system time of all threads of this process and of its descendants that are alive at both
            ends of the call, or began within it.
        peak_extra_bytes: Peak of resident memory above that at the start; None where it can't be measured.
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
        self._resident_bytes = _reset_peak()
        self._cpu_seconds = time.process_time()
        self._began_seconds = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        ended_seconds, cpu_seconds = time.monotonic(), time.process_time()
        peak = None if self._resident_bytes is None else max(0, _status("VmHWM") - self._resident_bytes)
        others = sum(seconds - self._children.get(process, 0.0) for process, seconds in _cpu_of_descendants().items())
        self.cost = Cost(self._began_seconds, ended_seconds, cpu_seconds - self._cpu_seconds + others, peak)


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


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # it has just ended
        return ""


def _reset_peak() -> int | None:
    try:
        _CLEAR_REFS.write_text("5")
        return _status("VmRSS")
    except OSError:
        return None


def _status(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS} has no {name}")


def _trim() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
