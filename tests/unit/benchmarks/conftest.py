"""A sink that the tests of a module share, and the environment that a client process would have."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.place import open_place
from benchmarks.settings import Setting, Target, client_environment


@pytest.fixture(scope="module")
def sink() -> Iterator[Target]:
    with open_place(Setting.FAST, None, 0) as place:
        yield place


@pytest.fixture
def client_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a client sees of AWS, here too: these runs are inline."""
    for name, value in client_environment().items():
        monkeypatch.setenv(name, value)
