"""Memory that two processes of one machine see, without a name and with one descriptor.

Problem: torch shares tensors one by one, each with a descriptor and a file in ``/dev/shm``: thousands of tensors run
into the limit of open files (case 52), a container's 64 MB of ``/dev/shm`` into a bus error in the middle of a copy,
and a killed process leaves the files behind (case 46). Anonymous memory of a fork is copied when it is written, or,
pinned, is not, which is worse (case 15).

Way taken: one anonymous file per block (``memfd_create``), mapped by both sides, its descriptor handed over on a
socket. It lives as long as somebody maps it, has no name that could remain, and is not bounded by ``/dev/shm``. Where
the system has no such call it is an unlinked temporary file in ``/dev/shm``, or in the temporary directory. Free memory
is asked for first (`free_memory`).
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import shutil
import tempfile

import torch

from dcpfs.background.free_memory import require_memory

__all__ = ["SharedBlock"]

_logger = logging.getLogger(__name__)

_SHM = "/dev/shm"  # noqa: S108 - the system's, not a place that this code would choose


class SharedBlock:
    """A block of bytes, as a tensor in each process that maps it.

    Attributes:
        size_bytes: Its size.
        tensor: Flat uint8. Its views keep the mapping, also beyond `close`.
        descriptor: Of the file behind it; stays this object's.
    """

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self.descriptor = descriptor
        self.size_bytes = size_bytes
        self._map: mmap.mmap | None = mmap.mmap(descriptor, max(1, size_bytes))
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8, count=size_bytes) if size_bytes else _EMPTY

    @classmethod
    def create(cls, size_bytes: int) -> SharedBlock:
        """Make a block.

        Raises:
            StorageFullError: There is not so much free memory.
        """
        require_memory(size_bytes)
        descriptor = _anonymous_file(size_bytes)
        try:
            os.ftruncate(descriptor, max(1, size_bytes))
            return cls(descriptor, size_bytes)
        except BaseException:
            os.close(descriptor)
            raise

    def discard(self) -> None:
        """Give the memory back although the other side still maps it, which then reads zeros. Before `close`."""
        advice = getattr(mmap, "MADV_REMOVE", None)
        if advice is not None and self.size_bytes and self._map is not None:
            with contextlib.suppress(OSError):  # a file system without holes: freed when the other side closes
                self._map.madvise(advice)

    def close(self) -> None:
        """Let go of the memory; it is freed when the other side, and views of the tensor, have gone too. Idempotent."""
        # Closing the map itself would pull it away from under views: torch holds the object, and not its buffer.
        self.tensor, self._map = _EMPTY, None
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


_EMPTY = torch.empty(0, dtype=torch.uint8, device="cpu")


def _anonymous_file(size_bytes: int) -> int:
    create = getattr(os, "memfd_create", None)
    if create is not None:
        return int(create("dcpfs-staging", os.MFD_CLOEXEC))
    directory = _SHM if os.path.isdir(_SHM) else None
    free_bytes = shutil.disk_usage(_SHM).free if directory is not None else 0
    if directory is not None and size_bytes > free_bytes:
        _logger.warning(
            "%s has %.2f GB free: the copy of the state goes to the temporary directory", _SHM, free_bytes / 1e9
        )
        directory = None
    descriptor, name = tempfile.mkstemp(prefix="dcpfs-staging-", dir=directory)
    os.unlink(name)
    return descriptor
