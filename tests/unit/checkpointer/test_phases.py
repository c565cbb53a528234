"""Seconds, bytes, and what is said when a phase does not end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest

from dcpfs.checkpointer.phases import Phases, format_bytes


@pytest.fixture
def watchdogs() -> Callable[[], list[str]]:
    """Names of those that a test has started so far and that still run."""
    before = set(threading.enumerate())
    return lambda: [
        thread.name
        for thread in threading.enumerate()
        if thread not in before and thread.name.startswith("dcpfs-watchdog")
    ]


def test_case_60_a_phase_past_its_deadline_is_reported_once_with_all_stacks_and_goes_on(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], watchdogs: Callable[[], list[str]]
) -> None:
    reported, released = threading.Event(), threading.Event()

    class Seen(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "has not ended" in record.getMessage():
                reported.set()

    handler = Seen()
    logging.getLogger("dcpfs.checkpointer.phases").addHandler(handler)

    def wait_for_a_peer_that_does_not_come() -> None:
        released.wait(60)

    stuck = threading.Thread(target=wait_for_a_peer_that_does_not_come, name="stuck-upload")
    stuck.start()
    phases = Phases(rank=3, deadline_seconds=0.05, label="save of iter_000000005")
    try:
        with phases.phase("write") as phase:
            phase.add_bytes(1_500_000)
            assert reported.wait(60)
    finally:
        logging.getLogger("dcpfs.checkpointer.phases").removeHandler(handler)
        released.set()
        stuck.join()
    assert phases.overdue == ("write",)
    assert not watchdogs()
    own = [record for record in caplog.records if record.name == "dcpfs.checkpointer.phases"]
    errors = [record.getMessage() for record in own if record.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "rank 3: write (save of iter_000000005) has not ended after" in errors[0]
    assert "1.5 MB moved" in errors[0]
    assert "stuck-upload" in errors[0]
    assert "wait_for_a_peer_that_does_not_come" in errors[0]
    assert "test_case_60" in errors[0]
    assert "came to its end after" in caplog.text
    printed = capfd.readouterr().err  # a job may have no handler for its log
    assert "rank 3: write (save of iter_000000005) has not ended" in printed
    assert "in wait_for_a_peer_that_does_not_come" in printed


def test_phases_are_measured_told_and_summed_up(watchdogs: Callable[[], list[str]]) -> None:
    told: list[tuple[str, int]] = []
    phases = Phases(deadline_seconds=60, on_phase=lambda name, seconds, size: told.append((name, size)))
    for size in (1_000_000, 2_400_000_000):
        with phases.phase("write") as phase:
            phase.bytes += size
            assert watchdogs() == ["dcpfs-watchdog-write"]
            with phases.phase("wait"):
                assert watchdogs() == ["dcpfs-watchdog-write", "dcpfs-watchdog-wait"]
    assert told == [("wait", 0), ("write", 1_000_000), ("wait", 0), ("write", 2_400_000_000)]
    assert not watchdogs()
    parts = phases.summary().split(", ")
    assert [part.split(" ")[0] for part in parts] == ["wait", "write"]
    assert parts[1].endswith(" s 2.4 GB")
    assert [record.failed for record in phases.records] == [False] * 4
    assert phases.overdue == ()


def test_a_phase_that_fails_is_measured_and_its_error_goes_on() -> None:
    phases = Phases()
    with pytest.raises(KeyboardInterrupt), phases.phase("write"):
        raise KeyboardInterrupt
    assert [(record.name, record.failed) for record in phases.records] == [("write", True)]


def test_bytes_are_counted_from_several_threads() -> None:
    phases = Phases()
    with phases.phase("write") as phase:

        def add() -> None:
            for _ in range(2000):
                phase.add_bytes(1)

        threads = [threading.Thread(target=add) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert phases.records[0].size_bytes == 8000


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 KB"), (3_400_000_000, "3.4 GB"), (10**19, "10000.0 PB")],
)
def test_sizes_are_written_for_people(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


def test_an_interrupt_while_a_watchdog_starts_leaves_none_behind(
    monkeypatch: pytest.MonkeyPatch, watchdogs: Callable[[], list[str]]
) -> None:
    start, own = threading.Timer.start, threading.current_thread()

    def start_and_be_interrupted(timer: threading.Timer) -> None:
        start(timer)
        if threading.current_thread() is own:
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Timer, "start", start_and_be_interrupted)
    phases = Phases(deadline_seconds=60)
    with pytest.raises(KeyboardInterrupt), phases.phase("plan"):
        pass
    assert not watchdogs()
    assert [record.failed for record in phases.records] == [True]
