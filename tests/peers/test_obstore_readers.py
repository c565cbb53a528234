"""torch's reader over obstore's class of filesystem, for what each writer left; and obstore's class for local files."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import dcpfs
from dcpfs.testing.servers import SeaweedServer
from tests.peers.exchange import (
    Place,
    Reader,
    Writer,
    connect_peers,
    obstore_options,
    obstore_scheme,
    read,
    write,
    writers_of,
)
from tests.peers.sample_state import assert_same, make_tensor, template_of, textual

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

pytest.importorskip("obstore", reason="the peer is not installed")

# Few and small: obstore's streams ask for a few bytes a request.
STATE: dict[str, object] = {
    "weight": make_tensor((40, 30)),
    "turned": make_tensor((7, 30), torch.float64, 3).t(),
    "halves": make_tensor((9,), torch.bfloat16, 5),
    "nested": {"list": [make_tensor((2,)), {"step": 3}], "lr": 0.1},
    "none": torch.empty(0, 3),
}
_OWN = (Writer.OWN, Writer.OWN_WRITER, Writer.OWN_PLANNER)
_READERS = (Reader.FSSPEC, Reader.OWN_READER, Reader.LOAD, Reader.READ)


@pytest.fixture(scope="module")
def written(seaweed: SeaweedServer) -> Iterator[Callable[[Writer], Place]]:
    """What a writer left on S3, to be read through obstore."""
    names: dict[Writer, str] = {}

    def find(writer: Writer) -> Place:
        name = names.get(writer)
        if name is None:
            name = uuid.uuid4().hex
            write(writer, STATE, Place("s3", seaweed.url(name), seaweed.storage_options))
            names[writer] = name
        return Place("obstore", seaweed.url(name).replace("s3://", "obs3://"), obstore_options(seaweed))

    with connect_peers(seaweed), obstore_scheme():
        yield find


def _check(reader: Reader, place: Place) -> None:
    expected: object = STATE
    if reader in (Reader.FSSPEC, Reader.OWN_READER):
        expected = textual(STATE, keeps_empty=True)
    template = template_of(expected)
    assert isinstance(template, dict)
    assert_same(read(reader, template, place), expected)


@pytest.mark.parametrize("reader", _READERS, ids=lambda value: value.name)
@pytest.mark.parametrize("writer", writers_of("s3"), ids=lambda value: value.name)
def test_what_anyone_wrote_on_s3_is_read_through_obstore(
    written: Callable[[Writer], Place], writer: Writer, reader: Reader
) -> None:
    _check(reader, written(writer))


@contextmanager
def _local_scheme() -> Iterator[None]:
    """``obsfile://`` is local files through obstore."""
    from obstore.fsspec import FsspecStore as ObstoreFilesystem

    class ObsFile(ObstoreFilesystem):
        protocol = "file"

        def __init__(self, **options: Any) -> None:
            super().__init__("file", **options)

        @classmethod
        def _strip_protocol(cls, path: Any) -> Any:
            if isinstance(path, list):
                return [cls._strip_protocol(each) for each in path]
            return super()._strip_protocol(str(path).replace("obsfile://", "file://", 1))

    # fsspec's own registry, so that a name registered here is gone afterwards.
    registry = sys.modules["fsspec.registry"].__dict__["_registry"]
    registry["obsfile"] = ObsFile
    try:
        yield
    finally:
        del registry["obsfile"]


@pytest.mark.parametrize("writer", _OWN, ids=lambda value: value.name)
def test_obstores_local_files_both_ways(tmp_path: Path, writer: Writer) -> None:
    with _local_scheme():
        through_obstore = Place("obstore", f"obsfile://{tmp_path}/ours")
        write(writer, STATE, through_obstore)
        _check(Reader.FILES, Place("local", str(tmp_path / "ours")))
        for reader in _READERS:
            _check(reader, through_obstore)
        dcpfs.save(STATE, tmp_path / "local")
        for reader in _READERS:
            _check(reader, Place("obstore", f"obsfile://{tmp_path}/local"))
