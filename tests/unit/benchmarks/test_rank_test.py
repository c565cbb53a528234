"""The rank test says what it should of samples whose answer is known, and errs as seldom as it promises."""

from __future__ import annotations

import math
import random

import pytest

from benchmarks import rank_test as module
from benchmarks.rank_test import least_probability, rank_test, runs_needed


def test_sets_apart_are_as_improbable_as_counting_says() -> None:
    assert rank_test([1, 2, 3, 4], [5, 6, 7, 8]) == pytest.approx(2 / 70)
    assert rank_test([5, 6, 7, 8], [1, 2, 3, 4]) == pytest.approx(2 / 70)
    assert least_probability(4, 4) == pytest.approx(2 / 70)


def test_one_swap_is_counted_with_its_mirror() -> None:
    # Rank sums of 4 out of 8: 10 once, 11 once; and the same from above.
    assert rank_test([1, 2, 3, 5], [4, 6, 7, 8]) == pytest.approx(4 / 70)


def test_equal_runs_tell_nothing() -> None:
    assert rank_test([2.0] * 5, [2.0] * 5) == 1.0
    assert rank_test([2.0] * 40, [2.0] * 40) == 1.0


def test_ties_share_their_ranks() -> None:
    # Ranks 1.5, 1.5, 3.5 | 3.5, 5.5, 5.5: either 3.5 may stand on either side, so four ways of twenty are as lopsided.
    assert rank_test([1, 1, 2], [2, 3, 3]) == pytest.approx(4 / 20)


@pytest.mark.parametrize(("alpha", "runs"), [(0.05, 4), (0.01, 5), (0.001, 7), (1.0, 1)])
def test_runs_needed_is_the_first_number_that_can_tell(alpha: float, runs: int) -> None:
    assert runs_needed(alpha) == runs
    assert least_probability(runs, runs) <= alpha
    assert runs == 1 or least_probability(runs - 1, runs - 1) > alpha


def test_the_normal_distribution_takes_over_without_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    random_numbers = random.Random(5)
    old = [random_numbers.gauss(10, 1) for _ in range(9)]
    new = [random_numbers.gauss(10.8, 1) for _ in range(9)]
    exact = rank_test(old, new)
    monkeypatch.setattr(module, "_EXACT_UP_TO", 0)
    assert rank_test(old, new) == pytest.approx(exact, abs=0.01)


def test_what_is_the_same_is_called_different_no_oftener_than_promised() -> None:
    random_numbers = random.Random(20_260_101)
    trials, alpha = 2000, 0.05
    wrong = 0
    for _ in range(trials):
        runs = [random_numbers.lognormvariate(0, 0.3) for _ in range(10)]
        wrong += rank_test(runs[:5], runs[5:]) <= alpha
    # Five standard deviations above what is promised, for a fixed seed.
    assert 0 < wrong <= trials * alpha + 5 * math.sqrt(trials * alpha * (1 - alpha))
