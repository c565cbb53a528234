"""What a client library's exception means: which error of dcpfs, and whether a second try can help.

Problem: one cause, "slow down", arrives as a ``ClientError``, an ``OSError(EBUSY)`` made from it by s3fs, an
aiohttp or azure response error, or a reset connection; and one type, ``PermissionError``, stands for a wrong
key as well as for a token that expired a second ago. Matching message texts breaks with every release and
every store.

Way taken: an exception and its causes are asked, in this order, for a store's error code, an HTTP status, and
an errno or type name. Each leads to one `Fault`, and a fault says error class, kind and remedy. Nothing is
imported for
it: the libraries are known by names and attributes.

Flow: ``classify(exception, verb=…, target=…)`` → `Classified` → `dcpfs.storage.retrying` tries again or
raises.

A store that speaks HTTP itself raises `ResponseError`; one that knows better than these tables raises
`FailedAttempt` around a `Classified` of its own.
"""

from __future__ import annotations

import datetime as dt
import email.utils
import enum
import errno
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from dcpfs.errors import (
    BucketNotFoundError,
    CredentialsError,
    DamagedObjectError,
    DcpfsError,
    ObjectExistsError,
    ObjectNotFoundError,
    PermissionDeniedError,
    StorageError,
    StorageFullError,
    TransferSizeError,
    UnsupportedOperationError,
)
from dcpfs.storage.location import redact_text

__all__ = [
    "Classified",
    "FailedAttempt",
    "FailureKind",
    "Fault",
    "ResponseError",
    "classify",
    "classify_fault",
    "fault_of",
    "has_answered",
]

_TEXT_LIMIT = 300


class FailureKind(enum.Enum):
    """Whether and how a failed request is tried again."""

    PERMANENT = "permanent"
    """Not at all."""
    TRANSIENT = "transient"
    """After a wait."""
    THROTTLED = "throttled"
    """After a wait; the store asks for fewer requests."""
    EXPIRED_CREDENTIALS = "expired_credentials"
    """Once, with renewed credentials."""
    UNKNOWN_HOST = "unknown_host"
    """After a wait where the store has answered before: then its name is right, and those who know it are not well."""


@dataclass(frozen=True, slots=True)
class Classified:
    """One failed attempt, understood.

    Attributes:
        error: What the caller sees when no further attempt is made; its ``__cause__`` is set.
        kind: Whether to try again.
        retry_after_seconds: The least time the store asks to wait, or None.
    """

    error: DcpfsError
    kind: FailureKind
    retry_after_seconds: float | None = None


class FailedAttempt(Exception):  # noqa: N818 - it carries an error and is none itself
    """Carries a `Classified` that the store made itself out of an operation."""

    def __init__(self, classified: Classified) -> None:
        super().__init__(str(classified.error))
        self.classified = classified


class ResponseError(Exception):
    """An HTTP response that is no success, for stores that speak HTTP themselves.

    Attributes:
        status_code: HTTP status.
        code: The store's error code, e.g. ``SlowDown``, or an empty text.
        retry_after_seconds: From the Retry-After header, or None.
    """

    def __init__(
        self, status_code: int, code: str = "", message: str = "", *, retry_after: str | float | None = None
    ) -> None:
        super().__init__(message)
        self.status_code = status_code
        self.code = code
        self.retry_after_seconds = _seconds(retry_after)


class Fault(enum.Enum):
    """Why a request failed, whichever library says so."""

    NOT_FOUND = "not found"
    NO_BUCKET = "no bucket"
    EXISTS = "exists"
    DENIED = "denied"
    CREDENTIALS = "credentials"
    EXPIRED = "expired"
    CLOCK = "clock"
    REGION = "region"
    FULL = "full"
    TOO_LARGE = "too large"
    UNSUPPORTED = "unsupported"
    RANGE = "range"
    UPLOAD_LOST = "upload lost"
    DAMAGED = "damaged"
    TRUST = "trust"
    LOOKUP = "lookup"
    THROTTLED = "throttled"
    TRANSIENT = "transient"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class _Meaning:
    error: type[StorageError]
    kind: FailureKind
    remedy: str


_P, _T = FailureKind.PERMANENT, FailureKind.TRANSIENT
_X, _S = FailureKind.EXPIRED_CREDENTIALS, FailureKind.THROTTLED
_MEANINGS: Mapping[Fault, _Meaning] = {
    Fault.NOT_FOUND: _Meaning(ObjectNotFoundError, _P, ""),
    Fault.NO_BUCKET: _Meaning(BucketNotFoundError, _P, "create it or correct the URL; dcpfs creates no buckets"),
    Fault.EXISTS: _Meaning(ObjectExistsError, _P, "choose another name or allow overwriting"),
    Fault.DENIED: _Meaning(PermissionDeniedError, _P, "give the identity the right to do this here"),
    Fault.CREDENTIALS: _Meaning(CredentialsError, _P, "check storage_options or the environment's credentials"),
    Fault.EXPIRED: _Meaning(CredentialsError, _X, "the credentials expired and could not be renewed"),
    Fault.CLOCK: _Meaning(CredentialsError, _P, "set this machine's clock"),
    Fault.REGION: _Meaning(StorageError, _P, "set the bucket's own region and endpoint in storage_options"),
    Fault.FULL: _Meaning(StorageFullError, _P, "free space or raise the quota"),
    Fault.TOO_LARGE: _Meaning(StorageError, _P, "use larger parts or smaller files (TransferConfig)"),
    Fault.UNSUPPORTED: _Meaning(UnsupportedOperationError, _P, "use a store that can"),
    Fault.RANGE: _Meaning(TransferSizeError, _P, "the object is shorter than it should be"),
    Fault.UPLOAD_LOST: _Meaning(StorageError, _P, "the store lost the upload or a part of it, so save again"),
    Fault.DAMAGED: _Meaning(DamagedObjectError, _P, "the data changed since it was saved, so use another copy"),
    Fault.TRUST: _Meaning(StorageError, _P, "check the endpoint's name and certificate"),
    Fault.LOOKUP: _Meaning(
        StorageError, FailureKind.UNKNOWN_HOST, "check the endpoint's name, and whether this machine can look it up"
    ),
    Fault.THROTTLED: _Meaning(StorageError, _S, "lower TransferConfig.concurrency or raise RetryConfig's limits"),
    Fault.TRANSIENT: _Meaning(StorageError, _T, "check network and endpoint, or raise RetryConfig's limits"),
    Fault.OTHER: _Meaning(StorageError, _P, ""),
}

_CODES: Mapping[Fault, str] = {
    Fault.NOT_FOUND: "NoSuchKey NoSuchVersion NotFound 404 BlobNotFound ResourceNotFound PathNotFound",
    Fault.NO_BUCKET: "NoSuchBucket ContainerNotFound FilesystemNotFound InvalidBucketName NoSuchContainer",
    Fault.EXISTS: """PreconditionFailed 412 BlobAlreadyExists ResourceAlreadyExists PathAlreadyExists
        ConditionNotMet TargetConditionNotMet ObjectAlreadyExists""",
    Fault.DENIED: """AccessDenied AccessDeniedException AllAccessDisabled AccountProblem Forbidden 403
        AuthorizationPermissionMismatch InsufficientAccountPermissions InvalidObjectState AccountIsDisabled
        AuthorizationFailure NotSignedUp InvalidPayer""",
    Fault.CREDENTIALS: """InvalidAccessKeyId SignatureDoesNotMatch InvalidToken InvalidClientTokenId 401
        UnrecognizedClientException AuthFailure AuthenticationFailed NoAuthenticationInformation
        InvalidSecurity MissingSecurityHeader Unauthorized MissingAuthenticationToken""",
    Fault.EXPIRED: """ExpiredToken ExpiredTokenException RequestExpired TokenRefreshRequired TokenExpired
        InvalidAuthenticationToken""",
    Fault.CLOCK: "RequestTimeTooSkewed",
    Fault.REGION: """PermanentRedirect AuthorizationHeaderMalformed Redirect TemporaryRedirect 301 307
        IllegalLocationConstraintException""",
    Fault.FULL: """QuotaExceeded StorageQuotaExceeded XMinioStorageFull InsufficientStorage
        InsufficientCapacity XMinioAdminBucketQuotaExceeded AccountLimitExceeded""",
    Fault.TOO_LARGE: "EntityTooLarge EntityTooSmall RequestBodyTooLarge BlockCountExceedsLimit 413",
    Fault.UNSUPPORTED: "MethodNotAllowed NotImplemented UnsupportedHttpVerb 405 501",
    Fault.RANGE: "InvalidRange 416 RequestedRangeNotSatisfiable",
    Fault.UPLOAD_LOST: "NoSuchUpload InvalidPart",
    Fault.THROTTLED: """SlowDown SlowDownRead SlowDownWrite ServiceUnavailable ServerBusy Throttling
        ThrottlingException ThrottledException RequestThrottled RequestThrottledException TooManyRequests
        TooManyRequestsException RequestLimitExceeded BandwidthLimitExceeded TransactionInProgressException
        ProvisionedThroughputExceededException Busy 503 429""",
    Fault.TRANSIENT: """InternalError InternalServerError InternalFailure RequestTimeout 408 409 500 502 504
        RequestTimeoutException OperationAborted ConditionalRequestConflict IncompleteBody BadDigest
        OperationTimedOut PriorRequestNotComplete Md5Mismatch GatewayTimeout BadGateway""",
}
"""Error codes of S3, Azure, GCS and stores like them. A bare number stands in a code's place where a response
has no body to put a code in (HEAD)."""

_STATUSES: Mapping[Fault, tuple[int, ...]] = {
    Fault.REGION: (301, 302, 307, 308),
    Fault.CREDENTIALS: (401,),
    Fault.DENIED: (403,),
    Fault.NOT_FOUND: (404, 410),
    Fault.UNSUPPORTED: (405, 501),
    Fault.EXISTS: (412,),
    Fault.TOO_LARGE: (413,),
    Fault.RANGE: (416,),
    Fault.FULL: (507,),
    Fault.THROTTLED: (429, 503, 509),
    Fault.TRANSIENT: (408, 409, 423, 425, 500, 502, 504),
}

_ERRNOS: Mapping[Fault, str] = {
    Fault.NOT_FOUND: "ENOENT ENOTDIR EISDIR",
    Fault.EXISTS: "EEXIST",
    Fault.DENIED: "EACCES EPERM",
    Fault.FULL: "ENOSPC EDQUOT",
    Fault.TOO_LARGE: "EFBIG EMSGSIZE",
    Fault.UNSUPPORTED: "EROFS ENOSYS EOPNOTSUPP ENOTSUP",
    Fault.TRANSIENT: """ECONNRESET ECONNABORTED ECONNREFUSED EPIPE ETIMEDOUT EHOSTUNREACH EHOSTDOWN ENETUNREACH
        ENETDOWN ENETRESET EAGAIN EINTR EBUSY ESTALE EREMOTEIO ENOBUFS ESHUTDOWN EADDRNOTAVAIL""",
}

_TYPES: Mapping[Fault, str] = {
    Fault.NOT_FOUND: """FileNotFoundError NotADirectoryError IsADirectoryError google.NotFound
        azure.ResourceNotFoundError asyncssh.SFTPNoSuchFile webdav4.ResourceNotFound""",
    Fault.EXISTS: "FileExistsError azure.ResourceExistsError webdav4.ResourceAlreadyExists",
    Fault.DENIED: "PermissionError asyncssh.SFTPPermissionDenied webdav4.ForbiddenOperation",
    Fault.CREDENTIALS: """botocore.NoCredentialsError botocore.PartialCredentialsError botocore.ProfileNotFound
        botocore.NoAuthTokenError botocore.SSOTokenLoadError botocore.UnauthorizedSSOTokenError
        botocore.LoginError botocore.ConfigNotFound azure.ClientAuthenticationError
        google.DefaultCredentialsError asyncssh.PermissionDenied paramiko.AuthenticationException
        smbprotocol.SMBAuthenticationError smbprotocol.LogonFailure""",
    Fault.EXPIRED: "botocore.CredentialRetrievalError botocore.TokenRetrievalError google.RefreshError",
    Fault.REGION: "botocore.NoRegionError botocore.UnknownRegionError botocore.InvalidRegionError",
    Fault.UNSUPPORTED: "UnsupportedOperation NotImplementedError",
    Fault.DAMAGED: "zipfile.BadZipFile zlib.error",
    Fault.TRUST: """aiohttp.ClientConnectorCertificateError aiohttp.ClientConnectorSSLError botocore.SSLError
        SSLCertVerificationError requests.SSLError paramiko.BadHostKeyException asyncssh.HostKeyNotVerifiable""",
    Fault.TRANSIENT: """TimeoutError ConnectionError EOFError HTTPException SSLError
        aiohttp.ClientPayloadError aiohttp.ClientConnectionError aiohttp.ClientHttpProxyError
        botocore.HTTPClientError botocore.ResponseStreamingError botocore.IncompleteReadError
        botocore.ConnectionError botocore.MetadataRetrievalError botocore.ChecksumError
        botocore.FlexibleChecksumError requests.ConnectionError requests.Timeout requests.ChunkedEncodingError
        urllib3.ProtocolError urllib3.TimeoutError urllib3.NewConnectionError urllib3.MaxRetryError
        httpx.TransportError httpcore.NetworkError httpcore.TimeoutException azure.ServiceRequestError
        azure.ServiceResponseError azure.IncompleteReadError google.TransportError gcsfs.ChecksumError
        paramiko.SSHException asyncssh.DisconnectError asyncssh.ChannelOpenError asyncssh.SFTPConnectionLost
        asyncssh.SFTPNoConnection
        smbprotocol.SMBConnectionClosed error_temp error_proto fsspec.FSTimeoutError xml.ParseError""",
}
"""``library.Class``, or ``Class`` for Python's own. Of a class and its bases, the first that is listed counts."""

_FTP_REPLIES: Mapping[Fault, str] = {Fault.CREDENTIALS: "530 532", Fault.NOT_FOUND: "550", Fault.FULL: "552"}


def _inverted(table: Mapping[Fault, str]) -> dict[str, Fault]:
    return {name: fault for fault, names in table.items() for name in names.split()}


_FAULT_OF_CODE = _inverted(_CODES)
_FAULT_OF_TYPE = _inverted(_TYPES)
_FAULT_OF_REPLY = _inverted(_FTP_REPLIES)
_FAULT_OF_STATUS = {status: fault for fault, statuses in _STATUSES.items() for status in statuses}
_FAULT_OF_ERRNO = {getattr(errno, name): fault for name, fault in _inverted(_ERRNOS).items() if hasattr(errno, name)}
_PYTHON = frozenset({"asyncio", "builtins", "concurrent", "ftplib", "http", "io", "ssl"})
_BUCKET = re.compile(r"[a-z0-9+.-]+://([^/]+)", re.IGNORECASE)
_WEB = re.compile(r"https?://", re.IGNORECASE)


def classify(exception: Exception, *, verb: str, target: str, scrub: Callable[[str], str] = redact_text) -> Classified:
    """Say what an exception of a failed operation means.

    Args:
        exception: What the client library raised.
        verb: What was tried, as in "Can't *read*".
        target: Redacted URL.
        scrub: Takes secrets out of a text, e.g. `Location.scrub`.
    """
    if isinstance(exception, FailedAttempt):
        return exception.classified
    if isinstance(exception, DcpfsError):
        return Classified(exception, FailureKind.PERMANENT)
    fault, link = _find(exception)
    return classify_fault(
        fault,
        verb=verb,
        target=target,
        reason=scrub(_reason(link)),
        cause=_safe_cause(exception, scrub),
        retry_after_seconds=_retry_after(exception),
    )


def classify_fault(
    fault: Fault,
    *,
    verb: str,
    target: str,
    reason: str,
    cause: BaseException | None = None,
    retry_after_seconds: float | None = None,
) -> Classified:
    """Make the error for a fault that a store found out by itself.

    Args:
        fault: What went wrong.
        verb: What was tried.
        target: Redacted URL.
        reason: The store's words, without secrets.
        cause: Becomes the error's ``__cause__``; its text must be free of secrets.
        retry_after_seconds: The least time the store asks to wait.
    """
    meaning = _MEANINGS[fault]
    if fault is Fault.NO_BUCKET:
        bucket = _bucket(target)
        reason = f"bucket {bucket!r} does not exist ({reason})" if bucket else f"no such bucket ({reason})"
    remedy = f"; {meaning.remedy}" if meaning.remedy else ""
    error = meaning.error(f"Can't {verb} {target}: {reason}{remedy}")
    error.__cause__ = cause
    return Classified(error, meaning.kind, retry_after_seconds)


def has_answered(exception: Exception) -> bool:
    """Whether the store, or what stands before it, said something: there is one at that address."""
    if isinstance(exception, FailedAttempt | DcpfsError):
        return True
    return any(_status(link) or _code(link) for link in _causes(exception))


def fault_of(exception: Exception) -> Fault:
    """Why a request failed."""
    return _find(exception)[0]


def _find(exception: Exception) -> tuple[Fault, BaseException]:
    for links in (list(_causes(exception)), list(_contexts(exception))):
        for find in (_by_code, _by_status, _by_type):
            for link in links:
                fault = find(link)
                if fault is not None:
                    return fault, link
    return Fault.OTHER, exception


def _causes(exception: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = exception
    for _ in range(8):
        if link is None:
            return
        yield link
        link = link.__cause__


def _contexts(exception: BaseException) -> Iterator[BaseException]:
    """What was being handled as it was raised: evidence only where causes gave none."""
    link = exception
    for _ in range(8):
        following = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
        if following is None:
            return
        yield following
        link = following


def _code(link: BaseException) -> str:
    response = getattr(link, "response", None)
    if isinstance(response, Mapping):
        details = response.get("Error")
        code = details.get("Code") if isinstance(details, Mapping) else None
    else:
        code = getattr(link, "error_code", None)
        if code is None and not hasattr(link, "status"):
            code = getattr(link, "code", None)
    code = getattr(code, "value", code)
    return code if isinstance(code, str) else ""


def _status(link: BaseException) -> int:
    response = getattr(link, "response", None)
    found: object = None
    if isinstance(response, Mapping):
        details = response.get("ResponseMetadata")
        found = details.get("HTTPStatusCode") if isinstance(details, Mapping) else None
    else:
        for holder, name in ((link, "status"), (link, "status_code"), (link, "code"), (response, "status_code")):
            found = getattr(holder, name, None)
            if isinstance(found, int):
                break
    return int(found) if isinstance(found, int) and 300 <= found < 600 else 0


def _by_code(link: BaseException) -> Fault | None:
    return _FAULT_OF_CODE.get(_code(link))


def _by_status(link: BaseException) -> Fault | None:
    status = _status(link)
    if not status:
        return None
    return _FAULT_OF_STATUS.get(status, Fault.TRANSIENT if status >= 500 else Fault.OTHER)


def _by_type(link: BaseException) -> Fault | None:
    if isinstance(link, OSError) and link.errno in _FAULT_OF_ERRNO and type(link).__module__ != "ssl":
        return _FAULT_OF_ERRNO[link.errno]
    names = [(kind.__module__.partition(".")[0], kind.__name__) for kind in type(link).__mro__]
    if ("ftplib", "error_perm") in names:
        return _FAULT_OF_REPLY.get(str(link)[:3], Fault.OTHER)
    if ("socket", "gaierror") in names:
        return _by_lookup(link)
    for library, name in names:
        # aiobotocore and httpx's successors keep the names of the libraries they follow.
        family = library.removeprefix("aio").rstrip("2") if library != "aiohttp" else library
        fault = _FAULT_OF_TYPE.get(name if library in _PYTHON else f"{family}.{name}")
        if fault is not None:
            return fault
    return None


def _by_lookup(link: BaseException) -> Fault:
    import socket

    again = getattr(link, "errno", None) == socket.EAI_AGAIN
    return Fault.TRANSIENT if again else Fault.LOOKUP


def _retry_after(exception: Exception) -> float | None:
    for link in _causes(exception):
        found = getattr(link, "retry_after_seconds", None)
        if isinstance(found, int | float):
            return float(found)
        response = getattr(link, "response", None)
        if isinstance(response, Mapping):
            details = response.get("ResponseMetadata")
            headers = details.get("HTTPHeaders") if isinstance(details, Mapping) else None
        else:
            headers = getattr(link, "headers", None) or getattr(response, "headers", None)
        if headers is not None and hasattr(headers, "get"):
            seconds = _seconds(headers.get("retry-after") or headers.get("Retry-After"))
            if seconds is not None:
                return seconds
    return None


def _seconds(value: object) -> float | None:
    """Read a Retry-After header: seconds, or a date."""
    if isinstance(value, int | float):
        return max(0.0, float(value))
    if not isinstance(value, str):
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        when = email.utils.parsedate_to_datetime(value)
    except ValueError:
        return None
    if when.tzinfo is None:
        when = when.replace(tzinfo=dt.timezone.utc)
    return max(0.0, (when - dt.datetime.now(dt.timezone.utc)).total_seconds())


def _reason(link: BaseException) -> str:
    """One line that says what happened in the library's own words."""
    code, status = _code(link), _status(link)
    response = getattr(link, "response", None)
    text = ""
    if isinstance(response, Mapping) and isinstance(response.get("Error"), Mapping):
        text = str(response["Error"].get("Message") or "")
    text = " ".join((text or str(link)).split())
    if len(text) > _TEXT_LIMIT:
        text = text[: _TEXT_LIMIT - 1] + "…"
    head = code or type(link).__name__
    if status and str(status) != head:
        head += f" (HTTP {status})"
    return f"{head}: {text}" if text and text != code else head


def _safe_cause(exception: Exception, scrub: Callable[[str], str]) -> BaseException:
    """The exception itself, or a stand-in when a text in its chain would show a secret in a traceback."""
    links = [*_causes(exception), *_contexts(exception)]
    if all(scrub(text) == text for text in map(str, links)):
        return exception
    return StorageError(scrub(f"{type(exception).__name__}: {exception}"))


def _bucket(target: str) -> str:
    if _WEB.match(target):
        return ""
    match = _BUCKET.search(target)
    return match.group(1) if match else ""
