"""Who runs `save_step`: what a saver is, and the one that saves in the caller.

Problem: a save in the background fails when nobody looks: the process ends with success and without its last
checkpoint, or one rank raises while its peers walk into the next collective (cases 48, 49). A second save begins while
the first still reads its buffers (case 15).

Way taken: a saver hands out what became of each save as a value, `SaveOutcome`, at a collective call and on all ranks
alike; what to make of it (raise, warn) is for the checkpointer. A save in the background owns its arena until its
outcome is known (`flights`). Its collectives run on a group of its own, in the order of the saves; the caller's on
another one (case 50).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from dcpfs.checkpointer.local_step import LocalStep
from dcpfs.checkpointer.phases import PhaseRecord, Phases
from dcpfs.checkpointer.save_context import SaveContext, StepReport
from dcpfs.checkpointer.save_step import save_step

__all__ = ["InlineSaver", "MakePhases", "SaveOutcome", "SaveRequest", "Saver", "run_save"]

MakePhases = Callable[[int], Phases]
"""Phases that measure and watch the save of an iteration."""


@dataclass(frozen=True)
class SaveRequest:
    """What a rank asks for.

    Attributes:
        iteration: Of the step.
        step: Its plan and values, or None with an ``error``.
        error: Why there is nothing to save on this rank; all ranks will raise it.
        moves_latest: Whether the pointer is to name this step.
    """

    iteration: int
    step: LocalStep | None
    error: BaseException | None = None
    moves_latest: bool = True


@dataclass(frozen=True)
class SaveOutcome:
    """What became of a save, the same on all ranks.

    Attributes:
        iteration: Of the step.
        report: What was done, or None when it failed.
        error: Why it failed: this rank's own exception, or another rank's as a value.
        seconds: From the request to the verdict.
        phases: What took how long, on this rank.
    """

    iteration: int
    report: StepReport | None
    error: BaseException | None
    seconds: float
    phases: tuple[PhaseRecord, ...] = ()


class Saver(Protocol):
    """Runs saves, one after another. All methods belong to the calling thread."""

    def make_room(self, iteration: int, *, waits: bool = False) -> tuple[list[SaveOutcome], bool]:
        """What became of saves that had to end before another can begin, and whether it can. Collective.

        Args:
            iteration: That is to be saved.
            waits: On any rank: this save is not to be left out, whatever `WhenBusy.SKIP` says.

        Raises:
            CheckpointError: It can't, and that is an error by `WhenBusy.ERROR`.
        """
        ...

    def submit(self, request: SaveRequest) -> list[SaveOutcome]:
        """Save, or begin to; what became of it, where that is known already. Collective, after `make_room`.

        Raises what keeps a save from beginning, on all ranks; nothing is in flight for it then.
        """
        ...

    def settle(self) -> list[SaveOutcome]:
        """Wait for everything in flight, and say what became of it. Collective."""
        ...

    def wait_for_staging(self) -> None:
        """Return when the values of the last request have been copied. Local; never raises for a failed save."""
        ...

    def failure(self) -> BaseException | None:
        """Why a save in the background failed, as far as this rank knows by now; None. Local, no waiting."""
        ...

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Iterations that are being saved, oldest first. Local."""
        ...

    def drain(self, timeout_seconds: float) -> list[BaseException]:
        """Wait for everything in flight, and give the errors that nobody has been told of. Local, for an exit hook."""
        ...

    def close(self) -> None:
        """Release memory, threads, processes. Local; after `settle` or `drain`. Idempotent."""
        ...


class InlineSaver:
    """Saves in the calling thread: `submit` returns when the step is committed.

    Args:
        context: Where and with whom.
        make_phases: Phases for the save of an iteration.
    """

    def __init__(self, context: SaveContext, make_phases: MakePhases) -> None:
        self._context = context
        self._make_phases = make_phases

    def make_room(
        self,
        iteration: int,  # noqa: ARG002 - the protocol's
        *,
        waits: bool = False,  # noqa: ARG002 - the protocol's
    ) -> tuple[list[SaveOutcome], bool]:
        """There always is."""
        return [], True

    def submit(self, request: SaveRequest) -> list[SaveOutcome]:
        """See `Saver`."""
        return [run_save(request, self._context, self._make_phases(request.iteration))]

    def settle(self) -> list[SaveOutcome]:
        """Nothing is ever in flight."""
        return []

    def wait_for_staging(self) -> None:
        """Nothing is ever staged."""

    def failure(self) -> BaseException | None:
        """`submit` has said it."""
        return None

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Nothing."""
        return ()

    def drain(self, timeout_seconds: float) -> list[BaseException]:  # noqa: ARG002 - the protocol's
        """Nothing is in flight."""
        return []

    def close(self) -> None:
        """Nothing is held."""


def run_save(request: SaveRequest, context: SaveContext, phases: Phases) -> SaveOutcome:
    """`save_step`, with what became of it as a value. Collective over the context's ranks; never raises."""
    started_seconds = time.monotonic()
    report: StepReport | None = None
    error: BaseException | None = None
    try:
        report = save_step(request.step, context, error=request.error, phases=phases, moves_latest=request.moves_latest)
    except BaseException as caught:  # noqa: BLE001 - handed to the caller as the outcome
        error = caught
    return SaveOutcome(request.iteration, report, error, time.monotonic() - started_seconds, phases.records)
