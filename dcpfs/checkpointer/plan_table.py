"""What the plans of ranks have in common, apart from what differs.

Problem: a plan is five objects per tensor. The plans of 1,024 ranks for 5,000 tensors are 25 million objects, and half
a gigabyte of pickles that one process has to load, compare key by key, and send back (case 74).

Why they need not be: ranks of one model hold the same keys with the same dtypes and shapes, and what differs is which
box of each tensor they hold. Tensors of equal shape are cut alike, so that even the boxes repeat from layer to layer.

Way taken: a plan is a `PlanTable` and a short list of boxes, one for each *slot*: items of equal kind, shape and box
share one. The table, with all text in it, is the same for all ranks that hold their own part of the same tensors: it is
decoded once, and equal bytes mean equal tables. What is left of a rank is some dozens of numbers.

::

    table   fqns, paths, containers    items: fqn, slot    slots: kind, dtype, shape, properties      JSON
    boxes   per slot: offsets, sizes                                                                  int64
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from dcpfs.dcp.agreement import Signature
from dcpfs.dcp.flatten import Structure
from dcpfs.dcp.save_planner import PlannerData
from dcpfs.errors import UnsupportedValueError

__all__ = ["Box", "ItemKind", "PlanTable", "make_table"]

Box = ChunkStorageMetadata | None
"""The part of a tensor that an item holds; None for other values."""

_NO_STRUCTURE = Structure({})


class ItemKind(NamedTuple):
    """What items of one slot have in common beside their box.

    Attributes:
        type: torch's.
        properties: Of the tensor; None for other values.
        size: Shape of the whole tensor.
    """

    type: WriteItemType
    properties: TensorProperties | None = None
    size: torch.Size | None = None

    @property
    def signature(self) -> Signature:
        """What ranks must agree about."""
        return None if self.properties is None or self.size is None else (self.properties.dtype, self.size)

    def size_bytes(self, box: Box) -> int:
        """Bytes of an item; 1 for what is no tensor."""
        return 1 if box is None or self.properties is None else box.sizes.numel() * self.properties.dtype.itemsize


@dataclass(frozen=True, slots=True)
class PlanTable:
    """The plan of a rank for one key, without its boxes.

    Attributes:
        fqns: All of the state, in its order.
        structure: Paths and containers.
        kinds: Of the slots.
        slot_kinds: Number of the kind of each slot.
        item_fqns: Number of the FQN of each item.
        item_slots: Number of the slot of each item.
        compared: Numbers of the FQNs whose values are compared over ranks.
    """

    fqns: list[str]
    structure: Structure
    kinds: list[ItemKind]
    slot_kinds: list[int]
    item_fqns: Sequence[int]
    item_slots: list[int]
    compared: Sequence[int]

    def encode(self) -> bytes:
        """As JSON text: equal tables, equal bytes."""
        identity = range(len(self.fqns))
        record = {
            "fqns": self.fqns,
            "paths": [
                [number, path]
                for number, (fqn, path) in enumerate(self.structure.paths.items())
                if len(path) != 1 or path[0] != fqn
            ],
            "structure": self.structure.to_json(),
            "kinds": [_kind_to_json(kind) for kind in self.kinds],
            "slot_kinds": self.slot_kinds,
            "item_fqns": None if self.item_fqns == identity else list(self.item_fqns),
            "item_slots": self.item_slots,
            "compared": None if self.compared == identity else list(self.compared),
        }
        return json.dumps(record, separators=(",", ":")).encode("ascii")

    @classmethod
    def decode(cls, data: bytes) -> PlanTable:
        """The table of `encode`."""
        record = json.loads(data)
        fqns: list[str] = record["fqns"]
        paths: dict[str, tuple[str | int, ...]] = {fqn: (fqn,) for fqn in fqns}
        for number, path in record["paths"]:
            paths[fqns[number]] = tuple(path)
        identity = range(len(fqns))
        return cls(
            fqns,
            Structure.from_json(record["structure"], paths),
            [_kind_from_json(kind) for kind in record["kinds"]],
            record["slot_kinds"],
            identity if record["item_fqns"] is None else record["item_fqns"],
            record["item_slots"],
            identity if record["compared"] is None else record["compared"],
        )

    def encode_boxes(self, boxes: Sequence[Box]) -> bytes:
        """Offsets and sizes of each slot in turn."""
        numbers = array("q")
        for box in boxes:
            if box is not None:
                numbers.extend(box.offsets)
                numbers.extend(box.sizes)
        return numbers.tobytes()

    def decode_boxes(self, data: bytes, known: dict[tuple[int, ...], ChunkStorageMetadata]) -> list[Box]:
        """The boxes of `encode_boxes`.

        Args:
            data: The bytes.
            known: Boxes made so far: equal ones are one object.
        """
        numbers = array("q")
        numbers.frombytes(data)
        boxes: list[Box] = []
        start = 0
        ranks = [None if kind.size is None else len(kind.size) for kind in self.kinds]
        for kind in self.slot_kinds:
            dims = ranks[kind]
            if dims is None:
                boxes.append(None)
                continue
            stop = start + 2 * dims
            place = tuple(numbers[start:stop])
            box = known.get(place)
            if box is None:
                box = known[place] = ChunkStorageMetadata(torch.Size(place[:dims]), torch.Size(place[dims:]))
            boxes.append(box)
            start = stop
        return boxes

    def items(self, boxes: Sequence[Box]) -> list[WriteItem]:
        """Torch's write items, as the planner of the rank made them."""
        slots = [self._describe(slot, box) for slot, box in enumerate(boxes)]
        items = []
        for fqn, slot in zip(self.item_fqns, self.item_slots, strict=True):
            about_index, about_item = slots[slot]
            # Not by the constructors, which take three times as long: the classes are frozen.
            index, item = MetadataIndex.__new__(MetadataIndex), WriteItem.__new__(WriteItem)
            index.__dict__.update(about_index, fqn=self.fqns[fqn])
            item.__dict__.update(about_item, index=index)
            items.append(item)
        return items

    def _describe(self, slot: int, box: Box) -> tuple[dict[str, object], dict[str, object]]:
        kind = self.kinds[self.slot_kinds[slot]]
        data = None
        if box is not None and kind.properties is not None and kind.size is not None:
            data = TensorWriteData(box, kind.properties, kind.size)
        hint = 0 if kind.type is WriteItemType.TENSOR else None
        return (
            {"offset": None if box is None else box.offsets, "index": hint},
            {"type": kind.type, "bytes_io_data": None, "tensor_data": data},
        )


def make_table(plan: SavePlan) -> tuple[PlanTable, list[Box]]:
    """Take a rank's plan apart.

    Args:
        plan: Made by dcpfs's planner.

    Raises:
        UnsupportedValueError: An item names another place than that of its chunk.
    """
    notes = plan.planner_data
    structure = notes.structure if isinstance(notes, PlannerData) else _NO_STRUCTURE
    fqns = list(structure.paths)
    numbers = {fqn: number for number, fqn in enumerate(fqns)}
    slots = _Slots()
    item_fqns: list[int] = []
    item_slots: list[int] = []
    for item in plan.items:
        fqn = item.index.fqn
        number = numbers.get(fqn)
        if number is None:
            number = numbers[fqn] = len(fqns)
            fqns.append(fqn)
        item_fqns.append(number)
        item_slots.append(slots.find(item))
    digests = notes.digests if isinstance(notes, PlannerData) else {}
    compared = [numbers[fqn] for fqn in digests]
    identity = range(len(fqns))
    table = PlanTable(
        fqns,
        structure,
        list(slots.kinds.values()),
        slots.slot_kinds,
        identity if item_fqns == list(identity) else item_fqns,
        item_slots,
        identity if compared == list(identity) else compared,
    )
    return table, slots.boxes


class _Slots:
    """Slots in the order in which a plan's items come to them."""

    def __init__(self) -> None:
        self.kinds: dict[tuple[object, ...], ItemKind] = {}
        self.slot_kinds: list[int] = []
        self.boxes: list[Box] = []
        self._by_data: dict[int, int] = {}
        self._by_value: dict[tuple[int, object], int] = {}
        self._kind_numbers: dict[tuple[object, ...], int] = {}

    def find(self, item: WriteItem) -> int:
        """The slot of an item. Items that share their description, as our planner's do, are found by that."""
        slot = self._by_data.get(id(item.tensor_data))
        if slot is None:
            slot = self._by_data[id(item.tensor_data)] = self._find_by_value(item)
        return slot

    def _find_by_value(self, item: WriteItem) -> int:
        data = item.tensor_data
        signature: tuple[object, ...]
        box: Box
        if data is None:
            kind, signature, box = ItemKind(item.type), (item.type,), None
        else:
            box, properties, size = data.chunk, data.properties, torch.Size(data.size)
            if item.index.offset != box.offsets:
                raise UnsupportedValueError(
                    f"can't save {item.index.fqn!r}: its write item is indexed at {item.index.offset}, but its chunk "
                    f"starts at {tuple(box.offsets)}"
                )
            kind = ItemKind(item.type, properties, size)
            signature = (
                item.type,
                properties.dtype,
                properties.layout,
                properties.requires_grad,
                properties.memory_format,
                properties.pin_memory,
                size,
            )
        self.kinds.setdefault(signature, kind)
        number = self._kind_numbers.setdefault(signature, len(self._kind_numbers))
        place = (number, None if box is None else (box.offsets, box.sizes))
        slot = self._by_value.setdefault(place, len(self.boxes))
        if slot == len(self.boxes):
            self.slot_kinds.append(number)
            self.boxes.append(box)
        return slot


def _kind_to_json(kind: ItemKind) -> list[object]:
    properties = kind.properties
    if properties is None or kind.size is None:
        return [kind.type.name]
    return [
        kind.type.name,
        str(properties.dtype),
        str(properties.layout),
        properties.requires_grad,
        str(properties.memory_format),
        properties.pin_memory,
        list(kind.size),
    ]


def _kind_from_json(record: Sequence[object]) -> ItemKind:
    kind = WriteItemType[str(record[0])]
    if len(record) == 1:
        return ItemKind(kind)
    _, dtype, layout, requires_grad, memory_format, pin_memory, size = record
    properties = TensorProperties(
        cast("torch.dtype", _of_torch(dtype)),
        cast("torch.layout", _of_torch(layout)),
        bool(requires_grad),
        cast("torch.memory_format", _of_torch(memory_format)),
        bool(pin_memory),
    )
    return ItemKind(kind, properties, torch.Size(size))  # type: ignore[arg-type]  # a list of ints, as encoded


def _of_torch(name: object) -> object:
    """What torch shows as ``torch.float32``, ``torch.strided``."""
    return getattr(torch, str(name).rpartition(".")[2])
