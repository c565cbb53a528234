"""What is known about one step after a look at it. Values only.

Problem: "there is a directory called iter_000000007" was taken for "step 7 can be loaded" by nearly every trainer
(cases 40, 41). Between nothing and a whole step lie a save at work, a dead one, a copy that lost files, another tool's
files.

Way taken: a state for each of them, with the sentence that says why, so that resume, retention and the command line
tell people the same thing. `dcpfs.checkpointer.completeness` is what looks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from dcpfs.checkpointer.layout import MODEL, PROTECTED_NAME
from dcpfs.checkpointer.manifest import Manifest
from dcpfs.storage.location import Location

__all__ = ["StepState", "StepStatus"]


class StepState(str, Enum):
    """What a look at a step found."""

    COMPLETE = "complete"
    """It can be loaded: a manifest that checks out, or another tool's step that was named and holds what it lists."""
    WRITING = "writing"
    """A save is at work there, or died, or the step was being removed: ``.writing`` without a manifest."""
    DAMAGED = "damaged"
    """It was committed, and no longer is what its manifest says."""
    PARTIAL = "partial"
    """Another tool's step that was named, and lacks something it lists."""
    UNKNOWN = "unknown"
    """Files without a manifest that nothing names: another tool's step, a copy without its manifest, a remainder.
    Whether it is whole was not looked at."""
    OUTSIDE = "outside"
    """A symbolic link in it leads out of the place that was looked into, and is not followed."""
    ABSENT = "absent"
    """There is no file."""


@dataclass(frozen=True)
class StepStatus:
    """One step as it stood when it was looked at.

    Attributes:
        iteration: By its directory's name, else by its manifest; None for a location that says neither.
        state: What was found.
        reason: Why it is not complete, as the end of a sentence about it; "" for a complete one.
        manifest: Its manifest, where one could be read.
        keys: Keys in torch's format that it holds, in the manifest's order, else by name.
        foreign: It has neither manifest nor ``.writing``: another tool wrote it.
        path: Its directory, relative to the store that was looked into; "" for the store's own location.
        files: Every file below it by name relative to it, with its size in bytes as listed. Where the store has no
            listing: nothing, or for a foreign step what its metadata lists, with the least size.
        rank_files: Key to global rank to the name of that rank's file: the manifest's, else by the names of the files.
        missing: Files that it should hold and does not, or not at full size: the first few.
        url: Redacted URL, for messages.
    """

    iteration: int | None
    state: StepState
    reason: str = ""
    manifest: Manifest | None = None
    keys: tuple[str, ...] = ()
    foreign: bool = False
    path: str = ""
    files: Mapping[str, int] = field(default_factory=dict, repr=False)
    rank_files: Mapping[str, Mapping[int, str]] = field(default_factory=dict, repr=False)
    missing: tuple[str, ...] = ()
    url: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether it can be loaded."""
        return self.state is StepState.COMPLETE

    @property
    def was_committed(self) -> bool:
        """Whether a save once finished there, as far as one can tell now."""
        return self.state in (StepState.COMPLETE, StepState.DAMAGED, StepState.PARTIAL)

    @property
    def is_protected(self) -> bool:
        """Whether a marker keeps retention away, when it was looked at."""
        return PROTECTED_NAME in self.files

    @property
    def beside_model(self) -> tuple[str, ...]:
        """The keys that it holds without the model: none in what a closing save left for others to use."""
        return tuple(key for key in (*self.keys, *self.rank_files) if key != MODEL)

    @property
    def size_bytes(self) -> int:
        """Length of all its files."""
        return sum(self.files.values())

    def locate(self, root: Location) -> Location:
        """Where it is, given the location of the store that was looked into."""
        return root.join(self.path) if self.path else root

    def describe(self) -> str:
        """Its name and why it is not complete: ``iter_000000007 (a save died there)``."""
        name = self.path.rpartition("/")[2] or self.url
        return f"{name} ({self.reason})" if self.reason else name
