from __future__ import annotations

import hashlib
import io
import math
import random
import zipfile

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.serialization import load as torch_load

from dcpfs.errors import UnsupportedValueError
from dcpfs.format.checksum import crc32, crc32_combine
from dcpfs.format.frames import encode_tensor_frame, payload_size_bytes, tensor_frame_sizes
from tests.unit.format.values import ALL_DTYPES, filled, raw_bytes, torch_save

SHAPES = [
    (), (0,), (1,), (3,), (0, 5), (5, 0, 2), (2, 3), (255,), (256,), (257, 3), (70_000,), (1,) * 5, (2, 1, 3, 1, 2, 1),
    (300, 1, 301),
]  # fmt: skip


def encode(tensor: torch.Tensor) -> bytes:
    payload = raw_bytes(tensor)
    frame = encode_tensor_frame(tensor.dtype, tensor.shape, crc32(payload), tensor.requires_grad)
    sizes = tensor_frame_sizes(tensor.dtype, tensor.shape, tensor.requires_grad)
    assert (sizes.head_bytes, sizes.payload_bytes, sizes.tail_bytes) == (len(frame.head), len(payload), len(frame.tail))
    entry = frame.head + payload + frame.tail
    assert sizes.entry_bytes == len(entry)
    assert sizes.payload_bytes == payload_size_bytes(tensor.dtype, tensor.shape)
    return entry


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_case_28_an_entry_of_every_dtype_is_what_torch_save_writes(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        tensor = filled(dtype, shape)
        assert encode(tensor) == torch_save(tensor), shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_gradients_are_asked_for_as_torch_save_does(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        tensor = filled(dtype, shape).requires_grad_(True)
        assert encode(tensor) == torch_save(tensor)


@given(
    st.sampled_from(ALL_DTYPES),
    st.lists(st.integers(0, 9), max_size=5).map(tuple),
    st.binary(min_size=1, max_size=64),
)
def test_an_entry_of_any_shape_and_bytes_is_what_torch_save_writes(
    dtype: torch.dtype, shape: tuple[int, ...], noise: bytes
) -> None:
    size_bytes = math.prod(shape) * dtype.itemsize
    data = bytearray((noise * (size_bytes // len(noise) + 1))[:size_bytes])
    if dtype is torch.bool:
        data = bytearray(byte & 1 for byte in data)
    # A payload that begins like a data descriptor is taken for one by torch when it makes up the serialization id,
    # which names the archive and which nothing reads.
    assume(not data.startswith(b"PK\x07\x08"))
    raw = torch.tensor(list(data), dtype=torch.uint8)
    tensor = raw.view(dtype).reshape(shape)
    assert encode(tensor) == torch_save(tensor)


def test_every_remainder_of_pickle_and_payload_aligns_as_torch_save_does() -> None:
    rng = random.Random(5)
    for size in range(1, 200):
        shape = (rng.choice((1, 200, 300, 70_000, 1)), *[rng.choice((1, 1, 1, 2)) for _ in range(size % 7)])
        tensor = filled(torch.uint8, (size,))
        assert encode(tensor) == torch_save(tensor)
        if math.prod(shape) < 10**6:
            tensor = torch.zeros(shape, dtype=torch.int16)
            assert encode(tensor) == torch_save(tensor)


def test_an_entry_is_a_sound_zip_archive_that_torch_loads() -> None:
    tensor = filled(torch.float32, (7, 5))
    entry = encode(tensor)
    with zipfile.ZipFile(io.BytesIO(entry)) as archive:
        assert archive.testzip() is None
        assert len(archive.namelist()) == 7
    assert torch.equal(torch_load(io.BytesIO(entry), weights_only=True).view(torch.int32), tensor.view(torch.int32))


@pytest.mark.parametrize("size_bytes", [63, 64, 65, 128])
def test_the_payload_starts_on_a_64_byte_border(size_bytes: int) -> None:
    assert tensor_frame_sizes(torch.uint8, (size_bytes,)).head_bytes % 64 == 0


@pytest.mark.parametrize("name", ["qint8", "uint4", "int3"])
def test_dtypes_that_torch_cannot_save_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedValueError, match=name):
        tensor_frame_sizes(getattr(torch, name), (2,))


def crc_of_zeros(size_bytes: int) -> int:
    crc, length_bytes, result = crc32(b"\0"), 1, 0
    while size_bytes:
        if size_bytes & 1:
            result = crc32_combine(result, crc, length_bytes)
        crc = crc32_combine(crc, crc, length_bytes)
        length_bytes *= 2
        size_bytes >>= 1
    return result


WRITTEN_BY_TORCH = {
    (1 << 32) - 1: (
        (704, "100a0b2afe5f9f157838b0705ed6f833471ab36b3ee61139af341088b9360766"),
        (926, "93ade63e25a71e5ca5adbd028de624a45728ac65bfde0ddbe61d7d37e9f4783a"),
    ),
    1 << 32: (
        (704, "dd091c847b3d756474e5d9480eb0d51db9b36155045851f2b13a9e3c3059b198"),
        (925, "54ac91fb05477d916038cc085bfc5a971eec1b90e58f2ec9a966908d2e5f03e7"),
    ),
    (1 << 32) + 100: (
        (704, "9c132f7cb749061eb58052dbdb257a25b347bfba0e0effd2722b105265589c68"),
        (889, "0ebf43df64b7adf426102fa5be83d8556427ccd070ffc7c02cdc1e22417782a7"),
    ),
}
"""Length and SHA-256 of what torch 2.13 wrote before and after so many zero bytes (`test_format_torch` writes anew)."""


@pytest.mark.parametrize("size_bytes", WRITTEN_BY_TORCH)
def test_entries_beyond_4_gib_have_the_64_bit_fields_where_torch_puts_them(size_bytes: int) -> None:
    frame = encode_tensor_frame(torch.uint8, (size_bytes,), crc_of_zeros(size_bytes))
    written = tuple((len(piece), hashlib.sha256(piece).hexdigest()) for piece in frame)
    assert written == WRITTEN_BY_TORCH[size_bytes]
    sizes = tensor_frame_sizes(torch.uint8, (size_bytes,))
    assert sizes == (len(frame.head), size_bytes, len(frame.tail))


@pytest.mark.parametrize("margin_bytes", [0, 1, 600, 704, 1500, 3000, 4095, 4096, 5000])
def test_sizes_hold_just_below_4_gib(margin_bytes: int) -> None:
    size_bytes = (1 << 32) - margin_bytes
    frame = encode_tensor_frame(torch.uint8, (size_bytes,), 0)
    assert tensor_frame_sizes(torch.uint8, (size_bytes,)) == (len(frame.head), size_bytes, len(frame.tail))
