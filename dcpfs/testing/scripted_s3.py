"""An S3 server inside the test, that checks every signature, records every request and fails as told.

Problem: whether a store retries, aborts, verifies and signs as it should shows only in the requests it sends when
something goes wrong at a chosen byte. A real server won't go wrong on demand, and a patched client proves nothing
about what is on the wire.

Way taken: a small HTTP/1.1 server, a thread a connection, over objects in memory. It is strict by default (SigV4,
signed headers, checksums, part order, buckets that nobody creates), so that passing here means something, and
scripted: `fail` takes what shall happen (`dcpfs.testing.s3_faults`), to which requests, how often and when.

Flow: ``with ScriptedS3Server() as server:`` → run the code under test on ``server.url()`` with
``server.storage_options`` → ``server.fail("UploadPart", slow_down(), times=2)`` → look at ``server.requests(...)``,
``server.objects``, ``server.open_uploads()``, ``server.hosts()``.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import ssl
import threading
from datetime import datetime, timedelta, timezone
from types import TracebackType
from typing import TYPE_CHECKING
from urllib.parse import unquote

from dcpfs.testing.http_exchange import Connection, Head, Response
from dcpfs.testing.s3_exchange import DroppedError, Exchange, S3Request, operation_of
from dcpfs.testing.s3_faults import Action, Fault, Match
from dcpfs.testing.s3_objects import S3Error, S3Objects, Upload
from dcpfs.testing.s3_service import Dialect, Service, error_response, plain_body
from dcpfs.testing.s3_signature import Credential, SignatureError, access_key_of, verify
from dcpfs.testing.tls import TlsAuthority

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ScriptedS3Server"]

_VIRTUAL_HOST = ".s3.localhost"


class ScriptedS3Server:
    """A scripted S3 server on loopback with one bucket. A context manager; thread-safe.

    Args:
        bucket: The bucket that exists.
        dialect: In what it differs from S3.
        verify_signatures: Refuse what is not signed right.
        minimum_part_bytes: Smallest part but the last; S3 asks for 5 MiB.
        tls: Speak TLS with a certificate of this authority.

    Attributes:
        objects: The state; open to the test.
        access_key: The identity in `storage_options`.
        secret_key: Its secret.
        clock_skew_seconds: How far the server's clock is ahead of the machine's.
    """

    def __init__(
        self,
        *,
        bucket: str = "dcpfs",
        dialect: Dialect | None = None,
        verify_signatures: bool = True,
        minimum_part_bytes: int = 0,
        tls: TlsAuthority | None = None,
    ) -> None:
        self.bucket = bucket
        self.dialect = dialect or Dialect()
        self.objects = S3Objects([bucket], minimum_part_bytes=minimum_part_bytes)
        self.access_key = f"SCRIPTED{secrets.token_hex(6).upper()}"
        self.secret_key = secrets.token_hex(20)
        self.clock_skew_seconds = 0.0
        self._credentials = {self.access_key: Credential(self.secret_key)}
        self._calls_until_expiry: dict[str, int] = {}
        self._verify = verify_signatures
        self._service = Service(self.dialect)
        self._tls = tls
        self._lock = threading.Lock()
        self._requests: list[S3Request] = []
        self._faults: list[Fault] = []
        self._connections: set[Connection] = set()
        self._threads: list[threading.Thread] = []
        self._accepted = 0
        self._stopping = threading.Event()
        self._listener: socket.socket | None = None

    # -- life ------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self._start(self._accept, self._listener)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        for fault in list(self._faults):
            fault.release()
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        with self._lock:
            connections, threads = list(self._connections), list(self._threads)
        for connection in connections:
            connection.interrupt()
        for thread in threads:
            thread.join(10)

    @property
    def port(self) -> int:
        """The port it listens on."""
        if self._listener is None:
            raise RuntimeError("ScriptedS3Server is not running: use it as a context manager")
        return int(self._listener.getsockname()[1])

    @property
    def endpoint_url(self) -> str:
        """Endpoint by address: clients put the bucket into the path."""
        return f"{self._scheme}://127.0.0.1:{self.port}"

    @property
    def virtual_endpoint_url(self) -> str:
        """Endpoint by name: clients put the bucket before it. Its names resolve under `LoopbackOnly`."""
        return f"{self._scheme}://s3.localhost:{self.port}"

    @property
    def _scheme(self) -> str:
        return "http" if self._tls is None else "https"

    @property
    def storage_options(self) -> dict[str, object]:
        """Options as s3fs takes them; a fresh dict."""
        client: dict[str, object] = {"region_name": self.dialect.region}
        if self._tls is not None:
            client["verify"] = self._tls.ca_path
        return {
            "key": self.access_key,
            "secret": self.secret_key,
            "endpoint_url": self.endpoint_url,
            "client_kwargs": client,
        }

    def url(self, path: str = "") -> str:
        """URL of a name in the bucket."""
        return f"s3://{self.bucket}/{path}"

    # -- script ----------------------------------------------------------------------------------------------

    def fail(self, match: Match, action: Action, *, times: int | None = 1, after: int = 0) -> Fault:
        """Have something go wrong. Of several faults that match, the one given first acts.

        Args:
            match: An operation's name, ``*``, ``Connect`` (a new connection is reset), or a predicate.
            action: What happens.
            times: How many times; None: until the fault is released.
            after: How many matching requests pass before.
        """
        fault = Fault(match, action, times=times, after=after)
        with self._lock:
            self._faults.append(fault)
        return fault

    def accept_credential(self, access_key: str, secret_key: str, session_token: str | None = None) -> None:
        """Know an identity; one of that name is replaced and no longer expired."""
        with self._lock:
            self._credentials[access_key] = Credential(secret_key, session_token)
            self._calls_until_expiry.pop(access_key, None)

    def expire_credential(self, access_key: str, *, after: int = 0) -> None:
        """Answer ExpiredToken to an identity, after so many requests more."""
        with self._lock:
            self._calls_until_expiry[access_key] = after

    # -- what happened ---------------------------------------------------------------------------------------

    def requests(
        self, operation: str | None = None, *, method: str | None = None, key: str | None = None
    ) -> list[S3Request]:
        """Requests so far in order, those that failed included."""
        with self._lock:
            found = list(self._requests)
        return [
            one
            for one in found
            if operation in (None, one.operation) and method in (None, one.method) and key in (None, one.key)
        ]

    def operations(self) -> list[str]:
        """Names of the operations so far, in order."""
        return [one.operation for one in self.requests()]

    def forget(self) -> None:
        """Empty the record."""
        with self._lock:
            self._requests.clear()

    def reset_faults(self) -> None:
        """Let nothing fail any more."""
        with self._lock:
            faults, self._faults = self._faults, []
        for fault in faults:
            fault.release()

    def reset(self) -> None:
        """Forget requests, faults, objects and uploads; connections and credentials stay."""
        self.reset_faults()
        self.forget()
        self.objects.clear()

    def hosts(self) -> set[str]:
        """Host headers seen: whom clients took this server for."""
        return {one.host for one in self.requests()}

    def open_uploads(self) -> list[Upload]:
        """Multipart uploads that nobody completed or aborted."""
        return self.objects.uploads()

    def stored_keys(self) -> list[str]:
        """Names of the bucket's objects."""
        return sorted(self.objects.check_bucket(self.bucket))

    def read(self, key: str) -> bytes:
        """An object's content."""
        return self.objects.get(self.bucket, key).joined()

    def write(self, key: str, content: bytes) -> None:
        """Put an object without a request."""
        self.objects.put(self.bucket, key, (content,))

    @property
    def connections(self) -> int:
        """Connections accepted so far."""
        return self._accepted

    # -- service ---------------------------------------------------------------------------------------------

    def _start(self, work: object, *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments, name="scripted-s3", daemon=True)  # type: ignore[arg-type] # narrowed by the callers
        with self._lock:
            self._threads = [one for one in self._threads if one.is_alive()] + [thread]
            thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while not self._stopping.is_set():
            try:
                accepted, _ = listener.accept()
            except OSError:
                return  # closed
            number = self._accepted
            self._accepted += 1
            self._start(self._serve_connection, accepted, number)

    def _serve_connection(self, accepted: socket.socket, number: int) -> None:
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connect = S3Request(-1, number, "Connect", "", "", Head("CONNECT", "", "", {}))
        if self._take_fault(connect) is not None:
            Connection(accepted, number).reset()
            return
        try:
            if self._tls is not None:
                accepted = self._tls.context.wrap_socket(accepted, server_side=True)
        except (OSError, ssl.SSLError):
            accepted.close()  # the client does not trust this authority, or went away
            return
        connection = Connection(accepted, number)
        with self._lock:
            self._connections.add(connection)
        try:
            while not self._stopping.is_set():
                head = connection.read_head()
                if head is None or not self._serve(connection, head):
                    return
        except (DroppedError, OSError, ValueError):
            return  # broken off by the script, by the client, or by both ends' disagreement about HTTP
        finally:
            connection.close()
            with self._lock:
                self._connections.discard(connection)

    def _take_fault(self, request: S3Request) -> Fault | None:
        with self._lock:
            faults = list(self._faults)
        return next((fault for fault in faults if fault.take(request)), None)

    def _serve(self, connection: Connection, head: Head) -> bool:
        """Serve one request; True while the connection can take another."""
        bucket, key = self._address(head)
        with self._lock:
            request = S3Request(
                order=len(self._requests),
                connection=connection.number,
                operation=operation_of(head, bucket, key),
                bucket=bucket,
                key=key,
                head=head,
                access_key=access_key_of(head),
            )
            self._requests.append(request)
        exchange = Exchange(request, head, connection, self.objects, self._wait)
        fault = self._take_fault(request) or _NO_FAULT
        fault.action.before_body(exchange, fault)
        raw = connection.read_body(head)
        request.body_bytes = len(raw)
        response = self._respond(exchange, fault, raw)
        request.status = response.status
        fault.action.send(exchange, fault, response)
        return head.headers.get("connection", "").lower() != "close"

    def _respond(self, exchange: Exchange, fault: Fault, raw: bytearray) -> Response:
        try:
            self._authenticate(exchange.head, raw)
            exchange.body = plain_body(exchange, raw, self.dialect.trailers)
        except (SignatureError, S3Error) as error:
            return self._stamped(error_response(exchange, error.status, error.code, str(error)))
        try:
            response = fault.action.before_effect(exchange, fault)
            if response is None:
                response = fault.action.after_effect(exchange, fault, self._service.serve(exchange))
        except S3Error as error:  # what the hook looked for is gone: another request has ended the upload
            response = error_response(exchange, error.status, error.code, str(error), error.headers)
        return self._stamped(response)

    def _stamped(self, response: Response) -> Response:
        now = self._now().strftime("%a, %d %b %Y %H:%M:%S GMT")
        headers = {"Server": "ScriptedS3", "Date": now, "x-amz-request-id": secrets.token_hex(8).upper()}
        return Response(response.status, {**headers, **response.headers}, response.body, response.send_body)

    def _now(self) -> datetime:
        return datetime.now(timezone.utc) + timedelta(seconds=self.clock_skew_seconds)

    def _authenticate(self, head: Head, raw: bytearray) -> None:
        key = access_key_of(head)
        with self._lock:
            credentials = dict(self._credentials)
            left = self._calls_until_expiry.get(key or "")
            if left:
                self._calls_until_expiry[key or ""] = left - 1
        if left == 0:
            raise SignatureError(400, "ExpiredToken", "The provided token has expired.")
        if self._verify:
            verify(head, raw, credentials, region=self.dialect.region, now=self._now())

    def _wait(self, event: threading.Event) -> None:
        event.wait()
        if self._stopping.is_set():
            raise DroppedError

    def _address(self, head: Head) -> tuple[str, str]:
        host = head.headers.get("host", "").partition(":")[0]
        path = head.raw_path.lstrip("/") if not head.raw_path.startswith("//") else head.raw_path[1:]
        if host.endswith(_VIRTUAL_HOST):
            return host.removesuffix(_VIRTUAL_HOST), unquote(path)
        bucket, _, key = path.partition("/")
        return unquote(bucket), unquote(key)


_NO_FAULT = Fault("*", Action(), times=None)
