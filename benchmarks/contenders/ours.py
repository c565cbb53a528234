"""dcpfs: in one call, under bare ``dcp.save``/``dcp.load``, and with the smallest sensible byte budget."""

from __future__ import annotations

import importlib
import importlib.util

import fsspec
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from dcpfs.storage.location import Location

from ..settings import Target
from ..workloads import State
from . import Layout, Scope

__all__ = ["Dcpfs", "DcpfsSmallBudget", "DcpfsUnderTorch", "import_dcpfs"]

_SMALL_BUDGET_BYTES = 64 << 20


def _missing(*names: str) -> str | None:
    import dcpfs

    absent = [name for name in names if not hasattr(dcpfs, name)]
    return f"this dcpfs has no {', '.join(absent)}" if absent else None


def import_dcpfs(url: str) -> None:
    """Import dcpfs, which is lazy, with the store that serves a URL."""
    scheme = Location(url).scheme
    stores = {
        "file": ("dcpfs.storage.local_store",),
        "s3": ("dcpfs.storage.s3_store", "s3fs", "aiobotocore.session", "aiobotocore.httpsession"),
    }
    for name in (
        *("dcpfs.dcp.load", "dcpfs.dcp.reader", "dcpfs.dcp.save", "dcpfs.dcp.writer"),
        *stores.get(scheme, ("dcpfs.storage.fsspec_store",)),
    ):
        importlib.import_module(name)
    if scheme not in stores:
        fsspec.get_filesystem_class(scheme)


class Dcpfs:
    """``dcpfs.save`` and ``dcpfs.load`` with their defaults."""

    layout = Layout.DCP
    sharding = True

    def available(self) -> str | None:
        """Absent when dcpfs isn't importable or lacks the calls."""
        return _missing("save", "load") if importlib.util.find_spec("dcpfs") else "dcpfs is not installed"

    def import_modules(self, target: Target) -> None:
        """All of dcpfs that saves and loads, and the client of the store."""
        import_dcpfs(target.url)

    def save(self, state: State, target: Target) -> None:
        """Save."""
        import dcpfs

        dcpfs.save(state, target.url, storage_options=target.storage_options())

    def load(self, template: State, target: Target, scope: Scope) -> None:
        """Load; part of a checkpoint is asked for by a template of part of its keys."""
        import dcpfs

        values: dict[str, object] = dict(template)
        dcpfs.load(values, target.url, storage_options=target.storage_options(), strict=scope is Scope.WHOLE)


class DcpfsUnderTorch:
    """dcpfs's writer and reader under torch's own save and load."""

    layout = Layout.DCP
    sharding = True
    budget_bytes: int | None = None

    def available(self) -> str | None:
        """Absent when dcpfs isn't importable or lacks the classes."""
        if not importlib.util.find_spec("dcpfs"):
            return "dcpfs is not installed"
        return _missing("FsspecStorageReader", "FsspecStorageWriter")

    def import_modules(self, target: Target) -> None:
        """All of dcpfs that saves and loads, and the client of the store."""
        import_dcpfs(target.url)

    def save(self, state: State, target: Target) -> None:
        """Save."""
        import dcpfs
        from dcpfs.config import TransferConfig

        transfer = None if self.budget_bytes is None else TransferConfig(budget_bytes=self.budget_bytes)
        writer = dcpfs.FsspecStorageWriter(target.url, storage_options=target.storage_options(), transfer=transfer)
        save(state, storage_writer=writer)

    def load(self, template: State, target: Target, scope: Scope) -> None:
        """Load."""
        import dcpfs
        from dcpfs.config import TransferConfig

        del scope
        transfer = None if self.budget_bytes is None else TransferConfig(budget_bytes=self.budget_bytes)
        reader = dcpfs.FsspecStorageReader(target.url, storage_options=target.storage_options(), transfer=transfer)
        load(template, storage_reader=reader)


class DcpfsSmallBudget(DcpfsUnderTorch):
    """The same within 64 MiB."""

    budget_bytes = _SMALL_BUDGET_BYTES
