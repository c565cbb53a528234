"""Plan the save of a step: all keys of a rank, without a collective."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from dcpfs.checkpointer.choices import DedupPolicy
from dcpfs.checkpointer.global_plan import GlobalPlan, plan_globally
from dcpfs.checkpointer.layout import check_key
from dcpfs.checkpointer.local_step import LocalKey, LocalStep, naming_key
from dcpfs.checkpointer.plan_cache import PlanCache
from dcpfs.checkpointer.plan_codec import decode_assigned, decode_local_plans, digest_keys, encode_local_plans
from dcpfs.checkpointer.result_codec import decode_results, encode_results
from dcpfs.config import Trust
from dcpfs.dcp.save_planner import PlannerData, SavePlanner

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
    relied_on: Sequence[str] = (),
    parameters: Mapping[str, Collection[str]] | None = None,
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
        relied_on: As `LocalStep.relied_on`.
        parameters: Key to `LocalKey.parameters`, where that is known.

    Raises:
        UnsupportedValueError: A value can't be stored exactly; names its key.
    """
    keys: dict[str, LocalKey] = {}
    for key, state in states.items():
        planner = SavePlanner(trust=trust, world_size=world_size)
        with naming_key(check_key(key)):
            planner.set_up_planner(dict(state))
            plan = planner.create_local_plan()
        notes = plan.planner_data
        digests = notes.digests if isinstance(notes, PlannerData) else {}
        keys[key] = LocalKey(key, plan, planner, digests, (parameters or {}).get(key))
    digest = digest_keys(keys, world_size=world_size, dedup=dedup)
    return LocalStep(
        iteration,
        keys,
        dict(rank_files or {}),
        digest,
        world_size,
        metric,
        dict(topology or {}),
        tuple(relied_on),
    )
