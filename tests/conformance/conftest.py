"""Scenes that several suites play in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dcpfs.storage.location import Location
from dcpfs.storage.opening import open_store
from dcpfs.testing.servers import SeaweedServer
from tests.conformance.step_scene import Scene, location_on


@pytest.fixture(params=["local", "memory", "s3"])
def scene(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Scene]:
    def seaweed() -> SeaweedServer:
        server = request.getfixturevalue("seaweed")
        assert isinstance(server, SeaweedServer)
        return server

    store = open_store(location_on(request.param, tmp_path, seaweed))
    yield Scene(store)
    store.close()


@pytest.fixture
def local(tmp_path: Path) -> Scene:
    return Scene(open_store(Location(tmp_path / "run")))
