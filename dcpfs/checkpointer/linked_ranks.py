"""Ranks on a group of their own, which learn at once that one of them is gone.

Problem: when a process dies, its neighbours in an exchange find their connections closed; who waits for a neighbour
that has given up waits until the time-out of the group, an hour by default (cases 49, 60). Gloo can't abort a group.

Way taken: a group that belongs to a checkpointer alone is taken down by the first rank whose exchange fails: its
connections close, so whoever waits for it fails in turn, and so on until all have. Every later exchange on it is
refused with the same reason.
"""

from __future__ import annotations

import contextlib
import gc
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from dcpfs.errors import RankError
from dcpfs.ranks import Ranks

__all__ = ["LinkedRanks", "LostRankError"]

T = TypeVar("T")


class LostRankError(RankError):
    """Another rank can't be reached any more. A consequence: what became of that rank is the cause."""


@dataclass
class _Link:
    """What became of the group; empty while it works."""

    lost: str = ""
    trace: str = ""


@dataclass(frozen=True)
class LinkedRanks(Ranks):
    """`Ranks` whose group nobody else uses. One thread at a time.

    Raises from every exchange:
        LostRankError: A connection to another rank is lost, now or before; the group is gone.
    """

    link: _Link = field(default_factory=_Link, compare=False)

    @property
    def is_lost(self) -> bool:
        """Whether an exchange has failed, so that none can work any more."""
        return bool(self.link.lost)

    def gather(self, value: T) -> list[T] | None:
        """See `Ranks`."""
        return self._exchange(lambda: super(LinkedRanks, self).gather(value))

    def all_gather(self, value: T) -> list[T]:
        """See `Ranks`."""
        return self._exchange(lambda: super(LinkedRanks, self).all_gather(value))

    def broadcast(self, value: T) -> T:
        """See `Ranks`."""
        return self._exchange(lambda: super(LinkedRanks, self).broadcast(value))

    def scatter(self, values: list[T] | None) -> T:
        """See `Ranks`."""
        return self._exchange(lambda: super(LinkedRanks, self).scatter(values))

    def largest(self, words: Sequence[int]) -> list[int]:
        """See `Ranks`."""
        return self._exchange(lambda: super(LinkedRanks, self).largest(words))

    def _exchange(self, call: Callable[[], T]) -> T:
        if self.world_size == 1:
            return call()
        if not self.link.lost:
            try:
                return call()
            except Exception as error:  # noqa: BLE001 - raised below, without the frames that hold the group
                self._take_down(error)
            except BaseException as error:
                self._take_down(error)
                raise
        raise LostRankError(
            f"rank {self.rank} can't reach the other ranks any more, one of them has ended or hangs: {self.link.lost}",
            rank=self.rank,
            cause_text=self.link.trace,
        )

    def _take_down(self, error: BaseException) -> None:
        """Close the connections: the group goes with the last reference to it."""
        import torch.distributed as dist

        self.link.trace = "".join(traceback.format_exception(error)).rstrip()
        self.link.lost = traceback.format_exception_only(error)[-1].strip().partition(". This is typically")[0]
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        group = self.group
        object.__setattr__(self, "group", None)
        if group is not None and dist.is_initialized():
            with contextlib.suppress(KeyError, ValueError, AssertionError):  # the trainer has closed all groups before
                dist.destroy_process_group(group)
        del group
        gc.collect()
