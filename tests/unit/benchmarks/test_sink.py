"""The sink speaks S3 as the contenders' clients do, counts right, and uses its memory again."""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Iterator

import boto3  # type: ignore[import-untyped] # it ships no types
import pytest
import s3fs
from botocore.client import BaseClient
from botocore.config import Config
from botocore.exceptions import ClientError

from benchmarks.object_memory import BLOCK_BYTES
from benchmarks.place import start_sink
from benchmarks.settings import BUCKET, client_environment
from benchmarks.sink_client import SinkConnection

BIG = os.urandom(3 * BLOCK_BYTES + 12345)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in client_environment().items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with start_sink(0, 0, 0) as port:
        yield port


@pytest.fixture
def client(port: int) -> Iterator[BaseClient]:
    config = Config(retries={"max_attempts": 1})
    client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}", config=config)
    yield client
    client.close()


def free(port: int) -> SinkConnection:
    return SinkConnection(port, counted=False)


@pytest.mark.parametrize("key", ["plain", "a/b c/+&é%41#[x]*?"])
@pytest.mark.parametrize("body", [b"", b"x", BIG], ids=["empty", "one", "big"])
def test_objects(client: BaseClient, key: str, body: bytes) -> None:
    client.put_object(Bucket=BUCKET, Key=key, Body=body)
    assert client.get_object(Bucket=BUCKET, Key=key)["Body"].read() == body
    assert client.head_object(Bucket=BUCKET, Key=key)["ContentLength"] == len(body)
    client.copy_object(Bucket=BUCKET, Key="copy", CopySource={"Bucket": BUCKET, "Key": key})
    client.delete_object(Bucket=BUCKET, Key=key)
    assert client.get_object(Bucket=BUCKET, Key="copy")["Body"].read() == body
    with pytest.raises(ClientError, match=r"NoSuchKey|404"):
        client.get_object(Bucket=BUCKET, Key=key)


@pytest.mark.parametrize(
    ("asked", "start", "stop"),
    [
        ("bytes=0-0", 0, 1),
        ("bytes=1048570-1048590", 1048570, 1048591),
        ("bytes=100-", 100, None),
        ("bytes=-7", -7, None),
    ],
)
def test_ranges(client: BaseClient, asked: str, start: int, stop: int | None) -> None:
    client.put_object(Bucket=BUCKET, Key="ranged", Body=BIG)
    answer = client.get_object(Bucket=BUCKET, Key="ranged", Range=asked)
    assert answer["Body"].read() == BIG[start:stop]
    assert answer["ContentRange"].endswith(f"/{len(BIG)}")
    with pytest.raises(ClientError, match="InvalidRange"):
        client.get_object(Bucket=BUCKET, Key="ranged", Range=f"bytes={len(BIG)}-")


def test_multipart(client: BaseClient, port: int) -> None:
    number = client.create_multipart_upload(Bucket=BUCKET, Key="parts")["UploadId"]
    for part, body in ((2, BIG), (1, b"wrong"), (1, b"right")):
        client.upload_part(Bucket=BUCKET, Key="parts", UploadId=number, PartNumber=part, Body=body)
    parts = {"Parts": [{"PartNumber": part, "ETag": "x"} for part in (1, 2)]}
    client.complete_multipart_upload(Bucket=BUCKET, Key="parts", UploadId=number, MultipartUpload=parts)
    assert free(port).get("parts") == b"right" + BIG
    number = client.create_multipart_upload(Bucket=BUCKET, Key="given-up")["UploadId"]
    client.upload_part(Bucket=BUCKET, Key="given-up", UploadId=number, PartNumber=1, Body=b"x")
    assert len(client.list_multipart_uploads(Bucket=BUCKET)["Uploads"]) == 1
    client.abort_multipart_upload(Bucket=BUCKET, Key="given-up", UploadId=number)
    assert "Uploads" not in client.list_multipart_uploads(Bucket=BUCKET)
    with pytest.raises(ClientError, match="NoSuchUpload"):
        client.upload_part(Bucket=BUCKET, Key="given-up", UploadId=number, PartNumber=1, Body=b"x")


def test_listing_pages_and_folds(client: BaseClient) -> None:
    names = [f"list/{number:02d}/{leaf}" for number in range(9) for leaf in "ab"]
    for name in names:
        client.put_object(Bucket=BUCKET, Key=name, Body=b"1")
    pages = client.get_paginator("list_objects_v2")
    flat = pages.paginate(Bucket=BUCKET, Prefix="list/", PaginationConfig={"PageSize": 5})
    assert [item["Key"] for page in flat for item in page["Contents"]] == names
    folded = pages.paginate(Bucket=BUCKET, Prefix="list/", Delimiter="/", PaginationConfig={"PageSize": 4})
    found = [item["Prefix"] for page in folded for item in page["CommonPrefixes"]]
    assert found == sorted({name[:8] for name in names})
    client.delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": name} for name in names]})
    assert client.list_objects_v2(Bucket=BUCKET, Prefix="list/")["KeyCount"] == 0


def test_buckets_and_conditions(client: BaseClient) -> None:
    client.head_bucket(Bucket=BUCKET)
    with pytest.raises(ClientError, match="NoSuchBucket"):
        client.put_object(Bucket="elsewhere", Key="x", Body=b"x")
    client.put_object(Bucket=BUCKET, Key="once", Body=b"1", IfNoneMatch="*")
    with pytest.raises(ClientError, match="PreconditionFailed"):
        client.put_object(Bucket=BUCKET, Key="once", Body=b"2", IfNoneMatch="*")


def test_s3fs_and_common_runtime(port: int) -> None:
    endpoint = f"http://127.0.0.1:{port}"
    filesystem = s3fs.S3FileSystem(endpoint_url=endpoint, use_listings_cache=False, skip_instance_cache=True)
    with filesystem.open(f"{BUCKET}/fs/x", "wb") as stream:
        stream.write(BIG)
    assert filesystem.cat_file(f"{BUCKET}/fs/x", start=-9) == BIG[-9:]
    filesystem.mv(f"{BUCKET}/fs/x", f"{BUCKET}/fs/y")
    assert filesystem.find(f"{BUCKET}/fs") == [f"{BUCKET}/fs/y"]

    s3torchconnector = pytest.importorskip("s3torchconnector", reason="extra: bench")
    from s3torchconnector._s3client import S3Client

    config = s3torchconnector.S3ClientConfig(force_path_style=True)
    runtime = S3Client("us-east-1", endpoint=endpoint, s3client_config=config)
    with runtime.put_object(BUCKET, "crt") as writer:
        for _ in range(4):
            writer.write(BIG)
    assert runtime.get_object(BUCKET, "crt").read() == BIG * 4


def raw(port: int, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(request)
        return connection.makefile("rb").read()


@pytest.mark.parametrize("outer", [False, True], ids=["aws-chunked", "chunked-aws-chunked"])
def test_framed_bodies(port: int, outer: bool) -> None:
    framed = b"5;chunk-signature=00\r\nhello\r\n6\r\n world\r\n0\r\nx-amz-checksum-crc32: AAAAAA==\r\n\r\n"
    head = b"PUT /bench/framed HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Encoding: aws-chunked\r\n"
    head += b"x-amz-decoded-content-length: 11\r\n"
    if outer:
        pieces = [framed[at : at + 7] for at in range(0, len(framed), 7)]
        framed = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
        head += b"Transfer-Encoding: chunked\r\n\r\n"
    else:
        head += b"Content-Length: %d\r\n\r\n" % len(framed)
    assert b" 200 " in raw(port, head + framed)
    assert free(port).get("framed") == b"hello world"


def test_expect_continue(port: int) -> None:
    request = b"PUT /bench/e HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    request += b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\nhi"
    assert raw(port, request).startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK")


def test_counts_are_those_of_counted_requests(port: int) -> None:
    counted, uncounted = SinkConnection(port, counted=True), free(port)
    uncounted.reset()
    counted.put("n", [memoryview(b"12345")])
    uncounted.put("m", [memoryview(b"123456789")])
    counted.get_into("n", [memoryview(bytearray(3))], 1)
    figures = uncounted.figures()
    assert figures.requests_by_verb == {"PutObject": 1, "GetObject": 1}
    assert (figures.received_bytes, figures.sent_bytes) == (5, 3)


def test_memory_is_used_again(port: int) -> None:
    sink = free(port)
    body = [memoryview(BIG)]
    allocated = set()
    for number in range(40):
        sink.put(f"again/{number % 2}", body)
        allocated.add(sink.figures().allocated_bytes)
    assert len(allocated) <= 2
    sink.delete_below("again/")
    assert sink.keys("again/") == []


def test_latency_and_pacing_spare_free_requests() -> None:
    with start_sink(30, 10, 0) as port:
        counted = SinkConnection(port, counted=True)
        began = time.monotonic()
        counted.put("x", [memoryview(bytes(1_000_000))])
        assert time.monotonic() - began >= 0.1  # a least time, which no slow machine can break
        assert len(free(port).get("x")) == 1_000_000


def test_upload_over_a_pipe(client: BaseClient) -> None:
    client.upload_fileobj(io.BytesIO(BIG * 4), BUCKET, "pipe")
    landed = io.BytesIO()
    client.download_fileobj(BUCKET, "pipe", landed)
    assert landed.getvalue() == BIG * 4
