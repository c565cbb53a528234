"""What a run writes is read back as it was; what isn't a recording is refused with file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.execution import RecordStream
from benchmarks.figures import Entry, Figure, Missing
from benchmarks.records import Metric, UnreadableRecordError, read, warm
from benchmarks.settings import Setting
from tests.unit.benchmarks.recordings import (
    SIMULATED,
    SIZE_BYTES,
    STALLED,
    figure,
    figures,
    manifest,
    missing,
    recording,
    step_figure,
    write,
)


def test_every_kind_of_figure_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    found = [
        *figures([1.0, 1.1]),
        missing("no", contender="torch-1"),
        step_figure(2.0, case="discovery-100", steps=100),
    ]
    with RecordStream(path, manifest()) as stream:
        for each in [*found, SIMULATED, STALLED]:
            stream.write(each)
            assert path.read_text().splitlines()[-1] == each.model_dump_json(), (
                "a line is there as soon as it is written"
            )
    recording = read(path)
    assert recording.manifest == manifest()
    assert list(recording.results) == found
    assert list(recording.others) == [SIMULATED, STALLED]
    assert not recording.left_out
    by_case = {sample.case: sample for sample in recording.samples}
    assert by_case["save"].costs[Metric.WALL] == 1.1
    assert by_case["save"].costs[Metric.CPU] == pytest.approx(0.55)
    assert by_case["discovery-100"].costs[Metric.REQUESTS] == 101
    assert by_case["discovery-100"].parameters == {"ranks": 1, "steps": 100}
    assert by_case["stall"].costs[Metric.BLOCKED] == 0.2


def test_lines_of_a_kind_that_is_not_known_are_counted_or_used(tmp_path: Path) -> None:
    path = write(tmp_path / "run.jsonl", figures([1.0]))
    with path.open("a") as stream:
        stream.write('{"kind": "weather", "sunny": true}\n')
        stream.write('{"kind": "replay", "contender": "dcpfs", "seconds": 2.5, "repetition": 3, "steps": 7}\n')
    recording = read(path)
    assert recording.left_out == {"weather": 1}
    (sample,) = [each for each in recording.samples if each.case.startswith("replay")]
    assert (sample.repetition, sample.costs, sample.parameters) == (3, {Metric.WALL: 2.5}, {"steps": 7})


def test_the_number_of_tensors_follows_from_the_size() -> None:
    from benchmarks.records import samples_of

    (sample,) = samples_of([figure(1.0)], [SIZE_BYTES])
    assert sample.parameters == {"ranks": 1, "tensors": 333}
    (unknown,) = samples_of([figure(1.0, size_bytes=123)], [SIZE_BYTES])
    assert "tensors" not in unknown.parameters


def test_only_last_rounds_of_those_who_never_failed_are_warm() -> None:
    good = [figure(3.0, round_=0), figure(1.0, round_=1)]
    bad: list[Figure | Missing] = [
        figure(1.0, contender="torch-1"),
        missing("wrong bytes", contender="torch-1", repetition=1),
    ]
    assert warm([*good, *bad]) == [good[1]]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it is empty"),
        ("hello\n", "line 1 of .*no figure in JSON"),
        ('{"kind": "figure"}\n', "line 1 of .* as the manifest of a run"),
        ("[1]\n", "line 1"),
    ],
)
def test_what_is_no_recording_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text(text)
    with pytest.raises(UnreadableRecordError, match=said):
        read(path)


def test_a_line_of_another_version_is_refused_by_its_number_and_fields(tmp_path: Path) -> None:
    path = write(tmp_path / "run.jsonl", figures([1.0]))
    path.write_text(path.read_text().replace('"needed_bytes"', '"needed_octets"'))
    with pytest.raises(UnreadableRecordError, match=r"line 2 of .*needed_bytes, needed_octets"):
        read(path)


def test_an_absent_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnreadableRecordError, match="No such file"):
        read(tmp_path / "nothing.jsonl")


def test_of_who_failed_no_sample_of_any_kind_is_left() -> None:
    gone = Missing(
        kind="failed",
        entry=Entry(case="stall", setting=Setting.TMPFS, contender="torch-thread", repetition=1),
        reason="no",
    )
    assert [sample.case for sample in recording([STALLED, SIMULATED, gone]).samples] == ["planning (ranks=64)"]
