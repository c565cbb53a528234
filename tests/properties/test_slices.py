"""However a tensor was cut when it was saved, whatever box of it is loaded has the values of that box."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import fsspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from typing_extensions import Self

import dcpfs
from tests.peers.sample_state import assert_same, make_tensor
from tests.properties.bounds import examples

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes."""


class Pieces(torch.Tensor):
    """Boxes of one large tensor, by the protocol that DTensor has, several in one process."""

    _boxes: list[tuple[Box, torch.Tensor]]

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, boxes: list[tuple[Box, torch.Tensor]]) -> Self:
        made: Self = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype)
        made._boxes = boxes
        return made

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]  # torch gives it no hints
        return f"Pieces({tuple(self.shape)}, {[box for box, _ in self._boxes]})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch's hints lack the defaults with which it calls
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{func} of pieces")

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for (offsets, sizes), _ in self._boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for (offsets, _), piece in self._boxes:
            if index.offset is None or tuple(index.offset) == offsets:
                return piece
        raise ValueError(f"no piece at {index.offset}")


def _part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(offset, offset + size) for offset, size in zip(*box, strict=True))]


def _grid(shape: Sequence[int], cuts: Sequence[Sequence[int]]) -> Iterator[Box]:
    edges = [sorted({0, size, *(cut % (size + 1) for cut in row)}) for size, row in zip(shape, cuts, strict=True)]
    spans = [list(itertools.pairwise(row)) for row in edges]
    for cell in itertools.product(*spans):
        yield tuple(start for start, _ in cell), tuple(stop - start for start, stop in cell)


@st.composite
def _memory(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    """The same values in memory of another order, or amid other memory."""
    kind = draw(st.sampled_from(["own", "transposed", "amid", "steps"]))
    if kind == "transposed":
        return tensor.t().contiguous().t() if tensor.dim() == 2 else tensor.clone()
    if kind == "amid":
        wide = torch.zeros([size + 3 for size in tensor.shape], dtype=tensor.dtype)
        part = wide[tuple(slice(1, 1 + size) for size in tensor.shape)]
    elif kind == "steps":
        part = torch.zeros((*tensor.shape, 2), dtype=tensor.dtype)[..., 0]
    else:
        return tensor.clone()
    part.copy_(tensor)
    return part


_cuts = st.lists(st.integers(0, 2000), max_size=3)


@st.composite
def _boxes(draw: st.DrawFn, shape: Sequence[int]) -> Box:
    offsets = tuple(draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(draw(st.integers(1, size - offset)) for size, offset in zip(shape, offsets, strict=True))
    return offsets, sizes


_configs = st.builds(
    dcpfs.TransferConfig,
    budget_bytes=st.sampled_from([1 << 20, (1 << 20) + 13, 512 << 20]),
    part_bytes=st.sampled_from([None, 64 << 10, 100_003]),
    read_bytes=st.sampled_from([64 << 10, 70_001, 16 << 20]),
    coalesce_gap_bytes=st.sampled_from([0, 1, 999, 64 << 10]),
    concurrency=st.sampled_from([1, 3, 32]),
    file_bytes=st.sampled_from([None, 1 << 20]),
)
_shapes = st.one_of(
    st.lists(st.integers(1, 9), min_size=1, max_size=3),
    st.tuples(st.integers(1, 900), st.integers(1, 700)).map(list),
    st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 130)).map(list),
    st.integers(1, 600_000).map(lambda size: [size]),
)


@pytest.mark.parametrize("kind", ["memory", "local"])
@examples(60)
@given(data=st.data())
def test_any_box_of_any_cutting(tmp_path_factory: pytest.TempPathFactory, kind: str, data: st.DataObject) -> None:
    shape = data.draw(_shapes, "shape")
    dtype = data.draw(st.sampled_from([torch.float32, torch.uint8, torch.bfloat16, torch.complex64]), "dtype")
    whole = make_tensor(tuple(shape), dtype)
    cells = data.draw(st.permutations(list(_grid(shape, [data.draw(_cuts) for _ in shape]))), "cells")
    saved = Pieces(shape, dtype, [(cell, data.draw(_memory(_part(whole, cell)))) for cell in cells])
    state = {"before": torch.ones(3), "w": saved, "after": {"x": 1, "y": torch.arange(100_000)}}
    name = uuid.uuid4().hex
    url = f"memory://{name}" if kind == "memory" else str(tmp_path_factory.mktemp("slices"))
    with_own = data.draw(st.booleans(), "saved by dcpfs.save")
    if with_own:
        dcpfs.save(state, url, transfer=data.draw(_configs, "saving"))
    else:
        # torch's planner marks shards itself, and its own writer of the same plan is what dcp.save would do.
        dcp_save(state, storage_writer=dcpfs.FsspecStorageWriter(url, transfer=data.draw(_configs, "saving")))
    try:
        wanted = [data.draw(_boxes(shape), "box") for _ in range(data.draw(st.integers(1, 3)))]
        unique = {offsets: (offsets, sizes) for offsets, sizes in wanted}  # one box at a corner: torch finds it by that
        targets = [(box, data.draw(_memory(torch.zeros_like(_part(whole, box))))) for box in unique.values()]
        template: dict[str, Any] = {
            "before": torch.zeros(3),
            "w": Pieces(shape, dtype, targets),
            "after": {"x": 0, "y": torch.zeros(100_000, dtype=torch.int64)},
        }
        config = data.draw(_configs, "loading")
        how = data.draw(st.sampled_from(["load", "torch planner", "own planner"]), "loaded by")
        if how == "load":
            dcpfs.load(template, url, transfer=config)
        else:
            planner = DefaultLoadPlanner() if how == "torch planner" else dcpfs.LoadPlanner()
            dcp_load(template, storage_reader=dcpfs.FsspecStorageReader(url, transfer=config), planner=planner)
        for box, target in targets:
            assert_same(target, _part(whole, box), f"box {box}")
        assert_same(template["after"], state["after"])
        assert_same(dcpfs.read(url, ["w"], transfer=config)["w"], whole)
    finally:
        if kind == "memory":
            fsspec.filesystem("memory").rm(f"/{name}", recursive=True)
