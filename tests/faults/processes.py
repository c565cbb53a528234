"""Waiting for other processes with an end to it: one that hangs fails its test, and takes no worker with it."""

from __future__ import annotations

import gc
import os
import select
import signal
import time
from collections.abc import Callable

__all__ = ["LONG_SECONDS", "fork_child", "has_ended"]

LONG_SECONDS = 240.0
"""More than a process takes to its end on the slowest machine."""


def has_ended(descriptor: int, seconds: float) -> bool:
    """Whether the process of a pidfd ends within some time."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def fork_child(work: Callable[[], object]) -> int:
    """Do something in a forked child, and wait for its end.

    Its collector is off: what other threads were at in the moment of the fork is not for it to finalize.

    Returns:
        The child's status, as `os.waitpid` tells it; its exit code is 1 where the work raised, else 0.

    Raises:
        AssertionError: It did not end, and was killed.
    """
    collects = gc.isenabled()
    gc.disable()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    if collects:
        gc.enable()
    deadline = time.monotonic() + LONG_SECONDS
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError(f"the child was not done after {LONG_SECONDS:.0f} s")
        time.sleep(0.001)
