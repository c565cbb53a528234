"""Bodies through sockets in as few system calls as the kernel allows.

Problem: with a time-out of its own, Python polls before every small send and receive, and takes the GIL back after
each. A part of 16 MiB then costs hundreds of switches between threads that all want it.

Way taken: for the length of a body, the kernel keeps the time and Python's socket blocks. One ``send`` takes a whole
part, one ``sendmsg`` hundreds of small buffers; one ``recv`` with MSG_WAITALL fills a whole buffer, one ``recvmsg``
hundreds. TLS, whose records pass through Python's memory anyway, keeps to Python's time-out and small steps.

A time-out limits silence, not slowness: a peer that sends a byte now and then would hold a request for ever. So a body
that moves, over a whole time-out, at less than 1 KiB/s counts as silent, and an answer's head, or a short answer, may
take ten time-outs in all. (Not one: while S3 completes an upload it sends blanks for minutes.)

Flow: `send_buffers` after a request's head; `read_body` after an answer's, on connections whose responses are
`BodyResponse`.
"""

from __future__ import annotations

import http.client
import io
import select
import socket
import ssl
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from typing_extensions import override

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["BodyResponse", "is_readable", "read_body", "send_buffers"]

_MIB = 1 << 20
_SLICE_BYTES = 1 * _MIB
"""Largest ``sendall`` where Python bounds the whole call by the time-out: a bigger one would fail on a slow link."""
_VECTOR = 512
"""Buffers in one call: below every system's IOV_MAX (1024 on Linux)."""
_KERNEL_TIMES = sys.platform in ("linux", "darwin")
_SLOWEST_BYTES_PER_SECOND = 1 << 10
"""A connection that is slower is given up: curl's and git's users set the same figure."""
_ANSWER_TIMEOUTS = 10


class _Pace:
    """Tells slowness from progress, in one direction of one connection.

    Args:
        timeout_seconds: Longest silence; None: nothing is limited.
    """

    def __init__(self, timeout_seconds: float | None) -> None:
        self._timeout_seconds = timeout_seconds
        self._since_seconds = time.monotonic()
        self._bytes = 0
        self._in_body = False

    def start_body(self) -> None:
        """From here on the rate counts, not the time in all."""
        self._in_body = True
        self._since_seconds = time.monotonic()
        self._bytes = 0

    def note(self, size_bytes: int) -> None:
        """Count what moved.

        Raises:
            TimeoutError: It is too little for the time it took.
        """
        if self._timeout_seconds is None:
            return
        seconds = time.monotonic() - self._since_seconds
        if not self._in_body:
            if seconds > _ANSWER_TIMEOUTS * self._timeout_seconds:
                raise TimeoutError(f"the answer was not there after {seconds:.1f} s")
            return
        self._bytes += size_bytes
        if seconds < self._timeout_seconds:
            return
        if self._bytes < _SLOWEST_BYTES_PER_SECOND * seconds:
            raise TimeoutError(f"only {self._bytes} bytes moved in {seconds:.1f} s")
        self.start_body()


class _PacedReader(io.RawIOBase):
    """A socket's raw reader that minds the pace."""

    def __init__(self, raw: io.RawIOBase, pace: _Pace) -> None:
        self._raw = raw
        self._pace = pace

    @override
    def readable(self) -> bool:
        return True

    @override
    def readinto(self, buffer: Buffer) -> int | None:
        count = self._raw.readinto(buffer)
        if count:
            self._pace.note(count)
        return count

    @override
    def close(self) -> None:
        if not self.closed:
            self._raw.close()
        super().close()


class BodyResponse(http.client.HTTPResponse):
    """A response that can hand its body over in large steps. Used by one thread."""

    def __init__(self, sock: socket.socket, debuglevel: int = 0, method: str | None = None, url: str | None = None):
        super().__init__(sock, debuglevel, method, url)
        self._sock = sock
        self._is_read = method == "GET"
        self._pace = _Pace(sock.gettimeout())
        self.fp = io.BufferedReader(_PacedReader(self.fp.detach(), self._pace))

    @override
    def begin(self) -> None:
        super().begin()
        while 100 <= self.status < 200:
            # An announcement (processing, early hints), which the answer follows; http.client knows but one of them.
            self.headers = None  # type: ignore[assignment]  # how it tells that nothing has been read yet
            super().begin()
        if self._is_read:
            self._pace.start_body()

    def read_into(self, buffers: Sequence[memoryview], arrived: Callable[[int], None]) -> None:
        """Fill buffers in order until they are full or the body ends.

        Args:
            buffers: Writable, of format ``B``.
            arrived: Told the size of each piece as soon as it is there, so also before a failure.

        Raises:
            TimeoutError: Nothing came for as long as the connection's time-out.
        """
        left = [buffer for buffer in buffers if len(buffer)]
        if self.length is None or self.chunked or not _is_plain(self._sock):
            _read_stepwise(self, left, arrived)
            return
        left = self._drain(_clipped(left, self.length), arrived)
        if not left:
            return
        with _timed_by_kernel(self._sock, socket.SO_RCVTIMEO):
            while left:
                count = _receive(self._sock, left[:_VECTOR])
                if not count:
                    break
                self.length -= count
                arrived(count)
                left = _after(left, count)
                if left:
                    self._pace.note(count)
        if left:
            # Not sooner: where the server closes, this is the end of the socket too.
            self.close()

    def _drain(self, left: list[memoryview], arrived: Callable[[int], None]) -> list[memoryview]:
        """Take what came with the head and lies in the reader's buffer; returns what is still to be filled."""
        timeout_seconds = self._sock.gettimeout()
        self._sock.settimeout(0.0)
        try:
            held_bytes = len(self.fp.peek())
        finally:
            self._sock.settimeout(timeout_seconds)
        while left and held_bytes:
            # Never more than is held: the rest comes straight from the socket.
            count = self.readinto(left[0][:held_bytes])
            if not count:
                break
            held_bytes -= count
            arrived(count)
            left = _after(left, count)
        return left


def read_body(
    response: http.client.HTTPResponse, buffers: Sequence[memoryview], arrived: Callable[[int], None]
) -> None:
    """`BodyResponse.read_into`, also for other responses."""
    if isinstance(response, BodyResponse):
        response.read_into(buffers, arrived)
    else:
        _read_stepwise(response, buffers, arrived)


def is_readable(sock: socket.socket) -> bool:
    """Whether there is something to read, be it the end or an error."""
    try:
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        return bool(poll.poll(0))
    except (OSError, ValueError):
        return True


def send_buffers(sock: socket.socket, buffers: Sequence[memoryview]) -> None:
    """Send all buffers, in order, from where they lie.

    Raises:
        TimeoutError: Nothing could be sent for as long as the socket's time-out.
    """
    left = [buffer for buffer in buffers if len(buffer)]
    if not left:
        return
    if not _is_plain(sock):
        _send_stepwise(sock, left)
        return
    pace = _Pace(sock.gettimeout())
    pace.start_body()
    with _timed_by_kernel(sock, socket.SO_SNDTIMEO):
        while left:
            count = sock.sendmsg(left[:_VECTOR])
            left = _after(left, count)
            if left:
                pace.note(count)


def _is_plain(sock: socket.socket) -> bool:
    return _KERNEL_TIMES and not isinstance(sock, ssl.SSLSocket) and sock.gettimeout() is not None


@contextmanager
def _timed_by_kernel(sock: socket.socket, option: int) -> Iterator[None]:
    """Have the kernel, not Python, limit the silence in one direction."""
    timeout_seconds = sock.gettimeout() or 0.0
    whole, part = divmod(timeout_seconds, 1.0)
    sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", int(whole), max(1, int(part * 1e6))))
    sock.settimeout(None)
    try:
        yield
    except BlockingIOError:
        raise TimeoutError("timed out") from None
    finally:
        sock.settimeout(timeout_seconds)


def _receive(sock: socket.socket, buffers: Sequence[memoryview]) -> int:
    if len(buffers) == 1:
        return sock.recv_into(buffers[0], 0, socket.MSG_WAITALL)
    return sock.recvmsg_into(buffers, 0, socket.MSG_WAITALL)[0]


def _read_stepwise(
    response: http.client.HTTPResponse, buffers: Sequence[memoryview], arrived: Callable[[int], None]
) -> None:
    for buffer in buffers:
        at = 0
        while at < len(buffer):
            count = response.readinto(buffer[at:])
            if not count:
                return
            arrived(count)
            at += count


def _send_stepwise(sock: socket.socket, buffers: Sequence[memoryview]) -> None:
    """Small buffers are joined: TLS copies anyway, and one record for several saves the overhead of each."""
    batch: list[memoryview] = []
    batch_bytes = 0
    for buffer in buffers:
        if batch and batch_bytes + len(buffer) > _SLICE_BYTES:
            sock.sendall(b"".join(batch))
            batch, batch_bytes = [], 0
        if len(buffer) < _SLICE_BYTES:
            batch.append(buffer)
            batch_bytes += len(buffer)
            continue
        for start in range(0, len(buffer), _SLICE_BYTES):
            sock.sendall(buffer[start : start + _SLICE_BYTES])
    if batch:
        sock.sendall(b"".join(batch))


def _after(buffers: list[memoryview], count: int) -> list[memoryview]:
    """What is left of buffers when the first ``count`` bytes are done."""
    for index, buffer in enumerate(buffers):
        if count < len(buffer):
            return [buffer[count:], *buffers[index + 1 :]]
        count -= len(buffer)
    return []


def _clipped(buffers: list[memoryview], size_bytes: int) -> list[memoryview]:
    """The first ``size_bytes`` of the buffers, or all."""
    clipped: list[memoryview] = []
    for buffer in buffers:
        if size_bytes <= 0:
            break
        clipped.append(buffer[:size_bytes])
        size_bytes -= len(buffer)
    return clipped
