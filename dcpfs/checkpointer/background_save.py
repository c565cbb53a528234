"""What the background process of a rank does: meet the others, save what it is told to, end when nobody waits.

Problem: a process that outlives its trainer publishes a step beside the next incarnation of the job; one that ends with
the launcher's SIGTERM loses the save that the SIGTERM asked for; one whose failure can't be pickled reports nothing
(cases 42, 54).

Way taken: orders are read by a thread, and carried out by the main one, in order, with the same `save_step` as in the
trainer. The end of the channel lets it finish what it has and end. The end of the parent is asked for right before the
commit, and ends it: at the coordinator right before the manifest, on any other rank when its data is written. A trainer
that dies after that takes nothing with it: the step is whole, and is committed. An error goes back as an error of
dcpfs, with its traceback as text.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import queue
import sys
import threading
from collections.abc import Mapping
from datetime import timedelta

from torch.distributed.checkpoint.planner import SavePlan

from dcpfs.background.channel import Channel, ChannelClosedError
from dcpfs.background.parent import ParentWatch
from dcpfs.background.shared_block import SharedBlock
from dcpfs.checkpointer.linked_ranks import LinkedRanks
from dcpfs.checkpointer.phases import Phases
from dcpfs.checkpointer.save_context import SaveContext
from dcpfs.checkpointer.save_orders import Joined, Meeting, SaveDone, SaveOrder, Started, decode_step
from dcpfs.checkpointer.saver import SaveRequest, run_save
from dcpfs.errors import CheckpointError
from dcpfs.ranks import Ranks, portable_error
from dcpfs.storage.contacts import Contact

__all__ = ["serve"]

_logger = logging.getLogger(__name__)

_ABANDONED = 3
_ORPHAN_SECONDS = 10.0
"""What a save without a trainer gets to take back what it wrote."""


def serve(channel: Channel) -> None:
    """Carry out orders until the channel closes. The main thread of a background process."""
    message, descriptors = channel.receive()
    if not isinstance(message, Meeting):
        raise TypeError(f"the first order must be a Meeting, and is a {type(message).__name__}")
    logging.basicConfig(
        level=logging.getLogger().getEffectiveLevel(),
        format=f"%(asctime)s %(name)s %(levelname)s [save process of rank {message.rank}] %(message)s",
    )
    channel.send(Started(os.getpid()))
    orders: queue.SimpleQueue[tuple[SaveOrder, list[int]] | BaseException] = queue.SimpleQueue()
    worker = _Worker(message, channel)
    watch = ParentWatch(message.parent_pid, worker.abandon)
    worker.watch = watch
    try:
        ranks = _meet(message, descriptors[0] if descriptors else None)
    except Exception as error:  # noqa: BLE001 - told to the parent, which raises it
        channel.send(Joined(portable_error(error, message.rank)))
        return
    worker.ranks = ranks
    channel.send(Joined())
    threading.Thread(target=_read, args=(channel, orders), name="dcpfs-orders", daemon=True).start()
    while worker.can_save:
        received = orders.get()
        if isinstance(received, ChannelClosedError):
            return
        if isinstance(received, BaseException):
            raise received
        worker.save(*received)


def _read(channel: Channel, orders: queue.SimpleQueue[tuple[SaveOrder, list[int]] | BaseException]) -> None:
    try:
        while True:
            order, descriptors = channel.receive()
            if not isinstance(order, SaveOrder):
                raise TypeError(f"a {type(order).__name__} is no order")
            orders.put((order, descriptors))
    except BaseException as error:  # noqa: BLE001 - handed to the main thread
        orders.put(error)


def _meet(meeting: Meeting, listener: int | None) -> Ranks:
    """Join the processes of the other ranks. Collective over them."""
    if meeting.world_size == 1:
        return Ranks()
    import torch.distributed as dist

    timeout = timedelta(seconds=meeting.timeout_seconds)
    store = dist.TCPStore(  # type: ignore[attr-defined]  # torch does not say that it exports it
        meeting.address.host,
        meeting.address.port,
        meeting.world_size,
        is_master=listener is not None,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener,
        use_libuv=True,
    )
    dist.init_process_group("gloo", store=store, rank=meeting.rank, world_size=meeting.world_size, timeout=timeout)
    return LinkedRanks(meeting.rank, meeting.world_size, dist.group.WORLD, meeting.timeout_seconds)


class _Worker:
    """Carries out orders, one after another."""

    watch: ParentWatch

    def __init__(self, meeting: Meeting, channel: Channel) -> None:
        self._meeting = meeting
        self._channel = channel
        self._blocks: dict[int, SharedBlock] = {}
        self._plans: Mapping[str, SavePlan] = {}
        self._plans_digest: int | None = None
        self._context: SaveContext | None = None
        self._idle = threading.Event()
        self._idle.set()
        self.ranks: Ranks = Ranks()

    def abandon(self) -> None:
        """The parent has ended. A save at work finds that out before it commits, and takes back what it wrote.

        Where it hangs, the processes of other ranks that wait for this one are not kept waiting.
        """
        if self._idle.wait(_ORPHAN_SECONDS):
            _logger.warning("the trainer has ended, and so does its background process")
        else:
            _logger.error("the trainer has ended, and its save came to no end in %.0f s: giving up", _ORPHAN_SECONDS)
        sys.stderr.flush()
        os._exit(_ABANDONED)

    @property
    def can_save(self) -> bool:
        """Whether the processes of the other ranks can be reached, as far as is known."""
        return not (isinstance(self.ranks, LinkedRanks) and self.ranks.is_lost)

    def save(self, order: SaveOrder, descriptors: list[int]) -> None:
        """Carry out one order, and reply."""
        self._idle.clear()
        rank = self._meeting.rank
        try:
            if self._context is None:
                self._context = dataclasses.replace(
                    self._meeting.context, ranks=self.ranks, still_wanted=self._require_parent
                )
                if self._meeting.has_answered:
                    Contact(self._context.save_dir).note_answer()
            phases = Phases(
                rank=rank,
                deadline_seconds=self._meeting.phase_timeout_seconds,
                label=f"save of iteration {order.iteration}",
            )
            outcome = run_save(self._request_of(order, descriptors), self._context, phases)
            if outcome.error is not None:
                outcome = dataclasses.replace(outcome, error=portable_error(outcome.error, rank))
            lost = "" if self.can_save else f"the background process of rank {rank} can't reach those of other ranks"
            self._channel.send(SaveDone(order.number, outcome, lost))
        except ChannelClosedError:
            _logger.warning("nobody is told what became of iteration %d: the trainer is gone", order.iteration)
        finally:
            self._idle.set()

    def _request_of(self, order: SaveOrder, descriptors: list[int]) -> SaveRequest:
        try:
            if order.error is not None:
                raise order.error
            if order.plans is not None and order.step is not None:
                self._plans, self._plans_digest = order.plans, order.step.digest
            if order.block_bytes is not None:
                old = self._blocks.pop(order.slot, None)
                if old is not None:
                    old.close()
                self._blocks[order.slot] = SharedBlock(descriptors[0], order.block_bytes)
            if order.step is not None and order.step.digest != self._plans_digest:
                raise ValueError("the plans that are known are of another structure than what is to be saved")
            step = decode_step(order, self._plans, self._blocks[order.slot].tensor)
        except Exception as error:  # noqa: BLE001 - handed to the save, which tells all ranks
            return SaveRequest(order.iteration, None, error)
        return SaveRequest(order.iteration, step, None, order.moves_latest)

    def _require_parent(self) -> None:
        if self.watch.is_gone:
            raise CheckpointError(
                f"the trainer of rank {self._meeting.rank} ended while its step was being saved: it is not published",
                rank=self._meeting.rank,
            )
