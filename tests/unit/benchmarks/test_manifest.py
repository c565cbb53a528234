"""Circumstances are told, secrets never."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import manifest as module
from benchmarks.execution import RecordStream, Stage, manifest_of
from benchmarks.manifest import mask_options, take
from benchmarks.runner import Plan
from benchmarks.settings import Link, Setting
from dcpfs.storage.location import Location

SECRETS = ("AKIAEXAMPLEKEY", "wJalrXUtnFEMI", "hunter2", "8675309", "tok-abc", "deep-secret", "private.example")
OPTIONS: dict[str, object] = {
    "key": "AKIAEXAMPLEKEY",
    "secret": "wJalrXUtnFEMI",
    "endpoint_url": "https://private.example:9000",
    "harmless_looking": "tok-abc",
    "pin": 8675309,
    "anon": False,
    "client_kwargs": {"region_name": "eu-west-1", "headers": {"x": "deep-secret"}, "list": ["deep-secret"]},
}
URL = "ftp://someone:hunter2@host/run"


def stage(url: str = URL) -> Stage:
    plan = Plan(
        setting=Setting.URL,
        cases=("save",),
        contenders=("dcpfs",),
        size_bytes=10,
        place=Location(url).redacted,
        link=Link(latency_ms=10, mb_per_second_per_connection=80),
    )
    return Stage(plan, url=url, storage_options=OPTIONS)


def test_no_secret_gets_into_a_file_or_a_trace(tmp_path: Path) -> None:
    described = manifest_of([stage()])
    path = tmp_path / "run.jsonl"
    with RecordStream(path, described):
        pass
    for text in (path.read_text(), repr(stage()), str(described)):
        for secret in SECRETS:
            assert secret not in text


def test_scheme_names_of_options_and_link_are_told() -> None:
    (plan,) = manifest_of([stage()]).plans
    assert plan.scheme == "ftp"
    assert plan.options == {
        "key": "***",
        "secret": "***",
        "endpoint_url": "***",
        "harmless_looking": "***",
        "pin": "***",
        "anon": "False",
        "client_kwargs.region_name": "***",
        "client_kwargs.headers.x": "***",
        "client_kwargs.list": "***",
    }
    assert plan.conditions["latency_ms"] == 10
    assert plan.conditions["mb_per_second_per_connection"] == 80
    assert plan.conditions["isolation"] == "process"


def test_places_of_the_benchmarks_own_have_no_scheme() -> None:
    plan = Plan(setting=Setting.TMPFS, cases=("save",), contenders=("dcpfs",), size_bytes=10)
    (recorded,) = manifest_of([Stage(plan)]).plans
    assert (recorded.setting, recorded.place, recorded.scheme, recorded.options) == ("tmpfs", "", None, {})
    assert recorded.conditions["latency_ms"] is None


def test_the_machine_and_all_contenders_packages_are_told() -> None:
    described = take([])
    assert described.cores >= 1
    assert described.memory_bytes > 1 << 28
    assert described.system.startswith("Linux ")
    assert described.versions["torch"]
    assert {"obstore", "multi-storage-client", "s3torchconnector", "safetensors"} <= described.versions.keys()
    assert described.git_sha is None or len(described.git_sha) == 40


def test_a_package_within_another_repository_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = Path(module.__file__).parent / "contenders"  # in this repository, and not its root
    monkeypatch.setattr(module, "_REPOSITORY", inner)
    assert (take([]).git_sha, take([]).git_dirty) == (None, None)
    monkeypatch.setattr(module, "_REPOSITORY", tmp_path)
    assert take([]).git_sha is None


def test_masks_hold_for_any_depth() -> None:
    assert mask_options({"a": {"b": {"c": "x"}}, "d": True}) == {"a.b.c": "***", "d": "True"}
