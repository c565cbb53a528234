"""The sink's side of one HTTP connection: heads parsed, bodies received straight into their place.

Problem: `http.server` reads and writes through buffered files, which copies every byte once more and costs
more CPU than the clients that are to be measured.

Way taken: a blocking socket and one small reused buffer for heads. Body bytes that came along with a head are
copied out of it; all others are received into the object's own memory. Bodies may be plain, HTTP-chunked,
``aws-chunked`` with trailers, or the latter within the former.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass

from .object_memory import UploadBuffer

__all__ = ["ConnectionClosedError", "Pacer", "RequestHead", "Wire"]

_HEAD_BYTES = 16 << 10
_PACED_PIECE_BYTES = 128 << 10
_PIECE_BYTES = 1 << 20


class ConnectionClosedError(Exception):
    """The client has gone."""


@dataclass(frozen=True, slots=True)
class RequestHead:
    """Request line and headers (names in lower case)."""

    method: str
    target: str
    headers: dict[str, str]


class Pacer:
    """Holds one connection to a rate, in bytes per second; None: as fast as it goes."""

    def __init__(self, bytes_per_second: float | None) -> None:
        self._rate = bytes_per_second
        self._free_at_seconds = 0.0
        self.enabled = True
        self.piece_bytes = _PIECE_BYTES if bytes_per_second is None else _PACED_PIECE_BYTES

    def begin(self) -> None:
        """A transfer starts: earlier idle time is no credit."""
        self._free_at_seconds = time.monotonic()

    def pass_bytes(self, size_bytes: int) -> None:
        """Wait until the rate allows these bytes to have passed."""
        if self._rate is None or not self.enabled:
            return
        self._free_at_seconds += size_bytes / self._rate
        ahead_seconds = self._free_at_seconds - time.monotonic()
        if ahead_seconds > 0.001:
            time.sleep(ahead_seconds)


class Wire:
    """One connection. Used by one thread."""

    def __init__(self, connection: socket.socket, pacer: Pacer) -> None:
        self._socket = connection
        self._pacer = pacer
        self._buffer = memoryview(bytearray(_HEAD_BYTES))
        self._start = 0
        self._end = 0

    def read_head(self) -> RequestHead | None:
        """Read the next request's head; None when the client closed between requests."""
        lines: list[bytes] = []
        try:
            while True:
                line = self._read_line()
                if line:
                    lines.append(line)
                elif lines:
                    break
        except ConnectionClosedError:
            if lines:
                raise
            return None
        method, target, _ = lines[0].decode("latin-1").split(" ", 2)
        headers: dict[str, str] = {}
        for line in lines[1:]:
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.strip().lower()] = value.strip()
        return RequestHead(method, target, headers)

    def receive_body(self, head: RequestHead, upload: UploadBuffer) -> None:
        """Receive the request's whole body into ``upload``, with its framing taken off."""
        self._pacer.begin()
        http_chunked = head.headers.get("transfer-encoding", "").lower() == "chunked"
        aws_chunked = "aws-chunked" in head.headers.get("content-encoding", "") or head.headers.get(
            "x-amz-content-sha256", ""
        ).startswith("STREAMING-")
        if http_chunked and aws_chunked:
            inner = UploadBuffer(upload.pool, None)
            self._receive_chunks(inner)
            _unframe(b"".join(inner.segments), upload)
            inner.discard()
        elif http_chunked or aws_chunked:
            self._receive_chunks(upload)
        else:
            self._receive(int(head.headers.get("content-length", "0")), upload)

    def send(self, head: bytes, body: Iterator[memoryview] | None = None) -> None:
        """Send a response."""
        if body is None:
            self._socket.sendall(head)
            return
        self._pacer.begin()
        self._socket.sendall(head, socket.MSG_MORE)
        for view in body:
            for at in range(0, len(view), self._pacer.piece_bytes):
                piece = view[at : at + self._pacer.piece_bytes]
                self._socket.sendall(piece)
                self._pacer.pass_bytes(len(piece))

    def _receive_chunks(self, upload: UploadBuffer) -> None:
        # HTTP chunks and aws-chunks look alike: size in hex, perhaps ";signature", data, CRLF; after the last
        # come trailers up to an empty line.
        while size_bytes := int(self._read_line().split(b";", 1)[0], 16):
            self._receive(size_bytes, upload)
            self._read_line()
        while self._read_line():
            pass

    def _receive(self, size_bytes: int, upload: UploadBuffer) -> None:
        for view in upload.space(size_bytes):
            self._fill(view)

    def _fill(self, view: memoryview) -> None:
        buffered = min(self._end - self._start, len(view))
        if buffered:
            view[:buffered] = self._buffer[self._start : self._start + buffered]
            self._start += buffered
            self._pacer.pass_bytes(buffered)
        while buffered < len(view):
            piece = view[buffered : buffered + self._pacer.piece_bytes]
            received = self._socket.recv_into(piece, len(piece), socket.MSG_WAITALL)
            if not received:
                raise ConnectionClosedError
            buffered += received
            self._pacer.pass_bytes(received)

    def _read_line(self) -> bytes:
        parts: list[bytes] = []
        while True:
            window = bytes(self._buffer[self._start : self._end])
            at = window.find(b"\n")
            if at >= 0:
                self._start += at + 1
                return (b"".join(parts) + window[:at]).rstrip(b"\r")
            parts.append(window)
            self._start = 0
            self._end = self._socket.recv_into(self._buffer)
            if not self._end:
                raise ConnectionClosedError


def _unframe(data: bytes, upload: UploadBuffer) -> None:
    at = 0
    while True:
        line_end = data.index(b"\r\n", at)
        size_bytes = int(data[at:line_end].split(b";", 1)[0], 16)
        at = line_end + 2
        if not size_bytes:
            return
        for view in upload.space(size_bytes):
            view[:] = data[at : at + len(view)]
            at += len(view)
        at += 2
