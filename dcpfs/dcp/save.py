"""Save a state in one call, with errors that a trainer can catch.

Problem: ``dcp.save`` reports a failure as a ``BaseException`` whose text is a trace of many pages, leaves the files
of the ranks that succeeded, and plans slowly.

Way taken: the same storage writer and planner protocol, driven here. Two exchanges: plans to the coordinator and
back, results to the coordinator and its verdict back. Whatever fails on any rank reaches every rank in the exchange
that follows, so that nobody waits for the one who left: the rank that failed raises its own exception, the others
the same error as a value. When the write failed anywhere, each rank deletes what it wrote; when publishing failed, the
coordinator does, marker first.

::

    every rank: plan ──► coordinator: compare, share out, refuse or withdraw ──► every rank: write
    every rank: results or error ──► coordinator: account, publish .metadata ──► every rank: return, or delete and raise
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dcpfs.config import RetryConfig, TransferConfig, Trust
from dcpfs.dcp.save_planner import SavePlanner
from dcpfs.dcp.stateful import own_state
from dcpfs.dcp.writer import FsspecStorageWriter
from dcpfs.errors import ConfigError, DcpfsError
from dcpfs.ranks import Ranks, warn_if_not_joined
from dcpfs.worker_deaths import undisturbed_by_workers

if TYPE_CHECKING:
    from fsspec.callbacks import Callback
    from torch.distributed import ProcessGroup
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan
    from torch.distributed.checkpoint.storage import WriteResult

__all__ = ["SaveReport", "save"]


@dataclass(frozen=True)
class SaveReport:
    """What one rank's part of a save did.

    Attributes:
        url: The redacted URL.
        save_id: Id of the save, as in the checkpoint (the coordinator's).
        seconds: From the call to its return.
        bytes_written: By this rank, the metadata not counted.
        requests: Parts and small objects sent by this rank.
        files: Data files written by this rank.
    """

    url: str
    save_id: str
    seconds: float
    bytes_written: int
    requests: int
    files: int


@undisturbed_by_workers()
def save(
    state_dict: Mapping[str, object],
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, object] | None = None,
    overwrite: bool = False,
    process_group: ProcessGroup | None = None,
    transfer: TransferConfig | None = None,
    retry: RetryConfig | None = None,
    callback: Callback | None = None,
    trust: Trust = Trust.ALLOWLIST,
) -> SaveReport:
    """Save a nested state to any URL, in torch's DCP format. Collective where there is a process group.

    Values with ``state_dict`` and ``load_state_dict`` are asked for their state. Tensors are read while the call runs
    and not changed.

    Args:
        state_dict: Nested mappings and lists of tensors, DTensors, ShardedTensors and plain values.
        url: Where to; the same on all ranks.
        storage_options: What the filesystem of the URL takes.
        overwrite: False: an existing checkpoint is an error. True: it is withdrawn before the first byte; if the
            save fails nothing is loadable there.
        process_group: Who saves together; None: the default group, or this process alone.
        transfer: How bytes are moved.
        retry: When requests are tried again.
        callback: An fsspec callback, told this rank's bytes.
        trust: `Trust.PICKLE`: objects that a default load refuses are saved all the same.

    Raises:
        CheckpointExistsError: One stands there and ``overwrite`` is False.
        UnsupportedValueError: A value can't be stored exactly; nothing was touched.
        ReplicaMismatchError: Ranks disagree about a key they share; nothing was touched.
        StorageError: The store failed. No file of this save is left where it could be deleted.
        DcpfsError: Another rank failed; its text and rank.
    """
    started_seconds = time.monotonic()
    ranks = Ranks.current(process_group)
    warn_if_not_joined(ranks)
    writer: FsspecStorageWriter | None = None
    planner = SavePlanner(trust=trust)
    plan: SavePlan | None = None
    error: BaseException | None = None
    try:
        writer = FsspecStorageWriter(
            url,
            storage_options=storage_options,
            overwrite=overwrite,
            transfer=transfer,
            retry=retry,
            callback=callback,
            trust=trust,
        )
        plan = _plan_locally(state_dict, planner, writer, ranks)
    except BaseException as caught:  # noqa: BLE001 - handed to all ranks below, and raised
        error = caught
    session = _Session(ranks, planner, writer)
    save_id = session.run(plan, error)
    written = session.writer.written
    return SaveReport(
        session.writer.checkpoint_id,
        save_id,
        time.monotonic() - started_seconds,
        written.bytes_written,
        written.requests + (1 if ranks.is_coordinator else 0),
        written.files,
    )


def _plan_locally(
    state_dict: Mapping[str, object], planner: SavePlanner, writer: FsspecStorageWriter, ranks: Ranks
) -> SavePlan:
    if not isinstance(state_dict, Mapping):
        raise ConfigError(f"can't save a {type(state_dict).__name__}: the state must be a mapping of keys to values")
    state = {key: own_state(value) for key, value in state_dict.items()}
    meta = writer.storage_meta()
    planner.set_up_planner(state, storage_meta=meta, is_coordinator=ranks.is_coordinator)
    writer.set_up_storage_writer(ranks.is_coordinator, rank=ranks.rank, use_collectives=True)
    return writer.prepare_local_plan(planner.create_local_plan())


def _check_urls(urls: Sequence[str]) -> None:
    """Return when all ranks save to one URL: a checkpoint whose files lie at several can't be loaded."""
    for rank, url in enumerate(urls):
        if url != urls[0]:
            raise ConfigError(
                f"can't save: rank 0 saves to {urls[0]} and rank {rank} to {url}; give all ranks the same URL, e.g. by "
                "broadcasting a time or a random name that is part of it"
            )


class _Session:
    """The exchanges of one save. Every method is collective."""

    def __init__(self, ranks: Ranks, planner: SavePlanner, writer: FsspecStorageWriter | None) -> None:
        self._ranks = ranks
        self._planner = planner
        self._writer = writer
        # Only once the coordinator has said that it will not publish: files of a marker that stands must stay.
        self._discard = False

    @property
    def writer(self) -> FsspecStorageWriter:
        """The writer; there is one once all ranks have planned."""
        if self._writer is None:
            raise RuntimeError("this rank has no writer, so it must have failed before")
        return self._writer

    def run(self, plan: SavePlan | None, error: BaseException | None) -> str:
        """Plan globally, write, publish; return the save id."""
        try:
            return self._run(plan, error)
        finally:
            if self._writer is not None:
                if self._discard:
                    self._writer.discard()
                self._writer.close()

    def _run(self, plan: SavePlan | None, error: BaseException | None) -> str:
        metadata: Metadata | None = None
        url = "" if self._writer is None else self._writer.checkpoint_id
        plans = self._ranks.gather_outcomes((plan, url), error)
        assigned: list[SavePlan] | None = None
        failure: BaseException | None = None
        if plans is not None and not isinstance(plans, DcpfsError):
            try:
                _check_urls([url for _, url in plans])
                planned, metadata = self._planner.create_global_plan([each for each, _ in plans if each is not None])
                assigned = self.writer.prepare_global_plan(planned)
            except BaseException as caught:  # noqa: BLE001 - handed to all ranks by _scatter, and raised
                failure = caught
        elif plans is not None:
            failure = plans
        mine = self._ranks.scatter_outcome(assigned, failure, error)
        results: list[WriteResult] | None = None
        error = None
        try:
            results = self.writer.write_data(self._planner.finish_plan(mine), self._planner).value()
        except BaseException as caught:  # noqa: BLE001 - handed to all ranks below, and raised
            error = caught
        written = self._ranks.gather_outcomes(results, error)
        failure = None
        if metadata is not None and written is not None and not isinstance(written, DcpfsError):
            try:
                self.writer.publish(metadata, [each for each in written if each is not None])
            except BaseException as caught:  # noqa: BLE001 - handed to all ranks by _broadcast, and raised
                failure = caught
        elif isinstance(written, DcpfsError):
            failure = written
        said = self.writer.save_id, isinstance(written, DcpfsError)
        (save_id, self._discard), verdict = self._ranks.broadcast_verdict(said, failure, error)
        if verdict is not None:
            raise verdict
        return save_id
