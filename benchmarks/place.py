"""A place to save to for the time of a run: a sink of its own or a directory, gone afterwards."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .settings import PLACE_PREFIX, Setting, Target

__all__ = ["open_place", "start_sink"]

_REPOSITORY = Path(__file__).resolve().parent.parent
_TMPFS = "/dev/shm"


@contextlib.contextmanager
def open_place(setting: Setting, disk_directory: Path | None, reserve_bytes: int) -> Iterator[Target]:
    """Yield where checkpoints of a run go.

    Args:
        setting: The kind of place.
        disk_directory: Directory on the device to measure; None: the system's temporary directory.
        reserve_bytes: Object memory that the sink touches before the first request.
    """
    if setting.is_s3:
        with start_sink(setting.latency_ms, setting.mbps_per_connection, reserve_bytes) as port:
            yield Target(setting=setting, path="run", port=port)
        return
    if setting is Setting.MEMORY:
        yield Target(setting=setting, path=f"/{PLACE_PREFIX}run")
        return
    parent = _TMPFS if setting is Setting.TMPFS else disk_directory
    directory = tempfile.mkdtemp(prefix=PLACE_PREFIX, dir=parent)
    try:
        yield Target(setting=setting, path=directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def start_sink(latency_ms: float, mbps_per_connection: float, reserve_bytes: int) -> Iterator[int]:
    """Run a sink in a process of its own and yield its port."""
    command = [sys.executable, "-m", f"{__package__}.sink", "--latency-ms", str(latency_ms)]
    command += ["--mbps-per-connection", str(mbps_per_connection), "--reserve-mib", str(reserve_bytes >> 20)]
    # It ends with its stdin, so it goes even when this process is killed.
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=_REPOSITORY)
    try:
        if process.stdout is None or not (line := process.stdout.readline()):
            raise RuntimeError("the sink did not start")
        yield int(json.loads(line)["port"])
    finally:
        process.communicate(timeout=30)
