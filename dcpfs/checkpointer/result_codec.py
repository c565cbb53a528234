"""Results of a rank's writes as bytes: what each rank tells the coordinator at every save.

Problem: torch gathers a pickle of four objects per entry from each rank, at every save, also when plans are cached.

Way taken: the coordinator knows which items it gave to a rank, in which order (`GlobalPlan`). So a rank tells where
they lie and nothing else: file, offset, length, start of the payload, checksum, as columns of numbers. Offsets are told
as the gap to the entry before, lengths repeat, so that little but the checksums is left after compression. Whatever
does not fit that form, such as results of another storage writer, or fewer than were planned, is pickled as it is.

Small values of the rank come along as digests, so that ranks are compared at every save (case 8).
"""

from __future__ import annotations

import pickle
import zlib
from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from dcpfs.checkpointer.global_plan import GlobalPlan
from dcpfs.checkpointer.local_step import LocalStep
from dcpfs.checkpointer.plan_codec import assign_items, encode_values
from dcpfs.format.collector import paused_collector
from dcpfs.torch_private import EntryInfo

__all__ = ["decode_results", "encode_results"]

_LEVEL = 1


class _Columns(NamedTuple):
    """Results in the order of the assigned items, each column compressed int64."""

    files: list[str]
    file_numbers: bytes
    gaps: bytes
    lengths: bytes
    payload_offsets: bytes
    checksums: bytes


def encode_results(
    results: Mapping[str, Sequence[WriteResult]], step: LocalStep, assigned: Mapping[str, SavePlan]
) -> bytes:
    """What a rank tells the coordinator after writing.

    Args:
        results: By key.
        step: Its small values are compared over ranks.
        assigned: What it was to write.
    """
    with paused_collector():
        encoded: dict[str, tuple[object, ...] | bytes] = {}
        for key, written in results.items():
            columns = _to_columns(written, assigned[key])
            encoded[key] = pickle.dumps(list(written), protocol=5) if columns is None else tuple(columns)
        values = {key: encode_values(each) for key, each in step.keys.items()}
        return pickle.dumps((values, encoded), protocol=5)


def decode_results(data: bytes, planned: GlobalPlan, rank: int) -> dict[str, list[WriteResult]]:
    """The results of one rank, by key. Coordinator.

    Args:
        data: What the rank told.
        planned: What it was to write.
        rank: Which one.
    """
    with paused_collector():
        results: dict[str, list[WriteResult]] = {}
        for key, encoded in pickle.loads(data)[1].items():
            if isinstance(encoded, bytes):
                results[key] = cast("list[WriteResult]", pickle.loads(encoded))
            else:
                results[key] = _from_columns(_Columns(*encoded), _indexes(planned, key, rank))
        return results


def _to_columns(results: Sequence[WriteResult], plan: SavePlan) -> _Columns | None:
    if len(results) != len(plan.items):
        return None
    files: dict[str, int] = {}
    ends: dict[str, int] = {}
    numbers, gaps, lengths, payloads, checksums = (array("q") for _ in range(5))
    for item, result in zip(plan.items, results, strict=True):
        info = result.storage_data
        if type(info) is not EntryInfo or info.transform_descriptors or result.size_in_bytes != info.length:
            return None
        if result.index is not item.index and result.index != item.index:
            return None
        file = info.relative_path
        numbers.append(files.setdefault(file, len(files)))
        gaps.append(info.offset - ends.get(file, 0))
        lengths.append(info.length)
        payloads.append(info.payload_offset_bytes)
        checksums.append(info.crc32)
        ends[file] = info.offset + info.length
    packed = [zlib.compress(each.tobytes(), _LEVEL) for each in (numbers, gaps, lengths, payloads, checksums)]
    return _Columns(list(files), *packed)


def _from_columns(columns: _Columns, indexes: Sequence[MetadataIndex]) -> list[WriteResult]:
    files = columns.files
    ends = [0] * len(files)
    results = []
    numbers = [_unpack(each) for each in columns[1:]]
    for index, number, gap, length, payload, checksum in zip(indexes, *numbers, strict=True):
        offset = ends[number] + gap
        ends[number] = offset + length
        # Not by the constructors, which take three times as long.
        info, result = EntryInfo.__new__(EntryInfo), WriteResult.__new__(WriteResult)
        info.__dict__.update(
            relative_path=files[number],
            offset=offset,
            length=length,
            transform_descriptors=None,
            payload_offset_bytes=payload,
            crc32=checksum,
        )
        result.__dict__.update(index=index, size_in_bytes=length, storage_data=info)
        results.append(result)
    return results


def _indexes(planned: GlobalPlan, key: str, rank: int) -> list[MetadataIndex]:
    """The indexes of what a rank was to write, in order."""
    layout = planned.layouts[key]
    number = layout.rank_tables[rank]
    table, boxes = layout.tables[number], layout.boxes[rank]
    kinds = [table.kinds[kind].type for kind in table.slot_kinds]
    offsets = [None if box is None else box.offsets for box in boxes]
    indexes = []
    for item, position in assign_items(layout.item_seats[number], layout.places[rank], planned.kept[key][rank]):
        slot = table.item_slots[item]
        hint = position if kinds[slot] is WriteItemType.SHARD else 0 if kinds[slot] is WriteItemType.TENSOR else None
        index = MetadataIndex.__new__(MetadataIndex)
        index.__dict__.update(fqn=table.fqns[table.item_fqns[item]], offset=offsets[slot], index=hint)
        indexes.append(index)
    return indexes


def _unpack(data: bytes) -> array[int]:
    numbers = array("q")
    numbers.frombytes(zlib.decompress(data))
    return numbers
