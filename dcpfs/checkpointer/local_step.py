"""What one rank brings to the save of a step: plans, a way to their values, and nothing that must be asked later.

Problem: a save that runs beside training, or in another process, can't reach for the model, its DTensors or a process
group of the trainer's: they have moved on, or do not exist there.

Way taken: plain data. A `LocalKey` holds write items in torch's own words and an object that resolves each of them;
a `LocalStep` all keys of a rank, its rank files as bytes, and a digest of the whole structure, so that two ranks, or
two saves, can tell in one number whether plans have to be exchanged again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Generator, Mapping
from dataclasses import dataclass, field

from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

from dcpfs.errors import DcpfsError

__all__ = ["LocalKey", "LocalStep", "naming_key"]


@dataclass(slots=True)
class LocalKey:
    """One key of one rank.

    Attributes:
        key: Its name: a directory of the step.
        plan: This rank's items, before replicas are dropped.
        values: Resolves each item; nothing else is asked of it.
        value_digests: CRC-32 of small plain values, by FQN: what ranks are compared by.
        parameters: FQNs of tensors that an optimizer alone writes; None: not known. See `stage_step`.
    """

    key: str
    plan: SavePlan
    values: SavePlanner
    value_digests: Mapping[str, int] = field(default_factory=dict)
    parameters: Collection[str] | None = None


@dataclass(slots=True)
class LocalStep:
    """All keys of one rank.

    Attributes:
        iteration: Of the step.
        keys: By name, in the order in which they are saved.
        rank_files: Contents of this rank's own files, by name relative to the step.
        digest: 63 bits over everything that plans depend on: keys, kinds, FQNs, shapes, dtypes, chunks, key types,
            world size, policy. Equal digests of one rank: its exchanged plans fit this state.
        world_size: Number of ranks that save.
        metric: What `keep_best` compares, or None.
        topology: Mesh of the world, for the manifest.
        relied_on: Names of files that another rank writes, and that this one reads on a load.
    """

    iteration: int
    keys: dict[str, LocalKey]
    rank_files: dict[str, bytes]
    digest: int
    world_size: int = 1
    metric: float | None = None
    topology: dict[str, object] = field(default_factory=dict)
    relied_on: tuple[str, ...] = ()


@contextlib.contextmanager
def naming_key(key: str) -> Generator[None, None, None]:
    """Within the block, errors of dcpfs are about this key's state, and their text says so."""
    try:
        yield
    except DcpfsError as error:
        error.message = f"{error.message} (in the state of the key {key!r})"
        raise
