"""Places that the matrices of writers and readers use."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from dcpfs.testing.servers import SeaweedServer
from tests.peers.exchange import NewPlace, Place, connect_peers


@pytest.fixture(scope="module")
def new_place(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[NewPlace]:
    """Makes a place of a kind that nobody has used; the S3 server is started for the first on it."""
    folder = tmp_path_factory.mktemp("places")
    connections = ExitStack()
    servers: list[SeaweedServer] = []

    def make(kind: str) -> Place:
        name = uuid.uuid4().hex
        if kind == "local":
            return Place(kind, str(folder / name))
        if kind == "memory":
            return Place(kind, f"memory://{name}")
        if not servers:
            servers.append(request.getfixturevalue("seaweed"))
            connections.enter_context(connect_peers(servers[0]))
        return Place(kind, servers[0].url(name), servers[0].storage_options)

    with connections:
        yield make
