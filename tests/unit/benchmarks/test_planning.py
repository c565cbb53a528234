"""The planning case runs, at a size of no account, and proves what it measures."""

from __future__ import annotations

import pytest

from benchmarks import planning
from benchmarks.figures import Missing
from benchmarks.planning import (
    RanksFigure,
    SimulationFigure,
    UnequalPlansError,
    markdown,
    measure,
    save_with_ranks,
    simulate_dcpfs,
    simulate_torch,
)


def test_simulated_ranks_plan_as_real_ones_would() -> None:
    ours, torchs = simulate_dcpfs(16, 24), simulate_torch(3, 24)
    assert (ours.ranks, torchs.ranks) == (16, 3)
    assert ours.sent_bytes < torchs.sent_bytes
    assert ours.assigned_bytes < torchs.assigned_bytes
    assert "| dcpfs | 16 × 24 |" in markdown([ours, torchs])


def test_case_74_a_later_save_meets_half_as_often() -> None:
    figures = save_with_ranks(12)
    counts = {(figure.contender, figure.save): figure.collectives for figure in figures}
    assert counts["dcpfs", "later"] <= 6
    assert counts["dcpfs", "first"] <= 12
    assert counts["dcpfs", "first"] < counts["torch", "first"]
    assert "| torch | later |" in markdown(figures)


def test_cost_over_the_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "save_with_ranks", lambda tensors: [])  # another test has them
    told: list[str] = []
    figures = list(measure(ranks=[2, 64], tensors=9, torch_ranks=2, tell=told.append))
    simulated = [figure for figure in figures if isinstance(figure, SimulationFigure)]
    assert [(figure.contender, figure.ranks) for figure in simulated] == [
        ("torch", 2),
        *(("dcpfs", ranks) for ranks in (2, 64)),
    ]
    for figure in simulated:
        assert figure.seconds is not None
        assert figure.moved_bytes == figure.sent_bytes + figure.assigned_bytes
    assert len(told) == 4


def test_figures_cross_process_borders() -> None:
    figure = simulate_dcpfs(2, 3)
    assert SimulationFigure.model_validate_json(figure.model_dump_json()) == figure
    with pytest.raises(ValueError, match="kind"):
        RanksFigure.model_validate_json(figure.model_dump_json())


def test_who_does_not_plan_the_same_checkpoint_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    def unequal(ranks: int, tensors: int) -> SimulationFigure:
        raise UnequalPlansError(f"model: they differ with {ranks} ranks of {tensors} tensors")

    monkeypatch.setattr(planning, "simulate_torch", unequal)
    monkeypatch.setattr(planning, "save_with_ranks", lambda tensors: [])
    results = list(measure(ranks=2, tensors=3, torch_ranks=2, tell=print, repetitions=2))
    assert [(result.kind, isinstance(result, Missing) and result.entry.contender) for result in results] == [
        ("failed", "dcpfs"),
        ("failed", "torch"),
    ]
    assert "| dcpfs | failed: UnequalPlansError: model: they differ" in markdown(results)


def test_ranks_that_die_are_no_figure_and_leave_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def die(tensors: int) -> list[RanksFigure]:
        raise RuntimeError(f"rank 1 of {tensors} tensors ended with 7")

    monkeypatch.setattr(planning, "save_with_ranks", die)
    results = list(measure(ranks=2, tensors=3, torch_ranks=2, tell=print, repetitions=2))
    counted = [result for result in results if not isinstance(result, Missing)]
    assert [(figure.contender, figure.repetition) for figure in counted] == [
        ("torch", 0),
        ("dcpfs", 0),
        ("torch", 1),
        ("dcpfs", 1),
    ]
    gone = {(result.entry.case, result.entry.contender) for result in results if isinstance(result, Missing)}
    assert gone == {("planning-2", "dcpfs"), ("planning-2", "torch")}
    text = markdown(results)
    assert "| torch | failed: RuntimeError: rank 1 of 3 tensors ended with 7 |" in text
    assert [line.split("|")[-2].strip() for line in text.splitlines() if line.startswith("| dcpfs | 2 × 3")] == ["2"]
