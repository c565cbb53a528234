"""Servers of the tests as far as this machine has them.

A server that is missing costs its tests, with the reason; where the variable `REQUIRED` of the environment asks for it,
it is a failure: ``wheels`` for all that pip brings, ``all`` for those of npm and of the operating system as well.

Flow: ``with started(NginxServer) as server:``. ``python -m tests.conformance.servers_here`` says which servers that no
wheel brings are missing.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from dcpfs.config import RetryConfig
from dcpfs.errors import MissingBackendError
from dcpfs.testing.server_process import LoopbackServer
from dcpfs.testing.servers_objects import AzuriteServer
from dcpfs.testing.servers_system import NginxServer, OpensshServer, ParamikoSshServer, SambaServer

__all__ = ["REQUIRED", "RETRY", "SHM", "in_memory", "is_required", "started"]

REQUIRED = "TESTS_REQUIRE"
SHM = Path("/dev/shm")
RETRY = RetryConfig(attempts=6, initial_backoff_seconds=0.05, max_backoff_seconds=1.0)
"""Of a store on a real server, which may be busy."""
_WITHOUT_WHEEL: tuple[type[LoopbackServer], ...] = (AzuriteServer, NginxServer, OpensshServer, SambaServer)

_Server = TypeVar("_Server", bound=LoopbackServer)


def is_required(kind: type[LoopbackServer], required: str) -> bool:
    """Whether to fail where a server is missing.

    Args:
        kind: Its class.
        required: What the environment asks for: ``all``, ``wheels`` or nothing.
    """
    if required not in ("", "wheels", "all"):
        raise ValueError(f"{REQUIRED} is {required!r}, which is none of 'wheels' and 'all'")
    return required == "all" or (required == "wheels" and kind not in (*_WITHOUT_WHEEL, ParamikoSshServer))


@contextmanager
def started(kind: type[_Server]) -> Iterator[_Server]:
    """A server of that kind; skips the test where it is not installed, or fails where it is required."""
    with ExitStack() as stack:
        try:
            server = kind()
            stack.enter_context(server)
        except MissingBackendError as error:
            if is_required(kind, os.environ.get(REQUIRED, "")):
                raise
            pytest.skip(str(error))
        yield server


@contextmanager
def in_memory() -> Iterator[Path]:
    """An empty directory on a tmpfs; skips the test where this system has none that can be written."""
    if not os.access(SHM, os.W_OK):
        pytest.skip(f"this system has no writable {SHM}")
    with tempfile.TemporaryDirectory(dir=SHM) as name:
        yield Path(name)


def _missing(kind: type[LoopbackServer]) -> str:
    try:
        with kind():
            return ""
    except MissingBackendError as error:
        return f"  {kind.__name__}: {error}"


if __name__ == "__main__":
    MISSING = [line for line in map(_missing, _WITHOUT_WHEEL) if line]
    if MISSING:
        print("NOT TESTED here, since these servers are missing:", *MISSING, sep="\n")
    else:
        print("All servers that the tests know are on this machine.")
