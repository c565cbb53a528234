"""Pauses of the cyclic collector: they nest, they end, and what was made in one is old afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from dcpfs.format.collector import paused_collector
from tests.unit.format.collecting import collects_again


@pytest.fixture(autouse=True)
def _collector_stays_as_it_is() -> Iterator[None]:
    enabled = collects_again()
    gc.enable()
    gc.unfreeze()
    yield
    gc.unfreeze()
    (gc.enable if enabled else gc.disable)()


def test_pauses_nest() -> None:
    with paused_collector():
        with paused_collector():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert collects_again()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    with paused_collector():
        pass
    assert not gc.isenabled()


def test_records_made_in_a_pause_are_not_young_afterwards() -> None:
    with paused_collector():
        made: list[object] = [[] for _ in range(3)]
    young = {id(each) for each in gc.get_objects(generation=0)}
    assert gc.is_tracked(made)
    assert id(made) not in young
    assert gc.get_freeze_count() == 0


def test_what_the_program_froze_stays_frozen() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    with paused_collector():
        pass
    assert frozen > 0
    assert gc.get_freeze_count() > 0
