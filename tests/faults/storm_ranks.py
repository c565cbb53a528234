"""The ranks of a run that somebody else stops, kills or cuts off, and the process that forks them.

Problem: a storm of hundreds of kills can't import torch anew for every rank; and a rank has to say what it knows before
it dies, so that what is found afterwards can be compared with it.

Way taken: ``python -m tests.faults.storm_ranks`` imports everything once and then reads orders, one a line. For each
it forks the ranks, tells their pids, waits until all have ended, and tells how. A rank tells in lines of its own: ::

    saver PID → (waits for its gate) → resumed STEP → began STEP → saved STEP | failed STEP ERROR: TEXT → … → done

A step's number is its version: every value of it tells which step it is of.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import s3fs  # noqa: F401 - imported once, before the forks, as the rest that is not named below
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import dcpfs
from dcpfs.checkpointer import resume as resume_module
from dcpfs.checkpointer import save_step as save_step_module
from dcpfs.checkpointer.process_saver import ProcessSaver
from dcpfs.dcp import source as source_module
from dcpfs.storage.location import Location
from dcpfs.storage.opening import open_store
from dcpfs.storage.s3_store import S3Store
from dcpfs.storage.store import Store
from dcpfs.testing.faulty import FaultyStore

_IMPORTED = (dcpfs.DistributedCheckpointer, S3Store, "torch.utils.serialization")

__all__ = ["KEEP_LAST", "Order", "columns_of", "gate_of", "halt_saves", "values_of"]

KEEP_LAST = 2
ROWS, COLUMNS = 96, 64
"""Of the sharded tensor: 2, 3 and 4 ranks have equal shares of it."""
LARGE_BYTES = 6 << 20
"""Of a rank's share where its file is to be uploaded in parts: two of them."""
PART_BYTES = 5 << 20
CLONE_NEWUTS, CLONE_NEWNET = 0x04000000, 0x40000000


@dataclass(frozen=True)
class Order:
    """One round: ranks that resume, and save some steps.

    Attributes:
        name: Of the round; new each time.
        folder: For the rendezvous, and for the gates that ranks wait at (`gate_of`).
        save_dir: Where.
        options: Storage options of each rank.
        mode: Who saves.
        saves: How many steps each rank saves.
        timeout_seconds: Of an exchange of the checkpointer; that of the ranks' own group is a minute at least.
        networks: Network namespace of each rank; none: that of the test.
        addresses: Of the ranks in these, which are machines of their own by that name.
        halts: Of a rank: how the name of the object ends before whose first change it, or its background process,
            tells ``halted`` and waits for its second gate.
        load_halts: The same before the first read of an object, in a load.
        waits: Each save is waited for; else the next one does that.
        pauses: A rank whose save has failed waits for its second gate.
        columns: Of the sharded tensor.
        retry: Settings of retries; none: the usual ones.
    """

    name: str
    folder: str
    save_dir: str
    options: list[dict[str, Any]]
    mode: str
    saves: int = 3
    timeout_seconds: float = 120.0
    networks: list[str] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)
    halts: dict[str, str] = field(default_factory=dict)
    load_halts: dict[str, str] = field(default_factory=dict)
    waits: bool = True
    pauses: bool = False
    columns: int = COLUMNS
    retry: dict[str, float] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        return len(self.options)

    def to_line(self) -> str:
        return json.dumps(asdict(self)) + "\n"


def gate_of(order: Order, rank: int, number: int = 0) -> Path:
    """A FIFO that a rank waits at until somebody opens it for writing."""
    return Path(order.folder) / f"{order.name}-gate-{number}-{rank}"


# --- the state


def columns_of(world_size: int, *, large: bool) -> int:
    """Columns of the sharded tensor; large: such that each rank uploads its share in parts."""
    return world_size * LARGE_BYTES // (ROWS * 4) if large else COLUMNS


def values_of(step: int, rank: int, columns: int = COLUMNS) -> dict[str, dict[str, Any]]:
    """A step's state, with whole tensors."""
    sharded = torch.arange(ROWS * columns, dtype=torch.float32).reshape(ROWS, columns) + step * 10_000
    return {
        "model": {"sharded": sharded, "shared": torch.full((20_000,), float(step))},
        "optim": {"state.shared.step": step, "state.shared.exp_avg": torch.full((300,), step + 0.5)},
        "dataloader": {"position": [step, rank] * 10},
        "trainer": {"step": step},
    }


def _make_state(rank: int, world_size: int, columns: int) -> dict[str, dict[str, Any]]:
    state = values_of(0, rank, columns)
    mesh = init_device_mesh("cpu", (world_size,))
    local = state["model"]["sharded"].chunk(world_size)[rank].clone()
    state["model"]["sharded"] = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    return state


def _local(value: object) -> object:
    return value.to_local() if isinstance(value, DTensor) else value


def _share(name: str, value: Any, rank: int, world_size: int) -> Any:
    return value.chunk(world_size)[rank] if name == "sharded" else value


def _fill(state: dict[str, dict[str, Any]], step: int, rank: int, world_size: int) -> None:
    for key, values in values_of(step, rank, state["model"]["sharded"].shape[1]).items():
        for name, value in values.items():
            held = _local(state[key][name])
            if isinstance(held, torch.Tensor):
                held.copy_(_share(name, value, rank, world_size))
            else:
                state[key][name] = value


def _differences(state: dict[str, dict[str, Any]], step: int, rank: int, world_size: int) -> list[str]:
    found = []
    for key, values in values_of(step, rank, state["model"]["sharded"].shape[1]).items():
        if state[key].keys() != values.keys():
            found.append(f"{key} has {list(state[key])}")
            continue
        for name, value in values.items():
            held, wanted = _local(state[key][name]), _share(name, value, rank, world_size)
            same = torch.equal(held, wanted) if isinstance(held, torch.Tensor) else held == wanted
            if not same:
                found.append(f"{key}/{name}")
    return found


# --- a rank


def _run_rank(order: Order, rank: int) -> None:
    tell = functools.partial(_tell, order, rank)
    torch.set_num_threads(1)
    if order.networks:
        _enter_network(order.networks[rank], order.addresses, rank)
    if str(rank) in order.halts:
        _halt_saves_of_children(order, rank)
        halt_saves(order, rank)
    if str(rank) in order.load_halts:
        halting = functools.partial(_open_halting, order.load_halts[str(rank)], functools.partial(_halt, order, rank))
        for module in (resume_module, source_module):
            setattr(module, "open_store", halting)  # noqa: B010 - not exported
    dist.init_process_group(
        "gloo",
        init_method=f"file://{order.folder}/{order.name}",
        rank=rank,
        world_size=order.world_size,
        timeout=timedelta(seconds=max(60.0, order.timeout_seconds)),  # ranks that are slow to start meet too
    )
    state = _make_state(rank, order.world_size, order.columns)
    config = dcpfs.CheckpointConfig.model_validate(
        {
            "save_dir": order.save_dir,
            "storage_options": order.options[rank],
            "async_mode": order.mode,
            "rng": "none",
            "keep_last": KEEP_LAST,
            "timeout_seconds": order.timeout_seconds,
            "transfer": {"part_bytes": PART_BYTES},
            "retry": order.retry,
        }
    )
    checkpointer = dcpfs.DistributedCheckpointer(config)
    saver = checkpointer._saver
    tell("saver", saver.pid if isinstance(saver, ProcessSaver) else 0)
    _wait_at_gate(order, rank, 0)
    try:
        start = checkpointer.load_state(dict(state))
    except Exception as error:
        tell("failed", "load", f"{type(error).__name__}: {error}")
        _close(checkpointer, tell)
        return
    wrong = _differences(state, start, rank, order.world_size)
    tell("resumed", start) if not wrong else tell("mixed", start, *wrong)
    failures = flying = 0
    for step in range(start + 1, start + 1 + order.saves):
        tell("began", step)
        try:
            _fill(state, step, rank, order.world_size)
            checkpointer.save_state(step, dict(state))
            checkpointer.maybe_wait_for_staging()
            _fill(state, -1, rank, order.world_size)
            if order.waits:
                checkpointer.wait()
                tell("saved", step)
            elif flying:
                tell("saved", flying)  # else this save had raised its failure
            flying = step
        except Exception as error:
            tell("failed", step, f"{type(error).__name__}: {error}")
            flying = 0
            failures += 1
            if failures == 2:
                break
            if order.pauses:
                _wait_at_gate(order, rank, 1)
    if _close(checkpointer, tell) and flying:
        tell("saved", flying)


def _tell(order: Order, rank: int, *words: object) -> None:
    os.write(1, (" ".join(map(str, (order.name, rank, *words))).replace("\n", " ")[:2000] + "\n").encode())


def _wait_at_gate(order: Order, rank: int, number: int) -> None:
    with open(gate_of(order, rank, number), "rb") as gate:
        gate.read()


def _close(checkpointer: dcpfs.DistributedCheckpointer, tell: Callable[..., None]) -> bool:
    try:
        checkpointer.close()
        tell("done")
    except Exception as error:
        tell("failed", "close", f"{type(error).__name__}: {error}")
        return False
    return True


def _enter_network(name: str, addresses: list[str], rank: int) -> None:
    """As ``ip netns exec`` does; with addresses, on a host of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/run/netns/{name}", os.O_RDONLY)
    if libc.setns(descriptor, CLONE_NEWNET) != 0 or (addresses and libc.unshare(CLONE_NEWUTS) != 0):
        raise OSError(ctypes.get_errno(), f"can't enter {name}")
    os.close(descriptor)
    os.environ["GLOO_SOCKET_IFNAME"] = "ranks"
    if addresses:
        # Background processes of several machines meet at the coordinator's address.
        socket.sethostname(addresses[rank])
        os.environ["MASTER_ADDR"] = addresses[0]


# --- halts


def halt_saves(order: Order, rank: int) -> None:
    """Let the saves of this process halt where an order says so."""
    halt = functools.partial(_halt, order, rank)
    opens = functools.partial(_open_halting, order.halts[str(rank)], halt)
    setattr(save_step_module, "open_store", opens)  # noqa: B010 - not exported


def _halt_saves_of_children(order: Order, rank: int) -> None:
    """The same in background processes that this one starts."""
    site = Path(order.folder) / f"{order.name}-site-{rank}"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import json, sys\n"
        "if any('dcpfs.background.worker' in each for each in sys.orig_argv):\n"
        "    from tests.faults.storm_ranks import Order, halt_saves\n"
        f"    halt_saves(Order(**json.loads({order.to_line()!r})), {rank})\n"
    )
    sys.path.insert(0, str(site))


def _halt(order: Order, rank: int, path: str) -> None:
    _tell(order, rank, "halted", path)
    _wait_at_gate(order, rank, 1)


class _HaltingStore(FaultyStore):
    """Halts once: before the first change of an object in a save, or before its first read in a load."""

    def __init__(self, store: Store, ending: str, halt: Callable[[str], object]) -> None:
        super().__init__(store)
        self._ending = ending
        self._halt: Callable[[str], object] | None = halt

    def mutate(self, verb: str, path: str, action: Callable[[], Any]) -> Any:
        self._halt_at(path)
        return super().mutate(verb, path, action)

    def read_into(self, path: str, start: int, buffers: Any) -> None:
        self._halt_at(path)
        super().read_into(path, start, buffers)

    def _halt_at(self, path: str) -> None:
        if self._halt is not None and path.endswith(self._ending):
            halt, self._halt = self._halt, None
            halt(path)


def _open_halting(ending: str, halt: Callable[[str], object], location: Location, **options: Any) -> Store:
    return _HaltingStore(open_store(location, **options), ending, halt)


# --- the process that forks them


def main() -> None:
    """Carry out orders until there are no more."""
    for line in sys.stdin:
        order = Order(**json.loads(line))
        ranks: dict[int, int] = {}
        for rank in range(order.world_size):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    _run_rank(order, rank)
                    code = 0
                except BaseException:
                    os.write(2, traceback.format_exc().encode())
                finally:
                    os._exit(code)
            ranks[pid] = rank
        print(order.name, "ranks", *ranks, flush=True)
        left = dict(ranks)
        while left:
            with contextlib.suppress(InterruptedError):
                pid, status = os.wait()
                print(order.name, "ended", left.pop(pid), os.waitstatus_to_exitcode(status), flush=True)
        print(order.name, "over", flush=True)


if __name__ == "__main__":
    main()
