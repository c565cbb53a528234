"""What processes hold open."""

from __future__ import annotations

import contextlib
import os

__all__ = ["open_links"]


def open_links(pid: int | str = "self") -> list[str]:
    """What each descriptor of a process stands for: a path, ``socket:[...]`` and the like.

    Raises:
        OSError: There is no ``/proc``, or no such process.
    """
    folder, found = f"/proc/{pid}/fd", []
    for number in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):  # closed in the meantime, as that of the listing itself
            found.append(os.readlink(f"{folder}/{number}"))
    return found
