"""Every case and every contender runs, at a size of no account, and its counts are what they must be."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from benchmarks.cases import CASES, Client, Operation, case_of
from benchmarks.contenders import Role, contenders_for
from benchmarks.figures import Figure, StepFigure
from benchmarks.files import remove
from benchmarks.place import open_place
from benchmarks.runner import order
from benchmarks.settings import Setting, Target
from tests.unit.benchmarks.small_runs import measure, measured

pytestmark = [pytest.mark.usefixtures("client_variables"), pytest.mark.timeout(1800)]

STORING = [name for name, case in CASES.items() if case.role is Role.STORAGE]
ALONE = [name for name in STORING if not CASES[name].sharded]
SLOW_SHARDED = [name for name in STORING if CASES[name].sharded and name != "save-2"]
PACKAGES = {
    "dcpfs-obstore": "obstore",
    "torch-obstore": "obstore",
    "multi-storage-client": "multistorageclient",
    "torchsnapshot": "torchsnapshot",
    **dict.fromkeys(
        ("s3torchconnector", "s3torchconnector-keys", "s3torchconnector-range", "s3torchconnector-sequential"),
        "s3torchconnector",
    ),
}
S3_CONTENDERS = [name for name in contenders_for(Setting.FAST) if name != "torch-obstore"]
LOCAL_CONTENDERS = [name for name in contenders_for(Setting.DISK) if name not in S3_CONTENDERS]
STEP_CONTENDERS = [
    "dcpfs-all-steps",
    "floor-listing",
    "floor-delete",
    "torch-keys",
    "torch-keys-4",
    "s3torchconnector-keys",
]


def storing(names: list[str]) -> list[str]:
    """Those that store states, of all contenders."""
    others = ("dcpfs-sync", "dcpfs-thread", "dcpfs-process", *STEP_CONTENDERS)
    return [name for name in names if name not in others]


def require(contender: str) -> None:
    package = PACKAGES.get(contender)
    if package is not None and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: the contender is optional")


@pytest.mark.parametrize("case", ALONE)
def test_every_case_of_one_rank(sink: Target, case: str) -> None:
    figures = measured(sink, case, "dcpfs", rounds=2)
    assert [figure.round for figure in figures] == ([0] if case_of(case).client is Client.FRESH else [0, 1])
    for figure in figures:
        assert figure.needed_bytes > 0
        assert figure.requests is not None
        assert figure.requests > 0
        assert figure.moved_per_needed is not None
        assert figure.moved_per_needed >= 1
        assert figure.moved_bytes is not None
        assert figure.moved_bytes >= figure.needed_bytes
        assert figure.cpu_seconds_per_gb > 0


@pytest.mark.parametrize("contender", storing(S3_CONTENDERS))
def test_every_contender_on_the_sink(sink: Target, contender: str) -> None:
    require(contender)
    figures = measured(sink, ["save", "load"], contender)
    assert [figure.entry.case for figure in figures] == ["save", "load"]
    assert all(figure.requests for figure in figures)


def test_case_4_torch_on_obstore_is_caught(sink: Target) -> None:
    require("torch-obstore")
    for result in measure(sink, ["save", "load"], "torch-obstore"):
        assert not isinstance(result, Figure | StepFigure)
        assert result.kind == "failed"


def test_sharded_case(sink: Target) -> None:
    (figure,) = measured(sink, "save-2", "dcpfs")
    assert figure.ranks == 2
    assert figure.moved_per_needed is not None


@pytest.mark.nightly
@pytest.mark.parametrize("case", [*SLOW_SHARDED, "save-3", "reshard-3-2"])
def test_sharded_case_of_other_numbers(sink: Target, case: str) -> None:
    (figure,) = measured(sink, case, "dcpfs")
    assert figure.ranks == case_of(case).world


@pytest.mark.parametrize("case", ["save", "load", "small-load", "large-load"])
def test_floor_moves_exactly_what_is_needed(sink: Target, case: str) -> None:
    (figure,) = measured(sink, case, "floor-sockets")
    assert figure.moved_per_needed == 1


@pytest.mark.parametrize("contender", ["dcpfs", *storing(LOCAL_CONTENDERS)])
def test_every_contender_on_local_files(tmp_path: Path, contender: str) -> None:
    require(contender)
    with open_place(Setting.DISK, tmp_path, 0) as place:
        figures = measured(place, ["save", "load"], contender)
    assert [figure.entry.case for figure in figures] == ["save", "load"]
    assert not list(tmp_path.iterdir())


def test_cold_local_files(tmp_path: Path) -> None:
    with open_place(Setting.DISK, tmp_path, 0) as place:
        (figure,) = measured(place, "load-cold", "dcpfs", rounds=2)
    assert figure.round == 0


@pytest.mark.parametrize("contender", ["dcpfs", "torch-4", "safetensors", "torchsnapshot"])
def test_part_of_local_files(tmp_path: Path, contender: str) -> None:
    require(contender)
    with open_place(Setting.DISK, tmp_path, 0) as place:
        (figure,) = measured(place, "partial", contender)
    assert figure.needed_bytes > 0


@pytest.mark.parametrize("contender", ["dcpfs", "torch-fsspec"])
def test_cases_in_memory(contender: str) -> None:
    with open_place(Setting.MEMORY, None, 0) as place:
        assert len(measured(place, ["save", "load", "partial"], contender)) == 3


def test_memcpy_is_a_floor() -> None:
    with open_place(Setting.MEMORY, None, 0) as place:
        assert len(measured(place, "load", "floor-memcpy", rounds=2)) == 2


# --- steps


@pytest.mark.parametrize("setting", [Setting.FAST, Setting.DISK, Setting.MEMORY])
def test_discovery_and_retention(setting: Setting, tmp_path: Path) -> None:
    with open_place(setting, tmp_path, 0) as place:
        results = measure(place, ["discovery-1", "discovery-12", "retention-8"], "dcpfs", *STEP_CONTENDERS, rounds=2)
    figures = [result for result in results if isinstance(result, StepFigure)]
    assert figures == results
    assert {(figure.case, figure.contender) for figure in figures} == {
        *((case, "dcpfs") for case in ("discovery-1", "discovery-12", "retention-8")),
        *((case, "dcpfs-all-steps") for case in ("discovery-1", "discovery-12")),
        *((case, "floor-listing") for case in ("discovery-1", "discovery-12")),
        ("retention-8", "floor-delete"),
    }
    for figure in figures:
        assert (figure.kind, figure.steps) == (figure.case.split("-")[0], case_of(figure.case).steps)
        assert figure.gigabytes is None
        assert (figure.requests is not None) == (setting is Setting.FAST)
        assert StepFigure.model_validate_json(figure.model_dump_json()) == figure
        assert figure.entry.case == figure.case


def test_case_40_finding_the_newest_asks_as_often_among_many_as_for_one(sink: Target) -> None:
    few, many = measure(sink, ["discovery-1", "discovery-30"], "dcpfs")
    assert isinstance(few, StepFigure)
    assert isinstance(many, StepFigure)
    assert few.requests == many.requests


@pytest.mark.parametrize("contender", ["dcpfs-sync", "dcpfs-thread", "torch-keys", "s3torchconnector-keys"])
def test_checkpointer(sink: Target, contender: str) -> None:
    require(contender)
    figures = measure(sink, "checkpointer", contender, rounds=2)
    assert [isinstance(figure, StepFigure) and figure.round for figure in figures] == [0, 1]
    for figure in figures:
        assert isinstance(figure, StepFigure)
        assert figure.blocked_seconds is not None
        assert 0 < figure.blocked_seconds <= figure.seconds
        assert figure.gigabytes is not None
        assert figure.moved_bytes is not None
        assert figure.moved_bytes > figure.gigabytes * 1e9


def test_checkpointer_in_a_process_counts_what_the_process_costs(tmp_path: Path) -> None:
    with open_place(Setting.DISK, tmp_path, 0) as place:
        (figure,) = measure(place, "checkpointer", "dcpfs-process")
        assert isinstance(figure, StepFigure), figure
        assert figure.blocked_seconds is not None
        assert figure.blocked_seconds < figure.seconds
    assert not list(tmp_path.iterdir())


def test_checkpointer_of_torch_with_four_threads(tmp_path: Path) -> None:
    with open_place(Setting.DISK, tmp_path, 0) as place:
        (figure,) = measure(place, "checkpointer", "torch-keys-4")
        assert isinstance(figure, StepFigure), figure
    assert not list(tmp_path.iterdir())


def test_checkpointer_of_two_ranks_with_fsdp2(sink: Target) -> None:
    (figure,) = measure(sink, "checkpointer-2", "dcpfs-thread")
    assert isinstance(figure, StepFigure), figure
    assert figure.ranks == 2


# --- names


@pytest.mark.parametrize("path", ["", ".", "/", "/dcpfs-benchmark-x", "somewhere/else", "dcpfs-benchmark-x/../../else"])
def test_only_checkpoints_of_a_place_are_deleted(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="is no checkpoint of a benchmark"):
        remove(Target(setting=Setting.DISK, path=path))


def test_cases_are_ordered_and_known() -> None:
    assert order([]) == tuple(CASES)
    assert order(["load", "save", "load"]) == ("save", "load")
    assert order(["save-5", "load", "discovery-7"]) == ("load", "save-5", "discovery-7")
    with pytest.raises(ValueError, match="no case is called nothing"):
        order(["nothing"])


def test_numbers_in_names_are_parameters() -> None:
    assert case_of("reshard-4-2").save_world == 4
    assert case_of("reshard-4-2").world == 2
    assert case_of("reshard-4").save_world == 1
    assert case_of("load-8").world == 8
    assert case_of("checkpointer-4").world == 4
    assert case_of("discovery-77").steps == 77
    assert case_of("retention-5").operation is Operation.RETAIN
    for name in ("save-0", "save-65", "discovery-0", "reshard-2-0"):
        with pytest.raises(ValueError, match="not within"):
            case_of(name)


def test_every_case_is_called_by_its_own_name() -> None:
    assert all(case_of(name).name == name for name in CASES)
