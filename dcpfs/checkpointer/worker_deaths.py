"""A dataloader's worker that dies while a save is wanted.

Problem: torch's dataloader installs a handler of SIGCHLD that raises in the main thread when a worker has died,
wherever that thread is. A signal to the whole process group kills the workers, and their deaths then break the save
that the signal asked for: on one rank, in mid-collective, with the others left waiting. To catch the first such error
is not enough, since each of the workers may bring one (seen in 7 of 120 runs with two workers).

Way taken: while a save is wanted or under way, torch's handler isn't called. Nothing is lost by that: the dataloader
looks for dead workers itself whenever no batch has come for 5 s (``MP_STATUS_CHECK_INTERVAL``), and raises where the
training loop asks for the batch. Handlers of anybody else are left alone.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import cast

__all__ = ["leave_worker_deaths_to_the_loader", "pass_over_worker_deaths"]

_Handler = Callable[[int, FrameType | None], object]
_MODULE = "torch.utils.data._utils.signal_handling"


def pass_over_worker_deaths(is_passed_over: Callable[[], bool]) -> Callable[[], None]:
    """From here on, torch's handler of SIGCHLD is asked only while that is not so. In the main thread.

    Returns:
        What puts torch's handler back where no other has been installed since.
    """
    previous = signal.getsignal(signal.SIGCHLD)
    if getattr(previous, "__module__", None) != _MODULE:
        return lambda: None

    def handle(number: int, frame: FrameType | None) -> None:
        if not is_passed_over():
            cast("_Handler", previous)(number, frame)

    def put_back() -> None:
        if signal.getsignal(signal.SIGCHLD) is handle:
            signal.signal(signal.SIGCHLD, cast("_Handler", previous))

    signal.signal(signal.SIGCHLD, handle)
    return put_back


@contextmanager
def leave_worker_deaths_to_the_loader() -> Iterator[None]:
    """Nothing is raised within because a dataloader's worker died. Also in threads that no signal handler runs in."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    put_back = pass_over_worker_deaths(lambda: True)
    try:
        yield
    finally:
        put_back()
