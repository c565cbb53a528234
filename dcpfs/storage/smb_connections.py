"""The connections that the client of SMB keeps for the whole process.

Problem: smbclient keeps one connection a server for all who ask, and looks neither whether it was made before a fork
(its thread is the parent's, so that a child's first call never comes back), nor whether anybody answers: at the end of
the process it says goodbye on each, and waits for the answer for ever.

Way taken: a child that was forked forgets its parent's connections, and whoever was left without an answer cuts that
server's. smbclient has no function for either; its table of connections is taken as it is, and where it is not to be
found, nothing is done.

Flow: import → children forget; ``cut_connection(host, port)`` after a call that did not come back.
"""

from __future__ import annotations

import contextlib
import os

__all__ = ["cut_connection"]

_PARENTS: list[object] = []
"""In a forked child, what its parent had: kept, since the end of a connection could hang up the parent's."""


def cut_connection(host: str, port: int) -> None:
    """Hang up on a server without a word: whoever waits for it fails."""
    connection = _table().pop(f"{host.lower()}:{port}", None)
    transport = getattr(connection, "transport", None)
    if transport is not None:
        with contextlib.suppress(OSError):  # it was closed already
            transport.close()


def _forget() -> None:
    table = _table()
    _PARENTS.extend(table.values())
    table.clear()


def _table() -> dict[str, object]:
    from smbclient import _pool

    found = getattr(_pool, "_SMB_CONNECTIONS", None)
    return found if isinstance(found, dict) else {}


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
