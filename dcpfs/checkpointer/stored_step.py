"""What a step holds, read by one rank for all: the metadata of its keys and the names of its rank files.

Problem: a trainer that calls ``dcp.load`` for one key after another has every rank fetch every ``.metadata``, learns
that the third key is missing after it has filled the first two, and takes whatever ``.metadata`` lies there, also that
of a save which overwrote it meanwhile.

Way taken: the coordinator reads all of them at once and holds each against the manifest: length, checksum, and that it
belongs to the same save. What it found travels to all ranks as a value, small parts of the manifest included, so that
only the coordinator needs to know the manifest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from dcpfs.checkpointer.layout import DATALOADER, parse_rank_file_name, rank_file_name
from dcpfs.checkpointer.manifest import FileRecord, Manifest
from dcpfs.config import RetryConfig, TransferConfig, Trust
from dcpfs.dcp.source import CheckpointSource
from dcpfs.errors import CheckpointNotFoundError, CorruptCheckpointError, IncompleteCheckpointError
from dcpfs.format.checksum import crc32
from dcpfs.format.index import CheckpointIndex
from dcpfs.format.metadata import decode_index, merge_indexes
from dcpfs.format.names import METADATA_NAME
from dcpfs.storage.location import Location
from dcpfs.storage.store import Store

__all__ = ["StoredStep", "read_stored_step"]

_AT_ONCE = 16


@dataclass(frozen=True)
class StoredStep:
    """What was found of the keys that were asked for. A plain value.

    Attributes:
        metadata: Key in torch's format to the bytes of its ``.metadata``, or of what its ranks wrote by themselves.
        rank_files: Key to global rank to the name of that rank's file, relative to the step.
        records: Size and checksum of those files, where the manifest has them.
        save_id: Of the manifest, or None for a step of another tool.
        world_size: Number of ranks that saved, or None.
        left: Keys that the step holds and nobody asked for, as far as the manifest tells.
        unchecked: Keys for whose ``.metadata`` the manifest has no checksum.
        topology: Of the manifest.
    """

    metadata: Mapping[str, tuple[bytes, ...]] = field(default_factory=dict, repr=False)
    rank_files: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    records: Mapping[str, FileRecord] = field(default_factory=dict)
    save_id: str | None = None
    world_size: int | None = None
    left: tuple[str, ...] = ()
    unchecked: frozenset[str] = frozenset()
    topology: Mapping[str, object] = field(default_factory=dict)

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys that were asked for and found."""
        return (*self.metadata, *self.rank_files)

    @property
    def is_foreign(self) -> bool:
        """Another tool wrote it: there is no manifest."""
        return self.save_id is None

    def decode_index(self, key: str, *, trust: Trust, url: str) -> CheckpointIndex:
        """The table of contents of a key.

        Raises:
            CorruptCheckpointError: It is damaged, or of another save than the manifest.
            UntrustedDataError: It holds a class outside the allow-list, or a name that leaves the key's directory.
        """
        files = self.metadata[key]
        indexes = [decode_index(data, trust=trust, url=url) for data in files]
        index = indexes[0] if len(indexes) == 1 else merge_indexes(indexes, url=url)
        if key in self.unchecked and index.save_id is not None and index.save_id != self.save_id:
            raise CorruptCheckpointError(
                f"loading {url}: its {METADATA_NAME} is of the save {index.save_id}, the manifest of the step of "
                f"{self.save_id}; the step is a mix of two, so load another one",
                file=f"{key}/{METADATA_NAME}",
                key=key,
            )
        return index


def read_stored_step(
    step: Location,
    keys: Sequence[str],
    *,
    store: Store,
    manifest: Manifest | None,
    directories: Mapping[str, str],
    world_size: int,
    transfer: TransferConfig | None = None,
    retry: RetryConfig | None = None,
) -> StoredStep:
    """Read what a step holds of some keys. Local: the coordinator's work. Absent keys are not in the result.

    Args:
        step: Location of the step, or of one key's directory.
        keys: What to look for.
        store: Opened at ``step``.
        manifest: Of the step; None: another tool wrote it, so each key is looked for.
        directories: Key to its directory relative to ``step``, where that is not the key itself.
        world_size: Number of ranks that load, whose files are asked for where the store has no listing.
        transfer: Concurrency.
        retry: When a request is tried again.

    Raises:
        IncompleteCheckpointError: The manifest lists a ``.metadata`` that is not there.
        CorruptCheckpointError: A ``.metadata`` is not the one that the manifest lists.
        StorageError: The store failed.
    """

    def read(key: str) -> tuple[bytes, ...] | None:
        if manifest is not None and key not in manifest.keys:
            return None
        return _read_metadata(step.join(directories.get(key, key)), key, manifest, transfer, retry)

    tensor_keys = [key for key in keys if manifest is None or key not in manifest.rank_files]
    with ThreadPoolExecutor(min(_AT_ONCE, len(tensor_keys) or 1), "dcpfs-metadata") as pool:
        metadata = {key: files for key, files in zip(tensor_keys, pool.map(read, tensor_keys), strict=True) if files}
    if manifest is None:
        rank_files = {}
        for key in keys:
            if key == DATALOADER and key not in metadata:
                found = _find_rank_files(store, directories.get(key, key), world_size)
                if found:
                    rank_files[key] = found
        return StoredStep(metadata, rank_files)
    rank_files = {key: dict(manifest.rank_files[key]) for key in keys if key in manifest.rank_files}
    names = {name for found in rank_files.values() for name in found.values()}
    asked = set(keys)
    return StoredStep(
        metadata,
        rank_files,
        {name: manifest.files[name] for name in names},
        manifest.save_id,
        manifest.world_size,
        tuple(key for key in (*manifest.keys, *manifest.rank_files) if key not in asked),
        frozenset(key for key in metadata if _checksum_of(manifest, key) is None),
        manifest.topology,
    )


def _checksum_of(manifest: Manifest, key: str) -> int | None:
    record = manifest.files.get(f"{key}/{METADATA_NAME}")
    return None if record is None else record.crc32


def _read_metadata(
    location: Location,
    key: str,
    manifest: Manifest | None,
    transfer: TransferConfig | None,
    retry: RetryConfig | None,
) -> tuple[bytes, ...] | None:
    """The metadata of one key; None where there is none and none was promised."""
    source = CheckpointSource(location, transfer=transfer, retry=retry)
    name = f"{key}/{METADATA_NAME}"
    record = None if manifest is None else manifest.files.get(name)
    try:
        if record is None:
            return tuple(source.read_all_metadata())
        data = source.read_metadata()
    except CheckpointNotFoundError as error:
        if manifest is None:
            return None
        raise IncompleteCheckpointError(
            f"loading {location.redacted}: the {METADATA_NAME} that the step's manifest lists is missing; the step is "
            "being overwritten, or lost it, so load another one",
            missing=(name,),
        ) from error
    finally:
        source.close()
    if len(data) != record.size_bytes or (record.crc32 is not None and crc32(data) != record.crc32):
        raise CorruptCheckpointError(
            f"loading {location.redacted}: its {METADATA_NAME} is not the one that the step's manifest lists; it was "
            "damaged or overwritten, so load another step",
            file=name,
            key=key,
        )
    return (data,)


def _find_rank_files(store: Store, directory: str, world_size: int) -> dict[int, str]:
    """Files of ranks that another tool wrote, by rank."""
    start = f"{directory}/" if directory else ""
    if store.capabilities.listable:
        names = (info.path for info in store.list(directory))
        ranks = ((parse_rank_file_name(name[len(start) :]), name) for name in names)
        return dict(sorted((rank, name) for rank, name in ranks if rank is not None))
    found = {}
    # One more than there are ranks, so that files of a larger world are noticed.
    for rank in range(world_size + 1):
        name = start + rank_file_name(rank)
        if store.exists(name):
            found[rank] = name
    return found
