"""A dataloader's worker that dies while a save is wanted or under way.

Problem: torch's handler of SIGCHLD raises in the main thread when a worker of a dataloader has died, wherever that
thread is. A signal to the whole process group kills the workers, and their deaths then break the save that the signal
asked for: on one rank, in mid-collective, with the others left waiting. To catch the first such error is not enough,
since the loader may see one worker's death itself, and the handler another's (seen in 7 of 120 runs with two workers).

Way taken: while somebody holds deaths back, they are told only where somebody waits for a worker. They are not
forgotten, unless their loader is given up: a thread looks each half second whether the main thread waits for a worker
by now, or nobody holds them back any more, and sends SIGCHLD again. Without it a loader could wait for ever, for the
rest of a message that its worker was writing, or go on without the worker's part of the data (``in_order=False``).
Handlers stay as they are: it is the check that torch's looks up at each call that is replaced, so that it makes no
difference who else handles SIGCHLD, or in which order handlers come and go.

What is told as ever: a death whose SIGCHLD is handled before the signal that asks for the save (Python handles signals
that are there together by their numbers, and those that schedulers use, SIGTERM, SIGUSR1, SIGUSR2 and SIGINT, come
first); and one that the loader has seen itself may be told again after the save, as by torch alone, where the loop
keeps the loader's iterator.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from dcpfs.torch_private import intercept_worker_check, waits_for_worker

__all__ = ["hold_worker_deaths_back", "undisturbed_by_workers"]

_REMIND_SECONDS = 0.5
_REMINDERS = 20
"""How often SIGCHLD is sent again when nobody listens: torch's handler may have been taken away."""
_MOST_LOADERS = 1000
"""Of which one look hears. Torch's check raises for one at a time."""


class _Guard:
    """What is asked before torch's handler looks for dead workers. One per process."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Nothing is held back here, be it that it is in the process that this one was forked from."""
        self.sections = 0
        self.reasons: list[Callable[[], bool]] = []
        self.errors: list[RuntimeError] = []
        """Of deaths that nobody was told of."""
        self.loaders: dict[int, tuple[int, ...]] = {}
        """The process ids of each loader's workers."""
        self.reminder: object = None
        """Stands for the thread that reminds of them; None where there is none."""

    def holds(self, frame: FrameType | None) -> bool:
        """Whether nothing may be raised in code that is called from there."""
        wanted = self.sections > 0 or _process_ends() or any(reason() for reason in tuple(self.reasons))
        return wanted and not waits_for_worker(frame)

    def answer(self, check: Callable[[], None]) -> None:
        """In the main thread, within torch's handler of SIGCHLD.

        It looks in any case: whoever starts a process in the meantime reaps those that have ended, and then torch can't
        see them any more.
        """
        for _ in range(_MOST_LOADERS):
            error = _error_of(check)
            if error is None:
                break
            self.errors.append(error)
        told = None
        if self.errors and not self.holds(sys._getframe()):
            with contextlib.suppress(IndexError):  # its loader was given up just now
                told = self.errors.pop(0)
        if self.errors and self.reminder is None:
            self.reminder = object()
            try:
                # Not a Thread: its start takes a lock that the interrupted code may hold.
                _thread.start_new_thread(self._remind, (self.reminder, _thread.get_ident()))
            except RuntimeError:  # no more threads, or none at the end of the process: the next SIGCHLD tells
                self.reminder = None
        if told is not None:
            raise told.with_traceback(None)

    def started(self, loader: int, pids: tuple[int, ...]) -> None:
        """A loader has workers."""
        self.loaders[loader] = pids

    def stopped(self, loader: int) -> None:
        """A loader was given up: nobody is told of its workers any more."""
        pids = self.loaders.pop(loader, ())
        for error in list(self.errors):  # in place: a signal may come in between
            if any(f"(pid {pid})" in str(error) for pid in pids):
                with contextlib.suppress(ValueError):  # told just now
                    self.errors.remove(error)

    def _remind(self, own: object, main_thread: int) -> None:
        reminders = 0
        while reminders < _REMINDERS and not _process_ends():
            time.sleep(_REMIND_SECONDS)
            if self.reminder is not own:
                return
            if not self.errors:
                self.reminder = None
                if not self.errors:
                    return
                self.reminder = own  # a death came in between, and found this thread
            if not self.holds(sys._current_frames().get(main_thread)):
                reminders += 1
                signal.pthread_kill(main_thread, signal.SIGCHLD)
        if self.reminder is own:
            self.reminder = None


def _error_of(check: Callable[[], None]) -> RuntimeError | None:
    try:
        check()
    except RuntimeError as error:
        # What was interrupted, and the exception that it may have been handling, is not to be kept alive.
        error.__context__ = None
        return error.with_traceback(None)
    return None


def _process_ends() -> bool:
    """Whether the interpreter waits for its threads: an error would end that, and nobody would hear of it."""
    return bool(getattr(threading, "_SHUTTING_DOWN", False))


_guard = _Guard()
if intercept_worker_check(_guard.answer, _guard.started, _guard.stopped):
    os.register_at_fork(after_in_child=_guard.reset)


@contextlib.contextmanager
def undisturbed_by_workers() -> Iterator[None]:
    """Nothing is raised within because a worker died, but in a wait for one. Nests; any thread may use it."""
    if threading.current_thread() is not threading.main_thread():  # no signal handler raises here
        yield
        return
    _guard.sections += 1
    try:
        yield
    finally:
        if _guard.sections:  # not so in a child that was forked within; and no call, which a signal could interrupt
            _guard.sections -= 1


def hold_worker_deaths_back(reason: Callable[[], bool]) -> Callable[[], None]:
    """Hold them back while that is so. For signal handlers too.

    Args:
        reason: Asked often, in any thread. Takes no lock.

    Returns:
        What ends it. Idempotent.
    """
    _guard.reasons.append(reason)

    def end() -> None:
        if reason in _guard.reasons:
            _guard.reasons.remove(reason)

    return end
