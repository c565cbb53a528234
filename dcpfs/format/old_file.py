"""A file of ``torch.save`` as it was before 1.6, and as a pickled tensor still carries its memory.

Problem: whole files of that format are rare; but ``pickle.dumps`` of a tensor calls ``torch.storage._load_from_bytes``
with one. Letting it call that is ``torch.load`` with everything allowed, which makes memory of any size that the file
names before it has read a byte; and torch 2.13 can't load such a file where the dtype has no storage class of its own
(uint16, float8, …).

Way taken: the file is taken apart here. It is five pickles, which go through `SafeUnpickler`, and the bytes::

    magic number | protocol | byte order and sizes | the value | keys of its storages | count | bytes | count | bytes …

Which storages there are, only the value says, and their bytes come after it. So it is read twice: first with storages
of zeros, no larger together than the file, and without the tensors that can't be made of zeros; then with the bytes in
them.
"""

from __future__ import annotations

import pickle

import torch

from dcpfs.errors import CorruptCheckpointError, DcpfsError, UntrustedDataError
from dcpfs.format.allowlist import Resolver
from dcpfs.format.tensor_values import check_storage_name, resolve_outline, resolve_tensor_value
from dcpfs.format.unpickling import SafeUnpickler

__all__ = ["decode_old_file"]

_MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001
_HEAD_BYTES = 16384
"""More than the pickles of a tensor's memory take: such a file is not copied to read them."""


def decode_old_file(data: bytes | memoryview, *, what: str, resolve: Resolver = resolve_tensor_value) -> object:
    """Decode the value. Tensors come to the CPU.

    Args:
        data: The whole file.
        what: What is decoded, for errors.
        resolve: The allow-list.

    Raises:
        UntrustedDataError: It names a class that is not on the allow-list, or was written on another kind of machine.
        CorruptCheckpointError: It is damaged, or no such file.
    """
    return _OldFile(memoryview(data).cast("B"), what, resolve).decode()


class _OldFile:
    def __init__(self, view: memoryview, what: str, resolve: Resolver) -> None:
        self._view = view
        self._what = what
        self._resolve = resolve
        self._position = 0
        self._storages: dict[str, tuple[torch.dtype, torch.UntypedStorage]] = {}
        self._size_bytes = 0

    def decode(self) -> object:
        if bytes(self._view[:1]) != pickle.PROTO or not (self._is_next(_MAGIC) and self._is_next(_PROTOCOL)):
            raise self._damaged("it is no file of torch.save")
        system = self._load()
        if type(system) is not dict or system.get("little_endian") is not True:
            raise UntrustedDataError(
                f"reading {self._what}: it was written on a machine of another byte order; refused"
            )
        start, resolve = self._position, self._resolve
        self._resolve = lambda module, name: resolve_outline(module, name) or resolve(module, name)
        self._load()
        self._resolve = resolve
        self._fill(self._load())
        self._position = start
        return self._load()

    def _is_next(self, number: int) -> bool:
        found = self._load()
        return type(found) is int and found == number  # what else there may be, can fail when it is compared

    def _load(self) -> object:
        """The next pickle."""
        rest = self._view[self._position :]
        known = dict(self._storages), self._size_bytes
        try:
            return self._load_from(rest[:_HEAD_BYTES])
        except DcpfsError:
            if len(rest) <= _HEAD_BYTES:
                raise
        self._storages, self._size_bytes = known
        return self._load_from(rest)

    def _load_from(self, data: memoryview) -> object:
        unpickler = SafeUnpickler(data, what=self._what, resolve=self._resolve, load_persistent=self._load_storage)
        value: object = unpickler.load()
        self._position += unpickler.position_bytes
        return value

    def _load_storage(self, pid: object) -> object:
        named = check_storage_name(pid, what=self._what, further=(None,))
        if named.name not in self._storages:
            self._size_bytes += named.size_bytes
            if self._size_bytes > len(self._view):
                raise self._damaged("its storages are larger than it is")
            zeros = torch.zeros(named.size_bytes, dtype=torch.uint8, device="cpu")
            self._storages[named.name] = (named.element, zeros.untyped_storage())
        known, storage = self._storages[named.name]
        if known is not named.element or storage.nbytes() != named.size_bytes:
            raise self._damaged("one storage has two sizes")
        return named.wrap(storage)

    def _fill(self, keys: object) -> None:
        """Bring the bytes into the storages."""
        if type(keys) is not list or not {*map(type, keys)} <= {str} or sorted(keys) != sorted(self._storages):
            raise self._damaged("its storages are not those of its value")
        position = self._position
        for key in keys:
            dtype, storage = self._storages[key]
            size_bytes = storage.nbytes()
            count = self._view[position : position + 8]
            stop = position + 8 + size_bytes if key is not keys[-1] else None  # nothing comes after the last
            payload = self._view[position + 8 : stop]
            written = int.from_bytes(count, "little") * dtype.itemsize
            if len(count) != 8 or written != size_bytes or len(payload) != size_bytes:
                raise self._damaged(
                    f"it holds {len(payload)} bytes for {size_bytes // dtype.itemsize} elements of {dtype}"
                )
            if size_bytes:
                target = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
                target.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
            position += 8 + size_bytes

    def _damaged(self, reason: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"reading {self._what}: {reason}; it is damaged")
