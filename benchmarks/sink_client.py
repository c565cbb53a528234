"""A raw client of the sink: the floor that contenders are measured against, and the hands of verification.

Problem: any S3 library has a cost of its own, so none can say what the machine allows.

Way taken: one blocking socket, requests written by hand, bodies sent from and received into the caller's
memory. Paths below ``/__free/`` bypass latency, pacing and counting.
"""

from __future__ import annotations

import json
import socket
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass

from .settings import BUCKET

__all__ = ["SinkConnection", "SinkFigures"]


@dataclass(frozen=True, slots=True)
class SinkFigures:
    """What the sink counted since its last reset. Bytes are those of bodies."""

    requests: int
    requests_by_verb: dict[str, int]
    received_bytes: int
    sent_bytes: int
    connections: int
    cpu_seconds: float
    allocated_bytes: int


class SinkConnection:
    """One connection. Used by one thread at a time.

    Args:
        port: The sink's port on 127.0.0.1.
        counted: Requests are subject to latency and pacing, and counted.
    """

    def __init__(self, port: int, *, counted: bool) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._root = f"/{BUCKET}" if counted else f"/__free/{BUCKET}"

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def put(self, key: str, views: Sequence[memoryview]) -> None:
        """Store an object."""
        length_bytes = sum(len(view) for view in views)
        self._send("PUT", self._name(key), f"Content-Length: {length_bytes}\r\n")
        for view in views:
            self._socket.sendall(view)
        self._expect(b"200")

    def get_into(self, key: str, views: Sequence[memoryview], start: int = 0) -> None:
        """Fill the views with the object's bytes from ``start`` on."""
        length_bytes = sum(len(view) for view in views)
        self._send("GET", self._name(key), f"Range: bytes={start}-{start + length_bytes - 1}\r\n")
        _, rest = self._head(b"206")
        for view in views:
            taken = min(len(rest), len(view))
            view[:taken] = rest[:taken]
            rest = rest[taken:]
            self._fill(view[taken:])

    def get(self, key: str) -> bytes:
        """Read a whole object."""
        self._send("GET", self._name(key))
        return self._body(b"200")

    def keys(self, prefix: str) -> list[str]:
        """Names of all objects below a prefix (1,000 at most)."""
        self._send("GET", f"{self._root}?list-type=2&prefix={urllib.parse.quote(prefix, safe='')}")
        listing = self._body(b"200").decode()
        return [piece.split("</Key>")[0] for piece in listing.split("<Key>")[1:]]

    def sizes(self, prefix: str) -> dict[str, int]:
        """All objects below a prefix with their sizes in bytes."""
        found: dict[str, int] = {}
        while True:
            after = f"&start-after={urllib.parse.quote(max(found), safe='')}" if found else ""
            self._send("GET", f"{self._root}?list-type=2&prefix={urllib.parse.quote(prefix, safe='')}{after}")
            rows = self._body(b"200").decode().split("<Contents>")[1:]
            if not rows:
                return found
            for row in rows:
                size = row.partition("<Size>")[2].partition("</Size>")[0]
                found[row.partition("<Key>")[2].partition("</Key>")[0]] = int(size)

    def delete(self, key: str) -> None:
        """Delete an object."""
        self._send("DELETE", self._name(key))
        self._expect(b"204")

    def delete_below(self, prefix: str) -> None:
        """Delete every object below a prefix."""
        while keys := self.keys(prefix):
            for key in keys:
                self.delete(key)

    def reset(self) -> None:
        """Set the sink's counters to zero."""
        self._send("GET", "/__reset")
        self._body(b"200")

    def figures(self) -> SinkFigures:
        """Read the sink's counters."""
        self._send("GET", "/__stats")
        stats = json.loads(self._body(b"200"))
        verbs = stats["verbs"]
        return SinkFigures(
            requests=sum(verb["requests"] for verb in verbs.values()),
            requests_by_verb={name: verb["requests"] for name, verb in verbs.items()},
            received_bytes=sum(verb["bytes_in"] for verb in verbs.values()),
            sent_bytes=sum(verb["bytes_out"] for verb in verbs.values()),
            connections=stats["connections"],
            cpu_seconds=stats["cpu_seconds"],
            allocated_bytes=stats["allocated_bytes"],
        )

    def _name(self, key: str) -> str:
        return f"{self._root}/{urllib.parse.quote(key)}"

    def _send(self, method: str, target: str, headers: str = "") -> None:
        self._socket.sendall(f"{method} {target} HTTP/1.1\r\nHost: sink\r\n{headers}\r\n".encode())

    def _head(self, status: bytes) -> tuple[int, bytes]:
        data = b""
        while b"\r\n\r\n" not in data:
            received = self._socket.recv(4096)
            if not received:
                raise ConnectionError("the sink closed the connection")
            data += received
        head, _, rest = data.partition(b"\r\n\r\n")
        if head.split(b" ", 2)[1] != status:
            raise ConnectionError(f"the sink answered {head.splitlines()[0].decode()}")
        length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
        return int(length.split(b":")[1]), rest

    def _body(self, status: bytes) -> bytes:
        length_bytes, rest = self._head(status)
        body = bytearray(length_bytes)
        body[: len(rest)] = rest
        self._fill(memoryview(body)[len(rest) :])
        return bytes(body)

    def _expect(self, status: bytes) -> None:
        self._body(status)

    def _fill(self, view: memoryview) -> None:
        while view:
            received = self._socket.recv_into(view, len(view), socket.MSG_WAITALL)
            if not received:
                raise ConnectionError("the sink closed the connection")
            view = view[received:]
