"""Answers that HTTP allows and few servers give, what stands before the store, and options that few users set."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import re
import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

import pytest
from typing_extensions import override

from dcpfs.errors import ConfigError, StorageError, UnsupportedOperationError
from dcpfs.storage.location import Location
from dcpfs.storage.s3_http import _host
from dcpfs.storage.s3_store import S3Store
from dcpfs.testing.http_exchange import Response
from dcpfs.testing.s3_exchange import DroppedError, Exchange
from dcpfs.testing.s3_faults import Action, Answer, Effect, Fault, IgnoreRange, internal_error, slow_down
from dcpfs.testing.s3_service import Dialect
from dcpfs.testing.scripted_s3 import ScriptedS3Server
from dcpfs.testing.tls import TlsAuthority
from tests.faults.s3_scene import LARGE, MIB, PARTS, PREFIX, RETRY, SMALL, open_store, write_large

pytestmark = pytest.mark.usefixtures("hear_everything")

_LENGTH = re.compile(rb"Content-Length: \d+\r\n")
_TOKEN = re.compile(rb"<NextContinuationToken>.*?</NextContinuationToken>")


def read(store: S3Store, start: int, size: int, name: str = "x") -> bytes:
    buffers = [bytearray(size // 3), bytearray(size - size // 3)]
    store.read_into(name, start, [memoryview(buffer) for buffer in buffers])
    return b"".join(buffers)


@dataclass
class _LastOne(Action):
    """The server says that it closes after this answer, and does; the last bytes may be missing."""

    missing_bytes: int = 0

    @override
    def send(self, exchange: Exchange, fault: Fault, response: Response) -> None:
        last = replace(response, headers={**response.headers, "Connection": "close"})
        exchange.connection.send_head(last)
        exchange.connection.send_body(last, 0, last.body_bytes - self.missing_bytes)
        raise DroppedError


@dataclass
class _UntilTheClose(Action):
    """An answer without a length, whose end is that of the connection; the last bytes may be missing."""

    missing_bytes: int = 0

    @override
    def send(self, exchange: Exchange, fault: Fault, response: Response) -> None:
        last = replace(response, headers={**response.headers, "Connection": "close"})
        exchange.connection.send_raw(_LENGTH.sub(b"", exchange.connection.head_bytes(last)))
        exchange.connection.send_body(last, 0, last.body_bytes - self.missing_bytes)
        raise DroppedError


@dataclass
class _Announced(Action):
    """Before the answer comes another, that there will be one."""

    head: bytes

    @override
    def send(self, exchange: Exchange, fault: Fault, response: Response) -> None:
        exchange.connection.send_raw(self.head)
        exchange.connection.send(response)


class _WholeButItsEnd(IgnoreRange):
    """All of an object in place of a range, and the connection breaks after the range."""

    @override
    def send(self, exchange: Exchange, fault: Fault, response: Response) -> None:
        exchange.connection.send_head(response)
        exchange.connection.send_body(response, 0, response.body_bytes - 10)
        raise DroppedError


class _WithoutLength(Action):
    """Nothing is said about the length of an object."""

    @override
    def send(self, exchange: Exchange, fault: Fault, response: Response) -> None:
        exchange.connection.send_raw(_LENGTH.sub(b"", exchange.connection.head_bytes(response)))


class _WithoutToken(Action):
    """A page of a listing that says there is more, and not how to get it."""

    def _token(self, token: bytes) -> bytes:
        return b""

    @override
    def after_effect(self, exchange: Exchange, fault: Fault, response: Response) -> Response:
        body = _TOKEN.sub(lambda found: self._token(found.group()), b"".join(response.body))
        return replace(response, body=(body,))


class _SameToken(_WithoutToken):
    """Every page names the first one's next."""

    first = b""

    @override
    def _token(self, token: bytes) -> bytes:
        self.first = self.first or token
        return self.first


@dataclass
class _Told(Action):
    """A document of success, and nothing is done."""

    document: bytes

    @override
    def before_effect(self, exchange: Exchange, fault: Fault) -> Response | None:
        return Response(200, {"Content-Type": "application/xml"}, (self.document,))


class _NotTheStore(Action):
    """What stands before the store answers in its place, that it knows no such page."""

    @override
    def before_effect(self, exchange: Exchange, fault: Fault) -> Response | None:
        headers, page = {"Content-Type": "text/plain; charset=utf-8"}, (b"default backend - 404",)
        return Response(404, headers, page, send_body=exchange.head.method != "HEAD")


class TestBodies:
    @pytest.mark.parametrize("size", [300, 8 * MIB])
    def test_case_89_a_body_cut_short_on_a_connection_that_ends_is_read_again(
        self, s3_server: ScriptedS3Server, s3_store: S3Store, size: int
    ) -> None:
        s3_server.write(f"{PREFIX}/big", LARGE)
        s3_server.fail("GetObject", _LastOne(10))
        assert read(s3_store, 100, size, "big") == LARGE[100 : 100 + size]
        assert len(s3_server.requests("GetObject")) == 2

    def test_a_whole_body_on_a_connection_that_ends_is_read_once(
        self, s3_server: ScriptedS3Server, s3_store: S3Store
    ) -> None:
        s3_server.fail("*", _LastOne(), times=None)
        assert read(s3_store, 100, 300) == SMALL[100:400]
        assert s3_store.get("x") == SMALL
        assert s3_store.put("new", [SMALL]).size_bytes == len(SMALL)
        assert s3_server.operations() == ["GetObject", "GetObject", "PutObject", "HeadObject"]

    def test_case_89_a_body_whose_end_nobody_told_is_compared_with_the_objects_size(
        self, s3_server: ScriptedS3Server, s3_store: S3Store
    ) -> None:
        s3_server.fail("GetObject", _UntilTheClose(10))
        s3_server.fail("GetObject", _UntilTheClose())
        assert s3_store.get("x") == SMALL
        assert s3_server.operations() == ["GetObject", "HeadObject"] * 2
        s3_server.fail("GetObject", _UntilTheClose(10))
        assert read(s3_store, 100, 300) == SMALL[100:400]

    @pytest.mark.parametrize(
        "head",
        [
            b"HTTP/1.1 102 Processing\r\n\r\n",
            b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\nHTTP/1.1 103 Early Hints\r\n\r\n",
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 102 Processing\r\n\r\n",
        ],
        ids=["processing", "hints", "both"],
    )
    def test_an_announcement_is_not_taken_for_the_answer(
        self, s3_server: ScriptedS3Server, s3_store: S3Store, head: bytes
    ) -> None:
        s3_server.fail("*", _Announced(head), times=None)
        assert s3_store.put("new", [b"content"]).size_bytes == 7
        write_large(s3_store, "large")
        assert read(s3_store, 100, 300) == SMALL[100:400]
        assert s3_store.get("new") == b"content"
        assert s3_server.read(f"{PREFIX}/large") == LARGE
        assert s3_server.operations().count("PutObject") == 1

    def test_what_comes_after_what_was_wanted_may_break(self, s3_server: ScriptedS3Server, s3_store: S3Store) -> None:
        s3_server.fail("GetObject", _WholeButItsEnd())
        assert read(s3_store, 100, 300) == SMALL[100:400]
        assert len(s3_server.requests("GetObject")) == 1

    def test_case_31_an_answer_without_a_size_is_no_reason_to_delete(
        self, s3_server: ScriptedS3Server, s3_store: S3Store
    ) -> None:
        s3_server.fail("HeadObject", _WithoutLength())
        assert s3_store.put("new", [SMALL]).size_bytes == len(SMALL)
        s3_server.fail("HeadObject", _WithoutLength(), times=None)
        with pytest.raises(StorageError, match="how large"):
            s3_store.put("new", [SMALL])
        assert s3_server.read(f"{PREFIX}/new") == SMALL

    def test_a_completion_is_recognized_by_a_clock_of_any_form(
        self, s3_server: ScriptedS3Server, s3_store: S3Store
    ) -> None:
        class _Headers(Action):
            def __init__(self, **headers: str) -> None:
                self.headers = headers

            @override
            def send(self, exchange: Exchange, fault: Fault, response: Response) -> None:
                exchange.connection.send(replace(response, headers={**response.headers, **self.headers}))

        s3_server.fail("CreateMultipartUpload", _Headers(Date="Mon, 01 Jan 2024 00:00:00 -0000"))
        s3_server.fail("HeadObject", _Headers(ETag='"of-its-own"'), times=None)
        s3_server.fail("CompleteMultipartUpload", internal_error(Effect.APPLIED))
        write_large(s3_store)
        assert s3_server.read(f"{PREFIX}/new") == LARGE
        assert len(s3_server.requests("CompleteMultipartUpload")) == 1


class TestListings:
    @pytest.mark.parametrize("action", [_WithoutToken(), _SameToken()], ids=["no token", "the same token"])
    def test_a_listing_that_says_there_is_more_and_not_how_to_get_it_is_an_error(self, action: Action) -> None:
        with ScriptedS3Server(dialect=Dialect(page_size=2)) as server:
            for name in ("a/1", "b/1", "c/1", "d/1", "e/1"):
                server.write(f"{PREFIX}/{name}", b"1")
            server.fail("ListObjectsV2", action, times=None)
            with contextlib.closing(open_store(server)) as store:
                for listing in (store.list, store.list_directories):
                    with pytest.raises(UnsupportedOperationError, match="there is more"):
                        list(listing())
            assert len(server.requests()) <= 4


class TestDeletes:
    def test_one_that_is_gone_does_not_hide_that_another_stayed(self, scripted_s3: ScriptedS3Server) -> None:
        """Google's store knows no bulk delete, and says of what is gone that it is not there."""
        for name in ("x", "y"):
            scripted_s3.write(f"{PREFIX}/{name}", b"1")
        scripted_s3.fail("DeleteObjects", Answer(400, "InvalidArgument"), times=None)
        scripted_s3.fail(
            lambda request: request.operation == "DeleteObject" and request.key.endswith("absent"),
            Answer(404, "NoSuchKey"),
            times=None,
        )
        scripted_s3.fail(
            lambda request: request.operation == "DeleteObject" and request.key.endswith("y"), slow_down(), times=2
        )
        with contextlib.closing(open_store(scripted_s3)) as store:
            store.delete(["absent", "x", "y"])
            assert scripted_s3.stored_keys() == []
            store.delete(["absent", "absent too"])

    @pytest.mark.parametrize("key", [b"", b"<Key>another</Key>"], ids=["no", "another"])
    def test_a_failure_that_names_no_key_of_ours_is_one_of_ours(
        self, s3_server: ScriptedS3Server, s3_store: S3Store, key: bytes
    ) -> None:
        failed = (
            b"<DeleteResult><Error>" + key + b"<Code>InternalError</Code><Message>m</Message></Error></DeleteResult>"
        )
        s3_server.fail("DeleteObjects", _Told(failed))
        s3_store.delete(["x", "y"])
        assert s3_server.stored_keys() == []
        assert s3_server.operations() == ["DeleteObjects", "DeleteObjects"]


@pytest.mark.parametrize("times", [1, 2])
def test_a_page_that_is_not_the_stores_does_not_say_that_something_is_absent(
    scripted_s3: ScriptedS3Server, times: int
) -> None:
    for name in ("x", "y", "z"):
        scripted_s3.write(f"{PREFIX}/{name}", SMALL)
    with contextlib.closing(open_store(scripted_s3)) as store:
        store.head("x")
        for operation, verb, expected in (
            ("GetObject", lambda: store.get("x"), SMALL),
            ("GetObject", lambda: store.get_tail("x", 3), (SMALL[-3:], len(SMALL))),
            ("GetObject", lambda: read(store, 1, 300), SMALL[1:301]),
            ("HeadObject", lambda: store.exists("x"), True),
            ("HeadObject", lambda: store.exists("absent"), False),
            ("ListObjectsV2", lambda: sorted(info.path for info in store.list()), ["x", "y", "z"]),
            ("DeleteObject", lambda: store.delete(["x"]), None),
            ("DeleteObjects", lambda: store.delete(["y", "z"]), None),
            ("ListObjectsV2", lambda: list(store.list()), []),
        ):
            fault = scripted_s3.fail(operation, _NotTheStore(), times=times)
            assert verb() == expected
            assert fault.hits
            scripted_s3.reset_faults()
        assert scripted_s3.stored_keys() == []
        scripted_s3.write(f"{PREFIX}/x", SMALL)
        scripted_s3.fail("*", _NotTheStore(), times=None)
        for verb in (lambda: store.get("x"), lambda: store.exists("x"), lambda: store.delete(["x"])):
            with pytest.raises(StorageError, match="not the store's"):
                verb()


@pytest.mark.parametrize(
    "url",
    [
        "http://store:80/b/k",
        "https://store:443/b/k",
        "https://store:80/b/k",
        "http://store:443/b/k?x",
        "http://Store.Example:9000/b/k",
        "http://user:word@store:9000/b",
        "http://[::1]:9000/b",
        "https://[FE80::1]:443/b",
        "http://store",
    ],
)
def test_the_host_is_told_as_it_is_signed(url: str) -> None:
    from botocore.auth import _host_from_url

    assert _host(urlsplit(url)) == _host_from_url(url)


def test_an_endpoint_in_capitals_is_the_same(scripted_s3: ScriptedS3Server) -> None:
    endpoint = f"http://LocalHost:{scripted_s3.port}"
    style = {"s3": {"addressing_style": "path"}}
    with contextlib.closing(open_store(scripted_s3, endpoint_url=endpoint, config_kwargs=style)) as store:
        store.put("new", [SMALL])
        assert store.get("new") == SMALL


@contextlib.contextmanager
def _refusing_proxy(answer: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """A proxy that opens no way."""
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                with client, contextlib.suppress(OSError):
                    asked.append(client.recv(1 << 16))
                    client.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", asked
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(10)


def test_a_proxy_that_opens_no_way_for_now_is_asked_again(tls_authority: TlsAuthority) -> None:
    with (
        ScriptedS3Server(tls=tls_authority) as server,
        _refusing_proxy(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n") as (url, asked),
        contextlib.closing(open_store(server, config_kwargs={"proxies": {"https": url}})) as store,
    ):
        with pytest.raises(StorageError, match="503 Service Unavailable"):
            store.get("x")
        assert len(asked) == RETRY.attempts
        assert server.requests() == []


class TestChecksums:
    @pytest.mark.parametrize("secure", [False, True], ids=["http", "https"])
    @pytest.mark.parametrize("algorithm", ["CRC32", "SHA1", "SHA256"])
    def test_case_77_the_algorithm_that_the_user_asks_for_is_used(
        self, tls_authority: TlsAuthority, algorithm: str, secure: bool
    ) -> None:
        def wanted(content: bytes) -> str:
            crc = zlib.crc32(content).to_bytes(4, "big")
            found = crc if algorithm == "CRC32" else hashlib.new(algorithm.lower(), content).digest()
            return base64.b64encode(found).decode()

        with (
            ScriptedS3Server(tls=tls_authority if secure else None) as server,
            contextlib.closing(open_store(server, s3_additional_kwargs={"ChecksumAlgorithm": algorithm})) as store,
        ):
            store.put("small", [SMALL[:10], SMALL[10:]])
            write_large(store)
            assert server.read(f"{PREFIX}/small") == SMALL
            assert server.read(f"{PREFIX}/new") == LARGE
            (put,) = server.requests("PutObject")
            assert put.header(f"x-amz-checksum-{algorithm.lower()}") == wanted(SMALL)
            assert (put.header("x-amz-trailer"), put.header("content-encoding")) == (None, None)
            for part in server.requests("UploadPart"):
                start = ((part.part_number or 0) - 1) * (PARTS.part_bytes or 0)
                content = LARGE[start : start + (PARTS.part_bytes or 0)]
                assert part.header(f"x-amz-checksum-{algorithm.lower()}") == wanted(content)
            (created,) = server.requests("CreateMultipartUpload")
            assert created.header("x-amz-checksum-algorithm") == algorithm
            store.delete(["small", "new"])
            assert server.stored_keys() == []

    def test_case_77_an_algorithm_that_is_not_there_is_told_before_anything_is_sent(
        self, scripted_s3: ScriptedS3Server
    ) -> None:
        with pytest.raises(ConfigError, match="'CRC64NVME'; give one of CRC32, SHA1, SHA256"):
            open_store(scripted_s3, s3_additional_kwargs={"ChecksumAlgorithm": "CRC64NVME"})

    def test_case_77_the_environment_may_ask_for_checksums(
        self, scripted_s3: ScriptedS3Server, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_supported")
        with contextlib.closing(open_store(scripted_s3)) as store:
            store.put("new", [SMALL])
        (put,) = scripted_s3.requests("PutObject")
        assert put.header("x-amz-checksum-crc32") is not None


_SESSION = (
    b'<?xml version="1.0" encoding="UTF-8"?><CreateSessionResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
    b"<Credentials><AccessKeyId>SESSIONKEY</AccessKeyId><SecretAccessKey>s</SecretAccessKey>"
    b"<SessionToken>t</SessionToken><Expiration>2999-01-01T00:00:00Z</Expiration></Credentials></CreateSessionResult>"
)


@pytest.mark.parametrize("first", ["get", "put", "large", "head"])
def test_case_77_a_directory_bucket_has_its_session_opened(first: str) -> None:
    """S3 Express signs with the keys of a session, which botocore opens on the way to the first request."""
    bucket = "dcpfs--use1-az4--x-s3"
    with ScriptedS3Server(bucket=bucket, verify_signatures=False) as server:
        server.fail(lambda request: "session" in request.query, _Told(_SESSION), times=None)
        server.write(f"{PREFIX}/x", SMALL)
        location = Location(server.url(PREFIX), server.storage_options)
        with contextlib.closing(S3Store(location, transfer=PARTS, retry=RETRY)) as store:
            verbs: dict[str, Callable[[], object]] = {
                "get": lambda: store.get("x"),
                "put": lambda: store.put("y", [SMALL]),
                "large": lambda: write_large(store),
                "head": lambda: store.head("x"),
            }
            verbs[first]()
            for verb in verbs.values():
                verb()
        assert server.read(f"{PREFIX}/new") == LARGE
        sessions = [request for request in server.requests() if "session" in request.query]
        assert [request.access_key for request in sessions] == [server.access_key]
        assert {request.access_key for request in server.requests() if request not in sessions} == {"SESSIONKEY"}
