"""What an entry's own first bytes say about its tensor.

Problem: strides, storage offset and the conjugate bit stand nowhere but in the pickle inside the entry: torch saves a
transpose with strides (1, n) while ``.metadata`` calls it contiguous, and a reader that takes the payload for
row-major gets its values in the wrong places. Reading the entry whole through ``torch.load`` costs 128 µs and all its
bytes, also for one row of it.

Way taken: the first few kilobytes hold the pickle and the payload's position. The pickle is decoded to a description,
with no tensor and no storage behind it, once per distinct pickle. The checksum stands behind the payload; whoever has
read that far gets it from `parse_tensor_tail`.

Flow: first 4 KiB of an entry → `parse_tensor_header` → `TensorHeader`, or `NeedMoreBytes`, or `UnusualEntry` for what
only torch itself can rebuild (a wrapper subclass, the format before torch 1.6): then the whole entry goes to
`dcpfs.format.objects.decode_tensor_entry`.
"""

from __future__ import annotations

import functools
import math
import sys
from typing import NamedTuple

import torch

from dcpfs.errors import CorruptCheckpointError, UntrustedDataError
from dcpfs.format.allowlist import Global, resolve_value
from dcpfs.format.archive import DESCRIPTOR_MARK, ArchiveError, NeedMoreBytes, read_front
from dcpfs.format.checksum import crc32
from dcpfs.format.tensor_pickle import STORAGE_CLASSES, row_major_strides
from dcpfs.format.unpickling import SafeUnpickler

__all__ = ["NeedMoreBytes", "TensorHeader", "UnusualEntry", "parse_tensor_header", "parse_tensor_tail"]


class UnusualEntry(Exception):  # noqa: N818 - a signal to the caller, not an error
    """The entry is not one plain tensor in torch's zip format; only `decode_tensor_entry` can say what it is."""


class TensorHeader(NamedTuple):
    """One tensor as its entry describes it.

    Attributes:
        dtype: Its dtype.
        shape: Its sizes.
        strides: Its strides in elements, none negative.
        storage_offset: First element within the payload.
        conj: The values are the conjugate of the bytes.
        neg: The values are the negative of the bytes.
        payload_offset_bytes: Start of the storage's bytes within the entry.
        payload_bytes: Length of the storage, which can be more than the tensor's own bytes. All elements lie inside it.
        crc32: CRC-32 of the payload, or None: it stands behind the payload (`parse_tensor_tail`), or nowhere.
        has_checksums: False when the writer was told not to compute any (``set_crc32_options(False)``).
        requires_grad: What was saved with it.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage_offset: int
    conj: bool
    neg: bool
    payload_offset_bytes: int
    payload_bytes: int
    crc32: int | None
    has_checksums: bool
    requires_grad: bool

    @property
    def is_row_major(self) -> bool:
        """The payload is exactly the tensor's row-major elements."""
        elements = math.prod(self.shape)
        return (
            not self.conj
            and not self.neg
            and self.payload_bytes == elements * self.dtype.itemsize
            and (
                elements == 0
                or all(
                    size == 1 or stride == expected
                    for size, stride, expected in zip(
                        self.shape, self.strides, row_major_strides(self.shape), strict=True
                    )
                )
            )
        )


def parse_tensor_header(head: bytes, entry_bytes: int, *, what: str = "a tensor entry") -> TensorHeader:
    """Describe the tensor of an entry from its first bytes. Thread-safe.

    Args:
        head: The entry's first bytes; 4 KiB are enough for all but very long pickles.
        entry_bytes: Length of the whole entry.
        what: The entry, for errors.

    Raises:
        NeedMoreBytes: The head ends too early; it says how many bytes to bring.
        UnusualEntry: The entry needs `decode_tensor_entry`.
        CorruptCheckpointError: It contradicts itself.
    """
    if len(head) < 4 and len(head) < entry_bytes:
        raise NeedMoreBytes(min(entry_bytes, 4096))
    if head[:4] != b"PK\x03\x04":
        raise UnusualEntry("not a zip archive")
    try:
        records = read_front(head, entry_bytes, "data/0")
    except ArchiveError as error:
        raise UnusualEntry(str(error)) from error
    pickle_record = records.get("data.pkl")
    if pickle_record is None:
        raise UnusualEntry("its pickle does not come first")
    data = bytes(head[pickle_record.start : pickle_record.start + pickle_record.size_bytes])
    has_checksums = pickle_record.crc32 != 0
    if has_checksums and crc32(data) != pickle_record.crc32:
        raise CorruptCheckpointError(
            f"reading {what}: the checksum of its header is wrong; it was damaged after saving"
        )
    byte_order = records.get("byteorder")
    if byte_order is not None and head[byte_order.start : byte_order.start + byte_order.size_bytes] != _BYTE_ORDER:
        raise UnusualEntry("saved on a machine of another byte order")
    described = _describe(data)
    payload_offset = records["data/0"].start
    if payload_offset + described.payload_bytes > entry_bytes:
        raise CorruptCheckpointError(f"reading {what}: the entry is shorter than its tensor; it was cut or damaged")
    return described._replace(payload_offset_bytes=payload_offset, has_checksums=has_checksums)


def parse_tensor_tail(header: TensorHeader, tail: bytes) -> int | None:
    """CRC-32 of the payload from the bytes right behind it, or None when the entry has no checksum.

    Args:
        header: The entry's header.
        tail: At least 24 bytes from ``payload_offset_bytes + payload_bytes`` on, or what is left of the entry.
    """
    if header.crc32 is not None:
        return header.crc32
    if not header.has_checksums:
        return None
    if header.payload_bytes == 0:
        return 0
    if tail[:4] != DESCRIPTOR_MARK or len(tail) < 16:
        return None
    size32, size64 = int.from_bytes(tail[8:12], "little"), int.from_bytes(tail[8:16], "little")
    if header.payload_bytes not in (size32, size64):
        return None
    return int.from_bytes(tail[4:8], "little")


_BYTE_ORDER = sys.byteorder.encode("ascii")


class _StorageClass(NamedTuple):
    dtype: torch.dtype | None


class _Storage(NamedTuple):
    dtype: torch.dtype | None
    size_bytes: int


def _refuse(reason: str) -> UnusualEntry:
    return UnusualEntry(reason)


def _load_storage(pid: object) -> _Storage:
    if type(pid) is not tuple or len(pid) != 5 or pid[0] != "storage" or type(pid[1]) is not _StorageClass:
        raise UntrustedDataError("no storage")
    _, kind, name, _, count = pid
    if name != "0" or type(count) is not int or not 0 <= count < 1 << 62:
        raise UntrustedDataError("another storage than the first")
    return _Storage(kind.dtype, count * (1 if kind.dtype is None else kind.dtype.itemsize))


def _rebuild_typed(
    storage: object,
    offset: object,
    sizes: object,
    strides: object,
    requires_grad: object = False,
    _hooks: object = None,
    flags: object = None,
) -> TensorHeader:
    if type(storage) is not _Storage or storage.dtype is None:
        raise UntrustedDataError("a tensor without a typed storage")
    return _rebuild(storage, storage.dtype, offset, sizes, strides, requires_grad, flags)


def _rebuild_untyped(
    storage: object,
    offset: object,
    sizes: object,
    strides: object,
    requires_grad: object,
    _hooks: object,
    dtype: object,
    flags: object = None,
) -> TensorHeader:
    if type(storage) is not _Storage or type(dtype) is not torch.dtype:
        raise UntrustedDataError("a tensor without a storage and a dtype")
    return _rebuild(storage, dtype, offset, sizes, strides, requires_grad, flags)


def _rebuild(
    storage: _Storage,
    dtype: torch.dtype,
    offset: object,
    sizes: object,
    strides: object,
    requires_grad: object,
    flags: object,
) -> TensorHeader:
    shape, steps = _natural(sizes), _natural(strides)
    if type(offset) is not int or offset < 0 or len(shape) != len(steps):
        raise UntrustedDataError("a tensor without sizes and strides")
    bits = flags if flags is not None else {}
    if (
        type(bits) is not dict
        or not set(bits) <= {"conj", "neg"}
        or not all(type(bit) is bool for bit in bits.values())
    ):
        raise UntrustedDataError("a tensor with further state")
    if math.prod(shape):
        last = offset + sum((size - 1) * step for size, step in zip(shape, steps, strict=True))
        if (last + 1) * dtype.itemsize > storage.size_bytes:
            raise UntrustedDataError("a tensor that exceeds its storage")
    return TensorHeader(
        dtype, shape, steps, offset, bits.get("conj", False), bits.get("neg", False), 0, storage.size_bytes, None, True,
        requires_grad is True,
    )  # fmt: skip


def _natural(numbers: object) -> tuple[int, ...]:
    if not isinstance(numbers, tuple) or len(numbers) > 256:
        raise UntrustedDataError("no sizes")
    for number in numbers:
        if type(number) is not int or not 0 <= number < 1 << 62:
            raise UntrustedDataError("no size")
    return tuple(numbers)


def _rebuild_parameter(tensor: object, requires_grad: object = True, _hooks: object = None) -> TensorHeader:
    if type(tensor) is not TensorHeader:
        raise UntrustedDataError("a parameter without a tensor")
    return tensor._replace(requires_grad=requires_grad is True)


_GLOBALS = {
    ("torch._utils", "_rebuild_tensor"): Global(_rebuild_typed, _rebuild_typed),
    ("torch._utils", "_rebuild_tensor_v2"): Global(_rebuild_typed, _rebuild_typed),
    ("torch._utils", "_rebuild_tensor_v3"): Global(_rebuild_untyped, _rebuild_untyped),
    ("torch._utils", "_rebuild_parameter"): Global(_rebuild_parameter, _rebuild_parameter),
    ("torch.storage", "UntypedStorage"): Global(_StorageClass(None)),
} | {("torch", name): Global(_StorageClass(dtype)) for dtype, name in STORAGE_CLASSES.items()}


def _resolve(module: str, name: str) -> Global | None:
    found = _GLOBALS.get((module, name))
    if found is None and (module == "collections" or (module == "torch" and name != "device")):
        found = resolve_value(module, name)
    return found


@functools.lru_cache(maxsize=4096)
def _describe(data: bytes) -> TensorHeader:
    try:
        described = SafeUnpickler(data, what="a tensor", resolve=_resolve, load_persistent=_load_storage).load()
    except (CorruptCheckpointError, UntrustedDataError) as error:
        raise UnusualEntry(str(error)) from error
    if type(described) is not TensorHeader:
        raise UnusualEntry("not a tensor")
    return described
