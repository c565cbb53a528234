"""When a kept client is the right one, and how long it is kept."""

from __future__ import annotations

import asyncio
import os
import ssl
from pathlib import Path

import pytest
from fsspec.asyn import get_loop, sync

from dcpfs.storage.s3_clients import KeptClients, S3Client, client_key
from dcpfs.storage.s3_http import HttpPool

OPTIONS: dict[str, object] = {"key": "AKID", "secret": "a-secret", "client_kwargs": {"region_name": "eu-west-3"}}


class _Closable:
    def __init__(self) -> None:
        self.closed = False

    async def close(self) -> None:
        self.closed = True


def made(*, pid: int | None = None) -> S3Client:
    pool = HttpPool(
        connect_timeout_seconds=1,
        read_timeout_seconds=1,
        make_ssl_context=ssl.create_default_context,
        find_proxy=lambda _: None,
    )
    loop: asyncio.AbstractEventLoop = get_loop()
    sync(loop, asyncio.sleep, 0)  # its thread may not have come to run it yet
    return S3Client(_Closable(), loop, pid or os.getpid(), pool, None)


def test_a_client_is_taken_by_one_who_wants_the_same_and_by_nobody_else_meanwhile() -> None:
    kept, first, second = KeptClients(), made(), made()
    assert kept.take("a") is None
    kept.keep("a", first)
    kept.keep("a", second)
    assert kept.take("b") is None
    assert kept.take("a") is second
    assert kept.take("a") is first
    assert kept.take("a") is None
    assert not first.client.closed


def test_a_client_that_can_not_be_compared_or_is_of_another_process_is_closed() -> None:
    kept, private, parents = KeptClients(), made(), made(pid=os.getpid() + 1)
    kept.keep(None, private)
    kept.keep("a", parents)
    assert private.client.closed
    assert kept.take("a") is None
    assert kept.take(None) is None
    assert not parents.client.closed, "its loop has no thread in this process"


def test_unused_clients_are_few_and_do_not_stay() -> None:
    now_seconds = [0.0]
    kept = KeptClients(idle_seconds=10, idle_clients=2, clock=lambda: now_seconds[0])
    clients = [made() for _ in range(3)]
    for index, one in enumerate(clients):
        kept.keep(str(index), one)
    assert [one.client.closed for one in clients] == [True, False, False]
    now_seconds[0] = 11.0
    assert kept.take("none of them") is None
    assert all(one.client.closed for one in clients)


def test_case_80_a_forked_child_starts_with_none() -> None:
    kept, parents = KeptClients(), made()
    kept.keep("a", parents)
    kept.forget()
    assert kept.take("a") is None
    assert not parents.client.closed


def test_all_are_closed_at_the_end() -> None:
    kept, one = KeptClients(), made()
    kept.keep("a", one)
    kept.close()
    kept.close()
    assert one.client.closed


def test_case_76_options_are_compared_by_value() -> None:
    key = client_key("b", OPTIONS, 1.0)
    assert key is not None
    assert "a-secret" not in key
    assert (
        client_key("b", {**dict(reversed(OPTIONS.items())), "client_kwargs": {"region_name": "eu-west-3"}}, 1.0) == key
    )
    different = [
        client_key("c", OPTIONS, 1.0),
        client_key("b", OPTIONS, 2.0),
        client_key("b", {**OPTIONS, "secret": "b-secret"}, 1.0),
        client_key("b", {**OPTIONS, "use_ssl": True}, 1.0),
        client_key("b", {**OPTIONS, "use_ssl": 1}, 1.0),
        client_key("b", {**OPTIONS, "client_kwargs": {"region_name": "eu-west-1"}}, 1.0),
        client_key("b", {}, 1.0),
    ]
    assert len({key, *different}) == len(different) + 1
    assert client_key("b", {**OPTIONS, "session": object()}, 1.0) is None


@pytest.mark.parametrize(
    "name", ["AWS_SESSION_TOKEN", "AWS_PROFILE", "https_proxy", "NO_PROXY", "HOME", "FSSPEC_S3_KEY"]
)
def test_case_81_a_changed_environment_is_another_client(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    before = client_key("b", {})
    monkeypatch.setenv("UNRELATED_TO_THIS", "1")
    assert client_key("b", {}) == before
    monkeypatch.setenv(name, "another")
    assert client_key("b", {}) != before


@pytest.mark.parametrize("name", ["AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"])
def test_case_81_a_renewed_profile_is_another_client(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.setenv(name, str(tmp_path / "profile"))
    absent = client_key("b", {})
    (tmp_path / "profile").write_text("[default]\n")
    first = client_key("b", {})
    (tmp_path / "renewed").write_text("[default]\n")
    (tmp_path / "renewed").replace(tmp_path / "profile")
    assert len({absent, first, client_key("b", {})}) == 3
