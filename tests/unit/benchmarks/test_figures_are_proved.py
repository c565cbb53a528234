"""A wrong result, a missing contender or a dead process can't pass as a figure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from benchmarks.cli import app
from benchmarks.figures import Entry, Figure, combine
from benchmarks.figures import Missing as MissingFigure
from benchmarks.job import Absent, Failed, Measured, Outcome, RoundFigures
from benchmarks.place import open_place
from benchmarks.runner import Isolation, Plan, Runner
from benchmarks.settings import Setting, Target, client_environment

TINY_BYTES = 400_000
BROKEN = "tests.unit.benchmarks.broken_contenders"


@pytest.fixture(scope="module")
def sink() -> Iterator[Target]:
    with open_place(Setting.FAST, None, 0) as place:
        yield place


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in client_environment().items():
        monkeypatch.setenv(name, value)


def measure(
    place: Target, case: str, contender: str, isolation: Isolation = Isolation.INLINE
) -> list[Figure | MissingFigure]:
    plan = Plan(
        setting=place.setting,
        cases=(case,),
        contenders=(contender,),
        size_bytes=TINY_BYTES,
        repetitions=1,
        isolation=isolation,
        timeout_seconds=240,
    )
    return list(Runner(plan, place, lambda _: None).run())


@pytest.mark.parametrize(
    ("case", "contender", "said"),
    [
        ("save", "FlipsOnSave", "wrong bytes"),
        ("save", "LosesOnSave", "not in the checkpoint"),
        ("save", "CastsOnSave", "described as torch.float32"),
        ("save", "SavesNothing", "404"),
        ("save", "Raises", "no such luck"),
        ("load", "FlipsOnLoad", "wrong bytes"),
        ("load", "LoadsNothing", "wrong bytes"),
        ("load", "MixesOnLoad", "wrong bytes"),
        ("load", "RightOnlyOnce", "wrong bytes"),
        ("load", "Raises", "saving what is to be loaded"),
        ("partial", "FlipsOnLoad", "wrong bytes"),
        ("small-load", "LoadsNothing", "wrong bytes"),
    ],
)
def test_wrong_bytes_are_no_figure(sink: Target, case: str, contender: str, said: str) -> None:
    (result,) = measure(sink, case, f"{BROKEN}:{contender}")
    assert isinstance(result, MissingFigure)
    assert result.kind == "failed"
    assert said in result.reason


def test_wrong_second_rank_is_no_figure(sink: Target) -> None:
    (result,) = measure(sink, "reshard", f"{BROKEN}:WrongOnSecondRank")
    assert isinstance(result, MissingFigure)
    assert result.kind == "failed"


def test_dead_process_is_no_figure(sink: Target) -> None:
    (result,) = measure(sink, "save", f"{BROKEN}:Dies", Isolation.PROCESS)
    assert isinstance(result, MissingFigure)
    assert result.kind == "failed"
    assert "ended with 7" in result.reason


@pytest.mark.parametrize("case", ["save", "load"])
def test_absent_is_absent(sink: Target, case: str) -> None:
    (result,) = measure(sink, case, f"{BROKEN}:Missing")
    assert isinstance(result, MissingFigure)
    assert result.kind == "absent"
    assert "not installed here" in result.reason


def test_one_rank_without_a_figure_leaves_none() -> None:
    figures = RoundFigures(began_seconds=1, ended_seconds=2, cpu_seconds=1, peak_extra_bytes=0)
    good = Outcome(result=Measured(verified=True, rounds=(figures,), needed_bytes=10**9))
    entry = Entry(case="save", setting=Setting.FAST, contender="x", repetition=0)
    assert isinstance(combine(entry, [good, good]), list)
    for bad in (Failed(reason="wrong"), Absent(reason="gone")):
        combined = combine(entry, [good, Outcome(result=bad)])
        assert isinstance(combined, MissingFigure)
        assert combined.kind == bad.kind
    assert isinstance(combine(entry, []), MissingFigure)


def test_figures_without_proof_cannot_be_made() -> None:
    unproved = {"kind": "measured", "verified": False, "rounds": [], "needed_bytes": 1}
    with pytest.raises(ValidationError):
        Outcome.model_validate({"result": unproved})


def test_report_shows_reasons_in_place_of_figures(tmp_path: Path) -> None:
    lines, table = tmp_path / "figures.jsonl", tmp_path / "figures.md"
    arguments = ["save", "--size-gb", "0.0004", "--repetitions", "1", "--rounds", "1"]
    arguments += ["--only", "floor-sockets", "--only", f"{BROKEN}:FlipsOnSave", "--only", f"{BROKEN}:Missing"]
    arguments += ["--baseline", "floor-sockets", "--json", str(lines), "--markdown", str(table)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1, result.output
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [record["kind"] for record in records] == ["manifest", "figure", "failed", "absent"]
    assert records[0]["versions"]["torch"]
    assert "not-a-secret" not in lines.read_text()
    rows = {row.split("|")[1].strip(): row for row in table.read_text().splitlines() if row.startswith("| ")}
    assert "1.00" in rows["floor-sockets"]
    assert "failed: " in rows[f"{BROKEN}:FlipsOnSave"]
    assert "absent: " in rows[f"{BROKEN}:Missing"]
