"""Where every chunk of one key lies among the ranks. Pure; at the coordinator.

Problem: which chunks a tensor has, whether they cover it, and who holds which, is a question per tensor and rank: five
million of them for 5,000 tensors on 1,024 ranks.

Way taken: tensors whose items sit in the same slots of the same tables (`PlanTable`) are cut alike on every rank. They
form a *class*: its chunks, their holders and their coverage are found once, and its table of contents is one list that
all of its tensors share. A model has some dozens of classes, whatever its depth.

A *seat* is a slot as seen from one class: the n-th item of each of its tensors. For each rank and seat one number says
where the chunk stands in the table of contents, and whether the rank is alone with it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)

from dcpfs.checkpointer.plan_table import Box, ItemKind, PlanTable
from dcpfs.dcp.agreement import Signature, check_signatures
from dcpfs.dcp.coverage import find_fault
from dcpfs.dcp.flatten import STRUCTURE_ATTRIBUTE, merge_structures
from dcpfs.errors import ReplicaMismatchError, UnsupportedValueError

__all__ = ["KeyLayout", "LayoutClass", "lay_out"]

Part = tuple[int, tuple[int, ...]]
"""Number of a table, and the slots of a tensor's items in it."""


@dataclass(slots=True)
class LayoutClass:
    """Tensors, or other values, that lie alike on all ranks.

    Attributes:
        kind: Of the tensors, by the first rank that holds one.
        parts: Tables and slots.
        fqns: The tensors.
        seats: Number of the first seat in each table of ``parts``.
        boxes: The chunks, in the order of the ranks.
        holders: Ranks of each chunk, ascending. Chunks held by the same ranks have one list.
    """

    kind: ItemKind
    parts: tuple[Part, ...]
    fqns: list[str] = field(default_factory=list)
    seats: dict[int, int] = field(default_factory=dict)
    boxes: list[Box] = field(default_factory=list)
    holders: list[list[int]] = field(default_factory=list)


@dataclass(slots=True)
class KeyLayout:
    """One key, over all ranks.

    Attributes:
        tables: Different ones.
        rank_tables: Number of each rank's table.
        boxes: Of each rank, by slot.
        classes: All of them.
        items: For each table, FQN to the numbers of its items, in order.
        item_seats: For each table, the seat of each item.
        places: For each rank, `AssignedKey.places`.
        stored: The table of contents.
    """

    tables: Sequence[PlanTable]
    rank_tables: Sequence[int]
    boxes: Sequence[Sequence[Box]]
    classes: list[LayoutClass]
    items: list[dict[str, list[int]]]
    item_seats: list[array[int]]
    places: list[array[int]]
    stored: dict[str, TensorStorageMetadata | BytesStorageMetadata]

    def metadata(self) -> Metadata:
        """The key's metadata, without where entries lie.

        Raises:
            ReplicaMismatchError: Ranks disagree about containers and key types.
        """
        structure = merge_structures([table.structure for table in self.tables])
        metadata = Metadata(dict(self.stored), planner_data=dict(structure.paths))
        setattr(metadata, STRUCTURE_ATTRIBUTE, structure.to_json())
        return metadata

    def item_of(self, rank: int, layout: LayoutClass, fqn: str, position: int) -> int:
        """Number of the item by which a rank holds a chunk of a tensor."""
        table = self.rank_tables[rank]
        items = self.items[table][fqn]
        if len(items) == 1:
            return items[0]
        first = layout.seats[table]
        places = self.places[rank]
        return next(item for n, item in enumerate(items) if places[first + n] >> 1 == position)


def lay_out(tables: Sequence[PlanTable], rank_tables: Sequence[int], boxes: Sequence[Sequence[Box]]) -> KeyLayout:
    """Find out where every chunk of a key lies.

    Args:
        tables: Different ones, in the order of the ranks that brought them first.
        rank_tables: Number of each rank's table.
        boxes: Of each rank, by slot; equal boxes are one object.

    Raises:
        ReplicaMismatchError: Ranks disagree about the kind, dtype or shape of what they share.
        UnsupportedValueError: The shards of a tensor don't cover it.
    """
    first_ranks = [rank_tables.index(number) for number in range(len(tables))]
    if len(tables) > 1:
        check_signatures({rank: _signatures(table) for rank, table in zip(first_ranks, tables, strict=True)})
    items = [_items_by_fqn(table) for table in tables]
    classes = _classify(tables, items)
    ranks_of: list[list[int]] = [[] for _ in tables]
    for rank, number in enumerate(rank_tables):
        ranks_of[number].append(rank)
    places = [array("q") for _ in rank_tables]
    item_seats = [array("I", bytes(4 * len(table.item_slots))) for table in tables]
    contents: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    taken = [0] * len(tables)
    groups: dict[tuple[int, ...], list[int]] = {}
    for layout in classes:
        _place_class(layout, ranks_of, boxes, places, taken, groups)
        _check_cover(layout, complete=len(rank_tables) > 1)
        for number, _ in layout.parts:
            first = layout.seats[number]
            for fqn in layout.fqns:
                for n, item in enumerate(items[number][fqn]):
                    item_seats[number][item] = first + n
        contents.update(_list_contents(layout))
    stored = {fqn: contents[fqn] for each in items for fqn in each}
    return KeyLayout(tables, rank_tables, boxes, classes, items, item_seats, places, stored)


def _signatures(table: PlanTable) -> Iterator[tuple[str, Signature]]:
    signatures = [table.kinds[kind].signature for kind in table.slot_kinds]
    for fqn, slot in zip(table.item_fqns, table.item_slots, strict=True):
        yield table.fqns[fqn], signatures[slot]


def _items_by_fqn(table: PlanTable) -> dict[str, list[int]]:
    items: dict[str, list[int]] = {}
    for item, fqn in enumerate(table.item_fqns):
        items.setdefault(table.fqns[fqn], []).append(item)
    return items


def _classify(tables: Sequence[PlanTable], items: Sequence[dict[str, list[int]]]) -> list[LayoutClass]:
    parts: dict[str, list[Part]] = {}
    for number, table in enumerate(tables):
        known: dict[tuple[int, ...], Part] = {}
        slots = table.item_slots
        for fqn, own in items[number].items():
            where = tuple([slots[item] for item in own])
            part = known.get(where)
            if part is None:
                part = known[where] = (number, where)
            parts.setdefault(fqn, []).append(part)
    classes: dict[tuple[Part, ...], LayoutClass] = {}
    for fqn, each in parts.items():
        signature = tuple(each)
        layout = classes.get(signature)
        if layout is None:
            number, where = signature[0]
            kind = tables[number].kinds[tables[number].slot_kinds[where[0]]]
            layout = classes[signature] = LayoutClass(kind, signature)
        layout.fqns.append(fqn)
    return list(classes.values())


def _place_class(
    layout: LayoutClass,
    ranks_of: Sequence[Sequence[int]],
    boxes: Sequence[Sequence[Box]],
    places: Sequence[array[int]],
    taken: list[int],
    groups: dict[tuple[int, ...], list[int]],
) -> None:
    """Find the chunks of a class and their holders, and give each rank its seats."""
    holding: list[tuple[int, tuple[int, ...]]] = []
    for number, where in layout.parts:
        layout.seats[number] = taken[number]
        taken[number] += len(where)
        holding += [(rank, where) for rank in ranks_of[number]]
    if len(layout.parts) > 1:
        holding.sort()
    positions: dict[torch.Size | None, int] = {}
    chunks, holders = layout.boxes, layout.holders
    for rank, where in holding:
        own = boxes[rank]
        for slot in where:
            box = own[slot]
            offsets = None if box is None else box.offsets
            position = positions.get(offsets)
            if position is None:
                position = positions[offsets] = len(chunks)
                chunks.append(box)
                holders.append([rank])
            else:
                if chunks[position] is not box:
                    _refuse_overlap(layout, chunks[position], box, holders[position][0], rank)
                if holders[position][-1] != rank:
                    holders[position].append(rank)
            places[rank].append(2 * position)
    for position, ranks in enumerate(holders):
        if len(ranks) > 1:
            holders[position] = groups.setdefault(tuple(ranks), ranks)
    # Whether a chunk is shared is known once all ranks have been seen.
    shared = [len(ranks) > 1 for ranks in holders]
    if any(shared):
        for number, where in layout.parts:
            first = layout.seats[number]
            for rank in ranks_of[number]:
                own_places = places[rank]
                for seat in range(first, first + len(where)):
                    own_places[seat] |= shared[own_places[seat] >> 1]


def _refuse_overlap(layout: LayoutClass, first: Box, second: Box, first_rank: int, rank: int) -> None:
    if first is None or second is None or first.sizes == second.sizes:
        return
    raise ReplicaMismatchError(
        f"can't save {layout.fqns[0]!r}: at {tuple(first.offsets)} rank {first_rank} holds a part of shape "
        f"{tuple(first.sizes)} and rank {rank} one of {tuple(second.sizes)}; the ranks' shards don't fit together"
    )


def _check_cover(layout: LayoutClass, *, complete: bool) -> None:
    size = layout.kind.size
    boxes: list[ChunkStorageMetadata] = [box for box in layout.boxes if box is not None]
    if size is None or (len(boxes) == 1 and boxes[0].sizes == size):
        return
    fault = find_fault(size, [(box.offsets, box.sizes) for box in boxes], complete=complete)
    if fault is not None:
        raise UnsupportedValueError(f"can't save {layout.fqns[0]!r}: {fault}; the ranks' shards don't fit together")


def _list_contents(layout: LayoutClass) -> dict[str, TensorStorageMetadata | BytesStorageMetadata]:
    properties, size = layout.kind.properties, layout.kind.size
    if properties is None or size is None:
        return {fqn: BytesStorageMetadata() for fqn in layout.fqns}
    chunks = [box for box in layout.boxes if box is not None]
    return {fqn: TensorStorageMetadata(properties, size, chunks) for fqn in layout.fqns}
