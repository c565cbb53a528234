"""obstore's class of filesystem, under torch and under dcpfs.

Under torch's writer its streams tell other positions than they are at, so that the offsets that are noted lead into the
middle of entries; the save reports success. What counts here is that dcpfs gives no wrong value for it, and that dcpfs'
own way of writing, which asks no stream for its position, is right over the same class.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import dcpfs
from dcpfs.errors import CorruptCheckpointError
from dcpfs.testing.servers import SeaweedServer
from tests.peers.exchange import Place, Reader, Writer, obstore_options, obstore_scheme, read, write
from tests.peers.sample_state import assert_same, full_state, odd_state, template_of, textual, trained_state

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]

pytest.importorskip("obstore", reason="the peer is not installed")

STATE = {**full_state(), **odd_state(), "trained": trained_state()}


@pytest.fixture
def places(seaweed: SeaweedServer) -> Iterator[tuple[Place, Place]]:
    """One prefix: through obstore, and through s3fs."""
    name = uuid.uuid4().hex
    through_obstore = Place("obstore", seaweed.url(name).replace("s3://", "obs3://"), obstore_options(seaweed))
    with obstore_scheme():
        yield through_obstore, Place("s3", seaweed.url(name), seaweed.storage_options)


@pytest.mark.parametrize("writer", [Writer.OWN, Writer.OWN_WRITER, Writer.OWN_PLANNER], ids=lambda value: value.name)
def test_what_dcpfs_writes_over_obstore_is_right_for_all(places: tuple[Place, Place], writer: Writer) -> None:
    write(writer, STATE, places[0])
    # Not torch's reader through obstore: it is right, and asks for a few bytes a request.
    for place, last in zip(places, (Reader.OWN_READER, Reader.FSSPEC), strict=True):
        for reader in (Reader.LOAD, last):
            expected: object = STATE
            if reader is not Reader.LOAD:
                expected = textual(STATE, keeps_empty=True)
            template = template_of(expected)
            assert isinstance(template, dict)
            assert_same(read(reader, template, place), expected)


def _read(place: Place, key: str) -> dict[str, object] | None:
    """One key through dcpfs; None: refused as corrupt, by name."""
    try:
        return dcpfs.read(place.url, [key], storage_options=place.options)
    except CorruptCheckpointError as error:
        return None if error.key else {}


@pytest.mark.parametrize("threads", [1, 4])
def test_what_torch_writes_over_obstore_is_right_or_refused_for_each_key(
    places: tuple[Place, Place], threads: int
) -> None:
    url, options = places[0].url, places[0].options
    writer = FsspecWriter(url, sync_files=False, thread_count=threads, **options)  # type: ignore[arg-type]  # options of a filesystem
    dcp_save(dict(STATE), storage_writer=writer)
    whole = textual(STATE)
    assert isinstance(whole, dict)
    found = {key: _read(places[1], key) for key in whole}
    for key, value in found.items():
        if value is not None:
            assert_same(value, {key: whole[key]})
    if all(value is not None for value in found.values()):
        return  # a release of obstore that writes what torch means
    for place in places:
        template = template_of(STATE)
        assert isinstance(template, dict)
        with pytest.raises(CorruptCheckpointError):
            dcpfs.load(template, place.url, storage_options=place.options)
        with pytest.raises(CheckpointException) as failed:
            read(Reader.OWN_READER, template, place)
        assert {type(error) for error, _ in failed.value.failures.values()} == {CorruptCheckpointError}
