"""Ranks of several machines, as far as one machine has them: each with a host name of its own, in 127.0.0.0/8."""

from __future__ import annotations

import ctypes
import os
import socket
from pathlib import Path

import torch.distributed as dist

from dcpfs.background.rendezvous import Rendezvous
from dcpfs.checkpointer.process_saver import ProcessSaver
from dcpfs.ranks import Ranks
from tests.multiprocess import background_job as job
from tests.multiprocess.gloo import run_ranks
from tests.open_files import open_links

_NEW_HOST_NAME = 0x04000000
"""CLONE_NEWUTS: a host name that this process and those that it starts have for themselves."""


def become_a_machine(number: int) -> str:
    """Give this process a host name that is an address: every other one can resolve it. Needs root for that; without,
    only this process believes in its name, and not the one that it starts."""
    name = f"127.0.0.{number}"
    if ctypes.CDLL(None).unshare(_NEW_HOST_NAME) == 0:
        socket.sethostname(name)
    else:
        socket.gethostname = lambda: name
    return name


def save_on_machines(save_dir: str) -> tuple[str, str, list[str], list[int]]:
    rank, state = dist.get_rank(), job.State()
    own = become_a_machine(2 + rank)
    os.environ.pop("MASTER_ADDR", None)
    rendezvous = Rendezvous.open(Ranks.current())
    met = rendezvous.address.host
    if rendezvous.descriptor is not None:
        bound, _ = socket.socket(fileno=os.dup(rendezvous.descriptor)).getsockname()
        assert bound == "0.0.0.0"  # every address of the machine
    rendezvous.close()
    with job.Checkpointer(job.config(save_dir, "async_with_pinned_mem")) as checkpointer:
        saver = checkpointer._saver
        assert isinstance(saver, ProcessSaver)
        assert saver.pid is not None
        for number in (1, 2):
            state.fill(number)
            checkpointer.save_state(number, {"model": state})
            checkpointer.wait()
        peers = sorted(established_peers(saver.pid))
        return own, met, peers, checkpointer.steps()


def established_peers(pid: int) -> set[str]:
    """Addresses that a process is connected to by TCP."""
    inodes = {target[8:-1] for target in open_links(pid) if target.startswith("socket:[")}
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[9] in inodes and fields[3] == "01":
            found.add(socket.inet_ntoa(bytes.fromhex(fields[2].partition(":")[0])[::-1]))
    return found


def test_case_51_processes_of_several_machines_meet_at_the_coordinators_own_name(tmp_path: Path) -> None:
    outcomes = run_ranks(save_on_machines, 2, str(tmp_path / "run"))
    for rank, (own, met, _, steps) in enumerate(outcomes):
        assert own == f"127.0.0.{2 + rank}"
        assert met == "127.0.0.2"  # the coordinator's name, and not the loopback of each
        assert steps == [1, 2]
    assert "127.0.0.2" in outcomes[1][2], outcomes  # where the process of the other machine is connected to
    assert job.saved(tmp_path / "run", 2)
