"""Plans as bytes: what ranks and coordinator send each other, for all keys at once."""

from __future__ import annotations

import pickle
from typing import cast

from torch.distributed.checkpoint.planner import SavePlan

from dcpfs.checkpointer.local_step import LocalStep

__all__ = ["decode_assigned", "decode_local_plans", "encode_local_plans"]


def encode_local_plans(step: LocalStep) -> bytes:
    """What a rank tells the coordinator."""
    return pickle.dumps({key: each.plan for key, each in step.keys.items()})


def decode_local_plans(data: bytes) -> dict[str, SavePlan]:
    """The plans of a rank."""
    return cast("dict[str, SavePlan]", pickle.loads(data))


def decode_assigned(data: bytes, step: LocalStep) -> dict[str, SavePlan]:  # noqa: ARG001
    """What this rank writes, by key."""
    return cast("dict[str, SavePlan]", pickle.loads(data)[1])


def exchange_id_of(data: bytes) -> int:
    """The id of the exchange that assigned this."""
    return int(pickle.loads(data)[0])
