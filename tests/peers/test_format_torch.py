"""The format against torch's own writers and readers: whole checkpoints both ways, and entries beyond 4 GiB."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from dcpfs.format.checksum import crc32, crc32_combine
from dcpfs.format.entries import (
    decode_object,
    decode_tensor_entry,
    encode_object,
    encode_tensor_frame,
    parse_tensor_header,
    parse_tensor_tail,
)
from dcpfs.format.index import BytesRecord, EntryLocation, TensorRecord
from dcpfs.format.metadata import check_coverage, decode_both, decode_index, encode_metadata, index_metadata
from dcpfs.format.names import METADATA_NAME, data_file_name, parse_data_file_name
from tests.unit.format.values import ALL_DTYPES, filled, raw_bytes


def copies(dtype: torch.dtype) -> bool:
    """This torch's reader can copy into a tensor of that dtype (2.9 can't into float4)."""
    try:
        torch.zeros(16, dtype=torch.uint8).view(dtype).copy_(filled(dtype, (16 // dtype.itemsize,)))
    except (NotImplementedError, RuntimeError):
        return False
    return True


def make_state() -> dict[str, Any]:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    random_state: Any = np.random.RandomState(1).get_state()
    return {
        "model": {
            # torch's planner can't tell the size of "bits" dtypes.
            **{
                str(dtype): filled(dtype, (3, 4))
                for dtype in ALL_DTYPES
                if copies(dtype) and not str(dtype).startswith("torch.bits")
            },
            "scalar": torch.tensor(3.5),
            "empty": torch.zeros((0, 3)),
            "transposed": base.t(),
            "column": torch.arange(5.0).reshape(1, 5).t(),
            "slice": base[1:3, 2:],
            "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
            "parameter": torch.nn.Parameter(base.clone()),
            "large": torch.arange(100_000, dtype=torch.int32),
        },
        "trainer": {"step": 7, "name": "größe", "state": {"a": [1, (2, None)]}, "random": random_state},
        "list": [torch.ones(2), 5],
    }  # fmt: skip


def flat(value: object, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves as DCP's planner names them."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from flat(item, f"{prefix}{key}.")
    elif isinstance(value, list) and any(isinstance(item, torch.Tensor) for item in value):
        for number, item in enumerate(value):
            yield from flat(item, f"{prefix}{number}.")
    else:
        yield prefix.removesuffix("."), value


def write_with_torch(kind: str, tmp_path: Path) -> dict[str, bytes]:
    """All files of a checkpoint that torch wrote, by name."""
    if kind == "fsspec memory":
        url = f"memory://{uuid.uuid4().hex}/run"
        dcp_save(make_state(), storage_writer=FsspecWriter(url), no_dist=True)
        memory = fsspec.filesystem("memory")
        path = url.removeprefix("memory:/")
        files = {name.rpartition("/")[2]: memory.cat_file(name) for name in memory.ls(path, detail=False)}
        memory.rm(path, recursive=True)
        return files
    choices: dict[str, dict[str, Any]] = {
        "one file": {},
        "4 threads": {"thread_count": 4},
        "a file per item": {"single_file_per_rank": False},
        "no fsync, synchronous": {"sync_files": False, "per_thread_copy_ahead": 0},
    }
    options = choices[kind]
    dcp_save(make_state(), storage_writer=FileSystemWriter(tmp_path, **options), no_dist=True)
    return {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["one file", "4 threads", "a file per item", "no fsync, synchronous", "fsspec memory"])
def test_case_28_what_torch_wrote_is_read_exactly(kind: str, tmp_path: Path) -> None:
    files = write_with_torch(kind, tmp_path)
    index, metadata = decode_both(files[METADATA_NAME])
    assert metadata == index_metadata_roundtrip(metadata)
    check_coverage(index)
    assert not index.written_by_dcpfs
    expected = dict(flat(make_state()))
    assert index.records.keys() >= {key for key, value in expected.items() if isinstance(value, torch.Tensor)}
    for name, size_bytes in index.data_files().items():
        assert parse_data_file_name(name) is not None
        assert len(files[name]) == size_bytes
    identical = 0
    for key, record in index.records.items():
        if isinstance(record, BytesRecord):
            at = record.location
            entry = files[at.file][at.offset_bytes : at.offset_bytes + at.length_bytes]
            value = decode_object(entry, key=key)
            assert repr(value) == repr(expected[key]) if key in expected else value is not None
            continue
        (part,) = record.chunks
        at = part.location
        entry = files[at.file][at.offset_bytes : at.offset_bytes + at.length_bytes]
        tensor = expected[key].detach()
        header = parse_tensor_header(entry[:4096], len(entry))
        assert (header.dtype, header.shape) == (record.dtype, record.shape) == (tensor.dtype, tuple(tensor.shape))
        end = header.payload_offset_bytes + header.payload_bytes
        assert parse_tensor_tail(header, entry[end : end + 24]) == crc32(entry[header.payload_offset_bytes : end])
        assert raw_bytes(decode_tensor_entry(entry, key=key)) == raw_bytes(tensor)
        if header.is_row_major and header.strides == torch.empty(header.shape, device="meta").stride():
            payload = raw_bytes(tensor)
            frame = encode_tensor_frame(tensor.dtype, tensor.shape, crc32(payload), header.requires_grad)
            assert entry == frame.head + payload + frame.tail
            identical += 1
    assert identical >= len(ALL_DTYPES) - 3


def index_metadata_roundtrip(metadata: Metadata) -> Metadata:
    """The metadata after it was written by us and read by us."""
    index = index_metadata(metadata)
    made_index, made = decode_both(encode_metadata(metadata, save_id=index.save_id))
    assert made_index.records == index.records
    return made


def compose(state: Mapping[str, object]) -> dict[str, bytes]:
    """A checkpoint made by the format layer alone: two data files, tensors cut in two where they can be."""
    files = {data_file_name(0, 0): bytearray(), data_file_name(0, 1): bytearray()}
    records: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    storage: dict[MetadataIndex, EntryLocation] = {}

    def place(number: int, index: MetadataIndex, entry: bytes, payload_offset_bytes: int, crc: int) -> None:
        file = files[data_file_name(0, number)]
        storage[index] = EntryLocation(data_file_name(0, number), len(file), len(entry), payload_offset_bytes, crc)
        file += entry

    for key, value in flat(state):
        if not isinstance(value, torch.Tensor):
            records[key] = BytesStorageMetadata()
            data = encode_object(value, key=key)
            place(0, MetadataIndex(key), data, 0, crc32(data))
            continue
        tensor = value.detach().resolve_conj().contiguous()
        parts = [(tensor, (0,) * tensor.dim())]
        if tensor.dim() and len(tensor) > 2:
            rest = (0,) * (tensor.dim() - 1)
            parts = [(tensor[:2], (0, *rest)), (tensor[2:], (2, *rest))]
        chunks = []
        for number, (part, offsets) in enumerate(parts):
            payload = raw_bytes(part)
            frame = encode_tensor_frame(part.dtype, part.shape, crc32(payload))
            entry = frame.head + payload + frame.tail
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), part.shape))
            place(number, MetadataIndex(key, torch.Size(offsets), number), entry, len(frame.head), crc32(payload))
        records[key] = TensorStorageMetadata(TensorProperties(tensor.dtype), tensor.shape, chunks)
    metadata = Metadata(records, None, storage, None)
    return {**{name: bytes(data) for name, data in files.items()}, METADATA_NAME: encode_metadata(metadata)}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["files", "fsspec memory"])
def test_case_28_torch_reads_what_the_format_made(kind: str, tmp_path: Path) -> None:
    state = dict(flat(make_state()))
    files = compose(make_state())
    reader: FileSystemReader = FileSystemReader(tmp_path)
    folder = f"memory://{uuid.uuid4().hex}/run"
    if kind == "files":
        for name, data in files.items():
            (tmp_path / name).write_bytes(data)
    else:
        memory = fsspec.filesystem("memory")
        for name, data in files.items():
            memory.pipe_file(f"{folder}/{name}", data)
        reader = FsspecReader(folder)
    index = decode_index(files[METADATA_NAME])
    check_coverage(index)
    assert any(isinstance(record, TensorRecord) and len(record.chunks) == 2 for record in index.records.values())
    target: dict[str, Any] = {
        key: torch.zeros(value.numel() * value.element_size(), dtype=torch.uint8).view(value.dtype).reshape(value.shape)
        if isinstance(value, torch.Tensor)
        else None
        for key, value in state.items()
    }
    dcp_load(target, storage_reader=reader, no_dist=True)
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            assert raw_bytes(target[key]) == raw_bytes(value), key
        else:
            assert repr(target[key]) == repr(value)


# --- beyond 4 GiB -------------------------------------------------------------------------------------------------


def crc_of_zeros(size_bytes: int) -> int:
    crc, length_bytes, result = crc32(b"\0"), 1, 0
    while size_bytes:
        if size_bytes & 1:
            result = crc32_combine(result, crc, length_bytes)
        crc = crc32_combine(crc, crc, length_bytes)
        length_bytes *= 2
        size_bytes >>= 1
    return result


BEYOND = [(1 << 32) - 1, 1 << 32, (1 << 32) + 100]


@pytest.mark.parametrize("size_bytes", BEYOND)
def test_torch_maps_an_entry_beyond_4_gib(size_bytes: int, tmp_path: Path) -> None:
    frame = encode_tensor_frame(torch.uint8, (size_bytes,), crc_of_zeros(size_bytes))
    path = tmp_path / "entry"
    with path.open("wb") as file:
        file.write(frame.head)
        file.seek(size_bytes - 3, os.SEEK_CUR)
        file.write(b"xyz")
        file.write(frame.tail)
    tensor = torch.load(path, mmap=True, weights_only=True)
    assert tuple(tensor.shape) == (size_bytes,)
    assert bytes(tensor[-5:].tolist()) == b"\0\0xyz"
    with path.open("rb") as file:
        head = file.read(4096)
        header = parse_tensor_header(head, path.stat().st_size)
        assert header.is_row_major
        assert header.payload_bytes == size_bytes
        file.seek(header.payload_offset_bytes + size_bytes)
        assert parse_tensor_tail(header, file.read(24)) == crc_of_zeros(size_bytes)


class Outline:
    """A file that keeps what is small: all but the payload."""

    def __init__(self) -> None:
        self.before = bytearray()
        self.after = bytearray()
        self.payload_bytes = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if len(view) > 100_000:
            self.payload_bytes += len(view)
        else:
            (self.after if self.payload_bytes else self.before).extend(view)
        return len(view)

    def flush(self) -> None:
        pass


@pytest.mark.nightly
@pytest.mark.parametrize("size_bytes", BEYOND)
def test_entries_beyond_4_gib_are_what_torch_save_writes(size_bytes: int, tmp_path: Path) -> None:
    path = tmp_path / "zeros"
    with path.open("wb") as file:
        file.truncate(size_bytes)
    tensor = torch.from_file(str(path), shared=True, size=size_bytes, dtype=torch.uint8)
    outline = Outline()
    torch.save(tensor, outline)  # type: ignore[arg-type]  # torch takes anything that writes
    frame = encode_tensor_frame(torch.uint8, (size_bytes,), crc_of_zeros(size_bytes))
    assert outline.payload_bytes == size_bytes
    assert (bytes(outline.before), bytes(outline.after)) == (frame.head, frame.tail)


@pytest.mark.nightly
def test_a_whole_entry_beyond_4_gib_is_read_by_torch(tmp_path: Path) -> None:
    count = (1 << 30) + 25
    path = tmp_path / "entry"
    tensor = torch.zeros(count, dtype=torch.int32)
    tensor[-1] = 7
    payload = memoryview(tensor.numpy().data).cast("B")
    frame = encode_tensor_frame(torch.int32, (count,), crc32(payload))
    with path.open("wb") as file:
        file.write(frame.head)
        file.write(payload)
        file.write(frame.tail)
    loaded = torch.load(path, weights_only=True)
    assert (len(loaded), loaded[-1].item(), int(loaded[:-1].max())) == (count, 7, 0)
