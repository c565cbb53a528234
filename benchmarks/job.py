"""What the runner asks of a client, and what it gets back: values that cross a process border as JSON.

An outcome is measured, absent or failed. Only a measured one has figures, and it can't be made without the
word that they were verified: a wrong or missing result has no way to become a figure.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from .settings import Target

__all__ = ["Absent", "Failed", "Job", "Measured", "Outcome", "Prepared", "RoundFigures"]


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Job(_Value):
    """One contender in one process of a case."""

    case: str
    contender: str
    target: Target
    size_bytes: int
    rounds: Annotated[int, Field(ge=1)]
    prepare: bool = False
    """Only save what later jobs load."""
    rank: int = 0
    rendezvous: str | None = None
    """File that ranks meet at; None: no process group."""


class RoundFigures(_Value):
    """One timed call of one rank. What the sink counted is for all ranks together, and given by rank 0."""

    began_seconds: float
    ended_seconds: float
    cpu_seconds: float
    peak_extra_bytes: int | None
    requests: int | None = None
    requests_by_verb: dict[str, int] | None = None
    moved_bytes: int | None = None
    connections: int | None = None
    server_cpu_seconds: float | None = None
    blocked_seconds: float | None = None
    """Until training may write its state again, where that is less than the whole call."""


class Measured(_Value):
    """Every round's bytes were right."""

    kind: Literal["measured"] = "measured"
    verified: Literal[True]
    rounds: Annotated[tuple[RoundFigures, ...], Field(min_length=1)]
    needed_bytes: int
    """Payload that all ranks together save or load in a round; 0 where the question is not about payload."""


class Prepared(_Value):
    """The checkpoint to load is there."""

    kind: Literal["prepared"] = "prepared"


class Absent(_Value):
    """The contender can't take part."""

    kind: Literal["absent"] = "absent"
    reason: str


class Failed(_Value):
    """It raised, died, or its bytes were wrong."""

    kind: Literal["failed"] = "failed"
    reason: str


class Outcome(_Value):
    """What a client hands back."""

    result: Annotated[Measured | Prepared | Absent | Failed, Field(discriminator="kind")]
