"""G2: a coordinator publishes nothing that others may have given up waiting for. Time passes where it is told to.

Ranks are threads, each with a clock of its own; nobody waits for anything but the others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from dcpfs.checkpointer.completeness import check_step
from dcpfs.checkpointer.save_context import SaveContext
from dcpfs.checkpointer.save_step import save_step
from dcpfs.checkpointer.step_plan import plan_step
from dcpfs.errors import CheckpointError
from dcpfs.ranks import Ranks
from dcpfs.storage.location import Location
from dcpfs.storage.opening import open_store

T = TypeVar("T")

LIMIT_SECONDS = 60.0
PATIENCE_SECONDS = 120.0
WORLD_SIZE = 2
RESULTS = 2
"""Which gathering is that of the results: the first is that of the plans."""


class Clock:
    """Of one rank. It starts where it likes, as monotonic clocks of machines do."""

    def __init__(self, start: float) -> None:
        self.now = start

    def __call__(self) -> float:
        return self.now


class Table:
    """Where the threads meet."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(WORLD_SIZE, timeout=PATIENCE_SECONDS)
        self._values: list[object] = [None] * WORLD_SIZE

    def meet(self, rank: int, value: object) -> list[object]:
        """The values of all, when all have come."""
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values


@dataclass(frozen=True)
class ThreadRanks(Ranks):
    """Exchanges of threads. ``on_gathered`` hears at the coordinator how many gatherings there were."""

    table: Table = field(default_factory=Table)
    on_gathered: Callable[[int], None] = lambda _: None
    gathered: list[None] = field(default_factory=list)

    def gather(self, value: T) -> list[T] | None:
        values: list[T] = self.table.meet(self.rank, value)  # type: ignore[assignment]  # all bring the same
        if not self.is_coordinator:
            return None
        self.gathered.append(None)
        self.on_gathered(len(self.gathered))
        return values

    def all_gather(self, value: T) -> list[T]:
        return self.table.meet(self.rank, value)  # type: ignore[return-value]  # all bring the same

    def broadcast(self, value: T) -> T:
        return self.all_gather(value)[0]

    def scatter(self, values: list[T] | None) -> T:
        given = self.all_gather(values)[0]
        assert given is not None
        return given[self.rank]

    def largest(self, words: Sequence[int]) -> list[int]:
        return [max(each) for each in zip(*self.all_gather(list(words)), strict=True)]


@dataclass(frozen=True)
class Course:
    """How many seconds pass where."""

    own_writing: float = 0.0
    others_writing: float = 0.0
    gathering: float = 0.0
    """At the coordinator, from when it tells its results until it has heard the others."""
    committing: float = 0.0


def save(directory: Path, course: Course) -> list[BaseException | None]:
    """What each rank raises."""
    table = Table()
    clocks = [Clock(1000.0), Clock(5.0)]
    asked: list[None] = []

    def on_gathered(number: int) -> None:
        if number == RESULTS:
            clocks[0].now += course.gathering

    def own_still_wanted() -> None:
        asked.append(None)
        clocks[0].now += course.own_writing if len(asked) == 1 else course.committing

    def other_still_wanted() -> None:
        clocks[1].now += course.others_writing

    def run(rank: int) -> BaseException | None:
        ranks = ThreadRanks(rank, WORLD_SIZE, timeout_seconds=LIMIT_SECONDS, table=table, on_gathered=on_gathered)
        wanted = (own_still_wanted, other_still_wanted)[rank]
        context = SaveContext(Location(directory), ranks, still_wanted=wanted)
        step = plan_step(1, {"trainer": {f"rng.{rank}": torch.tensor([rank])}}, world_size=WORLD_SIZE)
        try:
            save_step(step, context, clock=clocks[rank])
        except CheckpointError as error:
            return error
        return None

    with ThreadPoolExecutor(WORLD_SIZE) as pool:
        return list(pool.map(run, range(WORLD_SIZE)))


@pytest.mark.parametrize(
    "course",
    [
        pytest.param(Course(gathering=70), id="stopped while it hears the results"),
        pytest.param(Course(committing=70), id="stopped while it commits"),
        pytest.param(Course(gathering=35, committing=35), id="a little of both"),
        pytest.param(Course(others_writing=50, gathering=50 + 70), id="stopped when another came late"),
        pytest.param(Course(others_writing=50, gathering=50 + 35, committing=35), id="another late, a little of both"),
    ],
)
def test_case_101_a_coordinator_that_others_may_have_given_up_publishes_nothing(tmp_path: Path, course: Course) -> None:
    errors = save(tmp_path, course)
    assert all("the other ranks have given up rank 0" in str(error) for error in errors)
    assert not check_step(open_store(Location(tmp_path)), 1).is_complete


@pytest.mark.parametrize(
    "course",
    [
        pytest.param(Course(), id="nothing takes time"),
        pytest.param(Course(others_writing=50, gathering=50, committing=20), id="another rank was slow"),
        pytest.param(Course(own_writing=50, committing=20), id="the coordinator was slow"),
        pytest.param(Course(own_writing=500, others_writing=510, gathering=10, committing=50), id="both were"),
    ],
)
def test_time_that_nobody_waits_for_the_verdict_costs_no_save(tmp_path: Path, course: Course) -> None:
    assert save(tmp_path, course) == [None, None]
    assert check_step(open_store(Location(tmp_path)), 1).is_complete
