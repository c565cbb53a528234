"""Opening the fsspec filesystem of a location, and what is known about it.

Problem: fsspec parses a URL again each time, and takes ``::`` or ``?`` in a name for syntax; it keeps
instances and listings for the life of a process, so what another process wrote is not seen; a missing package
is a bare ``ImportError``; and no filesystem says whether its ``close()`` publishes an object at once, or
whether half a file is visible while it is written.

Way taken: the links of a `Location` are opened one by one, each by its class, as a new instance without
listing cache. Options go where fsspec puts them: ``{"s3": {...}}`` to the link of that protocol, the rest to
the outermost. A cache (``simplecache::X``) is left out: what it holds can be another version of the object
than the one that is asked for; one between an archive and its store (``zip::filecache::X``) holds a copy of the
archive's file, and is made anew each time. A directory wrapper (``dir::X``) is dissolved into the path. What a protocol
can do stands in one table; for protocols that nobody listed, their class is looked at.

Flow: ``open_filesystem(location)`` → `OpenFilesystem`: instance, root path, `Traits`.
"""

from __future__ import annotations

import difflib
import enum
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dcpfs.errors import ConfigError, MissingBackendError
from dcpfs.storage.location import Location

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

__all__ = [
    "OpenFilesystem",
    "Publishing",
    "Traits",
    "filesystem_class",
    "listed_traits",
    "missing_backend",
    "open_filesystem",
    "overrides",
    "revive_event_loop",
    "traits_of",
    "uncached",
]

logger = logging.getLogger(__name__)

_EXTRAS: Mapping[str, str] = {
    "abfs": "azure", "abfss": "azure", "adl": "azure", "az": "azure",
    "gcs": "gcs", "gs": "gcs",
    "http": "http", "https": "http",
    "sftp": "sftp", "ssh": "sftp",
    "smb": "smb",
    "webdav": "webdav", "webdavs": "webdav",
}  # fmt: skip
"""Protocol to the extra of dcpfs that brings its package."""
_CACHES = frozenset({"blockcache", "cached", "filecache", "simplecache"})
_TRANSPARENT = _CACHES | {"dir"}
_GOOGLE = frozenset({"gcs", "gs"})
_WEB = frozenset({"http", "https"})
_SHELLS = frozenset({"sftp", "ssh"})
_HOSTED = frozenset({"arrow_hdfs", "ftp", "ftps", "hdfs", "sftp", "smb", "ssh", "webhdfs"})


class Publishing(enum.Enum):
    """How an object comes to be under its name."""

    NEVER = "never"
    """Read-only."""
    MEMORY = "memory"
    """A buffer of this process, put into a dictionary."""
    CLOSE = "close"
    """An object store: a put, or the close of a file object, makes the object appear whole."""
    MOVE = "move"
    """A directory tree: half a file is visible, so it is written under another name and moved."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What is known about a filesystem.

    Attributes:
        publishing: How objects appear.
        listable: Directories can be listed reliably.
        ranged_reads: A range costs a range, not the whole object.
        remote: Requests cost a round trip.
        atomic: A killed writer leaves the old object or the new one.
        serial: One call at a time: the client behind it is not thread-safe.
        refused: Characters that its client takes in a name for syntax: it would use another name.
    """

    publishing: Publishing
    listable: bool = True
    ranged_reads: bool = True
    remote: bool = True
    atomic: bool = True
    serial: bool = False
    refused: str = ""


_OBJECTS = Traits(Publishing.CLOSE)
_TREE = Traits(Publishing.MOVE)
_LOOSE_TREE = Traits(Publishing.MOVE, atomic=False)
_READ_ONLY = Traits(Publishing.NEVER)
_ARCHIVE = Traits(Publishing.NEVER, ranged_reads=False, serial=True)
_TRAITS: Mapping[str, Traits] = {
    "memory": Traits(Publishing.MEMORY, remote=False),
    **dict.fromkeys(("abfs", "abfss", "az"), replace(_OBJECTS, refused="\\?#")),
    **dict.fromkeys(("gcs", "gs", "hf", "oci", "oss", "s3", "s3a", "tos", "tosfs"), _OBJECTS),
    **dict.fromkeys(("sftp", "ssh"), _TREE),
    **dict.fromkeys(("file", "local"), replace(_TREE, remote=False)),
    "smb": replace(_LOOSE_TREE, refused='\\:*?"<>|'),
    **dict.fromkeys(("arrow_hdfs", "dbfs", "dropbox", "hdfs", "webdav", "webdavs", "webhdfs"), _LOOSE_TREE),
    **dict.fromkeys(("ftp", "ftps"), replace(_LOOSE_TREE, serial=True, refused="\r\n")),
    **dict.fromkeys(("http", "https"), replace(_READ_ONLY, listable=False)),
    **dict.fromkeys(("data", "git", "gist", "github"), replace(_READ_ONLY, ranged_reads=False)),
    "reference": _READ_ONLY,
    **dict.fromkeys(("libarchive", "tar", "zip"), _ARCHIVE),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class OpenFilesystem:
    """A filesystem of this process.

    Attributes:
        filesystem: The instance; nobody else has it.
        root: Path of the location in it, without trailing slash; may be empty.
        traits: What is known about it.
    """

    filesystem: AbstractFileSystem
    root: str
    traits: Traits


def filesystem_class(protocol: str, location: Location) -> type[AbstractFileSystem]:
    """The class that serves a protocol.

    Raises:
        ConfigError: Nobody knows the protocol.
        MissingBackendError: Its package is not installed.
    """
    from fsspec.registry import available_protocols, get_filesystem_class

    try:
        found: type[AbstractFileSystem] = get_filesystem_class(protocol)
    except ImportError as error:
        raise missing_backend(protocol, location, error) from error
    except ValueError:
        near = difflib.get_close_matches(protocol, available_protocols(), 3)
        hint = f"did you mean {', '.join(f'{name}://' for name in near)}?" if near else "install its package"
        raise ConfigError(
            f"Can't open {location}: no filesystem is known for the scheme {protocol}://; {hint}"
        ) from None
    return found


def missing_backend(protocol: str, location: Location, error: ImportError) -> MissingBackendError:
    """The error for a protocol whose package is not installed."""
    extra = _EXTRAS.get(protocol)
    reason = error.__cause__ if isinstance(error.__cause__, ImportError) else error
    remedy = f"run pip install 'dcpfs[{extra}]'" if extra else str(error)
    return MissingBackendError(
        f"Can't open {location}: the scheme {protocol}:// needs a package that is not installed "
        f"({location.scrub(str(reason))}); {remedy}"
    )


def uncached(location: Location) -> Location:
    """The location without caches and empty directory wrappers around it; the same when there are none."""
    links, options = location.components, location.storage_options
    dropped = 0
    while dropped < len(links) - 1 and _is_transparent(links[dropped]):
        options.pop(_protocol(links[dropped]), None)
        dropped += 1
    if not dropped:
        return location
    nested = {name: value for name, value in options.items() if isinstance(value, Mapping)}
    own = nested.pop(_protocol(links[dropped]), {})
    return Location("::".join(links[dropped:]), {**nested, **{str(name): value for name, value in own.items()}})


def _is_transparent(link: str) -> bool:
    protocol, _, path = link.partition("://")
    return protocol in _TRANSPARENT and not path


def listed_traits(location: Location) -> Traits | None:
    """What is known of a location by its scheme alone, without importing anything for it; None for others."""
    schemes = (_protocol(link) for link in uncached(location).components)
    return next((_TRAITS.get(scheme) for scheme in schemes if scheme != "dir"), None)


def traits_of(location: Location) -> Traits:
    """What is known about the filesystem of a location, without opening it.

    Raises:
        ConfigError: A scheme is unknown.
        MissingBackendError: A scheme's package is not installed.
    """
    links = uncached(location).components
    classes = [filesystem_class(_protocol(link), location) for link in links]
    for link, kind in zip(links, classes, strict=True):
        if _protocol(link) != "dir":
            traits = _TRAITS.get(_protocol(link)) or _guess(kind)
            if _protocol(link) in _SHELLS and not kind.async_impl:
                # paramiko's client loses answers when several threads ask; asyncssh's does not.
                traits = replace(traits, serial=True)
            if any(base.__module__.partition(".")[0] == "obstore" for base in kind.__mro__):
                # It takes a backslash for a slash.
                traits = replace(traits, refused="\\")
            return traits
    return _guess(classes[-1])


def open_filesystem(location: Location) -> OpenFilesystem:
    """Open a new filesystem instance. It may connect.

    Raises:
        ConfigError: A scheme is unknown or the filesystem refuses the options.
        MissingBackendError: A scheme's package is not installed.
        Exception: What the filesystem raises when it can't connect.
    """
    traits = traits_of(location)
    plain = uncached(location)
    revive_event_loop()
    if _protocol(location.components[0]) in _CACHES:
        logger.info("Reading and writing %s past its cache, which can hold another version", location)
    options = plain.storage_options
    links = plain.components
    path = ""
    inner: dict[str, object] = {}
    filesystem: AbstractFileSystem | None = None
    for index in reversed(range(len(links))):
        link, protocol = links[index], _protocol(links[index])
        own = options.pop(protocol, {})
        arguments = _mapping(own)
        if protocol in _CACHES:
            protocol, arguments = "simplecache", {}
        kind = filesystem_class(protocol, location)
        if index == 0:
            arguments |= options
        elif protocol in _WEB:
            # A range of what is compressed is another, and an archive is read by ranges.
            arguments["headers"] = {"Accept-Encoding": "identity", **_mapping(arguments.get("headers"))}
        link_path = _path(kind, protocol, link)
        arguments = {**_url_arguments(kind, protocol, link), **arguments, **inner}
        arguments["skip_instance_cache"] = True
        if index == 0:
            filesystem = _instance(_chosen_class(kind, protocol, arguments), protocol, arguments, location)
        if not link_path and index < len(links) - 1 and protocol != "dir" and _is_chained(kind):
            link_path = path
        inner = {"target_protocol": protocol, "target_options": arguments, "fo": link_path}
        path = link_path
    if filesystem is None:  # pragma: no cover - a location has at least one link
        raise ConfigError(f"Can't open {location}")
    return _dissolved(filesystem, path, traits)


def revive_event_loop() -> None:
    """In a forked child, let fsspec start its own event loop: older versions wait for the parent's for ever."""
    from fsspec import asyn

    if asyn.iothread[0] is not None and not asyn.iothread[0].is_alive():
        asyn.reset_lock()


def _instance(
    kind: type[AbstractFileSystem], protocol: str, arguments: Mapping[str, object], location: Location
) -> AbstractFileSystem:
    try:
        return kind(**arguments)
    except ImportError as error:
        raise missing_backend(protocol, location, error) from error
    except (TypeError, ValueError) as error:
        if isinstance(error.__cause__, OSError):
            # How the client of SMB says that it can't connect.
            raise error.__cause__ from error
        raise ConfigError(
            f"Can't open {location}: the filesystem refuses its storage_options ({location.scrub(str(error))})"
        ) from None


def _chosen_class(
    kind: type[AbstractFileSystem], protocol: str, arguments: Mapping[str, object]
) -> type[AbstractFileSystem]:
    """The class of a protocol, or one in its place that does what is needed here."""
    if kind.__module__ == "fsspec.implementations.smb":
        from dcpfs.storage.smb_filesystem import SmbFilesystem

        return SmbFilesystem
    return _without_control_plane(kind, protocol, arguments)


def _without_control_plane(
    kind: type[AbstractFileSystem], protocol: str, arguments: Mapping[str, object]
) -> type[AbstractFileSystem]:
    """For an emulator of Google's store, the gcsfs class that asks nothing of the gRPC control plane.

    The other one asks it for the bucket's type before each request, waits for a minute where nobody answers, and
    does not remember that nobody did. The control plane speaks TLS only, so behind ``http://`` there is none.
    """
    endpoint = arguments.get("endpoint_url") or os.environ.get("STORAGE_EMULATOR_HOST") or ""
    if protocol not in _GOOGLE or not str(endpoint).lower().startswith("http://"):
        return kind
    plain = [base for base in kind.__mro__ if base.__module__ == "gcsfs.core" and base.__name__ == "GCSFileSystem"]
    return plain[0] if plain else kind


def _dissolved(filesystem: AbstractFileSystem, root: str, traits: Traits) -> OpenFilesystem:
    """Without directory wrappers around it, and with no listing cache in any layer."""
    from fsspec.implementations.dirfs import DirFileSystem

    while type(filesystem) is DirFileSystem:
        below = filesystem.path.rstrip("/")
        root = f"{below}/{root.lstrip('/')}" if root else below
        filesystem = filesystem.fs
    layer = filesystem
    while layer is not None:
        cache = getattr(layer, "dircache", None)
        if cache is not None and hasattr(cache, "use_listings_cache"):
            cache.use_listings_cache = False
        layer = getattr(layer, "fs", None)
    return OpenFilesystem(filesystem, root.rstrip("/"), traits)


def _mapping(value: object) -> dict[str, object]:
    return dict(value) if isinstance(value, Mapping) else {}


def _protocol(link: str) -> str:
    return "file" if link.startswith("/") else link.partition("://")[0]


def _path(kind: type[AbstractFileSystem], protocol: str, link: str) -> str:
    if "://" not in link:
        return link if link.startswith("/") else ""
    if protocol in _HOSTED:
        # fsspec would cut the path at "?".
        authority, slash, path = link.partition("://")[2].partition("/")
        return f"{slash}{path}" if authority or slash else ""
    return str(kind._strip_protocol(link))


def _url_arguments(kind: type[AbstractFileSystem], protocol: str, link: str) -> dict[str, object]:
    if "://" not in link:
        return {}
    if protocol in _HOSTED:
        link = "{}://{}/".format(protocol, link.partition("://")[2].partition("/")[0])
    return dict(kind._get_kwargs_from_urls(link))


def _is_chained(kind: type[AbstractFileSystem]) -> bool:
    from fsspec.implementations.chained import ChainedFileSystem

    return issubclass(kind, ChainedFileSystem)


def _guess(kind: type[AbstractFileSystem]) -> Traits:
    """For a class that nobody listed: one that brings its own move is taken for a directory tree."""
    from fsspec.asyn import AsyncFileSystem

    if any(overrides(kind, name) for name in ("mv", "_mv", "mv_file", "_mv_file")):
        return _LOOSE_TREE
    if issubclass(kind, AsyncFileSystem) or not overrides(kind, "_open"):
        return _OBJECTS
    return _LOOSE_TREE


def overrides(kind: type, name: str) -> bool:
    """True when a filesystem class brings its own method instead of fsspec's general one."""
    from fsspec import AbstractFileSystem
    from fsspec.asyn import AsyncFileSystem

    found = getattr(kind, name, None)
    general = (getattr(AsyncFileSystem, name, None), getattr(AbstractFileSystem, name, None))
    return found is not None and found not in general
