"""A key that was passed and is not in the step is never left out in silence; nor is a rule that matches nothing."""

from __future__ import annotations

import logging

import pytest
import torch

import dcpfs


def test_a_passed_key_that_the_step_lacks_is_an_error() -> None:
    config = dcpfs.CheckpointConfig(save_dir="memory://asked-keys")
    with dcpfs.DistributedCheckpointer(config) as checkpointer:
        checkpointer.save_state(1, {"model": torch.nn.Linear(2, 2), "ema": torch.nn.Linear(2, 2)})
        other = torch.nn.Linear(2, 2)
        before = other.weight.detach().clone()
        with pytest.raises(dcpfs.KeyMismatchError, match="ema2"):
            checkpointer.load_state({"model": torch.nn.Linear(2, 2), "ema2": other})
        assert torch.equal(other.weight, before)
        assert checkpointer.load_state({"ema": other}) == 1


def test_a_model_that_could_not_be_saved_is_refused_by_the_first_load() -> None:
    config = dcpfs.CheckpointConfig(save_dir="memory://asked-parts")
    with (
        dcpfs.DistributedCheckpointer(config) as checkpointer,
        pytest.raises(dcpfs.ConfigError, match="two parts of the model"),
    ):
        checkpointer.load([torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)])


def test_a_rule_that_matches_no_name_is_said(caplog: pytest.LogCaptureFixture) -> None:
    source = dcpfs.CheckpointConfig(save_dir="memory://asked-source")
    with dcpfs.DistributedCheckpointer(source) as checkpointer:
        checkpointer.save(torch.nn.Sequential(torch.nn.Linear(2, 2)), iteration=1)
    config = dcpfs.CheckpointConfig(
        save_dir="memory://asked-target", load_path="memory://asked-source", keys_to_skip_loading=["model/0", "bias"]
    )
    with dcpfs.DistributedCheckpointer(config) as checkpointer, caplog.at_level(logging.WARNING):
        assert checkpointer.load(torch.nn.Sequential(torch.nn.Linear(2, 2))) == 0
    said = [record.getMessage() for record in caplog.records if "matches" in record.getMessage()]
    assert len(said) == 1
    assert "'model/0'" in said[0]
    assert "'bias'" not in said[0]


def test_what_a_load_did_can_be_asked_before_there_was_one() -> None:
    with dcpfs.DistributedCheckpointer(dcpfs.CheckpointConfig(save_dir="memory://asked-before")) as checkpointer:
        assert checkpointer.last_load is None
        assert checkpointer.last_save is None
        assert checkpointer.load(torch.nn.Linear(2, 2)) == 0
        assert checkpointer.last_load is None
