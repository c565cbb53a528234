"""One HTTP/1.1 connection seen from the server, down to the byte at which it breaks.

Problem: the servers of the standard library answer correctly or not at all. A fault test needs half a header, a
body that stops after a given byte, a reset instead of a close, a wrong length told with a straight face.

Way taken: a thin layer on a blocking socket that reads a request's head and body and sends a response in separable
steps. Bodies are received into one buffer and sent from the stored ones, so hundreds of megabytes pass quickly.

Flow: ``read_head()`` → ``read_body(head)`` → ``send(response)``, or ``send_head``, ``send_body``, ``reset()``.
"""

from __future__ import annotations

import contextlib
import http
import io
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import unquote, unquote_plus

__all__ = ["Connection", "Head", "Response"]

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Head:
    """A request line and its headers.

    Attributes:
        method: Upper case.
        raw_path: As received: percent-encoded, without the query.
        raw_query: As received.
        headers: By lower-case name; repeated ones joined by a comma.
    """

    method: str
    raw_path: str
    raw_query: str
    headers: Mapping[str, str]

    @property
    def path(self) -> str:
        """Decoded path."""
        return unquote(self.raw_path)

    @property
    def query(self) -> tuple[tuple[str, str], ...]:
        """Decoded parameters in the order received; a parameter without ``=`` has an empty value."""
        pairs = (pair.partition("=") for pair in self.raw_query.split("&") if pair)
        return tuple((unquote_plus(name), unquote_plus(value)) for name, _, value in pairs)


@dataclass(frozen=True)
class Response:
    """What is to be sent.

    Attributes:
        status: HTTP status.
        headers: Content-Length is set by the sender unless it stands here.
        body: Buffers, sent one after the other without being joined.
        send_body: False for the answer to HEAD: the length is told, the bytes stay here.
    """

    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Sequence[bytes | bytearray | memoryview] = ()
    send_body: bool = True

    @property
    def body_bytes(self) -> int:
        """Length of the body."""
        return sum(len(buffer) for buffer in self.body)

    def body_range(self, start: int, stop: int) -> list[memoryview]:
        """Views of the bytes in ``[start, stop)`` of the body."""
        views: list[memoryview] = []
        at = 0
        for buffer in self.body:
            view = memoryview(buffer)[max(0, start - at) : max(0, stop - at)]
            if len(view):
                views.append(view)
            at += len(buffer)
        return views


class Connection:
    """The server's end of one connection. Used by one thread, except for `close`.

    Attributes:
        number: 0, 1, 2 … in the order of acceptance.
    """

    def __init__(self, accepted: socket.socket, number: int) -> None:
        self.number = number
        self._socket = accepted
        self._reader = io.BufferedReader(socket.SocketIO(accepted, "rb"), buffer_size=1 << 16)

    def read_head(self) -> Head | None:
        """The next request's head, or None when the client has closed.

        Raises:
            ValueError: Not HTTP/1.1.
        """
        line = self._reader.readline(65537)
        if not line.strip():
            return None
        method, target, version = line.decode("latin-1").split()
        if not version.startswith("HTTP/1."):
            raise ValueError(f"unknown version {version!r}")
        headers: dict[str, str] = {}
        while (text := self._reader.readline(65537).decode("latin-1").rstrip("\r\n")) != "":
            name, _, value = text.partition(":")
            name, value = name.strip().lower(), value.strip()
            headers[name] = f"{headers[name]},{value}" if name in headers else value
        path, _, query = target.partition("?")
        return Head(method.upper(), path, query, headers)

    def read_body(self, head: Head, limit_bytes: int | None = None) -> bytearray:
        """The request's body as it came over the wire, without HTTP's own chunking.

        Args:
            head: Its head.
            limit_bytes: Stop after that many, to leave the rest unread.

        Raises:
            ConnectionError: The client closed before the end.
        """
        if head.headers.get("expect", "").lower() == "100-continue":
            self._socket.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        if head.headers.get("transfer-encoding", "").lower() == "chunked":
            return self._read_chunked(limit_bytes)
        size = int(head.headers.get("content-length", "0"))
        return self._read_exactly(size if limit_bytes is None else min(size, limit_bytes))

    def _read_exactly(self, size: int) -> bytearray:
        body = bytearray(size)
        view = memoryview(body)
        while view:
            count = self._reader.readinto(view[:_CHUNK_BYTES])
            if not count:
                raise ConnectionAbortedError("the client closed in the middle of a body")
            view = view[count:]
        return body

    def _read_chunked(self, limit_bytes: int | None) -> bytearray:
        body = bytearray()
        while limit_bytes is None or len(body) < limit_bytes:
            size = int(self._reader.readline(1024).split(b";")[0], 16)
            if size == 0:
                while self._reader.readline(65537).strip():  # trailer fields
                    pass
                break
            body += self._read_exactly(size)
            self._reader.readline(16)
        return body

    def send(self, response: Response) -> None:
        """Send all of it."""
        self.send_head(response)
        if response.send_body:
            self.send_body(response, 0, response.body_bytes)

    def head_bytes(self, response: Response, *, length: int | None = None) -> bytes:
        """The status line and headers on the wire.

        Args:
            response: What they describe.
            length: Content-Length to tell, when it is not to be the true one.
        """
        headers = {"Content-Length": str(response.body_bytes if length is None else length), **response.headers}
        if length is not None:
            headers["Content-Length"] = str(length)
        if response.status in (204, 304):
            headers.pop("Content-Length")
        reason = http.HTTPStatus(response.status).phrase
        lines = [f"HTTP/1.1 {response.status} {reason}", *(f"{name}: {value}" for name, value in headers.items())]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    def send_head(self, response: Response, *, length: int | None = None) -> None:
        """Send status line and headers; see `head_bytes`."""
        self._socket.sendall(self.head_bytes(response, length=length))

    def send_body(self, response: Response, start: int, stop: int) -> None:
        """Send a range of the body."""
        for view in response.body_range(start, stop):
            self._socket.sendall(view)

    def send_raw(self, data: bytes) -> None:
        """Send bytes as they are."""
        self._socket.sendall(data)

    def reset(self) -> None:
        """Break off with a TCP reset: what was sent and not yet read may be lost to the client."""
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def close(self) -> None:
        """Close; wakes a thread that reads or sends. Idempotent."""
        with contextlib.suppress(OSError, ValueError):
            self._reader.close()
        self._socket.close()

    def interrupt(self) -> None:
        """Wake the thread that reads or sends here, from another one."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
