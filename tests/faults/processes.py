"""Waiting for other processes with an end to it: one that hangs fails its test, and takes no worker with it."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable

from dcpfs.format.collector import paused_collector

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
    with paused_collector():
        child = os.fork()
        if child == 0:
            code = 1
            try:
                work()
                code = 0
            finally:
                os._exit(code)
    descriptor = os.pidfd_open(child)
    try:
        ended = has_ended(descriptor, LONG_SECONDS)
    finally:
        os.close(descriptor)
    if not ended:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert ended, f"the child was not done after {LONG_SECONDS:.0f} s"
    return status
