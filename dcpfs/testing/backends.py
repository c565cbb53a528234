"""Which kinds of storage the conformance suites run on, and what each can do: the table in the README.

Problem: a list of backends that somebody wrote down is true on the day it was written.

Way taken: one table of kinds here, which the tests take their servers from, and the capabilities that the stores
themselves declare. ``python -m dcpfs.testing.backends`` prints the table; a test compares it with the README.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dcpfs.storage.capabilities import Capabilities
from dcpfs.storage.location import Location
from dcpfs.storage.opening import open_store
from dcpfs.testing.server_process import LoopbackServer
from dcpfs.testing.servers import JuicefsServer, RcloneServer, SeaweedServer
from dcpfs.testing.servers_files import (
    AsyncsshServer,
    FtpServer,
    HttpServer,
    RcloneFtpServer,
    SftpServer,
    WebdavServer,
    WsgidavServer,
)
from dcpfs.testing.servers_objects import AzuriteServer, GcsServer
from dcpfs.testing.servers_system import NginxServer, OpensshServer, ParamikoSshServer, SambaServer

__all__ = ["BACKENDS", "Backend", "table"]


@dataclass(frozen=True, slots=True)
class Backend:
    """One kind of storage under test.

    Attributes:
        kind: As in the table.
        url: An example, from which the capabilities are taken; nothing is opened.
        tested_with: What serves it in the tests.
        extra: The extra of dcpfs that brings its client, or an empty text.
        server: Its class, or None where no server is needed.
        read_only: Only loads.
        note: What to know.
    """

    kind: str
    url: str
    tested_with: str
    extra: str = ""
    server: type[LoopbackServer] | None = None
    read_only: bool = False
    note: str = ""


_NO_CONDITIONS = "ignores conditional puts, which is noticed"
_S3 = Backend("S3", "s3://bucket/run", "SeaweedFS", server=SeaweedServer)
_SFTP = Backend("SFTP", "sftp://host/run", "OpenSSH", "sftp", OpensshServer)
_WEBDAV = Backend("WebDAV", "webdav://run", "rclone", "webdav", WebdavServer)
_FTP = Backend("FTP", "ftp://host/run", "pyftpdlib", server=FtpServer, note="one request at a time")
_HTTP = Backend("HTTP", "https://host/run", "nginx", "http", NginxServer, read_only=True)
BACKENDS: tuple[Backend, ...] = (
    Backend("Local files", "/run", "disk, tmpfs"),
    Backend("Memory", "memory://run", "fsspec"),
    _S3,
    replace(_S3, tested_with="rclone", server=RcloneServer, note=_NO_CONDITIONS),
    replace(_S3, tested_with="JuiceFS gateway", server=JuicefsServer, note=_NO_CONDITIONS),
    Backend("Google Cloud Storage", "gs://bucket/run", "fake-gcs-server", "gcs", GcsServer),
    Backend("Azure Blob", "az://container/run", "Azurite", "azure", AzuriteServer),
    _SFTP,
    replace(_SFTP, tested_with="asyncssh", server=AsyncsshServer),
    replace(_SFTP, tested_with="rclone", server=SftpServer, note="rclone's own rename is not atomic"),
    replace(_SFTP, tested_with="OpenSSH, by paramiko", extra="", server=ParamikoSshServer, note="where sshfs is not"),
    _WEBDAV,
    replace(_WEBDAV, tested_with="wsgidav", server=WsgidavServer, note="its moves cut names at `?` and `;`: an error"),
    _FTP,
    replace(_FTP, tested_with="rclone", server=RcloneFtpServer),
    Backend("SMB", "smb://host/share/run", "Samba", "smb", SambaServer),
    _HTTP,
    replace(_HTTP, tested_with="rclone", server=HttpServer),
    Backend("Zip archive", "zip://run::file:///archive.zip", "a file, nginx", read_only=True),
    Backend("Tar archive", "tar://run::file:///archive.tar", "a file", read_only=True),
    replace(_S3, kind="S3 by obstore's class", tested_with="SeaweedFS", server=None, note="not in a forked child"),
    Backend("Directory, cache", "dir::s3://bucket/run", "S3, GCS, WebDAV", note="caches are passed by"),
)


def table() -> str:
    """The kinds of storage and their declared capabilities, in Markdown."""
    head = ("Storage", "URL", "Extra", "Tested with", "Save", "Load", "Retention", "Ranges", "Atomic", "Note")
    rows = [head, ("---",) * len(head)]
    for backend in BACKENDS:
        options = {"base_url": "http://host"} if backend.url.startswith("webdav") else {}
        can = open_store(Location(backend.url, options)).capabilities
        flags = (
            can.writable,
            True,
            can.writable and can.listable,
            can.ranged_reads,
            can.writable and can.atomic_put,
        )
        rows.append(
            (
                *(backend.kind, f"`{backend.url}`", f"`{backend.extra}`" if backend.extra else "", backend.tested_with),
                *("yes" if flag else "–" for flag in flags),
                "; ".join(filter(None, (_refused(can), backend.note))),
            )
        )
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _refused(can: Capabilities) -> str:
    marks = [mark for mark in can.refused_characters if mark.isprintable()]
    return f"no {' '.join(f'`{mark}`' for mark in marks)} in names".replace("`|`", "`\\|`") if marks else ""


if __name__ == "__main__":
    print(table(), end="")  # noqa: T201 - its purpose
