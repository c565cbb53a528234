"""Entries of other writers: where their payload is, and how it lies there.

Problem: an entry that torch wrote says in its own header alone where its payload starts, in what strides it lies (a
transpose keeps stride (1, n) while ``.metadata`` says contiguous) and whether it is conjugated. Decoding each with
``torch.load`` costs 128 µs and a copy of everything, also of what a slice does not need.

Way taken: the header is parsed (`dcpfs.format.headers`). Where the payload is dense, its dimensions sorted by stride
make it row-major, so the same plan that serves dcpfs's own entries reads just the bytes of a slice, into the target
seen with its dimensions in that order. What is not dense is read whole; what is no plain tensor is decoded by torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from dcpfs.dcp.host_memory import tensor_bytes
from dcpfs.dcp.landing import LandingContext, TensorWant, copy_exact, flat_elements, is_plain_memory
from dcpfs.dcp.read_plan import row_major_strides
from dcpfs.errors import CorruptCheckpointError
from dcpfs.format.checksum import crc32
from dcpfs.format.headers import (
    NeedMoreBytes,
    TensorHeader,
    UnusualEntry,
    parse_tensor_header,
    parse_tensor_tail,
)

__all__ = [
    "DensePayload",
    "check_header",
    "decode_entry",
    "dense_payload",
    "expected_checksum",
    "header_size_bytes",
    "parse_header",
]

_HEADER_BYTES = 4096
"""What is read of an entry to find its payload: torch's own headers take about 1 KiB."""
_TAIL_BYTES = 24


class DensePayload(NamedTuple):
    """A payload that is row-major once its dimensions are in the right order.

    Attributes:
        start_bytes: Where the tensor's elements start in the entry.
        axes: Dimensions of the tensor in the order in which they are row-major.
        conjugate: The stored values are the conjugates of the real ones.
        checked_bytes: Length of what the entry's checksum covers, when that is just these elements; else 0.
    """

    start_bytes: int
    axes: tuple[int, ...]
    conjugate: bool
    checked_bytes: int

    def reorder(self, want: TensorWant) -> TensorWant:
        """The same want with its dimensions in the order of the payload."""
        axes = self.axes
        if axes == tuple(range(len(axes))):
            return want
        return want._replace(
            sizes=tuple(want.sizes[axis] for axis in axes),
            offsets=tuple(want.offsets[axis] for axis in axes),
            lengths=tuple(want.lengths[axis] for axis in axes),
            target=want.target.permute(axes),
        )


def dense_payload(header: TensorHeader) -> DensePayload | None:
    """How a tensor lies in its entry, or None when there are gaps, repeats or signs to undo."""
    shape, strides = header.shape, header.strides
    if header.neg:
        return None
    axes = tuple(sorted(range(len(shape)), key=lambda axis: (-strides[axis] if shape[axis] > 1 else 0, axis)))
    sizes = [shape[axis] for axis in axes]
    expected = row_major_strides(sizes)
    if any(size > 1 and strides[axis] != step for axis, size, step in zip(axes, sizes, expected, strict=True)):
        return None
    elements = torch.Size(shape).numel()
    whole = header.storage_offset == 0 and header.payload_bytes == elements * header.dtype.itemsize
    start = header.payload_offset_bytes + header.storage_offset * header.dtype.itemsize
    return DensePayload(start, axes, header.conj, header.payload_bytes if whole and header.has_checksums else 0)


def header_size_bytes(entry_bytes: int) -> int:
    """How many first bytes of an entry are read to find its payload."""
    return min(_HEADER_BYTES, entry_bytes)


def parse_header(head: bytes, want: TensorWant, context: LandingContext) -> TensorHeader | int | None:
    """The header of an entry from its first bytes, or how many bytes it takes, or None: it has to be decoded whole.

    Raises:
        CorruptCheckpointError: The header is damaged or contradicts itself.
    """
    location = want.location
    what = f"key {want.key!r} in file {location.file!r} of {context.url}"
    try:
        return parse_tensor_header(head, location.length_bytes, what=what)
    except NeedMoreBytes as more:
        return more.size_bytes
    except UnusualEntry:
        return None
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(error.message, file=location.file, key=want.key) from error


def expected_checksum(header: TensorHeader, tail: bytes, want: TensorWant, context: LandingContext) -> int | None:
    """The CRC-32 of the payload from what stands behind it, or None when the writer computed none.

    Raises:
        CorruptCheckpointError: It should be there and is not.
    """
    expected = parse_tensor_tail(header, tail)
    if expected is None and header.has_checksums:
        raise context.corrupt(want.key, want.location.file, "the checksum is not where it belongs")
    return expected


def check_header(header: TensorHeader, want: TensorWant, context: LandingContext) -> None:
    """Raise when an entry holds another tensor than the metadata says."""
    if header.dtype is not want.dtype or header.shape != want.sizes:
        raise context.corrupt(
            want.key,
            want.location.file,
            f"there is a {header.dtype} of shape {header.shape} instead of the {want.dtype} of shape {want.sizes} that "
            f"the metadata lists",
        )


def decode_entry(
    source: memoryview,
    wants: list[TensorWant],
    context: LandingContext,
    decode: Callable[[memoryview, TensorWant], torch.Tensor],
) -> None:
    """Fill the targets of all wants of one entry from its bytes.

    Args:
        source: The whole entry.
        wants: What is wanted of it.
        context: The load.
        decode: Decodes what only torch can.
    """
    first = wants[0]
    header = None
    if not first.location.transforms:
        parsed = parse_header(bytes(source[:_HEADER_BYTES]), first, context)
        while isinstance(parsed, int):
            parsed = parse_header(bytes(source[:parsed]), first, context)
        header = parsed
    if header is None:
        tensor = decode(source, first)
        if tensor.dtype is not first.dtype or tuple(tensor.shape) != first.sizes:
            raise context.corrupt(first.key, first.location.file, "there is another tensor than the metadata lists")
    else:
        check_header(header, first, context)
        end = header.payload_offset_bytes + header.payload_bytes
        payload = source[header.payload_offset_bytes : end]
        if context.verify:
            expected = expected_checksum(header, bytes(source[end : end + _TAIL_BYTES]), first, context)
            if expected is not None and crc32(payload) != expected:
                raise context.corrupt(first.key, first.location.file, "the checksum does not match")
        if header.is_row_major:
            wants = [want for want in wants if not _copy_plain(payload, want)]
        if not wants or not header.payload_bytes:
            return
        flat = flat_elements(payload, header.dtype)
        tensor = flat.as_strided(header.shape, header.strides, header.storage_offset)
        if header.conj:
            tensor = tensor.conj()
        if header.neg:
            tensor = torch._neg_view(tensor)
    for want in wants:
        box = tuple(slice(o, o + n) for o, n in zip(want.offsets, want.lengths, strict=True))
        copy_exact(want.target, tensor[box])


def _copy_plain(payload: memoryview, want: TensorWant) -> bool:
    if not want.whole or not is_plain_memory(want.target, want.dtype):
        return False
    tensor_bytes(want.target)[:] = payload
    return True
