"""Could two sets of runs be of one thing? An exact rank test (Mann-Whitney, both sides).

Problem: runs of one thing differ, by how much and in what shape nobody knows; their means follow the one run that met a
neighbour.

Way taken: only the order of all runs counts. Of all ways to deal them out to the two sets, how many are as lopsided as
the one at hand, or more? Up to some ten thousand ways all are looked at; beyond, the normal distribution is as good.
With few runs even the most lopsided way is not rare, and nothing can be told: `least_probability` says so beforehand.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations

__all__ = ["least_probability", "rank_test", "runs_needed"]

_EXACT_UP_TO = 50_000


def rank_test(old: Sequence[float], new: Sequence[float]) -> float:
    """Probability that two samples of one thing differ in rank as much as these or more, in either direction."""
    ranks = _ranks([*old, *new])
    count, total = len(old), len(ranks)
    expected = count * (total + 1) / 2
    distance = abs(sum(ranks[:count]) - expected)
    ways = math.comb(total, count)
    if ways <= _EXACT_UP_TO:
        # A hair less, since sums of floats are compared.
        as_far = sum(abs(sum(chosen) - expected) >= distance - 1e-9 for chosen in combinations(ranks, count))
        return as_far / ways
    mean_square = sum((rank - (total + 1) / 2) ** 2 for rank in ranks) / (total - 1)
    deviation = math.sqrt(count * (total - count) / total * mean_square)
    if not deviation:
        return 1.0
    return math.erfc(max(0.0, distance - 0.5) / deviation / math.sqrt(2))


def least_probability(old: int, new: int) -> float:
    """What the test says of so many runs on each side when all of one are beyond all of the other."""
    return min(1.0, 2 / math.comb(old + new, old))


def runs_needed(alpha: float) -> int:
    """The fewest runs on each side with which a difference can be told from chance at all.

    Args:
        alpha: Largest probability of chance that still counts as a difference; above 0.
    """
    count = 1
    while least_probability(count, count) > alpha:
        count += 1
    return count


def _ranks(values: Sequence[float]) -> list[float]:
    """Position of each in the order of all; equal ones share the middle of theirs."""
    ordered = sorted(values)
    middle: dict[float, float] = {}
    at = 0
    while at < len(ordered):
        after = at
        while after < len(ordered) and ordered[after] == ordered[at]:
            after += 1
        middle[ordered[at]] = (at + 1 + after) / 2
        at = after
    return [middle[value] for value in values]
