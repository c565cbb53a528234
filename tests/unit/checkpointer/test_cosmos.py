"""The reference trainer's settings, translated; and its credentials' file."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dcpfs.checkpointer.choices import AsyncMode
from dcpfs.checkpointer.config import CheckpointConfig
from dcpfs.checkpointer.credentials import locate, read_credentials
from dcpfs.checkpointer.renaming import Renaming
from dcpfs.errors import ConfigError


@dataclasses.dataclass
class ObjectStore:
    enabled: bool = False
    credentials: str = ""
    bucket: str = ""


@dataclasses.dataclass
class Checkpoint:
    """As the reference has it, with its defaults."""

    type: dict[str, str] | None = None
    dcp_async_mode_enabled: bool = False
    save_to_object_store: ObjectStore = dataclasses.field(default_factory=ObjectStore)
    save_iter: int = 999999999
    load_from_object_store: ObjectStore = dataclasses.field(default_factory=ObjectStore)
    load_path: str = ""
    load_training_state: bool = False
    only_load_scheduler_state: bool = False
    strict_resume: bool = True
    verbose: bool = True
    keys_not_to_resume: list[str] = dataclasses.field(default_factory=list)
    keys_to_skip_loading: list[str] = dataclasses.field(default_factory=list)
    load_ema_to_reg: bool = False
    broadcast_via_filesystem: bool = False
    jit: ObjectStore = dataclasses.field(default_factory=ObjectStore)


@dataclasses.dataclass
class Job:
    project: str = "cosmos"
    group: str = "test"
    name: str = "run"

    @property
    def path(self) -> str:
        return f"{self.project}/{self.group}/{self.name}"

    @property
    def path_local(self) -> str:
        return f"/out/{self.path}"


def as_mapping(value: Any) -> Any:
    return dataclasses.asdict(value)


def as_namespace(value: Any) -> Any:
    return json.loads(json.dumps(dataclasses.asdict(value)), object_hook=lambda fields: SimpleNamespace(**fields))


class Node(dict[str, Any]):
    """Shows values that must be set as OmegaConf's nodes do: they are listed, and absent."""

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) and super().__getitem__(str(name)) != "???"


FORMS = {"dataclass": lambda value: value, "mapping": as_mapping, "attributes": as_namespace}


@pytest.mark.parametrize("form", FORMS)
def test_a_run_without_an_object_store_saves_below_its_local_path(form: str) -> None:
    config = CheckpointConfig.from_cosmos(FORMS[form](Checkpoint()), {"path": "p", "path_local": "/out/cosmos/"})
    assert config == CheckpointConfig(save_dir="/out/cosmos/checkpoints")


@pytest.mark.parametrize("form", FORMS)
def test_a_run_with_one_saves_below_its_path_in_the_bucket(form: str, tmp_path: Path) -> None:
    file = tmp_path / "s3.secret"
    store = ObjectStore(enabled=True, bucket="bucket", credentials=str(file))
    given = Checkpoint(
        save_to_object_store=store,
        load_from_object_store=store,
        dcp_async_mode_enabled=True,
        load_path="cosmos/pretrain/base/checkpoints/iter_000000100",
        load_training_state=True,
        strict_resume=False,
        keys_not_to_resume=["optim"],
        keys_to_skip_loading=["net_ema.", "action(1)"],
    )
    config = CheckpointConfig.from_cosmos(FORMS[form](given), Job())
    assert config.save_dir == "s3://bucket/cosmos/test/run/checkpoints"
    assert config.load_path == "s3://bucket/cosmos/pretrain/base/checkpoints/iter_000000100"
    assert config.async_mode is AsyncMode.ASYNC_WITH_PINNED_MEM
    assert (config.load_training_state, config.strict_resume, config.keys_not_to_resume) == (True, False, ("optim",))
    skips = config.renaming().skips
    assert [skips(name) for name in ("net_ema.w", "x.action(1).w", "net_emax", "action1")] == [True, True, False, False]
    # The file is read only when a location is made, and anew each time.
    with pytest.raises(ConfigError, match="No such file"):
        config.save_location()
    for key in ("first", "rotated"):
        file.write_text(json.dumps({"aws_access_key_id": key, "aws_secret_access_key": "s", "region_name": "r"}))
        for location in (config.save_location(), config.load_location()):
            assert location is not None
            assert location.storage_options == {"key": key, "secret": "s", "client_kwargs": {"region_name": "r"}}


def test_loading_from_elsewhere_than_saving_goes_by_load_path(caplog: pytest.LogCaptureFixture) -> None:
    given = Checkpoint(load_from_object_store=ObjectStore(True, "", "models"), load_path="base/")
    config = CheckpointConfig.from_cosmos(given, Job())
    assert (config.save_dir, config.load_path) == ("/out/cosmos/test/run/checkpoints", "s3://models/base")
    assert "differ" in caplog.text


@pytest.mark.parametrize(
    ("checkpoint", "job", "text"),
    [
        ({"load_path": "???"}, Job(), "load_path is not set"),
        (Node(load_path="???"), Job(), "load_path is not set"),
        (Node(save_to_object_store=Node(enabled=True, bucket="???")), Job(), "bucket is not set"),
        ({"load_training_state": "???"}, Job(), "load_training_state is not set"),
        ({"save_to_object_store": {"enabled": True}}, Job(), "bucket is not set"),
        ({}, {"path": "p"}, "path_local is not set"),
        ({"keys_not_to_resume": "optim"}, Job(), "not a list"),
        ({"load_ema_to_reg": True}, Job(), "rename="),
    ],
)
def test_what_is_missing_or_has_no_equivalent_is_refused(checkpoint: object, job: object, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        CheckpointConfig.from_cosmos(checkpoint, job)


def test_the_remedy_for_ema_weights_does_what_it_says() -> None:
    renaming = Renaming({"^net[.]": "raw.", "^net_ema[.]": "net."}, ["^raw[.]"])
    placed = renaming.sources(["net.a", "net_ema.a"]).place(["net.a"])
    assert placed.sources == {"net.a": "net_ema.a"}
    assert placed.skipped_stored == ("net.a",)


def test_what_is_left_out_is_named_when_it_is_switched_on(caplog: pytest.LogCaptureFixture) -> None:
    given = {
        "hf_export": {"enabled": True},
        "jit": {"enabled": False},
        "save_iter": 5,
        "load_path": "/x/iter.pt",
        "n": 0,
    }
    with caplog.at_level(logging.WARNING):
        config = CheckpointConfig.from_cosmos(given, Job())
    assert config.load_path is None
    own = [record for record in caplog.records if record.name == "dcpfs.checkpointer.cosmos"]
    assert [record.getMessage().split(" is left out")[0] for record in own] == [
        "load_path /x/iter.pt",
        "the setting hf_export of the reference has no equivalent here and",
    ]


# -- credentials


def test_a_credentials_file_becomes_options_below_those_given(tmp_path: Path) -> None:
    file = tmp_path / "s3.secret"
    fields = {
        "aws_access_key_id": "k",
        "aws_secret_access_key": "s",
        "aws_session_token": None,
        "endpoint_url": "http://h",
        "region_name": "",
    }
    file.write_text(json.dumps(fields))
    assert read_credentials(file) == {"key": "k", "secret": "s", "client_kwargs": {"endpoint_url": "http://h"}}
    location = locate("s3://b/x", {"secret": "mine", "client_kwargs": {"region_name": "r"}, "anon": False}, file)
    assert location.storage_options == {
        "key": "k",
        "secret": "mine",
        "client_kwargs": {"endpoint_url": "http://h", "region_name": "r"},
        "anon": False,
    }
    assert locate("/local", None, tmp_path / "absent").storage_options == {}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ('{"aws_secret_access_key": "hunter2",', "no JSON text at line 1"),
        ('["hunter2"]', "holds a list"),
        ('{"aws_secret_key": "hunter2"}', "aws_secret_key are unknown"),
        (b"\xff\xfe", "no JSON text"),
    ],
)
def test_case_114_a_credentials_file_that_can_not_be_used_is_named_and_not_shown(
    content: str | bytes, text: str, tmp_path: Path
) -> None:
    file = tmp_path / "s3.secret"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=text) as caught:
        locate("s3://b/x", None, file)
    assert str(file) in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None
