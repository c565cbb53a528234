"""Two saves at one URL, few descriptors, and metadata that promises what isn't there."""

from __future__ import annotations

import pickle
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import dcpfs
from dcpfs.errors import CheckpointExistsError, CorruptCheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

_STATE = {"w": torch.arange(24.0).reshape(6, 4), "n": [1, 2]}


def test_case_2_of_two_saves_at_once_one_is_told(tmp_path: Path) -> None:
    url = str(tmp_path / "c")
    publish = dcpfs.FsspecStorageWriter.publish

    def publish_second(self: Any, *args: Any) -> Any:
        with mock.patch.object(dcpfs.FsspecStorageWriter, "publish", publish):
            dcpfs.save(_STATE, url)
        return publish(self, *args)

    with (
        mock.patch.object(dcpfs.FsspecStorageWriter, "publish", publish_second),
        pytest.raises(CheckpointExistsError, match="another save"),
    ):
        dcpfs.save(_STATE, url)
    assert torch.equal(dcpfs.read(url)["w"], _STATE["w"])  # type: ignore[arg-type]  # it is a tensor


_FEW_DESCRIPTORS = """
import resource, sys, torch, dcpfs
import torch.distributed.checkpoint
dcpfs.save, dcpfs.load
state = {f"k{n}": torch.full((200_000,), float(n)) for n in range(120)}
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
dcpfs.save(state, sys.argv[1], transfer=dcpfs.TransferConfig(file_bytes=1 << 20))
found = {key: torch.zeros(200_000) for key in state}
dcpfs.load(found, sys.argv[1])
assert all(torch.equal(state[key], found[key]) for key in state)
"""


def test_many_files_need_few_descriptors(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _FEW_DESCRIPTORS, str(tmp_path / "c")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert 1 < len(list((tmp_path / "c").glob("*.distcp"))) <= 16


def _edit_metadata(folder: Path, change: Callable[[Any], None]) -> None:
    file = folder / ".metadata"
    metadata: Metadata = pickle.loads(file.read_bytes())
    change(metadata.state_dict_metadata["w"])
    file.write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("planner", ["own", "torch"])
def test_a_tensor_without_chunks_is_damage_and_no_load_of_nothing(tmp_path: Path, planner: str) -> None:
    dcp_save(_STATE, storage_writer=FileSystemWriter(tmp_path))
    _edit_metadata(tmp_path, lambda record: record.chunks.clear())
    target = {"w": torch.zeros(6, 4), "n": 0}
    with pytest.raises(CheckpointException, match="no data for 24 elements of key 'w'"):
        dcp_load(
            target,
            storage_reader=dcpfs.FsspecStorageReader(tmp_path),
            planner=dcpfs.LoadPlanner() if planner == "own" else None,
        )
    with pytest.raises(CorruptCheckpointError):
        dcpfs.load({"w": torch.zeros(6, 4), "n": 0}, tmp_path)


def test_no_memory_is_asked_for_what_the_entries_cannot_hold(tmp_path: Path) -> None:
    dcp_save(_STATE, storage_writer=FileSystemWriter(tmp_path))

    def grow(record: Any) -> None:
        record.size = record.chunks[0].sizes = torch.Size([1 << 40, 1 << 10])

    _edit_metadata(tmp_path, grow)
    with pytest.raises(CorruptCheckpointError, match="promises 4503599627370496 bytes"):
        dcpfs.read(tmp_path)


@pytest.mark.parametrize("length_bytes", [1 << 33, 1 << 45, (1 << 62) - 4096])
def test_no_memory_is_asked_for_a_value_that_is_larger_than_its_file(tmp_path: Path, length_bytes: int) -> None:
    dcp_save(_STATE, storage_writer=FileSystemWriter(tmp_path))
    file = tmp_path / ".metadata"
    metadata: Metadata = pickle.loads(file.read_bytes())
    for index, info in metadata.storage_data.items():
        if index.fqn == "n":
            info.length = length_bytes
    file.write_bytes(pickle.dumps(metadata))
    tracemalloc.start()
    try:
        with pytest.raises(CorruptCheckpointError, match=r"only .* bytes that the metadata lists"):
            dcpfs.read(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
