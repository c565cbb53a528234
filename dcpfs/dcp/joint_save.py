"""A name for a save that ranks make without collectives, the same on all of them.

Problem: ``use_collectives=False`` is there so that no rank waits for another. Without a word between them, nothing
tells the files of one save from those of the next: a rank that failed leaves its older metadata beside the others'.

Way taken: the key-value store of torch's default process group, which is no collective: nobody waits for anybody. The
first rank to ask names the launch, by compare-and-set, and each rank counts what it has published at a URL. The launch
and that count name the save. The count moves when a rank has published, so that a rank which fails and tries again is
still in the save of the others: torch's ``dcp.save`` ends with a barrier, which pairs them in the same way.

What this can't tell: a rank that failed, went on training, and only then published in the place of the try that failed.
Without a process group (or with one that has no store) a save has no name.
"""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections.abc import Callable
from typing import NamedTuple

import torch.distributed as dist

from dcpfs.format.index import RankSave

__all__ = ["JointSave", "begin_joint_save", "find_world_size"]

_logger = logging.getLogger(__name__)
_LAUNCH = "dcpfs/launch"


class JointSave(NamedTuple):
    """One rank's part of a save without collectives.

    Attributes:
        note: For its metadata.
        count_published: To be called when that has been put.
    """

    note: RankSave
    count_published: Callable[[], None]


def begin_joint_save(rank: int, url: str) -> JointSave:
    """What this rank notes of its save. Local: waits for no other rank.

    Args:
        rank: In the process group of the save.
        url: Where it saves.
    """
    world_size = find_world_size(rank)
    if not (dist.is_available() and dist.is_initialized()):
        return JointSave(RankSave(rank, world_size), _count_nothing)
    place = hashlib.sha256(url.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    counter = f"dcpfs/published/{place}/{rank}"
    try:
        store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]  # there is one once it is initialised
        launch = bytes(store.compare_set(_LAUNCH, "", uuid.uuid4().hex)).decode("ascii")
        published = int(store.add(counter, 0))
    except (RuntimeError, ValueError, AttributeError) as error:  # a group without a store, or with one that is gone
        _logger.warning("saving to %s without collectives: the save gets no name (%s)", url, error)
        return JointSave(RankSave(rank, world_size), _count_nothing)

    def count_published() -> None:
        try:
            store.add(counter, 1)
        except RuntimeError as error:
            _logger.warning("saving to %s without collectives: it could not be counted (%s)", url, error)

    return JointSave(RankSave(rank, world_size, f"{launch}-{published + 1}"), count_published)


def find_world_size(rank: int) -> int | None:
    """A number that no rank of this save reaches, or None where it can't be told.

    The process group of a save is not known here. Where it isn't torch's default one, its ranks are fewer, never more.

    Args:
        rank: In the process group of the save.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() if rank == dist.get_rank() else None
    return 1 if rank == 0 else None


def _count_nothing() -> None:
    """There is no store to count in."""
