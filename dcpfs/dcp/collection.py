"""Pause Python's cyclic garbage collection while many small records are made.

Problem: planning a load of 20,000 tensors makes a few hundred thousand tuples that all live until the load ends. Each
time enough were made, the collector walks all of them: more than half of the planning time, for nothing.

Way taken: it is paused for the short, pure-Python steps that only build such records, and switched on again by whoever
switched it off. Reference counting goes on as always.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Generator

__all__ = ["collection_paused"]


@contextlib.contextmanager
def collection_paused() -> Generator[None, None, None]:
    """Pause cyclic collection in this process for the length of a ``with`` block; nested uses do nothing more."""
    paused = gc.isenabled()
    if paused:
        gc.disable()
    try:
        yield
    finally:
        if paused:
            gc.enable()
