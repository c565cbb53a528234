"""Who takes part in a save or load, as a value handed down, and how the ranks agree.

Problem: when one rank fails alone, it raises while its peers walk into the next collective and hang until a
watchdog kills them, and the real error drowns in a time-out (cases 49, 101). An error that can't be pickled
deadlocks the gather that should have reported it (cases 54, 102).

Way taken: every phase ends in `Ranks.agree`. Each rank brings its error or None as a small portable value, all ranks
see all of them, and all raise together: the rank that failed its own exception, the others the same error rebuilt
from text. Collectives use gloo on the CPU, never the training job's NCCL stream.
"""

from __future__ import annotations

import logging
import os
import pickle
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from dcpfs.errors import DcpfsError, RankError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Ranks", "attempt", "portable_error", "warn_if_not_joined"]

_logger = logging.getLogger(__name__)

T = TypeVar("T")

# A gloo twin of a group that can't move CPU objects, made once per group: creating one is a collective.
_gloo_twins: weakref.WeakKeyDictionary[ProcessGroup, ProcessGroup] = weakref.WeakKeyDictionary()


def attempt(action: Callable[[], object]) -> BaseException | None:
    """Do something local between two exchanges, and give what it raised: the next exchange has to raise it."""
    try:
        action()
    except BaseException as caught:  # noqa: BLE001 - brought to the next exchange of the ranks, which raises it
        return caught
    return None


def portable_error(error: BaseException, rank: int) -> DcpfsError:
    """Turn any exception into an error of dcpfs that survives pickling, with its traceback as text."""
    text = "".join(traceback.format_exception(error)).rstrip()
    if isinstance(error, DcpfsError):
        try:
            copy = pickle.loads(pickle.dumps(error))
        except Exception:  # noqa: BLE001 - whatever a subclass holds, its text still travels
            copy = None
        if isinstance(copy, DcpfsError):
            copy.rank = rank if copy.rank is None else copy.rank
            copy.cause_text = copy.cause_text or text
            return copy
    summary = traceback.format_exception_only(error)[-1].strip()
    return RankError(f"rank {rank} failed: {summary}", rank=rank, cause_text=text)


def warn_if_not_joined(ranks: Ranks) -> None:
    """Say that this process is about to save alone although a launcher started it as one of several."""
    import torch.distributed as dist

    world_size = os.environ.get("WORLD_SIZE", "")
    if ranks.group is not None or (dist.is_available() and dist.is_initialized()):
        return
    if world_size.isdecimal() and int(world_size) > 1:
        _logger.warning(
            "this process saves as if it were alone, although RANK=%s and WORLD_SIZE=%s say that it is one of several: "
            "each of them writes over what the others save; call torch.distributed.init_process_group first",
            os.environ.get("RANK", "?"),
            world_size,
        )


@dataclass(frozen=True)
class Ranks:
    """Rank, world size and process group.

    Attributes:
        rank: This process's rank within the group, 0 without one.
        world_size: Number of ranks in the group, 1 without one.
        group: A group whose object collectives run on the CPU, or None when this process is alone.
        timeout_seconds: After which who waits in an exchange gives the others up; None: not known.
    """

    rank: int = 0
    world_size: int = 1
    group: ProcessGroup | None = None
    timeout_seconds: float | None = None

    @classmethod
    def current(cls, process_group: ProcessGroup | None = None, *, alone: bool = False) -> Ranks:
        """Describe this process. Collective the first time it meets a group without CPU support (a gloo twin is made).

        Args:
            process_group: The group that saves or loads; None: the default group, or no group.
            alone: Ignore any group.
        """
        import torch.distributed as dist

        if alone or not (dist.is_available() and dist.is_initialized()):
            return cls()
        group = process_group if process_group is not None else dist.group.WORLD
        if group is None:
            return cls()
        return cls(dist.get_rank(group), dist.get_world_size(group), _cpu_group(group))

    @property
    def is_coordinator(self) -> bool:
        """True on the rank that plans, and writes the metadata: rank 0."""
        return self.rank == 0

    def gather(self, value: T) -> list[T] | None:
        """Collect one value per rank at the coordinator. Collective. None on the others."""
        if self.group is None or self.world_size == 1:
            return [value]
        import torch.distributed as dist

        values: list[T] | None = [value] * self.world_size if self.is_coordinator else None
        dist.gather_object(value, values, group=self.group, group_dst=0)
        return values

    def all_gather(self, value: T) -> list[T]:
        """Collect one value per rank everywhere, by rank. Collective."""
        if self.group is None or self.world_size == 1:
            return [value]
        import torch.distributed as dist

        values: list[T] = [value] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: T) -> T:
        """Hand the coordinator's value to all. Collective."""
        if self.group is None or self.world_size == 1:
            return value
        import torch.distributed as dist

        box: list[T] = [value]
        dist.broadcast_object_list(box, group=self.group, group_src=0)
        return box[0]

    def scatter(self, values: list[T] | None) -> T:
        """Hand each rank its own of the coordinator's values. Collective; the others pass None."""
        if self.group is None or self.world_size == 1:
            if values is None:
                raise ValueError("the coordinator has to bring one value per rank")
            return values[0]
        import torch.distributed as dist

        box: list[T] = [None]  # type: ignore[list-item]  # filled by the collective
        dist.scatter_object_list(box, values, group=self.group, group_src=0)
        return box[0]

    def gather_outcomes(self, value: T, error: BaseException | None) -> list[T] | DcpfsError | None:
        """At the coordinator each rank's value, or the error of the lowest that failed; None elsewhere. Collective.

        Args:
            value: What this rank has, where it has no error.
            error: Its error; not raised here.
        """
        report = None if error is None else portable_error(error, self.rank)
        reports = self.gather((value if error is None else None, report))
        if reports is None:
            return None
        failed = [each for _, each in reports if each is not None]
        if failed:
            return _first_of(failed)
        return [each for each, _ in reports]  # type: ignore[misc]  # no error: every rank brought its value

    def scatter_outcome(
        self, values: Sequence[T] | None, failure: BaseException | None, own: BaseException | None
    ) -> T:
        """Hand each rank its own of the coordinator's values, or raise on all ranks. Collective.

        Args:
            values: At the coordinator one per rank, unless it failed.
            failure: Why the coordinator has none.
            own: This rank's error, raised before what it is told.
        """
        replies: list[tuple[T | None, DcpfsError | None]] | None = None
        if self.is_coordinator:
            report = None if failure is None else portable_error(failure, self.rank)
            each = values if values is not None else [None] * self.world_size
            replies = [(value, report) for value in each]
        value, report = self.scatter(replies)
        _raise_first(own, failure, report)
        return value  # type: ignore[return-value]  # no error: the coordinator had a value for every rank

    def broadcast_outcome(self, value: T, failure: BaseException | None, own: BaseException | None) -> T:
        """Hand all ranks the coordinator's value, or raise on all ranks. Collective.

        Args:
            value: The coordinator's counts.
            failure: Why the coordinator failed, if it did.
            own: This rank's error, raised before what it is told.
        """
        value, error = self.broadcast_verdict(value, failure, own)
        if error is not None:
            raise error
        return value

    def broadcast_verdict(
        self, value: T, failure: BaseException | None, own: BaseException | None
    ) -> tuple[T, BaseException | None]:
        """As `broadcast_outcome`; the error, if there is one, is returned. Collective."""
        report = None if failure is None else portable_error(failure, self.rank)
        value, report = self.broadcast((value, report))
        return value, own or failure or report

    def largest(self, words: Sequence[int]) -> list[int]:
        """The largest of each word over all ranks: one small reduction, no pickling. Collective.

        Args:
            words: As many on every rank, each of 64 bits with sign.
        """
        if self.group is None or self.world_size == 1:
            return list(words)
        import torch
        import torch.distributed as dist

        reduced = torch.tensor(words, dtype=torch.int64, device="cpu")
        dist.all_reduce(reduced, op=dist.ReduceOp.MAX, group=self.group)
        return [int(word) for word in reduced.tolist()]

    def agree(self, error: BaseException | None) -> None:
        """Return when no rank brings an error; otherwise raise on every rank. Collective.

        The rank that failed raises its own exception. The others raise that of the lowest failing rank, rebuilt.
        """
        self.agree_and_gather(error, None)

    def confirm(self, error: BaseException | None) -> None:
        """As `agree`, at the price of one word when no rank brings an error. Collective."""
        (failed,) = self.largest([error is not None])
        if failed:
            self.agree(error)

    def agree_and_gather(self, error: BaseException | None, value: T) -> list[T]:
        """`agree`, and collect one value per rank everywhere in the same exchange. Collective."""
        if self.group is None or self.world_size == 1:
            if error is not None:
                raise error
            return [value]
        status = None if error is None else portable_error(error, self.rank)
        reports = self.all_gather((status, None if error is not None else value))
        failed = [report for report, _ in reports if report is not None]
        if error is not None:
            raise error
        if failed:
            raise _first_of(failed)
        return [value for _, value in reports]  # type: ignore[misc]  # no error: every rank brought its value


def _first_of(failed: Sequence[DcpfsError]) -> DcpfsError:
    first = failed[0]
    if len(failed) > 1:
        others = ", ".join(str(report.rank) for report in failed[1:])
        first.message = f"{first.message} (rank {others} failed as well)"
    return first


def _raise_first(*errors: BaseException | None) -> None:
    for error in errors:
        if error is not None:
            raise error


def _cpu_group(group: ProcessGroup) -> ProcessGroup:
    import torch
    import torch.distributed as dist

    if torch.device("cpu") in group._device_types:  # one private name; checked in tests on every torch
        return group
    twin = _gloo_twins.get(group)
    if twin is None:
        members = dist.get_process_group_ranks(group)
        # The others don't come for a group of some: torch counts groups to name those of later, and would count apart.
        partial = len(members) < dist.get_world_size()
        made = dist.new_group(ranks=members, backend="gloo", use_local_synchronization=partial)
        if not isinstance(made, dist.ProcessGroup):
            raise RuntimeError("this process is not a member of the process group that it saves or loads with")
        twin = made
        _gloo_twins[group] = twin
    return twin
