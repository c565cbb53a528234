"""A scripted S3 server and a store on it, one a test module: making a client takes longer than a test."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from dcpfs.storage.s3_store import S3Store
from dcpfs.testing.loopback import LoopbackOnly
from dcpfs.testing.scripted_s3 import ScriptedS3Server
from tests.faults.kill_storm import ForkedRanks
from tests.faults.s3_scene import PREFIX, SMALL, open_store


@pytest.fixture
def hear_everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="dcpfs")


@pytest.fixture(scope="module")
def forked_ranks() -> Iterator[ForkedRanks]:
    with ForkedRanks() as ranks:
        yield ranks


@pytest.fixture(scope="module")
def module_s3_server() -> Iterator[ScriptedS3Server]:
    with ScriptedS3Server() as server:
        yield server


@pytest.fixture(scope="module")
def module_s3_store(module_s3_server: ScriptedS3Server) -> Iterator[S3Store]:
    store = open_store(module_s3_server)
    yield store
    store.close()


@pytest.fixture
def s3_server(module_s3_server: ScriptedS3Server) -> Iterator[ScriptedS3Server]:
    """Empty but for two objects, and a check that nobody was asked but this server."""
    module_s3_server.reset()
    for name in ("x", "y"):
        module_s3_server.write(f"{PREFIX}/{name}", SMALL)
    with LoopbackOnly() as guard:
        yield module_s3_server
    assert guard.foreign == []
    assert module_s3_server.hosts() <= {f"127.0.0.1:{module_s3_server.port}"}
    assert "CreateBucket" not in module_s3_server.operations()


@pytest.fixture
def s3_store(s3_server: ScriptedS3Server, module_s3_store: S3Store) -> S3Store:
    """Knows that its bucket exists, so that every request below belongs to the verb."""
    module_s3_store.head("x")
    s3_server.forget()
    return module_s3_store
