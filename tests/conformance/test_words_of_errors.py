"""Errors about what stands in a checkpoint say which checkpoint, and what stands there instead."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import dcpfs
from dcpfs.checkpointer.manifest import decode_manifest


def _edit(folder: Path, change: Callable[[Metadata], None]) -> None:
    """Save with torch, and change what its metadata says."""
    dcp_save({"weight": torch.ones(4, 2)}, storage_writer=FileSystemWriter(str(folder)), no_dist=True)
    file = folder / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))


def _drop_chunks(metadata: Metadata) -> None:
    record = metadata.state_dict_metadata["weight"]
    assert not isinstance(record, bytes)
    record.__dict__["chunks"] = []


def _leave(metadata: Metadata) -> None:
    for info in metadata.storage_data.values():
        info.relative_path = "../other/__0_0.distcp"


def _load(folder: Path) -> None:
    dcpfs.load({"weight": torch.zeros(4, 2)}, str(folder))


def _read(folder: Path) -> None:
    dcpfs.read(str(folder), ["weight"])


@pytest.mark.parametrize(
    ("change", "act", "text"),
    [
        (_drop_chunks, _load, "no data for 8 elements of key 'weight'"),
        (_drop_chunks, _read, "lists entries of 0"),
        (_leave, _load, "would leave the checkpoint"),
        (_leave, _read, "would leave the checkpoint"),
    ],
)
def test_coverage_and_names_say_where(
    change: Callable[[Metadata], None], act: Callable[[Path], None], text: str, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    _edit(folder, change)
    with pytest.raises(dcpfs.CheckpointError) as caught:
        act(folder)
    told = caught.value.message
    assert text in told
    assert str(folder) in told


@pytest.mark.parametrize("page", [b"<!DOCTYPE html><title>Log in</title>", b'{"error": "denied"}'])
def test_a_page_in_the_place_of_metadata_is_said_to_be_none(page: bytes, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / ".metadata").write_bytes(page)
    with pytest.raises(dcpfs.CorruptCheckpointError, match="is no pickle but begins with") as caught:
        _load(folder)
    assert str(folder) in caught.value.message
    assert "KeyError" not in caught.value.message


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"[1, 2]", "it is a list, not an object"),
        (b'"text"', "it is a str, not an object"),
        (b'{"layers": 3}', "it says no schema"),
    ],
)
def test_json_of_another_kind_is_no_manifest(data: bytes, text: str) -> None:
    with pytest.raises(dcpfs.CorruptCheckpointError, match=text) as caught:
        decode_manifest(data, url="s3://bucket/iter_000000001")
    assert "s3://bucket/iter_000000001" in caught.value.message


def test_a_world_of_no_ranks_is_refused(tmp_path: Path) -> None:
    with dcpfs.DistributedCheckpointer(dcpfs.CheckpointConfig(save_dir=str(tmp_path))) as checkpointer:
        checkpointer.save_state(1, {"net": {"weight": torch.ones(3)}})
    record = json.loads((tmp_path / "iter_000000001" / "manifest.json").read_bytes())
    decode_manifest(json.dumps(record).encode(), url="here")
    record["world_size"] = 0
    with pytest.raises(dcpfs.CorruptCheckpointError, match="a world size of 0"):
        decode_manifest(json.dumps(record).encode(), url="here")


def test_a_name_that_leaves_a_step_names_the_step(tmp_path: Path) -> None:
    with dcpfs.DistributedCheckpointer(dcpfs.CheckpointConfig(save_dir=str(tmp_path))) as checkpointer:
        checkpointer.save_state(1, {"net": {"weight": torch.ones(3)}})
    text = (tmp_path / "iter_000000001" / "manifest.json").read_text().replace('"net/.metadata"', '"../x/.metadata"')
    with pytest.raises(dcpfs.UntrustedDataError, match=r"would leave .* \(in the manifest of here\)"):
        decode_manifest(text.encode(), url="here")
