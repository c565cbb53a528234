"""Values are put only where the state can be changed, and that is known before anything else is."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

import pytest
import torch

import dcpfs
from dcpfs.errors import KeyMismatchError


@pytest.mark.parametrize("strict", [True, False])
def test_an_immutable_mapping_is_refused_before_the_first_copy(tmp_path: Path, strict: bool) -> None:
    dcpfs.save({"w": torch.ones(2), "a": {"x": 1}}, tmp_path / "step")
    weight = torch.zeros(2)
    with pytest.raises(KeyMismatchError, match=r"'a\.x' into a mappingproxy"):
        dcpfs.load({"w": weight, "a": MappingProxyType({"x": 0})}, tmp_path / "step", strict=strict)
    assert weight.tolist() == [0, 0]


def test_tensors_in_an_immutable_mapping_are_filled(tmp_path: Path) -> None:
    dcpfs.save({"a": {"w": torch.ones(2)}}, tmp_path / "step")
    weight = torch.zeros(2)
    dcpfs.load({"a": MappingProxyType({"w": weight})}, tmp_path / "step")
    assert weight.tolist() == [1, 1]
