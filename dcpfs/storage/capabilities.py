"""What a store can do, as a value: the only thing in which backends may differ.

The alternative, finding out by trying, fails after bytes were sent. A writer or reader asks here first.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Capabilities"]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a store can do.

    Attributes:
        writable: False for e.g. plain HTTP or a zip archive.
        listable: `Store.list` works.
        ranged_reads: `Store.read_into` moves only the bytes asked for. False: the whole object comes first.
        parallel_parts: `Sink.write_part` may be called from several threads at once and in any order.
            False: parts arrive in ascending order, one at a time.
        conditional_put: `Store.put(if_absent=True)` is atomic. False: it is a check followed by a put.
        atomic_put: An object appears whole or not at all, also when the writer is killed.
        remote: Requests cost a round trip, so many are kept in flight and near ranges are merged.
        max_object_bytes: Largest object, or None.
        max_open_sinks: Most objects that may be in writing at once in this process, or None.
        copies_reads: `Store.read_into` holds the bytes of the request once more before it fills the buffers.
        refused_characters: Characters that no name may hold: it is refused before anything is touched, since the client
            would use another name.
    """

    writable: bool = True
    listable: bool = True
    ranged_reads: bool = True
    parallel_parts: bool = False
    conditional_put: bool = False
    atomic_put: bool = True
    remote: bool = True
    max_object_bytes: int | None = None
    max_open_sinks: int | None = None
    copies_reads: bool = False
    refused_characters: str = ""
