"""Plan the save of a step: all keys of a rank, without a collective."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from dcpfs.checkpointer.choices import DedupPolicy
from dcpfs.checkpointer.global_plan import GlobalPlan, plan_globally
from dcpfs.checkpointer.local_step import LocalKey, LocalStep
from dcpfs.checkpointer.plan_cache import PlanCache
from dcpfs.checkpointer.plan_codec import decode_assigned, decode_local_plans, encode_local_plans
from dcpfs.checkpointer.result_codec import decode_results, encode_results
from dcpfs.config import Trust
from dcpfs.dcp.save_planner import SavePlanner

__all__ = [
    "DedupPolicy",
    "GlobalPlan",
    "LocalKey",
    "LocalStep",
    "PlanCache",
    "decode_assigned",
    "decode_local_plans",
    "decode_results",
    "encode_local_plans",
    "encode_results",
    "plan_globally",
    "plan_step",
]


def plan_step(
    iteration: int,
    states: Mapping[str, Mapping[str, object]],
    *,
    rank_files: Mapping[str, bytes] | None = None,
    world_size: int = 1,
    trust: Trust = Trust.ALLOWLIST,
    dedup: DedupPolicy = DedupPolicy.BALANCED,
    metric: float | None = None,
    topology: Mapping[str, object] | None = None,
) -> LocalStep:
    """Plan this rank's part of a step. Local: no collective.

    Args:
        iteration: Of the step.
        states: Key to nested state. Tensors are referred to, not copied.
        rank_files: Contents of this rank's own files, by name relative to the step.
        world_size: Number of ranks that save.
        trust: `Trust.PICKLE`: objects that a default load refuses are saved all the same.
        dedup: Who writes what several ranks hold.
        metric: What `keep_best` compares.
        topology: Mesh of the world, for the manifest.

    Raises:
        UnsupportedValueError: A value can't be stored exactly; names its key.
    """
    keys: dict[str, LocalKey] = {}
    text = [f"{world_size} {dedup.value}"]
    for key, state in states.items():
        planner = SavePlanner(trust=trust)
        planner.set_up_planner(dict(state))
        plan = planner.create_local_plan()
        keys[key] = LocalKey(key, plan, planner)
        text.append(f"{key} {plan.planner_data.structure} {plan.items}")
    digest = int.from_bytes(hashlib.blake2b("\n".join(text).encode(errors="backslashreplace"), digest_size=8).digest())
    return LocalStep(
        iteration, keys, dict(rank_files or {}), digest >> 1, world_size, metric, dict(topology or {})
    )
