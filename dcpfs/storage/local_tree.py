"""Names below a local directory, as files: what they resolve to, what their errors mean, their directories.

Problem: a name from a checkpoint's metadata must not lead elsewhere, and a symbolic link can make an innocent
name do that. An object store has no directories; files need them made, flushed to the device when made (or a
power cut takes the file with them), and removed when nothing is left in them. And an ``OSError`` says neither
what was tried nor what to do.

Way taken: a path becomes a file name by text alone; the name that the kernel resolved is compared with the
location's own. Making directories tolerates others that make or remove them at the same time. All calls run
inside `LocalTree.explained`, which turns an ``OSError`` into the error of dcpfs with verb, place, reason and
remedy.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Generator
from dataclasses import replace

from dcpfs.config import Durability
from dcpfs.errors import LinkOutsideError, StorageError
from dcpfs.storage.location import Location, check_name
from dcpfs.storage.translate import Classified, FailureKind, Fault, classify_fault

__all__ = ["LocalTree", "flush_directory"]

_FAULTS = {
    errno.EEXIST: Fault.EXISTS,
    errno.EACCES: Fault.DENIED,
    errno.EPERM: Fault.DENIED,
    errno.EROFS: Fault.DENIED,
    errno.ENOSPC: Fault.FULL,
    errno.EDQUOT: Fault.FULL,
    errno.EFBIG: Fault.FULL,
}
_PASSING = frozenset({errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EBUSY})
"""What a network filesystem reports while its server restarts: a read is tried again, a write isn't, since what was
lost of it is unknown."""
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP})
_HINTS = {
    errno.EFBIG: "the filesystem's or the process's limit of a file's size",
    errno.EIO: "the device or its network failed; see the kernel's log",
    errno.EISDIR: "a directory of that name is there",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ELOOP: "a symbolic link leads to itself",
    errno.ENOENT: "a directory was removed or never made",
    errno.ENOSPC: "see df for bytes and df -i for files",
    errno.ENOTDIR: "a part of the path is a file",
    errno.EROFS: "the filesystem is mounted read-only",
    errno.ESTALE: "the file server lost the file; mount it again",
}


class LocalTree:
    """The directory of a local location and the names below it. Thread-safe; holds no open file.

    Attributes:
        root: Absolute path of the directory, which need not exist.
        durable: Directories that are made are flushed to the device.
    """

    def __init__(self, location: Location, durability: Durability) -> None:
        self.root = location.path
        self.durable = durability is Durability.FSYNC
        self._location = location
        self._real_root = ""

    def file(self, path: str) -> str:
        """The file name of a path; ``""`` is the directory itself."""
        check_name(path)
        return f"{self.root.rstrip('/')}/{path}" if path else self.root

    def target(self, path: str) -> str:
        """The redacted text of a path, for errors."""
        return self._location.join(path).redacted

    def check_inside(self, real_name: str, path: str) -> None:
        """Refuse a path whose resolved file name is not below the location's own.

        Raises:
            LinkOutsideError: A symbolic link leads out.
        """
        if not self._is_inside(real_name):
            self._real_root = os.path.realpath(self.root)
            if not self._is_inside(real_name):
                raise LinkOutsideError(
                    f"Can't use {self.target(path)}: a symbolic link leads out of the location, to {real_name}; open "
                    "that place itself"
                )

    def check_directory_inside(self, directory: str, path: str) -> None:
        """`check_inside` for a directory, existing or not."""
        self.check_inside(os.path.realpath(directory), path)

    def check_open_file_inside(self, fd: int, file: str, path: str) -> None:
        """`check_inside` for what was opened, whatever happens to links meanwhile."""
        try:
            real_name = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:  # no /proc
            real_name = os.path.realpath(file)
        self.check_inside(real_name, path)

    def make_directory(self, directory: str) -> None:
        """Make a directory and what is missing above it; one that exists is fine.

        Raises:
            FileNotFoundError: Someone removed a directory in between; try again.
        """
        missing = []
        while not _make_one(directory):
            missing.append(directory)
            directory = os.path.dirname(directory)
        made = [directory]
        for directory in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory)
            made.append(directory)
        if self.durable:
            for directory in made:
                flush_directory(os.path.dirname(directory))

    def prune(self, directory: str) -> None:
        """Remove a directory below the root, and those above it, as far as they are empty."""
        below = self.root.rstrip("/") + "/"
        while directory.startswith(below):
            try:
                os.rmdir(directory)
            except OSError:  # not empty, gone, a link, or not ours: it stays
                return
            directory = os.path.dirname(directory)

    @contextlib.contextmanager
    def explained(self, verb: str, path: str, *, reading: bool = False) -> Generator[None, None, None]:
        """Turn an ``OSError`` of the block into an error of dcpfs."""
        try:
            yield
        except StorageError:
            raise
        except OSError as error:
            raise self.classify(error, verb=verb, path=path, reading=reading).error from error

    def classify(self, error: OSError, *, verb: str, path: str, reading: bool) -> Classified:
        """What an ``OSError`` means: when reading, no such directory means no such object."""
        number = error.errno or 0
        fault = Fault.NOT_FOUND if reading and number in _ABSENT else _FAULTS.get(number, Fault.OTHER)
        reason = error.strerror or str(error)
        if number in errno.errorcode:
            reason += f" ({errno.errorcode[number]})"
        if fault is not Fault.NOT_FOUND and number in _HINTS:
            reason += f", {_HINTS[number]}"
        classified = classify_fault(fault, verb=verb, target=self.target(path), reason=reason, cause=error)
        if isinstance(classified.error, StorageError):
            classified.error.errno = error.errno
        if reading and number in _PASSING:
            return replace(classified, kind=FailureKind.TRANSIENT)
        return classified

    def _is_inside(self, real_name: str) -> bool:
        root = self._real_root
        return bool(root) and (real_name == root or real_name.startswith(root.rstrip("/") + "/"))


def flush_directory(directory: str) -> None:
    """Wait until the names in a directory are on the device."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.EOPNOTSUPP}:  # a filesystem that knows no such thing
            raise
    finally:
        os.close(fd)


def _make_one(directory: str) -> bool:
    """Make one directory; False when the one above it is missing."""
    try:
        os.mkdir(directory)
    except FileExistsError:
        return True
    except FileNotFoundError:
        return False
    return True
