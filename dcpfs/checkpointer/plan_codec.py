"""Plans as bytes: what ranks and coordinator send each other, for all keys at once.

Problem: pickled, the plan of 5,000 tensors is a megabyte, takes 60 ms to write and as long to read, at the coordinator
once for each rank (case 74).

Way taken: a `PlanTable` and its boxes per key, each compressed on its own, so that the tables of ranks which hold parts
of the same tensors are equal byte for byte and are read once. Back go only the decisions: for each item where its chunk
stands in the metadata, and whether somebody else writes it; the rank has the items. The bytes travel among the ranks of
one job, which trust each other as with any object collective.
"""

from __future__ import annotations

import hashlib
import pickle
import zlib
from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from dcpfs.checkpointer.choices import DedupPolicy
from dcpfs.checkpointer.local_step import LocalKey, LocalStep
from dcpfs.checkpointer.plan_table import PlanTable, make_table
from dcpfs.dcp.save_planner import PlannerData
from dcpfs.format.collector import paused_collector

__all__ = [
    "AssignedKey",
    "EncodedKey",
    "assign_items",
    "decode_assigned",
    "decode_local_plans",
    "decode_values",
    "digest_keys",
    "encode_assigned",
    "encode_local_plans",
    "encode_values",
    "exchange_id_of",
    "keep_items",
    "split_local_plans",
    "values_of",
]

_LEVEL = 1


class EncodedKey(NamedTuple):
    """One rank's plan for one key, on its way to the coordinator.

    Attributes:
        table: The `PlanTable`, compressed.
        boxes: Its boxes, compressed.
        values: Digests of values, compressed; in the order of `PlanTable.compared`.
        storage_data: What the storage writer noted at the rank.
    """

    table: bytes
    boxes: bytes
    values: bytes
    storage_data: object


class AssignedKey(NamedTuple):
    """What the coordinator decided about one key of one rank.

    Attributes:
        item_seats: For each item the number of its seat, compressed; None: of the slot of the same number.
        places: For each seat twice the position of the chunk in the metadata, plus 1 where another rank holds it too.
        kept: Numbers of the items that are held by others too and written here.
        storage_data: What the storage writer noted at the coordinator.
        plan: In place of all that, where a storage writer changed the items.
    """

    item_seats: bytes
    places: bytes
    kept: bytes
    storage_data: object = None
    plan: SavePlan | None = None


def encode_local_plans(step: LocalStep) -> bytes:
    """What a rank tells the coordinator."""
    with paused_collector():
        encoded: dict[str, tuple[object, ...]] = {}
        for key, each in step.keys.items():
            table, boxes = make_table(each.plan)
            encoded[key] = (
                zlib.compress(table.encode(), _LEVEL),
                zlib.compress(table.encode_boxes(boxes), _LEVEL),
                encode_values(each),
                each.plan.storage_data,
            )
        return pickle.dumps(encoded, protocol=5)


def split_local_plans(data: bytes) -> dict[str, EncodedKey]:
    """What a rank told, by key, its parts still encoded."""
    return {key: EncodedKey(*parts) for key, parts in pickle.loads(data).items()}


def decode_local_plans(data: bytes) -> dict[str, SavePlan]:
    """The plans of a rank, as torch's planners take them."""
    plans = {}
    with paused_collector():
        for key, encoded in split_local_plans(data).items():
            table = PlanTable.decode(zlib.decompress(encoded.table))
            boxes = table.decode_boxes(zlib.decompress(encoded.boxes), {})
            digests = {table.fqns[n]: v for n, v in zip(table.compared, decode_values(encoded.values), strict=True)}
            notes = PlannerData(table.structure, digests)
            plans[key] = SavePlan(table.items(boxes), storage_data=encoded.storage_data, planner_data=notes)
    return plans


def encode_values(key: LocalKey) -> bytes:
    """Digests of the key's small values: 4 bytes each, compressed."""
    return zlib.compress(array("I", key.value_digests.values()).tobytes(), _LEVEL)


def decode_values(data: bytes) -> array[int]:
    """The digests of `encode_values`."""
    values = array("I")
    values.frombytes(zlib.decompress(data))
    return values


def values_of(results: bytes) -> dict[str, bytes]:
    """By key what `encode_values` made, out of what a rank tells after writing."""
    return cast("dict[str, bytes]", pickle.loads(results)[0])


def digest_keys(keys: Mapping[str, LocalKey], *, world_size: int, dedup: DedupPolicy) -> int:
    """63 bits over all that decides about plans: of two steps of one rank, equal ones can share an exchange.

    Raises:
        UnsupportedValueError: An item names another place than that of its chunk.
    """
    digest = hashlib.blake2b(f"{world_size} {dedup.value}".encode(), digest_size=8)
    with paused_collector():
        for key, each in keys.items():
            table, boxes = make_table(each.plan)
            for part in (key.encode(), table.encode(), table.encode_boxes(boxes)):
                digest.update(len(part).to_bytes(8, "little"))
                digest.update(part)
    return int.from_bytes(digest.digest(), "little") >> 1


def encode_assigned(exchange_id: int, keys: Mapping[str, AssignedKey]) -> bytes:
    """What the coordinator tells a rank."""
    return pickle.dumps((exchange_id, {key: tuple(each) for key, each in keys.items()}), protocol=5)


def decode_assigned(data: bytes, step: LocalStep) -> dict[str, SavePlan]:
    """What this rank writes, by key.

    Args:
        data: What the coordinator told.
        step: What this rank brought to the exchange, or one with the same digest.
    """
    with paused_collector():
        plans = {}
        for key, parts in pickle.loads(data)[1].items():
            assigned = AssignedKey(*parts)
            plans[key] = assigned.plan or SavePlan(
                keep_items(step.keys[key].plan.items, assigned), storage_data=assigned.storage_data
            )
        return plans


def exchange_id_of(data: bytes) -> int:
    """The number of the exchange in which the coordinator told this."""
    return int(pickle.loads(data)[0])


def assign_items(seats: Sequence[int], places: Sequence[int], kept: Sequence[int]) -> list[tuple[int, int]]:
    """The items that a rank writes: number of the item, position of its chunk in the metadata.

    Args:
        seats: For each item the number of its seat.
        places: As `AssignedKey.places`.
        kept: As `AssignedKey.kept`.
    """
    mine = set(kept)
    return [(number, places[seat] >> 1) for number, seat in enumerate(seats) if not places[seat] & 1 or number in mine]


def keep_items(items: Sequence[WriteItem], assigned: AssignedKey) -> list[WriteItem]:
    """The items that a rank writes, of all that it planned."""
    kept = []
    seats = _numbers("I", zlib.decompress(assigned.item_seats))
    for number, position in assign_items(seats, _numbers("q", assigned.places), _numbers("I", assigned.kept)):
        item = items[number]
        if item.type is WriteItemType.SHARD:
            # With the position of the chunk in the table of contents, as torch's reader likes to find it.
            index = MetadataIndex(item.index.fqn, item.index.offset, position)
            item = WriteItem(index, item.type, tensor_data=item.tensor_data)
        kept.append(item)
    return kept


def _numbers(kind: str, data: bytes) -> array[int]:
    numbers = array(kind)
    numbers.frombytes(data)
    return numbers
