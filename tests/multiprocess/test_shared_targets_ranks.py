"""Keys that share memory, where what several ranks read is read once and passed on."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import dcpfs
from tests.multiprocess.gloo import run_ranks, try_ranks


def _load_tied(url: str) -> list[float]:
    """Rank 1 has tied weights, the others don't."""
    head = torch.zeros(300)
    embedding = head if dist.get_rank() == 1 else torch.zeros(300)
    dcpfs.load({"embedding": embedding, "head": head, "other": torch.zeros(300)}, url, replicas="broadcast")
    return [float(embedding.sum()), float(head.sum())]


def _save(writer: str, folder: Path, head: float) -> str:
    url = str(folder / "checkpoint")
    state = {"embedding": torch.ones(300), "head": torch.full((300,), head), "other": torch.ones(300)}
    if writer == "torch":
        dcp_save(dict(state), storage_writer=FileSystemWriter(url), no_dist=True)
    else:
        dcpfs.save(state, url)
    return url


@pytest.mark.parametrize("writer", ["dcpfs", "torch"])
def test_two_values_fail_on_all_ranks_also_where_one_has_them_tied(writer: str, tmp_path: Path) -> None:
    url = _save(writer, tmp_path, 2.0)
    for outcome in try_ranks(_load_tied, 2, url):
        assert isinstance(outcome.error, dcpfs.KeyMismatchError)
        assert "'embedding' and 'head' share memory" in outcome.error_text
        pickle.dumps(outcome.error)


@pytest.mark.parametrize("writer", ["dcpfs", "torch"])
def test_equal_values_load_on_all_ranks(writer: str, tmp_path: Path) -> None:
    url = _save(writer, tmp_path, 1.0)
    assert run_ranks(_load_tied, 2, url) == [[300.0, 300.0], [300.0, 300.0]]
