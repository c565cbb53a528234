"""What is made of saves that ended: told, raised, or counted.

Problem: in one job a transient fault of the store kills a run of days; in another, failures that were only logged leave
a run of days without a checkpoint (cases 48, 107). And a callback that fails on one rank takes this rank out of the
next collective, where the others wait for it (case 49).

Way taken: outcomes come here, the same on all ranks, and so does the decision: raise, or log and count until there have
been too many in a row. What a callback raises about something that is done already belongs to one rank: it is kept, and
brought to the next collective call, where all ranks raise it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from dcpfs.checkpointer.callbacks import CheckpointCallbacks
from dcpfs.checkpointer.choices import OnSaveError
from dcpfs.checkpointer.save_context import StepReport
from dcpfs.checkpointer.saver import SaveOutcome
from dcpfs.ranks import Ranks, attempt

__all__ = ["Verdicts"]

_logger = logging.getLogger(__name__)


class Verdicts:
    """Of one checkpointer, on one rank.

    Args:
        callbacks: Who is told.
        ranks: Of the calling thread.
        on_save_error: What a failed save does.
        most_failures: In a row, until `OnSaveError.WARN` raises all the same.

    Attributes:
        last_report: Of the last save that is known to have succeeded.
    """

    def __init__(
        self, callbacks: CheckpointCallbacks, ranks: Ranks, on_save_error: OnSaveError, most_failures: int
    ) -> None:
        self._callbacks = callbacks
        self._ranks = ranks
        self._on_save_error = on_save_error
        self._most_failures = most_failures
        self._failures = 0
        self._late: Exception | None = None
        self.last_report: StepReport | None = None

    def handle(self, outcomes: Sequence[SaveOutcome]) -> None:
        """Tell callbacks what became of saves, and raise the first failure where that is to be. On all ranks."""
        failure: BaseException | None = None
        for outcome in outcomes:
            for record in outcome.phases:
                self._callbacks.on_phase(record.name, record.seconds, record.size_bytes)
            if outcome.error is None:
                self._failures = 0
                self.last_report = outcome.report
                self._tell_success(outcome)
                continue
            self._callbacks.on_save_checkpoint_error(outcome.iteration, outcome.error)
            self._failures += 1
            if self._is_fatal(outcome.error):
                if failure is not None:
                    _logger.error("saving iteration %d failed as well: %s", outcome.iteration, outcome.error)
                failure = failure or outcome.error
            else:
                _logger.error(
                    "saving iteration %d failed, %d times in a row by now; training goes on: %s",
                    outcome.iteration,
                    self._failures,
                    outcome.error,
                )
        if failure is not None:
            raise failure

    def tell(self, call: Callable[[], None]) -> None:
        """Call back about what has been done. Local; what it raises is kept for the next collective call, or logged."""
        try:
            call()
        except Exception as error:  # noqa: BLE001 - raised on all ranks by the next collective call
            if self._on_save_error is OnSaveError.WARN:
                _logger.error("a callback failed; training goes on: %s", error)
                return
            _logger.error("a callback failed, which the next collective call raises: %s", error)
            self._late = self._late or error

    def raise_own_late(self) -> None:
        """Raise what a callback left on this rank; the caller brings it to all. Local."""
        late, self._late = self._late, None
        if late is not None:
            raise late

    def raise_late(self) -> None:
        """Raise what a callback left on any rank. Collective."""
        self._ranks.confirm(attempt(self.raise_own_late))

    def _tell_success(self, outcome: SaveOutcome) -> None:
        if outcome.report is not None and outcome.report.committed:
            self.tell(lambda: self._callbacks.on_save_checkpoint_success(outcome.iteration, outcome.seconds))

    def _is_fatal(self, error: BaseException) -> bool:
        if self._on_save_error is OnSaveError.RAISE or not isinstance(error, Exception):
            return True
        return self._failures >= self._most_failures
