"""A process that has torch and no dcpfs: it writes the sample state, or reads it and compares.

``python -m tests.peers.torch_alone '["write", "files", "/tmp/c", {}]' '["read", …]'``: any number of jobs, each with a
verb, a peer (``files``, ``fsspec``, ``connector`` or ``multi storage``), a URL and the options of its filesystem;
multi-storage-client finds its own in the file that ``MSC_CONFIG`` names. Runs under any release of torch, by hand too.
Ends with 0 when everything that was read was right.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from tests.peers.sample_state import assert_same, full_state, odd_state, template_of, textual, trained_state

__all__ = ["sample"]


def sample() -> dict[str, object]:
    """The state that is exchanged."""
    return {**full_state(), **odd_state(), "trained": trained_state()}


def _connector_client(options: dict[str, Any]) -> Any:
    from s3torchconnector import S3ClientConfig
    from s3torchconnector._s3client import S3Client

    os.environ["AWS_ACCESS_KEY_ID"] = options["key"]
    os.environ["AWS_SECRET_ACCESS_KEY"] = options["secret"]
    config = S3ClientConfig(force_path_style=True)
    return S3Client("us-east-1", endpoint=options["endpoint_url"], s3client_config=config)


def _writer(peer: str, url: str, options: dict[str, Any]) -> Any:
    if peer == "files":
        return FileSystemWriter(url, thread_count=2)
    if peer == "fsspec":
        return FsspecWriter(url, sync_files=False, **options)
    if peer == "multi storage":
        from multistorageclient.contrib.torch import MultiStorageFileSystemWriter

        return MultiStorageFileSystemWriter(url, sync_files=False)
    from s3torchconnector.dcp import S3StorageWriter

    writer = S3StorageWriter("us-east-1", url)
    writer.fs._client = _connector_client(options)  # type: ignore[attr-defined]  # declared as torch's file system
    return writer


def _reader(peer: str, url: str, options: dict[str, Any]) -> Any:
    if peer == "files":
        return FileSystemReader(url)
    if peer == "fsspec":
        return FsspecReader(url, **options)
    if peer == "multi storage":
        from multistorageclient.contrib.torch import MultiStorageFileSystemReader

        return MultiStorageFileSystemReader(url)
    from s3torchconnector.dcp import S3StorageReader

    reader = S3StorageReader("us-east-1", url)
    reader.fs._client = _connector_client(options)
    return reader


def _run(verb: str, peer: str, url: str, options: dict[str, Any]) -> None:
    if verb == "write":
        save(sample(), storage_writer=_writer(peer, url, options))
        return
    expected = textual(sample(), keeps_empty=True)
    template = template_of(expected)
    if not isinstance(template, dict):
        raise TypeError("the sample is a mapping")
    load(template, storage_reader=_reader(peer, url, options))
    assert_same(template, expected)


def _main() -> None:
    sys.modules["dcpfs"] = None  # type: ignore[assignment]  # from here on `import dcpfs` fails
    for job in sys.argv[1:]:
        verb, peer, url, options = json.loads(job)
        try:
            _run(verb, peer, url, options)
        except BaseException:
            print(f"{verb} with {peer} at {url} failed", file=sys.stderr)
            raise
    leaked = [name for name in sys.modules if name.startswith("dcpfs.")]
    if leaked:
        raise AssertionError(f"dcpfs was imported: {leaked}")


if __name__ == "__main__":
    _main()
