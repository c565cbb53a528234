"""Real signals, in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from dcpfs.checkpointer.preemption import SaveFlag, install_signal_handler
from dcpfs.errors import ConfigError

PREAMBLE = """
import os, signal, sys, threading
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
import dcpfs, dcpfs.worker_deaths
from dcpfs import CheckpointConfig, DistributedCheckpointer

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
    import contextlib

    def main():
        batches = iter(loader_of({workers}, worker_init_fn=shield_worker if {shielded} else None))
        steps, lost = 0, False
        with install_signal_handler(flag), DistributedCheckpointer(CheckpointConfig(save_dir="memory://run")) as to:
            dcpfs.worker_deaths._REMIND_SECONDS = 1000  # nobody is told between the save and the end
            while steps < 100:  # more than the workers had prepared
                if steps == 3:
                    say("training")
                    wait()
                try:
                    next(batches)
                except (RuntimeError, EOFError, OSError):
                    lost = True
                    break
                steps += 1
            if not {shielded}:  # all of them, so that nobody dies after the save
                for worker in batches._workers:
                    with contextlib.suppress(ChildProcessError):  # the loader has seen it
                        os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
            say("lost its workers" if lost else "went on")
            to.save_state(steps, {{"model": {{"w": torch.ones(3)}}}})
            say("saved", to.latest() == steps, "because of", flag.reason)

    main()
    """
    with running(LOADER + textwrap.dedent(code)) as process:
        assert hear(process) == "training"
        os.killpg(process.pid, signal.SIGTERM)
        go_on(process)
        assert hear(process) == ("went on" if shielded else "lost its workers")
        assert hear(process) == "saved True because of SIGTERM"
        assert process.wait(60) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_workers_that_die_after_a_signal_raise_nothing_until_the_save_was_taken(number: signal.Signals) -> None:
    code = f"""
    def main():
        batches = [iter(loader_of(1)) for _ in range(3)]
        workers = [each._workers[0] for each in batches]
        other = SaveFlag()
        first, second = install_signal_handler(other), install_signal_handler(flag)
        signal.raise_signal({int(number)})
        kill(workers[0])
        other.clear()
        first.uninstall()
        kill(workers[1])
        say("goes on")
        try:
            flag.clear()
            kill(workers[2])
            say("is not told")
        except RuntimeError as error:
            say("killed by signal" in str(error))

    main()
    """
    with running(LOADER + textwrap.dedent(code)) as process:
        assert [hear(process), hear(process)] == ["goes on", "True"]


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_a_worker_that_dies_breaks_no_save(mode: str, tmp_path: Path) -> None:
    """Whatever asked for the save before; in it, and where one is waited for; the loop hears of it at its batch."""
    code = f"""
    workers, said = [], []

    class Killer:
        def on_save_checkpoint(self, model_parts, state_dict):
            kill(workers.pop())

        def on_save_checkpoint_success(self, iteration, elapsed_seconds):
            said.append(iteration)
            kill(workers.pop())

    def main():
        dcpfs.worker_deaths._REMIND_SECONDS = 1000
        batches = iter(loader_of(6))
        next(batches)
        workers.extend(batches._workers)
        config = CheckpointConfig(save_dir=sys.argv[1], async_mode="{mode}")
        with DistributedCheckpointer(config, callbacks=[Killer()]) as to:
            to.save_state(1, {{"model": {{"w": torch.ones(3)}}}})
            to.install_signal_handler(signal.SIGUSR1)
            signal.raise_signal(signal.SIGUSR1)
            say(to.should_save(1))
            for iteration in (2, 3):
                to.save_state(iteration, {{"model": {{"w": torch.ones(3)}}}})
        with DistributedCheckpointer(config) as to:
            say(to.steps(), sorted(said), len(workers))
        try:
            for _ in batches:
                pass
        except RuntimeError as error:
            say("exited" in str(error) or "killed" in str(error))

    if __name__ == "__main__":
        main()
    """
    program = tmp_path / "program.py"
    program.write_text(PREAMBLE + LOADER + textwrap.dedent(code))
    with running_file(program, str(tmp_path / "run")) as process:
        assert [hear(process) for _ in range(3)] == ["True", "[1, 2, 3] [1, 2, 3] 0", "True"]
        assert process.wait(60) == 0


def test_a_worker_that_dies_breaks_no_call_of_all_ranks() -> None:
    code = """
    dcpfs.worker_deaths._REMIND_SECONDS = 1000

    class Killing:
        def state_dict(self):
            if workers:
                kill(workers.pop())
            return {"x": 1}

        def load_state_dict(self, state):
            pass

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(3))

        def state_dict(self, *args, **options):
            Killing().state_dict()
            return super().state_dict(*args, **options)

    workers = []
    state = {"w": torch.ones(3), "a": Killing()}
    dcpfs.save(state, "memory://there")
    dcpfs.save_checkpoint(Model(), "memory://a-model")
    loaders = [iter(loader_of(1)) for _ in range(4)]
    for batches, call in zip(loaders, (
        lambda: dcpfs.save(state, "memory://one"),
        lambda: dcpfs.load(state, "memory://there"),
        lambda: dcpfs.save_checkpoint(Model(), "memory://model"),
        lambda: dcpfs.load_checkpoint(Model(), "memory://a-model"),
    )):
        workers.extend(batches._workers)
        call()
        say(len(workers))
    """
    with running(LOADER + textwrap.dedent(code)) as process:
        assert [hear(process) for _ in range(4)] == ["0"] * 4
        assert process.wait(60) == 0


def test_a_signal_and_a_death_while_ranks_agree_whether_to_save() -> None:
    """It comes within a call, whose end doesn't end what holds the death back."""
    code = """
    with DistributedCheckpointer(CheckpointConfig(save_dir="memory://run")) as to:
        to.install_signal_handler()
        batches = iter(loader_of(2))
        workers = list(batches._workers)
        ranks = to._caller

        class Late:
            def largest(self, words):
                signal.raise_signal(signal.SIGTERM)
                kill(workers.pop())
                return ranks.largest(words)

        to._caller = Late()
        say(to.should_save(1))
        to._caller = ranks
        kill(workers.pop())
        say(to.should_save(1))
    """
    with running(LOADER + textwrap.dedent(code)) as process:
        assert [hear(process), hear(process)] == ["False", "True"]


@pytest.mark.parametrize("order", ["before torch's", "after torch's", "in a thread"])
def test_handlers_of_others_hear_of_deaths_during_a_save(order: str) -> None:
    code = f"""
    heard = []
    dcpfs.worker_deaths._REMIND_SECONDS = 1000

    class Killer:
        def on_save_checkpoint(self, model_parts, state_dict):
            kill(workers.pop())

    def save():
        with DistributedCheckpointer(CheckpointConfig(save_dir="memory://run"), callbacks=[Killer()]) as to:
            to.save_state(1, {{"model": {{"w": torch.ones(3)}}}})
            say(to.steps())

    if {order == "before torch's"}:
        signal.signal(signal.SIGCHLD, lambda *_: heard.append(1))
    batches = iter(loader_of(1))
    next(batches)
    workers = list(batches._workers)
    if {order != "before torch's"}:
        signal.signal(signal.SIGCHLD, lambda *_: heard.append(1))
    if {order == "in a thread"}:
        import threading
        saver = threading.Thread(target=save)
        saver.start()
        saver.join()
    else:
        save()
    say(len(heard) > 0)
    """
    with running(LOADER + textwrap.dedent(code)) as process:
        assert [hear(process), hear(process)] == ["[1]", "True"]


@pytest.mark.parametrize("reaped", [False, True], ids=["", "reaped by others"])
@pytest.mark.parametrize("wanted", [True, False], ids=["while a save is wanted", "after a save"])
def test_a_loop_that_waits_for_the_rest_of_a_message_hears_of_the_death(wanted: bool, reaped: bool) -> None:
    """The worker was killed while it wrote a batch. Torch's own looks don't see it: they come before the read."""
    code = f"""
    class Long:
        def __len__(self):
            return 100
        def __getitem__(self, index):
            return bytes(4_000_000)  # more than fits into a pipe

    def main():
        batches = iter(DataLoader(Long(), batch_size=1, num_workers=1, collate_fn=bytes_of))
        assert batches._worker_result_queue._reader.poll(60)  # it has begun to write
        if {wanted}:
            install_signal_handler(flag)
            signal.raise_signal(signal.SIGUSR1)
            kill(batches._workers[0])
            if {reaped}:
                torch.multiprocessing.active_children()
        else:
            with dcpfs.worker_deaths.undisturbed_by_workers():
                kill(batches._workers[0])
                if {reaped}:
                    torch.multiprocessing.active_children()
        try:
            say("got", len(next(batches)))
        except RuntimeError as error:
            say("exited" in str(error) or "killed" in str(error))

    def bytes_of(items):
        return items[0]

    main()
    """
    with running(LOADER + textwrap.dedent(code)) as process:
        assert hear(process) == "True"


def test_a_loader_that_goes_on_without_a_worker_is_told_after_the_save() -> None:
    code = """
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            while True:
                yield 1

    def main():
        batches = iter(DataLoader(Endless(), num_workers=2, in_order=False))
        next(batches)
        with dcpfs.worker_deaths.undisturbed_by_workers():
            kill(batches._workers[0])
        try:
            while True:
                next(batches)
        except RuntimeError as error:
            say("exited" in str(error) or "killed" in str(error))

    main()
    """
    with running(LOADER + textwrap.dedent(code)) as process:
        assert hear(process) == "True"


def test_nobody_is_told_of_the_workers_of_a_loader_that_was_given_up() -> None:
    code = """
    def main():
        kept, given_up = iter(loader_of(1)), iter(loader_of(1))
        guard = dcpfs.worker_deaths._guard
        with dcpfs.worker_deaths.undisturbed_by_workers():
            kill(given_up._workers[0])
            kill(kept._workers[0])
            say(len(guard.errors))
            given_up._shutdown_workers()
            say(len(guard.errors))
            kept._shutdown_workers()
            say(len(guard.errors))
        while guard.reminder is not None:
            pass
        say(guard.loaders)

    main()
    """
    with running(LOADER + textwrap.dedent(code)) as process:
        assert [hear(process) for _ in range(4)] == ["2", "1", "0", "{}"]


def test_a_loader_that_ends_its_workers_hears_nothing_of_those_of_another() -> None:
    """Validation ends while a save is wanted: it waits for its workers, whose deaths are what it asked for."""
    code = """
    def main():
        dcpfs.worker_deaths._REMIND_SECONDS = 1000
        plain, other = iter(loader_of(1)), loader_of(2, worker_init_fn=shield_worker)
        install_signal_handler(flag)
        signal.raise_signal(signal.SIGTERM)
        kill(plain._workers[0])
        say(len([batch for batch in other]))
        batches = iter(other)
        next(batches)
        del batches
        say(len(dcpfs.worker_deaths._guard.errors))
        try:
            while True:
                next(plain)
        except (RuntimeError, OSError):
            say("is told of its own")

    main()
    """
    with running(LOADER + textwrap.dedent(code)) as process:
        assert [hear(process) for _ in range(3)] == ["1000", "1", "is told of its own"]


def test_what_was_interrupted_by_a_death_is_not_kept() -> None:
    """Nor the loader: one that is dropped is given up."""
    code = """
    import weakref

    def step():
        values = torch.ones(10)
        kept.append(weakref.ref(values))
        batches = iter(loader_of(1))
        try:
            raise KeyError("handled")
        except KeyError:
            kill(batches._workers[0])
        held.extend(dcpfs.worker_deaths._guard.errors)
        say(len(held), held[0].__context__, held[0].__traceback__)

    kept, held = [], []
    with dcpfs.worker_deaths.undisturbed_by_workers():
        step()
        say(kept[0]() is None, dcpfs.worker_deaths._guard.errors, dcpfs.worker_deaths._guard.loaders)
    """
    with running(LOADER + textwrap.dedent(code)) as process:
        assert [hear(process), hear(process)] == ["1 None None", "True [] {}"]


@pytest.mark.parametrize("wait", ["Queue().get", "Event().wait"])
def test_a_state_that_its_workers_owe_is_not_waited_for_for_ever(wait: str) -> None:
    """As loaders do that ask their workers for it, without a limit of time."""
    code = f"""
    class Asking:
        def __init__(self):
            self.answer = torch.multiprocessing.{wait}
            self.batches = iter(loader_of(1))
            next(self.batches)

        def state_dict(self):
            kill(self.batches._workers[0])
            return self.answer()

        def load_state_dict(self, state):
            pass

    with DistributedCheckpointer(CheckpointConfig(save_dir="memory://run")) as to:
        try:
            to.save(torch.nn.Linear(1, 1), iteration=1, dataloader=Asking())
        except Exception as error:
            say("killed by signal" in str(error))
        say(to.steps())
    """
    with running(LOADER + textwrap.dedent(code)) as process:
        assert [hear(process), hear(process)] == ["True", "[]"]


def test_without_a_thread_to_remind_the_next_death_tells() -> None:
    code = """
    import _thread

    def refuse(*arguments):
        raise RuntimeError("can't start new thread")

    batches = [iter(loader_of(1)), iter(loader_of(1))]
    start = _thread.start_new_thread
    _thread.start_new_thread = refuse
    with dcpfs.worker_deaths.undisturbed_by_workers():
        kill(batches[0]._workers[0])
    _thread.start_new_thread = start
    for _ in range(2):
        try:
            os.kill(os.getpid(), signal.SIGCHLD)
            say("is not told")
        except RuntimeError as error:
            say("killed by signal" in str(error))
    """
    with running(LOADER + textwrap.dedent(code)) as process:
        assert [hear(process), hear(process)] == ["True", "is not told"]


def test_what_a_signal_interrupts_ends_its_section() -> None:
    """Ctrl-C as often as it may come, while calls begin and end."""
    code = """
    class Stop(Exception):
        pass

    def stop(*_):
        raise Stop

    @dcpfs.worker_deaths.undisturbed_by_workers()
    def call():
        pass

    signal.signal(signal.SIGALRM, stop)
    stopped = 0
    while stopped < 300:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.0005, 0)
            while True:
                call()
        except Stop:
            stopped += 1
    say(dcpfs.worker_deaths._guard.sections)
    """
    with running(LOADER + textwrap.dedent(code)) as process:
        assert hear(process) == "0"


def test_reminders_end_where_nobody_listens_any_more_and_a_child_starts_anew() -> None:
    code = """
    def main():
        dcpfs.worker_deaths._REMIND_SECONDS = 0.01
        batches = iter(loader_of(2))
        sent = []
        with dcpfs.worker_deaths.undisturbed_by_workers():
            kill(batches._workers[0])
            guard = dcpfs.worker_deaths._guard
            child = os.fork()
            if child == 0:
                os._exit(bool(guard.sections or guard.errors or guard.reminder or guard.reasons or guard.loaders))
            say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            signal.signal(signal.SIGCHLD, lambda *_: sent.append(1))
        while guard.reminder is not None:
            pass
        say(0 < len(sent) <= 20)

    main()
    """
    with running(LOADER + textwrap.dedent(code)) as process:
        assert [hear(process), hear(process)] == ["0", "True"]


def test_a_worker_that_dies_at_the_end_of_the_process_breaks_no_save_in_flight(tmp_path: Path) -> None:
    """The checkpointer was not closed."""
    code = """
    def is_late():  # as an executor's hook that has work left: it comes first, and ends after the time to remind
        while dcpfs.worker_deaths._guard.reminder is not None:
            pass

    threading._register_atexit(is_late)
    to = DistributedCheckpointer(CheckpointConfig(save_dir=sys.argv[1], async_mode="async"))
    batches = [iter(loader_of(1)), iter(loader_of(1))]
    workers = [each._workers[0] for each in batches]
    drain = to._saver.drain

    def drain_late(seconds):
        say("drains")
        kill(workers[1])
        return drain(seconds)

    to._saver.drain = drain_late
    with dcpfs.worker_deaths.undisturbed_by_workers():
        kill(workers[0])  # told after half a second, while the interpreter waits for its threads
        to.save_state(1, {"model": {"w": torch.ones(3)}})
    """
    program = tmp_path / "program.py"
    program.write_text(PREAMBLE + LOADER + textwrap.dedent(code))
    with running_file(program, str(tmp_path / "run")) as process:
        assert hear(process) == "drains"
        assert process.wait(60) == 0
        assert process.stderr is not None
        assert "Exception ignored" not in process.stderr.read()
    assert (tmp_path / "run" / "latest_checkpoint.txt").exists()


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
