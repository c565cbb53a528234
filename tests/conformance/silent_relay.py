"""A relay between a client and a server that can fall silent: connections stay, and nothing passes."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType

from typing_extensions import Self

__all__ = ["SilentRelay"]


class SilentRelay:
    """Passes bytes to a port of 127.0.0.1 and back, until it is told not to. A context manager.

    Args:
        target: Port of the server.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._passing = threading.Event()
        self._passing.set()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])

    def fall_silent(self) -> None:
        """Hold back whatever comes from now on; new connections are made, and get no answer."""
        self._passing.clear()

    def speak_again(self) -> None:
        """Pass on what was held back, and what comes."""
        self._passing.set()

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in list(self._sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        self._passing.set()
        for thread in list(self._threads):
            thread.join()
        for one in self._sockets:
            one.close()

    def _start(self, work: object, *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)  # type: ignore[arg-type] # a method
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += [client, server]
                self._start(self._pass, client, server)
                self._start(self._pass, server, client)

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                self._passing.wait()
                sink.sendall(piece)
        self._passing.wait()
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)
