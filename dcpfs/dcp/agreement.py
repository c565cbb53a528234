"""Ranks that share a key must mean the same value. Pure.

Problem: torch takes equal keys for replicas and keeps one rank's. When the ranks disagree, about the kind
(tensor or object), the dtype, the shape, or a per-rank value such as a random state, the loser's value is gone
without a word (case 8).

Way taken: the coordinator compares, for every key, what each rank planned for it. Kind, dtype and global shape
must be equal; values are compared by digest where the planner brings digests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.distributed.checkpoint.planner import WriteItem

from dcpfs.errors import ReplicaMismatchError

__all__ = ["Signature", "check_replicas", "check_signatures", "find_differing_values"]

Signature = tuple[torch.dtype, torch.Size] | None
"""dtype and global shape of a tensor; None for any other value."""

_SHOWN = 10


def check_replicas(items_by_rank: Sequence[Iterable[WriteItem]]) -> None:
    """Return when all ranks agree about kind, dtype and global shape of each key they share.

    Raises:
        ReplicaMismatchError: They don't; names every such key and two ranks each.
    """
    check_signatures({rank: map(_signature_of, items) for rank, items in enumerate(items_by_rank)})


def check_signatures(signatures_by_rank: Mapping[int, Iterable[tuple[str, Signature]]]) -> None:
    """`check_replicas` for whoever has the signatures alone, of each rank or of one among many that are alike.

    Raises:
        ReplicaMismatchError: They don't agree; names every such key and two ranks each.
    """
    if len(signatures_by_rank) < 2:
        return
    known: dict[str, tuple[int, Signature]] = {}
    problems: dict[str, str] = {}
    for rank, signatures in signatures_by_rank.items():
        for fqn, mine in signatures:
            first_rank, first = known.setdefault(fqn, (rank, mine))
            if first != mine and fqn not in problems:
                problems[fqn] = (
                    f"{fqn!r} is {_describe(first)} on rank {first_rank} and {_describe(mine)} on rank {rank}"
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


def _signature_of(item: WriteItem) -> tuple[str, Signature]:
    data = item.tensor_data
    return item.index.fqn, None if data is None else (data.properties.dtype, data.size)


def _describe(signature: Signature) -> str:
    if signature is None:
        return "no tensor"
    dtype, size = signature
    return f"a {dtype} tensor of shape {tuple(size)}"
