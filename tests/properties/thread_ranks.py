"""Ranks that are threads of one process, for thousands of short runs with the checkpointer itself.

What they exchange is pickled on its way, as between processes. A rank that leaves alone is found: the others wait no
longer than a deadline.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest

from dcpfs.checkpointer import groups
from dcpfs.ranks import Ranks

__all__ = ["run_threads", "thread_groups"]

T = TypeVar("T")
_DEADLINE_SECONDS = 60.0


class _Hub:
    """Where the ranks of one group meet."""

    def __init__(self, count: int) -> None:
        self._barrier = threading.Barrier(count, timeout=_DEADLINE_SECONDS)
        self._values: list[bytes] = [b""] * count

    def exchange(self, rank: int, value: T) -> list[T]:
        self._values[rank] = pickle.dumps(value)
        self._barrier.wait()
        found: list[T] = [pickle.loads(each) for each in self._values]
        self._barrier.wait()
        return found


@dataclass(frozen=True)
class _ThreadRanks(Ranks):
    hub: _Hub = field(default_factory=lambda: _Hub(1))

    def gather(self, value: T) -> list[T] | None:
        found = self.hub.exchange(self.rank, value)
        return found if self.rank == 0 else None

    def all_gather(self, value: T) -> list[T]:
        return self.hub.exchange(self.rank, value)

    def broadcast(self, value: T) -> T:
        return self.hub.exchange(self.rank, value)[0]

    def scatter(self, values: list[T] | None) -> T:
        found = self.hub.exchange(self.rank, values)[0]
        assert found is not None
        return found[self.rank]

    def largest(self, words: Sequence[int]) -> list[int]:
        return [max(each) for each in zip(*self.hub.exchange(self.rank, list(words)), strict=True)]


class _Member(threading.local):
    rank = 0
    world_size = 1
    made = 0
    hubs: dict[int, _Hub] | None = None


_member = _Member()
_making = threading.Lock()


def _make_group(*_: object, **__: object) -> Ranks:
    hubs = _member.hubs
    if hubs is None:
        return Ranks()
    with _making:
        hub = hubs.setdefault(_member.made, _Hub(_member.world_size))
    _member.made += 1
    group: Any = object()  # there is one
    return _ThreadRanks(_member.rank, _member.world_size, group, hub=hub)


@contextlib.contextmanager
def thread_groups() -> Iterator[None]:
    """Within, the groups of a checkpointer that is made by `run_threads` are of its threads."""
    made: dict[object, object] = {
        groups.make_group: _make_group,
        groups.close_group: lambda _: None,
        groups.global_rank: lambda ranks: ranks.rank,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, module in [*sys.modules.items()]:
            if name.startswith("dcpfs."):
                for attribute, value in [*vars(module).items()]:
                    if callable(value) and getattr(value, "__module__", "") == groups.__name__ and value in made:
                        patch.setattr(module, attribute, made[value])
        yield


def run_threads(function: Callable[[int], T], world_size: int) -> list[T | BaseException]:
    """What each rank returned or raised, by rank. One rank runs in the calling thread, without a group."""
    if world_size == 1:
        try:
            return [function(0)]
        except Exception as error:
            return [error]
    hubs: dict[int, _Hub] = {}
    outcomes: list[T | BaseException] = [RuntimeError("it did not end")] * world_size

    def run(rank: int) -> None:
        _member.rank, _member.world_size, _member.made, _member.hubs = rank, world_size, 0, hubs
        try:
            outcomes[rank] = function(rank)
        except BaseException as error:
            outcomes[rank] = error

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * _DEADLINE_SECONDS)
    return outcomes
