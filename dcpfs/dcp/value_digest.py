"""A checksum of a plain value by which ranks find out whether theirs is the same. Pure.

Problem: equal values need not have equal pickles. A set of texts is pickled in the order of its hashes, which Python
salts anew in each process, and a text that a list holds twice is pickled once or twice, depending on whether it is one
object. Ranks that compare pickles then refuse to save what they agree about.

Way taken: the pickle counts for values that don't contain others. Lists, tuples, sets and mappings within them are
taken apart: what they hold is compared, not how Python happens to keep it.
"""

from __future__ import annotations

from collections.abc import Callable

from dcpfs.format.checksum import crc32

__all__ = ["digest_value"]

_SCALARS = frozenset({int, float, complex, bool, type(None), str, bytes})
"""Types of which ``repr`` tells every value."""
_SETS = frozenset({set, frozenset})
_CONTAINERS = frozenset({list, tuple, dict, *_SETS})


def digest_value(value: object, encoded: bytes, encode: Callable[[object], bytes]) -> int:
    """CRC-32 of a value: equal for equal values of all ranks.

    Args:
        value: Anything.
        encoded: Its pickle.
        encode: Pickles a value within it.
    """
    if type(value) not in _CONTAINERS:
        return crc32(encoded)
    try:
        return crc32(_spell(value, encode))
    except RecursionError:  # it holds itself
        return crc32(encoded)


def _spell(value: object, encode: Callable[[object], bytes]) -> bytes:
    kind = type(value)
    if kind in _SCALARS:
        return f"{kind.__name__} {value!r}".encode(errors="surrogatepass")
    if isinstance(value, (list, tuple)) and kind in _CONTAINERS:
        if set(map(type, value)) <= _SCALARS:
            return repr(value).encode(errors="surrogatepass")
        parts = [_spell(each, encode) for each in value]
    elif isinstance(value, (set, frozenset)) and kind in _CONTAINERS:
        parts = sorted(_spell(each, encode) for each in value)
    elif isinstance(value, dict) and kind in _CONTAINERS:
        parts = [_spell(each, encode) for pair in value.items() for each in pair]
    else:
        return encode(value)
    return b"%s(%s)" % (kind.__name__.encode(), b",".join(b"%d:%s" % (len(part), part) for part in parts))
