"""Whether the process that started this one still lives.

Problem: a save whose trainer was killed must not publish a step that nobody waits for, perhaps beside a new incarnation
of the job. The end of a pipe does not tell: workers that the trainer forked hold copies of its ends. Asking for the
parent's id does, but only whoever asks.

Way taken: a descriptor of the parent (``pidfd_open``), which becomes readable when it ends; a thread waits for that.
Where the system has none, the thread asks for the parent's id every half second. Started by a parent that is gone
already, the process has another parent by now, and finds that at once.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable

__all__ = ["ParentWatch"]

_ASK_SECONDS = 0.5


class ParentWatch:
    """Watches one process, the parent. Thread-safe.

    Args:
        pid: Of the parent.
        on_end: Called once, in the watching thread, when it has ended.
    """

    def __init__(self, pid: int, on_end: Callable[[], None]) -> None:
        self._pid = pid
        self._on_end = on_end
        self._gone = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="dcpfs-parent-watch", daemon=True)
        self._thread.start()

    @property
    def is_gone(self) -> bool:
        """Whether the parent has ended. Asked anew each time."""
        return self._gone.is_set() or os.getppid() != self._pid

    def _watch(self) -> None:
        opened = getattr(os, "pidfd_open", None)
        descriptor: int | None = None
        try:
            descriptor = opened(self._pid) if opened is not None else None
        except OSError:  # gone already, or a kernel without it
            descriptor = None
        if descriptor is not None and os.getppid() == self._pid:
            select.select([descriptor], [], [])
        else:
            while os.getppid() == self._pid:
                self._gone.wait(_ASK_SECONDS)
        self._gone.set()
        self._on_end()
