"""Figures: what a case's clients measured, put together over ranks and told in portable units.

Wall time runs from the first rank's start to the last one's end; CPU adds up; memory is the greediest rank's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from .job import Absent, Failed, Measured, Outcome, RoundFigures
from .settings import Setting

__all__ = ["Entry", "Figure", "Missing", "combine"]


class Entry(BaseModel):
    """Whose line it is.

    Attributes:
        place: The redacted URL, where a run compares several of one setting; else empty.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    case: str
    setting: Setting
    contender: str
    repetition: int
    place: str = ""

    @property
    def where(self) -> str:
        """Setting or URL: runs are only compared within one."""
        return self.place or self.setting.value


class Figure(BaseModel):
    """One timed and proved call. GB are 10^9 bytes of payload that was needed, whatever was moved."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["figure"] = "figure"
    entry: Entry
    round: int
    needed_bytes: int
    wall_seconds: float
    gb_per_second: float
    cpu_seconds_per_gb: float
    peak_extra_bytes: int | None
    requests: int | None
    requests_by_verb: dict[str, int] | None
    moved_per_needed: float | None
    connections: int | None
    server_cpu_seconds_per_gb: float | None


class Missing(BaseModel):
    """No figure, and why."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["absent", "failed"]
    entry: Entry
    reason: str


def combine(entry: Entry, outcomes: Sequence[Outcome]) -> list[Figure] | Missing:
    """Figures of each round from the outcomes of all ranks; missing when any rank has none."""
    measured: list[Measured] = []
    for rank, outcome in enumerate(outcomes):
        result = outcome.result
        if isinstance(result, Absent | Failed):
            return Missing(kind=result.kind, entry=entry, reason=f"rank {rank}: {result.reason}")
        if not isinstance(result, Measured):
            return Missing(kind="failed", entry=entry, reason=f"rank {rank} measured nothing")
        measured.append(result)
    if not measured:
        return Missing(kind="failed", entry=entry, reason="no rank answered")
    rounds = zip(*(result.rounds for result in measured), strict=True)
    return [_figure(entry, number, measured[0].needed_bytes, ranks) for number, ranks in enumerate(rounds)]


def _figure(entry: Entry, number: int, needed_bytes: int, ranks: Sequence[RoundFigures]) -> Figure:
    wall_seconds = max(rank.ended_seconds for rank in ranks) - min(rank.began_seconds for rank in ranks)
    gigabytes = needed_bytes / 1e9
    peaks = [rank.peak_extra_bytes for rank in ranks if rank.peak_extra_bytes is not None]
    first = ranks[0]
    server = first.server_cpu_seconds
    return Figure(
        entry=entry,
        round=number,
        needed_bytes=needed_bytes,
        wall_seconds=wall_seconds,
        gb_per_second=gigabytes / wall_seconds,
        cpu_seconds_per_gb=sum(rank.cpu_seconds for rank in ranks) / gigabytes,
        peak_extra_bytes=max(peaks) if len(peaks) == len(ranks) else None,
        requests=first.requests,
        requests_by_verb=first.requests_by_verb,
        moved_per_needed=None if first.moved_bytes is None else first.moved_bytes / needed_bytes,
        connections=first.connections,
        server_cpu_seconds_per_gb=None if server is None else server / gigabytes,
    )
