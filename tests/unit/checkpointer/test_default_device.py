"""A default device that the training script has set decides nothing about what is saved and loaded.

``torch.set_default_device("cuda")`` is common; the meta device stands in for it here, since what lands there by mistake
has no values.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import dcpfs


def _trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("mode", [dcpfs.AsyncMode.DISABLED, dcpfs.AsyncMode.ASYNC])
def test_a_step_is_saved_and_loaded_whole_under_another_default_device(tmp_path: Path, mode: dcpfs.AsyncMode) -> None:
    model, optimizer = _trained()
    fresh = nn.Linear(3, 2)
    fresh_optimizer = torch.optim.AdamW(fresh.parameters())
    config = dcpfs.CheckpointConfig(save_dir=str(tmp_path), async_mode=mode)
    with dcpfs.DistributedCheckpointer(config) as checkpointer, torch.device("meta"):
        checkpointer.save(model, optimizer, None, None, 1)
        checkpointer.wait()
        assert checkpointer.load(fresh, fresh_optimizer, None) == 1
    for name, value in model.state_dict().items():
        assert torch.equal(value, fresh.state_dict()[name])
    for old, new in zip(model.parameters(), fresh.parameters(), strict=True):
        for name, value in optimizer.state[old].items():
            assert torch.equal(value, fresh_optimizer.state[new][name])


def test_what_is_read_without_a_template_lies_on_the_cpu(tmp_path: Path) -> None:
    saved = {"weight": torch.randn(3), "nothing": torch.zeros(0), "list": [torch.ones(1)], "words": {"one": 1}}
    dcpfs.save(saved, tmp_path / "run")
    with torch.device("meta"):
        found = dcpfs.read(tmp_path / "run")
    assert torch.equal(_tensor(found["weight"]), saved["weight"])  # type: ignore[arg-type]  # a tensor, as made above
    assert _tensor(found["nothing"]).device.type == "cpu"
    assert found["words"] == {"one": 1}


def _tensor(value: object) -> torch.Tensor:
    assert isinstance(value, torch.Tensor)
    return value
