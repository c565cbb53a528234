"""Whether the ranks that load share the data as those did that saved. Pure.

Problem: eight ranks that each had a part of the data can come back as four parts for two tensor parallel ranks each.
The number of ranks is the same, and so are the names of their files; the position that a rank finds under its own
name belongs to another part, and samples are repeated and dropped without an error (cases 10, 11).

Way taken: a manifest says which rank's file each rank reads, and which mesh the model lay on. A run that says its parts
(``data_rank``) is held against the former, file by file; one that does not, against the mesh, as far as both are known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dcpfs.checkpointer.layout import parse_rank_file_name
from dcpfs.checkpointer.manifest import FileRecord

__all__ = ["describe_dealing", "describe_remeshing"]


def describe_dealing(
    saved: Mapping[int, str], reads: Mapping[int, int | None], records: Mapping[str, FileRecord]
) -> str:
    """How the sharing of files differs, as the end of a sentence; "" where it does not.

    Args:
        saved: Rank to the name of the file that the checkpoint has for it.
        reads: Rank to the rank whose file it would read if it had saved; None: its own.
        records: Size and checksum of the files: equal ones are one position.
    """
    for rank, leader in reads.items():
        name = saved.get(rank)
        before = None if name is None else parse_rank_file_name(name.rpartition("/")[2])
        now = rank if leader is None else leader
        if name is None or before is None or before == now:
            continue
        shared = saved.get(now) if now != rank else None
        if shared is not None and (shared == name or _is_equal(records.get(name), records.get(shared))):
            continue
        if before == rank:
            return f"rank {rank} has the same part of the data as rank {now}, and had one of its own"
        return f"rank {rank} had the same part of the data as rank {before}, and has it no longer"
    return ""


def describe_remeshing(before: Mapping[str, object], now: Mapping[str, object]) -> str:
    """How the meshes of two runs differ, as the end of a sentence; "" where they don't, or one is not known."""
    old, new = _dimensions(before), _dimensions(now)
    if old is None or new is None:
        return ""
    same_sizes = [size for size, _ in old] == [size for size, _ in new]
    named = all(name is not None for _, name in (*old, *new))
    if same_sizes and (not named or old == new):
        return ""
    return f"the model lay on a mesh of {_spell(old)}, and lies on one of {_spell(new)}"


def _is_equal(first: FileRecord | None, second: FileRecord | None) -> bool:
    """Whether two files are known to hold the same; another tool's are not known, and taken for what they are."""
    if first is None or second is None:
        return True
    return first.crc32 is not None and first == second


def _dimensions(topology: Mapping[str, object]) -> list[tuple[int, str | None]] | None:
    """Sizes and names of the dimensions of a mesh, those of one rank left out; None: there is none that one knows."""
    shape, names = topology.get("mesh_shape"), topology.get("mesh_dim_names")
    if not isinstance(shape, Sequence) or not all(type(size) is int for size in shape):
        return None
    known = list(names) if isinstance(names, Sequence) and len(names) == len(shape) else [None] * len(shape)
    return [(size, None if name is None else str(name)) for size, name in zip(shape, known, strict=True) if size != 1]


def _spell(dimensions: Sequence[tuple[int, str | None]]) -> str:
    return " × ".join(f"{size}" if name is None else f"{name} {size}" for size, name in dimensions) or "one rank"
