"""Under which circumstances figures were taken: without them a figure can't be compared with any other.

Problem: what has to be told (which store, with which options) is next to what must never be (keys, tokens, passwords).

Way taken: of a URL its scheme is told, and the URL itself as it is redacted everywhere; of options their names. A value
is told only where it is true or false, since no secret is; a number can be one, and any text is masked, whatever its
option is called.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from .runner import Plan

__all__ = ["Manifest", "RecordedPlan", "mask_options", "take"]

_REPOSITORY = Path(__file__).resolve().parent.parent
_PACKAGES = (
    "adlfs",
    "aiobotocore",
    "boto3",
    "dcpfs",
    "fsspec",
    "gcsfs",
    "isal",
    "multi-storage-client",
    "numpy",
    "obstore",
    "s3fs",
    "s3torchconnector",
    "safetensors",
    "sshfs",
    "torch",
    "torchsnapshot",
    "webdav4",
)
"""Of all contenders, and what they stand on."""
_MASK = "***"
_CPUINFO = Path("/proc/cpuinfo")


class RecordedPlan(BaseModel):
    """A plan as it may be told.

    Attributes:
        place: The redacted URL that was given; empty for a place of the benchmarks' own.
        scheme: Of that URL; None where none was given.
        options: Names of the options that were given with it, values masked.
        conditions: Whatever else the plan says in numbers and words, e.g. the latency that was put in.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    setting: str
    place: str = ""
    scheme: str | None = None
    options: dict[str, str] = {}
    cases: tuple[str, ...]
    contenders: tuple[str, ...]
    size_bytes: int
    repetitions: int
    rounds: int
    conditions: dict[str, str | int | float | bool | None] = {}

    @classmethod
    def of(
        cls, plan: Plan, *, scheme: str | None = None, storage_options: Mapping[str, object] | None = None
    ) -> RecordedPlan:
        """What may be told of a plan."""
        told = {*cls.model_fields, "timeout_seconds"}
        dumped = plan.model_dump(mode="json")
        dumped |= dumped.pop("link") or {"latency_ms": None, "mb_per_second_per_connection": None}
        conditions: dict[str, str | int | float | bool | None] = {
            name: value
            for name, value in dumped.items()
            if name not in told and (value is None or isinstance(value, bool | int | float))
        }
        return cls(
            setting=plan.setting.value,
            place=plan.place,
            scheme=scheme,
            options=mask_options(storage_options or {}),
            cases=plan.cases,
            contenders=plan.contenders,
            size_bytes=plan.size_bytes,
            repetitions=plan.repetitions,
            rounds=plan.rounds,
            conditions=conditions | {"isolation": plan.isolation.value},
        )


class Manifest(BaseModel):
    """Circumstances of a run. Holds no secret: redacted URLs, and options without their values."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["manifest"] = "manifest"
    taken_at: datetime
    git_sha: str | None
    git_dirty: bool | None
    python: str
    system: str
    """Name and kernel release of the operating system, and the machine's architecture."""
    processor: str | None = None
    cores: int
    memory_bytes: int
    load_average: float
    versions: dict[str, str | None]
    plans: tuple[RecordedPlan, ...]


def take(plans: Sequence[RecordedPlan]) -> Manifest:
    """Describe this machine, tree and run.

    Args:
        plans: What is going to be run.
    """
    sha = status = None
    if _git("rev-parse", "--show-toplevel") == str(_REPOSITORY):
        sha = _git("rev-parse", "HEAD")
        status = _git("status", "--porcelain")
    return Manifest(
        taken_at=datetime.now(timezone.utc),
        git_sha=sha,
        git_dirty=None if status is None else bool(status),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        processor=_processor(),
        cores=_cores(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        load_average=os.getloadavg()[0],
        versions={name: _version(name) for name in _PACKAGES},
        plans=tuple(plans),
    )


def mask_options(options: Mapping[str, object]) -> dict[str, str]:
    """Names of options, of nested ones with dots, each with true, false or a mask."""
    masked: dict[str, str] = {}
    for name, value in options.items():
        if isinstance(value, Mapping):
            masked |= {f"{name}.{inner}": text for inner, text in mask_options(value).items()}
        else:
            masked[str(name)] = str(value) if isinstance(value, bool) else _MASK
    return masked


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=_REPOSITORY, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def _processor() -> str | None:
    try:
        lines = _CPUINFO.read_text().splitlines()
    except OSError:
        return None
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, None)
