"""DCP's storage writer on any URL.

Problem: torch's own writers save through one file object per rank (or thread), frame each tensor with a
pickler, lose the errors of helper threads, overwrite in place, publish by rename, and forget their options when
they are reused. Building on them inherits all of it (cases 1, 2, 31-33, 76).

Way taken: DCP's base class alone. Who calls what, in the order of one save::

    every rank    storage_meta, set_up_storage_writer   a save begins: a new save id
    every rank    prepare_local_plan                    notes the items as planned, for the comparison below
    coordinator   prepare_global_plan                   do ranks agree? → refuse or withdraw what stands there
    every rank    write_data                            check, place, send (`upload`); all files of a rank or none
    coordinator   finish                                all entries written? → .metadata, one put → leftovers

Every rank waits for ``prepare_global_plan``, so no byte is written before the old marker is gone. Without
collectives (``use_collectives=False``) each rank is its own coordinator: it refuses, or withdraws, the common
marker and its own before its first byte, and publishes its own ``__N.metadata``, with a note of which save it is of
(`joint_save`). Rank 0 withdraws those of a larger world, too.

Nothing that belongs to one save travels in ``plan.storage_data``, since torch's plan cache replays it: the file
prefix follows from the rank. The writer is a value: it can be pickled to another process (``async_save`` with a
process), where it opens its own store.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from dcpfs.config import RetryConfig, TransferConfig, Trust
from dcpfs.dcp.accounting import account
from dcpfs.dcp.agreement import check_replicas
from dcpfs.dcp.file_checksums import FileChecksums
from dcpfs.dcp.flatten import STRUCTURE_ATTRIBUTE
from dcpfs.dcp.item_values import ItemValues
from dcpfs.dcp.joint_save import begin_joint_save, find_world_size
from dcpfs.dcp.placement import count_files, place
from dcpfs.dcp.predecessor import delete_leftovers, refuse_existing, withdraw_existing, withdraw_larger_world
from dcpfs.dcp.transfer import ByteBudget
from dcpfs.dcp.transformed import upload_transformed
from dcpfs.dcp.upload import Uploader, UploadReport
from dcpfs.errors import CheckpointExistsError, ObjectExistsError
from dcpfs.format.collector import paused_collector
from dcpfs.format.index import RankSave
from dcpfs.format.metadata import INDEX_MARK, encode_metadata
from dcpfs.format.names import METADATA_NAME, data_file_name, rank_metadata_name
from dcpfs.storage.location import Location
from dcpfs.storage.opening import open_store, require_writable
from dcpfs.storage.store import Store
from dcpfs.torch_private import DCP_VERSION, EntryInfo

if TYPE_CHECKING:
    from fsspec.callbacks import Callback

    from dcpfs.torch_private import StreamTransformExtension

__all__ = ["FsspecStorageWriter", "reads_items"]

_logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., object])

_PAUSED_BYTES = 4 << 30
_SEQUENTIAL_FILES = 8
_SEQUENTIAL_FILE_BYTES = 64 << 20
"""Where a file takes its parts one at a time, files are what can be sent in parallel."""


@dataclasses.dataclass(frozen=True)
class _LocalItems:
    """The items of a rank before replicas are dropped. Pickled with the plan, they cost a reference each."""

    items: list[WriteItem]


def reads_items(writer: StorageWriter) -> bool:
    """False when the writer's `prepare_global_plan` needs no items, so that nobody has to make those of all ranks.

    That is a property of the very function: whoever overrides it is asked with all items again.
    """
    return getattr(type(writer).prepare_global_plan, "dcpfs_reads_items", True) is not False


def _needs_no_items(function: F) -> F:
    function.dcpfs_reads_items = False  # type: ignore[attr-defined]  # read by `reads_items`
    return function


class FsspecStorageWriter(StorageWriter):
    """Writes DCP checkpoints to any URL that fsspec knows, or a local path.

    For `dcp.save`, `dcp.async_save` (thread or process) and `dcpfs.save`. One save at a time; may be reused for the
    next, also with another ``checkpoint_id``, and keeps its options.

    Args:
        url: Where the checkpoint is written, e.g. ``s3://bucket/run/model``.
        storage_options: What the filesystem of that scheme takes.
        overwrite: False: an existing checkpoint is an error. True: it is withdrawn before the first byte is written
            and its leftovers are deleted afterwards; if the save fails nothing is loadable there.
        transfer: How bytes are moved.
        retry: When requests are tried again.
        callback: An fsspec callback (e.g. ``TqdmCallback``), told this rank's bytes. It stays in this process.
        extensions: torch's stream transforms (compression), applied to each entry.
        trust: `Trust.PICKLE`: objects that a default load refuses are saved all the same.

    Raises:
        ConfigError: The URL or the options can't be meant.
        UnsupportedOperationError: What the URL names can only be read.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, object] | None = None,
        overwrite: bool = False,
        transfer: TransferConfig | None = None,
        retry: RetryConfig | None = None,
        callback: Callback | None = None,
        extensions: Sequence[StreamTransformExtension] | None = None,
        trust: Trust = Trust.ALLOWLIST,
    ) -> None:
        super().__init__()
        self._location = Location(url, storage_options)
        require_writable(self._location)
        self._overwrite = overwrite
        self._transfer = TransferConfig.given(transfer)
        self._retry = RetryConfig.given(retry)
        self._callback = callback
        self._extensions = tuple(extensions or ())
        self._trust = Trust(trust)
        self._store: Store | None = None
        self._rank = 0
        self._use_collectives = True
        self._is_coordinator = True
        self._save_id = ""
        self._next_save_id = _new_save_id()
        self._started_seconds = 0.0
        self._written = UploadReport()
        self._files: list[str] = []
        self._checksums: FileChecksums | None = None
        self._first_file_number = 0

    @property
    def checkpoint_id(self) -> str:
        """The redacted URL: torch logs it."""
        return self._location.redacted

    @property
    def location(self) -> Location:
        """Where the next save goes."""
        return self._location

    @property
    def save_id(self) -> str:
        """Id of the save that runs or ran last on this rank."""
        return self._save_id

    @property
    def written(self) -> UploadReport:
        """What this rank's last `write_data` sent."""
        return self._written

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Go on with another URL, and the same options."""
        if checkpoint_id:
            location = Location(checkpoint_id, self._location.storage_options)
            if location != self._location:
                require_writable(location)
                self.close()
                self._location = location

    def storage_meta(self) -> StorageMeta:
        """What torch logs and pickles into ``.metadata``: the redacted URL and the id of the save that comes next."""
        return StorageMeta(checkpoint_id=self._location.redacted, save_id=self._next_save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Begin a save. DCP passes ``rank`` and ``use_collectives``."""
        rank = kwargs.get("rank")
        if rank is None:
            rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        self._rank = int(rank)
        self._use_collectives = bool(kwargs.get("use_collectives", True))
        self._is_coordinator = is_coordinator
        self._save_id, self._next_save_id = self._next_save_id, _new_save_id()
        self._started_seconds = time.monotonic()
        self._written = UploadReport()
        self._files = []

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Note what this rank planned; without collectives, refuse or withdraw what stands there."""
        if not self._use_collectives:
            self._make_way()
            return plan
        compared = getattr(plan.planner_data, "compares_replicas", False)
        if plan.storage_data is None and plan.items and not compared:
            return dataclasses.replace(plan, storage_data=_LocalItems(plan.items))
        return plan

    @_needs_no_items
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Compare the ranks' plans, then refuse or withdraw what stands there. Coordinator, while the others wait."""
        if self._use_collectives:
            planned = [plan.storage_data.items for plan in plans if isinstance(plan.storage_data, _LocalItems)]
            check_replicas(planned)
            self._make_way()
        return [
            dataclasses.replace(plan, storage_data=None) if isinstance(plan.storage_data, _LocalItems) else plan
            for plan in plans
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items: all of its files, or none.

        Raises:
            UnsupportedValueError: A value that can't be stored exactly; before a byte is written.
            StorageError: The store failed; no file of this rank is left behind.
        """
        future: Future[list[WriteResult]] = Future()
        try:
            results = self._write_items(plan.items, planner)
            future.set_result(results)
            self._files = sorted(_files_of([results]))
        except BaseException:
            self.close()
            raise
        if not self._is_coordinator:
            self._log_saved()
            self.close()
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish, and note in the metadata where everything lies. Coordinator.

        Raises:
            IncompleteCheckpointError: A planned item has no result; nothing is published.
        """
        entries = self.publish(metadata, results)
        metadata.storage_data = {index: info.plain() for index, info in entries}

    def publish(self, metadata: Metadata, results: list[list[WriteResult]]) -> list[tuple[MetadataIndex, EntryInfo]]:
        """Check that every promised entry is there, put the metadata, delete leftovers. Coordinator.

        Returns:
            Where each entry lies.

        Raises:
            IncompleteCheckpointError: A planned item has no result; nothing is published.
            CheckpointExistsError: Without ``overwrite``, and another save has published there since this one began.
        """
        store = self._open()
        name = METADATA_NAME if self._use_collectives else rank_metadata_name(self._rank)
        joint = None if self._use_collectives else begin_joint_save(self._rank, self._location.redacted)
        try:
            try:
                encoded, entries = self._encode_metadata(metadata, results, None if joint is None else joint.note)
                store.put(name, [encoded], if_absent=not self._overwrite)
            except ObjectExistsError as error:  # and it vouches for files of these very names: nothing is deleted
                raise CheckpointExistsError(
                    f"can't publish the checkpoint at {self._location.redacted}: another save to this URL "
                    f"published {name} while this one ran, and both wrote files of the same names; delete that "
                    "checkpoint and save again, each save to a URL of its own"
                ) from error
            except BaseException as error:
                _undo(store, name, results, error)
                raise
            if joint is not None:
                joint.count_published()
            if self._overwrite and self._use_collectives:
                _clean_up(store, keep={name, *_files_of(results)})
            self._log_saved()
        finally:
            self.close()
        return entries

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """True when it is a URL or path that can be meant."""
        try:
            Location(checkpoint_id)
        except ValueError:
            return False
        return True

    def discard(self) -> None:
        """Delete the files of this rank's last `write_data`, after a save that failed elsewhere. Never raises."""
        names, self._files = self._files, []
        if not names:
            return
        try:
            self._open().delete(names)
        except Exception as error:  # noqa: BLE001 - the failure of the save is what counts and is raised
            _logger.warning("files of a failed save at %s could not be deleted: %s", self._location.redacted, error)

    def close(self) -> None:
        """Release connections. Idempotent; the next save opens new ones."""
        store, self._store = self._store, None
        if store is not None:
            store.close()

    def __getstate__(self) -> dict[str, object]:
        # A store holds connections, and a progress bar belongs to the process that shows it.
        return {**self.__dict__, "_store": None, "_callback": None}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._location.redacted!r})"

    # --- one save

    def _open(self) -> Store:
        if self._store is None:
            self._store = open_store(self._location, transfer=self._transfer, retry=self._retry)
        return self._store

    def _make_way(self) -> None:
        store = self._open()
        if self._overwrite:
            withdraw_existing(store, None if self._use_collectives else self._rank)
            if not self._use_collectives and self._rank == 0 and dist.is_available() and dist.is_initialized():
                world_size = find_world_size(self._rank)
                if world_size is not None:
                    withdraw_larger_world(store, world_size)
        else:
            concurrency = self._transfer.concurrency if store.capabilities.remote else 1
            own = rank_metadata_name(0 if self._use_collectives else self._rank)
            refuse_existing(store, (METADATA_NAME, own), concurrency=concurrency)

    def _write_items(self, items: Sequence[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        if not items:
            return []
        source = ItemValues(items, planner, self._trust)
        with paused_collector():
            payloads = source.payloads()
        store = self._open()
        remote = store.capabilities.remote
        concurrency = self._transfer.concurrency if remote else self._transfer.local_concurrency
        budget = ByteBudget(self._transfer.budget_bytes)
        progress = _Progress(self._callback, sum(payload.size_bytes for payload in payloads))
        if self._extensions:
            stored, self._written = upload_transformed(
                store,
                payloads,
                source.resolve,
                self._name_file,
                self._extensions,
                concurrency=concurrency,
                budget=budget,
                on_bytes=progress.add,
                checksums=self._checksums,
            )
            # As readers undo them: from the stored bytes inwards. torch's writer notes the reverse, and of two
            # transforms whose order counts it can't read what it wrote.
            descriptors = [extension.get_descriptor() for extension in self._extensions]
            return [
                _result(item, EntryInfo(place.file, place.offset_bytes, place.length_bytes, descriptors))
                for item, place in ((items[number], stored[number]) for number in range(len(items)))
            ]
        sizes_bytes = [payload.size_bytes for payload in payloads]
        layouts = place(sizes_bytes, files=self._count_files(store, sizes_bytes))
        files = [(self._name_file(number), layout) for number, layout in enumerate(layouts)]
        uploader = Uploader(
            store,
            payloads,
            source.resolve,
            makes_tensors=source.makes_tensors,
            concurrency=concurrency,
            budget=budget,
            on_bytes=progress.add,
            checksums=self._checksums,
        )
        # A save up to this size takes seconds: collection, which would walk all its records, waits for its end.
        with paused_collector() if sum(sizes_bytes) <= _PAUSED_BYTES else contextlib.nullcontext():
            self._written = uploader.upload(files)
        with paused_collector():
            results: list[WriteResult | None] = [None] * len(items)
            for name, layout in files:
                for number, offset in zip(layout.numbers, layout.offsets_bytes, strict=True):
                    payload = payloads[number]
                    info = EntryInfo(name, offset, payload.size_bytes, None, payload.head_bytes, payload.crc32)
                    results[number] = _result(items[number], info)
            return [result for result in results if result is not None]

    def _name_file(self, number: int) -> str:
        return data_file_name(self._rank, self._first_file_number + number)

    def _count_files(self, store: Store, sizes_bytes: Sequence[int]) -> int:
        total_bytes = sum(sizes_bytes)
        wish_bytes = self._transfer.file_bytes
        if wish_bytes is None and not store.capabilities.parallel_parts:
            wish_bytes = max(_SEQUENTIAL_FILE_BYTES, -(-total_bytes // _SEQUENTIAL_FILES))
        most_bytes = store.capabilities.max_object_bytes
        if most_bytes is not None and total_bytes > most_bytes:
            wish_bytes = min(wish_bytes or most_bytes, most_bytes // 2)
        files = count_files(total_bytes, len(sizes_bytes), file_bytes=wish_bytes)
        # All files of a rank are published together, so they are open together.
        return min(files, store.capabilities.max_open_sinks or files)

    def _encode_metadata(
        self, metadata: Metadata, results: list[list[WriteResult]], rank_save: RankSave | None = None
    ) -> tuple[bytes, list[tuple[MetadataIndex, EntryInfo]]]:
        """Check that every promised entry was written; the content of ``.metadata``, and where each entry lies."""
        with paused_collector():
            entries = account(metadata, results, where=self._location.redacted)
            metadata.version = DCP_VERSION
            metadata.storage_meta = StorageMeta(
                checkpoint_id=self._location.redacted, save_id=self._save_id, modules=[INDEX_MARK]
            )
            structure = getattr(metadata, STRUCTURE_ATTRIBUTE, None)
            encoded = encode_metadata(
                metadata, structure=structure, save_id=self._save_id, entries=entries, rank_save=rank_save
            )
        return encoded, entries

    def _log_saved(self) -> None:
        seconds = time.monotonic() - self._started_seconds
        written = self._written
        _logger.info(
            "rank %d %s %.1f MB to %s in %.2f s: %d files, %d writes%s",
            self._rank,
            "saved" if self._is_coordinator else "wrote",
            written.bytes_written / 1e6,
            self._location.redacted,
            seconds,
            written.files,
            written.requests,
            ", and the metadata" if self._is_coordinator else "",
        )


class _Progress:
    """Tells an fsspec callback. Called by one thread at a time."""

    def __init__(self, callback: Callback | None, total_bytes: int) -> None:
        self._callback = callback
        self._lock = threading.Lock()
        if callback is not None:
            callback.set_size(total_bytes)

    def add(self, size_bytes: int) -> None:
        if self._callback is not None:
            with self._lock:
                self._callback.relative_update(size_bytes)


def _result(item: WriteItem, info: EntryInfo) -> WriteResult:
    # Not by the constructor, which takes three times as long: the class is frozen.
    result = WriteResult.__new__(WriteResult)
    result.__dict__.update(index=item.index, size_in_bytes=info.length, storage_data=info)
    return result


def _files_of(results: list[list[WriteResult]]) -> set[str]:
    return {
        result.storage_data.relative_path
        for written in results
        for result in written
        if isinstance(result.storage_data, EntryInfo)
    }


def _clean_up(store: Store, keep: set[str]) -> None:
    """Delete leftovers of an older checkpoint. The new one is published, so a failure is only reported."""
    try:
        delete_leftovers(store, keep)
    except Exception as error:  # noqa: BLE001 - reported; what it leaves costs space and nothing else
        _logger.warning("files of an older checkpoint at %s are left: %s", store.location.redacted, error)


def _undo(store: Store, name: str, results: list[list[WriteResult]], cause: BaseException) -> None:
    """Delete what this save wrote, marker first: a put that failed may still have taken effect."""
    try:
        store.delete([name])
        store.delete(sorted(_files_of(results)))
    except Exception as error:  # noqa: BLE001 - noted on the error that is raised
        note = f"data files at {store.location.redacted} could not be deleted again: {error}"
        cause.__notes__ = [*getattr(cause, "__notes__", ()), note]  # type: ignore[attr-defined]  # new in 3.11


def _new_save_id() -> str:
    return uuid.uuid4().hex
