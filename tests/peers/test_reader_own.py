"""dcpfs reads what dcpfs wrote: values with their types, few requests, little memory, and errors in time."""

from __future__ import annotations

import uuid
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fsspec.callbacks import Callback
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

import dcpfs
from dcpfs.dcp.matching import wants_of_box
from dcpfs.dcp.source import CheckpointSource
from dcpfs.errors import CorruptCheckpointError, KeyMismatchError
from dcpfs.format.index import TensorRecord
from dcpfs.format.metadata import decode_index
from dcpfs.storage.location import Location
from tests.peers.test_reader_torch import _assert_same, _empty, _state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(params=["local", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "c") if request.param == "local" else f"memory://{uuid.uuid4().hex}/c"


class _Seen(Callback):  # type: ignore[misc]  # fsspec has no hints
    """Adds up what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = 0

    def relative_update(self, inc: int = 1) -> None:
        super().relative_update(inc)
        self.moved += inc


@pytest.mark.parametrize("entrance", ["load", "read", "own_planner", "torch_planner"])
def test_case_28_everything_comes_back_bit_for_bit(url: str, entrance: str) -> None:
    state = _state()
    dcpfs.save(state, url)
    if entrance == "read":
        _assert_same(dcpfs.read(url), state)
        return
    found = {key: _empty(value) for key, value in state.items()}
    if entrance == "load":
        report = dcpfs.load(found, url)
        assert report.requests < 20
    elif entrance == "own_planner":
        dcp_load(found, storage_reader=dcpfs.FsspecStorageReader(url), planner=dcpfs.LoadPlanner())
    else:
        dcp_load(found, storage_reader=dcpfs.FsspecStorageReader(url))
    _assert_same(found, state)


def _containers() -> dict[str, object]:
    return {
        "milestones": Counter({2: 1, 5: 3}),
        "by_int": {0: torch.ones(2), 10: {"lr": 0.1}},
        "mixed": {"a": 1, 2: 2, None: 3, (1, "x"): 4},
        "empty": {},
        "nested_empty": {"b": {"c": {}}, "a": {}},
        "none": None,
        "list": [1, [2, 3], {"k": torch.zeros(1)}, []],
        "pair": (1, (2, "x")),
        "ordered": OrderedDict([("z", 1), ("a", torch.ones(1))]),
        "default": defaultdict(list, {"k": [1]}),
    }


def test_key_types_tuples_and_empty_containers_survive(url: str) -> None:
    state = _containers()
    dcpfs.save(state, url)
    found = dcpfs.read(url)
    _assert_same(found, state)
    for key in ("milestones", "ordered", "default", "by_int", "mixed"):
        assert type(found[key]) is type(state[key])
    template = {
        "milestones": Counter({2: 0, 5: 0}),
        "by_int": {0: torch.zeros(2), 10: {"lr": 0}},
        "mixed": {"a": 0, 2: 0, None: 0, (1, "x"): 0},
        "empty": None,
        "nested_empty": {"b": {}},
        "none": 1,
        "list": [0, 0, {"k": torch.ones(1)}, 0],
        "pair": None,
        "ordered": OrderedDict([("z", 0), ("a", torch.zeros(1))]),
        "default": {"k": None},
    }
    dcpfs.load(template, url)
    assert str(template) == str(state | {"default": {"k": [1]}})
    assert list(template["milestones"].items()) == [(2, 1), (5, 3)]  # type: ignore[attr-defined]


def test_a_scheduler_resumes_with_int_milestones(url: str) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 4])
    dcpfs.save({"scheduler": scheduler.state_dict()}, url)
    for planner in (None, dcpfs.LoadPlanner()):
        state = {"scheduler": torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 4]).state_dict()}
        if planner is None:
            dcpfs.load(state, url)
        else:
            dcp_load(state, storage_reader=dcpfs.FsspecStorageReader(url), planner=planner)
        assert state["scheduler"]["milestones"] == Counter({2: 1, 4: 1})


def test_case_70_requests_and_bytes_of_a_full_load(url: str) -> None:
    state = {f"layers.{n}.w": torch.full((300_000,), float(n)) for n in range(100)}
    state |= {f"layers.{n}.norm": torch.ones(64) for n in range(100)}
    dcpfs.save(state, url)
    report = dcpfs.load({key: torch.zeros_like(value) for key, value in state.items()}, url)
    assert report.moved_bytes <= 1.01 * report.read_bytes
    assert report.requests <= 45
    few = {key: state[key] for key in list(state)[:5]}
    report = dcpfs.load({key: torch.zeros_like(value) for key, value in few.items()}, url, strict=False)
    assert report.moved_bytes <= 1.05 * report.read_bytes


def test_case_70_many_small_tensors_take_few_requests(url: str) -> None:
    state = {f"p{n}": torch.full((1000 + n % 7,), float(n)) for n in range(3000)}
    dcpfs.save(state, url)
    found = {key: torch.zeros_like(value) for key, value in state.items()}
    report = dcpfs.load(found, url)
    assert report.requests <= 20
    assert all(torch.equal(found[key], value) for key, value in state.items())


@pytest.mark.parametrize("size", [10, 200_000, 6_000_000])
def test_case_113_a_flipped_bit_names_file_and_key(tmp_path: Path, size: int) -> None:
    place = str(tmp_path / "c")
    dcpfs.save({"good": torch.ones(4), "bad": torch.zeros(size, dtype=torch.uint8), "v": {"x": 1}}, place)
    record = decode_index((tmp_path / "c" / ".metadata").read_bytes()).records["bad"]
    assert isinstance(record, TensorRecord)
    location = record.chunks[0].location
    file = tmp_path / "c" / location.file
    data = bytearray(file.read_bytes())
    data[location.offset_bytes + location.payload_offset_bytes + size - 1] ^= 64
    file.write_bytes(data)
    target: dict[str, object] = {"good": torch.zeros(4), "bad": torch.ones(size, dtype=torch.uint8), "v": {"x": 0}}
    with pytest.raises(CorruptCheckpointError, match=r"'bad'.*checksum.*file '__0_0.distcp'") as caught:
        dcpfs.load(target, place)
    assert (caught.value.key, caught.value.file) == ("bad", location.file)
    assert "'bad'" in str(caught.value).partition("already written")[2]
    with pytest.raises(CorruptCheckpointError):
        dcpfs.read(place, ["bad"])
    dcpfs.read(place, ["good", "v"])
    dcpfs.load(target, place, verify=dcpfs.VerifyMode.SIZES)


def test_case_113_a_short_file_is_noticed_whatever_is_loaded(tmp_path: Path) -> None:
    place = str(tmp_path / "c")
    dcpfs.save({"a": torch.ones(4), "w": torch.ones(1_000_000)}, place)
    file = tmp_path / "c" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    for keys in (["a"], ["w"], None):
        with pytest.raises(CorruptCheckpointError, match="__0_0"):
            dcpfs.read(place, keys)


@pytest.mark.parametrize("parts", [2, 8])
def test_case_64_a_share_of_the_rows_moves_its_share_of_the_bytes(url: str, parts: int) -> None:
    weight = torch.arange(4_000_000, dtype=torch.float32).reshape(4000, 1000)
    dcpfs.save({"w": weight}, url)
    moved = 0
    rows = 4000 // parts
    for part in range(parts):
        source = CheckpointSource(Location(url))
        index = source.decode_index(source.read_metadata())
        record = index.records["w"]
        assert isinstance(record, TensorRecord)
        target = torch.zeros(rows, 1000)
        fetch = source.new_fetch(index)
        for want in wants_of_box("w", record, (part * rows, 0), (rows, 1000), target):
            fetch.add_tensor(want)
        fetch.run()
        source.close()
        moved += fetch.totals.moved_bytes
        assert torch.equal(target, weight[part * rows : (part + 1) * rows])
    assert moved <= 1.05 * weight.nbytes


def _reset_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        pytest.skip(f"the peak of the memory can't be set back here: {error}")


def _memory_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


@pytest.mark.parametrize("kind", ["plain", "spread", "cast"])
def test_case_63_65_memory_stays_within_the_budget(tmp_path: Path, kind: str) -> None:
    """The state is 256 MB; beside it a load with a 16 MiB budget may take 16 MiB and 64 MB."""
    place = str(tmp_path / "c")
    config = dcpfs.TransferConfig(budget_bytes=16 << 20)
    state = {f"k{n}": torch.full((1_000_000,), float(n)) for n in range(64)}
    dcpfs.save(state, place, transfer=config)
    target: dict[str, torch.Tensor] = {}
    for key in state:
        if kind == "plain":
            target[key] = torch.ones(1_000_000)
        elif kind == "spread":
            target[key] = torch.ones(1_000_000, 2)[:, 0]
        else:
            target[key] = torch.ones(1_000_000, dtype=torch.float64)
    before = _memory_bytes("VmRSS")

    def taken_bytes() -> int:
        _reset_peak()
        dcpfs.load(target, place, transfer=config, allow_cast="widen")
        return _memory_bytes("VmHWM") - before

    # What other threads take is measured as well: one load of three without them is enough.
    assert any(taken_bytes() <= (16 << 20) + 64_000_000 for _ in range(3))
    assert all(torch.equal(target[key].float(), state[key]) for key in state)


def test_case_62_repeated_loads_leave_nothing_behind(tmp_path: Path) -> None:
    place = str(tmp_path / "c")
    state = {f"k{n}": torch.full((500_000,), float(n)) for n in range(16)}
    dcpfs.save(state, place)
    target = {key: torch.ones(500_000, 2)[:, 0] for key in state}
    resident: list[int] = []
    for _ in range(45):
        dcpfs.load(target, place)
        resident.append(_memory_bytes("VmRSS"))
    assert resident[-1] - resident[2] < 96 << 20  # a state a load would be 1344 MB


def test_case_88_one_failed_range_fails_the_load(tmp_path: Path) -> None:
    """Ranges that fail are errors, never values among the results."""
    place = str(tmp_path / "c")
    dcpfs.save({f"k{n}": torch.full((2_000_000,), float(n)) for n in range(8)}, place)
    file = tmp_path / "c" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:40_000_000])
    target = {f"k{n}": torch.zeros(2_000_000) for n in range(8)}
    with pytest.raises(CorruptCheckpointError, match="__0_0"):
        dcpfs.load(target, place)


def test_case_3_a_kind_that_differs_is_a_mismatch(url: str) -> None:
    dcpfs.save({"a": torch.ones(2), "b": 3, "c": {}}, url)
    with pytest.raises(KeyMismatchError) as caught:
        dcpfs.load({"a": 1, "b": torch.zeros(2), "c": torch.zeros(1)}, url)
    assert set(caught.value.mismatched) == {"a", "b", "c"}


def test_two_generations_are_equal(url: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    state: dict[str, object] = {"model": model, "optim": optimizer, "step": 1}
    dcpfs.save(state, url)
    again = f"{url}2"
    dcpfs.load(state, url)
    dcpfs.save(state, again)
    _assert_same(dcpfs.read(again), dcpfs.read(url))


@pytest.mark.parametrize("call", [dcpfs.read, lambda url: dcpfs.load({"w": torch.zeros(3)}, url)])
def test_progress_ends_at_the_total(url: str, call: Callable[..., object]) -> None:
    dcpfs.save({"w": torch.ones(3)}, url)
    seen = _Seen()
    dcpfs.read(url, callback=seen)
    assert seen.size == seen.value == seen.moved > 0
    call(url)


@pytest.mark.skipif(not hasattr(torch.distributed.checkpoint, "CheckpointableTensor"), reason="new in torch 2.14")
def test_local_parts_of_a_global_tensor(url: str) -> None:
    """Plain tensors that say, by torch 2.14's protocol, which chunks of a whole they hold, with padding between."""
    whole = torch.arange(40.0).reshape(10, 4)

    def local(values: torch.Tensor) -> torch.Tensor:
        part = torch.full((8, 4), -1.0)
        part[0:2], part[3:8] = values[0:2], values[5:10]
        for name, value in {
            "global_shape": (10, 4),
            "global_offsets": ((0, 0), (5, 0)),
            "local_offsets": ((0, 0), (3, 0)),
            "local_sizes": ((2, 4), (5, 4)),
        }.items():
            setattr(part, name, value)
        return part

    dcpfs.save({"w": whole}, url)
    target = local(torch.zeros(10, 4))
    dcpfs.load({"w": target}, url)
    assert torch.equal(target, local(whole))
    target = local(torch.zeros(10, 4))
    planner = dcpfs.LoadPlanner()
    dcp_load({"w": target}, storage_reader=dcpfs.FsspecStorageReader(url), planner=planner)
    assert torch.equal(target, local(whole))


def test_a_part_is_read_with_its_empty_containers(url: str) -> None:
    state = {"m": {"a": 1, "e": {}, 3: {"x": {}}}, "e": OrderedDict(), "other": 2}
    dcpfs.save(state, url)
    assert dcpfs.read(url, ["m"]) == {"m": state["m"]}
    assert dcpfs.read(url, ["m.3"]) == {"m": {3: {"x": {}}}}
    found = dcpfs.read(url, "e")
    assert found == {"e": {}}
    assert type(found["e"]) is OrderedDict
