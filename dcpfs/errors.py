"""Every error that dcpfs raises, in one tree.

Problem: a failed save or load surfaces, with torch alone, as a ``CheckpointException`` (a ``BaseException``)
whose text is a multi-page trace, or as whatever the storage client of the day raises. A trainer can then
neither catch it by kind nor read what to do. Here every failure is an ordinary exception with one clear
sentence: the verb, the redacted URL, the key or rank, the cause, and the remedy.

Each error is also the builtin it resembles, so ``except FileNotFoundError`` works, and each survives pickling
with its text, its rank and the text of its cause: that is how a failure of one rank, thread or process reaches
the others, also when the original exception can't be pickled.

::

    DcpfsError (Exception)
    ├── ConfigError (ValueError)                   an argument or config field is wrong; nothing was touched
    ├── MissingBackendError (ImportError)          the URL's scheme needs a package that is not installed
    ├── StorageError (OSError)                     the store said no, or did not answer
    │   ├── ObjectNotFoundError (FileNotFoundError)
    │   │   └── BucketNotFoundError
    │   ├── ObjectExistsError (FileExistsError)    a conditional put found an object
    │   ├── PermissionDeniedError (PermissionError)
    │   │   ├── CredentialsError                   missing, wrong or expired credentials
    │   │   └── LinkOutsideError                   a symbolic link leads out of the location
    │   ├── StorageTimeoutError (TimeoutError)     the deadline of the retry policy passed
    │   ├── StorageFullError                       no space, quota
    │   ├── DamagedObjectError                     the store itself finds that an object's bytes changed
    │   ├── TransferSizeError                      fewer or more bytes arrived than were sent or promised
    │   └── UnsupportedOperationError (io.UnsupportedOperation)   e.g. a write to a read-only store
    ├── CheckpointError (Exception)                a checkpoint, as opposed to the store beneath it
    │   ├── CheckpointNotFoundError (FileNotFoundError)
    │   ├── CheckpointExistsError (FileExistsError)
    │   │   └── SupersededError                    another save has taken over the step; nothing is published
    │   ├── IncompleteCheckpointError              objects that its metadata lists are missing
    │   ├── CorruptCheckpointError (ValueError)    a checksum, size or structure is wrong; names file and key
    │   ├── UntrustedDataError (pickle.UnpicklingError)   a class outside the allow-list, or an unsafe name
    │   ├── KeyMismatchError (KeyError)            missing, unexpected or mismatched keys
    │   ├── UnsupportedValueError (TypeError)      a tensor or object that can't be stored exactly
    │   └── ReplicaMismatchError (ValueError)      ranks disagree about a value they share
    └── RankError (RuntimeError)                   another rank failed; carries its rank and traceback text
"""

from __future__ import annotations

import io
import pickle
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = [
    "BucketNotFoundError",
    "CheckpointError",
    "CheckpointExistsError",
    "CheckpointNotFoundError",
    "ConfigError",
    "CorruptCheckpointError",
    "CredentialsError",
    "DamagedObjectError",
    "DcpfsError",
    "IncompleteCheckpointError",
    "KeyMismatchError",
    "LinkOutsideError",
    "MissingBackendError",
    "ObjectExistsError",
    "ObjectNotFoundError",
    "PermissionDeniedError",
    "RankError",
    "ReplicaMismatchError",
    "StorageError",
    "StorageFullError",
    "StorageTimeoutError",
    "SupersededError",
    "TransferSizeError",
    "UnsupportedOperationError",
    "UnsupportedValueError",
    "UntrustedDataError",
]


class DcpfsError(Exception):
    """Base of all errors of dcpfs.

    Attributes:
        message: The one sentence that ``str()`` shows.
        rank: Global rank on which it happened, or None when there are no ranks.
        cause_text: The traceback text of the original exception, kept across pickling and process borders.
        written_keys: Keys of a training state (``model``, ``optim``, ...) whose targets a failed load had begun to
            change, on any rank. Empty: everything is as it was.
    """

    written_keys: tuple[str, ...] = ()

    def __init__(self, message: str, *, rank: int | None = None, cause_text: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.rank = rank
        self.cause_text = cause_text

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        state = dict(self.__dict__)
        if self.__cause__ is not None and not state.get("cause_text"):
            state["cause_text"] = "".join(traceback.format_exception(self.__cause__)).rstrip()
        return _rebuild, (type(self), self.message, state)


def _rebuild(kind: type[DcpfsError], message: str, state: Mapping[str, Any]) -> DcpfsError:
    error = kind.__new__(kind, message)
    DcpfsError.__init__(error, message)
    error.__dict__.update(state)
    return error


class ConfigError(DcpfsError, ValueError):
    """An argument or config field is wrong; nothing was read or written."""


class MissingBackendError(DcpfsError, ImportError):
    """The URL's scheme is served by a package that is not installed; the text names the extra to install."""


class StorageError(DcpfsError, OSError):
    """The store refused, failed or did not answer."""


class ObjectNotFoundError(StorageError, FileNotFoundError):
    """No object of that name."""


class BucketNotFoundError(ObjectNotFoundError):
    """The bucket or container does not exist; dcpfs never creates one."""


class ObjectExistsError(StorageError, FileExistsError):
    """A conditional put found an object of that name."""


class PermissionDeniedError(StorageError, PermissionError):
    """The store knows who asks and says no."""


class CredentialsError(PermissionDeniedError):
    """Credentials are missing, wrong or expired (after one refresh)."""


class LinkOutsideError(PermissionDeniedError):
    """A symbolic link leads out of the location, which dcpfs does not follow."""


class StorageTimeoutError(StorageError, TimeoutError):
    """The retry policy's total deadline passed."""


class StorageFullError(StorageError):
    """No space left, or a quota is used up."""


class DamagedObjectError(StorageError):
    """What serves an object, such as an archive that has a checksum of it, finds that its bytes have changed."""


class TransferSizeError(StorageError):
    """Fewer or more bytes arrived than were sent or promised."""


class UnsupportedOperationError(StorageError, io.UnsupportedOperation):
    """The store can't do this at all, e.g. a write to a read-only one."""


class CheckpointError(DcpfsError):
    """A checkpoint is absent, incomplete, damaged, unsafe, or does not fit the state it is loaded into."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """No checkpoint at that URL."""


class CheckpointExistsError(CheckpointError, FileExistsError):
    """A checkpoint stands at that URL and overwriting was not asked for."""


class SupersededError(CheckpointExistsError):
    """Another save, of another incarnation of the job, has taken over the step that this one wrote; it wins."""


class IncompleteCheckpointError(CheckpointError):
    """Objects that the checkpoint's metadata lists are missing or short.

    Attributes:
        missing: Names of the objects, relative to the checkpoint.
    """

    def __init__(self, message: str, *, missing: Sequence[str] = (), rank: int | None = None) -> None:
        super().__init__(message, rank=rank)
        self.missing = tuple(missing)


class CorruptCheckpointError(CheckpointError, ValueError):
    """Bytes are not what was saved.

    Attributes:
        file: Name of the object, relative to the checkpoint, or None.
        key: The state key, or None.
    """

    def __init__(
        self, message: str, *, file: str | None = None, key: str | None = None, rank: int | None = None
    ) -> None:
        super().__init__(message, rank=rank)
        self.file = file
        self.key = key


class UntrustedDataError(CheckpointError, pickle.UnpicklingError):
    """A pickle names a class outside the allow-list, or metadata names a file outside the checkpoint."""


class KeyMismatchError(CheckpointError, KeyError):
    """The state to load into and the checkpoint don't have the same keys, kinds, shapes or dtypes.

    Attributes:
        missing: Keys that were asked for and that the checkpoint lacks.
        unexpected: Keys that the checkpoint holds and nobody asked for.
        mismatched: Key to a sentence that says how kind, shape or dtype differ.
    """

    def __init__(
        self,
        message: str,
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        mismatched: Mapping[str, str] | None = None,
        rank: int | None = None,
    ) -> None:
        super().__init__(message, rank=rank)
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.mismatched = dict(mismatched or {})


class UnsupportedValueError(CheckpointError, TypeError):
    """A tensor or object that can't be stored exactly; refused before a byte of that rank is written."""


class ReplicaMismatchError(CheckpointError, ValueError):
    """Ranks disagree about the kind, shape, dtype or value of a key they share."""


class RankError(DcpfsError, RuntimeError):
    """Another rank failed with an exception that is not an error of dcpfs.

    The text holds its type, message and rank; ``cause_text`` its traceback.
    """
