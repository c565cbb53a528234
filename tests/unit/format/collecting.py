"""Looks at the cyclic collector, which all threads of a process share."""

from __future__ import annotations

import gc
import threading

__all__ = ["collects_again"]

_LOOKS = 6000


def collects_again() -> bool:
    """Whether the collector is on, once the pauses of other threads have ended as well."""
    pause = threading.Event()
    for _ in range(_LOOKS):
        if gc.isenabled():
            return True
        pause.wait(0.01)
    return False
