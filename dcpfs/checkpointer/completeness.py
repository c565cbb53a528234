"""Whether a step is whole: the one answer for resume, retention and the command line.

Problem: the highest directory is not the newest step (case 40), a marker alone does not vouch for files that were lost
since (case 41), a copy may have all files and no marker (case 44), and a listing may be stale (case 78).

Way taken: a step is complete when its manifest checks out, every file of it at its size; or when another tool wrote it,
somebody named it (``latest_checkpoint.txt``, ``load_path``, ``load_step``), and every key has its ``.metadata`` and
every file that lists. What is not found is told apart from what could not be asked: a store that does not answer is an
error, never a "no".

Flow of `check_step`, with the requests it costs::

    manifest.json                one GET, first: all it lists was written before it
    everything below the step    one paged listing
    key/.metadata                one GET a key, only of a named foreign step
    what the listing lacks       one HEAD each, until one is really missing

What is found damaged, or to lack something, is looked at once more before that counts: an answer that was cut off on
the way must not cost a step.

``.writing`` beside a manifest means nothing: a save that takes a step over removes the manifest before it writes, and
what a manifest lists is not what another save writes (`dcpfs.checkpointer.ownership`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from dcpfs.checkpointer.layout import (
    KEYS,
    LATEST_NAME,
    MANIFEST_NAME,
    WRITING_NAME,
    parse_rank_file_name,
    parse_step_name,
    step_name,
)
from dcpfs.checkpointer.manifest import decode_manifest
from dcpfs.checkpointer.presence import get_if_there, size_if_there
from dcpfs.checkpointer.step_files import is_data_file, is_key, is_metadata_file
from dcpfs.checkpointer.step_status import StepState, StepStatus
from dcpfs.checkpointer.verification import FileFault, share_files, verify_step
from dcpfs.config import Trust
from dcpfs.errors import (
    CheckpointError,
    CorruptCheckpointError,
    DamagedObjectError,
    LinkOutsideError,
    UntrustedDataError,
)
from dcpfs.format.index import CheckpointIndex
from dcpfs.format.metadata import check_coverage, decode_index, merge_indexes
from dcpfs.format.names import METADATA_NAME, parse_rank_metadata_name, rank_metadata_name
from dcpfs.storage.location import Location
from dcpfs.storage.store import Store

__all__ = [
    "FileFault",
    "StepState",
    "StepStatus",
    "check_key_directory",
    "check_step",
    "check_step_at",
    "segments_of",
    "share_files",
    "verify_step",
]

_logger = logging.getLogger(__name__)

_ASKED_AT_ONCE = 16
_NAMED_AT_MOST = 5
_DOUBTED = frozenset({StepState.DAMAGED, StepState.PARTIAL})


def check_step(store: Store, iteration: int, *, named: bool = False, trust: Trust = Trust.ALLOWLIST) -> StepStatus:
    """Look at a step below a ``save_dir``.

    Args:
        store: Opened at ``save_dir``. Only read.
        iteration: Which step.
        named: ``latest_checkpoint.txt`` or the user names it, so that it may be another tool's.
        trust: What may be unpickled from the ``.metadata`` of a foreign step.

    Raises:
        StorageError: The store could not be asked.
    """
    return check_step_at(store, step_name(iteration), named=named, trust=trust)


def check_step_at(
    store: Store, path: str = "", *, named: bool = True, trust: Trust = Trust.ALLOWLIST, iteration: int | None = None
) -> StepStatus:
    """Look at a step at any directory of a store. See `check_step`.

    Args:
        store: Only read.
        path: The step's directory; "" is the store's own location.
        named: Somebody named it.
        trust: As for `check_step`.
        iteration: What its name says; None: the directory's name is looked at.

    Raises:
        StorageError: The store could not be asked.
    """
    location = store.location.join(path) if path else store.location
    told = parse_step_name(segments_of(location)[-1]) if iteration is None else iteration
    return _confirmed(lambda: _Look(store, path, location.redacted, trust, told).judge(named=named))


def check_key_directory(store: Store, path: str = "", *, trust: Trust = Trust.ALLOWLIST) -> StepStatus:
    """Look at one key's directory, a checkpoint of torch's own, by itself.

    Returns:
        A foreign status without a key and iteration: complete when its ``.metadata`` and all files it lists are there.

    Raises:
        StorageError: The store could not be asked.
    """
    location = store.location.join(path) if path else store.location
    return _confirmed(lambda: _Look(store, path, location.redacted, trust, None).judge_key_directory())


def segments_of(location: Location) -> list[str]:
    """The names that a location's URL consists of; at least one."""
    url = location.url
    if location.scheme in ("http", "https"):
        url = re.split("[?#]", url, maxsplit=1)[0]
    return url.rstrip("/").split("/")


def _confirmed(look: Callable[[], StepStatus]) -> StepStatus:
    """What a look finds; a second one's when the first speaks against the step."""
    first = look()
    if first.state not in _DOUBTED:
        return first
    second = look()
    if second.is_complete:
        _logger.warning("%s is complete, although the first look at it said that %s", second.url, first.reason)
    return second


class _Look:
    """One look at one directory."""

    def __init__(self, store: Store, path: str, url: str, trust: Trust, iteration: int | None) -> None:
        self._store = store
        self._path = path
        self._trust = trust
        self._status = StepStatus(iteration, StepState.ABSENT, "it holds no file", path=path, url=url)

    def judge(self, *, named: bool) -> StepStatus:
        try:
            return self._judge(named=named)
        except LinkOutsideError as error:  # of this step alone: it was moved away and linked back
            return self._found(StepState.OUTSIDE, f"it was not looked at: {error.message}")
        except DamagedObjectError as error:
            return self._found(StepState.DAMAGED, error.message)

    def _judge(self, *, named: bool) -> StepStatus:
        data = get_if_there(self._store, self._at(MANIFEST_NAME))
        files = self._list()
        if data is None and MANIFEST_NAME in files:  # it was committed in between
            data = self._get(MANIFEST_NAME)
            if data is None:
                return self._found(StepState.WRITING, "it is being overwritten or removed")
        if data is not None:
            self._status = replace(self._status, files=files)
            return self._judge_committed(data)
        keys, rank_files = _layout(files)
        self._status = replace(self._status, files=files, keys=keys, rank_files=rank_files)
        if WRITING_NAME in files or (not self._listable and self._get(WRITING_NAME) is not None):
            return self._found(StepState.WRITING, "a save is at work there, or died")
        if not files and self._listable:
            return self._status
        self._status = replace(self._status, foreign=True)
        if not named:
            return self._found(
                StepState.UNKNOWN,
                f"it has no {MANIFEST_NAME}, and {LATEST_NAME} does not name it",
            )
        return self._judge_foreign(files)

    def _judge_committed(self, data: bytes) -> StepStatus:
        status = self._status
        try:
            manifest = decode_manifest(data, url=status.url)
        except (CorruptCheckpointError, UntrustedDataError) as error:
            return self._found(StepState.DAMAGED, f"its {MANIFEST_NAME} can't be used: {error.message}")
        iteration = manifest.iteration if status.iteration is None else status.iteration
        self._status = replace(
            status, iteration=iteration, manifest=manifest, keys=manifest.keys, rank_files=manifest.rank_files
        )
        if manifest.iteration != iteration:
            return self._found(
                StepState.DAMAGED,
                f"its {MANIFEST_NAME} is that of iteration {manifest.iteration}: it was renamed or copied over",
            )
        faults = self._missing({name: (each.size_bytes, each.size_bytes) for name, each in manifest.files.items()})
        return self._with_faults(StepState.DAMAGED, faults)

    def _judge_foreign(self, files: Mapping[str, int]) -> StepStatus:
        keys = self._status.keys
        if not self._listable:
            keys = tuple(key for key in KEYS if self._store.exists(self._at(f"{key}/{METADATA_NAME}")))
            self._status = replace(self._status, keys=keys)
        if not keys:
            if not files:
                return replace(self._status, foreign=False)
            return self._found(StepState.PARTIAL, f"no directory of it has a {METADATA_NAME} or data files")
        lacking = tuple(f"{key}/{METADATA_NAME}" for key in keys if self._listable and not _metadata(files, key))
        if lacking:
            self._status = replace(self._status, missing=lacking[:_NAMED_AT_MOST])
            return self._found(StepState.PARTIAL, f"it lacks {_enumerate(lacking)}: that save did not finish")
        needed: dict[str, tuple[int, int | None]] = {}
        for key, sizes in zip(keys, self._read_sizes(files, keys), strict=True):
            if isinstance(sizes, str):
                return self._found(StepState.PARTIAL, f"the metadata of {key!r} can't be used: {sizes}")
            needed.update({f"{key}/{name}": (least_bytes, None) for name, least_bytes in sizes.items()})
        if not self._listable:
            self._status = replace(self._status, files={name: least for name, (least, _) in needed.items()})
        return self._with_faults(StepState.PARTIAL, self._missing(needed))

    def judge_key_directory(self) -> StepStatus:
        files = self._list()
        metadata = _own_metadata(files) if self._listable else [METADATA_NAME]
        self._status = replace(self._status, files=files, foreign=True)
        if not metadata:
            return self._found(StepState.PARTIAL if files else StepState.ABSENT, f"it has no {METADATA_NAME}")
        sizes = self._read_key_sizes(metadata)
        if isinstance(sizes, str):
            return self._found(StepState.PARTIAL, sizes)
        return self._with_faults(
            StepState.PARTIAL, self._missing({name: (least, None) for name, least in sizes.items()})
        )

    # -- what lies there

    @property
    def _listable(self) -> bool:
        return self._store.capabilities.listable

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}" if self._path else name

    def _get(self, name: str) -> bytes | None:
        return get_if_there(self._store, self._at(name))

    def _list(self) -> dict[str, int]:
        if not self._listable:
            return {}
        start = len(self._path) + 1 if self._path else 0
        return {info.path[start:]: info.size_bytes for info in self._store.list(self._path)}

    def _read_sizes(self, files: Mapping[str, int], keys: Sequence[str]) -> list[dict[str, int] | str]:
        """Of each key: its data files with their least sizes, or why its metadata can't be used."""
        named = [
            [f"{key}/{name}" for name in (_metadata(files, key) if self._listable else [METADATA_NAME])] for key in keys
        ]
        with ThreadPoolExecutor(min(_ASKED_AT_ONCE, len(named)), "dcpfs-look") as pool:
            return list(pool.map(self._read_key_sizes, named))

    def _read_key_sizes(self, names: Sequence[str]) -> dict[str, int] | str:
        indexes: list[CheckpointIndex] = []
        url = self._status.url
        for name in names:
            data = self._get(name)
            if data is None:
                return f"{name} is gone"
            try:
                indexes.append(decode_index(data, trust=self._trust, url=url))
            except CheckpointError as error:
                return error.message
        try:
            merged = merge_indexes(indexes, url=url)
            check_coverage(merged, url=url)
        except CorruptCheckpointError as error:
            return error.message
        return merged.data_files()

    # -- what should lie there

    def _missing(self, needed: Mapping[str, tuple[int, int | None]]) -> list[str]:
        """Files that are not there at a size between least and most, asked for by HEAD before it is said."""
        listed = self._status.files if self._listable else {}
        doubtful = [name for name, bounds in needed.items() if not _fits(listed.get(name), *bounds)]
        faults: list[str] = []
        with ThreadPoolExecutor(min(_ASKED_AT_ONCE, len(doubtful) or 1), "dcpfs-look") as pool:
            for batch in _batches(doubtful, _ASKED_AT_ONCE):
                for name, size_bytes in zip(batch, pool.map(self._size, batch), strict=True):
                    if not _fits(size_bytes, *needed[name]):
                        faults.append(name)
                if faults:
                    break
        return faults

    def _size(self, name: str) -> int | None:
        return size_if_there(self._store, self._at(name))

    def _with_faults(self, state: StepState, faults: Sequence[str]) -> StepStatus:
        if not faults:
            return replace(self._status, state=StepState.COMPLETE, reason="")
        self._status = replace(self._status, missing=tuple(faults[:_NAMED_AT_MOST]))
        return self._found(state, f"{_enumerate(faults)} missing or not of the size that is on record")

    def _found(self, state: StepState, reason: str) -> StepStatus:
        return replace(self._status, state=state, reason=reason)


def _fits(size_bytes: int | None, least_bytes: int, most_bytes: int | None) -> bool:
    return size_bytes is not None and least_bytes <= size_bytes and (most_bytes is None or size_bytes <= most_bytes)


def _layout(files: Iterable[str]) -> tuple[tuple[str, ...], dict[str, dict[int, str]]]:
    """Keys in torch's format, and rank files, by the names of the files alone.

    A directory is a key when it holds a data file or metadata: one of both is enough, since what it lacks then is what
    a save that died did not write. Other directories are nobody's business.
    """
    keys: dict[str, None] = {}
    rank_files: dict[str, dict[int, str]] = {}
    for name in sorted(files):
        key, _, rest = name.partition("/")
        if not is_key(key) or not rest:
            continue
        rank = parse_rank_file_name(rest)
        if rank is not None:
            rank_files.setdefault(key, {})[rank] = name
        elif is_metadata_file(name) or is_data_file(name):
            keys.setdefault(key)
    order = {key: number for number, key in enumerate(KEYS)}
    return tuple(sorted(keys, key=lambda key: (order.get(key, len(order)), key))), rank_files


def _metadata(files: Mapping[str, int], key: str) -> list[str]:
    """The metadata of a key relative to it: ``.metadata``, or what its ranks wrote by themselves."""
    start = len(key) + 1
    return _own_metadata({name[start:]: 0 for name in files if name.startswith(f"{key}/")})


def _own_metadata(files: Mapping[str, int]) -> list[str]:
    if METADATA_NAME in files:
        return [METADATA_NAME]
    ranks = sorted(rank for rank in map(parse_rank_metadata_name, files) if rank is not None)
    return [rank_metadata_name(rank) for rank in ranks]


def _enumerate(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMED_AT_MOST])
    return shown if len(names) <= _NAMED_AT_MOST else f"{shown} and others"


def _batches(names: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    for start in range(0, len(names), size):
        yield names[start : start + size]
