"""Object bodies to and from S3: one try each, straight from and into the caller's memory.

A response is believed only as far as it proves itself: a ranged read needs a Content-Range that says the very range
that was asked for (with status 206, or 200, as rclone has it), or a whole body, from a store that knows no ranges,
of which the rest is skipped; a body
that ends early leaves behind how far it came, so that the next try goes on from there, unless the object's ETag
says that it was replaced meanwhile, and then from its start. Trying again is not decided here: every failure is
raised as what `dcpfs.storage.translate` understands.

Wrong region: the answer to a signed request can be that the bucket lives elsewhere. botocore follows that, and
remembers it, for its own calls, so one HEAD of the bucket teaches it, and the request is signed anew.
"""

from __future__ import annotations

import http.client
import logging
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

from dcpfs.errors import StorageError, TransferSizeError
from dcpfs.storage.s3_answers import is_foreign, is_text_404, not_the_stores, parse_error
from dcpfs.storage.s3_http import HttpRequest, Scatter
from dcpfs.storage.s3_session import S3Session
from dcpfs.storage.s3_signing import PartSigner, S3Signer
from dcpfs.storage.translate import Classified, FailedAttempt, FailureKind, ResponseError

__all__ = ["RangedRead", "S3Transfer", "parse_content_range"]

_RANGE_OF_NOTHING = "bytes 0--1/0"
"""How MinIO's front describes the end of an empty object, where others say that there is no such range."""

logger = logging.getLogger(__name__)

_ERROR_BYTES = 64 << 10
_SKIP_BYTES = 1 << 20
_REGION_CODES = frozenset(
    {
        "AuthorizationHeaderMalformed",
        "IllegalLocationConstraintException",
        "PermanentRedirect",
        "Redirect",
        "TemporaryRedirect",
    }
)
_REGION_STATUSES = frozenset({301, 302, 307, 308})
_LESSONS = 3
"""How often a session lets itself be sent to another region: a store that always redirects is broken."""
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)$")


def parse_content_range(text: str) -> tuple[int, int, int | None] | None:
    """Read a Content-Range header as half-open range and total size, ``bytes */9`` as (0, 0, 9)."""
    match = _CONTENT_RANGE.match(text.strip())
    if match is None:
        return None
    first, last, total = match.groups()
    start, stop = (int(first), int(last) + 1) if first is not None else (0, 0)
    return start, stop, None if total == "*" else int(total)


@dataclass(slots=True)
class RangedRead:
    """A range of an object on its way into buffers, over as many tries as it takes.

    Attributes:
        key: Name in the bucket.
        target: Redacted URL, for errors.
        start: First byte.
        scatter: Where the bytes go.
        etag: Version from which the bytes so far came, or None.
    """

    key: str
    target: str
    start: int
    scatter: Scatter
    etag: str | None = None


class S3Transfer:
    """Moves bodies of objects. Thread-safe.

    Args:
        session: Whose client, bucket and connections are used.
        signer: Signs for it.
    """

    def __init__(self, session: S3Session, signer: S3Signer) -> None:
        self._session = session
        self._signer = signer
        self._lock = threading.Lock()
        self._lessons = 0
        self._told = False

    def put_object(self, key: str, buffers: Sequence[memoryview], *, if_absent: bool) -> str | None:
        """Write an object in one request. Returns its ETag."""
        parameters: dict[str, object] = {"IfNoneMatch": "*"} if if_absent else {}
        request = self._signer.sign_put(key, buffers, parameters)
        with self._exchange(request, buffers) as response:
            response.read()
            return response.getheader("ETag")

    def part_signer(self, key: str, upload_id: str, parts: int) -> PartSigner:
        """Signs the parts of an upload, for `put_part`."""
        return PartSigner(self._signer, key, upload_id, parts)

    def put_part(self, signer: PartSigner, number: int, buffers: Sequence[memoryview]) -> str:
        """Write one part. Returns its ETag."""
        with self._exchange(signer.sign(number, buffers), buffers) as response:
            response.read()
            etag = response.getheader("ETag")
        if not etag:
            raise ResponseError(502, "", f"the answer to part {number} names no ETag")
        return etag

    def head(self, key: str) -> dict[str, object]:
        """Describe an object.

        An error answer to a HEAD has no body and hides its code, e.g. that a token expired, or that it is not the
        store's. A GET of one byte shows it.
        """
        from botocore.exceptions import ClientError

        try:
            answer = self._session.call("head_object", Key=key)
        except ClientError as failure:
            if not _hides_its_cause(failure.response):
                raise
            absent = failure.response["Error"]["Code"] == "404"
            with self._exchange(self._signer.sign_get(key, None if absent else "bytes=0-0")):
                if absent:
                    raise not_the_stores(404, "Not Found") from None
                raise
        if "ContentLength" not in answer:
            raise ResponseError(502, "", "the answer about an object does not say how large it is")
        return answer

    def checksum(self, buffers: Sequence[memoryview]) -> dict[str, object]:
        """The checksum parameter that went with a part, for completing its upload; often nothing."""
        return self._signer.checksum(buffers)

    def read_range(self, read: RangedRead) -> None:
        """Go on with a ranged read from where it is.

        Raises:
            FailedAttempt: The answer holds another range, or less.
        """
        scatter = read.scatter
        first, stop = read.start + scatter.done_bytes, read.start + scatter.total_bytes
        request = self._signer.sign_get(read.key, f"bytes={first}-{stop - 1}")
        with self._exchange(request) as response:
            etag = response.getheader("ETag")
            if scatter.done_bytes and etag != read.etag:
                scatter.restart()
                raise _unfit(read.target, "the object was replaced while it was read")
            read.etag = etag
            if _is_range(response):
                got = parse_content_range(response.getheader("Content-Range") or "")
                if got is None or got[0] != first or got[1] > stop:
                    raise _unfit(read.target, f"asked for bytes {first}-{stop - 1}, got {_shown(response)}")
                if got[1] < stop:
                    total = got[1] if got[2] is None else got[2]
                    raise _ends_early(read.target, total, stop)
                if response.length is not None and response.length != stop - first:
                    raise _unfit(read.target, f"{response.length} bytes announced for bytes {first}-{stop - 1}")
            else:
                self._skip(read.target, response, first, stop)
            scatter.fill(response)
        if scatter.done_bytes < scatter.total_bytes:
            raise _unfit(read.target, f"the answer ended {scatter.total_bytes - scatter.done_bytes} bytes too early")

    def read_tail(self, key: str, target: str, size_bytes: int) -> tuple[bytes, int]:
        """Read the end of an object, and its full size."""
        request = self._signer.sign_get(key, f"bytes=-{size_bytes}")
        with self._exchange(request) as response:
            length = response.length
            body = response.read()
            if length is not None and len(body) != length:
                raise _unfit(target, f"the answer ended {length - len(body)} bytes too early")
            if not _is_range(response):
                return body[max(0, len(body) - size_bytes) :], len(body)
            shown = response.getheader("Content-Range") or ""
            if not body and shown == _RANGE_OF_NOTHING:
                return b"", 0
            got = parse_content_range(shown)
            if got is None or got[2] is None or got[1] != got[2] or got[1] - got[0] != len(body):
                raise _unfit(target, f"asked for the last {size_bytes} bytes, got {_shown(response)}")
            return body, got[2]

    def read_whole(self, key: str, target: str) -> bytes:
        """Read a whole object."""
        with self._exchange(self._signer.sign_get(key, None)) as response:
            length, is_ended_by_close = response.length, response.length is None and not response.chunked
            body = response.read()
        if is_ended_by_close:
            length = cast("int", self.head(key)["ContentLength"])
        if length is not None and len(body) != length:
            raise _unfit(target, f"the answer has {len(body)} bytes instead of {length}")
        return body

    def _skip(self, target: str, response: http.client.HTTPResponse, first: int, stop: int) -> None:
        """Pass over the start of a whole body that came in place of a range."""
        if response.length is not None and response.length < stop:
            raise _ends_early(target, response.length, stop)
        if not self._told and (first or response.length is None or response.length > stop):
            self._told = True
            logger.warning("%s answers ranged reads with whole objects: loading reads too much", target)
        scratch = memoryview(bytearray(min(first, _SKIP_BYTES)))
        while first:
            count = response.readinto(scratch[:first])
            if not count:
                raise _unfit(target, "the answer ended before the range")
            first -= count

    @contextmanager
    def _exchange(self, request: HttpRequest, buffers: Sequence[memoryview] = ()) -> Iterator[http.client.HTTPResponse]:
        generation = self._session.generation
        with self._session.pool.exchange(request, buffers) as response:
            if response.status < 300:
                yield response
                return
            error = _response_error(response)
        try:
            if error.code in _REGION_CODES or error.status_code in _REGION_STATUSES or _names_region(response):
                self._learn_region(generation, error)
            raise error
        finally:
            del error  # which holds this call, by its traceback

    def _learn_region(self, generation: int, error: ResponseError) -> None:
        """Let botocore find the bucket's region, then have the request tried again.

        Raises:
            FailedAttempt: The region may be known now.
        """
        from botocore.exceptions import BotoCoreError, ClientError

        with self._lock:
            if generation == self._session.generation:
                if self._lessons >= _LESSONS:
                    return
                self._lessons += 1
                try:
                    self._session.call("head_bucket")
                except (BotoCoreError, ClientError, http.client.HTTPException, OSError) as failure:
                    logger.debug("Asking for the bucket's region failed: %s", type(failure).__name__)
                self._session.outdate()
        retried = StorageError(f"{error.code or error.status_code}: the bucket is in another region")
        raise FailedAttempt(Classified(retried, FailureKind.TRANSIENT)) from error


def _response_error(response: http.client.HTTPResponse) -> ResponseError:
    body = response.read(_ERROR_BYTES)
    if is_foreign(response.status, body):
        return not_the_stores(response.status, response.reason)
    code, message = parse_error(body)
    request_id = response.getheader("x-amz-request-id")
    if request_id:
        message = f"{message} [request {request_id}]".strip()
    if not message:
        message = response.reason
    return ResponseError(response.status, code, message, retry_after=response.getheader("Retry-After"))


def _hides_its_cause(response: Mapping[str, Mapping[str, object]]) -> bool:
    return response.get("Error", {}).get("Code") in ("400", "403") or is_text_404(response)


def _names_region(response: http.client.HTTPResponse) -> bool:
    return response.status == 400 and response.getheader("x-amz-bucket-region") is not None


def _is_range(response: http.client.HTTPResponse) -> bool:
    return response.status == 206 or response.getheader("Content-Range") is not None


def _shown(response: http.client.HTTPResponse) -> str:
    return f"status {response.status}, Content-Range {response.getheader('Content-Range')!r}"


def _unfit(target: str, reason: str) -> FailedAttempt:
    """A response that doesn't fit its request: worth another try."""
    return FailedAttempt(Classified(TransferSizeError(f"Can't read {target}: {reason}"), FailureKind.TRANSIENT))


def _ends_early(target: str, size_bytes: int, stop: int) -> FailedAttempt:
    error = TransferSizeError(
        f"Can't read {target}: it has {size_bytes} bytes, and byte {stop - 1} was asked for; it is shorter than it "
        "should be"
    )
    return FailedAttempt(Classified(error, FailureKind.PERMANENT))
