"""Every case runs, at a size of no account, and its counts are what they must be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.cases import CASES
from benchmarks.figures import Figure
from benchmarks.place import open_place
from benchmarks.runner import Isolation, Plan, Runner, order
from benchmarks.settings import Setting, Target, client_environment
from benchmarks.verification import remove

TINY_BYTES = 400_000
ALONE = [name for name, case in CASES.items() if not case.sharded]
SHARDED = [name for name, case in CASES.items() if case.sharded]


@pytest.fixture(scope="module")
def sink() -> Iterator[Target]:
    with open_place(Setting.FAST, None, 0) as place:
        yield place


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in client_environment().items():
        monkeypatch.setenv(name, value)


def measure(place: Target, case: str, *contenders: str) -> list[Figure]:
    plan = Plan(
        setting=place.setting,
        cases=(case,),
        contenders=contenders,
        size_bytes=TINY_BYTES,
        repetitions=1,
        rounds=2,
        isolation=Isolation.INLINE,
        timeout_seconds=240,
    )
    figures: list[Figure] = []
    for result in Runner(plan, place, lambda _: None).run():
        assert isinstance(result, Figure), result.reason
        figures.append(result)
    return figures


@pytest.mark.parametrize("case", ALONE)
@pytest.mark.parametrize("contender", ["dcpfs", "dcpfs-bare", "torch-fsspec", "s3torchconnector"])
def test_case_on_the_sink(sink: Target, case: str, contender: str) -> None:
    first, second = measure(sink, case, contender)
    for figure in (first, second):
        assert figure.needed_bytes > 0
        assert figure.requests is not None
        assert figure.requests > 0
        assert figure.moved_per_needed is not None
        assert figure.moved_per_needed >= 1
        assert figure.cpu_seconds_per_gb > 0


@pytest.mark.parametrize("case", SHARDED)
def test_case_of_two_ranks(sink: Target, case: str) -> None:
    figures = measure(sink, case, "dcpfs")
    assert [figure.round for figure in figures] == [0, 1]
    assert all(figure.moved_per_needed is not None for figure in figures)


@pytest.mark.parametrize("case", ["save", "load", "small-load"])
def test_floor_moves_exactly_what_is_needed(sink: Target, case: str) -> None:
    for figure in measure(sink, case, "floor-sockets"):
        assert figure.moved_per_needed == 1


@pytest.mark.parametrize("case", ["save", "load", "small-save"])
@pytest.mark.parametrize("contender", ["dcpfs", "dcpfs-bare-64mib", "torch-1", "torch-4", "floor-files"])
def test_case_on_local_files(tmp_path: Path, case: str, contender: str) -> None:
    with open_place(Setting.DISK, tmp_path, 0) as place:
        figures = measure(place, case, contender)
    assert len(figures) == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("case", ["save", "load", "partial"])
@pytest.mark.parametrize("contender", ["dcpfs", "torch-fsspec"])
def test_case_in_memory(case: str, contender: str) -> None:
    with open_place(Setting.MEMORY, None, 0) as place:
        assert len(measure(place, case, contender)) == 2


def test_memcpy_is_a_floor() -> None:
    with open_place(Setting.MEMORY, None, 0) as place:
        assert len(measure(place, "load", "floor-memcpy")) == 2


@pytest.mark.parametrize("path", ["", ".", "/", "/dcpfs-benchmark-x", "somewhere/else"])
def test_only_checkpoints_of_a_place_are_deleted(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="is no checkpoint of a benchmark"):
        remove(Target(setting=Setting.DISK, path=path))


def test_cases_are_ordered_and_known() -> None:
    assert order([]) == tuple(CASES)
    assert order(["load", "save", "load"]) == ("save", "load")
    with pytest.raises(ValueError, match="no case is called nothing"):
        order(["nothing"])
