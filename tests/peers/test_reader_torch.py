"""dcpfs reads what torch's own writers wrote, through every entrance, and refuses what is not safe or not exact."""

from __future__ import annotations

import io
import logging
import pickle
import shutil
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from fsspec.callbacks import Callback
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import StorageWriter

import dcpfs
from dcpfs.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    KeyMismatchError,
    UntrustedDataError,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Save = Callable[[Mapping[str, object]], str]


def _writer(kind: str, url: str) -> StorageWriter:
    if kind == "threads":
        return FileSystemWriter(url, thread_count=4)
    if kind == "files":
        return FileSystemWriter(url, single_file_per_rank=False)
    if kind == "fsspec":
        return FsspecWriter(url)
    return FileSystemWriter(url)


@pytest.fixture(params=["plain", "threads", "files", "fsspec"])
def save(request: pytest.FixtureRequest, tmp_path: Path) -> Save:
    """Saves a state with one of torch's writers, and returns the URL."""

    def run(state: Mapping[str, object]) -> str:
        name = uuid.uuid4().hex
        url = f"memory://{name}" if request.param == "fsspec" else str(tmp_path / name)
        dcp_save(dict(state), storage_writer=_writer(request.param, url))
        return url

    return run


@pytest.fixture
def save_plain(tmp_path: Path) -> Save:
    def run(state: Mapping[str, object]) -> str:
        url = str(tmp_path / uuid.uuid4().hex)
        dcp_save(dict(state), storage_writer=FileSystemWriter(url))
        return url

    return run


def _state() -> dict[str, object]:
    """Tensors of all kinds and layouts, and values."""
    torch.manual_seed(3)
    base = torch.arange(24.0)
    weight = torch.nn.Parameter(torch.randn(7, 5))
    state: dict[str, object] = {
        "weight": weight,
        "transposed": torch.randn(6, 11).t(),
        "permuted": torch.randn(3, 4, 5).permute(2, 0, 1),
        "channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "offset": base[7:19],
        "strided": base[::2],
        "expanded": torch.tensor([1.5]).expand(4, 3),
        "conjugate": torch.randn(4, 3, dtype=torch.complex64).conj(),
        "negative": torch.randn(4, dtype=torch.complex64).conj().imag,
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "large": torch.randn(900, 700),
        "large_transposed": torch.randn(700, 900).t(),
        "large_conjugate": torch.randn(600, 500, dtype=torch.complex64).t().conj(),
        "nested": {"list": [torch.ones(2), {"deep": torch.zeros(1)}, 3], "lr": 0.1, "names": ["a", "b"]},
        "epoch": 7,
        "text": "ünïcode",
        "none": None,
        "pair": (1, torch.tensor([4, 5])),
        "ordered": OrderedDict(a=1, b=torch.tensor(3)),
        "stream": io.BytesIO(b"raw"),
    }
    dtypes = [torch.bool, torch.int8, torch.uint8, torch.int16, torch.uint16, torch.uint32, torch.uint64]
    dtypes += [torch.float16, torch.bfloat16, torch.float64, torch.complex128, torch.float8_e4m3fn]
    dtypes += [torch.float8_e5m2, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2]
    for dtype in dtypes:
        raw = torch.randint(0, 2, (6 * dtype.itemsize,), dtype=torch.uint8)
        state[f"dtype_{str(dtype).removeprefix('torch.')}"] = raw.view(dtype).reshape(2, 3)
    return state


def _empty(value: object) -> object:
    """A template of the same shape with nothing in it."""
    if isinstance(value, torch.Tensor):
        raw = torch.zeros(value.numel() * value.element_size(), dtype=torch.uint8)
        return raw.view(value.dtype).reshape(value.shape)
    if isinstance(value, dict):
        return {key: _empty(item) for key, item in value.items()}
    if isinstance(value, list) and any(isinstance(item, (torch.Tensor, dict)) for item in value):
        return [_empty(item) for item in value]
    return "nothing yet"


def _assert_same(found: object, expected: object, where: str = "") -> None:
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor), where
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), where
        a, b = found.detach().resolve_conj().resolve_neg(), expected.detach().resolve_conj().resolve_neg()
        a, b = a.contiguous().reshape(-1), b.contiguous().reshape(-1)
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), where
    elif isinstance(expected, dict):
        assert isinstance(found, dict), where
        assert list(found) == list(expected), where
        for key in expected:
            _assert_same(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert type(found) is type(expected), where
        assert len(found) == len(expected), where
        for position, item in enumerate(expected):
            _assert_same(found[position], item, f"{where}.{position}")
    elif isinstance(expected, io.BytesIO):
        assert isinstance(found, io.BytesIO), where
        assert found.getvalue() == expected.getvalue(), where
    else:
        assert found == expected, where
        assert type(found) is type(expected), where


@pytest.mark.parametrize("entrance", ["load", "torch_planner", "own_planner", "read", "empty_planner"])
def test_case_19_28_everything_comes_back_bit_for_bit(save: Save, entrance: str) -> None:
    state = _state()
    url = save(state)
    found = {key: _empty(value) for key, value in state.items()}
    if entrance == "load":
        tensors = {key: value for key, value in found.items() if isinstance(value, torch.Tensor)}
        report = dcpfs.load(found, url)
        assert len(report.loaded) >= len(state)
        assert all(found[key] is tensor for key, tensor in tensors.items())
    elif entrance == "read":
        found = dcpfs.read(url)
    elif entrance == "empty_planner":
        found = _load_without_template(url)
    else:
        planner = DefaultLoadPlanner() if entrance == "torch_planner" else dcpfs.LoadPlanner()
        dcp_load(found, storage_reader=dcpfs.FsspecStorageReader(url), planner=planner)
    _assert_same(found, state)


def _load_without_template(url: str) -> dict[str, object]:
    """As torch's format_utils do it."""
    found: dict[str, object] = {}
    reader = dcpfs.FsspecStorageReader(url)
    planner = _EmptyStateDictLoadPlanner()  # type: ignore[no-untyped-call]  # torch has no hints here
    _load_state_dict(found, storage_reader=reader, planner=planner, no_dist=True)
    return found


def test_into_targets_of_other_layouts(save_plain: Save) -> None:
    """A target's own strides, subrange or gradient flag don't matter, nor those of what was saved."""
    weight = torch.randn(40, 30)
    url = save_plain({"a": weight, "b": weight.t(), "c": weight.t().contiguous()})
    big = torch.zeros(100, 100)
    target = {
        "a": torch.zeros(30, 40).t(),
        "b": big[10:40, 20:60],
        "c": torch.nn.Parameter(torch.zeros(30, 40)),
    }
    dcpfs.load(target, url)
    assert torch.equal(target["a"], weight)
    assert torch.equal(target["b"], weight.t())
    assert torch.equal(target["c"], weight.t())
    assert torch.count_nonzero(big) == torch.count_nonzero(weight)


def test_keys_and_prefixes_are_read_without_the_rest(save_plain: Save) -> None:
    state = {
        "model": {"w": torch.randn(200, 100), "b": torch.ones(3)},
        "optim": {"m": torch.randn(300, 1000)},
        "x": 1,
    }
    url = save_plain(state)
    moved: list[int] = []
    part = dcpfs.read(url, ["model", "x"], callback=_Counting(moved))
    _assert_same(part, {"model": state["model"], "x": 1})
    assert sum(moved) < 2 * 80_000
    _assert_same(dcpfs.read(url, "model.b"), {"model": {"b": torch.ones(3)}})
    with pytest.raises(KeyMismatchError, match=r"'model.bb' \(closest: 'model.b'"):
        dcpfs.read(url, ["model.bb"])


class _Counting(Callback):  # type: ignore[misc]  # fsspec has no hints
    def __init__(self, moved: list[int]) -> None:
        super().__init__()
        self.moved = moved

    def relative_update(self, inc: int = 1) -> None:
        super().relative_update(inc)
        self.moved.append(inc)


def test_progress_is_told_in_bytes_and_ends_at_the_total(save: Save) -> None:
    url = save({"w": torch.randn(1000, 300), "s": 3})
    callback = _Counting([])
    dcpfs.load({"w": torch.zeros(1000, 300), "s": 0}, url, callback=callback)
    assert callback.size == callback.value >= 1_200_000
    callback = _Counting([])
    reader = dcpfs.FsspecStorageReader(url, callback=callback)
    dcp_load({"w": torch.zeros(1000, 300), "s": 0}, storage_reader=reader)
    assert callback.size == callback.value >= 1_200_000


def test_one_line_says_what_a_load_did(save_plain: Save, caplog: pytest.LogCaptureFixture) -> None:
    url = save_plain({"w": torch.randn(10)})
    with caplog.at_level(logging.INFO, "dcpfs"):
        dcpfs.load({"w": torch.zeros(10)}, url)
    lines = [record.getMessage() for record in caplog.records if "loaded" in record.getMessage()]
    assert len(lines) == 1
    assert " 40 bytes" in lines[0]
    assert " s:" in lines[0]


# --- what does not fit


@pytest.mark.parametrize("kind", ["load", "own_planner", "torch_planner"])
def test_case_3_no_silent_cast(save_plain: Save, kind: str) -> None:
    url = save_plain({"w": torch.tensor([1.7, -2.9, 3e9]), "c": torch.ones(2, dtype=torch.complex64)})
    target = {"w": torch.full((3,), 5, dtype=torch.int32), "c": torch.full((2,), 5.0)}
    if kind == "load":
        with pytest.raises(KeyMismatchError) as caught:
            dcpfs.load(target, url)
        assert set(caught.value.mismatched) == {"w", "c"}
    else:
        planner = dcpfs.LoadPlanner() if kind == "own_planner" else DefaultLoadPlanner()
        with pytest.raises(CheckpointException, match=r"torch.int32 in the state, torch.float32 in the checkpoint"):
            dcp_load(target, storage_reader=dcpfs.FsspecStorageReader(url), planner=planner)
    assert target["w"].tolist() == [5, 5, 5]
    assert target["c"].tolist() == [5, 5]


def test_case_3_a_cast_that_was_asked_for(save_plain: Save) -> None:
    values = torch.randn(50, 8)
    url = save_plain({"w": values.bfloat16(), "v": values})
    target = {"w": torch.zeros(50, 8), "v": torch.zeros(50, 8)}
    dcpfs.load(target, url, allow_cast="widen")
    assert torch.equal(target["w"], values.bfloat16().float())
    narrow = {"w": torch.zeros(50, 8), "v": torch.zeros(50, 8, dtype=torch.bfloat16)}
    with pytest.raises(KeyMismatchError, match="'v'"):
        dcpfs.load(narrow, url, allow_cast="widen")
    planner = dcpfs.LoadPlanner(allow_cast=dcpfs.CastPolicy.FLOATING)
    dcp_load(narrow, storage_reader=dcpfs.FsspecStorageReader(url), planner=planner)
    assert torch.equal(narrow["v"], values.bfloat16())


def test_case_93_strict_and_loose(save_plain: Save) -> None:
    url = save_plain({"a": torch.ones(2), "b": torch.ones(3), "extra": 1})
    target = {"a": torch.zeros(2), "b": torch.zeros(4), "c": torch.zeros(1)}
    with pytest.raises(KeyMismatchError) as caught:
        dcpfs.load(target, url)
    error = caught.value
    assert (error.missing, error.unexpected, set(error.mismatched)) == (("c",), ("extra",), {"b"})
    assert "Nothing was read" in str(error)
    assert torch.equal(target["a"], torch.zeros(2))
    report = dcpfs.load(target, url, strict=False)
    assert (report.loaded, report.missing, report.unexpected) == (("a",), ("c",), ("extra",))
    assert set(report.mismatched) == {"b"}
    _assert_same(target, {"a": torch.ones(2), "b": torch.zeros(4), "c": torch.zeros(1)})
    planner = dcpfs.LoadPlanner(strict=False)
    loose: dict[str, object] = dict(target)
    dcp_load(loose, storage_reader=dcpfs.FsspecStorageReader(url), planner=planner)
    assert (planner.missing, planner.unexpected, set(planner.mismatched)) == (("c",), ("extra",), {"b"})
    with pytest.raises(CheckpointException, match="KeyMismatchError"):
        dcp_load(loose, storage_reader=dcpfs.FsspecStorageReader(url), planner=dcpfs.LoadPlanner())


def test_case_5_a_fresh_optimizer_does_not_resume_in_silence(save_plain: Save) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    url = save_plain({"optim": optimizer.state_dict()})
    fresh = torch.optim.AdamW(model.parameters())
    with pytest.raises(KeyMismatchError, match=r"no place for 'optim\.state\.0\.step'"):
        dcpfs.load({"optim": fresh.state_dict()}, url)
    report = dcpfs.load({"optim": fresh.state_dict()}, url, strict=False)
    assert "optim.state.0.exp_avg" in report.unexpected


def test_case_20_stateful_objects_get_their_state_and_stay(save_plain: Save) -> None:
    model = torch.nn.Linear(3, 2)
    url = save_plain({"model": model, "step": 3})
    other = torch.nn.Linear(3, 2)
    state: dict[str, object] = {"model": other, "step": 0}
    dcpfs.load(state, url)
    assert state["model"] is other
    assert state["step"] == 3
    assert torch.equal(other.weight, model.weight)
    again = save_plain(state)
    _assert_same(dcpfs.read(again), dcpfs.read(url))


# --- damage and danger


def test_case_103_no_checkpoint_is_said_plainly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for call in (lambda url: dcpfs.load({"w": torch.zeros(1)}, url), dcpfs.read):
        with pytest.raises(CheckpointNotFoundError, match=r"no checkpoint at .*nowhere.*\.metadata") as caught:
            call(str(tmp_path / "nowhere"))
        assert isinstance(caught.value, FileNotFoundError)
    reader = dcpfs.FsspecStorageReader(tmp_path / "nowhere")
    with pytest.raises(CheckpointException) as failed:
        dcp_load({"w": torch.zeros(1)}, storage_reader=reader)
    assert "no checkpoint at" in str(failed.value) + caplog.text  # torch 2.9 drops the text, so it is logged
    with pytest.raises(ConfigError, match="s3:"):
        dcpfs.load({}, Path("s3://bucket/x"))


def _flip(path: Path, needle: bytes, bit: int = 2) -> None:
    data = bytearray(path.read_bytes())
    at = data.find(needle)
    assert at >= 0
    data[at + len(needle) // 2] ^= bit
    path.write_bytes(data)


@pytest.mark.parametrize("size", [100, 1_000_000])
def test_case_113_a_flipped_bit_in_another_writers_file(tmp_path: Path, size: int) -> None:
    tensor = torch.randint(0, 255, (size,), dtype=torch.uint8)
    url = str(tmp_path / "c")
    dcp_save({"good": torch.ones(3), "bad": tensor}, storage_writer=FileSystemWriter(url))
    _flip(tmp_path / "c" / "__0_0.distcp", bytes(tensor.numpy()))
    target = {"good": torch.zeros(3), "bad": torch.zeros_like(tensor)}
    with pytest.raises(CorruptCheckpointError, match=r"'bad'.*checksum.*'__0_0.distcp'") as caught:
        dcpfs.load(target, url)
    assert (caught.value.key, caught.value.file) == ("bad", "__0_0.distcp")
    with pytest.raises(CheckpointException, match="checksum"):
        dcp_load(target, storage_reader=dcpfs.FsspecStorageReader(url))
    dcpfs.load(target, url, verify="sizes")


def test_case_113_a_flipped_bit_in_a_value(tmp_path: Path) -> None:
    url = str(tmp_path / "c")
    dcp_save({"value": {"x": "some text to be damaged"}, "w": torch.ones(3)}, storage_writer=FileSystemWriter(url))
    _flip(tmp_path / "c" / "__0_0.distcp", b"some text to be damaged")
    with pytest.raises(CorruptCheckpointError, match=r"value\.x"):
        dcpfs.load({"value": {"x": ""}, "w": torch.zeros(3)}, url)


@pytest.mark.parametrize("cut", [1, 200, 3_000])
def test_case_113_a_truncated_file(tmp_path: Path, cut: int) -> None:
    url = str(tmp_path / "c")
    dcp_save({"a": torch.ones(3), "w": torch.randn(1000)}, storage_writer=FileSystemWriter(url))
    file = tmp_path / "c" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-cut])
    with pytest.raises(CorruptCheckpointError, match=r"file '__0_0\.distcp'"):
        dcpfs.load({"a": torch.zeros(3), "w": torch.zeros(1000)}, url)
    with pytest.raises(CorruptCheckpointError, match=r"file '__0_0\.distcp'"):
        dcpfs.read(url, ["a"])


def test_a_missing_file_is_incomplete(tmp_path: Path) -> None:
    url = str(tmp_path / "c")
    dcp_save({"a": torch.ones(3)}, storage_writer=FileSystemWriter(url))
    (tmp_path / "c" / "__0_0.distcp").unlink()
    with pytest.raises(IncompleteCheckpointError, match=r"__0_0\.distcp") as caught:
        dcpfs.read(url)
    assert caught.value.missing == ("__0_0.distcp",)


class _Trap:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("kind", ["load", "read", "torch_planner", "own_planner"])
def test_case_111_entries_run_no_code(tmp_path: Path, kind: str) -> None:
    url, trap = str(tmp_path / "c"), tmp_path / "sprung"
    dcp_save({"value": _Trap(trap), "w": torch.ones(2)}, storage_writer=FileSystemWriter(url))
    target: dict[str, object] = {"value": None, "w": torch.zeros(2)}
    if kind in ("load", "read"):
        with pytest.raises(UntrustedDataError, match="value"):
            dcpfs.load(target, url) if kind == "load" else dcpfs.read(url)
    else:
        planner = dcpfs.LoadPlanner() if kind == "own_planner" else DefaultLoadPlanner()
        with pytest.raises(CheckpointException, match="UntrustedDataError"):
            dcp_load(target, storage_reader=dcpfs.FsspecStorageReader(url), planner=planner)
    assert not trap.exists()
    dcpfs.load(target, url, trust="pickle")
    assert trap.exists()


def test_case_110_metadata_runs_no_code(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    url, trap = str(tmp_path / "c"), tmp_path / "sprung"
    dcp_save({"w": torch.ones(2)}, storage_writer=FileSystemWriter(url))
    file = tmp_path / "c" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    metadata.planner_data = _Trap(trap)
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(UntrustedDataError):
        dcpfs.load({"w": torch.zeros(2)}, url)
    with pytest.raises(CheckpointException) as failed:
        dcp_load({"w": torch.zeros(2)}, storage_reader=dcpfs.FsspecStorageReader(url))
    assert "allow-list" in str(failed.value) + caplog.text
    assert not trap.exists()


@pytest.mark.parametrize("name", ["../other/__0_0.distcp", "/etc/passwd", "s3://other/x", "a/../../b"])
def test_case_112_names_stay_inside(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    url = str(tmp_path / "c")
    dcp_save({"w": torch.ones(2)}, storage_writer=FileSystemWriter(url))
    shutil.copytree(tmp_path / "c", tmp_path / "other")
    file = tmp_path / "c" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = name
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(UntrustedDataError, match="leave the checkpoint"):
        dcpfs.load({"w": torch.zeros(2)}, url)
    with pytest.raises(CheckpointException) as failed:
        dcp_load({"w": torch.zeros(2)}, storage_reader=dcpfs.FsspecStorageReader(url))
    assert "leave the checkpoint" in str(failed.value) + caplog.text


def test_damaged_metadata_is_not_replaced_by_that_of_one_rank(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    url = str(tmp_path / "c")
    dcp_save({"w": torch.ones(2)}, storage_writer=FileSystemWriter(url))
    file = tmp_path / "c" / ".metadata"
    (tmp_path / "c" / "__0.metadata").write_bytes(file.read_bytes())
    file.write_bytes(file.read_bytes()[:-20])
    target = {"w": torch.zeros(2)}
    with pytest.raises(CheckpointException) as failed:
        dcp_load(target, storage_reader=dcpfs.FsspecStorageReader(url))
    assert "damaged" in str(failed.value) + caplog.text
    with pytest.raises(CorruptCheckpointError, match="metadata"):
        dcpfs.load(target, url)
    assert target["w"].tolist() == [0, 0]


# --- DCP's contract


class _ThreadPlanner(DefaultLoadPlanner):
    """Notes the threads it is called from, and the order of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()
        self.calls: list[str] = []

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        self.threads.add(threading.get_ident())
        self.calls.append("resolve")
        tensor: torch.Tensor = super().resolve_tensor(read_item)
        return torch.zeros_like(tensor)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.threads.add(threading.get_ident())
        self.calls.append("commit")
        super().resolve_tensor(read_item).copy_(tensor)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.threads.add(threading.get_ident())
        self.calls.append("bytes")
        super().load_bytes(read_item, value)


def test_planners_are_called_from_the_loading_thread_and_commit_what_arrived(save: Save) -> None:
    state = {f"k{n}": torch.full((40_000,), float(n)) for n in range(20)} | {"v": 5}
    url = save(state)
    target = {f"k{n}": torch.zeros(40_000) for n in range(20)} | {"v": 0}
    planner = _ThreadPlanner()
    dcp_load(target, storage_reader=dcpfs.FsspecStorageReader(url), planner=planner)
    _assert_same(target, state)
    assert planner.threads == {threading.get_ident()}
    assert planner.calls.count("commit") == 20


def test_case_76_a_reader_moves_on_with_its_options() -> None:
    first, second = f"memory://{uuid.uuid4().hex}", f"memory://{uuid.uuid4().hex}"
    for number, url in enumerate((first, second)):
        dcp_save({"w": torch.full((4,), float(number))}, storage_writer=FsspecWriter(url))
    reader = dcpfs.FsspecStorageReader(first, storage_options={"skip_instance_cache": True})
    target = {"w": torch.zeros(4)}
    dcp_load(target, storage_reader=reader)
    assert target["w"][0] == 0
    dcp_load(target, storage_reader=reader, checkpoint_id=second)
    assert target["w"][0] == 1
    assert reader.checkpoint_id == second
    assert reader._source.location.storage_options == {"skip_instance_cache": True}


def test_a_reader_that_is_used_again_sees_the_new_checkpoint(tmp_path: Path) -> None:
    url = str(tmp_path / "c")
    reader = dcpfs.FsspecStorageReader(url)
    for number in range(2):
        shutil.rmtree(url, ignore_errors=True)
        dcp_save({"w": torch.full((4 + number,), float(number))}, storage_writer=FileSystemWriter(url))
        target = {"w": torch.zeros(4 + number)}
        dcp_load(target, storage_reader=reader)
        assert target["w"][0] == number


def test_format_utils_take_the_reader(save_plain: Save, tmp_path: Path) -> None:
    state = {"a": torch.randn(4, 3), "n": {"x": 1, "l": [torch.ones(2)]}}
    url = save_plain(state)
    dcp_to_torch_save(url, tmp_path / "out.pt")
    expected = torch.load(tmp_path / "out.pt")
    _assert_same(_load_without_template(url), expected)


def test_the_metadata_of_one_rank(tmp_path: Path) -> None:
    url = str(tmp_path / "c")
    dcp_save({"w": torch.ones(2)}, storage_writer=FileSystemWriter(url))
    (tmp_path / "c" / ".metadata").rename(tmp_path / "c" / "__0.metadata")
    target = {"w": torch.zeros(2)}
    dcp_load(target, storage_reader=dcpfs.FsspecStorageReader(url))
    assert target["w"].tolist() == [1, 1]
    target = {"w": torch.zeros(2)}
    dcpfs.load(target, url)
    assert target["w"].tolist() == [1, 1]


class _Rot(StreamTransformExtension):
    """A stream transform that needs no package: every byte plus one."""

    @staticmethod
    def registry_name() -> str:
        return "stream.rot"

    @staticmethod
    def from_descriptor(version: str) -> _Rot:
        return _Rot()

    def get_descriptor(self) -> str:
        return "stream.rot/1"

    def transform_to(self, output: io.IOBase) -> io.RawIOBase:  # type: ignore[override]  # torch wants IO[bytes]
        class Writer(io.RawIOBase):
            def writable(self) -> bool:
                return True

            def write(self, data: bytes) -> int:  # type: ignore[override]  # any buffer
                output.write(bytes((byte + 1) % 256 for byte in bytes(data)))
                return len(bytes(data))

            def close(self) -> None:
                if not self.closed:
                    output.close()
                super().close()

        return Writer()

    def transform_from(self, source: io.IOBase) -> io.BytesIO:  # type: ignore[override]  # torch wants IO[bytes]
        return io.BytesIO(bytes((byte - 1) % 256 for byte in source.read()))


def test_stream_transforms_are_undone(tmp_path: Path) -> None:
    url = str(tmp_path / "c")
    state = {"w": torch.randn(30, 20), "t": torch.randn(6, 5).t(), "value": {"x": [1, 2]}}
    dcp_save(dict(state), storage_writer=FileSystemWriter(url, _extensions=[_Rot()]))
    registry = ExtensionRegistry()
    registry.register(_Rot)
    target: dict[str, object] = {"w": torch.zeros(30, 20), "t": torch.zeros(5, 6), "value": {"x": None}}
    reader = dcpfs.FsspecStorageReader(url, extension_registry=registry)
    dcp_load(target, storage_reader=reader, planner=dcpfs.LoadPlanner())
    _assert_same(target, state)
    with pytest.raises(ConfigError, match=r"stream.rot/1.*extension_registry"):
        dcpfs.read(url)


def test_a_slice_of_another_writers_tensor_moves_little_more(save_plain: Save) -> None:
    """Rows of a contiguous tensor, and columns of a transposed one, which are rows of what is stored."""
    weight = torch.randn(2000, 1000)
    url = save_plain({"w": weight, "t": weight.t()})
    moved: list[int] = []
    reader = dcpfs.FsspecStorageReader(url, callback=_Counting(moved))
    planner = _SlicePlanner({"w": (slice(500, 600), slice(None)), "t": (slice(None), slice(500, 600))})
    target = {"w": torch.zeros(2000, 1000), "t": torch.zeros(1000, 2000)}
    dcp_load(target, storage_reader=reader, planner=planner)
    assert torch.equal(target["w"][500:600], weight[500:600])
    assert torch.equal(target["t"][:, 500:600], weight.t()[:, 500:600])
    assert torch.count_nonzero(target["w"][:500]) == 0
    assert sum(moved) <= 1.05 * 2 * 400_000


class _SlicePlanner(DefaultLoadPlanner):
    """Loads one box of each tensor."""

    def __init__(self, boxes: dict[str, tuple[slice, slice]]) -> None:
        super().__init__()
        self.boxes = boxes

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        items = []
        for item in plan.items:
            box = self.boxes[item.dest_index.fqn]
            offsets = torch.Size(part.start or 0 for part in box)
            lengths = torch.Size(
                (part.stop if part.stop is not None else size) - (part.start or 0)
                for part, size in zip(box, item.lengths, strict=True)
            )
            items.append(ReadItem(item.type, item.dest_index, offsets, item.storage_index, offsets, lengths))
        plan.items = items
        return plan


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
def test_loading_while_another_thread_saves(tmp_path: Path) -> None:
    """Both flatten states; torch's planner flips a global while it loads."""
    url = str(tmp_path / "c")
    state: dict[str, object] = {"deep": {"a": {"x": 1, "y": [1, 2]}, "w": torch.ones(4)}}
    dcp_save(state, storage_writer=FileSystemWriter(url))
    stop = threading.Event()
    keys: list[set[str]] = []

    def keep_saving() -> None:
        number = 0
        while not stop.is_set():
            place = str(tmp_path / f"s{number % 2}")
            dcp_save(state, storage_writer=FileSystemWriter(place))
            keys.append(set(FileSystemReader(place).read_metadata().state_dict_metadata))
            number += 1

    thread = threading.Thread(target=keep_saving)
    thread.start()
    try:
        for _ in range(30):
            dcpfs.load({"deep": {"w": torch.zeros(4)}}, url, strict=False)
    finally:
        stop.set()
        thread.join()
    assert all(found == {"deep.a.x", "deep.a.y", "deep.w"} for found in keys)
