"""Saves in a process beside the trainer.

Problem: a thread that saves shares Python's lock with training, and slows it. A process that is started at the first
save fails in the middle of training; one that dies is noticed when a pipe breaks, and never comes back (cases 51, 53).
A failure that one rank alone raises leaves the others in a collective (case 49).

Way taken: a process per rank, started with the checkpointer, told where to meet the others. Values go through memory
that both sides map (`Arena` in a `SharedBlock`), everything else through a channel, each save with a number of its own.
Whatever happens to a process shows as the outcome of its save. When one has ended, on any rank, all are replaced at the
next collective call, since the processes' own group is broken with it.

Flow: `make_room` (outcomes, new processes) → `submit` (copy, agree, order) → the process: `save_step` → its reply → the
next `make_room` or `settle`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import os
import pickle
import threading
import time
from collections import deque
from dataclasses import dataclass, field

import torch

from dcpfs.background.arena import Arena
from dcpfs.background.channel import ChannelClosedError
from dcpfs.background.process import BackgroundProcess
from dcpfs.background.rendezvous import Rendezvous
from dcpfs.background.shared_block import SharedBlock
from dcpfs.checkpointer.choices import WhenBusy
from dcpfs.checkpointer.local_step import LocalStep
from dcpfs.checkpointer.save_context import SaveContext
from dcpfs.checkpointer.save_orders import Joined, Meeting, SaveDone, Started, encode_order
from dcpfs.checkpointer.saver import SaveOutcome, SaveRequest, busy_error, say_busy, unsettled_error
from dcpfs.checkpointer.staging import stage_step
from dcpfs.errors import CheckpointError, ConfigError
from dcpfs.ranks import Ranks

__all__ = ["ProcessSaver"]

_logger = logging.getLogger(__name__)

_TARGET = "dcpfs.checkpointer.background_save:serve"
_START_SECONDS = 300.0
"""Importing torch from a busy shared filesystem takes a minute or two."""
_GRACE_SECONDS = 30.0
_numbers = itertools.count(1)
"""Of saves, over all savers of this process: a reply can't be taken for another's."""


class _Slot:
    """One block that both processes map, cut into the tensors of a step."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.block: SharedBlock | None = None
        self.arena = Arena(self._make_block)
        self.is_known = False

    def _make_block(self, size_bytes: int) -> torch.Tensor:
        self.close()
        self.block = SharedBlock.create(size_bytes)
        self.is_known = False
        return self.block.tensor

    def close(self) -> None:
        block, self.block = self.block, None
        if block is not None:
            block.close()


@dataclass
class _Flight:
    """A save that was ordered."""

    number: int
    iteration: int
    slot: _Slot
    started_seconds: float
    done: threading.Event = field(default_factory=threading.Event)
    outcome: SaveOutcome | None = None
    sender: threading.Thread | None = None

    def land(self, outcome: SaveOutcome) -> None:
        self.outcome = outcome
        self.done.set()

    def fail(self, error: BaseException) -> None:
        self.land(SaveOutcome(self.iteration, None, error, time.monotonic() - self.started_seconds))


class _Crew:
    """One start of this rank's process: what has been heard of it. Told by the reading thread."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.process: BackgroundProcess | None = None
        self.ended = ""
        self.started = threading.Event()
        self.joined = threading.Event()
        self.join_error: BaseException | None = None
        self.flights: dict[int, _Flight] = {}
        self.known_digest: int | None = None
        self._lock = threading.Lock()

    def hear(self, message: object) -> None:
        if isinstance(message, Started):
            self.started.set()
        elif isinstance(message, Joined):
            self.join_error = message.error
            self.joined.set()
        elif isinstance(message, SaveDone):
            with self._lock:
                flight = self.flights.pop(message.number, None)
            if flight is not None:
                flight.land(message.outcome)

    def end(self, reason: str) -> None:
        with self._lock:
            self.ended = reason
            lost = list(self.flights.values())
            self.flights.clear()
        self.started.set()
        self.joined.set()
        for flight in lost:
            flight.fail(self.error(f"iteration {flight.iteration} was not saved"))

    def error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{what}: {self.ended}; it is replaced, and the next save can work", rank=self.rank)

    def watch(self, flight: _Flight) -> None:
        """Expect a reply; when the process has ended already, there will be none."""
        with self._lock:
            if not self.ended:
                self.flights[flight.number] = flight
                return
        flight.fail(self.error(f"iteration {flight.iteration} was not saved"))


class ProcessSaver:
    """Copies the state in the calling thread, and has a process save the copy. All ranks have one. See `Saver`.

    Args:
        context: Where and how; its ranks are not used, since the processes have a group of their own.
        caller: The ranks of the calling thread.
        max_in_flight: Saves at work at once, each with a copy of the state.
        when_busy: What to do when so many are.
        timeout_seconds: Of one exchange between the processes.
        phase_timeout_seconds: When a phase of a save is reported.
        niceness: How much less CPU the process gets than training, 0 to 19.

    Raises:
        ConfigError: The storage writer can't be handed to another process.
        CheckpointError: A process did not start, or the processes did not meet; on all ranks.
    """

    def __init__(
        self,
        context: SaveContext,
        caller: Ranks,
        *,
        max_in_flight: int = 1,
        when_busy: WhenBusy = WhenBusy.WAIT,
        timeout_seconds: float = 3600.0,
        phase_timeout_seconds: float | None = None,
        niceness: int = 0,
    ) -> None:
        self._context = dataclasses.replace(context, ranks=Ranks())
        self._caller = caller
        self._max_in_flight = max_in_flight
        self._when_busy = when_busy
        self._timeout_seconds = timeout_seconds
        self._phase_timeout_seconds = phase_timeout_seconds
        self._niceness = niceness
        self._flights: deque[_Flight] = deque()
        self._idle = [_Slot(number) for number in range(max_in_flight)]
        self._last_iteration = 0
        self._crew = _Crew(caller.rank)
        error: BaseException | None = None
        try:
            pickle.dumps(self._context)
        except Exception as caught:  # noqa: BLE001 - whatever a user's writer raises; told to all ranks as this
            error = ConfigError(
                f"can't save in a background process: the storage writer can't be handed to one ({caught}); set "
                "async_mode to 'async' or 'disabled'"
            )
        caller.confirm(error)
        self._start()

    def make_room(self, iteration: int) -> tuple[list[SaveOutcome], bool]:
        """See `Saver`. Processes that have ended are replaced here."""
        self._last_iteration = iteration
        full = len(self._flights) >= self._max_in_flight
        busy = full and self._flights[0].outcome is None
        ended, busy_anywhere = self._caller.largest([bool(self._crew.ended), busy])
        if busy_anywhere and not ended and self._when_busy is not WhenBusy.WAIT:
            others, url = [flight.iteration for flight in self._flights], self._context.save_dir.redacted
            if self._when_busy is WhenBusy.ERROR:
                raise busy_error(iteration, others, url)
            say_busy(iteration, others, url)
            return [], False
        if ended:
            return self._replace(), True
        outcomes = []
        while len(self._flights) >= self._max_in_flight:
            outcomes.append(self._land())
        if any(outcome.error is not None for outcome in outcomes):
            outcomes += self._replace_ended()
        return outcomes, True

    def submit(self, request: SaveRequest) -> list[SaveOutcome]:
        """See `Saver`. Returns when the copies have begun; the order is sent when they are complete."""
        slot = self._idle.pop()
        staged: LocalStep | None = None
        error = request.error
        if error is None and request.step is not None:
            try:
                staged = stage_step(request.step, slot.arena)
            except BaseException as caught:  # noqa: BLE001 - brought to the agreement, which raises it on all ranks
                error = caught
        try:
            self._caller.confirm(error)
        except BaseException:
            self._idle.append(slot)
            raise
        if staged is None:
            raise RuntimeError("there is neither a step nor an error")
        flight = _Flight(next(_numbers), request.iteration, slot, time.monotonic())
        self._flights.append(flight)
        send = functools.partial(self._send, self._crew, flight, staged, moves_latest=request.moves_latest)
        if slot.arena.is_pending:
            flight.sender = threading.Thread(target=send, name=f"dcpfs-order-{flight.number}")
            flight.sender.start()
        else:
            send()
        return []

    def settle(self) -> list[SaveOutcome]:
        """See `Saver`."""
        outcomes = []
        while self._flights:
            outcomes.append(self._land())
        return outcomes + self._replace_ended()

    def wait_for_staging(self) -> None:
        """See `Saver`. Copies of host memory are complete when `submit` returns."""
        for flight in self._flights:
            flight.slot.arena.wait()

    def failure(self) -> BaseException | None:
        """See `Saver`."""
        crew = self._crew
        if crew.ended and not self._flights:
            return crew.error("nothing was being saved")
        known = (flight.outcome for flight in self._flights)
        return next((each.error for each in known if each is not None and each.error is not None), None)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """See `Saver`."""
        return tuple(flight.iteration for flight in self._flights if flight.outcome is None)

    @property
    def pid(self) -> int | None:
        """Process id of this rank's process."""
        return None if self._crew.process is None else self._crew.process.pid

    def drain(self, timeout_seconds: float) -> list[BaseException]:
        """See `Saver`."""
        stop_seconds = time.monotonic() + timeout_seconds
        errors: list[BaseException] = []
        for flight in self._flights:
            flight.done.wait(max(0.0, stop_seconds - time.monotonic()))
            error = unsettled_error(flight.iteration, flight.outcome, timeout_seconds)
            if error is not None:
                errors.append(error)
        return errors

    def close(self) -> None:
        """See `Saver`. Saves in flight are waited for: their process ends when it has done them."""
        for flight in self._flights:
            flight.done.wait()
        self._stop()
        for slot in (*self._idle, *(flight.slot for flight in self._flights)):
            slot.arena.release()
            slot.close()
        self._flights.clear()
        self._idle.clear()

    # --- within

    def _send(self, crew: _Crew, flight: _Flight, staged: LocalStep, *, moves_latest: bool) -> None:
        slot = flight.slot
        crew.watch(flight)
        slot.arena.wait()
        if flight.done.is_set() or crew.process is None:
            return
        block = slot.block
        is_new = not slot.is_known
        order = encode_order(
            staged,
            number=flight.number,
            slot=slot.number,
            block_bytes=block.size_bytes if block is not None and is_new else None,
            sends_plans=crew.known_digest != staged.digest,
            moves_latest=moves_latest,
        )
        try:
            crew.process.send(order, [block.descriptor] if block is not None and is_new else [])
        except ChannelClosedError:
            return  # the reading thread learns why, and lands the flight
        slot.is_known = True
        crew.known_digest = staged.digest

    def _land(self) -> SaveOutcome:
        """Wait for the oldest save, and agree about what became of it. Collective."""
        flight = self._flights.popleft()
        if flight.sender is not None:
            flight.sender.join()
        flight.done.wait()
        self._idle.append(flight.slot)
        outcome = flight.outcome
        if outcome is None:
            raise RuntimeError(f"the save of iteration {flight.iteration} ended without an outcome")
        try:
            self._caller.confirm(outcome.error)
        except BaseException as error:  # noqa: BLE001 - handed to the caller as the outcome
            if error is not outcome.error:
                return dataclasses.replace(outcome, report=None, error=error)
        return outcome

    def _replace_ended(self) -> list[SaveOutcome]:
        """New processes, where one has ended on any rank. Collective."""
        (ended,) = self._caller.largest([bool(self._crew.ended)])
        return self._replace() if ended else []

    def _replace(self) -> list[SaveOutcome]:
        """What became of everything in flight, and new processes on all ranks. Collective."""
        idle = not self._flights
        outcomes = []
        while self._flights:
            outcomes.append(self._land())
        if idle:
            try:
                self._caller.agree(self._crew.error("nothing was being saved") if self._crew.ended else None)
            except CheckpointError as error:
                outcomes.append(SaveOutcome(self._last_iteration, None, error, 0.0))
        if all(outcome.error is None for outcome in outcomes):
            _logger.warning("a background process has ended after its save: all are replaced")
        self._stop()
        self._crew = _Crew(self._caller.rank)
        for slot in self._idle:
            slot.is_known = False
        self._start()
        return outcomes

    def _start(self) -> None:
        """Start a process on each rank, and have them meet. Collective."""
        crew, caller = self._crew, self._caller
        rendezvous = Rendezvous.open(caller)
        try:
            error: BaseException | None = None
            try:
                crew.process = BackgroundProcess(
                    _TARGET,
                    name=f"the background process of rank {caller.rank}",
                    on_message=crew.hear,
                    on_end=crew.end,
                    niceness=self._niceness,
                )
                meeting = Meeting(
                    rendezvous.address,
                    caller.rank,
                    caller.world_size,
                    self._timeout_seconds,
                    self._phase_timeout_seconds,
                    self._context,
                    os.getpid(),
                )
                descriptor = rendezvous.descriptor
                crew.process.send(meeting, [] if descriptor is None else [descriptor])
                self._expect(crew, crew.started, "did not start")
            except BaseException as caught:  # noqa: BLE001 - brought to the agreement, which raises it on all ranks
                error = caught
            self._confirm_start(error)
            try:
                self._expect(crew, crew.joined, "did not meet those of the other ranks")
            except BaseException as caught:  # noqa: BLE001 - brought to the agreement, which raises it on all ranks
                error = caught
            self._confirm_start(error)
        finally:
            rendezvous.close()

    def _confirm_start(self, error: BaseException | None) -> None:
        try:
            self._caller.confirm(error)
        except BaseException:
            self._stop()
            raise

    def _expect(self, crew: _Crew, event: threading.Event, failing: str) -> None:
        if not event.wait(_START_SECONDS):
            raise CheckpointError(
                f"can't save in the background: the process of rank {crew.rank} {failing} within {_START_SECONDS:.0f} "
                "s; set async_mode to 'async' to go on without one",
                rank=crew.rank,
            )
        if crew.ended:
            raise CheckpointError(
                f"can't save in the background: {crew.ended} before it {failing.removeprefix('did not ')}; set "
                "async_mode to 'async' to go on without one",
                rank=crew.rank,
            )
        if crew.join_error is not None:
            raise crew.join_error

    def _stop(self) -> None:
        if self._crew.process is not None:
            self._crew.process.stop(grace_seconds=0.0 if self._crew.ended else _GRACE_SECONDS)
