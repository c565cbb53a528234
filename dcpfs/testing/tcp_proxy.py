"""A network between a client and a server that breaks where a test says, and heals when it says.

Problem: a server that is stopped refuses connections, which is the kindest of all failures. A cut cable says nothing:
no reset, no end, and what is on its way may still arrive when the cable is back. Namespaces and packet filters can do
that to a real network, for who is root; they can't cut in the middle of the third part's body.

Way taken: a relay on loopback in front of the server. It can reset, refuse, fall silent, or not even shake hands, at
once (`TcpProxy.cut`) or at a chosen request and byte (`TcpProxy.cut_at`). A silent network keeps what it was given and
delivers it when it is mended, as TCP does. Nothing here waits for a clock. The server behind it can be another one
after a restart (`TcpProxy.retarget`), under the same address.

Flow: ``with TcpProxy(server.port) as proxy:`` → give the client ``proxy.port`` → ``point = proxy.cut_at(Cut.SILENT,
pattern=rb"partNumber=2", after_bytes=1 << 20)`` → ``point.reached.wait()`` → ``proxy.mend()``.
"""

from __future__ import annotations

import contextlib
import enum
import re
import select
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Cut", "CutPoint", "Direction", "TcpProxy"]

_CHUNK_BYTES = 1 << 16
_CARRY_BYTES = 4096
"""What is searched for may be split over two reads."""
_BACKLOG = 256
_FILLERS = 4
_FILL_SECONDS = 60.0
_TRIES = 16


class Cut(enum.Enum):
    """How the network is broken."""

    RESET = "reset"
    """Connections are reset, new ones as soon as they are made."""
    REFUSED = "refused"
    """Connections are reset, and nobody listens: new ones are refused."""
    SILENT = "silent"
    """Nothing arrives any more, in either direction, and nobody says so. New connections are made, and silent."""
    UNREACHABLE = "unreachable"
    """Silent, and new connections are not even answered. Linux only."""


class Direction(enum.Enum):
    """Which way bytes go."""

    TO_SERVER = "to_server"
    TO_CLIENT = "to_client"


@dataclass
class CutPoint:
    """Where the network breaks, once.

    Attributes:
        cut: How.
        pattern: Looked for in what the client sends; None: counting begins with the first byte.
        occurrence: Which match counts, from 1.
        direction: Whose bytes are counted from there on: those of the connection that matched, or without a pattern
            those of all.
        after_bytes: How many of them pass before.
        mends_after: So many new connections fail (are reset, or made and silent) before the network is whole again;
            None: until `TcpProxy.mend`.
        reached: Set when it has broken.
    """

    cut: Cut
    pattern: re.Pattern[bytes] | None
    occurrence: int
    direction: Direction
    after_bytes: int
    mends_after: int | None
    reached: threading.Event = field(default_factory=threading.Event)
    _left: int | None = None
    _link: int | None = None
    _seen: int = 0

    def take(self, link: int, direction: Direction, carry: bytes, chunk: bytes) -> int | None:
        """How much of a chunk still passes before the cut; None when it is not here."""
        if self.reached.is_set():
            return None
        start = 0
        if self._left is None:
            if self.pattern is None:
                self._left = self.after_bytes
            elif direction is Direction.TO_SERVER:
                text = carry + chunk
                for match in self.pattern.finditer(text):
                    if match.end() <= len(carry):
                        continue  # seen before
                    self._seen += 1
                    if self._seen == self.occurrence:
                        self._left, self._link = self.after_bytes, link
                        start = match.end() - len(carry)
                        break
        if self._left is None or direction is not self.direction or self._link not in (None, link):
            return None
        if len(chunk) - start < self._left:
            self._left -= len(chunk) - start
            return None
        return start + self._left


class TcpProxy:
    """Relays connections from an ephemeral port to a server, both on 127.0.0.1. A context manager; thread-safe.

    Args:
        target_port: Where the server listens.

    Attributes:
        connections: How many were made so far, those that were reset at once included.
    """

    def __init__(self, target_port: int) -> None:
        self.connections = 0
        self._target_port = target_port
        self._lock = threading.RLock()
        self._whole = threading.Event()
        self._whole.set()
        self._stopping = threading.Event()
        self._cut: Cut | None = None
        self._failures_left: int | None = None
        self._points: list[CutPoint] = []
        self._links: dict[int, _Link] = {}
        self._fillers: list[socket.socket] = []
        self._filler_ports: set[int] = set()
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition(self._lock)
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None
        self._wake, self._woken = socket.socketpair()

    def __enter__(self) -> Self:
        self._listener = _listen_on_a_port_of_its_own()
        self._listener.setblocking(False)
        self._acceptor = self._start(self._accept)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._whole.set()
        self._poke()
        if self._acceptor is not None:
            self._acceptor.join(10)  # then there are no more of the rest
        with self._lock:
            links, threads = list(self._links.values()), list(self._threads)
        for link in links:
            link.close()
        for thread in threads:
            thread.join(10)
        for one in (self._listener, self._wake, self._woken, *self._fillers):
            if one is not None:
                one.close()

    @property
    def port(self) -> int:
        """Where clients connect to."""
        if self._listener is None:
            raise RuntimeError("TcpProxy is not running: use it as a context manager")
        return int(self._listener.getsockname()[1])

    def retarget(self, target_port: int) -> None:
        """Relay new connections to another port."""
        with self._lock:
            self._target_port = target_port

    def cut(self, cut: Cut, *, mends_after: int | None = None) -> None:
        """Break now. See `CutPoint` for ``mends_after``."""
        with self._lock:
            self._break(cut, mends_after)

    def cut_at(
        self,
        cut: Cut,
        *,
        pattern: bytes | None = None,
        occurrence: int = 1,
        direction: Direction = Direction.TO_SERVER,
        after_bytes: int = 0,
        mends_after: int | None = None,
    ) -> CutPoint:
        """Break at a point to come.

        Args:
            cut: How.
            pattern: Regular expression, looked for in what clients send, e.g. ``rb"PUT /.*partNumber=2"``.
            occurrence: Which match counts, from 1.
            direction: Whose bytes are counted.
            after_bytes: How many of them pass before.
            mends_after: So many new connections fail before the network is whole again.
        """
        compiled = re.compile(pattern) if pattern is not None else None
        point = CutPoint(cut, compiled, occurrence, direction, after_bytes, mends_after)
        with self._lock:
            self._points.append(point)
        return point

    def mend(self) -> None:
        """Be whole again; what was held back is delivered."""
        with self._lock:
            self._mend()

    def await_connections(self, count: int, *, deadline_seconds: float = 60.0) -> bool:
        """Wait until so many connections have been made in all; False when the deadline passed first."""
        with self._changed:
            return self._changed.wait_for(lambda: self.connections >= count, deadline_seconds)

    # -- state; the lock is held

    def _break(self, cut: Cut, mends_after: int | None) -> None:
        if self._listener is None:
            raise RuntimeError("TcpProxy is not running: use it as a context manager")
        if mends_after is not None and cut not in (Cut.RESET, Cut.SILENT):
            raise ValueError(f"connections to a {cut.value} network can't be counted: call mend()")
        self._mend()
        self._cut, self._failures_left = cut, mends_after
        if cut in (Cut.SILENT, Cut.UNREACHABLE):
            self._whole.clear()
        else:
            for link in list(self._links.values()):
                link.reset()
        if cut is Cut.REFUSED:
            self._listener.shutdown(socket.SHUT_RDWR)  # keeps the port, which nobody else may take meanwhile
        if cut is Cut.UNREACHABLE:
            self._listener.listen(0)
            for _ in range(_FILLERS):
                filler = socket.socket()
                filler.setblocking(False)
                filler.connect_ex(self._listener.getsockname())
                self._fillers.append(filler)
                self._filler_ports.add(filler.getsockname()[1])
            _await_readable(self._listener)  # one waits to be accepted: there is no room for another
        self._poke()

    def _mend(self) -> None:
        cut, self._cut, self._failures_left = self._cut, None, None
        if cut in (Cut.REFUSED, Cut.UNREACHABLE) and self._listener is not None:
            self._listener.listen(_BACKLOG)
        fillers, self._fillers = self._fillers, []
        for filler in fillers:
            filler.close()
        self._whole.set()
        self._poke()

    def _poke(self) -> None:
        with contextlib.suppress(OSError):
            self._wake.send(b"!")

    # -- relaying

    def _start(self, work: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=work, name="tcp-proxy", daemon=True)
        with self._lock:
            self._threads = [one for one in self._threads if one.is_alive()] + [thread]
            thread.start()
        return thread

    def _accept(self) -> None:
        while not self._stopping.is_set():
            with self._lock:
                listens = self._cut not in (Cut.REFUSED, Cut.UNREACHABLE)
            poll = select.poll()
            poll.register(self._woken, select.POLLIN)
            if listens and self._listener:
                poll.register(self._listener, select.POLLIN)
            if self._woken.fileno() in dict(poll.poll()):
                self._woken.recv(4096)
                continue
            self._welcome()

    def _welcome(self) -> None:
        with self._changed:
            if self._listener is None or self._cut in (Cut.REFUSED, Cut.UNREACHABLE):
                return
            try:
                accepted, address = self._listener.accept()
            except OSError:
                return  # went away, or the network broke, in between
            if address[1] in self._filler_ports:
                self._filler_ports.discard(address[1])
                accepted.close()
                return
            number = self.connections
            self.connections += 1
            self._changed.notify_all()
            if self._failures_left == 0:
                self._mend()
            if self._failures_left is not None:
                self._failures_left -= 1
            if self._cut is Cut.RESET:
                _reset(accepted)
                return
            link = self._links[number] = _Link(self, number, accepted)
        self._start(link.serve)

    def connect(self) -> socket.socket:
        """A connection to the server, once the network is whole."""
        self._whole.wait()
        with self._lock:
            port = self._target_port
        return socket.create_connection(("127.0.0.1", port), timeout=10)

    def holds(self, number: int) -> bool:
        """Whether a connection is still wanted: neither was it reset, nor does the proxy end."""
        with self._lock:
            return number in self._links and not self._stopping.is_set()

    def forget(self, number: int) -> None:
        """A connection was reset."""
        with self._lock:
            self._links.pop(number, None)

    def end(self, number: int) -> None:
        """One direction of a connection has ended."""
        with self._lock:
            link = self._links.get(number)
            if link is None:
                return
            link.directions -= 1
            if link.directions == 0:
                del self._links[number]
                link.close()

    def pump(self, number: int, direction: Direction, source: socket.socket, sink: socket.socket) -> None:
        """Relay one direction of a connection until it ends or breaks."""
        carry = b""
        with contextlib.suppress(OSError):
            while chunk := source.recv(_CHUNK_BYTES):
                self._whole.wait()
                with self._lock:
                    point, passes = self._hit(number, direction, carry, chunk)
                if point is not None:
                    sink.sendall(chunk[:passes])
                    with self._lock:
                        self._break(point.cut, point.mends_after)
                        point.reached.set()
                    self._whole.wait()
                    chunk = chunk[passes:]  # what was held back
                sink.sendall(chunk)
                carry = (carry + chunk)[-_CARRY_BYTES:] if self._points else b""
            self._whole.wait()
            with self._lock:
                if number in self._links:  # else it was reset, and must not end in good order
                    sink.shutdown(socket.SHUT_WR)
        self.end(number)

    def _hit(self, number: int, direction: Direction, carry: bytes, chunk: bytes) -> tuple[CutPoint | None, int]:
        for point in self._points:
            passes = point.take(number, direction, carry, chunk)
            if passes is not None:
                return point, passes
        return None, 0

    def start_pump(self, number: int, direction: Direction, source: socket.socket, sink: socket.socket) -> None:
        """`pump` in a thread of its own."""
        self._start(partial(self.pump, number, direction, source, sink))


class _Link:
    """One connection with its other half.

    Attributes:
        directions: How many still go on.
    """

    def __init__(self, proxy: TcpProxy, number: int, client: socket.socket) -> None:
        self.directions = 2
        self._proxy = proxy
        self._number = number
        self._client = client
        self._server: socket.socket | None = None

    def serve(self) -> None:
        try:
            server = self._server = self._proxy.connect()
        except OSError:
            self.reset()
            return
        if not self._proxy.holds(self._number):  # reset while it waited for the network; nobody would end its threads
            self.reset()
            return
        server.settimeout(None)
        for one in (self._client, server):
            with contextlib.suppress(OSError):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._proxy.start_pump(self._number, Direction.TO_CLIENT, server, self._client)
        self._proxy.pump(self._number, Direction.TO_SERVER, self._client, server)

    def reset(self) -> None:
        """Reset both halves."""
        self._proxy.forget(self._number)
        for one in (self._client, self._server):
            if one is not None:
                _reset(one)

    def close(self) -> None:
        """Close both halves; wakes whoever relays."""
        for one in (self._client, self._server):
            if one is not None:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
                one.close()


def _listen_on_a_port_of_its_own() -> socket.socket:
    """A listener on a port that was asked for by number: one that the kernel chose is lost while nobody listens."""
    for _ in range(_TRIES):
        with socket.create_server(("127.0.0.1", 0)) as chosen:
            port = chosen.getsockname()[1]
        with contextlib.suppress(OSError):  # someone else took it in between
            return socket.create_server(("127.0.0.1", port), backlog=_BACKLOG)
    raise OSError("no free port on 127.0.0.1 stayed free")


def _await_readable(listener: socket.socket) -> None:
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    if not poll.poll(_FILL_SECONDS * 1000):
        raise TimeoutError("the listener's queue is not full")


def _reset(connected: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connected.shutdown(socket.SHUT_RD)  # says nothing to the peer, and wakes the thread that holds the socket open
    connected.close()
