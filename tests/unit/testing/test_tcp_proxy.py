"""The breakable network itself: each kind of cut as a client's socket sees it, where it happens, and mending."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from dcpfs.testing.tcp_proxy import Cut, Direction, TcpProxy

PATIENCE_SECONDS = 120.0
SILENCE_SECONDS = 0.3


class Echo:
    """Sends back what it gets."""

    def __init__(self, word: bytes = b"") -> None:
        self.got = b""
        self._word = word
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(accepted,), daemon=True).start()

    def _answer(self, accepted: socket.socket) -> None:
        with accepted, contextlib.suppress(OSError):
            while data := accepted.recv(65536):
                self.got += data
                accepted.sendall(self._word + data)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes who accepts, and would keep the port
        self._listener.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.close()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[TcpProxy]:
    with TcpProxy(echo.port) as made:
        yield made


def connect(proxy: TcpProxy, timeout_seconds: float = PATIENCE_SECONDS) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=timeout_seconds)


def receive(client: socket.socket, size_bytes: int) -> bytes:
    """So many bytes, in as many pieces as they come."""
    answer = b""
    while len(answer) < size_bytes:
        got = client.recv(size_bytes - len(answer))
        if not got:
            raise ConnectionError(f"ended after {answer!r}")
        answer += got
    return answer


def ask(client: socket.socket, data: bytes, word: bytes = b"") -> bytes:
    client.sendall(data)
    return receive(client, len(word + data))


def test_a_whole_network_passes_everything_and_ends_in_order(proxy: TcpProxy) -> None:
    content = bytes(range(256)) * 4000
    with connect(proxy) as client:
        sender = threading.Thread(target=client.sendall, args=(content,))
        sender.start()
        answer = b""
        while len(answer) < len(content):
            answer += client.recv(65536)
        sender.join()
        assert answer == content
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1) == b""


def test_a_reset_breaks_open_and_new_connections_until_mended(proxy: TcpProxy) -> None:
    with connect(proxy) as client:
        assert ask(client, b"one") == b"one"
        proxy.cut(Cut.RESET)
        with pytest.raises(ConnectionResetError):
            client.recv(1)
    with pytest.raises(OSError), connect(proxy) as client:  # noqa: PT011 - a reset shows in any call
        ask(client, b"two")
    proxy.mend()
    with connect(proxy) as client:
        assert ask(client, b"three") == b"three"


def test_a_refusing_network_keeps_its_port(proxy: TcpProxy) -> None:
    port = proxy.port
    for _ in range(3):
        with connect(proxy) as client:
            assert ask(client, b"one") == b"one"
            proxy.cut(Cut.REFUSED)
            with pytest.raises(ConnectionResetError):
                client.recv(1)
        with pytest.raises(ConnectionRefusedError):
            connect(proxy)
        proxy.mend()
        assert proxy.port == port


def test_a_silent_network_says_nothing_and_delivers_later(proxy: TcpProxy, echo: Echo) -> None:
    with connect(proxy) as old:
        assert ask(old, b"one") == b"one"
        proxy.cut(Cut.SILENT)
        old.sendall(b"two")
        with connect(proxy) as new:
            new.sendall(b"new")
            for client in (old, new):
                client.settimeout(SILENCE_SECONDS)
                with pytest.raises(TimeoutError):
                    client.recv(1)
                client.settimeout(PATIENCE_SECONDS)
            assert echo.got == b"one"
            proxy.mend()
            assert receive(old, 3) == b"two"
            assert receive(new, 3) == b"new"


def test_an_unreachable_network_shakes_no_hands(proxy: TcpProxy) -> None:
    for _ in range(2):
        proxy.cut(Cut.UNREACHABLE)
        with pytest.raises(TimeoutError):
            connect(proxy, SILENCE_SECONDS)
        proxy.mend()
        with connect(proxy) as client:
            assert ask(client, b"one") == b"one"


@pytest.mark.parametrize("pieces", [1, 7])
def test_a_cut_comes_at_the_byte_after_the_match_that_counts(proxy: TcpProxy, echo: Echo, pieces: int) -> None:
    text, until = b"GET /x PUT /x PUT /x 123456", b"GET /x PUT /x PUT /x 123"
    point = proxy.cut_at(Cut.SILENT, pattern=rb"PUT /x", occurrence=2, after_bytes=4)
    size = -(-len(text) // pieces)
    with connect(proxy) as client:
        for start in range(0, len(text), size):
            piece = text[start : start + size]
            if start + size < len(until):
                assert ask(client, piece) == piece  # so that pieces don't travel together
            else:
                client.sendall(piece)
        assert point.reached.wait(PATIENCE_SECONDS)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(echo.got) < len(until) and time.monotonic() < deadline:
            time.sleep(0.005)
        assert echo.got == until
        proxy.mend()
        while len(echo.got) < len(text) and time.monotonic() < deadline:
            time.sleep(0.005)
        assert echo.got == text


def test_a_silent_cut_in_an_answer_holds_the_rest_back(proxy: TcpProxy) -> None:
    point = proxy.cut_at(Cut.SILENT, pattern=rb"GET", direction=Direction.TO_CLIENT, after_bytes=5)
    with connect(proxy) as client:
        client.sendall(b"GET 123456789")
        assert point.reached.wait(PATIENCE_SECONDS)
        assert receive(client, 5) == b"GET 1"
        client.settimeout(SILENCE_SECONDS)
        with pytest.raises(TimeoutError):
            client.recv(1)
        proxy.mend()
        client.settimeout(PATIENCE_SECONDS)
        assert receive(client, 8) == b"23456789"


def test_it_mends_itself_after_so_many_connections(proxy: TcpProxy) -> None:
    proxy.cut(Cut.RESET, mends_after=2)
    for _ in range(2):
        with pytest.raises(OSError), connect(proxy) as client:  # noqa: PT011 - a reset shows in any call
            ask(client, b"one")
    with connect(proxy) as client:
        assert ask(client, b"two") == b"two"
    assert proxy.connections == 3
    assert proxy.await_connections(3)
    with pytest.raises(ValueError, match="can't be counted"):
        proxy.cut(Cut.REFUSED, mends_after=1)


def test_new_connections_go_to_the_new_target(proxy: TcpProxy) -> None:
    other = Echo(b"new ")
    with connect(proxy) as client:
        assert ask(client, b"one") == b"one"
        proxy.retarget(other.port)
        assert ask(client, b"two") == b"two"
    with connect(proxy) as client:
        assert ask(client, b"three", b"new ") == b"new three"
    other.close()


@pytest.mark.parametrize("ending", ["reset", "end of the proxy"])
def test_a_connection_that_waits_for_the_network_leaves_no_thread(echo: Echo, ending: str) -> None:
    with TcpProxy(echo.port) as proxy:
        proxy.cut(Cut.SILENT)
        with connect(proxy):
            assert proxy.await_connections(1)
            if ending == "reset":
                proxy.cut(Cut.RESET)
    assert not any(thread.is_alive() for thread in proxy._threads)
