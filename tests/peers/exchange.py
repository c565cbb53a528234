"""Every writer and every reader of DCP checkpoints that dcpfs must understand, behind two functions.

Flow: ``write(Writer.FSSPEC, state, place)`` and then ``read(Reader.LOAD, template, place)``. A `Place` says where, and
carries the credentials of a server. What a peer needs beyond a URL (torch's fsspec writer drops its options, the
S3 connector takes its endpoint from a client) is done here.
"""

from __future__ import annotations

import enum
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

import dcpfs

__all__ = ["HAS_CONNECTOR", "Place", "Reader", "Writer", "read", "readers_of", "write", "writers_of"]

HAS_CONNECTOR = importlib.util.find_spec("s3torchconnector") is not None


@dataclass(frozen=True)
class Place:
    """Where a checkpoint lies: ``local``, ``memory`` or ``s3``."""

    kind: str
    url: str
    options: Mapping[str, object] = field(default_factory=dict)


class Writer(enum.Enum):
    OWN = "dcpfs.save"
    OWN_WRITER = "dcp.save with FsspecStorageWriter"
    OWN_PLANNER = "dcp.save with FsspecStorageWriter and dcpfs.SavePlanner"
    FILES = "FileSystemWriter"
    FILES_THREADS = "FileSystemWriter, 4 threads"
    FILES_EACH = "FileSystemWriter, a file per item"
    FSSPEC = "FsspecWriter"
    CONNECTOR = "S3StorageWriter"


class Reader(enum.Enum):
    LOAD = "dcpfs.load"
    READ = "dcpfs.read"
    OWN_READER = "dcp.load with FsspecStorageReader"
    OWN_PLANNER = "dcp.load with FsspecStorageReader and dcpfs.LoadPlanner"
    FILES = "FileSystemReader"
    FSSPEC = "FsspecReader"
    CONNECTOR = "S3StorageReader"


_OWN_WRITERS = (Writer.OWN, Writer.OWN_WRITER, Writer.OWN_PLANNER)
_OWN_READERS = (Reader.LOAD, Reader.READ, Reader.OWN_READER, Reader.OWN_PLANNER)


def writers_of(kind: str) -> tuple[Writer, ...]:
    """Who can write there."""
    if kind == "local":
        return (*_OWN_WRITERS, Writer.FILES, Writer.FILES_THREADS, Writer.FILES_EACH, Writer.FSSPEC)
    if kind == "s3" and HAS_CONNECTOR:
        return (*_OWN_WRITERS, Writer.FSSPEC, Writer.CONNECTOR)
    return (*_OWN_WRITERS, Writer.FSSPEC)


def readers_of(kind: str) -> tuple[Reader, ...]:
    """Who can read there."""
    if kind == "local":
        return (*_OWN_READERS, Reader.FILES, Reader.FSSPEC)
    if kind == "s3" and HAS_CONNECTOR:
        return (*_OWN_READERS, Reader.FSSPEC, Reader.CONNECTOR)
    return (*_OWN_READERS, Reader.FSSPEC)


def write(writer: Writer, state: Mapping[str, object], place: Place) -> None:
    """Save the state."""
    if writer is Writer.OWN:
        dcpfs.save(state, place.url, storage_options=place.options)
        return
    planner = dcpfs.SavePlanner() if writer is Writer.OWN_PLANNER else None
    dcp_save(dict(state), storage_writer=_storage_writer(writer, place), planner=planner)


def _storage_writer(writer: Writer, place: Place) -> StorageWriter:
    if writer in _OWN_WRITERS:
        return dcpfs.FsspecStorageWriter(place.url, storage_options=place.options)
    if writer is Writer.FILES:
        return FileSystemWriter(place.url)
    if writer is Writer.FILES_THREADS:
        return FileSystemWriter(place.url, thread_count=4)
    if writer is Writer.FILES_EACH:
        return FileSystemWriter(place.url, single_file_per_rank=False, thread_count=2)
    if writer is Writer.FSSPEC:
        return FsspecWriter(place.url, sync_files=False, **place.options)  # type: ignore[arg-type]  # options of a filesystem
    from s3torchconnector.dcp import S3StorageWriter

    connector = S3StorageWriter("us-east-1", place.url)
    connector.fs._client = _connector_client(place)  # type: ignore[attr-defined]  # declared as torch's file system
    return connector


def read(reader: Reader, template: dict[str, object], place: Place) -> dict[str, object]:
    """Load into the template, or without it where the reader takes none."""
    if reader is Reader.READ:
        return dcpfs.read(place.url, storage_options=place.options)
    if reader is Reader.LOAD:
        report = dcpfs.load(template, place.url, storage_options=place.options)
        assert not report.missing
        assert not report.unexpected
        assert not report.mismatched
        return template
    planner = dcpfs.LoadPlanner() if reader is Reader.OWN_PLANNER else DefaultLoadPlanner()
    dcp_load(template, storage_reader=_storage_reader(reader, place), planner=planner)
    return template


def _storage_reader(reader: Reader, place: Place) -> StorageReader:
    if reader in _OWN_READERS:
        return dcpfs.FsspecStorageReader(place.url, storage_options=place.options)
    if reader is Reader.FILES:
        return FileSystemReader(place.url)
    if reader is Reader.FSSPEC:
        return FsspecReader(place.url, **place.options)
    from s3torchconnector.dcp import S3StorageReader

    connector = S3StorageReader("us-east-1", place.url)
    connector.fs._client = _connector_client(place)
    return connector


def _connector_client(place: Place) -> Any:
    """The connector takes its credentials from the environment alone; see the fixture that sets it."""
    from s3torchconnector import S3ClientConfig
    from s3torchconnector._s3client import S3Client

    config = S3ClientConfig(force_path_style=True)
    return S3Client("us-east-1", endpoint=str(place.options["endpoint_url"]), s3client_config=config)
