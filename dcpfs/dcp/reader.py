"""DCP's storage reader for any URL: torch's ``dcp.load`` on top of `dcpfs.dcp.fetch`.

Problem: torch's ``FsspecReader`` fetches whole chunks one by one through a buffered file object, in the order of the
plan, loses its storage options when it is reset to another checkpoint (case 76), unpickles whatever it finds (cases
110, 111), joins file names unchecked (case 112), and casts in silence (case 3).

Way taken: the base class, not a subclass of torch's reader. The planner is asked for all targets first, in the calling
thread; then everything is read at once, straight into them; then the planner gets its commits and bytes, again in the
calling thread. The options belong to the reader, not to the URL of the day.

Flow: ``read_metadata`` (one GET; the index comes from the same bytes) → torch plans → ``read_data``. Each load reads
``.metadata`` anew, so that a reader that is used again never mixes two checkpoints.
"""

from __future__ import annotations

import io
import logging
import math
import os
import time
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from dcpfs.config import CastPolicy, RetryConfig, TransferConfig, Trust, VerifyMode
from dcpfs.dcp.aliases import find_aliases, require_agreeing
from dcpfs.dcp.casting import allows_cast
from dcpfs.dcp.fetch import Fetch
from dcpfs.dcp.host_memory import has_memory, is_resident
from dcpfs.dcp.landing import TensorWant
from dcpfs.dcp.load_planner import LoadPlanner as CheckedLoadPlanner
from dcpfs.dcp.matching import FREED, OVERLAPPING, key_mismatch_error, local_boxes, no_data_error, overlaps_itself
from dcpfs.dcp.source import CheckpointSource
from dcpfs.errors import CheckpointNotFoundError, ConfigError, CorruptCheckpointError, DcpfsError
from dcpfs.format.collector import paused_collector
from dcpfs.format.index import BytesRecord, CheckpointIndex, ChunkRecord, EntryLocation, TensorRecord
from dcpfs.format.metadata import index_metadata
from dcpfs.format.naming import naming
from dcpfs.storage.location import Location
from dcpfs.torch_private import is_wrapper

if TYPE_CHECKING:
    from fsspec.callbacks import Callback

    from dcpfs.torch_private import ExtensionRegistry

__all__ = ["FsspecStorageReader"]

_logger = logging.getLogger(__name__)
_SHOWN = 10


class FsspecStorageReader(StorageReader):
    """Reads a checkpoint at any URL for ``dcp.load``. One instance serves one load at a time.

    Args:
        url: URL or local path of the checkpoint.
        storage_options: What the filesystem of the URL takes. Kept when the reader is reset to another checkpoint.
        verify: Compare the checksums of entries that are read whole, or sizes alone.
        trust: What may be unpickled.
        transfer: Concurrency, memory and request sizes.
        retry: When a request is tried again.
        callback: An fsspec ``Callback``, told bytes.
        extension_registry: torch's registry of stream transforms, for checkpoints that were saved with some.

    Raises:
        ConfigError: The URL or an option is wrong.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, object] | None = None,
        verify: VerifyMode | str = VerifyMode.CHECKSUMS,
        trust: Trust | str = Trust.ALLOWLIST,
        transfer: TransferConfig | None = None,
        retry: RetryConfig | None = None,
        callback: Callback | None = None,
        extension_registry: ExtensionRegistry | None = None,
    ) -> None:
        super().__init__()
        self._storage_options = storage_options
        self._verify = VerifyMode(verify)
        self._trust = Trust(trust)
        self._transfer = transfer
        self._retry = retry
        self._callback = callback
        self._registry = extension_registry
        self._index: CheckpointIndex | None = None
        self._metadata: Metadata | None = None
        self._failure: DcpfsError | None = None
        self._load_id = uuid.uuid4().hex
        self._source = self._open(Location(url, storage_options))

    def _open(self, location: Location) -> CheckpointSource:
        return CheckpointSource(
            location,
            verify=self._verify,
            trust=self._trust,
            transfer=self._transfer,
            retry=self._retry,
            callback=self._callback,
            registry=self._registry,
        )

    @property
    def checkpoint_id(self) -> str:
        """The redacted URL: torch logs it and pickles it."""
        return self._source.url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """True when it is a URL or path that a reader could be made for."""
        try:
            Location(checkpoint_id)
        except ConfigError:
            return False
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start a new load, of another checkpoint when one is named. All options stay."""
        self._index = self._metadata = None
        self._load_id = uuid.uuid4().hex
        if checkpoint_id:
            self._source.close()
            self._source = self._open(Location(checkpoint_id, self._storage_options))

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002 - DCP's signature
        """Read ``.metadata``, or with ``rank=`` the metadata that one rank wrote by itself.

        torch asks for the second whenever the first fails, for whatever reason, and from then on goes on without its
        peers. It gets it only where the first is absent; otherwise the error of the first again.

        Raises:
            CheckpointNotFoundError: There is none.
            CorruptCheckpointError: It is damaged, of another save than that of rank 0, or older than a save without
                collectives that overwrote its files.
            UntrustedDataError: It holds a class outside the allow-list, or a name that leaves the checkpoint.
        """
        rank = kwargs.get("rank")
        if rank is not None and self._failure is not None:
            raise self._failure
        self._failure = None
        try:
            data = self._source.read_metadata(rank)
            self._index, metadata = self._source.decode_both(data)
            if rank is None:
                self._source.require_newest(data)
            elif rank > 0:
                self._source.require_same_save(rank, self._index.rank_save)
            self._metadata = metadata
        except CheckpointNotFoundError as error:
            self._index = None
            if rank is None:
                raise
            error = self._source.explain_absence(error)
            _logger.error("%s", error)  # the end of a load; torch 2.9 drops the text of both errors
            raise error from error.__cause__
        except DcpfsError as error:
            self._failure = error
            _logger.error("%s", error)
            raise
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self._load_id
        metadata.storage_meta.checkpoint_id = self._source.url
        return metadata

    def set_up_storage_reader(
        self,
        metadata: Metadata,
        is_coordinator: bool,  # noqa: ARG002 - DCP's signature
        *args: Any,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Take the metadata of the load, from `read_metadata` or from elsewhere."""
        if metadata is not self._metadata or self._index is None:
            self._index = index_metadata(metadata)
        self._metadata = None

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan says. The planner is called in this thread only.

        Raises:
            KeyMismatchError: A target has another dtype or shape than what is stored (no byte was read).
            CorruptCheckpointError: A checksum, size or structure is wrong.
            UntrustedDataError: A non-tensor entry holds a class outside the allow-list.
        """
        started_seconds = time.monotonic()
        if self._index is None:
            raise ConfigError("read_data needs set_up_storage_reader first, as dcp.load does it")
        try:
            with paused_collector(), naming(self._source.url):
                fetch, tensors = self._plan_fetch(self._index, plan, planner)
            fetch.run()
        finally:
            self._source.close()
        for item, target in tensors:
            planner.commit_tensor(item, target)
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                self._load_bytes(item, fetch.objects[item.storage_index.fqn], planner)
        seconds = time.monotonic() - started_seconds
        _logger.info(
            "loaded %d items from %s in %.2f s: %d bytes, %d moved in %d requests",
            len(plan.items),
            self._source.url,
            seconds,
            fetch.totals.needed_bytes,
            fetch.totals.moved_bytes,
            fetch.totals.requests,
        )
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _plan_fetch(
        self, index: CheckpointIndex, plan: LoadPlan, planner: LoadPlanner
    ) -> tuple[Fetch, list[tuple[ReadItem, torch.Tensor]]]:
        """Ask the planner for all targets, and compare each with what is stored for it."""
        fetch = self._source.new_fetch(index)
        lookup = _ChunkLookup(index)
        tensors: list[tuple[ReadItem, torch.Tensor]] = []
        wants: list[TensorWant] = []
        mismatched: dict[str, str] = {}
        planned: dict[str, int] = {}
        policy = getattr(planner, "allow_cast", CastPolicy.NEVER)
        state = getattr(planner, "state_dict", None)
        replaced: list[str] = []
        for item in plan.items:
            key = item.storage_index.fqn
            if item.type is LoadItemType.BYTE_IO:
                fetch.add_object(key, lookup.find_object(item.storage_index))
                if isinstance(state, Mapping) and isinstance(state.get(item.dest_index.fqn), torch.Tensor):
                    replaced.append(item.dest_index.fqn)
                continue
            record, chunk = lookup.find_chunk(item.storage_index)
            target = planner.resolve_tensor(item)
            if target.requires_grad:
                target = target.detach()
            resident = _is_filled_whole(target, record, chunk, item)
            if not resident:
                difference = _describe_target(target, record, item, policy)
                if difference is not None:
                    mismatched[item.dest_index.fqn] = difference
                    continue
            tensors.append((item, target))
            offsets, lengths = tuple(item.storage_offsets), tuple(item.lengths)
            planned[item.dest_index.fqn] = planned.get(item.dest_index.fqn, 0) + math.prod(lengths)
            wants.append(TensorWant(key, record.dtype, chunk.sizes, chunk.location, offsets, lengths, target, resident))
        if mismatched:
            raise key_mismatch_error(self._source.url, mismatched=mismatched)
        _check_planned(planner, index, planned)
        if replaced:
            _logger.warning(
                "loading %s: tensors in the state, other values in the checkpoint, which the planner puts in their "
                "place in the mapping that was given: %s",
                self._source.url,
                ", ".join(map(repr, replaced[:_SHOWN])) + (" and others" if len(replaced) > _SHOWN else ""),
            )
        aliases = find_aliases(wants)
        require_agreeing(aliases, self._source.url)
        fetch.add_aliases(aliases)
        for want in wants:
            fetch.add_tensor(want)
        return fetch, tensors

    def _load_bytes(self, item: ReadItem, data: bytes, planner: LoadPlanner) -> None:
        # torch's own planners unpickle anything: what they get has been decoded by the allow-list before.
        if self._trust is not Trust.PICKLE and not isinstance(planner, CheckedLoadPlanner):
            self._source.decode_object(item.storage_index.fqn, data)
        planner.load_bytes(item, io.BytesIO(data))


class _ChunkLookup:
    """Find records by torch's index of an item, with its hint where it is right."""

    def __init__(self, index: CheckpointIndex) -> None:
        self._index = index
        self._chunks: dict[str, dict[tuple[int, ...], ChunkRecord]] = {}

    def find_object(self, index: MetadataIndex) -> EntryLocation:
        record = self._index.records.get(index.fqn)
        if not isinstance(record, BytesRecord):
            raise _unknown(index)
        return record.location

    def find_chunk(self, index: MetadataIndex) -> tuple[TensorRecord, ChunkRecord]:
        record = self._index.records.get(index.fqn)
        if not isinstance(record, TensorRecord):
            raise _unknown(index)
        chunks = record.chunks
        offsets = tuple(index.offset) if index.offset is not None else (0,) * len(record.shape)
        hint = index.index
        if hint is None:
            hint = 0
        if hint < len(chunks) and chunks[hint].offsets == offsets:
            return record, chunks[hint]
        by_offset = self._chunks.get(index.fqn)
        if by_offset is None:
            by_offset = self._chunks[index.fqn] = {chunk.offsets: chunk for chunk in chunks}
        found = by_offset.get(offsets)
        if found is None:
            raise _unknown(index)
        return record, found


def _check_planned(planner: LoadPlanner, index: CheckpointIndex, planned: Mapping[str, int]) -> None:
    """Return when the plan fills all targets: torch plans nothing, in silence, where metadata lists no chunk.

    Raises:
        CorruptCheckpointError: It does not.
    """
    state = getattr(planner, "state_dict", None)
    if not isinstance(state, Mapping):
        return
    untouched = getattr(planner, "mismatched", ())
    for key, leaf in state.items():
        record = index.records.get(key)
        if not isinstance(record, TensorRecord) or not isinstance(leaf, torch.Tensor) or key in untouched:
            continue
        if sum(math.prod(chunk.sizes) for chunk in record.chunks) >= math.prod(record.shape):
            continue
        missing = sum(math.prod(sizes) for _, sizes, _ in local_boxes(key, leaf)) - planned.get(key, 0)
        if missing > 0:
            raise no_data_error(key, missing)


def _unknown(index: MetadataIndex) -> CorruptCheckpointError:
    where = "" if index.offset is None else f" at {tuple(index.offset)}"
    return CorruptCheckpointError(
        f"the checkpoint's metadata lists no data for key {index.fqn!r}{where}: it is damaged, or the plan is for "
        f"another checkpoint",
        key=index.fqn,
    )


def _is_filled_whole(target: torch.Tensor, record: TensorRecord, chunk: ChunkRecord, item: ReadItem) -> bool:
    """The target is plain memory for a whole chunk, as it is stored, as nearly all are: nothing else needs a look."""
    return (
        target.dtype is record.dtype
        and item.lengths == chunk.sizes
        and target.size() == item.lengths
        and target.is_contiguous()
        and is_resident(target)
        and (type(target) is torch.Tensor or not is_wrapper(target))
        and has_memory(target)
    )


def _describe_target(target: torch.Tensor, record: TensorRecord, item: ReadItem, policy: CastPolicy) -> str | None:
    if target.size() != item.lengths:
        return f"shape {tuple(target.size())} in the state, {tuple(item.lengths)} in the plan"
    if target.dtype is not record.dtype and not allows_cast(policy, record.dtype, target.dtype):
        return f"{target.dtype} in the state, {record.dtype} in the checkpoint"
    if target.is_meta:
        return "on the meta device, which has no memory to load into; give it some with to_empty()"
    if target.layout is not torch.strided:
        return f"a tensor of layout {target.layout} in the state, a dense tensor in the checkpoint"
    if is_wrapper(target):
        return f"a {type(target).__name__}, a tensor subclass that can't be loaded into in place"
    if not has_memory(target):
        return FREED
    if overlaps_itself(target):
        return OVERLAPPING
    return None
