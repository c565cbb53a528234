"""A dataloader's worker that dies while a save is wanted or under way.

Problem: torch's handler of SIGCHLD raises in the main thread when a worker of a dataloader has died, wherever that
thread is. A signal to the whole process group kills the workers, and their deaths then break the save that the signal
asked for: on one rank, in mid-collective, with the others left waiting. To catch the first such error is not enough,
since the loader may see one worker's death itself, and the handler another's (seen in 7 of 120 runs with two workers).

Way taken: while somebody holds deaths back, they are told only where a loader waits for a batch. They are not
forgotten: a thread looks each half second whether the main thread waits for one by now, or nobody holds them back any
more, and sends SIGCHLD again. Without it a loader could wait for ever, for the rest of a message that its worker was
writing, or go on without the worker's part of the data (``in_order=False``). Handlers stay as they are: it is the check
that torch's looks up at each call that is replaced, so that it makes no difference who else handles SIGCHLD, in which
order handlers come and go, or when the first loader was made.

A death whose SIGCHLD is handled before the signal that asks for the save is told as ever. Python handles signals that
are there together by their numbers, and those that schedulers use (SIGTERM, SIGUSR1, SIGUSR2, SIGINT) come first.
"""

from __future__ import annotations

import _thread
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from dcpfs.torch_private import intercept_worker_check, waits_for_batch

__all__ = ["hold_worker_deaths_back", "undisturbed_by_workers"]

_REMIND_SECONDS = 0.5
_REMINDERS = 20
"""How often SIGCHLD is sent again when nobody listens: torch's handler may have been taken away."""


class _Guard:
    """What is asked before torch's handler looks for dead workers. One per process."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Nothing is held back here, be it that it is in the process that this one was forked from."""
        self.sections = 0
        self.reasons: list[Callable[[], bool]] = []
        self.debt: object = None
        """Stands for a death that was passed over and that nobody was told of; None when there is none."""

    @functools.cache  # noqa: B019 - there is one
    def stand(self) -> None:
        """Be asked from here on."""
        if intercept_worker_check(self.answer):
            os.register_at_fork(after_in_child=self.reset)

    def holds(self, frame: FrameType | None) -> bool:
        """Whether nothing may be raised in code that is called from there."""
        wanted = self.sections > 0 or any(reason() for reason in tuple(self.reasons))
        return wanted and not waits_for_batch(frame)

    def answer(self, check: Callable[[], None]) -> None:
        """In the main thread, within torch's handler of SIGCHLD."""
        if not self.holds(sys._getframe()):
            self.debt = None
            check()
        elif self.debt is None:
            self.debt = object()
            # Not a Thread: its start takes a lock that the interrupted code may hold.
            _thread.start_new_thread(self._remind, (self.debt, _thread.get_ident()))

    def _remind(self, debt: object, main_thread: int) -> None:
        reminders = 0
        while self.debt is debt and reminders < _REMINDERS:
            time.sleep(_REMIND_SECONDS)
            if self.debt is debt and not self.holds(sys._current_frames().get(main_thread)):
                reminders += 1
                signal.pthread_kill(main_thread, signal.SIGCHLD)
        if self.debt is debt:
            self.debt = None


_guard = _Guard()


@contextmanager
def undisturbed_by_workers() -> Iterator[None]:
    """Nothing is raised within because a worker died, but where a loader waits for it. Nests; any thread may use it."""
    if threading.current_thread() is not threading.main_thread():  # no signal handler raises here
        yield
        return
    _guard.stand()
    _guard.sections += 1
    try:
        yield
    finally:
        _guard.sections = max(0, _guard.sections - 1)  # it is 0 in a child that was forked within


def hold_worker_deaths_back(reason: Callable[[], bool]) -> Callable[[], None]:
    """Hold them back while that is so. For signal handlers too.

    Args:
        reason: Asked often, in any thread. Takes no lock.

    Returns:
        What ends it. Idempotent.
    """
    _guard.stand()
    _guard.reasons.append(reason)

    def end() -> None:
        if reason in _guard.reasons:
            _guard.reasons.remove(reason)

    return end
