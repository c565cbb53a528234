"""The questions that are asked, one a case.

Each case says who saves, who loads, and what: everything else (where, by whom, how often) is the runner's.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from .contenders import Scope
from .workloads import TensorSpec, Workload

__all__ = ["CASES", "Case", "Operation", "needed"]

_PART_STRIDE = 20


class Operation(str, enum.Enum):
    """What is timed."""

    SAVE = "save"
    LOAD = "load"


@dataclass(frozen=True, slots=True)
class Case:
    """One question.

    Attributes:
        name: As on the command line.
        question: What it answers.
        operation: What is timed.
        workload: What is saved.
        save_world: Ranks that save; with more than one each has its rows of every tensor.
        load_world: The same for loading.
        scope: Whether the whole checkpoint is loaded or every 20th key.
    """

    name: str
    question: str
    operation: Operation
    workload: Workload = Workload.LLAMA
    save_world: int = 1
    load_world: int = 1
    scope: Scope = Scope.WHOLE

    @property
    def world(self) -> int:
        """Ranks in the timed operation."""
        return self.save_world if self.operation is Operation.SAVE else self.load_world

    @property
    def sharded(self) -> bool:
        """DTensors are involved."""
        return max(self.save_world, self.load_world) > 1


def needed(case: Case, tensors: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """The tensors that the timed operation moves."""
    return tensors[::_PART_STRIDE] if case.scope is Scope.PART else tensors


CASES = {
    case.name: case
    for case in (
        Case("save", "What does it cost to save a model with its optimizer?", Operation.SAVE),
        Case("load", "What does it cost to load it?", Operation.LOAD),
        Case("save-2", "The same saved by two ranks, half of the rows each?", Operation.SAVE, save_world=2),
        Case("load-2", "And loaded by two ranks?", Operation.LOAD, save_world=2, load_world=2),
        Case(
            "reshard",
            "Saved by one, loaded by two: who reads more than its rows?",
            Operation.LOAD,
            load_world=2,
        ),
        Case("partial", "Every 20th key: who reads more than that?", Operation.LOAD, scope=Scope.PART),
        Case("small-save", "What does each of many small tensors cost?", Operation.SAVE, Workload.SMALL),
        Case("small-load", "And when loading?", Operation.LOAD, Workload.SMALL),
    )
}
"""All cases by name."""
