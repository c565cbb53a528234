"""What may not be there: an object's bytes or size, or None.

Problem: "there is no such object" is an answer, and "there is no such bucket" is none: whoever takes the one for the
other finds every step of a run incomplete where one letter of its URL is wrong.

Way taken: who reckons with a missing object asks here; everything else that a store says is an error.
"""

from __future__ import annotations

from dcpfs.errors import BucketNotFoundError, ObjectNotFoundError
from dcpfs.storage.store import Store

__all__ = ["get_if_there", "size_if_there"]


def get_if_there(store: Store, path: str) -> bytes | None:
    """An object, or None where there is none. One GET. A missing bucket is an error."""
    try:
        return store.get(path)
    except BucketNotFoundError:
        raise
    except ObjectNotFoundError:
        return None


def size_if_there(store: Store, path: str) -> int | None:
    """An object's bytes, or None where there is none. One HEAD. A missing bucket is an error."""
    try:
        return store.head(path).size_bytes
    except BucketNotFoundError:
        raise
    except ObjectNotFoundError:
        return None
