"""The questions that are asked, one a case.

Each case says who saves, who loads, and what: everything else (where, by whom, how often) is the runner's. Numbers in
a name are parameters: ``save-4`` are four ranks, ``reshard-4-2`` is saved by four and loaded by two, ``discovery-50``
looks for the newest of 50 steps. `CASES` holds the usual ones; `case_of` understands any.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from .contenders import Role, Scope
from .workloads import TensorSpec, Workload

__all__ = ["CASES", "Case", "Client", "Operation", "case_of", "needed"]

_PART_STRIDE = 20
_MOST_RANKS = 64
_MOST_STEPS = 100_000


class Operation(str, enum.Enum):
    """What is timed."""

    SAVE = "save"
    LOAD = "load"
    CHECKPOINT = "checkpoint"
    """One step of a trainer: all of its state, as one commit."""
    DISCOVER = "discover"
    """Finding the step to resume from."""
    RETAIN = "retain"
    """Removing all steps but the newest."""


_ROLES = {
    Operation.CHECKPOINT: Role.CHECKPOINTER,
    Operation.DISCOVER: Role.SEEKER,
    Operation.RETAIN: Role.REMOVER,
}


class Client(str, enum.Enum):
    """What the timed process has done before."""

    WARM = "warm"
    """The same a round earlier: connections, buffers and plans are there."""
    FRESH = "fresh"
    """Nothing: each process is timed once, and local files are asked out of the page cache."""


@dataclass(frozen=True, slots=True)
class Case:
    """One question.

    Attributes:
        name: As on the command line.
        question: What it answers.
        operation: What is timed.
        workload: What is saved.
        save_world: Ranks that save; with more than one each has its rows of every tensor, as FSDP2 cuts them.
        load_world: The same for loading.
        scope: Whether the whole checkpoint is loaded or every 20th key.
        client: What the timed process has done before.
        steps: In the directory, where steps are looked for or removed.
    """

    name: str
    question: str
    operation: Operation
    workload: Workload = Workload.LLAMA
    save_world: int = 1
    load_world: int = 1
    scope: Scope = Scope.WHOLE
    client: Client = Client.WARM
    steps: int = 0

    @property
    def world(self) -> int:
        """Ranks in the timed operation."""
        return self.load_world if self.operation is Operation.LOAD else self.save_world

    @property
    def role(self) -> Role:
        """Whose case it is."""
        return _ROLES.get(self.operation, Role.STORAGE)

    @property
    def sharded(self) -> bool:
        """DTensors are involved."""
        return max(self.save_world, self.load_world) > 1


def needed(case: Case, tensors: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """The tensors that the timed operation moves."""
    return tensors[::_PART_STRIDE] if case.scope is Scope.PART else tensors


def case_of(name: str) -> Case:
    """The case of that name.

    Raises:
        ValueError: There is none, or its numbers make no sense.
    """
    if name in CASES:
        return CASES[name]
    for pattern, make in _FAMILIES:
        if found := re.fullmatch(pattern, name):
            numbers = [int(each) for each in found.groups() if each is not None]
            limit = _MOST_STEPS if name.startswith(("discovery", "retention")) else _MOST_RANKS
            if not all(0 < each <= limit for each in numbers):
                raise ValueError(f"{name!r} asks for numbers that are not within 1 and {limit}")
            return replace(make(*numbers), name=name)
    raise ValueError(
        f"no case is called {name}; there are {', '.join(CASES)}, and the same with other numbers of ranks or steps"
    )


def _save(world: int) -> Case:
    return Case("", f"The same saved by {world} ranks, a share of the rows each?", Operation.SAVE, save_world=world)


def _load(world: int) -> Case:
    return Case("", f"And loaded by {world} ranks?", Operation.LOAD, save_world=world, load_world=world)


def _reshard(first: int, second: int | None = None) -> Case:
    saved, loaded = (1, first) if second is None else (first, second)
    question = f"Saved by {saved}, loaded by {loaded}: who reads more than its rows?"
    return Case("", question, Operation.LOAD, save_world=saved, load_world=loaded)


def _checkpoint(world: int) -> Case:
    question = f"What does a whole step of a trainer cost {world} ranks, and how long does training wait?"
    return Case("", question, Operation.CHECKPOINT, save_world=world)


def _discover(steps: int) -> Case:
    question = f"How long does a start look for the step to resume from, among {steps}? A start is a first round."
    return Case("", question, Operation.DISCOVER, steps=steps)


def _retain(steps: int) -> Case:
    return Case("", f"What does it cost to keep 3 of {steps} steps?", Operation.RETAIN, steps=steps)


_FAMILIES: tuple[tuple[str, Callable[..., Case]], ...] = (
    (r"save-(\d+)", _save),
    (r"load-(\d+)", _load),
    (r"reshard-(\d+)(?:-(\d+))?", _reshard),
    (r"checkpointer-(\d+)", _checkpoint),
    (r"discovery-(\d+)", _discover),
    (r"retention-(\d+)", _retain),
)

CASES = {
    case.name: case
    for case in (
        Case("save", "What does it cost to save a model with its optimizer?", Operation.SAVE),
        Case("load", "What does it cost to load it, in a process that has loaded it before?", Operation.LOAD),
        Case(
            "load-cold",
            "And in a process that has only just begun, local files asked out of the page cache?",
            Operation.LOAD,
            client=Client.FRESH,
        ),
        replace(_save(2), name="save-2"),
        replace(_load(2), name="load-2"),
        replace(_reshard(2), name="reshard"),
        replace(_reshard(2, 1), name="reshard-2-1"),
        Case("partial", "Every 20th key: who reads more than that?", Operation.LOAD, scope=Scope.PART),
        Case("small-save", "What does each of many small tensors cost?", Operation.SAVE, Workload.SMALL),
        Case("small-load", "And when loading?", Operation.LOAD, Workload.SMALL),
        Case("large-save", "One tensor that is larger than any part?", Operation.SAVE, Workload.LARGE),
        Case("large-load", "And when loading?", Operation.LOAD, Workload.LARGE),
        Case("moe-save", "A mixture of many experts?", Operation.SAVE, Workload.MIXTURE),
        Case("moe-load", "And when loading?", Operation.LOAD, Workload.MIXTURE),
        Case("real-save", "The weights of a model that people use?", Operation.SAVE, Workload.REAL),
        Case("real-load", "And when loading?", Operation.LOAD, Workload.REAL),
        replace(_checkpoint(1), name="checkpointer"),
        replace(_checkpoint(2), name="checkpointer-2"),
        *(replace(_discover(steps), name=f"discovery-{steps}") for steps in (1, 100, 1000)),
        replace(_retain(1000), name="retention-1000"),
    )
}
"""The usual cases by name."""
