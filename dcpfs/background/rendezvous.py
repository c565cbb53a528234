"""Where processes of several ranks meet: an address whose socket is bound from its choice to its use.

Problem: a free port that is chosen, closed and bound again later is somebody else's by then, in the middle of training
(case 51). An address of the trainer's own store may not be reachable, and must not be shared.

Way taken: the coordinator binds a listening socket to port 0 and keeps it; its number is told to all, and the socket
itself is handed to the process that serves (``TCPStore`` takes a descriptor). Ranks of one machine meet on loopback.
Each start of the processes has a meeting of its own.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from dcpfs.ranks import Ranks

__all__ = ["Address", "Rendezvous"]

_BACKLOG = 2048
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Address:
    """Where the processes meet.

    Attributes:
        host: Name or address that all ranks reach.
        port: Of the coordinator's socket.
    """

    host: str
    port: int


class Rendezvous:
    """A meeting of one process per rank. At the coordinator it holds the socket.

    Attributes:
        address: The same on all ranks.
    """

    def __init__(self, address: Address, listener: socket.socket | None) -> None:
        self.address = address
        self._listener = listener

    @classmethod
    def open(cls, ranks: Ranks) -> Rendezvous:
        """Choose an address. Collective.

        Raises:
            OSError: The coordinator can't bind a socket; raised on all ranks.
        """
        machine = f"{socket.gethostname()} {_boot_id()}"
        machines = ranks.all_gather(machine)
        listener: socket.socket | None = None
        address, error = Address(_LOOPBACK, 0), None
        if ranks.is_coordinator:
            try:
                alone = all(each == machine for each in machines)
                listener, address = _listen(alone=alone)
            except OSError as caught:
                error = caught
        return cls(ranks.broadcast_outcome(address, error, None), listener)

    @property
    def descriptor(self) -> int | None:
        """Of the bound socket, at the coordinator."""
        return None if self._listener is None else self._listener.fileno()

    def close(self) -> None:
        """Let go of the socket, once whoever serves has a copy. Idempotent."""
        if self._listener is not None:
            self._listener.close()


def _listen(*, alone: bool) -> tuple[socket.socket, Address]:
    host = _LOOPBACK if alone else _own_host()
    family = socket.AF_INET if alone else socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((_LOOPBACK if alone else "", 0))
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener, Address(host, listener.getsockname()[1])


def _own_host() -> str:
    """A name of this machine that others reach: torchrun's where this is its node, else the host's own."""
    own = {info[4][0] for info in _addresses(socket.gethostname())}
    named = os.environ.get("MASTER_ADDR")
    if named and own & {info[4][0] for info in _addresses(named)}:
        return named
    return socket.getfqdn()


def _addresses(host: str) -> list[tuple[object, object, object, str, tuple[object, ...]]]:
    try:
        return list(socket.getaddrinfo(host, None))
    except OSError:
        return []


def _boot_id() -> str:
    """Two containers may share a host name; one boot of one machine has one id, and its loopback is shared or not."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot} {os.readlink('/proc/self/ns/net')}"
    except OSError:
        return ""
