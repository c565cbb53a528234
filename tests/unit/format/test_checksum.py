from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st

from dcpfs.format import checksum
from dcpfs.format.checksum import crc32, crc32_combine


@given(st.binary(), st.integers(0, 0xFFFFFFFF))
def test_the_checksum_is_that_of_zlib(data: bytes, value: int) -> None:
    assert crc32(data) == zlib.crc32(data)
    assert crc32(memoryview(data), value) == zlib.crc32(data, value)


@given(st.lists(st.binary(max_size=300), max_size=6))
def test_neighbours_join_to_the_checksum_of_the_whole(parts: list[bytes]) -> None:
    joined = 0
    for part in parts:
        joined = crc32_combine(joined, zlib.crc32(part), len(part))
    assert joined == zlib.crc32(b"".join(parts))


@given(st.integers(0, 0xFFFFFFFF), st.integers(0, 0xFFFFFFFF), st.integers(0, 1 << 62), st.integers(0, 1 << 62))
def test_joining_twice_is_joining_the_sum(first: int, second: int, middle_bytes: int, last_bytes: int) -> None:
    one_by_one = crc32_combine(crc32_combine(first, 0, middle_bytes), second, last_bytes)
    at_once = crc32_combine(first, crc32_combine(0, second, last_bytes), middle_bytes + last_bytes)
    assert one_by_one == at_once


def test_lengths_beyond_32_bits_join() -> None:
    # 2**33 zero bytes by doubling, each half the other's neighbour, and as 2**7 blocks of 2**26.
    length_bytes = 1 << 26
    block = crc = zlib.crc32(bytes(length_bytes))
    for _ in range(7):
        crc = crc32_combine(crc, crc, length_bytes)
        length_bytes *= 2
    one_step = 0
    for _ in range(1 << 7):
        one_step = crc32_combine(one_step, block, 1 << 26)
    assert crc == one_step


@given(st.integers(0, 0xFFFFFFFF), st.integers(0, 0xFFFFFFFF), st.integers(1, (1 << 63) - 1))
def test_both_ways_to_join_agree(first: int, second: int, length_bytes: int) -> None:
    assert crc32_combine(first, second, length_bytes) == checksum._combine(first, second, length_bytes)
    assert crc32_combine(first, second, 0) == first
