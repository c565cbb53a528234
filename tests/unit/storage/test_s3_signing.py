"""Requests as botocore signs them for us, checked by a verifier that shares no code with it. Nothing is sent."""

from __future__ import annotations

import hashlib
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from urllib.parse import parse_qs, urlsplit

import pytest

from dcpfs.config import RetryConfig
from dcpfs.storage.location import Location
from dcpfs.storage.s3_http import HttpRequest
from dcpfs.storage.s3_session import S3Session
from dcpfs.storage.s3_signing import PartSigner, S3Signer
from dcpfs.testing.http_exchange import Head
from dcpfs.testing.s3_signature import Credential, verify

ENDPOINT = "http://store.invalid:9000"
KEY = "a b/?#[c]*%41+&=ü//x"
SECRET = "very-secret-key"
BODY = (memoryview(b"hello "), memoryview(b"world"))

Signing = Callable[..., S3Signer]


@pytest.fixture
def signing() -> Iterator[Signing]:
    sessions: list[S3Session] = []

    def make(*, bucket: str = "bucket", **options: object) -> S3Signer:
        given: dict[str, object] = {
            "key": "AKIDEXAMPLE",
            "secret": SECRET,
            "endpoint_url": ENDPOINT,
            "client_kwargs": {"region_name": "eu-west-3"},
            **options,
        }
        session = S3Session(Location(f"s3://{bucket}/p", given), RetryConfig(), 4)
        sessions.append(session)
        return S3Signer(session)

    yield make
    for session in sessions:
        session.close()


def check(request: HttpRequest, body: bytes = b"", *, token: str | None = None, region: str = "eu-west-3") -> None:
    """The signature is right, and is in the headers only."""
    parts = urlsplit(request.url)
    headers = {name.lower(): value for name, value in request.headers.items()}
    headers["host"] = parts.netloc
    assert "Signature" not in parts.query
    head = Head(request.method, parts.path, parts.query, headers)
    key = verify(
        head,
        body,
        {"AKIDEXAMPLE": Credential(SECRET, token)},
        region=region,
        now=datetime.now(timezone.utc),
    )
    assert key == "AKIDEXAMPLE"


def test_requests_are_signed_in_their_headers_without_their_payload(signing: Signing) -> None:
    signer = signing()
    check(signer.sign_get(KEY, None))
    check(signer.sign_put(KEY, BODY, {"IfNoneMatch": "*"}))
    parts = PartSigner(signer, KEY, "up/load+id=", 9999)
    # In any order, and again: those that were signed ahead and those that were not.
    for number in (1, 2, 3, 2, 9999, 9999, 1000):
        request = parts.sign(number, BODY)
        check(request)
        assert parse_qs(urlsplit(request.url).query) == {"partNumber": [str(number)], "uploadId": ["up/load+id="]}
        assert request.headers["X-Amz-Content-SHA256"] == "UNSIGNED-PAYLOAD"


def test_one_signature_serves_all_ranges_of_an_object(signing: Signing) -> None:
    signer = signing()
    whole, first, second = (signer.sign_get(KEY, part) for part in (None, "bytes=0-9", "bytes=10-19"))
    assert (first.headers["Range"], second.headers["Range"]) == ("bytes=0-9", "bytes=10-19")
    assert whole.headers["Authorization"] == first.headers["Authorization"] == second.headers["Authorization"]
    check(second)
    assert signer.sign_get("other", None).url != whole.url


def test_case_81_a_new_client_makes_new_signatures(signing: Signing) -> None:
    signer = signing()
    session = signer._session
    before = signer.sign_get(KEY, None)
    parts = PartSigner(signer, KEY, "id", 4)
    for number in (1, 2):
        parts.sign(number, BODY)
    template = parts._template
    session.refresh(session.generation)
    assert signer.sign_get(KEY, None) is not before
    check(parts.sign(3, BODY))
    assert parts._template is not template
    assert not parts._ahead, "signed by the client that was replaced"
    stale = session.generation - 1
    client = session.client
    session.refresh(stale)
    assert session.client is client, "the same failure, seen by another thread, replaces the client again"


@pytest.mark.parametrize(
    ("options", "host", "path"),
    [
        ({"config_kwargs": {"s3": {"addressing_style": "path"}}}, "store.invalid:9000", "/bucket/k"),
        ({"config_kwargs": {"s3": {"addressing_style": "virtual"}}}, "bucket.store.invalid:9000", "/k"),
        ({"endpoint_url": None}, "bucket.s3.eu-west-3.amazonaws.com", "/k"),
        ({"endpoint_url": None, "use_ssl": False}, "bucket.s3.eu-west-3.amazonaws.com", "/k"),
        (
            {"endpoint_url": None, "config_kwargs": {"s3": {"use_dualstack_endpoint": True}}},
            "bucket.s3.dualstack.eu-west-3.amazonaws.com",
            "/k",
        ),
    ],
)
def test_hosts_and_styles_are_those_of_botocore(
    signing: Signing, options: dict[str, object], host: str, path: str
) -> None:
    parts = urlsplit(signing(**options).sign_get("k", None).url)
    assert (parts.netloc, parts.path) == (host, path)


def test_case_77_options_reach_the_requests_that_know_them(signing: Signing) -> None:
    signer = signing(
        token="session-token",
        requester_pays=True,
        s3_additional_kwargs={"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "key-1", "StorageClass": "STANDARD_IA"},
    )
    get, put = signer.sign_get(KEY, None), signer.sign_put(KEY, BODY, {})
    part = PartSigner(signer, KEY, "id", 1).sign(1, BODY)
    for request in (get, put, part):
        check(request, token="session-token")
        assert request.headers["x-amz-request-payer"] == "requester"
    assert put.headers["x-amz-server-side-encryption"] == "aws:kms"
    assert put.headers["x-amz-storage-class"] == "STANDARD_IA"
    for request in (get, part):
        assert "x-amz-server-side-encryption" not in request.headers


def test_anonymous_requests_carry_no_signature(signing: Signing) -> None:
    signer = signing(anon=True, key=None, secret=None)
    parts = PartSigner(signer, KEY, "id", 7)
    parts.sign(1, BODY)
    again = parts.sign(7, BODY)
    for request in (signer.sign_get(KEY, None), signer.sign_put(KEY, BODY, {}), again):
        assert "authorization" not in {name.lower() for name in request.headers}
    assert parse_qs(urlsplit(again.url).query)["partNumber"] == ["7"]


def test_signed_payloads_where_the_user_asks_for_them(signing: Signing) -> None:
    signer = signing(config_kwargs={"s3": {"payload_signing_enabled": True}})
    parts = PartSigner(signer, KEY, "id", 9)
    for number in (1, 2):
        request = parts.sign(number, BODY)
        check(request, b"hello world")
        assert request.headers["X-Amz-Content-SHA256"] == hashlib.sha256(b"hello world").hexdigest()
    check(signer.sign_put(KEY, BODY, {}), b"hello world")


def test_case_85_checksums_only_where_the_user_asks_for_them_and_never_as_trailers(signing: Signing) -> None:
    plain = signing().sign_put(KEY, BODY, {})
    assert not [name for name in plain.headers if "checksum" in name.lower() or "trailer" in name.lower()]
    signer = signing(config_kwargs={"request_checksum_calculation": "when_supported"})
    parts = PartSigner(signer, KEY, "id", 9)
    for number, body in ((1, BODY), (2, BODY[:1]), (3, ())):
        request = parts.sign(number, body)
        check(request)
        wanted = zlib.crc32(b"".join(body)).to_bytes(4, "big")
        headers = {name.lower(): value for name, value in request.headers.items()}
        assert headers["x-amz-checksum-crc32"] == b64encode(wanted).decode()
        assert "x-amz-trailer" not in headers
        assert "aws-chunked" not in headers.get("content-encoding", "")


def test_case_114_nothing_shows_a_secret(signing: Signing) -> None:
    request = signing(token="session-token").sign_get(KEY, "bytes=0-1")
    signature = request.headers["Authorization"].rpartition("=")[2]
    for text in (repr(request), str(request)):
        assert signature not in text
        assert "session-token" not in text
