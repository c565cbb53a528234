"""The README's table of backends is what the stores declare, and each of them is under the suites."""

from __future__ import annotations

from pathlib import Path

from dcpfs.testing.backends import BACKENDS, table
from dcpfs.testing.conformance import StoreConformance
from dcpfs.testing.server_process import LoopbackServer
from dcpfs.testing.servers import RcloneServer, SeaweedServer
from tests.conformance import test_checkpointer_backends, test_store_backends

S3_SUITE = {RcloneServer, SeaweedServer}
"""What `tests.conformance.test_store_s3` has fixtures for."""


def test_the_table_in_the_readme_is_the_generated_one() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert table() in readme, "run python -m dcpfs.testing.backends and put its output into README.md"


def test_every_server_of_the_table_is_under_the_suites() -> None:
    writable = {backend.server for backend in BACKENDS if backend.server is not None and not backend.read_only}
    under_suite: set[type[LoopbackServer]] = {
        suite.server_class
        for suite in vars(test_store_backends).values()
        if isinstance(suite, type) and issubclass(suite, StoreConformance) and hasattr(suite, "server_class")
    }
    assert writable - under_suite - S3_SUITE == set()
    assert set(test_checkpointer_backends.SERVERS.values()) == writable
    read_only = {backend.server for backend in BACKENDS if backend.read_only}
    assert set(test_checkpointer_backends.READERS) == read_only - {None}
