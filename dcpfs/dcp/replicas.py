"""Read once what several ranks need, and hand it on over the process group.

Problem: with replicated state (DDP, HSDP, scalars and norms under any scheme) every rank reads the same bytes, N times
the traffic at a store whose bandwidth is shared by all of them (case 72).

Way taken: each rank names the boxes it needs, by file, entry and box. A box that several ranks name gets one owner
among them, the one that has the fewest bytes so far. After the reads, owners send what the others need, through one
reusable buffer of bounded size: as a broadcast where all ranks need it, else point to point. All ranks walk the same
list in the same order, so nobody waits for someone who waits for him, also when a rank fails between two transfers.
What is cast on the way is read by each rank.

Flow: ``share_plan(ids of all ranks)`` (pure) → each rank fetches what it owns or shares with nobody → all
agree → `exchange`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar

import torch

from dcpfs.dcp.aliases import Alias
from dcpfs.dcp.host_memory import flat_bytes
from dcpfs.dcp.landing import TensorWant, copy_exact
from dcpfs.ranks import Ranks

__all__ = ["BoxId", "Share", "SharedWants", "box_id", "exchange", "share_plan", "share_wants"]

_BUFFER_BYTES = 16 << 20

T = TypeVar("T")


class BoxId(NamedTuple):
    """A box of a stored chunk, the same on every rank that needs it."""

    file: str
    offset_bytes: int
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]


class Share(NamedTuple):
    """A box that several ranks need: who reads it, who needs it (ascending, the owner included), and its size."""

    box: BoxId
    owner: int
    needers: tuple[int, ...]
    size_bytes: int


def box_id(want: TensorWant) -> BoxId | None:
    """The id of a box that can be shared: one whose bytes arrive unchanged. None for the others."""
    if want.target.dtype is not want.dtype or 0 in want.lengths:
        return None
    return BoxId(want.location.file, want.location.offset_bytes, want.offsets, want.lengths)


def share_plan(needs: Sequence[dict[BoxId, int]]) -> list[Share]:
    """Choose an owner for every box that more than one rank needs; the largest first, so that all own about the same.

    Args:
        needs: By rank, the boxes it needs and their size in bytes.
    """
    needers: dict[BoxId, list[int]] = {}
    sizes: dict[BoxId, int] = {}
    loads = [0] * len(needs)
    for rank, boxes in enumerate(needs):
        for box, size_bytes in boxes.items():
            needers.setdefault(box, []).append(rank)
            sizes[box] = size_bytes
    for box, ranks in needers.items():
        if len(ranks) == 1:
            loads[ranks[0]] += sizes[box]
    shares = []
    shared = [box for box, ranks in needers.items() if len(ranks) > 1]
    for box in sorted(shared, key=lambda box: (-sizes[box], box)):
        owner = min(needers[box], key=lambda rank: (loads[rank], rank))
        loads[owner] += sizes[box]
        shares.append(Share(box, owner, tuple(needers[box]), sizes[box]))
    return shares


@dataclass(frozen=True, slots=True)
class SharedWants:
    """What this rank reads, and what it gets from others.

    Attributes:
        rest: The wants it reads itself.
        own: Its wants that others may have too, by box.
        shares: What is passed on; the same on all ranks.
    """

    rest: list[TensorWant]
    own: dict[BoxId, TensorWant]
    shares: list[Share]

    def exchange(self, ranks: Ranks, budget_bytes: int) -> None:
        """Pass on what was read. Collective, after all ranks have agreed that their reads are done."""
        if self.shares:
            exchange(self.shares, self.own, ranks, budget_bytes)


def share_wants(wants: Sequence[TensorWant], ranks: Ranks, aliases: Sequence[Alias] = ()) -> SharedWants:
    """Decide who reads what several ranks need. Collective.

    Args:
        wants: What this rank needs.
        ranks: The group.
        aliases: Wants that share memory: this rank reads them itself, since they are compared.

    Raises:
        DcpfsError: Any rank could not say what it needs.
    """
    own: dict[BoxId, TensorWant] = {}
    error: BaseException | None = None
    compared = {id(want) for pair in aliases for want in pair}
    try:
        for want in wants:
            box = box_id(want)
            if box is not None and id(want) not in compared:
                own.setdefault(box, want)  # of equal boxes the first
    except BaseException as failure:  # noqa: BLE001 - brought to the agreement below, which raises it
        error = failure
    sizes = {box: math.prod(want.lengths) * want.dtype.itemsize for box, want in own.items()}
    shares = share_plan(ranks.agree_and_gather(error, sizes))
    foreign = {id(own[share.box]) for share in shares if share.box in own and share.owner != ranks.rank}
    return SharedWants([want for want in wants if id(want) not in foreign], own, shares)


def exchange(shares: Sequence[Share], wants: dict[BoxId, TensorWant], ranks: Ranks, budget_bytes: int) -> None:
    """Send and receive the shared boxes. Collective: every rank passes the same shares, and its own wants.

    A rank that can't copy, for lack of memory say, goes on sending and receiving, so that nobody waits for it; all
    raise at the end.

    Args:
        shares: From `share_plan`.
        wants: This rank's wants by id; those it owns are filled, the others are filled here.
        ranks: The group.
        budget_bytes: Bound of the buffer.

    Raises:
        RankError: Another rank failed.
    """
    groups: dict[tuple[int, tuple[int, ...]], list[Share]] = {}
    for share in shares:
        groups.setdefault((share.owner, share.needers), []).append(share)
    local = _LocalWork()
    # One size on all ranks, though their budgets may differ: they pass the same buffers.
    budget_bytes = min(ranks.all_gather(budget_bytes))
    size_bytes = max(1, min(_BUFFER_BYTES, budget_bytes // 2, _largest(groups)))
    buffer = local.attempt(lambda: torch.empty(size_bytes, dtype=torch.uint8, device="cpu"))
    ranks.agree(local.error)
    if buffer is None:
        raise RuntimeError("a rank without a buffer must have failed before")
    for (owner, needers), members in sorted(groups.items(), key=lambda item: item[0]):
        if ranks.rank in needers:
            _exchange_group(owner, needers, members, wants, ranks, buffer, local)
    ranks.agree(local.error)


def _largest(groups: dict[tuple[int, tuple[int, ...]], list[Share]]) -> int:
    return max((sum(share.size_bytes for share in members) for members in groups.values()), default=1)


class _LocalWork:
    """What this rank does between collectives: its first failure is kept, after which nothing more is done.

    Attributes:
        error: The failure, for the agreement at the end.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def attempt(self, step: Callable[[], T]) -> T | None:
        """Do a step, unless one has failed before. None when there is no result."""
        if self.error is None:
            try:
                return step()
            except BaseException as failure:  # noqa: BLE001 - brought to the agreement of `exchange`, which raises it
                self.error = failure
        return None


def _exchange_group(
    owner: int,
    needers: tuple[int, ...],
    members: list[Share],
    wants: dict[BoxId, TensorWant],
    ranks: Ranks,
    buffer: torch.Tensor,
    local: _LocalWork,
) -> None:
    """Pass the boxes of one owner to the ranks that need them, buffer by buffer."""
    sends = ranks.rank == owner
    pieces: list[_Piece] = []
    used = 0
    unpack: list[_Arriving] = []
    for share in members:
        arriving = local.attempt(partial(_Arriving, wants[share.box], sends))
        unpack += [] if arriving is None else [arriving]
        at = 0
        while at < share.size_bytes:
            size = min(share.size_bytes - at, buffer.numel() - used)
            if arriving is not None:
                pieces.append(_Piece(arriving.flat, at, used, size))
            at += size
            used += size
            if used == buffer.numel():
                _pass_buffer(owner, needers, pieces, used, ranks, buffer, local)
                pieces, used = [], 0
                rest = [arriving] if arriving is not None and at < share.size_bytes else []
                for done in unpack[: len(unpack) - len(rest)]:
                    local.attempt(done.finish)
                unpack = rest
    if used:
        _pass_buffer(owner, needers, pieces, used, ranks, buffer, local)
    for done in unpack:
        local.attempt(done.finish)


class _Piece(NamedTuple):
    """A part of a target's flat bytes, and where in the buffer it travels."""

    flat: torch.Tensor
    start: int
    buffer_start: int
    size_bytes: int


class _Arriving:
    """The flat bytes of a target: its own memory where that is flat, else a copy that `finish` puts in place."""

    def __init__(self, want: TensorWant, sends: bool) -> None:
        self._target = want.target
        plain = want.target.is_contiguous() and not want.target.is_conj() and not want.target.is_neg()
        self._own = sends or plain
        if self._own:
            self.flat = flat_bytes(want.target)
        else:
            size_bytes = math.prod(want.lengths) * want.dtype.itemsize
            self.flat = torch.empty(size_bytes, dtype=torch.uint8, device=want.target.device)

    def finish(self) -> None:
        """Put received bytes in place."""
        if not self._own:
            copy_exact(self._target, self.flat.view(self._target.dtype).reshape(self._target.shape))


def _pass_buffer(
    owner: int,
    needers: tuple[int, ...],
    pieces: list[_Piece],
    used: int,
    ranks: Ranks,
    buffer: torch.Tensor,
    local: _LocalWork,
) -> None:
    import torch.distributed as dist

    part = buffer[:used]
    if ranks.rank == owner:
        local.attempt(lambda: _pack(pieces, part))
    if len(needers) == ranks.world_size:
        dist.broadcast(part, group=ranks.group, group_src=owner)
    elif ranks.rank == owner:
        for rank in needers:
            if rank != owner:
                dist.send(part, group=ranks.group, group_dst=rank)
    else:
        dist.recv(part, group=ranks.group, group_src=owner)
    if ranks.rank != owner:
        local.attempt(lambda: _unpack(pieces, part))


def _pack(pieces: list[_Piece], part: torch.Tensor) -> None:
    for flat, start, at, size in pieces:
        part[at : at + size].copy_(flat[start : start + size])


def _unpack(pieces: list[_Piece], part: torch.Tensor) -> None:
    for flat, start, at, size in pieces:
        flat[start : start + size].copy_(part[at : at + size])
