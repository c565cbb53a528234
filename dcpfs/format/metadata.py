"""``.metadata``: torch's pickle of what the checkpoint holds, and dcpfs's index behind it.

Problem: torch unpickles this file without looking (case 110) and joins the names in it to paths unchecked (case 112).
A damaged number in it ends in an `IndexError` somewhere, or in a tensor read from the wrong place.

Way taken: `decode_index` takes dcpfs's own index where it is there and its checksums match, else decodes the pickle
through an allow-list of torch's metadata classes, and checks every name, number and type before anyone sees it.
`decode_metadata` gives torch's planners the objects they expect, rebuilt from the index, which is quicker than
unpickling, unless the metadata holds what the index has no place for.

Flow: ``Metadata`` → `encode_metadata` → bytes → `decode_index` (dcpfs's reads) or `decode_metadata` (torch's
planners). Without collectives each rank writes a file of its own: `merge_indexes` makes one of several.
"""

from __future__ import annotations

import json
import logging
import math
import pickle
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcpfs.config import Trust
from dcpfs.errors import CorruptCheckpointError, IncompleteCheckpointError, UntrustedDataError
from dcpfs.format.collector import paused_collector
from dcpfs.format.index import BytesRecord, CheckpointIndex, ChunkRecord, EntryLocation, RankSave, TensorRecord
from dcpfs.format.index_block import (
    IndexBlock,
    MetadataExtras,
    append_index,
    check_chunks,
    decode_layout,
    ends_with_index,
    is_cut_short,
    split_index,
)
from dcpfs.format.metadata_classes import STRUCTURE_ATTRIBUTE, load_metadata_pickle
from dcpfs.format.metadata_pickle import encode_metadata_pickle
from dcpfs.format.names import check_relative_name
from dcpfs.format.naming import naming
from dcpfs.format.rank_saves import check_one_save, find_differing_chunk, without_leftovers
from dcpfs.torch_private import StorageInfo

__all__ = [
    "INDEX_MARK",
    "check_coverage",
    "decode_both",
    "decode_index",
    "decode_metadata",
    "encode_metadata",
    "index_metadata",
    "merge_indexes",
    "metadata_from_index",
]

_logger = logging.getLogger(__name__)

INDEX_MARK = "dcpfs.index"
"""Among ``storage_meta.modules``: an index follows the pickle. Without it, a file that lost just its index would pass
for another writer's, and key types would be lost in silence."""
_LARGEST_NUMBER = 1 << 62
_make_location = partial(tuple.__new__, EntryLocation)
_make_record = partial(tuple.__new__, TensorRecord)
_make_chunk = partial(tuple.__new__, ChunkRecord)
"""What the constructors do, in a third of the time."""


def encode_metadata(
    metadata: Metadata,
    *,
    structure: object = None,
    save_id: str | None = None,
    entries: Sequence[tuple[MetadataIndex, object]] | None = None,
    rank_save: RankSave | None = None,
) -> bytes:
    """The whole ``.metadata`` file.

    Args:
        metadata: As torch's planner made it; ``storage_data`` maps `MetadataIndex` to `EntryLocation`, or to torch's
            storage records, which may carry ``payload_offset_bytes`` and ``crc32`` as attributes. Not changed.
        structure: JSON value that describes the containers of the state (`dcpfs.dcp.flatten`).
        save_id: Id of the save.
        entries: Taken in place of ``storage_data``: pairs of what it would hold, no two with the same key and offset.
        rank_save: For the file of a rank that saves without collectives: which save it belongs to.

    Raises:
        IncompleteCheckpointError: A record of the metadata has no entry in ``storage_data``.
    """
    with paused_collector():
        pairs = list((metadata.storage_data or {}).items()) if entries is None else entries
        return _encode(metadata, structure, save_id, pairs, rank_save)


def _encode(
    metadata: Metadata,
    structure: object,
    save_id: str | None,
    entries: Sequence[tuple[MetadataIndex, object]],
    rank_save: RankSave | None,
) -> bytes:
    located = [(index, _locate(info)) for index, info in entries]
    try:
        records = _make_records(metadata.state_dict_metadata, located)
    except CorruptCheckpointError as error:
        raise IncompleteCheckpointError(f"writing the metadata: {error.message}; nothing was published") from error
    has_paths = _is_paths(metadata.planner_data)
    index = CheckpointIndex(
        records,
        structure,
        metadata.planner_data if has_paths else {},
        save_id,
        written_by_dcpfs=True,
        rank_save=rank_save,
    )
    held = sum([len(record.chunks) if isinstance(record, TensorRecord) else 1 for record in records.values()])
    complete = held == len(located)
    extras = _extras(metadata, held, has_paths=has_paths) if complete else MetadataExtras()
    return append_index(encode_metadata_pickle(metadata, located), IndexBlock(index, extras))


def decode_index(
    data: bytes | memoryview, *, trust: Trust = Trust.ALLOWLIST, url: str = "the checkpoint"
) -> CheckpointIndex:
    """The table of contents of a checkpoint from its ``.metadata``, whoever wrote it.

    Args:
        data: The whole file.
        trust: Whether the allow-list applies to a pickle. Names and numbers are checked in any case.
        url: The checkpoint, redacted, for errors.

    Raises:
        CorruptCheckpointError: The bytes are damaged or contradict themselves.
        UntrustedDataError: A class is not on the allow-list, or a name leaves the checkpoint.
    """
    where = _where(url)
    with paused_collector(), naming(where):
        block = split_index(data, where=where)
        if block is not None:
            return block.contents
        return index_metadata(_load_pickle(data, trust, where), url=url)


def decode_both(
    data: bytes | memoryview, *, trust: Trust = Trust.ALLOWLIST, url: str = "the checkpoint"
) -> tuple[CheckpointIndex, Metadata]:
    """`decode_index` and `decode_metadata` in one pass over the file.

    Raises:
        CorruptCheckpointError: The bytes are damaged or contradict themselves.
        UntrustedDataError: A class is not on the allow-list, or a name leaves the checkpoint.
    """
    where = _where(url)
    with paused_collector(), naming(where):
        block = split_index(data, where=where)
        if block is not None and block.extras.complete:
            return block.contents, metadata_from_index(block.contents, block.extras)
        metadata = _load_pickle(data, trust, where)
        index = index_metadata(metadata, url=url)
        return index if block is None else block.contents, metadata


def decode_metadata(
    data: bytes | memoryview, *, trust: Trust = Trust.ALLOWLIST, url: str = "the checkpoint"
) -> Metadata:
    """Torch's own metadata object from ``.metadata``, whoever wrote it. Checked as `decode_index` checks it.

    Raises:
        CorruptCheckpointError: The bytes are damaged or contradict themselves.
        UntrustedDataError: A class is not on the allow-list, or a name leaves the checkpoint.
    """
    return decode_both(data, trust=trust, url=url)[1]


def index_metadata(metadata: Metadata, *, url: str = "the checkpoint") -> CheckpointIndex:
    """The table of contents of torch's metadata object, checked.

    Chunks that are listed twice (several ranks saved one replica) count once.

    Raises:
        CorruptCheckpointError: It contradicts itself.
        UntrustedDataError: A name leaves the checkpoint.
    """
    where = _where(url)
    try:
        if type(metadata.storage_data) is not dict or type(metadata.state_dict_metadata) is not dict:
            raise CorruptCheckpointError("it has no records")
        located = [(index, _check_location(_locate(info))) for index, info in metadata.storage_data.items()]
        records = _make_records(metadata.state_dict_metadata, located)
        structure = json.loads(json.dumps(getattr(metadata, STRUCTURE_ATTRIBUTE, None)))
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(
            f"reading {where}: the metadata is damaged: {error.message}", file=".metadata", key=error.key
        ) from error
    except UntrustedDataError:
        raise
    except Exception as error:
        # Attributes that are missing or of another kind, in more ways than can be listed.
        raise CorruptCheckpointError(
            f"reading {where}: the metadata is damaged ({type(error).__name__}: {str(error)[:200]})", file=".metadata"
        ) from error
    meta = metadata.storage_meta
    save_id = getattr(meta, "save_id", None)
    return CheckpointIndex(
        records,
        structure=structure,
        paths=dict(metadata.planner_data) if _is_paths(metadata.planner_data) else {},
        save_id=save_id if type(save_id) is str else None,
    )


def merge_indexes(indexes: Sequence[CheckpointIndex], *, url: str = "the checkpoint") -> CheckpointIndex:
    """One table of contents of the files that ranks wrote without collectives, the lowest rank first.

    Chunks of one tensor are joined; of a chunk or value that several hold, the first counts. Files of ranks that the
    save of rank 0 did not have are left out.

    Raises:
        CorruptCheckpointError: They are of several saves, or may be, since ranks hold different values of one chunk; or
            they disagree about the kind, dtype or shape of a key.
    """
    indexes = without_leftovers(indexes, url=url)
    is_one_save = check_one_save([index.rank_save for index in indexes], url=url)
    key = find_differing_chunk(indexes)
    if key is not None:
        if not is_one_save:
            raise CorruptCheckpointError(
                f"reading {url}: ranks that saved by themselves hold different values of {key!r}, and nothing says "
                "that they did so in one save; load it with dcp.load, where each rank gets its own, or load another "
                "checkpoint",
                key=key,
            )
        _logger.warning(
            "reading %s: ranks that saved by themselves hold different values of %r; that of the lowest rank counts "
            "(with dcp.load each rank gets its own)",
            url,
            key,
        )
    merged = CheckpointIndex({}, written_by_dcpfs=bool(indexes) and all(index.written_by_dcpfs for index in indexes))
    merged.structure = _join_notes([index.structure for index in indexes if index.structure is not None])
    for index in indexes:
        merged.paths = {**index.paths, **merged.paths}
        merged.save_id = merged.save_id if merged.save_id is not None else index.save_id
        for key, record in index.records.items():
            known = merged.records.setdefault(key, record)
            if known is record:
                continue
            if type(known) is not type(record) or (
                isinstance(known, TensorRecord)
                and isinstance(record, TensorRecord)
                and (known.dtype, known.shape) != (record.dtype, record.shape)
            ):
                raise CorruptCheckpointError(
                    f"reading {url}: the metadata of two ranks disagree about the kind, dtype or shape of {key!r}",
                    key=key,
                )
            if isinstance(known, TensorRecord) and isinstance(record, TensorRecord):
                merged.records[key] = known._replace(chunks=_distinct((*known.chunks, *record.chunks)))
    return merged


def _join_notes(structures: Sequence[Any]) -> object:
    """What ranks note of their containers. Of several notes of one mapping the first that has keys counts.

    Notes of another shape are damage, which shows where they are read: the first ones stay as they are.
    """
    joined: dict[str, list[Any]] = {}
    for structure in structures if len(structures) > 1 else ():
        notes = structure.get("containers") if type(structure) is dict else None
        for pair in notes if type(notes) is list else (None,):
            if type(pair) is not list or len(pair) != 2 or type(pair[1]) is not dict:
                return structures[0]
            path, note = pair
            known = joined.setdefault(json.dumps(path), [path, note])
            if known[1].get("empty") and not note.get("empty"):
                known[1] = note
    if joined:
        return {"containers": list(joined.values())}
    return structures[0] if structures else None


def check_coverage(index: CheckpointIndex, *, url: str = "the checkpoint") -> None:
    """Refuse a checkpoint whose tensors have gaps. Not for the file of a single rank.

    Raises:
        CorruptCheckpointError: The chunks of a tensor hold fewer elements than it has.
    """
    for key, record in index.records.items():
        if isinstance(record, TensorRecord):
            held = sum(math.prod(chunk.sizes) for chunk in record.chunks)
            elements = math.prod(record.shape)
            if held < elements:
                raise CorruptCheckpointError(
                    f"reading {_where(url)}: the metadata lists {held} of {elements} elements of {key!r}; a part "
                    f"of the checkpoint is missing",
                    file=".metadata",
                    key=key,
                )


def metadata_from_index(index: CheckpointIndex, extras: MetadataExtras | None = None) -> Metadata:
    """Torch's metadata object for an index, for planners that want one."""
    if extras is None:
        extras = MetadataExtras(has_paths=bool(index.paths), save_id=index.save_id, modules=())
    choices = [
        (decode_layout(layout), requires_grad, pin_memory) for layout, requires_grad, pin_memory in extras.properties
    ] or [(torch.strided, False, False)]
    numbers = iter(extras.property_numbers)
    shared: dict[tuple[torch.dtype, int], TensorProperties] = {}
    state: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    storage: dict[MetadataIndex, StorageInfo] = {}
    for key, record in index.records.items():
        if isinstance(record, BytesRecord):
            state[key] = BytesStorageMetadata()
            storage[MetadataIndex(key)] = _storage_info(record.location)
            continue
        choice = next(numbers, 0)
        properties = shared.get((record.dtype, choice))
        if properties is None:
            layout, requires_grad, pin_memory = choices[choice]
            properties = TensorProperties(record.dtype, layout, requires_grad, torch.contiguous_format, pin_memory)
            shared[record.dtype, choice] = properties
        chunks = []
        for number, (offsets, sizes, location) in enumerate(record.chunks):
            start = torch.Size(offsets)
            chunks.append(ChunkStorageMetadata(start, torch.Size(sizes)))
            storage[MetadataIndex(key, start, number)] = _storage_info(location)
        state[key] = TensorStorageMetadata(properties, torch.Size(record.shape), chunks)
    meta = None
    if extras.modules is not None:
        meta = StorageMeta(extras.checkpoint_id, extras.save_id, None, list(extras.modules))
    return Metadata(state, dict(index.paths) if extras.has_paths else None, storage, meta, extras.version)


def _where(url: str) -> str:
    return f"the .metadata of {url}"


def _storage_info(location: EntryLocation) -> StorageInfo:
    return StorageInfo(
        location.file,
        location.offset_bytes,
        location.length_bytes,
        list(location.transforms) if location.transforms else None,
    )


def _load_pickle(data: bytes | memoryview, trust: Trust, where: str) -> Metadata:
    if trust is Trust.PICKLE:
        try:
            loaded: object = pickle.loads(data)
        except Exception as error:
            raise CorruptCheckpointError(
                f"reading {where}: its pickle can't be loaded ({type(error).__name__}: {str(error)[:200]})",
                file=".metadata",
            ) from error
    else:
        loaded, length_bytes = load_metadata_pickle(data, where=where)
        if is_cut_short(data, length_bytes):
            raise CorruptCheckpointError(
                f"reading {where}: the file was cut short, or changed behind its pickle", file=".metadata"
            )
    if not isinstance(loaded, Metadata):
        raise CorruptCheckpointError(
            f"reading {where}: it holds a {type(loaded).__qualname__}, not torch's Metadata", file=".metadata"
        )
    for name in ("planner_data", "storage_data", "storage_meta", "version"):
        # torch before 2.3 wrote fewer fields; the class has their defaults.
        if name not in loaded.__dict__:
            setattr(loaded, name, None)
    if INDEX_MARK in _modules_of(loaded.storage_meta, where) and not ends_with_index(data):
        raise CorruptCheckpointError(
            f"reading {where}: the file was cut short, or changed behind its pickle", file=".metadata"
        )
    return loaded


def _modules_of(meta: object, where: str) -> list[str]:
    modules: object = meta.__dict__.get("modules") if isinstance(meta, StorageMeta) else None
    if modules is None and (meta is None or isinstance(meta, StorageMeta)):
        return []
    if not isinstance(modules, (list, tuple)) or any(type(name) is not str for name in modules):
        raise CorruptCheckpointError(f"reading {where}: its storage_meta is damaged", file=".metadata")
    return list(modules)


def _locate(info: object) -> EntryLocation:
    if type(info) is EntryLocation:
        return info
    if not isinstance(info, StorageInfo):
        raise CorruptCheckpointError(f"an entry is described by a {type(info).__qualname__}")
    fields: Any = info.__dict__
    transforms = fields.get("transform_descriptors")
    return _make_location(
        (
            fields["relative_path"],
            fields["offset"],
            fields["length"],
            fields.get("payload_offset_bytes", -1),
            fields.get("crc32", -1),
            tuple(transforms) if transforms else (),
        )
    )


def _check_location(location: EntryLocation) -> EntryLocation:
    check_relative_name(location.file)
    for number in (location.offset_bytes, location.length_bytes):
        if type(number) is not int or not 0 <= number <= _LARGEST_NUMBER:
            raise CorruptCheckpointError("an entry's offset or length is no sensible number")
    if any(type(name) is not str for name in location.transforms):
        raise CorruptCheckpointError("an entry's transform is not named by a string")
    return location


def _make_records(
    state: Mapping[str, object], entries: Iterable[tuple[MetadataIndex, EntryLocation]]
) -> dict[str, TensorRecord | BytesRecord]:
    by_chunk: dict[tuple[str, object], EntryLocation] = {}
    for index, location in entries:
        if type(index) is not MetadataIndex:
            raise CorruptCheckpointError("an entry has no key")
        by_chunk[index.fqn, index.offset] = location
    records: dict[str, TensorRecord | BytesRecord] = {}
    checked: dict[torch.Size, tuple[int, ...]] = {}
    # dcpfs's planner describes tensors of one dtype and shape by the same objects, torch's by equal ones.
    seen: dict[tuple[int, int, int], tuple[TensorRecord, int]] = {}
    equal: dict[tuple[object, ...], tuple[TensorRecord, int]] = {}
    for key, record in state.items():
        if type(key) is not str:
            raise CorruptCheckpointError("a key is not a string")
        if type(record) is BytesStorageMetadata:
            records[key] = BytesRecord(_find(by_chunk, key, None))
        elif type(record) is TensorStorageMetadata:
            if len(record.chunks) != 1:
                records[key] = _make_tensor_record(key, record, by_chunk, checked)
                continue
            chunk = record.chunks[0]
            signature = (id(record.properties), id(record.size), id(chunk))
            known = seen.get(signature)
            if known is None:
                values = (record.properties.dtype, record.size, chunk.offsets, chunk.sizes)
                known = equal.get(values)
                if known is None or type(record.chunks) is not list:
                    made = records[key] = _make_tensor_record(key, record, by_chunk, checked)
                    equal[values] = (made, math.prod(made.chunks[0].sizes) * made.dtype.itemsize)
                    continue
                seen[signature] = known
            (dtype, shape, ((offsets, sizes, _),)), payload_bytes = known
            found = by_chunk.get((key, offsets))
            if found is None or 0 <= found[3] > found[2] - payload_bytes:
                records[key] = _make_tensor_record(key, record, by_chunk, checked)  # which raises
                continue
            records[key] = _make_record((dtype, shape, (_make_chunk((offsets, sizes, found)),)))
        else:
            raise CorruptCheckpointError(f"{key!r} is described by a {type(record).__qualname__}", key=key)
    return records


def _find(by_chunk: Mapping[tuple[str, object], EntryLocation], key: str, offset: object) -> EntryLocation:
    location = by_chunk.get((key, offset))
    if location is None:
        raise CorruptCheckpointError(f"no entry is listed for {key!r}", key=key)
    return location


def _make_tensor_record(
    key: str,
    record: TensorStorageMetadata,
    by_chunk: Mapping[tuple[str, object], EntryLocation],
    checked: dict[torch.Size, tuple[int, ...]],
) -> TensorRecord:
    dtype = record.properties.dtype
    shape = _sizes(key, record.size, checked)
    if type(dtype) is not torch.dtype or type(record.chunks) is not list:
        raise CorruptCheckpointError(f"the record of {key!r} is malformed", key=key)
    chunks = []
    for chunk in record.chunks:
        offsets, sizes = _sizes(key, chunk.offsets, checked), _sizes(key, chunk.sizes, checked)
        chunks.append(ChunkRecord(offsets, sizes, _find(by_chunk, key, offsets)))
    distinct = _distinct(chunks) if len(chunks) > 1 else tuple(chunks)
    check_chunks(key, dtype, shape, distinct)
    return TensorRecord(dtype, shape, distinct)


def _sizes(key: str, sizes: object, checked: dict[torch.Size, tuple[int, ...]]) -> tuple[int, ...]:
    if type(sizes) is not torch.Size:
        raise CorruptCheckpointError(f"the sizes of {key!r} are no sizes", key=key)
    known = checked.get(sizes)
    if known is not None:
        return known
    plain = tuple(sizes)
    for number in plain:
        if type(number) is not int or not 0 <= number <= _LARGEST_NUMBER:
            raise CorruptCheckpointError(f"the sizes of {key!r} are no sensible numbers", key=key)
    checked[sizes] = plain
    return plain


def _distinct(chunks: Sequence[ChunkRecord]) -> tuple[ChunkRecord, ...]:
    """Each hyper-rectangle once, the first time it is listed."""
    known: dict[tuple[tuple[int, ...], tuple[int, ...]], ChunkRecord] = {}
    for chunk in chunks:
        known.setdefault((chunk.offsets, chunk.sizes), chunk)
    return tuple(known.values())


def _is_paths(planner_data: object) -> bool:
    """Torch's planner data: key to path."""
    if type(planner_data) is not dict:
        return False
    for key, path in planner_data.items():
        if type(key) is not str or type(path) is not tuple:
            return False
        for part in path:
            if type(part) is not str and type(part) is not int:
                return False
    return True


def _extras(metadata: Metadata, held: int, *, has_paths: bool) -> MetadataExtras:
    """What belongs to an index of so many entries. Entries without a record, or listed twice, only the pickle holds."""
    meta = metadata.storage_meta
    texts = [metadata.version] + ([] if meta is None else [meta.checkpoint_id, meta.save_id])
    complete = (
        (has_paths or metadata.planner_data is None)
        and all(text is None or type(text) is str for text in texts)
        and (meta is None or (meta.load_id is None and all(type(name) is str for name in meta.modules)))
    )
    choices: dict[tuple[str, bool, bool], int] = {}
    seen: dict[int, int] = {}
    numbers = []
    listed = 0
    for record in metadata.state_dict_metadata.values():
        if type(record) is not TensorStorageMetadata:
            listed += 1
            continue
        listed += len(record.chunks)
        properties = record.properties
        number = seen.get(id(properties))
        if number is None:
            choice = (
                str(properties.layout).removeprefix("torch."),
                properties.requires_grad,
                properties.pin_memory,
            )
            number = seen[id(properties)] = choices.setdefault(choice, len(choices))
            complete = complete and properties.memory_format is torch.contiguous_format
        numbers.append(number)
    if not complete or held != listed:
        return MetadataExtras()
    return MetadataExtras(
        complete=True,
        version=metadata.version,
        checkpoint_id=None if meta is None else cast("str | None", meta.checkpoint_id),
        save_id=None if meta is None else meta.save_id,
        modules=None if meta is None else tuple(meta.modules),
        has_paths=has_paths,
        properties=tuple(choices),
        property_numbers=tuple(numbers) if len(choices) > 1 else (),
    )
