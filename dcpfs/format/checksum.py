"""CRC-32 of a zip archive, as fast as memory allows, and in parts.

Problem: every tensor entry is a zip record with a CRC-32. Computed by zlib at 4 GB/s it costs as much CPU time as
sending the bytes does; ISA-L computes the same number at 26 GB/s and, like zlib, without the GIL. A large tensor is
written and read in parts by several threads, so no one call sees all of it.

Way taken: ISA-L where the package is there, else zlib; and `crc32_combine`, which joins the checksums of neighbours
without their bytes. Appending n zero bytes multiplies a CRC by x**(8n) modulo the polynomial, so joining is one
product in GF(2)[x]; the factor for a length is kept, since parts have few different lengths. ISA-L does the same
eighteen times as fast.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from dcpfs.storage.store import Buffer

__all__ = ["crc32", "crc32_combine"]

_POLYNOMIAL = 0xEDB88320
_ONE = 0x80000000
_X = 0x40000000
_LONGEST_FOR_C = (1 << 63) - 1


def _fastest() -> Callable[[Buffer, int], int]:
    try:
        from isal import isal_zlib
    except ImportError:
        return zlib.crc32
    return cast("Callable[[Buffer, int], int]", isal_zlib.crc32)


def _fastest_combine() -> Callable[[int, int, int], int]:
    try:
        from isal.isal_zlib import crc32_combine as combine
    except ImportError:  # no package, or one before it had the function
        return _combine
    return combine


_crc32 = _fastest()


def crc32(buffer: Buffer, value: int = 0) -> int:
    """CRC-32 of the buffer, continued from ``value``. Thread-safe; runs without the GIL on large buffers."""
    return _crc32(buffer, value)


def crc32_combine(crc1: int, crc2: int, length2_bytes: int) -> int:
    """CRC-32 of two neighbours from the CRC-32 of each and the length of the second."""
    if not 0 < length2_bytes <= _LONGEST_FOR_C:
        return _combine(crc1, crc2, length2_bytes) if length2_bytes else crc1
    return _crc32_combine(crc1, crc2, length2_bytes)


def _combine(crc1: int, crc2: int, length2_bytes: int) -> int:
    return _multiply(_factor(length2_bytes), crc1) ^ crc2


def _multiply(a: int, b: int) -> int:
    """Product of two polynomials modulo the CRC's, bits reflected as in the CRC itself."""
    product = 0
    bit = _ONE
    while a:
        if a & bit:
            product ^= b
            a ^= bit
        bit >>= 1
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


@functools.lru_cache(maxsize=1)
def _squares() -> tuple[int, ...]:
    """x**(2**k) for k from 0 to 66: enough for the bits of any length below 2**64."""
    powers = [_X]
    for _ in range(66):
        powers.append(_multiply(powers[-1], powers[-1]))
    return tuple(powers)


@functools.lru_cache(maxsize=1024)
def _factor(length_bytes: int) -> int:
    """x**(8 * length) modulo the polynomial."""
    squares = _squares()
    factor = _ONE
    bits = length_bytes << 3
    position = 0
    while bits:
        if bits & 1:
            factor = _multiply(squares[position], factor)
        bits >>= 1
        position += 1
    return factor


_crc32_combine = _fastest_combine()
