"""A step's values, copied to where a save in the background may read them.

Problem: training writes its parameters again while the save still reads them, and the checkpoint becomes a mix of two
iterations (cases 12, 15, 16). A copy that is kept per key or by identity goes stale when a tensor is made anew at each
``state_dict()`` (case 13).

Way taken: the plan says which tensors a rank writes, and these, in the order of the plan, go into an `Arena`. What is
staged is a `LocalStep` like any other, whose items resolve to the copies; objects have been encoded to bytes when they
were planned, at this very save (case 14). Replicas that another rank writes are copied too: who writes what is
decided later.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from dcpfs.background.arena import Arena
from dcpfs.checkpointer.layout import SCHEDULER, TRAINER
from dcpfs.checkpointer.local_step import LocalKey, LocalStep
from dcpfs.errors import UnsupportedValueError

__all__ = ["Place", "StagedValues", "place_of", "stage_step"]

Place = tuple[str, torch.Size | None]
"""FQN and offset of an item."""


class StagedValues(SavePlanner):
    """Resolves the items of a plan from values that were copied. Plans nothing.

    Args:
        tensors: By FQN and offset.
        objects: Encoded entries, by FQN.

    Attributes:
        objects: See above.
    """

    hands_out_references = True
    """As `dcpfs.dcp.save_planner.SavePlanner`: asking early costs no memory."""
    checks_objects = True
    """As `dcpfs.dcp.save_planner.SavePlanner`: they were checked when they were encoded."""

    def __init__(self, tensors: Mapping[Place, torch.Tensor], objects: Mapping[str, bytes]) -> None:
        self._tensors = tensors
        self.objects = objects

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The copy of an item's tensor, or the bytes of its entry."""
        index = write_item.index
        if write_item.type is WriteItemType.BYTE_IO:
            return io.BytesIO(self.objects[index.fqn])
        return self._tensors[place_of(index)]

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Not for staged values: they are planned already."""
        raise NotImplementedError

    def create_local_plan(self) -> SavePlan:
        """Not for staged values: they are planned already."""
        raise NotImplementedError

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Not for staged values: they are planned already."""
        raise NotImplementedError

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Not for staged values: they are planned already."""
        raise NotImplementedError


def stage_step(step: LocalStep, arena: Arena) -> LocalStep:
    """The same step, with copies of its values in the arena. Local.

    Args:
        step: As planned. Its tensors may be written again when the arena has been waited for; those of the host, and
            all but parameters and optimizers' states, when this returns.
        arena: Nobody reads from it any more.

    Raises:
        UnsupportedValueError: An item resolves to something else than it was planned as; names its key.
    """
    places: list[tuple[str, Place]] = []
    first: set[int] = set()
    tensors: list[torch.Tensor] = []
    objects: dict[str, dict[str, bytes]] = {key: {} for key in step.keys}
    for key, local in step.keys.items():
        for item in local.plan.items:
            value = local.values.resolve_data(item)
            if isinstance(value, torch.Tensor):
                if _may_be_written(local, item.index.fqn):
                    first.add(len(tensors))
                places.append((key, place_of(item.index)))
                tensors.append(value)
            elif isinstance(value, io.BytesIO):
                objects[key][item.index.fqn] = value.getvalue()
            else:
                raise UnsupportedValueError(
                    f"can't save {item.index.fqn!r} of {key!r}: the planner gave a {type(value).__name__} for it"
                )
    copies: dict[str, dict[Place, torch.Tensor]] = {key: {} for key in step.keys}
    for (key, place), copy in zip(places, arena.stage(tensors, first=first), strict=True):
        copies[key][place] = copy
    keys = {
        key: LocalKey(key, local.plan, StagedValues(copies[key], objects[key]), local.value_digests)
        for key, local in step.keys.items()
    }
    return dataclasses.replace(step, keys=keys)


def _may_be_written(local: LocalKey, fqn: str) -> bool:
    """Whether training may write it before it has waited for the copies: all but parameters and optimizers' states."""
    if local.parameters is None:
        return local.key in (SCHEDULER, TRAINER)
    return fqn not in local.parameters


def place_of(index: MetadataIndex) -> Place:
    """What tells an item from others of its key: FQN and offset."""
    return index.fqn, index.offset
