"""s3torchconnector: AWS's own client for torch, on the Common Runtime, with each kind of its readers.

Its DCP classes take no endpoint, so their client is replaced by one that has it; nothing else is changed from
the defaults (8 MiB parts, one writer thread, 10 Gbit/s as the target for its connections). Keys come from the
environment, the only place where it looks for them.
"""

from __future__ import annotations

import importlib
import importlib.util

from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ..settings import S3Access, Target
from ..workloads import State
from . import Layout, Scope

__all__ = [
    "S3TorchConnector",
    "S3TorchConnectorRangeBased",
    "S3TorchConnectorSequential",
    "connector_reader",
    "connector_writer",
]


class S3TorchConnector:
    """``S3StorageWriter`` and ``S3StorageReader`` with its default, the DCP-optimized reader."""

    layout = Layout.DCP
    sharding = True
    reader = "dcp_optimized"
    """Name of the constructor in ``S3ReaderConstructor``."""

    def available(self) -> str | None:
        """Absent when the package is."""
        if importlib.util.find_spec("s3torchconnector") is None:
            return "s3torchconnector is not installed (extra: bench)"
        return None

    def import_modules(self, target: Target) -> None:
        """Its DCP classes and its client."""
        del target
        importlib.import_module("s3torchconnector.dcp")
        importlib.import_module("s3torchconnector._s3client")

    def save(self, state: State, target: Target) -> None:
        """Save."""
        save(state, storage_writer=connector_writer(target))

    def load(self, template: State, target: Target, scope: Scope) -> None:
        """Load."""
        del scope
        load(template, storage_reader=connector_reader(target, self.reader))


class S3TorchConnectorSequential(S3TorchConnector):
    """Its reader that fetches an object from the beginning."""

    reader = "sequential"


class S3TorchConnectorRangeBased(S3TorchConnector):
    """Its reader that fetches what is asked for, through a buffer."""

    reader = "range_based"


def connector_writer(target: Target) -> FileSystemWriter:
    """Its writer for a target."""
    from s3torchconnector import S3ClientConfig
    from s3torchconnector._s3client import S3Client
    from s3torchconnector.dcp import S3StorageWriter

    config, access = S3ClientConfig(force_path_style=True), _access(target)
    writer: FileSystemWriter = S3StorageWriter(access.region, target.url, s3client_config=config)
    client = S3Client(access.region, endpoint=access.endpoint, s3client_config=config)
    writer.fs._client = client  # type: ignore[attr-defined] # declared as torch's file system
    return writer


def connector_reader(target: Target, kind: str) -> FileSystemReader:
    """Its reader of a kind for a target."""
    from s3torchconnector import S3ClientConfig, S3ReaderConstructor
    from s3torchconnector._s3client import S3Client
    from s3torchconnector.dcp import S3StorageReader

    config, access = S3ClientConfig(force_path_style=True), _access(target)
    constructor = getattr(S3ReaderConstructor, kind)()
    reader: FileSystemReader = S3StorageReader(
        access.region, target.url, s3client_config=config, reader_constructor=constructor
    )
    client = S3Client(access.region, endpoint=access.endpoint, s3client_config=config)
    reader.fs._client = client  # type: ignore[attr-defined] # declared as torch's file system
    return reader


def _access(target: Target) -> S3Access:
    access = target.s3()
    if access is None:
        raise ValueError(f"s3torchconnector speaks S3 only, not {target.scheme}")
    return access
