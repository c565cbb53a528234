"""The filesystem that an fsspec store talks to: opened when needed, one a process, and let go when it is no good.

Problem: a filesystem instance that went through a fork hangs, its credentials expire, a client with one connection
never opens another, several clients lose answers when two threads ask, and many wait for ever for a server that went
silent.

Way taken: what can't be shared between processes (locks, threads, the instance) is one value a process, which a
forked child makes anew when it first asks; who makes it is decided by one step that no two threads can both win. An
instance belongs to a generation: whoever finds its own at fault ends that one and no newer. Where one call at a time
has to be, a call waits for its turn, and that time is not taken from its own. Every call of a remote filesystem ends
in time (`dcpfs.storage.bounded_calls`).

Flow: ``connection.attempts(what)`` → ``attempts.make(action)`` for every attempt of a request: turn, filesystem, call
within what is left of the deadline → after a failure ``renew``, or a new connection at once where only that helps.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

from dcpfs.config import RetryConfig
from dcpfs.errors import StorageError
from dcpfs.storage.bounded_calls import CallThreads, CallTimeoutError, in_bounded_call
from dcpfs.storage.filesystems import OpenFilesystem, Traits, open_filesystem, uncached
from dcpfs.storage.literal_calls import disconnect
from dcpfs.storage.location import Location
from dcpfs.storage.translate import Fault, fault_of

__all__ = ["Attempts", "FsspecConnection"]

_T = TypeVar("_T")
_ONE_CONNECTION = frozenset({"ftp", "ftps", "sftp", "smb", "ssh"})


class _InProcess:
    """What of a connection belongs to one process.

    A lock that is held as it forks stays held in the child, and threads and sockets are the parent's.
    """

    def __init__(self) -> None:
        self.opening = threading.Lock()
        self.serial: contextlib.AbstractContextManager[object] = threading.Lock()
        self.threads = CallThreads()
        self.opened: OpenFilesystem | None = None
        self.generation = 0
        self.stalls = 0


_PARENTS: list[_InProcess] = []
"""In a forked child, what its parent had: kept, since the end of some (sshfs) hangs up the parent's line."""


class FsspecConnection:
    """The filesystem of a location. Thread-safe, usable in a forked child.

    Args:
        location: Where it is.
        traits: What is known about the filesystem.
        retry: Deadline and time-outs.
    """

    def __init__(self, location: Location, traits: Traits, retry: RetryConfig) -> None:
        self._location = location
        self._scheme = uncached(location).scheme
        self._traits = traits
        self._retry = retry
        self._closed = False
        self._processes = {os.getpid(): _InProcess()}

    @property
    def generation(self) -> int:
        """How often the filesystem was renewed in this process."""
        return self._here().generation

    @property
    def stalls(self) -> int:
        """How many calls of this process did not come back in time."""
        return self._here().stalls

    @property
    def left_behind(self) -> int:
        """How many calls of this process have not come back by now."""
        return self._here().threads.left_behind

    def attempts(self, what: str, extra_seconds: Callable[[OpenFilesystem], float] | None = None) -> Attempts:
        """Start a request, which may take more than one attempt.

        Args:
            what: Verb and redacted URL.
            extra_seconds: What one call may take on top of what it gets of the deadline.
        """
        return Attempts(self, what, time.monotonic() + self._retry.deadline_seconds, extra_seconds)

    def filesystem(self) -> OpenFilesystem:
        """The filesystem of this process."""
        return self._filesystem(self._here())[0]

    def once(self, what: str, call: Callable[[], _T]) -> _T:
        """Run a call that can't be repeated, within the whole deadline."""
        here = self._here()
        opened, generation = here.opened, here.generation
        with self._turn(here):
            try:
                return self._call(here, call, what=what, limit_seconds=self._retry.deadline_seconds)
            except Exception as error:
                if opened is not None:
                    self._hang_up(here, error, opened, generation)
                raise

    def tidy(self, what: str, call: Callable[[], object]) -> None:
        """Run a call whose failure nobody needs to hear of: what failed before it is on its way."""
        with contextlib.suppress(Exception):
            here = self._here()
            with self._turn(here):
                self._call(here, call, what=what, limit_seconds=self._retry.connect_timeout_seconds)

    def close(self) -> None:
        """Let the filesystem go. Idempotent."""
        self._closed = True
        self._here().opened = None

    def _here(self) -> _InProcess:
        pid = os.getpid()
        here = self._processes.get(pid)
        if here is None:
            # All threads get the one that was first, and each ancestor's goes to one of them: these calls are atomic.
            here = self._processes.setdefault(pid, _InProcess())
            for other in list(self._processes):
                inherited = None if other == pid else self._processes.pop(other, None)
                if inherited is not None:
                    _PARENTS.append(inherited)
        return here

    @contextlib.contextmanager
    def _turn(self, here: _InProcess) -> Iterator[None]:
        """One call at a time where it has to be."""
        if not self._traits.serial or in_bounded_call():
            yield
            return
        stalls = here.stalls
        with here.serial:
            if stalls != here.stalls:
                raise TimeoutError("the server stopped answering while this call waited for its turn")
            yield

    def _call(self, here: _InProcess, call: Callable[[], _T], *, what: str, limit_seconds: float) -> _T:
        """Run a call of the filesystem, which ends in time where a server is asked."""
        if not self._traits.remote or in_bounded_call():
            return call()
        return self._bounded(here, call, what=what, limit_seconds=limit_seconds)

    def _bounded(self, here: _InProcess, call: Callable[[], _T], *, what: str, limit_seconds: float) -> _T:
        try:
            return here.threads.run(call, limit_seconds=limit_seconds, what=what)
        except CallTimeoutError:
            here.stalls += 1
            raise

    def _filesystem(self, here: _InProcess) -> tuple[OpenFilesystem, int]:
        """The filesystem of this process, and which one after how many renewals it is."""
        opened = here.opened
        if opened is not None:
            return opened, here.generation
        stalls = here.stalls
        with here.opening:
            if self._closed:
                raise StorageError(f"Can't use {self._location}: this store was closed")
            if here.opened is None:
                if stalls != here.stalls:
                    raise TimeoutError("the server stopped answering while this call waited for a connection")
                here.opened = self._open(here)
            return here.opened, here.generation

    def _open(self, here: _InProcess) -> OpenFilesystem:
        if not self._traits.remote:
            return open_filesystem(self._location)
        retry = self._retry
        return self._bounded(
            here,
            partial(open_filesystem, self._location),
            what=f"open {self._location.redacted}",
            limit_seconds=min(retry.connect_timeout_seconds + retry.read_timeout_seconds, retry.deadline_seconds),
        )

    def _renew(self, here: _InProcess, generation: int) -> None:
        """Let go of the filesystem of a generation, unless another thread was faster."""
        with here.opening:
            if generation == here.generation:
                here.generation += 1
                here.opened = None

    def _hang_up(self, here: _InProcess, error: Exception, opened: OpenFilesystem, generation: int) -> None:
        """After a failure of the one connection that some filesystems have: they never open another."""
        stalled = isinstance(error, CallTimeoutError)
        if stalled:
            disconnect(opened.filesystem)
        if stalled or (self._scheme in _ONE_CONNECTION and fault_of(error) is Fault.TRANSIENT):
            self._renew(here, generation)

    def _limit_seconds(self, deadline: float) -> float:
        """How long a call may take: so long that a second one still can help."""
        left = max(deadline - time.monotonic(), 0.001)
        return max(left / 2, min(left, self._retry.read_timeout_seconds))


class Attempts:
    """The attempts of one request: they share a deadline, and know which filesystem the last one had. One thread's."""

    def __init__(
        self,
        connection: FsspecConnection,
        what: str,
        deadline: float,
        extra_seconds: Callable[[OpenFilesystem], float] | None,
    ) -> None:
        self._connection = connection
        self._what = what
        self._deadline = deadline
        self._extra_seconds = extra_seconds
        self._generation = 0

    def make(self, action: Callable[[OpenFilesystem], _T]) -> _T:
        """One attempt: the action, on the filesystem of this process."""
        connection = self._connection
        here = connection._here()
        asked_seconds = time.monotonic()
        # Not before it is this call's turn: the one before may have lost the connection.
        with connection._turn(here):
            self._deadline += time.monotonic() - asked_seconds  # others' time, which their own limits bound
            opened, self._generation = connection._filesystem(here)
            limit_seconds = connection._limit_seconds(self._deadline)
            if self._extra_seconds is not None:
                limit_seconds += self._extra_seconds(opened)
            try:
                return connection._call(here, lambda: action(opened), what=self._what, limit_seconds=limit_seconds)
            except Exception as error:
                connection._hang_up(here, error, opened, self._generation)
                raise

    def renew(self) -> None:
        """Let go of the filesystem that the last attempt had, whose credentials expired."""
        self._connection._renew(self._connection._here(), self._generation)
