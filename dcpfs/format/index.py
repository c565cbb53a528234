"""The checkpoint's table of contents in the form that dcpfs plans reads with.

Problem: torch's ``.metadata`` is a pickle of some fifteen small objects per tensor: 0.67 s for 20,000 tensors, more
than reading their bytes takes. It also lacks what a reader wants to know before it reads: where in an entry the
payload starts, its checksum, and which keys and containers the saved state really had.

Way taken: records of plain tuples. dcpfs appends them to ``.metadata`` in a compact form behind the pickle's end,
where torch's ``pickle.load`` stops reading; for a checkpoint of another writer they are derived from the pickle.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

__all__ = ["BytesRecord", "CheckpointIndex", "ChunkRecord", "EntryLocation", "RankSave", "TensorRecord"]


class EntryLocation(NamedTuple):
    """Where one entry lies.

    Attributes:
        file: Name of the data file, relative to the checkpoint, already checked to stay inside it.
        offset_bytes: Start of the entry in the file.
        length_bytes: Length of the entry.
        payload_offset_bytes: Start of the tensor's raw row-major bytes within the entry; -1: written by someone else,
            so offset, strides and conjugation must be read from the entry's own header first. 0 for non-tensors.
        crc32: CRC-32 of the payload (of the whole entry for non-tensors); -1: not known from the index.
        transforms: torch's descriptors of the stream transforms that the entry went through (compression).
    """

    file: str
    offset_bytes: int
    length_bytes: int
    payload_offset_bytes: int = -1
    crc32: int = -1
    transforms: tuple[str, ...] = ()


class ChunkRecord(NamedTuple):
    """One stored chunk of a tensor: its hyper-rectangle in elements, and where it lies."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    location: EntryLocation


class TensorRecord(NamedTuple):
    """A tensor as the checkpoint holds it. The chunks cover it without overlap."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[ChunkRecord, ...]


class BytesRecord(NamedTuple):
    """A non-tensor value as the checkpoint holds it: the bytes of ``torch.save``."""

    location: EntryLocation


class RankSave(NamedTuple):
    """What a rank that saves without collectives notes of its save.

    Attributes:
        rank: The rank, in the process group of the save.
        world_size: No rank of the save is as high. None: not known.
        name: The same on all ranks of one save, and in no other. None: there was no way to agree about one.
    """

    rank: int
    world_size: int | None = None
    name: str | None = None


@dataclass(slots=True)
class CheckpointIndex:
    """All records by key.

    Attributes:
        records: FQN to record, in the order of the metadata.
        structure: JSON value that describes containers and key types of the saved state (`dcpfs.dcp.flatten`);
            None for another writer's checkpoint.
        paths: torch's ``planner_data``: FQN to the path of string keys and list positions, where it has one.
        save_id: Id of the save, or None.
        rank_save: What one rank noted that saved by itself; None: a save with collectives, or another writer's.
        written_by_dcpfs: The records come from dcpfs's own index.
        file_sizes: What `data_files` gives, where that is known already; whoever changes ``records`` clears it.
    """

    records: dict[str, TensorRecord | BytesRecord]
    structure: object = None
    paths: dict[str, tuple[str | int, ...]] = field(default_factory=dict)
    save_id: str | None = None
    written_by_dcpfs: bool = False
    file_sizes: dict[str, int] | None = field(default=None, compare=False, repr=False)
    rank_save: RankSave | None = None

    def data_files(self) -> dict[str, int]:
        """Each data file and the least size it must have, in bytes."""
        if self.file_sizes is not None:
            return dict(self.file_sizes)
        sizes: dict[str, int] = {}
        for record in self.records.values():
            locations = [record.location] if isinstance(record, BytesRecord) else [c.location for c in record.chunks]
            for location in locations:
                end = location.offset_bytes + location.length_bytes
                if end > sizes.get(location.file, -1):
                    sizes[location.file] = end
        return sizes
