"""What to say when a URL holds no checkpoint itself, and directories below it do.

Problem: a step of a checkpointer is a directory of checkpoints, one for each key, and a run is a directory of steps.
Whoever gives the URL of either to a load of one checkpoint is told that there is none, right above the one they mean.

Way taken: only once a load has failed, a few requests look one and two directories down. This layer does not know what
a step is: it looks for metadata, and for names that end in a number, of which the highest is the newest. What the store
answers to these requests is never an error of its own.
"""

from __future__ import annotations

import re

from dcpfs.errors import CheckpointNotFoundError, DcpfsError
from dcpfs.format.names import METADATA_NAME
from dcpfs.storage.store import Store

__all__ = ["point_below"]

_FIRST = "model"
"""What is asked for mostly."""
_ASKED_AT_MOST = 8
_SUBDIRECTORY = "checkpoints"


def point_below(error: CheckpointNotFoundError, store: Store) -> CheckpointNotFoundError:
    """The error, with the URL that was meant, if there is one below that of the store."""
    try:
        found = _find(store) if store.capabilities.listable else None
    except DcpfsError:
        return error
    if found is None:
        return error
    what = "directories of checkpoints (a run of a checkpointer)" if "/" in found else "checkpoints by key (a step)"
    error.message = (
        f"no checkpoint at {store.location}: it has no {METADATA_NAME}, and holds {what}: give the URL of one of them, "
        f"such as {store.location.join(found)}, or load it with a DistributedCheckpointer"
    )
    return error


def _find(store: Store) -> str | None:
    """A directory with metadata: right below, or below the newest of those that bear numbers."""
    names = list(store.list_directories(""))
    found = _find_key(store, names, "")
    if found is None and _SUBDIRECTORY in names:
        return _find_in_newest(store, list(store.list_directories(_SUBDIRECTORY)), f"{_SUBDIRECTORY}/")
    return found or _find_in_newest(store, names, "")


def _find_in_newest(store: Store, names: list[str], start: str) -> str | None:
    numbered = [(int(match[1]), name) for name in names if (match := re.search(r"([0-9]{1,18})\Z", name))]
    for _, name in sorted(numbered, reverse=True)[:2]:  # the newest may have just begun
        found = _find_key(store, list(store.list_directories(start + name)), f"{start}{name}/")
        if found is not None:
            return found
    return None


def _find_key(store: Store, names: list[str], start: str) -> str | None:
    ordered = sorted(names, key=lambda name: (name != _FIRST, name))[:_ASKED_AT_MOST]
    return next((start + name for name in ordered if store.exists(f"{start}{name}/{METADATA_NAME}")), None)
