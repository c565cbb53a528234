"""AWS Signature Version 4, checked from what arrived on the wire.

Problem: a client that signs for itself, to send bytes straight from memory, is only right if a server that never
saw its code agrees. Most test servers take any signature.

Way taken: the canonical request is rebuilt from the received path, query, headers and body, with the rules of the
public specification and nothing of botocore, and compared. As S3 does, it also asks that ``host`` and every
``x-amz-`` header be signed, and that a signed payload hash be the hash of the payload.

Flow: ``verify(head, body, credentials)`` → the access key, or a `SignatureError` with the S3 error code.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from urllib.parse import quote, unquote

from dcpfs.testing.http_exchange import Head

__all__ = ["Credential", "SignatureError", "access_key_of", "verify"]

_ALGORITHM = "AWS4-HMAC-SHA256"
_AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256\s+Credential=(?P<key>[^/,]+)/(?P<date>\d{8})/(?P<region>[^/,]+)/(?P<service>[^/,]+)/aws4_request,"
    r"\s*SignedHeaders=(?P<headers>[^,]+),\s*Signature=(?P<signature>[0-9a-f]{64})\s*$"
)
_UNHASHED = "UNSIGNED-PAYLOAD"
_STREAMING = "STREAMING-"
_LONGEST_SKEW_SECONDS = 15 * 60


@dataclass(frozen=True)
class Credential:
    """A secret, and the session token that must come with it, if any."""

    secret_key: str
    session_token: str | None = None

    def __repr__(self) -> str:
        return "Credential(***)"


class SignatureError(Exception):
    """The request is not to be trusted.

    Attributes:
        status: HTTP status to answer with.
        code: S3's error code.
    """

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def access_key_of(head: Head) -> str | None:
    """The access key that a request claims, unchecked; None when it is not signed by header."""
    found = _AUTHORIZATION.match(head.headers.get("authorization", ""))
    return found["key"] if found else None


def verify(
    head: Head,
    body: bytes | bytearray,
    credentials: Mapping[str, Credential],
    *,
    region: str,
    now: datetime | None = None,
) -> str:
    """Check a request's signature and return its access key.

    Args:
        head: As received.
        body: As received on the wire (a streaming body with its framing, whose chunk signatures are not checked).
        credentials: By access key.
        region: The region that must have been signed for.
        now: The server's clock.

    Raises:
        SignatureError: Missing, malformed, unknown, out of date or wrong.
    """
    found = _AUTHORIZATION.match(head.headers.get("authorization", ""))
    if found is None:
        raise SignatureError(403, "AccessDenied", "no AWS4-HMAC-SHA256 Authorization header")
    credential = credentials.get(found["key"])
    if credential is None:
        raise SignatureError(403, "InvalidAccessKeyId", "no such access key")
    if credential.session_token is not None and (head.headers.get("x-amz-security-token") != credential.session_token):
        raise SignatureError(403, "InvalidToken", "the session token is missing or wrong")
    if (found["region"], found["service"]) != (region, "s3"):
        raise SignatureError(
            400, "AuthorizationHeaderMalformed", f"signed for {found['region']}/{found['service']}, not {region}/s3"
        )
    stamp = _check_date(head, found["date"], now or datetime.now(timezone.utc))
    signed = found["headers"].split(";")
    _check_signed_headers(head, signed)
    payload_hash = _check_payload(head, body)

    canonical = "\n".join(
        (
            head.method,
            quote(unquote(head.raw_path), safe="/-_.~"),
            _canonical_query(head),
            *(f"{name}:{' '.join(head.headers[name].split())}" for name in signed),
            "",
            ";".join(signed),
            payload_hash,
        )
    )
    scope = f"{found['date']}/{region}/s3/aws4_request"
    to_sign = f"{_ALGORITHM}\n{stamp}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    key = f"AWS4{credential.secret_key}".encode()
    for step in (found["date"], region, "s3", "aws4_request"):
        key = hmac.new(key, step.encode(), hashlib.sha256).digest()
    expected = hmac.new(key, to_sign.encode(), hashlib.sha256).hexdigest()
    if not hmac.compare_digest(expected, found["signature"]):
        raise SignatureError(403, "SignatureDoesNotMatch", f"the signature is not that of:\n{canonical}")
    return found["key"]


def _check_date(head: Head, scope_date: str, now: datetime) -> str:
    stamp = head.headers.get("x-amz-date", "")
    try:
        sent = datetime.strptime(stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=timezone.utc)
    except ValueError:
        raise SignatureError(403, "AccessDenied", "no x-amz-date of the form 20250131T235959Z") from None
    if stamp[:8] != scope_date:
        raise SignatureError(403, "SignatureDoesNotMatch", "the date of the scope is not that of x-amz-date")
    if abs((now - sent).total_seconds()) > _LONGEST_SKEW_SECONDS:
        raise SignatureError(403, "RequestTimeTooSkewed", "the clocks differ by more than 15 minutes")
    return stamp


def _check_signed_headers(head: Head, signed: list[str]) -> None:
    if signed != sorted(signed):
        raise SignatureError(403, "SignatureDoesNotMatch", "SignedHeaders are not sorted")
    for name in signed:
        if name not in head.headers:
            raise SignatureError(403, "SignatureDoesNotMatch", f"header {name} is signed and was not received")
    for name in head.headers:
        if (name == "host" or name.startswith("x-amz-")) and name not in signed:
            raise SignatureError(403, "AccessDenied", f"header {name} was received and is not signed")


def _check_payload(head: Head, body: bytes | bytearray) -> str:
    told = head.headers.get("x-amz-content-sha256")
    if told is None:
        raise SignatureError(400, "InvalidRequest", "no x-amz-content-sha256")
    if told != _UNHASHED and not told.startswith(_STREAMING) and told != hashlib.sha256(body).hexdigest():
        raise SignatureError(400, "XAmzContentSHA256Mismatch", "the payload is not the one that was signed")
    return told


def _canonical_query(head: Head) -> str:
    pairs = (pair.partition("=") for pair in head.raw_query.split("&") if pair)
    encoded = sorted(
        (quote(unquote(name), safe="-_.~"), quote(unquote(value), safe="-_.~")) for name, _, value in pairs
    )
    return "&".join(f"{name}={value}" for name, value in encoded)
