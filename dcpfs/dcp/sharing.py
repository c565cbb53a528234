"""Which rank writes what several ranks hold. Pure.

Problem: torch spreads replicas over all ranks by the smallest load, scalars included, so that every rank opens
every file on load (case 71). Leaving all to the lowest rank makes that one write everything (case 73).

Way taken: a threshold. Small items stay with the lowest rank that has them, up to a total; large ones go, largest
first, to whichever of their holders has the least to write so far.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

__all__ = ["choose_writers"]

K = TypeVar("K", bound=Hashable)

SMALL_BYTES = 1 << 20
"""Reading a small item from another file costs a request, about as much as a megabyte."""
SMALL_TOTAL_BYTES = 64 << 20
"""What one rank takes of small items before they are spread like large ones."""


def choose_writers(
    holders: Mapping[K, Sequence[int]], sizes_bytes: Mapping[K, int], loads_bytes: Sequence[int]
) -> dict[K, int]:
    """The rank that writes each item.

    Args:
        holders: Ranks that hold each shared item, ascending.
        sizes_bytes: Its size.
        loads_bytes: What each rank writes anyway.
    """
    writers: dict[K, int] = {}
    loads = list(loads_bytes)
    small_totals = [0] * len(loads)
    large: list[K] = []
    for item, ranks in holders.items():
        size = sizes_bytes[item]
        lowest = ranks[0]
        if size < SMALL_BYTES and small_totals[lowest] + size <= SMALL_TOTAL_BYTES:
            small_totals[lowest] += size
            loads[lowest] += size
            writers[item] = lowest
        else:
            large.append(item)
    for item in sorted(large, key=lambda each: -sizes_bytes[each]):
        writer = min(holders[item], key=lambda rank: (loads[rank], rank))
        loads[writer] += sizes_bytes[item]
        writers[item] = writer
    return writers
