"""Real processes with a gloo group, for tests.

Problem: a test of several ranks needs processes that see each other, whose failures reach the test with
their traceback, and that never outlive it. ``torch.multiprocessing.spawn`` imports torch anew in each
(seconds), hands back no values, and joins for ever when one rank hangs in a collective.

Way taken: a fork server that has imported torch once; a rendezvous on a file; values and errors come back as
plain pickles through one pipe per rank; past the deadline every process is killed and the test is told which
rank hung and where. ::

    values = run_ranks(save_something, 4, url)            # one value per rank; raises if any rank failed
    outcomes = try_ranks(save_something, 4, url)          # the failures as values

The function is importable (module level), gets the arguments that follow, and finds an initialised group.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Generic, TypeVar

__all__ = ["Outcome", "run_ranks", "try_ranks"]

T = TypeVar("T")

_PRELOADED = ["torch", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"]
_PRELOADED += ["torch.distributed.checkpoint.state_dict", "fsspec", "pytest", "dcpfs.errors", "dcpfs.config"]


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What one rank did: a value, or an error as type name, text, traceback (and itself, if it pickles)."""

    rank: int
    value: T | None = None
    error_type: str | None = None
    error_text: str = ""
    traceback_text: str = ""
    error: BaseException | None = None

    @property
    def failed(self) -> bool:
        """True when the rank raised, died or hung."""
        return self.error_type is not None


def run_ranks(function: Callable[..., T], world_size: int, *args: object, timeout_seconds: float = 600) -> list[T]:
    """Run ``function(*args)`` on every rank of a gloo group and return the values by rank.

    Raises:
        AssertionError: A rank raised, died, or hung past ``timeout_seconds``; the text holds every traceback.
    """
    outcomes = try_ranks(function, world_size, *args, timeout_seconds=timeout_seconds)
    failed = [outcome for outcome in outcomes if outcome.failed]
    if failed:
        texts = [f"--- rank {o.rank}: {o.error_type}: {o.error_text}\n{o.traceback_text}" for o in failed]
        raise AssertionError(f"{len(failed)} of {world_size} ranks failed\n" + "\n".join(texts))
    return [outcome.value for outcome in outcomes]  # type: ignore[misc]  # none failed, so each has a value


def try_ranks(
    function: Callable[..., T], world_size: int, *args: object, timeout_seconds: float = 600
) -> list[Outcome[T]]:
    """Like `run_ranks`, with failures as values. Hung ranks are killed and reported as ``TimeoutError``."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    call = pickle.dumps((function, args))
    with tempfile.TemporaryDirectory(prefix="gloo-") as folder:
        pipes: list[multiprocessing.connection.Connection] = []
        processes = []
        try:
            for rank in range(world_size):
                receiver, sender = context.Pipe(duplex=False)
                rank_args = (rank, world_size, folder, call, sender, timeout_seconds)
                process = context.Process(target=_run_rank, args=rank_args, name=f"rank-{rank}", daemon=False)
                process.start()
                sender.close()
                pipes.append(receiver)
                processes.append(process)
            # Each start has waited until the server had imported torch and forked.
            deadline_seconds = time.monotonic() + timeout_seconds
            outcomes: list[Outcome[T]] = [
                _receive(rank, pipe, max(0.0, deadline_seconds - time.monotonic()), Path(folder))
                for rank, pipe in enumerate(pipes)
            ]
        finally:
            for process in processes:
                process.join(timeout=5)
                if process.is_alive():
                    process.kill()
                    process.join()
            for pipe in pipes:
                pipe.close()
    return [
        outcome
        if outcome.error_type != "EOFError"
        else Outcome(outcome.rank, error_type="ProcessDied", error_text=f"exit code {process.exitcode}")
        for outcome, process in zip(outcomes, processes, strict=True)
    ]


def _receive(rank: int, pipe: multiprocessing.connection.Connection, wait_seconds: float, folder: Path) -> Outcome[T]:
    if not pipe.poll(wait_seconds):
        stacks = folder / f"stacks-{rank}"
        text = stacks.read_text() if stacks.exists() else ""
        return Outcome(rank, error_type="TimeoutError", error_text="the rank hung", traceback_text=text)
    try:
        outcome: Outcome[T] = pickle.loads(pipe.recv_bytes())
    except EOFError:
        return Outcome(rank, error_type="EOFError")
    return outcome


def _run_rank(
    rank: int,
    world_size: int,
    folder: str,
    call: bytes,
    sender: multiprocessing.connection.Connection,
    timeout_seconds: float,
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")  # where torch's own background processes meet
    outcome: Outcome[object]
    with open(Path(folder) / f"stacks-{rank}", "w") as stacks:
        faulthandler.dump_traceback_later(max(1.0, timeout_seconds * 0.7), file=stacks)
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder}/rendezvous",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout_seconds),
            )
            dist.barrier()  # a rank that is done at once must not leave while another still connects to it
            function, args = pickle.loads(call)
            outcome = Outcome(rank, value=function(*args))
            payload = pickle.dumps(outcome)
        except BaseException as error:
            payload = _dump_failure(rank, error)
        finally:
            faulthandler.cancel_dump_traceback_later()
    sender.send_bytes(payload)
    sender.close()
    sys.stdout.flush()
    if dist.is_initialized():
        dist.destroy_process_group()


def _dump_failure(rank: int, error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(error))
    carried: BaseException | None = error
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        carried = None
    return pickle.dumps(Outcome[object](rank, None, type(error).__name__, str(error), text, carried))
