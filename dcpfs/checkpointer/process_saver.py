"""Saves in a process beside the trainer.

Problem: a thread that saves shares Python's lock with training, and slows it. A process that is started at the first
save fails in the middle of training; one that dies is noticed when a pipe breaks, and never comes back (cases 51, 53).

Way taken: a process per rank, started with the checkpointer, told where to meet the others. Values go through memory
that both sides map (`Arena` in a `SharedBlock`), everything else through a channel, each save with a number of its own.
Whatever happens to a process shows as the outcome of its save. When one has ended, on any rank, all are replaced before
the next save, since the processes' own group is broken with it.

Flow: see `flights`; here an order is sent when the copies are complete → the process: `save_step` → its reply.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import os
import pickle
import threading
from collections.abc import Callable

import torch

from dcpfs.background.arena import Arena
from dcpfs.background.channel import ChannelClosedError
from dcpfs.background.copying import Copier, copier_for
from dcpfs.background.process import BackgroundProcess
from dcpfs.background.rendezvous import Rendezvous
from dcpfs.background.shared_block import SharedBlock
from dcpfs.checkpointer.choices import WhenBusy
from dcpfs.checkpointer.flights import Flight, FlightSaver
from dcpfs.checkpointer.local_step import LocalStep
from dcpfs.checkpointer.save_context import SaveContext
from dcpfs.checkpointer.save_orders import Joined, Meeting, SaveDone, SaveOrder, Started, encode_order
from dcpfs.checkpointer.saver import Saver
from dcpfs.errors import CheckpointError, ConfigError
from dcpfs.ranks import Ranks, portable_error
from dcpfs.storage.contacts import Contact

__all__ = ["ProcessSaver"]

_logger = logging.getLogger(__name__)

_TARGET = "dcpfs.checkpointer.background_save:serve"
_START_SECONDS = 300.0
"""Importing torch from a busy shared filesystem takes a minute or two."""
_LOOK_SECONDS = 0.25
"""How often ranks that wait for a start tell each other how it goes."""
_GRACE_SECONDS = 30.0
_numbers = itertools.count(1)
"""Of saves, over all savers of this process: a reply can't be taken for another's (case 59)."""


class _SharedArena(Arena):
    """An arena in a block that both processes map."""

    def __init__(self, number: int, choose_copier: Callable[[torch.device], Copier]) -> None:
        super().__init__(self._share, choose_copier)
        self.number = number
        self.block: SharedBlock | None = None
        self.is_known = False

    def release(self) -> None:
        """See `Arena`."""
        super().release()
        block, self.block, self.is_known = self.block, None, False
        if block is not None:
            block.discard()
            block.close()

    def _share(self, size_bytes: int) -> torch.Tensor:
        self.block = SharedBlock.create(size_bytes)
        return self.block.tensor


class _Crew:
    """One start of this rank's process: what has been heard of it. Told by the reading thread."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.process: BackgroundProcess | None = None
        self.ended = ""
        self.started = threading.Event()
        self.joined = threading.Event()
        self.join_error: BaseException | None = None
        self.known_digest: int | None = None
        self._flights: dict[int, Flight] = {}
        self._lock = threading.Lock()

    def hear(self, message: object) -> None:
        """Take a message in. A reply to a save that nobody waits for is none."""
        if isinstance(message, Started):
            self.started.set()
        elif isinstance(message, Joined):
            self.join_error = message.error
            self.joined.set()
        elif isinstance(message, SaveDone):
            with self._lock:
                flight = self._flights.pop(message.number, None)
                self.ended = self.ended or message.lost
            if message.outcome.error is not None:
                self._forget(flight)
            if flight is not None:
                flight.land(message.outcome)

    def _forget(self, flight: Flight | None) -> None:
        """After a failure: how far the process came with plans and memory that it was told of is not known."""
        self.known_digest = None
        if flight is not None and isinstance(flight.arena, _SharedArena):
            flight.arena.is_known = False

    def end(self, reason: str) -> None:
        """It has ended: so have its saves."""
        with self._lock:
            self.ended = self.ended or reason
            lost = list(self._flights.values())
            self._flights.clear()
        self.started.set()
        self.joined.set()
        for flight in lost:
            flight.fail(self.loss(f"iteration {flight.iteration} was not saved"))

    def loss(self, what: str) -> CheckpointError:
        """The error of an end."""
        return CheckpointError(f"{what}: {self.ended}; it is replaced, and the next save can work", rank=self.rank)

    def watch(self, number: int, flight: Flight) -> None:
        """Expect a reply; when the process has ended already, there will be none."""
        with self._lock:
            if not self.ended:
                self._flights[number] = flight
                return
        flight.fail(self.loss(f"iteration {flight.iteration} was not saved"))


class ProcessSaver(FlightSaver):
    """Copies the state in the calling thread, and has a process save the copy. All ranks have one. See `Saver`.

    Args:
        context: Where and how; its ranks are not used, since the processes have a group of their own.
        caller: The ranks of the calling thread.
        max_in_flight: Saves at work at once, each with a copy of the state.
        when_busy: What to do when so many are.
        timeout_seconds: Of one exchange between the processes.
        phase_timeout_seconds: When a phase of a save is reported.
        niceness: How much less CPU the process gets than training, 0 to 19.
        stand_in: Saves while no process can be started in the place of a lost one; None: that is an error.
        choose_copier: Says who copies tensors of a device.

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
        stand_in: Saver | None = None,
        choose_copier: Callable[[torch.device], Copier] = copier_for,
    ) -> None:
        numbers = itertools.count()
        super().__init__(
            context.save_dir.redacted,
            caller,
            lambda: _SharedArena(next(numbers), choose_copier),
            max_in_flight=max_in_flight,
            when_busy=when_busy,
            stand_in=stand_in,
        )
        self._context = dataclasses.replace(context, ranks=Ranks())
        self._timeout_seconds = timeout_seconds
        self._phase_timeout_seconds = phase_timeout_seconds
        self._niceness = niceness
        self._crew = _Crew(caller.rank)
        self._sender: threading.Thread | None = None
        caller.confirm(_why_not_portable(self._context))
        self._start()

    @property
    def pid(self) -> int | None:
        """Process id of this rank's process."""
        return None if self._crew.process is None else self._crew.process.pid

    def _launch(self, flight: Flight, step: LocalStep, *, moves_latest: bool) -> None:
        number = next(_numbers)
        self._crew.watch(number, flight)
        before = self._sender if self._sender is not None and self._sender.is_alive() else None
        send = functools.partial(self._send, self._crew, number, flight, step, before, moves_latest=moves_latest)
        if flight.arena.is_pending or before is not None:
            self._sender = threading.Thread(target=send, name=f"dcpfs-order-{number}", daemon=True)
            self._sender.start()
        else:
            send()

    def _send(
        self,
        crew: _Crew,
        number: int,
        flight: Flight,
        step: LocalStep,
        before: threading.Thread | None,
        *,
        moves_latest: bool,
    ) -> None:
        """Send the order when the copies are complete. Orders go out in the order of the saves, on all ranks."""
        arena = flight.arena
        if before is not None:
            before.join()
        if flight.done.is_set() or crew.process is None or not isinstance(arena, _SharedArena):
            return
        try:
            descriptors: list[int] = []
            try:
                arena.wait()
                block = None if arena.is_known else arena.block
                order = encode_order(
                    step,
                    number=number,
                    slot=arena.number,
                    block_bytes=block.size_bytes if block is not None else None,
                    sends_plans=crew.known_digest != step.digest,
                    moves_latest=moves_latest,
                )
                message = pickle.dumps(order, protocol=pickle.HIGHEST_PROTOCOL)
                descriptors = [block.descriptor] if block is not None else []
            except Exception as error:  # noqa: BLE001 - told to the process, and by it to those of the other ranks
                report = portable_error(error, crew.rank)
                failed = SaveOrder(number, arena.number, flight.iteration, error=report)
                crew.process.send(pickle.dumps(failed))
                return
            arena.is_known = True  # before: a reply may say that it is not so
            crew.known_digest = step.digest
            crew.process.send(message, descriptors)
        except ChannelClosedError:
            return  # the reading thread learns why, and lands the flight

    def _loss(self) -> CheckpointError | None:
        return self._crew.loss("can't save in the background") if self._crew.ended else None

    def _replace_crew(self) -> None:
        _logger.warning("rank %d: the background processes of all ranks are replaced", self._caller.rank)
        self._dismiss_crew(at_once=False)
        for arena in self._idle:
            if isinstance(arena, _SharedArena):
                arena.is_known = False
        self._crew = _Crew(self._caller.rank)
        self._start()

    def _dismiss_crew(self, *, at_once: bool) -> None:
        process = self._crew.process
        if process is not None:
            process.stop(grace_seconds=0.0 if at_once else _GRACE_SECONDS)

    # --- starting

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
                    Contact(self._context.save_dir).has_answered,
                )
                descriptor = rendezvous.descriptor
                crew.process.send(pickle.dumps(meeting), [] if descriptor is None else [descriptor])
            except Exception as caught:  # noqa: BLE001 - brought to the agreement, which raises it on all ranks
                error = caught
            try:
                caller.confirm(self._await(crew.started, error, "did not start"))
                caller.confirm(self._await(crew.joined, None, "did not meet those of the other ranks"))
            except BaseException as failure:
                self._dismiss_crew(at_once=True)
                crew.end(f"the background process did not start ({failure})")
                raise
        finally:
            rendezvous.close()

    def _await(self, event: threading.Event, error: BaseException | None, failing: str) -> BaseException | None:
        """Wait until the process of each rank has come so far, or that of any has failed: why. Collective."""
        crew, rounds = self._crew, int(_START_SECONDS / _LOOK_SECONDS)
        for round_ in range(rounds + 1):
            if error is None and event.wait(_LOOK_SECONDS):
                error = self._start_error(failing)
            elif error is None and round_ == rounds:
                error = CheckpointError(
                    f"can't save in the background: the process of rank {crew.rank} {failing} within "
                    f"{_START_SECONDS:.0f} s; set async_mode to 'async' to go on without one",
                    rank=crew.rank,
                )
            failed, pending = self._caller.largest([error is not None, not event.is_set()])
            if failed or not pending:
                break
        return error

    def _start_error(self, failing: str) -> BaseException | None:
        crew = self._crew
        if crew.join_error is not None:
            return crew.join_error
        if crew.ended:
            return CheckpointError(
                f"can't save in the background: {crew.ended} before it {failing.removeprefix('did not ')}; set "
                "async_mode to 'async' to go on without one",
                rank=crew.rank,
            )
        return None


def _why_not_portable(context: SaveContext) -> ConfigError | None:
    reason = ""
    try:
        if b"__main__" in pickle.dumps(context):
            reason = "it belongs to the script that runs, which the process does not run: put it into a module"
    except Exception as error:  # noqa: BLE001 - whatever a user's writer raises; told to all ranks as this
        reason = f"{type(error).__name__}: {error}"
    if not reason:
        return None
    return ConfigError(
        f"can't save in a background process: the storage writer can't be handed to one ({reason}); or set async_mode "
        "to 'async' or 'disabled'"
    )
