"""The commit marker of a step: what it consists of, file by file. Pure.

Problem: a marker that only says "done" vouches for whatever lies beside it: files of an older save, of a save that
was torn in two, a copy that lost some (cases 2, 41, 44).

Way taken: one JSON object that names every file with size and CRC-32, the id of the save that wrote it, and the world
it was written by. It is put last, in one step. Whoever reads it can tell a whole step from anything else with one
listing, and a damaged file with one read. It is checked strictly when it is decoded, since anyone may have edited it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from dcpfs.checkpointer.layout import check_key
from dcpfs.errors import CorruptCheckpointError, UntrustedDataError
from dcpfs.format.names import check_relative_name

__all__ = ["SCHEMA_VERSION", "FileRecord", "Manifest", "decode_manifest", "encode_manifest"]

SCHEMA_VERSION = 1
_LARGEST_NUMBER = 1 << 62
_CRC32 = re.compile(r"[0-9a-f]{8}", re.ASCII)


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of a step.

    Attributes:
        size_bytes: Its length.
        crc32: CRC-32 of all its bytes, or None where whoever wrote it could not say.
    """

    size_bytes: int
    crc32: int | None = None


@dataclass(frozen=True)
class Manifest:
    """A committed step.

    Attributes:
        save_id: Id of the save; also in each key's ``.metadata``, where dcpfs wrote it.
        iteration: Of the step.
        world_size: Number of ranks that saved.
        files: Every file of the step but the manifest, by name relative to the step.
        keys: Keys in torch's format, each a directory with a ``.metadata``.
        rank_files: Key (``dataloader``) to global rank to the name of that rank's file, relative to the step. Several
            ranks may share one file.
        metric: What `keep_best` compares, or None.
        created_seconds: Seconds since the epoch, by the coordinator's clock.
        versions: Package to version.
        topology: Mesh of the world that saved, where known: ``{"mesh_shape": [2, 2], "mesh_dim_names": ["dp", "tp"]}``.
        fingerprint: Key to CRC-32 over the checksums of its entries: equal contents, equal number.
    """

    save_id: str
    iteration: int
    world_size: int
    files: Mapping[str, FileRecord]
    keys: tuple[str, ...] = ()
    rank_files: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    metric: float | None = None
    created_seconds: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)
    topology: Mapping[str, object] = field(default_factory=dict)
    fingerprint: Mapping[str, int] = field(default_factory=dict)


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest as JSON text, readable for people: one file per line.

    Raises:
        ValueError: A number is not finite, which JSON can't hold: the step could not be read.
    """
    record = {
        "schema": SCHEMA_VERSION,
        "save_id": manifest.save_id,
        "iteration": manifest.iteration,
        "world_size": manifest.world_size,
        "created": manifest.created_seconds,
        "versions": dict(manifest.versions),
        "metric": manifest.metric,
        "topology": dict(manifest.topology),
        "keys": list(manifest.keys),
        "fingerprint": {key: f"{value:08x}" for key, value in manifest.fingerprint.items()},
        "rank_files": {
            key: {str(rank): name for rank, name in sorted(names.items())} for key, names in manifest.rank_files.items()
        },
    }
    head = ",\n".join(f"  {json.dumps(name)}: {json.dumps(value, allow_nan=False)}" for name, value in record.items())
    files = ",\n".join(
        f"    {json.dumps(name)}: " + json.dumps(_file_to_json(each)) for name, each in sorted(manifest.files.items())
    )
    return f'{{\n{head},\n  "files": {{\n{files}\n  }}\n}}\n'.encode()


def decode_manifest(data: bytes, *, url: str) -> Manifest:
    """Read a manifest, checking every field. Fields that a later version added are passed over.

    Args:
        data: The bytes.
        url: Redacted URL of the step, for the error.

    Raises:
        CorruptCheckpointError: It is no manifest, or one of a schema that this version does not know.
        UntrustedDataError: A name leaves the step.
    """
    try:
        record = json.loads(data.decode("utf-8"), object_pairs_hook=_distinct)
        if not isinstance(record, dict):
            raise ValueError(f"it is a {type(record).__name__}, not an object")
        if "schema" not in record:
            raise ValueError("it says no schema, so it is another kind of file")
        schema = record["schema"]
        if schema != SCHEMA_VERSION:
            raise ValueError(f"schema {schema!r} is not known to this version, which knows {SCHEMA_VERSION}")
        files = {check_relative_name(str(name)): _file_from_json(value) for name, value in record["files"].items()}
        metric = record.get("metric")
        rank_files = {
            check_key(key): {_rank(rank): _member(name, files) for rank, name in names.items()}
            for key, names in record.get("rank_files", {}).items()
        }
        keys = tuple(check_key(key) for key in record["keys"])
        if len({*keys, *rank_files}) != len(keys) + len(rank_files):
            raise ValueError("a key stands there twice")
        holding = {name.partition("/")[0] for name in files}
        if not {*keys, *rank_files} <= holding or any(
            not name.startswith(f"{key}/") for key, names in rank_files.items() for name in names.values()
        ):
            raise ValueError("its files are not those of its keys")
        return Manifest(
            save_id=_text(record["save_id"]),
            iteration=_count(record["iteration"]),
            world_size=_world_size(record["world_size"]),
            files=files,
            keys=keys,
            rank_files=rank_files,
            metric=None if metric is None else _number(metric),
            created_seconds=_number(record.get("created", 0.0)),
            versions={str(name): str(value) for name, value in record.get("versions", {}).items()},
            topology=dict(record.get("topology", {})),
            fingerprint={str(key): int(value, 16) for key, value in record.get("fingerprint", {}).items()},
        )
    except UntrustedDataError as error:
        error.message = f"{error.message} (in the manifest of {url})"
        raise
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CorruptCheckpointError(
            f"can't read the manifest of {url}: {type(error).__name__}: {error}; it was damaged or edited, so load "
            "another step",
            file="manifest.json",
        ) from error


def _file_to_json(record: FileRecord) -> dict[str, object]:
    return {"size": record.size_bytes, "crc32": None if record.crc32 is None else f"{record.crc32:08x}"}


def _file_from_json(value: Mapping[str, object]) -> FileRecord:
    crc32 = value["crc32"]
    if crc32 is not None and (not isinstance(crc32, str) or not _CRC32.fullmatch(crc32)):
        raise ValueError(f"{crc32!r} is no CRC-32 in hexadecimal")
    return FileRecord(_count(value["size"]), None if crc32 is None else int(crc32, 16))


def _distinct(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name stands there twice")
    return fields


def _rank(text: str) -> int:
    rank = _count(int(text))
    if str(rank) != text:
        raise ValueError(f"{text[:80]!r} is no rank")
    return rank


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST_NUMBER:
        raise ValueError(f"{str(value)[:80]} is no count")
    return value


def _world_size(value: object) -> int:
    count = _count(value)
    if count == 0:
        raise ValueError("a world size of 0 is none")
    return count


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no finite number")
    return float(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _member(name: object, files: Mapping[str, FileRecord]) -> str:
    text = _text(name)
    if text not in files:
        raise ValueError(f"{text!r} is not among the files")
    return text
