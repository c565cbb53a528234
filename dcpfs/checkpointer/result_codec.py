"""Results of a rank's writes as bytes."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import cast

from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from dcpfs.checkpointer.global_plan import GlobalPlan
from dcpfs.checkpointer.local_step import LocalStep

__all__ = ["decode_results", "encode_results"]


def encode_results(
    results: Mapping[str, Sequence[WriteResult]], step: LocalStep, assigned: Mapping[str, SavePlan]
) -> bytes:
    """What a rank tells the coordinator after writing.

    Args:
        results: By key.
        step: Its small values are compared over ranks.
        assigned: What it was to write.
    """
    return pickle.dumps({key: list(each) for key, each in results.items()})


def decode_results(data: bytes, planned: GlobalPlan, rank: int) -> dict[str, list[WriteResult]]:
    """The results of one rank, by key."""
    return cast("dict[str, list[WriteResult]]", pickle.loads(data))
