"""A place to save to for the time of a run: a sink of its own, a directory, or one below the user's URL.

Whatever is made here is gone afterwards, and nothing else is: at the user's URL that is one directory with a name of
its own, deleted by its full name.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from pydantic import JsonValue

from dcpfs.storage.location import Location, redact_text
from dcpfs.storage.translate import classify

from .files import remove
from .settings import PACKAGE_ROOT, PLACE_PREFIX, Link, Setting, Target

__all__ = ["open_place", "start_proxy", "start_sink"]

logger = logging.getLogger(__name__)
_TMPFS = "/dev/shm"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@contextlib.contextmanager
def open_place(
    setting: Setting,
    disk_directory: Path | None,
    reserve_bytes: int,
    *,
    link: Link | None = None,
    url: str | None = None,
    storage_options: Mapping[str, object] | None = None,
) -> Iterator[Target]:
    """Yield where checkpoints of a run go.

    Args:
        setting: The kind of place.
        disk_directory: Directory on the device to measure; None: the system's temporary directory.
        reserve_bytes: Object memory that the sink touches before the first request.
        link: How far away the server is to seem; None: as the setting has it. Given for a URL, even without any delay,
            requests are counted there, by the proxy.
        url: The user's, for that setting.
        storage_options: For that URL; what JSON can hold, since they go to other processes.

    Raises:
        ValueError: The setting lacks its URL, an option is of another kind, or there is no server that a link could be
            put in front of.
    """
    if setting is Setting.URL:
        if url is None:
            raise ValueError("The setting url needs a URL; name one, such as s3://bucket/scratch")
        options = _plain(storage_options or {})
        with _open_url(url, _with_endpoint(url, options), link) as target:
            yield target
        return
    if setting.is_s3:
        latency_ms = setting.latency_ms if link is None else link.latency_ms
        rate = setting.mbps_per_connection if link is None else link.mb_per_second_per_connection
        with start_sink(latency_ms, rate, reserve_bytes) as port:
            yield Target(setting=setting, path="run", port=port)
        return
    if link is not None and link != Link():
        raise ValueError(f"The setting {setting.value} has no server, so nothing can be put in front of one")
    if setting is Setting.MEMORY:
        yield Target(setting=setting, path=f"/{PLACE_PREFIX}run")
        return
    parent = _TMPFS if setting is Setting.TMPFS else disk_directory
    directory = tempfile.mkdtemp(prefix=PLACE_PREFIX, dir=parent)
    try:
        yield Target(setting=setting, path=directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def start_sink(latency_ms: float, mbps_per_connection: float, reserve_bytes: int) -> Iterator[int]:
    """Run a sink in a process of its own and yield its port."""
    arguments = ["--latency-ms", str(latency_ms), "--mbps-per-connection", str(mbps_per_connection)]
    with _start("sink", [*arguments, "--reserve-mib", str(reserve_bytes >> 20)]) as port:
        yield port


@contextlib.contextmanager
def start_proxy(host: str, port: int, link: Link) -> Iterator[int]:
    """Run a proxy in front of a server, in a process of its own, and yield its port on 127.0.0.1."""
    arguments = ["--host", host, "--port", str(port), "--latency-ms", str(link.latency_ms)]
    with _start("proxy", [*arguments, "--mbps-per-connection", str(link.mb_per_second_per_connection)]) as own:
        yield own


@contextlib.contextmanager
def _start(module: str, arguments: Sequence[str]) -> Generator[int, None, None]:
    command = [sys.executable, "-m", f"{__package__}.{module}", *arguments]
    # It ends with its stdin, so it goes even when this process is killed.
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=PACKAGE_ROOT)
    try:
        if process.stdout is None or not (line := process.stdout.readline()):
            raise RuntimeError(f"the {module} did not start")
        yield int(json.loads(line)["port"])
    finally:
        process.communicate(timeout=30)


# --- the user's URL


def _plain(options: Mapping[str, object]) -> dict[str, JsonValue]:
    try:
        plain: dict[str, JsonValue] = json.loads(json.dumps(dict(options)))
    except TypeError:
        names = ", ".join(sorted(map(str, options)))
        raise ValueError(f"Storage options go to other processes as JSON, which can't hold one of {names}") from None
    return plain


def _with_endpoint(url: str, options: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """The options with the endpoint that environment or profile name, which some clients of S3 know nothing of.

    Those would go to Amazon's own instead: another store would be measured, and written to.
    """
    given = options.get("client_kwargs")
    if (
        Location(url).scheme != "s3"
        or "endpoint_url" in options
        or (isinstance(given, dict) and "endpoint_url" in given)
        or importlib.util.find_spec("botocore") is None
    ):
        return options
    from botocore.configprovider import ConfiguredEndpointProvider
    from botocore.session import Session

    session = Session(profile=options.get("profile"))
    if session.get_config_variable("ignore_configured_endpoint_urls"):
        return options
    endpoint = ConfiguredEndpointProvider(session.full_config, session.get_scoped_config(), "s3").provide()
    return {**options, "endpoint_url": endpoint} if endpoint else options


@contextlib.contextmanager
def _open_url(url: str, options: dict[str, JsonValue], link: Link | None) -> Generator[Target, None, None]:
    with contextlib.ExitStack() as stack:
        target = Target(
            setting=Setting.URL, path=f"{PLACE_PREFIX}{uuid.uuid4().hex[:12]}", root=Location(url).url, options=options
        )
        if link is not None:
            server = _server_of(url, options)
            if server is None:
                raise ValueError(
                    f"Can't put a link in front of {redact_text(url)}: neither it nor its options name an http server "
                    "on this machine; leave out latency and rate"
                )
            host, port = server
            own = stack.enter_context(start_proxy(host, port, link))
            target = target.model_copy(
                update={
                    "port": own,
                    "root": _moved(target.root, server, own),
                    "options": _moved(options, server, own),
                    "direct_root": target.root,
                    "direct_options": options,
                }
            )
        try:
            yield target
        finally:
            _leave(target.direct())


def _leave(target: Target) -> None:
    """Delete the directory of a run. That it can't be deleted takes nobody's figures, and hides no other error."""
    try:
        remove(target)
    except Exception as error:  # noqa: BLE001 - told, with what is left to do
        place = Location(target.url, target.storage_options())
        told = classify(error, verb="delete", target=place.redacted, scrub=place.scrub).error
        logger.warning("%s (what the benchmark has written there may be left: delete it by hand)", told)


def _server_of(url: str, options: JsonValue) -> tuple[str, int] | None:
    """Host and port of the first plain HTTP server on loopback that a URL or its options name."""
    if isinstance(options, dict):
        found = [_server_of(url, each) for each in options.values()] or [None]
        return next((each for each in found if each is not None), None) or _address_of(url)
    return _address_of(options) if isinstance(options, str) else None


def _address_of(text: str) -> tuple[str, int] | None:
    if not text.startswith("http://"):
        return None
    parts = urlsplit(text)
    return (parts.hostname, parts.port or 80) if parts.hostname in _LOOPBACK else None


def _moved(value: JsonValue, server: tuple[str, int], port: int) -> JsonValue:
    """The same with the proxy's port for the server's."""
    if isinstance(value, dict):
        return {name: _moved(each, server, port) for name, each in value.items()}
    if isinstance(value, str) and _address_of(value) == server:
        parts = urlsplit(value)
        user, at, _ = parts.netloc.rpartition("@")
        return urlunsplit(parts._replace(netloc=f"{user}{at}127.0.0.1:{port}"))
    return value
