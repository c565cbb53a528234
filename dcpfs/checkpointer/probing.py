"""Whether a store takes what a save will write, asked before it matters.

Problem: missing rights, a full disk or a read-only mount show at the first save, hours into a run, as whatever error
the upload of that hour raises (case 90).

Way taken: put a small object below ``save_dir``, read it back, delete it. Its name is new each time, so that ranks and
jobs don't meet, and hidden, so that nobody takes it for a step.
"""

from __future__ import annotations

import uuid

from dcpfs.errors import StorageError, TransferSizeError
from dcpfs.storage.store import Store

__all__ = ["PROBE_PREFIX", "probe_access"]

PROBE_PREFIX = ".dcpfs-probe-"

_CONTENT = b"dcpfs asks whether it may write here\n"


def probe_access(store: Store) -> None:
    """Return when an object can be written, read and deleted. Three requests. Any rank.

    Args:
        store: Opened at ``save_dir``.

    Raises:
        StorageError: It can't; the store's own error, and what was tried.
    """
    name = PROBE_PREFIX + uuid.uuid4().hex
    try:
        store.put(name, [_CONTENT])
        found = store.get(name)
        store.delete([name])
    except StorageError as error:
        error.message = f"{error.message} (trying whether a save to {store.location.redacted} could work)"
        raise
    if found != _CONTENT:
        raise TransferSizeError(
            f"can't save to {store.location.redacted}: an object of {len(_CONTENT)} bytes was written there, and "
            f"{len(found)} other bytes were read back; something between here and the store changes data"
        )
