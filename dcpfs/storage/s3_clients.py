"""Clients of s3fs that outlive the store that asked for them, so that the next save finds its connections open.

Problem: a client costs 0.1 s of CPU (botocore's session and models) and its connections a round trip each, and a
trainer opens a store for every save and every load. s3fs' own cache of instances is no way out: it keeps old tokens
and old environments, and breaks in a forked child.

Way taken: a store that is closed leaves its client here, and the next one with the same wishes takes it: bucket,
options by value, time-outs, and whatever of the environment botocore and fsspec look at, with the state of the
profile files. Any change there is another client. A client belongs to one store at a time, so that what one is taught
(a bucket's region) or shown (an expired credential) can't trouble another, and one that has failed is not kept. Unused
ones are closed after five minutes, at the next use, or beyond four of them, and all at exit. A forked child starts
with none. What is not plain data (say, a session object among the options) can't be compared, so it is not kept.

It is state of the process, as fsspec's event loop is, on which all clients live: no thread, nothing running, and
nothing observable but speed. Secrets are part of a key only as a digest.

Flow: `client_key` → `KeptClients.take`, or make one → `KeptClients.keep`, or `close_client`.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import hashlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from dcpfs.storage.s3_http import HttpPool

__all__ = ["CLIENTS", "KeptClients", "S3Client", "client_key", "close_client", "run_on_loop"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_IDLE_SECONDS = 300.0
_IDLE_CLIENTS = 4
_CLOSE_SECONDS = 5.0
_VARIABLES = re.compile(
    r"(AWS|BOTO|S3|FSSPEC)_?|.*_PROXY$|(REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|SSL_CERT_FILE|SSL_CERT_DIR|HOME)$",
    re.IGNORECASE,
)
_PROFILES = {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config"}


@dataclass(slots=True, eq=False)
class S3Client:
    """One client and what belongs to it.

    Attributes:
        client: The aiobotocore client.
        loop: Where its coroutines run.
        pid: The process in which it works.
        pool: Blocking connections with the same time-outs, trust and proxies.
        filesystem: The s3fs filesystem that made the client; as long as it lives, the client does.
        bucket_seen: Its bucket is known to exist.
    """

    client: Any
    loop: asyncio.AbstractEventLoop
    pid: int
    pool: HttpPool
    filesystem: Any
    bucket_seen: bool = False


def client_key(bucket: str, options: Mapping[str, object], *settings: object) -> str | None:
    """Digest of all that a client depends on; None when it depends on more than plain data."""
    from fsspec.config import conf

    environment = {name: value for name, value in os.environ.items() if _VARIABLES.match(name)}
    profiles = [_state(os.environ.get(name) or default) for name, default in _PROFILES.items()]
    try:
        text = repr(_plain([bucket, options, list(settings), environment, profiles, conf.get("s3"), conf.get("s3a")]))
    except TypeError:
        return None
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def _plain(value: object) -> object:
    """A value as nested tuples whose ``repr`` tells different values apart.

    Raises:
        TypeError: It is no plain data.
    """
    if value is None or type(value) in (str, bytes, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return "mapping", sorted((repr(_plain(name)), _plain(item)) for name, item in value.items())
    if type(value) in (list, tuple):
        return "sequence", [_plain(item) for item in value]  # type: ignore[attr-defined]  # narrowed by its type
    raise TypeError(type(value).__name__)


def _state(path: str) -> list[object]:
    try:
        found = os.stat(os.path.expanduser(path))
    except OSError:
        return [path]
    return [path, found.st_mtime_ns, found.st_size, found.st_ino]


class KeptClients:
    """Unused clients by key. Thread-safe.

    Args:
        idle_seconds: How long one stays.
        idle_clients: How many stay.
        clock: Seconds that only go up.
    """

    def __init__(
        self,
        *,
        idle_seconds: float = _IDLE_SECONDS,
        idle_clients: int = _IDLE_CLIENTS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._idle_seconds = idle_seconds
        self._idle_clients = idle_clients
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: list[tuple[str, float, S3Client]] = []
        self._lost: list[object] = []

    def take(self, key: str | None) -> S3Client | None:
        """A client that was made for this key, no longer kept here; the one used last."""
        found: S3Client | None = None
        with self._lock:
            for index in reversed(range(len(self._kept))):
                if self._kept[index][0] == key and self._kept[index][2].loop.is_running():
                    found = self._kept.pop(index)[2]
                    break
        self._close_stale()
        return found

    def keep(self, key: str | None, client: S3Client) -> None:
        """Take over a client that nobody uses any more; one without a key, or of a parent process, is closed."""
        if key is None or client.pid != os.getpid():
            close_client(client)
        else:
            with self._lock:
                self._kept.append((key, self._clock(), client))
        self._close_stale()

    def close(self) -> None:
        """Close all that is kept."""
        with self._lock:
            kept, self._kept = self._kept, []
        for _, _, client in kept:
            close_client(client)

    def forget(self) -> None:
        """Start empty, in a forked child: neither the loop's thread nor the lock's owner exists there."""
        self._lock = threading.Lock()
        # Held, since their finalizers would wait for the loop.
        self._lost.append(self._kept)
        self._kept = []

    def _close_stale(self) -> None:
        oldest_seconds = self._clock() - self._idle_seconds
        with self._lock:
            # The one unused for longest comes first.
            expired = sum(since_seconds < oldest_seconds for _, since_seconds, _ in self._kept)
            count = max(expired, len(self._kept) - self._idle_clients)
            stale, self._kept = self._kept[:count], self._kept[count:]
        for _, _, client in stale:
            close_client(client)


CLIENTS = KeptClients()
"""Those of this process."""


def run_on_loop(loop: asyncio.AbstractEventLoop, work: Coroutine[object, object, T]) -> T:
    """Run a coroutine on fsspec's loop from another thread."""
    future = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def close_client(stale: S3Client) -> None:
    """Close a client and its connections, in the process where it was made."""
    stale.pool.close()
    if stale.pid != os.getpid() or not stale.loop.is_running():
        return

    async def close() -> None:
        await stale.client.close()

    with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
        asyncio.run_coroutine_threadsafe(close(), stale.loop).result(_CLOSE_SECONDS)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=CLIENTS.forget)
atexit.register(CLIENTS.close)
