"""What belongs to one rank, such as its dataloader's position, as the bytes of its own file.

Problem: the usual ``pickle.dump`` into an open file leaves half a file behind when an object can't be pickled (case
109), drags a whole dataset along for a slice of one tensor, and writes what a careful load will refuse; the usual
``pickle.load`` runs whatever the file says (case 110).

Way taken: a plain pickle of the bare state, as the reference checkpointer has it and any Python can read, made in
memory and held against the list of a default load before a byte is written. Tensors in it are cut from what they are
views of, and come to the CPU. Decoding goes through the allow-list, with the few names that a pickled tensor takes.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dcpfs.config import Trust
from dcpfs.errors import CheckpointError, UnsupportedValueError
from dcpfs.format.allowlist import Global
from dcpfs.format.storage_pickle import decode_pickled_storage
from dcpfs.format.tensor_values import resolve_plain_tensor
from dcpfs.format.unpickling import SafeUnpickler, loads

__all__ = ["RankResize", "decode_rank_state", "encode_rank_state"]

_PROTOCOL = 4
"""Read by every Python that torch supports."""


@dataclass(frozen=True, slots=True)
class RankResize:
    """A rank that loads what other ranks saved, another number of them or with other parts of the data: for a hook.

    Attributes:
        rank: This global rank.
        world_size: Number of ranks that load.
        saved_world_size: Number of ranks that saved.
    """

    rank: int
    world_size: int
    saved_world_size: int


def encode_rank_state(state: object, *, key: str, rank: int, trust: Trust = Trust.ALLOWLIST) -> bytes:
    """Pickle a rank's state in memory. Nothing is written, whatever happens.

    Args:
        state: Plain data, numpy values, and plain tensors.
        key: The key it is saved under, for errors.
        rank: Global rank, for errors.
        trust: `Trust.PICKLE`: what a default load refuses is encoded all the same.

    Raises:
        UnsupportedValueError: It can't be pickled, holds a sharded tensor, or a class that is not on the allow-list.
    """
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(state)
    except UnsupportedValueError as error:
        raise UnsupportedValueError(f"saving {key!r} of rank {rank}: {error.message}", rank=rank) from error
    except Exception as error:
        raise UnsupportedValueError(
            f"saving {key!r} of rank {rank}: it can't be pickled ({type(error).__name__}: {str(error)[:200]}); store "
            "plain data instead",
            rank=rank,
        ) from error
    data = buffer.getvalue()
    if trust is Trust.ALLOWLIST:
        try:
            decode_rank_state(data, url="the state")
        except CheckpointError as error:
            reason = error.message.partition("; pass trust=")[0]
            raise UnsupportedValueError(
                f"saving {key!r} of rank {rank}: a load would refuse it: {reason}; store plain data, or register the "
                "class with torch.serialization.add_safe_globals on both sides",
                rank=rank,
            ) from error
    return data


def decode_rank_state(data: bytes | memoryview, *, trust: Trust = Trust.ALLOWLIST, url: str = "a rank file") -> object:
    """Decode a rank's state, also one that the reference checkpointer wrote. Tensors come to the CPU.

    Args:
        data: The whole file.
        trust: Whether the allow-list applies.
        url: Redacted URL of the file, for errors.

    Raises:
        UntrustedDataError: It names a class that is not on the allow-list.
        CorruptCheckpointError: It is no well-formed pickle.
    """
    if trust is Trust.PICKLE:
        return loads(data, trust=trust, what=url)
    unpickler = SafeUnpickler(data, what=url, resolve=_resolve)
    state: object = unpickler.load()
    return state


class _Pickler(pickle.Pickler):
    """Pickles tensors by their own elements alone, from the CPU."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=_PROTOCOL)

    def reducer_override(self, obj: object) -> Any:
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        if isinstance(obj, DTensor):
            raise UnsupportedValueError(
                "it holds a DTensor, which belongs to all ranks together; save it under a key of its own, or its "
                "full_tensor() here"
            )
        if type(obj) not in (torch.Tensor, torch.nn.Parameter) or obj.layout is not torch.strided or obj.is_meta:
            return NotImplemented  # the list decides
        own = obj
        if obj.device.type != "cpu":
            own = obj.detach().cpu()
        if own.untyped_storage().nbytes() != own.nbytes or own is not obj:
            own = own.detach().clone().requires_grad_(obj.requires_grad)
            if isinstance(obj, torch.nn.Parameter):
                own = torch.nn.Parameter(own.detach(), obj.requires_grad)
        return own.__reduce_ex__(_PROTOCOL)  # type: ignore[no-untyped-call]  # torch's has no annotations


def _resolve(module: str, name: str) -> Global | None:
    return _STORAGE if (module, name) == ("torch.storage", "_load_from_bytes") else resolve_plain_tensor(module, name)


_STORAGE = Global(decode_pickled_storage, decode_pickled_storage)
