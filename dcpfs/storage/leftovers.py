"""What killed writers leave that no listing shows: files with the temporary names of a store's own.

Problem: where an object is a file that is renamed once it is whole, a writer that is killed leaves a file with a
temporary name. Listings hide it, since it is no object; so whoever removes all that is listed leaves a directory behind
that is not empty and stays for good.

Way taken: a store that can leave such files says so by a method that removes them, and nothing else, below one
directory. It is called for what is given up as a whole alone, a step that is removed, since a writer that is still at
work there loses its file and fails. A store that wraps another one hands the call on.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from dcpfs.storage.location import check_name
from dcpfs.storage.store import Store

__all__ = ["LeavesLeftovers", "check_own_directory", "sweep_leftovers"]


@runtime_checkable
class LeavesLeftovers(Protocol):
    """A store whose killed writers leave files that its listings hide."""

    def sweep_leftovers(self, directory: str) -> int:
        """Remove what killed writers left below a directory, and the directories that this empties.

        Args:
            directory: Name within the store, not its own location.

        Returns:
            The number of files.

        Raises:
            StorageError: The store failed.
        """
        ...


def sweep_leftovers(store: Store, directory: str) -> int:
    """`LeavesLeftovers.sweep_leftovers`, where the store can leave any.

    Args:
        store: Any.
        directory: Name within it, given up as a whole: a writer still at work there fails.

    Raises:
        StorageError: The store failed.
    """
    return store.sweep_leftovers(directory) if isinstance(store, LeavesLeftovers) else 0


def check_own_directory(directory: str) -> str:
    """The name of a directory below a store's location.

    Raises:
        ConfigError: It leads elsewhere.
        ValueError: It is the location itself, where others may be at work.
    """
    if not directory:
        raise ValueError("leftovers are swept below one directory of a store, not in all of it")
    return check_name(directory)
