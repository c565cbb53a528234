"""Who writes what, and who reads it: all writers and readers, three kinds of storage, equal to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import dcpfs
from tests.peers.exchange import NewPlace, Place, Reader, Writer, read, readers_of, write, writers_of
from tests.peers.sample_state import assert_same, full_state, odd_state, template_of, textual, trained_state

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]

KINDS = ("local", "memory", "s3")
STATE = {**full_state(), **odd_state(), "trained": trained_state()}
_TEMPLATED_BY_DCPFS = (Reader.LOAD, Reader.READ, Reader.OWN_PLANNER)
_OWN_WRITERS = (Writer.OWN, Writer.OWN_PLANNER)
"""Those that note the types of keys and containers."""


@pytest.fixture(scope="module")
def written(new_place: NewPlace) -> Callable[[str, Writer], Place]:
    """The state is written once by each writer."""
    places: dict[tuple[str, Writer], Place] = {}

    def find(kind: str, writer: Writer) -> Place:
        place = places.get((kind, writer))
        if place is None:
            place = new_place(kind)
            write(writer, STATE, place)
            places[kind, writer] = place
        return place

    return find


@pytest.mark.parametrize(
    ("kind", "writer", "reader"),
    [(kind, writer, reader) for kind in KINDS for writer in writers_of(kind) for reader in readers_of(kind)],
    ids=lambda value: getattr(value, "name", value),
)
def test_case_28_what_anyone_writes_anyone_reads(
    written: Callable[[str, Writer], Place], kind: str, writer: Writer, reader: Reader
) -> None:
    place = written(kind, writer)
    expected: object = STATE
    if reader is Reader.READ and writer not in _OWN_WRITERS:
        # Without a template the types of keys and containers are known only where the writer noted them.
        expected = textual(STATE)
    elif reader not in _TEMPLATED_BY_DCPFS:
        # torch's planner puts text twins beside int keys, and leaves empty containers as they are.
        expected = textual(STATE, keeps_empty=True)
    template = template_of(expected)
    assert isinstance(template, dict)
    assert_same(read(reader, template, place), expected)


@pytest.mark.parametrize("reader", [Reader.LOAD, Reader.READ, Reader.OWN_PLANNER], ids=lambda reader: reader.name)
def test_an_empty_mapping_amid_a_list(new_place: NewPlace, reader: Reader) -> None:
    place = new_place("memory")
    state: dict[str, object] = {"list": [1, {}, {"k": 2}, {"a": {}}, {}, 3]}
    write(Writer.OWN, state, place)
    template = template_of(state)
    assert isinstance(template, dict)
    assert_same(read(reader, template, place), state)


@pytest.mark.parametrize("writer", writers_of("local"), ids=lambda writer: writer.name)
def test_case_27_tied_tensors_stay_tied_in_a_tied_template(
    written: Callable[[str, Writer], Place], writer: Writer
) -> None:
    place = written("local", writer)
    template = template_of(STATE)
    assert isinstance(template, dict)
    template["tied"]["two"] = template["tied"]["one"]
    dcpfs.load(template, place.url)
    assert template["tied"]["two"] is template["tied"]["one"]
    assert_same(template, STATE)


def test_names_of_files_are_those_of_torch(new_place: NewPlace) -> None:
    place = new_place("local")
    write(Writer.OWN, trained_state(), place)
    assert sorted(path.name for path in Path(place.url).iterdir()) == [".metadata", "__0_0.distcp"]
