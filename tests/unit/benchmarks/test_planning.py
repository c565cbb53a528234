"""The planning case runs, at a size of no account, and proves what it measures."""

from __future__ import annotations

import pytest

from benchmarks import planning
from benchmarks.planning import (
    RanksFigure,
    SimulationFigure,
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
    figures = measure(ranks=[2, 64], tensors=9, torch_ranks=2, tell=told.append)
    simulated = [figure for figure in figures if isinstance(figure, SimulationFigure)]
    assert [(figure.contender, figure.ranks) for figure in simulated] == [
        *(("dcpfs", ranks) for ranks in (2, 64)),
        ("torch", 2),
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
