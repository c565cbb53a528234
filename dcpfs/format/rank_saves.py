"""Which save the metadata of one rank belongs to. Pure.

Problem: without collectives each rank publishes its own ``__N.metadata``, and nothing says which of these belong
together. A smaller world that overwrites a larger one leaves the files of the ranks that are no more; a rank that
fails leaves its old file beside the new ones of the others. Whoever joins what lies there serves values of two saves.

Way taken: each rank notes in its own index how many ranks there were at most, and a name of the save that is the same
on all ranks (`dcpfs.dcp.joint_save`). Rank 0 decides how many there are: files of higher ranks are of an older, larger
world, and don't count. All others must name the same save. Where a save has no name (another writer, no process
group), ranks that hold one chunk with two checksums are refused: they may be of two saves.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from dcpfs.errors import CorruptCheckpointError
from dcpfs.format.index import BytesRecord, CheckpointIndex, RankSave, TensorRecord
from dcpfs.format.names import rank_metadata_name

__all__ = ["check_one_save", "decode_rank_save", "find_differing_chunk", "is_beyond", "without_leftovers"]

_logger = logging.getLogger(__name__)
_SHOWN = 5


def decode_rank_save(value: Any) -> RankSave | None:
    """The note of an index, or None when it has none.

    Raises:
        ValueError: It is malformed.
    """
    if value is None:
        return None
    rank, world_size, name = value
    if type(rank) is not int or rank < 0 or not (world_size is None or (type(world_size) is int and world_size > 0)):
        raise ValueError("the rank or world size of a save is no sensible number")
    if name is not None and type(name) is not str:
        raise ValueError("the name of a save is no text")
    return RankSave(rank, world_size, name)


def without_leftovers(indexes: Sequence[CheckpointIndex], *, url: str) -> list[CheckpointIndex]:
    """The indexes without those of ranks that the save of rank 0 did not have.

    Args:
        indexes: Of the files that ranks wrote by themselves, the lowest rank first.
        url: The checkpoint, redacted, for the log.
    """
    first = indexes[0].rank_save if indexes else None
    if first is None:
        return list(indexes)
    ranks = [number if index.rank_save is None else index.rank_save.rank for number, index in enumerate(indexes)]
    kept = {
        rank: index for rank, index in zip(ranks, indexes, strict=True) if not is_beyond(first, rank, index.rank_save)
    }
    if len(kept) < len(indexes):
        _logger.warning(
            "reading %s: %d ranks saved it, so the metadata of %d higher ranks there is of an older save of more, and "
            "is ignored",
            url,
            first.world_size,
            len(indexes) - len(kept),
        )
    absent = [rank for rank in range(first.world_size or 0) if rank not in kept]
    if absent:
        more = f" and {len(absent) - _SHOWN} more" if len(absent) > _SHOWN else ""
        _logger.warning(
            "reading %s: no metadata of the ranks %s%s, of %d at most that saved it: they failed, still write, or were "
            "not in its process group",
            url,
            ", ".join(map(str, absent[:_SHOWN])),
            more,
            first.world_size,
        )
    return list(kept.values())


def is_beyond(first: RankSave | None, rank: int, own: RankSave | None) -> bool:
    """Whether a rank's file is of an older, larger world, by what rank 0 noted.

    A note of neither world nor save stays: its writer was driven by hand, without a process group.
    """
    if first is None or first.rank != 0 or first.world_size is None or rank < first.world_size:
        return False
    return own is None or own.world_size is not None or own.name is not None


def check_one_save(notes: Sequence[RankSave | None], *, url: str) -> bool:
    """Return when nothing says that the files are of several saves; True when they are known to be of one.

    Raises:
        CorruptCheckpointError: They are of several saves, or of several writers.
    """
    if len(notes) < 2 or not any(notes):
        return len(notes) < 2
    known = [note for note in notes if note is not None]
    first = known[0]
    for number, note in enumerate(notes):
        if note is None:
            raise CorruptCheckpointError(
                f"reading {url}: {rank_metadata_name(first.rank)} names its save, and another rank's (number {number} "
                f"of {len(notes)}) does not, so it is of another save; {_REMEDY}",
                file=rank_metadata_name(number),
            )
    for field in ("world_size", "name"):
        told = [note for note in known if getattr(note, field) is not None]
        other = next((note for note in told if getattr(note, field) != getattr(told[0], field)), None)
        if other is not None:
            raise CorruptCheckpointError(
                f"reading {url}: {rank_metadata_name(told[0].rank)} and {rank_metadata_name(other.rank)} are of two "
                f"saves, so a rank failed or still writes; {_REMEDY}",
                file=rank_metadata_name(other.rank),
            )
    return all(note.name is not None for note in known)


_REMEDY = "load another checkpoint, or delete the files of the save that you don't want"


def find_differing_chunk(indexes: Sequence[CheckpointIndex]) -> str | None:
    """A key of which two indexes hold the same chunk of a tensor with two checksums, or None."""
    known: dict[tuple[object, ...], int] = {}
    for index in indexes:
        for key, record in index.records.items():
            if isinstance(record, BytesRecord):
                continue  # equal values may have different pickles
            if isinstance(record, TensorRecord):
                for offsets, sizes, location in record.chunks:
                    if location.crc32 < 0 or location.transforms:
                        continue
                    if known.setdefault((key, offsets, sizes), location.crc32) != location.crc32:
                        return key
    return None
