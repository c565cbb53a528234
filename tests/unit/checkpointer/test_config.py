"""Settings: what is refused, what shows, where they come from."""

from __future__ import annotations

import ast
import copy
import itertools
import json
import pickle
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import pydantic
import pytest

import dcpfs.checkpointer.config as config_module
from dcpfs.checkpointer import config_sources
from dcpfs.checkpointer.choices import AsyncMode, BestMode, OnExisting, OnSaveError, RngPolicy
from dcpfs.checkpointer.config import CheckpointConfig
from dcpfs.checkpointer.config_sources import TextForm
from dcpfs.checkpointer.mappings import FrozenMapping, StorageOptions
from dcpfs.config import TransferConfig
from dcpfs.errors import ConfigError, MissingBackendError

SECRETS = ("AKIASECRET", "hunter2", "pa55word", "t0ken", "5ig", "nested-secret")
OPTIONS: dict[str, object] = {
    "key": "AKIASECRET",
    "secret": "hunter2",
    "token": "t0ken",
    "anon": False,
    "unknown_thing": "hunter2",
    "client_kwargs": {"endpoint_url": "http://user:pa55word@host:9000", "deep": {"x": "nested-secret"}},
}


def with_secrets() -> CheckpointConfig:
    return CheckpointConfig(
        save_dir="ftp://user:pa55word@host/run",
        storage_options=OPTIONS,
        load_path="https://host/run?sig=5ig",
        load_storage_options={"headers": {"Authorization": "t0ken"}},
        rename={"^a[.]": "b."},
    )


# -- what is refused


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"save_dir": Path("s3://bucket/run")}, "lost a slash"),
        ({"save_dir": "s3:/bucket/run"}, "lost a slash"),
        ({"save_dir": ""}, "valid string"),
        ({"save_dir": "s3://"}, "names no bucket"),
        ({"save_dir": 3}, "give a URL or path"),
        ({"load_path": Path("gs://bucket/run")}, "lost a slash"),
        ({"keep_lst": 3}, "keep_lst"),
        ({"keep_last": 0}, "keep_last"),
        ({"keep_every": -1}, "keep_every"),
        ({"keep_best": 1.5}, "keep_best"),
        ({"async_mode": "process"}, "'async_with_pinned_mem'"),
        ({"on_existing": "append"}, "'overwrite', 'skip' or 'error'"),
        ({"max_in_flight": 0}, "max_in_flight"),
        ({"timeout_seconds": 0}, "timeout_seconds"),
        ({"timeout_seconds": float("inf")}, "timeout_seconds"),
        ({"timeout_seconds": float("nan")}, "timeout_seconds"),
        ({"keys_not_to_resume": ["optm"]}, "'optm': give keys among model, optim"),
        ({"keys_not_to_resume": "optim"}, "list of keys"),
        ({"extra_keys": ["model"]}, "saved and resumed anyway"),
        ({"extra_keys": ["../up"]}, "names a directory"),
        ({"strict_resume": {"modl": False}}, "'modl'"),
        ({"strict_resume": "perhaps"}, "True, False"),
        ({"rename": {"(": "x"}}, "no regular expression"),
        ({"rename": ["a"]}, "patterns with replacements"),
        ({"keys_to_skip_loading": ["("]}, "no regular expression"),
        ({"load_step": -1}, "can't name a step"),
        ({"export_dtype": "int8", "last_save_model_only": True}, "can't export as 'int8'"),
        ({"export_dtype": "bfloat16"}, "last_save_model_only"),
        ({"storage_options": ["hunter2"]}, "mapping of options"),
        ({"storage_options": {1: "hunter2"}}, "text keys"),
        ({"transfer": {"budget_bytes": 1}}, "budget_bytes"),
    ],
)
def test_case_99_what_can_be_known_to_be_wrong_is_refused_at_once_without_repeating_it(
    fields: dict[str, object], text: str
) -> None:
    with pytest.raises(pydantic.ValidationError) as caught:
        CheckpointConfig.model_validate({"save_dir": "/run", **fields})
    assert text in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_a_local_path_is_made_absolute_and_a_url_stays_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert CheckpointConfig(save_dir="run").save_dir == str(tmp_path / "run")
    assert CheckpointConfig.model_validate({"save_dir": tmp_path / "x"}).save_dir == str(tmp_path / "x")
    assert CheckpointConfig(save_dir="s3://bucket/run/checkpoints").save_dir == "s3://bucket/run/checkpoints"
    assert CheckpointConfig(save_dir="/run", load_path="").load_path is None


def test_a_config_does_not_change() -> None:
    config = with_secrets()
    given = config.storage_options
    assert given is not None
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        config.keep_last = 3
    for change in (
        lambda: getattr(given, "__setitem__")("key", "x"),  # noqa: B009 - that it isn't there is the point
        lambda: setattr(given, "_items", {}),
        lambda: delattr(given, "_items"),
    ):
        with pytest.raises(AttributeError):
            change()
    with pytest.raises(AttributeError):
        config.keys_not_to_resume.append("optim")  # type: ignore[attr-defined]  # that it isn't there is the point
    OPTIONS["later"] = "x"
    try:
        assert "later" not in given
    finally:
        del OPTIONS["later"]


# -- what shows


def test_case_114_no_text_of_a_config_holds_a_secret() -> None:
    config = with_secrets()
    texts = [
        repr(config),
        str(config),
        str(config.model_dump()),
        config.model_dump_json(),
        json.dumps(config.model_dump(mode="json")),
        repr(config.storage_options),
        f"{config.load_storage_options}",
        str(CheckpointConfig.model_json_schema()),
        repr(config.save_location()),
        str(vars(config)),
        str(dict(config)),
        f"{config!r} {[config.save_dir, config.load_path]}",
    ]
    for text in texts:
        assert not [secret for secret in SECRETS if secret in text]
    assert "host:9000" in repr(config)  # the endpoint helps
    assert "'unknown_thing': '***'" in repr(config)


@pytest.mark.parametrize(
    "given",
    [
        {"storage_options": ["hunter2"]},
        {"load_storage_options": "hunter2"},
        {"secret": "hunter2"},
        {"load_path": "s3:/user:hunter2@host/run"},
        {"transfer": {"budget_bytes": "hunter2"}},
    ],
    ids=lambda given: next(iter(given)),
)
def test_case_114_no_form_of_an_error_holds_a_value_that_was_given(given: dict[str, object]) -> None:
    with pytest.raises(pydantic.ValidationError) as caught:
        CheckpointConfig.model_validate({"save_dir": "run", **given})
    error = caught.value
    assert "hunter2" not in "".join((str(error), repr(error), repr(error.errors()), error.json()))


def test_case_114_a_dump_without_secrets_reads_back_and_one_with_masks_is_refused() -> None:
    plain = CheckpointConfig(save_dir="/run", keep_last=2, rename={"a": "b"}, strict_resume={"model": False})
    assert CheckpointConfig.model_validate_json(plain.model_dump_json()) == plain
    with pytest.raises(pydantic.ValidationError, match="masked"):
        CheckpointConfig.model_validate(with_secrets().model_dump())
    for field in ("save_dir", "load_path"):
        with pytest.raises(pydantic.ValidationError, match="masked"):
            CheckpointConfig.model_validate({"save_dir": "/run", field: with_secrets().model_dump()[field]})


def test_pickling_and_copying_keep_the_secrets() -> None:
    config = with_secrets()
    for same in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config), config.model_copy(update={"keep_last": 1})):
        assert same.storage_options == OPTIONS
        assert same.save_location().storage_options == OPTIONS
        assert same.save_location().url == "ftp://user:pa55word@host/run"
        assert f"{same.save_dir}/below" == "ftp://user:pa55word@host/run/below"
    assert cast("StorageOptions", config.storage_options).revealed() == OPTIONS


def test_immutable_mappings_equal_plain_ones_and_keep_their_order() -> None:
    mapping = FrozenMapping({"b": 1, "a": 2})
    assert list(mapping) == ["b", "a"]
    assert mapping == {"a": 2, "b": 1}
    assert len(mapping) == 2
    assert pickle.loads(pickle.dumps(mapping)) == mapping
    assert repr(mapping) == "FrozenMapping({'b': 1, 'a': 2})"
    with pytest.raises(ConfigError, match="text keys"):
        FrozenMapping(cast("Mapping[str, int]", {1: 2}))


# -- what it says


def test_every_field_says_what_it_is() -> None:
    tree = ast.parse(Path(str(config_module.__file__)).read_text())
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "CheckpointConfig").body
    documented = {
        cast("ast.Name", field.target).id
        for field, after in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr)
    }
    assert documented == set(CheckpointConfig.model_fields)


def test_nothing_is_deleted_or_skipped_unless_asked() -> None:
    config = CheckpointConfig(save_dir="/run")
    assert (config.keep_last, config.keep_every, config.keep_best) == (None, None, None)
    assert config.async_mode is AsyncMode.DISABLED
    assert config.on_existing is OnExisting.OVERWRITE
    assert config.on_save_error is OnSaveError.RAISE
    assert config.rng is RngPolicy.PER_RANK
    assert config.best_mode is BestMode.MAX
    assert config.max_in_flight == 1
    assert all(map(config.is_strict, ("model", "optim", "mine")))


def test_strictness_is_by_key_where_it_is_given_so() -> None:
    config = CheckpointConfig(save_dir="/run", strict_resume={"model": False, "mine": False}, extra_keys=["mine"])
    assert [config.is_strict(key) for key in ("model", "mine", "optim")] == [False, False, True]
    assert not CheckpointConfig(save_dir="/run", strict_resume=False).is_strict("optim")


def test_names_are_renamed_by_rules_or_a_function() -> None:
    assert CheckpointConfig(save_dir="/run", rename={"^a[.]": "b."}).renaming().apply("a.w") == "b.w"
    assert CheckpointConfig(save_dir="/run", rename=str.upper).renaming().apply("a") == "A"
    assert CheckpointConfig(save_dir="/run", keys_to_skip_loading=["lora"]).renaming().skips("x.lora_A")


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"load_path": "s3://other/run"}, {"anon": True}),
        ({"load_path": "s3://other/run", "load_storage_options": {}}, {}),
        ({"load_path": "s3://other/run", "load_storage_options": {"key": "k"}}, {"key": "k"}),
        ({"load_path": "memory://other/run"}, {}),
        ({"load_path": "/run"}, {}),
        ({}, None),
    ],
)
def test_options_go_to_the_load_path_of_the_same_scheme_unless_it_has_its_own(
    fields: dict[str, object], options: dict[str, object] | None
) -> None:
    config = CheckpointConfig.model_validate(
        {"save_dir": "s3://bucket/run", "storage_options": {"anon": True}, **fields}
    )
    location = config.load_location()
    assert (None if location is None else location.storage_options) == options


# -- where settings come from

JSON = '{"trainer": {"checkpoint": {"save_dir": "/run", "keep_last": 2, "transfer": {"concurrency": 8}}}}'
YAML = "trainer:\n  checkpoint:\n    save_dir: /run\n    keep_last: 2\n    transfer: {concurrency: 8}\n"
TOML = '[trainer.checkpoint]\nsave_dir = "/run"\nkeep_last = 2\ntransfer.concurrency = 8\n'


@pytest.mark.parametrize(("text", "form"), [(JSON, "json"), (YAML, "yaml"), (TOML, "toml")])
def test_settings_are_read_from_texts_and_files(text: str, form: str, tmp_path: Path) -> None:
    wanted = CheckpointConfig(save_dir="/run", keep_last=2, transfer=TransferConfig(concurrency=8))
    assert CheckpointConfig.from_text(text, form, section="trainer.checkpoint") == wanted
    file = tmp_path / f"settings.{form}"
    file.write_text(text)
    assert CheckpointConfig.from_file(file, section="trainer.checkpoint") == wanted
    with pytest.raises(ConfigError, match=r"no section trainer\.check"):
        CheckpointConfig.from_file(file, section="trainer.check.x")
    with pytest.raises(pydantic.ValidationError, match="trainer"):
        CheckpointConfig.from_file(file)


def test_what_is_wrong_in_a_file_is_said_with_its_name_and_section_and_the_closest_setting(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    fields = {"save_dir": "/run", "keepLast": 3, "transfer": {"concurency": 1}, "storage_options": ["hunter2"]}
    path.write_text(json.dumps({"a": {"b": fields}}))
    with pytest.raises(pydantic.ValidationError) as caught:
        CheckpointConfig.from_file(path, section="a.b")
    text = str(caught.value)
    assert text.startswith(f"3 validation errors for CheckpointConfig in {path}, section a.b\n")
    assert "keepLast\n  There is no such setting; did you mean keep_last?" in text
    assert "transfer.concurency\n  There is no such setting; did you mean concurrency?" in text
    assert "storage_options\n  Value error, a list was given: give a mapping of options" in text
    assert "hunter2" not in text
    assert "errors.pydantic.dev" not in text
    with pytest.raises(pydantic.ValidationError, match=r"^1 validation error for CheckpointConfig in the text\n"):
        CheckpointConfig.from_text("{}", "json")
    with pytest.raises(pydantic.ValidationError, match=r"CheckpointConfig in the environment \(DCPFS_…\)\nkeep_last"):
        CheckpointConfig.from_env(environ={"DCPFS_SAVE_DIR": "/run", "DCPFS_KEEP_LAST": "x"})
    with pytest.raises(pydantic.ValidationError, match=r"for CheckpointConfig\nzzz\n  There is no such setting \["):
        CheckpointConfig.model_validate({"save_dir": "/run", "zzz": 1})
    with pytest.raises(pydantic.ValidationError, match="did you mean part_bytes"):
        TransferConfig.model_validate({"part_byte": 1 << 20})


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ('{"secret": "hunter2",\n oops', "json"),
        ("secret: hunter2\n  x: [", "yaml"),
        ('secret = "hunter2"\noops', "toml"),
        ("[1, 2]", "json"),
        ("- hunter2", "yaml"),
    ],
)
def test_case_114_a_text_that_can_not_be_parsed_is_not_repeated(text: str, form: str) -> None:
    with pytest.raises(ConfigError, match="can't read settings") as caught:
        CheckpointConfig.from_text(text, form)
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_file_that_is_absent_or_of_another_kind_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        CheckpointConfig.from_file(tmp_path / "none.json")
    with pytest.raises(ConfigError, match=r"\.json, \.yaml, \.yml, \.toml"):
        CheckpointConfig.from_file(tmp_path / "settings.ini")
    with pytest.raises(ConfigError, match="'json', 'yaml', 'toml'"):
        CheckpointConfig.from_text("", "ini")


def test_case_109_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> object:
        raise ImportError(name)

    monkeypatch.setattr(config_sources, "import_module", refuse)
    for form, text in ((TextForm.YAML, "YAML"), (TextForm.TOML, "TOML")):
        with pytest.raises(MissingBackendError, match=rf"{text}.*dcpfs\[config\]"):
            CheckpointConfig.from_text("", form)


def test_settings_are_read_from_the_environment_over_those_of_a_file() -> None:
    environ = {
        "DCPFS_SAVE_DIR": "/run",
        "DCPFS_KEEP_LAST": "3",
        "DCPFS_KEEP_EVERY": "",
        "DCPFS_ASYNC_MODE": "async",
        "DCPFS_STRICT_RESUME": "false",
        "DCPFS_KEYS_NOT_TO_RESUME": "optim, scheduler",
        "DCPFS_KEYS_TO_SKIP_LOADING": '["a,b"]',
        "DCPFS_STORAGE_OPTIONS": '{"anon": true}',
        "DCPFS_TRANSFER__CONCURRENCY": "8",
        "DCPFS_EXPORT_DTYPE": "float16",
        "DCPFS_LAST_SAVE_MODEL_ONLY": "1",
        "OTHER_KEEP_LAST": "9",
    }
    config = CheckpointConfig.from_env(environ=environ)
    assert config == CheckpointConfig(
        save_dir="/run",
        keep_last=3,
        async_mode=AsyncMode.ASYNC,
        strict_resume=False,
        keys_not_to_resume=("optim", "scheduler"),
        keys_to_skip_loading=("a,b",),
        storage_options={"anon": True},
        transfer=TransferConfig(concurrency=8),
        export_dtype="float16",
        last_save_model_only=True,
    )
    base = CheckpointConfig(save_dir="/base", storage_options=OPTIONS, transfer=TransferConfig(local_concurrency=2))
    over = CheckpointConfig.from_env(
        "RUN_", base=base, environ={"RUN_TRANSFER__CONCURRENCY": "8", "RUN_SAVE_DIR": "/over", "RUN_LOAD_STEP": "7"}
    )
    assert (over.save_dir, over.load_step) == ("/over", 7)
    assert over.storage_options == OPTIONS
    assert over.transfer == TransferConfig(local_concurrency=2, concurrency=8)


@pytest.mark.parametrize(
    ("environ", "text"),
    [
        ({"DCPFS_KEEP_LST": "3"}, "did you mean DCPFS_KEEP_LAST"),
        ({"DCPFS_TRANSFER": "1", "DCPFS_TRANSFER__CONCURRENCY": "8"}, "set as a whole already"),
    ],
)
def test_a_variable_that_names_no_setting_is_refused(environ: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        CheckpointConfig.from_env(environ={"DCPFS_SAVE_DIR": "/run", **environ})


def test_the_process_environment_is_read_when_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("G_TEST_SAVE_DIR", "/run")
    assert CheckpointConfig.from_env("G_TEST_").save_dir == "/run"
    monkeypatch.delenv("G_TEST_SAVE_DIR")
    with pytest.raises(pydantic.ValidationError, match="save_dir"):
        CheckpointConfig.from_env("G_TEST_")


def test_settings_do_not_need_torch() -> None:
    code = "import sys; from dcpfs.checkpointer.config import CheckpointConfig; print('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"
