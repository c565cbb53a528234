"""One S3 request on its way through the scripted server: what a test asks about, and what a fault acts on.

The *record* (`S3Request`) is what stays: a test reads it after, or while, the request is served. The *exchange*
(`Exchange`) is the live side with the connection, which ends with the answer.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from dcpfs.testing.http_exchange import Connection, Head
from dcpfs.testing.s3_objects import S3Objects

__all__ = ["DroppedError", "Exchange", "S3Request", "Stage", "operation_of"]


class DroppedError(Exception):
    """The connection was broken off on purpose; nothing more is sent on it."""


class Stage(enum.Enum):
    """How far a request has come."""

    HEAD = "head"
    """Its head has been read, nothing of its body."""
    REQUEST_BODY = "request_body"
    """Some bytes of its body have been read."""
    RESPONSE_HEAD = "response_head"
    """All of it has been read; the answer has not begun."""
    RESPONSE_BODY = "response_body"
    """The answer's head and some bytes of its body have been sent."""


@dataclass
class S3Request:
    """What arrived, and how it ended.

    Attributes:
        order: 0, 1, 2 … over all connections, by the arrival of the head.
        connection: Number of the connection.
        operation: S3's name, e.g. ``UploadPart``; ``Unknown`` when there is none.
        bucket: Bucket, or "".
        key: Decoded key, or "".
        head: Request line and headers. Its repr leaves the headers out: they hold a signature.
        body_bytes: Length of the body on the wire, as far as it was read.
        status: What was answered; None while it isn't, or when the connection was broken off.
        access_key: Whose request it claims to be.
    """

    order: int
    connection: int
    operation: str
    bucket: str
    key: str
    head: Head = field(repr=False)
    body_bytes: int = 0
    status: int | None = None
    access_key: str | None = None

    @property
    def method(self) -> str:
        """HTTP method."""
        return self.head.method

    @property
    def host(self) -> str:
        """The Host header: whom the client thinks it talks to."""
        return self.head.headers.get("host", "")

    @property
    def query(self) -> dict[str, str]:
        """Decoded parameters."""
        return dict(self.head.query)

    @property
    def part_number(self) -> int | None:
        """Of an UploadPart."""
        number = self.query.get("partNumber")
        return int(number) if number else None

    def header(self, name: str) -> str | None:
        """A header's value, by name in any case."""
        return self.head.headers.get(name.lower())


@dataclass
class Exchange:
    """A request that is being served.

    Attributes:
        request: Its record.
        head: What the service is to see; a fault may change it.
        connection: The client's connection.
        objects: The server's state.
        wait: Blocks until an event is set, or raises `DroppedError` when the server stops first.
        body: The body, framing removed, once read.
        hidden_keys: Names that a listing is to leave out.
    """

    request: S3Request
    head: Head
    connection: Connection
    objects: S3Objects
    wait: Callable[[threading.Event], None]
    body: bytes | bytearray | memoryview = b""
    hidden_keys: frozenset[str] = frozenset()


_BUCKET_OPERATIONS = {
    ("GET", "uploads"): "ListMultipartUploads",
    ("GET", "location"): "GetBucketLocation",
    ("POST", "delete"): "DeleteObjects",
}
_OBJECT_OPERATIONS = {
    ("POST", "uploads"): "CreateMultipartUpload",
    ("POST", "uploadId"): "CompleteMultipartUpload",
    ("DELETE", "uploadId"): "AbortMultipartUpload",
    ("GET", "uploadId"): "ListParts",
}
_KNOWN_PARAMETERS = frozenset(
    {
        *("continuation-token", "delimiter", "encoding-type", "fetch-owner", "list-type", "prefix", "start-after"),
        *("max-keys", "max-parts", "max-uploads", "key-marker", "upload-id-marker", "part-number-marker"),
        *("delete", "location", "partNumber", "uploadId", "uploads", "x-id"),
    }
)


def operation_of(head: Head, bucket: str, key: str) -> str:
    """S3's name for a request, or ``Unknown``."""
    names = {name for name, _ in head.query}
    if names - _KNOWN_PARAMETERS:
        return "Unknown"
    if not bucket:
        return "ListBuckets" if head.method == "GET" else "Unknown"
    for (method, name), operation in (_OBJECT_OPERATIONS if key else _BUCKET_OPERATIONS).items():
        if head.method == method and name in names:
            return operation
    copies = "x-amz-copy-source" in head.headers
    if key:
        if head.method == "PUT" and {"uploadId", "partNumber"} <= names:
            return "UploadPartCopy" if copies else "UploadPart"
        plain = {
            "GET": "GetObject",
            "HEAD": "HeadObject",
            "PUT": "CopyObject" if copies else "PutObject",
            "DELETE": "DeleteObject",
        }
    else:
        listing = "ListObjectsV2" if ("list-type", "2") in head.query else "ListObjects"
        plain = {"GET": listing, "HEAD": "HeadBucket", "PUT": "CreateBucket", "DELETE": "DeleteBucket"}
    return plain.get(head.method, "Unknown")
