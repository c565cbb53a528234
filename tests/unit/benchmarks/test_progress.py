"""Progress is counted right, and is plain lines where nobody watches."""

from __future__ import annotations

import io

from rich.console import Console

from benchmarks.execution import Stage, most_bytes_at_once, units, written_bytes
from benchmarks.progress import RunProgress
from benchmarks.runner import Plan
from benchmarks.settings import Setting
from tests.unit.benchmarks.recordings import figure, missing, step_figure


def console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, force_terminal=terminal, width=60, color_system=None), stream


def test_lines_without_a_terminal_have_the_count_and_no_control_characters() -> None:
    target, stream = console(terminal=False)
    with RunProgress(3, target) as progress:
        progress.tell("save [dcpfs] #0: 1.2 GB/s " + "x" * 100)
        progress.count(figure(1.0), 3)
        progress.tell("next")
    assert stream.getvalue() == f"[0/3] save [dcpfs] #0: 1.2 GB/s {'x' * 100}\n[1/3] next\n"


def test_work_that_is_not_counted_has_no_count() -> None:
    target, stream = console(terminal=False)
    with RunProgress(0, target) as progress:
        progress.tell("planning: 8 ranks")
    assert stream.getvalue() == "planning: 8 ranks\n"


def test_a_terminal_gets_a_bar_below_the_lines() -> None:
    target, stream = console(terminal=True)
    with RunProgress(4, target) as progress:
        progress.tell("save dcpfs #0")
        progress.count(figure(1.0), 2)
        progress.reach(4)
    assert "save dcpfs #0" in stream.getvalue()
    assert "4/4" in stream.getvalue()


def test_rounds_count_once_and_the_missing_take_their_repetitions_along() -> None:
    target, _ = console(terminal=False)
    with RunProgress(10, target) as progress:
        progress.count(figure(1.0, round_=0), 3)
        progress.count(figure(1.0, round_=1), 3)
        assert progress.done == 1
        progress.count(figure(1.0, repetition=1), 3)
        assert progress.done == 2
        progress.count(missing("no", contender="dcpfs", repetition=2), 3)
        assert progress.done == 3
        progress.count(missing("no", contender="torch-4"), 3)
        assert progress.done == 6
        progress.count(step_figure(1.0, case="discovery-1", steps=1), 3)
        assert progress.done == 7
        progress.reach(5)
        assert progress.done == 7, "it never goes back"
        progress.count(figure(1.0), 3)
        assert progress.done == 8, "the same again is another plan's"
        progress.reach(99)
        assert progress.done == 10


def test_units_of_a_plan_are_those_who_take_part() -> None:
    plan = Plan(
        setting=Setting.FAST,
        cases=("save", "discovery-1"),
        contenders=("dcpfs", "torch-fsspec", "floor-listing"),
        size_bytes=1,
        repetitions=5,
    )
    # dcpfs and torch-fsspec save; dcpfs and floor-listing look for steps.
    assert units(plan) == 5 * (2 + 2)
    assert Stage(plan).where == "fast"


def test_a_checkpointer_writes_a_step_a_round_and_one_that_proves_them() -> None:
    plan = Plan(
        setting=Setting.FAST,
        cases=("checkpointer",),
        contenders=("dcpfs-sync", "torch-keys"),
        size_bytes=4_000_000,
        repetitions=5,
        rounds=2,
    )
    one = most_bytes_at_once(plan.model_copy(update={"cases": ("save",)}))
    assert most_bytes_at_once(plan) == 3 * one, "its steps stay until the end"
    assert written_bytes(plan) == 3 * one * 2 * 5
