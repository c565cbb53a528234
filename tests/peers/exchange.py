"""Every writer and every reader of DCP checkpoints that dcpfs must understand, behind two functions.

Flow: ``with connect_peers(server):`` ``write(Writer.FSSPEC, state, place)`` and then ``read(Reader.LOAD, template,
place)``. A `Place` says where, and carries the credentials of a server. What a peer needs beyond a URL (torch's fsspec
writer drops its options, the S3 connector takes its endpoint from a client and its credentials from the environment,
multi-storage-client both from a file) is done here. A peer that is not installed keeps its cells: what is asked of it
skips the test and says so. obstore's class stands for the scheme ``obs3`` beside the one that fsspec knows for ``s3``,
with the options of `obstore_options`.
"""

from __future__ import annotations

import enum
import importlib.util
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

import dcpfs
from dcpfs.testing.servers import S3Server
from dcpfs.testing.servers_obstore import obstore_options, obstore_scheme

__all__ = [
    "HAS_CONNECTOR",
    "HAS_MULTI_STORAGE",
    "NewPlace",
    "Place",
    "Reader",
    "Writer",
    "connect_peers",
    "obstore_options",
    "obstore_scheme",
    "read",
    "readers_of",
    "storage_reader",
    "write",
    "writers_of",
]

HAS_CONNECTOR = importlib.util.find_spec("s3torchconnector") is not None
HAS_MULTI_STORAGE = importlib.util.find_spec("multistorageclient") is not None


@dataclass(frozen=True)
class Place:
    """Where a checkpoint lies: ``local``, ``memory`` or ``s3``."""

    kind: str
    url: str
    options: Mapping[str, object] = field(default_factory=dict)


NewPlace = Callable[[str], Place]
"""Makes a place of a kind that nobody has used."""


class Writer(enum.Enum):
    OWN = "dcpfs.save"
    OWN_WRITER = "dcp.save with FsspecStorageWriter"
    OWN_PLANNER = "dcp.save with FsspecStorageWriter and dcpfs.SavePlanner"
    FILES = "FileSystemWriter"
    FILES_THREADS = "FileSystemWriter, 4 threads"
    FILES_EACH = "FileSystemWriter, a file per item"
    FSSPEC = "FsspecWriter"
    CONNECTOR = "S3StorageWriter"
    CONNECTOR_PREFIXES = "S3StorageWriter, 2 threads, names with a prefix"
    MULTI_STORAGE = "MultiStorageFileSystemWriter"
    MULTI_STORAGE_THREADS = "MultiStorageFileSystemWriter, 3 threads"


class Reader(enum.Enum):
    LOAD = "dcpfs.load"
    READ = "dcpfs.read"
    OWN_READER = "dcp.load with FsspecStorageReader"
    OWN_PLANNER = "dcp.load with FsspecStorageReader and dcpfs.LoadPlanner"
    FILES = "FileSystemReader"
    FSSPEC = "FsspecReader"
    CONNECTOR = "S3StorageReader"
    MULTI_STORAGE = "MultiStorageFileSystemReader"
    MULTI_STORAGE_THREADS = "MultiStorageFileSystemReader, 3 threads"


_OWN_WRITERS = (Writer.OWN, Writer.OWN_WRITER, Writer.OWN_PLANNER)
_OWN_READERS = (Reader.LOAD, Reader.READ, Reader.OWN_READER, Reader.OWN_PLANNER)


_CONNECTOR = (Writer.CONNECTOR, Writer.CONNECTOR_PREFIXES)
_MULTI_STORAGE = (Writer.MULTI_STORAGE, Writer.MULTI_STORAGE_THREADS)
_CONNECTOR_READERS = (Reader.CONNECTOR,)
_MULTI_STORAGE_READERS = (Reader.MULTI_STORAGE, Reader.MULTI_STORAGE_THREADS)


def _require_peer(peer: Writer | Reader) -> None:
    """Skip the test where the peer is not installed; a failure where the environment requires what wheels bring."""
    package = ""
    if peer in (*_CONNECTOR, *_CONNECTOR_READERS) and not HAS_CONNECTOR:
        package = "s3torchconnector"
    if peer in (*_MULTI_STORAGE, *_MULTI_STORAGE_READERS) and not HAS_MULTI_STORAGE:
        package = "multi-storage-client"
    if package:
        # Not above: whoever makes golden checkpoints has no pytest, and asks for what is there alone.
        import pytest

        from tests.conformance.servers_here import REQUIRED

        leave = pytest.fail if os.environ.get(REQUIRED) else pytest.skip
        leave(f"{peer.value}: {package} is not installed")


def writers_of(kind: str) -> tuple[Writer, ...]:
    """Who can write there, installed or not."""
    if kind == "local":
        files = (Writer.FILES, Writer.FILES_THREADS, Writer.FILES_EACH)
        return (*_OWN_WRITERS, *files, Writer.FSSPEC, *_MULTI_STORAGE)
    if kind == "s3":
        return (*_OWN_WRITERS, Writer.FSSPEC, *_CONNECTOR, *_MULTI_STORAGE)
    return (*_OWN_WRITERS, Writer.FSSPEC)


def readers_of(kind: str) -> tuple[Reader, ...]:
    """Who can read there, installed or not."""
    if kind == "local":
        return (*_OWN_READERS, Reader.FILES, Reader.FSSPEC, *_MULTI_STORAGE_READERS)
    if kind == "s3":
        return (*_OWN_READERS, Reader.FSSPEC, *_CONNECTOR_READERS, *_MULTI_STORAGE_READERS)
    return (*_OWN_READERS, Reader.FSSPEC)


@contextmanager
def connect_peers(server: S3Server) -> Iterator[None]:
    """Tell the peers that take no options how to reach the server."""
    profile = {
        "storage_provider": {
            "type": "s3",
            "options": {
                "base_path": server.bucket,
                "region_name": server.region,
                "endpoint_url": server.endpoint_url,
            },
        },
        "credentials_provider": {
            "type": "S3Credentials",
            "options": {"access_key": server.access_key, "secret_key": server.secret_key},
        },
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "multi-storage-client.json")
        file.write_text(json.dumps({"profiles": {_profile_of(server.endpoint_url): profile}}))
        wanted = {
            "AWS_ACCESS_KEY_ID": server.access_key,
            "AWS_SECRET_ACCESS_KEY": server.secret_key,
            "MSC_CONFIG": str(file),
        }
        before = {name: os.environ.get(name) for name in wanted}
        os.environ.update(wanted)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _profile_of(endpoint_url: str) -> str:
    # The library keeps a client by profile for as long as the process lives.
    return f"port-{endpoint_url.rpartition(':')[2]}"


def _multi_storage_url(place: Place) -> str:
    if place.kind == "local":
        return place.url
    name = place.url.removeprefix("s3://").partition("/")[2]
    return f"msc://{_profile_of(str(place.options['endpoint_url']))}/{name}"


def write(writer: Writer, state: Mapping[str, object], place: Place) -> None:
    """Save the state; skips the test where the writer is not installed."""
    _require_peer(writer)
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
    if writer in _MULTI_STORAGE:
        from multistorageclient.contrib.torch import MultiStorageFileSystemWriter

        threads = 3 if writer is Writer.MULTI_STORAGE_THREADS else 1
        made: StorageWriter = MultiStorageFileSystemWriter(
            _multi_storage_url(place), sync_files=False, thread_count=threads
        )
        return made
    from s3torchconnector.dcp import HexPrefixStrategy, S3StorageWriter

    connector = S3StorageWriter("us-east-1", place.url)
    if writer is Writer.CONNECTOR_PREFIXES:
        prefixes = HexPrefixStrategy(epoch_num=3)
        connector = S3StorageWriter("us-east-1", place.url, prefix_strategy=prefixes, thread_count=2)
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
    dcp_load(template, storage_reader=storage_reader(reader, place), planner=planner)
    return template


def storage_reader(reader: Reader, place: Place) -> StorageReader:
    """What reads under ``dcp.load``; skips the test where it is not installed."""
    _require_peer(reader)
    if reader in _OWN_READERS:
        return dcpfs.FsspecStorageReader(place.url, storage_options=place.options)
    if reader is Reader.FILES:
        return FileSystemReader(place.url)
    if reader is Reader.FSSPEC:
        return FsspecReader(place.url, **place.options)
    if reader in _MULTI_STORAGE_READERS:
        from multistorageclient.contrib.torch import MultiStorageFileSystemReader

        threads = 3 if reader is Reader.MULTI_STORAGE_THREADS else 1
        made: StorageReader = MultiStorageFileSystemReader(_multi_storage_url(place), thread_count=threads)
        return made
    from s3torchconnector.dcp import S3StorageReader

    connector = S3StorageReader("us-east-1", place.url)
    connector.fs._client = _connector_client(place)
    return connector


def _connector_client(place: Place) -> Any:
    """The connector takes its credentials from the environment alone; see `connect_peers`."""
    from s3torchconnector import S3ClientConfig
    from s3torchconnector._s3client import S3Client

    config = S3ClientConfig(force_path_style=True)
    return S3Client("us-east-1", endpoint=str(place.options["endpoint_url"]), s3client_config=config)
