"""The S3 store on real servers: the one suite, and what only S3 has."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import s3fs

from dcpfs.config import TransferConfig
from dcpfs.errors import BucketNotFoundError, ObjectExistsError, PermissionDeniedError, StorageError
from dcpfs.storage.location import Location
from dcpfs.storage.s3_store import S3Store
from dcpfs.storage.store import Store
from dcpfs.testing.conformance import StoreConformance, pattern, write_parts
from dcpfs.testing.loopback import LoopbackOnly
from dcpfs.testing.scripted_s3 import ScriptedS3Server
from dcpfs.testing.servers import S3Server
from dcpfs.testing.tls import TlsAuthority
from tests.conformance.servers_here import RETRY

MIB = 1 << 20
PARTS = TransferConfig(part_bytes=5 * MIB)
PLAIN = pattern(5000)
LARGE = pattern(11 * MIB + 3)


def opened(location: Location) -> S3Store:
    return S3Store(location, transfer=PARTS, retry=RETRY)


class _OnS3(StoreConformance):
    large_bytes = 11 * MIB + 3

    def reopen(self, store: Store) -> Store:
        return opened(store.location)


class TestSeaweed(_OnS3):
    backend = "SeaweedServer"
    odd_names = tuple(name for name in StoreConformance.odd_names if "\\" not in name)
    """SeaweedFS lists a backslash as a slash."""

    @pytest.fixture
    def store(self, s3_prefix: Location) -> Iterator[Store]:
        with contextlib.closing(opened(s3_prefix)) as store:
            yield store


class TestRclone(_OnS3):
    """Objects are files here: three tests ask for less."""

    backend = "RcloneServer"

    @pytest.fixture
    def store(self, rclone_prefix: Location) -> Iterator[Store]:
        with contextlib.closing(opened(rclone_prefix)) as store:
            yield store

    def test_parts_may_come_in_any_order_from_many_threads(self, store: Store) -> None:
        """A part that has reached the file can't be written again with other bytes."""
        content = pattern(self.large_bytes)
        sink = store.open_sink("large", len(content))
        with ThreadPoolExecutor(3) as pool:
            list(
                pool.map(lambda part: sink.write_part(part, [content[part.start : part.stop]]), reversed(sink.parts()))
            )
        sink.commit()
        assert self.reopen(store).get("large") == content

    def test_a_deletion_takes_what_is_named_and_no_more(self, store: Store) -> None:
        """A key that is the name of a directory can't be deleted: an error, not silence."""
        for name in ("dir/0", "dir/1", "directory/kept"):
            store.put(name, [b"x"])
        store.delete(["dir/0", "absent", "dir/1", "absent/too", "dir/0"])
        assert [found.path for found in self.reopen(store).list()] == ["directory/kept"]
        with pytest.raises(StorageError, match="InternalError"):
            store.delete(["directory"])

    def test_a_conditional_put_spares_an_old_object(self, store: Store) -> None:
        """The condition is ignored: only looking before writing is left."""
        store.put("object", [b"first"], if_absent=True)
        with pytest.raises(ObjectExistsError):
            store.put("object", [b"second"], if_absent=True)
        assert store.get("object") == b"first"


class TestScripted(_OnS3):
    """Strict about signatures, checksums and part sizes."""

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        with ScriptedS3Server(minimum_part_bytes=5 * MIB) as server:
            location = Location(server.url("a/b"), server.storage_options)
            with contextlib.closing(opened(location)) as store:
                yield store


@pytest.fixture(params=["seaweed", "rclone_s3"])
def server(request: pytest.FixtureRequest) -> S3Server:
    found: S3Server = request.getfixturevalue(request.param)
    return found


def at(server: S3Server, **options: object) -> Location:
    return Location(server.url(f"test-{uuid.uuid4().hex}"), {**server.storage_options, **options})


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"s3": {"payload_signing_enabled": True}},
        {"request_checksum_calculation": "when_supported"},
        {"signature_version": "s3v4", "s3": {"addressing_style": "path"}},
        {"retries": {"max_attempts": 7}, "max_pool_connections": 3},
    ],
    ids=["defaults", "signed payload", "checksums", "explicit style", "own retries"],
)
def test_case_77_case_85_settings_of_the_client_work(server: S3Server, config: dict[str, object]) -> None:
    with contextlib.closing(opened(at(server, config_kwargs=config))) as store:
        store.put("small", [PLAIN[:10], PLAIN[10:]])
        sink = store.open_sink("large", len(LARGE))
        write_parts(sink, LARGE)
        assert sink.commit().size_bytes == len(LARGE)
        assert store.get("small") == PLAIN
        assert store.get("large") == LARGE


def test_case_77_s3fs_reads_what_the_store_wrote_and_the_other_way_round(server: S3Server) -> None:
    location = at(server)
    filesystem = s3fs.S3FileSystem(**server.storage_options, skip_instance_cache=True)
    with contextlib.closing(opened(location)) as store:
        sink = store.open_sink("d/large", len(LARGE))
        write_parts(sink, LARGE)
        sink.commit()
        assert filesystem.cat_file(f"{location.path}/d/large") == LARGE
        filesystem.pipe_file(f"{location.path}/d/theirs", PLAIN)
        assert store.get("d/theirs") == PLAIN


def test_case_31_case_83_an_aborted_upload_leaves_no_parts(server: S3Server) -> None:
    location = at(server)
    with contextlib.closing(opened(location)) as store:
        sink = store.open_sink("large", len(LARGE))
        part = sink.parts()[1]
        sink.write_part(part, [LARGE[part.start : part.stop]])
        sink.abort()
        sink.abort()
        assert not store.exists("large")
        filesystem = s3fs.S3FileSystem(**server.storage_options, skip_instance_cache=True)
        uploads = filesystem.call_s3("list_multipart_uploads", Bucket=server.bucket).get("Uploads") or []
        assert [one for one in uploads if one["Key"].startswith(location.path.partition("/")[2])] == []


def test_case_86_a_missing_bucket_is_named_and_not_made(server: S3Server) -> None:
    with contextlib.closing(opened(Location("s3://no-such-bucket/x", server.storage_options))) as store:
        sink = store.open_sink("large", len(LARGE))
        for act in (
            lambda: store.put("a", [b"1"]),
            lambda: store.get("a"),
            lambda: store.head("a"),
            lambda: store.exists("a"),
            lambda: list(store.list()),
            lambda: list(store.list_directories()),
            lambda: write_parts(sink, LARGE),
        ):
            with pytest.raises(BucketNotFoundError, match="'no-such-bucket' does not exist"):
                act()


def test_a_wrong_secret_is_an_error_that_does_not_show_it(server: S3Server) -> None:
    with contextlib.closing(opened(at(server, secret="not-the-secret"))) as store:
        for act in (lambda: store.put("a", [b"1"]), lambda: store.get("a"), lambda: list(store.list())):
            with pytest.raises(PermissionDeniedError) as caught:
                act()
            assert "not-the-secret" not in f"{caught.value!r} {caught.value.__cause__!r}"


def test_case_78_more_than_a_page_is_listed_and_deleted(seaweed: S3Server) -> None:
    with contextlib.closing(opened(at(seaweed))) as store:
        names = [f"d{number % 3}/{number}" for number in range(1005)]
        threads = [
            threading.Thread(target=lambda first=first: [store.put(name, [b"x"]) for name in names[first::4]])
            for first in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(found.path for found in store.list()) == sorted(names)
        assert sorted(store.list_directories()) == ["d0", "d1", "d2"]
        store.delete([*names, "absent"])
        assert list(store.list()) == []


class _Proxy:
    """A forward proxy: absolute targets for plain HTTP, CONNECT for TLS. Remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://user:proxy-password@127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            head = b""
            while b"\r\n\r\n" not in head:
                received = client.recv(1 << 16)
                if not received:
                    return
                head += received
            line, _, rest = head.partition(b"\r\n")
            method, target, version = line.decode().split(" ")
            authorized = b"proxy-authorization: basic " in head.lower()
            self.asked.append(f"{method} {target}" if authorized else f"{method} without authorization")
            if method == "CONNECT":
                host, _, port = target.partition(":")
                first = b""
                client.sendall(b"HTTP/1.1 200 Connected\r\n\r\n")
            else:
                # One request a connection is enough here: the answer says so to the client.
                address, slash, path = target.removeprefix("http://").partition("/")
                host, _, port = address.partition(":")
                first = f"{method} {slash}{path} {version}\r\n".encode() + b"Connection: close\r\n" + rest
            with socket.create_connection((host, int(port))) as server:
                server.sendall(first)
                _relay(client, server)


def _relay(one: socket.socket, other: socket.socket) -> None:
    peers = {one: other, other: one}
    while True:
        for source in select.select(list(peers), [], [])[0]:
            received = source.recv(1 << 16)
            if not received:
                return
            peers[source].sendall(received)


@pytest.fixture
def proxy() -> Iterator[_Proxy]:
    proxy = _Proxy()
    yield proxy
    proxy.close()


@pytest.mark.parametrize("secure", [False, True], ids=["http", "https"])
@pytest.mark.parametrize("how", ["environment", "config"])
def test_case_77_proxies_of_the_environment_and_the_client_are_used(
    proxy: _Proxy, tls_authority: TlsAuthority, monkeypatch: pytest.MonkeyPatch, secure: bool, how: str
) -> None:
    scheme = "https" if secure else "http"
    for name in ("no_proxy", "NO_PROXY", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    options: dict[str, object] = {}
    if how == "environment":
        monkeypatch.setenv(f"{scheme}_proxy", proxy.url)
    else:
        options["config_kwargs"] = {"proxies": {scheme: proxy.url}}
    with ScriptedS3Server(tls=tls_authority if secure else None) as server:
        location = Location(server.url("run"), {**server.storage_options, **options})
        with contextlib.closing(opened(location)) as store, LoopbackOnly() as guard:
            store.put("small", [PLAIN])
            sink = store.open_sink("large", len(LARGE))
            write_parts(sink, LARGE)
            sink.commit()
            assert store.get("small") == PLAIN
            assert store.get("large") == LARGE
        wanted = f"CONNECT 127.0.0.1:{server.port}" if secure else f"http://127.0.0.1:{server.port}/"
        assert proxy.asked
        assert all(wanted in asked for asked in proxy.asked)
        assert guard.foreign == []


def test_case_77_no_proxy_is_honoured(
    proxy: _Proxy, monkeypatch: pytest.MonkeyPatch, scripted_s3: ScriptedS3Server
) -> None:
    monkeypatch.setenv("http_proxy", proxy.url)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with contextlib.closing(opened(Location(scripted_s3.url("run"), scripted_s3.storage_options))) as store:
        store.put("small", [PLAIN])
        assert store.get("small") == PLAIN
    assert proxy.asked == []
