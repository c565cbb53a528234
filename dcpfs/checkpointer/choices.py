"""The choices that a checkpointer's settings offer. Values only, so that every module can name them.

Each is an enum and not a boolean: a mode that gets a third state keeps its name, and a call says what it asks for. What
is no choice is refused when the setting is made, with the list of choices, never in mid-save.
"""

from __future__ import annotations

from dcpfs.config import Choice

__all__ = [
    "Access",
    "AsyncMode",
    "BestMode",
    "DedupPolicy",
    "OnExisting",
    "OnProcessLoss",
    "OnSaveError",
    "RngPolicy",
    "WhenBusy",
    "WorldSizePolicy",
]


class Access(Choice):
    """What a checkpointer is used for."""

    READ_WRITE = "read_write"
    """Loads and saves."""
    READ_ONLY = "read_only"
    """Loads: nothing is ever written, and no process or thread started. `save` is an error."""


class AsyncMode(Choice):
    """Where a save runs, and so what training waits for."""

    DISABLED = "disabled"
    """In the caller: `save` returns when the step is committed."""
    ASYNC = "async"
    """In a thread of the trainer's process: training waits for the copy to host memory alone."""
    ASYNC_WITH_PINNED_MEM = "async_with_pinned_mem"
    """In a process of its own, through memory that both share: not even Python's lock is shared with training."""


class WhenBusy(Choice):
    """What `save` does while as many saves as are allowed are still at work."""

    WAIT = "wait"
    """Waits for the oldest."""
    SKIP = "skip"
    """Saves nothing, on all ranks, with a warning. But the closing save waits, and so does one that was asked for, by a
    signal or `request_save`: nothing may come after these."""
    ERROR = "error"
    """Raises on all ranks; nothing is saved."""


class OnSaveError(Choice):
    """What a failed save does to training."""

    RAISE = "raise"
    """Raises on every rank: at once, or from the next collective call when the save ran in the background."""
    WARN = "warn"
    """Logs, and lets training go on, until too many saves in a row have failed."""


class OnProcessLoss(Choice):
    """What becomes of a save when a background process has been lost and none can be started in its place.

    In both cases a later save tries to start one again.
    """

    RAISE = "raise"
    """Raises on every rank, and saves nothing. The next save tries again."""
    SAVE_IN_CALLER = "save_in_caller"
    """Saves in the caller, which training waits for, with a warning each time. A process that ended while it saved
    nothing is a warning, too: no save was lost. After a start that failed, the next one is tried when twice the seconds
    have passed that it took, then four times, up to 32 times: one that hangs takes 300 s, which training waits for."""


class OnExisting(Choice):
    """What a save does when its step stands already."""

    OVERWRITE = "overwrite"
    """Withdraws the old step, with a warning, and saves; refused for the only committed step."""
    SKIP = "skip"
    """Leaves the old step as it is and saves nothing."""
    ERROR = "error"
    """Raises `CheckpointExistsError`; nothing is touched."""


class DedupPolicy(Choice):
    """Which rank writes what several ranks hold alike."""

    BALANCED = "balanced"
    """Large items by turns, so that each rank writes about as many bytes; small ones together in one file."""
    LOWEST_RANK = "lowest_rank"
    """Everything by the lowest rank that holds it: the fewest files, and the least for other ranks to open."""


class WorldSizePolicy(Choice):
    """What a load does with rank files of another number of ranks, or of ranks that shared the data otherwise."""

    ERROR = "error"
    """Raises: a position in the data means something else under another number of ranks (case 11)."""
    SKIP = "skip"
    """Leaves them unread, with a warning."""


class RngPolicy(Choice):
    """Whether the states of the random number generators travel with a step."""

    PER_RANK = "per_rank"
    """Those of Python, numpy, torch and CUDA, each rank's own, saved and restored."""
    NONE = "none"
    """Neither saved nor restored."""


class BestMode(Choice):
    """Which metric is the better one."""

    MAX = "max"
    """The larger, as of an accuracy."""
    MIN = "min"
    """The smaller, as of a loss."""
