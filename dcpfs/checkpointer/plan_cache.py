"""The plans of the last exchange, for as long as the structure of the state stays the same."""

from __future__ import annotations

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from dcpfs.checkpointer.global_plan import GlobalPlan
from dcpfs.checkpointer.local_step import LocalStep
from dcpfs.checkpointer.plan_codec import decode_assigned, exchange_id_of

__all__ = ["PlanCache"]


class PlanCache:
    """Remembers one exchange. One per checkpointer and process; one save at a time."""

    def __init__(self) -> None:
        self._digest: int | None = None
        self._assigned = b""
        self._planned: GlobalPlan | None = None

    def token(self, step: LocalStep) -> int:
        """A number above 0 that is equal on all ranks when all remember one exchange that fits; else 0."""
        return exchange_id_of(self._assigned) if self.matches(step) else 0

    def matches(self, step: LocalStep) -> bool:
        """True when this rank's structure is that of the exchange."""
        return self._digest == step.digest

    def remember(self, step: LocalStep, assigned: bytes, planned: GlobalPlan | None) -> None:
        """Keep an exchange.

        Args:
            step: What this rank brought.
            assigned: What it got.
            planned: At the coordinator, all of it.
        """
        self._digest, self._assigned, self._planned = step.digest, assigned, planned

    def assigned(self, step: LocalStep) -> dict[str, SavePlan]:
        """What this rank writes, by key."""
        return decode_assigned(self._assigned, step)

    @property
    def planned(self) -> GlobalPlan | None:
        """All of it, at the coordinator."""
        return self._planned

    def metadata(self) -> dict[str, Metadata]:
        """Metadata of each key, for one save to complete. Coordinator."""
        if self._planned is None:
            raise RuntimeError("this rank did not plan for the others")
        return self._planned.metadata()

    def drop(self) -> None:
        """Forget. After any failure, on all ranks."""
        self._digest, self._assigned, self._planned = None, b"", None
