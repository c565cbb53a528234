"""What a call costs includes what its processes cost, and nothing of what was there before."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from benchmarks.measuring import Meter

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


def test_cpu_of_a_child_that_lives_on_is_counted_and_only_that_of_the_call() -> None:
    with _child(_WORK) as work:
        work()  # before the clock
        with Meter() as busy:
            work()
        with Meter() as idle:
            pass
    assert 0.25 <= busy.cost.cpu_seconds < 2
    assert idle.cost.cpu_seconds < 0.2


def test_memory_that_a_call_gave_back_is_in_its_peak_and_not_in_the_next_one() -> None:
    with Meter() as first:
        block = bytearray(64 << 20)
        block[::4096] = bytes(len(block) // 4096)
        del block
    with Meter() as second:
        pass
    if first.cost.peak_extra_bytes is not None and second.cost.peak_extra_bytes is not None:
        assert first.cost.peak_extra_bytes >= 60 << 20
        assert second.cost.peak_extra_bytes < 8 << 20


def test_cpu_of_a_child_that_came_and_went_is_counted() -> None:
    with Meter() as meter:
        subprocess.run([sys.executable, "-c", _WORK], input="once\n", stdout=subprocess.DEVNULL, text=True, check=True)
    assert 0.25 <= meter.cost.cpu_seconds < 5


_MEMORY = """
import sys
for line in sys.stdin:
    block = bytearray(64 << 20)
    block[::4096] = bytes(len(block) // 4096)
    del block
    print(flush=True)
"""


def test_memory_that_a_child_needed_is_in_the_peak_and_not_in_the_next_one() -> None:
    with _child(_MEMORY) as work:
        work()  # what it holds for good is there before the clock
        with Meter() as busy:
            work()
        with Meter() as idle:
            pass
    if busy.cost.peak_extra_bytes is not None and idle.cost.peak_extra_bytes is not None:
        assert busy.cost.peak_extra_bytes >= 60 << 20
        assert idle.cost.peak_extra_bytes < 8 << 20
