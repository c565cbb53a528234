"""torch's own storage classes: local files with one, two and four writer threads, and any fsspec filesystem.

``sync_files`` is off for fsspec: the classes would call ``os.sync()`` after each remote file, which flushes
nothing of theirs and waits for everybody else's. Local files keep torch's default, an fsync, as dcpfs has by
default.
"""

from __future__ import annotations

from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ..files import import_filesystem
from ..settings import Target
from ..workloads import State
from . import Layout, Scope

__all__ = ["TorchFourThreads", "TorchFsspec", "TorchOneThread", "TorchTwoThreads"]


class TorchOneThread:
    """``FileSystemWriter`` as it comes, and ``FileSystemReader``, which has no threads to set."""

    layout = Layout.DCP
    sharding = True
    threads = 1

    def available(self) -> str | None:
        """Always: it is part of torch."""
        return None

    def save(self, state: State, target: Target) -> None:
        """Save."""
        save(state, storage_writer=FileSystemWriter(_directory(target), thread_count=self.threads))

    def load(self, template: State, target: Target, scope: Scope) -> None:
        """Load."""
        del scope
        load(template, storage_reader=FileSystemReader(_directory(target)))


class TorchTwoThreads(TorchOneThread):
    """The same with two writer threads (and so two files)."""

    threads = 2


class TorchFourThreads(TorchOneThread):
    """The same with four writer threads (and so four files)."""

    threads = 4


class TorchFsspec:
    """``FsspecWriter`` and ``FsspecReader``."""

    layout = Layout.DCP
    sharding = True

    def available(self) -> str | None:
        """Always: torch and fsspec are there."""
        return None

    def import_modules(self, target: Target) -> None:
        """The filesystem, which fsspec imports by the URL's scheme."""
        import_filesystem(target)

    def save(self, state: State, target: Target) -> None:
        """Save."""
        writer = FsspecWriter(target.url, sync_files=False, **target.storage_options())  # type: ignore[arg-type] # options are what the scheme takes
        save(state, storage_writer=writer)

    def load(self, template: State, target: Target, scope: Scope) -> None:
        """Load."""
        del scope
        load(template, storage_reader=FsspecReader(target.url, **target.storage_options()))


def _directory(target: Target) -> str:
    if target.directory is None:
        raise ValueError(f"FileSystemWriter takes local files only, not {target.scheme}")
    return target.directory
