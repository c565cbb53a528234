"""What a checkpoint says about one of its keys, without its bytes, and what a part of a training state makes of it.

Problem: a template that is made from the fresh state alone asks for what that state happens to hold: nothing, for an
optimizer that has not stepped (cases 5 and 6). Way taken: templates are made from what the checkpoint holds, so they
need its kinds, types and shapes, though none of its bytes, and no class of the metadata's format.

What a part asks for and what it leaves is said by name, so that a strict load can stay strict about the rest::

    part.template(stored)   the nested state to fill: its keys are what the part asks for
    part.left_out(stored)   keys that it knows and does not ask for, each with the reason: no mismatch, but said
    part.load_state_dict(filled template)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

__all__ = ["StoredValue", "StoredValues", "TemplatePart"]


@dataclass(frozen=True, slots=True)
class StoredValue:
    """One entry of a key's metadata.

    Attributes:
        dtype: Of a tensor; None for any other value.
        shape: Of the whole tensor, not of a shard; None for any other value.
        path: Where it stood in the nested state that was saved, as torch notes it: text for the keys of mappings, int
            for positions in lists. Empty: not known, so the flat key is taken apart at its dots where it must be.
        real_path: The same with keys of their real types, e.g. ``("milestones", 2)``; empty: these are not known.
    """

    dtype: torch.dtype | None
    shape: tuple[int, ...] | None
    path: tuple[str | int, ...] = ()
    real_path: tuple[object, ...] = ()

    @property
    def is_tensor(self) -> bool:
        """Whether the entry is a tensor."""
        return self.shape is not None


class StoredValues(dict[str, StoredValue]):
    """What a checkpoint holds by flat key, as a template is made of it.

    Attributes:
        empty: The mappings with nothing in them, which have no entry: joined path to where they stood.
    """

    def __init__(self, values: Mapping[str, StoredValue], empty: Mapping[str, StoredValue]) -> None:
        super().__init__(values)
        self.empty = dict(empty)

    @classmethod
    def empty_of(cls, stored: Mapping[str, StoredValue]) -> Mapping[str, StoredValue]:
        """Those of any mapping; none where it does not say."""
        return stored.empty if isinstance(stored, cls) else {}


@runtime_checkable
class TemplatePart(Protocol):
    """A part of a training state that makes its template from what the checkpoint holds.

    A load with rename rules calls both methods with the names that the state has.
    """

    def state_dict(self) -> dict[str, object]:
        """What a save stores, read anew at each call."""
        ...

    def template(self, stored: Mapping[str, StoredValue]) -> dict[str, object]:
        """The nested state that a load fills: tensors in place, other values replaced.

        Args:
            stored: Flat key, in the checkpoint, to what it holds.
        """
        ...

    def left_out(self, stored: Mapping[str, StoredValue]) -> dict[str, str]:
        """Keys of the checkpoint that this part knows and does not ask for, each with the reason. No mismatches."""
        ...

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Take over the filled template."""
        ...
