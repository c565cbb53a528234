"""Saves of several real ranks, read back with torch alone."""

from __future__ import annotations

import logging
import os
import warnings
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dcpfs
from dcpfs.dcp.save_planner import DifferingValues
from dcpfs.errors import ConfigError, UnsupportedValueError
from tests.multiprocess.gloo import run_ranks, try_ranks

HOW = ["dcpfs.save", "dcp.save", "dcp.save+planner"]


def _save(state: dict[str, Any], url: str, how: str = "dcpfs.save", **options: Any) -> None:
    if how == "dcpfs.save":
        dcpfs.save(state, url, **options)
        return
    planner = dcpfs.SavePlanner() if how == "dcp.save+planner" else None
    save(state, storage_writer=dcpfs.FsspecStorageWriter(url, **options), planner=planner)


def _full(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def _read_with_torch(url: str, template: dict[str, Any]) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load(template, storage_reader=FileSystemReader(url))
    return template


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# --- layouts

SHAPES: dict[str, tuple[int, ...]] = {
    "rows": (8, 3),
    "columns": (3, 8),
    "uneven": (6, 2),
    "fewer rows than ranks": (2, 5),
    "one row": (1, 7),
    "flat": (6,),
    "replicated": (5, 5),
    "grid": (7, 5),
    "hsdp": (9, 2),
    "scalar": (),
    "empty": (0, 4),
}


def _save_layouts(url: str, how: str) -> None:
    line = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    placements: dict[str, tuple[Any, list[Any]]] = {
        "rows": (line, [Shard(0)]),
        "columns": (line, [Shard(1)]),
        "uneven": (line, [Shard(0)]),
        "fewer rows than ranks": (line, [Shard(0)]),
        "one row": (line, [Shard(1)]),
        "flat": (line, [Shard(0)]),
        "replicated": (line, [Replicate()]),
        "grid": (square, [Shard(0), Shard(1)]),
        "hsdp": (square, [Replicate(), Shard(0)]),
        "scalar": (line, [Replicate()]),
        "empty": (line, [Shard(1)]),
    }
    state: dict[str, Any] = {
        name: distribute_tensor(_full(*SHAPES[name]), mesh, placement) for name, (mesh, placement) in placements.items()
    }
    state["nested"] = {"number": 7, "plain": _full(3)}
    _save(state, url, how)


@pytest.mark.parametrize("how", HOW)
def test_case_22_every_layout_is_read_by_torch(tmp_path: Path, how: str) -> None:
    run_ranks(_save_layouts, 4, str(tmp_path), how)
    template: dict[str, Any] = {name: torch.full(shape, -1.0) for name, shape in SHAPES.items()}
    template["nested"] = {"number": 0, "plain": torch.zeros(3)}
    found = _read_with_torch(str(tmp_path), template)
    for name, shape in SHAPES.items():
        assert torch.equal(found[name], _full(*shape)), name
    assert found["nested"]["number"] == 7
    assert torch.equal(found["nested"]["plain"], _full(3))


def _save_parallel_model(url: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.ReLU(), torch.nn.Linear(10, 5))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    assert any(isinstance(value, DTensor) for value in model.state_dict().values())
    dcpfs.save({"model": model}, url)
    return expected


def test_fsdp_and_tensor_parallel_with_strided_shards(tmp_path: Path) -> None:
    expected = run_ranks(_save_parallel_model, 4, str(tmp_path))[0]
    template = {"model": {name: torch.zeros_like(value) for name, value in expected.items()}}
    found = _read_with_torch(str(tmp_path), template)["model"]
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def _save_chunked(url: str, how: str) -> None:
    rank = dist.get_rank()
    full = _full(8, 3)
    # This rank holds rows r, r+1 and r+4, r+5 of the whole, with a row of padding between them.
    start = 2 * rank
    local: Any = torch.full((5, 3), -7.0)
    local[0:2], local[3:5] = full[start : start + 2], full[start + 4 : start + 6]
    local.global_shape = (8, 3)
    local.global_offsets = ((start, 0), (start + 4, 0))
    local.local_offsets = ((0, 0), (3, 0))
    local.local_sizes = ((2, 3), (2, 3))
    _save({"w": local, "plain": torch.ones(2)}, url, how)


@pytest.mark.skipif(find_spec("torch.distributed.checkpoint.protocol") is None, reason="new in torch 2.14")
@pytest.mark.parametrize("how", HOW)
def test_several_chunks_a_rank(tmp_path: Path, how: str) -> None:
    run_ranks(_save_chunked, 2, str(tmp_path), how)
    found = _read_with_torch(str(tmp_path), {"w": torch.zeros(8, 3), "plain": torch.zeros(2)})
    assert torch.equal(found["w"], _full(8, 3))


# --- who writes what


def _save_replicas(url: str) -> int:
    state: dict[str, Any] = {f"small{n}": _full(10) for n in range(12)} | {f"step{n}": n for n in range(4)}
    state |= {f"large{n}": torch.full((1 << 19,), float(n)) for n in range(8)}
    writer = dcpfs.FsspecStorageWriter(url)
    save(state, storage_writer=writer, planner=dcpfs.SavePlanner())
    return writer.written.bytes_written


def test_case_71_and_73_small_replicas_in_one_file_large_ones_balanced(tmp_path: Path) -> None:
    written = run_ranks(_save_replicas, 4, str(tmp_path))
    assert max(written) < 1.1 * min(written)
    metadata = FileSystemReader(str(tmp_path)).read_metadata()
    homes = {index.fqn: info.relative_path for index, info in metadata.storage_data.items()}
    assert {home for key, home in homes.items() if not key.startswith("large")} == {"__0_0.distcp"}


# --- disagreement


def _save_mismatch(url: str, how: str, kind: str) -> None:
    rank = dist.get_rank()
    values: dict[str, list[Any]] = {
        "shape": [torch.ones(2), torch.ones(3)],
        "dtype": [torch.ones(2), torch.ones(2, dtype=torch.int32)],
        "kind": [torch.ones(2), "text"],
    }
    _save({"w": values[kind][rank], "fine": torch.ones(1)}, url, how)


@pytest.mark.parametrize("kind", ["shape", "dtype", "kind"])
@pytest.mark.parametrize("how", HOW)
def test_replicas_that_differ_are_refused_on_all_ranks(tmp_path: Path, how: str, kind: str) -> None:
    outcomes = try_ranks(_save_mismatch, 2, str(tmp_path), how, kind)
    assert all(outcome.failed for outcome in outcomes)
    if how == "dcpfs.save":
        assert {outcome.error_type for outcome in outcomes} == {"ReplicaMismatchError"}
    if not (how == "dcp.save" and kind == "kind"):  # torch's planner fails first, with words of its own
        assert all("'w' is" in outcome.error_text for outcome in outcomes)
    assert _files(tmp_path) == []


def _save_rank_values(url: str, policy: str) -> list[str]:
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logging.getLogger("dcpfs.dcp.save_planner").addHandler(Keep())
    rank = dist.get_rank()
    state = {
        "rng": torch.full((16,), rank, dtype=torch.uint8),
        "text": f"rank{rank}",
        "same": 1,
        "weight": torch.ones(4),
    }
    save(
        state,
        storage_writer=dcpfs.FsspecStorageWriter(url),
        planner=dcpfs.SavePlanner(differing_values=DifferingValues(policy)),
    )
    return messages


def test_case_8_values_of_single_ranks_are_named(tmp_path: Path) -> None:
    messages = run_ranks(_save_rank_values, 2, str(tmp_path / "warn"), "warn")[0]
    (text,) = [message for message in messages if "differ between ranks" in message]
    assert "'rng'" in text
    assert "'text'" in text
    assert "'same'" not in text
    assert "'weight'" not in text
    outcomes = try_ranks(_save_rank_values, 2, str(tmp_path / "refuse"), "refuse")
    assert all("'rng'" in outcome.error_text for outcome in outcomes)
    assert not (tmp_path / "refuse").exists() or _files(tmp_path / "refuse") == []


# --- failures


def _overwrite_with_unsupported(url: str, how: str) -> str:
    value = torch.ones(2) if dist.get_rank() == 0 else torch.eye(2).to_sparse()
    try:
        _save({"mine" if dist.get_rank() else "other": value}, url, how, overwrite=True)
    except UnsupportedValueError as error:
        return f"own: {error}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def test_case_17_one_rank_refuses_and_the_old_checkpoint_stays(tmp_path: Path) -> None:
    url = str(tmp_path)
    dcpfs.save({"old": torch.ones(3)}, url)
    texts = run_ranks(_overwrite_with_unsupported, 2, url, "dcpfs.save")
    assert all(text.startswith("own: ") and "'mine'" in text and "sparse" in text for text in texts)
    assert torch.equal(_read_with_torch(url, {"old": torch.zeros(3)})["old"], torch.ones(3))


class _Failing(dcpfs.SavePlanner):
    """Fails on rank 1 when data is asked for."""

    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError("disk on fire")
        return super().resolve_data(write_item)


def _overwrite_and_fail(url: str, how: str) -> str:
    module = import_module("dcpfs.dcp.save")
    rank = dist.get_rank()
    state = {f"rank{rank}": torch.full((1000,), 2.0)}
    try:
        if how == "dcpfs.save":
            setattr(module, "SavePlanner", _Failing)  # noqa: B010 - stands in for a failing store on one rank
            dcpfs.save(state, url, overwrite=True)
        else:
            save(state, storage_writer=dcpfs.FsspecStorageWriter(url, overwrite=True), planner=_Failing())
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


@pytest.mark.parametrize("how", ["dcpfs.save", "dcp.save"])
def test_case_2_a_failed_overwrite_leaves_nothing_loadable(tmp_path: Path, how: str) -> None:
    url = str(tmp_path)
    run_ranks(_save_per_rank, 2, url)
    texts = run_ranks(_overwrite_and_fail, 2, url, how)
    assert all("disk on fire" in text for text in texts)
    assert ".metadata" not in _files(tmp_path)
    if how == "dcpfs.save":
        assert texts == ["RankError: rank 1 failed: OSError: disk on fire", "OSError: disk on fire"]
        assert "__0_0.distcp" not in _files(tmp_path)  # its own, new one; rank 1 wrote nothing over its old one


def _save_per_rank(url: str) -> None:
    dcpfs.save({f"rank{dist.get_rank()}": torch.ones(1000)}, url, overwrite=True)


# --- overwriting


def test_case_2_no_files_of_a_larger_world_are_left(tmp_path: Path) -> None:
    url = str(tmp_path)
    run_ranks(_save_per_rank, 3, url)
    for name in ("notes.txt", "__0_0.distcp.bak", "__x_0.distcp"):
        (tmp_path / name).write_text("mine")
    assert "__2_0.distcp" in _files(tmp_path)
    dcpfs.save({"a": torch.ones(2)}, url, overwrite=True)
    assert _files(tmp_path) == [".metadata", "__0_0.distcp", "__0_0.distcp.bak", "__x_0.distcp", "notes.txt"]


# --- DCP's other ways


def _save_without_collectives(url: str, overwrite: bool, value: float) -> str:
    rank = dist.get_rank()
    writer = dcpfs.FsspecStorageWriter(url, overwrite=overwrite)
    try:
        save({"w": torch.full((4,), value + rank)}, storage_writer=writer, use_collectives=False)
    except dcpfs.CheckpointExistsError as error:
        dist.barrier()
        return str(error)
    return ""


def test_without_collectives_each_rank_has_its_own_metadata(tmp_path: Path) -> None:
    url = str(tmp_path)
    run_ranks(_save_without_collectives, 2, url, False, 1.0)
    assert _files(tmp_path) == ["__0.metadata", "__0_0.distcp", "__1.metadata", "__1_0.distcp"]
    refused = run_ranks(_save_without_collectives, 2, url, False, 5.0)
    assert all(f"__{rank}.metadata" in text for rank, text in enumerate(refused))
    run_ranks(_save_without_collectives, 2, url, True, 3.0)
    run_ranks(_check_without_collectives, 2, url, 3.0)
    with pytest.raises(dcpfs.CheckpointExistsError):
        dcpfs.save({"w": torch.ones(1)}, url)
    dcpfs.save({"w": torch.ones(1)}, url, overwrite=True)
    assert _files(tmp_path) == [".metadata", "__0_0.distcp"]


def _check_without_collectives(url: str, value: float) -> None:
    rank = dist.get_rank()
    metadata = FileSystemReader(url).read_metadata(rank=rank)
    assert set(metadata.state_dict_metadata) == {"w"}
    with open(Path(url) / f"__{rank}_0.distcp", "rb") as file:
        found = torch.load(file, weights_only=True)
    assert torch.equal(found, torch.full((4,), value + rank))


def _async_save(url: str, kind: str) -> None:
    rank = dist.get_rank()
    own = torch.full((1000,), float(rank))
    state = {f"own{rank}": own, "shared": torch.ones(10), "number": 3}
    future: Any = async_save(
        state,
        storage_writer=dcpfs.FsspecStorageWriter(url),
        async_checkpointer_type=AsyncCheckpointerType(kind),
    )
    own.fill_(-1)
    future.result()


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_case_16_async_save_writes_the_values_of_the_call(tmp_path: Path, kind: str) -> None:
    run_ranks(_async_save, 2, str(tmp_path), kind)
    template: dict[str, Any] = {f"own{rank}": torch.zeros(1000) for rank in range(2)}
    found = _read_with_torch(str(tmp_path), {**template, "shared": torch.zeros(10), "number": 0})
    assert all(torch.equal(found[f"own{rank}"], torch.full((1000,), float(rank))) for rank in range(2))
    assert found["number"] == 3


def _save_with_cached_plans(base: str, ours: bool) -> str:
    rank = dist.get_rank()
    for step in range(3):
        planner: Any = (
            dcpfs.SavePlanner(enable_plan_caching=True) if ours else DefaultSavePlanner(enable_plan_caching=True)
        )
        state = {
            f"own{rank}": torch.full((50,), float(10 * step + rank)),
            "step": step,
            "shared": torch.full((3,), step),
        }
        writer = dcpfs.FsspecStorageWriter(f"{base}/{step}")
        save(state, storage_writer=writer, planner=planner)
    state = {f"own{rank}": torch.full((50,), 7, dtype=torch.int32), "step": 9, "shared": torch.full((3,), 9)}
    try:
        save(state, storage_writer=dcpfs.FsspecStorageWriter(f"{base}/other dtype"), planner=planner)
    except BaseException as error:
        return str(error)
    return "saved"


@pytest.mark.parametrize("ours", [True, False], ids=["dcpfs's planner", "torch's planner"])
def test_cached_plans_never_mix_saves(tmp_path: Path, ours: bool) -> None:
    texts = run_ranks(_save_with_cached_plans, 2, str(tmp_path), ours)
    for step in range(3):
        template = {
            "own0": torch.zeros(50),
            "own1": torch.zeros(50),
            "step": 0,
            "shared": torch.zeros(3, dtype=torch.int64),
        }
        found = _read_with_torch(f"{tmp_path}/{step}", template)
        values = [found["own0"][0], found["own1"][0], found["step"], found["shared"][0]]
        assert values == [10 * step, 10 * step + 1, step, step]
    if ours:
        assert texts == ["saved", "saved"]
        found = _read_with_torch(f"{tmp_path}/other dtype", {"own1": torch.zeros(50, dtype=torch.int32)})
        assert found["own1"][0] == 7
    else:
        assert all("'own0'" in text or "'own1'" in text for text in texts)
        assert "torch.int32" in texts[0]
        assert not (tmp_path / "other dtype" / ".metadata").exists()


def _save_to_two_urls(url: str) -> None:
    mine = f"{url}-{dist.get_rank()}"
    with pytest.raises(ConfigError, match="same URL") as caught:
        dcpfs.save({"w": torch.ones(2), f"r{dist.get_rank()}": 1}, mine)
    assert caught.value.rank in (None, 0)
    assert not os.path.exists(mine)


def test_ranks_that_save_to_different_urls_are_refused(tmp_path: Path) -> None:
    run_ranks(_save_to_two_urls, 2, str(tmp_path / "c"))
