"""What can go wrong with a request to S3, as values that a scripted server acts out.

Problem: a retry, an abort or a size check is only proven by the very byte sequence that calls for it: a reset after
the answer's first 100 bytes, a completion that took effect and was never confirmed, a body one byte short under
the right length. Real servers don't do that on demand.

Way taken: an `Action` has four hooks along a request's way, of which each fault overrides the one it needs. A
`Fault` says when: for which requests, how many, after how many. Nothing here waits for a clock: what hangs or
drips goes on when the test says so.

Flow: ``server.fail("UploadPart", slow_down(), times=2)`` → `Fault`; its ``hits``, ``reached`` and ``release()`` let
the test follow and steer.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from typing_extensions import override

from dcpfs.testing.http_exchange import Head, Response
from dcpfs.testing.s3_exchange import DroppedError, Exchange, S3Request, Stage
from dcpfs.testing.s3_objects import StoredPart
from dcpfs.testing.s3_service import error_response

if TYPE_CHECKING:
    from dcpfs.testing.s3_objects import StoredObject

__all__ = [
    "Action",
    "Answer",
    "Drip",
    "Drop",
    "Effect",
    "ErrorInside200",
    "ExtraBytes",
    "Fault",
    "FlipByte",
    "Hang",
    "IgnoreRange",
    "Length",
    "LosePart",
    "Match",
    "ShortBody",
    "StaleList",
    "Truncate",
    "WrongETag",
    "WrongRange",
    "denied",
    "expired_token",
    "internal_error",
    "moved_to",
    "no_such_bucket",
    "not_implemented",
    "slow_down",
    "too_skewed",
]

Match = str | Callable[[S3Request], bool]
"""An operation's name, ``*`` for all, or a question about the request. A connection's start is asked about as an
operation ``Connect`` of its own, which ``*`` leaves out."""


class Effect(enum.Enum):
    """Whether the request did what it asked for."""

    NONE = "none"
    APPLIED = "applied"


class Length(enum.Enum):
    """Which Content-Length goes with a body of the wrong length."""

    PROMISED = "promised"
    """The right one: the client sees the connection close early."""
    SENT = "sent"
    """That of what is sent: only the client's own knowledge shows that it is wrong."""


class Action:
    """Does nothing wrong. Faults override hooks; a hook may raise `DroppedError` after breaking the connection."""

    def before_body(self, exchange: Exchange, fault: Fault) -> None:
        """The head has been read."""

    def before_effect(self, exchange: Exchange, fault: Fault) -> Response | None:  # noqa: ARG002 - a hook
        """The body has been read; a response is sent in place of doing what was asked."""
        return None

    def after_effect(
        self,
        exchange: Exchange,  # noqa: ARG002 - a hook
        fault: Fault,  # noqa: ARG002 - a hook
        response: Response,
    ) -> Response:
        """It has been done; what is returned is sent."""
        return response

    def send(self, exchange: Exchange, fault: Fault, response: Response) -> None:  # noqa: ARG002 - a hook
        """Send the answer."""
        exchange.connection.send(response)


class Fault:
    """An action with its occasions. Thread-safe.

    Args:
        match: For which requests.
        action: What happens to them.
        times: To how many; None: to all until `release`.
        after: How many matching ones pass before.

    Attributes:
        hits: To how many it has happened.
        reached: Set at the first.
        released: Set by `release`.
    """

    def __init__(self, match: Match, action: Action, *, times: int | None = 1, after: int = 0) -> None:
        self.match = match
        self.action = action
        self.hits = 0
        self.reached = threading.Event()
        self.released = threading.Event()
        self.steps = threading.Semaphore(0)
        self._left = times
        self._after = after
        self._lock = threading.Lock()

    def take(self, request: S3Request) -> bool:
        """Count a request; True when it is to fail."""
        name = self.match
        if isinstance(name, str):
            if name != request.operation and (name != "*" or request.operation == "Connect"):
                return False
        elif not name(request):
            return False
        with self._lock:
            if self.released.is_set() or self._left == 0:
                return False
            if self._after > 0:
                self._after -= 1
                return False
            if self._left is not None:
                self._left -= 1
            self.hits += 1
        self.reached.set()
        return True

    def step(self, count: int = 1) -> None:
        """Let a `Drip` send so many chunks more."""
        for _ in range(count):
            self.steps.release()

    def release(self) -> None:
        """Happen no more; let those that hang go on."""
        self.released.set()
        self.steps.release()


@dataclass(frozen=True)
class Answer(Action):
    """An error answer."""

    status: int
    code: str
    message: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    effect: Effect = Effect.NONE

    def _response(self, exchange: Exchange) -> Response:
        return error_response(exchange, self.status, self.code, self.message, dict(self.headers))

    @override
    def before_effect(self, exchange: Exchange, fault: Fault) -> Response | None:
        return None if self.effect is Effect.APPLIED else self._response(exchange)

    @override
    def after_effect(self, exchange: Exchange, fault: Fault, response: Response) -> Response:
        return self._response(exchange) if self.effect is Effect.APPLIED else response


def slow_down(retry_after_seconds: int | None = None) -> Answer:
    """503 SlowDown, with Retry-After if given."""
    headers = {} if retry_after_seconds is None else {"Retry-After": str(retry_after_seconds)}
    return Answer(503, "SlowDown", "Please reduce your request rate.", headers)


def internal_error(effect: Effect = Effect.NONE) -> Answer:
    """500 InternalError."""
    return Answer(500, "InternalError", "We encountered an internal error. Please try again.", effect=effect)


def expired_token() -> Answer:
    """400 ExpiredToken; see also `ScriptedS3Server.expire`."""
    return Answer(400, "ExpiredToken", "The provided token has expired.")


def too_skewed() -> Answer:
    """403 RequestTimeTooSkewed; see also `ScriptedS3Server.clock_skew_seconds`."""
    return Answer(403, "RequestTimeTooSkewed", "The difference between the times is too large.")


def denied() -> Answer:
    """403 AccessDenied."""
    return Answer(403, "AccessDenied", "Access Denied")


def no_such_bucket() -> Answer:
    """404 NoSuchBucket."""
    return Answer(404, "NoSuchBucket", "The specified bucket does not exist")


def not_implemented() -> Answer:
    """501 NotImplemented."""
    return Answer(501, "NotImplemented", "A header you provided implies functionality that is not implemented")


def moved_to(region: str) -> Answer:
    """301 PermanentRedirect to another region, on a host that is not this one."""
    headers = {"x-amz-bucket-region": region, "Location": f"http://s3.{region}.amazonaws.com/"}
    return Answer(301, "PermanentRedirect", "Address this bucket at its own endpoint.", headers)


@dataclass(frozen=True)
class Drop(Action):
    """The connection breaks.

    Attributes:
        stage: Where.
        after_bytes: How many bytes of the request's body, or of the answer's head or body, pass before.
        effect: At RESPONSE_HEAD: whether the request had taken effect. (Later: it had; earlier: it had not.)
        reset: With a TCP reset rather than an orderly close.
    """

    stage: Stage = Stage.HEAD
    after_bytes: int = 0
    effect: Effect = Effect.NONE
    reset: bool = True

    def _drop(self, exchange: Exchange) -> None:
        if self.reset:
            exchange.connection.reset()
        raise DroppedError

    @override
    def before_body(self, exchange: Exchange, fault: Fault) -> None:
        if self.stage is Stage.HEAD:
            self._drop(exchange)
        if self.stage is Stage.REQUEST_BODY:
            exchange.request.body_bytes = len(exchange.connection.read_body(exchange.head, self.after_bytes))
            self._drop(exchange)

    @override
    def before_effect(self, exchange: Exchange, fault: Fault) -> Response | None:
        if self.stage is Stage.RESPONSE_HEAD and self.effect is Effect.NONE:
            exchange.connection.send_raw(exchange.connection.head_bytes(Response(200))[: self.after_bytes])
            self._drop(exchange)
        return None

    @override
    def send(self, exchange: Exchange, fault: Fault, response: Response) -> None:
        connection = exchange.connection
        if self.stage is Stage.RESPONSE_HEAD:
            connection.send_raw(connection.head_bytes(response)[: self.after_bytes])
        else:
            connection.send_head(response)
            connection.send_body(response, 0, self.after_bytes)
        self._drop(exchange)


@dataclass(frozen=True)
class Hang(Action):
    """Silence until the fault is released; then all goes on as if nothing had been.

    Attributes:
        stage: Where.
        after_bytes: At RESPONSE_BODY: how many bytes of the answer's body are sent before.
    """

    stage: Stage = Stage.HEAD
    after_bytes: int = 0

    @override
    def before_body(self, exchange: Exchange, fault: Fault) -> None:
        if self.stage is Stage.HEAD:
            exchange.wait(fault.released)

    @override
    def before_effect(self, exchange: Exchange, fault: Fault) -> Response | None:
        if self.stage is Stage.REQUEST_BODY:
            exchange.wait(fault.released)
        return None

    @override
    def send(self, exchange: Exchange, fault: Fault, response: Response) -> None:
        if self.stage is Stage.RESPONSE_HEAD:
            exchange.wait(fault.released)
        exchange.connection.send_head(response)
        if not response.send_body:
            return
        if self.stage is Stage.RESPONSE_BODY:
            exchange.connection.send_body(response, 0, self.after_bytes)
            exchange.wait(fault.released)
            exchange.connection.send_body(response, self.after_bytes, response.body_bytes)
        else:
            exchange.connection.send_body(response, 0, response.body_bytes)


@dataclass(frozen=True)
class Drip(Action):
    """The answer's body comes in chunks, each when the test calls `Fault.step`; the rest at `Fault.release`."""

    chunk_bytes: int

    @override
    def send(self, exchange: Exchange, fault: Fault, response: Response) -> None:
        exchange.connection.send_head(response)
        for start in range(0, response.body_bytes, self.chunk_bytes):
            if not fault.released.is_set():
                fault.steps.acquire()
            stop = min(start + self.chunk_bytes, response.body_bytes)
            exchange.connection.send_body(response, start, stop)


@dataclass(frozen=True)
class ShortBody(Action):
    """The last bytes of the answer's body are missing, and the connection closes in good order."""

    missing_bytes: int = 1
    length: Length = Length.PROMISED

    @override
    def send(self, exchange: Exchange, fault: Fault, response: Response) -> None:
        sent = max(0, response.body_bytes - self.missing_bytes)
        told = response.body_bytes if self.length is Length.PROMISED else sent
        exchange.connection.send_head(response, length=told)
        exchange.connection.send_body(response, 0, sent)
        if self.length is Length.PROMISED:
            raise DroppedError


@dataclass(frozen=True)
class ExtraBytes(Action):
    """The answer's body goes on past its end; PROMISED leaves the surplus outside of the told length."""

    count: int = 1
    length: Length = Length.SENT

    @override
    def send(self, exchange: Exchange, fault: Fault, response: Response) -> None:
        longer = replace(response, body=(*response.body, bytes(self.count)))
        told = response.body_bytes if self.length is Length.PROMISED else longer.body_bytes
        exchange.connection.send_head(response, length=told)
        exchange.connection.send_body(longer, 0, longer.body_bytes)


@dataclass(frozen=True)
class FlipByte(Action):
    """One byte of the answer's body is not what is stored; a negative offset counts from the end."""

    offset: int = 0

    @override
    def after_effect(self, exchange: Exchange, fault: Fault, response: Response) -> Response:
        body = bytearray(b"".join(response.body))
        body[self.offset] ^= 0x01
        return replace(response, body=(body,))


@dataclass(frozen=True)
class WrongRange(Action):
    """The answer tells a Content-Range other than its body's."""

    shift_bytes: int = 1

    @override
    def after_effect(self, exchange: Exchange, fault: Fault, response: Response) -> Response:
        span, _, size = response.headers.get("Content-Range", "").removeprefix("bytes ").partition("/")
        first, _, last = span.partition("-")
        shifted = f"bytes {int(first) + self.shift_bytes}-{int(last) + self.shift_bytes}/{size}"
        return replace(response, headers={**response.headers, "Content-Range": shifted})


@dataclass(frozen=True)
class IgnoreRange(Action):
    """A ranged read is answered with 200 and the whole object, as HTTP allows."""

    @override
    def before_effect(self, exchange: Exchange, fault: Fault) -> Response | None:
        headers = {name: value for name, value in exchange.head.headers.items() if name != "range"}
        exchange.head = Head(exchange.head.method, exchange.head.raw_path, exchange.head.raw_query, headers)
        return None


@dataclass(frozen=True)
class ErrorInside200(Action):
    """Status 200 with an error document, as S3 may answer a completion or a copy that took long and failed."""

    code: str = "InternalError"

    @override
    def before_effect(self, exchange: Exchange, fault: Fault) -> Response | None:
        return replace(error_response(exchange, 200, self.code), headers={"Content-Type": "application/xml"})


@dataclass(frozen=True)
class WrongETag(Action):
    """The answer tells another entity tag than the store keeps."""

    etag: str = '"00000000000000000000000000000000"'

    @override
    def after_effect(self, exchange: Exchange, fault: Fault, response: Response) -> Response:
        return replace(response, headers={**response.headers, "ETag": self.etag})


@dataclass(frozen=True)
class LosePart(Action):
    """A part is confirmed and then forgotten: completing the upload with it says InvalidPart."""

    @override
    def after_effect(self, exchange: Exchange, fault: Fault, response: Response) -> Response:
        request = exchange.request
        upload = exchange.objects.upload(request.bucket, request.key, request.query["uploadId"])
        upload.parts.pop(request.part_number or 0, None)
        return response


@dataclass(frozen=True)
class Truncate(Action):
    """A part or object is confirmed, and stored without its last bytes."""

    missing_bytes: int = 1

    @override
    def after_effect(self, exchange: Exchange, fault: Fault, response: Response) -> Response:
        request, objects = exchange.request, exchange.objects
        if request.operation == "UploadPart":
            parts = objects.upload(request.bucket, request.key, request.query["uploadId"]).parts
            part = parts[request.part_number or 0]
            kept = self._kept(part)
            parts[request.part_number or 0] = replace(part, body=kept, size_bytes=sum(map(len, kept)))
        else:
            found = objects.get(request.bucket, request.key)
            objects.replace(request.bucket, request.key, self._kept(found))
        return response

    def _kept(self, stored: StoredPart | StoredObject) -> tuple[memoryview, ...]:
        stop = max(0, stored.size_bytes - self.missing_bytes)
        return tuple(Response(200, {}, stored.body).body_range(0, stop))


@dataclass(frozen=True)
class StaleList(Action):
    """A listing does not show these names yet."""

    hidden_keys: Iterable[str] = ()

    @override
    def before_effect(self, exchange: Exchange, fault: Fault) -> Response | None:
        exchange.hidden_keys = frozenset(self.hidden_keys)
        return None
