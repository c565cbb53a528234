"""The storage writer of one key of a step.

Problem: `FsspecStorageWriter` is a checkpoint of its own: it refuses or withdraws what stands at its URL, publishes
its own marker, and removes leftovers. In a step the marker is the manifest, one for all keys, and what stood there has
been dealt with before any key is written (`commit`).

Way taken: the same planning, placing and sending, without the rest, on a store that all keys of the step share. Its
data files are numbered from where the claim says, so that no two saves share a name; ``.metadata`` is put only where
none stands (`ownership`). For the manifest it says size and CRC-32 of each file, joined from the checksums that the
entries have anyway.

Flow, in `save_step`: ``prepare_local_plan`` → ``prepare_global_plan`` → ``write_data`` → each rank's `StepWriter.files`
to the coordinator → `StepWriter.publish` → `StepWriter.metadata_file`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dcpfs.checkpointer.layout import step_name
from dcpfs.checkpointer.manifest import FileRecord
from dcpfs.checkpointer.ownership import put_owned
from dcpfs.config import TransferConfig, Trust
from dcpfs.dcp.file_checksums import FileChecksums
from dcpfs.dcp.writer import FsspecStorageWriter
from dcpfs.format.checksum import crc32
from dcpfs.format.names import METADATA_NAME
from dcpfs.storage.store import Store
from dcpfs.storage.subdirectory import Subdirectory
from dcpfs.torch_private import EntryInfo

if TYPE_CHECKING:
    from fsspec.callbacks import Callback

    from dcpfs.torch_private import StreamTransformExtension

__all__ = ["StepWriter", "join_fingerprints"]

_MASK32 = 0xFFFFFFFF


class StepWriter(FsspecStorageWriter):
    """Writes one key of a step. One save; belongs to one thread at a time. Not picklable: it uses the caller's store.

    Args:
        store: Opened at ``save_dir``; stays the caller's, who closes it.
        iteration: Of the step.
        key: Of the state; the directory within the step.
        save_id: Of the save, the same on the coordinator and in the manifest; other ranks' is not written anywhere.
        first_file_number: From which data files are numbered: that of the claim, on all ranks.
        transfer: How bytes are moved.
        callback: An fsspec callback, told this rank's bytes.
        extensions: torch's stream transforms, applied to each entry.
        trust: `Trust.PICKLE`: objects that a default load refuses are saved all the same.
    """

    def __init__(
        self,
        store: Store,
        iteration: int,
        key: str,
        *,
        save_id: str,
        first_file_number: int = 0,
        transfer: TransferConfig | None = None,
        callback: Callback | None = None,
        extensions: Sequence[StreamTransformExtension] | None = None,
        trust: Trust = Trust.ALLOWLIST,
    ) -> None:
        self._step_store = store
        self._iteration = iteration
        self._key = key
        self._view = Subdirectory(store, f"{step_name(iteration)}/{key}")
        location = self._view.location
        super().__init__(
            location.url,
            storage_options=location.storage_options,
            transfer=transfer,
            callback=callback,
            extensions=extensions,
            trust=trust,
        )
        self._save_id = self._next_save_id = save_id
        self._first_file_number = first_file_number
        self._records: dict[str, FileRecord] = {}
        self._fingerprint = 0
        self._metadata_file: FileRecord | None = None

    @property
    def files(self) -> Mapping[str, FileRecord]:
        """Data files of this rank's `write_data`, by name relative to the step, e.g. ``model/__0_0.distcp``."""
        return self._records

    @property
    def fingerprint(self) -> int:
        """32 bits that follow from names, places and contents of this rank's entries; those of all ranks add up."""
        return self._fingerprint

    @property
    def metadata_file(self) -> FileRecord | None:
        """The ``.metadata`` that `publish` has put; None before."""
        return self._metadata_file

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin the save. Pass ``rank``."""
        save_id = self._save_id
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        self._save_id = self._next_save_id = save_id
        self._records = {}
        self._fingerprint = 0

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items of the key: all of its files, or none.

        Raises:
            UnsupportedValueError: A value that can't be stored exactly; before a byte of this key is written.
            StorageError: The store failed; no file of this rank and key is left behind.
        """
        self._checksums = FileChecksums()
        future = super().write_data(plan, planner)
        self._records = {
            f"{self._key}/{name}": FileRecord(size_bytes, crc)
            for name, (size_bytes, crc) in self._checksums.whole_files().items()
        }
        self._fingerprint = join_fingerprints(map(_fingerprint_of, future.value()))
        return future

    def publish(self, metadata: Metadata, results: list[list[WriteResult]]) -> list[tuple[MetadataIndex, EntryInfo]]:
        """Check that every promised entry is there, and put ``.metadata``. Coordinator; any thread.

        A failure leaves everything as it is: `abandon_step` deletes it.

        Returns:
            Where each entry lies.

        Raises:
            IncompleteCheckpointError: A planned item has no result; nothing is put.
            SupersededError: Another save has taken over the step, and has put its own.
        """
        encoded, entries = self._encode_metadata(metadata, results)
        put_owned(
            self._step_store,
            f"{step_name(self._iteration)}/{self._key}/{METADATA_NAME}",
            [encoded],
            iteration=self._iteration,
            save_id=self._save_id,
        )
        self._metadata_file = FileRecord(len(encoded), crc32(encoded))
        return entries

    def close(self) -> None:
        """Nothing: the store is the caller's."""

    def __getstate__(self) -> dict[str, object]:
        raise TypeError("a StepWriter uses the store of the save that it belongs to, and can't be pickled")

    def _open(self) -> Store:
        return self._view

    def _make_way(self) -> None:
        """The step has been claimed, and what stood there withdrawn."""

    def _log_saved(self) -> None:
        """The save logs one line for all keys."""


def join_fingerprints(parts: Iterable[int]) -> int:
    """The fingerprint of all entries of those that have these."""
    return sum(parts) & _MASK32


def _fingerprint_of(result: WriteResult) -> int:
    index, info = result.index, result.storage_data
    name = f"{index.fqn}\0{tuple(index.offset or ())}".encode("utf-8", "surrogatepass")
    return crc32(name, max(0, info.crc32) if isinstance(info, EntryInfo) else 0)
