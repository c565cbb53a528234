"""The one suite over real servers of every other kind of storage, each started here on a loopback port.

A server that a machine without npm can't have is skipped with that reason. Files are small: the servers share two
cores with everything else.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from dcpfs.config import RetryConfig, TransferConfig
from dcpfs.errors import MissingBackendError
from dcpfs.storage.location import Location
from dcpfs.storage.opening import open_store
from dcpfs.storage.store import Store
from dcpfs.testing.conformance import ODD_NAMES, StoreConformance
from dcpfs.testing.server_process import LoopbackServer
from dcpfs.testing.servers import JuicefsServer
from dcpfs.testing.servers_files import AsyncsshServer, FtpServer, SftpServer, WebdavServer
from dcpfs.testing.servers_objects import AzuriteServer, GcsServer

SMALL_PARTS = TransferConfig(part_bytes=64 << 10)
QUICK = RetryConfig(attempts=3, initial_backoff_seconds=0.001, max_backoff_seconds=0.001)


class _OnServer(StoreConformance):
    server_class: type[LoopbackServer]
    wrapper = ""

    @pytest.fixture(scope="class")
    @classmethod
    def server(cls) -> Iterator[LoopbackServer]:
        try:
            with cls.server_class() as server:
                yield server
        except MissingBackendError as error:
            pytest.skip(str(error))

    def location(self, server: LoopbackServer) -> Location:
        return Location(self.wrapper + server.url(f"test-{uuid.uuid4().hex}"), server.storage_options)

    @pytest.fixture
    def store(self, server: LoopbackServer) -> Iterator[Store]:
        store = open_store(self.location(server), transfer=SMALL_PARTS, retry=QUICK)
        yield store
        store.close()

    def reopen(self, store: Store) -> Store:
        return open_store(store.location, transfer=SMALL_PARTS, retry=QUICK)


class TestJuicefs(_OnServer):
    server_class = JuicefsServer
    # Metadata of JuiceFS hold no backslash or the like apart: what its gateway refuses is said by the server.


class TestGcs(_OnServer):
    server_class = GcsServer


class TestAzure(_OnServer):
    server_class = AzuriteServer
    # The client puts these characters into a URL as they are; Azure itself takes a backslash for a slash.
    odd_names = tuple(name for name in ODD_NAMES if not set(name) & set("\\?#"))


class TestSftpRclone(_OnServer):
    server_class = SftpServer

    @pytest.mark.skip(reason="rclone's rename deletes the old file first; OpenSSH and asyncssh replace it in one step")
    def test_a_reader_sees_the_old_object_or_the_new_one(self, store: Store) -> None: ...


class TestSftpAsyncssh(_OnServer):
    server_class = AsyncsshServer


class TestWebdav(_OnServer):
    server_class = WebdavServer


class TestFtp(_OnServer):
    server_class = FtpServer
