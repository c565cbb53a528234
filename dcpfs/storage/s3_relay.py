"""Small requests: prepared and understood by botocore, sent by the thread that waits for them.

Problem: botocore knows how to complete an upload or list a bucket and what the answers mean, but its asynchronous
transport keeps connections of its own, which a process opens anew beside those that carry the data, and its first
request costs 36 ms of CPU for a TLS context, also for plain HTTP.

Way taken: a handler of ``before-send``, botocore's last event before sending, hands the request to the calling
thread, which does nothing but wait, and gives botocore the answer that it received over the pool. Two transports
become one: the same connections, time-outs, proxies and trust for all requests. Nothing follows a redirect but
botocore.

Flow: ``Relay(loop, pool).run(coroutine)`` → botocore prepares and signs on the loop → `send_by_caller` → exchange in
the calling thread → botocore parses on the loop → the coroutine's result.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine, Mapping
from queue import SimpleQueue
from typing import Protocol, TypeVar

from dcpfs.storage.s3_answers import is_foreign, not_the_stores
from dcpfs.storage.s3_http import HttpPool, HttpRequest

__all__ = ["Relay", "send_by_caller"]

T = TypeVar("T")

_OURS = frozenset({"content-length", "expect", "host", "transfer-encoding"})
"""Headers that the pool sets itself, or that only make sense for botocore's own sending."""


class _Request(Protocol):
    method: str
    url: str
    headers: Mapping[str, str | bytes]
    body: object


class _Reader(Protocol):
    def read(self) -> bytes | str: ...


class _Answer:
    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self._body = body

    async def read(self) -> bytes:
        return self._body


_Errand = tuple[_Request, "asyncio.Future[_Answer]"]

_relay: contextvars.ContextVar[Relay | None] = contextvars.ContextVar("dcpfs_s3_relay", default=None)


class Relay:
    """Runs one call of a client. Used once, by one thread, which must not be the loop's."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pool: HttpPool) -> None:
        self._loop = loop
        self._pool = pool
        self._errands: SimpleQueue[_Errand | None] = SimpleQueue()

    def run(self, work: Coroutine[object, object, T]) -> T:
        """Run a coroutine on the loop, and send what it wants to send from here."""

        async def relayed() -> T:
            token = _relay.set(self)
            try:
                return await work
            finally:
                _relay.reset(token)

        future = asyncio.run_coroutine_threadsafe(relayed(), self._loop)
        future.add_done_callback(lambda _: self._errands.put(None))
        try:
            while (errand := self._errands.get()) is not None:
                self._send(*errand)
            return future.result()
        except BaseException:
            future.cancel()
            raise
        finally:
            del future  # which holds the error, which holds this call

    async def ask(self, request: _Request) -> _Answer:
        """On the loop: have the waiting thread send a request."""
        answer: asyncio.Future[_Answer] = self._loop.create_future()
        self._errands.put((request, answer))
        return await answer

    def _send(self, request: _Request, answer: asyncio.Future[_Answer]) -> None:
        try:
            body = _bytes(request.body)
            with self._pool.exchange(_sendable(request), [memoryview(body)] if body else []) as response:
                content = response.read()
            if is_foreign(response.status, content):
                raise not_the_stores(response.status, response.reason)
            result = _Answer(response.status, dict(response.getheaders()), content)
        except Exception as failure:  # noqa: BLE001 - handed over to the coroutine that wanted to send
            self._loop.call_soon_threadsafe(_fail, answer, failure)
        else:
            self._loop.call_soon_threadsafe(_settle, answer, result)


async def send_by_caller(request: _Request, **_: object) -> object:
    """A handler for ``before-send``: answers requests of calls that a `Relay` runs, and no others."""
    relay = _relay.get()
    if relay is None:
        return None
    from aiobotocore.awsrequest import AioAWSResponse

    answer = await relay.ask(request)
    return AioAWSResponse(request.url, answer.status, answer.headers, answer)


def _settle(answer: asyncio.Future[_Answer], result: _Answer) -> None:
    if not answer.done():
        answer.set_result(result)


def _fail(answer: asyncio.Future[_Answer], failure: Exception) -> None:
    if not answer.done():
        answer.set_exception(failure)


def _sendable(request: _Request) -> HttpRequest:
    headers = {
        name: value.decode("utf-8") if isinstance(value, bytes) else str(value)
        for name, value in request.headers.items()
        if name.lower() not in _OURS
    }
    return HttpRequest(request.method, request.url, {"Accept-Encoding": "identity", **headers})


def _bytes(body: object) -> bytes:
    if body is None:
        return b""
    if isinstance(body, str):
        return body.encode("utf-8")
    if isinstance(body, bytes | bytearray | memoryview):
        return bytes(body)
    reader: _Reader = body  # type: ignore[assignment]  # botocore's bodies are text, bytes or files
    return _bytes(reader.read())
