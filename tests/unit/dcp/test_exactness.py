"""What can't be stored exactly is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dcpfs.dcp.exactness import check_matches, check_storable_tensor
from dcpfs.errors import UnsupportedValueError


class Wrapper(torch.Tensor):
    """A wrapper subclass: an inner tensor, and no memory of its own."""

    held: torch.Tensor

    @staticmethod
    def wrap(inner: torch.Tensor) -> torch.Tensor:
        made = torch.Tensor._make_wrapper_subclass(Wrapper, inner.shape, dtype=inner.dtype)
        made.held = inner
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch's hint lacks func
        raise NotImplementedError


@pytest.mark.parametrize(
    ("tensor", "word"),
    [
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.eye(2).to_sparse_csr(), "sparse"),
        (torch.empty(2, device="meta"), "meta"),
        (torch.nn.Parameter(torch.empty(2, device="meta")), "meta"),
        (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantized"),
        (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
        (torch.nn.parameter.UninitializedParameter(), "not initialised"),
    ],
    ids=["coo", "csr", "meta", "meta parameter", "quantized", "nested", "lazy"],
)
def test_case_17_kinds_without_plain_values_are_refused(tensor: torch.Tensor, word: str) -> None:
    with pytest.raises(UnsupportedValueError, match=word) as caught:
        check_storable_tensor("layer.weight", tensor)
    assert "'layer.weight'" in str(caught.value)


def test_case_17_a_wrapper_subclass_is_refused() -> None:
    with pytest.raises(UnsupportedValueError, match="Wrapper wraps other tensors"):
        check_storable_tensor("w", Wrapper.wrap(torch.ones(2)))


@pytest.mark.parametrize("kept", [0, 40])
def test_memory_that_was_freed_is_refused(kept: int) -> None:
    whole = torch.ones(20)
    views = [whole, whole[10:], whole[2:].as_strided((3,), (8,)), whole[:16].view(4, 4).t(), torch.nn.Parameter(whole)]
    whole.untyped_storage().resize_(kept)
    for view in views:
        with pytest.raises(UnsupportedValueError, match="freed") as caught:
            check_storable_tensor("w", view)
        assert "'w'" in str(caught.value)


def test_views_within_their_storage_are_not_taken_for_freed() -> None:
    whole = torch.arange(20.0)
    for tensor in (whole[19:], whole[20:], whole[3::4], whole.expand(3, 20), whole.as_strided((3, 4), (2, 5))):
        check_storable_tensor("w", tensor)


class Named(torch.Tensor):
    """A subclass with memory of its own."""


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3),
        torch.nn.Parameter(torch.ones(3)),
        torch.nn.Buffer(torch.ones(3)),
        torch.ones(2, 3).t(),
        torch.empty(0, 5),
        torch.tensor(1),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(2).as_subclass(Named),
    ],
    ids=range(8),
)
def test_dense_memory_is_taken(tensor: torch.Tensor) -> None:
    check_storable_tensor("w", tensor)


def test_a_tensor_that_is_not_what_was_planned_is_refused() -> None:
    check_matches("w", torch.ones(2, 3), torch.float32, torch.Size([2, 3]))
    for dtype, shape in ((torch.float64, [2, 3]), (torch.float32, [3, 2])):
        with pytest.raises(UnsupportedValueError, match="'w'"):
            check_matches("w", torch.ones(2, 3), dtype, torch.Size(shape))


def test_a_tensor_whose_memory_was_freed_is_refused_by_name() -> None:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedValueError, match=r"'layer\.w' exactly: its memory has been freed"):
        check_storable_tensor("layer.w", tensor)
    check_storable_tensor("empty", torch.empty(0))
