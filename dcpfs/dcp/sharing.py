"""Which rank writes what several ranks hold. Pure.

Problem: torch spreads replicas over all ranks by the smallest load, scalars included, so that every rank opens
every file on load (case 71). Leaving all to the lowest rank makes that one write everything (case 73).

Way taken: a threshold. Small items stay with the lowest rank that has them, up to a total; large ones go, largest
first, to whichever of their holders has the least to write so far.
"""

from __future__ import annotations

import heapq
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
        holders: Ranks that hold each shared item, ascending. Items held by the same ranks should share one sequence:
            the least loaded of 1,024 ranks is then found in a step, not in 1,024.
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
    queues: dict[int, list[tuple[int, int]]] = {}
    for item in sorted(large, key=lambda each: -sizes_bytes[each]):
        ranks = holders[item]
        queue = queues.get(id(ranks))
        if queue is None:
            queue = queues[id(ranks)] = [(loads[rank], rank) for rank in ranks]
            heapq.heapify(queue)
        while queue[0][0] != loads[queue[0][1]]:  # another queue has given to that rank; loads only grow
            heapq.heapreplace(queue, (loads[queue[0][1]], queue[0][1]))
        writer = queue[0][1]
        loads[writer] += sizes_bytes[item]
        heapq.heapreplace(queue, (loads[writer], writer))
        writers[item] = writer
    return writers
