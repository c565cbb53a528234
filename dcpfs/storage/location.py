"""Where bytes are: a URL or local path, with the options to open it, as one picklable value.

Problem: a URL that goes through ``pathlib`` loses a slash (``s3:/bucket/x``) and becomes a local directory;
one that goes through ``urllib`` loses everything from ``?`` or ``#`` on, which are ordinary characters of
object names; a relative path means something else after a ``chdir``; a filesystem object instead of a URL
does not survive a fork; and a URL or option that is printed can show a password.

Way taken: text rules only, no client library, no access. A URL is taken apart just as far as needed to find
the end that a child's name belongs to, and names are literal. What is printed is always the redacted text;
options are never printed at all.

Flow: ``Location(url, options)`` refuses what can't be meant → ``join(name)`` walks down → a store of this
process opens ``path`` with ``storage_options`` → errors and logs show ``str(location)``.

Chained URLs of fsspec (``simplecache::s3://b/x``, ``zip://sub::s3://b/a.zip``) are split at ``::`` only while
the left side is a wrapper, so that ``::`` in the name of an object stays what it is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import NoReturn
from urllib.parse import quote

from dcpfs.errors import ConfigError

__all__ = ["Location", "check_name", "redact_text"]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+._-]*)://")
_ALIASES = {"local": "file", "s3a": "s3"}
_BUCKETS = frozenset(
    {
        "abfs",
        "abfss",
        "adl",
        "az",
        "gcs",
        "gs",
        "oci",
        "ocilake",
        "oss",
        "s3",
        "s3a",
        "tos",
        "tosfs",
        "wasb",
        "wasbs",
    }
)
_HOSTS = frozenset({"arrow_hdfs", "ftp", "ftps", "hdfs", "sftp", "smb", "ssh", "webhdfs"})
"""Schemes whose authority is a machine; a store sees the path below it."""
_WEB = frozenset({"http", "https"})
_ENDS = _BUCKETS | _HOSTS | _WEB | {"data", "file", "local", "memory", "hf", "gdrive", "dropbox", "webdav", "webdavs"}
"""Schemes that stand at the end of a chain: whatever follows is a name."""
_ARCHIVES = frozenset({"libarchive", "reference", "tar", "zip"})
"""Wrappers with names of their own: a child of ``zip::X`` is in the archive, that of ``simplecache::X`` in
X."""
_COLLAPSED = re.compile(
    r"(?:^|/|::)((?:" + "|".join(sorted(_BUCKETS | _HOSTS | _WEB | {"file", "memory"})) + r")):(?:/(?!/)|$)"
)
_ANY_COLLAPSED = re.compile(r"(?:^|::)([A-Za-z][A-Za-z0-9+._-]+):/(?!/)")
_SECRET_NAME = re.compile(r"sig|token|secret|pass|pwd|key|cred|auth|sas|session", re.IGNORECASE)
_SECRET_OPTION = re.compile(
    r"secret|token|pass|pwd|cred|auth|signature|sas|^key$|(access|account|api|private|shared|aws|client)_?key",
    re.IGNORECASE,
)
_QUERY_VALUE = re.compile(r"([?&;#]|&amp;)([^=&;#?\s/]+)=([^&;#\s'\"<>]*)")
_USERINFO = re.compile(
    r"([A-Za-z][A-Za-z0-9+._-]*)://([^/?#\s'\"<>]*@|[^/?#\s'\"<>@:]*:(?!:)[^@\s'\"<>0-9][^@\s'\"<>]*@)"
)
"""Also a password with an unescaped slash: after a host there would be a port, which begins with a digit."""
_NAMED_USERS = _HOSTS | _BUCKETS
"""Schemes in which what stands before ``@`` without a colon is a user or container, not a token."""
_MASK = "***"


class Location:
    """A URL or local path and the options to open it. Immutable, hashable, picklable, thread-safe.

    Pickling carries the options, since a child process needs them; no text form does.

    Args:
        url: A URL that fsspec understands, or a local path, which is made absolute at once.
        storage_options: What the filesystem of the URL takes, copied.

    Raises:
        ConfigError: The URL is empty, lacks its bucket or host, or lost a slash in a ``pathlib.Path``; or the
            options are no mapping with text keys.
    """

    __slots__ = ("_components", "_options", "_path", "_redacted", "_scheme", "_target", "_url")

    _components: tuple[str, ...]
    _options: dict[str, object]
    _path: str
    _redacted: str
    _scheme: str
    _target: int
    _url: str

    def __init__(self, url: str | os.PathLike[str], storage_options: Mapping[str, object] | None = None) -> None:
        self._set(_normalize(_text(url)), _copy_options(storage_options))

    def _set(self, components: tuple[str, ...], options: dict[str, object]) -> None:
        target = _target(components)
        scheme, path = _scheme_and_path(components[target])
        outer = _scheme_and_path(components[0])[0]
        url = "::".join(components)
        for name, value in (
            ("_components", components),
            ("_options", options),
            ("_target", target),
            ("_path", path),
            ("_scheme", scheme if len(components) == 1 else outer),
            ("_url", url),
            ("_redacted", "::".join(map(redact_text, components))),
        ):
            object.__setattr__(self, name, value)

    @property
    def url(self) -> str:
        """The URL without trailing slashes; an absolute path for a local one. It can hold secrets."""
        return self._url

    @property
    def scheme(self) -> str:
        """Lower-case scheme, of a chained URL the outermost; ``file`` for local paths, ``s3`` for ``s3a``."""
        return self._scheme

    @property
    def path(self) -> str:
        """What the filesystem calls it: an absolute path, bucket and key, or for HTTP the URL; literal."""
        return self._path

    @property
    def components(self) -> tuple[str, ...]:
        """The links of a chained URL, outermost first; one for a plain URL. They can hold secrets."""
        return self._components

    @property
    def storage_options(self) -> dict[str, object]:
        """A copy of the options, nested mappings and lists included."""
        return _copy_options(self._options)

    @property
    def redacted(self) -> str:
        """The URL for logs and errors: no password, no signature or token."""
        return self._redacted

    def join(self, name: str) -> Location:
        """The child called ``name``, literally; ``/`` separates levels and ``""`` is this location itself.

        Over HTTP, where a name is part of a URL, it is percent-encoded.

        Raises:
            ConfigError: The name is absolute or has an empty, ``.`` or ``..`` segment.
        """
        name = check_name(name.rstrip("/"))
        if not name:
            return self
        components = list(self._components)
        link = components[self._target]
        if self._target < len(components) - 1 and "::" in name:
            raise ConfigError(f"Can't name a child of {self._redacted} with '::' in it: that separates chained URLs")
        components[self._target] = _join(link, name)
        child = object.__new__(Location)
        child._set(tuple(components), self._options)
        return child

    def describe(self, name: str) -> str:
        """The child called ``name`` for logs and errors, redacted; also one that no chained URL can name.

        Raises:
            ConfigError: The name is absolute or has an empty, ``.`` or ``..`` segment.
        """
        components = list(self._components)
        if check_name(name.rstrip("/")):
            components[self._target] = _join(components[self._target], name.rstrip("/"))
        return "::".join(map(redact_text, components))

    def scrub(self, text: str) -> str:
        """``text``, e.g. a client's error message, without the secrets of this location's URL and options."""
        for secret in _secrets(self._options):
            text = text.replace(secret, _MASK)
        return redact_text(text)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"A Location is immutable; can't set {name!r}")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"A Location is immutable; can't delete {name!r}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Location):
            return NotImplemented
        return self._url == other._url and self._options == other._options

    def __hash__(self) -> int:
        return hash(self._url)

    def __str__(self) -> str:
        return self._redacted

    def __repr__(self) -> str:
        return f"Location({self._redacted!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (self._components, self._options)


def _rebuild(components: tuple[str, ...], options: dict[str, object]) -> Location:
    location = object.__new__(Location)
    location._set(components, options)
    return location


def check_name(name: str) -> str:
    """Return a name inside a store as it is, or refuse it.

    Raises:
        ConfigError: It is absolute, or has an empty, ``.`` or ``..`` segment or a NUL.
    """
    if name and (name[0] == "/" or "\0" in name or any(part in ("", ".", "..") for part in name.split("/"))):
        raise ConfigError(f"Name {name!r} is not allowed: it must be relative, without empty, '.' or '..' segments")
    return name


def redact_text(text: str) -> str:
    """Mask passwords, signatures and tokens of every URL in a text."""
    if "://" in text:
        text = _USERINFO.sub(_mask_userinfo, text)
    if "=" in text:
        text = _QUERY_VALUE.sub(_mask_value, text)
    return text


def _mask_userinfo(match: re.Match[str]) -> str:
    scheme, userinfo = match.group(1), match.group(2)[:-1]
    user, colon, _ = userinfo.partition(":")
    if colon:
        return f"{scheme}://{user}:{_MASK}@"
    return f"{scheme}://{user if scheme.lower() in _NAMED_USERS else _MASK}@"


def _mask_value(match: re.Match[str]) -> str:
    separator, name, value = match.groups()
    return f"{separator}{name}={_MASK}" if value and _SECRET_NAME.search(name) else match.group(0)


def _secrets(options: Mapping[str, object]) -> list[str]:
    found: list[str] = []
    for name, value in options.items():
        if isinstance(value, Mapping):
            found += _secrets(value)
        elif _SECRET_OPTION.search(str(name)):
            values = value if isinstance(value, list | tuple) else [value]
            found += [item for item in values if isinstance(item, str) and len(item) >= 4]
    return sorted(found, key=len, reverse=True)


def _text(url: str | os.PathLike[str]) -> str:
    try:
        text = os.fspath(url)
    except TypeError:
        raise ConfigError(f"A URL or path must be text or a path, not {type(url).__name__}") from None
    if not isinstance(text, str):
        raise ConfigError(f"A URL or path must be text, not {type(text).__name__}")
    if not text.strip():
        raise ConfigError("The URL is empty; give a URL such as s3://bucket/run or a directory")
    if "\0" in text:
        raise ConfigError("The URL holds a NUL character")
    collapsed = None if _SCHEME.match(text) else _ANY_COLLAPSED.search(text) or _COLLAPSED.search(text)
    if collapsed and not (collapsed.group(1) == "file" and collapsed.start() == 0):
        scheme, end = collapsed.group(1), collapsed.end()
        # Looked at with its slash, so that what is secret in it is found.
        shown = redact_text(f"{text[:end]}/{text[end:]}").replace(f"{scheme}://", f"{scheme}:/", 1)
        shown = shown if end < len(text) else text
        raise ConfigError(
            f"{shown!r} looks like a {scheme}:// URL that lost a slash in a pathlib.Path; "
            f"pass the URL as a string, {scheme}://..."
        )
    return text


def _normalize(text: str) -> tuple[str, ...]:
    links = _split(text)
    return tuple(
        _normalize_link(link, bare=len(links) > 1 and index < len(links) - 1) for index, link in enumerate(links)
    )


def _split(text: str) -> list[str]:
    links: list[str] = []
    while "::" in text:
        left, right = text.split("::", 1)
        match = _SCHEME.match(left)
        scheme = match.group(1).lower() if match else left.lower()
        if scheme in _ENDS or not _is_protocol(scheme):
            break
        links.append(left)
        text = right
    if not text:
        raise ConfigError("A chained URL ends without its last part")
    if links and text.lower() not in _ENDS and not _SCHEME.match(text) and _is_protocol(text):
        text += "://"
    elif links and text.lower() == "memory":
        text = "memory://"
    links.append(text)
    return links


def _is_protocol(name: str) -> bool:
    from fsspec.registry import available_protocols

    return name in available_protocols()


def _normalize_link(link: str, *, bare: bool) -> str:
    """One link with a lower-case scheme, no trailing slash, and an absolute path when it is local."""
    match = _SCHEME.match(link)
    if match is None:
        if bare:
            return link.lower()
        return _absolute(link[len("file:") :] if link.startswith("file:/") else link)
    scheme, rest = match.group(1).lower(), link[match.end() :]
    if scheme in ("file", "local"):
        return _absolute(rest or "/")
    if scheme == "memory":
        return f"memory://{rest.strip('/')}"
    if scheme in _WEB:
        address, query = _split_query(rest)
        rest = address.rstrip("/") + query
        if not re.match(r"[^/?#]", rest):
            raise ConfigError(f"URL {redact_text(link)!r} names no host; give {scheme}://host/path")
        return f"{scheme}://{rest}"
    stripped = rest.rstrip("/")
    if scheme in _BUCKETS and (not stripped or rest.startswith("/")):
        raise ConfigError(f"URL {redact_text(link)!r} names no bucket; give {scheme}://bucket/path")
    if not stripped and scheme in _HOSTS:
        stripped = "/"
    return f"{scheme}://{stripped}"


def _absolute(path: str) -> str:
    # ".." stays: across a symbolic link, dropping it would name another directory.
    if path.startswith("~"):
        path = os.path.expanduser(path)
    whole = os.path.join(os.getcwd(), path)
    return "/" + "/".join(part for part in whole.split("/") if part not in ("", "."))


def _split_query(rest: str) -> tuple[str, str]:
    cut = min((at for at in (rest.find("?"), rest.find("#")) if at >= 0), default=len(rest))
    return rest[:cut], rest[cut:]


def _target(components: tuple[str, ...]) -> int:
    """Index of the link that a child's name belongs to."""
    for index, link in enumerate(components[:-1]):
        match = _SCHEME.match(link)
        if (match and link[match.end() :]) or (match.group(1) if match else link) in _ARCHIVES:
            return index
    return len(components) - 1


def _scheme_and_path(link: str) -> tuple[str, str]:
    match = _SCHEME.match(link)
    if match is None:
        return ("file", link) if link.startswith("/") else (link, "")
    scheme, rest = match.group(1), link[match.end() :]
    if scheme == "memory":
        rest = f"/{rest}" if rest else ""
    elif scheme in _WEB:
        rest = link
    elif scheme in _HOSTS:
        rest = rest[rest.find("/") :] if "/" in rest else "/"
    return _ALIASES.get(scheme, scheme), rest


def _join(link: str, name: str) -> str:
    match = _SCHEME.match(link)
    if match is None:
        return f"{link.rstrip('/')}/{name}" if link.startswith("/") else f"{link}://{name}"
    head, rest = link[: match.end()], link[match.end() :]
    if match.group(1) in _WEB:
        address, query = _split_query(rest)
        return f"{head}{address.rstrip('/')}/{quote(name, safe='/')}{query}"
    return f"{head}{rest.rstrip('/')}/{name}" if rest.rstrip("/") or match.group(1) in _HOSTS else f"{head}{name}"


def _copy_options(options: Mapping[str, object] | None) -> dict[str, object]:
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise ConfigError(f"storage_options must be a mapping, not {type(options).__name__}")
    if not all(isinstance(name, str) for name in options):
        raise ConfigError("storage_options must have text keys")
    return {name: _copy_value(value) for name, value in options.items()}


def _copy_value(value: object) -> object:
    if isinstance(value, Mapping):
        return {name: _copy_value(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_copy_value(item) for item in value]
    return value
