"""What a call costs includes what its processes cost, and nothing of what was there before."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context

from benchmarks.measuring import Cost, Meter

_WORK = """
import sys, time
for line in sys.stdin:
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    print(flush=True)
"""


@contextmanager
def _child(code: str) -> Iterator[Callable[[], None]]:
    """A process that does its work once for each call, and ends with the block."""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        stdin, stdout = child.stdin, child.stdout

        def work() -> None:
            print(file=stdin, flush=True)
            stdout.readline()

        yield work
        stdin.close()


def _alone(measure: Callable[[], list[Cost]]) -> list[Cost]:
    """What is measured in a fresh process, which has no threads and children but those of the measurement."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measure).result()


def _work_of_a_child_that_lives_on() -> list[Cost]:
    with _child(_WORK) as work:
        work()  # before the clock
        with Meter() as busy:
            work()
        with Meter() as idle:
            pass
    return [busy.cost, idle.cost]


def test_cpu_of_a_child_that_lives_on_is_counted_and_only_that_of_the_call() -> None:
    busy, idle = _alone(_work_of_a_child_that_lives_on)
    assert busy.cpu_seconds >= 0.25
    assert idle.cpu_seconds < busy.cpu_seconds / 2


def _memory_that_is_given_back() -> list[Cost]:
    with Meter() as first:
        block = bytearray(64 << 20)
        block[::4096] = bytes(len(block) // 4096)
        del block
    with Meter() as second:
        pass
    return [first.cost, second.cost]


def test_memory_that_a_call_gave_back_is_in_its_peak_and_not_in_the_next_one() -> None:
    first, second = _alone(_memory_that_is_given_back)
    if first.peak_extra_bytes is not None and second.peak_extra_bytes is not None:
        assert first.peak_extra_bytes >= 40 << 20
        assert second.peak_extra_bytes < 8 << 20


def _work_of_a_child_that_comes_and_goes() -> list[Cost]:
    with Meter() as meter:
        subprocess.run([sys.executable, "-c", _WORK], input="once\n", stdout=subprocess.DEVNULL, text=True, check=True)
    return [meter.cost]


def test_cpu_of_a_child_that_came_and_went_is_counted() -> None:
    (cost,) = _alone(_work_of_a_child_that_comes_and_goes)
    assert cost.cpu_seconds >= 0.25


_MEMORY = """
import sys
for line in sys.stdin:
    block = bytearray(64 << 20)
    block[::4096] = bytes(len(block) // 4096)
    del block
    print(flush=True)
"""


def _memory_of_a_child() -> list[Cost]:
    with _child(_MEMORY) as work:
        work()  # what it holds for good is there before the clock
        with Meter() as busy:
            work()
        with Meter() as idle:
            pass
    return [busy.cost, idle.cost]


def test_memory_that_a_child_needed_is_in_the_peak_and_not_in_the_next_one() -> None:
    busy, idle = _alone(_memory_of_a_child)
    if busy.peak_extra_bytes is not None and idle.peak_extra_bytes is not None:
        assert busy.peak_extra_bytes >= 40 << 20
        assert idle.peak_extra_bytes < 8 << 20
