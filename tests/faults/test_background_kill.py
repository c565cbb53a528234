"""A trainer, or its background process, is killed at every request of a save: what loads is always one whole step.

Trainers are forked by one script that has imported everything, so that a dozen of them cost a dozen background
processes and no more. Each saves to a prefix of its own on a scripted S3 server in this process, which does the killing
when a request of its choice has arrived, and lets the request go on when the victim is gone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import dcpfs
from dcpfs.checkpointer.choices import RngPolicy
from dcpfs.testing.s3_exchange import Exchange, S3Request
from dcpfs.testing.s3_faults import Action, Fault
from dcpfs.testing.scripted_s3 import ScriptedS3Server
from tests.faults.processes import has_ended
from tests.multiprocess import background_job as job

ROOT = Path(__file__).parents[2]
CHANGES = {
    *("PutObject", "DeleteObject", "DeleteObjects"),
    *("CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"),
}

TRAINERS = """
import json, os, sys
import dcpfs
from tests.multiprocess import background_job as job
url, options, mode, gates, *names = sys.argv[1:]
keep_workers, holds_workers = os.pipe()
trainers = []
for name in names:
    trainer = os.fork()
    if trainer == 0:
        break
    trainers.append(trainer)
else:
    for trainer in trainers:
        os.waitpid(trainer, 0)
    print("all ended", flush=True)
    sys.stdin.read()  # until the test has seen what it wants: workers outlive their trainers so long
    sys.exit()
config = dcpfs.CheckpointConfig(
    save_dir=f"{url}/{name}", storage_options=json.loads(options), async_mode=mode, rng="none", keep_last=1
)
checkpointer = dcpfs.DistributedCheckpointer(config)
state = job.State()
def save(number):
    state.fill(number)
    checkpointer.save_state(number, {"model": state})
    checkpointer.maybe_wait_for_staging()
    state.fill(-1)
def tell(*words):
    os.write(1, (" ".join(map(str, (name, *words))) + chr(10)).encode())
if os.fork() == 0:  # a worker of a dataloader: it holds a copy of every descriptor, and outlives the trainer
    os.close(holds_workers)
    os.read(keep_workers, 1)
    os._exit(0)
save(1)
checkpointer.wait()
tell("pids", os.getpid(), checkpointer._saver.pid if mode != "async" else os.getpid())
open(f"{gates}/{name}", "rb").read()
try:
    save(2)
    checkpointer.wait()
    tell("saved")
except Exception as error:
    tell("failed", type(error).__name__, error)
save(3)
checkpointer.close()
tell("done")
"""


@dataclass
class Victim:
    """One trainer of the script, and what became of it.

    Attributes:
        at: Which changing request of the save of step 2 is the last thing that it sees, 0 the first; None: it lives.
        signal: What it gets then.
        hits_trainer: Or its background process.
        pids: Of both.
        seen: Changing requests from step 2 on.
        words: What it said.
    """

    at: int | None = None
    signal: int = signal.SIGKILL
    hits_trainer: bool = True
    pids: tuple[int, int] = (0, 0)
    seen: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)

    @property
    def manifest_at(self) -> int:
        """Which request commits step 2."""
        return self.seen.index("PutObject iter_000000002/manifest.json")


class Ambush(Action):
    """Signals a victim when its request has arrived, and lets the request go on when it is gone."""

    def __init__(self, victims: dict[str, Victim]) -> None:
        self._victims = victims
        self._lock = threading.Lock()

    def matches(self, request: S3Request) -> bool:
        name, _, path = request.key.partition("/")
        return (
            request.operation in CHANGES
            and name in self._victims
            and self._victims[name].pids != (0, 0)
            and "dcpfs-probe" not in path
        )

    def before_effect(self, exchange: Exchange, fault: Fault) -> None:
        name, _, path = exchange.request.key.partition("/")
        victim = self._victims[name]
        with self._lock:
            fires = len(victim.seen) == victim.at
            victim.seen.append(f"{exchange.request.operation} {path}")
        if fires:
            pid = victim.pids[0 if victim.hits_trainer else 1]
            descriptor = os.pidfd_open(pid)
            os.kill(pid, victim.signal)
            if victim.signal == signal.SIGKILL:
                assert has_ended(descriptor, 60)
            os.close(descriptor)


def run(server: ScriptedS3Server, mode: str, victims: dict[str, Victim], gates: Path) -> None:
    """Until every trainer and every background process has ended, with their workers alive."""
    ambush = Ambush(victims)
    server.fail(ambush.matches, ambush, times=None)
    for name in victims:
        os.mkfifo(gates / name)
    options = json.dumps(server.storage_options)
    script = subprocess.Popen(
        [sys.executable, "-c", TRAINERS, server.url().rstrip("/"), options, mode, str(gates), *victims],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert script.stdin is not None
    assert script.stdout is not None
    ends: list[int] = []
    try:
        for line in script.stdout:
            if line == "all ended\n":
                break
            name, word, *rest = line.split()
            victims[name].words.append(line.partition(" ")[2].strip())
            if word == "pids":
                ends.append(os.pidfd_open(int(rest[1])))
                victims[name].pids = (int(rest[0]), int(rest[1]))
                with open(gates / name, "wb"):
                    pass
        for end in ends:
            assert has_ended(end, 60), "a background process outlives its trainer"
            os.close(end)
    finally:
        script.kill()
        script.wait()
        script.stdout.close()
        script.stdin.close()


def load(server: ScriptedS3Server, name: str) -> int:
    """What a new trainer resumes from: bit for bit one step."""
    state = job.State()
    config = dcpfs.CheckpointConfig(
        save_dir=server.url(name), storage_options=server.storage_options, rng=RngPolicy.NONE
    )
    with dcpfs.DistributedCheckpointer(config, access="read_only") as checkpointer:
        iteration = checkpointer.load_state({"model": state})
    assert state.number == iteration
    assert all(tensor.eq(iteration).all() for tensor in state.tensors.values())
    return iteration


CHANGES_OF_A_SAVE = 11
"""Claim, two data files, two of metadata, manifest, end of the claim, pointer; retention: claim, manifest, end."""


@pytest.mark.parametrize("mode", ["async", "async_with_pinned_mem"])
def test_cases_15_30_34_42_53_killed_at_any_request(scripted_s3: ScriptedS3Server, tmp_path: Path, mode: str) -> None:
    victims = {"clean": Victim()}
    moments = range(CHANGES_OF_A_SAVE) if mode == "async" else (0, 1, 3, 5, 6, 7, 9)
    victims |= {f"trainer-{at}": Victim(at) for at in moments}
    if mode != "async":
        victims |= {f"saver-{at}": Victim(at, hits_trainer=False) for at in (1, 5)}
        victims["term"] = Victim(1, signal.SIGTERM, hits_trainer=False)
    run(scripted_s3, mode, victims, tmp_path)

    clean = victims["clean"]
    assert [word.split()[0] for word in clean.words] == ["pids", "saved", "done"]
    commit = clean.manifest_at
    assert clean.seen[commit + 2] == "PutObject latest_checkpoint.txt"  # pointer and retention follow (cases 34, 35)
    assert min(number for number, each in enumerate(clean.seen) if "iter_000000001" in each) > commit + 2

    stored = scripted_s3.stored_keys()
    for name, victim in victims.items():
        manifest = f"{name}/iter_000000002/manifest.json"
        if name.startswith("trainer"):
            assert victim.at is not None
            published = victim.at >= commit
            assert (manifest in stored) == published, (name, victim)
            # A thread dies with its trainer, before it moves the pointer; a process that had to publish does so.
            pointed = victim.at >= (commit + 2 if mode == "async" else commit)
            assert load(scripted_s3, name) == (2 if pointed else 1)
            assert len(victim.words) == 1
        elif name.startswith("saver"):
            assert "killed by SIGKILL" in victim.words[1], victim
            assert victim.words[2] == "done"
            assert load(scripted_s3, name) == 3
        else:
            assert [word.split()[0] for word in victim.words] == ["pids", "saved", "done"]
            assert load(scripted_s3, name) == 3
