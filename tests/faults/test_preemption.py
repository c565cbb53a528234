"""Real signals, in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dcpfs.checkpointer.preemption import SaveFlag, install_signal_handler
from dcpfs.errors import ConfigError

PREAMBLE = """
import os, signal, sys, time
from dcpfs.checkpointer.preemption import SaveFlag, install_signal_handler, shield_worker

def say(*words):
    print(*words, flush=True)

def wait():
    sys.stdin.readline()

flag = SaveFlag()
"""


@contextmanager
def running(code: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process in a session of its own that says on stdout where it is, and goes on at each line on stdin."""
    process = subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + textwrap.dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def hear(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    assert line or process.poll() is None, process.stderr and process.stderr.read()
    return line


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_the_first_signal_asks_for_a_save_and_the_second_ends_the_process(number: signal.Signals) -> None:
    code = """
    install_signal_handler(flag)
    say("ready")
    wait()
    say(flag.requested, flag.reason)
    wait()
    """
    with running(code) as process:
        assert hear(process) == "ready"
        process.send_signal(number)
        go_on(process)
        assert hear(process) == f"True {number.name}"
        process.send_signal(number)
        assert process.wait(30) == -number


def test_a_handler_that_was_there_is_called_both_times_and_stays_afterwards() -> None:
    code = """
    signal.signal(signal.SIGUSR1, lambda number, frame: say("theirs"))
    handlers = install_signal_handler(flag, signal.SIGUSR1)
    for _ in range(2):
        flag.clear()
        signal.raise_signal(signal.SIGUSR1)
        say(flag.requested)
    handlers.uninstall()
    signal.raise_signal(signal.SIGUSR1)
    """
    with running(code) as process:
        heard = [hear(process) for _ in range(5)]
        assert heard == ["theirs", "True", "theirs", "False", "theirs"]
        assert process.wait(30) == 0


def test_ctrl_c_asks_the_first_time_and_interrupts_the_second_time() -> None:
    code = """
    install_signal_handler(flag, signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
    say(flag.reason)
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        say("interrupted")
    """
    with running(code) as process:
        assert [hear(process), hear(process)] == ["SIGINT", "interrupted"]


def test_a_forked_child_ends_at_the_first_signal() -> None:
    code = """
    install_signal_handler(flag)
    started, starts = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(starts, b".")
        signal.pause()
        os._exit(0)
    os.read(started, 1)  # a signal before Python is done with forking would be lost, whatever the handler
    os.kill(child, signal.SIGTERM)
    say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flag.requested)
    """
    with running(code) as process:
        assert hear(process) == f"{-signal.SIGTERM} False"


def test_two_checkpointers_are_both_asked_and_leave_in_any_order() -> None:
    code = """
    other = SaveFlag()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    first, second = install_signal_handler(flag), install_signal_handler(other)
    signal.raise_signal(signal.SIGUSR1)
    say(flag.requested, other.requested)
    first, second = install_signal_handler(SaveFlag()), install_signal_handler(other)
    first.uninstall()
    second.uninstall()
    signal.raise_signal(signal.SIGUSR1)
    say(signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN)
    """
    with running(code) as process:
        assert [hear(process), hear(process)] == ["True True", "True"]


@pytest.mark.parametrize("shielded", [True, False], ids=["shielded", "plain"])
def test_case_42_a_signal_to_the_whole_group_leaves_time_for_the_save(shielded: bool) -> None:
    """Plain workers die, and the loop fails; but it fails in the trainer's own code, which can still save."""
    code = f"""
    import torch
    from torch.utils.data import DataLoader

    def main():
        shield = shield_worker if {shielded} else None
        loader = DataLoader(range(1000), num_workers=2, worker_init_fn=shield)
        steps = 0
        with install_signal_handler(flag):
            try:
                for batch in loader:
                    steps += 1
                    if steps == 3:
                        say("training")
                        wait()
                    if flag.requested and steps > 100:  # more than the workers had prepared
                        break
                say("went on")
            except (RuntimeError, EOFError, OSError):
                say("lost its workers")
            say("saves because of", flag.reason)

    main()
    """
    with running(code) as process:
        assert hear(process) == "training"
        os.killpg(process.pid, signal.SIGTERM)
        go_on(process)
        assert hear(process) == ("went on" if shielded else "lost its workers")
        assert hear(process) == "saves because of SIGTERM"
        assert process.wait(60) == 0


def test_a_request_stands_until_it_is_cleared() -> None:
    flag = SaveFlag()
    states = [flag.requested]
    thread = threading.Thread(target=flag.request)
    thread.start()
    thread.join()
    states.append(flag.requested)
    assert flag.reason == "the program"
    flag.clear()
    assert [*states, flag.requested] == [False, True, False]


def test_handlers_are_refused_outside_the_main_thread_and_for_signals_that_can_not_be_handled() -> None:
    before = signal.getsignal(signal.SIGUSR2)
    for number in (signal.SIGKILL, 4711):
        with pytest.raises(ConfigError, match="can't handle"):
            install_signal_handler(SaveFlag(), [signal.SIGUSR2, number])
    refused: list[str] = []

    def install() -> None:
        try:
            install_signal_handler(SaveFlag())
        except ConfigError as error:
            refused.append(str(error))

    thread = threading.Thread(target=install)
    thread.start()
    thread.join()
    assert "main thread" in refused[0]
    assert signal.getsignal(signal.SIGUSR2) == before
