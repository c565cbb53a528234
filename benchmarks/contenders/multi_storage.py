"""NVIDIA's multi-storage-client: its writer and reader for DCP, on S3.

It takes its settings from a file that an environment variable names, and keeps what it read by the name of a profile:
each endpoint and bucket gets a profile of its own, in a file that is there for as long as it is read. Caches and
observability are off, as they are unless somebody asks for them.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ..settings import PLACE_PREFIX, S3Access, Target
from ..workloads import State
from . import Layout, Scope

__all__ = ["MultiStorageClient"]

_VARIABLE = "MSC_CONFIG"


class MultiStorageClient:
    """``MultiStorageFileSystemWriter`` and ``MultiStorageFileSystemReader`` with their defaults, but for fsync."""

    layout = Layout.DCP
    sharding = True

    def available(self) -> str | None:
        """Absent when the package is."""
        if importlib.util.find_spec("multistorageclient") is None:
            return "multi-storage-client is not installed (extra: bench)"
        return None

    def import_modules(self, target: Target) -> None:
        """Its DCP classes, and the provider that it looks up by name."""
        del target
        importlib.import_module("multistorageclient.contrib.torch.filesystem")
        importlib.import_module("multistorageclient.providers.s3")

    def save(self, state: State, target: Target) -> None:
        """Save; ``os.sync()`` after each remote file is off, as for the other fsspec-like classes."""
        from multistorageclient.contrib.torch.filesystem import MultiStorageFileSystemWriter

        with _profile(target) as url:
            save(state, storage_writer=MultiStorageFileSystemWriter(url, sync_files=False))

    def load(self, template: State, target: Target, scope: Scope) -> None:
        """Load."""
        from multistorageclient.contrib.torch.filesystem import MultiStorageFileSystemReader

        del scope
        with _profile(target) as url:
            load(template, storage_reader=MultiStorageFileSystemReader(url))


@contextlib.contextmanager
def _profile(target: Target) -> Iterator[str]:
    access = target.s3()
    if access is None:
        raise ValueError(f"multi-storage-client is used for S3 only, not {target.scheme}")
    name = "bench-" + hashlib.sha256(f"{access.endpoint} {access.bucket}".encode()).hexdigest()[:12]
    before = os.environ.get(_VARIABLE)
    with tempfile.TemporaryDirectory(prefix=PLACE_PREFIX) as directory:  # for its owner alone
        path = Path(directory) / "config.json"
        path.write_text(json.dumps({"profiles": {name: _settings(access)}}))
        os.environ[_VARIABLE] = str(path)
        try:
            yield f"msc://{name}/{access.key}"
        finally:
            if before is None:
                del os.environ[_VARIABLE]
            else:
                os.environ[_VARIABLE] = before


def _settings(access: S3Access) -> dict[str, object]:
    options = {"base_path": access.bucket, "region_name": access.region}
    if access.endpoint is not None:
        options["endpoint_url"] = access.endpoint
    settings: dict[str, object] = {"storage_provider": {"type": "s3", "options": options}}
    if access.access_key is not None and access.secret_key is not None:
        keys = {"access_key": access.access_key, "secret_key": access.secret_key}
        if access.token is not None:
            keys["session_token"] = access.token
        settings["credentials_provider"] = {"type": "S3Credentials", "options": keys}
    return settings
