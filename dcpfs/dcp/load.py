"""Load a checkpoint into a state, or without one, in one call.

Problem: ``dcp.load`` plans in Python at 45 µs a tensor, has every rank read ``.metadata``, ends in a
``BaseException`` with a multi-page trace, and never says what it did not load (cases 5, 93, 103). It turns the int keys
of a scheduler's milestones into text, and drops empty containers.

Way taken: a road of its own from the checkpoint's index to the read plan. One rank reads the metadata and shares it;
the state is matched as a whole before a byte is read, and all ranks raise the same ordinary error together; tensors are
filled in place, other values are put back at the places and under the keys that the state itself has.

::

    coordinator: GET .metadata ──broadcast──► all: flatten, match ──agree──► fetch ──agree──► put values ──agree──►
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar, cast

import torch

from dcpfs.config import CastPolicy, ReplicaReads, RetryConfig, TransferConfig, Trust, VerifyMode
from dcpfs.dcp.aliases import Alias, find_aliases, require_agreeing
from dcpfs.dcp.delivery import FetchTotals
from dcpfs.dcp.fetch import Fetch
from dcpfs.dcp.flatten import Structure, unflatten
from dcpfs.dcp.matching import Match, check_plausible, key_mismatch_error, wants_of_box
from dcpfs.dcp.replicas import SharedWants, share_wants
from dcpfs.dcp.source import CheckpointSource
from dcpfs.dcp.state_filling import StateFilling
from dcpfs.errors import CheckpointNotFoundError
from dcpfs.format.collector import paused_collector
from dcpfs.format.index import BytesRecord, CheckpointIndex
from dcpfs.format.naming import naming
from dcpfs.ranks import Ranks, attempt, portable_error
from dcpfs.storage.location import Location
from dcpfs.worker_deaths import undisturbed_by_workers

if TYPE_CHECKING:
    from fsspec.callbacks import Callback
    from torch.distributed import ProcessGroup

__all__ = ["LoadReport", "load", "read"]

_logger = logging.getLogger(__name__)

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load did. Keys are flat, as the checkpoint has them.

    Attributes:
        loaded: Keys that were loaded on this rank.
        missing: Keys of this rank's state that the checkpoint lacks; left untouched.
        unexpected: Keys of the checkpoint that no rank has a place for.
        mismatched: Key to a sentence that says how kind, shape or dtype differ; left untouched.
        read_bytes: Bytes that this rank needed.
        moved_bytes: Bytes that this rank asked of the store, gaps included.
        requests: Requests that took.
        seconds: Wall time.
    """

    loaded: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: Mapping[str, str] = field(default_factory=dict)
    read_bytes: int = 0
    moved_bytes: int = 0
    requests: int = 0
    seconds: float = 0.0


@undisturbed_by_workers()
def load(
    state_dict: dict[str, Value],
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, object] | None = None,
    strict: bool = True,
    process_group: ProcessGroup | None = None,
    verify: VerifyMode | str = VerifyMode.CHECKSUMS,
    trust: Trust | str = Trust.ALLOWLIST,
    allow_cast: CastPolicy | str = CastPolicy.NEVER,
    replicas: ReplicaReads | str = ReplicaReads.EACH,
    transfer: TransferConfig | None = None,
    retry: RetryConfig | None = None,
    callback: Callback | None = None,
) -> LoadReport:
    """Load a checkpoint into a state. Collective over the process group, when there is one.

    Tensors are filled in place, on whatever device they are; of sharded ones each rank reads its own part. Other values
    are replaced in ``state_dict``. A top-level value with ``state_dict`` and ``load_state_dict`` gets its state through
    these. When a load fails in the middle, the error says which keys had been written.

    Args:
        state_dict: The state; nested dicts and lists may hold tensors and values.
        url: URL or local path of the checkpoint.
        storage_options: What the filesystem of the URL takes.
        strict: Raise when keys are missing, unexpected or mismatched, before anything is read. Otherwise load what
            fits, leave the rest untouched, and report it.
        process_group: The ranks that load together; None: the default group, or this process alone.
        verify: Compare the checksums of entries that are read whole, or sizes alone.
        trust: What may be unpickled.
        allow_cast: Which dtype differences are no mismatch.
        replicas: How ranks that need the same bytes get them.
        transfer: Concurrency, memory and request sizes.
        retry: When a request is tried again.
        callback: An fsspec ``Callback``, told this rank's bytes; from several threads, one call at a time.

    Raises:
        CheckpointNotFoundError: There is no checkpoint at ``url``.
        KeyMismatchError: ``strict``, and something does not fit. Nothing was read. Or, strict or not: tensors that
            share memory in the state have different values in the checkpoint.
        CorruptCheckpointError: A checksum, size or structure is wrong.
        IncompleteCheckpointError: A data file is missing.
        UntrustedDataError: The checkpoint holds a class outside the allow-list.
        StorageError: The store failed.
        RankError: Another rank failed with an error of another kind.
    """
    started_seconds = time.monotonic()
    ranks = Ranks.current(process_group)
    source: CheckpointSource | None = None
    error: BaseException | None = None
    job = _Load(cast("dict[str, object]", state_dict), ranks, strict)
    try:
        job.allow_cast, job.replicas = CastPolicy(allow_cast), ReplicaReads(replicas)
        source = CheckpointSource(
            Location(url, storage_options),
            verify=verify,
            trust=trust,
            transfer=transfer,
            retry=retry,
            callback=callback,
        )
    except BaseException as caught:  # noqa: BLE001 - handed to all ranks by the job, and raised
        error = caught
    try:
        report = job.run(source, error)
    finally:
        if source is not None:
            source.close()
    seconds = time.monotonic() - started_seconds
    totals = job.totals
    _logger.info(
        "loaded %d keys from %s in %.2f s: %d bytes, %d moved in %d requests%s",
        len(report.loaded),
        job.source.url,
        seconds,
        totals.needed_bytes,
        totals.moved_bytes,
        totals.requests,
        f" (rank {ranks.rank})" if ranks.world_size > 1 else "",
    )
    return LoadReport(
        report.loaded,
        report.missing,
        report.unexpected,
        report.mismatched,
        totals.needed_bytes,
        totals.moved_bytes,
        totals.requests,
        seconds,
    )


class _Load:
    """One call of `load`: each step ends with all ranks agreed."""

    def __init__(self, state_dict: dict[str, object], ranks: Ranks, strict: bool) -> None:
        self.allow_cast = CastPolicy.NEVER
        self.replicas = ReplicaReads.EACH
        self.totals = FetchTotals()
        self._state = state_dict
        self._ranks = ranks
        self._strict = strict
        self._source: CheckpointSource | None = None
        self._filling: StateFilling | None = None
        self._match = Match()
        self._aliases: list[Alias] = []

    @property
    def source(self) -> CheckpointSource:
        """The checkpoint; there is one once all ranks have agreed."""
        if self._source is None:
            raise RuntimeError("this rank could not open the checkpoint, so it must have failed before")
        return self._source

    def run(self, source: CheckpointSource | None, error: BaseException | None) -> LoadReport:
        """Load, and report. A rank that could not even begin brings its error instead of a source."""
        self._source = source
        files, error = self._share_metadata(error)
        index: CheckpointIndex | None = None
        if error is None:
            try:
                with paused_collector():
                    index = self.source.decode_index(*files)
                    self._prepare(index)
            except BaseException as failure:  # noqa: BLE001 - brought to the agreement below, which raises it
                error = failure
        match = self._match
        own = (tuple(match.missing), tuple(match.unexpected), match.mismatched)
        found = self._ranks.agree_and_gather(error, own)
        unexpected = _common([part[1] for part in found])
        if self._strict:
            self._raise_mismatches(found, unexpected, index)
        values = self._read(index)
        self._ranks.agree(attempt(lambda: self._put(values)))
        self._ranks.agree(attempt(self._hand_over))
        return LoadReport(tuple(match.loaded), tuple(match.missing), tuple(unexpected), dict(match.mismatched))

    def _share_metadata(self, error: BaseException | None) -> tuple[list[bytes], BaseException | None]:
        """The bytes of the metadata from the coordinator, whose ``strict`` and ``replicas`` decide for all."""
        files: list[bytes] = []
        if self._ranks.is_coordinator and error is None:
            try:
                files = self.source.read_all_metadata()
            except CheckpointNotFoundError as failure:
                error = self.source.explain_absence(failure)
            except BaseException as failure:  # noqa: BLE001 - shared with all ranks, which raise it
                error = failure
        if self._ranks.world_size > 1:
            status = None if error is None else portable_error(error, self._ranks.rank)
            shared = (files, status, self._strict, self.replicas)
            files, status, self._strict, self.replicas = self._ranks.broadcast(shared)
            error = error or status
        return files, error

    def _prepare(self, index: CheckpointIndex) -> None:
        self._filling = StateFilling(self._state)
        with naming(self.source.url):
            self._match = self._filling.match_records(index, allow_cast=self.allow_cast)
        self._aliases = find_aliases(self._match.wants)
        require_agreeing(self._aliases, self.source.url)

    def _raise_mismatches(
        self,
        found: list[tuple[tuple[str, ...], tuple[str, ...], dict[str, str]]],
        unexpected: list[str],
        index: CheckpointIndex | None,
    ) -> None:
        missing = list(dict.fromkeys(key for part in found for key in part[0]))
        mismatched = {key: text for part in found for key, text in part[2].items()}
        if missing or unexpected or mismatched:
            raise key_mismatch_error(
                self.source.url,
                missing=missing,
                unexpected=unexpected,
                mismatched=mismatched,
                known=index.records if index is not None else (),
            )

    def _read(self, index: CheckpointIndex | None) -> dict[str, object]:
        """Fetch everything, and decode the values. Collective."""
        values: dict[str, object] = {}
        error: BaseException | None = None
        fetch: Fetch | None = None
        wants = self._match.wants
        shared: SharedWants | None = None
        if self.replicas is ReplicaReads.BROADCAST and self._ranks.world_size > 1:
            shared = share_wants(wants, self._ranks, self._aliases)
            wants = shared.rest
        try:
            if index is not None:
                fetch = self.source.new_fetch(index)
                fetch.add_aliases(self._aliases)
                for want in wants:
                    fetch.add_tensor(want)
                for key, location in self._match.objects:
                    fetch.add_object(key, location)
                fetch.run()
                self.totals = fetch.totals
                for key, _ in self._match.objects:
                    values[key] = self.source.decode_object(key, fetch.objects.pop(key))
        except BaseException as failure:  # noqa: BLE001 - brought to the agreement below, which raises it
            error = failure
        self._ranks.agree(error)
        if shared is not None:
            shared.exchange(self._ranks, self.source.transfer.budget_bytes)
        return values

    def _put(self, values: Mapping[str, object]) -> None:
        if self._filling is not None:
            self._filling.put(values)

    def _hand_over(self) -> None:
        if self._filling is not None:
            self._filling.hand_over()


def _common(unexpected: list[tuple[str, ...]]) -> list[str]:
    """Keys that no rank asked for: ranks of a pipeline each have a part of the state."""
    rest = set(unexpected[0]).intersection(*unexpected[1:])
    return [key for key in unexpected[0] if key in rest]


def read(
    url: str | os.PathLike[str],
    keys: Iterable[str] | str | None = None,
    *,
    storage_options: Mapping[str, object] | None = None,
    verify: VerifyMode | str = VerifyMode.CHECKSUMS,
    trust: Trust | str = Trust.ALLOWLIST,
    transfer: TransferConfig | None = None,
    retry: RetryConfig | None = None,
    callback: Callback | None = None,
) -> dict[str, object]:
    """Read a checkpoint, or some of its keys, without a template. Not collective: the calling process reads alone.

    Tensors come whole, on the CPU; containers and key types come back as they were saved (those of another writer as
    far as its metadata tells).

    Args:
        url: URL or local path of the checkpoint.
        keys: Flat keys, or prefixes of such that end before a dot (``"model"`` takes ``"model.weight"``). Only their
            bytes are read. None: everything.
        storage_options: What the filesystem of the URL takes.
        verify: Compare checksums, or sizes alone.
        trust: What may be unpickled.
        transfer: Concurrency, memory and request sizes.
        retry: When a request is tried again.
        callback: An fsspec ``Callback``, told bytes.

    Raises:
        CheckpointNotFoundError: There is no checkpoint at ``url``.
        KeyMismatchError: A key is not in it; the text has the closest names.
        CorruptCheckpointError: A checksum, size or structure is wrong.
        UntrustedDataError: It holds a class outside the allow-list.
        StorageError: The store failed.
    """
    started_seconds = time.monotonic()
    source = CheckpointSource(
        Location(url, storage_options),
        verify=verify,
        trust=trust,
        transfer=transfer,
        retry=retry,
        callback=callback,
    )
    try:
        try:
            files = source.read_all_metadata()
        except CheckpointNotFoundError as error:
            raise source.explain_absence(error) from error.__cause__
        index = source.decode_index(*files)
        structure = Structure.from_json(index.structure, index.paths)
        if keys is None:
            chosen = list(index.records)
        else:
            chosen, structure = _choose(keys, index, structure, source.url)
        leaves: dict[str, object] = {}
        fetch = source.new_fetch(index)
        for key in chosen:
            record = index.records[key]
            if isinstance(record, BytesRecord):
                leaves[key] = None
                fetch.add_object(key, record.location)
                continue
            check_plausible(key, record, source.url)
            tensor = torch.empty(record.shape, dtype=record.dtype, device="cpu")
            leaves[key] = tensor
            with naming(source.url):
                for want in wants_of_box(key, record, (0,) * len(record.shape), record.shape, tensor):
                    fetch.add_tensor(want)
        fetch.run()
    finally:
        source.close()
    for key in list(fetch.objects):
        leaves[key] = source.decode_object(key, fetch.objects.pop(key))
    state = unflatten(leaves, structure)
    totals = fetch.totals
    _logger.info(
        "read %d keys from %s in %.2f s: %d bytes, %d moved in %d requests",
        len(chosen),
        source.url,
        time.monotonic() - started_seconds,
        totals.needed_bytes,
        totals.moved_bytes,
        totals.requests,
    )
    return cast("dict[str, object]", state)


def _choose(
    keys: Iterable[str] | str, index: CheckpointIndex, structure: Structure, url: str
) -> tuple[list[str], Structure]:
    """The flat keys that were asked for, and the structure of these and of the empty mappings among them."""
    asked = [keys] if isinstance(keys, str) else list(keys)
    empty = {".".join(map(str, path)): path for path, note in structure.containers.items() if note.empty and path}
    chosen: dict[str, None] = {}
    missing = []
    for name in asked:
        found = [name] if name in index.records or name in empty else []
        found = found or [key for key in (*index.records, *empty) if key.startswith(f"{name}.")]
        if not found:
            missing.append(name)
        chosen.update(dict.fromkeys(found))
    if missing:
        remedy = "ask for flat keys, or for prefixes of such that end before a dot"
        raise key_mismatch_error(url, missing=missing, known=index.records, remedy=remedy)
    leaves = [key for key in index.records if key in chosen]
    return leaves, structure.restricted(leaves, [path for key, path in empty.items() if key in chosen])
