"""Real signals, in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

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


def running(code: str) -> AbstractContextManager[subprocess.Popen[str]]:
    """A Python process in a session of its own that says on stdout where it is, and goes on at each line on stdin."""
    return _running("-c", PREAMBLE + textwrap.dedent(code))


def running_file(program: Path, *arguments: str) -> AbstractContextManager[subprocess.Popen[str]]:
    """`running` for a program with arguments, which processes of its own can import."""
    return _running(str(program), *arguments)


@contextmanager
def _running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, *arguments],
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


LOADER = """
import torch
from torch.utils.data import DataLoader
from dcpfs import AsyncMode, CheckpointConfig, DistributedCheckpointer

# How often a loader without a batch looks for dead workers: each 5 s otherwise.
torch.utils.data.dataloader._MultiProcessingDataLoaderIter._try_get_data.__defaults__ = (0.2,)

def loader_of(workers, **options):
    return DataLoader(range(1000), num_workers=workers, **options)

def kill(worker):
    os.kill(worker.pid, signal.SIGKILL)
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)  # by now SIGCHLD was sent
"""


@pytest.mark.parametrize(
    ("shielded", "workers"), [(True, 2), (False, 2), (False, 4)], ids=["shielded", "plain", "four plain"]
)
def test_case_42_a_signal_to_the_whole_group_leaves_time_for_the_save(shielded: bool, workers: int) -> None:
    """Plain workers die, and the loop fails; but once, and where it asks for the batch, so that it can still save."""
    code = f"""
    import traceback

    def main():
        batches = iter(loader_of({workers}, worker_init_fn=shield_worker if {shielded} else None))
        steps, lost = 0, []
        with install_signal_handler(flag), DistributedCheckpointer(CheckpointConfig(save_dir="memory://run")) as to:
            while steps < 100:  # more than the workers had prepared
                if steps == 3:
                    say("training")
                    wait()
                try:
                    next(batches)
                except (RuntimeError, EOFError, OSError) as error:
                    lost = traceback.extract_tb(error.__traceback__)
                    break
                steps += 1
            sum(range(1_000_000))  # what comes between
            say("lost its workers" if lost else "went on", any("signal_handling" in frame.filename for frame in lost))
            to.save_state(steps, {{"model": {{"w": torch.ones(3)}}}})
            say("saved", to.latest() == steps, "because of", flag.reason)

    main()
    """
    with running(LOADER + textwrap.dedent(code)) as process:
        assert hear(process) == "training"
        os.killpg(process.pid, signal.SIGTERM)
        go_on(process)
        assert hear(process) == ("went on False" if shielded else "lost its workers False")
        assert hear(process) == "saved True because of SIGTERM"
        assert process.wait(60) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_workers_that_die_after_a_signal_raise_nothing_until_the_save_was_taken(number: signal.Signals) -> None:
    code = f"""
    def main():
        loader = loader_of(2)
        batches = iter(loader)
        next(batches)
        handler = signal.getsignal(signal.SIGCHLD)
        with install_signal_handler(flag):
            signal.raise_signal({int(number)})
            kill(batches._workers[0])
            say("goes on")
            flag.clear()
            try:
                kill(batches._workers[1])
                say("is not told")
            except RuntimeError as error:
                say("is told again:", "killed by signal" in str(error))
        say(signal.getsignal(signal.SIGCHLD) is handler)

    main()
    """
    with running(LOADER + textwrap.dedent(code)) as process:
        assert [hear(process) for _ in range(3)] == ["goes on", "is told again: True", "True"]


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_a_worker_that_dies_breaks_no_save(mode: str) -> None:
    """In the save, or where one that is under way is waited for; the loop hears of it at the batch that it asks for."""
    code = f"""
    workers, said = [], []

    class Killer:
        def on_save_checkpoint(self, model_parts, state_dict):
            kill(workers.pop())

        def on_save_checkpoint_success(self, iteration, elapsed_seconds):
            said.append(iteration)
            kill(workers.pop())

    def main():
        batches = iter(loader_of(4))
        next(batches)
        workers.extend(batches._workers)
        config = CheckpointConfig(save_dir=sys.argv[1], async_mode="{mode}")
        with DistributedCheckpointer(config, callbacks=[Killer()]) as to:
            for iteration in (1, 2):
                to.save_state(iteration, {{"model": {{"w": torch.ones(3)}}}})
        with DistributedCheckpointer(config) as to:
            say(to.steps(), sorted(said))
        try:
            for _ in batches:
                pass
        except RuntimeError as error:
            say("exited" in str(error) or "killed" in str(error))
        say(len(workers))

    if __name__ == "__main__":
        main()
    """
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "program.py"
        program.write_text(PREAMBLE + LOADER + textwrap.dedent(code))
        with running_file(program, folder + "/run") as process:
            assert [hear(process) for _ in range(3)] == ["[1, 2] [1, 2]", "True", "0"]
            assert process.wait(60) == 0


@pytest.mark.parametrize("how", ["other", "thread"])
def test_handlers_of_others_are_asked_during_a_save_and_threads_may_save(how: str) -> None:
    code = f"""
    heard = []

    class Killer:
        def on_save_checkpoint(self, model_parts, state_dict):
            kill(workers.pop())

    def save():
        with DistributedCheckpointer(CheckpointConfig(save_dir="memory://run"), callbacks=[Killer()]) as to:
            to.save_state(1, {{"model": {{"w": torch.ones(3)}}}})
            say(to.steps())

    batches = iter(loader_of(1))
    next(batches)
    workers = list(batches._workers)
    signal.signal(signal.SIGCHLD, lambda *_: heard.append(1))
    if {how == "other"}:
        save()
    else:
        import threading
        saver = threading.Thread(target=save)
        saver.start()
        saver.join()
    say(len(heard))
    """
    with running(LOADER + textwrap.dedent(code)) as process:
        assert [hear(process), hear(process)] == ["[1]", "1"]
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
