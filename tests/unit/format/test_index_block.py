from __future__ import annotations

import json
import struct
import zlib
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcpfs.errors import CorruptCheckpointError, UntrustedDataError
from dcpfs.format import index_block
from dcpfs.format.checksum import crc32
from dcpfs.format.index import BytesRecord, CheckpointIndex, ChunkRecord, EntryLocation, TensorRecord
from dcpfs.format.index_block import (
    IndexBlock,
    MetadataExtras,
    append_index,
    decode_dtype,
    decode_layout,
    is_cut_short,
    split_index,
)
from tests.unit.format.values import ALL_DTYPES

NUMBERS = st.integers(0, 1 << 50)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
LOCATIONS = st.builds(
    EntryLocation,
    st.sampled_from(["__0_0.distcp", "__1_0.distcp", "sub/x"]),
    NUMBERS,
    st.integers(1 << 30, 1 << 50),
    st.integers(-1, 5000),
    st.integers(-1, 0xFFFFFFFF),
    st.lists(NAMES, max_size=2).map(tuple),
)


@st.composite
def tensor_records(draw: st.DrawFn) -> TensorRecord:
    shape = tuple(draw(st.lists(st.integers(0, 6), max_size=4)))
    chunks = [ChunkRecord((0,) * len(shape), shape, draw(LOCATIONS))]
    if shape and shape[0] > 1 and draw(st.booleans()):
        cut = draw(st.integers(1, shape[0] - 1))
        rest = (0,) * (len(shape) - 1)
        chunks = [
            ChunkRecord((0, *rest), (cut, *shape[1:]), draw(LOCATIONS)),
            ChunkRecord((cut, *rest), (shape[0] - cut, *shape[1:]), draw(LOCATIONS)),
        ]
    return TensorRecord(draw(st.sampled_from(ALL_DTYPES)), shape, tuple(chunks))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)
PATHS = st.dictionaries(NAMES, st.lists(NAMES | st.integers(), max_size=3).map(tuple), max_size=4)
INDEXES = st.builds(
    CheckpointIndex,
    st.dictionaries(NAMES, tensor_records() | st.builds(BytesRecord, LOCATIONS), max_size=4),
    JSON,
    PATHS,
    st.none() | NAMES,
    st.just(True),
)


@given(INDEXES, st.binary(max_size=40))
def test_an_index_comes_back_as_it_was(index: CheckpointIndex, pickled: bytes) -> None:
    data = append_index(pickled, IndexBlock(index, MetadataExtras()))
    assert data.startswith(pickled)
    block = split_index(data, where="x")
    assert block is not None
    assert block.contents == index
    assert list(block.contents.records) == list(index.records)
    for record in block.contents.records.values():
        assert type(record) in (TensorRecord, BytesRecord)
        for chunk in record.chunks if isinstance(record, TensorRecord) else ():
            assert type(chunk) is ChunkRecord
            assert type(chunk.location) is EntryLocation
    assert split_index(memoryview(data), where="x") == block


def test_keys_that_are_no_unicode_come_back() -> None:
    index = CheckpointIndex({"\ud800": BytesRecord(EntryLocation("a", 0, 1, 0, 1))}, written_by_dcpfs=True)
    block = split_index(append_index(b"N.", IndexBlock(index, MetadataExtras())), where="x")
    assert block is not None
    assert block.contents == index


def test_extras_come_back() -> None:
    record = TensorRecord(torch.int8, (2,), (ChunkRecord((0,), (2,), EntryLocation("a", 0, 900, 704, 1)),))
    extras = MetadataExtras(
        True, "1.0.0", "id", "save", ("a", "b"), True, (("strided", True, False), ("strided", False, True)), (1, 0)
    )  # fmt: skip
    index = CheckpointIndex({"a": record, "b": record}, written_by_dcpfs=True)
    block = split_index(append_index(b"N.", IndexBlock(index, extras)), where="x")
    assert block is not None
    assert block.extras == extras


SAMPLE = append_index(
    b"pickle.",
    IndexBlock(
        CheckpointIndex({"a": BytesRecord(EntryLocation("f", 0, 1, 0, 1))}, written_by_dcpfs=True), MetadataExtras()
    ),
)
TRAILER = index_block._TRAILER


@pytest.mark.parametrize("data", [b"", b"\x80\x02N.", SAMPLE[:-1], b"DCPFSIDX", b"x" * 100], ids=len)
def test_files_without_a_trailer_are_another_writers(data: bytes) -> None:
    assert split_index(data, where="x") is None


@pytest.mark.parametrize("version", [2, 3, 77, 0xFFFF])
def test_a_newer_index_is_left_to_the_pickle(version: int) -> None:
    data = SAMPLE[: -TRAILER.size] + struct.pack("<I", version) + SAMPLE[4 - TRAILER.size :]
    assert split_index(data.replace(b"DCPFSIX1", b"DCPFSIX2"), where="x") is None


@pytest.mark.parametrize("version", [2, 3, 77, 0xFFFF])
def test_case_113_a_newer_version_over_this_versions_index_is_damage(version: int) -> None:
    data = SAMPLE[: -TRAILER.size] + struct.pack("<I", version) + SAMPLE[4 - TRAILER.size :]
    with pytest.raises(CorruptCheckpointError, match="another version"):
        split_index(data, where="x")


@pytest.mark.parametrize("version", [0, 1 << 16, (1 << 31) + 1])
def test_case_113_a_version_that_never_was_is_damage(version: int) -> None:
    data = SAMPLE[: -TRAILER.size] + struct.pack("<I", version) + SAMPLE[4 - TRAILER.size :]
    with pytest.raises(CorruptCheckpointError, match="version"):
        split_index(data, where="x")


def test_case_113_each_byte_of_pickle_index_and_trailer_is_guarded() -> None:
    magic = range(len(SAMPLE) - 8, len(SAMPLE))
    for position in range(len(SAMPLE)):
        damaged = bytearray(SAMPLE)
        damaged[position] ^= 0x40
        if position in magic:
            assert split_index(bytes(damaged), where="x") is None
            assert is_cut_short(bytes(damaged), 7)
            continue
        with pytest.raises(CorruptCheckpointError) as caught:
            split_index(bytes(damaged), where="the .metadata of x")
        assert caught.value.file == ".metadata"
        assert str(caught.value).startswith("reading the .metadata of x")


@pytest.mark.parametrize("cut_bytes", range(1, 60))
def test_a_file_that_was_cut_shows_the_start_of_an_index(cut_bytes: int) -> None:
    data = SAMPLE[:-cut_bytes]
    assert split_index(data, where="x") is None
    assert is_cut_short(data, 7) == (len(data) > 7)
    assert not is_cut_short(SAMPLE, 7)


def test_case_113_a_newer_version_behind_a_start_that_it_does_not_point_to_is_damage() -> None:
    data = SAMPLE[: -TRAILER.size] + struct.pack("<IQQ", 2, 5, 5) + SAMPLE[20 - TRAILER.size :]
    assert split_index(data, where="x") is None
    assert is_cut_short(data, 7)
    assert is_cut_short(SAMPLE[:15] + b"DCPFSIDX", 7)


def test_bytes_of_another_writer_behind_the_pickle_are_no_cut_index() -> None:
    assert not is_cut_short(b"pickle.", 7)
    assert not is_cut_short(b"pickle.other", 7)


def forge(text: bytes) -> bytes:
    """A file whose checksums match that text."""
    packed = b"DCPFSIX1" + zlib.compress(text)
    return packed + TRAILER.pack(1, len(packed), 0, crc32(packed), 0, b"DCPFSIDX")


@pytest.mark.parametrize(
    "text", [b"", b"{}", b"[]", b"null", b"3", b"{", b"[" * 100_000, b'{"keys":3}', b"\xff"], ids=len
)
def test_an_index_that_makes_no_sense_is_damage_though_its_checksum_matches(text: bytes) -> None:
    with pytest.raises(CorruptCheckpointError):
        split_index(forge(text), where="x")


def test_an_index_that_unpacks_to_far_more_than_it_is_is_damage() -> None:
    with pytest.raises(CorruptCheckpointError, match="does not end"):
        split_index(forge(b" " * (100 << 20)), where="x")


COLUMNS = sorted(json.loads(json.dumps(index_block._encode_columns(index_block.split_index(SAMPLE, where="x")))))  # type: ignore[arg-type]  # it is there
WRONG: list[Any] = [
    None,
    3,
    -1,
    "x",
    [],
    [-1],
    [1 << 70],
    ["x"],
    [None],
    [[1]],
    [True],
    [1.5],
    {},
    {"known": [], "others": {}},
]


@pytest.mark.parametrize("column", COLUMNS)
def test_columns_of_wrong_kinds_and_lengths_are_errors_of_ours(column: str) -> None:
    block = split_index(SAMPLE, where="x")
    assert block is not None
    columns = json.loads(json.dumps(index_block._encode_columns(block)))
    for wrong in [*WRONG, KeyError]:
        edited = {**columns, column: wrong}
        if wrong is KeyError:
            del edited[column]
        try:
            made = split_index(forge(json.dumps(edited).encode()), where="x")
        except (CorruptCheckpointError, UntrustedDataError):
            continue
        assert made is not None
        assert list(made.contents.records) in (["a"], ["x"])


@pytest.mark.parametrize("name", ["load", "nn", "Tensor", "__doc__", "", None, 3, "torch.float32", "strided"])
def test_only_dtypes_are_dtypes(name: object) -> None:
    with pytest.raises(ValueError, match="no dtype"):
        decode_dtype(name)


def test_dtypes_and_layouts_are_found_by_name() -> None:
    for dtype in ALL_DTYPES:
        assert decode_dtype(str(dtype).removeprefix("torch.")) is dtype
    assert decode_layout("strided") is torch.strided
    with pytest.raises(ValueError, match="no layout"):
        decode_layout("float32")
