"""How long each phase of a save or load takes, and who hangs in one.

Problem: at scale a save or load sometimes stands still for hours without an error (case 60): a collective whose peer
never came, a mount that does not answer. The trainer's own watchdog, where there is one, kills the job without saying
where. And ``faulthandler.dump_traceback_later`` is one timer for the whole process, so whoever uses it takes it from
the trainer, or from a second checkpointer.

Way taken: work is cut into named phases. Each has a deadline with a timer thread of its own that ends with the phase;
when the deadline passes it writes, once, the phase, the rank, the bytes so far and the stacks of all threads, to the
log and to stderr. It changes nothing: what ends a hang is the time-out of the group or the store. Seconds and bytes of
each phase are kept for the one line that a save or load logs, and told to the metrics callback.

::

    phases = Phases(rank=3, deadline_seconds=600, on_phase=callbacks.on_phase)
    with phases.phase("write") as phase:
        phase.add_bytes(n)
    _logger.info("saved ...: %s", phases.summary())     # plan 0.01 s, write 1.20 s 3.4 GB
"""

from __future__ import annotations

import faulthandler
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["Phase", "PhaseRecord", "Phases", "format_bytes"]

_logger = logging.getLogger(__name__)

_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")


@dataclass(frozen=True, slots=True)
class PhaseRecord:
    """A phase that has ended.

    Attributes:
        name: Of the phase.
        seconds: Wall time, phases within it included.
        size_bytes: What this rank moved in it.
        failed: It ended with an exception.
    """

    name: str
    seconds: float
    size_bytes: int
    failed: bool = False


class Phase:
    """A phase at work."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.bytes = 0
        self._started_seconds = time.monotonic()
        self._lock = threading.Lock()

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self._started_seconds

    def add_bytes(self, size_bytes: int) -> None:
        """Count bytes that were moved. Thread-safe, unlike ``phase.bytes += n``."""
        with self._lock:
            self.bytes += size_bytes


class Phases:
    """The phases of one save or load on one rank. They may be nested, and run in several threads.

    Args:
        rank: For the texts.
        deadline_seconds: After which a phase that has not ended is reported; None: never.
        on_phase: Told name, seconds and bytes at the end of each phase. It must not raise.
        label: What the phases belong to, for the texts, e.g. ``save of iter_000000005``.
    """

    def __init__(
        self,
        *,
        rank: int = 0,
        deadline_seconds: float | None = None,
        on_phase: Callable[[str, float, int], None] | None = None,
        label: str = "",
    ) -> None:
        self._rank = rank
        self._deadline_seconds = deadline_seconds
        self._on_phase = on_phase
        self._label = label
        self._records: list[PhaseRecord] = []
        self._overdue: list[str] = []

    @property
    def records(self) -> tuple[PhaseRecord, ...]:
        """The phases that have ended, in that order."""
        return tuple(self._records)

    @property
    def overdue(self) -> tuple[str, ...]:
        """Names of the phases whose deadline passed."""
        return tuple(self._overdue)

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Measure and watch what is done within. No thread is left when it ends."""
        current = Phase(name)
        timer = self._watchdog(current)
        failed = True
        _logger.debug("rank %d: %s%s begins", self._rank, name, self._of())
        try:
            if timer is not None:
                timer.start()  # within: an interrupt right after it must not leave it running
            yield current
            failed = False
        finally:
            if timer is not None:
                timer.cancel()
                if timer.ident is not None:
                    timer.join()
            record = PhaseRecord(name, current.seconds, current.bytes, failed)
            self._records.append(record)
            if name in self._overdue:
                _logger.warning(
                    "rank %d: %s%s %s after %.1f s",
                    self._rank,
                    name,
                    self._of(),
                    "failed" if failed else "came to its end",
                    record.seconds,
                )
            if self._on_phase is not None:
                self._on_phase(name, record.seconds, record.size_bytes)

    def summary(self) -> str:
        """Seconds and bytes of each phase, in one line; phases of one name together."""
        totals: dict[str, tuple[float, int]] = {}
        for record in self._records:
            seconds, size_bytes = totals.get(record.name, (0.0, 0))
            totals[record.name] = seconds + record.seconds, size_bytes + record.size_bytes
        return ", ".join(
            f"{name} {seconds:.2f} s" + (f" {format_bytes(size_bytes)}" if size_bytes else "")
            for name, (seconds, size_bytes) in totals.items()
        )

    def _of(self) -> str:
        return f" ({self._label})" if self._label else ""

    def _watchdog(self, phase: Phase) -> threading.Timer | None:
        """Not started."""
        if self._deadline_seconds is None:
            return None
        timer = threading.Timer(self._deadline_seconds, self._report, (phase,))
        timer.name = f"dcpfs-watchdog-{phase.name}"
        timer.daemon = True
        return timer

    def _report(self, phase: Phase) -> None:
        self._overdue.append(phase.name)
        text = (
            f"rank {self._rank}: {phase.name}{self._of()} has not ended after {phase.seconds:.1f} s, with "
            f"{format_bytes(phase.bytes)} moved; the stacks of all threads follow"
        )
        _logger.error("%s\n%s", text, _stacks())
        _dump_to_stderr(text)


def format_bytes(size_bytes: int) -> str:
    """A size for people: ``3.4 GB``, in powers of 1000."""
    value, power = float(size_bytes), 0
    while value >= 1000 and power < len(_UNITS) - 1:
        value, power = value / 1000, power + 1
    return f"{value:.1f} {_UNITS[power]}" if power else f"{size_bytes} B"


def _stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    own = threading.get_ident()
    texts = [
        f"thread {names.get(ident, '?')} ({ident}):\n{''.join(traceback.format_stack(frame)).rstrip()}"
        for ident, frame in sys._current_frames().items()
        if ident != own
    ]
    return "\n".join(texts)


def _dump_to_stderr(text: str) -> None:
    """The same from C, which also shows threads that Python does not know. Not where stderr is no file."""
    stderr = sys.__stderr__
    if stderr is None:
        return
    try:
        print(text, file=stderr, flush=True)  # a hanging job may have no handler for its log
        faulthandler.dump_traceback(file=stderr, all_threads=True)
    except (OSError, ValueError):  # closed, or without a descriptor: the log has it
        return
