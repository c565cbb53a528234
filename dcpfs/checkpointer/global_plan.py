"""Who writes what, for all keys and ranks at once. At the coordinator."""

from __future__ import annotations

import pickle
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import StorageWriter

from dcpfs.checkpointer.choices import DedupPolicy
from dcpfs.checkpointer.layout import TRAINER
from dcpfs.checkpointer.plan_codec import decode_local_plans
from dcpfs.dcp.flatten import STRUCTURE_ATTRIBUTE
from dcpfs.dcp.save_planner import DifferingValues, SavePlanner

__all__ = ["GlobalPlan", "plan_globally"]


@dataclass
class GlobalPlan:
    """What the coordinator decided, and what it needs to read the results of the ranks.

    Attributes:
        exchange_id: A random number above 0, the same for all ranks of one exchange.
        assigned: For each rank what `decode_assigned` takes.
        contents: Metadata of each key. Not to be changed: `metadata` makes copies.
    """

    exchange_id: int
    assigned: list[bytes]
    contents: dict[str, Metadata]

    def metadata(self) -> dict[str, Metadata]:
        """Metadata of each key, for one save to complete and write."""
        return {key: _copy(each) for key, each in self.contents.items()}

    def check_values(self, results: Sequence[bytes]) -> None:
        """Compare small values of all ranks, which results bring along.

        Raises:
            ReplicaMismatchError: Ranks disagree about a value of the trainer's.
        """


def plan_globally(
    all_ranks: Sequence[bytes], writers: Mapping[str, StorageWriter], dedup: DedupPolicy = DedupPolicy.BALANCED
) -> GlobalPlan:
    """Compare the ranks, choose who writes what, and list it. Coordinator.

    Args:
        all_ranks: Of each rank what `encode_local_plans` made.
        writers: Of each key; asked to prepare the global plan.
        dedup: Who writes what several ranks hold.

    Raises:
        ReplicaMismatchError: Ranks disagree about a key that they share, or don't save the same keys.
        UnsupportedValueError: The shards of a tensor don't cover it.
    """
    plans = [decode_local_plans(each) for each in all_ranks]
    exchange_id = secrets.randbits(62) | 1
    chosen: list[dict[str, SavePlan]] = [{} for _ in plans]
    contents: dict[str, Metadata] = {}
    for key, writer in writers.items():
        values = DifferingValues.REFUSE if key == TRAINER else DifferingValues.WARN
        final, contents[key] = SavePlanner(differing_values=values).create_global_plan([each[key] for each in plans])
        for mine, plan in zip(chosen, writer.prepare_global_plan(final), strict=True):
            mine[key] = plan
    return GlobalPlan(exchange_id, [pickle.dumps((exchange_id, each)) for each in chosen], contents)


def _copy(metadata: Metadata) -> Metadata:
    copy = Metadata(dict(metadata.state_dict_metadata), planner_data=dict(metadata.planner_data))
    setattr(copy, STRUCTURE_ATTRIBUTE, getattr(metadata, STRUCTURE_ATTRIBUTE))
    return copy
