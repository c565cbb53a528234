"""Where a case runs: a store that is fast, one that behaves like a remote one, or a local filesystem.

Problem: contenders name the same place in different ways, and a developer's own AWS profile changes what they
do.

Way taken: a `Target` is a value that every contender derives its own arguments from, and
`client_environment` is the whole of what a client process sees of AWS.
"""

from __future__ import annotations

import enum
import os

from pydantic import BaseModel, ConfigDict

__all__ = ["BUCKET", "PLACE_PREFIX", "REGION", "Setting", "Target", "client_environment"]

BUCKET = "bench"
REGION = "us-east-1"
PLACE_PREFIX = "dcpfs-benchmark-"
"""How directories that the benchmarks made, and may delete, are called."""
_KEY = "benchmark"
_SECRET = "not-a-secret"


class Setting(str, enum.Enum):
    """Kinds of place."""

    FAST = "fast"
    """S3 sink on loopback, as fast as it goes: ranks what clients cost."""
    S3LIKE = "s3like"
    """The same with 20 ms before each answer and 80 MB/s a connection: ranks concurrency and round trips."""
    TMPFS = "tmpfs"
    """Local files in memory."""
    DISK = "disk"
    """Local files on a device."""
    MEMORY = "memory"
    """``memory://`` of fsspec, in the client's own process."""

    @property
    def is_s3(self) -> bool:
        """True when the sink serves it."""
        return self in (Setting.FAST, Setting.S3LIKE)

    @property
    def latency_ms(self) -> float:
        """Wait of the sink before each answer."""
        return 20.0 if self is Setting.S3LIKE else 0.0

    @property
    def mbps_per_connection(self) -> float:
        """Rate of one connection to the sink in MB/s; 0: unlimited."""
        return 80.0 if self is Setting.S3LIKE else 0.0


class Target(BaseModel):
    """A place for one checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    setting: Setting
    path: str
    """Key within the bucket, directory, or path in ``memory://``."""
    port: int | None = None
    """The sink's port on 127.0.0.1."""

    @property
    def url(self) -> str:
        """The checkpoint's URL."""
        if self.setting.is_s3:
            return f"s3://{BUCKET}/{self.path}"
        return f"memory://{self.path}" if self.setting is Setting.MEMORY else self.path

    @property
    def endpoint(self) -> str | None:
        """The sink's URL."""
        return None if self.port is None else f"http://127.0.0.1:{self.port}"

    def storage_options(self) -> dict[str, object]:
        """Options of fsspec for it."""
        if not self.setting.is_s3:
            return {}
        return {
            "key": _KEY,
            "secret": _SECRET,
            "endpoint_url": self.endpoint,
            "client_kwargs": {"region_name": REGION},
        }

    def child(self, name: str) -> Target:
        """A place below."""
        return self.model_copy(update={"path": f"{self.path}/{name}"})


def client_environment() -> dict[str, str]:
    """Environment of a client process: the caller's, with nothing of the caller's AWS set-up."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    return kept | {
        "AWS_ACCESS_KEY_ID": _KEY,
        "AWS_SECRET_ACCESS_KEY": _SECRET,
        "AWS_REGION": REGION,
        "AWS_DEFAULT_REGION": REGION,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "PYTHONUNBUFFERED": "1",
    }
