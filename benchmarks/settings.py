"""Where a case runs: a store that is fast, one that behaves like a remote one, local files, or any URL.

Problem: contenders name the same place in different ways, and a developer's own AWS profile changes what they
do; a user's own store, on the other hand, is reached by just that profile. A laptop is no wide-area store.

Way taken: a `Target` is a value that every contender derives its own arguments from, and
`client_environment` is the whole of what a client process sees of AWS: nothing of the caller's for our own
server, all of it, and the keys among the options, for the user's URL. A `Link` says how far away the server
is to seem; the sink keeps to it itself, any other server on loopback gets a proxy in front (`benchmarks.proxy`).
Options can hold secrets: they cross process borders on stdin and are shown nowhere.
"""

from __future__ import annotations

import enum
import os
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from dcpfs.storage.location import Location

__all__ = [
    "BUCKET",
    "PACKAGE_ROOT",
    "PLACE_PREFIX",
    "REGION",
    "Link",
    "S3Access",
    "Setting",
    "Target",
    "client_environment",
]

BUCKET = "bench"
REGION = "us-east-1"
PACKAGE_ROOT = Path(__file__).resolve().parents[len((__package__ or "").split("."))]
"""Where Python finds this package, under whichever of its two names: child processes start there."""
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
    URL = "url"
    """Whatever the user names, with the user's options."""

    @property
    def told(self) -> str:
        """What it is, for those who read figures and not this."""
        return _TOLD[self]

    @property
    def is_s3(self) -> bool:
        """True when the sink serves it."""
        return self in (Setting.FAST, Setting.S3LIKE)

    @property
    def scheme(self) -> str:
        """Of URLs there; of the user's own URL nothing is known here."""
        if self.is_s3:
            return "s3"
        return "memory" if self is Setting.MEMORY else "file"

    @property
    def latency_ms(self) -> float:
        """Wait of the sink before each answer, unless a link says otherwise."""
        return 20.0 if self is Setting.S3LIKE else 0.0

    @property
    def mbps_per_connection(self) -> float:
        """Rate of one connection to the sink in MB/s; 0: unlimited. Unless a link says otherwise."""
        return 80.0 if self is Setting.S3LIKE else 0.0


_TOLD = {
    Setting.FAST: "an S3-like server in memory on loopback, without authentication or hashing",
    Setting.S3LIKE: "the same kind of server with 20 ms before each answer and 80 MB/s a connection",
    Setting.TMPFS: "local files in memory",
    Setting.DISK: "local files on a device, synced when saved, in the page cache when loaded unless a case says cold",
    Setting.MEMORY: "memory:// of fsspec, in the client's own process",
    Setting.URL: "",
}


class Link(BaseModel):
    """How far away a server is to seem.

    Attributes:
        latency_ms: Wait before the first byte of each answer.
        mb_per_second_per_connection: Rate of one connection, each way; 0: unlimited.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    latency_ms: float = Field(default=0.0, ge=0)
    mb_per_second_per_connection: float = Field(default=0.0, ge=0)


@dataclass(frozen=True)
class S3Access:
    """What an S3 client needs to know. None: whatever the environment says."""

    bucket: str
    key: str
    """Of the checkpoint, without slashes at its ends."""
    endpoint: str | None
    region: str
    access_key: str | None = None
    secret_key: str | None = None
    token: str | None = None


class Target(BaseModel):
    """A place for one checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    setting: Setting
    path: str
    """Key within the bucket, directory, path in ``memory://``, or name below the user's URL."""
    port: int | None = None
    """The sink's port on 127.0.0.1, or that of the proxy: who counts requests."""
    root: str | None = Field(default=None, repr=False)
    """The user's URL."""
    options: dict[str, JsonValue] = Field(default_factory=dict, repr=False)
    """The user's options, through the proxy where there is one."""
    direct_root: str | None = Field(default=None, repr=False)
    """The user's URL for preparation and verification, which go past the proxy; None: the same."""
    direct_options: dict[str, JsonValue] | None = Field(default=None, repr=False)

    @property
    def url(self) -> str:
        """The checkpoint's URL."""
        if self.setting.is_s3:
            return f"s3://{BUCKET}/{self.path}"
        if self.setting is Setting.URL:
            return self._location().url
        return f"memory://{self.path}" if self.setting is Setting.MEMORY else self.path

    @property
    def scheme(self) -> str:
        """Of the URL; ``file`` for local paths."""
        return self._location().scheme if self.setting is Setting.URL else self.setting.scheme

    @property
    def in_process(self) -> bool:
        """What is saved is seen by the process alone that saved it."""
        return self.scheme == "memory"

    @property
    def directory(self) -> str | None:
        """The local directory that it is, or None."""
        if self.scheme != "file":
            return None
        return self._location().path if self.setting is Setting.URL else self.path

    @property
    def endpoint(self) -> str | None:
        """URL of the S3 server, where one is named."""
        if self.setting.is_s3:
            return f"http://127.0.0.1:{self.port}"
        return _text(self.options, "endpoint_url")

    def s3(self) -> S3Access | None:
        """How a client of S3 gets there; None where it is no S3."""
        if self.setting.is_s3:
            return S3Access(BUCKET, self.path, self.endpoint, REGION, _KEY, _SECRET)
        if self.scheme != "s3":
            return None
        bucket, _, key = self._location().path.partition("/")
        return S3Access(
            bucket,
            key,
            self.endpoint,
            _text(self.options, "region_name")
            or os.environ.get("AWS_REGION")
            or os.environ.get("AWS_DEFAULT_REGION")
            or REGION,
            _text(self.options, "key") or _text(self.options, "aws_access_key_id"),
            _text(self.options, "secret") or _text(self.options, "aws_secret_access_key"),
            _text(self.options, "token") or _text(self.options, "aws_session_token"),
        )

    def storage_options(self) -> dict[str, object]:
        """Options of fsspec for it."""
        if self.setting is Setting.URL:
            return dict(self.options)
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

    def direct(self) -> Target:
        """The same place past the proxy, for what is neither timed nor counted."""
        root = self.root if self.direct_root is None else self.direct_root
        options = self.options if self.direct_options is None else self.direct_options
        return self.model_copy(update={"root": root, "options": options})

    def scrub(self, text: str) -> str:
        """A text, e.g. of a peer's error, without the secrets of the user's URL and options."""
        if self.root is None:
            return text
        return Location(self.root, dict(self.options)).scrub(text)

    def _location(self) -> Location:
        if self.root is None:
            raise ValueError(f"A target of the setting {self.setting.value} names no URL")
        return Location(self.root).join(self.path)


def client_environment(target: Target | None = None) -> dict[str, str]:
    """Environment of a client process.

    Args:
        target: Where it works. At the user's URL it sees the caller's environment and the keys among the options; else
            nothing of the caller's AWS set-up.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    if target is not None and target.setting is Setting.URL:
        access = target.s3()
        keys = {} if access is None else _environment_of(access)
        if access is not None and (profile := _text(target.options, "profile")) is not None:
            keys["AWS_PROFILE"] = profile
        return dict(os.environ) | keys | {"PYTHONUNBUFFERED": "1"}
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


def _environment_of(access: S3Access) -> dict[str, str]:
    """For clients that take keys from nowhere else."""
    if access.access_key is None or access.secret_key is None:
        return {}
    token = {} if access.token is None else {"AWS_SESSION_TOKEN": access.token}
    return {"AWS_ACCESS_KEY_ID": access.access_key, "AWS_SECRET_ACCESS_KEY": access.secret_key, **token}


def _text(options: dict[str, JsonValue], name: str) -> str | None:
    """An option, wherever s3fs lets it stand."""
    for place in (options, options.get("client_kwargs")):
        if isinstance(place, dict) and isinstance(found := place.get(name), str):
            return found
    return None
