"""The checkpoint that stands at a URL before a save: refused, or withdrawn, and its leftovers removed.

Problem: torch overwrites by default and in place. When that save fails, the old ``.metadata`` still vouches for data
files of which some are new: a mix of two steps that loads without complaint (case 2). When it succeeds with fewer
ranks, the files of the others stay for ever.

Way taken: ``overwrite=False`` refuses before a byte is written (case 106). ``overwrite=True`` deletes every marker,
``.metadata`` and each rank's own ``__N.metadata``, before the first new byte; from then on nothing is loadable until
the new marker is put. Data files of a larger world are deleted after that. Only names that a writer makes are ever
touched.

Without collectives a rank can't know whether another's marker is of the old save or already of the new one, so each
withdraws its own. Rank 0 also withdraws those of ranks that this world does not have, where nobody can be writing: else
torch's reader, in a world that is large again, would find them.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from functools import partial

from dcpfs.dcp.transfer import ByteBudget, Task, run_tasks
from dcpfs.errors import CheckpointExistsError
from dcpfs.format.names import METADATA_NAME, parse_data_file_name, parse_rank_metadata_name, rank_metadata_name
from dcpfs.storage.store import Store

__all__ = ["delete_leftovers", "refuse_existing", "withdraw_existing", "withdraw_larger_world"]

_logger = logging.getLogger(__name__)
_THREADS = "dcpfs-markers"


def refuse_existing(store: Store, markers: Collection[str], *, concurrency: int = 1) -> None:
    """Return when none of the markers exists.

    Args:
        store: Where the checkpoint would stand.
        markers: Names, of which any is one too many.
        concurrency: Most questions at once; each costs a round trip on a remote store.

    Raises:
        CheckpointExistsError: One does.
    """
    found: dict[str, bool] = {}
    tasks = [Task(0, partial(_ask, store, name, found)) for name in markers]
    run_tasks(tasks, concurrency=concurrency, budget=ByteBudget(1), name=_THREADS)
    for name in markers:
        if found[name]:
            raise CheckpointExistsError(
                f"can't save to {store.location.redacted}: a checkpoint stands there already ({name}); "
                "pass overwrite=True to replace it, or save to another URL"
            )


def _ask(store: Store, name: str, found: dict[str, bool]) -> None:
    found[name] = store.exists(name)


def withdraw_existing(store: Store, rank: int | None) -> None:
    """Delete the markers of an existing checkpoint; afterwards it can't be loaded.

    Args:
        store: Where the checkpoint is.
        rank: None: called by the coordinator alone, all markers go. A rank: it saves by itself, so the common
            marker and its own go.
    """
    markers = [METADATA_NAME]
    if rank is not None:
        markers.append(rank_metadata_name(rank))
    elif store.capabilities.listable:
        markers += [info.path for info in store.list() if parse_rank_metadata_name(info.path) is not None]
    else:
        markers.append(rank_metadata_name(0))
    found = [name for name in markers if store.exists(name)] if len(markers) <= 2 else markers
    if found:
        _logger.warning("overwriting the checkpoint at %s", store.location.redacted)
        store.delete(found[:1])
        store.delete(found[1:])


def withdraw_larger_world(store: Store, world_size: int) -> None:
    """Delete what ranks of an older, larger world saved by themselves. Markers first, then data files.

    Args:
        store: Where the checkpoint is.
        world_size: No rank that can be writing now is as high.
    """
    if not store.capabilities.listable:
        return
    names = [info.path for info in store.list()]
    ranks = {name: parse_rank_metadata_name(name) for name in names}
    markers = [name for name, rank in ranks.items() if rank is not None and rank >= world_size]
    if not markers:
        return
    files = [(name, parse_data_file_name(name)) for name in names]
    store.delete(markers)
    store.delete([name for name, parsed in files if parsed is not None and parsed.rank >= world_size])
    _logger.info("deleted what %d ranks of a larger world saved at %s", len(markers), store.location.redacted)


def delete_leftovers(store: Store, keep: Collection[str]) -> list[str]:
    """Delete data files and rank markers that are not part of the new checkpoint, and return their names."""
    if not store.capabilities.listable:
        return []
    stale = [
        info.path
        for info in store.list()
        if info.path not in keep
        and (parse_data_file_name(info.path) is not None or parse_rank_metadata_name(info.path) is not None)
    ]
    if stale:
        store.delete(stale)
        _logger.info("deleted %d files of an older checkpoint at %s", len(stale), store.location.redacted)
    return stale
