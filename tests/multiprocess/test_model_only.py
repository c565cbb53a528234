"""A model alone: any number of ranks saves, any other number loads; also from where other tools saved."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.fsdp import fully_shard

import dcpfs
from dcpfs.checkpointer.model_only import load_checkpoint, save_checkpoint
from dcpfs.storage.location import Location
from tests.multiprocess.gloo import run_ranks, try_ranks


def new_model(seed: int, *, device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(seed)
    with torch.device(device):
        return nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))


def expected() -> dict[str, torch.Tensor]:
    return new_model(1).state_dict()


def check_equal(state: dict[str, Any]) -> None:
    for name, value in expected().items():
        got = state[name]
        got = got.full_tensor() if hasattr(got, "full_tensor") else got
        assert torch.equal(got, value), name


def weight_of(model: nn.Module, layer: int) -> torch.Tensor:
    return model.get_parameter(f"{layer}.weight")


def save_sharded(url: str) -> None:
    model = new_model(1)
    fully_shard(model)
    report = save_checkpoint(model, url)
    assert report.bytes_written > 0


def load_sharded(url: str) -> tuple[str, ...]:
    model = new_model(2 + dist.get_rank(), device="meta")
    fully_shard(model)
    report = load_checkpoint(model, url)
    check_equal(model.state_dict())
    return report.loaded


def load_torn_credentials(url: str, folder: str) -> None:
    file = f"{folder}/{'s3' if dist.get_rank() == 0 else 'absent'}.secret"
    load_checkpoint(new_model(1), url, credentials=file)


def test_a_sharded_model_is_saved_and_loaded_by_other_numbers_of_ranks(tmp_path: Path) -> None:
    url = str(tmp_path / "model")
    run_ranks(save_sharded, 2, url)
    assert set(run_ranks(load_sharded, 3, url)[0]) == set(expected())
    alone = new_model(2, device="meta")
    load_checkpoint(alone, url)
    check_equal(alone.state_dict())


def test_a_rank_without_credentials_fails_on_all_ranks_with_its_error(tmp_path: Path) -> None:
    (tmp_path / "s3.secret").write_text("{}")
    outcomes = try_ranks(load_torn_credentials, 2, "s3://bucket/model", str(tmp_path))
    assert [outcome.error_type for outcome in outcomes] == ["ConfigError"] * 2
    assert all("absent.secret" in outcome.error_text for outcome in outcomes)


def test_parts_of_a_pipeline_are_one_checkpoint_with_names_at_its_top_level(tmp_path: Path) -> None:
    class Stage(nn.Module):
        def __init__(self, index: int, layer: nn.Module) -> None:
            super().__init__()
            self.add_module(str(index), layer)

    model = new_model(1)
    save_checkpoint([Stage(index, layer) for index, layer in enumerate(model)], tmp_path / "model")
    assert set(dcpfs.read(tmp_path / "model")) == set(expected())
    whole = new_model(2)
    load_checkpoint(cast("nn.Module", torch.compile(whole)), tmp_path / "model")
    check_equal(whole.state_dict())
    torch_alone: dict[str, Any] = {name: torch.zeros_like(value) for name, value in expected().items()}
    dcp_load(torch_alone, checkpoint_id=tmp_path / "model")
    check_equal(torch_alone)


def test_what_torch_saved_is_loaded_renamed_skipped_and_cast_on_request(tmp_path: Path) -> None:
    state = {f"net.{name}": value for name, value in expected().items()}
    dcp_save(state, checkpoint_id=tmp_path / "model")
    model = new_model(2)
    with pytest.raises(dcpfs.KeyMismatchError):
        load_checkpoint(model, tmp_path / "model")
    before = weight_of(model, 2).detach().clone()
    report = load_checkpoint(model, tmp_path / "model", rename={"^net[.]": ""}, skip=["^2[.]weight"])
    assert set(report.loaded) == set(expected()) - {"2.weight"}
    assert torch.equal(weight_of(model, 2), before)
    load_checkpoint(model, tmp_path / "model", rename=lambda name: name.removeprefix("net."))
    check_equal(model.state_dict())
    loose = load_checkpoint(nn.Sequential(nn.Linear(6, 7)), tmp_path / "model", strict=False)
    assert not loose.loaded


def test_export_changes_floating_values_alone_and_loads_back_on_request(tmp_path: Path) -> None:
    save_checkpoint(new_model(1), tmp_path / "model", export_dtype=torch.bfloat16)
    saved = dcpfs.read(tmp_path / "model")
    for name, value in expected().items():
        wanted = value.bfloat16() if value.is_floating_point() else value
        got = saved[name]
        assert isinstance(got, torch.Tensor)
        assert torch.equal(got, wanted)
        assert got.dtype == wanted.dtype
    model = new_model(2)
    with pytest.raises(dcpfs.KeyMismatchError, match=r"torch\.bfloat16 in the checkpoint"):
        load_checkpoint(model, tmp_path / "model")
    load_checkpoint(model, tmp_path / "model", allow_cast=dcpfs.CastPolicy.WIDEN)
    assert torch.equal(weight_of(model, 0), weight_of(new_model(1), 0).bfloat16().float())
    with pytest.raises(dcpfs.ConfigError, match="floating dtype"):
        save_checkpoint(model, tmp_path / "other", export_dtype=torch.int8)
    assert not (tmp_path / "other").exists()


def test_case_106_an_existing_checkpoint_is_overwritten_on_request_alone(tmp_path: Path) -> None:
    save_checkpoint(new_model(1), tmp_path / "model")
    with pytest.raises(dcpfs.CheckpointExistsError):
        save_checkpoint(new_model(2), tmp_path / "model")
    model = new_model(3)
    load_checkpoint(model, tmp_path / "model")
    check_equal(model.state_dict())
    save_checkpoint(new_model(2), tmp_path / "model", overwrite=True)
    load_checkpoint(model, tmp_path / "model")
    assert torch.equal(weight_of(model, 0), weight_of(new_model(2), 0))


def test_case_100_everything_goes_to_s3_by_a_credentials_file_and_nothing_to_the_working_directory(
    s3_prefix: Location, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = s3_prefix.storage_options
    client = {**dict(options.get("client_kwargs") or {})}  # type: ignore[call-overload]  # a dict, as servers give it
    if "endpoint_url" in options:
        client["endpoint_url"] = options["endpoint_url"]
    file = tmp_path / "s3.secret"
    fields = {"aws_access_key_id": options["key"], "aws_secret_access_key": options["secret"], **client}
    file.write_text(json.dumps(fields))
    empty = tmp_path / "cwd"
    empty.mkdir(mode=0o500)
    monkeypatch.chdir(empty)
    save_checkpoint(new_model(1), f"{s3_prefix.url}/model", credentials=file)
    model = new_model(2)
    load_checkpoint(model, f"{s3_prefix.url}/model", credentials=file)
    check_equal(model.state_dict())
    assert os.listdir(empty) == []
