"""Under which circumstances figures were taken: without them a figure can't be compared with any other."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from .runner import Plan

__all__ = ["Manifest", "take"]

_REPOSITORY = Path(__file__).resolve().parent.parent
_PACKAGES = ("aiobotocore", "boto3", "dcpfs", "fsspec", "isal", "s3fs", "s3torchconnector", "torch")


class Manifest(BaseModel):
    """Circumstances of a run. Holds no path, host name, URL or option."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["manifest"] = "manifest"
    taken_at: datetime
    git_sha: str | None
    git_dirty: bool | None
    python: str
    system: str
    cores: int
    memory_bytes: int
    load_average: float
    versions: dict[str, str | None]
    plans: tuple[Plan, ...]


def take(plans: tuple[Plan, ...]) -> Manifest:
    """Describe this machine, tree and run."""
    sha = _git("rev-parse", "HEAD")
    status = _git("status", "--porcelain")
    return Manifest(
        taken_at=datetime.now(timezone.utc),
        git_sha=sha,
        git_dirty=None if status is None else bool(status),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        load_average=os.getloadavg()[0],
        versions={name: _version(name) for name in _PACKAGES},
        plans=plans,
    )


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
