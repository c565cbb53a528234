"""The proxy passes on what it gets, delays answers, holds connections to a rate, and counts."""

from __future__ import annotations

import http.client
import os
import time
from collections.abc import Iterator

import boto3  # type: ignore[import-untyped] # it ships no types
import pytest
from botocore.client import BaseClient
from botocore.exceptions import ClientError

from benchmarks.object_memory import BLOCK_BYTES
from benchmarks.place import start_proxy
from benchmarks.settings import BUCKET, Link, Target
from benchmarks.sink_client import SinkConnection
from tests.unit.benchmarks.small_runs import refusing_port

pytestmark = pytest.mark.usefixtures("client_variables")

BIG = os.urandom(3 * BLOCK_BYTES + 12345)


@pytest.fixture(scope="module")
def port(sink: Target) -> Iterator[int]:
    assert sink.port is not None
    with start_proxy("127.0.0.1", sink.port, Link()) as port:
        yield port


@pytest.fixture
def client(port: int) -> Iterator[BaseClient]:
    client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}")
    yield client
    client.close()


@pytest.mark.parametrize("body", [b"", b"x", BIG], ids=["empty", "one", "big"])
def test_bodies_pass_both_ways_unchanged(client: BaseClient, body: bytes) -> None:
    client.put_object(Bucket=BUCKET, Key="a b/c+", Body=body)
    assert client.get_object(Bucket=BUCKET, Key="a b/c+")["Body"].read() == body
    assert client.head_object(Bucket=BUCKET, Key="a b/c+")["ContentLength"] == len(body)
    client.delete_object(Bucket=BUCKET, Key="a b/c+")
    with pytest.raises(ClientError, match=r"NoSuchKey|404"):
        client.get_object(Bucket=BUCKET, Key="a b/c+")


def test_requests_are_counted_by_verb_with_their_bytes(port: int) -> None:
    through, control = SinkConnection(port, counted=True), SinkConnection(port, counted=False)
    control.reset()
    through.put("n", [memoryview(b"12345")])
    through.put("m", [memoryview(BIG)])
    through.get_into("n", [memoryview(bytearray(3))], 1)
    through.delete("n")
    figures = control.figures()
    assert figures.requests_by_verb == {"PUT": 2, "GET": 1, "DELETE": 1}
    assert figures.received_bytes == 5 + len(BIG)
    assert 3 < figures.sent_bytes < 4096  # with the heads of four answers
    control.reset()
    assert control.figures().requests == 0


def test_chunked_bodies_end_where_they_end(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    control = SinkConnection(port, counted=False)
    control.reset()
    for number in range(2):
        connection.request("PUT", f"/{BUCKET}/chunked-{number}", iter([b"hello", b" ", BIG]), encode_chunked=True)
        assert connection.getresponse().read() == b""
    connection.request("GET", f"/{BUCKET}/chunked-1")
    assert connection.getresponse().read() == b"hello " + BIG
    connection.close()
    assert control.figures().requests_by_verb == {"PUT": 2, "GET": 1}
    assert control.figures().received_bytes == 2 * (6 + len(BIG))


def test_a_client_that_waits_for_the_word_to_go_on_gets_it(port: int) -> None:
    through = http.client.HTTPConnection("127.0.0.1", port)
    through.putrequest("PUT", f"/{BUCKET}/expected")
    through.putheader("Expect", "100-continue")
    through.putheader("Content-Length", "2")
    through.endheaders()
    assert through.sock is not None
    assert through.sock.recv(1024).startswith(b"HTTP/1.1 100 Continue")
    through.send(b"hi")
    assert through.getresponse().status == 200
    through.close()


def test_answers_come_late_and_connections_keep_to_their_rate(sink: Target) -> None:
    assert sink.port is not None
    with start_proxy("127.0.0.1", sink.port, Link(latency_ms=40, mb_per_second_per_connection=10)) as port:
        through, free = SinkConnection(port, counted=True), SinkConnection(port, counted=False)
        began = time.monotonic()
        through.put("x", [memoryview(bytes(1_000_000))])
        assert time.monotonic() - began >= 0.13  # least times, which no slow machine can break
        began = time.monotonic()
        through.get_into("x", [memoryview(bytearray(1_000_000))])
        assert time.monotonic() - began >= 0.13
        began = time.monotonic()
        for _ in range(3):
            through.get_into("x", [memoryview(bytearray(1))])
        assert time.monotonic() - began >= 0.12
        assert free.figures().requests == 5


def test_a_server_that_is_gone_closes_the_connection() -> None:
    with refusing_port() as gone, start_proxy("127.0.0.1", gone, Link()) as port:
        through = SinkConnection(port, counted=True)
        with pytest.raises(ConnectionError):
            through.get("x")
        assert SinkConnection(port, counted=False).figures().requests == 0  # and the proxy goes on
