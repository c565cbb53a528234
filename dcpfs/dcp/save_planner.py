"""Plan a save: torch's keys, dcpfs's exactness, and 20,000 tensors in the time of a request.

Problem: torch's planner takes 45 µs per tensor, loses key types and empty containers, takes equal keys of different
ranks for replicas whatever they hold, and scatters small replicas over all files (cases 8, 71, 73). Its plan cache
compares plans without their dtypes.

Way taken: the same protocol and the same keys, so either side's loader reads the result.

* Values are checked when the plan is made, so every rank has refused before anything at the URL is touched.
* What is equal for many tensors (chunk, properties) is made once and shared; pickled plans shrink with it.
* The coordinator compares kind, dtype and shape of shared keys, and digests of small plain values: a key whose
  values differ between ranks is reported by name, since only one rank's value will be there after a load.
* Key types, kinds of mappings and empty ones travel with the plan (`flatten.Structure`) and reach the writer as an
  attribute of torch's ``Metadata``; torch's own ``planner_data`` is written as torch writes it.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner import SavePlanner as TorchSavePlanner
from torch.distributed.tensor import DTensor

from dcpfs.config import Trust
from dcpfs.dcp.agreement import check_replicas, find_differing_values
from dcpfs.dcp.coverage import find_fault
from dcpfs.dcp.exactness import check_storable_tensor
from dcpfs.dcp.flatten import STRUCTURE_ATTRIBUTE, Structure, flatten, merge_structures
from dcpfs.dcp.host_memory import tensor_bytes
from dcpfs.dcp.shard_items import ShardItems, plan_shards
from dcpfs.dcp.sharing import choose_writers
from dcpfs.dcp.value_digest import digest_value
from dcpfs.errors import ReplicaMismatchError, UnsupportedValueError
from dcpfs.format.checksum import crc32
from dcpfs.format.collector import paused_collector
from dcpfs.format.entries import encode_object
from dcpfs.torch_private import find_shard, flatten_sharded_tensors, has_own_parts, settle

__all__ = ["DifferingValues", "PlannerData", "SavePlanner"]

_logger = logging.getLogger(__name__)

_DIGEST_BYTES = 16 << 10
"""Plain tensors up to this are compared by value: random states, counters. 5,056 bytes is torch's CPU generator."""

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_SCALARS = frozenset({int, float, bool, type(None)})
_SHOWN = 10


class DifferingValues(str, enum.Enum):
    """What to do about a key that several ranks hold with different plain values (only one of them is kept)."""

    WARN = "warn"
    """One warning that names the keys."""
    REFUSE = "refuse"
    """`ReplicaMismatchError`."""


@dataclasses.dataclass(frozen=True)
class PlannerData:
    """What a rank's plan tells the coordinator beside its items.

    Attributes:
        structure: Paths and containers of the rank's state.
        digests: Checksums of small plain values, by key.
        compares_replicas: Tells a writer that the planner does.
    """

    structure: Structure
    digests: dict[str, int]
    compares_replicas: bool = True


@dataclasses.dataclass(frozen=True)
class _Decided:
    """What the coordinator has planned for all.

    Attributes:
        merged: What each rank brought.
        plans: What each rank gets.
        metadata: The table of contents.
    """

    merged: list[SavePlan]
    plans: list[SavePlan]
    metadata: Metadata


class SavePlanner(TorchSavePlanner):
    """DCP's save planner, exact and fast. For ``dcp.save(..., planner=dcpfs.SavePlanner())``; `dcpfs.save` uses it.

    One save at a time; may be reused.

    Args:
        differing_values: About keys whose plain values differ between ranks.
        enable_plan_caching: As torch's: while the structure of the state (dtypes and key types included) stays the
            same on all ranks, plans are not exchanged again. Values of ranks are then not compared.
        trust: `Trust.PICKLE`: objects that a default load refuses are saved all the same.
        world_size: Number of ranks that save; None: of the default process group.
    """

    hands_out_references = True
    """`resolve_data` returns the state's own tensors, so a writer may ask for all of them at once."""
    checks_objects = True
    """Objects have been checked against the allow-list when the writer gets them."""

    def __init__(
        self,
        *,
        differing_values: DifferingValues = DifferingValues.WARN,
        enable_plan_caching: bool = False,
        trust: Trust = Trust.ALLOWLIST,
        world_size: int | None = None,
    ) -> None:
        self._world_size = world_size
        self._differing_values = DifferingValues(differing_values)
        self._caching = enable_plan_caching
        self._trust = Trust(trust)
        self._scalars: dict[tuple[type, str], bytes] = {}
        self._state: dict[str, object] = {}
        self._plain: dict[str, torch.Tensor] = {}
        self._objects: dict[str, bytes] = {}
        self._structure = Structure({})
        self._pending: SavePlan | None = None
        self._decided: _Decided | None = None

    # --- DCP's protocol

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,  # noqa: ARG002 - DCP's contract
        is_coordinator: bool = False,  # noqa: ARG002 - DCP's contract
    ) -> None:
        """Take the state of one save. All ranks.

        Raises:
            UnsupportedValueError: Two paths share a key, a key would come back as text, or the factory of a
                ``defaultdict`` would be lost.
        """
        with paused_collector():
            leaves, self._structure = flatten(state_dict)
            self._structure.require_factories()
        if any(type(leaf).__name__ == "ShardedTensor" for leaf in leaves.values()):
            leaves = flatten_sharded_tensors(leaves)
        self._state = leaves
        self._plain = {}
        self._objects = {}
        self._scalars = {}
        self._pending = self._decided = None

    def create_local_plan(self) -> SavePlan:
        """This rank's items. All ranks.

        Raises:
            UnsupportedValueError: A value that can't be stored exactly; names its key.
        """
        world_size = self._world_size
        if world_size is None:
            world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        compare = world_size > 1
        with paused_collector():
            items, digests = self._plan_items(compare=compare)
        plan = SavePlan(items, planner_data=PlannerData(self._structure, digests))
        if self._caching:
            cached = TorchSavePlanner._cached_save_plan.get(_CACHE_KEY)
            if cached is not None and _same_structure(plan, cached):
                return SavePlan([], usable=False)
            self._pending = plan
        return plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Compare the ranks, choose who writes what, and list it. Coordinator.

        Raises:
            ReplicaMismatchError: Ranks disagree about a key that they share.
            UnsupportedValueError: The shards of a tensor don't cover it.
        """
        if not self._caching:
            with paused_collector():
                return self._plan_globally(all_plans)
        kind = TorchSavePlanner
        known = kind._cached_all_plans.get(_CACHE_KEY)
        if known is None or len(known) != len(all_plans):
            if not all(plan.usable for plan in all_plans):
                raise ReplicaMismatchError(
                    "can't save: some ranks have a cached plan and the coordinator has none; "
                    "make the planner anew on all ranks"
                )
            merged = all_plans
        elif not any(plan.usable for plan in all_plans):
            return [SavePlan([], usable=False)] * len(all_plans), kind._cached_metadata[_CACHE_KEY]
        else:
            merged = [mine if mine.usable else old for old, mine in zip(known, all_plans, strict=True)]
        plans, metadata = self._plan_globally(merged)
        before = kind._cached_global_plan.get(_CACHE_KEY, [])
        # Remembered in `finish_plan`: until then this save can still fail, and ranks go on with what they had before.
        self._decided = _Decided(merged, plans, metadata)
        if len(before) != len(plans):
            return plans, metadata
        changes = [
            SavePlan([], usable=False) if not local.usable and _same_structure(old, new) else new
            for local, old, new in zip(all_plans, before, plans, strict=True)
        ]
        return changes, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The plan to write. All ranks."""
        if not self._caching:
            return new_plan
        if new_plan.usable:
            TorchSavePlanner._cached_final_save_plan[_CACHE_KEY] = new_plan
        else:
            new_plan = TorchSavePlanner._cached_final_save_plan[_CACHE_KEY]
        if self._pending is not None:
            TorchSavePlanner._cached_save_plan[_CACHE_KEY] = self._pending
            self._pending = None
        if self._decided is not None:
            TorchSavePlanner._cached_all_plans[_CACHE_KEY] = self._decided.merged
            TorchSavePlanner._cached_global_plan[_CACHE_KEY] = self._decided.plans
            TorchSavePlanner._cached_metadata[_CACHE_KEY] = self._decided.metadata
            self._decided = None
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The local tensor of an item, no copy; or an object as the bytes of its entry."""
        index = write_item.index
        held = self._plain.get(index.fqn)
        if held is not None:
            return held
        if write_item.type is WriteItemType.BYTE_IO:
            encoded = self._objects.pop(index.fqn, None)
            return io.BytesIO(self._encode(index.fqn, self._state[index.fqn]) if encoded is None else encoded)
        value = self._state[index.fqn]
        if _is_whole(value) and isinstance(value, torch.Tensor):
            return value
        found = find_shard(self._state, index)
        if not isinstance(found, torch.Tensor):
            raise UnsupportedValueError(f"can't save {index.fqn!r}: no local shard at {index.offset}")
        return settle(found)

    @property
    def find_plain(self) -> Callable[[str], torch.Tensor | None] | None:
        """Finds what `create_local_plan` found to be one piece of memory and checked; quicker than `resolve_data`.

        None where a subclass resolves in its own way.
        """
        return self._plain.get if type(self).resolve_data is SavePlanner.resolve_data else None

    # --- planning

    def _plan_items(self, *, compare: bool) -> tuple[list[WriteItem], dict[str, int]]:
        items: list[WriteItem] = []
        digests: dict[str, int] = {}
        plain = self._plain
        described: dict[tuple[torch.dtype, torch.Size, bool], tuple[dict[str, object], dict[str, object]]] = {}
        shards = ShardItems(self._state)
        for fqn, value in self._state.items():
            if _is_whole(value) and isinstance(value, torch.Tensor):
                check_storable_tensor(fqn, value)
                shape = value.shape
                signature = (value.dtype, shape, value.requires_grad)
                found = described.get(signature)
                if found is None:
                    described_as = _describe(*signature)
                    found = described[signature] = (
                        {"offset": described_as.chunk.offsets, "index": 0},
                        {"type": WriteItemType.TENSOR, "bytes_io_data": None, "tensor_data": described_as},
                    )
                # Not by the constructors, which take three times as long: the classes are frozen.
                index, item = MetadataIndex.__new__(MetadataIndex), WriteItem.__new__(WriteItem)
                index.__dict__.update(found[0], fqn=fqn)
                item.__dict__.update(found[1], index=index)
                items.append(item)
                plain[fqn] = value
                if compare:
                    digest = _tensor_digest(value)
                    if digest is not None:
                        digests[fqn] = digest
            elif type(value) is DTensor and not has_own_parts(value):
                part = shards.plan(fqn, value)
                if part is not None:
                    items.append(part[0])
                    plain[fqn] = part[1]
            elif isinstance(value, torch.Tensor):
                items += plan_shards(self._state, fqn, value)
            else:
                items.append(WriteItem(MetadataIndex(fqn), WriteItemType.BYTE_IO))
                encoded = self._objects[fqn] = self._encode(fqn, value)
                if compare:
                    digests[fqn] = digest_value(value, encoded, partial(self._encode, fqn))
        return items, digests

    def _encode(self, fqn: str, value: object) -> bytes:
        if type(value) not in _SCALARS and not (type(value) is tuple and all(type(each) in _SCALARS for each in value)):
            return encode_object(value, key=fqn, trust=self._trust)
        # Optimizers repeat the same few numbers in each group; -0.0 and 0.0, 1 and True are equal and not the same.
        known = (type(value), repr(value))
        encoded = self._scalars.get(known)
        if encoded is None:
            encoded = self._scalars[known] = encode_object(value, key=fqn, trust=self._trust)
        return encoded

    def _plan_globally(self, plans: Sequence[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        notes = [plan.planner_data for plan in plans if isinstance(plan.planner_data, PlannerData)]
        check_replicas([plan.items for plan in plans])
        self._report_differing([note.digests for note in notes])
        structure = merge_structures([note.structure for note in notes]) if notes else Structure({})
        kept = _drop_replicas([plan.items for plan in plans])
        stored = _list_stored(plans)
        final = [
            dataclasses.replace(plan, items=_with_hints(items, stored), planner_data=None)
            for plan, items in zip(plans, kept, strict=True)
        ]
        _check_coverage(stored, complete=len(plans) > 1)
        metadata = Metadata(dict(stored), planner_data=dict(structure.paths))
        setattr(metadata, STRUCTURE_ATTRIBUTE, structure.to_json())
        return final, metadata

    def _report_differing(self, digests: Sequence[dict[str, int]]) -> None:
        keys = find_differing_values(digests)
        if not keys:
            return
        shown = ", ".join(map(repr, keys[:_SHOWN])) + (f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else "")
        text = (
            f"values of {shown} differ between ranks, and one key holds one rank's value only; save what belongs to a "
            "rank under a key with its rank"
        )
        if self._differing_values is DifferingValues.REFUSE:
            raise ReplicaMismatchError(f"can't save: {text}")
        _logger.warning("%s", text)


_CACHE_KEY = f"{__name__}.SavePlanner"


def _is_whole(value: object) -> bool:
    """True for a plain tensor that stands for itself; one with a ``global_shape`` is, from torch 2.14 on, shards."""
    return type(value) in _PLAIN and "global_shape" not in value.__dict__


def _describe(dtype: torch.dtype, shape: torch.Size, requires_grad: bool) -> TensorWriteData:
    chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(shape)), sizes=shape)
    return TensorWriteData(chunk, TensorProperties(dtype=dtype, requires_grad=requires_grad), shape)


def _tensor_digest(tensor: torch.Tensor) -> int | None:
    """Checksum of a small CPU tensor's values; None for others, which are not compared by value."""
    if not tensor.is_cpu or tensor.nbytes > _DIGEST_BYTES or not tensor.is_contiguous():
        return None
    if tensor.is_conj() or tensor.is_neg():
        return None
    return crc32(tensor_bytes(tensor))


def _drop_replicas(items_by_rank: Sequence[list[WriteItem]]) -> list[list[WriteItem]]:
    """Each item at one rank only."""
    if len(items_by_rank) == 1:
        return [items_by_rank[0]]
    holders: dict[MetadataIndex, list[int]] = {}
    sizes: dict[MetadataIndex, int] = {}
    for rank, items in enumerate(items_by_rank):
        for item in items:
            ranks = holders.setdefault(item.index, [])
            if not ranks:
                sizes[item.index] = _size_bytes(item)
            if not ranks or ranks[-1] != rank:
                ranks.append(rank)
    loads = [0] * len(items_by_rank)
    shared: dict[MetadataIndex, Sequence[int]] = {}
    groups: dict[tuple[int, ...], Sequence[int]] = {}
    for index, ranks in holders.items():
        if len(ranks) > 1:
            shared[index] = groups.setdefault(tuple(ranks), ranks)
        else:
            loads[ranks[0]] += sizes[index]
    writers = choose_writers(shared, sizes, loads)
    return [
        [item for item in items if writers.get(item.index, rank) == rank] for rank, items in enumerate(items_by_rank)
    ]


def _size_bytes(item: WriteItem) -> int:
    data = item.tensor_data
    return 1 if data is None else data.chunk.sizes.numel() * data.properties.dtype.itemsize


def _list_stored(plans: Sequence[SavePlan]) -> dict[str, TensorStorageMetadata | BytesStorageMetadata]:
    """The checkpoint's table of contents, keys in the order of the ranks' states."""
    stored: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    seen: dict[MetadataIndex, tuple[int, TensorWriteData | None]] = {}
    alone = len(plans) == 1
    for rank, plan in enumerate(plans):
        for item in plan.items:
            index, data = item.index, item.tensor_data
            if not alone:
                known_item = seen.get(index)
                if known_item is not None:
                    _require_same_box(index, *known_item, rank, data)
                    continue
                seen[index] = (rank, data)
            if data is None:
                stored[index.fqn] = BytesStorageMetadata()
                continue
            known = stored.get(index.fqn)
            if isinstance(known, TensorStorageMetadata):
                known.chunks.append(data.chunk)
            else:
                stored[index.fqn] = TensorStorageMetadata(data.properties, data.size, [data.chunk])
    return stored


def _require_same_box(
    index: MetadataIndex, first_rank: int, first: TensorWriteData | None, rank: int, data: TensorWriteData | None
) -> None:
    """Return when two ranks hold the same part. One entry is written for both, by either of them."""
    if first is None or data is None or first.chunk.sizes == data.chunk.sizes:
        return
    raise ReplicaMismatchError(
        f"can't save {index.fqn!r}: at {tuple(data.chunk.offsets)} rank {first_rank} holds a part of shape "
        f"{tuple(first.chunk.sizes)} and rank {rank} one of {tuple(data.chunk.sizes)}; shard it alike on all ranks, or "
        "save it from one of the meshes only"
    )


def _with_hints(
    items: list[WriteItem], stored: dict[str, TensorStorageMetadata | BytesStorageMetadata]
) -> list[WriteItem]:
    """Shards with the position of their chunk in the table of contents, as torch's reader likes to find it."""
    hinted = []
    positions: dict[str, dict[torch.Size, int]] = {}
    for item in items:
        record = stored[item.index.fqn]
        if item.type is not WriteItemType.SHARD or not isinstance(record, TensorStorageMetadata):
            hinted.append(item)
            continue
        offset = item.index.offset
        if offset is None:
            hinted.append(item)
            continue
        where = positions.get(item.index.fqn)
        if where is None:
            where = positions[item.index.fqn] = {chunk.offsets: n for n, chunk in enumerate(record.chunks)}
        index = MetadataIndex(item.index.fqn, offset, where.get(offset))
        hinted.append(WriteItem(index, item.type, tensor_data=item.tensor_data))
    return hinted


def _check_coverage(stored: dict[str, TensorStorageMetadata | BytesStorageMetadata], *, complete: bool) -> None:
    for fqn, record in stored.items():
        if isinstance(record, BytesStorageMetadata):
            continue
        chunks = record.chunks
        if len(chunks) == 1 and chunks[0].sizes == record.size:
            continue
        boxes = [(chunk.offsets, chunk.sizes) for chunk in chunks]
        fault = find_fault(record.size, boxes, complete=complete)
        if fault is not None:
            raise UnsupportedValueError(f"can't save {fqn!r}: {fault}; the ranks' shards don't fit together")


def _same_structure(first: SavePlan, second: SavePlan) -> bool:
    """True when a plan can stand for the other: items with dtypes, and containers; values are not compared."""
    if len(first.items) != len(second.items) or first.usable != second.usable:
        return False
    mine, other = first.planner_data, second.planner_data
    if isinstance(mine, PlannerData) and isinstance(other, PlannerData) and mine.structure != other.structure:
        return False
    return all(
        one.type is two.type
        and one.index == two.index
        and one.index.index == two.index.index
        and (one.tensor_data is two.tensor_data or one.tensor_data == two.tensor_data)
        for one, two in zip(first.items, second.items, strict=True)
    )
