"""The state machine with saves from a process beside the trainer, and with such processes killed at any time."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

import dcpfs
from dcpfs.checkpointer.layout import step_name
from dcpfs.checkpointer.process_saver import ProcessSaver
from tests.properties.bounds import examples
from tests.properties.test_checkpointer_machine import ITERATIONS, CheckpointerMachine

MODE = "async_with_pinned_mem"
_LATEST_SECONDS = 30.0


class _ProcessMachine(CheckpointerMachine):
    """A run whose saves go on in processes, too."""

    @rule(
        iteration=ITERATIONS,
        on_existing=st.sampled_from(("overwrite", "skip", "error")),
        metric=st.sampled_from((None, 0.0, 2.0)),
    )
    def save_from_a_process(self, iteration: int, on_existing: str, metric: float | None) -> None:
        self.save(iteration, on_existing, metric, MODE)

    @rule(iteration=ITERATIONS, metric=st.sampled_from((None, 3.0)), victim=st.integers(0, 2), files=st.integers(0, 9))
    def kill_the_process(self, iteration: int, metric: float | None, victim: int, files: int) -> None:
        """When that many files of the step have been written, or the save has ended."""
        folder = self.run / step_name(iteration)
        before = {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}
        killed: list[int] = []

        def written() -> int:
            count = 0
            for directory, _, names in os.walk(folder):  # what vanishes meanwhile is passed over
                for path in (Path(directory, name) for name in names):
                    with contextlib.suppress(FileNotFoundError):
                        count += before.get(path) != path.stat().st_mtime_ns
            return count

        def kill(checkpointer: dcpfs.DistributedCheckpointer, rank: int) -> None:
            if rank != victim % self.world_size:
                return
            saver = checkpointer._saver
            assert isinstance(saver, ProcessSaver)
            pid = saver.pid
            assert pid is not None
            deadline = time.monotonic() + _LATEST_SECONDS
            while (
                written() < files
                and any(flight.outcome is None for flight in saver._flights)
                and time.monotonic() < deadline
            ):
                time.sleep(0.001)  # between two looks: another process writes, and tells nobody of a file
            killed.append(pid)
            os.kill(pid, signal.SIGKILL)

        config = self.config(async_mode=MODE)
        errors, _ = self.attempt_save(iteration, config, metric, None, during=kill)
        assert len(killed) == 1 or errors
        self.after_crash(iteration, metric, errors, reached=bool(killed))


TestCheckpointerMachineWithProcesses: Any = pytest.mark.timeout(7200)(pytest.mark.nightly(_ProcessMachine.TestCase))
TestCheckpointerMachineWithProcesses.settings = settings(examples(20), stateful_step_count=15, derandomize=False)
