"""The pickle of one tensor, written without pickling it.

Problem: ``torch.save`` runs a Python pickler for every tensor, a third of the time that an entry takes, to produce
the same opcodes with other numbers each time.

Way taken: the opcodes as constants per dtype, and the numbers between them: protocol 2, every object memoised where
torch's pickler memoises it, so the bytes are the same. Twelve dtypes have a storage class of their own; all others
are pickled as untyped bytes and a dtype.
"""

from __future__ import annotations

import functools
import io

import torch

from dcpfs.errors import UnsupportedValueError

__all__ = ["STORAGE_CLASSES", "encode_tensor_pickle", "row_major_strides"]

STORAGE_CLASSES = {
    torch.float64: "DoubleStorage",
    torch.float32: "FloatStorage",
    torch.float16: "HalfStorage",
    torch.bfloat16: "BFloat16Storage",
    torch.int64: "LongStorage",
    torch.int32: "IntStorage",
    torch.int16: "ShortStorage",
    torch.int8: "CharStorage",
    torch.uint8: "ByteStorage",
    torch.bool: "BoolStorage",
    torch.complex128: "ComplexDoubleStorage",
    torch.complex64: "ComplexFloatStorage",
}
"""Dtypes that torch pickles through a storage class of their own; all others are untyped bytes and a dtype."""


def encode_tensor_pickle(dtype: torch.dtype, shape: tuple[int, ...], elements: int, requires_grad: bool) -> bytes:
    """What torch's pickler writes for a row-major tensor: protocol 2, every object memoised where it does."""
    prefix, counted_bytes, suffix = _pickle_pieces(dtype)
    sizes = _encode_ints(shape)
    if shape:
        sizes = b"%sq\x06%sq\x07" % (sizes, _encode_ints(row_major_strides(shape)))
        memo = 8
    else:
        sizes = b"))"
        memo = 6
    flag = b"\x88" if requires_grad else b"\x89"
    return b"%s%stq\x05QK\x00%s%s%s" % (prefix, _encode_int(elements * counted_bytes), sizes, flag, suffix[memo])


@functools.lru_cache(maxsize=128)
def _pickle_pieces(dtype: torch.dtype) -> tuple[bytes, int, dict[int, bytes]]:
    """What a dtype puts before the numbers, the bytes its storage counts in, and what it puts behind, by next memo."""
    storage = STORAGE_CLASSES.get(dtype)
    if storage is None:
        _check_storable(dtype)
    suffixes = {}
    for memo in (6, 8):
        after = memo + 2
        suffix = b"ccollections\nOrderedDict\nq%c)Rq%c" % (memo, memo + 1)
        if storage is None:
            suffix += b"ctorch\n%s\nq%c" % (str(dtype).removeprefix("torch.").encode("ascii"), after)
            after += 1
        suffixes[memo] = suffix + b"tq%cRq%c." % (after, after + 1)
    if storage is None:
        return _PREFIX_UNTYPED, dtype.itemsize, suffixes
    return _PREFIX_TYPED % storage.encode("ascii"), 1, suffixes


_UNTYPED = ("float8_", "float4_", "bits", "complex32", "uint16", "uint32", "uint64")
"""Names of dtypes that torch.save is known to store untyped; of others it is asked once, which can make it warn."""

_PREFIX_TYPED = (
    b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nq\x00((X\x07\x00\x00\x00storageq\x01ctorch\n%s\nq\x02"
    b"X\x01\x00\x00\x000q\x03X\x03\x00\x00\x00cpuq\x04"
)
_PREFIX_UNTYPED = (
    b"\x80\x02ctorch._utils\n_rebuild_tensor_v3\nq\x00((X\x07\x00\x00\x00storageq\x01"
    b"ctorch.storage\nUntypedStorage\nq\x02X\x01\x00\x00\x000q\x03X\x03\x00\x00\x00cpuq\x04"
)


_SMALL_INTS = tuple(b"K%c" % value for value in range(256))


def _encode_int(value: int) -> bytes:
    if value < 0x100:
        return _SMALL_INTS[value]
    if value < 0x10000:
        return b"M" + value.to_bytes(2, "little")
    if value < 0x80000000:
        return b"J" + value.to_bytes(4, "little")
    size_bytes = (value.bit_length() >> 3) + 1
    return b"\x8a%c" % size_bytes + value.to_bytes(size_bytes, "little")


def _encode_ints(values: tuple[int, ...]) -> bytes:
    items = b"".join(map(_encode_int, values))
    if not values:
        return b")"
    if len(values) <= 3:
        return b"%s%c" % (items, 0x84 + len(values))
    return b"(%st" % items


def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a row-major tensor in elements, as torch counts them where a size is 0."""
    strides = []
    stride = 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= max(size, 1)
    return tuple(reversed(strides))


def _check_storable(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    if name.startswith(_UNTYPED):
        return
    if name.startswith("q"):
        raise UnsupportedValueError(f"framing a tensor of {dtype}: it is quantized and has scales beside its values")
    try:
        torch.save(torch.empty((0,), dtype=dtype, device="cpu"), io.BytesIO())
    except Exception as error:
        # torch raises several kinds: KeyError for sub-byte integers, RuntimeError for quantized ones
        raise UnsupportedValueError(
            f"framing a tensor of {dtype}: torch.save can't store it ({type(error).__name__}); convert it first"
        ) from error
