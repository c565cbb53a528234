"""One object on its way into an fsspec filesystem: where its bytes go, and how they get under its name.

Problem: in a directory tree half a file is visible, a directory that was made can be gone again, and an answer that
is lost leaves open whether the file was moved. Where a client has no move, the file is copied under its name, which
takes as long as the file is large: left behind half-way and asked for again, two copies write to one name.

Way taken: in a directory tree, bytes go to a temporary name beside the object's own; then the size is checked, the
file moved, and looked for under its name. A missing temporary file means that an attempt before has moved it. A copy
gets time for its bytes on top of what a call gets anyway. Elsewhere bytes go to the object's name at once, since the
close makes them appear whole.

Flow: ``open`` → the caller writes and closes the file → ``publish``, again where that failed → ``discard`` after a
failure.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

from dcpfs.errors import StorageError, TransferSizeError
from dcpfs.storage.filesystems import OpenFilesystem, Publishing, Traits
from dcpfs.storage.fsspec_connection import FsspecConnection
from dcpfs.storage.fsspec_sink import FileWriter, discard_file, temporary_name
from dcpfs.storage.literal_calls import copies_to_move, describe_file, move_file
from dcpfs.storage.store import ObjectInfo

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

__all__ = ["FsspecWriting", "check_written"]

_COPIED_BYTES_PER_SECOND = 10 << 20
"""The least that a copy is expected to do, by a server or through the client: a spinning disk does ten times that."""


class FsspecWriting:
    """An object being written. One thread's at a time.

    Args:
        connection: Gives the filesystem, and runs what tidies up.
        traits: How objects come under their names there.
        made: Directories that are known to be there; more are added.
        path: Name in the store.
        target: Redacted URL of it.
        size_bytes: Its length.
    """

    def __init__(
        self,
        connection: FsspecConnection,
        traits: Traits,
        made: set[str],
        path: str,
        target: str,
        size_bytes: int,
    ) -> None:
        self._connection = connection
        self._moves = traits.publishing is Publishing.MOVE
        self._doubtful = not traits.atomic
        self._made = made
        self._path = path
        self._target = target
        self._size_bytes = size_bytes
        self._name = ""
        self._own_name = ""
        self._lost: list[str] = []
        self._move_asked = False

    def open(self, fs: AbstractFileSystem, name: str) -> FileWriter:
        """Open the file object; in a directory tree, make the directories first."""
        self._name = name
        if self._moves and self._own_name:
            # Of an attempt before this one, whose answer was lost: it may be there.
            self._lost.append(self._own_name)
        self._own_name = temporary_name(name) if self._moves else name
        if self._moves:
            directory = name.rpartition("/")[0]
            if directory and directory not in self._made:
                self._make(fs, directory)
            try:
                return cast("FileWriter", fs.open(self._own_name, "wb"))
            except FileNotFoundError:
                # Somebody removed the directory since, because it was empty.
                self._make(fs, directory)
        return cast("FileWriter", fs.open(self._own_name, "wb"))

    def _make(self, fs: AbstractFileSystem, directory: str) -> None:
        with contextlib.suppress(FileExistsError):
            fs.makedirs(directory, exist_ok=True)
        self._made.add(directory)

    def extra_seconds(self, opened: OpenFilesystem) -> float:
        """What `publish` may take longer than another call: where it copies, as long as its bytes need."""
        copies = self._moves and copies_to_move(opened.filesystem)
        return self._size_bytes / _COPIED_BYTES_PER_SECOND if copies else 0.0

    def publish(self, fs: AbstractFileSystem) -> ObjectInfo:
        """After the close: check the size, move the file to its name, and look whether it is there."""
        try:
            found = check_written(fs, self._own_name, self._path, self._target, self._size_bytes)
        except FileNotFoundError:
            if not self._move_asked:
                raise
            # An attempt before this one has moved it, and its answer, or that to what followed, was lost.
            return self._moved(fs)
        if not self._moves:
            return found
        self._move_asked = True
        move_file(fs, self._own_name, self._name, doubtful=self._doubtful)
        return self._moved(fs)

    def _moved(self, fs: AbstractFileSystem) -> ObjectInfo:
        try:
            found = check_written(fs, self._name, self._path, self._target, self._size_bytes)
        except FileNotFoundError:
            raise StorageError(
                f"Can't write {self._target}: it was moved to its name and is not there; choose "
                "a name without characters that the server takes for syntax"
            ) from None
        self._remove_quietly(self._lost)
        return found

    def drop_file(self, file: FileWriter) -> None:
        """Get rid of the file object: under a temporary name it may be closed."""
        drop = file.close if self._moves else partial(discard_file, file)
        self._connection.tidy(f"give up writing {self._target}", drop)

    def discard(self) -> None:
        """Remove a file with a temporary name, on a new connection where that of the write is gone."""
        if self._moves and self._own_name:
            self._remove_quietly([*self._lost, self._own_name])

    def _remove_quietly(self, names: Sequence[str]) -> None:
        for name in names:
            with contextlib.suppress(Exception):
                # Nothing may be there, and what failed before is what the caller must hear of.
                remove = partial(self._connection.filesystem().filesystem.rm_file, name)
                self._connection.tidy(f"tidy up after {self._target}", remove)


def check_written(fs: AbstractFileSystem, name: str, path: str, target: str, size_bytes: int) -> ObjectInfo:
    """Describe an object that was just written, or remove it when it is not what was sent.

    Raises:
        FileNotFoundError: There is none.
        TransferSizeError: It has another size; it is removed.
    """
    found = describe_file(fs, name, path)
    if found.size_bytes != size_bytes:
        with contextlib.suppress(Exception):  # the wrong size is what the caller must hear of
            fs.rm_file(name)
        raise TransferSizeError(
            f"Can't write {target}: {size_bytes} bytes were sent and {found.size_bytes} are stored; "
            "check the endpoint's checksum settings"
        )
    return found
