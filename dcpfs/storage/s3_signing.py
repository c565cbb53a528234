"""Requests signed by botocore and sent by someone else.

Problem: a request to S3 needs the bucket's endpoint, the right addressing style, the user's encryption headers and
a signature from credentials that may come from anywhere and change. botocore makes all of that, but only as part
of sending. A presigned URL is no way out: bucket policies can refuse it, and it can't carry every header.

Way taken: an operation of the client is called, and its finished request is taken at botocore's last event before
sending, ``before-send``, where a handler may answer in the server's place. Nothing is sent. The payload is no part of
the signature (``UNSIGNED-PAYLOAD``, also over plain HTTP), so it need not exist yet, and hashing it costs nothing.

That costs 0.6 ms of CPU. So it is done rarely:

- A signed GET is kept for a minute and serves all ranges of its object: SigV4 signs the headers it names, and Range
  needs not be among them.
- The upload of part 1 is prepared once per upload and minute; for every other part only number and signature
  change, which the calling thread computes with botocore's own signer object in 0.07 ms.

Where the user asked for signed payloads, or the signature is of a kind that needs more than that (SigV4a, S3
Express), every request is prepared in full.
"""

from __future__ import annotations

import base64
import contextvars
import hashlib
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from dcpfs.storage.s3_clients import S3Client, run_on_loop
from dcpfs.storage.s3_http import HttpRequest
from dcpfs.storage.s3_session import S3Session

__all__ = ["PartSigner", "PartTemplate", "S3Signer"]

_KEPT_SECONDS = 60.0
"""How long a prepared request is reused: far below S3's 15 minutes, and below botocore's renewal margin."""
_KEPT_REQUESTS = 1024
_SIGNED_AHEAD = 31
"""Parts signed along with one: 2 ms of work, and at the default concurrency all that are in flight."""
_RESIGNABLE = frozenset({"s3v4", "v4"})
_UNSENT = frozenset({"amz-sdk-invocation-id", "amz-sdk-request", "content-length", "expect", "host"})
"""Headers of a prepared request that describe botocore's own sending of it, not the request."""
_CHECKSUM_HEADERS = "x-amz-checksum-"
_PART_NUMBER = re.compile(r"(?<=[?&]partNumber=)\d+")


class _Auth(Protocol):
    def add_auth(self, request: object) -> None: ...


class _RequestSigner(Protocol):
    async def get_auth_instance(self, signing_name: str, region_name: str, signature_version: str) -> _Auth: ...


class _Request(Protocol):
    method: str
    url: str
    headers: Mapping[str, str | bytes]
    context: dict[str, object]


@dataclass(slots=True)
class PartTemplate:
    """The upload of part 1, prepared, from which those of the others are made.

    Attributes:
        generation: Of the session, when it was made.
        until_seconds: Monotonic time from which it is not used any more.
        request: All but number and signature.
        auth: botocore's signer with frozen credentials, or None for anonymous requests.
        context: What the signer wants to know about the request.
    """

    generation: int
    until_seconds: float
    request: HttpRequest
    auth: _Auth | None
    context: dict[str, object]


class _Capture:
    """What the event handlers see of one request on its way through botocore.

    Of no other: on its way botocore may open a session (S3 Express), which it sends for real.
    """

    def __init__(self, operation: str) -> None:
        self.operation = operation
        self.request: HttpRequest | None = None
        self.unsigned: HttpRequest | None = None
        self.context: dict[str, object] = {}
        self.signature_version: object = None
        self.signer: _RequestSigner | None = None
        self.signing_name = ""
        self.region_name = ""
        self.auth: _Auth | None = None


_capture: contextvars.ContextVar[_Capture | None] = contextvars.ContextVar("dcpfs_s3_capture", default=None)


class S3Signer:
    """Signs GETs and PUTs for a session's bucket. Thread-safe."""

    def __init__(self, session: S3Session) -> None:
        self._session = session
        # No lock: single operations on a dict are atomic, and a lock could be held by a thread that a fork loses.
        self._kept: dict[tuple[int, str], tuple[float, HttpRequest]] = {}
        self._hooked: S3Client | None = None

    def sign_get(self, key: str, byte_range: str | None) -> HttpRequest:
        """A GET of an object or of a range of it, e.g. ``bytes=0-9``."""
        name = (self._session.generation, key)
        now_seconds = time.monotonic()
        kept = self._kept.get(name)
        if kept is not None and kept[0] > now_seconds:
            request = kept[1]
        else:
            request = _taken(self._prepare("get_object", {"Key": key}))
            if len(self._kept) >= _KEPT_REQUESTS:
                self._kept = {}
            self._kept[name] = (now_seconds + _KEPT_SECONDS, request)
        if byte_range is None:
            return request
        return HttpRequest(request.method, request.url, {**request.headers, "Range": byte_range})

    def sign_put(self, key: str, buffers: Sequence[memoryview], parameters: Mapping[str, object]) -> HttpRequest:
        """A PUT of an object, without its body."""
        return _taken(
            self._prepare(
                "put_object", {"Key": key, **parameters, **self.checksum(buffers), "Body": self._body(buffers)}
            )
        )

    def prepare_part(
        self, key: str, upload_id: str, number: int, buffers: Sequence[memoryview]
    ) -> tuple[HttpRequest, PartTemplate | None]:
        """The upload of one part, and the template for those of the others; None: they are prepared like this one."""
        parameters = {"Key": key, "UploadId": upload_id, "PartNumber": number, **self.checksum(buffers)}
        generation, until_seconds = self._session.generation, time.monotonic() + _KEPT_SECONDS
        capture = self._prepare("upload_part", {**parameters, "Body": self._body(buffers)}, with_auth=True)
        template = None if self.signs_payload else _template(capture, generation, until_seconds)
        return _taken(capture), template

    def fits(self, template: PartTemplate) -> bool:
        """Whether requests made from it are still good."""
        return template.generation == self._session.generation and time.monotonic() < template.until_seconds

    def checksum(self, buffers: Sequence[memoryview]) -> dict[str, object]:
        """The checksum parameter of an upload, when the user's options ask for checksums, else nothing.

        Computed here, since botocore would do it of a body that it does not have, by wrapping it in chunks with a
        trailer.
        """
        algorithm = self._session.checksum_algorithm
        if algorithm is None:
            return {}
        return {f"Checksum{algorithm}": base64.b64encode(_digest(algorithm, buffers)).decode("ascii")}

    @property
    def signs_payload(self) -> bool:
        """Whether the user asked for signatures that cover the payload: then no two parts are alike."""
        return bool((self._session.config.s3 or {}).get("payload_signing_enabled"))

    def _body(self, buffers: Sequence[memoryview]) -> object:
        return _Joined(buffers) if self.signs_payload else b""

    def _prepare(self, operation: str, parameters: Mapping[str, object], *, with_auth: bool = False) -> _Capture:
        current = self._session.client
        self._hook(current)
        arguments = self._session.arguments(operation, parameters)
        capture = _Capture(current.client.meta.method_to_api_mapping[operation])

        async def run() -> _Capture:
            token = _capture.set(capture)
            try:
                await getattr(current.client, operation)(**arguments)
            finally:
                _capture.reset(token)
            version = capture.signature_version
            if with_auth and isinstance(version, str) and version in _RESIGNABLE and capture.signer:
                capture.auth = await capture.signer.get_auth_instance(
                    capture.signing_name, capture.region_name, version
                )
            return capture

        return run_on_loop(current.loop, run())

    def _hook(self, current: S3Client) -> None:
        if self._hooked is not current:
            # A handler with an id is registered once, however many threads do it.
            events = current.client.meta.events
            events.register("before-sign.s3", _on_before_sign, unique_id="dcpfs-before-sign")
            events.register("before-send.s3", _on_before_send, unique_id="dcpfs-before-send")
            self._hooked = current


class PartSigner:
    """Signs the parts of one upload. Thread-safe.

    The first is prepared by botocore while the others wait for what it teaches. Then a thread whose part is not signed
    yet signs those that come next as well: right after a body has gone through the processor's caches the same work
    takes five times as long.

    Args:
        signer: Of the session.
        key: Name in the bucket.
        upload_id: Of the upload.
        parts: How many there are.
    """

    def __init__(self, signer: S3Signer, key: str, upload_id: str, parts: int) -> None:
        self._signer = signer
        self._key = key
        self._upload_id = upload_id
        self._parts = parts
        self._lock = threading.Lock()
        self._alike = not signer.signs_payload
        self._template: PartTemplate | None = None
        self._ahead: dict[int, HttpRequest] = {}
        self._signed = 0

    def sign(self, number: int, buffers: Sequence[memoryview]) -> HttpRequest:
        """The upload of one part, without its body."""
        if not self._alike:
            return self._signer.prepare_part(self._key, self._upload_id, number, buffers)[0]
        checksum = self._signer.checksum(buffers)
        with self._lock:
            template = self._template
            if template is None or not self._signer.fits(template):
                return self._prepare(number, buffers)
            if not checksum:
                return self._next(template, number)
        return _sign_again(template, number, checksum)

    def _prepare(self, number: int, buffers: Sequence[memoryview]) -> HttpRequest:
        self._ahead.clear()
        self._signed = 0
        request, self._template = self._signer.prepare_part(self._key, self._upload_id, number, buffers)
        # Once it fails, each is prepared by the thread that sends it.
        self._alike = self._template is not None
        return request

    def _next(self, template: PartTemplate, number: int) -> HttpRequest:
        request = self._ahead.pop(number, None)
        if request is not None:
            return request
        if number > self._signed:
            self._signed = min(number + _SIGNED_AHEAD, self._parts)
            self._ahead.update((each, _sign_again(template, each, {})) for each in range(number + 1, self._signed + 1))
        return _sign_again(template, number, {})


class _Joined:
    """Buffers as a file, for signatures that cover the payload. Read by botocore in pieces."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = buffers
        self._size_bytes = sum(map(len, buffers))
        self._at = 0

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size_bytes}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        stop = self._size_bytes if size < 0 else min(self._size_bytes, self._at + size)
        pieces, start = [], 0
        for buffer in self._buffers:
            pieces.append(bytes(buffer[max(0, self._at - start) : max(0, stop - start)]))
            start += len(buffer)
        self._at = max(self._at, stop)
        return b"".join(pieces)


class _NoBody:
    """Stands for the response to a request that was taken, not sent."""

    async def read(self) -> bytes:
        return b""


def _on_before_sign(
    request: _Request,
    signing_name: str,
    region_name: str,
    signature_version: object,
    request_signer: _RequestSigner,
    operation_name: str,
    **_: object,
) -> None:
    capture = _capture.get()
    if capture is None or operation_name != capture.operation:
        return
    signing = cast("Mapping[str, str]", request.context.get("signing") or {})
    capture.signature_version = signature_version
    capture.signer = None if signing.get("request_credentials") else request_signer
    capture.signing_name = signing.get("signing_name") or signing_name
    capture.region_name = signing.get("region") or region_name
    capture.unsigned = HttpRequest(request.method, request.url, _headers(request.headers))
    capture.context = {name: request.context[name] for name in ("client_config", "signing") if name in request.context}


def _on_before_send(request: _Request, event_name: str, **_: object) -> object:
    capture = _capture.get()
    if capture is None or event_name.rpartition(".")[2] != capture.operation:
        return None
    from aiobotocore.awsrequest import AioAWSResponse

    capture.request = HttpRequest(request.method, request.url, _sendable(request.headers))
    return AioAWSResponse(request.url, 200, {}, _NoBody())


def _digest(algorithm: str, buffers: Sequence[memoryview]) -> bytes:
    if algorithm == "CRC32":
        from isal import isal_zlib

        value = 0
        for buffer in buffers:
            value = isal_zlib.crc32(buffer, value)
        return value.to_bytes(4, "big")
    digest = hashlib.new(algorithm, usedforsecurity=False)
    for buffer in buffers:
        digest.update(buffer)
    return digest.digest()


def _taken(capture: _Capture) -> HttpRequest:
    if capture.request is None:
        raise RuntimeError("botocore sent a request without its before-send event")
    return capture.request


def _headers(headers: Mapping[str, str | bytes]) -> dict[str, str]:
    return {
        name: value.decode("utf-8") if isinstance(value, bytes) else str(value)
        for name, value in headers.items()
        if name.lower() not in _UNSENT
    }


def _sendable(headers: Mapping[str, str | bytes]) -> dict[str, str]:
    return {"Accept-Encoding": "identity", **_headers(headers)}


def _template(capture: _Capture, generation: int, until_seconds: float) -> PartTemplate | None:
    from botocore import UNSIGNED

    if capture.signature_version is UNSIGNED:
        return PartTemplate(generation, until_seconds, _taken(capture), None, {})
    if capture.auth is None or capture.unsigned is None:
        return None
    return PartTemplate(generation, until_seconds, capture.unsigned, capture.auth, capture.context)


def _sign_again(template: PartTemplate, number: int, checksum: Mapping[str, object]) -> HttpRequest:
    source = template.request
    url = _PART_NUMBER.sub(str(number), source.url, count=1)
    headers = {name: value for name, value in source.headers.items() if not name.lower().startswith(_CHECKSUM_HEADERS)}
    for name, value in checksum.items():
        headers[_CHECKSUM_HEADERS + name.removeprefix("Checksum").lower()] = str(value)
    if template.auth is None:
        return HttpRequest(source.method, url, headers)
    from botocore.awsrequest import AWSRequest

    request = AWSRequest(method=source.method, url=url, headers=headers)
    request.context.update(template.context)
    template.auth.add_auth(request)
    return HttpRequest(source.method, url, _sendable(request.headers))
