"""Whether the bytes of a step are those that were saved.

Problem: a flipped bit has no size: a step with one loads, and trains on (case 113). Reading a step to find out must
neither take its size in memory nor, on a remote store, run at the speed of one connection.

Way taken: of our own steps the manifest has the CRC-32 of every file, so a file is read in ranges of a few MiB by a
bounded pool of threads, each range is dropped once it is summed, and the sums are joined in order. Of another tool's
steps there is only what the entries say of themselves: each is a zip archive with a checksum per record. Files can be
dealt out over ranks (`share_files`), since a step is read whole once, not once a rank.
"""

from __future__ import annotations

import io
import logging
import threading
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from dcpfs.checkpointer.presence import size_if_there
from dcpfs.checkpointer.step_status import StepStatus
from dcpfs.config import TransferConfig, Trust
from dcpfs.dcp.transfer import ByteBudget, Task, run_tasks
from dcpfs.errors import (
    BucketNotFoundError,
    CheckpointError,
    DamagedObjectError,
    ObjectNotFoundError,
    TransferSizeError,
)
from dcpfs.format.checksum import crc32, crc32_combine
from dcpfs.format.index import CheckpointIndex, EntryLocation, TensorRecord
from dcpfs.format.metadata import decode_index
from dcpfs.format.names import METADATA_NAME, parse_rank_metadata_name
from dcpfs.storage.store import Store

__all__ = ["FileFault", "share_files", "verify_step"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FileFault:
    """A file that is not what was saved.

    Attributes:
        file: Its name, relative to the step.
        reason: What is wrong, as the end of a sentence about the file.
        key: Entry of a foreign step that is damaged, or None: the manifest knows whole files.
    """

    file: str
    reason: str
    key: str | None = None

    def __str__(self) -> str:
        return f"{self.file} {self.reason}"


def share_files(status: StepStatus, rank: int, world_size: int) -> list[str]:
    """The files of a step that one of ``world_size`` ranks verifies: about as many bytes for each. Pure.

    Every file is some rank's, and no file is two ranks'.
    """
    sizes = {name: each.size_bytes for name, each in status.manifest.files.items()} if status.manifest else status.files
    loads = [0] * world_size
    mine = []
    for name, size_bytes in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        least = loads.index(min(loads))
        loads[least] += size_bytes
        if least == rank:
            mine.append(name)
    return sorted(mine)


def verify_step(
    store: Store,
    status: StepStatus,
    *,
    files: Collection[str] | None = None,
    transfer: TransferConfig | None = None,
    trust: Trust = Trust.ALLOWLIST,
) -> list[FileFault]:
    """Read the files of a step and compare checksums. Reads only; local, no collective.

    Args:
        store: The one that was looked into for ``status``.
        status: Of the step, whatever its state.
        files: Names relative to the step, e.g. of `share_files`; None: all. Names of no file of it are passed over.
        transfer: Concurrency, and the bytes in memory at once.
        trust: What may be unpickled from the ``.metadata`` of a foreign step.

    Returns:
        What is wrong, by file name; nothing when all is well.

    Raises:
        StorageError: A file is there and could not be read.
    """
    settings = TransferConfig.given(transfer)
    check = _Verification(store, status, settings, trust)
    wanted = None if files is None else frozenset(files)
    tasks = check.committed_tasks(wanted) if status.manifest is not None else check.foreign_tasks(wanted)
    run_tasks(
        tasks,
        concurrency=settings.concurrency if store.capabilities.remote else settings.local_concurrency,
        budget=ByteBudget(settings.budget_bytes),
        name="dcpfs-verify",
    )
    return check.faults()


class _Sums:
    """Checksums of the ranges of one file, joined when all are there."""

    def __init__(self, count: int) -> None:
        self.ranges: list[tuple[int, int] | None] = [None] * count
        self.left = count

    def join(self) -> int:
        total = 0
        for each in self.ranges:
            if each is not None:
                total = crc32_combine(total, *each)
        return total


class _Verification:
    def __init__(self, store: Store, status: StepStatus, transfer: TransferConfig, trust: Trust) -> None:
        self._store = store
        self._status = status
        self._read_bytes = min(transfer.read_bytes, transfer.budget_bytes)
        self._trust = trust
        self._lock = threading.Lock()
        self._faults: dict[str, FileFault] = {}

    def faults(self) -> list[FileFault]:
        return [self._faults[name] for name in sorted(self._faults)]

    def _add(self, file: str, reason: str, key: str | None = None) -> None:
        with self._lock:
            self._faults.setdefault(file, FileFault(file, reason, key))

    def _at(self, name: str) -> str:
        return f"{self._status.path}/{name}" if self._status.path else name

    # -- our own steps: whole files

    def committed_tasks(self, wanted: frozenset[str] | None) -> Iterator[Task]:
        manifest = self._status.manifest
        if manifest is None:
            return
        listed = self._status.files
        for name, record in sorted(manifest.files.items()):
            if wanted is not None and name not in wanted:
                continue
            size_bytes = listed[name] if name in listed else self._size(name)
            if size_bytes != record.size_bytes:  # before there are as many ranges as the manifest promises bytes
                if size_bytes is not None:
                    self._add(name, f"has {size_bytes} bytes instead of {record.size_bytes}")
                continue
            starts = range(0, record.size_bytes, self._read_bytes)
            if record.crc32 is None or not starts:
                yield Task(0, self._guarded(name, partial(self._check_there, name)))
                continue
            sums = _Sums(len(starts))
            for number, start in enumerate(starts):
                range_bytes = min(self._read_bytes, record.size_bytes - start)
                yield Task(range_bytes, self._sum_task(name, sums, number, start, range_bytes, record.crc32))

    def _check_there(self, name: str) -> None:
        self._store.head(self._at(name))

    def _size(self, name: str) -> int | None:
        """Of a file that was not listed; None: it is missing, which is noted."""
        size_bytes = size_if_there(self._store, self._at(name))
        if size_bytes is None:
            self._add(name, "is missing")
        return size_bytes

    def _sum_task(
        self, name: str, sums: _Sums, number: int, start: int, size_bytes: int, expected: int
    ) -> Callable[[], None]:
        def run() -> None:
            if name in self._faults:
                return
            data = bytearray(size_bytes)
            self._store.read_into(self._at(name), start, [memoryview(data)])
            found = (crc32(data), size_bytes)
            with self._lock:
                sums.ranges[number] = found
                sums.left -= 1
                last = sums.left == 0
            if last and sums.join() != expected:
                self._add(name, "does not have the checksum it was saved with: it was damaged since")

        return self._guarded(name, run)

    def _guarded(self, name: str, run: Callable[[], None]) -> Callable[[], None]:
        def guarded() -> None:
            try:
                run()
            except BucketNotFoundError:
                raise
            except ObjectNotFoundError:
                self._add(name, "is missing")
            except TransferSizeError as error:
                self._add(name, f"is shorter than it was saved ({error.message})")
            except DamagedObjectError as error:
                self._add(name, f"was damaged since it was saved ({error.message})")

        return guarded

    # -- foreign steps: entry by entry

    def foreign_tasks(self, wanted: frozenset[str] | None) -> Iterator[Task]:
        for key in self._status.keys or ("",):
            prefix = f"{key}/" if key else ""
            for index in self._indexes(prefix):
                for name, entries in _entries(index).items():
                    file = prefix + name
                    if wanted is None or file in wanted:
                        yield from self._file_tasks(file, entries)

    def _indexes(self, prefix: str) -> Iterator[CheckpointIndex]:
        names = [name for name in self._status.files if name.startswith(prefix)]
        ranks = [name for name in names if parse_rank_metadata_name(name[len(prefix) :]) is not None]
        for name in [prefix + METADATA_NAME] if prefix + METADATA_NAME in names or not ranks else sorted(ranks):
            index = self._index(name)
            if index is not None:
                yield index

    def _index(self, name: str) -> CheckpointIndex | None:
        try:
            return decode_index(self._store.get(self._at(name)), trust=self._trust, url=self._status.url)
        except BucketNotFoundError:
            raise
        except ObjectNotFoundError:
            self._add(name, "is missing")
        except (CheckpointError, DamagedObjectError) as error:
            self._add(name, f"can't be used: {error.message}")
        return None

    def _file_tasks(self, file: str, entries: Sequence[tuple[str, EntryLocation]]) -> Iterator[Task]:
        """Neighbours that fit into one read together; larger entries alone, in a window that moves over them."""
        group: list[tuple[str, EntryLocation]] = []
        for key, entry in entries:
            start = group[0][1].offset_bytes if group else entry.offset_bytes
            end = entry.offset_bytes + entry.length_bytes
            if group and end - start > self._read_bytes:
                yield self._group_task(file, group)
                group = []
            if entry.length_bytes > self._read_bytes:
                yield Task(2 * self._read_bytes, self._guarded(file, self._window_check(file, key, entry)))
            else:
                group.append((key, entry))
        if group:
            yield self._group_task(file, group)

    def _group_task(self, file: str, group: Sequence[tuple[str, EntryLocation]]) -> Task:
        start = group[0][1].offset_bytes
        size_bytes = max(entry.offset_bytes + entry.length_bytes for _, entry in group) - start

        def run() -> None:
            data = bytearray(size_bytes)
            self._store.read_into(self._at(file), start, [memoryview(data)])
            for key, entry in group:
                at = entry.offset_bytes - start
                self._check_archive(file, key, io.BytesIO(memoryview(data)[at : at + entry.length_bytes]))

        return Task(2 * size_bytes, self._guarded(file, run))

    def _window_check(self, file: str, key: str, entry: EntryLocation) -> Callable[[], None]:
        def run() -> None:
            window = _Window(self._store, self._at(file), entry.offset_bytes, entry.length_bytes)
            with io.BufferedReader(window, self._read_bytes) as stream:
                self._check_archive(file, key, stream)

        return run

    def _check_archive(self, file: str, key: str, stream: io.BufferedIOBase) -> None:
        if stream.read(4) != b"PK\x03\x04":
            logger.debug("The entry of %r in %s has no checksum of its own", key, file)
            return
        try:
            with zipfile.ZipFile(stream) as archive:
                records = archive.infolist()
                if any(record.compress_type != zipfile.ZIP_STORED for record in records):
                    self._add(file, f"is damaged: the entry of {key!r} is compressed, which torch does not write", key)
                    return
                if all(record.CRC == 0 for record in records if record.file_size):
                    return  # the writer was told to compute none
                damaged = archive.testzip()
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, UnicodeError) as error:
            self._add(file, f"is damaged: the entry of {key!r} can't be read ({error})", key)
            return
        if damaged is not None:
            self._add(file, f"is damaged: the checksum of {key!r} is wrong", key)


def _entries(index: CheckpointIndex) -> dict[str, list[tuple[str, EntryLocation]]]:
    """The entries of every file, by offset. Those that went through a transform are no archives and are left out."""
    found: dict[str, dict[int, tuple[str, EntryLocation]]] = {}
    for key, record in index.records.items():
        chunks = [chunk.location for chunk in record.chunks] if isinstance(record, TensorRecord) else [record.location]
        for location in chunks:
            if not location.transforms:
                found.setdefault(location.file, {})[location.offset_bytes] = (key, location)
    return {file: [entries[at] for at in sorted(entries)] for file, entries in sorted(found.items())}


class _Window(io.RawIOBase):
    """The bytes of one entry as a stream that can seek."""

    def __init__(self, store: Store, path: str, start: int, size_bytes: int) -> None:
        self._store = store
        self._path = path
        self._start = start
        self._size_bytes = size_bytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size_bytes}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override] # WriteableBuffer is not public
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._size_bytes - self._position))
        if count:
            self._store.read_into(self._path, self._start + self._position, [view[:count]])
            self._position += count
        return count
