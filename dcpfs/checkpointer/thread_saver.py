"""Saves in a thread beside the trainer.

Problem: a thread that Python waits for when the process ends can hang that end for ever; one that it does not wait for
is stopped in the middle of a save. And executors refuse work as soon as the interpreter is on its way out, so a save
that is only then waited for fails (case 48).

Way taken: a daemon thread per save, after the one before. Who waits for it, and for how long, is decided elsewhere:
a collective call, or the exit hook, which runs while executors still work. When the group of the threads is lost, after
a time-out say, while that of the callers works, a new one is made.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable

from dcpfs.background.arena import Arena
from dcpfs.checkpointer.choices import WhenBusy
from dcpfs.checkpointer.flights import Flight, FlightSaver
from dcpfs.checkpointer.groups import close_group
from dcpfs.checkpointer.linked_ranks import LinkedRanks
from dcpfs.checkpointer.local_step import LocalStep
from dcpfs.checkpointer.save_context import SaveContext
from dcpfs.checkpointer.saver import MakePhases, SaveRequest, run_save
from dcpfs.errors import CheckpointError
from dcpfs.ranks import Ranks

__all__ = ["ThreadSaver"]


class ThreadSaver(FlightSaver):
    """Copies the state in the calling thread, and saves the copy in another. See `Saver`.

    Args:
        context: Where and with whom; its group is the saver's own.
        make_phases: Phases for the save of an iteration.
        caller: The ranks of the calling thread, on another group.
        make_ranks: Makes another group for saves, collectively; None: a lost one is not replaced.
        max_in_flight: Saves at work at once, each with a copy of the state.
        when_busy: What to do when so many are.
        make_arena: Makes what a copy lies in.
    """

    def __init__(
        self,
        context: SaveContext,
        make_phases: MakePhases,
        caller: Ranks,
        *,
        make_ranks: Callable[[], Ranks] | None = None,
        max_in_flight: int = 1,
        when_busy: WhenBusy = WhenBusy.WAIT,
        make_arena: Callable[[], Arena] = Arena,
    ) -> None:
        url = context.save_dir.redacted
        super().__init__(url, caller, make_arena, max_in_flight=max_in_flight, when_busy=when_busy)
        self._context = context
        self._make_phases = make_phases
        self._make_ranks = make_ranks
        self._own: Ranks | None = None
        self._thread: threading.Thread | None = None

    def _launch(self, flight: Flight, step: LocalStep, *, moves_latest: bool) -> None:
        before, context, phases = self._thread, self._context, self._make_phases(flight.iteration)

        def save() -> None:
            if before is not None:
                before.join()
            error: BaseException | None = None
            try:
                flight.arena.wait()
            except BaseException as caught:  # noqa: BLE001 - handed to the save, which tells all ranks
                error = caught
            request = SaveRequest(flight.iteration, step if error is None else None, error, moves_latest)
            flight.land(run_save(request, context, phases))

        self._thread = threading.Thread(target=save, name=f"dcpfs-save-{flight.iteration}", daemon=True)
        self._thread.start()

    def _loss(self) -> CheckpointError | None:
        ranks = self._context.ranks
        if not isinstance(ranks, LinkedRanks) or not ranks.is_lost or self._make_ranks is None:
            return None
        return CheckpointError(f"can't save to {self._url}: {ranks.link.lost}", rank=ranks.rank)

    def _replace_crew(self) -> None:
        if self._make_ranks is None:
            raise RuntimeError("no group of these threads is ever found lost")
        if self._own is not None:
            close_group(self._own)
        self._own = self._make_ranks()
        self._context = dataclasses.replace(self._context, ranks=self._own)

    def _dismiss_crew(self, *, at_once: bool) -> None:
        if self._thread is not None and not at_once:
            self._thread.join()
        if self._own is not None and not at_once:
            close_group(self._own)
