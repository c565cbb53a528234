"""Every private name of torch that dcpfs uses, in one place.

Problem: what DCP needs from a storage layer is only partly public: the record that says where an entry lies, the
protocol that turns a DTensor into write items, how a local shard is found. Such names move between releases.

Way taken: they are imported here and nowhere else, with the smallest surface, and tests/peers run on the oldest and
the newest supported torch. Whatever is missing in a release is bridged here.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing.connection
import multiprocessing.synchronize
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from types import FrameType
from typing import IO, cast

import torch
import torch.distributed.checkpoint
from torch.distributed import distributed_c10d
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint._sharded_tensor_utils import _flatten_sharded_tensors
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list, _create_write_items
from torch.distributed.checkpoint.utils import find_state_dict_object, find_tensor_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.data._utils import signal_handling

__all__ = [
    "DCP_VERSION",
    "EntryInfo",
    "ExtensionRegistry",
    "StorageInfo",
    "StreamTransformExtension",
    "create_write_items",
    "describe_sharding_fault",
    "find_shard",
    "flatten_sharded_tensors",
    "global_shape",
    "has_flat_parameters",
    "has_own_parts",
    "has_shards",
    "intercept_worker_check",
    "is_on_meta",
    "is_wrapper",
    "local_part",
    "local_shards",
    "named_process_group",
    "new_extension_registry",
    "settle",
    "sharding_of",
    "stream_transforms",
    "waits_for_worker",
    "wrapped_child",
]

DCP_VERSION: str = CURRENT_DCP_VERSION


@contextlib.contextmanager
def named_process_group(name: str) -> Iterator[None]:
    """Let torch give this name to the group that is made within by its members alone. Local; one thread at a time."""
    derive = distributed_c10d._hash_ranks_to_str
    distributed_c10d._hash_ranks_to_str = lambda ranks: name  # noqa: ARG005 - torch's parameter
    try:
        yield
    finally:
        distributed_c10d._hash_ranks_to_str = derive


def intercept_worker_check(
    guard: Callable[[Callable[[], None]], None],
    started: Callable[[int, tuple[int, ...]], None],
    stopped: Callable[[int], None],
) -> bool:
    """Stand between torch's handler of SIGCHLD and what it asks about workers of dataloaders.

    Args:
        guard: Called instead of torch's own check, with it. That raises for one loader whose worker has died, and then
            no more for that loader.
        started: Told the id of a loader's iterator and its workers' process ids, before torch is.
        stopped: Told the id of one whose workers nobody has an interest in any more, after torch was.

    Returns:
        Whether torch has such a check.
    """
    names = ("_error_if_any_worker_fails", "_set_worker_pids", "_remove_worker_pids")
    if not all(hasattr(signal_handling, name) for name in names):
        return False
    check, add, remove = (getattr(signal_handling, name) for name in names)

    def add_and_tell(loader: int, pids: tuple[int, ...]) -> None:
        started(loader, pids)
        add(loader, pids)

    def remove_and_tell(loader: int) -> None:
        remove(loader)
        stopped(loader)

    for name, value in zip(names, (functools.partial(guard, check), add_and_tell, remove_and_tell), strict=True):
        setattr(signal_handling, name, value)
    return True


def waits_for_worker(frame: FrameType | None) -> bool:
    """Whether what runs there was called by a wait for a dataloader's workers, torch's or the user's own.

    The former is known by the method that torch's and torchdata's loaders have; the latter by the modules that pipes,
    queues, events and barriers of processes wait in, which dcpfs doesn't use. A loader that ends its workers waits for
    them too, but they owe it nothing any more.
    """
    waits = False
    while frame is not None:
        name = frame.f_code.co_name
        if name == "_try_get_data":
            return True
        if name == "_shutdown_workers":
            return False
        waits = waits or any(frame.f_globals is vars(module) for module in _WAITING_MODULES)
        frame = frame.f_back
    return waits


_WAITING_MODULES = (multiprocessing.connection, multiprocessing.synchronize)


class EntryInfo(StorageInfo):
    """Where an entry lies, with what dcpfs's index wants to know beside it. Travels from rank to coordinator.

    It becomes a plain `StorageInfo` before it is written, so that torch alone can read the metadata.

    Attributes:
        payload_offset_bytes: As in `dcpfs.format.index.EntryLocation`.
        crc32: As in `dcpfs.format.index.EntryLocation`.
    """

    def __init__(
        self,
        relative_path: str,
        offset: int,
        length: int,
        transform_descriptors: list[str] | None = None,
        payload_offset_bytes: int = -1,
        crc32: int = -1,
    ) -> None:
        self.relative_path = relative_path
        self.offset = offset
        self.length = length
        self.transform_descriptors = transform_descriptors
        self.payload_offset_bytes = payload_offset_bytes
        self.crc32 = crc32

    def plain(self) -> StorageInfo:
        """The same as torch writes it."""
        return StorageInfo(self.relative_path, self.offset, self.length, self.transform_descriptors)


def create_write_items(fqn: str, value: object) -> list[WriteItem]:
    """The write items of one value, by the protocols of DTensor, ShardedTensor and 2.14's checkpointable tensors."""
    return _create_write_items(fqn, value)


def find_shard(state_dict: Mapping[str, object], index: MetadataIndex) -> object:
    """The value, or the local shard of a sharded one, that an index names."""
    return find_state_dict_object(dict(state_dict) if not isinstance(state_dict, dict) else state_dict, index)


def flatten_sharded_tensors(state_dict: dict[str, object]) -> dict[str, object]:
    """Open ShardedTensors whose only shard is a ShardedTensor itself (2-D parallel of FSDP1). Keys stay."""
    return cast("dict[str, object]", _flatten_sharded_tensors(state_dict))


def is_wrapper(tensor: torch.Tensor) -> bool:
    """True for a subclass that only wraps other tensors and has no memory of its own."""
    return is_traceable_wrapper_subclass(tensor)


def settle(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for the collective that a lazily gathered tensor stands for; any other tensor as it is."""
    if isinstance(tensor, AsyncCollectiveTensor):
        return tensor.wait()
    return tensor


_KNOWS_CHECKPOINTABLE = hasattr(torch.distributed.checkpoint, "CheckpointableTensor")  # new in torch 2.14


def global_shape(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The shape of the whole that a plain tensor is a local part of, by the protocol of torch 2.14; else None."""
    if not _KNOWS_CHECKPOINTABLE:
        return None
    shape = getattr(tensor, "global_shape", None)
    return None if shape is None or not hasattr(tensor, "global_offsets") else tuple(shape)


def is_on_meta(tensor: torch.Tensor) -> bool:
    """True for a tensor without memory. A ShardedTensor can't be asked, and has its shards on real devices."""
    return not isinstance(tensor, ShardedTensor) and tensor.is_meta


def has_shards(tensor: torch.Tensor) -> bool:
    """True for a tensor that says itself which boxes of the whole this rank holds."""
    return hasattr(tensor, "__create_chunk_list__") or isinstance(tensor, ShardedTensor)


def local_shards(fqn: str, tensor: torch.Tensor) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]]:
    """The boxes of a tensor that this rank holds, by any of torch's protocols: offsets, sizes, and their memory.

    None when the rank is not part of a DTensor's mesh.
    """
    if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None:
        return
    for position, chunk in enumerate(_create_chunk_list(tensor)):
        offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
        shard = find_tensor_shard(tensor, MetadataIndex(fqn, chunk.offsets, position))
        yield offsets, sizes, shard


def local_part(tensor: DTensor) -> torch.Tensor:
    """A DTensor's local tensor itself, where ``to_local`` makes a view of it, with its place in autograd's graph."""
    return settle(tensor._local_tensor)


def has_own_parts(tensor: DTensor) -> bool:
    """True when a DTensor's local tensor says itself which boxes of the whole it is made of (those of torchrec do)."""
    return hasattr(tensor._local_tensor, "__create_write_items__")


def describe_sharding_fault(tensor: torch.Tensor) -> str | None:
    """Why what this rank holds of a tensor is no box of the whole, as a part of a sentence; None: it is one.

    torch itself takes a rank's rows for those that follow its first one, wherever they are.
    """
    if not isinstance(tensor, DTensor):
        return None
    placements = tensor.placements
    if any(each.is_partial() for each in placements):
        return "a DTensor of partial sums, which are no values of their own; redistribute it first"
    strided = {each.dim for each in placements if isinstance(each, _StridedShard)}
    coordinate = tensor.device_mesh.get_coordinate()
    if not strided or coordinate is None:
        return None
    shape, places = tuple(tensor.device_mesh.shape), tuple(coordinate)
    if all(_is_one_run(tensor.shape[dim], dim, placements, shape, places) for dim in strided):
        return None
    return "a DTensor of which this rank holds rows that lie apart in the whole; redistribute it first"


@functools.lru_cache(maxsize=4096)
def _is_one_run(
    rows: int, dim: int, placements: tuple[Placement, ...], mesh: tuple[int, ...], coordinate: tuple[int, ...]
) -> bool:
    """Whether the indices of one dimension that a rank holds follow each other."""
    held = torch.arange(rows, device="cpu")
    for placement, ranks, place in zip(placements, mesh, coordinate, strict=True):
        if isinstance(placement, _StridedShard) and placement.dim == dim:
            count = int(placement.split_factor)
            held = torch.cat([_share(_share(held, count, block), ranks, place) for block in range(count)])
        elif placement.is_shard(dim):
            held = _share(held, ranks, place)
    return len(held) < 2 or int(held[-1] - held[0]) == len(held) - 1


def _share(held: torch.Tensor, count: int, place: int) -> torch.Tensor:
    """One of ``count`` pieces, as torch cuts them: the last ones are shorter, or empty."""
    size = -(-len(held) // count)
    return held[place * size : (place + 1) * size]


def sharding_of(tensor: DTensor) -> Hashable:
    """What decides which box of the whole a DTensor's local tensor is. Equal only while its mesh is alive."""
    spec = tensor._spec
    return id(spec.mesh), spec.placements, tensor.shape


def new_extension_registry() -> ExtensionRegistry:
    """The registry of stream transforms with those that torch brings."""
    return ExtensionRegistry()


def stream_transforms(
    registry: ExtensionRegistry, descriptors: Sequence[str]
) -> list[Callable[[IO[bytes]], IO[bytes]]]:
    """How to undo the stream transforms of an entry, in the order in which to apply them.

    Raises:
        ValueError: The registry does not know one.
    """
    extensions = registry.from_descriptor_list(descriptors)
    return [e.transform_from for e in extensions if isinstance(e, StreamTransformExtension)]


def has_flat_parameters(module: torch.nn.Module) -> bool:
    """Whether a module is sharded by FSDP1, of which parameters are pieces of a flat one, without shape or place."""
    wrapper = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", None)
    return wrapper is not None and any(isinstance(child, wrapper) for child in module.modules())


def wrapped_child(module: torch.nn.Module) -> tuple[str | None, bool]:
    """What a wrapper wraps: the name of its only child that counts, and whether its state dict has no such name.

    ``(None, False)`` for a module that is no wrapper. The classes are looked up among the loaded modules: a module of
    a class whose home was never imported does not exist.
    """
    kind = type(module)
    if kind.__mro__[1] is torch.nn.Module and kind.__module__.partition(".")[0] != "torch":
        return None, False  # the quick way for nearly all modules
    for home, name, child, hides_itself in _WRAPPERS:
        wrapper = getattr(sys.modules.get(home), name, None)
        if wrapper is not None and isinstance(module, wrapper):
            return child, hides_itself
    return None, False


_WRAPPERS = (
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod", False),
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module", False),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module", False),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
        True,  # hooks of its own take the name out of state dicts, and put it back
    ),
)
