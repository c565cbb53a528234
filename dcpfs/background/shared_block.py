"""Memory that two processes of one machine see, without a name and with one descriptor.

Problem: torch shares tensors one by one, each with a descriptor and a file in ``/dev/shm``: thousands of tensors run
into the limit of open files (case 52), a container's 64 MB of ``/dev/shm`` into a bus error in the middle of a copy,
and a killed process leaves the files behind (case 46). Anonymous memory of a fork is copied when it is written, or,
pinned, is not, which is worse (case 15).

Way taken: one anonymous file per block (``memfd_create``), mapped by both sides, its descriptor handed over on a
socket. It lives as long as somebody maps it, has no name that could remain, and is not bounded by ``/dev/shm``. Where
the system has no such call it is an unlinked temporary file in ``/dev/shm``, or in the temporary directory. Free memory
is asked for first: memory that is promised and not there kills the process when it is touched, not when it is made.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import shutil
import tempfile

import torch

from dcpfs.errors import StorageFullError

__all__ = ["SharedBlock", "available_bytes"]

_logger = logging.getLogger(__name__)

_SHM = "/dev/shm"  # noqa: S108 - the system's, not a place that this code would choose
_RESERVE_BYTES = 256 << 20
"""Left to everybody else."""


class SharedBlock:
    """A block of bytes, as a tensor in each process that maps it.

    Attributes:
        size_bytes: Its size.
        tensor: Flat uint8. It and its views must not be used after `close`.
        descriptor: Of the file behind it; stays this object's.
    """

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self.descriptor = descriptor
        self.size_bytes = size_bytes
        self._map = mmap.mmap(descriptor, max(1, size_bytes))
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8, count=size_bytes) if size_bytes else _EMPTY

    @classmethod
    def create(cls, size_bytes: int) -> SharedBlock:
        """Make a block.

        Raises:
            StorageFullError: There is not so much free memory.
        """
        _require_memory(size_bytes)
        descriptor = _anonymous_file(size_bytes)
        try:
            os.ftruncate(descriptor, max(1, size_bytes))
            return cls(descriptor, size_bytes)
        except BaseException:
            os.close(descriptor)
            raise

    def close(self) -> None:
        """Let go of the memory; it is freed when the other side has done so too. Idempotent."""
        self.tensor = _EMPTY
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
            # A view that somebody still holds keeps the mapping: it goes when that does.
            with contextlib.suppress(BufferError):
                self._map.close()


_EMPTY = torch.empty(0, dtype=torch.uint8)


def available_bytes() -> int | None:
    """Memory that can be had without swapping, the limit of this process's control group counted in; None: unknown."""
    found = [each for each in (_of_the_machine(), _of_the_group()) if each is not None]
    return min(found) if found else None


def _require_memory(size_bytes: int) -> None:
    free_bytes = available_bytes()
    if free_bytes is not None and size_bytes + _RESERVE_BYTES > free_bytes:
        raise StorageFullError(
            f"can't copy the state for a save in the background: it takes {size_bytes / 1e9:.2f} GB of host memory and "
            f"{free_bytes / 1e9:.2f} GB are free; free some, or set async_mode to 'disabled', which needs no copy"
        )


def _of_the_machine() -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        return None
    return None


def _of_the_group() -> int | None:
    """What the control group still allows (version 2, else 1); files that it could drop are not counted as used."""
    for directory, limit_file, used_file, droppable in (
        ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file "),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "),
    ):
        try:
            limit = _read(directory, limit_file).strip()
            if not limit.isdigit() or int(limit) >= 1 << 60:  # "max", or version 1's way to say it
                return None
            used_bytes = int(_read(directory, used_file))
            for line in _read(directory, "memory.stat").splitlines():
                if line.startswith(droppable):
                    used_bytes -= int(line.split()[1])
        except (OSError, ValueError, IndexError):
            continue
        return max(0, int(limit) - used_bytes)
    return None


def _read(directory: str, name: str) -> str:
    with open(f"{directory}/{name}", encoding="ascii") as file:
        return file.read()


def _anonymous_file(size_bytes: int) -> int:
    create = getattr(os, "memfd_create", None)
    if create is not None:
        return int(create("dcpfs-staging", os.MFD_CLOEXEC))
    directory = _SHM if os.path.isdir(_SHM) else None
    free_bytes = shutil.disk_usage(directory or tempfile.gettempdir()).free
    if directory is not None and size_bytes > free_bytes:
        _logger.warning(
            "%s has %.2f GB free: the copy of the state goes to the temporary directory", _SHM, free_bytes / 1e9
        )
        directory = None
    descriptor, name = tempfile.mkstemp(prefix="dcpfs-staging-", dir=directory)
    os.unlink(name)
    return descriptor
