"""s3torchconnector: AWS's own client for torch, on the Common Runtime, with its DCP-optimized reader.

Its DCP classes take no endpoint, so their client is replaced by one that has it; nothing else is changed from
the defaults (8 MiB parts, one writer thread, 10 Gbit/s as the target for its connections).
"""

from __future__ import annotations

import importlib.util

from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ..settings import REGION, Target
from ..workloads import State
from . import Layout, Scope

__all__ = ["S3TorchConnector"]


class S3TorchConnector:
    """``S3StorageWriter`` and ``S3StorageReader``."""

    layout = Layout.DCP
    sharding = True

    def available(self) -> str | None:
        """Absent when the package is."""
        if importlib.util.find_spec("s3torchconnector") is None:
            return "s3torchconnector is not installed (extra: bench)"
        return None

    def save(self, state: State, target: Target) -> None:
        """Save."""
        from s3torchconnector import S3ClientConfig
        from s3torchconnector._s3client import S3Client
        from s3torchconnector.dcp import S3StorageWriter

        config = S3ClientConfig(force_path_style=True)
        writer = S3StorageWriter(REGION, target.url, s3client_config=config)
        client = S3Client(REGION, endpoint=target.endpoint, s3client_config=config)
        writer.fs._client = client  # type: ignore[attr-defined] # declared as torch's file system
        save(state, storage_writer=writer)

    def load(self, template: State, target: Target, scope: Scope) -> None:
        """Load."""
        from s3torchconnector import S3ClientConfig
        from s3torchconnector._s3client import S3Client
        from s3torchconnector.dcp import S3StorageReader

        del scope
        config = S3ClientConfig(force_path_style=True)
        reader = S3StorageReader(REGION, target.url, s3client_config=config)
        reader.fs._client = S3Client(REGION, endpoint=target.endpoint, s3client_config=config)
        load(template, storage_reader=reader)
