"""Silence and slowness on one connection, both ways, on real sockets of loopback."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from dcpfs.storage import s3_sockets
from dcpfs.storage.s3_sockets import BodyResponse, read_body, send_buffers

TIMEOUT_SECONDS = 2.0
"""Far more than a busy machine keeps a thread from its work."""
DRIP_SECONDS = 0.03
HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"
LONG = 1 << 22


@contextlib.contextmanager
def connected(timeout_seconds: float = TIMEOUT_SECONDS) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends with small buffers in the kernel."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        ours = socket.socket()
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        ours.connect(listener.getsockname())
        theirs, _ = listener.accept()
        with ours, theirs:
            ours.settimeout(timeout_seconds)
            yield ours, theirs


@contextlib.contextmanager
def now_and_then(step: Callable[[], object]) -> Iterator[None]:
    """Take a step every `DRIP_SECONDS`, until the end or a failure."""
    ended = threading.Event()

    def go() -> None:
        with contextlib.suppress(OSError):
            while not ended.wait(DRIP_SECONDS):
                step()

    thread = threading.Thread(target=go)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(20)


@pytest.mark.parametrize("buffers", [1, 3])
def test_a_body_that_drips_is_given_up_and_what_came_is_counted(buffers: int) -> None:
    arrived: list[int] = []
    with connected() as (ours, theirs):
        theirs.sendall(HEAD % LONG + b"x" * 1000)
        response = BodyResponse(ours, method="GET")
        response.begin()
        room = [memoryview(bytearray(LONG // buffers)) for _ in range(buffers)]
        with now_and_then(lambda: theirs.send(b"y")), pytest.raises(TimeoutError, match="bytes moved"):
            read_body(response, room, arrived.append)
    assert sum(arrived) >= 1000
    assert bytes(room[0][:1001]) == b"x" * 1000 + b"y"


def test_a_body_that_is_slow_but_moves_arrives() -> None:
    size = 300_000
    with connected() as (ours, theirs):
        theirs.sendall(HEAD % size)
        response = BodyResponse(ours, method="GET")
        response.begin()
        room = memoryview(bytearray(size))
        started_seconds = time.monotonic()
        with now_and_then(lambda: theirs.send(b"y" * 3000)):  # 100 kB/s
            read_body(response, [room], lambda _: None)
        assert time.monotonic() - started_seconds > TIMEOUT_SECONDS
    assert bytes(room) == b"y" * size


@pytest.mark.parametrize("text", [b"HTTP/1.1 200 OK\r\nX: ", HEAD % LONG], ids=["head", "short answer"])
def test_an_answer_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    monkeypatch.setattr(s3_sockets, "_ANSWER_TIMEOUTS", 1)
    with connected() as (ours, theirs):
        theirs.sendall(text)
        response = BodyResponse(ours, method="POST")

        def read_it() -> None:
            response.begin()
            response.read()

        with now_and_then(lambda: theirs.send(b" ")), pytest.raises(TimeoutError, match="the answer was not there"):
            read_it()


def test_blanks_while_an_upload_is_completed_are_borne_for_many_timeouts() -> None:
    many_seconds = 2.5 * TIMEOUT_SECONDS
    size = int(many_seconds / DRIP_SECONDS) + 100
    with connected() as (ours, theirs):
        theirs.sendall(HEAD % size)
        response = BodyResponse(ours, method="POST")
        response.begin()
        started_seconds = time.monotonic()

        def drip() -> None:
            theirs.send(b" " * (1 if time.monotonic() - started_seconds < many_seconds else size))

        with now_and_then(drip):
            assert response.read() == b" " * size
        assert time.monotonic() - started_seconds >= many_seconds


def test_a_peer_that_takes_a_byte_now_and_then_is_given_up() -> None:
    with connected() as (ours, theirs):
        content = memoryview(bytes(LONG))
        with now_and_then(lambda: theirs.recv(20)), pytest.raises(TimeoutError):
            send_buffers(ours, [content, content])


def test_silence_is_given_up() -> None:
    with connected(timeout_seconds=0.3) as (ours, theirs):
        theirs.sendall(HEAD % LONG)
        response = BodyResponse(ours, method="GET")
        response.begin()
        with pytest.raises(TimeoutError):
            read_body(response, [memoryview(bytearray(LONG))], lambda _: None)
        with pytest.raises(TimeoutError):
            send_buffers(ours, [memoryview(bytes(LONG))])
