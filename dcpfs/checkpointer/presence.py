"""What may not be there: an object's bytes or size, or None.

Problem: "there is no such object" is an answer, and "there is no such bucket" is none: whoever takes the one for the
other finds every step of a run incomplete where one letter of its URL is wrong.

A body that was cut off on the way, under a length that agrees, is no error of HTTP. Taken at its word, it makes a whole
step a damaged one, an older step the newest, or a save its own rival.

Way taken: who reckons with a missing object asks here; everything else that a store says is an error. What speaks
against a step, by its content, counts when the store has said the same twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from dcpfs.errors import BucketNotFoundError, ObjectNotFoundError
from dcpfs.storage.store import Store

__all__ = ["get_if_there", "get_twice_unless", "size_if_there"]

_logger = logging.getLogger(__name__)
_ASKED_AT_MOST = 4


def get_if_there(store: Store, path: str) -> bytes | None:
    """An object, or None where there is none. One GET. A missing bucket is an error."""
    try:
        return store.get(path)
    except BucketNotFoundError:
        raise
    except ObjectNotFoundError:
        return None


def get_twice_unless(store: Store, path: str, is_plausible: Callable[[bytes], bool]) -> bytes | None:
    """An object, or None where there is none; one that is not plausible is read until two answers agree.

    One GET as a rule, two of an object that really is what it seems, and at most four.

    Args:
        store: Only read.
        path: Of a small object.
        is_plausible: Whether it is what is expected there. Never raises.
    """
    data = get_if_there(store, path)
    for _ in range(_ASKED_AT_MOST - 1):
        if data is None or is_plausible(data):
            break
        before, data = data, get_if_there(store, path)
        if data == before:
            break
        _logger.warning("%s came over damaged, or was changed meanwhile: read again", store.location.join(path))
    return data


def size_if_there(store: Store, path: str) -> int | None:
    """An object's bytes, or None where there is none. One HEAD. A missing bucket is an error."""
    try:
        return store.head(path).size_bytes
    except BucketNotFoundError:
        raise
    except ObjectNotFoundError:
        return None
