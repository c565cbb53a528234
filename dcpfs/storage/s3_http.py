"""HTTP/1.1 exchanges that send from, and receive into, the caller's memory.

Problem: the asynchronous clients copy every body at least once (a request body into chunks, a response body from
chunks into one string), which costs more CPU than the kernel needs to move the bytes, and holds one event loop at
1 GB/s.

Way taken: the standard library's ``http.client``, one blocking connection per thread that asks for one. A body
goes out with ``sendall`` (many small buffers gathered by ``sendmsg``) and comes in with ``readinto``; both release
the GIL for the whole system call. Connections are kept alive and reused, last used first; one that the server has
closed meanwhile is noticed before the request, so reuse needs no retry of its own.

Flow: ``with pool.exchange(request, buffers) as response:`` connects or reuses → sends → yields the response, whose
head is read → on a clean end keeps the connection, else closes it.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urlsplit

from dcpfs.errors import ConfigError
from dcpfs.storage.s3_sockets import BodyResponse, is_readable, read_body, send_buffers

__all__ = ["HttpPool", "HttpRequest", "Proxy", "Scatter"]

_IDLE_SECONDS = 60.0
"""Idle connections older than this are not reused: balancers drop them without a word after minutes."""
_IDLE_CONNECTIONS = 64
"""So many idle connections are kept at most."""
_DISCARD_BYTES = 64 << 10
"""A rest of a response up to this size is read to keep the connection; a longer one costs more than a new one."""


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request without its body.

    Attributes:
        method: GET, PUT, ...
        url: Absolute and encoded.
        headers: All but Content-Length and Host. Never shown: they hold the signature.
    """

    method: str
    url: str = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Proxy:
    """Where requests to an origin go instead.

    Attributes:
        url: ``http://host:port``.
        headers: E.g. Proxy-Authorization.
    """

    url: str = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)


class _Connection(http.client.HTTPConnection):
    """A connection that holds a request's head back, so that it leaves with the body."""

    held: bytes | None = None

    def send(self, data: Any) -> None:
        if self.held is None or self.sock is None:
            super().send(data)
        else:
            self.held += bytes(data)


class _SecureConnection(_Connection, http.client.HTTPSConnection):
    pass


class HttpPool:
    """Kept-alive connections. Thread-safe. As many are open as threads ask at once.

    Args:
        connect_timeout_seconds: For TCP and, with TLS, the handshake.
        read_timeout_seconds: Longest silence on a connection.
        make_ssl_context: Called once, before the first TLS connection.
        find_proxy: Returns the proxy for a URL, or None.
    """

    def __init__(
        self,
        *,
        connect_timeout_seconds: float,
        read_timeout_seconds: float,
        make_ssl_context: Callable[[], ssl.SSLContext],
        find_proxy: Callable[[str], Proxy | None],
    ) -> None:
        self._connect_timeout_seconds = connect_timeout_seconds
        self._read_timeout_seconds = read_timeout_seconds
        self._make_ssl_context = make_ssl_context
        self._find_proxy = find_proxy
        self._ssl_context: ssl.SSLContext | None = None
        self._routes: dict[str, Proxy | None] = {}
        self._idle: dict[str, list[tuple[_Connection, float]]] = {}
        self._lock = threading.Lock()
        self._closed = False

    @contextmanager
    def exchange(self, request: HttpRequest, buffers: Sequence[memoryview] = ()) -> Iterator[http.client.HTTPResponse]:
        """Send one request and yield its response with the head read and the body still to come.

        The connection is kept when the body is read to its end (or nearly) by the time the block ends well.

        Raises:
            OSError, http.client.HTTPException: The exchange failed; the connection is closed.
        """
        parts = urlsplit(request.url)
        origin = f"{parts.scheme}://{parts.netloc}"
        connection = self._take(origin, parts)
        try:
            self._send(connection, request, parts, buffers)
            response = connection.getresponse()
            yield response
            keep = self._finish(response)
        except BaseException:
            connection.close()
            raise
        if keep and connection.sock is not None:
            self._give(origin, connection)
        else:
            connection.close()

    def close(self) -> None:
        """Close what is idle; connections in use close when their exchange ends."""
        with self._lock:
            self._closed = True
            idle = [connection for group in self._idle.values() for connection, _ in group]
            self._idle.clear()
        for connection in idle:
            connection.close()

    def _take(self, origin: str, parts: SplitResult) -> _Connection:
        while True:
            with self._lock:
                group = self._idle.get(origin)
                if not group:
                    break
                connection, since_seconds = group.pop()
            if time.monotonic() - since_seconds < _IDLE_SECONDS and _is_silent(connection):
                return connection
            connection.close()
        return self._connect(origin, parts)

    def _give(self, origin: str, connection: _Connection) -> None:
        now_seconds = time.monotonic()
        excess = [connection]
        with self._lock:
            if not self._closed:
                group = self._idle.setdefault(origin, [])
                group.append((connection, now_seconds))
                # The one unused for longest comes first.
                stale = sum(now_seconds - since_seconds >= _IDLE_SECONDS for _, since_seconds in group)
                stale = max(stale, len(group) - _IDLE_CONNECTIONS)
                excess = [one for one, _ in group[:stale]]
                del group[:stale]
        for one in excess:
            one.close()

    def _route(self, origin: str, url: str) -> Proxy | None:
        with self._lock:
            if origin in self._routes:
                return self._routes[origin]
        proxy = self._find_proxy(url)
        with self._lock:
            self._routes[origin] = proxy
        return proxy

    def _connect(self, origin: str, parts: SplitResult) -> _Connection:
        host = parts.hostname or ""
        secure = parts.scheme == "https"
        port = parts.port or (443 if secure else 80)
        proxy = self._route(origin, parts.geturl())
        via = urlsplit(proxy.url) if proxy else None
        if via is not None and via.scheme != "http":
            raise ConfigError(f"Can't reach {origin} through a proxy that speaks {via.scheme}: give an http:// proxy")
        address = (via.hostname or "", via.port or 80) if via is not None else (host, port)
        timeout_seconds = self._connect_timeout_seconds
        connection: _Connection
        if secure:
            connection = _SecureConnection(*address, timeout=timeout_seconds, context=self._context())
            if proxy is not None:
                connection.set_tunnel(host, port, headers=dict(proxy.headers))
        else:
            connection = _Connection(*address, timeout=timeout_seconds)
        connection.response_class = BodyResponse
        try:
            connection.connect()
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.sock.settimeout(self._read_timeout_seconds)
        except BaseException as error:
            connection.close()
            if type(error) is OSError and error.errno is None:
                # How http.client says that a proxy opened no way: it may be busy, or restart.
                raise ConnectionError(str(error)) from error
            raise
        return connection

    def _context(self) -> ssl.SSLContext:
        with self._lock:
            if self._ssl_context is None:
                self._ssl_context = self._make_ssl_context()
            return self._ssl_context

    def _send(
        self,
        connection: _Connection,
        request: HttpRequest,
        parts: SplitResult,
        buffers: Sequence[memoryview],
    ) -> None:
        origin = f"{parts.scheme}://{parts.netloc}"
        proxy = self._routes.get(origin)
        plain_proxy = proxy is not None and parts.scheme == "http"
        # Taken from the text: urlsplit drops an empty query's "?".
        target = request.url if plain_proxy else request.url[len(origin) :] or "/"
        connection.putrequest(request.method, target, skip_host=True, skip_accept_encoding=True)
        connection.putheader("Host", _host(parts))
        for name, value in request.headers.items():
            connection.putheader(name, value)
        if plain_proxy and proxy is not None:
            for name, value in proxy.headers.items():
                connection.putheader(name, value)
        if request.method in ("PUT", "POST"):
            connection.putheader("Content-Length", str(sum(map(len, buffers))))
        if not buffers:
            connection.endheaders()
            return
        connection.held = b""
        connection.endheaders()
        head, connection.held = connection.held, None
        try:
            send_buffers(connection.sock, [memoryview(head), *buffers])
        except (BrokenPipeError, ConnectionResetError):
            # The server may have answered (e.g. SlowDown) and closed before it read the body.
            if not is_readable(connection.sock):
                raise

    @staticmethod
    def _finish(response: http.client.HTTPResponse) -> bool:
        """Read a short rest, so that the connection can be reused. Returns whether it can.

        Whoever asked has what it wanted, so what becomes of the rest is no failure.
        """
        if not response.isclosed():
            length = response.length
            if length is None or length > _DISCARD_BYTES:
                return False
            try:
                response.read()
            except (OSError, http.client.HTTPException):
                return False
        return not response.will_close


class Scatter:
    """Buffers to be filled in order, by one response or, after a failure, by several. Not thread-safe.

    Attributes:
        total_bytes: Room in all.
        done_bytes: What arrived so far; exact also after `fill` raised.
    """

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = buffers
        self.total_bytes = sum(map(len, buffers))
        self.done_bytes = 0

    def restart(self) -> None:
        """Forget what arrived."""
        self.done_bytes = 0

    def fill(self, response: http.client.HTTPResponse) -> None:
        """Read a response's body until there is no more room, or no more body."""
        skip_bytes = self.done_bytes
        left: list[memoryview] = []
        for buffer in self._buffers:
            if skip_bytes >= len(buffer):
                skip_bytes -= len(buffer)
                continue
            left.append(buffer[skip_bytes:] if skip_bytes else buffer)
            skip_bytes = 0
        read_body(response, left, self._count)

    def _count(self, size_bytes: int) -> None:
        self.done_bytes += size_bytes


def _host(parts: SplitResult) -> str:
    """The host as it is signed: in lower case, without a user, and without the port that its scheme has anyway."""
    host = parts.hostname or ""
    if ":" in host:
        host = f"[{host}]"
    own_port = 443 if parts.scheme == "https" else 80
    return host if parts.port in (None, own_port) else f"{host}:{parts.port}"


def _is_silent(connection: _Connection) -> bool:
    """Nothing to read on an idle connection: the server has neither closed it nor said anything unasked."""
    return not is_readable(connection.sock)
