"""What lies in a run's ``save_dir``, asked by one rank.

Problem: a look that is kept goes stale: other processes save, remove and edit there (case 78).

Way taken: each question opens the store, asks it, and closes it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from dcpfs.checkpointer.config import CheckpointConfig
from dcpfs.checkpointer.discovery import StepSearch, list_statuses
from dcpfs.checkpointer.probing import probe_access
from dcpfs.checkpointer.retention import protect_step, unprotect_step
from dcpfs.storage.opening import open_store
from dcpfs.storage.store import Store

__all__ = ["SaveDirectory"]


class SaveDirectory:
    """The directory that a checkpointer saves to. Local; thread-safe.

    Attributes:
        probed: It has been written to once.
    """

    def __init__(self, config: CheckpointConfig) -> None:
        self._config = config
        self.probed = False

    def steps(self) -> list[int]:
        """Iterations of the complete steps, ascending."""
        with self._opened() as store:
            return [each.iteration for each in list_statuses(store) if each.is_complete and each.iteration is not None]

    def latest(self) -> int | None:
        """The iteration that a resume would start from, or None.

        Raises:
            IncompleteCheckpointError: Steps were committed, and none is usable.
        """
        with self._opened() as store:
            found = StepSearch(store, trust=self._config.trust).find()
        return None if found is None else found.iteration

    def protect(self, step: int) -> None:
        """Keep retention away from a step."""
        with self._opened() as store:
            protect_step(store, step)

    def unprotect(self, step: int) -> None:
        """Let retention have a step again."""
        with self._opened() as store:
            unprotect_step(store, step)

    def probe(self) -> None:
        """Write, read and delete a small object.

        Raises:
            StorageError: With the store's own reason.
        """
        with self._opened() as store:
            probe_access(store)
        self.probed = True

    @contextlib.contextmanager
    def _opened(self) -> Iterator[Store]:
        store = open_store(self._config.save_location(), transfer=self._config.transfer, retry=self._config.retry)
        try:
            yield store
        finally:
            store.close()
