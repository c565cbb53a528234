"""Reads a checkpoint with torch alone: run as a script by a process in which dcpfs can't be imported.

It is the demo's proof that dcpfs writes torch's own format. Only torch and, for a URL, fsspec may be imported here.
The job comes as JSON on standard input (a secret on a command line is seen by every user of the machine); the
fingerprint of every tensor goes to standard output as JSON.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import sys
from collections.abc import Mapping

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.tensor import DTensor

__all__ = ["fingerprints", "main"]


def fingerprints(state: Mapping[str, object]) -> dict[str, str]:
    """SHA-256 of shape, dtype and bytes of every tensor, by FQN. Collective where tensors are sharded."""
    flat, _ = flatten_state_dict(dict(state))
    result = {}
    for key, value in flat.items():
        if not isinstance(value, torch.Tensor):
            continue
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        dense = whole.detach().cpu().contiguous()
        digest = hashlib.sha256(f"{whole.dtype} {tuple(whole.shape)}".encode())
        size_bytes = dense.numel() * dense.element_size()
        digest.update((ctypes.c_char * size_bytes).from_address(dense.data_ptr()) if size_bytes else b"")
        result[key] = digest.hexdigest()
    return result


def main() -> None:
    """Read ``{"url": …, "storage_options": …}`` from standard input, write ``{FQN: fingerprint}``."""
    sys.modules["dcpfs"] = None  # type: ignore[assignment]  # any import of dcpfs now fails
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    job = json.load(sys.stdin)
    if "://" in job["url"]:
        reader: FileSystemReader = FsspecReader(job["url"], **job["storage_options"])
    else:
        reader = FileSystemReader(job["url"])
    state: dict[str, object] = {}
    planner = _EmptyStateDictLoadPlanner()  # type: ignore[no-untyped-call]  # torch's own, without types
    _load_state_dict(state, storage_reader=reader, planner=planner, no_dist=True)
    json.dump(fingerprints(state), sys.stdout)


if __name__ == "__main__":
    main()
