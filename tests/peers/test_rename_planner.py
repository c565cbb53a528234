"""The renaming planner under torch's own ``dcp.load``, on checkpoints of torch's own ``dcp.save``."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import StorageReader

from dcpfs.checkpointer.rename_planner import RenameLoadPlanner
from dcpfs.checkpointer.renaming import RenameRules
from dcpfs.dcp.reader import FsspecStorageReader
from dcpfs.errors import ConfigError


def _save(path: Path, state: dict[str, object]) -> None:
    dcp_save(state, storage_writer=FileSystemWriter(path), no_dist=True)


def _load(path: Path, state: dict[str, object], planner: RenameLoadPlanner, *, ours: bool = True) -> None:
    reader: StorageReader = FsspecStorageReader(path) if ours else FileSystemReader(path)
    dcp_load(state, storage_reader=reader, planner=planner, no_dist=True)


def _state() -> dict[str, object]:
    return {"net.a": torch.arange(4.0), "net.b": torch.ones(2, 3), "head.w": torch.full((3,), 7.0), "epoch": 5}


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("rename", [{r"^net\.": "body."}, {r"^body\.": "net."}, lambda n: n.replace("net", "body")])
def test_names_change_in_either_direction(tmp_path: Path, rename: RenameRules, *, ours: bool) -> None:
    _save(tmp_path, _state())
    target: dict[str, object] = {"body.a": torch.zeros(4), "body.b": torch.zeros(2, 3), "head.w": torch.zeros(3)}
    target["epoch"] = 0
    planner = RenameLoadPlanner(rename)
    _load(tmp_path, target, planner, ours=ours)
    assert torch.equal(target["body.a"], torch.arange(4.0))  # type: ignore[arg-type]  # a tensor
    assert torch.equal(target["body.b"], torch.ones(2, 3))  # type: ignore[arg-type]  # a tensor
    assert target["epoch"] == 5
    assert planner.renamed == {"body.a": "net.a", "body.b": "net.b"}


def test_a_swap_of_names(tmp_path: Path) -> None:
    _save(tmp_path, {"a": torch.ones(2), "b": torch.zeros(3), "n": 1, "m": 2})
    swap = {"a": "b", "b": "a", "n": "m", "m": "n"}
    target: dict[str, object] = {"b": torch.full((2,), 9.0), "a": torch.full((3,), 9.0), "n": 0, "m": 0}
    _load(tmp_path, target, RenameLoadPlanner(lambda name: swap[name]))
    assert [value.tolist() if isinstance(value, torch.Tensor) else value for value in target.values()] == [
        [1.0, 1.0],
        [0.0, 0.0, 0.0],
        2,
        1,
    ]


def test_the_optimizer_follows_its_parameters(tmp_path: Path) -> None:
    def make(name: str) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, object]]:
        net = nn.ModuleDict({name: nn.Linear(2, 2)})
        optimizer = torch.optim.AdamW(net.parameters())
        net[name](torch.ones(1, 2)).sum().backward()
        optimizer.step()
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        return net, optimizer, dict(get_optimizer_state_dict(net, optimizer, options=options))

    _, _, saved = make("net")
    net, _, target = make("body")
    for value in target.values():
        if isinstance(value, torch.Tensor):
            value.zero_()
    states: dict[str, object] = {"model": dict(net.state_dict()), "optim": target}
    _save(tmp_path, {"model": {"net.weight": torch.ones(2, 2), "net.bias": torch.ones(2)}, "optim": saved})
    planner = RenameLoadPlanner({r"\bnet\.": "body."}, skip=[r"bias$"])
    _load(tmp_path, states, planner)
    assert torch.equal(target["state.body.weight.exp_avg"], saved["state.net.weight.exp_avg"])  # type: ignore[arg-type]
    assert not target["state.body.bias.exp_avg"].any()  # type: ignore[attr-defined]  # a tensor
    assert "optim.param_groups.body.bias.lr" in planner.skipped
    assert planner.renamed["optim.param_groups.body.weight.lr"] == "optim.param_groups.net.weight.lr"


def test_skipped_names_may_be_reshaped_absent_or_unsafe(tmp_path: Path) -> None:
    _save(tmp_path, _state())
    target: dict[str, object] = {
        "net.a": torch.zeros(4),
        "net.b": torch.full((9,), 3.0),
        "net.new": torch.full((2,), 3.0),
        "epoch": torch.zeros(1),
    }
    planner = RenameLoadPlanner(skip=[r"^net\.(b|new)$", "head", "^epoch$"])
    _load(tmp_path, target, planner)
    assert torch.equal(target["net.a"], torch.arange(4.0))  # type: ignore[arg-type]  # a tensor
    assert torch.equal(target["net.b"], torch.full((9,), 3.0))  # type: ignore[arg-type]  # a tensor
    assert set(planner.skipped) == {"net.b", "net.new", "epoch"}
    assert (planner.missing, planner.unexpected, planner.mismatched) == ((), (), {})


def test_case_93_missing_names_are_said_with_the_closest(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _save(tmp_path, _state())
    target: dict[str, object] = {"net.a": torch.zeros(4), "net.bb": torch.zeros(2, 3), "head.w": torch.zeros(4)}
    with pytest.raises(CheckpointException, match=r"'net\.bb' \(closest: 'net\.b'\)"):
        _load(tmp_path, dict(target), RenameLoadPlanner())
    planner = RenameLoadPlanner(allow_partial_load=True)
    with caplog.at_level(logging.WARNING):
        _load(tmp_path, target, planner)
    assert "'net.bb' (closest: 'net.b')" in caplog.text
    assert (planner.missing, planner.unexpected) == (("net.bb",), ("net.b", "epoch"))
    assert list(planner.mismatched) == ["head.w"]
    assert torch.equal(target["net.a"], torch.arange(4.0))  # type: ignore[arg-type]  # a tensor


def test_two_sources_are_an_error(tmp_path: Path) -> None:
    _save(tmp_path, _state())
    with pytest.raises(CheckpointException, match=r"'net\.a' and 'net\.b'"):
        _load(tmp_path, {"one": torch.zeros(4)}, RenameLoadPlanner({r"^net\..": "one"}, allow_partial_load=True))


def test_wrong_rules_are_refused_when_the_planner_is_made() -> None:
    with pytest.raises(ConfigError):
        RenameLoadPlanner({"(": ""})


def test_a_template_with_a_part_of_the_names_needs_the_option_that_its_error_names(tmp_path: Path) -> None:
    _save(tmp_path, _state())
    target: dict[str, object] = {"body.a": torch.zeros(4)}
    with pytest.raises(
        CheckpointException, match=r"no place for .*pass allow_partial_load=True to take what fits"
    ) as e:
        _load(tmp_path, target, RenameLoadPlanner({r"^net\.": "body."}))
    assert "no name matches" not in str(e.value)
    assert torch.equal(target["body.a"], torch.zeros(4))  # type: ignore[arg-type]  # a tensor
    _load(tmp_path, target, RenameLoadPlanner({r"^net\.": "body."}, allow_partial_load=True))
    assert torch.equal(target["body.a"], torch.arange(4.0))  # type: ignore[arg-type]  # a tensor


def test_a_pattern_that_matches_nothing_is_said_in_the_error_and_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _save(tmp_path, _state())
    text = r"no name matches '\^model/net' of the rename and skip rules, .* names without the key before them"
    with pytest.raises(CheckpointException, match=text):
        _load(tmp_path, {"body.a": torch.zeros(4)}, RenameLoadPlanner({"^model/net": "body"}, [r"^head\."]))
    target = {name: value for name, value in _state().items() if name != "head.w"}
    with caplog.at_level(logging.WARNING):
        _load(tmp_path, target, RenameLoadPlanner({"^model/net": "body"}, [r"^head\."]))
    assert "no name matches '^model/net'" in caplog.text
