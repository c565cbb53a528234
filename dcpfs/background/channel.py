"""Messages between a process and the one that it started.

Problem: ``multiprocessing`` queues lose what their feeder has not sent when the process ends, fail in a thread of their
own when a message can't be pickled, and a dead peer shows as silence, or as a bare ``BrokenPipeError`` for the rest of
the run (cases 53, 54).

Way taken: a socket pair, and each message as a length and a pickle, sent by the caller itself. The end of the peer is
the end of the stream, at once, whatever killed it. Both ends are dcpfs, one started by the other: unpickling is safe.
Descriptors travel beside a message.
"""

from __future__ import annotations

import array
import contextlib
import pickle
import socket
import struct
import threading
from collections.abc import Sequence

__all__ = ["Channel", "ChannelClosedError"]

_HEAD = struct.Struct("<QI")
_MOST_DESCRIPTORS = 64


class ChannelClosedError(ConnectionError):
    """The other end is gone."""


class Channel:
    """One end. `send` may be called by several threads, `receive` by one.

    Args:
        end: A connected stream socket of the Unix family; becomes this object's.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._lock = threading.Lock()

    def send(self, message: bytes | object, descriptors: Sequence[int] = ()) -> None:
        """Send a message, and copies of descriptors with it.

        Args:
            message: A value, or the bytes of a pickled one.
            descriptors: Stay the caller's.

        Raises:
            ChannelClosedError: The other end is gone.
        """
        data = message if isinstance(message, bytes) else pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        head = _HEAD.pack(len(data), len(descriptors))
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        try:
            with self._lock:
                self._socket.sendmsg([head], ancillary)
                self._socket.sendall(data)
        except OSError as error:
            raise ChannelClosedError("the other process has ended") from error

    def receive(self) -> tuple[object, list[int]]:
        """Wait for the next message, and the descriptors that came with it, which become the caller's.

        Raises:
            ChannelClosedError: The other end is gone.
        """
        try:
            head, descriptors, _, _ = socket.recv_fds(self._socket, _HEAD.size, _MOST_DESCRIPTORS)
            if len(head) < _HEAD.size:
                head += self._read(_HEAD.size - len(head)) if head else b""
            if not head:
                raise ChannelClosedError("the other process has ended")
            size_bytes, _ = _HEAD.unpack(head)
            return pickle.loads(self._read(size_bytes)), list(descriptors)
        except OSError as error:
            if isinstance(error, ChannelClosedError):
                raise
            raise ChannelClosedError("the other process has ended") from error

    def shut_sending(self) -> None:
        """Say that nothing more will be sent: the other end finds its stream at its end. Idempotent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close this end; the other one then finds it closed. Idempotent, from any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, size_bytes: int) -> bytearray:
        data = bytearray(size_bytes)
        view, filled = memoryview(data), 0
        while filled < size_bytes:
            got = self._socket.recv_into(view[filled:])
            if got == 0:
                raise ChannelClosedError("the other process has ended")
            filled += got
        return data
