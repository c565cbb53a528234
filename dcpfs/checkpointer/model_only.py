"""A model alone, saved and loaded in one call: for evaluation, export, and the start of another run.

Problem: a trainer's checkpoint holds far more than the weights, and is tied to the trainer. Who wants the weights alone
wraps ``dcp.save`` and ``dcp.load`` by hand: prefixes of wrappers get into the names, pipeline stages overwrite each
other, and the credentials' file is read by code of its own.

Way taken: the parts of the model become one state (`ModelWrapper`), which goes through the same save and load as
everything else. What lies at the URL afterwards is one checkpoint in torch's format with the parameters' names at its
top level: the same as a step's ``model`` directory, which can be loaded here too, on any number of ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch

from dcpfs.checkpointer.credentials import locate
from dcpfs.checkpointer.layout import MODEL
from dcpfs.checkpointer.load_step import load_step
from dcpfs.checkpointer.model_state import ModelWrapper
from dcpfs.checkpointer.renaming import Renaming
from dcpfs.config import CastPolicy, RetryConfig, TransferConfig, Trust, VerifyMode
from dcpfs.dcp.load import LoadReport
from dcpfs.dcp.save import SaveReport, save
from dcpfs.errors import ConfigError
from dcpfs.ranks import Ranks
from dcpfs.worker_deaths import undisturbed_by_workers

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed import ProcessGroup

__all__ = ["cast_floating", "load_checkpoint", "save_checkpoint"]

T = TypeVar("T")

_EXTRA_STATE = "_extra_state"


@undisturbed_by_workers()
def save_checkpoint(
    model_parts: nn.Module | Sequence[nn.Module],
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, object] | None = None,
    credentials: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    export_dtype: torch.dtype | str | None = None,
    process_group: ProcessGroup | None = None,
    transfer: TransferConfig | None = None,
    retry: RetryConfig | None = None,
    trust: Trust = Trust.ALLOWLIST,
) -> SaveReport:
    """Save the parameters and buffers of a model. Collective where there is a process group.

    Args:
        model_parts: A module, or the parts of a pipeline that this rank holds.
        url: Where to; the same on all ranks.
        storage_options: What the filesystem of the URL takes.
        credentials: JSON file of AWS keys, endpoint and region, read for S3 only; ``storage_options`` go before it.
        overwrite: False: an existing checkpoint is an error. True: it is withdrawn first.
        export_dtype: Dtype of floating parameters and buffers in the checkpoint; needs a copy of this rank's part of
            the model in memory. None: as they are.
        process_group: Who saves together; None: the default group, or this process alone.
        transfer: How bytes are moved.
        retry: When requests are tried again.
        trust: `Trust.PICKLE`: extra states that a default load refuses are saved all the same.

    Raises:
        ConfigError: The model, the URL, the options or the credentials' file can't be used, or it is no floating dtype.
        DcpfsError: As `dcpfs.save`.
    """
    ranks = Ranks.current(process_group)
    location, state = _agree_on(
        ranks,
        lambda: (
            locate(url, storage_options, credentials),
            cast_floating(ModelWrapper(model_parts).state_dict(), export_dtype),
        ),
    )
    return save(
        state,
        location.url,
        storage_options=location.storage_options,
        overwrite=overwrite,
        process_group=process_group,
        transfer=transfer,
        retry=retry,
        trust=trust,
    )


@undisturbed_by_workers()
def load_checkpoint(
    model_parts: nn.Module | Sequence[nn.Module],
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, object] | None = None,
    credentials: str | os.PathLike[str] | None = None,
    strict: bool = True,
    rename: Mapping[str, str] | Callable[[str], str] | None = None,
    skip: Sequence[str] = (),
    process_group: ProcessGroup | None = None,
    verify: VerifyMode = VerifyMode.CHECKSUMS,
    trust: Trust = Trust.ALLOWLIST,
    allow_cast: CastPolicy = CastPolicy.NEVER,
    transfer: TransferConfig | None = None,
    retry: RetryConfig | None = None,
) -> LoadReport:
    """Load a model, saved by `save_checkpoint`, as a step's ``model``, or by torch. Collective where there is a group.

    Parameters are filled in place, each rank reading its own part; those on the meta device get memory.

    Args:
        model_parts: A module, or the parts of a pipeline that this rank holds.
        url: The checkpoint, e.g. ``s3://bucket/run/checkpoints/iter_000000005/model``.
        storage_options: What the filesystem of the URL takes.
        credentials: As for `save_checkpoint`.
        strict: Raise when names, shapes or dtypes differ, before anything is read. Otherwise load what fits.
        rename: Regular expressions with replacements, or a function, from a name in the checkpoint to the model's.
        skip: Regular expressions; parameters in whose names one is found are left as they are.
        process_group: Who loads together; None: the default group, or this process alone.
        verify: Compare the checksums of entries that are read whole, or sizes alone.
        trust: What may be unpickled.
        allow_cast: Which dtype differences are no mismatch.
        transfer: Concurrency, memory and request sizes.
        retry: When a request is tried again.

    Raises:
        ConfigError: The model, the URL, a pattern, the options or the credentials' file can't be used.
        CheckpointNotFoundError: There is no checkpoint at ``url``.
        KeyMismatchError: ``strict``, and something does not fit. Nothing was read.
        DcpfsError: As `dcpfs.load`.
    """
    ranks = Ranks.current(process_group)
    location, wrapper, renaming = _agree_on(
        ranks,
        lambda: (locate(url, storage_options, credentials), ModelWrapper(model_parts), Renaming(rename, skip)),
    )
    report = load_step(
        {MODEL: wrapper},
        location,
        keys=(MODEL,),
        ranks=ranks,
        strict=strict,
        renaming=renaming,
        directories={MODEL: ""},
        verify=verify,
        trust=trust,
        allow_cast=allow_cast,
        transfer=transfer,
        retry=retry,
    )
    model = report.keys[MODEL]
    return LoadReport(
        model.loaded,
        model.missing,
        model.unexpected,
        model.mismatched,
        report.read_bytes,
        report.moved_bytes,
        report.requests,
        report.seconds,
    )


def cast_floating(state: Mapping[str, object], dtype: torch.dtype | str | None) -> dict[str, object]:
    """A model's state with its floating tensors in another dtype; what is of that dtype already is not copied.

    Extra states stay as they are: only their module knows what they are.

    Raises:
        ConfigError: The dtype, or what bears that name in torch, is not a floating one.
    """
    if dtype is None:
        return dict(state)
    target: object = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not (isinstance(target, torch.dtype) and target.is_floating_point):
        raise ConfigError(f"can't export a model as {dtype}: give a floating dtype, e.g. torch.bfloat16")
    cast = dict(state)
    for name, value in state.items():
        is_extra = name.rpartition(".")[2] == _EXTRA_STATE
        if isinstance(value, torch.Tensor) and value.is_floating_point() and not is_extra:
            cast[name] = value.to(target)
    return cast


def _agree_on(ranks: Ranks, prepare: Callable[[], T]) -> T:
    """What this rank prepared, once all have. Collective. Raises on all ranks what failed on any."""
    prepared: T | None = None
    error: BaseException | None = None
    try:
        prepared = prepare()
    except BaseException as caught:  # noqa: BLE001 - brought to the agreement below, which raises it
        error = caught
    ranks.agree(error)
    if prepared is None:
        raise RuntimeError("this rank has prepared nothing, so it must have failed before")
    return prepared
