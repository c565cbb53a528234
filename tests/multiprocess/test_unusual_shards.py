"""Tensors whose parts are no plain boxes of the whole: saved exactly, or refused by name on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor.placement_types import _StridedShard

import dcpfs
from dcpfs.dcp.load_planner import LoadPlanner
from dcpfs.errors import KeyMismatchError, ReplicaMismatchError, UnsupportedValueError
from tests.multiprocess.gloo import run_ranks

WHOLE = torch.arange(16.0).reshape(8, 2)


def _place(local: torch.Tensor, mesh: DeviceMesh, *placements: Placement, whole: torch.Tensor = WHOLE) -> DTensor:
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def _partial_sums() -> DTensor:
    return _place(torch.zeros(8, 2), DeviceMesh("cpu", torch.arange(4)), Partial())


def _rows_apart() -> DTensor:
    """Rows 0, 1, 4, 5 on two ranks, and 2, 3, 6, 7 on two."""
    mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2))
    return _place(torch.zeros(4, 2), mesh, _StridedShard(0, split_factor=2), Replicate())


def _own_cut() -> DTensor:
    """Cut as nobody could tell from the placements: 5 rows on the first rank, 1 on the others."""
    rows = 5 if dist.get_rank() == 0 else 1
    return _place(torch.zeros(rows, 2), DeviceMesh("cpu", torch.arange(4)), Shard(0))


def _expanded() -> DTensor:
    return _place(torch.zeros(2).expand(2, 2), DeviceMesh("cpu", torch.arange(4)), Shard(0))


UNUSUAL: dict[str, tuple[Callable[[], DTensor], str]] = {
    "partial sums": (_partial_sums, "partial sums"),
    "rows apart": (_rows_apart, "rows that lie apart"),
    "own cut": (_own_cut, "to which its placements give"),
    "expanded": (_expanded, "share memory"),
}


def _load_into(url: str) -> dict[str, list[str]]:
    if dist.get_rank() == 0:
        dcpfs.save({"w": WHOLE, "n": 1}, url, process_group=dist.new_group([0]))
    else:
        dist.new_group([0])
    dist.barrier()
    return {kind: _try_to_load(url, kind) for kind in UNUSUAL}


def _try_to_load(url: str, kind: str) -> list[str]:
    target = UNUSUAL[kind][0]()
    texts = []
    for strict in (True, False):
        state: dict[str, object] = {"w": target, "n": 0}
        try:
            texts.append(dcpfs.load(state, url, strict=strict).mismatched["w"])
        except KeyMismatchError as error:
            texts.append(str(error))
    planner = LoadPlanner(strict=False)
    load({"w": target, "n": 0}, storage_reader=dcpfs.FsspecStorageReader(url), planner=planner)
    texts.append(planner.mismatched["w"])
    assert not target._local_tensor.any(), "nothing is written to a place that does not fit"
    return texts


def test_case_91_a_place_that_is_no_box_of_the_whole_is_a_mismatch(tmp_path: Path) -> None:
    for found in run_ranks(_load_into, 4, str(tmp_path / "c")):
        for kind, texts in found.items():
            assert len(texts) == 3
            assert all(UNUSUAL[kind][1] in text for text in texts)


def _save_from(url: str) -> dict[str, str]:
    texts = {}
    for kind in ("partial sums", "rows apart"):
        with pytest.raises(UnsupportedValueError) as caught:
            dcpfs.save({"w": UNUSUAL[kind][0]()}, url)
        texts[kind] = str(caught.value)
    return texts


def test_case_91_parts_that_are_no_boxes_are_refused_by_name(tmp_path: Path) -> None:
    for texts in run_ranks(_save_from, 4, str(tmp_path)):
        assert {kind: "'w'" in text and UNUSUAL[kind][1] in text for kind, text in texts.items()} == {
            "partial sums": True,
            "rows apart": True,
        }
    assert not list(tmp_path.iterdir())


def _wrapped(fill: float | None) -> tuple[DTensor, list[torch.Tensor]]:
    """Two columns of its own rows on each of two ranks, held apart, as torchrec holds the tables of an embedding."""
    first = 4 * dist.get_rank()
    rows = WHOLE[first : first + 4] if fill is None else torch.full((4, 2), fill)
    parts = [rows[:, :1].clone(), rows[:, 1:].clone()]
    local = LocalShardsWrapper(parts, [(first, 0), (first, 1)])
    return _place(local, DeviceMesh("cpu", torch.arange(2)), Shard(0)), parts


def _save_and_load_wrapped(url: str) -> bool:
    dcpfs.save({"w": _wrapped(None)[0], "n": 1}, url)
    target, parts = _wrapped(0.0)
    dcpfs.load({"w": target, "n": 0}, url)
    first = 4 * dist.get_rank()
    return torch.equal(torch.cat(parts, 1), WHOLE[first : first + 4])


def test_several_parts_within_one_local_tensor(tmp_path: Path) -> None:
    url = str(tmp_path / "c")
    assert run_ranks(_save_and_load_wrapped, 2, url) == [True, True]
    found = dcpfs.read(url, "w")["w"]
    assert isinstance(found, torch.Tensor)
    assert torch.equal(found, WHOLE)


def _save_finer_and_coarser(url: str) -> list[str]:
    meshes = DeviceMesh("cpu", [0, 1, 2, 3]), DeviceMesh("cpu", [4, 5])
    return [_try_to_save(url, meshes, rows) for rows in (4, 32768)]


def _try_to_save(url: str, meshes: tuple[DeviceMesh, DeviceMesh], rows: int) -> str:
    """Four ranks hold quarters of the columns, two others halves: at two places begin parts of two sizes."""
    rank = dist.get_rank()
    whole = torch.zeros(rows, 64)
    if rank < 4:
        mine = _place(torch.zeros(rows, 16), meshes[0], Shard(1), whole=whole)
        state = {"w": mine, f"own{rank}": torch.zeros(rows, 64)}  # so that the others have less to write
    else:
        state = {"w": _place(torch.zeros(rows, 32), meshes[1], Shard(1), whole=whole)}
    try:
        dcpfs.save(state, url)
    except ReplicaMismatchError as error:
        return str(error)
    return "saved"


def test_case_8_parts_that_begin_at_one_place_have_one_size(tmp_path: Path) -> None:
    """One entry would be written for both, by whichever rank has less to write."""
    for texts in run_ranks(_save_finer_and_coarser, 6, str(tmp_path)):
        assert all("'w'" in text and "rank 0 holds a part of shape" in text for text in texts)
    assert not list(tmp_path.iterdir())
