"""The S3 client of s3fs, with its event loop, its options and its life in one place.

Problem: who may read a bucket, where it is and how it is addressed is a world of its own: keys, profiles, roles,
SSO, instance credentials that renew themselves, endpoint rules, path or host style, server-side encryption. s3fs
and botocore know it, and users have configured it there. But s3fs instances are cached with their old tokens, list
from caches, retry on their own, and break in a forked child.

Way taken: one client, built by s3fs from the options an s3fs user gives, on fsspec's event loop, used by nobody
else and kept for a later store (`dcpfs.storage.s3_clients`). Its operations are called directly, each once: retries
belong to `dcpfs.storage.retrying`. A client whose credentials expired is replaced as a whole. In a forked child
everything is built anew, since neither the loop's thread nor the sockets exist there.

Flow: `S3Session.call` for what is small, prepared and understood by botocore and sent over the same connections
(`dcpfs.storage.s3_relay`); `S3Session.client` for `dcpfs.storage.s3_signing`, and `S3Session.pool` for
`dcpfs.storage.s3_transfer`, which move what is large.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import ssl
import threading
from collections.abc import Mapping, Sequence
from typing import Any, cast
from urllib.parse import urlsplit

from dcpfs.config import RetryConfig
from dcpfs.errors import ConfigError
from dcpfs.storage.location import Location
from dcpfs.storage.s3_answers import headers_of, is_text_404, not_the_stores
from dcpfs.storage.s3_clients import CLIENTS, S3Client, client_key, close_client, run_on_loop
from dcpfs.storage.s3_http import HttpPool, Proxy
from dcpfs.storage.s3_redirects import refuse_other_domains, without_redirects
from dcpfs.storage.s3_relay import Relay, send_by_caller

__all__ = ["S3Session", "split_bucket"]

_BUCKET_ARN = re.compile(
    r"(arn:aws[^:/]*:s3-outposts:[^:/]*:\d{12}:outpost[/:][^/:]+[/:](?:bucket|accesspoint)[/:][^/:]+"
    r"|arn:aws[^:/]*:s3(?:-object-lambda)?:[^:/]*:\d{12}:accesspoint[/:][^/]+)(?:/(.*))?$",
    re.DOTALL,
)
_CHECKSUMS = ("CRC32", "SHA1", "SHA256")
"""Those that can be computed without a package of its own."""


def split_bucket(path: str) -> tuple[str, str]:
    """Split ``bucket/key`` literally; the bucket can be the ARN of an access point."""
    match = _BUCKET_ARN.match(path)
    if match:
        return match.group(1), match.group(2) or ""
    bucket, _, key = path.partition("/")
    return bucket, key


class S3Session:
    """An S3 client for the bucket of a location. Thread-safe; usable again in a forked child.

    Args:
        location: An ``s3://`` URL with the options of s3fs.
        retry: Its time-outs are the client's, where the user's ``config_kwargs`` set none.
        connections: Requests in flight that the client must bear.
    """

    def __init__(self, location: Location, retry: RetryConfig, connections: int) -> None:
        self.bucket, self.prefix = split_bucket(location.path)
        self._location = location
        self._retry = retry
        self._connections = connections
        self._wanted_checksum = _wanted_checksum(location)
        self._current: S3Client | None = None
        self._key: str | None = None
        self._trusted = True
        self._generation = 0
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._retired: list[S3Client] = []
        self._closed = False

    # -- calls

    @property
    def generation(self) -> int:
        """Changes when signatures made so far should not be used any more."""
        return self._generation

    @property
    def client(self) -> S3Client:
        """The client of this process, made on first use."""
        return self._open()

    @property
    def pool(self) -> HttpPool:
        """The connections over which signed requests go."""
        return self._open().pool

    @property
    def config(self) -> Any:
        """Botocore's merged configuration of the client."""
        return self._open().client.meta.config

    @property
    def checksum_algorithm(self) -> str | None:
        """Of the checksum that goes with what is written, where the user's options ask for one."""
        if self._wanted_checksum is not None:
            return self._wanted_checksum
        return "CRC32" if self.config.request_checksum_calculation == "when_supported" else None

    @property
    def is_amazon(self) -> bool:
        """The endpoint is Amazon's own."""
        host = urlsplit(self.client.client.meta.endpoint_url).hostname or ""
        return host.endswith((".amazonaws.com", ".amazonaws.com.cn"))

    def call(self, operation: str, **parameters: object) -> dict[str, object]:
        """Run one operation of the client, e.g. ``head_object``, once.

        The bucket and the user's ``s3_additional_kwargs`` that the operation knows are added.

        Raises:
            botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError: As botocore raises them.
        """
        current = self._open()
        arguments = self.arguments(operation, parameters)

        async def work() -> dict[str, object]:
            return cast("dict[str, object]", await getattr(current.client, operation)(**arguments))

        return Relay(current.loop, current.pool).run(work())

    def call_each(
        self, operation: str, each: Sequence[Mapping[str, object]], *, concurrency: int
    ) -> list[BaseException | None]:
        """Run one operation many times, some at once; returns the exception or None of each."""
        current = self._open()
        arguments = [self.arguments(operation, parameters) for parameters in each]

        async def run() -> list[BaseException | None]:
            gate = asyncio.Semaphore(concurrency)

            async def one(argument: dict[str, object]) -> None:
                async with gate:
                    await getattr(current.client, operation)(**argument)

            done = await asyncio.gather(*map(one, arguments), return_exceptions=True)
            return [_outcome(result) if isinstance(result, BaseException) else None for result in done]

        return run_on_loop(current.loop, run())

    def refresh(self, generation: int) -> None:
        """Replace the client, looking credentials up anew, unless someone did since ``generation``."""
        with self._lock:
            if self._current is not None and self._generation == generation:
                # Others may be in mid-call with it: it is closed at the end, and its idle connections now.
                self._current.pool.close()
                self._retired.append(self._current)
                self._current = None
                self._generation += 1

    def outdate(self) -> None:
        """Have all requests signed anew, e.g. because the bucket turned out to be in another region."""
        with self._lock:
            self._generation += 1

    def note_bucket(self) -> None:
        """Remember, as long as the client lives, that the bucket exists."""
        current = self._current
        if current is not None:
            current.bucket_seen = True

    def distrust(self) -> None:
        """Have the client closed with this session, not kept: something went wrong, and it may have to do with it."""
        self._trusted = False

    def close(self) -> None:
        """Leave the client to a later session, or close it. Idempotent."""
        with self._lock:
            self._closed = True
            stale, self._retired = self._retired, []
            current, self._current = self._current, None
        for client in stale:
            close_client(client)
        if current is not None:
            CLIENTS.keep(self._key if self._trusted else None, current)

    # -- the client

    def arguments(self, operation: str, parameters: Mapping[str, object]) -> dict[str, object]:
        """Add the bucket, and those of the user's ``s3_additional_kwargs`` that the operation takes."""
        options = self._location.storage_options
        extra = dict(cast("Mapping[str, object]", options.get("s3_additional_kwargs") or {}))
        if options.get("requester_pays"):
            extra["RequestPayer"] = "requester"
        known = _input_members(self._open().client, operation)
        arguments = {name: value for name, value in extra.items() if name in known}
        arguments.update(parameters)
        arguments["Bucket"] = self.bucket
        return arguments

    def _open(self) -> S3Client:
        with self._lock if self._pid == os.getpid() else self._after_fork():
            if self._closed:
                raise ConfigError(f"The store of {self._location} is closed; open a new one")
            if self._current is None:
                self._key = self._client_key()
                kept = CLIENTS.take(self._key) if not self._retired else None
                self._current = kept or self._build()
            return self._current

    def _after_fork(self) -> threading.Lock:
        """Start over in a forked child: the lock, the loop and the sockets belong to the parent."""
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._generation += 1
        if self._current is not None:
            # Kept, since its finalizer would wait for a loop that has no thread here.
            self._retired.append(self._current)
            self._current = None
        return self._lock

    def _client_key(self) -> str | None:
        retry = self._retry
        timeouts = (retry.connect_timeout_seconds, retry.read_timeout_seconds)
        return client_key(self.bucket, self._location.storage_options, *timeouts, self._connections)

    def _build(self) -> S3Client:
        from aiobotocore.session import AioSession
        from s3fs import S3FileSystem

        options = self._location.storage_options
        # These would change whose loop it runs on, or what it remembers; a store depends on neither.
        for name in ("asynchronous", "loop", "skip_instance_cache", "use_listings_cache"):
            options.pop(name, None)
        options["config_kwargs"] = self._config_defaults(
            cast("Mapping[str, object]", options.get("config_kwargs") or {})
        )
        options["default_cache_type"] = "none"
        try:
            filesystem = S3FileSystem(skip_instance_cache=True, use_listings_cache=False, **options)
        except (TypeError, ValueError) as error:
            raise self._refused(error) from None
        # What s3fs does not know it hands to the session, and drops it where the user brings one.
        unknown = filesystem.kwargs.keys() - inspect.signature(AioSession.__init__).parameters.keys()
        if unknown:
            raise ConfigError(
                f"Can't open {self._location}: s3fs knows no storage_options named {', '.join(sorted(unknown))}; "
                "correct or remove them (options of botocore's client belong in client_kwargs or config_kwargs)"
            )
        loop = cast("asyncio.AbstractEventLoop", filesystem.loop)

        async def connect() -> Any:
            await filesystem.set_session()
            return await filesystem.get_s3(self.bucket)

        try:
            client = run_on_loop(loop, connect())
        except TypeError as error:  # an argument that botocore does not know, or of a wrong type
            raise self._refused(error) from None
        # First in line, before a handler that takes the request for itself.
        client.meta.events.register_first("before-send.s3", refuse_other_domains(client.meta.endpoint_url))
        client.meta.events.register("before-send.s3", send_by_caller)
        return S3Client(client, loop, os.getpid(), self._pool(client, filesystem), filesystem)

    def _refused(self, error: Exception) -> ConfigError:
        return ConfigError(
            f"Can't open {self._location}: its storage_options are refused ({self._location.scrub(str(error))}); "
            "correct or remove what is named"
        )

    def _config_defaults(self, given: Mapping[str, object]) -> dict[str, object]:
        from aiobotocore.config import AioConfig
        from aiobotocore.httpsession import AIOHTTPSession

        settings: dict[str, object] = {
            "connect_timeout": self._retry.connect_timeout_seconds,
            "read_timeout": self._retry.read_timeout_seconds,
            "max_pool_connections": self._connections,
            "response_checksum_validation": "when_required",
            **given,
            # One retry policy, that of dcpfs.
            "retries": {"total_max_attempts": 1, "mode": "standard"},
        }
        if "AWS_REQUEST_CHECKSUM_CALCULATION" not in os.environ:
            # Stores other than AWS know no checksum trailers; sizes are checked after every upload instead.
            settings.setdefault("request_checksum_calculation", "when_required")
        if "http_session_cls" in inspect.signature(AioConfig).parameters:
            session_class = settings.get("http_session_cls", AIOHTTPSession)
            settings["http_session_cls"] = without_redirects(session_class)
        s3 = cast("Mapping[str, object]", given.get("s3") or {})
        settings["s3"] = {"payload_signing_enabled": False, **s3}
        return settings

    def _pool(self, client: Any, filesystem: Any) -> HttpPool:
        from botocore.httpsession import ProxyConfiguration, create_urllib3_context, get_cert_path
        from botocore.utils import get_environ_proxies

        config = client.meta.config
        verify = cast("Mapping[str, object]", filesystem.client_kwargs).get("verify")
        if verify is None:
            verify = filesystem.session.get_config_variable("ca_bundle")
        if verify is None:
            verify = os.environ.get("REQUESTS_CA_BUNDLE") or True

        def make_ssl_context() -> ssl.SSLContext:
            given = (config.connector_args or {}).get("ssl_context")
            if given is not None:
                return cast("ssl.SSLContext", given)
            context = cast("ssl.SSLContext", create_urllib3_context())
            if verify:
                context.verify_mode = ssl.CERT_REQUIRED
                context.check_hostname = True
                context.load_verify_locations(get_cert_path(verify))
            else:
                context.check_hostname = False
                context.verify_mode = ssl.CERT_NONE
            certificate = config.client_cert
            if isinstance(certificate, str):
                context.load_cert_chain(certificate)
            elif certificate:
                context.load_cert_chain(*certificate)
            context.set_alpn_protocols(["http/1.1"])
            return context

        def find_proxy(url: str) -> Proxy | None:
            proxies = config.proxies if config.proxies is not None else get_environ_proxies(url)
            found = ProxyConfiguration(proxies=proxies, proxies_settings=config.proxies_config)
            proxy_url = found.proxy_url_for(url)
            if not proxy_url:
                return None
            return Proxy(proxy_url, dict(found.proxy_headers_for(proxy_url)))

        return HttpPool(
            connect_timeout_seconds=float(config.connect_timeout),
            read_timeout_seconds=float(config.read_timeout),
            make_ssl_context=make_ssl_context,
            find_proxy=find_proxy,
        )


def _outcome(failure: BaseException) -> BaseException:
    """The failure of an operation. One without a code of the store's, though with a page, is not the store's."""
    response = getattr(failure, "response", None)
    if isinstance(response, Mapping) and is_text_404(response) and headers_of(response).get("content-length") != "0":
        return not_the_stores(404, "Not Found")
    return failure


def _wanted_checksum(location: Location) -> str | None:
    """The algorithm among the ``s3_additional_kwargs``.

    Raises:
        ConfigError: It is one that nobody here can compute.
    """
    extra = cast("Mapping[str, object]", location.storage_options.get("s3_additional_kwargs") or {})
    name = extra.get("ChecksumAlgorithm")
    if name is None or name in _CHECKSUMS:
        return name
    raise ConfigError(
        f"Can't open {location}: its storage_options ask for checksums of the algorithm {name!r}; give one of "
        f"{', '.join(_CHECKSUMS)}"
    )


def _input_members(client: Any, operation: str) -> frozenset[str]:
    name = client.meta.method_to_api_mapping[operation]
    shape = client.meta.service_model.operation_model(name).input_shape
    return frozenset(shape.members)
