"""Stands in front of an HTTP server on loopback, makes it seem far away, and counts what passes.

Problem: on loopback every client is near its server. What a round trip or a slow connection costs a client shows
only in the field, and a server that is not ours says neither how often it was asked nor for how many bytes.

Way taken: a process of its own that passes bytes on without changing one, so that signatures stay valid. Of requests
it reads just as much as tells where one ends and the next begins. Before the first byte of each answer it waits, and it
holds each connection to a rate, both ways. Only plain HTTP/1.1 without pipelining, which is what clients of stores
speak there.

Control is the sink's: ``GET /__stats`` and ``GET /__reset`` on the same port are answered here and not passed on. Bytes
sent count the heads of answers as well, a few hundred each.

Flow: `main` prints one JSON line with the port and serves until its stdin closes. For each connection two threads:
requests up, answers down.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import sys
import threading
import time

from .traffic import Traffic
from .wire import ConnectionClosedError, Pacer

__all__ = ["Proxy", "main"]

_BUFFER_BYTES = 1 << 20
_HEAD_BYTES = 64 << 10


class Proxy:
    """The proxy. `serve` runs in the calling thread; everything else is thread-safe.

    Args:
        host: Of the server.
        port: Of the server.
        latency_seconds: Before the first byte of each answer.
        bytes_per_second: Of one connection each way; None: as fast as it goes.
    """

    def __init__(self, host: str, port: int, latency_seconds: float, bytes_per_second: float | None) -> None:
        self._server = (host, port)
        self._latency_seconds = latency_seconds
        self._bytes_per_second = bytes_per_second
        self._traffic = Traffic()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port: int = self._listener.getsockname()[1]

    def serve(self) -> None:
        """Accept connections until the process ends."""
        while True:
            client, _ = self._listener.accept()
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._traffic.connect()
            threading.Thread(target=self._pass, args=(client,), daemon=True).start()

    def stats(self) -> dict[str, object]:
        """As the sink tells them. The CPU seconds are the proxy's."""
        return {**self._traffic.figures(), "allocated_bytes": 0}

    def reset(self) -> None:
        """Set the counters to zero."""
        self._traffic.reset()

    def _pass(self, client: socket.socket) -> None:
        # Whoever resets a connection, it is over for both ends; the next one is served all the same.
        with client, contextlib.suppress(ConnectionClosedError, ConnectionError, OSError):
            _Connection(self, client).run()

    def _open(self) -> socket.socket:
        server = socket.create_connection(self._server)
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return server

    def _pacer(self) -> Pacer:
        return Pacer(self._bytes_per_second)


class _Connection:
    """One client and, from its first request on, its connection to the server."""

    def __init__(self, proxy: Proxy, client: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._server: socket.socket | None = None
        self._buffer = bytearray()
        self._verb = ""
        self._asked = 0
        """Requests whose head has been passed on; the thread that passes answers reads it."""
        self._pacer = proxy._pacer()

    def run(self) -> None:
        try:
            while (head := self._read_head()) is not None:
                verb, target, headers = _parse(head)
                if target in ("/__stats", "/__reset"):
                    self._control(target)
                    continue
                server = self._connect()
                self._verb = verb
                self._proxy._traffic.count(verb, requests=1)
                self._asked += 1
                self._pacer.begin()
                server.sendall(head)
                if headers.get("transfer-encoding", "").lower() == "chunked":
                    self._pass_chunks(server)
                else:
                    self._pass_bytes(server, int(headers.get("content-length", "0")))
        finally:
            if self._server is not None:
                with contextlib.suppress(OSError):
                    self._server.shutdown(socket.SHUT_WR)

    def _connect(self) -> socket.socket:
        if self._server is None:
            self._server = self._proxy._open()
            threading.Thread(target=self._answers, args=(self._server,), daemon=True).start()
        return self._server

    def _answers(self, server: socket.socket) -> None:
        answered, pacer, buffer = 0, self._proxy._pacer(), memoryview(bytearray(_BUFFER_BYTES))
        with server, contextlib.suppress(ConnectionError, OSError):
            while received := server.recv_into(buffer[: pacer.piece_bytes]):
                # Without pipelining an answer begins with the first bytes after a request.
                if answered < self._asked:
                    answered = self._asked
                    time.sleep(self._proxy._latency_seconds)
                    pacer.begin()
                self._proxy._traffic.count(self._verb, sent_bytes=received)
                self._client.sendall(buffer[:received])
                pacer.pass_bytes(received)
        with contextlib.suppress(OSError):
            self._client.shutdown(socket.SHUT_RDWR)

    def _control(self, target: str) -> None:
        if target == "/__reset":
            self._proxy.reset()
        body = json.dumps(self._proxy.stats()).encode()
        self._client.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)

    # --- reading requests

    def _read_head(self) -> bytes | None:
        """Request line and headers with the empty line; None when the client closed between requests."""
        while (at := self._buffer.find(b"\r\n\r\n")) < 0:
            if len(self._buffer) > _HEAD_BYTES:
                raise ConnectionClosedError
            if not self._receive():
                if self._buffer:
                    raise ConnectionClosedError
                return None
        return self._take(at + 4)

    def _pass_bytes(self, server: socket.socket, size_bytes: int) -> None:
        buffered = self._take(min(size_bytes, len(self._buffer)))
        if buffered:
            self._send(server, buffered)
        left, view = size_bytes - len(buffered), memoryview(bytearray(min(size_bytes, _BUFFER_BYTES) or 1))
        while left:
            received = self._client.recv_into(view[: min(left, self._pacer.piece_bytes)])
            if not received:
                raise ConnectionClosedError
            self._send(server, view[:received])
            left -= received

    def _pass_chunks(self, server: socket.socket) -> None:
        while True:
            line = self._read_line()
            server.sendall(line)
            size_bytes = int(line.split(b";", 1)[0], 16)
            if not size_bytes:
                break
            self._pass_bytes(server, size_bytes)
            server.sendall(self._read_line())
        while (line := self._read_line()) != b"\r\n":  # trailers
            server.sendall(line)
        server.sendall(line)

    def _send(self, server: socket.socket, data: bytes | memoryview) -> None:
        server.sendall(data)
        self._proxy._traffic.count(self._verb, received_bytes=len(data))
        self._pacer.pass_bytes(len(data))

    def _read_line(self) -> bytes:
        while (at := self._buffer.find(b"\n")) < 0:
            if not self._receive():
                raise ConnectionClosedError
        return self._take(at + 1)

    def _receive(self) -> int:
        data = self._client.recv(_HEAD_BYTES)
        self._buffer += data
        return len(data)

    def _take(self, size_bytes: int) -> bytes:
        taken = bytes(self._buffer[:size_bytes])
        del self._buffer[:size_bytes]
        return taken


def _parse(head: bytes) -> tuple[str, str, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    verb, target, _ = first.split(" ", 2)
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return verb, target, headers


def main() -> None:
    """Start, say on which port, and serve until stdin closes."""
    parser = argparse.ArgumentParser(description="A far-away server, on loopback.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True, help="of the server that it stands in front of")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="before the first byte of each answer")
    parser.add_argument("--mbps-per-connection", type=float, default=0.0, help="MB/s each way; 0: unlimited")
    arguments = parser.parse_args()
    rate = arguments.mbps_per_connection * 1e6 or None
    proxy = Proxy(arguments.host, arguments.port, arguments.latency_ms / 1000, rate)
    threading.Thread(target=proxy.serve, daemon=True).start()
    print(json.dumps({"port": proxy.port}), flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        sys.stdin.read()


if __name__ == "__main__":
    main()
