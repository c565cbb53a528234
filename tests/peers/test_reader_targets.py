"""Targets that torch's own planner hands to the reader and that can't be loaded into, or are replaced."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.testing._internal.two_tensor import TwoTensor

import dcpfs


def _freed() -> torch.Tensor:
    whole = torch.ones(20)
    view = whole[10:14]
    whole.untyped_storage().resize_(0)
    return view


def _pair() -> torch.Tensor:
    make: Any = TwoTensor
    pair: torch.Tensor = make(torch.ones(4), torch.ones(4))
    return pair


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (_freed, "memory has been freed"),
        (lambda: torch.zeros(4).to_sparse(), "layout torch.sparse_coo"),
        (_pair, "TwoTensor, a tensor subclass"),
        (lambda: torch.zeros(1).expand(4), "expanded"),
    ],
    ids=["freed", "sparse", "wrapper", "expanded"],
)
def test_a_target_without_plain_memory_is_named(
    tmp_path: Path, make: Any, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    dcpfs.save({"v": torch.ones(4), "w": torch.arange(4.0)}, tmp_path)
    state = {"v": torch.zeros(4), "w": make()}
    with pytest.raises(CheckpointException) as caught:
        dcp_load(state, storage_reader=dcpfs.FsspecStorageReader(tmp_path))
    assert word in str(caught.value) + caplog.text
    assert "'w'" in str(caught.value) + caplog.text
    assert state["v"].tolist() == [0] * 4


def test_a_tensor_that_a_plain_value_replaces_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dcpfs.save({"step": 3, "other": 4, "w": torch.arange(4.0)}, tmp_path)
    state = {"step": torch.zeros(()), "other": 0, "w": torch.zeros(4)}
    planner = DefaultLoadPlanner(allow_partial_load=True)
    with caplog.at_level(logging.WARNING, "dcpfs"):
        dcp_load(state, storage_reader=dcpfs.FsspecStorageReader(tmp_path), planner=planner)
    assert state["step"] == 3
    assert "other values in the checkpoint" in caplog.text
    assert "'step'" in caplog.text
    assert "'other'" not in caplog.text
