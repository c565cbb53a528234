"""The stall case runs, at a size of no account, and proves what it measures."""

from __future__ import annotations

from benchmarks.stall import CONTENDERS, StallFigure, markdown, measure


def test_every_contender_is_blocked_for_something_and_stores_what_was_there() -> None:
    said: list[str] = []
    figures = measure(size_bytes=2_000_000, rounds=2, tell=said.append)
    assert [figure.contender for figure in figures] == list(CONTENDERS)
    for figure in figures:
        assert figure.first.total_seconds >= figure.first.call_seconds > 0
        assert figure.copies > 0
        assert figure.quiet_steps_per_second > 0
        assert figure.saving_steps_per_second > 0
        assert StallFigure.model_validate_json(figure.model_dump_json()) == figure
    assert len(said) == len(figures)
    text = markdown(figures)
    assert all(f"| {contender} | " in text for contender in CONTENDERS)
