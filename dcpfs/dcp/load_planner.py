"""A load planner for ``dcp.load`` that never guesses.

Problem: torch's ``DefaultLoadPlanner`` stops at the first missing key and says nothing of mismatched kinds or keys that
nobody asked for; it unpickles every non-tensor entry without restriction (case 111); it puts a value that was saved
under the key ``2`` beside the state's own as ``"2"``; and while it plans it flips a global of torch that makes a save
in another thread flatten its state the wrong way.

Way taken: the state is matched as a whole (`dcpfs.dcp.matching`), everything that does not fit is one
`KeyMismatchError` on all ranks before a byte is read, values are decoded with the allow-list, and each is put back at
the path, with the key, that the state itself has. Renaming planners can be built on it: `create_local_plan` is all
that decides.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from dcpfs.config import CastPolicy, Trust
from dcpfs.dcp.flatten import Structure, flatten
from dcpfs.dcp.matching import describe_mismatch, key_mismatch_error
from dcpfs.dcp.places import put_value
from dcpfs.format.entries import decode_object
from dcpfs.torch_private import flatten_sharded_tensors

__all__ = ["LoadPlanner", "url_of_metadata"]


class LoadPlanner(DefaultLoadPlanner):
    """Plans a load by ``dcp.load``. One instance serves one load at a time; methods belong to the loading thread.

    Args:
        strict: Raise on missing, unexpected and mismatched keys. Otherwise what fits is loaded, the rest is left
            untouched, and ``missing``, ``unexpected`` and ``mismatched`` say what that is.
        allow_cast: Which dtype differences are no mismatch.
        trust: What may be unpickled from non-tensor entries.

    Attributes:
        missing: Keys of the state that the checkpoint lacks.
        unexpected: Keys of the checkpoint that the state lacks.
        mismatched: Key to a sentence that says how kind, shape or dtype differ.
    """

    def __init__(
        self,
        *,
        strict: bool = True,
        allow_cast: CastPolicy = CastPolicy.NEVER,
        trust: Trust = Trust.ALLOWLIST,
    ) -> None:
        super().__init__()
        self.strict = strict
        self.allow_cast = CastPolicy(allow_cast)
        self.trust = Trust(trust)
        self.missing: tuple[str, ...] = ()
        self.unexpected: tuple[str, ...] = ()
        self.mismatched: dict[str, str] = {}
        self._structure = Structure({})

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the state and the metadata."""
        super().set_up_planner(state_dict, metadata, is_coordinator)
        # torch's own way through nested ShardedTensors makes a None of each empty mapping amid a list.
        leaves, self._structure = flatten(self.original_state_dict)
        if any(type(leaf).__name__ == "ShardedTensor" for leaf in leaves.values()):
            leaves = flatten_sharded_tensors(leaves)
        self.state_dict = leaves

    def create_local_plan(self) -> LoadPlan:
        """Match the whole state, then plan to read what fits.

        Raises:
            KeyMismatchError: ``strict`` and something does not fit.
        """
        if self.metadata is None:
            raise ValueError("a load needs the checkpoint's metadata")
        stored = self.metadata.state_dict_metadata
        self.missing = tuple(key for key in self.state_dict if key not in stored)
        self.unexpected = tuple(key for key in stored if key not in self.state_dict)
        self.mismatched = self._find_mismatched(self.state_dict, self.metadata)
        if self.strict and (self.missing or self.unexpected or self.mismatched):
            raise key_mismatch_error(
                url_of_metadata(self.metadata),
                missing=self.missing,
                unexpected=self.unexpected,
                mismatched=self.mismatched,
                known=stored,
            )
        fitting = {key: value for key, value in self.state_dict.items() if key in stored and key not in self.mismatched}
        return create_default_local_load_plan(fitting, self.metadata, strict=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Decode a non-tensor value and put it where the state has it."""
        key = read_item.dest_index.fqn
        # Not getbuffer(): a failure keeps it alive in its traceback, and Python 3.13 complains when both are collected.
        decoded = decode_object(value.getvalue(), trust=self.trust, key=key)
        self.state_dict[key] = decoded
        put_value(self.original_state_dict, self._structure.real_path(key), decoded)

    def _find_mismatched(self, leaves: Mapping[str, Any], metadata: Metadata) -> dict[str, str]:
        mismatched = {}
        for key, leaf in leaves.items():
            record = metadata.state_dict_metadata.get(key)
            if record is None:
                continue
            difference: str | None = None
            if isinstance(record, BytesStorageMetadata):
                if isinstance(leaf, torch.Tensor):
                    difference = "a tensor in the state, another kind of value in the checkpoint"
            else:
                difference = describe_mismatch(leaf, record.properties.dtype, tuple(record.size), self.allow_cast)
            if difference is not None:
                mismatched[key] = difference
        return mismatched


def url_of_metadata(metadata: Metadata) -> str:
    """The redacted URL that a reader of dcpfs notes in the metadata, for errors."""
    meta = metadata.storage_meta
    return str(meta.checkpoint_id) if meta is not None and meta.checkpoint_id is not None else "the checkpoint"
