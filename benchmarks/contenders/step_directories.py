"""Who finds and who removes steps: dcpfs, and what the filesystem itself takes for the names alone.

The floors know nothing of completeness: a listing takes every directory for a step, and a recursive delete stops at
nothing. What dcpfs costs above them is what its promises cost.
"""

from __future__ import annotations

import importlib

import dcpfs
from dcpfs.checkpointer.layout import parse_step_name, step_name
from dcpfs.checkpointer.retention import RetentionPolicy, apply_retention
from dcpfs.storage.location import Location
from dcpfs.storage.opening import open_store

from ..files import filesystem_of, import_filesystem
from ..settings import Target
from .ours import import_dcpfs

__all__ = ["DcpfsAllSteps", "DcpfsNewest", "DcpfsRetention", "Listing", "RecursiveDelete"]


class DcpfsNewest:
    """A checkpointer is made, and asked for what it would resume from."""

    def available(self) -> str | None:
        """Always."""
        return None

    def import_modules(self, target: Target) -> None:
        """The checkpointer, and what reads for it."""
        importlib.import_module("dcpfs.checkpointer.checkpointer")
        import_dcpfs(target.url)

    def seek(self, target: Target) -> tuple[int, ...]:
        """The newest step."""
        with _reader(target) as checkpointer:
            _, url = checkpointer.keys_to_resume_during_load()
        iteration = None if url is None else parse_step_name(url.rstrip("/").rpartition("/")[2])
        return () if iteration is None else (iteration,)


class DcpfsAllSteps:
    """A checkpointer is made, and asked for every complete step."""

    def available(self) -> str | None:
        """Always."""
        return None

    def import_modules(self, target: Target) -> None:
        """The checkpointer, and what reads for it."""
        importlib.import_module("dcpfs.checkpointer.checkpointer")
        import_dcpfs(target.url)

    def seek(self, target: Target) -> tuple[int, ...]:
        """All steps."""
        with _reader(target) as checkpointer:
            return tuple(checkpointer.steps())


class Listing:
    """One listing of the filesystem; every directory with a step's name counts."""

    def available(self) -> str | None:
        """Always."""
        return None

    def import_modules(self, target: Target) -> None:
        """The filesystem."""
        import_filesystem(target)

    def seek(self, target: Target) -> tuple[int, ...]:
        """All names of steps."""
        filesystem, root = filesystem_of(target)
        names = (str(path).rstrip("/").rpartition("/")[2] for path in filesystem.ls(root, detail=False))
        return tuple(sorted(number for name in names if (number := parse_step_name(name)) is not None))


class DcpfsRetention:
    """The checkpointer's retention."""

    def available(self) -> str | None:
        """Always."""
        return None

    def import_modules(self, target: Target) -> None:
        """The checkpointer, and what reads for it."""
        importlib.import_module("dcpfs.checkpointer.checkpointer")
        import_dcpfs(target.url)

    def remove_all_but(self, target: Target, keep: int, steps: tuple[int, ...]) -> None:
        """Look, decide, remove."""
        del steps
        store = open_store(Location(target.url, target.storage_options()))
        try:
            apply_retention(store, RetentionPolicy(keep_last=keep))
        finally:
            store.close()


class RecursiveDelete:
    """The filesystem's own recursive delete, of steps that somebody else has chosen."""

    def available(self) -> str | None:
        """Always."""
        return None

    def import_modules(self, target: Target) -> None:
        """The filesystem."""
        import_filesystem(target)

    def remove_all_but(self, target: Target, keep: int, steps: tuple[int, ...]) -> None:
        """Remove."""
        filesystem, root = filesystem_of(target)
        filesystem.rm([f"{root}/{step_name(step)}" for step in steps[:-keep]], recursive=True)


def _reader(target: Target) -> dcpfs.DistributedCheckpointer:
    config = dcpfs.CheckpointConfig(save_dir=target.url, storage_options=target.storage_options())
    return dcpfs.DistributedCheckpointer(config, access="read_only")
