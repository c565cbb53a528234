"""The zip archive as torch writes it: stored records, 64-byte alignment, checksums behind the data.

Problem: `zipfile` writes through a stream and reads with seeks, and checks checksums that torch may have been told
not to compute. We need single headers as bytes, and to find a payload from the first few kilobytes of an entry.

Way taken: headers are functions of name, position and size. Reading goes either by the directory at the end, when the
whole archive is there, or from the front: torch leaves the sizes in local headers at 0 and repeats them in a
descriptor behind the data, so the end of a small record is the first descriptor that confirms the distance it stands
at.
"""

from __future__ import annotations

import itertools
import struct
from typing import NamedTuple

__all__ = [
    "ALIGNMENT",
    "CENTRAL_HEADER_BYTES",
    "DESCRIPTOR",
    "DESCRIPTOR_MARK",
    "LIMIT32",
    "ArchiveError",
    "NeedMoreBytes",
    "Record",
    "central_header",
    "data_descriptor",
    "end_records",
    "local_header",
    "read_directory",
    "read_front",
]

ALIGNMENT = 64
LIMIT32 = 0xFFFFFFFF
_LOCAL = struct.Struct("<IHHHHHIIIHH")
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")
CENTRAL_HEADER_BYTES = _CENTRAL.size
DESCRIPTOR = struct.Struct("<4sIII")
_DESCRIPTOR64 = struct.Struct("<4sIQQ")
_END64 = struct.Struct("<4sQHHIIQQQQ4sIQI4sHHHHIIH")
_END64_RECORD_SIZE = 44

DESCRIPTOR_MARK = b"PK\x07\x08"
_UTF8 = 0x0800
_HAS_DESCRIPTOR = 0x0008


def local_header(name: bytes, cursor: int, size_bytes: int) -> bytes:
    """Local header of a record that starts at ``cursor``, padded so that its data starts on a 64-byte border."""
    # The packed size is not known yet when torch writes this header, and stays 0.
    zip64 = _zip64_field(size_bytes, 0, cursor)
    start = cursor + _LOCAL.size + len(name) + len(zip64) + 4
    padding = -start % ALIGNMENT
    flags = _UTF8 | _HAS_DESCRIPTOR if size_bytes else _UTF8
    extra_bytes = len(zip64) + 4 + padding
    return b"".join(
        (
            _LOCAL.pack(0x04034B50, 0, flags, 0, 0, 0, 0, 0, 0, len(name), extra_bytes),
            name,
            zip64,
            b"FB",
            padding.to_bytes(2, "little"),
            b"Z" * padding,
        )
    )


def _zip64_field(size_bytes: int, packed_bytes: int, offset: int) -> bytes:
    fields = b""
    if size_bytes >= LIMIT32:
        fields = struct.pack("<QQ", size_bytes, packed_bytes)
    if offset >= LIMIT32:
        fields += struct.pack("<Q", offset)
    return struct.pack("<HH", 1, len(fields)) + fields if fields else b""


def data_descriptor(crc: int, size_bytes: int, offset: int) -> bytes:
    """What torch writes behind the data of a record that starts at ``offset``."""
    if size_bytes >= LIMIT32 or offset >= LIMIT32:
        return _DESCRIPTOR64.pack(DESCRIPTOR_MARK, crc, size_bytes, size_bytes)
    return DESCRIPTOR.pack(DESCRIPTOR_MARK, crc, size_bytes, size_bytes)


def central_header(name: bytes, crc: int, size_bytes: int, offset: int) -> bytes:
    """The directory's line for a record that starts at ``offset``."""
    zip64 = _zip64_field(size_bytes, size_bytes, offset)
    flags = _UTF8 | _HAS_DESCRIPTOR if size_bytes else _UTF8
    size32 = min(size_bytes, LIMIT32)
    return (
        _CENTRAL.pack(
            0x02014B50,
            0,
            0,
            flags,
            0,
            0,
            0,
            crc,
            size32,
            size32,
            len(name),
            len(zip64),
            0,
            0,
            0,
            0,
            min(offset, LIMIT32),
        )
        + name
        + zip64
    )


def end_records(directory_offset: int, directory_bytes: int, count: int) -> bytes:
    """What stands behind a directory of ``count`` lines: torch always writes the zip64 records too."""
    return _END64.pack(
        b"PK\x06\x06",
        _END64_RECORD_SIZE,
        0x031E,
        45,
        0,
        0,
        count,
        count,
        directory_bytes,
        directory_offset,
        b"PK\x06\x07",
        0,
        directory_offset + directory_bytes,
        1,
        b"PK\x05\x06",
        0,
        0,
        count,
        count,
        directory_bytes,
        min(directory_offset, LIMIT32),
        0,
    )


class ArchiveError(Exception):
    """The bytes are no archive of stored records. Internal: callers turn it into an error with file and key."""


class NeedMoreBytes(Exception):  # noqa: N818 - a signal to the caller, not an error
    """The first bytes of an entry don't suffice.

    Attributes:
        size_bytes: How many bytes from the entry's start to bring next.
    """

    def __init__(self, size_bytes: int) -> None:
        super().__init__(f"{size_bytes} bytes needed")
        self.size_bytes = size_bytes


class Record(NamedTuple):
    """One record of an archive.

    Attributes:
        start: Where its data starts, relative to the archive.
        size_bytes: Length of its data; -1: not known from the front, or the data is compressed or encrypted.
        crc32: CRC-32 of its data as the archive states it; -1 likewise.
    """

    start: int
    size_bytes: int
    crc32: int


_LOCAL_MARK = b"PK\x03\x04"
_CENTRAL_MARK = b"PK\x01\x02"
_END_MARK = b"PK\x05\x06"
_LOCATOR = struct.Struct("<4sIQI")
_END64_HEAD = struct.Struct("<4sQHHIIQQQQ")
_END = struct.Struct("<4sHHHHIIH")
_MOST_RECORDS = 1 << 20


def read_directory(archive: memoryview) -> dict[str, Record]:
    """All records of a whole archive by name, from its directory.

    Raises:
        ArchiveError: There is no directory, or it doesn't fit the bytes.
    """
    total = len(archive)
    try:
        position, count = _find_directory(archive)
        records: dict[str, Record] = {}
        places: list[tuple[int, int]] = []
        for _ in range(count):
            header = _CENTRAL.unpack_from(archive, position)
            flags, method, crc, packed, size_bytes, name_bytes, extra_bytes, comment_bytes = (
                header[3], header[4], header[7], header[8], header[9], header[10], header[11], header[12],
            )  # fmt: skip
            offset = header[16]
            name_start = position + _CENTRAL.size
            extra_start = name_start + name_bytes
            position = extra_start + extra_bytes + comment_bytes
            if header[0] != 0x02014B50 or position > total:
                raise ArchiveError("its directory is damaged")
            stored = method == 0 and not flags & 1
            size_bytes, packed, offset = _apply_zip64(
                archive[extra_start : extra_start + extra_bytes], size_bytes, packed, offset
            )
            local = _LOCAL.unpack_from(archive, offset)
            start = offset + _LOCAL.size + local[9] + local[10]
            if local[0] != 0x04034B50 or start + packed > total or (stored and packed != size_bytes):
                raise ArchiveError("its directory does not fit its records")
            name = bytes(archive[name_start:extra_start]).decode("utf-8", "replace")
            if name in records:
                raise ArchiveError("it has two records of one name")
            records[name] = Record(start, size_bytes, crc) if stored else Record(start, -1, -1)
            places.append((offset, start + packed))
        places.sort()
        # A directory of many lines for the same bytes makes a small archive a large one.
        if any(stop > following for (_, stop), (following, _) in itertools.pairwise(places)):
            raise ArchiveError("its records overlap")
    except (struct.error, OverflowError) as error:
        raise ArchiveError("it is cut short") from error
    return records


def _find_directory(archive: memoryview) -> tuple[int, int]:
    tail_start = max(0, len(archive) - _END.size - 0xFFFF)
    tail = bytes(archive[tail_start:])
    end = tail.rfind(_END_MARK)
    if end < 0:
        raise ArchiveError("it has no directory at its end")
    _, _, _, _, count, _, position, _ = _END.unpack_from(tail, end)
    locator = tail_start + end - _LOCATOR.size
    if locator >= 0 and bytes(archive[locator : locator + 4]) == b"PK\x06\x07":
        end64 = _LOCATOR.unpack_from(archive, locator)[2]
        fields = _END64_HEAD.unpack_from(archive, end64)
        if fields[0] != b"PK\x06\x06":
            raise ArchiveError("its end record is damaged")
        count, position = fields[7], fields[9]
    if count > _MOST_RECORDS or position >= len(archive):
        raise ArchiveError("its end record is damaged")
    return position, count


def _apply_zip64(extra: memoryview, size_bytes: int, packed: int, offset: int) -> tuple[int, int, int]:
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, position)
        position += 4
        if kind == 1:
            numbers = [value for (value,) in struct.iter_unpack("<Q", extra[position : position + (length & ~7)])]
            if size_bytes == LIMIT32 and numbers:
                size_bytes = numbers.pop(0)
            if packed == LIMIT32 and numbers:
                packed = numbers.pop(0)
            if offset == LIMIT32 and numbers:
                offset = numbers.pop(0)
            break
        position += length
    return size_bytes, packed, offset


def read_front(head: bytes, entry_bytes: int, last: str) -> dict[str, Record]:
    """Records from the front of an archive up to and including the header of the one named ``last``.

    Args:
        head: The first bytes of the archive.
        entry_bytes: Length of the whole archive.
        last: Name of the record to stop at, without the archive's own prefix.

    Returns:
        The records by name without prefix.

    Raises:
        NeedMoreBytes: The head ends before that record's header does.
        ArchiveError: The archive can't be read from the front.
    """
    records: dict[str, Record] = {}
    position = 0
    while True:
        if position + _LOCAL.size > len(head):
            raise _more(head, entry_bytes)
        fields = _LOCAL.unpack_from(head, position)
        if fields[0] != 0x04034B50:
            raise ArchiveError("a record does not follow the one before")
        flags, method, crc, packed, size_bytes, name_bytes, extra_bytes = (
            fields[2], fields[3], fields[6], fields[7], fields[8], fields[9], fields[10],
        )  # fmt: skip
        start = position + _LOCAL.size + name_bytes + extra_bytes
        if start > len(head):
            raise _more(head, entry_bytes, start)
        if method != 0 or flags & 1:
            raise ArchiveError("its records are compressed or encrypted")
        full_name = head[position + _LOCAL.size : position + _LOCAL.size + name_bytes].decode("utf-8", "replace")
        name = full_name.partition("/")[2]
        if name == last:
            records[name] = Record(start, -1, -1)
            return records
        if flags & _HAS_DESCRIPTOR and not size_bytes:
            end = _find_descriptor(head, start)
            if end < 0:
                raise _more(head, entry_bytes)
            crc = int.from_bytes(head[end + 4 : end + 8], "little")
            size_bytes = end - start
            position = end + DESCRIPTOR.size
        else:
            position = start + size_bytes + (DESCRIPTOR.size if flags & _HAS_DESCRIPTOR else 0)
            if position > len(head):
                raise _more(head, entry_bytes, position + _LOCAL.size)
        if packed not in (0, size_bytes) or name in records:
            raise ArchiveError("its records are damaged")
        records[name] = Record(start, size_bytes, crc)


def _find_descriptor(head: bytes, start: int) -> int:
    """Where the descriptor stands that confirms the length of the data at ``start``, or -1."""
    end = head.find(DESCRIPTOR_MARK, start)
    while end >= 0 and end + DESCRIPTOR.size <= len(head):
        _, _, packed, size_bytes = DESCRIPTOR.unpack_from(head, end)
        if packed == size_bytes == end - start:
            return end
        end = head.find(DESCRIPTOR_MARK, end + 1)
    return -1


def _more(head: bytes, entry_bytes: int, least: int = 0) -> Exception:
    if len(head) >= entry_bytes or least > entry_bytes:
        return ArchiveError("it is cut short")
    return NeedMoreBytes(min(entry_bytes, max(2 * len(head), least, 4096)))
