"""fsspec's caches in front of a store: what is read is what is there now, never a copy of what was.

Each cache keeps its files in a directory that outlives the store, as one that a job is configured with does.
"""

from __future__ import annotations

import contextlib
import uuid
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import dcpfs
from dcpfs.storage.location import Location
from dcpfs.storage.opening import open_store
from dcpfs.storage.store import Store
from dcpfs.testing.servers_files import HttpServer
from dcpfs.testing.servers_objects import GcsServer
from tests.conformance.dummy_filesystems import registered_dummies

CACHES = ("simplecache", "filecache", "blockcache")


@pytest.fixture(scope="module", params=["s3", "gs", "http", "dummyobj"])
def remote(request: pytest.FixtureRequest) -> Iterator[tuple[Location, Store]]:
    """A place to read from, and a store that writes there past whatever is in front."""
    with contextlib.ExitStack() as stack:
        if request.param == "s3":
            seaweed = request.getfixturevalue("seaweed")
            place = Location(seaweed.url(uuid.uuid4().hex), seaweed.storage_options)
            behind = place
        elif request.param == "gs":
            gcs = stack.enter_context(GcsServer())
            place = behind = Location(gcs.url("run"), gcs.storage_options)
        elif request.param == "http":
            web = stack.enter_context(HttpServer())
            place, behind = Location(web.url("run"), web.storage_options), Location(web.data / "run")
        else:
            stack.enter_context(registered_dummies())
            place = behind = Location("dummyobj://bucket/run")
        yield place, stack.enter_context(contextlib.closing(open_store(behind)))


def in_front(place: Location, cache: str, storage: Path) -> Location:
    return Location(
        f"{cache}::{place.url}", {place.scheme: place.storage_options, cache: {"cache_storage": str(storage)}}
    )


@pytest.mark.parametrize("cache", CACHES)
def test_what_was_overwritten_is_read_anew(remote: tuple[Location, Store], cache: str, tmp_path: Path) -> None:
    place, behind = remote
    name = f"object-{uuid.uuid4().hex}"
    behind.put(name, [b"first"])
    for opening in range(2):
        with contextlib.closing(open_store(in_front(place, cache, tmp_path))) as store:
            for content in (b"of the same", b"size, only", b"now another size", b"of the same"):
                behind.put(name, [content])
                part = bytearray(3)
                store.read_into(name, 2, [memoryview(part)])
                assert (store.get(name), bytes(part)) == (content, content[2:5]), opening
                assert store.head(name).size_bytes == len(content)
    behind.delete([name])
    with contextlib.closing(open_store(in_front(place, cache, tmp_path))) as store:
        assert not store.exists(name)


@pytest.mark.parametrize("cache", CACHES)
def test_a_checkpoint_that_was_overwritten_is_loaded_anew(
    remote: tuple[Location, Store], cache: str, tmp_path: Path
) -> None:
    place, behind = remote
    step = f"step-{uuid.uuid4().hex}"
    target = behind.location.join(step)
    for value in (1.0, 2.0, 3.0):
        dcpfs.save(
            {"x": torch.full((500,), value)}, target.url, storage_options=target.storage_options, overwrite=value > 1
        )
        front = in_front(place.join(step), cache, tmp_path)
        found = {"x": torch.zeros(500)}
        dcpfs.load(found, front.url, storage_options=front.storage_options)
        assert bool((found["x"] == value).all())


@pytest.mark.parametrize("cache", CACHES)
def test_an_archive_that_was_replaced_is_read_anew(cache: str, tmp_path: Path) -> None:
    with HttpServer() as web:
        place = Location(
            f"zip://run::{cache}::{web.url('archive.zip')}",
            {"http": web.storage_options, cache: {"cache_storage": str(tmp_path / "cache")}},
        )
        for content in (b"first", b"other", b"a longer one"):
            with zipfile.ZipFile(web.data / "archive.zip", "w") as archive:
                archive.writestr("run/object", content)
            with contextlib.closing(open_store(place)) as store:
                assert store.get("object") == content
    assert not (tmp_path / "cache").exists()
