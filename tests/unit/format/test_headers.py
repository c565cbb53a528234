from __future__ import annotations

import io
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcpfs.errors import CorruptCheckpointError
from dcpfs.format.checksum import crc32
from dcpfs.format.entries import decode_tensor_entry
from dcpfs.format.frames import encode_tensor_frame
from dcpfs.format.headers import NeedMoreBytes, TensorHeader, UnusualEntry, parse_tensor_header, parse_tensor_tail
from tests.unit.format.values import ALL_DTYPES, filled, raw_bytes, torch_save


def parse(entry: bytes, size_bytes: int = 4096) -> TensorHeader:
    """The header, brought as many bytes as it asks for."""
    for _ in range(20):
        try:
            return parse_tensor_header(entry[:size_bytes], len(entry))
        except NeedMoreBytes as more:
            needed_bytes = more.size_bytes
        assert size_bytes < needed_bytes <= len(entry)
        size_bytes = needed_bytes
    raise AssertionError("it never has enough")


def rebuild(entry: bytes, header: TensorHeader) -> torch.Tensor:
    """The tensor as the header describes it."""
    payload = bytearray(entry[header.payload_offset_bytes : header.payload_offset_bytes + header.payload_bytes])
    storage = torch.tensor(list(payload), dtype=torch.uint8).untyped_storage()
    made = torch.empty(0, dtype=header.dtype).set_(storage, header.storage_offset, header.shape, header.strides)
    if header.conj:
        made = torch._conj(made)
    return torch._neg_view(made) if header.neg else made


BASE = torch.arange(24, dtype=torch.float32).reshape(4, 6)
IMAGINARY = torch.arange(6, dtype=torch.float32) + 1j * torch.arange(6, 12)
VIEWS: dict[str, torch.Tensor] = {
    "row-major": BASE,
    "transposed": BASE.t(),
    "row of a transpose": BASE.t()[1],
    "stride (1, n)": torch.arange(5.0).reshape(1, 5).t(),
    "slice": BASE[1:3],
    "column": BASE[:, 2],
    "every second": BASE[::2, ::3],
    "permuted": torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
    "expanded": torch.arange(3.0).reshape(3, 1).expand(3, 4),
    "channels last": torch.arange(48.0).reshape(1, 3, 4, 4).to(memory_format=torch.channels_last),
    "storage offset": torch.arange(10.0)[7:],
    "scalar of a vector": torch.arange(10.0)[7],
    "empty of a vector": torch.arange(10.0)[3:3],
    "conjugate": IMAGINARY.conj(),
    "negative": IMAGINARY.conj().imag,
    "imaginary part": IMAGINARY.imag,
    "gradient": BASE.clone().requires_grad_(True),
    "parameter": torch.nn.Parameter(BASE.clone()),
    "frozen parameter": torch.nn.Parameter(BASE.t(), requires_grad=False),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_is_described_as_it_was_saved(name: str) -> None:
    tensor = VIEWS[name]
    entry = torch_save(tensor)
    header = parse(entry)
    plain = tensor.detach()
    assert (header.dtype, header.shape) == (plain.dtype, tuple(plain.shape))
    assert (header.strides, header.storage_offset) == (plain.stride(), plain.storage_offset())
    assert (header.conj, header.neg) == (plain.is_conj(), plain.is_neg())
    assert header.requires_grad == tensor.requires_grad
    assert header.has_checksums
    assert torch.equal(rebuild(entry, header), plain)
    assert torch.equal(decode_tensor_entry(entry).detach(), plain)
    end = header.payload_offset_bytes + header.payload_bytes
    assert parse_tensor_tail(header, entry[end : end + 24]) == crc32(entry[header.payload_offset_bytes : end])
    expected = plain.is_contiguous() and plain.untyped_storage().nbytes() == plain.nbytes and not plain.is_conj()
    assert header.is_row_major == (expected and not plain.is_neg())


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_case_28_entries_of_every_dtype_are_described(dtype: torch.dtype) -> None:
    for shape in ((), (0, 3), (5,), (2, 3, 4)):
        tensor = filled(dtype, shape)
        entry = torch_save(tensor)
        header = parse(entry)
        assert (header.dtype, header.shape, header.is_row_major) == (dtype, shape, True)
        payload = raw_bytes(tensor)
        assert entry[header.payload_offset_bytes :][: header.payload_bytes] == payload
        assert raw_bytes(decode_tensor_entry(entry)) == payload
        frame = encode_tensor_frame(dtype, shape, crc32(payload))
        assert header.payload_offset_bytes == len(frame.head)
        assert parse_tensor_tail(header, frame.tail) == crc32(payload)


@given(st.integers(1, 1200), st.sampled_from(sorted(VIEWS)))
def test_any_number_of_first_bytes_leads_to_the_same_header(size_bytes: int, name: str) -> None:
    entry = torch_save(VIEWS[name])
    assert parse(entry, min(size_bytes, len(entry))) == parse(entry)


def test_a_long_pickle_asks_for_more_than_the_first_read() -> None:
    tensor = torch.zeros((1,) * 250)
    entry = torch_save(tensor)
    assert parse(entry, 64).shape == tuple(tensor.shape)


def test_an_entry_without_checksums_has_none() -> None:
    torch.serialization.set_crc32_options(False)
    try:
        entry = torch_save(BASE)
    finally:
        torch.serialization.set_crc32_options(True)
    header = parse(entry)
    assert not header.has_checksums
    end = header.payload_offset_bytes + header.payload_bytes
    assert parse_tensor_tail(header, entry[end : end + 24]) is None
    assert torch.equal(rebuild(entry, header), BASE)
    assert torch.equal(decode_tensor_entry(entry), BASE)


def test_a_payload_that_holds_marks_of_the_archive_is_no_end() -> None:
    marks = b"PK\x07\x08\0\0\0\0\x10\0\0\0\x10\0\0\0PK\x03\x04PK\x01\x02PK\x05\x06" * 8
    tensor = torch.tensor(list(marks), dtype=torch.uint8)
    entry = torch_save(tensor)
    header = parse(entry, 100)
    assert torch.equal(rebuild(entry, header), tensor)
    assert torch.equal(decode_tensor_entry(entry), tensor)


class Wrapped(torch.Tensor):
    pass


def old_format(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


UNUSUAL: dict[str, Callable[[], bytes]] = {
    "format before 1.6": lambda: old_format(BASE),
    "a dict": lambda: torch_save({"a": BASE}),
    "a number": lambda: torch_save(3),
    "two tensors": lambda: torch_save((BASE, BASE)),
    "a subclass": lambda: torch_save(BASE.as_subclass(Wrapped)),
    "sparse": lambda: torch_save(BASE.to_sparse()),
    "quantized": lambda: torch_save(torch.quantize_per_tensor(BASE, 1.0, 0, torch.qint8)),
    "safetensors": lambda: b"\x10\0\0\0\0\0\0\0" + b'{"a":1}         ',
    "text": lambda: b"<html>404</html>" * 9,
    "empty": lambda: b"",
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", UNUSUAL)
def test_what_is_no_plain_tensor_is_said_to_be_unusual(name: str) -> None:
    with pytest.raises(UnusualEntry):
        parse(UNUSUAL[name](), 4)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["format before 1.6", "sparse", "quantized"])
def test_unusual_tensors_are_decoded_whole(name: str) -> None:
    made = decode_tensor_entry(UNUSUAL[name]())
    if made.is_quantized:
        made = made.dequantize()
    assert torch.equal(made.to_dense() if made.is_sparse else made, BASE)


def test_case_113_a_damaged_pickle_is_found_by_its_checksum() -> None:
    entry = bytearray(torch_save(BASE))
    position = entry.index(b"FloatStorage")
    entry[position] ^= 1
    with pytest.raises(CorruptCheckpointError, match="checksum"):
        parse(bytes(entry))


def test_an_entry_that_was_cut_is_damaged() -> None:
    entry = torch_save(BASE)
    header = parse(entry)
    with pytest.raises(CorruptCheckpointError, match="cut"):
        parse_tensor_header(entry, header.payload_offset_bytes + header.payload_bytes - 1)


@given(st.data())
def test_damage_of_the_front_is_one_of_three_errors_or_harmless(data: st.DataObject) -> None:
    entry = bytearray(torch_save(BASE.t()))
    for _ in range(data.draw(st.integers(1, 3))):
        entry[data.draw(st.integers(0, 900))] = data.draw(st.integers(0, 255))
    try:
        header = parse(bytes(entry), 700)
    except (UnusualEntry, CorruptCheckpointError):
        return
    assert header.payload_offset_bytes + header.payload_bytes <= len(entry)
    parse_tensor_tail(header, bytes(entry)[header.payload_offset_bytes + header.payload_bytes :][:24])
