"""Rules of a start from another run: a pattern that matches nothing is said where it matters."""

from __future__ import annotations

import logging
import uuid

import pytest
import torch
from torch import nn

import dcpfs
from dcpfs.errors import KeyMismatchError

UNUSED = r"no name matches 'model/old\\\.' of the rename and skip rules, whose patterns are regular expressions for "


@pytest.fixture
def run() -> str:
    """A run that has saved a model with the part ``old``."""
    url = f"memory://{uuid.uuid4().hex}"
    with dcpfs.DistributedCheckpointer(dcpfs.CheckpointConfig(save_dir=f"{url}/first")) as checkpointer:
        checkpointer.save(nn.ModuleDict({"old": nn.Linear(2, 2)}), iteration=3)
    return url


def start(run: str, model: nn.Module, rename: dict[str, str]) -> int:
    config = dcpfs.CheckpointConfig(save_dir=f"{run}/second", load_path=f"{run}/first", rename=rename)
    with dcpfs.DistributedCheckpointer(config, access="read_only") as checkpointer:
        return checkpointer.load(model)


def test_a_pattern_with_the_key_before_the_name_is_said_in_the_error_of_the_load(run: str) -> None:
    model = nn.ModuleDict({"new": nn.Linear(2, 2)})
    with pytest.raises(KeyMismatchError, match=f"lacks 'model/new.*{UNUSED}"):
        start(run, model, {r"model/old\.": "new."})
    with pytest.raises(KeyMismatchError, match=f"lacks 'model/new.*strict=False.*{UNUSED}"):
        dcpfs.load_checkpoint(model, f"{run}/first/iter_000000003/model", rename={r"model/old\.": "new."})
    assert start(run, model, {r"^old\.": "new."}) == 0


def test_a_pattern_that_matches_nothing_is_a_warning_where_all_else_fits(
    run: str, caplog: pytest.LogCaptureFixture
) -> None:
    layer = nn.Linear(2, 2)
    nn.init.zeros_(layer.weight)
    model = nn.ModuleDict({"old": layer})
    with caplog.at_level(logging.WARNING):
        start(run, model, {r"model/old\.": "new."})
        dcpfs.load_checkpoint(model, f"{run}/first/iter_000000003/model", skip=["model/x"])
    assert r"no name matches 'model/old\.' of the rename and skip rules" in caplog.text
    assert "no name matches 'model/x'" in caplog.text
    assert not torch.equal(layer.weight, torch.zeros(2, 2))
