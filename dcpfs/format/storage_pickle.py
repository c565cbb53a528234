"""The memory of a tensor in a plain pickle: a file of torch's oldest format, inside a bytes value.

Problem: a tensor that is pickled, not saved, calls ``torch.storage._load_from_bytes`` with such a file, and that is
``torch.load`` with everything allowed.

Way taken: `old_file` takes it apart, and it may hold one storage and nothing else.
"""

from __future__ import annotations

import torch

from dcpfs.errors import UntrustedDataError
from dcpfs.format.old_file import decode_old_file

__all__ = ["decode_pickled_storage"]

_WHAT = "a tensor's memory in a pickle"


def decode_pickled_storage(data: object) -> torch.storage.TypedStorage:
    """Rebuild a storage, on the CPU.

    Args:
        data: What a pickled tensor gives to ``torch.storage._load_from_bytes``.

    Raises:
        UntrustedDataError: It is something else.
        CorruptCheckpointError: It is damaged.
    """
    if type(data) is not bytes:
        raise UntrustedDataError(f"reading {_WHAT}: it is no bytes; refused")
    storage = decode_old_file(data, what=_WHAT)
    if not isinstance(storage, torch.storage.TypedStorage):
        raise UntrustedDataError(f"reading {_WHAT}: it holds something else than one storage; refused")
    return storage
