"""Steps that were moved to another place and linked back: not followed, and no one else's trouble."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import dcpfs


def _link_step(step: Path, archive: Path) -> None:
    step.rename(archive / step.name)
    step.symlink_to(archive / step.name)


def _link_key(step: Path, archive: Path) -> None:
    (step / "net").rename(archive / "net")
    (step / "net").symlink_to(archive / "net")


def _link_manifest(step: Path, archive: Path) -> None:
    (step / "manifest.json").rename(archive / "manifest.json")
    (step / "manifest.json").symlink_to(archive / "manifest.json")


links = pytest.mark.parametrize("link", [_link_step, _link_key, _link_manifest])


def _make(place: Path, steps: int, keep_last: int | None = None) -> dcpfs.CheckpointConfig:
    config = dcpfs.CheckpointConfig(save_dir=str(place), keep_last=keep_last)
    with dcpfs.DistributedCheckpointer(config) as checkpointer:
        for step in range(1, steps + 1):
            checkpointer.save_state(step, {"net": {"weight": torch.full((3,), float(step))}})
    return config


@links
def test_the_other_steps_load_and_a_warning_names_the_linked_one(
    link: Callable[[Path, Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, archive = tmp_path / "run", tmp_path / "archive"
    archive.mkdir()
    config = _make(run, 2)
    link(run / "iter_000000002", archive)
    state = {"weight": torch.zeros(3)}
    with dcpfs.DistributedCheckpointer(config) as checkpointer:
        for ask, expected in (
            (checkpointer.steps, [1]),
            (checkpointer.latest, 1),
            (lambda: checkpointer.load_state({"net": state}), 1),
        ):
            caplog.clear()
            with caplog.at_level(logging.WARNING, "dcpfs"):
                assert ask() == expected
            told = [text for text in caplog.messages if "iter_000000002" in text and "symbolic link" in text]
            assert len(told) == 1
    assert torch.equal(state["weight"], torch.ones(3))


@links
def test_a_linked_step_alone_is_no_start_from_scratch(link: Callable[[Path, Path], None], tmp_path: Path) -> None:
    run, archive = tmp_path / "run", tmp_path / "archive"
    archive.mkdir()
    config = _make(run, 1)
    link(run / "iter_000000001", archive)
    with dcpfs.DistributedCheckpointer(config) as checkpointer:
        assert checkpointer.steps() == []
        with pytest.raises(dcpfs.IncompleteCheckpointError, match=r"iter_000000001 .*symbolic link leads out"):
            checkpointer.load_state({"net": {"weight": torch.zeros(3)}})


def test_saving_goes_on_and_retention_leaves_the_archive_alone(tmp_path: Path) -> None:
    run, archive = tmp_path / "run", tmp_path / "archive"
    archive.mkdir()
    config = _make(run, 1, keep_last=1)
    _link_step(run / "iter_000000001", archive)
    kept = sorted(path.name for path in archive.rglob("*"))
    with dcpfs.DistributedCheckpointer(config) as checkpointer:
        for step in (2, 3):
            checkpointer.save_state(step, {"net": {"weight": torch.full((3,), float(step))}})
        assert checkpointer.steps() == [3]
    assert sorted(path.name for path in archive.rglob("*")) == kept
    assert (run / "iter_000000001").is_symlink()
