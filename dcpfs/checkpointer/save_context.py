"""What a save is given beside the state, and what it gives back.

Problem: whoever saves (the trainer, a thread, another process) needs the same dozen settings, some of which must not
leave the process.

Way taken: one value without the ranks' group can be pickled; the process that saves puts its own in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch.distributed.checkpoint.storage import StorageWriter

from dcpfs.checkpointer.choices import DedupPolicy, OnExisting
from dcpfs.checkpointer.step_plan import PlanCache
from dcpfs.config import RetryConfig, TransferConfig, Trust
from dcpfs.ranks import Ranks
from dcpfs.storage.location import Location
from dcpfs.storage.store import Store

__all__ = ["MakeWriter", "SaveContext", "StepReport", "Sweep"]

MakeWriter = Callable[[Location], StorageWriter]
"""Makes a storage writer for the directory of a key: what a trainer's own `get_storage_writer` gives."""

Sweep = Callable[[Store, int], None]
"""What the coordinator does after the commit of an iteration: retention. Never raises."""


@dataclass
class SaveContext:
    """What stays the same from save to save. One save at a time; belongs to whoever saves.

    Attributes:
        save_dir: Where steps lie.
        ranks: Who saves together, on a group that nobody else uses.
        on_existing: About a step that stands already.
        dedup: Who writes what several ranks hold.
        make_writer: Makes a key's storage writer; None: dcpfs's own.
        transfer: How bytes are moved.
        retry: When requests are tried again.
        trust: `Trust.PICKLE`: objects that a default load refuses are saved all the same.
        sweep: Called by the coordinator after the verdict.
        still_wanted: Asked before and right before the commit; raises when nobody waits for the save any more.
        plans: Of the last exchange.
        global_rank: This process's rank in the whole job, by which its own files are named; None: that of ``ranks``.
        file_rank: Global rank whose files this rank reads on a load; None: its own.
        is_shared_place: A rank beside the coordinator has found there what that one had put; not asked again.
    """

    save_dir: Location
    ranks: Ranks
    on_existing: OnExisting = OnExisting.OVERWRITE
    dedup: DedupPolicy = DedupPolicy.BALANCED
    make_writer: MakeWriter | None = None
    transfer: TransferConfig = field(default_factory=TransferConfig)
    retry: RetryConfig = field(default_factory=RetryConfig)
    trust: Trust = Trust.ALLOWLIST
    sweep: Sweep | None = None
    still_wanted: Callable[[], None] | None = None
    plans: PlanCache = field(default_factory=PlanCache)
    global_rank: int | None = None
    file_rank: int | None = None
    is_shared_place: bool = False


@dataclass(frozen=True)
class StepReport:
    """What the save of a step did.

    Attributes:
        iteration: Of the step.
        save_id: Of the save.
        committed: False: the step stood already and was left as it was.
        seconds: From the call to the verdict.
        bytes_written: By this rank.
        requests: Sent by this rank for its data: parts, and small objects.
        planned: Plans were exchanged.
    """

    iteration: int
    save_id: str
    committed: bool
    seconds: float
    bytes_written: int
    requests: int
    planned: bool
