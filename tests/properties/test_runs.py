"""Whatever is done to a run's steps, what is resumed from and what retention leaves follow the rules."""

from __future__ import annotations

import logging

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dcpfs.checkpointer.completeness import StepState, check_step
from dcpfs.checkpointer.discovery import choose_step
from dcpfs.checkpointer.layout import LATEST_NAME, MANIFEST_NAME, step_name
from dcpfs.checkpointer.retention import Retention, RetentionPolicy, protect_step, unprotect_step
from dcpfs.errors import IncompleteCheckpointError
from dcpfs.testing.faulty import Aftermath, FaultPlan, FaultyStore, Moment
from tests.conformance.step_scene import Scene
from tests.properties.bounds import examples
from tests.properties.dict_store import DictStore

ITERATIONS = st.integers(1, 9)


class Runs(RuleBasedStateMachine):
    """A run in memory beside sets that say what must be there."""

    def __init__(self) -> None:
        super().__init__()
        self.scene = Scene(DictStore())
        self.whole: set[int] = set()
        self.foreign: set[int] = set()
        self.damaged: set[int] = set()
        self.dead: set[int] = set()
        self.protected: set[int] = set()
        self.latest: int | None = None
        self.seen: dict[int, str] = {}
        logging.getLogger("dcpfs").setLevel(logging.CRITICAL)

    def teardown(self) -> None:
        logging.getLogger("dcpfs").setLevel(logging.NOTSET)
        self.scene.store.close()

    @initialize(last=st.none() | st.integers(1, 3), every=st.none() | st.integers(2, 4))
    def begin(self, last: int | None, every: int | None) -> None:
        self.policy = RetentionPolicy(keep_last=last, keep_every=every)
        self.retention = Retention(self.policy)

    def forget(self, iteration: int) -> None:
        self.scene.store.delete(self.scene.names(step_name(iteration)))
        for found in (self.whole, self.foreign, self.damaged, self.dead, self.protected):
            found.discard(iteration)

    @rule(iteration=ITERATIONS, pointed=st.booleans())
    def commit(self, iteration: int, pointed: bool) -> None:
        self.forget(iteration)
        self.scene.commit(iteration, latest=pointed, size_bytes=10)
        self.whole.add(iteration)
        self.latest = iteration if pointed else self.latest

    @rule(iteration=ITERATIONS)
    def die(self, iteration: int) -> None:
        self.forget(iteration)
        self.scene.dead(iteration)
        self.dead.add(iteration)

    @rule(iteration=ITERATIONS)
    def copy_in(self, iteration: int) -> None:
        self.forget(iteration)
        self.scene.foreign(iteration)
        self.foreign.add(iteration)

    @precondition(lambda self: self.whole)
    @rule(data=st.data(), how=st.sampled_from(["short", "gone", "manifest"]))
    def damage(self, data: st.DataObject, how: str) -> None:
        iteration = data.draw(st.sampled_from(sorted(self.whole)))
        if how == "short":
            self.scene.cut(iteration, "model/__0_1.distcp")
        elif how == "gone":
            self.scene.delete(iteration, "trainer/.metadata")
        else:
            self.scene.cut(iteration, MANIFEST_NAME, 30)
        self.whole.discard(iteration)
        self.damaged.add(iteration)

    @rule(iteration=ITERATIONS)
    def point(self, iteration: int) -> None:
        self.scene.name_latest(iteration)
        self.latest = iteration

    @rule()
    def unpoint(self) -> None:
        self.scene.store.delete([LATEST_NAME])
        self.latest = None

    @precondition(lambda self: self.whole)
    @rule(data=st.data())
    def turn_protection(self, data: st.DataObject) -> None:
        iteration = data.draw(st.sampled_from(sorted(self.whole)))
        (unprotect_step if iteration in self.protected else protect_step)(self.scene.store, iteration)
        self.protected ^= {iteration}

    @rule(
        fresh=st.booleans(),
        plan=st.just(FaultPlan())
        | st.builds(
            FaultPlan,
            mutation=st.integers(1, 8),
            moment=st.sampled_from(Moment),
            aftermath=st.sampled_from(Aftermath),
        ),
    )
    def retain(self, fresh: bool, plan: FaultPlan) -> None:
        retention = Retention(self.policy) if fresh else self.retention
        pointed = self.latest if self.latest in self.whole else None
        newest = max(self.whole, default=None) if pointed is None else pointed
        report = retention.apply(FaultyStore(self.scene.store, plan))
        kinds = dict.fromkeys(self.whole, "whole") | dict.fromkeys(self.foreign | self.damaged, "other")
        changed = {each for each, kind in self.seen.items() if kinds.get(each) != kind}
        if not fresh:
            self.seen.update(kinds)
        gone = {*report.removed, *report.swept, *report.failures} - {-1}
        if newest is None:
            assert not gone
            return
        counted = sorted(each for each in self.whole if each <= newest)
        kept = {newest, *self.protected, *counted[-(self.policy.keep_last or 1) :], *self.foreign}
        if self.latest is not None:
            kept.add(self.latest)
        if self.policy.keep_every:
            kept |= {each for each in self.whole | self.damaged if each % self.policy.keep_every == 0}
        assert not gone & kept
        assert all(each < newest for each in gone)
        if self.policy.keeps_all:
            assert gone <= self.dead
        if not report.failures:
            expected = {each for each in self.dead if each < newest}
            if not self.policy.keeps_all:
                expected |= {each for each in counted if each not in kept}
            # It believes of what it has seen that it is as it was, until it would remove it.
            assert expected - kept - (set() if fresh else changed) <= gone
        for iteration in gone:
            state = check_step(self.scene.store, iteration).state
            if iteration in report.failures:
                assert state in (StepState.COMPLETE, StepState.DAMAGED, StepState.WRITING, StepState.ABSENT)
                if state not in (StepState.COMPLETE, StepState.DAMAGED):
                    self.forget_facts(iteration, left=state is StepState.WRITING)
            else:
                assert state is StepState.ABSENT
                self.forget_facts(iteration, left=False)

    def forget_facts(self, iteration: int, *, left: bool) -> None:
        for found in (self.whole, self.damaged, self.dead):
            found.discard(iteration)
        if left:
            self.dead.add(iteration)

    @invariant()
    def what_is_resumed_from_follows_the_rules(self) -> None:
        usable = self.whole | ({self.latest} & self.foreign)
        expected = self.latest if self.latest in usable else max(self.whole, default=None)
        try:
            choice = choose_step(self.scene.store)
        except IncompleteCheckpointError:
            assert expected is None
            assert self.latest is not None or self.damaged
            return
        if choice.status is None:
            assert expected is None
            assert self.latest is None
            assert not self.damaged
            return
        assert choice.status.iteration == expected


TestRuns = Runs.TestCase
TestRuns.settings = settings(examples(40), stateful_step_count=25)
