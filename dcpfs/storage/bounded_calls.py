"""Calls that end by a deadline, of clients that may never answer.

Problem: a client without time-outs of its own (sshfs, paramiko, SMB, what nobody has listed) waits for ever for a
server that went silent, and with it a save, every rank that waits for it, and the end of the process. A thread that
waits in a foreign call can't be stopped, and an executor's threads are joined when the process ends.

Way taken: a call runs in a daemon thread of its own, and who asked for it waits no longer than a limit. After that the
call is left behind: nobody reads its result, its thread is of no use until it comes back, and a warning says so. A call
therefore must not write into memory of whoever asked for it: it returns what it has read. Idle threads end by
themselves.

Flow: ``threads.run(call, limit_seconds)`` → the call's result or exception, or `CallTimeoutError` after the limit.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["CallThreads", "CallTimeoutError", "in_bounded_call"]

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
_IDLE_SECONDS = 10.0
_here = threading.local()


class CallTimeoutError(TimeoutError):
    """A call had not come back at its limit, and was left behind."""


def in_bounded_call() -> bool:
    """True in a thread of `CallThreads`: what it calls is within the limit already."""
    return getattr(_here, "bounded", False)


class CallThreads:
    """Runs calls with a limit. Thread-safe; not to be used across a fork."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Thread] = []
        self._left_behind = 0

    @property
    def left_behind(self) -> int:
        """How many calls have not come back by now."""
        return self._left_behind

    def run(self, call: Callable[[], _T], *, limit_seconds: float, what: str) -> _T:
        """The result of a call, which must not write into memory of the caller's.

        Args:
            call: Runs in another thread; from within such a thread, in this one.
            limit_seconds: Longest wait.
            what: Said when it is left behind, e.g. "read s3://bucket/x"; without secrets.

        Raises:
            CallTimeoutError: It had not come back.
            Exception: What the call raised.
        """
        if in_bounded_call():
            return call()
        pending = _Pending(call)
        with self._lock:
            thread = self._idle.pop() if self._idle else _Thread(self._rest, self._unrest)
        thread.take(pending)
        try:
            if not pending.ended.wait(limit_seconds):
                raise CallTimeoutError(f"no answer within {limit_seconds:.1f} s")
        except BaseException:
            self._leave(pending, what, limit_seconds)
            raise
        return pending.outcome()

    def _leave(self, pending: _Pending[_T], what: str, limit_seconds: float) -> None:
        with self._lock:
            if not pending.leave(self._returned):
                return
            self._left_behind += 1
            count = self._left_behind
        logger.warning(
            "The call to %s did not come back within %.1f s; it is left behind with its thread and connection (%d now)",
            *(what, limit_seconds, count),
        )

    def _returned(self) -> None:
        with self._lock:
            self._left_behind -= 1

    def _rest(self, thread: _Thread) -> None:
        with self._lock:
            self._idle.append(thread)

    def _unrest(self, thread: _Thread) -> bool:
        """Take a thread out of the idle ones; False when somebody was faster and has work for it."""
        with self._lock:
            if thread in self._idle:
                self._idle.remove(thread)
                return True
            return False


class _Pending(Generic[_T]):
    """One call and what became of it."""

    def __init__(self, call: Callable[[], _T]) -> None:
        self._call: Callable[[], _T] | None = call
        self._result: list[_T] = []
        self._error: BaseException | None = None
        self._on_return: Callable[[], None] | None = None
        self._lock = threading.Lock()
        self.ended = threading.Event()

    def run(self, at_end: Callable[[], None]) -> None:
        call, self._call = self._call, None
        try:
            if call is not None:
                self._result.append(call())
        except BaseException as error:  # noqa: BLE001 - handed over to who asked
            self._error = error
        # Before anybody is told: who asks again at once finds the thread idle.
        at_end()
        with self._lock:
            self.ended.set()
            on_return = self._on_return
            if on_return is not None:
                self._result.clear()
                self._error = None
        if on_return is not None:
            on_return()

    def leave(self, on_return: Callable[[], None]) -> bool:
        """Nobody waits any more. False when the call has ended just now."""
        with self._lock:
            if self.ended.is_set():
                return False
            self._on_return = on_return
            return True

    def outcome(self) -> _T:
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                # The traceback refers to this frame.
                del error
        return self._result.pop()


class _Thread:
    """A thread that runs one call after another, and ends when none comes for a while."""

    def __init__(self, rest: Callable[[_Thread], None], unrest: Callable[[_Thread], bool]) -> None:
        self._rest = rest
        self._unrest = unrest
        self._calls: queue.SimpleQueue[_Pending[object]] = queue.SimpleQueue()
        self._started = False

    def take(self, pending: _Pending[_T]) -> None:
        self._calls.put(pending)  # type: ignore[arg-type] # the queue never looks at results
        if not self._started:
            self._started = True
            threading.Thread(target=self._work, name="dcpfs-call", daemon=True).start()

    def _work(self) -> None:
        _here.bounded = True
        while True:
            try:
                pending = self._calls.get(timeout=_IDLE_SECONDS)
            except queue.Empty:
                if self._unrest(self):
                    return
                continue
            pending.run(lambda: self._rest(self))
            del pending
