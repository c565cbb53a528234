"""What a save has read is let go of when the save has ended, and not when Python's collector comes to it.

A collector that has much else to look at comes late: a run that makes a new state for each save, as one that gathers
or casts it does, would hold as many of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import dcpfs
from dcpfs.checkpointer.choices import AsyncMode, RngPolicy
from dcpfs.errors import ObjectExistsError
from dcpfs.storage.location import Location
from dcpfs.storage.opening import open_store
from dcpfs.testing.scripted_s3 import ScriptedS3Server
from tests.conformance.step_scene import location_on


@pytest.fixture(params=["local", "memory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path, scripted_s3: ScriptedS3Server) -> Location:
    if request.param == "s3":
        return Location(scripted_s3.url("garbage"), scripted_s3.storage_options)
    return location_on(request.param, tmp_path, lambda: pytest.fail("no server is needed"))


@pytest.mark.usefixtures("_uncollected")
@pytest.mark.parametrize("mode", [AsyncMode.DISABLED, AsyncMode.ASYNC])
def test_case_62_a_state_is_let_go_of_when_its_save_has_ended(place: Location, mode: AsyncMode) -> None:
    config = dcpfs.CheckpointConfig(
        save_dir=place.url, storage_options=place.storage_options, async_mode=mode, rng=RngPolicy.NONE, keep_last=2
    )
    with dcpfs.DistributedCheckpointer(config) as checkpointer:

        def save(step: int) -> weakref.ref[torch.Tensor]:
            value = torch.full((100, 100), float(step))
            checkpointer.save_state(step, {"model": {"value": value, f"of {step}": value + 1}})
            checkpointer.wait()
            return weakref.ref(value)

        held = [save(step) for step in (1, 2, 3, 4, 4)]  # new, with retention, and overwriting
        assert [step for step, value in enumerate(held, start=1) if value() is not None] == []


@pytest.mark.usefixtures("_uncollected")
def test_an_everyday_error_of_a_store_does_not_hold_its_caller(place: Location) -> None:
    store = open_store(place)

    def ask(question: Callable[[], object]) -> bool:
        """Whether what the caller holds is held on."""

        def caller() -> weakref.ref[torch.Tensor]:
            value = torch.zeros(3)
            question()
            return weakref.ref(value)

        return caller()() is not None

    def refused() -> None:
        try:
            store.put("taken", [b"x"], if_absent=True)
        except ObjectExistsError:
            return
        pytest.fail("it was not refused")

    store.put("taken", [b"x"])
    assert not ask(lambda: store.exists("missing"))
    assert not ask(refused)
    store.close()
