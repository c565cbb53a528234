"""Ranges over HTTP: right bytes or one clear error, whatever the server makes of the question."""

from __future__ import annotations

import contextlib
import http.server
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

import dcpfs
from dcpfs.config import RetryConfig
from dcpfs.errors import StorageError, TransferSizeError
from dcpfs.storage.fsspec_store import FsspecStore
from dcpfs.storage.location import Location
from dcpfs.testing.conformance import pattern, read_range
from dcpfs.testing.servers_system import NginxServer
from tests.conformance.servers_here import started

QUICK = RetryConfig(attempts=3, initial_backoff_seconds=0.001, max_backoff_seconds=0.001)
CONTENT = pattern(3 << 20)
RANGES = ((0, 10), (1000, 5000), ((2 << 20) + 1, 77), (len(CONTENT) - 5, 5), (0, len(CONTENT)))

Answer = Callable[[http.server.BaseHTTPRequestHandler, int, int], None]
"""What a server says when it is asked for ``[start, stop)``."""


def send(
    request: http.server.BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str] | None = None
) -> None:
    request.send_response(status)
    for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
        request.send_header(name, value)
    request.end_headers()
    if request.command == "GET":
        with contextlib.suppress(ConnectionError):  # who has read enough hangs up
            request.wfile.write(body)


def part(request: http.server.BaseHTTPRequestHandler, start: int, body: bytes, said: str | None = None) -> None:
    said = said or f"bytes {start}-{start + len(body) - 1}/{len(CONTENT)}"
    send(request, 206, body, {"Content-Range": said})


def whole(request: http.server.BaseHTTPRequestHandler, _start: int, _stop: int) -> None:
    send(request, 200, CONTENT)


def another_range(request: http.server.BaseHTTPRequestHandler, start: int, stop: int) -> None:
    part(request, start + 1, CONTENT[start + 1 : stop + 1])


def no_word_of_the_range(request: http.server.BaseHTTPRequestHandler, start: int, stop: int) -> None:
    send(request, 206, CONTENT[start:stop])


def short(request: http.server.BaseHTTPRequestHandler, start: int, stop: int) -> None:
    part(request, start, CONTENT[start : max(start + 1, stop - 3)])


def longer(request: http.server.BaseHTTPRequestHandler, start: int, stop: int) -> None:
    part(request, start, CONTENT[start : stop + 100])


@contextmanager
def web(answer: Answer) -> Iterator[tuple[str, list[str]]]:
    """A server whose answers to ranges are given, and what it was asked."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            send(self, 200, CONTENT)

        def do_GET(self) -> None:
            wanted = self.headers.get("Range", "")
            asked.append(wanted)
            found = re.fullmatch(r"bytes=(\d+)-(\d+)", wanted)
            if found is None:
                send(self, 200, CONTENT)
            else:
                answer(self, int(found.group(1)), int(found.group(2)) + 1)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("answer", [whole, longer], ids=lambda answer: answer.__name__)
def test_more_than_was_asked_for_is_cut(answer: Answer) -> None:
    with web(answer) as (url, _), contextlib.closing(FsspecStore(Location(url), retry=QUICK)) as store:
        for start, size in RANGES:
            assert read_range(store, "object", start, size) == CONTENT[start : start + size]


@pytest.mark.parametrize("answer", [another_range, no_word_of_the_range], ids=lambda answer: answer.__name__)
def test_bytes_of_another_range_are_an_error(answer: Answer) -> None:
    with web(answer) as (url, asked), contextlib.closing(FsspecStore(Location(url), retry=QUICK)) as store:
        with pytest.raises(StorageError, match=r"bytes 1000-1099 were asked for, and the server answered with"):
            read_range(store, "object", 1000, 100)
        assert asked == ["bytes=1000-1099"]


def test_a_range_that_comes_short_is_asked_for_again_and_then_an_error() -> None:
    with web(short) as (url, asked), contextlib.closing(FsspecStore(Location(url), retry=QUICK)) as store:
        with pytest.raises(TransferSizeError, match=r"97 of 100 bytes arrived.*3 attempts"):
            read_range(store, "object", 1000, 100)
        assert asked == ["bytes=1000-1099"] * 3


def test_no_more_of_a_whole_object_is_read_than_up_to_the_range() -> None:
    sent: list[int] = []

    def slowly(request: http.server.BaseHTTPRequestHandler, _start: int, _stop: int) -> None:
        request.send_response(200)
        request.send_header("Content-Length", str(1 << 40))
        request.end_headers()
        with contextlib.suppress(ConnectionError):
            while True:
                request.wfile.write(bytes(1 << 16))
                sent.append(1 << 16)

    with web(slowly) as (url, _), contextlib.closing(FsspecStore(Location(url), retry=QUICK)) as store:
        # An object without end: it is over when the range is there.
        assert read_range(store, "object", 100_000, 1000) == bytes(1000)
    assert sum(sent) < 1 << 30


def test_a_server_that_compresses_gives_ranges_of_what_is_stored() -> None:
    state = {"weight": torch.arange(50_000.0), "zeros": torch.zeros(100_000)}
    with started(NginxServer) as server:
        dcpfs.save(state, str(server.data / "run"))
        found = {"weight": torch.zeros(50_000), "zeros": torch.ones(100_000)}
        dcpfs.load(found, server.url("run"), storage_options=server.storage_options)
        assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
        some = dcpfs.read(server.url("run"), ["zeros"], storage_options=server.storage_options)
        zeros = some["zeros"]
        assert isinstance(zeros, torch.Tensor)
        assert torch.equal(zeros, state["zeros"])
