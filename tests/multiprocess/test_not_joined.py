"""A process that a launcher started as one of several, and that made no process group, is told so when it saves."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import dcpfs


def _save(place: Path) -> None:
    dcpfs.save({"weight": torch.ones(2)}, str(place / "checkpoint"))


def _open_checkpointer(place: Path) -> None:
    dcpfs.DistributedCheckpointer(dcpfs.CheckpointConfig(save_dir=str(place / "run"))).close()


def _only_load(place: Path) -> None:
    dcpfs.DistributedCheckpointer(dcpfs.CheckpointConfig(save_dir=str(place / "run")), access="read_only").close()


@pytest.mark.parametrize(
    ("act", "world_size", "expected"),
    [
        (_save, "2", 1),
        (_open_checkpointer, "2", 1),
        (_only_load, "2", 0),
        (_save, "1", 0),
        (_open_checkpointer, None, 0),
        (_save, "many", 0),
    ],
)
def test_one_warning_where_the_environment_names_more_ranks(
    act: Callable[[Path], None],
    world_size: str | None,
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("RANK", "1")
    if world_size is None:
        monkeypatch.delenv("WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("WORLD_SIZE", world_size)
    with caplog.at_level(logging.WARNING, "dcpfs"):
        act(tmp_path)
    told = [record.getMessage() for record in caplog.records if "init_process_group" in record.getMessage()]
    assert len(told) == expected
    assert all("RANK=1 and WORLD_SIZE=2" in text for text in told)
