"""Ranks that share a key must mean the same value. Pure.

Problem: torch takes equal keys for replicas and keeps one rank's. When the ranks disagree, about the kind
(tensor or object), the dtype, the shape, or a per-rank value such as a random state, the loser's value is gone
without a word (case 8).

Way taken: the coordinator compares, for every key, what each rank planned for it. Kind, dtype and global shape
must be equal; values are compared by digest where the planner brings digests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch.distributed.checkpoint.planner import WriteItem

from dcpfs.errors import ReplicaMismatchError

__all__ = ["check_replicas", "find_differing_values"]

_SHOWN = 10


def check_replicas(items_by_rank: Sequence[Iterable[WriteItem]]) -> None:
    """Return when all ranks agree about kind, dtype and global shape of each key they share.

    Raises:
        ReplicaMismatchError: They don't; names every such key and two ranks each.
    """
    if len(items_by_rank) < 2:
        return
    known: dict[str, tuple[int, object]] = {}
    problems: dict[str, str] = {}
    for rank, items in enumerate(items_by_rank):
        for item in items:
            data = item.tensor_data
            mine = None if data is None else (data.properties.dtype, data.size)
            first_rank, first = known.setdefault(item.index.fqn, (rank, mine))
            if first != mine and item.index.fqn not in problems:
                problems[item.index.fqn] = (
                    f"{item.index.fqn!r} is {_describe(first)} on rank {first_rank} "
                    f"and {_describe(mine)} on rank {rank}"
                )
    if problems:
        shown = "; ".join(list(problems.values())[:_SHOWN])
        more = "" if len(problems) <= _SHOWN else f"; and {len(problems) - _SHOWN} more"
        raise ReplicaMismatchError(
            f"can't save: ranks disagree about keys that they share: {shown}{more}; "
            "use a key per rank, or make them equal"
        )


def find_differing_values(digests_by_rank: Sequence[Mapping[str, int]]) -> list[str]:
    """Keys whose values differ between ranks, by the digests that each rank brings, in order."""
    known: dict[str, int] = {}
    differing: dict[str, None] = {}
    for digests in digests_by_rank:
        for key, digest in digests.items():
            if known.setdefault(key, digest) != digest:
                differing[key] = None
    return list(differing)


def _describe(signature: object) -> str:
    if isinstance(signature, tuple):
        dtype, size = signature
        return f"a {dtype} tensor of shape {tuple(size)}"
    return "no tensor"
