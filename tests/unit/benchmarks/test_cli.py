"""``python -m benchmarks``: cases run without being told to, and the other words do what they say."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.cli import app
from benchmarks.records import read
from benchmarks.settings import PLACE_PREFIX

ROOT = Path(__file__).parents[3]
TINY = ["--size-gb", "0.0004", "--repetitions", "1", "--rounds", "1"]


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_one_run_gives_lines_tables_and_plots_that_agree(tmp_path: Path) -> None:
    lines, table, plots = tmp_path / "run.jsonl", tmp_path / "run.md", tmp_path / "plots"
    outputs = ["--json", str(lines), "--markdown", str(table), "--plots", str(plots)]
    sizes = ["--size-gb", "0.0008"]
    code, text = invoke("save", "--setting", "memory", "--only", "floor-memcpy", *TINY, *sizes, *outputs)
    assert code == 0, text
    recording = read(lines)
    assert len({sample.parameters["ranks"] for sample in recording.samples}) == 1
    assert len({sample.case for sample in recording.samples}) == 2, "each size is a case of its own"
    assert [plan.size_bytes for plan in recording.manifest.plans] == [400_000, 800_000]
    assert table.read_text().strip() in text
    assert table.read_text().count("### save, memory") == 2
    assert {path.suffix for path in plots.iterdir()} == {".png", ".svg"}
    assert "[0/2] save floor-memcpy #0" in text


def test_an_unknown_case_is_refused_before_anything_runs() -> None:
    code, text = invoke("nothing")
    assert code == 2
    assert "no case is called nothing" in text


def test_an_unknown_contender_is_refused_before_anything_runs() -> None:
    code, text = invoke("save", "--setting", "memory", "--only", "dcpfs", "--only", "dcpsf")
    assert code == 2
    assert "no contender is called dcpsf" in text
    assert "#0" not in text


@pytest.mark.parametrize("arguments", [["--setting", "url"], ["--setting", "tmpfs", "--url", "/tmp/x"]])
def test_a_url_and_its_setting_go_together(arguments: list[str]) -> None:
    code, text = invoke("save", *arguments)
    assert code == 2
    assert "--setting url and --url go together" in " ".join(text.split()).replace("│ ", "")


def test_results_that_can_t_be_written_are_refused_in_one_sentence_by_every_command(tmp_path: Path) -> None:
    lines, blocked = tmp_path / "run.jsonl", tmp_path / "file" / "results"
    (tmp_path / "file").write_text("precious")
    code, text = invoke("save", "--setting", "memory", "--only", "floor-memcpy", *TINY, "--json", str(lines))
    assert code == 0, text
    for arguments, expected in [
        (["save", "--setting", "memory", *TINY, "--json", str(blocked)], 2),
        (["compare", str(lines), str(lines), "--markdown", str(blocked)], 2),  # 1 would tell of a regression
        (["plot", str(lines), "--directory", str(blocked)], 2),
        (["tune", str(tmp_path / "store"), "--json", str(blocked)], 1),
    ]:
        code, text = invoke(*arguments)
        assert code == expected, text
        assert "Can't write results to" in " ".join(text.replace("│", " ").split())
        assert "#0" not in text
    assert not (tmp_path / "store").exists()


def test_a_disk_directory_that_is_not_there_is_refused_before_anything_runs(tmp_path: Path) -> None:
    code, text = invoke("save", "--setting", "disk", "--disk-directory", str(tmp_path / "no"), *TINY)
    assert code == 2
    assert "does not exist" in " ".join(text.replace("│", " ").split())


@pytest.mark.nightly
def test_what_was_written_at_a_url_is_deleted_when_the_run_is_told_to_end(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    command = [sys.executable, "-m", "benchmarks", "save", "--url", str(store), "--only", "dcpfs"]
    process = subprocess.Popen(
        [*command, "--rounds", "100000", "--size-gb", "0.0004"], cwd=ROOT, stderr=subprocess.DEVNULL
    )
    try:
        while not list(store.glob(f"{PLACE_PREFIX}*/save-dcpfs/*/.metadata")):
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.communicate()
    assert list(store.iterdir()) == []


def test_a_link_needs_a_server_to_stand_before() -> None:
    code, text = invoke("save", "--setting", "fast", "--setting", "tmpfs", "--latency-ms", "10")
    assert code == 2
    assert "no server to put a link in front of in tmpfs" in " ".join(text.replace("│", " ").split())


def test_options_that_are_no_json_are_refused_without_being_shown() -> None:
    code, text = invoke("save", "--url", "memory://x", "--storage-options", "{hunter2")
    assert code == 2
    assert "hunter2" not in text


def test_help_is_that_of_running_and_names_the_other_commands() -> None:
    code, text = invoke("--help")
    assert code == 0
    for word in ("compare A.jsonl B.jsonl", "plot A.jsonl", "tune URL", "--latency-ms", "small-save", "planning"):
        assert word in " ".join(text.replace("│", " ").split()), word


def test_tune_prints_grids_and_what_to_paste_and_leaves_nothing(tmp_path: Path) -> None:
    store, lines, plots = tmp_path / "store", tmp_path / "tune.jsonl", tmp_path / "plots"
    arguments = ["--size-gb", "0.0004", "--json", str(lines), "--plots", str(plots)]
    code, text = invoke("tune", str(store), *arguments)
    assert code == 0, text
    assert "writes and reads at most" in text
    for title in ("### save, GB/s: part size", "### load, GB/s: read size", "transfer = "):
        assert title in text
    assert not store.exists(), "the directory was made for the run, and is gone with it"
    kinds = [json.loads(line)["kind"] for line in lines.read_text().splitlines()]
    assert kinds[0] == "manifest"
    assert set(kinds[1:]) == {"tuning"}
    assert {path.suffix for path in plots.iterdir()} == {".png", ".svg"}
    code, text = invoke("plot", str(lines), "--directory", str(tmp_path / "again"))
    assert code == 0, text


def test_a_file_is_told_as_the_tables_that_the_run_printed(tmp_path: Path) -> None:
    lines, markdown = tmp_path / "run.jsonl", tmp_path / "again.md"
    code, text = invoke(
        "save", "--setting", "memory", "--only", "floor-memcpy", "--only", "dcpfs", *TINY, "--json", str(lines)
    )
    assert code == 0, text
    code, again = invoke("table", str(lines), "--markdown", str(markdown))
    assert code == 0, again
    assert again.strip() in text
    assert markdown.read_text().strip() == again.strip()
    lines.write_text("\n".join(lines.read_text().splitlines()[:2]) + "\n")  # broken off
    code, again = invoke("table", str(lines))
    assert code == 0, again
    assert "| floor-memcpy |" in again
    code, text = invoke("table", str(tmp_path / "nothing.jsonl"))
    assert code == 2
    assert "No such file" in text


def test_latencies_stand_side_by_side(tmp_path: Path) -> None:
    lines = tmp_path / "run.jsonl"
    latencies = ["--latency-ms", "0", "--latency-ms", "2"]
    code, text = invoke("save", "--setting", "fast", "--only", "dcpfs", *TINY, *latencies, "--json", str(lines))
    assert code == 0, text
    assert [result.entry.where for result in read(lines).results] == ["fast +0 ms", "fast +2 ms"]
    assert "### dcpfs at each place" in text
