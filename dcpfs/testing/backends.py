"""Which kinds of storage the conformance suites run on, and what each can do: the table in the README.

Problem: a list of backends that somebody wrote down is true on the day it was written.

Way taken: one table of kinds here, which the tests take their servers from, and the capabilities that the stores
themselves declare. A server can do less than its client knows of; that stands here as well, and a test compares it with
what its suite leaves out. ``python -m dcpfs.testing.backends`` prints the table; a test compares it with the README.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

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
from dcpfs.testing.servers_obstore import ObstoreServer, obstore_scheme
from dcpfs.testing.servers_system import NginxServer, OpensshServer, ParamikoSshServer, SambaServer

__all__ = ["BACKENDS", "Backend", "table"]


@dataclass(frozen=True, slots=True)
class Backend:
    """One kind of storage under test.

    Attributes:
        kind: As in the table.
        url: An example, from which the capabilities are taken; nothing is opened.
        tested_with: What serves it in the tests.
        place: What the tests call it where no server is needed.
        extra: The extra of dcpfs that brings its client, or an empty text.
        server: Its class, or None where no server is needed.
        read_only: Only loads.
        atomic: False where this server is not, though others of its kind are.
        lost_characters: Those that this server does not keep in a name, though its client sends them, and
        lost_how: what becomes of them, for the table.
        lacks: The tests of `dcpfs.testing.conformance.StoreConformance` that it does not pass as they are, each with
            what the table says of it; an empty text where other words of the row say it.
        note: What else to know.
    """

    kind: str
    url: str
    tested_with: str
    extra: str = ""
    server: type[LoopbackServer] | None = None
    place: str = ""
    read_only: bool = False
    atomic: bool = True
    lost_characters: str = ""
    lost_how: str = ""
    lacks: Mapping[str, str] = field(default_factory=dict)
    note: str = ""

    @property
    def name(self) -> str:
        """What suites and places of the tests are called after: the server's class, or the place."""
        return self.server.__name__ if self.server else self.place

    def capabilities(self) -> Capabilities:
        """What its store declares, less what this server is known not to do."""
        options = {"base_url": "http://host"} if self.url.startswith("webdav") else {}
        with obstore_scheme():
            can = open_store(Location(self.url, options)).capabilities
        return replace(can, atomic_put=can.atomic_put and self.atomic)


_NO_CONDITIONS = "ignores conditional puts, which is noticed"
_S3 = Backend("S3", "s3://bucket/run", "SeaweedFS", server=SeaweedServer)
_SFTP = Backend("SFTP", "sftp://host/run", "OpenSSH", "sftp", OpensshServer)
_WEBDAV = Backend("WebDAV", "webdav://run", "rclone", "webdav", WebdavServer)
_FTP = Backend("FTP", "ftp://host/run", "pyftpdlib", server=FtpServer, note="one request at a time")
_HTTP = Backend("HTTP", "https://host/run", "nginx", "http", NginxServer, read_only=True)
BACKENDS: tuple[Backend, ...] = (
    Backend("Local files", "/run", "disk", place="file"),
    Backend("Local files", "/run", "tmpfs", place="tmpfs"),
    Backend("Memory", "memory://run", "fsspec", place="memory", note="of one process"),
    replace(_S3, lost_characters="\\", lost_how="listed as `/`"),
    replace(
        _S3,
        tested_with="rclone",
        server=RcloneServer,
        lacks={
            "test_parts_may_come_in_any_order_from_many_threads": "a part can't be sent again with other bytes",
            "test_a_deletion_takes_what_is_named_and_no_more": "to delete a directory's name is an error",
            "test_a_conditional_put_spares_an_old_object": _NO_CONDITIONS,
        },
    ),
    replace(_S3, tested_with="JuiceFS gateway", server=JuicefsServer, note=_NO_CONDITIONS),
    Backend("Google Cloud Storage", "gs://bucket/run", "fake-gcs-server", "gcs", GcsServer),
    Backend("Azure Blob", "az://container/run", "Azurite", "azure", AzuriteServer),
    _SFTP,
    replace(_SFTP, tested_with="asyncssh", server=AsyncsshServer),
    replace(
        _SFTP,
        tested_with="rclone",
        server=SftpServer,
        atomic=False,
        lacks={"test_a_reader_sees_the_old_object_or_the_new_one": "its rename deletes the old file first"},
    ),
    replace(_SFTP, tested_with="OpenSSH, by paramiko", extra="", server=ParamikoSshServer, note="where sshfs is not"),
    _WEBDAV,
    replace(
        _WEBDAV,
        tested_with="wsgidav",
        server=WsgidavServer,
        lost_characters="?;",
        lost_how="cut there by a move, which is an error",
    ),
    _FTP,
    replace(_FTP, tested_with="rclone", server=RcloneFtpServer),
    Backend("SMB", "smb://host/share/run", "Samba", "smb", SambaServer),
    _HTTP,
    replace(_HTTP, tested_with="rclone", server=HttpServer),
    Backend("Zip archive", "zip://run::file:///archive.zip", "a file, nginx", place="zip", read_only=True),
    Backend("Tar archive", "tar://run::file:///archive.tar", "a file", place="tar", read_only=True),
    Backend(
        "S3 by obstore's class",
        "obs3://bucket/run",
        "SeaweedFS",
        server=ObstoreServer,
        lacks={
            "test_case_80_a_forked_process_uses_an_open_store": "not in a forked child",
            "test_a_deletion_takes_what_is_named_and_no_more": "an emptied directory is listed for a while",
        },
        note="under a scheme of its own, since `s3://` has a store of its own",
    ),
    Backend(
        "Directory, cache",
        "dir::s3://bucket/run",
        "S3, GCS, WebDAV, memory",
        place="dir::",
        note="caches are passed by",
    ),
)


def table() -> str:
    """The kinds of storage and their declared capabilities, in Markdown."""
    head = ("Storage", "URL", "Extra", "Tested with", "Save", "Load", "Retention", "Ranges", "Atomic", "Note")
    rows = [head, ("---",) * len(head)]
    for backend in BACKENDS:
        can = backend.capabilities()
        flags = (
            can.writable,
            True,
            can.writable and can.listable,
            can.ranged_reads,
            can.writable and can.atomic_put,
        )
        lost = f"{_marks(backend.lost_characters)} in names {backend.lost_how}" if backend.lost_characters else ""
        rows.append(
            (
                *(backend.kind, f"`{backend.url}`", f"`{backend.extra}`" if backend.extra else "", backend.tested_with),
                *("yes" if flag else "–" for flag in flags),
                "; ".join(filter(None, (_refused(can), lost, *backend.lacks.values(), backend.note))),
            )
        )
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _refused(can: Capabilities) -> str:
    marks = _marks(can.refused_characters)
    return f"no {marks} in names" if marks else ""


def _marks(characters: str) -> str:
    return " ".join(f"`{mark}`" for mark in characters if mark.isprintable()).replace("`|`", "`\\|`")


if __name__ == "__main__":
    print(table(), end="")  # noqa: T201 - its purpose
