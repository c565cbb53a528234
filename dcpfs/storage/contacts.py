"""Which services have answered this process.

Problem: while a service has never answered, host or port are wrong, most likely, and a request to it is given up soon.
If every store begins without that knowledge, a resume that opens one while the service restarts gives up too, though
the same process had answers from there a second before.

Way taken: one set a process, by what stands for a service: scheme and host or bucket of every link of the URL, and the
options, in which an endpoint may lie. Both can hold secrets, so only a digest is kept, under a key of this process;
options that don't print the same twice make a service unknown, never a wrong one known. A forked child has the set, a
spawned one is told what its parent knows.
"""

from __future__ import annotations

import hashlib
import secrets

from dcpfs.storage.location import Location

__all__ = ["Contact"]

_KEY = secrets.token_bytes(32)
_answered: set[bytes] = set()


class Contact:
    """A service as this process knows it. Thread-safe; of the same service there may be many.

    Args:
        location: Anything there; None: known to nobody else.
    """

    def __init__(self, location: Location | None = None) -> None:
        self._digest = None if location is None else _digest(location)
        self._has_answered = False

    @property
    def has_answered(self) -> bool:
        """Whether it has ever said something to this process."""
        return self._has_answered or self._digest in _answered

    def note_answer(self) -> None:
        """It has."""
        if not self._has_answered:
            self._has_answered = True
            if self._digest is not None:
                _answered.add(self._digest)


def _digest(location: Location) -> bytes:
    text = repr((list(map(_service, location.components)), _in_order(location.storage_options)))
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), key=_KEY, digest_size=32).digest()


def _service(link: str) -> str:
    scheme, separator, rest = link.partition("://")
    return f"{scheme}://{rest.partition('/')[0]}" if separator else scheme


def _in_order(value: object) -> object:
    if isinstance(value, dict):
        return sorted(((repr(key), _in_order(item)) for key, item in value.items()), key=lambda pair: pair[0])
    return value
