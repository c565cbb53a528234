"""Which steps retention takes: the decision alone."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpfs.checkpointer.choices import BestMode
from dcpfs.checkpointer.retention import RetentionPolicy, StepFacts, StepKind, choose_removals
from dcpfs.errors import ConfigError

C, D, L, U = StepKind.COMMITTED, StepKind.DAMAGED, StepKind.LEFTOVER, StepKind.UNKNOWN


def committed(iterations: Iterable[int]) -> list[StepFacts]:
    return [StepFacts(iteration, C) for iteration in iterations]


def rated(**metrics: float | None) -> list[StepFacts]:
    return [StepFacts(int(name[1:]), C, metric) for name, metric in metrics.items()]


@pytest.mark.parametrize(
    ("rules", "gone"),
    [
        ({}, []),
        ({"keep_last": 2}, [1, 2, 3, 4]),
        ({"keep_last": 9}, []),
        ({"keep_every": 2}, [1, 3, 5]),
        ({"keep_last": 2, "keep_every": 3}, [1, 2, 4]),
        ({"keep_last": 1, "protected": {2, 77}}, [1, 3, 4, 5]),
        ({"keep_last": 1, "in_flight": {1}}, [2, 3, 4, 5]),
        ({"keep_last": 2, "in_flight": {6}}, [1, 2, 3]),
        ({"keep_last": 1, "newest": 6, "in_flight": {6}}, [1, 2, 3, 4, 5]),
    ],
)
def test_what_any_rule_keeps_stays(rules: dict[str, object], gone: list[int]) -> None:
    assert choose_removals(committed(range(1, 7)), **rules) == gone  # type: ignore[arg-type] # a table of arguments


def test_case_38_a_protected_step_is_kept_and_counts_among_the_last() -> None:
    assert choose_removals(committed([10, 20, 30, 40]), keep_last=2, protected={30}) == [10, 20]


@pytest.mark.parametrize(("mode", "gone"), [(BestMode.MAX, [1, 3, 5]), (BestMode.MIN, [2, 4, 5])], ids=["max", "min"])
def test_the_best_are_kept_beside_the_newest(mode: BestMode, gone: list[int]) -> None:
    steps = rated(i1=0.1, i2=0.9, i3=0.2, i4=0.8, i5=None, i6=0.5)
    assert choose_removals(steps, keep_best=2, best_mode=mode) == gone


def test_of_equal_metrics_the_newer_step_is_better() -> None:
    assert choose_removals(rated(i1=0.5, i2=0.5, i3=0.5, i4=0.1), keep_best=2) == [1]


def test_steps_from_before_a_rollback_stay_until_training_has_passed_them() -> None:
    steps = committed([10, 20, 30, 40])
    assert choose_removals([*steps, StepFacts(25, C)], keep_last=2, newest=25) == [10]
    assert choose_removals([*steps, StepFacts(35, C)], keep_last=2, newest=35) == [10, 20]


def test_case_34_what_does_not_load_does_not_count() -> None:
    steps = [*committed([10, 20]), StepFacts(30, D), StepFacts(40, L), StepFacts(50, U)]
    assert choose_removals(steps, keep_last=1) == [10]
    assert choose_removals(steps, keep_last=2) == []
    assert choose_removals([StepFacts(30, D), StepFacts(40, L), StepFacts(50, U)], keep_last=1) == []


def test_a_damaged_step_goes_only_with_those_of_its_age() -> None:
    damaged = [StepFacts(iteration, D) for iteration in (5, 15, 25)]
    assert choose_removals([*damaged, *committed([10, 20])], keep_last=1) == [5, 10, 15]
    assert choose_removals([*damaged, *committed([10, 20])], keep_last=2) == [5]
    assert choose_removals([*damaged, *committed([10, 20])], keep_last=3) == []
    assert choose_removals([*damaged, *committed([10, 20])]) == []


def test_exports_of_the_model_take_no_place_of_what_training_goes_on_from() -> None:
    exports = [StepFacts(iteration, C, resumable=False) for iteration in (5, 35, 36, 37)]
    steps = [*committed([10, 20, 30]), *exports]
    assert choose_removals(steps, keep_last=1) == [5, 10, 20, 35, 36]
    assert choose_removals(steps, keep_last=2) == [5, 10, 35]
    assert choose_removals([*steps, StepFacts(40, C)], keep_last=2) == [5, 10, 20, 35, 36]
    assert choose_removals(exports, keep_last=2) == [5, 35]
    assert choose_removals(steps, keep_every=7) == [5, 10, 20, 36]


def test_a_damaged_step_is_measured_by_those_of_its_kind() -> None:
    exports = [StepFacts(iteration, C, resumable=False) for iteration in (30, 40)]
    assert choose_removals([StepFacts(10, D), *exports], keep_last=1) == [30]
    assert choose_removals([StepFacts(10, D), *committed([20]), *exports], keep_last=1) == [10, 30]
    assert choose_removals([StepFacts(10, D, resumable=False), *exports], keep_last=1) == [10, 30]


@pytest.mark.parametrize("rules", [{}, {"keep_last": 5}, {"keep_every": 1}])
def test_case_37_leftovers_go_once_they_are_older_than_the_newest_commit(rules: dict[str, int]) -> None:
    steps = [StepFacts(3, L), StepFacts(5, C), StepFacts(7, L), StepFacts(1, U)]
    assert choose_removals(steps, **rules) == [3]  # type: ignore[arg-type] # a table of arguments
    assert choose_removals(steps, **rules, in_flight={3}) == []  # type: ignore[arg-type] # as above
    assert choose_removals(steps, **rules, protected={3}) == []  # type: ignore[arg-type] # as above


def test_nothing_goes_when_the_newest_step_is_not_committed() -> None:
    assert choose_removals([*committed([1, 2]), StepFacts(3, D)], keep_last=1, newest=3) == []


@pytest.mark.parametrize("rules", [{"keep_last": 0}, {"keep_every": -1}, {"keep_best": True}, {"keep_last": 1.5}])
def test_a_policy_takes_positive_integers(rules: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(rules))):
        RetentionPolicy(**rules)  # type: ignore[arg-type] # wrong on purpose


FACTS = st.dictionaries(
    st.integers(0, 60),
    st.tuples(st.sampled_from(list(StepKind)), st.none() | st.floats(-10, 10), st.booleans()),
    max_size=25,
).map(lambda found: [StepFacts(iteration, *fact) for iteration, fact in found.items()])
RULE = st.none() | st.integers(1, 6)


@given(FACTS, RULE, RULE, RULE, st.sets(st.integers(0, 60), max_size=5), st.data())
def test_whatever_the_rules_the_newest_and_what_nobody_can_vouch_for_stay(
    facts: list[StepFacts], last: int | None, every: int | None, best: int | None, held: set[int], data: st.DataObject
) -> None:
    kinds = {each.iteration: each.kind for each in facts}
    whole = sorted(iteration for iteration, kind in kinds.items() if kind is C)
    newest = data.draw(st.sampled_from(whole)) if whole else None
    gone = choose_removals(
        facts, keep_last=last, keep_every=every, keep_best=best, protected=held, newest=newest, in_flight={1, 2}
    )
    assert gone == sorted(set(gone))
    assert not {*gone} & {*held, 1, 2}
    assert all(kinds[iteration] is not U for iteration in gone)
    if newest is None:
        assert gone == []
        return
    assert all(iteration < newest for iteration in gone)
    left = [iteration for iteration in whole if iteration not in gone and iteration <= newest]
    counted = [iteration for iteration in whole if iteration <= newest and iteration not in {1, 2} - {newest}]
    assert len(left) >= min(last or 1, len(counted))
    assert {*counted[-(last or 1) :]} <= {*left}
    resumable = {each.iteration for each in facts if each.resumable}
    assert {*[each for each in counted if each in resumable][-(last or 1) :]} <= {*left}
    # Applied again to what is left, it finds nothing more: retention settles.
    rest = [each for each in facts if each.iteration not in gone]
    assert not choose_removals(
        rest, keep_last=last, keep_every=every, keep_best=best, protected=held, newest=newest, in_flight={1, 2}
    )
