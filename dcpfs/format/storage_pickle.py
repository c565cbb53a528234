"""The memory of a tensor in a plain pickle: torch's oldest file format, inside a bytes value.

Problem: a tensor that is pickled, not saved, calls ``torch.storage._load_from_bytes`` with a whole file of the format
that ``torch.save`` had before it wrote archives. Letting it call that is ``torch.load`` with everything allowed, and
torch 2.13 can't load such a file where the dtype has no storage class of its own (uint16, float8, …).

Way taken: the file is taken apart here. It is five pickles, which go through `SafeUnpickler`, and the bytes::

    magic number | protocol | byte order and sizes | persistent id of the storage | [its key] | count | bytes
"""

from __future__ import annotations

import torch

from dcpfs.errors import CorruptCheckpointError, UntrustedDataError
from dcpfs.format.objects import StorageClass, resolve_tensor_value
from dcpfs.format.unpickling import SafeUnpickler

__all__ = ["decode_pickled_storage"]

_MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001
_HEAD_BYTES = 16384
"""More than the five pickles take."""
_WHAT = "a tensor's memory in a pickle"


def decode_pickled_storage(data: object) -> torch.storage.TypedStorage:
    """Rebuild a storage, on the CPU.

    Args:
        data: What a pickled tensor gives to ``torch.storage._load_from_bytes``.

    Raises:
        UntrustedDataError: It is something else.
        CorruptCheckpointError: It is damaged.
    """
    if type(data) is not bytes:
        raise UntrustedDataError(f"reading {_WHAT}: it is no bytes; refused")
    position = 0
    found: list[tuple[StorageClass, int]] = []

    def load_persistent(pid: object) -> object:
        if (
            type(pid) is not tuple
            or len(pid) != 6
            or pid[0] != "storage"
            or type(pid[1]) is not StorageClass
            or type(pid[4]) is not int
            or pid[5] is not None
            or found
        ):
            raise UntrustedDataError(f"reading {_WHAT}: it holds something else than one storage; refused")
        found.append((pid[1], pid[4]))
        return found

    def next_pickle() -> object:
        nonlocal position
        head = data[position : position + _HEAD_BYTES]
        unpickler = SafeUnpickler(head, what=_WHAT, resolve=resolve_tensor_value, load_persistent=load_persistent)
        value: object = unpickler.load()
        position += unpickler.position_bytes
        return value

    if next_pickle() != _MAGIC or next_pickle() != _PROTOCOL:
        raise UntrustedDataError(f"reading {_WHAT}: it is not in the format of a pickled storage; refused")
    system = next_pickle()
    if type(system) is not dict or system.get("little_endian") is not True:
        raise UntrustedDataError(f"reading {_WHAT}: it was written on a machine of another byte order; refused")
    if next_pickle() is not found or not found:
        raise UntrustedDataError(f"reading {_WHAT}: it holds something else than one storage; refused")
    keys = next_pickle()
    kind, count = found[0]
    dtype = kind.dtype if kind.dtype is not None else torch.uint8
    written = int.from_bytes(data[position : position + 8], "little")
    payload = bytearray(memoryview(data)[position + 8 :])
    if type(keys) is not list or len(keys) != 1 or written != count or len(payload) != count * dtype.itemsize:
        raise CorruptCheckpointError(f"reading {_WHAT}: it holds {len(payload)} bytes for {count} elements of {dtype}")
    # Cloned: torch's own allocation can be resized.
    tensor = torch.frombuffer(payload, dtype=torch.uint8).clone() if payload else torch.empty(0, dtype=torch.uint8)
    return torch.storage.TypedStorage(  # type: ignore[no-untyped-call]  # torch's constructor has no annotations
        wrap_storage=tensor.untyped_storage(), dtype=dtype, _internal=True
    )
