"""Every planned item has been written: the condition for publishing a checkpoint. Pure.

Problem: torch publishes ``.metadata`` with whatever results arrived. When a helper thread died, or an upload error
was only logged, the checkpoint lists fewer entries than its own table of contents promises, and the loss shows at
the next load (cases 1, 45).

Way taken: before the metadata is written, every chunk of every tensor and every other value that it promises is
looked up in the results, and the other way round.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from dcpfs.errors import IncompleteCheckpointError
from dcpfs.torch_private import EntryInfo

__all__ = ["account"]

_SHOWN = 10


def account(
    metadata: Metadata, results: Iterable[Sequence[WriteResult]], *, where: str
) -> list[tuple[MetadataIndex, EntryInfo]]:
    """Where each entry lies, once all are there. When ranks wrote the same entry, the lowest rank's counts.

    Pairs, since each look at a `MetadataIndex` in a dict costs a microsecond: they are compared by key and offset.

    Args:
        metadata: What the checkpoint promises.
        results: Of each rank.
        where: The checkpoint's redacted URL, for the error.

    Raises:
        IncompleteCheckpointError: An entry was promised and not written, or written and not promised.
    """
    entries: dict[tuple[str, object], tuple[MetadataIndex, EntryInfo]] = {}
    for rank, written in enumerate(results):
        for result in written:
            index, info = result.index, result.storage_data
            if not isinstance(info, EntryInfo):
                raise IncompleteCheckpointError(
                    f"can't publish the checkpoint at {where}: the result for {index.fqn!r} of rank {rank} was "
                    "not made by dcpfs's writer; all ranks must save with it"
                )
            entries.setdefault((index.fqn, index.offset), (index, info))
    missing: list[str] = []
    promised = 0
    for fqn, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, BytesStorageMetadata):
            promised += 1
            if (fqn, None) not in entries:
                missing.append(fqn)
            continue
        for chunk in stored.chunks:
            promised += 1
            if (fqn, chunk.offsets) not in entries:
                missing.append(f"{fqn} at {tuple(chunk.offsets)}" if any(chunk.offsets) else fqn)
    if missing:
        raise IncompleteCheckpointError(
            f"can't publish the checkpoint at {where}: {_count(len(missing), 'planned item')} not written: "
            f"{_names(missing)}; a rank or a writer lost them, save again",
            missing=missing,
        )
    if len(entries) > promised:
        unknown = [fqn for fqn, _ in entries if fqn not in metadata.state_dict_metadata]
        raise IncompleteCheckpointError(
            f"can't publish the checkpoint at {where}: {len(entries) - promised} more entries were written than its "
            f"metadata lists: {_names(unknown or ['chunks of listed keys'])}; the planner's plan and metadata disagree",
            missing=unknown,
        )
    return list(entries.values())


def _count(number: int, noun: str) -> str:
    return f"{number} {noun} was" if number == 1 else f"{number} {noun}s were"


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
