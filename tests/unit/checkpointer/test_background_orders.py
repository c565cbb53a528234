"""What a background process makes of orders, one of which it could not carry out."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch

import dcpfs
from dcpfs.background.channel import Channel
from dcpfs.background.copying import copier_for
from dcpfs.background.rendezvous import Address
from dcpfs.checkpointer.background_save import _Worker
from dcpfs.checkpointer.flights import Flight
from dcpfs.checkpointer.local_step import LocalStep
from dcpfs.checkpointer.process_saver import _Crew, _SharedArena
from dcpfs.checkpointer.save_context import SaveContext
from dcpfs.checkpointer.save_orders import Meeting, SaveDone, encode_order
from dcpfs.checkpointer.staging import stage_step
from dcpfs.checkpointer.step_plan import plan_step
from dcpfs.ranks import Ranks
from dcpfs.storage.contacts import Contact
from dcpfs.storage.location import Location


@dataclass
class Replies:
    """The end of a channel that keeps what is sent."""

    heard: list[SaveDone] = field(default_factory=list)

    def send(self, message: object, descriptors: object = ()) -> None:
        assert isinstance(message, SaveDone)
        self.heard.append(message)


class Present:
    is_gone = False


class Trainer:
    """The side that orders, with a crew as `ProcessSaver` has it."""

    def __init__(self, save_dir: Path, *, has_answered: bool = False) -> None:
        self.replies = Replies()
        context = SaveContext(Location(str(save_dir)), Ranks())
        meeting = Meeting(Address("", 0), 0, 1, 60.0, None, context, os.getpid(), has_answered)
        self.worker = _Worker(meeting, cast("Channel", self.replies))
        self.worker.watch = cast("object", Present())  # type: ignore[assignment]  # all that is asked of it
        self.crew = _Crew(0)
        self.number = 0

    def close(self) -> None:
        """What the process holds goes with it."""
        while self.worker._blocks:
            self.worker._blocks.popitem()[1].close()

    def save(self, step: LocalStep, arena: _SharedArena, *, loses_block: bool = False) -> str:
        """Order it as `ProcessSaver` does; why it failed, or ""."""
        self.number += 1
        flight = Flight(step.iteration, arena)
        self.crew.watch(self.number, flight)
        staged = stage_step(step, arena)
        block = None if arena.is_known else arena.block
        order = encode_order(
            staged,
            number=self.number,
            slot=arena.number,
            block_bytes=None if block is None else block.size_bytes,
            sends_plans=self.crew.known_digest != step.digest,
            moves_latest=True,
        )
        arena.is_known, self.crew.known_digest = True, step.digest
        descriptors = [] if block is None or loses_block else [os.dup(block.descriptor)]
        self.worker.save(order, descriptors)
        self.crew.hear(self.replies.heard[-1])
        assert flight.outcome is not None
        return "" if flight.outcome.error is None else str(flight.outcome.error)


def step(iteration: int, rows: int) -> LocalStep:
    value = float(iteration)
    return plan_step(iteration, {"model": {"a": torch.full((rows,), value), "b": torch.full((64,), -value)}})


def arena(number: int) -> _SharedArena:
    return _SharedArena(number, copier_for)


def test_case_59_an_order_that_failed_leaves_nothing_that_is_thought_known(tmp_path: Path) -> None:
    """Its memory never arrived (no descriptor was free): plans and memory are sent again, for either slot."""
    trainer, first, second = Trainer(tmp_path), arena(0), arena(1)
    assert trainer.save(step(1, 64), first) == ""
    assert trainer.save(step(2, 64), second) == ""
    assert "IndexError" in trainer.save(step(3, 128), first, loses_block=True)
    assert trainer.save(step(4, 128), second) == ""
    assert trainer.save(step(5, 128), first) == ""
    for iteration, rows in ((1, 64), (2, 64), (4, 128), (5, 128)):
        found = dcpfs.read(f"{tmp_path}/iter_{iteration:09}/model")
        assert sorted(found) == ["a", "b"]
        value = float(iteration)
        for name, wanted in {"a": torch.full((rows,), value), "b": torch.full((64,), -value)}.items():
            tensor = found[name]
            assert isinstance(tensor, torch.Tensor)
            assert torch.equal(tensor, wanted)
    trainer.close()
    for each in (first, second):
        each.release()


def test_case_59_memory_is_never_cut_by_the_plans_of_another_structure(tmp_path: Path) -> None:
    trainer, first, second = Trainer(tmp_path), arena(0), arena(1)
    assert trainer.save(step(1, 64), first) == ""
    other = step(2, 128)
    trainer.crew.known_digest = other.digest  # as if an earlier order had brought them
    assert "plans that are known are of another structure" in trainer.save(other, second)
    assert not (tmp_path / "iter_000000002" / "manifest.json").exists()
    trainer.close()
    for each in (first, second):
        each.release()


def test_case_82_a_process_knows_what_has_answered_its_parent(tmp_path: Path) -> None:
    for has_answered in (False, True):
        save_dir = tmp_path / str(has_answered)
        trainer, memory = Trainer(save_dir, has_answered=has_answered), arena(0)
        assert trainer.save(step(1, 64), memory) == ""
        assert Contact(Location(str(save_dir))).has_answered is has_answered
        trainer.close()
        memory.release()
