"""What a trainer and its background process say to each other.

Problem: a reply that belongs to an earlier save, or to an earlier process, finishes a save that has only begun (case
59). An order that holds tensors costs a descriptor for each (case 52), one that holds the whole plan each time costs
training the time to pickle it.

Way taken: values with a number that is never used twice. Tensors are named by the order of the plan alone: both sides
cut the same block in the same way. A plan is sent once for as long as the structure of the state stays the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType

from dcpfs.background.arena import Layout, cut_block
from dcpfs.background.rendezvous import Address
from dcpfs.checkpointer.local_step import LocalKey, LocalStep
from dcpfs.checkpointer.save_context import SaveContext
from dcpfs.checkpointer.saver import SaveOutcome
from dcpfs.checkpointer.staging import StagedValues, place_of
from dcpfs.errors import DcpfsError, UnsupportedValueError

__all__ = ["Joined", "Meeting", "SaveDone", "SaveOrder", "Started", "decode_step", "encode_order", "layout_of_plans"]


@dataclass(frozen=True)
class Meeting:
    """First order: with whom to save, and where. The coordinator's comes with the bound socket.

    Attributes:
        address: Where the processes of all ranks meet.
        rank: Of this process.
        world_size: Number of processes.
        timeout_seconds: Of one exchange.
        phase_timeout_seconds: When a phase is reported.
        context: With no ranks in it.
        parent_pid: Whose process it is.
        has_answered: The store has answered the parent before.
    """

    address: Address
    rank: int
    world_size: int
    timeout_seconds: float
    phase_timeout_seconds: float | None
    context: SaveContext
    parent_pid: int
    has_answered: bool = False


@dataclass(frozen=True)
class Started:
    """The process runs, and has what it needs."""

    pid: int


@dataclass(frozen=True)
class Joined:
    """It has met the others, or could not.

    Attributes:
        error: Why not.
    """

    error: BaseException | None = None


@dataclass(frozen=True)
class SaveOrder:
    """Save a step. A new block of memory comes with the order as a descriptor.

    Attributes:
        number: Of the save; a reply bears it.
        slot: Which block holds the tensors.
        iteration: Of the step.
        step: The step, its keys without values, and without plans when the process has them; None with an ``error``.
        block_bytes: Size of the new block, or None: the one that this slot has.
        plans: Plans by key, or None: those of the last order.
        objects: Key to FQN to encoded entry.
        moves_latest: As for `save_step`.
        error: Why this rank has nothing to save, for all ranks to learn.
    """

    number: int
    slot: int
    iteration: int
    step: LocalStep | None = None
    block_bytes: int | None = None
    plans: Mapping[str, SavePlan] | None = None
    objects: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict)
    moves_latest: bool = True
    error: DcpfsError | None = None


@dataclass(frozen=True)
class SaveDone:
    """What became of a save.

    Attributes:
        number: Of the save.
        outcome: Its error is one that can be pickled.
        lost: Why the process can save no more, and ends; empty as a rule.
    """

    number: int
    outcome: SaveOutcome
    lost: str = ""


def encode_order(
    staged: LocalStep, *, number: int, slot: int, block_bytes: int | None, sends_plans: bool, moves_latest: bool
) -> SaveOrder:
    """An order for a staged step, whose values are `StagedValues`."""
    objects: dict[str, Mapping[str, bytes]] = {}
    for key, local in staged.keys.items():
        if not isinstance(local.values, StagedValues):
            raise UnsupportedValueError(f"can't save {key!r} in the background: its values were not copied")
        objects[key] = local.values.objects
    empty = StagedValues({}, {})
    keys = {key: LocalKey(key, SavePlan([]), empty, local.value_digests) for key, local in staged.keys.items()}
    return SaveOrder(
        number,
        slot,
        staged.iteration,
        dataclasses.replace(staged, keys=keys),
        block_bytes,
        {key: local.plan for key, local in staged.keys.items()} if sends_plans else None,
        objects,
        moves_latest,
    )


def layout_of_plans(plans: Mapping[str, SavePlan]) -> Layout:
    """The slots of the tensors that the plans of all keys name, in their order."""
    return tuple(
        (item.tensor_data.properties.dtype, item.tensor_data.chunk.sizes)
        for plan in plans.values()
        for item in plan.items
        if item.type is not WriteItemType.BYTE_IO and item.tensor_data is not None
    )


def decode_step(order: SaveOrder, plans: Mapping[str, SavePlan], block: torch.Tensor) -> LocalStep:
    """The staged step that an order is about.

    Args:
        order: The order.
        plans: By key.
        block: Of its slot.

    Raises:
        ValueError: The order holds no step.
    """
    if order.step is None:
        raise ValueError("this order is about a step that failed")
    slots = iter(cut_block(block, layout_of_plans(plans)))
    keys = {}
    for key, local in order.step.keys.items():
        plan = plans[key]
        tensors = {place_of(item.index): next(slots) for item in plan.items if item.type is not WriteItemType.BYTE_IO}
        keys[key] = LocalKey(key, plan, StagedValues(tensors, order.objects[key]), local.value_digests)
    return dataclasses.replace(order.step, keys=keys)
