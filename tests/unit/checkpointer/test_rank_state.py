"""Rank files: plain pickles made in memory, tensors cut from their bases, decoded by the allow-list."""

from __future__ import annotations

import collections
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dcpfs.checkpointer.rank_state import RankResize, decode_rank_state, encode_rank_state
from dcpfs.config import Trust
from dcpfs.errors import CorruptCheckpointError, UnsupportedValueError, UntrustedDataError
from tests.unit.checkpointer.part_exchange import equal_states


def sample_state() -> dict[str, Any]:
    return {
        "position": 7,
        "nested": {"a": [1, 2.5, None, (True, b"x")], 3: {"set": {1, 2}}},
        "counts": collections.Counter("aab"),
        "generator": torch.Generator().get_state(),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 2),
        "bf16": torch.ones(2, dtype=torch.bfloat16),
        "bool": torch.tensor([True, False]),
        "parameter": nn.Parameter(torch.ones(2)),
        "random": np.random.default_rng(1).bit_generator.state,
        "path": Path("a/b"),
    }


def test_a_state_comes_back_and_plain_pickle_reads_it_too() -> None:
    state = sample_state()
    data = encode_rank_state(state, key="dataloader", rank=0)
    assert equal_states(decode_rank_state(data), state)
    assert equal_states(pickle.loads(data), state)
    assert equal_states(decode_rank_state(pickle.dumps(state, protocol=2)), state), "as another tool writes it"
    assert equal_states(decode_rank_state(data, trust=Trust.PICKLE), state)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.uint16,
        torch.uint64,
        torch.float8_e4m3fn,
        torch.float8_e8m0fnu,
        torch.complex64,
        torch.complex32,
        torch.int8,
    ],
    ids=str,
)
def test_tensors_of_every_dtype_come_back(dtype: torch.dtype) -> None:
    tensor = torch.arange(64, dtype=torch.uint8).view(dtype)
    back = decode_rank_state(encode_rank_state([tensor, tensor[:2]], key="k", rank=0))
    assert isinstance(back, list)
    assert back[0].dtype is dtype
    assert torch.equal(back[0].view(torch.uint8), tensor.view(torch.uint8))
    assert torch.equal(back[1].view(torch.uint8), tensor[:2].view(torch.uint8))


def test_a_view_does_not_drag_its_base_along() -> None:
    base = torch.arange(1_000_000.0)
    state = {
        "slice": base[5:8],
        "strided": base.view(1000, 1000)[::500, 3],
        "transposed": torch.arange(6).view(2, 3).T,
        "parameter": nn.Parameter(base[:2]),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "whole": torch.arange(3),
    }
    data = encode_rank_state(state, key="dataloader", rank=0)
    assert len(data) < 8000
    back = decode_rank_state(data)
    assert isinstance(back, dict)
    back["conjugate"] = back["conjugate"].resolve_conj()
    assert equal_states(back, {**state, "conjugate": state["conjugate"].resolve_conj()})
    assert isinstance(back["parameter"], nn.Parameter)


class Runner:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("should-not-exist"),)


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (lambda: 1, "it can't be pickled"),
        ({"loader": Runner()}, "a load would refuse it"),
        ({"mesh": torch.ones(2).to_sparse()}, "a load would refuse it"),
        ({"meta": torch.ones(2, device="meta")}, "a load would refuse it"),
        (nn.Linear(1, 1), "a load would refuse it: .* torch.nn.modules.linear.Linear"),
    ],
    ids=["lambda", "code", "sparse", "meta", "module"],
)
def test_case_109_what_can_not_be_kept_is_refused_before_anything_is_written(state: object, text: str) -> None:
    with pytest.raises(UnsupportedValueError, match=rf"saving 'dataloader' of rank 3: {text}") as caught:
        encode_rank_state(state, key="dataloader", rank=3)
    assert caught.value.rank == 3


def test_case_109_with_trust_everything_that_pickles_is_kept() -> None:
    data = encode_rank_state(nn.Linear(1, 1), key="dataloader", rank=0, trust=Trust.PICKLE)
    assert isinstance(decode_rank_state(data, trust=Trust.PICKLE), nn.Linear)
    with pytest.raises(UntrustedDataError, match="Linear"):
        decode_rank_state(data)


def test_case_110_code_in_a_rank_file_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UntrustedDataError, match=r"reading s3://b/iter_1/rank_0\.pkl: its pickle names"):
        decode_rank_state(pickle.dumps({"x": Runner()}), url="s3://b/iter_1/rank_0.pkl")
    assert not list(tmp_path.iterdir())


def evil_storage(payload: object) -> bytes:
    """A pickled tensor whose memory is another pickle."""

    class Memory:
        def __reduce__(self) -> Any:
            return torch.storage._load_from_bytes, (payload,)  # as tensors pickle

    return pickle.dumps(Memory())


def test_case_110_a_tensors_memory_is_no_way_around_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    whole: Any = torch.ones(4).untyped_storage()
    inner = whole.__reduce__()[1][0]
    assert isinstance(decode_rank_state(evil_storage(inner)), torch.storage.TypedStorage)
    for bad in (pickle.dumps(Runner()), b"", 5, inner[:100], pickle.dumps([1])):
        with pytest.raises((UntrustedDataError, CorruptCheckpointError)):
            decode_rank_state(evil_storage(bad))
    for bad in (inner[:-1], inner + b"x"):
        with pytest.raises(CorruptCheckpointError, match="bytes for 16 elements"):
            decode_rank_state(evil_storage(bad))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("cut", [0, 1, 30, -1])
def test_a_damaged_file_is_called_that(cut: int) -> None:
    data = encode_rank_state(sample_state(), key="dataloader", rank=0)
    with pytest.raises(CorruptCheckpointError, match="damaged"):
        decode_rank_state(data[:cut])


def test_a_resize_says_who_loads_what() -> None:
    assert (RankResize(1, 2, 4).rank, RankResize(1, 2, 4).world_size, RankResize(1, 2, 4).saved_world_size) == (1, 2, 4)
