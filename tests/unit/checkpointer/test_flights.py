"""Saves in the background with a crew that does what the test says, and with two ranks where they have to agree."""

from __future__ import annotations

import itertools
import pickle
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch

from dcpfs.background import free_memory
from dcpfs.background.arena import Arena
from dcpfs.checkpointer.choices import WhenBusy
from dcpfs.checkpointer.flights import Flight, FlightSaver
from dcpfs.checkpointer.linked_ranks import LostRankError
from dcpfs.checkpointer.local_step import LocalStep
from dcpfs.checkpointer.process_saver import _Crew
from dcpfs.checkpointer.save_context import StepReport
from dcpfs.checkpointer.save_orders import Joined, SaveDone, Started, decode_step, encode_order
from dcpfs.checkpointer.saver import InlineSaver, SaveOutcome, Saver, SaveRequest
from dcpfs.checkpointer.staging import stage_step
from dcpfs.checkpointer.step_plan import plan_step
from dcpfs.errors import CheckpointError, ConfigError, RankError, StorageFullError
from dcpfs.ranks import Ranks
from tests.unit.background.test_arena import LateCopier
from tests.unit.checkpointer.part_exchange import warnings_of

T = TypeVar("T")


pytestmark = pytest.mark.usefixtures("_memory_is_not_asked_for")


class Clock:
    """Time that passes only where a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Crew(FlightSaver):
    """Lands flights when told to."""

    def __init__(
        self,
        caller: Ranks | None = None,
        *,
        room: int = 1,
        when_busy: str = "wait",
        late: bool = False,
        stand_in: Saver | None = None,
    ):
        self.copier = LateCopier()
        self.clock = Clock()
        super().__init__(
            "memory://run",
            caller or Ranks(),
            lambda: Arena(choose_copier=lambda device: self.copier) if late else Arena(),
            max_in_flight=room,
            when_busy=WhenBusy(when_busy),
            stand_in=stand_in,
            clock=self.clock,
        )
        self.launched: list[tuple[Flight, LocalStep]] = []
        self.lost = ""
        self.crews = 1
        self.dismissed: list[bool] = []
        self.cannot_start: Exception | None = None
        self.start_seconds = 0.0
        self.starts: list[float] = []

    def _launch(self, flight: Flight, step: LocalStep, *, moves_latest: bool) -> None:
        self.launched.append((flight, step))

    def _loss(self) -> CheckpointError | None:
        return CheckpointError(f"the crew is gone: {self.lost}", rank=self._caller.rank) if self.lost else None

    def _replace_crew(self) -> None:
        self.starts.append(self.clock.now)
        self.clock.now += self.start_seconds
        if self.cannot_start is not None:
            raise self.cannot_start
        self.crews += 1
        self.lost = ""

    def _dismiss_crew(self, *, at_once: bool) -> None:
        self.dismissed.append(at_once)

    # --- what a test does

    def save(self, number: int) -> list[SaveOutcome]:
        outcomes, has_room = self.make_room(number)
        return outcomes + (self.submit(request(number)) if has_room else [])

    def land(self, error: BaseException | None = None) -> None:
        flight = next(flight for flight, _ in self.launched if flight.outcome is None)
        flight.land(done(flight.iteration, error))

    def staged(self, at: int) -> float:
        _, step = self.launched[at]
        (item,) = step.keys["model"].plan.items
        value = step.keys["model"].values.resolve_data(item)
        assert isinstance(value, torch.Tensor)
        return float(value[0])


def request(number: int, error: BaseException | None = None) -> SaveRequest:
    step = plan_step(number, {"model": {"w": torch.full((100,), float(number))}})
    return SaveRequest(number, None if error else step, error)


def done(number: int, error: BaseException | None = None) -> SaveOutcome:
    report = None if error else StepReport(number, "id", True, 0.0, 0, 0, False)
    return SaveOutcome(number, report, error, 0.0)


def said(outcomes: Sequence[SaveOutcome]) -> list[tuple[int, str]]:
    return [(each.iteration, "" if each.error is None else str(each.error)) for each in outcomes]


def waits(call: Callable[[], T], then: Callable[[], None]) -> T:
    """What a call returns; that it does not return before something else has been done."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(call)
        assert not future.done() or pytest.fail("it did not wait")
        then()
        return future.result(30)


def test_case_15_a_buffer_is_not_used_again_before_its_save_has_landed() -> None:
    crew = Crew(room=2)
    assert crew.save(1) == crew.save(2) == []
    assert crew.in_flight == (1, 2)
    first, second = (flight.arena for flight, _ in crew.launched)
    assert first is not second
    assert said(waits(lambda: crew.save(3), crew.land)) == [(1, "")]
    assert crew.launched[2][0].arena is first
    assert (crew.staged(1), crew.staged(2)) == (2.0, 3.0)
    crew.land()
    crew.land(OSError("full"))
    assert str(crew.failure()) == "full"
    assert said(crew.settle()) == [(2, ""), (3, "full")]
    assert crew.failure() is None
    crew.close()
    assert crew.dismissed == [False]


@pytest.mark.parametrize("when_busy", ["skip", "error"])
def test_a_busy_crew(when_busy: str, caplog: pytest.LogCaptureFixture) -> None:
    crew = Crew(when_busy=when_busy)
    crew.save(1)
    if when_busy == "skip":
        assert crew.save(2) == []
        assert "iteration 2 is not saved: iteration 1 is still being saved to memory://run" in caplog.text
    else:
        with pytest.raises(CheckpointError, match="can't save iteration 2: iteration 1 is still being saved"):
            crew.save(2)
    crew.land()
    assert said(crew.save(3)) == [(1, "")]
    assert [flight.iteration for flight, _ in crew.launched] == [1, 3]


def test_a_save_that_must_not_be_left_out_waits_for_room() -> None:
    """The closing save, and one that was asked for by a signal: nothing may come after them."""
    crew = Crew(when_busy="skip")
    crew.save(1)
    assert crew.save(2) == []
    outcomes, has_room = waits(lambda: crew.make_room(3, waits=True), crew.land)
    assert (said(outcomes), has_room) == ([(1, "")], True)
    assert crew.submit(request(3)) == []
    assert [flight.iteration for flight, _ in crew.launched] == [1, 3]


def test_staging_is_waited_for_where_it_has_to_be_and_nowhere_else() -> None:
    crew = Crew(late=True)
    crew.wait_for_staging()
    crew.save(1)
    assert crew.copier.begun[0].waits == 0
    crew.wait_for_staging()
    crew.wait_for_staging()
    assert crew.copier.begun[0].waits == 1
    assert crew.staged(0) == 1.0
    crew.land(OSError("full"))
    crew.wait_for_staging()  # never raises for a save that failed


def test_case_49_what_fails_before_a_save_begins_leaves_room_for_the_next() -> None:
    crew = Crew()
    with pytest.raises(ValueError, match="broken"):
        crew.submit(request(1, ValueError("broken")))
    assert crew.in_flight == ()
    assert crew.save(2) == []


def test_case_53_a_lost_crew_is_spoken_of_once_and_replaced_before_the_next_save() -> None:
    crew = Crew(room=2)
    crew.save(1)
    crew.save(2)
    crew.land()
    crew.lost = "killed"
    crew.land(crew._loss())
    assert said(crew.settle()) == [(1, ""), (2, "the crew is gone: killed")]
    assert crew.failure() is None
    assert crew.settle() == []
    assert crew.crews == 1
    assert crew.save(3) == []
    assert crew.crews == 2
    crew.land()
    crew.lost = "killed while idle"
    assert "killed while idle" in str(crew.failure())
    assert said(crew.save(4)) == [(3, ""), (4, "the crew is gone: killed while idle")]
    assert crew.crews == 3
    assert crew.in_flight == (4,)
    crew.land()
    crew.lost = "again"
    crew.cannot_start = ConfigError("no Python")
    outcomes, has_room = crew.make_room(5)
    assert said(outcomes) == [(4, ""), (5, "the crew is gone: again"), (5, "no Python")]
    assert not has_room
    crew.cannot_start = None
    assert crew.save(6) == []


class Notes(InlineSaver):
    """Stands in, and notes for what."""

    def __init__(self) -> None:
        self.saved: list[int] = []

    def submit(self, request: SaveRequest) -> list[SaveOutcome]:
        self.saved.append(request.iteration)
        return [done(request.iteration, request.error)]


def test_case_53_a_stand_in_saves_for_as_long_as_no_crew_can_be_had(caplog: pytest.LogCaptureFixture) -> None:
    notes = Notes()
    crew = Crew(stand_in=notes)
    crew.save(1)
    crew.lost = "killed"
    crew.land()
    crew.cannot_start = ConfigError("no Python")
    assert said(crew.save(2)) == [(1, ""), (2, "")]  # save 1 had landed: nothing is lost
    assert said(crew.save(3)) == [(3, "")]
    assert notes.saved == [2, 3]
    texts = warnings_of(caplog)
    assert "no save was lost, and training goes on: the crew is gone: killed" in texts
    for number in (2, 3):
        assert f"iteration {number} is saved in the caller, and training waits for it" in texts
    assert texts.count("to go back to the background: no Python") == 2
    assert not crew.in_flight
    assert crew.failure() is None
    crew.cannot_start = None
    assert crew.save(4) == []
    assert notes.saved == [2, 3]
    assert list(crew.in_flight) == [4]
    crew.lost = "killed again"
    crew.land(CheckpointError("4 was lost"))
    assert said(crew.settle()) == [(4, "4 was lost")]  # a save was lost: that is no warning
    crew.cannot_start = LostRankError("the ranks are gone", rank=0)
    outcomes, has_room = crew.make_room(5)
    assert said(outcomes) == [(5, "the ranks are gone")]
    assert not has_room


def lost_and_hanging(caller: Ranks | None = None, stand_in: Saver | None = None) -> Crew:
    """A crew that is gone, and whose starts fail after 300 s."""
    crew = Crew(caller, stand_in=stand_in)
    crew.lost = "killed"
    crew.cannot_start = CheckpointError("it did not start within 300 s")
    crew.start_seconds = 300.0
    return crew


def save_every(crew: Crew, seconds: float, *, until: float) -> list[str]:
    """What training with a save every so many seconds hears of its saves."""
    errors, number = [], 0
    while crew.clock.now < until:
        number += 1
        errors += [str(each.error) for each in crew.save(number) if each.error is not None]
        crew.clock.now += seconds
    return errors


def test_case_53_starts_that_hang_are_tried_ever_less_often_while_a_stand_in_saves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    notes = Notes()
    crew = lost_and_hanging(stand_in=notes)
    assert save_every(crew, 60.0, until=100 * 3600.0) == []
    assert notes.saved == list(range(1, len(notes.saved) + 1))
    pauses = [later - earlier - 300.0 for earlier, later in itertools.pairwise(crew.starts)]
    assert pauses[:6] == [600.0, 1200.0, 2400.0, 4800.0, 9600.0, 9600.0]
    assert set(pauses[6:]) == {9600.0}
    assert len(crew.starts) * 300.0 < crew.clock.now / 25
    assert "the first save after 600 s tries to go back to the background: it did not start" in warnings_of(caplog)
    crew.cannot_start = None
    crew.clock.now = crew.starts[-1] + 300.0 + 9600.0
    assert crew.save(7000) == []
    assert crew.in_flight == (7000,)
    crew.land()
    crew.lost, crew.cannot_start = "killed again", CheckpointError("it did not start within 300 s")
    first = len(crew.starts)
    save_every(crew, 60.0, until=crew.clock.now + 1500.0)
    assert crew.starts[first + 1] - crew.starts[first] == 300.0 + 600.0  # counted from the start that worked


def test_case_53_without_a_stand_in_every_save_tries_to_start_a_crew() -> None:
    crew = lost_and_hanging()
    errors = save_every(crew, 60.0, until=1800.0)
    assert len(crew.starts) == 5
    assert errors.count("it did not start within 300 s") == 5


def test_case_68_without_memory_for_a_second_copy_the_first_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    crew = Crew(room=2)
    crew.save(1)
    monkeypatch.setattr(free_memory, "available_bytes", lambda: 0)
    assert said(waits(lambda: crew.save(2), crew.land)) == [(1, "")]
    assert crew.launched[1][0].arena is crew.launched[0][0].arena
    assert crew.staged(1) == 2.0
    crew.land()
    crew.settle()
    crew = Crew(room=2)
    with pytest.raises(StorageFullError):
        crew.save(1)


def test_what_is_late_at_the_end_is_said_and_given_up() -> None:
    crew = Crew(room=2)
    crew.save(1)
    crew.save(2)
    crew.land(OSError("full"))
    assert [str(error) for error in crew.drain(0.0)] == [
        "full",
        "the save of iteration 2 to memory://run did not end within 0 s",
    ]
    crew.close()
    crew.close()
    assert crew.dismissed == [True, False]
    assert crew.staged(1) == 2.0  # its memory stays: somebody may read it yet


# --- two ranks


class Pair:
    """Two ranks in threads, which exchange lists."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2)
        self._values: list[object] = [None, None]

    def exchange(self, rank: int, value: object) -> list[object]:
        self._values[rank] = value
        self._barrier.wait(30)
        found = list(self._values)
        self._barrier.wait(30)
        return found

    def run(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        with ThreadPoolExecutor(2) as pool:
            return [future.result(30) for future in [pool.submit(call) for call in calls]]


class PairedRanks(Ranks):
    pair: Pair

    @classmethod
    def of(cls, pair: Pair, rank: int) -> PairedRanks:
        ranks = cls(rank, 2)
        object.__setattr__(ranks, "pair", pair)
        return ranks

    def largest(self, words: Sequence[int]) -> list[int]:
        return [max(each) for each in zip(*self.pair.exchange(self.rank, list(words)), strict=True)]

    def all_gather(self, value: T) -> list[T]:
        return [pickle.loads(pickle.dumps(each)) for each in self.pair.exchange(self.rank, value)]


def test_cases_49_101_both_ranks_raise_the_cause_and_not_its_consequence() -> None:
    pair = Pair()
    crews = [Crew(PairedRanks.of(pair, rank), when_busy="wait") for rank in range(2)]
    pair.run([lambda crew=crew: crew.save(1) for crew in crews])  # type: ignore[misc]  # bound at once
    crews[0].lost = "the other one left"
    crews[0].land(LostRankError("rank 0 can't reach the other ranks any more", rank=0))
    crews[1].lost = "killed by SIGKILL"
    crews[1].land(crews[1]._loss())
    heard = pair.run([lambda crew=crew: crew.settle() for crew in crews])  # type: ignore[misc]  # bound at once
    assert [said(each) for each in heard] == [[(1, "the crew is gone: killed by SIGKILL")]] * 2
    pair.run([lambda crew=crew: crew.save(2) for crew in crews])  # type: ignore[misc]  # bound at once
    assert [crew.crews for crew in crews] == [2, 2]
    crews[0].land()
    crews[1].land(OSError("full"))
    first, second = pair.run([lambda crew=crew: crew.settle() for crew in crews])  # type: ignore[misc]  # bound at once
    assert isinstance(first[0].error, RankError)
    assert isinstance(second[0].error, OSError)


def test_case_53_ranks_whose_clocks_differ_start_together_or_not_at_all() -> None:
    pair = Pair()
    notes = [Notes(), Notes()]
    crews = [lost_and_hanging(PairedRanks.of(pair, rank), notes[rank]) for rank in range(2)]
    crews[1].start_seconds = 301.0
    for number, now in enumerate((0.0, 901.0, 1000.0), 1):  # at 901 s one is to wait for 2 s more
        for crew in crews:
            crew.clock.now = now
        pair.run([lambda crew=crew, number=number: crew.save(number) for crew in crews])  # type: ignore[misc]  # bound at once
    assert [crew.starts for crew in crews] == [[0.0, 1000.0]] * 2
    assert [each.saved for each in notes] == [[1, 2, 3]] * 2


# --- the words of a process


def crew_waits_for(flight: Flight) -> bool:
    return flight.outcome is None


def test_case_59_a_stale_reply_finishes_nothing() -> None:
    crew = _Crew(0)
    old, new = Flight(1, Arena()), Flight(2, Arena())
    crew.watch(1, old)
    crew.hear(Started(1))
    crew.hear(Joined())
    assert crew.started.is_set()
    assert crew.joined.is_set()
    crew.hear(SaveDone(1, done(1)))
    crew.watch(2, new)
    for number in (1, 3):  # once more, and of another process
        crew.hear(SaveDone(number, done(1, OSError("stale"))))
    assert crew_waits_for(new)
    assert old.outcome == done(1)
    old.land(done(1, OSError("late")))
    assert old.outcome == done(1)
    crew.end("it was killed")
    assert new.outcome is not None
    assert "iteration 2 was not saved: it was killed" in str(new.outcome.error)
    third = Flight(3, Arena())
    crew.watch(3, third)
    assert third.done.is_set()


def test_case_52_an_order_names_tensors_by_their_place_and_plans_once() -> None:
    tensors = {f"w{number}": torch.full((number % 7 + 1,), float(number)) for number in range(2000)}
    step = plan_step(1, {"model": {**tensors, "lr": 0.5}, "trainer": {"number": 3}})
    arena = Arena()
    staged = stage_step(step, arena)
    first = encode_order(staged, number=1, slot=0, block_bytes=1, sends_plans=True, moves_latest=True)
    later = encode_order(staged, number=2, slot=0, block_bytes=None, sends_plans=False, moves_latest=False)
    assert len(pickle.dumps(later)) < 10_000 < len(pickle.dumps(first))
    assert first.plans is not None
    block = torch.frombuffer(bytearray(arena._slots[0].untyped_storage()), dtype=torch.uint8)
    decoded = decode_step(pickle.loads(pickle.dumps(later)), first.plans, block)
    for key, local in staged.keys.items():
        for item in local.plan.items:
            found, wanted = decoded.keys[key].values.resolve_data(item), local.values.resolve_data(item)
            if isinstance(wanted, torch.Tensor):
                assert isinstance(found, torch.Tensor)
                assert found.equal(wanted)
            else:
                assert not isinstance(found, torch.Tensor)
                assert found.getvalue() == wanted.getvalue()
