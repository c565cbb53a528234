"""An SFTP service of one directory, started as a module by `dcpfs.testing.servers_files.AsyncsshServer`.

An OpenSSH server can't be had from a wheel; asyncssh's serves the same protocol with the same extensions, above
all ``posix-rename@openssh.com``, which replaces an old file in one step and which rclone's server lacks.
"""

from __future__ import annotations

import asyncio
import os
import sys

import asyncssh

__all__ = ["serve"]


class _OneUser(asyncssh.SSHServer):
    def begin_auth(self, username: str) -> bool:  # noqa: ARG002 - asyncssh's contract
        return True

    def password_auth_supported(self) -> bool:
        return True

    def validate_password(self, username: str, password: str) -> bool:
        return (username, password) == (os.environ["DCPFS_SFTP_USER"], os.environ["DCPFS_SFTP_PASSWORD"])


async def serve(directory: str) -> None:
    """Serve a directory as the root, until the process is ended."""

    def root(channel: asyncssh.SSHServerChannel[bytes]) -> asyncssh.SFTPServer:
        return asyncssh.SFTPServer(channel, chroot=os.fsencode(directory))

    key = asyncssh.generate_private_key("ssh-ed25519")
    server = await asyncssh.listen("127.0.0.1", 0, server_factory=_OneUser, server_host_keys=[key], sftp_factory=root)
    print(f"serving SFTP on 127.0.0.1:{server.get_port()}", flush=True)  # noqa: T201 - read by who started it
    await server.wait_closed()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
