"""Saves in the background, as far as a thread and a process do them alike.

Problem: a second save begins while the first still reads its buffers (case 15). A failure that one rank alone raises
leaves the others in a collective (case 49). Whoever saves can be lost, on one rank, while another has not noticed.

Way taken: each save is a `Flight` that holds its arena until it has landed, which all ranks agree about: at `make_room`
when there is no arena left, at `settle`, and when there is no memory for one more copy. A crew (who saves) that is lost
on any rank is spoken of once, on all ranks, and replaced on all, before the next save. Where that fails, it is tried
again at the save after, and this one is an error, or done by a stand-in where the settings name one. A start that hangs
takes minutes before it fails, though, and with a stand-in nobody needs it: then pauses between starts grow with what
those that failed took, so that training waits for them ever less often.

Flow: `make_room` (land; replace the crew) → `submit` (copy; agree; launch) → … → `settle` (land).
"""

from __future__ import annotations

import abc
import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from dcpfs.background.arena import Arena
from dcpfs.checkpointer.choices import WhenBusy
from dcpfs.checkpointer.linked_ranks import LostRankError
from dcpfs.checkpointer.local_step import LocalStep
from dcpfs.checkpointer.saver import SaveOutcome, Saver, SaveRequest
from dcpfs.checkpointer.staging import stage_step
from dcpfs.errors import CheckpointError, StorageFullError
from dcpfs.ranks import Ranks, portable_error

__all__ = ["Flight", "FlightSaver"]

_logger = logging.getLogger(__name__)

_MOST_DOUBLINGS = 5
"""Of the pause after a failed start: those take less than a thirtieth of the time, and after one that hangs, for 300 s,
the next follows within three hours."""


class Flight:
    """One save at work. `land` may be called by any thread; what comes after the first call is too late.

    Attributes:
        iteration: Of the step.
        arena: Holds the values until the save has ended.
        started_seconds: On the monotonic clock.
        done: Set when there is an outcome.
    """

    def __init__(self, iteration: int, arena: Arena) -> None:
        self.iteration = iteration
        self.arena = arena
        self.started_seconds = time.monotonic()
        self.done = threading.Event()
        self._outcome: SaveOutcome | None = None
        self._lock = threading.Lock()

    @property
    def outcome(self) -> SaveOutcome | None:
        """What became of it; None while it is at work."""
        return self._outcome

    def land(self, outcome: SaveOutcome) -> None:
        """Say what became of it."""
        with self._lock:
            if self._outcome is None:
                self._outcome = outcome
        self.done.set()

    def fail(self, error: BaseException) -> None:
        """Say that it failed."""
        self.land(SaveOutcome(self.iteration, None, error, time.monotonic() - self.started_seconds))


class FlightSaver(abc.ABC):
    """Copies the state in the calling thread, and has a crew save the copy. See `Saver`.

    Args:
        url: Redacted, for texts.
        caller: The ranks of the calling thread.
        make_arena: Makes what a copy lies in.
        max_in_flight: Saves at work at once, each with a copy of the state.
        when_busy: What to do when so many are.
        stand_in: Saves, in the calling thread, while a lost crew can't be replaced; None: such a save fails.
        clock: Seconds that only go up; measures starts and the pauses between them.
    """

    def __init__(
        self,
        url: str,
        caller: Ranks,
        make_arena: Callable[[], Arena],
        *,
        max_in_flight: int = 1,
        when_busy: WhenBusy = WhenBusy.WAIT,
        stand_in: Saver | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url = url
        self._caller = caller
        self._when_busy = when_busy
        self._flights: deque[Flight] = deque()
        self._idle = [make_arena() for _ in range(max_in_flight)]
        self._stand_in = stand_in
        self._needs_crew = False
        self._why_none = ""
        self._clock = clock
        self._failed_starts = 0
        self._next_start_seconds = 0.0
        self._last_iteration = 0

    # --- what a crew is

    @abc.abstractmethod
    def _launch(self, flight: Flight, step: LocalStep, *, moves_latest: bool) -> None:
        """Have the crew save a step that is being copied. Local; what fails lands the flight."""

    @abc.abstractmethod
    def _loss(self) -> CheckpointError | None:
        """Why this rank's crew can save no more. Local, instant."""

    @abc.abstractmethod
    def _replace_crew(self) -> None:
        """Stop what is left of the crews of all ranks, and start anew. Collective; raises alike on all ranks."""

    @abc.abstractmethod
    def _dismiss_crew(self, *, at_once: bool) -> None:
        """Stop this rank's crew. Local; idempotent."""

    # --- Saver

    def make_room(self, iteration: int, *, waits: bool = False) -> tuple[list[SaveOutcome], bool]:
        """See `Saver`. A crew that was lost is replaced here."""
        self._last_iteration = iteration
        busy = not self._idle and self._flights[0].outcome is None
        lost, busy_anywhere, waits_anywhere = self._caller.largest([self._loss() is not None, busy, waits])
        outcomes: list[SaveOutcome] = []
        if not lost and not self._needs_crew:
            if busy_anywhere and self._when_busy is not WhenBusy.WAIT:
                if self._when_busy is WhenBusy.ERROR:
                    raise CheckpointError(
                        f"can't save iteration {iteration}: {self._still_saving()}; save less often, or set when_busy "
                        "to 'wait' or 'skip', or max_in_flight to more"
                    )
                if not waits_anywhere:
                    _logger.warning("iteration %d is not saved: %s", iteration, self._still_saving())
                    return outcomes, False
            if not self._idle:
                outcomes.append(self._land())
            if all(outcome.error is None for outcome in outcomes):
                return outcomes, True
        self._settle(outcomes)
        if self._needs_crew and not self._waits_to_start():
            error = self._start_anew()
            if error is not None and (self._stand_in is None or isinstance(error, LostRankError)):
                outcomes.append(SaveOutcome(iteration, None, error, 0.0))
                return outcomes, False
        return outcomes, True

    def submit(self, request: SaveRequest) -> list[SaveOutcome]:
        """See `Saver`. Returns when the copies have begun; after a stand-in's save, when that is done."""
        if self._needs_crew and self._stand_in is not None:
            _logger.warning(
                "iteration %d is saved in the caller, and training waits for it; the first save after %.0f s tries to "
                "go back to the background: %s",
                request.iteration,
                max(0.0, self._next_start_seconds - self._clock()),
                self._why_none,
            )
            return self._stand_in.submit(request)
        outcomes: list[SaveOutcome] = []
        arena = self._idle.pop()
        step, error = _stage(request, arena)
        is_short = request.error is None and isinstance(error, StorageFullError)
        try:
            failed, short = self._caller.largest([error is not None, is_short])
            if short and self._flights:
                _logger.warning("no memory for one more copy of the state: waiting for what is being saved")
                outcomes = [self._land() for _ in range(len(self._flights))]
                if is_short:
                    self._idle.insert(0, arena)
                    arena = self._idle.pop()
                    step, error = _stage(request, arena)
                (failed,) = self._caller.largest([error is not None])
            if failed:
                self._caller.agree(error)
        except BaseException as caught:
            self._idle.append(arena)
            if outcomes and isinstance(caught, Exception):
                return [*outcomes, SaveOutcome(request.iteration, None, caught, 0.0)]
            raise
        if step is None:
            raise RuntimeError("there is neither a step nor an error")
        flight = Flight(request.iteration, arena)
        self._flights.append(flight)
        try:
            self._launch(flight, step, moves_latest=request.moves_latest)
        except BaseException as caught:
            flight.fail(caught)
            if not isinstance(caught, Exception):
                raise
        return outcomes

    def settle(self) -> list[SaveOutcome]:
        """See `Saver`."""
        outcomes: list[SaveOutcome] = []
        self._settle(outcomes)
        return outcomes

    def wait_for_staging(self) -> None:
        """See `Saver`. Copies of host memory are complete when `submit` returns."""
        for flight in self._flights:
            flight.arena.wait()

    def failure(self) -> BaseException | None:
        """See `Saver`."""
        known = (flight.outcome for flight in self._flights)
        failed = next((each.error for each in known if each is not None and each.error is not None), None)
        return failed or (None if self._needs_crew else self._loss())

    @property
    def in_flight(self) -> tuple[int, ...]:
        """See `Saver`."""
        return tuple(flight.iteration for flight in self._flights if flight.outcome is None)

    def drain(self, timeout_seconds: float) -> list[BaseException]:
        """See `Saver`."""
        stop_seconds = time.monotonic() + timeout_seconds
        errors: list[BaseException] = []
        for flight in self._flights:
            if not flight.done.wait(max(0.0, stop_seconds - time.monotonic())):
                late = f"the save of iteration {flight.iteration} to {self._url} did not end within"
                errors.append(CheckpointError(f"{late} {timeout_seconds:.0f} s"))
            elif flight.outcome is not None and flight.outcome.error is not None:
                errors.append(flight.outcome.error)
        return errors

    def close(self) -> None:
        """See `Saver`. What is at work still, after `drain`, is given up."""
        given_up = [flight for flight in self._flights if flight.outcome is None]
        self._dismiss_crew(at_once=bool(given_up))
        for arena in (*self._idle, *(flight.arena for flight in self._flights if flight not in given_up)):
            arena.release()
        self._flights.clear()
        self._idle.clear()

    # --- within

    def _waits_to_start(self) -> bool:
        """Whether a stand-in saves without a new start, since one failed not long ago. Collective after failures."""
        if self._stand_in is None or not self._failed_starts:
            return False
        (waits,) = self._caller.largest([self._clock() < self._next_start_seconds])  # clocks differ: one is enough
        return bool(waits)

    def _start_anew(self) -> Exception | None:
        """Replace the crew; why there is none, the same on all ranks. Collective."""
        started_seconds = self._clock()
        try:
            self._replace_crew()
        except Exception as error:  # noqa: BLE001 - handed over as an outcome, or a warning
            self._failed_starts += 1
            failed_seconds = self._clock()
            pause_seconds = (failed_seconds - started_seconds) * 2 ** min(self._failed_starts, _MOST_DOUBLINGS)
            self._next_start_seconds = failed_seconds + pause_seconds
            self._why_none = str(error)
            return error
        self._failed_starts = 0
        self._needs_crew = False
        return None

    def _settle(self, outcomes: list[SaveOutcome]) -> None:
        """Land everything, and add what became of it; a crew that was lost is spoken of, if nothing did. Collective."""
        while self._flights:
            outcomes.append(self._land())
        if self._needs_crew:
            return
        loss = self._loss()
        (self._needs_crew,) = map(bool, self._caller.largest([loss is not None]))
        if self._needs_crew and all(outcome.error is None for outcome in outcomes):
            error = self._agree(loss)
            if self._stand_in is None or isinstance(error, LostRankError):
                outcomes.append(SaveOutcome(self._last_iteration, None, error, 0.0))
            else:
                _logger.warning("no save was lost, and training goes on: %s", error)

    def _land(self) -> SaveOutcome:
        """Wait for the oldest save, and agree about what became of it. Collective."""
        flight = self._flights[0]
        flight.done.wait()
        self._flights.popleft()
        self._idle.append(flight.arena)
        outcome = flight.outcome
        if outcome is None:
            raise RuntimeError(f"the save of iteration {flight.iteration} ended without an outcome")
        try:
            error = self._agree(outcome.error)
        except Exception as caught:  # noqa: BLE001 - handed to the caller as the outcome
            error = outcome.error or caught
        return outcome if error is outcome.error else dataclasses.replace(outcome, report=None, error=error)

    def _agree(self, error: BaseException | None) -> BaseException | None:
        """What all ranks raise: this rank's own, else the lowest rank's; causes before their consequences. Collective.

        A rank whose connection broke since another rank's process died has an error of its own, and not the cause.
        """
        (failed,) = self._caller.largest([error is not None])
        if not failed:
            return None
        mine = None if error is None else portable_error(error, self._caller.rank)
        reports = [each for each in self._caller.all_gather(mine) if each is not None]
        causes = [each for each in reports if not isinstance(each, LostRankError)]
        if error is not None and (not causes or not isinstance(error, LostRankError)):
            return error
        return (causes or reports)[0]

    def _still_saving(self) -> str:
        names: Sequence[str] = [str(flight.iteration) for flight in self._flights]
        return f"iteration {', '.join(names)} is still being saved to {self._url}"


def _stage(request: SaveRequest, arena: Arena) -> tuple[LocalStep | None, BaseException | None]:
    if request.error is not None or request.step is None:
        return None, request.error or RuntimeError("a request has neither a step nor an error")
    try:
        return stage_step(request.step, arena), None
    except BaseException as caught:  # noqa: BLE001 - brought to the agreement, which raises it on all ranks
        return None, caught
