"""Figures: what a case's clients measured, put together over ranks and told in portable units.

Wall time runs from the first rank's start to the last one's end; CPU adds up; memory is the greediest rank's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from .job import Absent, Failed, Measured, Outcome, RoundFigures
from .settings import Setting

__all__ = ["Entry", "Figure", "Missing", "StepFigure", "combine", "combine_steps", "link_text"]


class Entry(BaseModel):
    """Whose line it is.

    Attributes:
        place: The redacted URL, where a run compares several of one setting; else empty.
        latency_ms: That was injected beyond what the setting says; None: nothing was.
        mb_per_second_per_connection: That connections were held to; 0: unlimited, None: nothing was injected.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    case: str
    setting: Setting
    contender: str
    repetition: int
    place: str = ""
    latency_ms: float | None = None
    mb_per_second_per_connection: float | None = None

    @property
    def where(self) -> str:
        """Setting or URL, and the link that was put in front: runs are only compared within one."""
        return " ".join(filter(None, (self.place or self.setting.value, link_text(self))))


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
    moved_bytes: int | None = None
    ranks: int = 1


class StepFigure(BaseModel):
    """One timed and proved call of a case about steps.

    Attributes:
        steps: In the directory at the start.
        seconds: Of the whole call: until the step is committed, found, or the others are gone.
        blocked_seconds: Until training may write its state again; of a checkpointer alone.
        gigabytes: 10^9 bytes of the state; None where the question is not about payload.
        peak_bytes: Of memory above the state, of the greediest rank's own process.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["checkpointer", "discovery", "retention"]
    case: str
    contender: str
    setting: Setting
    place: str = ""
    latency_ms: float | None = None
    mb_per_second_per_connection: float | None = None
    repetition: int
    round: int
    ranks: int
    steps: int
    seconds: float
    blocked_seconds: float | None
    cpu_seconds: float
    gigabytes: float | None
    peak_bytes: int | None
    requests: int | None
    requests_by_verb: dict[str, int] | None
    moved_bytes: int | None

    @property
    def entry(self) -> Entry:
        """Whose line it is, as of the other figures."""
        names = ("case", "contender", "setting", "place", "latency_ms", "mb_per_second_per_connection", "repetition")
        return Entry.model_validate({name: getattr(self, name) for name in names})


class Missing(BaseModel):
    """No figure, and why."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["absent", "failed"]
    entry: Entry
    reason: str


def link_text(entry: Entry) -> str:
    """The link that was put in front, in words; empty when there was none."""
    if entry.latency_ms is None and entry.mb_per_second_per_connection is None:
        return ""
    rate = entry.mb_per_second_per_connection
    return f"+{entry.latency_ms or 0:g} ms" + (f", {rate:g} MB/s a connection" if rate else "")


def combine(entry: Entry, outcomes: Sequence[Outcome]) -> list[Figure] | Missing:
    """Figures of each round from the outcomes of all ranks; missing when any rank has none."""
    measured = _all_measured(entry, outcomes)
    if isinstance(measured, Missing):
        return measured
    rounds = zip(*(result.rounds for result in measured), strict=True)
    return [_figure(entry, number, measured[0].needed_bytes, ranks) for number, ranks in enumerate(rounds)]


def combine_steps(
    entry: Entry, kind: Literal["checkpointer", "discovery", "retention"], steps: int, outcomes: Sequence[Outcome]
) -> list[StepFigure] | Missing:
    """The same for cases about steps."""
    measured = _all_measured(entry, outcomes)
    if isinstance(measured, Missing):
        return measured
    figures = []
    for number, ranks in enumerate(zip(*(result.rounds for result in measured), strict=True)):
        blocked = [rank.blocked_seconds for rank in ranks if rank.blocked_seconds is not None]
        needed_bytes = measured[0].needed_bytes
        figures.append(
            StepFigure(
                kind=kind,
                **entry.model_dump(),
                round=number,
                ranks=len(ranks),
                steps=steps,
                seconds=_wall_seconds(ranks),
                blocked_seconds=max(blocked) if blocked else None,
                cpu_seconds=sum(rank.cpu_seconds for rank in ranks),
                gigabytes=needed_bytes / 1e9 if needed_bytes else None,
                peak_bytes=_peak_bytes(ranks),
                requests=ranks[0].requests,
                requests_by_verb=ranks[0].requests_by_verb,
                moved_bytes=ranks[0].moved_bytes,
            )
        )
    return figures


def _all_measured(entry: Entry, outcomes: Sequence[Outcome]) -> list[Measured] | Missing:
    measured: list[Measured] = []
    for rank, outcome in enumerate(outcomes):
        result = outcome.result
        if isinstance(result, Absent | Failed):
            return Missing(kind=result.kind, entry=entry, reason=f"rank {rank}: {result.reason}")
        if not isinstance(result, Measured):
            return Missing(kind="failed", entry=entry, reason=f"rank {rank} measured nothing")
        measured.append(result)
    return measured or Missing(kind="failed", entry=entry, reason="no rank answered")


def _wall_seconds(ranks: Sequence[RoundFigures]) -> float:
    return max(rank.ended_seconds for rank in ranks) - min(rank.began_seconds for rank in ranks)


def _peak_bytes(ranks: Sequence[RoundFigures]) -> int | None:
    peaks = [rank.peak_extra_bytes for rank in ranks if rank.peak_extra_bytes is not None]
    return max(peaks) if len(peaks) == len(ranks) else None


def _figure(entry: Entry, number: int, needed_bytes: int, ranks: Sequence[RoundFigures]) -> Figure:
    wall_seconds, gigabytes = _wall_seconds(ranks), needed_bytes / 1e9
    first = ranks[0]
    server = first.server_cpu_seconds
    return Figure(
        entry=entry,
        round=number,
        needed_bytes=needed_bytes,
        wall_seconds=wall_seconds,
        gb_per_second=gigabytes / wall_seconds,
        cpu_seconds_per_gb=sum(rank.cpu_seconds for rank in ranks) / gigabytes,
        peak_extra_bytes=_peak_bytes(ranks),
        requests=first.requests,
        requests_by_verb=first.requests_by_verb,
        moved_per_needed=None if first.moved_bytes is None else first.moved_bytes / needed_bytes,
        connections=first.connections,
        server_cpu_seconds_per_gb=None if server is None else server / gigabytes,
        moved_bytes=first.moved_bytes,
        ranks=len(ranks),
    )
