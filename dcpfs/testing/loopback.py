"""A process that talks to nobody but itself: whoever else it tries is refused and remembered.

Problem: options lost on the way (case 76) send a save to the public endpoint of the cloud. A server on loopback
can't see that: the request does not come to it.

Way taken: while `LoopbackOnly` is entered, Python's name resolution and connections refuse every other host, and
note it. Names below ``localhost`` resolve to 127.0.0.1, which not every system's resolver does, so that buckets in
host names can be tested too.

Process-wide and not for concurrent use. Native code that resolves for itself is not seen.
"""

from __future__ import annotations

import ipaddress
import socket
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["LoopbackOnly"]


class LoopbackOnly:
    """Context manager; see the module.

    Attributes:
        foreign: Hosts that were asked for and refused, in order.
    """

    def __init__(self) -> None:
        self.foreign: list[str] = []
        self._resolve = socket.getaddrinfo
        self._connect = socket.socket.connect
        self._connect_ex = socket.socket.connect_ex

    def __enter__(self) -> Self:
        guard = self

        def getaddrinfo(host: Any, *arguments: Any, **options: Any) -> Any:
            name = host.decode() if isinstance(host, bytes) else host
            if name is None or _is_loopback(name):
                local = "127.0.0.1" if name is not None and name.endswith(".localhost") else host
                return guard._resolve(local, *arguments, **options)
            guard.foreign.append(name)
            raise socket.gaierror(socket.EAI_NONAME, f"{name} is not on loopback")

        def connect(this: socket.socket, address: Any) -> None:
            guard._check(this, address)
            guard._connect(this, address)

        def connect_ex(this: socket.socket, address: Any) -> int:
            guard._check(this, address)
            return guard._connect_ex(this, address)

        socket.getaddrinfo = getaddrinfo
        socket.socket.connect = connect  # type: ignore[method-assign,assignment] # put back in __exit__
        socket.socket.connect_ex = connect_ex  # type: ignore[method-assign,assignment] # put back in __exit__
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        socket.getaddrinfo = self._resolve
        socket.socket.connect = self._connect  # type: ignore[method-assign] # the original
        socket.socket.connect_ex = self._connect_ex  # type: ignore[method-assign] # the original

    def _check(self, this: socket.socket, address: Any) -> None:
        if this.family in (socket.AF_INET, socket.AF_INET6) and not _is_loopback(str(address[0])):
            self.foreign.append(str(address[0]))
            raise ConnectionRefusedError(f"{address[0]} is not on loopback")


def _is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
