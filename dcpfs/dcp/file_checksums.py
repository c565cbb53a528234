"""CRC-32 of whole files, from the checksums of what fills them.

Problem: a manifest that names files with checksums needs one for each file, but a file leaves in parts that different
threads send, straight from tensor memory. Reading it all once more, after the checksums of its entries, costs as much
CPU time again.

Way taken: the thread that sends a part joins the checksums its entries have already (`dcpfs.format.checksum`), and
takes one of the few small buffers between them. Parts join to files when all are sent.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from dcpfs.format.checksum import crc32_combine

__all__ = ["FileChecksums"]


class FileChecksums:
    """Checksums of the parts of files, in any order. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: dict[str, dict[int, tuple[int, int]]] = {}

    def add(self, file: str, start: int, size_bytes: int, crc: int) -> None:
        """Note a part: where it starts in its file, its length, its CRC-32. A part that is sent again counts once."""
        with self._lock:
            self._parts.setdefault(file, {})[start] = (size_bytes, crc)

    def whole_files(self) -> Mapping[str, tuple[int, int]]:
        """Size and CRC-32 of each file. Call when all parts are sent."""
        with self._lock:
            return {file: _join(parts) for file, parts in self._parts.items()}


def _join(parts: Mapping[int, tuple[int, int]]) -> tuple[int, int]:
    total_bytes = 0
    joined = 0
    for start in sorted(parts):
        size_bytes, crc = parts[start]
        if start != total_bytes:
            raise RuntimeError(f"the parts of a file leave a gap before byte {start}")
        joined = crc32_combine(joined, crc, size_bytes)
        total_bytes += size_bytes
    return total_bytes, joined
