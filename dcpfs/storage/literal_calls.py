"""Calls of an fsspec filesystem that take a name as it is, and what they answer.

Problem: the calls that fsspec is known for expand ``*``, ``?`` and ``[`` in names, ``find`` and ``walk``
leave out what they could not list, a file object for reading fetches megabytes ahead of a small range, and
each filesystem has its own words for an object's version and age.

Way taken: `list_directory` lists one directory and raises what goes wrong; `move_file` uses a filesystem's
own move, or else one copy and one removal; `read_bytes` reads one name, and `reads_ranges` says whether it knows
ranges (sshfs takes ``start`` and ``end``, and reads the whole file); `open_unbuffered` and `fill` read a range
and no more; `object_info` reads the words. Over HTTP a range is what the server says it sent: fsspec takes any body for
the range that it asked for, and holds all of an object whose server knows no ranges.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import ftplib
import inspect
import re
import socket
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Protocol, cast

from dcpfs.errors import UnsupportedOperationError
from dcpfs.storage.filesystems import overrides
from dcpfs.storage.store import ObjectInfo
from dcpfs.storage.translate import Fault, fault_of

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

__all__ = [
    "Readable",
    "copies_to_move",
    "describe_file",
    "disconnect",
    "fill",
    "list_directory",
    "move_file",
    "object_info",
    "open_unbuffered",
    "quote_marks",
    "read_bytes",
    "reads_ranges",
    "remove_directory",
]

_PIECE_BYTES = 1 << 20
_CUT_SHORT = frozenset({"426", "450", "451"})
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/")


def list_directory(fs: AbstractFileSystem, name: str) -> Sequence[tuple[str, Mapping[str, object]]]:
    """Name and details of what is right in a directory, temporary files too; nothing when there is none."""
    fs.invalidate_cache()
    try:
        found = fs.ls(name, detail=True)
    except Exception as error:
        fault = fault_of(error)
        if fault is Fault.NOT_FOUND:
            return []
        if fault is Fault.OTHER and fs.info(name).get("type") == "file":
            # Some servers have no word for what is wrong with listing a file.
            return []
        raise
    entries = []
    for details in found:
        full = str(details["name"]).rstrip("/")
        last = full.rpartition("/")[2]
        # A directory may list its own placeholder, and a file is listed as itself.
        if last and full.strip("/") != name.strip("/"):
            entries.append((last, details))
    own = name.rstrip("/").rpartition("/")[2]
    if len(entries) == 1 and entries[0][0] == own and fs.info(name).get("type") != "directory":
        # Some list a file as if it were a directory that holds it.
        return []
    return entries


def move_file(fs: AbstractFileSystem, source: str, target: str, *, doubtful: bool) -> None:
    """Move a file, literally, over an old one.

    Args:
        fs: The filesystem.
        source: Its name.
        target: Its new name.
        doubtful: A move that finds a file in its place may do nothing, without a word (WebHDFS).
    """
    if _is_dav(fs):
        # Its own mv lists, expands and copies; its client moves in one request.
        fs.client.move(source, target, overwrite=True)
        return
    own = _own_move(fs)
    if not own:
        fs.cp_file(source, target)
        fs.rm_file(source)
        return
    move = getattr(fs, own)
    try:
        move(source, target)
    except Exception as error:
        if fault_of(error) is not Fault.EXISTS:
            raise
    else:
        if not doubtful or not _is_there(fs, source):
            return
    # A filesystem whose move replaces nothing.
    with contextlib.suppress(FileNotFoundError):
        fs.rm_file(target)
    move(source, target)
    if doubtful and _is_there(fs, source):
        raise OSError(f"the move to {target!r} did nothing")


def _is_there(fs: AbstractFileSystem, name: str) -> bool:
    fs.invalidate_cache()
    try:
        return bool(fs.info(name).get("type") != "directory")
    except Exception as error:
        if fault_of(error) is Fault.NOT_FOUND:
            return False
        raise


def copies_to_move(fs: AbstractFileSystem) -> bool:
    """True when `move_file` copies all bytes, which takes as long as the file is large."""
    return not _is_dav(fs) and not _own_move(fs)


def _own_move(fs: AbstractFileSystem) -> str:
    """The name of the filesystem's own move, or ""."""
    kind = type(fs)
    return next((name for name in ("mv_file", "mv") if overrides(kind, name) or overrides(kind, f"_{name}")), "")


def describe_file(fs: AbstractFileSystem, name: str, path: str) -> ObjectInfo:
    """Describe a file, never from a cache.

    Raises:
        FileNotFoundError: There is none, or a directory.
    """
    fs.invalidate_cache()
    details = fs.info(name)
    if details.get("type") == "directory":
        raise FileNotFoundError(f"{path!r} is a directory")
    return object_info(path, details)


def remove_directory(fs: AbstractFileSystem, name: str) -> None:
    """Remove a directory that is empty; an error, or nothing at all, where it is not."""
    kind = type(fs)
    if not overrides(kind, "rmdir") and overrides(kind, "_rmdir"):
        from fsspec.asyn import sync

        # fsspec makes no synchronous twin of this one.
        sync(fs.loop, fs._rmdir, name)
    else:
        fs.rmdir(name)


def reads_ranges(fs: AbstractFileSystem) -> bool:
    """True when `read_bytes` of a range moves that range and no more."""
    own = [name for name in ("_cat_file", "cat_file") if overrides(type(fs), name)]
    # Where keywords are swallowed unread, the whole file would come.
    return (
        _is_dav(fs) or _is_ftp(fs) or (bool(own) and "start" in inspect.signature(getattr(type(fs), own[0])).parameters)
    )


def read_bytes(fs: AbstractFileSystem, name: str, start: int | None = None, stop: int | None = None) -> bytes:
    """The bytes of a file, or a range of them; maybe more than that, or fewer."""
    if start is not None and stop is not None:
        if _is_ftp(fs):
            return _read_ftp_range(fs, name, start, stop)
        if _is_web(fs):
            from fsspec.asyn import sync

            return bytes(sync(fs.loop, _read_web_range, fs, name, start, stop))
    if not _is_dav(fs):
        return bytes(fs.cat_file(name, start=start, end=stop) if start is not None else fs.cat_file(name))
    # webdav4's file object asks for the whole file first, then for all from a seek on, and knows no encoded names.
    headers = {} if start is None or stop is None else {"Range": f"bytes={start}-{stop - 1}"}
    response = fs.client.request("GET", name, headers=headers, follow_redirects=True)
    if response.status_code != HTTPStatus.PARTIAL_CONTENT and fs.info(name).get("type") == "directory":
        # Some servers answer with a page that lists it.
        raise IsADirectoryError(f"{name!r} is a directory")
    return bytes(response.content)


def _read_ftp_range(fs: AbstractFileSystem, name: str, start: int, stop: int) -> bytes:
    """A range of a file, by hanging up the data connection once it is there.

    fsspec aborts the transfer instead, and then waits for two replies: of servers that send one it waits for ever.
    """
    fs.ftp.voidcmd("TYPE I")
    pieces: list[bytes] = []
    missing = stop - start
    try:
        connection = fs.ftp.transfercmd(f"RETR {name}", rest=start or None)
        with contextlib.closing(connection):
            while missing and (piece := connection.recv(min(missing, _PIECE_BYTES))):
                pieces.append(piece)
                missing -= len(piece)
        fs.ftp.voidresp()
    except (ftplib.error_temp, ftplib.error_perm) as error:
        # Cut short is how it should be; a start past the end has no reply of its own.
        if not pieces and fault_of(error) is not Fault.OTHER and str(error)[:3] not in _CUT_SHORT:
            raise
    return b"".join(pieces)


async def _read_web_range(fs: AbstractFileSystem, url: str, start: int, stop: int) -> bytes:
    """A range of what is at a URL: checked against what the server says it sent, or cut out of all of it."""
    options = dict(fs.kwargs)
    options["headers"] = {
        **(options.get("headers") or {}),
        "Range": f"bytes={start}-{stop - 1}",
        "Accept-Encoding": "identity",  # a range of what is compressed is another
    }
    session = await fs.set_session()
    async with session.get(fs.encode_url(url), **options) as response:
        fs._raise_not_found_for_status(response, url)
        skipped = start
        if response.status == HTTPStatus.PARTIAL_CONTENT:
            sent = _CONTENT_RANGE.match(response.headers.get("Content-Range", ""))
            if sent is None or int(sent.group(1)) != start:
                said = response.headers.get("Content-Range", "no Content-Range")
                raise OSError(f"bytes {start}-{stop - 1} were asked for, and the server answered with {said!r}")
            skipped = 0
        content = bytearray()
        # Of all of an object no more is kept than was asked for, and none is awaited that comes after it.
        async for piece in response.content.iter_chunked(_PIECE_BYTES):
            if skipped >= len(piece):
                skipped -= len(piece)
                continue
            content += piece[skipped : skipped + stop - start - len(content)]
            skipped = 0
            if len(content) >= stop - start:
                break
        return bytes(content)


def disconnect(fs: AbstractFileSystem) -> None:
    """Cut the connection of a filesystem that no longer answers, where it has one: what waits for it fails."""
    client = getattr(fs, "client", fs)
    with contextlib.suppress(Exception):
        # What can't be cut is left to whoever waits for it.
        if _is_ftp(fs):
            fs.ftp.sock.shutdown(socket.SHUT_RDWR)
        elif callable(getattr(fs, "disconnect", None)):
            fs.disconnect()
        elif type(client).__module__.startswith("paramiko"):
            client.close()
        elif type(client).__module__.startswith("asyncssh"):
            fs.loop.call_soon_threadsafe(client.abort)


def _is_web(fs: AbstractFileSystem) -> bool:
    return type(fs).__module__ == "fsspec.implementations.http"


def _is_ftp(fs: AbstractFileSystem) -> bool:
    return isinstance(getattr(fs, "ftp", None), ftplib.FTP)


def _is_dav(fs: AbstractFileSystem) -> bool:
    return type(fs).__module__.partition(".")[0] == "webdav4"


def quote_marks(path: str) -> str:
    """A name for a client that takes ``%``, ``?`` and ``#`` in it for those of a URL, and encodes the rest itself."""
    return path.replace("%", "%25").replace("?", "%3F").replace("#", "%23")


class Readable(Protocol):
    """What is used of a file object that is read."""

    def seek(self, position: int, /) -> object:
        """Go to a byte."""
        ...

    def read(self, size_bytes: int, /) -> bytes:
        """Up to so many bytes from here on."""
        ...

    def close(self) -> None:
        """Let it go."""
        ...


def open_unbuffered(fs: AbstractFileSystem, name: str) -> Readable:
    """A file object that fetches what is asked for and nothing ahead."""
    from fsspec.caching import BaseCache
    from fsspec.spec import AbstractBufferedFile

    file = fs.open(name, "rb")
    if isinstance(file, AbstractBufferedFile):
        file.cache = BaseCache(file.blocksize, file._fetch_range, file.size)
    return cast("Readable", file)


def fill(file: Readable, view: memoryview) -> int:
    """Read until the view is full or the file ends; return the bytes read."""
    filled = 0
    while filled < len(view):
        readinto = getattr(file, "readinto", None)
        if readinto is not None:
            count = readinto(view[filled:]) or 0
        else:
            content = file.read(len(view) - filled)
            count = len(content)
            view[filled : filled + count] = content
        if not count:
            break
        filled += count
    return filled


def object_info(path: str, details: Mapping[str, object]) -> ObjectInfo:
    """What a filesystem's details of an object say."""
    size = details.get("size")
    if not isinstance(size, int):
        raise UnsupportedOperationError(f"Can't describe {path!r}: the store does not say how large it is")
    etag = next((details[name] for name in ("ETag", "etag", "md5Hash", "content_md5") if details.get(name)), None)
    return ObjectInfo(path, size, str(etag) if etag else None, _modified_seconds(details))


def _modified_seconds(details: Mapping[str, object]) -> float | None:
    for name in ("LastModified", "last_modified", "mtime", "modified", "updated", "modify", "created"):
        value = details.get(name)
        if isinstance(value, int | float):
            return float(value)
        if isinstance(value, str):
            try:
                value = dt.datetime.fromisoformat(value.replace("Z", "+00:00"))
            except ValueError:
                continue
        if isinstance(value, dt.datetime):
            return (value if value.tzinfo else value.replace(tzinfo=dt.timezone.utc)).timestamp()
    return None
