"""Ranks that share a key must mean the same value."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint.planner import WriteItem

from dcpfs.dcp.agreement import check_replicas, find_differing_values
from dcpfs.errors import ReplicaMismatchError
from dcpfs.torch_private import create_write_items


def _item(value: object) -> list[WriteItem]:
    return create_write_items("k", value)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (torch.ones(2), torch.ones(3), ["(2,)", "(3,)"]),
        (torch.ones(2), torch.ones(2, dtype=torch.int32), ["float32", "int32"]),
        (torch.ones(2), "text", ["float32", "no tensor"]),
    ],
)
def test_kind_dtype_and_shape_must_agree(first: object, second: object, words: list[str]) -> None:
    with pytest.raises(ReplicaMismatchError, match="'k'") as caught:
        check_replicas([_item(first), [], _item(second)])
    assert all(word in str(caught.value) for word in [*words, "rank 0", "rank 2"])


def test_equal_replicas_and_keys_of_one_rank_pass() -> None:
    check_replicas([_item(torch.ones(2)), _item(torch.zeros(2)), []])
    check_replicas([_item(torch.ones(2))])


def test_case_8_keys_with_values_of_one_rank_are_found() -> None:
    assert find_differing_values([{"a": 1, "b": 2}, {"a": 1, "b": 3}, {"c": 4}]) == ["b"]
