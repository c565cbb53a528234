"""A user's own URL: who takes part, what is counted, what is left, and what is told to nobody."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.contenders import contenders_for
from benchmarks.figures import Figure, Missing, StepFigure
from benchmarks.place import open_place
from benchmarks.runner import Isolation
from benchmarks.settings import PLACE_PREFIX, Link, Setting, Target, client_environment
from dcpfs.testing.scripted_s3 import ScriptedS3Server
from tests.unit.benchmarks.small_runs import measure, refusing_port


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedS3Server]:
    """An S3 server that checks every signature; its keys where clients look that take none."""
    with ScriptedS3Server() as server:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.access_key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.secret_key)
        yield server


@pytest.mark.parametrize("contender", ["dcpfs", "torch-fsspec", "dcpfs-obstore", "s3torchconnector"])
def test_signatures_hold_through_the_proxy_and_requests_are_counted(server: ScriptedS3Server, contender: str) -> None:
    url, link = server.url("scratch"), Link()
    before = server.objects.snapshot(server.bucket)
    with open_place(Setting.URL, None, 0, link=link, url=url, storage_options=server.storage_options) as place:
        results = measure(place, ["save", "load"], contender, link=link)
    for result in results:
        assert isinstance(result, Figure), result
        assert result.requests is not None
        assert result.requests > 0
        assert result.moved_per_needed is not None
        assert result.moved_per_needed > 1
        assert result.entry.where == "url +0 ms"
    assert len(results) == 2
    assert server.objects.snapshot(server.bucket) == before


@pytest.mark.timeout(1800)
def test_steps_at_a_url(server: ScriptedS3Server) -> None:
    with open_place(Setting.URL, None, 0, url=server.url("s"), storage_options=server.storage_options) as place:
        results = measure(
            place, ["discovery-3", "retention-5", "checkpointer"], "dcpfs", "floor-delete", "dcpfs-thread"
        )
    assert [isinstance(result, StepFigure) and result.kind for result in results] == [
        "discovery",
        "retention",
        "retention",
        "checkpointer",
    ]
    assert not server.objects.snapshot(server.bucket)


def test_only_the_directory_of_the_run_is_deleted(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "notes.txt").write_text("the user's")
    with open_place(Setting.URL, None, 0, url=f"file://{tmp_path}/scratch") as place:
        assert place.path.startswith(PLACE_PREFIX)
        assert all(isinstance(result, Figure) for result in measure(place, ["save", "partial"], "dcpfs", "torch-2"))
    assert [path.name for path in (tmp_path / "scratch").iterdir()] == ["notes.txt"]


def test_what_ended_a_run_is_told_when_its_directory_can_t_be_deleted_either(caplog: pytest.LogCaptureFixture) -> None:
    client = {"retries": {"max_attempts": 0}, "connect_timeout": 1}
    with (
        pytest.raises(RuntimeError, match="what ended the run"),
        refusing_port() as port,
        open_place(
            Setting.URL,
            None,
            0,
            url="s3://bucket/scratch",
            storage_options={
                "key": "k3y",
                "secret": "hunter2",
                "endpoint_url": f"http://127.0.0.1:{port}",
                "config_kwargs": client,
            },
        ),
    ):
        raise RuntimeError("what ended the run")
    (record,) = [each for each in caplog.records if each.name == "benchmarks.place"]
    assert f"Can't delete s3://bucket/scratch/{PLACE_PREFIX}" in record.getMessage()
    assert "delete it by hand" in record.getMessage()
    assert "hunter2" not in record.getMessage()


def test_memory_is_one_process_by_any_name() -> None:
    told: list[str] = []
    with open_place(Setting.URL, None, 0, url="memory://scratch") as place:
        absent, figure = measure(place, ["load-2", "load"], "dcpfs", told=told)
    assert isinstance(absent, Missing)
    assert (absent.kind, absent.entry.case) == ("absent", "load-2")
    assert isinstance(figure, Figure)
    assert "lives in one process" in told[0]


@pytest.mark.parametrize(
    ("url", "there", "not_there"),
    [
        ("s3://b/x", "s3torchconnector", "torch-1"),
        ("/scratch", "torch-1", "s3torchconnector"),
        ("gs://b/x", "torch-fsspec", "torch-1"),
        ("memory://x", "torch-fsspec", "dcpfs-process"),
    ],
)
def test_who_takes_part_at_a_url(url: str, there: str, not_there: str) -> None:
    names = contenders_for(Setting.URL, url)
    assert {"dcpfs", "dcpfs-sync", "torch-save", "floor-client", there} <= set(names)
    assert not {"floor-sockets", "floor-memcpy", not_there} & set(names)


def test_a_link_needs_a_server_and_a_setting_its_url(tmp_path: Path) -> None:
    link = Link(latency_ms=10)
    for setting, url in ((Setting.DISK, None), (Setting.URL, "s3://bucket/x"), (Setting.URL, f"file://{tmp_path}")):
        with (
            pytest.raises(ValueError, match=r"put in front|put a link"),
            open_place(
                setting, tmp_path, 0, link=link, url=url, storage_options={"endpoint_url": "http://far.example:80"}
            ),
        ):
            pass
    with pytest.raises(ValueError, match="needs a URL"), open_place(Setting.URL, None, 0):
        pass
    with (
        pytest.raises(ValueError, match="can't hold one of hook"),
        open_place(Setting.URL, None, 0, url="memory://x", storage_options={"hook": print}),
    ):
        pass


def test_secrets_are_told_to_client_processes_and_to_nobody_else() -> None:
    options: dict[str, object] = {"key": "AKIDX", "secret": "hush-hush", "token": "tok-tok"}
    with open_place(Setting.URL, None, 0, url="memory://u:hush-hush@x", storage_options=options) as place:
        assert "hush" not in repr(place)
        assert "tok-tok" not in repr(place)
        assert "hush" not in repr(place.child("below"))
    target = Target(setting=Setting.URL, path="x", root="s3://b", options={"key": "AKIDX", "secret": "hush-hush"})
    environment = client_environment(target)
    assert (environment["AWS_ACCESS_KEY_ID"], environment["AWS_SECRET_ACCESS_KEY"]) == ("AKIDX", "hush-hush")


@pytest.mark.parametrize(
    ("contender", "isolation"), [("TellsItsOptions", Isolation.INLINE), ("DiesTellingItsOptions", Isolation.PROCESS)]
)
def test_what_a_peer_says_of_its_options_is_told_without_secrets(contender: str, isolation: Isolation) -> None:
    options: dict[str, object] = {"secret": "hush-hush", "client_kwargs": {"aws_secret_access_key": "hush-two"}}
    target = Target(setting=Setting.URL, path="dcpfs-benchmark-x", root="memory://x?token=hush-three").model_copy(
        update={"options": options}
    )
    (result,) = measure(target, "save", f"tests.unit.benchmarks.broken_contenders:{contender}", isolation=isolation)
    assert isinstance(result, Missing)
    assert "can't reach memory://x" in result.reason
    assert "hush" not in result.model_dump_json()


def test_the_caller_s_aws_setup_is_used_at_the_caller_s_url_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "production")
    assert client_environment(Target(setting=Setting.URL, path="x", root="s3://b"))["AWS_PROFILE"] == "production"
    assert "AWS_PROFILE" not in client_environment(Target(setting=Setting.FAST, path="x", port=1))
    assert "AWS_PROFILE" not in client_environment()


def test_an_endpoint_of_the_environment_or_the_profile_is_told_to_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config"
    config.write_text("[profile own]\nendpoint_url = http://127.0.0.1:7\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    for variable in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "AWS_PROFILE"):
        monkeypatch.delenv(variable, raising=False)

    def endpoint(**options: object) -> str | None:
        with open_place(Setting.URL, None, 0, url="s3://bucket/x", storage_options=options) as place:
            access = place.s3()
            assert access is not None
            assert place.storage_options().get("endpoint_url") == access.endpoint
            return access.endpoint

    # Nothing is asked of any server: what would be deleted at the end is not looked for.
    monkeypatch.setattr("benchmarks.place.remove", lambda target: None)
    assert endpoint() is None
    assert endpoint(profile="own") == "http://127.0.0.1:7"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:8")
    assert endpoint() == "http://127.0.0.1:8"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    assert endpoint() == "http://127.0.0.1:9"
    assert endpoint(endpoint_url="http://127.0.0.1:10") == "http://127.0.0.1:10"
    monkeypatch.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true")
    assert endpoint() is None


def test_a_profile_among_the_options_is_there_for_clients_that_take_it_from_the_environment_alone() -> None:
    target = Target(setting=Setting.URL, path="x", root="s3://b", options={"profile": "own"})
    assert client_environment(target)["AWS_PROFILE"] == "own"
