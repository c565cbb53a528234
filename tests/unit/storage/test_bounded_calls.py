"""Calls with a limit: results, errors, and what becomes of those that stay away."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from dcpfs.storage import bounded_calls
from dcpfs.storage.bounded_calls import CallThreads, CallTimeoutError, in_bounded_call

DEADLINE_SECONDS = 30.0


def wait_for(condition: object) -> None:
    assert callable(condition)
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.005)


def test_results_and_errors_come_back() -> None:
    threads = CallThreads()
    assert threads.run(lambda: 7, limit_seconds=DEADLINE_SECONDS, what="count") == 7
    with pytest.raises(ZeroDivisionError) as caught:
        threads.run(lambda: 1 // 0, limit_seconds=DEADLINE_SECONDS, what="divide")
    assert caught.traceback[-1].name == "<lambda>"
    assert threads.left_behind == 0


def test_a_thread_serves_one_call_after_another() -> None:
    threads = CallThreads()
    names = {threads.run(lambda: threading.current_thread().name, limit_seconds=30, what="name") for _ in range(50)}
    idents = {threads.run(threading.get_ident, limit_seconds=30, what="ask") for _ in range(50)}
    assert names == {"dcpfs-call"}
    assert len(idents) == 1
    assert threading.get_ident() not in idents


def test_calls_at_once_do_not_wait_for_each_other() -> None:
    threads, together = CallThreads(), threading.Barrier(8)
    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(lambda _: threads.run(together.wait, limit_seconds=30, what="meet"), range(8)))
    assert sorted(done) == list(range(8))


def test_a_call_within_a_call_stays_in_its_thread() -> None:
    threads = CallThreads()

    def outer() -> bool:
        return threads.run(threading.get_ident, limit_seconds=30, what="inner") == threading.get_ident()

    assert not in_bounded_call()
    assert threads.run(outer, limit_seconds=30, what="outer")
    assert threads.run(in_bounded_call, limit_seconds=30, what="ask")


def test_a_call_that_stays_away_is_left_behind_and_said(caplog: pytest.LogCaptureFixture) -> None:
    threads, comes = CallThreads(), threading.Event()
    with caplog.at_level(logging.WARNING), pytest.raises(CallTimeoutError, match=r"no answer within 0\.0 s"):
        threads.run(comes.wait, limit_seconds=0.01, what="read there")
    assert "The call to read there did not come back within 0.0 s" in caplog.text
    assert threads.left_behind == 1
    # Others are not held up.
    assert threads.run(lambda: 1, limit_seconds=30, what="count") == 1
    comes.set()
    wait_for(lambda: threads.left_behind == 0)


def test_an_error_that_comes_too_late_is_nobodys() -> None:
    threads, comes = CallThreads(), threading.Event()

    def fails() -> None:
        comes.wait()
        raise OSError("late")

    with pytest.raises(CallTimeoutError):
        threads.run(fails, limit_seconds=0.01, what="fail")
    comes.set()
    wait_for(lambda: threads.left_behind == 0)
    assert threads.run(lambda: 1, limit_seconds=30, what="count") == 1


def test_idle_threads_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_calls, "_IDLE_SECONDS", 0.01)
    threads = CallThreads()
    ident = threads.run(threading.get_ident, limit_seconds=30, what="ask")
    wait_for(lambda: ident not in {thread.ident for thread in threading.enumerate()})
    assert threads.run(lambda: 1, limit_seconds=30, what="count") == 1


def test_no_call_is_lost_between_idling_and_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_calls, "_IDLE_SECONDS", 0.0001)
    threads = CallThreads()
    for number in range(300):
        assert threads.run(lambda number=number: number, limit_seconds=30, what="count") == number  # type: ignore[misc] # bound now
        threading.Event().wait(0.0001 * (number % 3))
