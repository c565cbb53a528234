"""The bytes around a tensor's payload that make it the file ``torch.save`` would write.

Problem: an entry of a ``.distcp`` file is a zip archive. ``torch.save`` makes one in 61-100 µs per tensor, through a
Python pickler, seven records and a writer that copies the payload; for 20,000 small tensors that is longer than
sending them takes. And the whole has to pass through one stream, while we send parts of the payload from the tensor's
memory.

Way taken: the archive is computed. Everything but the payload is a function of dtype, shape and the payload's CRC,
and its size is a function of dtype and shape alone, so a writer can place entries before it has read a byte. All
records start on 64-byte borders; what follows the pickle depends on its length modulo 64 only, what follows the
payload on the payload's, so the pieces are made once per remainder and then joined.

Layout, with the lengths that vary::

    head     data.pkl, .format_version, .storage_alignment, byteorder, the local header of data/0     multiple of 64
    payload  row-major little-endian elements
    tail     checksum of data/0, version, .data/serialization_id, central directory, end records

The last record holds two 64-bit numbers of 20 digits: a hash of the record names, always the same here, and one of
their checksums. From 4 GiB on, records get the zip64 fields, exactly where torch's writer puts them. The result
equals that of torch 2.9 to 2.14 byte for byte (tests/peers), but for one corner: torch's writer takes a payload that
itself begins with the mark of a record's end (``PK``, 7, 8) for one and mixes it into the second number, which
nothing reads.
"""

from __future__ import annotations

import functools
import math
import struct
import sys
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from dcpfs.format.archive import (
    ALIGNMENT,
    CENTRAL_HEADER_BYTES,
    DESCRIPTOR,
    DESCRIPTOR_MARK,
    LIMIT32,
    central_header,
    data_descriptor,
    end_records,
    local_header,
)
from dcpfs.format.checksum import crc32
from dcpfs.format.tensor_pickle import encode_tensor_pickle

__all__ = ["Frame", "FrameSizes", "encode_tensor_frame", "payload_size_bytes", "tensor_frame_sizes"]

_MASK64 = 0xFFFFFFFFFFFFFFFF

_PICKLE_NAME = b"archive/data.pkl"
_PAYLOAD_NAME = b"archive/data/0"
_VERSION_NAME = b"archive/version"
_ID_NAME = b"archive/.data/serialization_id"
_SMALL_RECORDS = (
    (b"archive/.format_version", b"1"),
    (b"archive/.storage_alignment", b"64"),
    (b"archive/byteorder", sys.byteorder.encode("ascii")),
)
_VERSION = b"3\n"
_VERSION_CRC = crc32(_VERSION)
_ID_SIZE_BYTES = 40
_NAMES_HASH = b"15728199511854643026"
_NAMES_HASH_CRC = crc32(_NAMES_HASH)


class FrameSizes(NamedTuple):
    """Lengths of an entry's three pieces. The payload starts at ``head_bytes``."""

    head_bytes: int
    payload_bytes: int
    tail_bytes: int

    @property
    def entry_bytes(self) -> int:
        """Length of the whole entry."""
        return self.head_bytes + self.payload_bytes + self.tail_bytes


class Frame(NamedTuple):
    """What stands before and after the payload of an entry."""

    head: bytes
    tail: bytes


def payload_size_bytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Length of the row-major elements of a tensor."""
    return math.prod(shape) * dtype.itemsize


def tensor_frame_sizes(dtype: torch.dtype, shape: Sequence[int], requires_grad: bool = False) -> FrameSizes:
    """Lengths of the entry of a row-major tensor. Known before its values are.

    Raises:
        UnsupportedValueError: ``torch.save`` can't store that dtype.
    """
    return _frame_sizes(dtype, tuple(shape), requires_grad)


@functools.lru_cache(maxsize=8192)
def _frame_sizes(dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> FrameSizes:
    elements = math.prod(shape)
    return _sizes(len(encode_tensor_pickle(dtype, shape, elements, requires_grad)), elements * dtype.itemsize)


def encode_tensor_frame(dtype: torch.dtype, shape: Sequence[int], crc32: int, requires_grad: bool = False) -> Frame:
    """Head and tail of the entry of a row-major tensor whose payload has that CRC-32. Thread-safe.

    Raises:
        UnsupportedValueError: ``torch.save`` can't store that dtype.
    """
    template = _template(dtype, tuple(shape), requires_grad)
    if template.tail:
        return Frame(template.head, _fill_tail(template, crc32))
    encode_tail = _encode_tail if _is_small(len(template.head) + template.payload_bytes) else _encode_large_tail
    return Frame(template.head, encode_tail(template, crc32))


class _Template(NamedTuple):
    """What a frame has in common for all values of one dtype and shape.

    Attributes:
        head: The head itself.
        payload_bytes: Length of the payload.
        pickle_crc: CRC-32 of data.pkl.
        pickle_bytes: Length of data.pkl.
        offsets: Where the records behind data.pkl start, that of the payload last.
        crcs_hash: torch's running hash of the checksums before the payload's.
        tail: What the tail has between the numbers that follow from the payload's checksum; empty where it has no
            such numbers, or wide ones.
    """

    head: bytes
    payload_bytes: int
    pickle_crc: int
    pickle_bytes: int
    offsets: tuple[int, ...]
    crcs_hash: int
    tail: tuple[bytes, ...] = ()


@functools.lru_cache(maxsize=8192)
def _template(dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> _Template:
    elements = math.prod(shape)
    payload_bytes = elements * dtype.itemsize
    data = encode_tensor_pickle(dtype, shape, elements, requires_grad)
    pickle_bytes = len(data)
    pickle_crc = crc32(data)
    remainder = pickle_bytes % ALIGNMENT
    small_records, offsets, header, empty_header = _small_records(remainder)
    if not payload_bytes:
        header = empty_header
    elif payload_bytes >= LIMIT32:
        header = local_header(_PAYLOAD_NAME, offsets[-1], payload_bytes)
    shift = pickle_bytes - remainder
    first, second, third, payload = offsets
    crcs_hash = _hash_combine(0, pickle_crc)
    for crc in _SMALL_CRCS:
        crcs_hash = _hash_combine(crcs_hash, crc)
    descriptor = DESCRIPTOR.pack(DESCRIPTOR_MARK, pickle_crc, pickle_bytes, pickle_bytes)
    template = _Template(
        b"".join((_PICKLE_HEADER, data, descriptor, small_records, header)),
        payload_bytes,
        pickle_crc,
        pickle_bytes,
        (first + shift, second + shift, third + shift, payload + shift),
        crcs_hash,
    )
    if payload_bytes and _is_small(len(template.head) + payload_bytes):
        return template._replace(tail=_cut_tail(_encode_tail(template, 0)))
    return template


def _sizes(pickle_bytes: int, payload_bytes: int) -> FrameSizes:
    remainder = pickle_bytes % ALIGNMENT
    _, offsets, header, _ = _small_records(remainder)
    payload_offset = offsets[-1] + pickle_bytes - remainder
    if payload_bytes >= LIMIT32:
        header = local_header(_PAYLOAD_NAME, payload_offset, payload_bytes)
    head_bytes = payload_offset + len(header)
    if _is_small(head_bytes + payload_bytes):
        return FrameSizes(head_bytes, payload_bytes, _small_tail_size(payload_bytes % ALIGNMENT, payload_bytes > 0))
    template = _Template(bytes(head_bytes), payload_bytes, 0, 0, (0, 0, 0, payload_offset), 0)
    return FrameSizes(head_bytes, payload_bytes, len(_encode_large_tail(template, 0)))


@functools.lru_cache(maxsize=2 * ALIGNMENT)
def _small_tail_size(remainder: int, filled: bool) -> int:
    payload_bytes = remainder + ALIGNMENT if filled else 0
    return len(_encode_large_tail(_Template(b"", payload_bytes, 0, 0, (0, 0, 0, 0), 0), 0))


def _is_small(payload_end: int) -> bool:
    """No offset or size in the entry needs more than 32 bits: what follows the payload is shorter than 4 KiB."""
    return payload_end + 4096 < LIMIT32


_PICKLE_HEADER = local_header(_PICKLE_NAME, 0, 1)
_SMALL_CRCS = tuple(crc32(data) for _, data in _SMALL_RECORDS)


@functools.lru_cache(maxsize=ALIGNMENT)
def _small_records(remainder: int) -> tuple[bytes, tuple[int, int, int, int], bytes, bytes]:
    """What stands behind a pickle whose length has that remainder.

    Returns:
        The small records; where each of them and the payload's record start; the local header of a payload, and of an
        empty one.
    """
    cursor = len(_PICKLE_HEADER) + remainder + DESCRIPTOR.size
    pieces = []
    offsets = []
    for (name, data), crc in zip(_SMALL_RECORDS, _SMALL_CRCS, strict=True):
        offsets.append(cursor)
        piece = local_header(name, cursor, len(data)) + data + data_descriptor(crc, len(data), cursor)
        pieces.append(piece)
        cursor += len(piece)
    first, second, third = offsets
    header, empty_header = (local_header(_PAYLOAD_NAME, cursor, size_bytes) for size_bytes in (1, 0))
    return b"".join(pieces), (first, second, third, cursor), header, empty_header


def _table(make: Callable[[int], bytes]) -> tuple[bytes, ...]:
    return tuple(make(remainder) for remainder in range(ALIGNMENT))


_VERSION_RECORDS = _table(
    lambda cursor: local_header(_VERSION_NAME, cursor, 2) + _VERSION + data_descriptor(_VERSION_CRC, 2, cursor)
)
_ID_HEADERS = _table(lambda cursor: local_header(_ID_NAME, cursor, _ID_SIZE_BYTES))


def _hash_combine(seed: int, value: int) -> int:
    return seed ^ ((value + 0x9E3779B9 + (seed << 6) + (seed >> 2)) & _MASK64)


def _serialization_id(template: _Template, crc: int) -> bytes:
    # An empty record leaves no trace in the hash of checksums.
    state = _hash_combine(template.crcs_hash, crc) if template.payload_bytes else template.crcs_hash
    return b"%s%020d" % (_NAMES_HASH, _hash_combine(state, _VERSION_CRC))


def _cut_tail(tail: bytes) -> tuple[bytes, ...]:
    """The tail of a small filled record without its numbers: checksum, hash, its checksum, and both checksums again."""
    identity = tail.index(_NAMES_HASH)
    directory = identity + _ID_SIZE_BYTES + DESCRIPTOR.size
    before_payload = sum(CENTRAL_HEADER_BYTES + len(name) for name in _NAMES[:4])
    before_identity = sum(CENTRAL_HEADER_BYTES + len(name) for name in _NAMES[:-1])
    numbers = (
        (4, 4),
        (identity + len(_NAMES_HASH), _ID_SIZE_BYTES - len(_NAMES_HASH)),
        (identity + _ID_SIZE_BYTES + 4, 4),
        (directory + before_payload + 16, 4),
        (directory + before_identity + 16, 4),
    )
    pieces = []
    start = 0
    for position, length_bytes in numbers:
        pieces.append(tail[start:position])
        start = position + length_bytes
    return (*pieces, tail[start:])


def _fill_tail(template: _Template, crc: int) -> bytes:
    """What `_encode_tail` makes, from ready pieces: for thousands of small tensors its time counts."""
    first, second, third, fourth, fifth, last = template.tail
    state = template.crcs_hash
    state ^= (crc + 0x9E3779B9 + (state << 6) + (state >> 2)) & _MASK64
    state ^= (_VERSION_CRC + 0x9E3779B9 + (state << 6) + (state >> 2)) & _MASK64
    digits = b"%020d" % state
    identity_crc = zlib.crc32(digits, _NAMES_HASH_CRC).to_bytes(4, "little")
    payload_crc = crc.to_bytes(4, "little")
    return b"".join(
        (first, payload_crc, second, digits, third, identity_crc, fourth, payload_crc, fifth, identity_crc, last)
    )


_NAMES = (_PICKLE_NAME, *(name for name, _ in _SMALL_RECORDS), _PAYLOAD_NAME, _VERSION_NAME, _ID_NAME)
_DIRECTORY_BYTES = sum(CENTRAL_HEADER_BYTES + len(name) for name in _NAMES)


def _encode_tail(template: _Template, crc: int) -> bytes:
    """The tail where no number exceeds 32 bits: ready pieces, and one pack for the directory and the end records."""
    head_bytes, payload_bytes = len(template.head), template.payload_bytes
    version_offset = head_bytes + payload_bytes
    if payload_bytes:
        descriptor = DESCRIPTOR.pack(DESCRIPTOR_MARK, crc, payload_bytes, payload_bytes)
        version_offset += DESCRIPTOR.size
        payload_mark = _PAYLOAD_MARK
    else:
        descriptor = b""
        crc = 0
        payload_mark = _EMPTY_PAYLOAD_MARK
    version = _VERSION_RECORDS[version_offset % ALIGNMENT]
    id_offset = version_offset + len(version)
    id_header = _ID_HEADERS[id_offset % ALIGNMENT]
    identity = _serialization_id(template, crc)
    identity_crc = crc32(identity)
    directory_offset = id_offset + len(id_header) + _ID_SIZE_BYTES + DESCRIPTOR.size
    first, second, third, payload_offset = template.offsets
    pieces = _SMALL_PIECES
    directory = _SMALL_DIRECTORY.pack(
        pieces[0],
        template.pickle_crc,
        template.pickle_bytes,
        template.pickle_bytes,
        pieces[1],
        first,
        pieces[2],
        second,
        pieces[3],
        third,
        payload_mark,
        crc,
        payload_bytes,
        payload_bytes,
        pieces[5],
        payload_offset,
        pieces[6],
        version_offset,
        pieces[7],
        identity_crc,
        pieces[8],
        id_offset,
        pieces[9],
        directory_offset,
        pieces[10],
        directory_offset + _DIRECTORY_BYTES,
        pieces[11],
        directory_offset,
        pieces[12],
    )
    return b"".join(
        (
            descriptor,
            version,
            id_header,
            identity,
            DESCRIPTOR.pack(DESCRIPTOR_MARK, identity_crc, _ID_SIZE_BYTES, _ID_SIZE_BYTES),
            directory,
        )
    )


def _encode_large_tail(template: _Template, crc: int) -> bytes:
    """The tail by the rules, whatever the sizes."""
    head_bytes, payload_bytes = len(template.head), template.payload_bytes
    *small_offsets, payload_offset = template.offsets
    crc = crc if payload_bytes else 0
    descriptor = data_descriptor(crc, payload_bytes, payload_offset) if payload_bytes else b""
    version_offset = head_bytes + payload_bytes + len(descriptor)
    version = (
        local_header(_VERSION_NAME, version_offset, 2) + _VERSION + data_descriptor(_VERSION_CRC, 2, version_offset)
    )
    id_offset = version_offset + len(version)
    identity = _serialization_id(template, crc)
    identity_crc = crc32(identity)
    identity_record = (
        local_header(_ID_NAME, id_offset, _ID_SIZE_BYTES)
        + identity
        + data_descriptor(identity_crc, _ID_SIZE_BYTES, id_offset)
    )
    directory_offset = id_offset + len(identity_record)
    directory = b"".join(
        (
            central_header(_PICKLE_NAME, template.pickle_crc, template.pickle_bytes, 0),
            *(
                central_header(name, small_crc, len(data), offset)
                for (name, data), small_crc, offset in zip(_SMALL_RECORDS, _SMALL_CRCS, small_offsets, strict=True)
            ),
            central_header(_PAYLOAD_NAME, crc, payload_bytes, payload_offset),
            central_header(_VERSION_NAME, _VERSION_CRC, 2, version_offset),
            central_header(_ID_NAME, identity_crc, _ID_SIZE_BYTES, id_offset),
        )
    )
    return b"".join(
        (descriptor, version, identity_record, directory, end_records(directory_offset, len(directory), len(_NAMES)))
    )


def _small_pieces() -> tuple[tuple[bytes, ...], bytes, struct.Struct]:
    """The constants of directory and end records between the numbers that vary, and the struct that joins all.

    A directory header is: 16 bytes, CRC, size, size, 14 bytes, offset, name.
    """
    pickle_header = central_header(_PICKLE_NAME, 0, 1, 0)
    small = [
        central_header(name, crc, len(data), 0) for (name, data), crc in zip(_SMALL_RECORDS, _SMALL_CRCS, strict=True)
    ]
    payload = central_header(_PAYLOAD_NAME, 0, 1, 0)
    version = central_header(_VERSION_NAME, _VERSION_CRC, len(_VERSION), 0)
    identity = central_header(_ID_NAME, 0, _ID_SIZE_BYTES, 0)
    end = end_records(0, _DIRECTORY_BYTES, len(_NAMES))
    pieces = (
        pickle_header[:16],
        pickle_header[28:] + small[0][:42],
        small[0][46:] + small[1][:42],
        small[1][46:] + small[2][:42],
        small[2][46:] + payload[:16],
        payload[28:42],
        payload[46:] + version[:42],
        version[46:] + identity[:16],
        identity[20:42],
        identity[46:] + end[:48],
        end[56:64],
        end[72:92],
        end[96:],
    )
    empty_mark = small[2][46:] + central_header(_PAYLOAD_NAME, 0, 0, 0)[:16]
    numbers = ("III", "I", "I", "I", "III", "I", "I", "I", "I", "Q", "Q", "I", "")
    layout = "<" + "".join(f"{len(piece)}s{number}" for piece, number in zip(pieces, numbers, strict=True))
    return pieces, empty_mark, struct.Struct(layout)


_SMALL_PIECES, _EMPTY_PAYLOAD_MARK, _SMALL_DIRECTORY = _small_pieces()
_PAYLOAD_MARK = _SMALL_PIECES[4]
