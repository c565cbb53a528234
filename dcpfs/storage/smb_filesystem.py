"""fsspec's filesystem of SMB with connections and credentials of its own.

Problem: smbclient keeps one table of connections for all of a process. What a forked child finds there never answers,
since the thread behind it is the parent's; one filesystem's lost connection is made anew by the next call of any, which
knows no credentials; and at the end of the process it says goodbye on each, and waits for the answer for ever. Beyond
that, fsspec's class asks for each name that it lists, and its move replaces nothing.

Way taken: a subclass that hands every call its own table and its credentials, lists with sizes in one request, and
moves over an old file. `SmbFilesystem.disconnect` hangs up without a word.
"""

from __future__ import annotations

import contextlib
import errno
import ntpath
from collections.abc import Mapping
from stat import S_ISDIR
from typing import IO, TYPE_CHECKING, cast

import smbclient
from fsspec.implementations.smb import SMBFileSystem
from smbprotocol.exceptions import SMBOSError
from smbprotocol.file_info import FileAttributes
from smbprotocol.header import NtStatus

if TYPE_CHECKING:
    from smbclient._os import SMBDirEntryInformation

__all__ = ["SmbFilesystem"]


_OPEN_ELSEWHERE = frozenset(
    {NtStatus.STATUS_ACCESS_DENIED, NtStatus.STATUS_DELETE_PENDING, NtStatus.STATUS_SHARING_VIOLATION}
)


class SmbFilesystem(SMBFileSystem):  # type: ignore[misc] # fsspec has no types
    """Files on a share, over connections that no other instance uses."""

    def _connect(self) -> None:
        self._session: Mapping[str, object] = {
            "username": self.username,
            "password": self.password,
            "port": self._port,
            "encrypt": self.encrypt,
            "connection_timeout": self.timeout,
            "connection_cache": {},
        }
        smbclient.register_session(self.host, **self._session)

    def disconnect(self) -> None:
        """Hang up: what waits for an answer fails, and the next call connects anew."""
        connections = cast("dict[str, object]", self._session["connection_cache"])
        for name in list(connections):
            transport = getattr(connections.pop(name, None), "transport", None)
            if transport is not None:
                with contextlib.suppress(OSError):  # it was closed already
                    transport.close()

    def _remote(self, path: str) -> str:
        return ntpath.normpath(f"\\\\{self.host}{path}".replace("/", "\\"))

    def info(self, path: str, **_: object) -> dict[str, object]:
        """Describe a file or directory."""
        status = smbclient.stat(self._remote(path), **self._session)
        return _described(path, status.st_size, status.st_mtime, is_directory=S_ISDIR(status.st_mode))

    def ls(self, path: str, detail: bool = True, **_: object) -> list[object]:
        """What is right in a directory, with sizes, in one request."""
        with contextlib.closing(smbclient.scandir(self._remote(path), **self._session)) as entries:
            # What came with the listing: to ask an entry is another request, and not to this port.
            found = [_listed(f"{path.rstrip('/')}/{entry.name}", entry.smb_info) for entry in entries]
        return list(found) if detail else [entry["name"] for entry in found]

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a directory and those above it."""
        if path.strip("/").count("/"):  # the share itself is there
            smbclient.makedirs(self._remote(path), exist_ok=exist_ok, **self._session)

    def rmdir(self, path: str) -> None:
        """Remove an empty directory."""
        smbclient.rmdir(self._remote(path), **self._session)

    def rm_file(self, path: str) -> None:
        """Remove a file."""
        smbclient.remove(self._remote(path), **self._session)

    def mv(self, path1: str, path2: str, **_: object) -> None:
        """Move a file, over an old one."""
        try:
            smbclient.replace(self._remote(path1), self._remote(path2), **self._session)
        except SMBOSError as error:
            if error.ntstatus not in _OPEN_ELSEWHERE:
                raise
            # A reader will have closed it soon.
            raise OSError(errno.EBUSY, "the old file is open elsewhere, and can't be replaced meanwhile") from error

    def _open(self, path: str, mode: str = "rb", **_: object) -> IO[bytes]:
        # Not locked for others: ranks read the same file at once.
        opened = smbclient.open_file(self._remote(path), mode, share_access=self.share_access or "rwd", **self._session)
        return cast("IO[bytes]", opened)


def _listed(path: str, found: SMBDirEntryInformation) -> dict[str, object]:
    is_directory = bool(found.file_attributes & FileAttributes.FILE_ATTRIBUTE_DIRECTORY)
    return _described(path, found.end_of_file, found.last_write_time.timestamp(), is_directory=is_directory)


def _described(path: str, size: int, changed_seconds: float, *, is_directory: bool) -> dict[str, object]:
    kind = "directory" if is_directory else "file"
    return {"name": path, "size": size, "type": kind, "mtime": changed_seconds}
