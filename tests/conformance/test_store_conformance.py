"""The one suite over the generic store's filesystems. Local files and S3 have modules of their own."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from dcpfs.config import RetryConfig, TransferConfig
from dcpfs.storage.fsspec_store import FsspecStore
from dcpfs.storage.location import Location
from dcpfs.storage.store import Store
from dcpfs.testing.conformance import StoreConformance
from tests.conformance.dummy_filesystems import registered_dummies

SMALL_PARTS = TransferConfig(part_bytes=64 << 10)
QUICK = RetryConfig(attempts=3, initial_backoff_seconds=0.001, max_backoff_seconds=0.001)


class _Generic(StoreConformance):
    def reopen(self, store: Store) -> Store:
        return FsspecStore(store.location, transfer=SMALL_PARTS, retry=QUICK)


@pytest.mark.parametrize("store", ["memory://{}", "dir::memory://{}", "simplecache::memory://{}"], indirect=True)
class TestMemory(_Generic):
    backend = "memory"
    shared_between_processes = False

    @pytest.fixture
    def store(self, request: pytest.FixtureRequest) -> Iterator[Store]:
        yield from _opened(request.param.format(uuid.uuid4().hex))


@pytest.mark.parametrize("store", ["dummyobj://bucket/{}", "dummytree:///{}", "dir::dummytree:///{}"], indirect=True)
class TestUnlisted(_Generic):
    shared_between_processes = False

    @pytest.fixture
    def store(self, request: pytest.FixtureRequest) -> Iterator[Store]:
        with registered_dummies():
            yield from _opened(request.param.format(uuid.uuid4().hex))


class TestDirectoryOfFiles(_Generic):
    """Local files through fsspec, as sftp or webdav would be: temporary name, then move."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        yield from _opened(f"dir::file://{tmp_path}/store")


def _opened(url: str) -> Iterator[Store]:
    store = FsspecStore(Location(url), transfer=SMALL_PARTS, retry=QUICK)
    yield store
    store.close()
