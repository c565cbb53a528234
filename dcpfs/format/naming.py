"""Which checkpoint an error is about.

Problem: what is wrong with a name or a record is found where names and records are looked at, which knows of no URL;
and an error without one is useless in the log of a job that reads from three places.

Way taken: who knows the URL adds it on the way out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from dcpfs.errors import CheckpointError

__all__ = ["naming"]


@contextlib.contextmanager
def naming(where: str) -> Iterator[None]:
    """Have an error about a checkpoint say where that is, unless it does.

    Args:
        where: The redacted URL, or words that contain it.
    """
    try:
        yield
    except CheckpointError as error:
        if where not in error.message:
            error.message = f"{error.message} (in {where})"
        raise
