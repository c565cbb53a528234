"""A regression is told from noise, and what can't be compared isn't."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.cli import app
from benchmarks.compare import Comparison, IncomparableError, Limits, Row, Verdict, compare, judge, markdown
from benchmarks.figures import Entry, Figure, Missing
from benchmarks.records import Metric
from benchmarks.settings import Setting
from benchmarks.stall import Blocked, StallFigure
from tests.unit.benchmarks.recordings import (
    SIMULATED,
    STALLED,
    figure,
    figures,
    manifest,
    missing,
    recording,
    write,
)

BASE = [1.00, 1.03, 0.98, 1.05, 1.01]


def verdicts(comparison: Comparison, metric: Metric = Metric.WALL) -> dict[str, Verdict]:
    return {row.contender: row.judgement.verdict for row in comparison.rows if row.metric in (metric, None)}


def scaled(seconds: Sequence[float], factor: float) -> list[float]:
    return [each * factor for each in seconds]


def wall(old: Sequence[float], new: Sequence[float], limits: Limits | None = None) -> Verdict:
    return judge(old, new, metric=Metric.WALL, limits=limits or Limits()).verdict


def test_slower_by_more_than_the_spread_is_worse_and_faster_is_better() -> None:
    assert wall(BASE, scaled(BASE, 1.2)) is Verdict.WORSE
    assert wall(scaled(BASE, 1.2), BASE) is Verdict.BETTER
    assert judge(BASE, scaled(BASE, 1.2), metric=Metric.WALL, limits=Limits()).ratio == pytest.approx(1.2)


def test_a_shift_within_the_spread_is_noise() -> None:
    wide = [0.7, 1.5, 0.9, 1.3, 1.1]
    assert wall(wide, scaled(wide, 1.2)) is Verdict.WITHIN_NOISE


def test_a_sure_difference_below_the_threshold_is_no_regression() -> None:
    steady = [1.000, 1.001, 1.002, 1.003, 1.004]
    assert wall(steady, scaled(steady, 1.02)) is Verdict.WITHIN_NOISE
    assert wall(steady, scaled(steady, 1.02), Limits(threshold=0.01)) is Verdict.WORSE


def test_three_runs_are_too_few_to_tell() -> None:
    assert wall([1.0, 1.0, 1.0], [9.0, 9.0, 9.0]) is Verdict.TOO_FEW_RUNS
    assert wall([1.0, 1.0, 1.0], [9.0, 9.0, 9.0], Limits(alpha=0.1)) is Verdict.WORSE


def test_counts_that_never_vary_need_no_test() -> None:
    limits = Limits()
    assert judge([97, 97], [98, 98], metric=Metric.REQUESTS, limits=limits).verdict is Verdict.WORSE
    assert judge([970, 970], [975, 975], metric=Metric.REQUESTS, limits=limits).verdict is Verdict.WITHIN_NOISE
    assert judge([97_000, 97_010], [99_000, 99_010], metric=Metric.MOVED, limits=limits).verdict is Verdict.WORSE
    assert judge([97, 97], [97, 130], metric=Metric.REQUESTS, limits=limits).verdict is Verdict.TOO_FEW_RUNS
    assert judge([97], [130], metric=Metric.REQUESTS, limits=limits).verdict is Verdict.TOO_FEW_RUNS


def test_a_few_megabytes_more_are_no_regression() -> None:
    assert judge([0] * 5, [5 << 20] * 5, metric=Metric.PEAK, limits=Limits()).verdict is Verdict.WITHIN_NOISE
    assert judge([0] * 5, [50 << 20] * 5, metric=Metric.PEAK, limits=Limits()).verdict is Verdict.WORSE


def test_noise_alone_is_seldom_called_a_regression() -> None:
    random_numbers = random.Random(7)
    wrong = 0
    for _ in range(500):
        runs = [random_numbers.lognormvariate(0, 0.2) for _ in range(10)]
        wrong += wall(runs[:5], runs[5:]) is Verdict.WORSE
    assert wrong <= 500 * 0.05


def test_each_contender_is_judged_alone() -> None:
    old = recording([*figures(BASE), *figures(BASE, contender="torch-4")])
    new = recording([*figures(scaled(BASE, 1.3)), *figures(BASE, contender="torch-4")])
    found = compare(old, new)
    assert verdicts(found) == {"dcpfs": Verdict.WORSE, "torch-4": Verdict.WITHIN_NOISE}
    assert verdicts(found, Metric.REQUESTS) == {"dcpfs": Verdict.WITHIN_NOISE, "torch-4": Verdict.WITHIN_NOISE}
    assert [row.contender for row in found.worse] == ["dcpfs", "dcpfs"]  # wall and CPU
    assert {row.contender for row in compare(old, new, contenders=["torch-4"]).rows} == {"torch-4"}


def test_who_fails_where_it_had_figures_is_worse() -> None:
    old = recording(figures(BASE))
    new = recording([*figures(BASE[:2]), missing("wrong bytes", contender="dcpfs", repetition=2)])
    (row,) = compare(old, new).worse
    assert row.judgement.verdict is Verdict.NOW_FAILS
    assert "**now fails**" in markdown(compare(old, new))


def test_who_fails_is_worse_also_where_several_sizes_were_measured() -> None:
    def sized(contender: str) -> list[Figure]:
        return [
            figure(each, contender=contender, size_bytes=size, repetition=number)
            for size in (10**8, 10**9)
            for number, each in enumerate(BASE)
        ]

    old = recording([*sized("dcpfs"), *sized("torch-4")])
    new = recording([*sized("torch-4"), missing("wrong bytes", contender="dcpfs")])
    worse = compare(old, new).worse
    assert {(row.case, row.judgement.verdict) for row in worse} == {
        ("save, 100000000 bytes", Verdict.NOW_FAILS),
        ("save, 1000000000 bytes", Verdict.NOW_FAILS),
    }


def test_who_fails_to_save_in_the_background_or_to_plan_is_worse() -> None:
    gone = [
        Missing(
            kind="failed",
            entry=Entry(case=case, setting=setting, contender="torch-thread", repetition=0, place=place),
            reason="no",
        )
        for case, setting, place in (("stall", Setting.TMPFS, ""), ("planning", Setting.MEMORY, "without a store"))
    ]
    simulated = SIMULATED.model_copy(update={"contender": "torch-thread"})
    old = recording([STALLED, simulated, *figures(BASE)])
    worse = compare(old, recording([STALLED, simulated, *gone, *figures(BASE)])).worse
    assert [(row.case, row.judgement.verdict) for row in worse] == [
        ("stall", Verdict.NOW_FAILS),
        ("planning (ranks=64)", Verdict.NOW_FAILS),
    ]


def test_seconds_that_training_waits_are_told_from_their_spread() -> None:
    def waits(factor: float) -> list[StallFigure]:
        return [
            STALLED.model_copy(
                update={
                    "repetition": number,
                    "later": Blocked(call_seconds=each * factor, total_seconds=each * factor),
                    "seconds": each * factor,
                }
            )
            for number, each in enumerate(BASE)
        ]

    found = compare(recording(waits(1)), recording(waits(1.5)))
    assert {row.metric for row in found.worse} == {Metric.WALL, Metric.BLOCKED}


def test_who_is_absent_now_is_noted() -> None:
    old = recording([*figures(BASE), *figures(BASE, contender="torch-4")])
    new = recording([*figures(BASE), missing("not installed", contender="torch-4", kind="absent")])
    found = compare(old, new)
    assert not found.worse
    assert any("Only in A: save fast torch-4" in note for note in found.notes)


def test_on_another_machine_a_reference_is_the_measure() -> None:
    slow = manifest(cores=64)
    old = recording([*figures(BASE), *figures(scaled(BASE, 4), contender="torch-4")])
    same = recording([*figures(scaled(BASE, 3)), *figures(scaled(BASE, 12), contender="torch-4")], about=slow)
    worse = recording([*figures(scaled(BASE, 3)), *figures(scaled(BASE, 6), contender="torch-4")], about=slow)
    with pytest.raises(IncomparableError, match=r"different machines \(cores: 2 and 64\): name a contender"):
        compare(old, same)
    assert not compare(old, same, reference="torch-4").worse
    found = compare(old, worse, reference="torch-4")
    assert {(row.contender, row.metric) for row in found.worse} == {("dcpfs", Metric.WALL), ("dcpfs", Metric.CPU)}
    assert found.worse[0].judgement.ratio == pytest.approx(2)
    with pytest.raises(IncomparableError, match="beside one of nobody"):
        compare(old, same, reference="nobody", metrics=[Metric.WALL])


def test_runs_are_paired_with_the_reference_of_their_own_minute() -> None:
    # Every second minute is twice as slow for everybody: in pairs nothing varies, alone everything does.
    minutes = [1.0, 2.0, 1.0, 2.0, 1.0]
    old = recording([*figures(minutes), *figures(minutes, contender="torch-4")])
    new = recording([*figures(scaled(minutes, 1.2)), *figures(minutes, contender="torch-4")])
    assert verdicts(compare(old, new))["dcpfs"] is Verdict.WITHIN_NOISE
    assert verdicts(compare(old, new, reference="torch-4"))["dcpfs"] is Verdict.WORSE


def test_other_work_is_refused_by_what_differs() -> None:
    old = recording(figures(BASE))
    with pytest.raises(IncomparableError, match="size_bytes of fast: 4000000 and 5000000"):
        compare(old, recording(figures(BASE), about=manifest(size_bytes=5_000_000)))
    other = [figure(each, size_bytes=77, repetition=number) for number, each in enumerate(BASE)]
    with pytest.raises(IncomparableError, match=r"save, dcpfs: \d+ bytes and 77 bytes"):
        compare(old, recording(other))
    with pytest.raises(IncomparableError, match="no case and contender has figures in both"):
        compare(old, recording(figures(BASE, case="load")))


def test_what_else_changed_is_noted() -> None:
    old = recording(figures(BASE))
    new = recording(figures(BASE), about=manifest(versions={"torch": "2.14.0"}))
    notes = " ".join(compare(old, new).notes)
    assert "s3torchconnector" not in notes, "absent in both"
    assert "torch 2.13.0 → 2.14.0" in notes
    assert "commit 0123456789ab" in notes


def test_the_table_has_both_spreads_and_the_verdict() -> None:
    text = markdown(compare(recording(figures(BASE)), recording(figures(scaled(BASE, 1.2)))))
    (row,) = [line for line in text.splitlines() if "| wall |" in line]
    assert "1.01 s (0.98 s–1.05 s), 5" in row
    assert "1.21 s (1.18 s–1.26 s), 5" in row
    assert "1.200" in row
    assert "0.008" in row
    assert row.endswith("**worse** |")


def test_rows_tell_nothing_when_a_side_has_no_figure_of_the_cost() -> None:
    old = recording([figure(each, requests=None, repetition=number) for number, each in enumerate(BASE)])
    rows: Sequence[Row] = compare(old, recording(figures(BASE))).rows
    assert Metric.REQUESTS not in {row.metric for row in rows}


@pytest.mark.parametrize(
    ("new", "code", "said"),
    [
        (scaled(BASE, 1.3), 1, "worse"),
        (BASE, 0, "within noise"),
        (scaled(BASE, 0.7), 0, "better"),
        ([9.0], 0, "too few runs to tell: at 0.05 it takes 4 on each side"),
    ],
)
def test_the_exit_code_is_the_verdict(tmp_path: Path, new: list[float], code: int, said: str) -> None:
    old_path, new_path = write(tmp_path / "a.jsonl", figures(BASE)), write(tmp_path / "b.jsonl", figures(new))
    table = tmp_path / "table.md"
    result = CliRunner().invoke(app, ["compare", str(old_path), str(new_path), "--markdown", str(table)])
    assert result.exit_code == code, result.output
    assert said in result.output
    assert table.read_text().strip() in result.output


def test_nothing_comparable_ends_with_another_code(tmp_path: Path) -> None:
    old_path = write(tmp_path / "a.jsonl", figures(BASE))
    new_path = write(tmp_path / "b.jsonl", figures(BASE), manifest(cores=8))
    result = CliRunner().invoke(app, ["compare", str(old_path), str(new_path)])
    assert result.exit_code == 2
    assert "--reference" in result.output
    result = CliRunner().invoke(app, ["compare", str(old_path), str(tmp_path / "nothing.jsonl")])
    assert result.exit_code == 2
    assert "No such file" in result.output
