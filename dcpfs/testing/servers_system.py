"""Real file servers on loopback that no wheel brings, of the operating system: OpenSSH, nginx and Samba.

Problem: the servers that most people have are not on PyPI, and are made to be run once a machine, by root, on a port of
their own, with files in ``/etc``.

Way taken: where the executable is installed (Debian: ``openssh-server``, ``nginx-light``, ``samba``; ``make setup``
asks for them where it may), it runs in the foreground on a configuration of its own in a private directory. Where it
is not, its class says so before anything is started, as Azurite's does.

Flow: ``with OpensshServer() as server:`` → ``Location(server.url("run"), server.storage_options)``.
"""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
from pathlib import Path

from dcpfs.errors import MissingBackendError
from dcpfs.testing.server_process import ServerProcess, ServerStartError, free_ports
from dcpfs.testing.servers_files import FileServer, basic_authorization

__all__ = ["NginxServer", "OpensshServer", "ParamikoSshServer", "SambaServer"]

_SYSTEM = "/usr/local/sbin:/usr/sbin:/sbin"


class OpensshServer(FileServer):
    """OpenSSH's ``sshd``, for the user who runs the tests, with a key made for the occasion. Starts in about 0.3 s."""

    def _launch(self, directory: Path) -> ServerProcess:
        self.user = getpass.getuser()
        daemon = _find("sshd", package="openssh-server")
        keys = [directory / name for name in ("host_key", "user_key")]
        for key in keys:
            _run_once([_find("ssh-keygen", package="openssh-client"), "-q", "-t", "ed25519", "-N", "", "-f", str(key)])
        self._key = keys[1]
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # where sshd, run by root, confines its children
        [port] = free_ports(1)
        config = directory / "sshd_config"
        config.write_text(
            f"ListenAddress 127.0.0.1:{port}\nHostKey {keys[0]}\nAuthorizedKeysFile {keys[1]}.pub\n"
            f"PidFile {directory / 'sshd.pid'}\nStrictModes no\nUsePAM no\nPasswordAuthentication no\n"
            "PermitRootLogin prohibit-password\nMaxStartups 100\nMaxSessions 100\nSubsystem sftp internal-sftp\n"
        )
        self._directory(directory)
        self._port = port
        return ServerProcess("sshd", [daemon, "-D", "-e", "-f", str(config)], directory=directory)

    def _await_ready(self, process: ServerProcess) -> str:
        _greeted(process, self._port, b"SSH-2.0")
        return f"127.0.0.1:{self._port}"

    @property
    def storage_options(self) -> dict[str, object]:
        """Options as sshfs takes them; a fresh dict."""
        return {"username": self.user, "known_hosts": None, "client_keys": [str(self._key)]}

    def url(self, path: str = "") -> str:
        """URL of a name in the directory."""
        return f"sftp://{self.address}{self.data}/{path}"


class ParamikoSshServer(OpensshServer):
    """The same, for fsspec's own class of SFTP, which is paramiko's and takes other options."""

    @property
    def storage_options(self) -> dict[str, object]:
        """Options as paramiko takes them; a fresh dict."""
        return {
            "username": self.user,
            "key_filename": str(self._key),
            "look_for_keys": False,
            "allow_agent": False,
        }


class NginxServer(FileServer):
    """nginx: reads only, with ranges; a test puts files into `data`. Starts in about 0.1 s."""

    def _launch(self, directory: Path) -> ServerProcess:
        daemon = _find("nginx", package="nginx-light")
        passwords = directory / "passwords"
        passwords.write_text(f"{self.user}:{{PLAIN}}{self.password}\n")
        [port] = free_ports(1)
        temporary = " ".join(
            f"{kind}_temp_path {directory / kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        account = f"user {getpass.getuser()};\n" if os.getuid() == 0 else ""
        config = directory / "nginx.conf"
        config.write_text(
            f"{account}daemon off; pid {directory / 'nginx.pid'}; error_log stderr; worker_processes 1;\n"
            "events { worker_connections 256; }\n"
            f"http {{ access_log off; {temporary} gzip on; gzip_min_length 1; gzip_types *; server {{\n"
            f"  listen 127.0.0.1:{port}; root {self._directory(directory)};\n"
            f"  auth_basic tests; auth_basic_user_file {passwords};\n"
            "} }\n"
        )
        self._port = port
        command = [daemon, "-p", str(directory), "-e", "stderr", "-c", str(config)]
        return ServerProcess("nginx", command, directory=directory)

    def _await_ready(self, process: ServerProcess) -> str:
        process.wait_until(lambda: _connected(self._port))
        return f"http://127.0.0.1:{self._port}"

    @property
    def storage_options(self) -> dict[str, object]:
        """Options as fsspec's HTTP filesystem takes them; a fresh dict."""
        return {"headers": basic_authorization(self.user, self.password)}

    def url(self, path: str = "") -> str:
        """URL of a name in the directory."""
        return f"{self.address}/{path}"


class SambaServer(FileServer):
    """Samba's ``smbd``, with one share, for the user who runs the tests. Starts in about 0.5 s."""

    def _launch(self, directory: Path) -> ServerProcess:
        daemon, passwords = _find("smbd", package="samba"), _find("smbpasswd", package="samba")
        self.user = getpass.getuser()
        self._directory(directory)
        state = directory / "samba"
        state.mkdir()
        [port] = free_ports(1)
        config = directory / "smb.conf"
        places = "\n".join(
            f"{kind} = {state}" for kind in ("private dir", "lock directory", "state directory", "cache directory")
        )
        config.write_text(
            f"[global]\n{places}\npid directory = {state}\nncalrpc dir = {state / 'rpc'}\nsmb ports = {port}\n"
            "interfaces = 127.0.0.1/8\nbind interfaces only = yes\nserver min protocol = SMB2\n"
            "disable netbios = yes\nload printers = no\nprinting = bsd\nlog level = 1\nlogging = file\n"
            "server role = standalone server\nusershare max shares = 0\n"
            f"[data]\npath = {self.data}\nread only = no\nforce user = {self.user}\nmangled names = no\n"
        )
        entry = f"{self.password}\n{self.password}\n"
        _run_once([passwords, "-c", str(config), "-a", "-s", self.user], standard_input=entry)
        self._port = port
        command = [daemon, "--foreground", "--no-process-group", "--debug-stdout", "-s", str(config)]
        return ServerProcess("smbd", command, directory=directory)

    def _await_ready(self, process: ServerProcess) -> str:
        process.wait_until(lambda: _connected(self._port))
        return f"127.0.0.1:{self._port}"

    @property
    def storage_options(self) -> dict[str, object]:
        """Options as fsspec's SMB filesystem takes them; a fresh dict."""
        return {"username": self.user, "password": self.password, "register_session_retries": 0}

    def url(self, path: str = "") -> str:
        """URL of a name in the share."""
        return f"smb://{self.address}/data/{path}"


def _find(name: str, *, package: str) -> str:
    found = shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", ""), _SYSTEM)))
    if found is None:
        raise MissingBackendError(
            f"start {name}: it is not installed; apt-get install {package} brings it, and make setup where it may"
        )
    return found


def _run_once(command: list[str], *, standard_input: str = "") -> None:
    made = subprocess.run(command, input=standard_input, capture_output=True, text=True, timeout=240, check=False)
    if made.returncode:
        raise ServerStartError(
            f"run {Path(command[0]).name}: ended with {made.returncode}; said:\n{made.stderr[-2048:]}"
        )


def _connected(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port), timeout=2):
        return True


def _greeted(process: ServerProcess, port: int, greeting: bytes) -> None:
    def asked() -> bool | None:
        with socket.create_connection(("127.0.0.1", port), timeout=2) as client:
            return client.recv(len(greeting)) == greeting or None

    process.wait_until(asked)
