"""What dcpfs writes to real files, torch alone reads: values, dtypes, memory layouts, transforms, tools."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import pytest
import torch
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

import dcpfs

HOW = ["dcpfs.save", "dcp.save"]


@pytest.fixture(autouse=True)
def _no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _save(how: str, state: dict[str, Any], url: str, **options: Any) -> None:
    if how == "dcpfs.save":
        dcpfs.save(state, url, **options)
    else:
        save(state, storage_writer=dcpfs.FsspecStorageWriter(url, **options))


def _load(template: dict[str, Any], url: str) -> dict[str, Any]:
    load(template, storage_reader=FileSystemReader(url))
    return template


_NAMES = (
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
)
DTYPES = [getattr(torch, name) for name in _NAMES if hasattr(torch, name)]


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


@pytest.mark.parametrize("how", HOW)
def test_case_28_every_dtype_bit_for_bit(tmp_path: Path, how: str) -> None:
    state: dict[str, Any] = {}
    for dtype in DTYPES:
        raw = torch.randint(0, 2 if dtype is torch.bool else 256, (6 * dtype.itemsize,), dtype=torch.uint8)
        state[str(dtype)] = raw.view(dtype).reshape(2, 3)
        state[f"{dtype} scalar"] = raw[: dtype.itemsize].clone().view(dtype).reshape(())
        state[f"{dtype} empty"] = torch.empty((0, 2), dtype=dtype)
    _save(how, state, str(tmp_path))
    places = FileSystemReader(str(tmp_path)).read_metadata().storage_data
    infos = {index.fqn: info for index, info in places.items()}
    for key, tensor in state.items():
        with open(tmp_path / infos[key].relative_path, "rb") as file:
            file.seek(infos[key].offset)
            found = torch.load(io.BytesIO(file.read(infos[key].length)), weights_only=False)
        assert found.dtype is tensor.dtype
        assert found.shape == tensor.shape
        assert _bytes_of(found) == _bytes_of(tensor), key


@pytest.mark.parametrize("how", HOW)
def test_memory_layouts_are_stored_as_values(tmp_path: Path, how: str) -> None:
    base = torch.randn(100, 50)
    tied = torch.randn(20, 20)
    state: dict[str, Any] = {
        "view of a big base": base[3:5, 10:20],
        "transposed": base.t(),
        "strided": base[::7, ::3],
        "expanded": torch.randn(1, 5).expand(4, 5),
        "conjugate": torch.randn(5, dtype=torch.complex64).conj(),
        "negative": torch.randn(5, dtype=torch.complex64).conj().imag,
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "needs grad": torch.randn(3, requires_grad=True) * 2,
        "tied a": tied,
        "tied b": tied,
    }
    _save(how, state, str(tmp_path))
    found = _load({key: torch.zeros(value.shape, dtype=value.dtype) for key, value in state.items()}, str(tmp_path))
    for key, value in state.items():
        assert torch.equal(found[key], value.detach()), key
    assert sum(file.stat().st_size for file in tmp_path.glob("*.distcp")) < 200_000  # no whole base


def test_case_27_tied_weights_are_stored_under_both_names(tmp_path: Path) -> None:
    weight = torch.randn(1000)
    dcpfs.save({"a": weight, "b": weight}, str(tmp_path))
    found = _load({"a": torch.zeros(1000), "b": torch.zeros(1000)}, str(tmp_path))
    assert torch.equal(found["a"], weight)
    assert torch.equal(found["b"], weight)


def test_large_entries_in_many_parts_and_files(tmp_path: Path) -> None:
    transfer = dcpfs.TransferConfig(budget_bytes=1 << 20, part_bytes=64 << 10, file_bytes=4 << 20)
    state = {f"k{n}": torch.randn(300_000 + n) for n in range(6)} | {
        f"t{n}": torch.randn(90, 1000).t() for n in range(4)
    }
    dcpfs.save(state, str(tmp_path), transfer=transfer)
    assert len(list(tmp_path.glob("*.distcp"))) > 1
    found = _load({key: torch.zeros(value.shape) for key, value in state.items()}, str(tmp_path))
    assert all(torch.equal(found[key], value) for key, value in state.items())


@pytest.mark.parametrize("how", HOW)
def test_nested_state_and_torchs_converter(tmp_path: Path, how: str) -> None:
    state = {"model": {"w": torch.ones(2), "l": [torch.zeros(1), {"x": 3}]}, "lr": 0.5, "t": (1, 2), "n": None}
    _save(how, state, str(tmp_path / "dcp"))
    dcp_to_torch_save(str(tmp_path / "dcp"), str(tmp_path / "one.pt"))
    found = torch.load(tmp_path / "one.pt", weights_only=False)
    assert found["model"]["l"][1] == {"x": 3}
    assert torch.equal(found["model"]["w"], torch.ones(2))
    assert (found["lr"], found["t"], found["n"]) == (0.5, (1, 2), None)


def test_a_process_without_dcpfs_reads_it(tmp_path: Path) -> None:
    dcpfs.save({"w": torch.arange(5.0), "n": [1, "x"], "e": {2: {}}}, str(tmp_path))
    script = (
        "import sys; sys.modules['dcpfs'] = None\n"
        "import torch, warnings; warnings.simplefilter('ignore')\n"
        "import torch.distributed.checkpoint as dcp\n"
        "state = {'w': torch.zeros(5), 'n': 0}\n"
        f"dcp.load(state, checkpoint_id={str(tmp_path)!r})\n"
        "assert torch.equal(state['w'], torch.arange(5.0)) and state['n'] == [1, 'x'], state\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=280)


def test_case_32_nothing_syncs_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden() -> None:
        raise AssertionError("os.sync was called")

    monkeypatch.setattr(os, "sync", forbidden)
    for url in (str(tmp_path), "memory://case32/a"):
        for how in HOW:
            _save(how, {"w": torch.ones(3)}, f"{url}/{how}")


class _Deflate(StreamTransformExtension):
    """zlib, one byte stream per entry."""

    @staticmethod
    def registry_name() -> str:
        return "stream.deflate"

    @staticmethod
    def from_descriptor(version: str) -> _Deflate:
        return _Deflate()

    def get_descriptor(self) -> str:
        return "stream.deflate/1"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        class Writer(io.RawIOBase):
            def __init__(self) -> None:
                self.engine = zlib.compressobj()

            def writable(self) -> bool:
                return True

            def write(self, data: Any) -> int:
                output.write(self.engine.compress(data))
                return len(memoryview(data))

            def close(self) -> None:
                if not self.closed:
                    output.write(self.engine.flush())
                    output.close()
                super().close()

        return cast("IO[bytes]", Writer())

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:  # noqa: A002 - torch's name
        return io.BytesIO(zlib.decompress(input.read()))


def test_stream_transforms(tmp_path: Path) -> None:
    state = {f"z{n}": torch.zeros(50_000) for n in range(10)} | {"n": {"x": [1, 2]}}
    _save(
        "dcp.save", state, str(tmp_path), extensions=[_Deflate()], transfer=dcpfs.TransferConfig(budget_bytes=1 << 20)
    )
    assert sum(file.stat().st_size for file in tmp_path.glob("*.distcp")) < 100_000
    registry = ExtensionRegistry()
    registry.register(_Deflate)
    template: dict[str, Any] = {f"z{n}": torch.ones(50_000) for n in range(10)} | {"n": {"x": 0}}
    load(template, storage_reader=FileSystemReader(str(tmp_path), _extension_registry=registry))
    assert template["n"] == {"x": [1, 2]}
    assert all(not template[f"z{n}"].any() for n in range(10))


@pytest.mark.parametrize("stager", ["default", "blocking", "kept"])
def test_case_16_async_save_in_a_thread_keeps_the_values_of_the_call(tmp_path: Path, stager: str) -> None:
    options = {
        "default": None,
        "blocking": BlockingAsyncStager(),
        "kept": DefaultStager(StagingOptions(False, False, False, False)),
    }
    base = torch.ones(1000)
    state: dict[str, Any] = {"plain": base.clone(), "view a": base[:500], "view b": base[500:], "n": [1]}
    for step in range(2):
        future: Any = async_save(
            state,
            storage_writer=dcpfs.FsspecStorageWriter(str(tmp_path / str(step))),
            async_stager=options[stager],
            no_dist=True,
        )
        state["plain"].fill_(step + 2)
        base.fill_(step + 2)
        future.result()
    for step in range(2):
        template = {"plain": torch.zeros(1000), "view a": torch.zeros(500), "view b": torch.zeros(500), "n": 0}
        found = _load(template, str(tmp_path / str(step)))
        assert all(
            torch.equal(found[key], torch.full_like(found[key], step + 1)) for key in ("plain", "view a", "view b")
        )


def test_stateful_values_are_asked_for_their_state(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    dcpfs.save({"model": model, "optim": torch.optim.SGD(model.parameters(), lr=0.1)}, str(tmp_path))
    metadata = FileSystemReader(str(tmp_path)).read_metadata()
    assert {"model.weight", "model.bias"} <= set(metadata.state_dict_metadata)
    assert any(key.startswith("optim.param_groups") for key in metadata.state_dict_metadata)
