"""Bounded work: a budget in bytes and a pool of threads that lives for one call.

Problem: a save or load of one rank is thousands of independent pieces of very different size. One thread does
not fill a link. A plain thread pool is handed all pieces at once, so what they hold (a framed entry, a host
copy of a device tensor, a read buffer) piles up to the size of the state (cases 62, 63, 66, 67). And an
exception in a helper thread is easily lost, while the rest of the save goes on and is published (case 1).

Way taken: the calling thread pulls tasks one by one from an iterable, so that whatever makes them (a DCP
planner may only be called there) runs in that thread and no faster than the budget lets it. Each task says
what it holds in bytes; it starts when that fits. Workers are threads of this one call: none outlives it,
whatever happens. The first failure stops the supply, what runs is waited for, and the first error is raised
with the others noted on it.

::

    calling thread                          workers (at most `concurrency`)
    next(tasks) → budget.acquire(cost) ──►  queue ──► task.run() → budget.release(cost)
         ▲                                                 │
         └────────── one token per finished task ◄─────────┘    (bounds how far the caller runs ahead)
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from queue import SimpleQueue

__all__ = ["ByteBudget", "Task", "run_tasks"]

_AHEAD = 64
"""Tasks that may wait in the queue. Enough that threads change hands once per batch of tiny tasks and not
once per task, and few enough that a supply of tasks without cost stays lazy."""

_START_TRIES = 1000


@dataclass(slots=True)
class Task:
    """One independent piece of work.

    Attributes:
        cost_bytes: Memory beyond the state itself that it holds from before `run` is called until it returns.
        run: Does the work, in any thread. What it acquires from the same budget by itself can deadlock.
        discard: Called instead of ``run``, from any thread, when the run failed before the task began: gives
            back what the task was made with, e.g. a host buffer that the supply of tasks waits for.
    """

    cost_bytes: int
    run: Callable[[], None]
    discard: Callable[[], None] | None = None


class _Waiter:
    """A place in the line of a budget; ``ready`` is held until the bytes are granted or the budget closes."""

    __slots__ = ("granted", "ready", "size_bytes")

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.granted = False
        self.ready = threading.Lock()
        self.ready.acquire()


class ByteBudget:
    """Bytes in flight, bounded, first come first served. Thread-safe.

    A request larger than the whole budget is not refused: it passes alone, when nothing else is in flight. A
    small request never overtakes a large one that came before it, so the large one is not starved.

    Attributes:
        total_bytes: The bound.
    """

    def __init__(self, total_bytes: int) -> None:
        if total_bytes < 1:
            raise ValueError(f"a byte budget must be positive, not {total_bytes}")
        self.total_bytes = total_bytes
        self._lock = threading.Lock()
        self._waiters: deque[_Waiter] = deque()
        self._in_flight_bytes = 0
        self._peak_bytes = 0
        self._error: BaseException | None = None

    @property
    def in_flight_bytes(self) -> int:
        """Bytes held right now."""
        return self._in_flight_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that was ever held at once."""
        return self._peak_bytes

    @property
    def waiting(self) -> int:
        """Threads that wait in `acquire`."""
        return len(self._waiters)

    def acquire(self, size_bytes: int) -> None:
        """Wait until ``size_bytes`` fit, then hold them until `release`. Nothing always fits.

        Raises:
            BaseException: The error that the budget was closed with.
        """
        if size_bytes < 0:
            raise ValueError(f"cannot hold {size_bytes} bytes")
        waiter = _Waiter(size_bytes)
        try:
            with self._lock:
                self._raise_if_closed()
                if size_bytes == 0:
                    return
                if not self._waiters and self._fits(size_bytes):
                    self._take(size_bytes)
                    waiter.granted = True
                    return
                self._waiters.append(waiter)
            waiter.ready.acquire()
        except BaseException:
            self._withdraw(waiter)
            raise
        if not waiter.granted:
            self._raise_if_closed()

    def release(self, size_bytes: int) -> None:
        """Give back bytes that were acquired, from any thread."""
        with self._lock:
            if size_bytes > self._in_flight_bytes:
                raise ValueError(f"released {size_bytes} bytes while {self._in_flight_bytes} were held")
            self._in_flight_bytes -= size_bytes
            if self._waiters:
                self._grant()

    @contextlib.contextmanager
    def hold(self, size_bytes: int) -> Generator[None, None, None]:
        """Hold bytes for the length of a ``with`` block."""
        self.acquire(size_bytes)
        try:
            yield
        finally:
            self.release(size_bytes)

    def close(self, error: BaseException) -> None:
        """Raise ``error`` in every thread that waits, now or later; of several errors the first counts."""
        with self._lock:
            if self._error is None:
                self._error = error
            while self._waiters:
                self._waiters.popleft().ready.release()

    def _withdraw(self, waiter: _Waiter) -> None:
        """After an interrupt: give back the place in the line, or the bytes if they were just granted."""
        with self._lock:
            if waiter.granted:
                self._in_flight_bytes -= waiter.size_bytes
            elif waiter in self._waiters:
                self._waiters.remove(waiter)
            self._grant()

    def _raise_if_closed(self) -> None:
        if self._error is not None:
            raise self._error

    def _fits(self, size_bytes: int) -> bool:
        return self._in_flight_bytes == 0 or self._in_flight_bytes + size_bytes <= self.total_bytes

    def _take(self, size_bytes: int) -> None:
        self._in_flight_bytes += size_bytes
        if self._in_flight_bytes > self._peak_bytes:
            self._peak_bytes = self._in_flight_bytes

    def _grant(self) -> None:
        while self._waiters and self._fits(self._waiters[0].size_bytes):
            waiter = self._waiters.popleft()
            self._take(waiter.size_bytes)
            waiter.granted = True
            waiter.ready.release()


def run_tasks(tasks: Iterable[Task], *, concurrency: int, budget: ByteBudget, name: str = "dcpfs-transfer") -> None:
    """Run every task, in up to ``concurrency`` threads, holding each task's cost of ``budget`` while it runs.

    ``tasks`` is pulled in the calling thread, one task at a time and not much faster than they finish. A task
    is pulled before its cost is acquired: what pulling itself allocates counts for one task beyond the
    budget. With one task, or a concurrency of 1, everything runs in the calling thread.

    Args:
        tasks: The supply. A generator is closed in the calling thread when the run ends early.
        concurrency: Most tasks that run at once.
        budget: May be shared with other runs. The caller must not hold bytes of it that only end after this
            call.
        name: Prefix of the thread names.

    Raises:
        BaseException: The first error of a task or of ``tasks`` itself. No task starts after it, running ones
            are waited for, and further errors are noted on it. An interrupt of the calling thread counts as
            one.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency must be at least 1, not {concurrency}")
    supply = iter(tasks)
    try:
        if concurrency == 1:
            for task in supply:
                _hold(task, budget)
                _run_held(task, budget)
            return
        first = next(supply, None)
        if first is None:
            return
        _hold(first, budget)
        try:
            second = next(supply, None)
        except BaseException:
            _drop_held(first, budget)
            raise
        if second is None:
            _run_held(first, budget)
        else:
            _Pool(concurrency, budget, name).run(first, second, supply)
    finally:
        if isinstance(supply, Generator):
            supply.close()


def _hold(task: Task, budget: ByteBudget) -> None:
    """Acquire the cost of a task; one that can't have it is discarded."""
    try:
        budget.acquire(task.cost_bytes)
    except BaseException:
        if task.discard is not None:
            task.discard()
        raise


def _run_held(task: Task, budget: ByteBudget) -> None:
    try:
        task.run()
    finally:
        budget.release(task.cost_bytes)


def _drop_held(task: Task, budget: ByteBudget) -> None:
    try:
        if task.discard is not None:
            task.discard()
    finally:
        budget.release(task.cost_bytes)


class _Pool:
    """The threads of one run. Every method but `_work` belongs to the calling thread."""

    def __init__(self, concurrency: int, budget: ByteBudget, name: str) -> None:
        self._concurrency = concurrency
        self._budget = budget
        self._name = name
        self._queue: SimpleQueue[Task | None] = SimpleQueue()
        self._finished: SimpleQueue[None] = SimpleQueue()
        self._unfinished = 0
        self._threads: list[threading.Thread] = []
        self._errors: list[BaseException] = []  # in order of time; the first one stops the run

    def run(self, first: Task, second: Task, supply: Iterator[Task]) -> None:
        """Run ``first``, whose cost is held already, then ``second`` and the supply."""
        fed = False
        while True:  # also an interrupt that falls into the wait for the threads must not end it
            try:
                if not fed:
                    fed = True
                    self._feed(first, second, supply)
                self._end_threads()
                break
            except BaseException as error:  # noqa: BLE001 - raised below, after the running tasks have ended
                self._errors.append(error)
        if self._errors:
            raise _with_notes(self._errors)

    def _feed(self, first: Task, second: Task, supply: Iterator[Task]) -> None:
        self._submit(first)
        task: Task | None = second
        while task is not None:
            _hold(task, self._budget)
            self._submit(task)  # once the run has failed a worker discards it
            task = None if self._errors else next(supply, None)

    def _submit(self, task: Task) -> None:
        self._unfinished += 1
        self._queue.put(task)
        if len(self._threads) < self._concurrency:
            self._count_finished()
            if self._unfinished > len(self._threads):
                self._start_thread()
        while self._unfinished >= self._concurrency + _AHEAD:
            self._finished.get()
            self._unfinished -= 1

    def _count_finished(self) -> None:
        while not self._finished.empty():
            self._finished.get()
            self._unfinished -= 1

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._work, name=f"{self._name}-{len(self._threads)}", daemon=True)
        self._threads.append(thread)  # before it starts: an interrupt in start() must not hide it
        try:
            thread.start()
        except RuntimeError:  # no more threads to be had: go on with those that run
            self._threads.pop()
            if not self._threads:
                raise
            self._concurrency = len(self._threads)

    def _work(self) -> None:
        while True:
            task = self._queue.get()
            if task is None:
                return
            try:
                if self._errors:
                    _drop_held(task, self._budget)
                else:
                    _run_held(task, self._budget)
            except BaseException as error:  # noqa: BLE001 - handed to the calling thread, which raises it
                self._errors.append(error)
            finally:
                del task
                self._finished.put(None)

    def _end_threads(self) -> None:
        """Wait for what runs and end the threads. When it raises it may be called again."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            _await_end(thread)
        while not self._queue.empty():  # tasks are left only when no thread could be started at all
            task = self._queue.get()
            if task is not None:
                _drop_held(task, self._budget)


def _await_end(thread: threading.Thread) -> None:
    """Join a thread, also one that never came to be, because an interrupt fell into its start."""
    pause = threading.Event()
    for _ in range(_START_TRIES):
        with contextlib.suppress(RuntimeError):  # it has not started
            thread.join()
            return
        pause.wait(0.001)


def _with_notes(errors: list[BaseException]) -> BaseException:
    """The first error, each other one a line of its ``__notes__`` (tracebacks show them from 3.11 on)."""
    first = errors[0]
    others = [error for error in errors[1:] if error is not first]
    if others:
        notes = [*getattr(first, "__notes__", ())]
        notes += [f"also failed: {type(error).__name__}: {error}" for error in others]
        with contextlib.suppress(AttributeError):
            first.__notes__ = notes  # type: ignore[attr-defined] # set directly: add_note is new in 3.11
    return first
