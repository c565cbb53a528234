"""What tests share: servers, each started when first asked for and ended with its process, and a quiet collector."""

from __future__ import annotations

import gc
import logging
import os
import sys
import uuid
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from dcpfs.background import free_memory
from dcpfs.storage.location import Location
from dcpfs.testing.scripted_s3 import ScriptedS3Server
from dcpfs.testing.servers import RcloneServer, SeaweedServer
from dcpfs.testing.tls import TlsAuthority

# How long an example takes on a busy machine says nothing of what it tests. Every run of the suite tries the same ones,
# but that which searches: `tests.properties.bounds`.
settings.register_profile(
    "no clocks",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=int(os.environ.get("DCPFS_PROPERTY_SCALE", "0")) == 0,
    database=None,
)
settings.load_profile("no clocks")


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """A test that was cut short leaves neither silence nor a process group to the next one."""
    yield
    logging.disable(logging.NOTSET)
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.fixture(scope="session")
def seaweed() -> Iterator[SeaweedServer]:
    with SeaweedServer() as server:
        yield server


@pytest.fixture(scope="session")
def rclone_s3() -> Iterator[RcloneServer]:
    with RcloneServer() as server:
        yield server


@pytest.fixture
def s3_prefix(seaweed: SeaweedServer) -> Location:
    """A prefix on SeaweedFS that nobody has used, with the options to reach it."""
    return Location(seaweed.url(f"test-{uuid.uuid4().hex}"), seaweed.storage_options)


@pytest.fixture
def rclone_prefix(rclone_s3: RcloneServer) -> Location:
    """A prefix on rclone's S3 server that nobody has used, with the options to reach it."""
    return Location(rclone_s3.url(f"test-{uuid.uuid4().hex}"), rclone_s3.storage_options)


@pytest.fixture
def scripted_s3() -> Iterator[ScriptedS3Server]:
    """A fresh scripted S3 server."""
    with ScriptedS3Server() as server:
        yield server


@pytest.fixture(scope="session")
def tls_authority(tmp_path_factory: pytest.TempPathFactory) -> TlsAuthority:
    """Signs the certificate of every TLS server of the tests."""
    return TlsAuthority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def _memory_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a machine has free says nothing of what is tested; a test of too little says how much there is."""
    monkeypatch.setattr(free_memory, "available_bytes", lambda: None)


@pytest.fixture
def _uncollected() -> Iterator[None]:
    """Nothing is freed but by the last reference to it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
