"""Bounded work: who gets bytes when, and that no failure, thread or byte is lost."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from dcpfs.dcp.transfer import ByteBudget, Task, run_tasks

DEADLINE_SECONDS = 60.0
MIB = 1 << 20
OURS = ("dcpfs-transfer-", "tiny-", "few-", "test-")
"""How the names of a run's threads and of the tests' own begin; others may come and go in the same process."""


def wait_until(condition: Callable[[], bool]) -> None:
    """Look again and again; what is waited for is a state, never a time."""
    pause = threading.Event()
    for _ in range(int(DEADLINE_SECONDS * 1000)):
        if condition():
            return
        pause.wait(0.001)
    raise AssertionError("it never came to be")


class Taker:
    """A thread that acquires bytes and says so."""

    def __init__(self, budget: ByteBudget, size_bytes: int, log: list[int] | None = None) -> None:
        self.error: BaseException | None = None
        self.done = threading.Event()
        line = budget.waiting
        self._thread = threading.Thread(target=self._take, args=(budget, size_bytes, log), name="test-taker")
        self._thread.start()
        wait_until(lambda: self.done.is_set() or budget.waiting > line)

    def _take(self, budget: ByteBudget, size_bytes: int, log: list[int] | None) -> None:
        try:
            budget.acquire(size_bytes)
            if log is not None:
                log.append(size_bytes)
        except BaseException as error:
            self.error = error
        self.done.set()

    def ended(self) -> bool:
        """True once it has its bytes or an error; waits for that."""
        self._thread.join(DEADLINE_SECONDS)
        return not self._thread.is_alive()


@pytest.fixture
def interrupts() -> Iterator[Callable[[], None]]:
    """Makes SIGINT raise KeyboardInterrupt in the main thread, whatever the test runner did; call it to send one."""
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("only the main thread can be interrupted, and the test runner uses another")
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    main = threading.main_thread().ident
    assert main is not None
    yield lambda: signal.pthread_kill(main, signal.SIGINT)
    signal.signal(signal.SIGINT, old)


@pytest.fixture(autouse=True)
def no_thread_survives() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    after = [thread for thread in threading.enumerate() if thread.name.startswith(OURS)]
    assert [thread for thread in after if thread not in before] == []


# -- the budget


def test_bytes_are_held_until_released() -> None:
    budget = ByteBudget(10)
    with budget.hold(4):
        budget.acquire(6)
        assert (budget.in_flight_bytes, budget.peak_bytes) == (10, 10)
        budget.release(6)
    assert (budget.in_flight_bytes, budget.peak_bytes, budget.waiting) == (0, 10, 0)
    with pytest.raises(ZeroDivisionError), budget.hold(4):
        raise ZeroDivisionError
    assert budget.in_flight_bytes == 0


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        ByteBudget(0)
    budget = ByteBudget(10)
    with pytest.raises(ValueError, match="-1 bytes"):
        budget.acquire(-1)
    budget.acquire(2)
    with pytest.raises(ValueError, match="released 3 bytes while 2"):
        budget.release(3)
    assert budget.in_flight_bytes == 2


def test_first_come_first_served() -> None:
    budget = ByteBudget(10)
    log: list[int] = []
    budget.acquire(10)
    takers = [Taker(budget, size, log) for size in (10, 9, 8, 7, 6)]
    assert budget.waiting == 5
    budget.release(10)
    for number, taker in enumerate(takers):
        assert taker.ended()
        assert log == [10, 9, 8, 7, 6][: number + 1]
        budget.release(log[number])
    assert (budget.in_flight_bytes, budget.peak_bytes) == (0, 10)


def test_a_small_request_does_not_overtake_a_large_one() -> None:
    budget = ByteBudget(10)
    budget.acquire(5)
    large, small = Taker(budget, 8), Taker(budget, 1)  # the small one alone would fit
    assert budget.waiting == 2
    budget.release(5)
    assert large.ended()
    assert small.ended()
    assert budget.in_flight_bytes == 9


def test_case_67_an_oversize_request_passes_alone() -> None:
    budget = ByteBudget(10)
    budget.acquire(1)
    large = Taker(budget, 1000)
    assert not large.done.is_set()
    budget.release(1)
    assert large.ended()
    assert budget.in_flight_bytes == 1000
    small = Taker(budget, 1)
    assert not small.done.is_set()
    budget.release(1000)
    assert small.ended()
    assert (budget.in_flight_bytes, budget.peak_bytes) == (1, 1000)


def test_a_request_for_nothing_never_waits() -> None:
    budget = ByteBudget(1)
    budget.acquire(1)
    waiter = Taker(budget, 1)
    budget.acquire(0)
    budget.release(0)
    with budget.hold(0):
        assert budget.waiting == 1
    budget.release(1)
    assert waiter.ended()


def test_closing_wakes_all_who_wait() -> None:
    budget = ByteBudget(10)
    budget.acquire(10)
    takers = [Taker(budget, size) for size in (1, 20, 3)]
    error = OSError("the first")
    budget.close(error)
    budget.close(OSError("another"))
    assert all(taker.ended() for taker in takers)
    assert [taker.error for taker in takers] == [error] * 3
    for size_bytes in (0, 1):
        with pytest.raises(OSError, match="the first"):
            budget.acquire(size_bytes)
    budget.release(10)
    assert (budget.in_flight_bytes, budget.waiting) == (0, 0)


def test_an_interrupted_wait_gives_its_place_back(interrupts: Callable[[], None]) -> None:
    budget = ByteBudget(10)
    budget.acquire(6)
    second: list[Taker] = []

    def interrupt() -> None:
        wait_until(lambda: budget.waiting == 1)
        second.append(Taker(budget, 4))  # fits, but waits behind the large one
        interrupts()

    thread = threading.Thread(target=interrupt, name="test-interrupt")
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        budget.acquire(7)
    thread.join()
    assert second[0].ended()  # it moved up
    assert (budget.in_flight_bytes, budget.waiting) == (10, 0)


def test_an_interrupt_gives_back_what_was_just_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = ByteBudget(10)
    budget.acquire(10)

    class Interrupted:
        """A lock on which the wait ends with the bytes and with an interrupt at the same time."""

        def acquire(self) -> bool:
            if budget.waiting:  # not the constructor's own call
                budget.release(10)
                raise KeyboardInterrupt
            return True

        def release(self) -> None:
            pass

    monkeypatch.setattr("dcpfs.dcp.transfer._Waiter", lambda size: _waiter_with(Interrupted(), size))
    with pytest.raises(KeyboardInterrupt):
        budget.acquire(5)
    assert (budget.in_flight_bytes, budget.waiting) == (0, 0)


def _waiter_with(ready: object, size_bytes: int) -> object:
    class Waiter:
        granted = False

    waiter = Waiter()
    waiter.ready, waiter.size_bytes = ready, size_bytes  # type: ignore[attr-defined] # a stand-in of one test
    return waiter


def test_threads_that_come_and_go_never_exceed_the_budget() -> None:
    budget = ByteBudget(100)
    over: list[int] = []

    def work(seed: int) -> None:
        sizes = random.Random(seed)
        for _ in range(300):
            size_bytes = sizes.choice([0, 1, 10, 60, 100, 150])
            with budget.hold(size_bytes):
                held = budget.in_flight_bytes
                if held > 100 and held != 150:
                    over.append(held)

    threads = [threading.Thread(target=work, args=(seed,), name=f"test-{seed}") for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_SECONDS)
    assert over == []
    assert (budget.in_flight_bytes, budget.peak_bytes, budget.waiting) == (0, 150, 0)


# -- the run


@pytest.mark.parametrize("concurrency", [1, 2, 7, 64])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 500])
def test_every_task_runs_once(concurrency: int, count: int) -> None:
    budget = ByteBudget(100)
    ran: list[int] = []
    run_tasks(
        (Task(number % 50, lambda number=number: ran.append(number)) for number in range(count)),  # type: ignore[misc] # bound early
        concurrency=concurrency,
        budget=budget,
    )
    assert sorted(ran) == list(range(count))
    assert budget.in_flight_bytes == 0
    assert budget.peak_bytes <= 100


def test_twenty_thousand_tasks_run_in_few_threads() -> None:
    names: set[str] = set()

    def run() -> None:
        names.add(threading.current_thread().name)

    run_tasks([Task(1, run)] * 20_000, concurrency=4, budget=ByteBudget(64), name="tiny")
    assert names <= {f"tiny-{number}" for number in range(4)}


def test_wrong_concurrency_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1, not 0"):
        run_tasks([], concurrency=0, budget=ByteBudget(1))


@pytest.mark.parametrize(("concurrency", "count"), [(8, 1), (1, 5)])
def test_what_needs_no_threads_has_none(concurrency: int, count: int) -> None:
    ran_in: list[threading.Thread] = []
    task = Task(1, lambda: ran_in.append(threading.current_thread()))
    run_tasks([task] * count, concurrency=concurrency, budget=ByteBudget(1))
    assert ran_in == [threading.current_thread()] * count


@pytest.mark.parametrize("concurrency", [2, 5])
def test_as_many_run_at_once_as_asked_for_and_no_more(concurrency: int) -> None:
    together = threading.Barrier(concurrency)
    lock = threading.Lock()
    running = 0
    most = 0

    def run() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        together.wait(DEADLINE_SECONDS)  # breaks unless all of them run at once
        with lock:
            running -= 1

    run_tasks([Task(0, run)] * (concurrency * 10), concurrency=concurrency, budget=ByteBudget(1))
    assert most == concurrency


def test_cases_63_66_memory_in_flight_stays_within_the_budget() -> None:
    """64 pieces of 1 MiB with room for 3: a buffer lives from before its task starts until it ends."""
    budget = ByteBudget(3 * MIB + 5)
    lock = threading.Lock()
    held = 0
    most = 0

    def run() -> None:
        nonlocal held, most
        buffer = bytearray(MIB)
        with lock:
            held += len(buffer)
            most = max(most, held)
            assert held <= budget.in_flight_bytes
        with lock:
            held -= len(buffer)

    run_tasks((Task(MIB, run) for _ in range(64)), concurrency=16, budget=budget)
    assert most <= budget.peak_bytes == 3 * MIB


def test_case_62_runs_one_after_the_other_hold_no_more_than_one() -> None:
    budget = ByteBudget(MIB)
    for _ in range(20):
        run_tasks([Task(MIB // 2, lambda: None)] * 10, concurrency=4, budget=budget)
        assert (budget.in_flight_bytes, budget.peak_bytes) == (0, MIB)


def test_case_67_no_task_beside_an_oversize_one() -> None:
    budget = ByteBudget(10)
    beside: list[int] = []
    tasks = [
        Task(cost, lambda cost=cost: beside.append(budget.in_flight_bytes) if cost > 10 else None)  # type: ignore[misc] # bound early
        for cost in (1, 5, 1000, 1, 2000, 10) * 5
    ]
    run_tasks(tasks, concurrency=8, budget=budget)
    assert sorted(beside) == [1000] * 5 + [2000] * 5


def test_tasks_are_pulled_in_the_calling_thread_and_no_faster_than_the_budget_lets() -> None:
    budget = ByteBudget(4)
    release = threading.Event()
    pulled: list[threading.Thread] = []

    def tasks() -> Iterator[Task]:
        for number in range(100):
            pulled.append(threading.current_thread())
            if number == 5:  # 4 hold the whole budget: number 4 was pulled and could not start
                raise AssertionError("pulled too early")
            if number == 4:
                waker.start()
            yield Task(1, lambda: _wait(release))

    def wake() -> None:
        wait_until(lambda: budget.waiting == 1)
        assert len(pulled) == 5
        release.set()

    waker = threading.Thread(target=wake, name="test-waker")
    with pytest.raises(AssertionError, match="too early"):  # after the release: what runs is waited for
        run_tasks(tasks(), concurrency=8, budget=budget)
    waker.join()
    assert pulled == [threading.current_thread()] * 6


def test_tasks_without_cost_are_pulled_lazily_too() -> None:
    started = 0
    ahead: list[int] = []

    def run() -> None:
        nonlocal started
        started += 1

    def tasks() -> Iterator[Task]:
        for number in range(5000):
            ahead.append(number - started)
            yield Task(0, run)

    run_tasks(tasks(), concurrency=1, budget=ByteBudget(1))
    assert max(ahead) == 0
    started = 0
    ahead.clear()
    lock = threading.Lock()
    finished = 0

    def count() -> None:
        nonlocal finished
        with lock:
            finished += 1

    def counted() -> Iterator[Task]:
        for number in range(5000):
            ahead.append(number - finished)
            yield Task(0, count)

    run_tasks(counted(), concurrency=4, budget=ByteBudget(1))
    assert max(ahead) <= 4 + 64


def _wait(event: threading.Event) -> None:
    assert event.wait(DEADLINE_SECONDS)


# -- failures


@pytest.mark.parametrize("concurrency", [1, 2, 8])
@pytest.mark.parametrize("failing", [0, 1, 7, 15])
def test_case_1_a_failure_in_any_thread_is_raised(concurrency: int, failing: int) -> None:
    budget = ByteBudget(4)

    def run(number: int) -> None:
        if number == failing:
            raise OSError(f"disk {number} is gone")

    with pytest.raises(OSError, match=f"disk {failing} is gone") as caught:
        run_tasks(
            (Task(1, lambda number=number: run(number)) for number in range(16)),  # type: ignore[misc] # bound early
            concurrency=concurrency,
            budget=budget,
        )
    assert not getattr(caught.value, "__notes__", [])
    assert budget.in_flight_bytes == 0


def test_case_1_the_first_error_is_raised_and_the_others_are_noted() -> None:
    together = threading.Barrier(3)
    first_has_failed = threading.Event()

    def run(number: int) -> None:
        together.wait(DEADLINE_SECONDS)
        if number == 1:
            first_has_failed.set()
            raise OSError("the first")
        _wait(first_has_failed)
        wait_until(lambda: budget.in_flight_bytes < 3)  # the first one has ended
        raise ValueError(f"number {number}")

    budget = ByteBudget(3)
    tasks = [Task(1, lambda number=number: run(number)) for number in range(3)]  # type: ignore[misc] # bound early
    with pytest.raises((OSError, ValueError)) as caught:
        run_tasks(tasks, concurrency=3, budget=budget)
    notes: list[str] = getattr(caught.value, "__notes__", [])
    texts = sorted([f"also failed: {type(caught.value).__name__}: {caught.value}", *notes])
    assert texts == [
        "also failed: OSError: the first",
        "also failed: ValueError: number 0",
        "also failed: ValueError: number 2",
    ]
    assert budget.in_flight_bytes == 0


def test_nothing_starts_after_a_failure_and_what_runs_is_waited_for() -> None:
    failed = threading.Event()
    together = threading.Barrier(2)
    events: list[str] = []
    pulled = 0

    def slow() -> None:
        together.wait(DEADLINE_SECONDS)
        _wait(failed)
        events.append("slow is done")

    def fail() -> None:
        together.wait(DEADLINE_SECONDS)
        failed.set()
        raise OSError("no")

    def tasks() -> Iterator[Task]:
        nonlocal pulled
        yield Task(1, slow)
        yield Task(1, fail)
        while True:  # endless: only the failure ends it
            pulled += 1
            yield Task(0, lambda: events.append("late"), lambda: events.append("discarded"))

    with pytest.raises(OSError, match="no"):
        run_tasks(tasks(), concurrency=2, budget=ByteBudget(2))
    assert events.count("slow is done") == 1
    assert events.count("late") + events.count("discarded") == pulled


@pytest.mark.parametrize("concurrency", [2, 4])
def test_tasks_that_never_run_are_discarded(concurrency: int) -> None:
    """A supply that hands out a few buffers, which only come back when a task runs or is discarded."""
    buffers = threading.Semaphore(3)
    lock = threading.Lock()
    out = 0

    def give_back() -> None:
        nonlocal out
        with lock:
            out -= 1
        buffers.release()

    def run(number: int) -> None:
        give_back()
        if number == 10:
            raise OSError("the device is gone")

    def tasks() -> Iterator[Task]:
        nonlocal out
        for number in range(10_000):
            assert buffers.acquire(timeout=DEADLINE_SECONDS)
            with lock:
                out += 1
            yield Task(1, lambda number=number: run(number), give_back)  # type: ignore[misc] # bound early

    budget = ByteBudget(100)
    with pytest.raises(OSError, match="the device is gone"):
        run_tasks(tasks(), concurrency=concurrency, budget=budget)
    assert (out, budget.in_flight_bytes) == (0, 0)


@pytest.mark.parametrize("held", [0, 1])
def test_a_task_whose_cost_is_refused_is_discarded(held: int) -> None:
    budget = ByteBudget(10)
    discarded: list[int] = []
    closed = OSError("closed")

    def close_once_the_next_one_waits() -> None:
        wait_until(lambda: budget.waiting == 1)
        budget.close(closed)

    def tasks() -> Iterator[Task]:
        if held:
            yield Task(10, close_once_the_next_one_waits, lambda: discarded.append(0))
        else:
            budget.close(closed)
        yield Task(1, lambda: None, lambda: discarded.append(100))
        yield Task(1, lambda: None, lambda: discarded.append(200))

    with pytest.raises(OSError, match="closed"):
        run_tasks(tasks(), concurrency=4, budget=budget)
    assert discarded == [100]  # the second one was never pulled, unless it was looked at first
    assert budget.in_flight_bytes == 0


def test_an_error_of_discard_is_noted() -> None:
    budget = ByteBudget(4)
    failing = threading.Event()

    def run() -> None:
        wait_until(lambda: budget.in_flight_bytes == 4)
        failing.set()
        raise OSError("no")

    def discard() -> None:
        raise ValueError("no discard")

    def tasks() -> Iterator[Task]:
        yield Task(1, run, discard)
        yield Task(1, lambda: _wait(failing), discard)
        yield Task(1, lambda: _wait(failing), discard)
        yield Task(1, lambda: _wait(failing), discard)

    with pytest.raises(OSError, match="no") as caught:
        run_tasks(tasks(), concurrency=2, budget=budget)
    assert set(getattr(caught.value, "__notes__", [])) <= {"also failed: ValueError: no discard"}
    assert budget.in_flight_bytes == 0


@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize("after", [0, 1, 2, 10])
def test_an_error_of_the_supply_is_raised(concurrency: int, after: int) -> None:
    finished: list[int] = []
    closed: list[bool] = []
    budget = ByteBudget(2)

    def tasks() -> Iterator[Task]:
        try:
            for number in range(after):
                yield Task(1, lambda number=number: finished.append(number), lambda: finished.append(-1))  # type: ignore[misc] # bound early
            raise LookupError("the planner does not know it")
        finally:
            closed.append(True)

    with pytest.raises(LookupError, match="planner"):
        run_tasks(tasks(), concurrency=concurrency, budget=budget)
    assert closed == [True]
    assert len(finished) == after
    assert budget.in_flight_bytes == 0


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_generator_is_closed_in_the_calling_thread_when_the_run_ends_early(concurrency: int) -> None:
    closed_in: list[threading.Thread] = []

    def fail() -> None:
        raise OSError("no")

    def tasks() -> Iterator[Task]:
        try:
            while True:
                yield Task(0, fail)
        finally:
            closed_in.append(threading.current_thread())

    with pytest.raises(OSError, match="no"):
        run_tasks(tasks(), concurrency=concurrency, budget=ByteBudget(1))
    assert closed_in == [threading.current_thread()]


@pytest.mark.parametrize("place", ["budget", "supply", *["end"] * 20])  # the end has many places
def test_an_interrupt_stops_the_run_and_leaves_nothing(interrupts: Callable[[], None], place: str) -> None:
    budget = ByteBudget(2)
    interrupted = threading.Event()
    begun = threading.Barrier(3)
    ended: list[str] = []

    def run() -> None:
        if place == "supply":
            begun.wait(DEADLINE_SECONDS)
        if place == "budget":
            wait_until(lambda: budget.waiting == 1)
        if place != "supply":
            with contextlib.suppress(threading.BrokenBarrierError):
                if together.wait(DEADLINE_SECONDS) == 0:
                    interrupts()
                    interrupted.set()
        _wait(interrupted)
        ended.append("run")

    def tasks() -> Iterator[Task]:
        yield Task(1, run)
        yield Task(1, run)
        if place == "supply":
            begun.wait(DEADLINE_SECONDS)
            interrupted.set()
            interrupts()
            _wait(threading.Event())  # the interrupt ends this
        if place == "budget":
            yield Task(1, lambda: ended.append("late"), lambda: ended.append("discarded"))

    together = threading.Barrier(2)
    with pytest.raises(KeyboardInterrupt):
        run_tasks(tasks(), concurrency=4, budget=budget)
    assert sorted(ended) == ["discarded"] * (place == "budget") + ["run", "run"]
    assert budget.in_flight_bytes == 0


def test_a_run_goes_on_with_the_threads_that_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start
    allowed = 2

    def limited(thread: threading.Thread) -> None:
        nonlocal allowed
        if not thread.name.startswith(OURS):
            start(thread)
            return
        if allowed == 0:
            raise RuntimeError("can't start new thread")
        allowed -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    ran: list[str] = []
    tasks = [Task(1, lambda: ran.append(threading.current_thread().name))] * 300
    run_tasks(tasks, concurrency=8, budget=ByteBudget(500), name="few")
    assert len(ran) == 300
    assert set(ran) <= {"few-0", "few-1"}


def test_a_run_without_any_thread_fails_and_discards(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith(OURS):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    budget = ByteBudget(10)
    discarded: list[int] = []
    with pytest.raises(RuntimeError, match="new thread"):
        run_tasks([Task(1, lambda: None, lambda: discarded.append(1))] * 3, concurrency=8, budget=budget)
    assert (discarded, budget.in_flight_bytes) == ([1], 0)


def test_runs_may_share_a_budget() -> None:
    budget = ByteBudget(10)
    done: list[int] = []

    def run(_: int) -> None:
        run_tasks([Task(7, lambda: done.append(1))] * 50, concurrency=3, budget=budget)

    threads = [threading.Thread(target=run, args=(number,), name=f"test-{number}") for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_SECONDS)
    assert (len(done), budget.in_flight_bytes, budget.peak_bytes) == (200, 0, 7)


_FORK = """
import os, sys
from dcpfs.dcp.transfer import ByteBudget, Task, run_tasks

ran = []
def run():
    run_tasks([Task(1, lambda: ran.append(1))] * 10, concurrency=3, budget=ByteBudget(2))

run()
child = os.fork()
if child == 0:
    status = 1
    try:
        run()
        status = 0 if len(ran) == 20 else 2
    finally:
        os._exit(status)
sys.exit(0 if os.waitpid(child, 0)[1] == 0 else 1)
"""


def test_a_forked_child_can_run_tasks() -> None:
    """No lock and no thread of the module outlives a run, so a fork inherits nothing that could block."""
    if not hasattr(os, "fork"):
        pytest.skip("no fork on this system")
    # In a process of its own: no other thread can hold a lock at the fork.
    assert subprocess.run([sys.executable, "-c", _FORK], timeout=DEADLINE_SECONDS * 10, check=False).returncode == 0
