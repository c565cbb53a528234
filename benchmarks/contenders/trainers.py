"""Who saves the whole state of a trainer: dcpfs in each of its modes, and torch's own calls key by key.

The last is what a trainer writes that has no checkpointer: ``dcp.save`` for each part, a pickle for each rank's place
in the data, and a file that names the newest step. It has no commit: when it dies half-way, it leaves a step that looks
like one.
"""

from __future__ import annotations

import importlib
import io
from typing import ClassVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import dcpfs

from ..files import filesystem_of, import_filesystem, writable_filesystem_of
from ..settings import Target
from ..training import Training
from .ours import import_dcpfs
from .s3_connector import S3TorchConnector, connector_reader, connector_writer

__all__ = [
    "ConnectorKeyByKey",
    "DcpfsProcess",
    "DcpfsSync",
    "DcpfsThread",
    "TorchKeyByKey",
    "TorchKeyByKeyFourThreads",
]

_NEWEST = "latest_checkpoint.txt"


class DcpfsSync:
    """`DistributedCheckpointer` that saves in the caller."""

    mode: ClassVar[str] = "disabled"

    def __init__(self) -> None:
        self._checkpointer: dcpfs.DistributedCheckpointer | None = None
        self._config: dcpfs.CheckpointConfig | None = None

    def available(self) -> str | None:
        """Always."""
        return None

    def import_modules(self, target: Target) -> None:
        """The checkpointer, and what saves and loads for it."""
        importlib.import_module("dcpfs.checkpointer.checkpointer")
        import_dcpfs(target.url)

    def open(self, target: Target) -> None:
        """Make the checkpointer; its background process, if any, starts here."""
        self._config = dcpfs.CheckpointConfig.model_validate(
            {"save_dir": target.url, "storage_options": target.storage_options(), "async_mode": self.mode}
        )
        self._checkpointer = dcpfs.DistributedCheckpointer(self._config)

    def save(self, training: Training, iteration: int) -> None:
        """Save."""
        self._open().save(
            training.model,
            training.optimizer,
            training.scheduler,
            None,
            iteration,
            dataloader=training.dataloader,
            trainer=training.progress,
        )

    def release(self) -> None:
        """Wait for the copy."""
        self._open().maybe_wait_for_staging()

    def finish(self) -> None:
        """Wait for the commit."""
        self._open().wait()

    def load(self, training: Training) -> int:
        """Load with a checkpointer of its own, as a new start would."""
        if self._config is None:
            raise RuntimeError("the contender has not been opened")
        with dcpfs.DistributedCheckpointer(self._config, access="read_only") as checkpointer:
            return checkpointer.load(
                training.model,
                training.optimizer,
                training.scheduler,
                dataloader=training.dataloader,
                trainer=training.progress,
            )

    def close(self) -> None:
        """Close."""
        if self._checkpointer is not None:
            self._checkpointer.close()

    def _open(self) -> dcpfs.DistributedCheckpointer:
        if self._checkpointer is None:
            raise RuntimeError("the contender has not been opened")
        return self._checkpointer


class DcpfsThread(DcpfsSync):
    """In a thread."""

    mode = "async"


class DcpfsProcess(DcpfsSync):
    """In a process of its own."""

    mode = "async_with_pinned_mem"


class TorchKeyByKey:
    """``dcp.save`` for each part."""

    threads: ClassVar[int] = 1

    def __init__(self) -> None:
        self._target: Target | None = None

    def available(self) -> str | None:
        """Always: it is part of torch."""
        return None

    def import_modules(self, target: Target) -> None:
        """The filesystem."""
        import_filesystem(target)

    def open(self, target: Target) -> None:
        """Remember where."""
        self._target = target

    def save(self, training: Training, iteration: int) -> None:
        """Save; everything is stored when it returns."""
        step = self._place().child(f"step-{iteration}")
        parts: dict[str, dict[str, object]] = {
            "model": dict(get_model_state_dict(training.model)),
            "optim": dict(get_optimizer_state_dict(training.model, training.optimizer)),
            "scheduler": training.scheduler.state_dict(),
            "trainer": dict(training.progress),
        }
        for key, state in parts.items():
            save(state, storage_writer=self._writer(step.child(key)))
        filesystem, root = writable_filesystem_of(step.child("dataloader"))
        stream = io.BytesIO()
        torch.save(training.dataloader, stream)
        filesystem.pipe_file(f"{root}/rank_{_rank()}.pkl", stream.getvalue())
        if dist.is_initialized():
            dist.barrier()
        if _rank() == 0:
            filesystem.pipe_file(f"{filesystem_of(self._place())[1]}/{_NEWEST}", f"{iteration}\n".encode())

    def release(self) -> None:
        """Nothing is under way."""

    def finish(self) -> None:
        """Wait for rank 0, who names the step."""
        if dist.is_initialized():
            dist.barrier()

    def load(self, training: Training) -> int:
        """Load key by key."""
        filesystem, root = filesystem_of(self._place())
        iteration = int(filesystem.cat_file(f"{root}/{_NEWEST}"))
        step = self._place().child(f"step-{iteration}")
        model = get_model_state_dict(training.model)
        load(model, storage_reader=self._reader(step.child("model")))
        set_model_state_dict(training.model, model)
        optim = get_optimizer_state_dict(training.model, training.optimizer)
        load(optim, storage_reader=self._reader(step.child("optim")))
        set_optimizer_state_dict(training.model, training.optimizer, optim)
        scheduler = training.scheduler.state_dict()
        load(scheduler, storage_reader=self._reader(step.child("scheduler")))
        training.scheduler.load_state_dict(scheduler)
        progress: dict[str, int] = dict(training.progress)
        load(progress, storage_reader=self._reader(step.child("trainer")))
        training.progress.update(progress)
        stored = filesystem.cat_file(f"{root}/step-{iteration}/dataloader/rank_{_rank()}.pkl")
        training.dataloader.update(torch.load(io.BytesIO(stored), weights_only=True))
        return iteration

    def close(self) -> None:
        """Nothing is open."""

    def _place(self) -> Target:
        if self._target is None:
            raise RuntimeError("the contender has not been opened")
        return self._target

    def _writer(self, target: Target) -> FileSystemWriter:
        if target.directory is not None:
            return FileSystemWriter(target.directory, thread_count=self.threads)
        return FsspecWriter(target.url, sync_files=False, **target.storage_options())  # type: ignore[arg-type] # options are what the scheme takes

    def _reader(self, target: Target) -> FileSystemReader:
        if target.directory is not None:
            return FileSystemReader(target.directory)
        return FsspecReader(target.url, **target.storage_options())


class TorchKeyByKeyFourThreads(TorchKeyByKey):
    """The same with four writer threads on local files."""

    threads = 4


class ConnectorKeyByKey(TorchKeyByKey):
    """The same with s3torchconnector's classes."""

    def available(self) -> str | None:
        """Absent when the package is."""
        return S3TorchConnector().available()

    def import_modules(self, target: Target) -> None:
        """The package, and the filesystem for what is no checkpoint of torch's."""
        S3TorchConnector().import_modules(target)
        import_filesystem(target)

    def _writer(self, target: Target) -> FileSystemWriter:
        return connector_writer(target)

    def _reader(self, target: Target) -> FileSystemReader:
        return connector_reader(target, S3TorchConnector.reader)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
