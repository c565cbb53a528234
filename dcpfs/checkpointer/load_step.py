"""Load one step: every key, every rank, all or a plain word about what was changed.

Problem: a loop of ``dcp.load`` over the keys finds out that the optimizer does not fit after the model has been filled,
waits for one small key after another, and leaves, when it fails in the middle, a trainer of which nobody knows which
half is new. A rank that fails alone leaves its peers in the next collective.

Way taken: all keys go through the same phases together. The metadata of all keys is read by one rank and shared; every
part on every rank is matched, and the rank files are read and decoded, before a byte of a tensor is; then one fetch
over all keys fills all tensors under one budget; then the parts take over their states in order. Ranks may have
different parts (stages of a pipeline, a dataloader on some ranks): what is decided is decided over their union. Each
phase ends in one exchange, where an error of any rank reaches all, from the read on with the keys that were changed by
then on any rank (``written_keys``)::

    all           which parts                                              one gathering
    coordinator   GET every .metadata, hold against the manifest           one broadcast
    all           templates, match, rank files                             one gathering
    all           fetch                                                    one gathering
    all           hand over: model, optim, all others                      one gathering each
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from dcpfs.checkpointer.choices import WorldSizePolicy
from dcpfs.checkpointer.fit_verdict import by_key, log_fits, log_left_out, require_fits
from dcpfs.checkpointer.groups import global_rank
from dcpfs.checkpointer.layout import DATALOADER, MODEL, OPTIM
from dcpfs.checkpointer.load_report import KeyReport, StepLoadReport, Strictness, choose_strictness
from dcpfs.checkpointer.manifest import Manifest
from dcpfs.checkpointer.part_loading import Fit, KeyLoading, all_placed, check_part, names_not_placed
from dcpfs.checkpointer.parts import topology_of
from dcpfs.checkpointer.phases import Phase, Phases
from dcpfs.checkpointer.rank_dealing import describe_dealing, describe_remeshing
from dcpfs.checkpointer.rank_file_loading import RankFileLoading, ReshardHook
from dcpfs.checkpointer.renaming import Renaming
from dcpfs.checkpointer.stored_step import StoredStep, read_stored_step
from dcpfs.config import CastPolicy, ReplicaReads, RetryConfig, TransferConfig, Trust, VerifyMode
from dcpfs.dcp.aliases import Alias, find_aliases, require_agreeing
from dcpfs.dcp.delivery import FetchTotals
from dcpfs.dcp.landing import TensorWant
from dcpfs.dcp.matching import key_mismatch_error
from dcpfs.dcp.replicas import SharedWants, share_wants
from dcpfs.dcp.source import CheckpointSource
from dcpfs.errors import CheckpointError, CheckpointNotFoundError, DcpfsError
from dcpfs.format.collector import paused_collector
from dcpfs.format.names import METADATA_NAME
from dcpfs.format.naming import naming
from dcpfs.ranks import Ranks, attempt, portable_error
from dcpfs.storage.location import Location
from dcpfs.worker_deaths import undisturbed_by_workers

if TYPE_CHECKING:
    from fsspec.callbacks import Callback

    from dcpfs.format.index import CheckpointIndex

__all__ = ["KeyReport", "StepLoadReport", "Strictness", "choose_strictness", "load_step"]

_logger = logging.getLogger(__name__)

T = TypeVar("T")


@undisturbed_by_workers()
def load_step(
    parts: Mapping[str, object],
    step: Location,
    *,
    keys: Sequence[str],
    manifest: Manifest | None = None,
    ranks: Ranks | None = None,
    strict: Mapping[str, Strictness] | bool = True,
    optional: Collection[str] = (),
    read_whole: Collection[str] = (),
    renaming: Renaming | None = None,
    directories: Mapping[str, str] | None = None,
    on_world_size_change: WorldSizePolicy | ReshardHook = WorldSizePolicy.ERROR,
    file_rank: int | None = None,
    verify: VerifyMode = VerifyMode.CHECKSUMS,
    trust: Trust = Trust.ALLOWLIST,
    allow_cast: CastPolicy = CastPolicy.NEVER,
    replicas: ReplicaReads = ReplicaReads.EACH,
    transfer: TransferConfig | None = None,
    retry: RetryConfig | None = None,
    callback: Callback | None = None,
    phases: Phases | None = None,
    changed: dict[str, set[str]] | None = None,
) -> StepLoadReport:
    """Load the keys of a step into the parts that ranks have. Collective over ``ranks``.

    The coordinator's ``manifest``, ``keys``, ``strict``, ``optional`` and ``replicas`` decide for all. A part that a
    rank passes and that is not among ``keys`` is left alone.

    Args:
        parts: Key to a `TemplatePart`, an object with ``state_dict`` and ``load_state_dict``, or a dict that is updated
            in place; None is no part. Ranks may pass different ones.
        step: Location of the step, or of one key's directory with ``directories={key: ""}``.
        keys: Keys to load, in the order in which parts take over. One that a rank passes must be there; one that
            nobody passes is read where it is a rank file or in ``read_whole``.
        manifest: Of the step; None: another tool wrote it. Only the coordinator's counts.
        ranks: Who loads; None: this process alone.
        strict: Strictness by key; `Strictness.EXACT` for keys that it does not name. Or one word for all, as in
            `choose_strictness`.
        optional: Keys whose absence is a warning.
        read_whole: Keys that are read as they are when nobody passes them, if they are there: each rank all of it.
        renaming: Rules for parameter names.
        directories: Key to directory relative to ``step``, where that is not the key.
        on_world_size_change: What becomes of rank files of another number of ranks, or of ranks that shared the data
            otherwise.
        file_rank: Global rank whose file this rank shares; None: its own.
        verify: Compare checksums of what is read whole, or sizes alone.
        trust: What may be unpickled.
        allow_cast: Which dtype differences are no mismatch.
        replicas: How ranks that need the same bytes get them.
        transfer: Concurrency, memory and request sizes.
        retry: When a request is tried again.
        callback: Told this rank's bytes.
        phases: Measures and watches; None: nobody does.
        changed: Key to names that earlier, failed attempts have begun to change on this rank, and that this one must
            bring; those that it changes are added.

    Raises:
        KeyMismatchError: A key or a part of it is missing, unexpected or mismatched. Nothing was changed.
        CorruptCheckpointError: A checksum, size or structure is wrong. ``written_keys`` says what was changed.
        IncompleteCheckpointError: A file is missing.
        CheckpointNotFoundError: Nothing of what was asked for is there.
        UntrustedDataError: A class is outside the allow-list.
        StorageError: The store failed.
        CheckpointError: A part did not take its state; chained.
        RankError: Another rank failed with an error of another kind.
    """
    ranks = Ranks() if ranks is None else ranks
    job = _StepLoad(step, ranks, phases or Phases(rank=ranks.rank))
    job.strict = choose_strictness(keys, strict=strict) if isinstance(strict, bool) else dict(strict)
    job.keys, job.optional, job.read_whole = tuple(keys), frozenset(optional), frozenset(read_whole)
    job.renaming, job.directories, job.on_world_size_change = renaming, dict(directories or {}), on_world_size_change
    job.allow_cast, job.replicas = allow_cast, replicas
    job.file_rank = file_rank
    job.source = CheckpointSource(step, verify=verify, trust=trust, transfer=transfer, retry=retry, callback=callback)
    job.retry = retry
    job.changed = {} if changed is None else changed
    try:
        return job.run(parts, manifest)
    finally:
        job.source.close()


@dataclass
class _Decisions:
    """What the coordinator decides for all: a value that travels once."""

    stored: StoredStep
    keys: tuple[str, ...]
    strict: Mapping[str, Strictness]
    optional: frozenset[str]
    read_whole: frozenset[str]
    replicas: ReplicaReads


class _StepLoad:
    """One call of `load_step`."""

    source: CheckpointSource
    keys: tuple[str, ...]
    strict: Mapping[str, Strictness]
    optional: frozenset[str]
    read_whole: frozenset[str]
    renaming: Renaming | None
    directories: dict[str, str]
    on_world_size_change: WorldSizePolicy | ReshardHook
    allow_cast: CastPolicy
    replicas: ReplicaReads
    retry: RetryConfig | None
    changed: dict[str, set[str]]
    file_rank: int | None

    def __init__(self, step: Location, ranks: Ranks, phases: Phases) -> None:
        self._step = step
        self._ranks = ranks
        self._phases = phases
        self._parts: dict[str, object] = {}
        self._passed: frozenset[str] = frozenset()
        self._reads: dict[int, int | None] = {}
        self._topology: dict[str, object] = {}
        self._stored = StoredStep()
        self._loadings: dict[str, KeyLoading] = {}
        self._indexes: dict[str, CheckpointIndex] = {}
        self._rank_files: dict[str, RankFileLoading] = {}
        self._unexpected: dict[str, tuple[str, ...]] = {}
        self._states: dict[str, object] = {}
        self._written: set[str] = set()
        self._wants: list[TensorWant] = []
        self._aliases: list[Alias] = []
        self._totals = FetchTotals()
        self._started_seconds = time.monotonic()

    def run(self, parts: Mapping[str, object], manifest: Manifest | None) -> StepLoadReport:
        with self._phases.phase("load metadata") as phase:
            self._agree_on_parts(parts)
            self._share_metadata(manifest)
            phase.add_bytes(sum(len(data) for files in self._stored.metadata.values() for data in files))
        with self._phases.phase("match"):
            self._agree_on_fit(attempt(self._match))
        with self._phases.phase("read") as phase:
            values = self._read(phase)
        with self._phases.phase("apply"):
            for keys in self._turns():
                self._agree_on_written(attempt(partial(self._apply, keys, values)))
        return self._report()

    # --- what is there

    def _agree_on_parts(self, parts: Mapping[str, object]) -> None:
        """Every rank's keys and place, so that all know who has what."""
        topology: dict[str, object] = {}

        def check() -> None:
            self._parts = {key: part for key, part in parts.items() if part is not None}
            for key, part in self._parts.items():
                check_part(key, part)
            topology.update(topology_of(self._parts.get(MODEL)))

        error = attempt(check)
        own = (frozenset(self._parts), global_rank(self._ranks), self.file_rank, topology)
        told = self._ranks.agree_and_gather(error, own)
        self._passed = frozenset().union(*(keys for keys, *_ in told))
        self._reads = {rank: leader for _, rank, leader, _ in told}
        self._topology = told[0][-1]

    def _share_metadata(self, manifest: Manifest | None) -> None:
        decisions: _Decisions | None = None
        error: BaseException | None = None
        if self._ranks.is_coordinator:
            try:
                stored = read_stored_step(
                    self._step,
                    [key for key in self.keys if self._is_read(key, manifest)],
                    store=self.source.store,
                    manifest=manifest,
                    directories=self.directories,
                    world_size=self._ranks.world_size,
                    transfer=self.source.transfer,
                    retry=self.retry,
                )
                self._require_keys(stored, manifest)
                decisions = _Decisions(stored, self.keys, self.strict, self.optional, self.read_whole, self.replicas)
            except BaseException as failure:  # noqa: BLE001 - broadcast to all ranks, which raise it
                error = failure
        told = self._ranks.broadcast_outcome(decisions, error, None)
        if told is None:
            raise RuntimeError("the coordinator has neither an error nor a decision")
        self._stored, self.keys, self.strict = told.stored, told.keys, told.strict
        self.optional, self.read_whole, self.replicas = told.optional, told.read_whole, told.replicas

    def _is_read(self, key: str, manifest: Manifest | None) -> bool:
        return key in self._passed or key in self.read_whole or _is_rank_key(key, manifest)

    def _require_keys(self, stored: StoredStep, manifest: Manifest | None) -> None:
        """Return when everything that was asked for is there, or may be absent."""
        held = (*stored.keys, *stored.left)
        lacking = [key for key in self.keys if key in self._passed and key not in stored.keys]
        fatal = []
        for key in lacking:
            if key in self.optional or (manifest is None and _is_rank_key(key, manifest)):
                _logger.warning("%s has no %r; what was passed for it is left as it is", self._step, key)
            else:
                fatal.append(key)
        if fatal and not held:
            whole = all(self._directory(key) for key in fatal)
            what = f"no {' and no '.join(map(repr, fatal))}" if whole else f"no {METADATA_NAME}"
            error = CheckpointNotFoundError(f"no checkpoint at {self._step}: it has {what}; check the URL")
            raise error if whole else self.source.explain_absence(error)
        if fatal:
            raise key_mismatch_error(
                self._step.redacted,
                missing=fatal,
                known=held,
                remedy=f"it holds {', '.join(held) or 'no key'}; leave the others out with keys_not_to_resume, or load "
                "another step",
            )

    # --- what fits

    def _match(self) -> None:
        """Match every key, and read the rank files. Nothing of the caller's is changed."""
        trust = self.source.trust
        known_names: Mapping[str, str] = {}
        with paused_collector():
            for key in self.keys:
                if key not in self._stored.metadata:
                    continue
                part = self._parts.get(key)
                if part is None and key in self._passed:
                    continue  # other ranks have it
                url = self._url_of(key)
                index = self._indexes[key] = self._stored.decode_index(key, trust=trust, url=url)
                with naming(url):
                    loading = KeyLoading(
                        key,
                        part,
                        index,
                        allow_cast=self.allow_cast,
                        renaming=self.renaming,
                        known_names=known_names,
                        url=url,
                    )
                self._loadings[key] = loading
                if key == MODEL:
                    known_names = loading.placement.fqns
        self._require_changed()
        self._wants = [want for key, each in self._loadings.items() for want in each.wants(self._directory(key))]
        self._aliases = find_aliases(self._wants)
        require_agreeing(self._aliases, self._step.redacted)
        for key in self.keys:
            if key in self._stored.rank_files:
                loading_ = RankFileLoading(
                    key,
                    self._parts.get(key),
                    self._stored,
                    ranks=self._ranks,
                    requested=key in self._passed,
                    policy=self.on_world_size_change,
                    url=self._step.redacted,
                    redealt=self._how_redealt(key),
                )
                loading_.read(self.source.store, trust=trust)
                self._rank_files[key] = loading_

    def _how_redealt(self, key: str) -> str:
        """How the ranks share the data otherwise than those that saved, as far as one knows; alike on all ranks."""
        stored = self._stored
        dealing = describe_dealing(stored.rank_files[key], self._reads, stored.records)
        if dealing or any(leader is not None for leader in self._reads.values()):
            return dealing
        return describe_remeshing(stored.topology, self._topology)

    def _require_changed(self) -> None:
        """Return when everything that a failed attempt has changed is loaded anew."""
        for key, names in self.changed.items():
            loading = self._loadings.get(key)
            lacking = names.difference(() if loading is None else loading.loaded)
            if lacking:
                raise CheckpointError(
                    f"can't fall back to {self._step}: an earlier attempt has changed {key}/{min(lacking)} and "
                    f"{len(lacking) - 1} more names that it does not hold; start the process anew, with load_step",
                    rank=self._ranks.rank,
                )

    def _agree_on_fit(self, error: BaseException | None) -> None:
        """Exchange what fits; raise what is too much on all ranks."""
        told = self._ranks.agree_and_gather(error, {key: each.fit for key, each in self._loadings.items()})
        fits = by_key([key for key in self.keys if key in self._passed], told)
        for key, found in fits.items():
            self._note_unexpected(key, found)
        unused = "" if self.renaming is None else self.renaming.describe_unused()
        stored = {key: index.records for key, index in self._indexes.items()}
        url = self._step.redacted
        require_fits(fits, self._unexpected, strict=self.strict, stored=stored, url=url, hint=unused)
        leads = self._ranks.is_coordinator
        for key, loading in self._loadings.items():
            log_left_out(key, loading.left_out, self._url_of(key), is_coordinator=leads)
        if leads:
            log_fits(fits, self._unexpected, self._url_of)
            if unused:
                _logger.warning("loading %s: %s", self._step, unused)
            if self._stored.left:
                _logger.info("%s also holds %s, which nobody asked for", self._step, ", ".join(self._stored.left))

    def _note_unexpected(self, key: str, found: Sequence[Fit]) -> None:
        """Every rank comes to the same names, those that have no part too."""
        if all_placed(found):
            self._unexpected[key] = ()
            return
        index = self._indexes.get(key)
        if index is None:
            index = self._stored.decode_index(key, trust=self.source.trust, url=self._url_of(key))
        self._unexpected[key] = tuple(names_not_placed(found, index.records))

    # --- bytes

    def _read(self, phase: Phase) -> dict[str, object]:
        """Fetch all tensors and values of all keys. Collective. The decoded values, by key and name."""
        values: dict[str, object] = {}
        shared: SharedWants | None = None
        wants, self._wants = self._wants, []
        objects = [item for key, each in self._loadings.items() for item in each.objects(self._directory(key))]
        if self.replicas is ReplicaReads.BROADCAST and self._ranks.world_size > 1:
            shared = share_wants(wants, self._ranks, self._aliases)
            wants = shared.rest
        sizes: dict[str, int] = {}
        for key, index in self._indexes.items():
            directory = self._directory(key)
            start = f"{directory}/" if directory else ""
            sizes.update((start + name, size_bytes) for name, size_bytes in index.data_files().items())
        fetch = self.source.new_fetch_of(sizes)

        def read() -> None:
            fetch.add_aliases(self._aliases)
            for want in wants:
                fetch.add_tensor(want)
            for name, location in objects:
                fetch.add_object(name, location)
            try:
                fetch.run()
            finally:
                for written in fetch.written:
                    key, _, name = written.partition("/")
                    if key in self._parts:
                        self._written.add(key)
                        self.changed.setdefault(key, set()).add(name)
            for name, _ in objects:
                values[name] = self.source.decode_object(name, fetch.objects.pop(name))

        error = attempt(read)
        self._totals = fetch.totals
        phase.add_bytes(fetch.totals.needed_bytes)
        self._agree_on_written(error)
        if shared is not None:
            everything = set(self._loadings)
            try:
                shared.exchange(self._ranks, self.source.transfer.budget_bytes)
            except DcpfsError as failure:
                _note_written(failure, everything, self.keys)
                raise
        return values

    def _agree_on_written(self, error: BaseException | None) -> None:
        """As `Ranks.agree`, where the error says what any rank has changed by now."""
        status = None if error is None else portable_error(error, self._ranks.rank)
        reports = self._ranks.all_gather((status, tuple(self._written)))
        failed = [report for report, _ in reports if report is not None]
        if not failed:
            return
        written = {key for _, keys in reports for key in keys}
        raised: BaseException = failed[0] if error is None else error
        if len(failed) > 1 and error is None:
            failed[0].message += f" (rank {', '.join(str(each.rank) for each in failed[1:])} failed as well)"
        if isinstance(raised, DcpfsError):
            _note_written(raised, written, self.keys)
        raise raised

    # --- taking over

    def _turns(self) -> list[list[str]]:
        """The keys in turns that end in an exchange, alike on all ranks.

        A model or optimizer may take its state in collectives of the trainer's own (FSDP1 does): a rank that failed in
        the turn before would leave the others waiting there.
        """
        turns: list[list[str]] = [[]]
        for key in self.keys:
            turns[-1].append(key)
            if key in (MODEL, OPTIM) and key in self._passed and self._ranks.world_size > 1:
                turns.append([])
        return [turn for turn in turns if turn] or [[]]

    def _apply(self, keys: Sequence[str], values: Mapping[str, object]) -> None:
        for key in keys:
            loading: KeyLoading | RankFileLoading | None = self._loadings.get(key) or self._rank_files.get(key)
            if loading is None:
                continue
            if key in self._parts:
                self._written.add(key)
                if isinstance(loading, KeyLoading):
                    self.changed.setdefault(key, set()).update(loading.loaded)
            try:
                if isinstance(loading, KeyLoading):
                    start = f"{key}/"
                    own = {name: value for name, value in values.items() if name.startswith(start)}
                    self._states[key] = loading.apply(own)
                elif loading.found:
                    self._states[key] = loading.apply()
            except DcpfsError:
                raise
            except Exception as error:
                raise CheckpointError(
                    f"loading {key!r} from {self._url_of(key)}: the {type(self._parts.get(key)).__name__} did not take "
                    f"its state: {type(error).__name__}: {error}",
                    rank=self._ranks.rank,
                ) from error

    def _report(self) -> StepLoadReport:
        reports = {
            key: KeyReport(
                each.loaded,
                each.fit.missing,
                self._unexpected.get(key, ()),
                dict(each.fit.mismatched),
                each.placement.skipped_wanted,
                {new: old for new, old in each.placement.sources.items() if new != old},
                dict(each.left_out),
            )
            for key, each in self._loadings.items()
        }
        held = {*self._stored.keys}
        absent = tuple(key for key in self.keys if key in self._passed and key not in held)
        report = StepLoadReport(
            reports,
            dict(self._states),
            absent,
            self._stored.left,
            self._totals.needed_bytes,
            self._totals.moved_bytes,
            self._totals.requests,
            time.monotonic() - self._started_seconds,
        )
        _logger.info(
            "loaded %s from %s (rank %d): %s; %d bytes moved in %d requests",
            ", ".join(self._states) or "nothing",
            self._step,
            self._ranks.rank,
            self._phases.summary(),
            report.moved_bytes,
            report.requests,
        )
        return report

    def _directory(self, key: str) -> str:
        return self.directories.get(key, key)

    def _url_of(self, key: str) -> str:
        return self._step.join(self._directory(key)).redacted


def _is_rank_key(key: str, manifest: Manifest | None) -> bool:
    return key == DATALOADER if manifest is None else key in manifest.rank_files


def _note_written(error: DcpfsError, written: Collection[str], keys: Sequence[str]) -> None:
    """Say in an error what was changed."""
    error.written_keys = tuple(key for key in keys if key in written)
    if error.written_keys:
        error.message = f"{error.message}; already changed, whole or in part: {', '.join(error.written_keys)}"
    else:
        error.message = f"{error.message}; nothing of the training state was changed"
