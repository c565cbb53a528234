"""Part sizes, names, ranges and error bodies of S3: pure decisions."""

from __future__ import annotations

import http.client
from collections.abc import Sequence
from typing import cast

import pytest

from dcpfs.errors import ConfigError
from dcpfs.storage.s3_answers import parse_error
from dcpfs.storage.s3_http import Scatter
from dcpfs.storage.s3_multipart import MAX_OBJECT_BYTES, plan_part_bytes
from dcpfs.storage.s3_redirects import is_same_domain
from dcpfs.storage.s3_session import split_bucket
from dcpfs.storage.s3_transfer import parse_content_range
from dcpfs.storage.store import PartMemory

MIB = 1 << 20
GIB = 1 << 30


@pytest.mark.parametrize("part_bytes", [None, 64 << 10, 5 * MIB, 50 * MIB, 5 * GIB])
@pytest.mark.parametrize("size_bytes", [0, 1, 5 * MIB, 500 * MIB, 157 * GIB, 600 * GIB, MAX_OBJECT_BYTES])
@pytest.mark.parametrize("concurrency", [1, 32, 1024])
@pytest.mark.parametrize("memory", PartMemory)
def test_case_84_parts_stay_within_the_limits_of_s3(
    size_bytes: int, part_bytes: int | None, concurrency: int, memory: PartMemory
) -> None:
    planned = plan_part_bytes(size_bytes, part_bytes, concurrency, memory)
    assert 5 * MIB <= planned <= 5 * GIB
    assert -(-size_bytes // planned) <= 10_000
    if part_bytes is not None and part_bytes >= 5 * MIB:
        assert planned >= part_bytes


def test_case_84_an_object_that_no_part_size_fits_is_refused_early() -> None:
    with pytest.raises(ConfigError, match="file_bytes"):
        plan_part_bytes(MAX_OBJECT_BYTES + 1, None, 32)


@pytest.mark.parametrize(
    ("size_bytes", "concurrency", "copied", "in_place"),
    [
        (100 * MIB, 32, 13, 13),
        (400 * MIB, 32, 32, 32),
        (512 * MIB, 32, 32, 32),
        (600 * MIB, 32, 64, 64),
        (1280 * MIB, 32, 96, 96),
        (2 * GIB, 32, 128, 96),
        (5 * GIB, 32, 320, 96),
        (12 * GIB, 32, 768, 192),
        (GIB, 4, 64, 16),
    ],
)
def test_parts_keep_every_request_busy_to_the_end(
    size_bytes: int, concurrency: int, copied: int, in_place: int
) -> None:
    planned = [plan_part_bytes(size_bytes, None, concurrency, memory) for memory in PartMemory]
    assert [-(-size_bytes // part_bytes) for part_bytes in planned] == [copied, in_place]


def test_a_wish_for_a_part_size_counts_wherever_the_bytes_lie() -> None:
    assert {plan_part_bytes(5 * GIB, 20 * MIB, 32, memory) for memory in PartMemory} == {20 * MIB}


@pytest.mark.parametrize(
    ("path", "bucket", "key"),
    [
        ("b", "b", ""),
        ("b/k", "b", "k"),
        ("b/a//b?versionId=3#[*]%41 ü", "b", "a//b?versionId=3#[*]%41 ü"),
        (
            "arn:aws:s3:us-west-2:123456789012:accesspoint/point/a/b",
            "arn:aws:s3:us-west-2:123456789012:accesspoint/point",
            "a/b",
        ),
        ("arn:aws:s3::123456789012:accesspoint:mrap.x", "arn:aws:s3::123456789012:accesspoint:mrap.x", ""),
        (
            "arn:aws:s3-outposts:us-west-2:123456789012:outpost/op-1/accesspoint/point/k",
            "arn:aws:s3-outposts:us-west-2:123456789012:outpost/op-1/accesspoint/point",
            "k",
        ),
    ],
)
def test_bucket_and_key_are_split_literally(path: str, bucket: str, key: str) -> None:
    assert split_bucket(path) == (bucket, key)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bytes 0-9/20", (0, 10, 20)),
        ("bytes 5-5/*", (5, 6, None)),
        ("bytes */7", (0, 0, 7)),
        ("", None),
        ("bytes 0-9", None),
        ("items 0-9/20", None),
        ("bytes -9/20", None),
    ],
)
def test_content_range(text: str, expected: object) -> None:
    assert parse_content_range(text) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"<Error><Code>SlowDown</Code><Message> please </Message></Error>", ("SlowDown", "please")),
        (b'<?xml version="1.0"?><Error xmlns="http://s3/"><Code>A</Code></Error>', ("A", "")),
        (b"<html>Bad gateway", ("", "")),
        (b"", ("", "")),
        (b"\xff\xfe", ("", "")),
    ],
)
def test_error_body(body: bytes, expected: tuple[str, str]) -> None:
    assert parse_error(body) == expected


@pytest.mark.parametrize(
    ("host", "endpoint", "same"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("b.s3.localhost", "s3.localhost", True),
        ("b.s3.eu-west-1.amazonaws.com", "s3.us-east-1.amazonaws.com", True),
        ("s3.cn-north-1.amazonaws.com.cn", "s3.cn-northwest-1.amazonaws.com.cn", True),
        ("evil.com.cn", "s3.cn-northwest-1.amazonaws.com.cn", False),
        ("s3.eu-west-1.amazonaws.com", "127.0.0.1", False),
        ("s3.eu-west-1.amazonaws.com", "minio.example.org", False),
        ("127.0.0.2", "127.0.0.1", False),
        ("eu.store.example.org", "us.store.example.org", True),
        ("localhost", "minio", False),
    ],
)
def test_case_76_a_client_stays_in_the_domain_of_its_endpoint(host: str, endpoint: str, same: bool) -> None:
    assert is_same_domain(host, endpoint) is same


class _Body:
    """A response that gives its body in pieces, and breaks off where a piece is an exception."""

    def __init__(self, pieces: Sequence[bytes | Exception]) -> None:
        self._pieces = list(pieces)

    def readinto(self, view: memoryview) -> int:
        if not self._pieces:
            return 0
        piece = self._pieces.pop(0)
        if isinstance(piece, Exception):
            raise piece
        count = min(len(piece), len(view))
        view[:count] = piece[:count]
        if piece[count:]:
            self._pieces.insert(0, piece[count:])
        return count


def _body(*pieces: bytes | Exception) -> http.client.HTTPResponse:
    return cast("http.client.HTTPResponse", _Body(pieces))


def test_buffers_are_filled_over_several_tries() -> None:
    target = bytearray(10)
    view = memoryview(target)
    scatter = Scatter([view[:3], view[3:3], view[3:4], view[4:]])
    with pytest.raises(ConnectionResetError):
        scatter.fill(_body(b"ab", ConnectionResetError()))
    assert scatter.done_bytes == 2
    scatter.fill(_body(b"c", b"defg"))
    assert scatter.done_bytes == 7
    scatter.fill(_body(b"hijk"))
    assert (bytes(target), scatter.done_bytes) == (b"abcdefghij", 10)
    scatter.restart()
    assert scatter.done_bytes == 0
