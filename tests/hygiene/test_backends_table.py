"""The table of backends is what the stores declare, each row is under the suites, and no suite asks for less."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from dcpfs.testing.backends import BACKENDS, table
from dcpfs.testing.conformance import StoreConformance
from dcpfs.testing.read_only_conformance import ReadOnlyConformance
from tests.conformance import test_checkpointer_backends

TESTS = Path(__file__).parents[1]
ROWS = {backend.name: backend for backend in BACKENDS}
READ_ONLY_PLACES = {"nginx": "NginxServer", "http": "HttpServer", "zip": "zip", "tar": "tar"}
"""What the checkpointer's test of loading calls its places, and the rows that they are of."""
NO_BACKEND = {"TestWrapped": {"test_a_store_survives_pickling"}}
"""Suites of something else than a backend, with what they leave out: a wrapper that counts is bound to its process."""


def below(kind: type[object]) -> Iterator[type[object]]:
    for each in kind.__subclasses__():
        yield each
        yield from below(each)


def suites(kind: type[object]) -> list[type[object]]:
    """The suites of that kind that pytest runs."""
    for path in sorted(TESTS.rglob("test_*.py")):
        if "Conformance" in path.read_text(encoding="utf-8"):
            import_module(".".join(("tests", *path.relative_to(TESTS).with_suffix("").parts)))
    return [each for each in below(kind) if each.__name__.startswith("Test") and each.__module__.startswith("tests.")]


def row_of(suite: type[object]) -> str:
    """The name of the row whose store a suite is on; empty for a store that is no backend."""
    server = getattr(suite, "server_class", None)
    return server.__name__ if server else str(getattr(suite, "backend", ""))


def test_the_table_in_the_readme_is_the_generated_one() -> None:
    readme = (TESTS.parent / "README.md").read_text()
    assert table() in readme, "run python -m dcpfs.testing.backends and put its output into README.md"


def test_each_row_has_a_name_of_its_own() -> None:
    assert all(ROWS)
    assert len(ROWS) == len(BACKENDS)


@pytest.mark.parametrize("kind", [StoreConformance, ReadOnlyConformance])
def test_each_row_is_under_the_suite(kind: type[object]) -> None:
    rows = {backend.name for backend in BACKENDS if backend.read_only == (kind is ReadOnlyConformance)}
    # What stands in front of a store is a row as well.
    found = {name for suite in suites(kind) for name in (row_of(suite), getattr(suite, "wrapper", ""))}
    assert rows - found == set()
    assert {row_of(suite) for suite in suites(kind)} - {""} <= rows


def test_each_row_is_a_place_of_the_checkpointers_tests() -> None:
    writable = {backend.name for backend in BACKENDS if not backend.read_only}
    wrappers = set(test_checkpointer_backends.WRAPPERS)
    assert writable - wrappers == set(test_checkpointer_backends.PLACES)
    assert writable & wrappers
    places = {place for place in test_checkpointer_backends.READ_ONLY if "::" not in place}
    assert {READ_ONLY_PLACES[place] for place in places} == {backend.name for backend in BACKENDS if backend.read_only}


@pytest.mark.parametrize(
    "suite", suites(StoreConformance) + suites(ReadOnlyConformance), ids=lambda each: each.__name__
)
def test_a_suite_leaves_out_what_its_row_declares_and_no_more(suite: type[object]) -> None:
    kind = StoreConformance if issubclass(suite, StoreConformance) else ReadOnlyConformance
    own = {name for name in vars(kind) if name.startswith("test_") and getattr(suite, name) is not vars(kind)[name]}
    assert not [mark for mark in getattr(suite, "pytestmark", []) if mark.name.startswith("skip")]
    row = ROWS.get(row_of(suite))
    lacks = set(row.lacks) if row is not None else NO_BACKEND.get(suite.__name__, set())
    assert own == lacks
    lost = set(row.lost_characters) if row is not None else set()
    missing = {name for name in kind.odd_names if name not in suite.odd_names}  # type: ignore[attr-defined] # of a suite
    assert missing == {name for name in kind.odd_names if lost & set(name)}
    if row is not None and "test_a_reader_sees_the_old_object_or_the_new_one" in lacks:
        assert not row.capabilities().atomic_put
    if not getattr(suite, "shared_between_processes", True):
        assert row_of(suite) in ("memory", ""), "elsewhere another process sees what this one wrote"


def test_what_a_row_says_of_names_is_said_of_what_the_client_sends() -> None:
    for backend in BACKENDS:
        assert not set(backend.lost_characters) & set(backend.capabilities().refused_characters)
        assert bool(backend.lost_characters) == bool(backend.lost_how)
