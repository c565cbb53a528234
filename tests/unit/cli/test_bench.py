"""``dcpfs bench``: says what it will write, touches nothing else, refuses what can't be meant, and is in the wheel."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.figures import Figure
from benchmarks.place import start_sink
from benchmarks.records import read
from benchmarks.settings import BUCKET, PLACE_PREFIX
from benchmarks.sink_client import SinkConnection
from dcpfs.cli.app import app
from dcpfs.errors import ConfigError, DcpfsError

ROOT = Path(__file__).parents[3]
TINY = ["--size-gb", "0.0004", "--repetitions", "1", "--rounds", "1"]


def bench(*arguments: str) -> tuple[int, str, BaseException | None]:
    result = CliRunner().invoke(app, ["bench", *arguments])
    return result.exit_code, result.output, result.exception


def refused(*arguments: str) -> DcpfsError:
    _, text, error = bench(*arguments)
    assert isinstance(error, DcpfsError), (text, error)
    assert "\n" not in str(error)
    return error


def test_a_store_is_left_as_it_was_and_no_secret_is_told(tmp_path: Path) -> None:
    lines = tmp_path / "run.jsonl"
    with start_sink(0, 0, 0) as port:
        own = SinkConnection(port, counted=False)
        for key in ("scratch/mine", f"scratch/{PLACE_PREFIX}of-somebody-else/model", "elsewhere"):
            own.put(key, [memoryview(b"precious")])
        options = json.dumps({"key": "k3y", "secret": "hunter2", "endpoint_url": f"http://127.0.0.1:{port}"})
        url = f"s3://{BUCKET}/scratch"
        arguments = [url, "save", "--storage-options", options, "--contender", "dcpfs", *TINY, "--json", str(lines)]
        code, text, _ = bench(*arguments)
        assert code == 0, text
        for key in ("scratch/mine", f"scratch/{PLACE_PREFIX}of-somebody-else/model", "elsewhere"):
            assert own.get(key) == b"precious"
        assert len(own.keys("")) == 3
    for secret in ("hunter2", "k3y", f"127.0.0.1:{port}"):
        assert secret not in text
        assert secret not in lines.read_text()
    recording = read(lines)
    (figure,) = recording.results
    assert isinstance(figure, Figure)
    assert figure.entry.where == url
    first = text.splitlines()[0]
    assert f"{url}: writes about 0.488 MB ({figure.needed_bytes:,} bytes) in all" in first, (
        "what it said is what it wrote"
    )
    assert "deleted at the end" in first
    assert recording.manifest.plans[0].options == {"key": "***", "secret": "***", "endpoint_url": "***"}


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/run", "zip://run::file:///nowhere.zip"])
def test_a_url_that_can_only_be_read_is_refused_in_one_sentence(url: str) -> None:
    assert "it can only be read; name a URL that can be written" in str(refused(url))


def test_a_store_that_refuses_to_write_ends_the_run_before_it_measures(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    _, text, error = bench(str(tmp_path / "file" / "below"), "save", *TINY)
    assert isinstance(error, DcpfsError)
    assert "#0" not in text
    assert (tmp_path / "file").read_text() == "precious"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("option", ["--json", "--markdown", "--plots"])
def test_results_that_can_t_be_written_are_refused_before_anything_is_measured(tmp_path: Path, option: str) -> None:
    (tmp_path / "file").write_text("precious")
    place = tmp_path / "file" / "results"
    error = refused(str(tmp_path / "store"), "save", *TINY, option, str(place))
    assert f"Can't write results to {place}: Not a directory" in str(error)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_word_that_is_neither_case_nor_url_is_refused_with_the_cases() -> None:
    said = str(refused("sav"))
    assert "no case 'sav'" in said
    assert "./sav" in said
    assert "small-load" in said


def test_what_does_not_fit_together_is_refused() -> None:
    assert "name at least one" in str(refused("save"))
    assert "give --tune one URL" in str(refused("/a", "/b", "--tune"))
    assert "give --tune one URL" in str(refused("/a", "save", "--tune"))
    assert "2 for 3 URLs" in str(
        refused("/a", "/b", "/c", "--storage-options", "{}", "--storage-options", '{"key": "hunter2"}')
    )
    error = refused("/a", "--storage-options", "{hunter2")
    assert isinstance(error, ConfigError)
    assert "hunter2" not in str(error)
    assert "no contender is called" in str(refused("/a/b", "--contender", "nobody"))


@pytest.mark.nightly
def test_what_was_written_is_deleted_when_the_run_is_told_to_end(tmp_path: Path) -> None:
    store = tmp_path / "store"
    command = [sys.executable, "-m", "dcpfs", "bench", str(store), "save", "--contender", "dcpfs", "--rounds", "100000"]
    process = subprocess.Popen(
        [*command, "--size-gb", "0.0004"], cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stderr is not None
        assert "deleted at the end" in process.stderr.readline()
        while not list(store.glob(f"{PLACE_PREFIX}*/save-dcpfs/*/.metadata")):
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.communicate()
    assert not store.exists()


@pytest.mark.timeout(1800)
def test_the_wheel_carries_the_benchmarks_and_runs_them_without_the_sources(tmp_path: Path) -> None:
    built = tmp_path / "built"
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(built)], cwd=ROOT, check=True)
    (wheel,) = built.iterdir()
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
        assert not [
            name for name in archive.namelist() if name.endswith(".pyc") or name.startswith(("tests", "benchmarks"))
        ]
    environment = dict(os.environ) | {"PYTHONPATH": str(installed)}
    lines = tmp_path / "run.jsonl"

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "dcpfs", "bench", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "--tune" in run("--help")
    output = run(str(tmp_path / "store"), "save", "--contender", "dcpfs", *TINY, "--json", str(lines))
    assert "| dcpfs |" in output
    recording = read(lines)
    assert len(recording.results) == 1
    assert recording.manifest.git_sha is None, "it was not run from the sources"
    assert not (tmp_path / "store").exists()
