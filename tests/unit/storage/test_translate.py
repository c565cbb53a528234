"""Exceptions of client libraries, as they are raised, and what dcpfs makes of them."""

from __future__ import annotations

import asyncio
import errno
import ftplib
import http.client
import io
import socket
import ssl
from collections.abc import Callable

import aiohttp
import botocore.exceptions as boto
import pytest
from fsspec.exceptions import FSTimeoutError
from hypothesis import given
from hypothesis import strategies as st
from s3fs.errors import translate_boto_error

from dcpfs import errors
from dcpfs.storage.location import Location
from dcpfs.storage.translate import (
    Classified,
    FailedAttempt,
    FailureKind,
    Fault,
    ResponseError,
    classify,
    classify_fault,
    fault_of,
)

PERMANENT, TRANSIENT = FailureKind.PERMANENT, FailureKind.TRANSIENT
THROTTLED, EXPIRED = FailureKind.THROTTLED, FailureKind.EXPIRED_CREDENTIALS


def client_error(code: str, status: int, **headers: str) -> boto.ClientError:
    return boto.ClientError(
        {
            "Error": {"Code": code, "Message": "the message"},
            "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": headers},
        },
        "PutObject",
    )


CODES = [
    ("SlowDown", 503, THROTTLED, errors.StorageError),
    ("ServiceUnavailable", 503, THROTTLED, errors.StorageError),
    ("TooManyRequests", 429, THROTTLED, errors.StorageError),
    ("InternalError", 500, TRANSIENT, errors.StorageError),
    ("500", 500, TRANSIENT, errors.StorageError),
    ("502", 502, TRANSIENT, errors.StorageError),
    ("GatewayTimeout", 504, TRANSIENT, errors.StorageError),
    ("RequestTimeout", 400, TRANSIENT, errors.StorageError),
    ("OperationAborted", 409, TRANSIENT, errors.StorageError),
    ("ExpiredToken", 400, EXPIRED, errors.CredentialsError),
    ("ExpiredTokenException", 403, EXPIRED, errors.CredentialsError),
    ("RequestExpired", 400, EXPIRED, errors.CredentialsError),
    ("TokenRefreshRequired", 400, EXPIRED, errors.CredentialsError),
    ("AccessDenied", 403, PERMANENT, errors.PermissionDeniedError),
    ("403", 403, PERMANENT, errors.PermissionDeniedError),
    ("InvalidAccessKeyId", 403, PERMANENT, errors.CredentialsError),
    ("SignatureDoesNotMatch", 403, PERMANENT, errors.CredentialsError),
    ("RequestTimeTooSkewed", 403, PERMANENT, errors.CredentialsError),
    ("NoSuchBucket", 404, PERMANENT, errors.BucketNotFoundError),
    ("NoSuchKey", 404, PERMANENT, errors.ObjectNotFoundError),
    ("404", 404, PERMANENT, errors.ObjectNotFoundError),
    ("PreconditionFailed", 412, PERMANENT, errors.ObjectExistsError),
    ("InvalidRange", 416, PERMANENT, errors.TransferSizeError),
    ("EntityTooLarge", 400, PERMANENT, errors.StorageError),
    ("QuotaExceeded", 403, PERMANENT, errors.StorageFullError),
    ("MethodNotAllowed", 405, PERMANENT, errors.UnsupportedOperationError),
    ("PermanentRedirect", 301, PERMANENT, errors.StorageError),
    ("SomethingNew", 400, PERMANENT, errors.StorageError),
    ("SomethingNew", 599, TRANSIENT, errors.StorageError),
]


@pytest.mark.parametrize("raised_by", ["botocore", "s3fs", "http"])
@pytest.mark.parametrize(("code", "status", "kind", "error"), CODES)
def test_an_error_code_means_the_same_whoever_raises_it(
    code: str, status: int, kind: FailureKind, error: type[Exception], raised_by: str
) -> None:
    raised: Exception = client_error(code, status)
    if raised_by == "s3fs":
        raised = translate_boto_error(raised)
    elif raised_by == "http":
        raised = ResponseError(status, code, "the message")
    found = classify(raised, verb="write", target="s3://bucket/x")
    assert (found.kind, type(found.error)) == (kind, error)
    assert str(found.error).startswith("Can't write s3://bucket/x: ")
    assert "the message" in str(found.error)
    assert found.error.__cause__ is raised


@pytest.mark.parametrize(
    ("raised", "kind", "error"),
    [
        (aiohttp.ClientPayloadError("cut"), TRANSIENT, errors.StorageError),
        (aiohttp.ServerDisconnectedError(), TRANSIENT, errors.StorageError),
        (aiohttp.SocketTimeoutError(), TRANSIENT, errors.StorageError),
        (aiohttp.ClientOSError(errno.ECONNRESET, "reset"), TRANSIENT, errors.StorageError),
        (boto.EndpointConnectionError(endpoint_url="u"), TRANSIENT, errors.StorageError),
        (boto.ConnectTimeoutError(endpoint_url="u"), TRANSIENT, errors.StorageError),
        (boto.ReadTimeoutError(endpoint_url="u"), TRANSIENT, errors.StorageError),
        (boto.ConnectionClosedError(endpoint_url="u"), TRANSIENT, errors.StorageError),
        (boto.ResponseStreamingError(error="e"), TRANSIENT, errors.StorageError),
        (boto.IncompleteReadError(actual_bytes=1, expected_bytes=2), TRANSIENT, errors.StorageError),
        (boto.HTTPClientError(error="e"), TRANSIENT, errors.StorageError),
        (boto.SSLError(endpoint_url="u", error="e"), PERMANENT, errors.StorageError),
        (boto.NoCredentialsError(), PERMANENT, errors.CredentialsError),
        (boto.PartialCredentialsError(provider="p", cred_var="v"), PERMANENT, errors.CredentialsError),
        (boto.ProfileNotFound(profile="p"), PERMANENT, errors.CredentialsError),
        (boto.CredentialRetrievalError(provider="p", error_msg="m"), EXPIRED, errors.CredentialsError),
        (boto.NoRegionError(), PERMANENT, errors.StorageError),
        (boto.ParamValidationError(report="r"), PERMANENT, errors.StorageError),
        (FSTimeoutError(), TRANSIENT, errors.StorageError),
        (asyncio.TimeoutError(), TRANSIENT, errors.StorageError),
        (TimeoutError(), TRANSIENT, errors.StorageError),
        (ConnectionResetError(errno.ECONNRESET, "reset"), TRANSIENT, errors.StorageError),
        (BrokenPipeError(), TRANSIENT, errors.StorageError),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), TRANSIENT, errors.StorageError),
        (http.client.IncompleteRead(b""), TRANSIENT, errors.StorageError),
        (http.client.RemoteDisconnected("gone"), TRANSIENT, errors.StorageError),
        (EOFError(), TRANSIENT, errors.StorageError),
        (ssl.SSLEOFError(8, "eof"), TRANSIENT, errors.StorageError),
        (ssl.SSLCertVerificationError(1, "bad certificate"), PERMANENT, errors.StorageError),
        (socket.gaierror(socket.EAI_NONAME, "unknown"), FailureKind.UNKNOWN_HOST, errors.StorageError),
        (OSError(errno.EADDRNOTAVAIL, "no port left"), TRANSIENT, errors.StorageError),
        (socket.gaierror(socket.EAI_AGAIN, "try again"), TRANSIENT, errors.StorageError),
        (ftplib.error_temp("421 busy"), TRANSIENT, errors.StorageError),
        (ftplib.error_perm("530 login"), PERMANENT, errors.CredentialsError),
        (ftplib.error_perm("550 no file"), PERMANENT, errors.ObjectNotFoundError),
        (ftplib.error_perm("552 quota"), PERMANENT, errors.StorageFullError),
        (FileNotFoundError("x"), PERMANENT, errors.ObjectNotFoundError),
        (FileNotFoundError(errno.ENOENT, "x"), PERMANENT, errors.ObjectNotFoundError),
        (PermissionError("x"), PERMANENT, errors.PermissionDeniedError),
        (FileExistsError("x"), PERMANENT, errors.ObjectExistsError),
        (OSError(errno.ENOSPC, "full"), PERMANENT, errors.StorageFullError),
        (OSError(errno.EDQUOT, "quota"), PERMANENT, errors.StorageFullError),
        (OSError(errno.EROFS, "read-only"), PERMANENT, errors.UnsupportedOperationError),
        (OSError(errno.EIO, "disk"), PERMANENT, errors.StorageError),
        (NotImplementedError(), PERMANENT, errors.UnsupportedOperationError),
        (io.UnsupportedOperation("write"), PERMANENT, errors.UnsupportedOperationError),
        (KeyError("bug"), PERMANENT, errors.StorageError),
    ],
    ids=lambda value: getattr(value, "__name__", None) or type(value).__name__,
)
def test_types_and_errnos(raised: Exception, kind: FailureKind, error: type[Exception]) -> None:
    found = classify(raised, verb="read", target="s3://b/x")
    assert (found.kind, type(found.error)) == (kind, error)


def made(module: str, name: str, *bases: type[Exception], **attributes: object) -> Exception:
    """An exception of a library that is not installed here, by what it is known for."""
    kind: type[Exception] = type(name, bases or (Exception,), {"__module__": module, **attributes})
    return kind("text")


@pytest.mark.parametrize(
    ("raised", "kind", "error"),
    [
        (made("gcsfs.retry", "HttpError", code=503), THROTTLED, errors.StorageError),
        (made("gcsfs.retry", "HttpError", code=404), PERMANENT, errors.ObjectNotFoundError),
        (made("google.auth.exceptions", "RefreshError"), EXPIRED, errors.CredentialsError),
        (made("google.auth.exceptions", "TransportError"), TRANSIENT, errors.StorageError),
        (made("azure.core.exceptions", "ServiceRequestError"), TRANSIENT, errors.StorageError),
        (made("azure.core.exceptions", "HttpResponseError", status_code=503, error_code="ServerBusy"), THROTTLED,
         errors.StorageError),
        (made("azure.core.exceptions", "ResourceNotFoundError", status_code=404, error_code="ContainerNotFound"),
         PERMANENT, errors.BucketNotFoundError),
        (made("azure.core.exceptions", "ResourceExistsError", status_code=409, error_code="BlobAlreadyExists"),
         PERMANENT, errors.ObjectExistsError),
        (made("azure.core.exceptions", "ClientAuthenticationError"), PERMANENT, errors.CredentialsError),
        (made("paramiko.ssh_exception", "SSHException"), TRANSIENT, errors.StorageError),
        (made("paramiko.ssh_exception", "AuthenticationException"), PERMANENT, errors.CredentialsError),
        (made("asyncssh.misc", "ConnectionLost", type(made("asyncssh.misc", "DisconnectError"))), TRANSIENT,
         errors.StorageError),
        (made("httpx", "ReadTimeout", type(made("httpx", "TransportError"))), TRANSIENT, errors.StorageError),
        (made("requests.exceptions", "ConnectionError", OSError), TRANSIENT, errors.StorageError),
        (made("somebodys", "TimeoutError"), PERMANENT, errors.StorageError),
    ],
    ids=lambda value: getattr(value, "__name__", None) or type(value).__name__,
)  # fmt: skip
def test_libraries_that_are_not_installed(raised: Exception, kind: FailureKind, error: type[Exception]) -> None:
    found = classify(raised, verb="read", target="gs://b/x")
    assert (found.kind, type(found.error)) == (kind, error)


def test_a_missing_bucket_is_named() -> None:
    found = classify(client_error("NoSuchBucket", 404), verb="write", target="s3://my-bucket/run/x")
    assert "bucket 'my-bucket' does not exist" in str(found.error)
    assert "dcpfs creates no buckets" in str(found.error)


def test_the_cause_speaks_before_the_wrapper_and_the_context_last() -> None:
    wrapper = PermissionError("denied")
    wrapper.__cause__ = client_error("ExpiredToken", 400)
    assert fault_of(wrapper) is Fault.EXPIRED
    unknown = RuntimeError("failed")
    unknown.__context__ = TimeoutError()
    assert fault_of(unknown) is Fault.TRANSIENT
    known = FileNotFoundError("gone")
    known.__context__ = client_error("SlowDown", 503)
    assert fault_of(known) is Fault.NOT_FOUND


@pytest.mark.parametrize(
    ("value", "seconds"), [("7", 7.0), ("1.5", 1.5), ("-3", 0.0), ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0), ("x", None)]
)
def test_retry_after_is_read(value: str, seconds: float | None) -> None:
    for raised in (client_error("SlowDown", 503, **{"retry-after": value}), ResponseError(503, retry_after=value)):
        assert classify(raised, verb="read", target="t").retry_after_seconds == seconds


def test_what_the_store_has_classified_itself_passes_through() -> None:
    own = Classified(errors.TransferSizeError("short"), TRANSIENT)
    assert classify(FailedAttempt(own), verb="read", target="t") is own
    error = errors.ConfigError("wrong")
    assert classify(error, verb="read", target="t") == Classified(error, PERMANENT)


@pytest.mark.parametrize("fault", Fault)
def test_every_fault_has_a_meaning(fault: Fault) -> None:
    found = classify_fault(fault, verb="read", target="s3://b/x", reason="why")
    assert str(found.error).startswith("Can't read s3://b/x: ")
    assert isinstance(found.error, errors.StorageError)


@given(
    secret=st.text("abcdef0123456789+/", min_size=8, max_size=40),
    wrap=st.sampled_from([RuntimeError, PermissionError, OSError]),
)
def test_case_114_no_secret_gets_into_an_error(secret: str, wrap: Callable[[str], Exception]) -> None:
    location = Location("https://h/x", {"secret": secret})
    raised = wrap(f"GET https://user:{secret.replace('/', '')}z@h/x?X-Amz-Signature={secret} with {secret}")
    raised.__cause__ = ValueError(f"key {secret}")
    found = classify(raised, verb="read", target=str(location), scrub=location.scrub)
    chain: list[BaseException] = [found.error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    assert not any(secret in str(link) for link in chain)


def test_long_texts_are_cut_to_one_line() -> None:
    error = classify(RuntimeError("line\n" * 1000), verb="read", target="t").error
    assert len(str(error)) < 400
    assert "\n" not in str(error)
