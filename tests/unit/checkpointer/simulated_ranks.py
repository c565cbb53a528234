"""Plans of ranks that exist on paper alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, StorageMeta, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from dcpfs.checkpointer.choices import DedupPolicy
from dcpfs.checkpointer.local_step import LocalKey, LocalStep
from dcpfs.checkpointer.plan_codec import digest_keys
from dcpfs.dcp.flatten import flatten
from dcpfs.dcp.save_planner import PlannerData, SavePlanner
from dcpfs.dcp.writer import FsspecStorageWriter
from dcpfs.format.checksum import crc32
from dcpfs.torch_private import EntryInfo


@dataclass(frozen=True)
class Shard:
    """A rank's part of a tensor."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype = torch.float32


def rows(shape: tuple[int, ...], rank: int, world_size: int, dtype: torch.dtype = torch.float32) -> Shard:
    """A rank's rows of a tensor, cut as FSDP2 cuts it: the last ranks may have fewer or none."""
    each = -(-shape[0] // world_size)
    start, stop = min(rank * each, shape[0]), min((rank + 1) * each, shape[0])
    rest = tuple(0 for _ in shape[1:])
    return Shard(shape, (start, *rest), (stop - start, *shape[1:]), dtype)


def local_key(key: str, state: Mapping[str, object], *, world_size: int) -> LocalKey:
    """As the planner makes it of a state; a `Shard` stands for a DTensor."""
    whole = {fqn: value for fqn, value in state.items() if not isinstance(value, Shard)}
    planner = SavePlanner(world_size=world_size)
    planner.set_up_planner(whole)
    plan = planner.create_local_plan()
    own = {item.index.fqn: item for item in plan.items}
    order = {fqn: 0 if isinstance(value, Shard) else value for fqn, value in state.items()}
    leaves, structure = flatten(order)
    items = []
    shared: dict[Shard, TensorWriteData] = {}
    for fqn in leaves:
        value = state.get(fqn)
        if not isinstance(value, Shard):
            items.append(own[fqn])
            continue
        data = shared.get(value)
        if data is None:
            chunk = ChunkStorageMetadata(torch.Size(value.offsets), torch.Size(value.sizes))
            data = shared[value] = TensorWriteData(chunk, TensorProperties(dtype=value.dtype), torch.Size(value.shape))
        items.append(WriteItem(MetadataIndex(fqn, data.chunk.offsets), WriteItemType.SHARD, tensor_data=data))
    digests = plan.planner_data.digests
    return LocalKey(key, SavePlan(items, planner_data=PlannerData(structure, digests)), planner, digests)


def local_steps(states: Sequence[Mapping[str, Mapping[str, object]]]) -> list[LocalStep]:
    """What the ranks bring: a state per key and rank."""
    steps = []
    for keys in states:
        made = {key: local_key(key, state, world_size=len(states)) for key, state in keys.items()}
        digest = digest_keys(made, world_size=len(states), dedup=DedupPolicy.BALANCED)
        steps.append(LocalStep(5, made, {}, digest, len(states)))
    return steps


class PathWriter(FsspecStorageWriter):
    """Takes everything for free."""

    def _make_way(self) -> None:
        """Nothing stands there."""


class ItemReadingWriter(StorageWriter):
    """As torch's own writers: reads items, and notes something for each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[SavePlan] = []

    def reset(self, checkpoint_id: object = None) -> None:
        """Nothing."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        """Nothing."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Notes a prefix."""
        self.seen = plans
        return [SavePlan(plan.items, f"prefix {rank}", plan.planner_data) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: object) -> Future[list[WriteResult]]:
        """Not used."""
        raise NotImplementedError

    def finish(self, metadata: object, results: object) -> None:
        """Not used."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        """True."""
        return True

    def storage_meta(self) -> StorageMeta | None:
        """None."""
        return None


def results_of(plan: SavePlan, rank: int) -> list[WriteResult]:
    """What a writer says that wrote everything into one file."""
    results, stop = [], 128
    for number, item in enumerate(plan.items):
        length = 300 + 7 * (number % 3)
        checksum = crc32(item.index.fqn.encode())
        info = EntryInfo(f"__{rank}_0.distcp", stop, length, None, 128 if item.tensor_data else 0, checksum)
        stop += length
        results.append(WriteResult(item.index, length, info))
    return results
