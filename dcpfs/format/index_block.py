"""The compact index behind the pickle in ``.metadata``.

Problem: see `dcpfs.format.index`: the pickle is slow to decode, can run code when decoded carelessly, and has no room
for payload offsets, checksums and containers. A file of its own would double the requests of every load, and could be
copied or deleted apart from the metadata it describes.

Way taken: behind the pickle's STOP, where ``pickle.load`` has stopped reading, stands a block of JSON in columns,
compressed, and a trailer of fixed length at the very end of the file. Columns, because one list of 20,000 integers
parses and is checked in a millisecond, and 20,000 small objects are not. JSON, because parsing it can't do anything
else.

::

    pickle | "DCPFSIX1" zlib(JSON) | trailer: version, lengths and CRC-32 of block and pickle, "DCPFSIDX"

The trailer's checksums decide: a block is used only when both match, and a mismatch is damage. A file without a
trailer was written by someone else; one that has the block's start but no trailer was cut short. A newer version has
another start and another version in its trailer: where only one of them differs, it is damage, since a flipped bit may
not turn an index into one that is left unread.
"""

from __future__ import annotations

import itertools
import json
import math
import struct
import zlib
from collections.abc import Iterable, Sequence
from functools import partial
from operator import add
from typing import Any, NamedTuple, TypeVar

import torch

from dcpfs.errors import CorruptCheckpointError, UntrustedDataError
from dcpfs.format.checksum import crc32
from dcpfs.format.index import BytesRecord, CheckpointIndex, ChunkRecord, EntryLocation, TensorRecord
from dcpfs.format.names import check_relative_name
from dcpfs.format.rank_saves import decode_rank_save

__all__ = [
    "IndexBlock",
    "MetadataExtras",
    "append_index",
    "check_chunks",
    "decode_dtype",
    "decode_layout",
    "ends_with_index",
    "is_cut_short",
    "split_index",
]

_START = b"DCPFSIX1"
_TRAILER = struct.Struct("<IQQII8s")
_MAGIC = b"DCPFSIDX"
_VERSION = 1
_LAST_VERSION = 0xFFFF
_LARGEST_BYTES = 1 << 31
_LARGEST_RATIO = 256
"""Keys differ, and numbers of a record are fewer than 200 characters: no index of ours gets near this."""
_LARGEST_NUMBER = 1 << 62

T = TypeVar("T")


class MetadataExtras(NamedTuple):
    """What torch's `Metadata` holds beside the records, so that it can be rebuilt without the pickle.

    Attributes:
        complete: False: the metadata holds something that has no place here; rebuild it from the pickle.
        version: Its ``version``.
        checkpoint_id: Of its ``storage_meta``.
        save_id: Of its ``storage_meta``.
        modules: Of its ``storage_meta``; None: there is no ``storage_meta``.
        has_paths: Its ``planner_data`` is a dict.
        properties: Distinct (layout, requires_grad, pin_memory) of tensors.
        property_numbers: For each tensor, in order, its place in ``properties``; empty: all are the first.
    """

    complete: bool = False
    version: str | None = None
    checkpoint_id: str | None = None
    save_id: str | None = None
    modules: tuple[str, ...] | None = None
    has_paths: bool = False
    properties: tuple[tuple[str, bool, bool], ...] = ()
    property_numbers: tuple[int, ...] = ()


class IndexBlock(NamedTuple):
    """What the block holds."""

    contents: CheckpointIndex
    extras: MetadataExtras


def append_index(pickle_bytes: bytes, block: IndexBlock) -> bytes:
    """The whole file: the pickle, the block and the trailer."""
    text = json.dumps(_encode_columns(block), separators=(",", ":"), allow_nan=False).encode("ascii")
    packed = _START + _compress(text)
    trailer = _TRAILER.pack(_VERSION, len(packed), len(pickle_bytes), crc32(packed), crc32(pickle_bytes), _MAGIC)
    return b"".join((pickle_bytes, packed, trailer))


def split_index(data: bytes | memoryview, *, where: str) -> IndexBlock | None:
    """Decode the block at the end of the metadata file. None: another writer's file.

    Args:
        data: The whole file.
        where: The file, for errors.

    Raises:
        CorruptCheckpointError: There is a block and it is damaged, or the pickle before it is.
        UntrustedDataError: It names a file outside the checkpoint.
    """
    if bytes(data[-8:]) != _MAGIC or len(data) < _TRAILER.size:
        return None
    version, packed_bytes, pickle_bytes, packed_crc, pickle_crc, _ = _TRAILER.unpack_from(
        data, len(data) - _TRAILER.size
    )
    if _VERSION < version <= _LAST_VERSION:
        if bytes(data[pickle_bytes : pickle_bytes + len(_START)]) == _START:
            raise _damaged(where, "its trailer has another version than its index")
        # A newer dcpfs: the pickle tells everything that is needed.
        return None
    if version != _VERSION:
        raise _damaged(where, "its trailer has no version")
    if pickle_bytes + packed_bytes + _TRAILER.size != len(data):
        raise _damaged(where, "its trailer does not fit its length")
    view = memoryview(data)
    packed = view[pickle_bytes : pickle_bytes + packed_bytes]
    if crc32(packed) != packed_crc or crc32(view[:pickle_bytes]) != pickle_crc:
        raise _damaged(where, "a checksum is wrong")
    if bytes(packed[:8]) != _START:
        raise _damaged(where, "its index has no start")
    try:
        return _decode_columns(json.loads(_decompress(packed[8:])))
    except CorruptCheckpointError as error:
        raise _damaged(where, error.message) from error
    except (UntrustedDataError, MemoryError):
        raise
    except Exception as error:
        # The checksum matched, so this was made on purpose; still one kind of error, whatever it trips.
        raise _damaged(where, f"its index makes no sense ({type(error).__name__}: {str(error)[:200]})") from error


def ends_with_index(data: bytes | memoryview) -> bool:
    """A trailer of this or a newer version stands at the end."""
    return bytes(data[-len(_MAGIC) :]) == _MAGIC


def is_cut_short(data: bytes | memoryview, pickle_bytes: int) -> bool:
    """Behind a pickle of that length stands the start of an index of this version, though there is no such trailer."""
    rest = bytes(data[pickle_bytes : pickle_bytes + len(_START)])
    if not rest or not _START.startswith(rest):
        return False
    if len(data) < _TRAILER.size or not ends_with_index(data):
        return True
    return bool(_TRAILER.unpack_from(data, len(data) - _TRAILER.size)[0] != _VERSION)


def _damaged(where: str, reason: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"reading {where}: the metadata is damaged: {reason}", file=".metadata")


def _compress(text: bytes) -> bytes:
    try:
        from isal import isal_zlib
    except ImportError:
        return zlib.compress(text, 1)
    packed: bytes = isal_zlib.compress(text, 1)
    return packed


def _decompress(packed: memoryview) -> bytes:
    engine: Any
    try:
        from isal import isal_zlib
    except ImportError:
        engine = zlib.decompressobj()
    else:
        engine = isal_zlib.decompressobj()
    text: bytes = engine.decompress(packed, min(_LARGEST_BYTES, (16 << 20) + _LARGEST_RATIO * len(packed)))
    if not engine.eof:
        raise ValueError("the compressed index does not end")
    return text


# --- columns ------------------------------------------------------------------------------------------------------


def _encode_columns(block: IndexBlock) -> dict[str, object]:
    index = block.contents
    types: dict[torch.dtype, int] = {}
    files: dict[str, int] = {}
    transforms: dict[tuple[str, ...], int] = {(): 0}
    kinds: list[int] = []
    shapes: list[tuple[int, ...]] = []
    counts: list[int] = []
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    locations: list[EntryLocation] = []
    for record in index.records.values():
        if isinstance(record, BytesRecord):
            kinds.append(-1)
            locations.append(record.location)
            continue
        dtype, shape, chunks = record
        kinds.append(types.setdefault(dtype, len(types)))
        shapes.append(shape)
        if len(chunks) == 1 and chunks[0].sizes == shape and not any(chunks[0].offsets):
            counts.append(-1)
            locations.append(chunks[0].location)
        else:
            counts.append(len(chunks))
            for offsets, sizes, location in chunks:
                boxes.append((offsets, sizes))
                locations.append(location)
    columns = list(zip(*locations, strict=True)) or [()] * 6
    extras = block.extras
    return {
        "save_id": index.save_id,
        **({} if index.rank_save is None else {"rank_save": index.rank_save}),
        "structure": index.structure,
        "keys": list(index.records),
        "kinds": kinds,
        "dtypes": [str(dtype).removeprefix("torch.") for dtype in types],
        "shapes": shapes,
        "counts": counts if any(count != -1 for count in counts) else None,
        "boxes": boxes,
        "files": (numbers := [files.setdefault(name, len(files)) for name in columns[0]]) and list(files),
        "file": numbers,
        "offset": columns[1],
        "length": columns[2],
        "payload": columns[3],
        "crc": columns[4],
        "transforms": [transforms.setdefault(names, len(transforms)) for names in columns[5]]
        if any(columns[5])
        else None,
        "transform_names": list(transforms),
        "paths": _encode_paths(index),
        "extras": extras._asdict(),
    }


def _encode_paths(index: CheckpointIndex) -> dict[str, object]:
    """Paths of keys that are records by position, None where the path is the key alone; the others by name."""
    paths = index.paths
    known: list[object] = []
    for key in index.records:
        path = paths.get(key)
        known.append(0 if path is None else None if path == (key,) else path)
    others = {key: path for key, path in paths.items() if key not in index.records}
    return {"known": known, "others": others}


def _decode_columns(columns: Any) -> IndexBlock:
    keys = columns["keys"]
    _expect_all(keys, str)
    kinds = _naturals(columns["kinds"], least=-1)
    dtypes = [decode_dtype(name) for name in columns["dtypes"]]
    tensors = len(kinds) - kinds.count(-1)
    shapes = _shapes(columns["shapes"])
    counts = columns["counts"]
    if counts is None:
        counts = [-1] * tensors
    _naturals(counts, least=-1)
    if len(kinds) != len(keys) or len(shapes) != tensors or len(counts) != tensors:
        raise ValueError("columns differ in length")
    if len(set(keys)) != len(keys):
        raise ValueError("a key stands there twice")
    boxes = [(_box(offsets), _box(sizes)) for offsets, sizes in columns["boxes"]]
    locations, sizes = _decode_locations(columns)
    zeros = [(0,) * length for length in range(max(map(len, shapes), default=0) + 1)]
    records: dict[str, TensorRecord | BytesRecord]
    if len(locations) == tensors == len(keys) and not any(count >= 0 for count in counts) and not boxes:
        # Nothing but tensors stored whole: the same in a third of the time.
        types = [dtypes[kind] for kind in kinds]
        _check_payloads(locations, types, shapes, keys)
        chunks = map(_make_chunk, zip(map(zeros.__getitem__, map(len, shapes)), shapes, locations, strict=True))
        records = dict(zip(keys, map(_make_tensor, zip(types, shapes, zip(chunks), strict=True)), strict=True))
    else:
        records = _join_columns(keys, kinds, dtypes, shapes, counts, boxes, locations, zeros)
    save_id = columns["save_id"]
    if save_id is not None:
        _expect_all([save_id], str)
    index = CheckpointIndex(
        records,
        structure=columns["structure"],
        paths=_decode_paths(columns["paths"], keys),
        save_id=save_id,
        written_by_dcpfs=True,
        file_sizes=sizes,
        rank_save=decode_rank_save(columns.get("rank_save")),
    )
    return IndexBlock(index, _decode_extras(columns["extras"], tensors))


_make_tensor = partial(tuple.__new__, TensorRecord)
_make_chunk = partial(tuple.__new__, ChunkRecord)


def _join_columns(
    keys: Sequence[str],
    kinds: Sequence[int],
    dtypes: Sequence[torch.dtype],
    shapes: Sequence[tuple[int, ...]],
    counts: Sequence[int],
    boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
    locations: Sequence[EntryLocation],
    zeros: Sequence[tuple[int, ...]],
) -> dict[str, TensorRecord | BytesRecord]:
    """The records, one by one."""
    next_location = iter(locations).__next__
    next_box = iter(boxes).__next__
    records: dict[str, TensorRecord | BytesRecord] = {}
    next_shape, next_count = iter(shapes).__next__, iter(counts).__next__
    try:
        for key, kind in zip(keys, kinds, strict=True):
            if kind < 0:
                records[key] = BytesRecord(next_location())
                continue
            shape, count = next_shape(), next_count()
            dtype = dtypes[kind]
            if count < 0:
                location = next_location()
                _check_payload(location, dtype, shape, key)
                chunks: tuple[ChunkRecord, ...] = (_make_chunk((zeros[len(shape)], shape, location)),)
            else:
                chunks = tuple(_make_chunk((*next_box(), next_location())) for _ in range(count))
                check_chunks(key, dtype, shape, chunks)
            records[key] = _make_tensor((dtype, shape, chunks))
    except StopIteration as error:
        raise ValueError("there are fewer entries than records") from error
    except RuntimeError as error:
        # A StopIteration inside the generator expression of the chunks.
        raise ValueError("there are fewer entries than records") from error
    if next(iter(boxes[sum(count for count in counts if count > 0) :]), None) is not None:
        raise ValueError("there are more chunks than records")
    return records


def _decode_locations(columns: Any) -> tuple[list[EntryLocation], dict[str, int]]:
    """The entries, and the size that each file must have."""
    files = [check_relative_name(name) for name in columns["files"]]
    numbers = _naturals(columns["file"])
    offsets, lengths = _naturals(columns["offset"]), _naturals(columns["length"])
    payloads, crcs = _naturals(columns["payload"], least=-1), _naturals(columns["crc"], least=-1)
    if max(crcs, default=0) > 0xFFFFFFFF:
        raise ValueError("a checksum has more than 32 bits")
    transforms: Iterable[tuple[str, ...]]
    if columns["transforms"] is None:
        transforms = itertools.repeat((), len(numbers))
    else:
        names = [tuple(_expect_all(names, str)) for names in columns["transform_names"]]
        transforms = [names[number] for number in _naturals(columns["transforms"])]
    names_of_files = [files[number] for number in numbers]
    locations = list(
        map(
            partial(tuple.__new__, EntryLocation),
            zip(names_of_files, offsets, lengths, payloads, crcs, transforms, strict=True),
        )
    )
    ends = map(add, offsets, lengths)
    if len(files) == 1 and locations:
        return locations, {files[0]: max(ends)}
    sizes: dict[str, int] = {}
    for name, end in zip(names_of_files, ends, strict=True):
        if end > sizes.get(name, -1):
            sizes[name] = end
    return locations, sizes


def _decode_paths(paths: Any, keys: Sequence[str]) -> dict[str, tuple[str | int, ...]]:
    known = paths["known"]
    if type(known) is not list or len(known) != len(keys):
        raise ValueError("columns differ in length")
    decoded: dict[str, tuple[str | int, ...]] = {}
    parts: set[type] = set()
    for key, path in zip(keys, known, strict=True):
        if path is None:
            decoded[key] = (key,)
        elif path != 0:
            decoded[key] = tuple(path)
            parts.update(map(type, path))
    for key, path in paths["others"].items():
        decoded[key] = tuple(path)
        parts.update(map(type, path))
    if not parts <= {str, int}:
        raise ValueError("a path is made of something else than names and positions")
    return decoded


def _decode_extras(fields: Any, tensors: int) -> MetadataExtras:
    extras = MetadataExtras(**fields)
    texts = [text for text in (extras.version, extras.checkpoint_id, extras.save_id) if text is not None]
    _expect_all(texts, str)
    modules = None if extras.modules is None else tuple(_expect_all(extras.modules, str))
    properties = []
    for layout, requires_grad, pin_memory in extras.properties:
        decode_layout(layout)
        _expect_all([requires_grad, pin_memory], bool)
        properties.append((layout, requires_grad, pin_memory))
    numbers = _naturals(list(extras.property_numbers))
    if numbers and (len(numbers) != tensors or max(numbers) >= len(properties)):
        raise ValueError("columns differ in length")
    _expect_all([extras.complete, extras.has_paths], bool)
    return extras._replace(modules=modules, properties=tuple(properties), property_numbers=tuple(numbers))


# --- checks -------------------------------------------------------------------------------------------------------


def _expect_all(values: Any, kind: type[T]) -> list[T]:
    if not isinstance(values, list | tuple) or not set(map(type, values)) <= {kind}:
        raise ValueError(f"a column does not hold {kind.__name__} alone")
    return values  # type: ignore[return-value]  # checked above


def _naturals(values: Any, least: int = 0) -> list[int]:
    checked = _expect_all(values, int)
    if checked and (min(checked) < least or max(checked) > _LARGEST_NUMBER):
        raise ValueError("a number is out of range")
    return checked


def _shapes(shapes: Any) -> list[tuple[int, ...]]:
    _expect_all(shapes, list)
    _naturals(list(itertools.chain.from_iterable(shapes)))
    return list(map(tuple, shapes))


def _box(numbers: Any) -> tuple[int, ...]:
    return tuple(_naturals(numbers))


def decode_dtype(name: object) -> torch.dtype:
    """The dtype of that name, without ``torch.``."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"this torch has no dtype {str(name)[:100]!r}")
    return dtype


def decode_layout(name: object) -> torch.layout:
    """The layout of that name, without ``torch.``."""
    layout = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(layout, torch.layout):
        raise ValueError(f"this torch has no layout {str(name)[:100]!r}")
    return layout


def _check_payload(location: EntryLocation, dtype: torch.dtype, sizes: tuple[int, ...], key: str) -> None:
    payload_offset = location.payload_offset_bytes
    if payload_offset >= 0 and payload_offset + math.prod(sizes) * dtype.itemsize > location.length_bytes:
        raise CorruptCheckpointError(f"the entry of {key!r} is shorter than its tensor")


def _check_payloads(
    locations: Sequence[EntryLocation],
    dtypes: Sequence[torch.dtype],
    shapes: Sequence[tuple[int, ...]],
    keys: Sequence[str],
) -> None:
    """`_check_payload` of many, which nearly always fit."""
    needed = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
    if any(location[3] + size_bytes > location[2] for location, size_bytes in zip(locations, needed, strict=True)):
        for location, dtype, shape, key in zip(locations, dtypes, shapes, keys, strict=True):
            _check_payload(location, dtype, shape, key)


def check_chunks(key: str, dtype: torch.dtype, shape: tuple[int, ...], chunks: Sequence[ChunkRecord]) -> None:
    """Refuse chunks that leave the tensor or exceed their entries. They may leave gaps: see `check_coverage`.

    Raises:
        CorruptCheckpointError: They do.
    """
    for offsets, sizes, location in chunks:
        if sizes == shape and not any(offsets) and len(offsets) == len(shape):
            _check_payload(location, dtype, sizes, key)
            continue
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise CorruptCheckpointError(f"a chunk of {key!r} has another rank than its tensor")
        if any(offset + size > extent for offset, size, extent in zip(offsets, sizes, shape, strict=True)):
            raise CorruptCheckpointError(f"a chunk of {key!r} lies outside its tensor")
        _check_payload(location, dtype, sizes, key)
