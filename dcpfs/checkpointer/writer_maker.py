"""A trainer's own storage writer, for another process to make.

Problem: `get_storage_writer` is a method, so that a subclass can override it; the object that it belongs to holds
process groups, threads and locks, none of which can go to another process.

Way taken: the class and the settings go. There the method is called on an object of the class that has nothing but
`config`: what the method may use in a background process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch.distributed.checkpoint.storage import StorageWriter

from dcpfs.checkpointer.config import CheckpointConfig
from dcpfs.storage.location import Location

__all__ = ["MakesWriters", "WriterMaker"]


class MakesWriters(Protocol):
    """A checkpointer, as far as this goes."""

    def get_storage_writer(self, url: str) -> StorageWriter:
        """A storage writer for the directory of a key."""
        ...


@dataclass(frozen=True)
class WriterMaker:
    """Calls the method of a class without a checkpointer.

    Attributes:
        kind: The class; importable where this is used.
        config: The settings.
    """

    kind: type[MakesWriters]
    config: CheckpointConfig

    def __call__(self, location: Location) -> StorageWriter:
        """The writer for a key's directory."""
        maker = self.kind.__new__(self.kind)
        vars(maker)["_config"] = self.config
        return maker.get_storage_writer(location.url)
