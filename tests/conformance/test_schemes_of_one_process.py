"""A scheme that a program registered for itself: its own threads save there, and a process that is started can't."""

from __future__ import annotations

import pytest

import dcpfs
from dcpfs.storage.location import Location
from dcpfs.testing.servers_obstore import ObstoreServer, obstore_scheme
from tests.conformance.servers_here import started
from tests.conformance.test_checkpointer_backends import check_steps, config, model, optimizer_of, save_steps

pytest.importorskip("obstore", reason="the client is not installed")


def test_a_process_of_its_own_that_does_not_know_the_scheme_refuses_in_words() -> None:
    # As `fsspec.register_implementation` does it.
    with obstore_scheme(), started(ObstoreServer) as server:
        place = Location(server.url("run"), server.storage_options)
        save_steps(place, "async")
        check_steps(place)
        module = model(4.0)
        with dcpfs.DistributedCheckpointer(config(place, "async_with_pinned_mem")) as checkpointer:
            checkpointer.save(module, optimizer_of(module), None, None, 4)
            with pytest.raises(dcpfs.ConfigError, match="no filesystem is known for the scheme obs3://"):
                checkpointer.wait()
        check_steps(place)
