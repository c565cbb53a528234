"""Ranks load together: they share what they read, and fail together with the cause."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard as Shard1
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import dcpfs
from dcpfs.dcp import replicas
from dcpfs.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    KeyMismatchError,
    RankError,
)
from dcpfs.storage.local_store import LocalStore
from tests.multiprocess.gloo import run_ranks, try_ranks


def _rows(value: torch.Tensor) -> DTensor:
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()))
    return distribute_tensor(value, mesh, [Shard(0)])


def _load_nothing(url: str) -> None:
    dcpfs.load({"w": torch.zeros(2)}, url)


def test_case_101_103_all_ranks_say_that_there_is_no_checkpoint(tmp_path: Path) -> None:
    for outcome in try_ranks(_load_nothing, 3, str(tmp_path / "nowhere")):
        assert isinstance(outcome.error, CheckpointNotFoundError)
        assert "nowhere" in outcome.error_text
        assert outcome.error.rank in (None, 0)


def _load_with_a_bad_argument(url: str, argument: str) -> list[float]:
    dcpfs.save({"w": torch.ones(2)}, url)
    bad = dist.get_rank() == 1
    target = {"w": torch.zeros(2)}
    state: Any = [target] if bad and argument == "state" else target
    where = "" if bad and argument == "url" else url
    cast = "all" if bad and argument == "allow_cast" else "never"
    with pytest.raises(ConfigError) as caught:
        dcpfs.load(state, where, allow_cast=cast)
    assert caught.value.rank in (None, 1)
    values: list[float] = target["w"].tolist()
    return values


@pytest.mark.parametrize("argument", ["url", "allow_cast", "state"])
def test_case_101_an_argument_that_one_rank_has_wrong_ends_the_load_on_all(tmp_path: Path, argument: str) -> None:
    outcomes = run_ranks(_load_with_a_bad_argument, 2, str(tmp_path / "c"), argument)
    assert outcomes == [[0, 0]] * 2


def _load_with_two_minds(url: str) -> list[float]:
    dcpfs.save({"w": torch.ones(2), "v": torch.ones(2)}, url)
    rank = dist.get_rank()
    target = {"w": torch.zeros(2)}
    report = dcpfs.load(target, url, strict=rank == 1, replicas="each" if rank == 1 else "broadcast")
    assert report.unexpected == ("v",)
    values: list[float] = target["w"].tolist()
    return values


def test_case_101_the_coordinators_strictness_and_way_of_reading_count(tmp_path: Path) -> None:
    assert run_ranks(_load_with_two_minds, 2, str(tmp_path / "c")) == [[1, 1]] * 2


def _mismatch_on_one(url: str) -> list[float]:
    dcpfs.save({"a": torch.ones(2), "b": torch.ones(2)}, url)
    size = 3 if dist.get_rank() == 1 else 2
    target = {"a": torch.zeros(2), "b": torch.zeros(size)}
    with pytest.raises(KeyMismatchError, match=r"shape \(3,\) in the state") as caught:
        dcpfs.load(target, url)
    assert set(caught.value.mismatched) == {"b"}
    values: list[float] = target["a"].tolist()
    return values


def test_case_93_one_ranks_mismatch_stops_all_before_the_first_copy(tmp_path: Path) -> None:
    assert run_ranks(_mismatch_on_one, 3, str(tmp_path / "c")) == [[0, 0]] * 3


def _pipeline(url: str) -> list[float]:
    """Each rank has another part of the model; together they have all of it."""
    rank = dist.get_rank()
    dcpfs.save({f"layer{rank}": torch.full((2,), float(rank)), "step": 4}, url)
    target: dict[str, Any] = {f"layer{rank}": torch.zeros(2), "step": 0}
    report = dcpfs.load(target, url)
    assert report.unexpected == ()
    assert target["step"] == 4
    with pytest.raises(KeyMismatchError) as caught:
        dcpfs.load({"step": 0}, url)
    assert set(caught.value.unexpected) == {"layer0", "layer1", "layer2"}
    values: list[float] = target[f"layer{rank}"].tolist()
    return values


def test_stages_of_a_pipeline_load_strictly(tmp_path: Path) -> None:
    assert run_ranks(_pipeline, 3, str(tmp_path / "c")) == [[0, 0], [1, 1], [2, 2]]


def _damage_one(url: str, how: str) -> str:
    """The file of rank 1 is damaged; rank 0 does not read it."""
    dcpfs.save({"w": _rows(torch.arange(4000.0))}, url)
    file = Path(url) / "__1_0.distcp"
    if dist.get_rank() == 0:
        if how == "missing":
            file.unlink()
        else:
            data = bytearray(file.read_bytes())
            at = data.index(torch.tensor([2500.0]).numpy().tobytes())
            data[at] ^= 1
            file.write_bytes(data)
    dist.barrier()
    target = _rows(torch.zeros(4000))
    with pytest.raises((IncompleteCheckpointError, CorruptCheckpointError), match=r"__1_0\.distcp") as caught:
        dcpfs.load({"w": target}, url)
    return type(caught.value).__name__


def test_case_101_one_ranks_damage_is_everyones_error(tmp_path: Path) -> None:
    assert run_ranks(_damage_one, 2, str(tmp_path / "a"), "missing") == ["IncompleteCheckpointError"] * 2
    assert run_ranks(_damage_one, 2, str(tmp_path / "b"), "flipped") == ["CorruptCheckpointError"] * 2


class _UnpicklableError(RuntimeError):
    def __init__(self) -> None:
        super().__init__("no way to send this")
        self.lock = threading.Lock()


class _Picky:
    """Refuses its state on rank 1, with an error that can't be pickled."""

    def state_dict(self) -> dict[str, Any]:
        return {"x": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if dist.get_rank() == 1:
            raise _UnpicklableError


def _refuse_state(url: str) -> str:
    dcpfs.save({"part": _Picky()}, url)
    with pytest.raises(RuntimeError, match="no way to send this") as caught:
        dcpfs.load({"part": _Picky()}, url)
    if isinstance(caught.value, RankError):
        assert caught.value.rank == 1
        assert "load_state_dict" in (caught.value.cause_text or "")
    return type(caught.value).__name__


def test_case_102_an_error_that_cannot_be_pickled_reaches_all(tmp_path: Path) -> None:
    names = run_ranks(_refuse_state, 3, str(tmp_path / "c"))
    assert names == ["RankError", "_UnpicklableError", "RankError"]


def _count_metadata_reads(url: str) -> int:
    dcpfs.save({"w": torch.ones(2)}, url)
    reads = []
    original: Callable[[LocalStore, str], bytes] = LocalStore.get

    def count(store: LocalStore, path: str) -> bytes:
        reads.append(path)
        return original(store, path)

    with mock.patch.object(LocalStore, "get", count):
        dcpfs.load({"w": torch.zeros(2)}, url)
    return reads.count(".metadata")


def test_the_metadata_is_read_once_in_all(tmp_path: Path) -> None:
    assert run_ranks(_count_metadata_reads, 3, str(tmp_path / "c")) == [1, 0, 0]


def _share(url: str, way: str) -> tuple[int, int]:
    """8 MB that every rank needs, in targets of several kinds."""
    state = {f"k{n}": torch.arange(250_000.0) + n for n in range(7)} | {"small": torch.ones(3)}
    state["rows"] = torch.arange(250_000.0).reshape(500, 500)
    dcpfs.save(state, url)
    target: dict[str, Any] = {key: torch.zeros_like(value) for key, value in state.items()}
    target["k0"] = torch.zeros(250_000, 2)[:, 1]
    target["k1"] = torch.zeros(250_000, dtype=torch.float64)
    target["rows"] = torch.zeros(500, 500).t()
    config = dcpfs.TransferConfig(budget_bytes=1 << 20)
    report = dcpfs.load(target, url, replicas=way, allow_cast="widen", transfer=config)
    for key, value in state.items():
        assert torch.equal(target[key].float(), value), key
    return report.moved_bytes, sum(value.nbytes for value in state.values())


def test_case_72_replicas_are_read_once(tmp_path: Path) -> None:
    each = run_ranks(_share, 4, str(tmp_path / "a"), "each")
    shared = run_ranks(_share, 4, str(tmp_path / "b"), "broadcast")
    total = each[0][1]
    cast_bytes = 1_000_000  # one tensor is cast on the way, which each rank does by itself
    assert sum(moved for moved, _ in each) >= 4 * total
    assert sum(moved for moved, _ in shared) <= 1.05 * (total + 3 * cast_bytes)
    assert max(moved for moved, _ in shared) <= 0.5 * total


def _share_with_a_failure(url: str, way: str) -> None:
    state = {f"k{n}": torch.arange(1000.0) + n for n in range(8)}
    dcpfs.save(state, url)
    dist.barrier()
    target = {key: torch.zeros_like(value) for key, value in state.items()}
    if way == "target":
        target = {key: torch.zeros(1000, 2)[:, 1] for key in state}  # not flat: what arrives is copied into place
    if way == "damage":
        data_file = Path(url) / "__0_0.distcp"
        if dist.get_rank() == 1:
            data = data_file.read_bytes()
            at = data.index(state["k5"].numpy().tobytes())
            data_file.write_bytes(data[: at + 5] + b"\xff" + data[at + 6 :])
        dist.barrier()
    place = {"read": (LocalStore, "read_into"), "send": (replicas, "_pack"), "receive": (replicas, "_unpack")}
    place["target"] = (replicas, "copy_exact")
    failing = contextlib.nullcontext()
    if way in place and dist.get_rank() == 1:
        failing = mock.patch.object(*place[way], side_effect=OSError(5, "it broke"))  # type: ignore[assignment]  # both
    with failing:
        dcpfs.load(target, url, replicas="broadcast")


@pytest.mark.parametrize("way", ["read", "damage", "send", "receive", "target"])
def test_case_101_a_rank_that_fails_while_replicas_are_shared_ends_the_load_on_all(tmp_path: Path, way: str) -> None:
    outcomes = try_ranks(_share_with_a_failure, 2, str(tmp_path / "c"), way)
    for outcome in outcomes:
        assert outcome.failed
        assert outcome.error_type != "TimeoutError", outcome.traceback_text
        if way == "damage":
            assert isinstance(outcome.error, CorruptCheckpointError)
            assert "k5" in outcome.error_text
        else:
            assert "it broke" in outcome.error_text


def _share_with_other_budgets(url: str) -> bool:
    value = torch.arange(1_000_000.0)
    dcpfs.save({"w": value}, url)
    target = torch.zeros(1_000_000)
    config = dcpfs.TransferConfig(budget_bytes=(1 + dist.get_rank()) << 20)
    dcpfs.load({"w": target}, url, replicas="broadcast", transfer=config)
    return torch.equal(target, value)


def test_case_72_ranks_with_different_budgets_share_replicas(tmp_path: Path) -> None:
    assert run_ranks(_share_with_other_budgets, 2, str(tmp_path / "c")) == [True] * 2


def _load_own_files(url: str) -> list[float]:
    """Two ranks wrote a file of metadata each, without collectives; all of them are read together."""
    dcpfs.save({"w": _rows(torch.arange(6.0))}, url)
    if dist.get_rank() == 0:
        data = (Path(url) / ".metadata").read_bytes()
        for rank in range(2):
            (Path(url) / f"__{rank}.metadata").write_bytes(data)
        (Path(url) / ".metadata").unlink()
    dist.barrier()
    target = _rows(torch.zeros(6))
    dcpfs.load({"w": target}, url)
    values: list[float] = target.full_tensor().tolist()
    return values


def test_metadata_by_rank_is_joined(tmp_path: Path) -> None:
    assert run_ranks(_load_own_files, 2, str(tmp_path / "c")) == [[0, 1, 2, 3, 4, 5]] * 2


def _load_sharded_tensor(url: str) -> list[list[float]]:
    """FSDP1's ShardedTensor, saved with rows here, loaded with rows there; one rank holds two shards of the second."""
    rank = dist.get_rank()
    value = torch.arange(24.0).reshape(8, 3)
    saved = _sharded_tensor([(rank * 4, 4)], value)
    dcpfs.save({"w": saved, "plain": torch.ones(2)}, url)
    shards = [[(0, 1), (6, 2)], [(1, 5)]][rank]
    target = _sharded_tensor(shards, torch.zeros(8, 3))
    dcpfs.load({"w": target, "plain": torch.zeros(2)}, url)
    for shard, (start, count) in zip(target.local_shards(), shards, strict=True):
        assert torch.equal(shard.tensor, value[start : start + count])
    return [shard.tensor[0].tolist() for shard in target.local_shards()]


def _sharded_tensor(mine: list[tuple[int, int]], value: torch.Tensor) -> ShardedTensor:
    rank = dist.get_rank()
    shards = [
        Shard1.from_tensor_and_offsets(value[start : start + count].clone(), [start, 0], rank) for start, count in mine
    ]
    return init_from_local_shards(shards, *value.shape)


def test_sharded_tensors_of_fsdp1(tmp_path: Path) -> None:
    values = run_ranks(_load_sharded_tensor, 2, str(tmp_path / "c"))
    assert values == [[[0, 1, 2], [18, 19, 20]], [[3, 4, 5]]]
