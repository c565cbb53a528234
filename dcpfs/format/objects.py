"""Values that are no plain tensor: encoded by ``torch.save``, decoded through the allow-list.

Problem: torch's planner loads every non-tensor entry with ``weights_only=False``, so an entry can run code in each
rank (case 111); with ``weights_only=True`` it refuses what trainers store, and says so only after the job was lost.
And a value that can't be pickled at all fails when the file it should go to already exists (case 109).

Way taken: one list for both ways. Decoding takes the archive apart here, checks its checksums, and rebuilds its
pickle through `SafeUnpickler`, tensors of every kind included (`tensor_values`); the format before 1.6 likewise
(`old_file`). torch's own unpickler reads only what the caller trusts. Encoding makes the bytes in memory first, then
decodes them with the list of a default load, and refuses what that would refuse while the key is known and no byte is
written. A time of the hour that a clock goes through twice keeps which of both it is, which the pickle protocol that
torch takes by default drops without a word.
"""

from __future__ import annotations

import datetime as dt
import io
import pickle
import sys
from types import SimpleNamespace
from typing import Any

import torch

from dcpfs.config import Trust
from dcpfs.errors import CheckpointError, CorruptCheckpointError, UnsupportedValueError, UntrustedDataError
from dcpfs.format.archive import ArchiveError, Record, read_directory
from dcpfs.format.checksum import crc32
from dcpfs.format.old_file import decode_old_file
from dcpfs.format.tensor_values import check_storage_name, resolve_tensor_value
from dcpfs.format.unpickling import SafeUnpickler

__all__ = [
    "check_storable_object",
    "decode_object",
    "decode_tensor_entry",
    "encode_object",
]


_PLAIN = (int, float, bool, str, bytes, complex, type(None))
"""Types whose values always load."""


class _Pickler(pickle.Pickler):
    """Python's, which in torch's protocol 2 also says which of two equal times of a day one is."""

    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, (dt.datetime, dt.time)) and obj.fold:
            return obj.__reduce_ex__(4)
        return NotImplemented


_PICKLE: Any = SimpleNamespace(__name__="pickle", Pickler=_Pickler)


def encode_object(value: object, *, key: str = "", trust: Trust = Trust.ALLOWLIST) -> bytes:
    """Encode a value as torch's planner does, refusing what a default load would refuse.

    Args:
        value: The value; tensors inside it are stored whole.
        key: The state key, for errors.
        trust: `Trust.PICKLE`: anything that pickles is stored; loading it will take the same trust.

    Raises:
        UnsupportedValueError: It can't be pickled, or holds a class that is not on the allow-list; names key and class.
    """
    buffer = io.BytesIO()
    try:
        if type(value) in _PLAIN:
            torch.save(value, buffer)
        else:
            torch.save(value, buffer, pickle_module=_PICKLE)
    except Exception as error:
        raise UnsupportedValueError(
            f"saving {key!r}: a {_kind(value)} can't be pickled ({type(error).__name__}: {str(error)[:200]}); store "
            f"plain data instead"
        ) from error
    data = buffer.getvalue()
    if trust is Trust.ALLOWLIST and type(value) not in _PLAIN:
        check_storable_object(data, key)
    return data


def check_storable_object(data: bytes | memoryview, key: str) -> None:
    """Refuse an encoded value that a default load would refuse.

    Args:
        data: The bytes of ``torch.save``, as a planner's ``resolve_data`` returns them.
        key: The state key, for errors.

    Raises:
        UnsupportedValueError: It holds a class that is not on the allow-list; names key and class.
    """
    try:
        decode_object(data, key=key)
    except CheckpointError as error:
        reason = error.message.partition("; pass trust=")[0]
        raise UnsupportedValueError(
            f"saving {key!r}: a load would refuse it: {reason}; store plain data, or register the class with "
            f"torch.serialization.add_safe_globals on both sides"
        ) from error


def decode_object(data: bytes | memoryview, *, trust: Trust = Trust.ALLOWLIST, key: str = "") -> object:
    """Decode a value from the bytes of ``torch.save``. Tensors inside it come to the CPU.

    Args:
        data: The whole entry.
        trust: Whether the allow-list applies.
        key: The state key, for errors.

    Raises:
        UntrustedDataError: A class is not on the allow-list; names class and key.
        CorruptCheckpointError: The bytes are damaged.
    """
    what = f"the entry {key!r}"
    view = memoryview(data).cast("B")
    archive = _Archive.open(view, what, key)
    if trust is Trust.PICKLE:
        return _load_with_torch(view, what, key)
    try:
        if archive is None:
            _refuse_safetensors(view, what, key)
            return decode_old_file(view, what=what)
        unpickler = SafeUnpickler(
            archive.read("data.pkl"), what=what, resolve=resolve_tensor_value, load_persistent=archive.load_storage
        )
        return unpickler.load()
    except CorruptCheckpointError as error:
        error.key = key
        raise


def decode_tensor_entry(entry: bytes | memoryview, *, trust: Trust = Trust.ALLOWLIST, key: str = "") -> torch.Tensor:
    """Decode any entry that holds one tensor, also those that `parse_tensor_header` calls unusual.

    Raises:
        UntrustedDataError: It names a class that is not on the allow-list; names class and key.
        CorruptCheckpointError: The bytes are damaged, or hold something else than a tensor.
    """
    value = decode_object(entry, trust=trust, key=key)
    if not isinstance(value, torch.Tensor):
        raise CorruptCheckpointError(
            f"reading the entry {key!r}: it holds a {_kind(value)}, but the metadata says a tensor", key=key
        )
    return value


def _kind(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _load_with_torch(view: memoryview, what: str, key: str) -> Any:
    """``torch.load`` of what the caller trusts."""
    _refuse_safetensors(view, what, key)
    try:
        return torch.load(io.BytesIO(view), map_location="cpu", weights_only=False)
    except Exception as error:
        raise _damaged(what, key, error) from error


def _refuse_safetensors(view: memoryview, what: str, key: str) -> None:
    if bytes(view[8:9]) == b"{" and int.from_bytes(view[:8], "little") <= len(view):
        raise CorruptCheckpointError(
            f"reading {what}: it is in safetensors format, not that of torch.save; read it with a safetensors reader",
            key=key,
        )


def _damaged(what: str, key: str, error: Exception | str) -> CorruptCheckpointError:
    text = error if isinstance(error, str) else f"{type(error).__name__}: {str(error)[:200]}"
    return CorruptCheckpointError(f"reading {what}: the entry is damaged ({text})", key=key)


class _Archive:
    """The records of one entry, and the storages made from them so far."""

    def __init__(self, view: memoryview, records: dict[str, Record]) -> None:
        self._view = view
        self._records = records
        self._storages: dict[str, torch.UntypedStorage] = {}
        self._swapped = False

    @classmethod
    def open(cls, view: memoryview, what: str, key: str) -> _Archive | None:
        """Check an archive and its checksums. None when it is no archive."""
        if bytes(view[:4]) != b"PK\x03\x04":
            return None
        try:
            named = read_directory(view)
        except ArchiveError as error:
            raise _damaged(what, key, str(error)) from error
        records = {}
        for full_name, record in named.items():
            prefix, _, name = full_name.partition("/")
            records[name or prefix] = record
        if len(records) != len(named) or "data.pkl" not in records:
            raise _damaged(what, key, "it is no archive of torch.save")
        if "constants.pkl" in records:
            raise UntrustedDataError(f"reading {what}: it is a TorchScript program, not a value; refused")
        if any(record.size_bytes < 0 for record in records.values()):
            raise _damaged(what, key, "its records are compressed")
        # A writer that was told not to compute checksums leaves them at 0, that of the never empty pickle too.
        if records["data.pkl"].crc32 != 0:
            for name, record in records.items():
                if crc32(view[record.start : record.start + record.size_bytes]) != record.crc32:
                    raise CorruptCheckpointError(
                        f"reading {what}: the checksum of its record {name[:100]!r} is wrong; it was damaged after "
                        f"saving",
                        key=key,
                    )
        archive = cls(view, records)
        if "byteorder" in records:
            byte_order = bytes(archive.read("byteorder"))
            if byte_order not in (b"little", b"big"):
                raise _damaged(what, key, "its byte order is unknown")
            archive._swapped = byte_order != sys.byteorder.encode("ascii")
        return archive

    def read(self, name: str) -> memoryview:
        """The bytes of a record."""
        record = self._records[name]
        return self._view[record.start : record.start + record.size_bytes]

    def load_storage(self, pid: object) -> object:
        """Make the storage that a persistent id names, once."""
        named = check_storage_name(pid)
        storage = self._storages.get(named.name)
        if storage is None:
            if f"data/{named.name}" not in self._records:
                raise CorruptCheckpointError("reading a value: its archive lacks a tensor's data; it is damaged")
            # The bytes are copied twice: torch warns about read-only memory, and its own allocation can be resized.
            data = bytearray(self.read(f"data/{named.name}"))
            tensor = (
                torch.frombuffer(data, dtype=torch.uint8).clone()
                if data
                else torch.empty(0, dtype=torch.uint8, device="cpu")
            )
            storage = tensor.untyped_storage()
            if self._swapped and named.dtype is not None:
                storage.byteswap(named.dtype)  # type: ignore[no-untyped-call]  # torch has no annotation there
            self._storages[named.name] = storage
        if named.size_bytes != storage.nbytes():
            raise CorruptCheckpointError("reading a value: the size of a tensor's data is wrong; it is damaged")
        return named.wrap(storage)
