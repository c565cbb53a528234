"""Process groups of a checkpointer's own.

Problem: a save that exchanges over the training job's group gets in the way of its collectives: from a thread it mixes
with them and deadlocks (case 50), a long upload trips their watchdog (case 108), and a failure is found by a time-out
that was set for something else (case 101). Torch makes a new group with all processes of the job, members or not. The
way it has for members alone derives the group's name from how many groups a process belongs to: it waits in vain where
these numbers differ, and takes a name twice when groups come and go, which is refused or breaks the connections.

After an elastic restart its store still has the addresses that the last attempt left under the names that it counts up,
and whoever comes first connects to those.

Way taken: gloo groups on the CPU with a time-out of their own, one for each thread that exchanges, made by the members
alone under a random name that they share over the group that they were given.
"""

from __future__ import annotations

import secrets
from datetime import timedelta
from typing import TYPE_CHECKING

from dcpfs.checkpointer.linked_ranks import LinkedRanks
from dcpfs.errors import ConfigError
from dcpfs.ranks import Ranks
from dcpfs.torch_private import named_process_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["close_group", "global_rank", "make_group"]


def make_group(process_group: ProcessGroup | None = None, *, timeout_seconds: float) -> Ranks:
    """A new gloo group of the same ranks. Collective over ``process_group``; the ranks of one job call in one order.

    Args:
        process_group: The ranks that save or load together; None: all, or this process alone where there is no group.
        timeout_seconds: How long one exchange waits for the other ranks.

    Returns:
        The ranks, with the new group; close it with `close_group`.

    Raises:
        ConfigError: This process is no member of ``process_group``.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return Ranks()
    parent = process_group if process_group is not None else dist.group.WORLD
    if not isinstance(parent, dist.ProcessGroup) or dist.get_rank(parent) < 0:
        raise ConfigError("can't save or load with this process group: this process is not a member of it")
    members = dist.get_process_group_ranks(parent)
    timeout = timedelta(seconds=timeout_seconds)
    group = _new_group(parent, members, timeout)
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError("can't save or load with this process group: this process is not a member of it")
    return LinkedRanks(dist.get_rank(group), len(members), group, timeout_seconds)


def close_group(ranks: Ranks) -> None:
    """Close the group of `make_group`. Local; idempotent; no exchange may be at work on this rank."""
    import torch.distributed as dist

    if ranks.group is None or not dist.is_initialized():
        return
    try:
        dist.get_process_group_ranks(ranks.group)
    except (KeyError, ValueError):  # the trainer has closed all groups before
        return
    dist.destroy_process_group(ranks.group)


def global_rank(ranks: Ranks) -> int:
    """This process's rank in the whole job, by which files of one rank are named; 0 without a group. Local."""
    import torch.distributed as dist

    return 0 if ranks.group is None else dist.get_global_rank(ranks.group, ranks.rank)


def _new_group(parent: ProcessGroup, members: list[int], timeout: timedelta) -> object:
    """A group under a name that was never used."""
    import torch.distributed as dist

    tokens: list[str] = [""] * len(members)
    dist.all_gather_object(tokens, secrets.token_hex(8), group=parent)
    with named_process_group(f"dcpfs_{tokens[0]}"):
        return dist.new_group(members, timeout=timeout, backend="gloo", use_local_synchronization=True)
