from __future__ import annotations

import contextlib
import copy
import gc
import os
import pathlib
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo, _StoragePrefix
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcpfs.config import Trust
from dcpfs.errors import CorruptCheckpointError, IncompleteCheckpointError, UntrustedDataError
from dcpfs.format import index_block
from dcpfs.format.collector import paused_collector
from dcpfs.format.index import BytesRecord, CheckpointIndex, ChunkRecord, EntryLocation, TensorRecord
from dcpfs.format.metadata import (
    check_coverage,
    decode_both,
    decode_index,
    decode_metadata,
    encode_metadata,
    index_metadata,
    merge_indexes,
    metadata_from_index,
)
from dcpfs.format.metadata_pickle import encode_metadata_pickle
from tests.properties.bounds import examples
from tests.unit.format.collecting import collects_again
from tests.unit.format.samples import as_torch_holds_it, chunk, make_metadata
from tests.unit.format.values import ALL_DTYPES

STRUCTURE = {"kind": "dict", "items": [["model", 1], ["größe", None]]}


def other_writers(metadata: Metadata, protocol: int = 4) -> bytes:
    """The file as torch's own writer makes it."""
    return pickle.dumps(as_torch_holds_it(metadata), protocol)


def without_ours(index: CheckpointIndex) -> CheckpointIndex:
    """The index as the pickle alone tells it."""

    def plain(location: EntryLocation) -> EntryLocation:
        return location._replace(payload_offset_bytes=-1, crc32=-1)

    records: dict[str, TensorRecord | BytesRecord] = {
        key: BytesRecord(plain(record.location))
        if isinstance(record, BytesRecord)
        else record._replace(chunks=tuple(part._replace(location=plain(part.location)) for part in record.chunks))
        for key, record in index.records.items()
    }
    return CheckpointIndex(records, None, index.paths, index.save_id, written_by_dcpfs=False)


def test_torch_alone_reads_the_metadata_that_it_would_have_written() -> None:
    metadata = make_metadata()
    data = encode_metadata(metadata, structure=STRUCTURE, save_id="save-1")
    expected = as_torch_holds_it(metadata)
    loaded = pickle.loads(data)
    assert loaded == expected
    assert repr(loaded) == repr(expected)
    assert [key.index for key in loaded.storage_data] == [key.index for key in expected.storage_data]
    assert {type(info) for info in loaded.storage_data.values()} == {_StorageInfo}
    known = {"relative_path", "offset", "length", "transform_descriptors"}
    assert all(known >= set(vars(info)) for info in loaded.storage_data.values())


def test_the_index_holds_what_was_saved() -> None:
    data = encode_metadata(make_metadata(), structure=STRUCTURE, save_id="save-1")
    index = decode_index(data)
    assert list(index.records) == list(make_metadata().state_dict_metadata)
    assert (index.structure, index.save_id, index.written_by_dcpfs) == (STRUCTURE, "save-1", True)
    assert index.paths == make_metadata().planner_data
    record = index.records["model.weight"]
    assert isinstance(record, TensorRecord)
    assert (record.dtype, record.shape, len(record.chunks)) == (torch.float32, (4, 3), 2)
    second = record.chunks[1]
    assert (second.offsets, second.sizes) == ((1, 0), (3, 3))
    assert second.location == EntryLocation("__1_0.distcp", 0, 1650, 704, 7, ("zstd", "x"))
    assert index.records["größe/\u2028"] == BytesRecord(EntryLocation("__0_0.distcp", 5400, 900, 0, 9))
    assert index.data_files() == {
        "__0_0.distcp": 6300, "__1_0.distcp": 1650, "sub/dir/__0_1.distcp": (1 << 40) + 1500,
    }  # fmt: skip


def test_planners_get_the_metadata_that_the_pickle_holds() -> None:
    data = encode_metadata(make_metadata(), save_id="save-1")
    assert decode_metadata(data) == pickle.loads(data)
    assert repr(decode_metadata(data)) == repr(pickle.loads(data))
    index, metadata = decode_both(data)
    assert (index, metadata) == (decode_index(data), decode_metadata(data))
    assert index_metadata(metadata) == without_ours(index)


def test_the_given_metadata_is_not_changed() -> None:
    metadata = make_metadata()
    before = copy.deepcopy(metadata)
    encode_metadata(metadata, structure=STRUCTURE)
    assert metadata == before


class Info(_StorageInfo):
    """A storage record that carries what the index wants to know."""

    def __init__(self, location: EntryLocation) -> None:
        self.relative_path, self.offset, self.length = location[:3]
        self.transform_descriptors = list(location.transforms) or None
        self.payload_offset_bytes, self.crc32 = location.payload_offset_bytes, location.crc32


def test_storage_records_with_further_attributes_are_stored_plain() -> None:
    metadata = make_metadata()
    direct = encode_metadata(metadata)
    metadata.storage_data = {index: Info(location) for index, location in metadata.storage_data.items()}
    assert encode_metadata(metadata) == direct
    assert {type(info) for info in pickle.loads(direct).storage_data.values()} == {_StorageInfo}


@pytest.mark.parametrize("missing", range(6))
def test_a_record_without_an_entry_is_refused_before_anything_is_published(missing: int) -> None:
    metadata = make_metadata()
    del metadata.storage_data[list(metadata.storage_data)[missing]]
    with pytest.raises(IncompleteCheckpointError, match="nothing was published"):
        encode_metadata(metadata)


def change(**fields: object) -> Metadata:
    metadata = make_metadata()
    for name, value in fields.items():
        setattr(metadata, name, value)
    return metadata


def with_a_chunk_twice() -> Metadata:
    metadata = make_metadata()
    bias: Any = metadata.state_dict_metadata["model.bias"]
    bias.chunks = bias.chunks * 2
    return metadata


UNUSUAL: dict[str, Callable[[], Metadata]] = {
    "a chunk twice": with_a_chunk_twice,
    "nothing": lambda: Metadata({}, None, {}, None),
    "no planner data": lambda: change(planner_data=None),
    "empty planner data": lambda: change(planner_data={}),
    "planner data of another planner": lambda: change(planner_data=[("a", 1), {"b": (2.5, None)}]),
    "planner data with other paths": lambda: change(planner_data={"a": ["x"]}),
    "planner data with other keys": lambda: change(planner_data={1: ("x",)}),
    "planner data with truths": lambda: change(planner_data={"a": (True,)}),
    "planner data with large numbers": lambda: change(planner_data={"a": (1 << 80, -5, -(1 << 40), 1 << 31)}),
    "no storage meta": lambda: change(storage_meta=None),
    "bare storage meta": lambda: change(storage_meta=StorageMeta()),
    "a path for an id": lambda: change(storage_meta=StorageMeta(pathlib.PurePosixPath("/a/b"))),
    "load id": lambda: change(storage_meta=StorageMeta("x", "y", "z")),
    "no version": lambda: change(version=None),
    "large offsets": lambda: change(
        storage_data={
            index: location._replace(offset_bytes=number)
            for (index, location), number in zip(
                make_metadata().storage_data.items(), (0, 255, 256, (1 << 31) - 1, 1 << 31, 1 << 60), strict=True
            )
        }
    ),
    "index without a hint": lambda: change(
        storage_data={
            MetadataIndex(index.fqn, index.offset): location for index, location in make_metadata().storage_data.items()
        }
    ),
    "memory format": lambda: change(
        state_dict_metadata={
            "step": TensorStorageMetadata(
                TensorProperties(torch.float32, memory_format=torch.preserve_format), torch.Size(()), [chunk((), ())]
            )
        }
    ),
    "sparse layout": lambda: change(
        state_dict_metadata={
            "step": TensorStorageMetadata(
                TensorProperties(torch.float32, layout=torch.sparse_coo), torch.Size(()), [chunk((), ())]
            )
        }
    ),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_metadata_comes_back_for_torch_and_for_planners(name: str) -> None:
    metadata = UNUSUAL[name]()
    data = encode_metadata(metadata)
    expected = as_torch_holds_it(metadata)
    assert pickle.loads(data) == expected
    assert decode_metadata(data) == expected
    assert decode_both(data) == (decode_index(data), expected)
    assert decode_index(data).written_by_dcpfs


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_case_28_every_dtype_has_its_place_in_the_metadata(dtype: torch.dtype) -> None:
    metadata = change(
        state_dict_metadata={"step": TensorStorageMetadata(TensorProperties(dtype), torch.Size(()), [chunk((), ())])}
    )
    data = encode_metadata(metadata)
    assert decode_metadata(data) == pickle.loads(data) == as_torch_holds_it(metadata)
    record = decode_index(data).records["step"]
    assert isinstance(record, TensorRecord)
    assert record.dtype is dtype
    assert index_metadata(decode_metadata(other_writers(metadata))).records["step"][0] is dtype


@pytest.mark.parametrize("count", [0, 1, 300, 3000])
def test_many_records_share_sizes_and_names(count: int) -> None:
    properties = TensorProperties(torch.float32)
    sizes = [torch.Size((number % 97 + 1, 64)) for number in range(count)]
    state: dict[str, Any] = {
        f"layers.{number}": TensorStorageMetadata(properties, size, [chunk((0, 0), tuple(size))])
        for number, size in enumerate(sizes)
    }
    storage = {
        MetadataIndex(f"layers.{number}", torch.Size((0, 0)), 0): EntryLocation("__0_0.distcp", number << 20, 1 << 20)
        for number in range(count)
    }
    metadata = Metadata(state, {key: tuple(key.split(".")) for key in state}, storage, StorageMeta(), "1.0.0")
    data = encode_metadata(metadata)
    assert pickle.loads(data) == decode_metadata(data) == as_torch_holds_it(metadata)
    assert len(encode_metadata_pickle(metadata, storage)) < len(other_writers(metadata)) + 1000


@pytest.mark.parametrize("protocol", range(2, 6))
def test_metadata_of_other_writers_is_read(protocol: int) -> None:
    data = other_writers(make_metadata(), protocol)
    own = decode_index(encode_metadata(make_metadata(), save_id="save-1"))
    assert decode_index(data) == without_ours(own)
    assert decode_metadata(data) == pickle.loads(data)
    assert decode_both(data) == (decode_index(data), decode_metadata(data))
    assert decode_index(data, trust=Trust.PICKLE) == decode_index(data)


def test_metadata_of_older_torch_lacks_fields() -> None:
    metadata = as_torch_holds_it(make_metadata())
    for name in ("storage_meta", "version"):
        del metadata.__dict__[name]
    for info in metadata.storage_data.values():
        info.__dict__.pop("transform_descriptors", None)
    made = decode_metadata(pickle.dumps(metadata))
    assert (made.storage_meta, made.version) == (None, None)
    assert list(decode_index(pickle.dumps(metadata)).records) == list(make_metadata().state_dict_metadata)


def test_a_writer_that_kept_its_own_classes_of_torch_is_read() -> None:
    metadata = as_torch_holds_it(make_metadata())
    metadata.planner_data = {"prefix": _StoragePrefix("__0_")}
    assert decode_metadata(pickle.dumps(metadata)).planner_data == metadata.planner_data


@pytest.mark.parametrize("kind", [pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.Path])
def test_paths_of_any_system_become_pure(kind: Callable[[str], object]) -> None:
    metadata = as_torch_holds_it(make_metadata())
    metadata.storage_meta = StorageMeta(kind("a"))  # type: ignore[arg-type]  # torch's type lacks pure paths
    assert metadata.storage_meta is not None
    made = decode_metadata(pickle.dumps(metadata)).storage_meta
    assert made is not None
    assert isinstance(made.checkpoint_id, pathlib.PurePath)
    assert not isinstance(made.checkpoint_id, pathlib.Path)
    assert str(made.checkpoint_id) == "a"


# --- what was edited or damaged -----------------------------------------------------------------------------------


class Runs:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("place", ["whole", "planner_data", "storage_meta", "version", "key", "properties"])
def test_case_110_nothing_in_the_metadata_runs(place: str, tmp_path: pathlib.Path) -> None:
    trap = Runs(str(tmp_path / "trap"))
    metadata: Any = as_torch_holds_it(make_metadata())
    if place == "whole":
        metadata = trap
    elif place == "key":
        metadata.state_dict_metadata = {trap: BytesStorageMetadata()}
    elif place == "properties":
        metadata.state_dict_metadata["step"].properties = trap
    else:
        setattr(metadata, place, trap)
    data = pickle.dumps(metadata)
    for decode in (decode_index, decode_metadata, decode_both):
        with pytest.raises(UntrustedDataError, match=r"mkdir.*allow-list"):
            decode(data, url="memory://run")
    assert not (tmp_path / "trap").exists()
    with contextlib.suppress(CorruptCheckpointError):
        decode_index(data, trust=Trust.PICKLE)
    assert (tmp_path / "trap").exists()


@pytest.mark.parametrize(
    "name", ["../outside/__0_0.distcp", "/etc/passwd", "s3://other/x", "a/../../b", "", "C:\\x", 3]
)
@pytest.mark.parametrize("trust", list(Trust))
def test_case_112_names_that_leave_the_checkpoint_are_refused(name: Any, trust: Trust) -> None:
    metadata = as_torch_holds_it(make_metadata())
    next(iter(metadata.storage_data.values())).relative_path = name
    for decode in (decode_index, decode_metadata, decode_both):
        with pytest.raises(UntrustedDataError, match="refused"):
            decode(pickle.dumps(metadata), trust=trust)


def forged(monkeypatch: pytest.MonkeyPatch, edit: Callable[[dict[str, Any]], object]) -> bytes:
    """A file whose checksums match an index that was edited."""
    block = index_block.split_index(encode_metadata(make_metadata()), where="x")
    assert block is not None
    columns: dict[str, Any] = index_block._encode_columns(block)
    columns = {name: list(column) if isinstance(column, tuple) else column for name, column in columns.items()}
    edit(columns)
    with monkeypatch.context() as patched:
        patched.setattr(index_block, "_encode_columns", lambda _: columns)
        return index_block.append_index(b"N.", block)


def put(name: str, position: int, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda columns: columns[name].__setitem__(position, value)


FORGERIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "negative offset": put("offset", 0, -1),
    "huge offset": put("offset", 0, 1 << 63),
    "length of text": put("length", 0, "9"),
    "entry shorter than its tensor": put("length", 2, 100),
    "payload behind the entry": put("payload", 2, 1 << 40),
    "checksum of 33 bits": put("crc", 0, 1 << 32),
    "unknown file": put("file", 0, 9),
    "negative file": put("file", 0, -1),
    "unknown dtype": put("dtypes", 0, "load"),
    "dtype number": put("kinds", 0, 7),
    "chunk outside": put("boxes", 0, ((0, 0), (9, 9))),
    "chunk of another rank": put("boxes", 0, ((0,), (1,))),
    "negative chunk": put("boxes", 0, ((0, -1), (1, 3))),
    "more chunks than boxes": put("counts", 0, 9),
    "fewer chunks than boxes": put("counts", 0, 1),
    "many chunks": put("counts", 0, 1 << 50),
    "negative shape": put("shapes", 1, (-300,)),
    "larger shape": put("shapes", 1, (1 << 50,)),
    "shape of fractions": put("shapes", 1, (1.5,)),
    "one key twice": put("keys", 1, "model.weight"),
    "key of a number": put("keys", 1, 3),
    "missing record": lambda columns: columns["keys"].pop(),
    "missing column": lambda columns: columns.pop("crc"),
    "path of lists": lambda columns: columns["paths"]["known"].__setitem__(0, [[1]]),
    "layout": lambda columns: columns["extras"].update(properties=[["load", False, False]]),
    "property number": lambda columns: columns["extras"].update(property_numbers=[9, 9, 9, 9]),
    "unknown extra": lambda columns: columns["extras"].update(other=1),
    "modules": lambda columns: columns["extras"].update(modules=[1]),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_an_index_that_contradicts_itself_is_damage_even_when_its_checksums_match(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = forged(monkeypatch, FORGERIES[name])
    for decode in (decode_index, decode_metadata, decode_both):
        with pytest.raises(CorruptCheckpointError, match=r"\.metadata of memory://run") as caught:
            decode(data, url="memory://run")
        assert caught.value.file == ".metadata"


@pytest.mark.parametrize("name", ["../x", "/x", "s3://b/x", 3])
def test_case_112_an_edited_index_names_no_file_outside(name: object, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UntrustedDataError, match="refused"):
        decode_index(forged(monkeypatch, lambda columns: columns["files"].__setitem__(0, name)))


def edit_info(**fields: object) -> Callable[[Any], object]:
    return lambda metadata: next(iter(metadata.storage_data.values())).__dict__.update(fields)


def edit_weight(**fields: object) -> Callable[[Any], object]:
    return lambda metadata: metadata.state_dict_metadata["model.weight"].__dict__.update(fields)


EDITS: dict[str, Callable[[Any], object]] = {
    "negative offset": edit_info(offset=-1),
    "offset of text": edit_info(offset="0"),
    "true for an offset": edit_info(offset=True),
    "huge length": edit_info(length=1 << 63),
    "transform of a number": edit_info(transform_descriptors=[1]),
    "transforms of a number": edit_info(transform_descriptors=3),
    "entry missing": lambda metadata: metadata.storage_data.pop(next(iter(metadata.storage_data))),
    "entry of another kind": lambda metadata: metadata.storage_data.update(
        dict.fromkeys(metadata.storage_data, "__0_0.distcp")
    ),
    "entry without a key": lambda metadata: metadata.storage_data.update(
        {"a": next(iter(metadata.storage_data.values()))}
    ),
    "record of another kind": lambda metadata: metadata.state_dict_metadata.update(a=3),
    "key of a number": lambda metadata: metadata.state_dict_metadata.update({3: BytesStorageMetadata()}),
    "chunk outside": edit_weight(chunks=[chunk((0, 0), (9, 9))]),
    "chunk of another rank": edit_weight(chunks=[chunk((0, 0), (3,))]),
    "chunks of another kind": edit_weight(chunks=3),
    "sizes of another kind": edit_weight(size=[4, 3]),
    "huge sizes": edit_weight(size=torch.Size(((1 << 63) - 1, 3))),
    "negative sizes": edit_weight(size=torch.Size((-4, 3))),
    "no properties": edit_weight(properties=None),
    "no storage data": lambda metadata: setattr(metadata, "storage_data", None),
    "no state": lambda metadata: setattr(metadata, "state_dict_metadata", None),
    "no fields": lambda metadata: metadata.__dict__.clear(),
    "storage of another kind": lambda metadata: setattr(metadata, "storage_meta", 3),
    "modules of another kind": lambda metadata: setattr(metadata, "storage_meta", StorageMeta(modules=3)),  # type: ignore[arg-type]
    "a module of another kind": lambda metadata: setattr(metadata, "storage_meta", StorageMeta(modules=[3])),  # type: ignore[list-item]
    "info without fields": lambda metadata: next(iter(metadata.storage_data.values())).__dict__.clear(),
    "record without fields": lambda metadata: metadata.state_dict_metadata["step"].__dict__.clear(),
}


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("trust", list(Trust))
def test_metadata_that_contradicts_itself_is_damage(name: str, trust: Trust) -> None:
    metadata = as_torch_holds_it(make_metadata())
    EDITS[name](metadata)
    data = pickle.dumps(metadata)
    for decode in (decode_index, decode_metadata, decode_both):
        with pytest.raises((CorruptCheckpointError, UntrustedDataError)) as caught:
            decode(data, trust=trust, url="memory://run")
        if isinstance(caught.value, CorruptCheckpointError):
            assert "memory://run" in str(caught.value)
            assert caught.value.file == ".metadata"


def test_attributes_that_the_classes_lack_are_refused() -> None:
    metadata: Any = as_torch_holds_it(make_metadata())
    metadata.__dict__["__class__"] = 3
    with pytest.raises(UntrustedDataError, match="Metadata has attributes"):
        decode_index(pickle.dumps(metadata))


@pytest.mark.parametrize("data", [b"", b"\x80\x04N.", b"\x80\x04}.", b"<html>", b"PK\x03\x04", b"\x80\x04"], ids=repr)
@pytest.mark.parametrize("trust", list(Trust))
def test_what_is_no_metadata_is_damage(data: bytes, trust: Trust) -> None:
    with pytest.raises((CorruptCheckpointError, UntrustedDataError)) as caught:
        decode_index(data, trust=trust, url="memory://run")
    assert "memory://run" in str(caught.value)


def test_case_113_each_bit_of_the_metadata_is_guarded() -> None:
    data = encode_metadata(make_metadata(), structure=STRUCTURE)
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << (position % 8)
        for decode in (decode_index, decode_metadata):
            with pytest.raises(CorruptCheckpointError):
                decode(bytes(damaged))


def test_case_113_every_cut_is_seen() -> None:
    data = encode_metadata(make_metadata())
    pickle_bytes = data.index(b"DCPFSIX1")
    for length_bytes in range(len(data)):
        if length_bytes == pickle_bytes:
            # Exactly torch's own file.
            assert decode_metadata(data[:length_bytes]) == pickle.loads(data)
            continue
        with pytest.raises(CorruptCheckpointError):
            decode_index(data[:length_bytes])


def test_a_newer_index_is_left_to_the_pickle() -> None:
    data = bytearray(encode_metadata(make_metadata(), structure=STRUCTURE))
    data[-index_block._TRAILER.size] = 2
    data[:] = data.replace(b"DCPFSIX1", b"DCPFSIX2")
    assert decode_index(bytes(data)) == without_ours(decode_index(encode_metadata(make_metadata(), save_id="save-1")))
    assert decode_metadata(bytes(data)) == pickle.loads(bytes(data))


@examples(400)
@given(st.sampled_from(["own", "torch", "torch 2"]), st.data())
def test_damaged_metadata_is_an_error_of_ours(kind: str, data: st.DataObject) -> None:
    metadata = make_metadata()
    original = {
        "own": encode_metadata(metadata),
        "torch": other_writers(metadata),
        "torch 2": other_writers(metadata, 2),
    }[kind]
    damaged = bytearray(original)
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(damaged) - 1))
        if data.draw(st.booleans()):
            damaged[position] = data.draw(st.integers(0, 255))
        else:
            damaged[position : position + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    for decode in (decode_index, decode_metadata):
        with contextlib.suppress(CorruptCheckpointError, UntrustedDataError):
            decode(bytes(damaged))


# --- several files, gaps, planners --------------------------------------------------------------------------------


def rank_metadata(rank: int, rows: int = 2) -> bytes:
    """What one of two ranks writes without collectives: its rows, one value of its own and one that both hold."""
    offsets = (rank * rows, 0)
    properties = TensorProperties(torch.float32)
    state: dict[str, Any] = {
        "weight": TensorStorageMetadata(properties, torch.Size((4, 3)), [chunk(offsets, (rows, 3))]),
        f"rank.{rank}": BytesStorageMetadata(),
        "shared": BytesStorageMetadata(),
    }  # fmt: skip
    name = f"__{rank}_0.distcp"
    storage = {
        MetadataIndex("weight", torch.Size(offsets), 0): EntryLocation(name, 0, 1600, 704, rank),
        MetadataIndex(f"rank.{rank}"): EntryLocation(name, 1600, 900, 0, 3),
        MetadataIndex("shared"): EntryLocation(name, 2500, 900, 0, 4),
    }
    paths = {key: (key,) for key in state}
    return encode_metadata(Metadata(state, paths, storage, StorageMeta()), structure=[rank], save_id="save")


def test_the_metadata_of_ranks_is_joined() -> None:
    indexes = [decode_index(rank_metadata(rank)) for rank in (0, 1)]
    for index in indexes:
        with pytest.raises(CorruptCheckpointError, match="6 of 12 elements of 'weight'"):
            check_coverage(index, url="memory://run")
    merged = merge_indexes(indexes, url="memory://run")
    check_coverage(merged)
    weight = merged.records["weight"]
    assert isinstance(weight, TensorRecord)
    assert [part.offsets for part in weight.chunks] == [(0, 0), (2, 0)]
    assert [part.location.file for part in weight.chunks] == ["__0_0.distcp", "__1_0.distcp"]
    shared = merged.records["shared"]
    assert isinstance(shared, BytesRecord)
    assert shared.location.file == "__0_0.distcp"
    assert set(merged.records) == {"weight", "rank.0", "rank.1", "shared"} == set(merged.paths)
    assert (merged.structure, merged.save_id, merged.written_by_dcpfs) == ([0], "save", True)
    assert indexes[0] == decode_index(rank_metadata(0))


def test_a_chunk_that_two_ranks_hold_counts_once_for_coverage() -> None:
    first = decode_index(rank_metadata(0))
    merged = merge_indexes([first, first], url="memory://run")
    with pytest.raises(CorruptCheckpointError, match="6 of 12") as caught:
        check_coverage(merged, url="memory://run")
    assert caught.value.key == "weight"
    assert "memory://run" in str(caught.value)


def test_ranks_that_disagree_are_an_error() -> None:
    whole = decode_index(rank_metadata(0))
    record = whole.records["weight"]
    assert isinstance(record, TensorRecord)
    others: list[TensorRecord | BytesRecord] = [
        record._replace(shape=(5, 3)),
        record._replace(dtype=torch.int32),
        BytesRecord(record.chunks[0].location),
    ]
    for other in others:
        with pytest.raises(
            CorruptCheckpointError, match="disagree about the kind, dtype or shape of 'weight'"
        ) as caught:
            merge_indexes([whole, CheckpointIndex({"weight": other})], url="memory://run")
        assert caught.value.key == "weight"
    with pytest.raises(CorruptCheckpointError, match="disagree"):
        merge_indexes([CheckpointIndex({"weight": others[2]}), whole], url="memory://run")


def test_joining_with_another_writers_index_is_not_wholly_ours() -> None:
    own = decode_index(rank_metadata(0))
    assert not merge_indexes([own, without_ours(decode_index(rank_metadata(1)))], url="x").written_by_dcpfs
    assert not merge_indexes([], url="x").written_by_dcpfs


def test_planners_get_metadata_of_a_joined_index() -> None:
    merged = merge_indexes([decode_index(rank_metadata(rank)) for rank in (0, 1)], url="x")
    metadata = metadata_from_index(merged)
    assert metadata.planner_data == {key: (key,) for key in merged.records}
    assert index_metadata(metadata) == without_ours(merged)
    weight = metadata.state_dict_metadata["weight"]
    assert isinstance(weight, TensorStorageMetadata)
    assert weight.chunks == [chunk((0, 0), (2, 3)), chunk((2, 0), (2, 3))]
    assert {index.index for index in metadata.storage_data if index.fqn == "weight"} == {0, 1}
    assert metadata_from_index(CheckpointIndex({})).planner_data is None


def test_replicas_that_a_writer_lists_twice_count_once() -> None:
    metadata = as_torch_holds_it(make_metadata())
    bias: Any = metadata.state_dict_metadata["model.bias"]
    bias.chunks = bias.chunks * 3
    record = decode_index(pickle.dumps(metadata)).records["model.bias"]
    assert isinstance(record, TensorRecord)
    assert record.chunks == (ChunkRecord((0,), (300,), EntryLocation("__0_0.distcp", 1600, 2300)),)


def test_gaps_are_allowed_in_one_file_and_found_in_the_whole() -> None:
    metadata = as_torch_holds_it(make_metadata())
    weight: Any = metadata.state_dict_metadata["model.weight"]
    del weight.chunks[0]
    index = decode_index(pickle.dumps(metadata))
    with pytest.raises(CorruptCheckpointError, match=r"9 of 12 elements of 'model\.weight'"):
        check_coverage(index)
    check_coverage(decode_index(encode_metadata(make_metadata())))


def test_the_collector_is_paused_and_comes_back() -> None:
    assert collects_again()
    with paused_collector():
        assert not gc.isenabled()
        with paused_collector():
            assert not gc.isenabled()
        assert not gc.isenabled()
        decode_index(encode_metadata(make_metadata()))
        assert not gc.isenabled()
    assert collects_again()
    with pytest.raises(CorruptCheckpointError):
        decode_index(b"")
    assert collects_again()
    gc.disable()
    try:
        decode_both(encode_metadata(make_metadata()))
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_notes_of_all_ranks_are_joined() -> None:
    notes = [
        {"containers": [[["m"], {"kind": "dict", "empty": True}], [["e"], {"kind": "dict", "empty": True}]]},
        None,
        {"containers": [[["m"], {"kind": "dict", "keys": "int"}], [["o"], {"kind": "OrderedDict"}]]},
        {"containers": [[["m"], {"kind": "dict", "empty": True}]]},
    ]
    merged = merge_indexes([CheckpointIndex({}, structure=each) for each in notes], url="memory://run")
    assert merged.structure == {
        "containers": [
            [["m"], {"kind": "dict", "keys": "int"}],
            [["e"], {"kind": "dict", "empty": True}],
            [["o"], {"kind": "OrderedDict"}],
        ]
    }
    assert notes[0] == {
        "containers": [[["m"], {"kind": "dict", "empty": True}], [["e"], {"kind": "dict", "empty": True}]]
    }
    odd: list[object] = [{"containers": 5}, {"containers": [[1]]}, [], {"containers": [[["a"], 5]]}]
    for other in odd:
        for structures in ([notes[0], other], [other, notes[0]]):
            merged = merge_indexes([CheckpointIndex({}, structure=each) for each in structures], url="memory://run")
            assert merged.structure == structures[0]
