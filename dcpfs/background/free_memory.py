"""How much host memory a copy of the state may take.

Problem: memory that is promised and not there kills the process when it is touched, not when it is made. What the
machine has free is not what a container may use, and another process's share of it changes while one looks.

Way taken: the least of what the machine and each control group above this process still allow is asked for before a
block is made, less a reserve for everybody else; too little is an error that says both sizes.
"""

from __future__ import annotations

from collections.abc import Iterator

from dcpfs.errors import StorageFullError

__all__ = ["available_bytes", "require_memory"]

_RESERVE_BYTES = 256 << 20
"""Left to everybody else."""
_UNLIMITED = 1 << 60
"""What version 1 of control groups says for no limit is about 2 ** 63."""


def require_memory(size_bytes: int) -> None:
    """Check that a block can be had.

    Raises:
        StorageFullError: There is not so much free memory.
    """
    free_bytes = available_bytes()
    if free_bytes is not None and size_bytes + _RESERVE_BYTES > free_bytes:
        raise StorageFullError(
            f"can't copy the state for a save in the background: it takes {size_bytes / 1e9:.2f} GB of host memory and "
            f"{free_bytes / 1e9:.2f} GB are free, of which {_RESERVE_BYTES / 1e9:.2f} GB are left alone; free some, or "
            "set async_mode to 'disabled', which needs no copy"
        )


def available_bytes() -> int | None:
    """Memory that can be had without swapping, limits of this process's control groups counted in; None: unknown."""
    found = [each for each in (_of_the_machine(), *_of_the_groups()) if each is not None]
    return min(found) if found else None


def _of_the_machine() -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        return None
    return None


def _of_the_groups() -> Iterator[int | None]:
    """What each control group from this process's to the root still allows, in both versions."""
    for version, path in _own_groups():
        root, names = (
            ("/sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file "))
            if version == 2
            else ("/sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "))
        )
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            yield _allowed("/".join((root, *parts[:depth])), *names)


def _own_groups() -> list[tuple[int, str]]:
    found = [(2, "/"), (1, "/")]  # a container's view has its own group at the root, under whatever name
    try:
        with open("/proc/self/cgroup", encoding="utf-8") as file:
            for line in file:
                _, controllers, path = line.rstrip("\n").split(":", 2)
                if controllers == "" or "memory" in controllers.split(","):
                    found.append((2 if controllers == "" else 1, path))
    except (OSError, ValueError):
        pass
    return found


def _allowed(directory: str, limit_file: str, used_file: str, droppable: str) -> int | None:
    """Files that the group could drop are not counted as used."""
    try:
        limit = _read(directory, limit_file).strip()
        if not limit.isdigit() or int(limit) >= _UNLIMITED:
            return None
        used_bytes = int(_read(directory, used_file))
        for line in _read(directory, "memory.stat").splitlines():
            if line.startswith(droppable):
                used_bytes -= int(line.split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return max(0, int(limit) - used_bytes)


def _read(directory: str, name: str) -> str:
    with open(f"{directory}/{name}", encoding="ascii") as file:
        return file.read()
