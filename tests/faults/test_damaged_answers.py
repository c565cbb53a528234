"""Answers that are damaged on their way, once each, where what is stored is whole: no step is lost by one.

Nothing of HTTP tells them: the length agrees with the body. What they make of a pointer, a manifest or metadata speaks
against a step, so it is asked for again before it counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import dcpfs
from dcpfs.checkpointer.layout import LATEST_NAME
from dcpfs.checkpointer.probing import PROBE_PREFIX
from dcpfs.testing.s3_faults import Action, FlipByte, Length, ShortBody
from dcpfs.testing.scripted_s3 import ScriptedS3Server
from tests.faults.scripted_scene import STEPS, WORKS, Part, config, on_clock, settle
from tests.faults.test_scripted_faults import Nth, quiet_run

if TYPE_CHECKING:
    from dcpfs.testing.s3_exchange import S3Request

DAMAGE: dict[str, Action] = {
    "a byte short": ShortBody(1, Length.SENT),
    "three bytes short": ShortBody(3, Length.SENT),
    "ten bytes short": ShortBody(10, Length.SENT),
    "a bit flipped near its end": FlipByte(-5),
    "a bit flipped at its start": FlipByte(0),
}
POINTER = f"{STEPS}/{LATEST_NAME}"


@pytest.fixture
def server(module_s3_server: ScriptedS3Server) -> ScriptedS3Server:
    module_s3_server.reset()
    return module_s3_server


def save_two(server: ScriptedS3Server) -> None:
    settings = config(server).model_copy(update={"keep_last": None})
    with on_clock(), dcpfs.DistributedCheckpointer(settings) as checkpointer:
        for step in (1, 2):
            checkpointer.save_state(step, {"model": Part(step), "optim": Part(10 * step)})


def resume(server: ScriptedS3Server) -> int:
    """The step that a resume loads, whole and of one save."""
    model, optim = Part(0), Part(0)
    with on_clock(), dcpfs.DistributedCheckpointer(config(server), access="read_only") as checkpointer:
        step = checkpointer.load_state({"model": model, "optim": optim})
    assert torch.equal(model.values, Part(step).values)
    assert torch.equal(optim.values, Part(10 * step).values)
    return step


def reads(requests: list[S3Request]) -> list[int]:
    return [at for at, request in enumerate(requests) if request.operation in ("GetObject", "ListObjectsV2")]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("wanted", [1, 2], ids=["rolled back", "newest"])
def test_cases_40_78_an_answer_that_is_damaged_once_leads_a_resume_to_no_other_step(
    server: ScriptedS3Server, wanted: int, damage: str
) -> None:
    save_two(server)
    server.write(POINTER, f"iter_{wanted:09}\n".encode())
    server.forget()
    assert resume(server) == wanted
    usual = list(server.requests())
    places = reads(usual)
    assert len(places) >= 8
    for at in places:
        server.forget()
        picks = Nth(at)
        server.fail(picks, DAMAGE[damage], times=1)
        assert resume(server) == wanted, f"{at}: {usual[at].operation} {usual[at].key}"
        assert picks.picked is not None
        assert len(server.requests()) <= 3 * len(usual)
        server.reset_faults()


@pytest.mark.parametrize("damage", DAMAGE)
def test_an_answer_that_is_damaged_once_fails_no_save_and_leaves_no_pointer_behind(
    server: ScriptedS3Server, damage: str
) -> None:
    work = WORKS["commit"]
    usual = quiet_run(server, work)
    # What tries whether data comes back as it was written is there to tell of this, before a save begins.
    places = [at for at in reads(usual) if PROBE_PREFIX not in usual[at].key]
    if damage == "a bit flipped near its end":
        # In the pointer that is a digit: another step's name, as of a user who edits it, and left alone as such.
        places = [at for at in places if usual[at].key != POINTER]
    assert len(places) >= 10
    for at in places:
        settle(server, work)
        server.fail(Nth(at), DAMAGE[damage], times=1)
        with on_clock():
            work.run(server, server.storage_options)
        server.reset_faults()
        assert server.read(POINTER) == b"iter_000000002\n"
        assert work.found(server) == work.after


def test_a_step_that_is_damaged_in_the_store_is_passed_over_after_a_second_look(server: ScriptedS3Server) -> None:
    save_two(server)
    manifest = f"{STEPS}/iter_000000002/manifest.json"
    server.write(manifest, server.read(manifest)[:-10])
    server.forget()
    assert resume(server) == 1
    assert len([one for one in server.requests("GetObject") if one.key == manifest]) == 2


def test_values_that_are_damaged_in_the_store_are_read_twice_and_passed_over(server: ScriptedS3Server) -> None:
    save_two(server)
    name = f"{STEPS}/iter_000000002/model/__0_0.distcp"
    values = Part(2).values.numpy().tobytes()
    content = server.read(name)
    assert content.count(values) == 1
    server.write(name, content.replace(values, Part(7).values.numpy().tobytes()))
    server.forget()
    assert resume(server) == 1
    assert len([one for one in server.requests("GetObject") if one.key == name]) == 2
