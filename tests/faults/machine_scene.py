"""A trainer in a process of its own, on a filesystem that fails under it: full, read-only, or somebody else's.

In each mode, the trainer saves a step, the filesystem breaks, a second step fails, the filesystem is mended, and a
third step succeeds. What it saw comes back as a line of JSON a mode.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

__all__ = ["MODES", "Story", "tell", "tell_in_own_mount"]

MODES = ["disabled", "async", "async_with_pinned_mem"]
ROOT = Path(__file__).parents[2]

TRAINER = """
import ctypes, json, os, resource, subprocess, sys
import torch
import dcpfs
from dcpfs.config import TransferConfig
from tests.faults.scripted_scene import Part

root, breaks, modes, *drops = sys.argv[1:]
if drops:
    # Root without the capabilities to pass over rights: it is an owner like any other, and so are its children.
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        if libc.prctl(24, capability, 0, 0, 0):  # PR_CAPBSET_DROP
            raise OSError(ctypes.get_errno(), "capabilities can't be dropped here")
    os.execv(sys.executable, [sys.executable, "-c", os.environ["TRAINER"], root, breaks, modes])

class Large(Part):
    def __init__(self, seed):
        self.values = torch.full((400_000,), float(seed))  # 1.6 MB

def config(mode):
    return dcpfs.CheckpointConfig(save_dir=save_dir, async_mode=mode, rng="none", timeout_seconds=120)

def save(checkpointer, step):
    checkpointer.save_state(step, {"model": Large(step), "optim": Part(step * 10)})
    checkpointer.wait()

def resumed():
    model, optim = Large(0), Part(0)
    with dcpfs.DistributedCheckpointer(config("disabled"), access="read_only") as one:
        step = one.load_state({"model": model, "optim": optim})
    assert torch.equal(model.values, Large(step).values), "a mix"
    assert torch.equal(optim.values, Part(step * 10).values), "a mix"
    return step

def files():
    found = (os.path.join(top, name) for top, _, names in os.walk(save_dir) for name in names)
    return sorted(os.path.relpath(path, save_dir) for path in found)

def said(error):
    return {
        "type": type(error).__name__,
        "text": str(error),
        "os_error": isinstance(error, OSError),
        "errno": getattr(error, "errno", None),
    }

ballast = os.path.join(root, "ballast")
def fill():
    free = os.statvfs(root).f_bavail * os.statvfs(root).f_frsize
    with open(ballast, "wb") as file:
        file.write(bytes(max(0, free - (1 << 20))))

def limit(size_bytes):
    for pid in {os.getpid(), getattr(checkpointer._saver, "pid", os.getpid())}:
        hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size_bytes, hard))

def remount(how):
    subprocess.run(["mount", "-o", "remount," + how, root], check=True)

def close_directories(mode_bits):
    for top, _, _ in [*os.walk(save_dir)][:: 1 if mode_bits & 0o200 else -1]:
        os.chmod(top, mode_bits)

BREAKS = {
    "full": (fill, lambda: os.unlink(ballast)),
    "limit": (lambda: limit(1 << 20), lambda: limit(resource.RLIM_INFINITY)),
    "read-only": (lambda: remount("ro"), lambda: remount("rw")),
    "right": (lambda: close_directories(0o500), lambda: close_directories(0o700)),
}
break_it, mend_it = BREAKS[breaks]

for mode in modes.split(","):
    save_dir = os.path.join(root, "run-" + mode)
    seen = {"mode": mode}
    with dcpfs.DistributedCheckpointer(config(mode)) as checkpointer:
        save(checkpointer, 1)
        before = files()
        break_it()
        try:
            save(checkpointer, 2)
        except Exception as error:
            seen["save"] = said(error)
        seen["left"] = sorted(set(files()) - set(before))
        seen["found"] = resumed()
        try:
            dcpfs.save({"weights": torch.zeros(400_000)}, os.path.join(save_dir, "bare"))
        except Exception as error:
            seen["bare"] = said(error)
        seen["bare left"] = [name for name in files() if name.startswith("bare")]
        mend_it()
        save(checkpointer, 3)
        seen["found after"] = resumed()
    print("seen", json.dumps(seen))
"""


@dataclass(frozen=True)
class Story:
    """What a trainer saw.

    Attributes:
        save: What the failed save of step 2 said: type, text, errno.
        bare: The same of `dcpfs.save`.
        left: Files of step 2.
        bare_left: Files of the failed `dcpfs.save`.
        found: The step that was resumed while the filesystem was broken.
        found_after: The one that was resumed when it was mended and the third step saved.
    """

    save: dict[str, object]
    bare: dict[str, object]
    left: list[str]
    bare_left: list[str]
    found: int
    found_after: int


def _stories(done: subprocess.CompletedProcess[str]) -> dict[str, Story]:
    assert done.returncode == 0, done.stderr[-4000:]
    stories = {}
    for line in done.stdout.splitlines():
        if not line.startswith("seen "):
            continue
        seen = json.loads(line.removeprefix("seen "))
        assert "save" in seen, "the save of a broken filesystem reported success"
        assert "bare" in seen, "dcpfs.save to a broken filesystem reported success"
        stories[seen["mode"]] = Story(
            seen["save"], seen["bare"], seen["left"], seen["bare left"], int(seen["found"]), int(seen["found after"])
        )
    assert list(stories) == MODES
    return stories


def tell(root: Path, breaks: str, *, as_owner: bool = False) -> dict[str, Story]:
    """Run a trainer on a directory, in each mode.

    Args:
        root: The directory; it becomes ``<root>/run-<mode>``.
        breaks: What happens.
        as_owner: Rights bind it even if it is root.
    """
    drops = ["drop"] if as_owner and os.geteuid() == 0 else []
    return _stories(_run(_trainer(root, breaks, *drops)))


def tell_in_own_mount(root: Path, mount: str, breaks: str) -> dict[str, Story]:
    """Run a trainer on a filesystem of its own, which ends with it, in each mode.

    Args:
        root: Where it is mounted.
        mount: Arguments of `mount`.
        breaks: What happens.
    """
    if shutil.which("unshare") is None or os.geteuid() != 0:
        pytest.skip("mounting a small filesystem needs unshare and root")
    root.mkdir()
    command = f'mount {mount} "$0" && exec "$@"'
    done = _run(["unshare", "--mount", "sh", "-c", command, str(root), *_trainer(root, breaks)])
    if done.returncode in {1, 32} and ("unshare:" in done.stderr or "mount:" in done.stderr):
        pytest.skip(f"this machine does not allow mounts: {done.stderr.strip()}")
    return _stories(done)


def _trainer(root: Path, breaks: str, *drops: str) -> list[str]:
    return [sys.executable, "-c", TRAINER, str(root), breaks, ",".join(MODES), *drops]


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRAINER": TRAINER}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=280, cwd=ROOT, env=environment)
