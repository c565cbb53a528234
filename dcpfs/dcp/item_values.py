"""The values of a plan's items, asked from the planner and checked before anything is sent.

Problem: a planner may only be called in the thread that called the writer, may make tensors on the fly, and may give
something else than it planned. Asked one by one between the parts, 20,000 small tensors take longer than their bytes.

Way taken: where the planner hands out the state's own tensors all are asked at once, which costs no memory; those that
dcpfs's own planner has checked already are not checked again. Any other planner is asked as late as the first part.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem, WriteItemType

from dcpfs.config import Trust
from dcpfs.dcp.exactness import check_matches, check_storable_tensor
from dcpfs.dcp.payload import BytesPayload, Payload, TensorPayload
from dcpfs.errors import UnsupportedValueError
from dcpfs.format.entries import check_storable_object
from dcpfs.torch_private import settle

__all__ = ["ItemValues"]


class ItemValues:
    """The values of a plan's items, asked from the planner in the calling thread and checked.

    Args:
        items: All of this rank.
        planner: Who resolves them.
        trust: `Trust.PICKLE`: objects that a default load refuses pass.

    Attributes:
        makes_tensors: The planner may make tensors that nobody else holds.
    """

    def __init__(self, items: Sequence[WriteItem], planner: SavePlanner, trust: Trust) -> None:
        self._items = items
        self._checks_objects = trust is Trust.ALLOWLIST and not getattr(planner, "checks_objects", False)
        self._planner = planner
        self._tensors: list[torch.Tensor | None] = [None] * len(items)
        self.makes_tensors = not _hands_out_references(planner)

    def payloads(self) -> list[Payload]:
        """One payload per item. Non-tensors are encoded here, and held tensors are checked, before anything is sent."""
        payloads: list[Payload] = []
        find_plain = getattr(self._planner, "find_plain", None)
        for number, item in enumerate(self._items):
            if item.type is WriteItemType.BYTE_IO:
                payloads.append(BytesPayload(self._bytes_of(item)))
                continue
            data = item.tensor_data
            if data is None:
                raise UnsupportedValueError(
                    f"can't save {item.index.fqn!r}: its write item does not describe the tensor"
                )
            dtype, sizes = data.properties.dtype, data.chunk.sizes
            try:
                payload = TensorPayload(dtype, sizes)
            except UnsupportedValueError as error:
                raise UnsupportedValueError(f"can't save {item.index.fqn!r}: {error.message}") from error
            payloads.append(payload)
            if self.makes_tensors:
                continue
            tensor = find_plain(item.index.fqn) if find_plain is not None else None
            if tensor is None or tensor.dtype is not dtype or tensor.shape != sizes:
                tensor = self._ask(item)
            if not payload.attach(tensor):
                self._tensors[number] = tensor
        return payloads

    def resolve(self, number: int) -> torch.Tensor:
        """The checked tensor of an item. Calling thread, once per item."""
        tensor = self._tensors[number]
        if tensor is None:
            return self._ask(self._items[number])
        self._tensors[number] = None
        return tensor

    def _ask(self, item: WriteItem) -> torch.Tensor:
        key, data = item.index.fqn, item.tensor_data
        value = self._planner.resolve_data(item)
        if not isinstance(value, torch.Tensor) or data is None:
            raise UnsupportedValueError(
                f"can't save {key!r}: it was planned as a tensor, but the planner gave a {type(value).__name__}"
            )
        tensor = value if type(value) is torch.Tensor else settle(value)
        check_storable_tensor(key, tensor)
        check_matches(key, tensor, data.properties.dtype, data.chunk.sizes)
        return tensor

    def _bytes_of(self, item: WriteItem) -> memoryview:
        value = self._planner.resolve_data(item)
        if not isinstance(value, io.BytesIO):
            raise UnsupportedValueError(
                f"can't save {item.index.fqn!r}: it was planned as an object, but the planner gave a "
                f"{type(value).__name__} and no io.BytesIO"
            )
        data = memoryview(value.getvalue())  # no copy; a kept getbuffer() makes Python 3.13 complain
        # What starts otherwise was not made by torch.save: the planner's own bytes, which its load planner decodes.
        if self._checks_objects and bytes(data[:2]) in (b"PK", b"\x80\x02"):
            check_storable_object(data, item.index.fqn)
        return data


def _hands_out_references(planner: SavePlanner) -> bool:
    """True for planners known to hand out the state's own tensors; then asking early costs no memory."""
    kind = type(planner)
    known: Any = DefaultSavePlanner
    if not isinstance(planner, known):
        return bool(getattr(planner, "hands_out_references", False))
    names = ("resolve_data", "lookup_object", "transform_object")
    return all(getattr(kind, name) is getattr(known, name) for name in names)
