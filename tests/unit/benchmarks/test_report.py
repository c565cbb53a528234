"""Tables: every figure with its spread, every absentee with its reason, every place beside the others."""

from __future__ import annotations

from benchmarks.figures import Figure, Missing
from benchmarks.report import circumstances, markdown
from tests.unit.benchmarks.recordings import figure, figures, manifest, missing, step_figure


def rows(text: str, title: str) -> dict[str, list[str]]:
    """Cells by first cell, of the table below a title."""
    lines = text[text.index(f"### {title}") :].splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("| ---"))
    found = {}
    for line in lines[start + 1 :]:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        found[cells[0]] = cells[1:]
    return found


def test_median_range_and_ratio_to_the_baseline() -> None:
    sized = [figure(each, size_bytes=10**9, repetition=number) for number, each in enumerate((0.5, 1.0, 2.0))]
    other = [figure(4.0, size_bytes=10**9, contender="torch-4")]
    text = markdown(manifest(), [*sized, *other], {"fast": "torch-4"})
    found = rows(text, "save, fast, 1.00 GB")
    assert found["dcpfs"] == ["1.00 (0.50–2.00)", "–", "4.00", "0.50 (0.25–1.00)", "1 (1–1)", "10", "1.000", "3"]
    assert found["torch-4"] == ["0.25", "–", "1.00", "2.00", "1", "10", "1.000", "1"]
    assert "What does it cost to save" in text


def test_the_first_round_stands_apart() -> None:
    first = figure(2.0, size_bytes=10**9, round_=0)
    text = markdown(manifest(), [first, figure(1.0, size_bytes=10**9)], {})
    assert rows(text, "save, fast")["dcpfs"][:3] == ["1.00", "0.50", "–"]


def test_reasons_stand_in_place_of_figures() -> None:
    found: list[Figure | Missing] = [*figures([1.0]), missing("wrong | bytes\nmore", contender="dcpfs", repetition=1)]
    text = markdown(manifest(), [*found, missing("", contender="torch-4", kind="absent")], {})
    assert rows(text, "save")["dcpfs"][0] == "failed: wrong / bytes"
    assert rows(text, "save")["torch-4"][0] == "absent: no reason given"


def test_each_size_has_its_table_and_the_missing_are_in_both() -> None:
    found: list[Figure | Missing] = [figure(1.0, size_bytes=10**9), figure(1.0, size_bytes=2 * 10**9)]
    text = markdown(manifest(), [*found, missing("no", contender="torch-4")], {})
    for title in ("save, fast, 1.00 GB", "save, fast, 2.00 GB"):
        assert set(rows(text, title)) == {"dcpfs", "torch-4"}


def test_small_figures_keep_two_digits() -> None:
    text = markdown(manifest(), [figure(1.0, size_bytes=1_230_000)], {})
    assert rows(text, "save, fast, 0.0012 GB")["dcpfs"][0] == "0.0012"


def test_places_stand_side_by_side() -> None:
    found = [
        figure(1 / speed, size_bytes=10**9, case=case, place=place)
        for place, speed in (("s3://a/run", 1.0), ("/disk", 4.0))
        for case in ("save", "load")
    ]
    text = markdown(manifest(), found, {})
    assert rows(text, "dcpfs at each place") == {"s3://a/run": ["1.00", "1.00"], "/disk": ["4.00", "4.00"]}
    assert "### save, s3://a/run" in text
    assert "at each place" not in markdown(manifest(), found[:2], {})


def test_cases_about_steps_are_told_in_seconds() -> None:
    found = [
        step_figure(each, case="discovery-100", steps=100, repetition=number) for number, each in enumerate((1, 3))
    ]
    absent = missing("gone", contender="torch-4", kind="absent", case="discovery-100")
    table = rows(markdown(manifest(), [*found, absent], {}), "discovery-100, fast")
    assert table["dcpfs"] == ["2.00 (1.00–3.00)", "2.00", "–", "1.00 (0.50–1.50)", "–", "101", "2"]
    assert table["torch-4"][0] == "absent: gone"


def test_circumstances_name_what_is_absent() -> None:
    text = circumstances(manifest())
    assert "torch 2.13.0; without s3torchconnector" in text
    assert "2 cores (one) shared by all, 8 GiB" in text
    assert "commit 0123456789ab;" in text


def test_what_a_figure_is_and_where_it_was_taken_is_said() -> None:
    text = markdown(manifest(), [figure(1.0)], {})
    assert "Starting a process, importing, making the state and comparing" in text
    assert '"first round" is its first' in text
    assert "fast: an S3-like server in memory on loopback" in text
    assert "Each figure is one call" not in markdown(manifest(), [], {})


def test_what_a_proxy_costs_is_said() -> None:
    plain, far = figure(1.0, place="s3://a/run"), figure(1.0, place="s3://a/run")
    far = far.model_copy(update={"entry": far.entry.model_copy(update={"latency_ms": 10.0})})
    assert "a proxy before the server" in markdown(manifest(), [far], {})
    assert "proxy" not in markdown(manifest(), [plain], {})
