"""A flipped bit that the archive around a checkpoint finds by itself is damage of the checkpoint."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch

import dcpfs


def _flip(archive: Path, near: bytes) -> None:
    data = bytearray(archive.read_bytes())
    at = data.find(near)
    assert at >= 0
    data[at + len(near) // 2] ^= 1
    archive.write_bytes(data)


def _zip(folder: Path, archive: Path, kind: int) -> None:
    with zipfile.ZipFile(archive, "w", kind) as zipped:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                zipped.write(file, file.relative_to(folder))


@pytest.mark.parametrize("kind", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_damage_of_a_tensor_names_file_and_key(kind: int, tmp_path: Path) -> None:
    archive = tmp_path / "archive.zip"
    dcpfs.save({"weight": torch.arange(5000.0)}, str(tmp_path / "saved"))
    _zip(tmp_path / "saved", archive, kind)
    with zipfile.ZipFile(archive) as zipped:
        info = zipped.getinfo("__0_0.distcp")
        start = info.header_offset + 30 + len(info.filename)
        middle = archive.read_bytes()[start : start + info.compress_size][info.compress_size // 2 :][:64]
    _flip(archive, middle)
    with pytest.raises(dcpfs.CorruptCheckpointError, match="loading key 'weight'") as caught:
        dcpfs.load({"weight": torch.zeros(5000)}, f"zip://::{archive}")
    assert (caught.value.file, caught.value.key) == ("__0_0.distcp", "weight")


def test_damage_of_the_metadata_names_that(tmp_path: Path) -> None:
    archive = tmp_path / "archive.zip"
    dcpfs.save({"weight": torch.arange(10.0)}, str(tmp_path / "saved"))
    _zip(tmp_path / "saved", archive, zipfile.ZIP_STORED)
    _flip(archive, (tmp_path / "saved" / ".metadata").read_bytes())
    with pytest.raises(dcpfs.CorruptCheckpointError, match="the store finds damage") as caught:
        dcpfs.load({"weight": torch.zeros(10)}, f"zip://::{archive}")
    assert caught.value.file == ".metadata"


def test_a_step_with_a_damaged_manifest_is_passed_over(tmp_path: Path) -> None:
    archive, run = tmp_path / "archive.zip", tmp_path / "run"
    with dcpfs.DistributedCheckpointer(dcpfs.CheckpointConfig(save_dir=str(run))) as checkpointer:
        for step in (1, 2):
            checkpointer.save_state(step, {"net": {"weight": torch.full((3,), float(step))}})
    _zip(run, archive, zipfile.ZIP_STORED)
    _flip(archive, (run / "iter_000000002" / "manifest.json").read_bytes())
    state = {"weight": torch.zeros(3)}
    config = dcpfs.CheckpointConfig(save_dir=f"zip://::{archive}")
    with dcpfs.DistributedCheckpointer(config, access="read_only") as checkpointer:
        assert checkpointer.steps() == [1]
        assert checkpointer.load_state({"net": state}) == 1
    assert torch.equal(state["weight"], torch.ones(3))


@pytest.mark.parametrize("damaged", ["net/__0_0.distcp", "net/.metadata", "dataloader/rank_0.pkl"])
@pytest.mark.parametrize("verify", [False, True])
def test_a_damaged_file_of_a_step_leads_to_the_one_before(damaged: str, verify: bool, tmp_path: Path) -> None:
    archive, run = tmp_path / "archive.zip", tmp_path / "run"
    with dcpfs.DistributedCheckpointer(dcpfs.CheckpointConfig(save_dir=str(run))) as checkpointer:
        for step in (1, 2):
            parts = {"net": {"weight": torch.full((3,), float(step))}, "dataloader": {"at": step}}
            checkpointer.save_state(step, parts)
    _zip(run, archive, zipfile.ZIP_STORED)
    _flip(archive, (run / "iter_000000002" / damaged).read_bytes())
    state, place = {"weight": torch.zeros(3)}, {"at": 0}
    config = dcpfs.CheckpointConfig(save_dir=f"zip://::{archive}", verify_on_resume=verify)
    with dcpfs.DistributedCheckpointer(config, access="read_only") as checkpointer:
        assert checkpointer.load_state({"net": state, "dataloader": place}) == 1
    assert torch.equal(state["weight"], torch.ones(3))
    assert place == {"at": 1}
