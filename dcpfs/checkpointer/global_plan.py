"""Who writes what, for all keys and ranks at once. At the coordinator.

Problem: torch plans key by key: each is a gathering of pickled objects, a comparison of every item of every rank with
all others, and a scattering of the same objects back. With the ranks it grows to minutes, and training waits
(case 74).

Way taken: one exchange of the compact form of `plan_codec` for all keys. Each key is laid out by classes of tensors
(`key_layout`), so that the work grows with ranks × distinct shapes, not with ranks × tensors. What several ranks hold
is then shared out over all keys together, so that a rank's total counts (`sharing`). The storage writers are asked key
by key, as DCP asks them; those that need items get them.

Thread-safety: a `GlobalPlan` is read only, but for what it has warned of.
"""

from __future__ import annotations

import logging
import secrets
import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import StorageWriter

from dcpfs.checkpointer.choices import DedupPolicy
from dcpfs.checkpointer.key_layout import KeyLayout, LayoutClass, lay_out
from dcpfs.checkpointer.layout import TRAINER
from dcpfs.checkpointer.local_step import naming_key
from dcpfs.checkpointer.plan_codec import (
    AssignedKey,
    EncodedKey,
    decode_values,
    encode_assigned,
    keep_items,
    split_local_plans,
    values_of,
)
from dcpfs.checkpointer.plan_table import Box, PlanTable
from dcpfs.dcp.agreement import find_differing_values
from dcpfs.dcp.flatten import STRUCTURE_ATTRIBUTE
from dcpfs.dcp.save_planner import PlannerData
from dcpfs.dcp.sharing import choose_writers
from dcpfs.dcp.writer import reads_items
from dcpfs.errors import ReplicaMismatchError
from dcpfs.format.collector import paused_collector

__all__ = ["GlobalPlan", "plan_globally"]

_logger = logging.getLogger(__name__)

_SHOWN = 10


@dataclass
class GlobalPlan:
    """What the coordinator decided, and what it needs to understand the results of the ranks.

    Attributes:
        exchange_id: A random number above 0, the same for all ranks of one exchange.
        assigned: For each rank what `decode_assigned` takes. May be emptied once sent.
        layouts: Of each key.
        kept: For each key and rank the numbers of the shared items that it writes.
        contents: Metadata of each key. Not to be changed: `metadata` makes copies.
        warned: Keys and FQNs whose differing values have been reported.
    """

    exchange_id: int
    assigned: list[bytes]
    layouts: dict[str, KeyLayout]
    kept: dict[str, list[array[int]]]
    contents: dict[str, Metadata]
    warned: set[tuple[str, str]] = field(default_factory=set)

    def metadata(self) -> dict[str, Metadata]:
        """Metadata of each key, for one save to complete and write. Chunk lists are shared and not to be changed."""
        return {key: _copy(each) for key, each in self.contents.items()}

    def check_values(self, results: Sequence[bytes]) -> None:
        """Compare small values of all ranks: a key holds one rank's only (case 8).

        Args:
            results: Of each rank what `encode_results` made, which brings the digests of its values along.

        Raises:
            ReplicaMismatchError: Ranks disagree about a value of the trainer's. Others are warned of, once each.
        """
        values = [values_of(each) for each in results]
        for key in self.layouts:
            self.compare_key(key, [each[key] for each in values])

    def compare_key(self, key: str, values: Sequence[bytes]) -> None:
        """`check_values` of one key, by what `encode_values` made of each rank."""
        differing = _find_differing(self.layouts[key], values)
        if key == TRAINER and differing:
            raise ReplicaMismatchError(f"can't save: {_describe_differing(key, differing)}")
        fresh = [fqn for fqn in differing if (key, fqn) not in self.warned]
        if fresh:
            self.warned.update((key, fqn) for fqn in fresh)
            _logger.warning("%s", _describe_differing(key, fresh))


def plan_globally(
    all_ranks: Sequence[bytes], writers: Mapping[str, StorageWriter], dedup: DedupPolicy = DedupPolicy.BALANCED
) -> GlobalPlan:
    """Compare the ranks, choose who writes what, and list it. Coordinator.

    Args:
        all_ranks: Of each rank what `encode_local_plans` made.
        writers: Of each key, the keys of every rank; asked to prepare the global plan.
        dedup: Who writes what several ranks hold.

    Raises:
        ReplicaMismatchError: Ranks disagree about a key that they share, or don't save the same keys.
        UnsupportedValueError: The shards of a tensor don't cover it.
    """
    with paused_collector():
        encoded = [split_local_plans(each) for each in all_ranks]
        _check_keys(encoded, writers)
        layouts = {key: _lay_out(key, [each[key] for each in encoded]) for key in writers}
        kept = _share_out(layouts, len(all_ranks), dedup)
        contents = {}
        for key, layout in layouts.items():
            with naming_key(key):
                contents[key] = layout.metadata()
        plan = GlobalPlan(secrets.randbits(62) | 1, [], layouts, kept, contents)
        for key in writers:
            plan.compare_key(key, [each[key].values for each in encoded])
        by_rank: list[dict[str, AssignedKey]] = [{} for _ in all_ranks]
        for key, writer in writers.items():
            assigned = _assign(layouts[key], kept[key], writer, [each[key] for each in encoded])
            for mine, each in zip(by_rank, assigned, strict=True):
                mine[key] = each
        plan.assigned = [encode_assigned(plan.exchange_id, each) for each in by_rank]
        return plan


def _check_keys(encoded: Sequence[Mapping[str, EncodedKey]], writers: Mapping[str, StorageWriter]) -> None:
    for rank, keys in enumerate(encoded):
        if list(keys) != list(encoded[0]):
            raise ReplicaMismatchError(
                f"can't save: rank 0 saves the keys {', '.join(encoded[0])} and rank {rank} the keys "
                f"{', '.join(keys)}; pass the same keys in the same order on all ranks"
            )
    if set(writers) != set(encoded[0]):
        raise ValueError(f"there are writers for {sorted(writers)}, but the ranks save {sorted(encoded[0])}")


def _lay_out(key: str, ranks: Sequence[EncodedKey]) -> KeyLayout:
    numbers: dict[bytes, int] = {}
    tables: list[PlanTable] = []
    known: dict[tuple[int, ...], ChunkStorageMetadata] = {}
    seen: dict[tuple[int, bytes], list[Box]] = {}
    rank_tables: list[int] = []
    boxes: list[list[Box]] = []
    for rank in ranks:
        number = numbers.get(rank.table)
        if number is None:
            number = numbers[rank.table] = len(tables)
            tables.append(PlanTable.decode(zlib.decompress(rank.table)))
        rank_tables.append(number)
        own = seen.get((number, rank.boxes))
        if own is None:
            own = seen[number, rank.boxes] = tables[number].decode_boxes(zlib.decompress(rank.boxes), known)
        boxes.append(own)
    with naming_key(key):
        return lay_out(tables, rank_tables, boxes)


def _share_out(layouts: Mapping[str, KeyLayout], world_size: int, dedup: DedupPolicy) -> dict[str, list[array[int]]]:
    """For each key and rank the numbers of the shared items that it writes."""
    kept = {key: [array("I") for _ in range(world_size)] for key in layouts}
    loads = [0] * world_size
    holders: dict[tuple[str, int, int, str], Sequence[int]] = {}
    sizes: dict[tuple[str, int, int, str], int] = {}
    found: dict[tuple[str, int], LayoutClass] = {}
    for key, layout in layouts.items():
        for number, each in enumerate(layout.classes):
            for position, ranks in enumerate(each.holders):
                size = each.kind.size_bytes(each.boxes[position])
                if len(ranks) == 1:
                    loads[ranks[0]] += size * len(each.fqns)
                    continue
                found[key, number] = each
                for fqn in each.fqns:
                    item = (key, number, position, fqn)
                    holders[item] = ranks
                    sizes[item] = size
    if dedup is DedupPolicy.LOWEST_RANK:
        writers = {item: ranks[0] for item, ranks in holders.items()}
    else:
        writers = choose_writers(holders, sizes, loads)
    for (key, number, position, fqn), writer in writers.items():
        kept[key][writer].append(layouts[key].item_of(writer, found[key, number], fqn, position))
    return kept


def _assign(
    layout: KeyLayout, kept: Sequence[array[int]], writer: StorageWriter, ranks: Sequence[EncodedKey]
) -> list[AssignedKey]:
    seats = [zlib.compress(each.tobytes(), 1) for each in layout.item_seats]
    assigned = [
        AssignedKey(seats[table], places.tobytes(), mine.tobytes())
        for table, places, mine in zip(layout.rank_tables, layout.places, kept, strict=True)
    ]
    if not reads_items(writer):
        prepared = writer.prepare_global_plan([SavePlan([], storage_data=rank.storage_data) for rank in ranks])
        return [each._replace(storage_data=plan.storage_data) for each, plan in zip(assigned, prepared, strict=True)]
    return _assign_with_items(layout, assigned, writer, ranks)


def _assign_with_items(
    layout: KeyLayout, assigned: Sequence[AssignedKey], writer: StorageWriter, ranks: Sequence[EncodedKey]
) -> list[AssignedKey]:
    """As any other storage writer wants it: with all items of all ranks."""
    plans = []
    for rank, each in enumerate(assigned):
        table = layout.tables[layout.rank_tables[rank]]
        own = PlannerData(table.structure, {})
        plans.append(
            SavePlan(
                keep_items(table.items(layout.boxes[rank]), each),
                storage_data=ranks[rank].storage_data,
                planner_data=own,
            )
        )
    prepared = writer.prepare_global_plan(list(plans))
    result = []
    for each, before, after in zip(assigned, plans, prepared, strict=True):
        if after.items is before.items or after.items == before.items:
            result.append(each._replace(storage_data=after.storage_data))
        else:
            result.append(each._replace(plan=after))
    return result


def _find_differing(layout: KeyLayout, values: Sequence[bytes]) -> list[str]:
    """FQNs whose values differ between ranks, by the digests that each rank brings."""
    columns: dict[tuple[int, bytes], dict[str, int]] = {}
    for number, column in zip(layout.rank_tables, values, strict=True):
        if (number, column) not in columns:
            columns[number, column] = {}
    if len(columns) < 2:
        return []
    for (number, column), digests in columns.items():
        table = layout.tables[number]
        for fqn, digest in zip(table.compared, decode_values(column), strict=True):
            digests[table.fqns[fqn]] = digest
    return find_differing_values(list(columns.values()))


def _describe_differing(key: str, fqns: Sequence[str]) -> str:
    more = f" and {len(fqns) - _SHOWN} more" if len(fqns) > _SHOWN else ""
    return (
        f"values of {', '.join(map(repr, fqns[:_SHOWN]))}{more} under the key {key!r} differ between ranks, and the "
        "checkpoint holds one rank's only; make them equal, or save what belongs to a rank under a key with its rank"
    )


def _copy(metadata: Metadata) -> Metadata:
    copy = Metadata(dict(metadata.state_dict_metadata), planner_data=metadata.planner_data)
    setattr(copy, STRUCTURE_ATTRIBUTE, getattr(metadata, STRUCTURE_ATTRIBUTE))
    return copy
