"""Who runs `save_step`: the caller, or a thread beside it.

Problem: a save in the background fails when nobody looks: the process ends with success and without its last
checkpoint, or one rank raises while its peers walk into the next collective (cases 48, 49). A second save begins while
the first still reads its buffers (case 15).

Way taken: a saver hands out what became of each save as a value, `SaveOutcome`, at a collective call and on all ranks
alike; what to make of it (raise, warn) is for the checkpointer. A save in the background owns its arena until its
outcome is known. Its collectives run on a group of its own, in the order of the saves; the caller's on another one
(case 50). Threads are no daemons and end with their save: a process that ends waits for what is in flight.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from dcpfs.background.arena import Arena
from dcpfs.checkpointer.choices import WhenBusy
from dcpfs.checkpointer.local_step import LocalStep
from dcpfs.checkpointer.phases import PhaseRecord, Phases
from dcpfs.checkpointer.save_context import SaveContext, StepReport
from dcpfs.checkpointer.save_step import save_step
from dcpfs.checkpointer.staging import stage_step
from dcpfs.errors import CheckpointError
from dcpfs.ranks import Ranks

__all__ = [
    "InlineSaver",
    "SaveOutcome",
    "SaveRequest",
    "Saver",
    "ThreadSaver",
    "busy_error",
    "run_save",
    "say_busy",
    "unsettled_error",
]

_logger = logging.getLogger(__name__)

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

    def make_room(self, iteration: int) -> tuple[list[SaveOutcome], bool]:
        """What became of saves that had to end before another can begin, and whether it can. Collective.

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
        """Release memory and threads. Local; after `settle`. Idempotent."""
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

    def make_room(self, iteration: int) -> tuple[list[SaveOutcome], bool]:  # noqa: ARG002 - the protocol's
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


class _Flight:
    """One save in a thread."""

    def __init__(self, request: SaveRequest, arena: Arena, run: Callable[[], SaveOutcome]) -> None:
        self.iteration = request.iteration
        self.arena = arena
        self.outcome: SaveOutcome | None = None
        self._run = run
        self._thread = threading.Thread(target=self._work, name=f"dcpfs-save-{request.iteration}")

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_seconds: float | None = None) -> None:
        self._thread.join(timeout_seconds)

    def _work(self) -> None:
        self.outcome = self._run()


class ThreadSaver:
    """Copies the state in the calling thread, and saves the copy in another.

    Args:
        context: Where and with whom; its group is the saver's own.
        make_phases: Phases for the save of an iteration.
        caller: The ranks of the calling thread, on another group.
        max_in_flight: Saves at work at once, each with a copy of the state.
        when_busy: What `submit` does when so many are.
    """

    def __init__(
        self,
        context: SaveContext,
        make_phases: MakePhases,
        caller: Ranks,
        *,
        max_in_flight: int = 1,
        when_busy: WhenBusy = WhenBusy.WAIT,
    ) -> None:
        self._context = context
        self._make_phases = make_phases
        self._caller = caller
        self._max_in_flight = max_in_flight
        self._when_busy = when_busy
        self._flights: deque[_Flight] = deque()
        self._idle: list[Arena] = []

    def submit(self, request: SaveRequest) -> list[SaveOutcome]:
        """See `Saver`. Returns when the copies have begun."""
        error, staged, arena = request.error, None, self._idle.pop() if self._idle else Arena()
        if error is None and request.step is not None:
            try:
                staged = stage_step(request.step, arena)
            except BaseException as caught:  # noqa: BLE001 - brought to the agreement, which raises it on all ranks
                error = caught
        try:
            self._caller.confirm(error)
        except BaseException:
            self._idle.append(arena)
            raise
        ready = SaveRequest(request.iteration, staged, None, request.moves_latest)
        before = self._flights[-1] if self._flights else None
        phases = self._make_phases(request.iteration)

        def run() -> SaveOutcome:
            if before is not None:
                before.join()
            arena.wait()
            return run_save(ready, self._context, phases)

        flight = _Flight(request, arena, run)
        self._flights.append(flight)
        flight.start()
        return []

    def settle(self) -> list[SaveOutcome]:
        """See `Saver`."""
        outcomes = []
        while self._flights:
            outcomes.append(self._land())
        return outcomes

    def wait_for_staging(self) -> None:
        """See `Saver`. Copies of host memory are complete when `submit` returns."""
        for flight in self._flights:
            flight.arena.wait()

    def failure(self) -> BaseException | None:
        """See `Saver`."""
        known = (flight.outcome for flight in self._flights)
        return next((each.error for each in known if each is not None and each.error is not None), None)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """See `Saver`."""
        return tuple(flight.iteration for flight in self._flights if flight.outcome is None)

    def drain(self, timeout_seconds: float) -> list[BaseException]:
        """See `Saver`."""
        stop_seconds = time.monotonic() + timeout_seconds
        errors: list[BaseException] = []
        for flight in self._flights:
            flight.join(max(0.0, stop_seconds - time.monotonic()))
            error = unsettled_error(flight.iteration, flight.outcome, timeout_seconds)
            if error is not None:
                errors.append(error)
        return errors

    def close(self) -> None:
        """See `Saver`."""
        for flight in self._flights:
            flight.join()
            flight.arena.release()
        self._flights.clear()
        for arena in self._idle:
            arena.release()
        self._idle.clear()

    def make_room(self, iteration: int) -> tuple[list[SaveOutcome], bool]:
        """See `Saver`."""
        outcomes: list[SaveOutcome] = []
        if len(self._flights) < self._max_in_flight:
            return outcomes, True
        if self._when_busy is not WhenBusy.WAIT:
            (busy,) = self._caller.largest([self._flights[0].outcome is None])
            if busy:
                others, url = [flight.iteration for flight in self._flights], self._context.save_dir.redacted
                if self._when_busy is WhenBusy.ERROR:
                    raise busy_error(iteration, others, url)
                say_busy(iteration, others, url)
                return outcomes, False
        while len(self._flights) >= self._max_in_flight:
            outcomes.append(self._land())
        return outcomes, True

    def _land(self) -> SaveOutcome:
        """Wait for the oldest save, and agree about what became of it. Collective."""
        flight = self._flights.popleft()
        flight.join()
        self._idle.append(flight.arena)
        outcome = flight.outcome
        if outcome is None:
            raise RuntimeError(f"the thread that saved iteration {flight.iteration} ended without an outcome")
        try:
            self._caller.confirm(outcome.error)
        except BaseException as error:  # noqa: BLE001 - handed to the caller as the outcome
            if error is not outcome.error:
                return SaveOutcome(outcome.iteration, None, error, outcome.seconds, outcome.phases)
        return outcome


def unsettled_error(iteration: int, outcome: SaveOutcome | None, timeout_seconds: float) -> BaseException | None:
    """Why a save that nobody asked about is to be spoken of when the process ends."""
    if outcome is None:
        return CheckpointError(f"the save of iteration {iteration} did not end within {timeout_seconds:.0f} s")
    return outcome.error


def busy_error(iteration: int, others: Sequence[int], url: str) -> CheckpointError:
    """The error of a save for which there is no room."""
    return CheckpointError(
        f"can't save iteration {iteration}: {_still_saving(others, url)}; save less often, or set when_busy to 'wait' "
        "or 'skip', or max_in_flight to more"
    )


def say_busy(iteration: int, others: Sequence[int], url: str) -> None:
    """Log that a save is left out since there is no room for it."""
    _logger.warning("iteration %d is not saved: %s", iteration, _still_saving(others, url))


def _still_saving(others: Sequence[int], url: str) -> str:
    names = ", ".join(map(str, others))
    return f"iteration {names} is still being saved to {url}"


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
