"""dcpfs: in one call, under bare ``dcp.save``/``dcp.load``, and with the smallest sensible byte budget."""

from __future__ import annotations

import importlib.util

from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ..settings import Target
from ..workloads import State
from . import Layout, Scope

__all__ = ["Dcpfs", "DcpfsSmallBudget", "DcpfsUnderTorch"]

_SMALL_BUDGET_BYTES = 64 << 20


def _missing(*names: str) -> str | None:
    import dcpfs

    absent = [name for name in names if not hasattr(dcpfs, name)]
    return f"this dcpfs has no {', '.join(absent)}" if absent else None


class Dcpfs:
    """``dcpfs.save`` and ``dcpfs.load`` with their defaults."""

    layout = Layout.DCP
    sharding = True

    def available(self) -> str | None:
        """Absent when dcpfs isn't importable or lacks the calls."""
        return _missing("save", "load") if importlib.util.find_spec("dcpfs") else "dcpfs is not installed"

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
