"""What a checkpoint says about one of its keys, without its bytes. Pure.

Problem: a template that is made from the fresh state alone asks for what that state happens to hold: nothing, for an
optimizer that has not stepped (cases 5 and 6). Way taken: templates are made from what the checkpoint holds, so they
need its kinds, types and shapes, though none of its bytes, and no class of the metadata's format.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["StoredValue"]


@dataclass(frozen=True, slots=True)
class StoredValue:
    """One entry of a key's metadata.

    Attributes:
        dtype: Of a tensor; None for any other value.
        shape: Of the whole tensor, not of a shard; None for any other value.
    """

    dtype: torch.dtype | None
    shape: tuple[int, ...] | None

    @property
    def is_tensor(self) -> bool:
        """Whether the entry is a tensor."""
        return self.shape is not None
