"""Whose a step is while it is being written.

Problem: a job that is thought dead is started anew and saves the step at which the old one hangs. Then the old one
wakes up, in mid-upload, and goes on: it puts its files over those of the new one, or deletes them when it notices that
it failed. Whatever it asked before it fell asleep is no longer true, and no store lets a request say "only if I am
still the one".

Way taken: ``.writing`` holds the id of the one save that may publish; who puts it last owns the step. Three things keep
an old owner from doing harm, however late it wakes up:

* A save that finds anything in its step numbers its data files in a block of its own. No two saves then share the name
  of a data file, so neither can change or delete what the other one vouches for.
* Names that every save uses (``.metadata``, ``rank_0.pkl``, ``manifest.json``) are put only where nothing stands, by
  the store itself where it can (`Capabilities.conditional_put`). When something does, ``.writing`` decides: the owner
  replaces it, the manifest that may vouch for it first; anyone else is told that it was superseded.
* Who is superseded deletes nothing but its own data files.

What is left is the time between a question and the request that follows it, and only for names that all saves use. (On
stores without conditional puts, two saves that both find the step empty within the same request share the names of
data files as well.) An old owner that stalls exactly there can damage the new step. That shows: a load checks
``.metadata`` and rank files against the manifest's checksums, and entries against those in ``.metadata``. No order of
events makes a mix that loads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from dcpfs.checkpointer.layout import MANIFEST_NAME, WRITING_NAME, step_name
from dcpfs.checkpointer.presence import get_twice_unless
from dcpfs.errors import ObjectExistsError, SupersededError
from dcpfs.storage.store import Buffer, ObjectInfo, Store

__all__ = ["FILE_BLOCK", "first_file_number", "put_owned", "read_owner", "require_owner", "superseded"]

FILE_BLOCK = 100_000
"""Data files of one rank and key that share a block of numbers."""

_BLOCKS = 999_999
_LONGEST_ID_BYTES = 256


def first_file_number(save_id: str) -> int:
    """Where a save numbers its data files from when its step is not empty: a block that follows from its id."""
    digest = hashlib.blake2b(save_id.encode("utf-8", "backslashreplace"), digest_size=8).digest()
    return FILE_BLOCK * (1 + int.from_bytes(digest, "little") % _BLOCKS)


def read_owner(store: Store, iteration: int, expected: str | None = None) -> str | None:
    """Id of the save that is at work on a step, or died there; None when there is none. One GET, or two of a rival's.

    Args:
        store: Opened at ``save_dir``.
        iteration: Of the step.
        expected: Id of the save that asks: any other is read twice, for it is the end of this one.
    """
    content = get_twice_unless(
        store, f"{step_name(iteration)}/{WRITING_NAME}", lambda found: expected is None or _id_in(found) == expected
    )
    return None if content is None else _id_in(content)


def require_owner(store: Store, iteration: int, save_id: str, *, verb: str) -> None:
    """Return when the step is this save's.

    Raises:
        SupersededError: It isn't, or no longer.
    """
    owner = read_owner(store, iteration, save_id)
    if owner != save_id:
        raise superseded(store, iteration, save_id, owner, verb=verb)


def _id_in(content: bytes) -> str:
    return content[:_LONGEST_ID_BYTES].decode("utf-8", "replace").strip()


def superseded(store: Store, iteration: int, save_id: str, owner: str | None, *, verb: str) -> SupersededError:
    """The error of a save that finds another one in its place."""
    step = store.location.join(step_name(iteration)).redacted
    whose = f"save {owner}" if owner else "another save"
    return SupersededError(
        f"can't {verb} of {step}: {whose} has taken over the step from this one ({save_id}), and publishes it; end all "
        "but one of the jobs that save there"
    )


def put_owned(store: Store, path: str, buffers: Sequence[Buffer], *, iteration: int, save_id: str) -> ObjectInfo:
    """Put an object whose name every save of the step uses. Any rank.

    Costs one more request than a plain put only when something stands there.

    Args:
        store: Opened at ``save_dir``.
        path: Name relative to it.
        buffers: Content.
        iteration: Of the step.
        save_id: Of this save.

    Raises:
        SupersededError: Something stands there, and the step is another save's.
    """
    try:
        return store.put(path, buffers, if_absent=True)
    except ObjectExistsError:
        require_owner(store, iteration, save_id, verb=f"write {path.rpartition('/')[2]}")
    # A save that lost the step may have put its manifest after this one took over: it must not vouch for what comes.
    store.delete([f"{step_name(iteration)}/{MANIFEST_NAME}"])
    return store.put(path, buffers)
