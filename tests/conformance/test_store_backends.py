"""The one suite over real servers of every other kind of storage, each started here on a loopback port.

A server that a machine does not have is skipped with that reason, as `tests.conformance.servers_here` says. Files are
small: the servers share two cores with everything else.
"""

from __future__ import annotations

import contextlib
import ftplib
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dcpfs.config import TransferConfig
from dcpfs.errors import ObjectExistsError, StorageError
from dcpfs.storage.filesystems import open_filesystem
from dcpfs.storage.fsspec_store import FsspecStore
from dcpfs.storage.location import Location
from dcpfs.storage.opening import open_store
from dcpfs.storage.store import Store
from dcpfs.testing.conformance import ODD_NAMES, StoreConformance, pattern, read_range
from dcpfs.testing.server_process import LoopbackServer
from dcpfs.testing.servers import JuicefsServer, RcloneServer, SeaweedServer
from dcpfs.testing.servers_files import (
    AsyncsshServer,
    FileServer,
    FtpServer,
    RcloneFtpServer,
    SftpServer,
    WebdavServer,
    WsgidavServer,
)
from dcpfs.testing.servers_objects import AzuriteServer, GcsServer
from dcpfs.testing.servers_obstore import ObstoreServer, obstore_installed
from dcpfs.testing.servers_system import OpensshServer, ParamikoSshServer, SambaServer
from dcpfs.testing.tcp_proxy import Cut, CutPoint, Direction, TcpProxy
from tests.conformance.paramiko_alone import paramiko_alone
from tests.conformance.servers_here import RETRY, started

SMALL_PARTS = TransferConfig(part_bytes=64 << 10)


class _OnServer(StoreConformance):
    server_class: type[LoopbackServer]
    wrapper = ""

    @pytest.fixture(scope="class")
    @classmethod
    def server(cls) -> Iterator[LoopbackServer]:
        with started(cls.server_class) as server:
            yield server

    def location(self, server: LoopbackServer) -> Location:
        url, options = server.url(f"test-{uuid.uuid4().hex}"), server.storage_options
        return Location(self.wrapper + url, {url.partition("://")[0]: options} if self.wrapper else options)

    @pytest.fixture
    def store(self, server: LoopbackServer) -> Iterator[Store]:
        store = open_store(self.location(server), transfer=SMALL_PARTS, retry=RETRY)
        yield store
        store.close()

    def reopen(self, store: Store) -> Store:
        return open_store(store.location, transfer=SMALL_PARTS, retry=RETRY)


class TestJuicefs(_OnServer):
    server_class = JuicefsServer
    large_bytes = 11 * 1024 * 1024 + 3  # parts of S3 have at least 5 MiB
    reopen = StoreConformance.reopen

    @pytest.fixture
    def store(self, server: LoopbackServer) -> Iterator[Store]:
        store = open_store(self.location(server), transfer=TransferConfig(part_bytes=5 * 1024 * 1024), retry=RETRY)
        yield store
        store.close()


class TestGcs(_OnServer):
    server_class = GcsServer


@pytest.mark.nightly
class TestGcsBehindCache(_OnServer):
    server_class = GcsServer
    wrapper = "blockcache::"


class TestAzure(_OnServer):
    server_class = AzuriteServer


class TestSftpRclone(_OnServer):
    server_class = SftpServer

    @pytest.mark.skip(reason="rclone's rename deletes the old file first; OpenSSH and asyncssh replace it in one step")
    def test_a_reader_sees_the_old_object_or_the_new_one(self, store: Store) -> None: ...


class TestSftpAsyncssh(_OnServer):
    server_class = AsyncsshServer


class TestSftpOpenssh(_OnServer):
    server_class = OpensshServer


@pytest.mark.nightly
class TestSftpOpensshInDirectory(_OnServer):
    server_class = OpensshServer
    wrapper = "dir::"


class TestSftpParamiko(_OnServer):
    """fsspec's own class, as where sshfs is not installed."""

    server_class = ParamikoSshServer

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def without_sshfs(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        with paramiko_alone(tmp_path_factory.mktemp("shadow")):
            yield


class TestWebdav(_OnServer):
    server_class = WebdavServer


class TestWebdavWsgidav(_OnServer):
    server_class = WsgidavServer
    # In the target of a move it takes encoded question marks and semicolons for those of a URL.
    odd_names = tuple(name for name in ODD_NAMES if not {"?", ";"} & set(name))

    def test_a_name_that_the_server_cuts_is_an_error(self, store: Store) -> None:
        """What was moved elsewhere does not count as written."""
        for name in ("dir/what?", "dir/what?if", "dir/a;b"):
            with pytest.raises(StorageError, match="it was moved to its name and is not there"):
                store.put(name, [b"x"])


class TestSmb(_OnServer):
    server_class = SambaServer


class TestFtp(_OnServer):
    server_class = FtpServer


class TestFtpRclone(_OnServer):
    server_class = RcloneFtpServer


class TestObstore(_OnServer):
    """Another client of S3 behind fsspec: obstore's class, served like any filesystem that nobody listed."""

    server_class = ObstoreServer

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def with_its_scheme(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        pytest.importorskip("obstore", reason="the client is not installed")
        with obstore_installed(tmp_path_factory.mktemp("scheme")):
            yield

    @pytest.mark.skip(reason="obstore's own threads do not survive a fork: a child hangs in its first call")
    def test_case_80_a_forked_process_uses_an_open_store(self, store: Store) -> None: ...

    @pytest.mark.skip(reason="SeaweedFS lists an emptied directory for a while; the store for S3 looks into it")
    def test_a_deletion_takes_what_is_named_and_no_more(self, store: Store) -> None: ...


class TestS3InDirectory(_OnServer):
    server_class = SeaweedServer
    wrapper = "dir::"
    large_bytes = 11 * 1024 * 1024 + 3
    odd_names = tuple(name for name in ODD_NAMES if "\\" not in name)  # SeaweedFS lists a backslash as a slash

    @pytest.fixture
    def store(self, server: LoopbackServer) -> Iterator[Store]:
        store = open_store(self.location(server), transfer=TransferConfig(part_bytes=5 * 1024 * 1024), retry=RETRY)
        yield store
        store.close()


def test_an_emulator_of_google_is_asked_nothing_of_the_control_plane() -> None:
    for endpoint, extended in (("http://127.0.0.1:1", False), ("https://storage.example", True)):
        opened = open_filesystem(Location("gs://bucket/x", {"endpoint_url": endpoint, "token": "anon"}))
        assert (type(opened.filesystem).__module__ == "gcsfs.extended_gcsfs") == extended


@pytest.mark.parametrize("kind", [AsyncsshServer, FtpServer])
def test_a_connection_that_was_lost_is_made_anew(kind: type[LoopbackServer]) -> None:
    with kind() as server:
        store = open_store(Location(server.url("run"), server.storage_options), retry=RETRY)
        assert isinstance(store, FsspecStore)
        store.put("object", [b"content"])
        filesystem = store._connection.filesystem().filesystem
        if kind is FtpServer:
            filesystem.ftp.sock.shutdown(socket.SHUT_RDWR)
        else:
            filesystem.loop.call_soon_threadsafe(filesystem.client.abort)
        assert store.get("object") == b"content"
        assert [info.path for info in store.list()] == ["object"]
        store.close()


@contextmanager
def data_connections_cut(after_bytes: int) -> Iterator[list[CutPoint]]:
    """Each of FTP's data connections breaks after so many bytes of a file, and tells whether so many came."""
    points: list[CutPoint] = []
    original = ftplib.FTP.makepasv
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:

        def makepasv(client: ftplib.FTP) -> tuple[str, int]:
            network = stack.enter_context(TcpProxy(original(client)[1]))
            points.append(network.cut_at(Cut.RESET, direction=Direction.TO_CLIENT, after_bytes=after_bytes))
            return "127.0.0.1", network.port

        patch.setattr(ftplib.FTP, "makepasv", makepasv)
        yield points


@pytest.mark.parametrize("kind", [FtpServer, RcloneFtpServer])
def test_a_range_of_a_large_file_over_ftp_costs_a_range(kind: type[FileServer]) -> None:
    size, known = 96 << 20, {start: pattern(1000, start) for start in (0, 5 << 20, (96 << 20) - 1000)}
    three_tries = RETRY.model_copy(update={"attempts": 3})
    with kind() as server:
        with server.data.joinpath("large").open("wb") as file:
            file.truncate(size)
            for start, content in known.items():
                file.seek(start)
                file.write(content)
        # What is in the buffers of sockets when the client hangs up has come as well: some MiB, not the file.
        with (
            data_connections_cut(size // 3) as points,
            contextlib.closing(open_store(Location(server.url(), server.storage_options), retry=three_tries)) as store,
        ):
            for start, content in known.items():
                assert read_range(store, "large", start, 10) == content[:10]
                assert read_range(store, "large", start, 1000) == content
            assert len(points) == 2 * len(known)
            assert not any(point.reached.is_set() for point in points)
            # The measure itself: who reads all of it is cut.
            with pytest.raises(StorageError):
                store.get("large")
            assert any(point.reached.is_set() for point in points[2 * len(known) :])


@pytest.mark.parametrize(("kind", "keeps"), [(SeaweedServer, True), (RcloneServer, False), (JuicefsServer, False)])
def test_a_server_that_ignores_conditions_is_found_out(kind: type[LoopbackServer], keeps: bool) -> None:
    with kind() as server, contextlib.closing(open_store(Location(server.url("run"), server.storage_options))) as store:
        assert not store.capabilities.conditional_put, "nothing is known before it was asked"
        store.put("mark", [b"whose"], if_absent=True)
        assert store.capabilities.conditional_put == keeps
        with pytest.raises(ObjectExistsError):
            store.put("mark", [b"another's"], if_absent=True)
        assert store.get("mark") == b"whose"
        # What is large is never sent twice for that, and what was found out stays.
        store.put("large", [pattern(5000)], if_absent=True)
        assert store.get("large") == pattern(5000)
        assert store.capabilities.conditional_put == keeps
