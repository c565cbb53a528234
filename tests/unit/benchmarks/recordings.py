"""Recordings with figures that tests make up: what a run would have written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

from pydantic import BaseModel

from benchmarks.figures import Entry, Figure, Missing, StepFigure
from benchmarks.manifest import Manifest, RecordedPlan
from benchmarks.planning import SimulationFigure
from benchmarks.records import Recording, recording_of
from benchmarks.settings import Setting
from benchmarks.stall import Blocked, StallFigure
from benchmarks.workloads import Workload, specs

SIZE_BYTES = 4_000_000

SIMULATED = SimulationFigure(
    contender="dcpfs",
    ranks=64,
    tensors=100,
    local_cpu_seconds=0.1,
    sent_bytes=1000,
    coordinator_cpu_seconds=0.4,
    coordinator_extra_bytes=None,
    assigned_bytes=10,
    decode_cpu_seconds=0.01,
)
STALLED = StallFigure(
    contender="torch-thread",
    size_bytes=10,
    threads=2,
    copy_seconds=0.1,
    first=Blocked(call_seconds=0.5, total_seconds=0.5),
    later=Blocked(call_seconds=0.1, total_seconds=0.2),
    quiet_steps_per_second=10,
    saving_steps_per_second=9,
)


def figure(
    seconds: float,
    *,
    case: str = "save",
    contender: str = "dcpfs",
    repetition: int = 0,
    size_bytes: int | None = None,
    requests: int | None = 10,
    round_: int = 1,
    place: str = "",
) -> Figure:
    """A figure that took so many seconds; of the whole Llama-shaped state unless a size is given."""
    needed = sum(spec.size_bytes for spec in specs(Workload.LLAMA, SIZE_BYTES)) if size_bytes is None else size_bytes
    return Figure(
        entry=entry(case, contender, repetition, place),
        round=round_,
        needed_bytes=needed,
        wall_seconds=seconds,
        gb_per_second=needed / 1e9 / seconds,
        cpu_seconds_per_gb=seconds / 2 / (needed / 1e9),
        peak_extra_bytes=1 << 20,
        requests=requests,
        requests_by_verb=None,
        moved_per_needed=1.0,
        connections=None,
        server_cpu_seconds_per_gb=None,
    )


def figures(seconds: Sequence[float], *, contender: str = "dcpfs", case: str = "save") -> list[Figure]:
    """One figure a repetition."""
    return [figure(each, contender=contender, case=case, repetition=number) for number, each in enumerate(seconds)]


def step_figure(seconds: float, *, case: str, steps: int, contender: str = "dcpfs", repetition: int = 0) -> StepFigure:
    """A figure of a case about steps."""
    return StepFigure(
        kind="discovery",
        case=case,
        contender=contender,
        setting=Setting.FAST,
        repetition=repetition,
        round=0,
        ranks=1,
        steps=steps,
        seconds=seconds,
        blocked_seconds=None,
        cpu_seconds=seconds / 2,
        gigabytes=None,
        peak_bytes=None,
        requests=steps + 1,
        requests_by_verb=None,
        moved_bytes=None,
    )


def missing(reason: str, *, contender: str, kind: str = "failed", case: str = "save", repetition: int = 0) -> Missing:
    """A contender without figures."""
    return Missing.model_validate({"kind": kind, "entry": entry(case, contender, repetition), "reason": reason})


def entry(case: str, contender: str, repetition: int, place: str = "") -> Entry:
    """Whose line it is, in the fast setting or at a URL."""
    setting = Setting.URL if place else Setting.FAST
    return Entry(case=case, setting=setting, contender=contender, repetition=repetition, place=place)


def manifest(
    *, cores: int = 2, size_bytes: int = SIZE_BYTES, versions: Mapping[str, str | None] | None = None
) -> Manifest:
    """Circumstances of a run that never was."""
    plan = RecordedPlan(
        setting="fast", cases=("save",), contenders=("dcpfs",), size_bytes=size_bytes, repetitions=3, rounds=2
    )
    return Manifest(
        taken_at=datetime(2026, 1, 1, tzinfo=timezone.utc),
        git_sha="0123456789abcdef",
        git_dirty=False,
        python="3.11.7",
        system="Linux 6 x86_64",
        processor="one",
        cores=cores,
        memory_bytes=8 << 30,
        load_average=0.5,
        versions=dict(versions or {"torch": "2.13.0", "s3torchconnector": None}),
        plans=(plan,),
    )


def recording(results: Sequence[BaseModel], *, name: str = "run.jsonl", about: Manifest | None = None) -> Recording:
    """A recording as it would be read back."""
    return recording_of(Path(name), about or manifest(), results)


def write(path: Path, results: Sequence[BaseModel], about: Manifest | None = None) -> Path:
    """Write it as a run does."""
    lines = [each.model_dump_json() for each in (about or manifest(), *results)]
    path.write_text("\n".join(lines) + "\n")
    return path
