"""The plans of the last exchange, for as long as the structure of the state stays the same.

Problem: planning is most of what ranks say to each other, and comes out the same at nearly every save (case 74). torch
keeps plans in class attributes, which two planners of one process share, compares them without their dtypes, and keeps
them after a failure.

Way taken: one object per checkpointer and process. A rank compares the digest of its structure (`LocalStep.digest`)
with that of the exchange it remembers. Whether all ranks may use what they remember, they find out together: each
brings a token, the number of that exchange or 0, and only where all tokens are equal and above 0 do the plans fit each
other. After a failure of any kind nobody remembers anything.
"""

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
        self._exchange_id = 0
        self._plans: dict[str, SavePlan] = {}
        self._planned: GlobalPlan | None = None

    def token(self, step: LocalStep) -> int:
        """A number above 0 that is equal on all ranks when all remember one exchange that fits; else 0."""
        return self._exchange_id if self.matches(step) else 0

    def matches(self, step: LocalStep) -> bool:
        """True when this rank's structure is that of the exchange."""
        return self._digest == step.digest

    def remember(self, step: LocalStep, assigned: bytes, planned: GlobalPlan | None) -> None:
        """Keep an exchange, until the next one or `drop`.

        Args:
            step: What this rank brought.
            assigned: What it got.
            planned: At the coordinator, all of it.
        """
        self._plans = decode_assigned(assigned, step)
        self._digest, self._exchange_id, self._planned = step.digest, exchange_id_of(assigned), planned

    def assigned(self, step: LocalStep) -> dict[str, SavePlan]:
        """What this rank writes, by key: the very plans of the exchange, since items name values and hold none.

        Raises:
            ValueError: The step has another structure.
        """
        if not self.matches(step):
            raise ValueError("the plans that are remembered are of another structure")
        return dict(self._plans)

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
        self._digest, self._exchange_id, self._plans, self._planned = None, 0, {}, None
