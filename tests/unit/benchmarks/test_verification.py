"""A checkpoint that lacks rows, or has some twice, is not the one that was saved."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from benchmarks.place import open_place
from benchmarks.settings import Setting, Target
from benchmarks.verification import check_saved
from benchmarks.workloads import TensorSpec, build

SPEC = TensorSpec("weight", torch.float32, (8, 3), 4)


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Target]:
    with open_place(Setting.DISK, tmp_path, 0) as place:
        yield place


def write(target: Target, rows: list[tuple[int, int]]) -> None:
    """A checkpoint in torch's format with these runs of rows of the tensor, each an entry."""
    whole = build((SPEC,), None)["weight"]
    chunks = [ChunkStorageMetadata(torch.Size([start, 0]), torch.Size([stop - start, 3])) for start, stop in rows]
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import TensorProperties

    stored, at = {}, 0
    with (Path(target.path) / "data").open("wb") as stream:
        for (start, stop), chunk in zip(rows, chunks, strict=True):
            torch.save(whole[start:stop].clone(), stream)
            stored[MetadataIndex("weight", chunk.offsets)] = _StorageInfo("data", at, stream.tell() - at)
            at = stream.tell()
    described = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(SPEC.shape), chunks)
    metadata = Metadata({"weight": described}, storage_data=stored)
    (Path(target.path) / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([(0, 8)], None),
        ([(0, 3), (3, 8)], None),
        ([(3, 8), (0, 3)], None),
        ([(0, 3)], "3 rows stored instead of 8"),
        ([(0, 3), (4, 8)], "row 3 is not stored exactly once"),
        ([(0, 4), (3, 8)], "row 3 is not stored exactly once"),
        ([(0, 4), (0, 4)], "row 0 is not stored exactly once"),
    ],
)
def test_every_row_is_stored_once(target: Target, rows: list[tuple[int, int]], said: str | None) -> None:
    write(target, rows)
    found = check_saved(target, (SPEC,))
    assert found is None if said is None else said in (found or "")


def test_rows_under_the_name_of_others_are_found(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    save: Callable[..., None] = torch.save
    monkeypatch.setattr(torch, "save", lambda rows, stream: save(rows.flip(0).clone(), stream))
    write(target, [(0, 3), (3, 8)])
    assert "wrong bytes" in (check_saved(target, (SPEC,)) or "")
