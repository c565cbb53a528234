"""Tensors inside a pickle: the names that rebuild them, each with a check of what it is told.

Problem: what torch pickles a tensor to is a call with sizes, strides and offsets. torch's own functions believe most of
them: a quantized tensor's size is allocated before it is compared with the bytes, ``torch.FloatTensor(10**12)`` is
memory that nobody wrote, and ``bytearray(10**12)`` is on torch's weights-only list. Leaving to torch what is rare
leaves it all of that.

Way taken: every name is an entry of the allow-list with a function of ours, which compares the numbers with the bytes
that are there and then builds the tensor: strided ones, parameters, sparse, quantized, nested and meta ones, and
subclasses that the user registered with ``torch.serialization.add_safe_globals``. Tensors come to the CPU. A view that
repeats its elements (``expand``) is allowed by itself, and refused where torch would copy it out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch

from dcpfs.errors import CorruptCheckpointError, UntrustedDataError
from dcpfs.format.allowlist import Global, resolve_value
from dcpfs.format.tensor_pickle import STORAGE_CLASSES

__all__ = [
    "StorageClass",
    "StorageName",
    "check_storage_name",
    "resolve_outline",
    "resolve_plain_tensor",
    "resolve_tensor_value",
]

_LARGEST_NUMBER = 1 << 62


class StorageClass:
    """Stands for a storage class of torch, whose pickles name nothing but the dtype."""

    __slots__ = ("dtype",)

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype


@dataclass(frozen=True)
class StorageName:
    """What a pickle calls a storage by.

    Attributes:
        name: In its file.
        dtype: Of its elements; None: bytes, that it says nothing of.
        count: Of elements.
    """

    name: str
    dtype: torch.dtype | None
    count: int

    @property
    def element(self) -> torch.dtype:
        """The dtype that its elements are counted in."""
        return torch.uint8 if self.dtype is None else self.dtype

    @property
    def size_bytes(self) -> int:
        """Of all its elements."""
        return self.count * self.element.itemsize

    def wrap(self, storage: torch.UntypedStorage) -> torch.storage.TypedStorage:
        """The storage as torch's own functions take it."""
        return torch.storage.TypedStorage(  # type: ignore[no-untyped-call]  # torch's constructor has no annotations
            wrap_storage=storage, dtype=self.element, _internal=True
        )


def check_storage_name(pid: object, *, what: str = "a value", further: tuple[object, ...] = ()) -> StorageName:
    """What a persistent id says, which is ``("storage", class, name, device, count)``.

    Args:
        pid: What the pickle holds.
        what: What is read, for errors.
        further: What follows in the format that is read.

    Raises:
        UntrustedDataError: torch writes no such thing.
    """
    if (
        type(pid) is not tuple
        or len(pid) != 5 + len(further)
        or pid[0] != "storage"
        or type(pid[1]) is not StorageClass
        or type(pid[2]) is not str
        or type(pid[4]) is not int
        or pid[4] < 0
        or any(given is not wanted for given, wanted in zip(pid[5:], further, strict=True))
    ):
        raise UntrustedDataError(f"reading {what}: its pickle holds a storage that torch does not write; refused")
    return StorageName(pid[2], pid[1].dtype, pid[4])


def _refuse(what: str) -> UntrustedDataError:
    return UntrustedDataError(f"reading a value: its pickle holds {what}; refused")


def _check_numbers(numbers: object) -> tuple[int, ...]:
    if not isinstance(numbers, tuple | list) or not all(type(n) is int and 0 <= n < _LARGEST_NUMBER for n in numbers):
        raise _refuse("a tensor without sizes and strides")
    return tuple(numbers)


# --- strided tensors ----------------------------------------------------------------------------------------------


def _set_tensor(storage: object, dtype: object, offset: object, sizes: object, strides: object) -> torch.Tensor:
    shape, steps = _check_numbers(sizes), _check_numbers(strides)
    if (
        not isinstance(storage, torch.storage.TypedStorage)
        or not isinstance(dtype, torch.dtype)
        or type(offset) is not int
        or not 0 <= offset < _LARGEST_NUMBER
        or len(shape) != len(steps)
    ):
        raise _refuse("a tensor that torch does not write")
    if 0 not in shape:
        last = offset + sum((size - 1) * step for size, step in zip(shape, steps, strict=True))
        if (last + 1) * dtype.itemsize > storage._untyped_storage.nbytes():
            raise CorruptCheckpointError("reading a value: a tensor exceeds its storage; it is damaged")
    return torch.empty((0,), dtype=dtype, device="cpu").set_(storage._untyped_storage, offset, shape, steps)


def _finish(tensor: torch.Tensor, requires_grad: object, flags: object) -> torch.Tensor:
    if flags is not None:
        if type(flags) is not dict or not set(flags) <= {"conj", "neg"}:
            raise _refuse("a tensor with further state")
        if flags.get("conj") is True:
            tensor = torch._conj(tensor)
        if flags.get("neg") is True:
            tensor = torch._neg_view(tensor)
    if requires_grad is True:
        tensor.requires_grad_(True)
    return tensor


def _rebuild_typed(
    storage: object,
    offset: object,
    sizes: object,
    strides: object,
    requires_grad: object = False,
    _hooks: object = None,
    flags: object = None,
) -> torch.Tensor:
    dtype = storage.dtype if isinstance(storage, torch.storage.TypedStorage) else None
    return _finish(_set_tensor(storage, dtype, offset, sizes, strides), requires_grad, flags)


def _rebuild_untyped(
    storage: object,
    offset: object,
    sizes: object,
    strides: object,
    requires_grad: object,
    _hooks: object,
    dtype: object,
    flags: object = None,
) -> torch.Tensor:
    return _finish(_set_tensor(storage, dtype, offset, sizes, strides), requires_grad, flags)


def _rebuild_parameter(tensor: object, requires_grad: object = True, _hooks: object = None) -> torch.Tensor:
    if type(tensor) is not torch.Tensor:
        raise _refuse("a parameter without a tensor")
    return torch.nn.Parameter(tensor, requires_grad is True)


# --- others -------------------------------------------------------------------------------------------------------


def _check_own_bytes(*tensors: object) -> None:
    """Refuse what is no tensor, or has more elements than bytes of its own: torch would write them all out."""
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
            raise _refuse("a tensor made of something else than tensors")
        if not tensor.is_meta and tensor.numel() * tensor.dtype.itemsize > tensor.untyped_storage().nbytes():
            raise _refuse("a tensor made of one that repeats its elements")


def _rebuild_sparse(layout: object, parts: object) -> torch.Tensor:
    if type(parts) is not tuple or type(layout) is not torch.layout:
        raise _refuse("a sparse tensor that torch does not write")
    if layout is torch.sparse_coo and len(parts) in (3, 4):
        indices, values, size = parts[:3]
        _check_own_bytes(indices, values)
        coalesced = parts[3] if len(parts) == 4 else None
        if coalesced not in (None, True, False):
            raise _refuse("a sparse tensor that torch does not write")
        return torch.sparse_coo_tensor(
            indices, values, _check_numbers(size), check_invariants=True, is_coalesced=coalesced
        )
    if layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc) and len(parts) == 4:
        compressed, plain, values, size = parts
        _check_own_bytes(compressed, plain, values)
        return torch.sparse_compressed_tensor(
            compressed, plain, values, _check_numbers(size), layout=layout, check_invariants=True
        )
    raise _refuse("a sparse tensor that torch does not write")


def _outline_sparse(_layout: object, _parts: object) -> torch.Tensor:
    """Stands for a sparse tensor whose numbers are not there yet: zeros break the rules of its layout."""
    return torch.empty(0, device="cpu")


def _rebuild_quantized(
    storage: object,
    offset: object,
    sizes: object,
    strides: object,
    quantizer: object,
    requires_grad: object,
    _hooks: object = None,
) -> torch.Tensor:
    shape, steps = _check_numbers(sizes), _check_numbers(strides)
    if not isinstance(storage, torch.storage.TypedStorage) or type(offset) is not int or type(quantizer) is not tuple:
        raise _refuse("a quantized tensor that torch does not write")
    # As many as four elements share a byte.
    if math.prod(shape) > 4 * storage._untyped_storage.nbytes():
        raise CorruptCheckpointError("reading a value: a quantized tensor exceeds its storage; it is damaged")
    scheme, *numbers = quantizer or (None,)
    if scheme is torch.per_tensor_affine:
        if len(numbers) != 2 or type(numbers[0]) is not float or type(numbers[1]) is not int:
            raise _refuse("a quantized tensor without scale and zero point")
    elif scheme in (torch.per_channel_affine, torch.per_channel_affine_float_qparams) and len(numbers) == 3:
        scales, zero_points, axis = numbers
        _check_own_bytes(scales, zero_points)
        if (
            type(axis) is not int
            or not 0 <= axis < len(shape)
            or not scales.shape == zero_points.shape == shape[axis : axis + 1]
        ):
            raise _refuse("a quantized tensor whose scales don't fit its shape")
    else:
        raise _refuse("a quantized tensor of an unknown kind")
    made: torch.Tensor = torch._utils._rebuild_qtensor(  # type: ignore[no-untyped-call]  # torch has no annotation there
        storage, offset, shape, steps, quantizer, requires_grad is True, {}
    )
    return made


def _rebuild_nested(buffer: object, sizes: object, strides: object, offsets: object) -> torch.Tensor:
    _check_own_bytes(buffer, sizes, strides, offsets)
    memory, shapes, steps, starts = cast("tuple[torch.Tensor, ...]", (buffer, sizes, strides, offsets))
    if (
        memory.dim() != 1
        or any(numbers.dtype is not torch.int64 or numbers.is_meta for numbers in (shapes, steps, starts))
        or shapes.dim() != 2
        or steps.shape != shapes.shape
        or starts.shape != shapes.shape[:1]
    ):
        raise _refuse("a nested tensor that torch does not write")
    for shape, stride, start in zip(shapes.tolist(), steps.tolist(), starts.tolist(), strict=True):
        _check_numbers([*shape, *stride, start])
        last = start + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        if 0 not in shape and last >= memory.numel():
            raise CorruptCheckpointError("reading a value: a nested tensor exceeds its storage; it is damaged")
    return torch._nested_view_from_buffer(memory, shapes, steps, starts)


def _rebuild_meta(dtype: object, sizes: object, strides: object, requires_grad: object) -> torch.Tensor:
    if not isinstance(dtype, torch.dtype):
        raise _refuse("a meta tensor without a dtype")
    made = torch.empty_strided(_check_numbers(sizes), _check_numbers(strides), dtype=dtype, device="meta")
    return made.requires_grad_(requires_grad is True)


def _rebuild_from_device(tensor: object, dtype: object, _device: object, requires_grad: object) -> torch.Tensor:
    """A tensor of a device whose memory torch can't pickle. It comes to the CPU."""
    _check_own_bytes(tensor)
    if not isinstance(dtype, torch.dtype) or not isinstance(tensor, torch.Tensor):
        raise _refuse("a tensor without a dtype")
    return tensor.to(dtype).requires_grad_(requires_grad is True)


def _rebuild_wrapper(
    kind: object,
    dtype: object,
    sizes: object,
    strides: object,
    offset: object,
    layout: object,
    _device: object,
    requires_grad: object,
) -> torch.Tensor:
    """A subclass without memory of its own, which the user registered; its parts come as its state."""
    if (
        not (isinstance(kind, type) and issubclass(kind, torch.Tensor) and kind is not torch.Tensor)
        or not isinstance(dtype, torch.dtype)
        or not isinstance(layout, torch.layout)
        or type(offset) is not int
    ):
        raise _refuse("a subclass of a tensor that torch does not write")
    return torch.Tensor._make_wrapper_subclass(
        kind,
        _check_numbers(sizes),
        strides=_check_numbers(strides),
        dtype=dtype,
        storage_offset=offset,
        layout=layout,
        device=torch.device("cpu"),
        requires_grad=requires_grad is True,
    )


# --- with attributes ----------------------------------------------------------------------------------------------


def _set_attributes(tensor: torch.Tensor, state: object) -> torch.Tensor:
    """Attributes of the user's own. A class that the user registered knows what it may have."""
    own = type(tensor) not in (torch.Tensor, torch.nn.Parameter)
    states = state if type(state) is tuple and len(state) == 2 else (state,)
    for names in states:
        if names is None:
            continue
        if type(names) is not dict or any(
            type(name) is not str or name.startswith("__") or (hasattr(torch.Tensor, name) and not own)
            for name in names
        ):
            raise _refuse("a state of a tensor that replaces what tensors have")
        for name, value in names.items():
            setattr(tensor, name, value)
    return tensor


def _rebuild_parameter_with_state(tensor: object, requires_grad: object, _hooks: object, state: object) -> torch.Tensor:
    return _set_attributes(_rebuild_parameter(tensor, requires_grad), state)


def _rebuild_from_type(rebuild: object, kind: object, arguments: object, state: object) -> torch.Tensor:
    if rebuild not in _REBUILDERS or type(arguments) is not tuple:
        raise _refuse("a tensor that is not made by one of torch's own functions")
    if not (isinstance(kind, type) and issubclass(kind, torch.Tensor)):
        raise _refuse("a tensor of a class that is none of a tensor")
    made = cast("Callable[..., torch.Tensor]", rebuild)(*arguments)
    if type(made) is not kind:
        made = made.as_subclass(kind)
    set_state: Any = getattr(kind, "__setstate__", None)
    if set_state is not torch.Tensor.__setstate__:
        set_state(made, state)
        return made
    return _set_attributes(made, state)


_REBUILDERS: frozenset[object] = frozenset(
    (
        _rebuild_typed,
        _rebuild_untyped,
        _rebuild_parameter,
        _rebuild_sparse,
        _outline_sparse,
        _rebuild_quantized,
        _rebuild_nested,
        _rebuild_meta,
        _rebuild_from_device,
        _rebuild_wrapper,
    )
)
_UTILS = "torch._utils"
_QUANTIZED = {
    "QInt8Storage": torch.qint8,
    "QUInt8Storage": torch.quint8,
    "QInt32Storage": torch.qint32,
    "QUInt4x2Storage": torch.quint4x2,
    "QUInt2x4Storage": torch.quint2x4,
}
_PLAIN = {
    (_UTILS, "_rebuild_tensor"): Global(_rebuild_typed, _rebuild_typed),
    (_UTILS, "_rebuild_tensor_v2"): Global(_rebuild_typed, _rebuild_typed),
    (_UTILS, "_rebuild_tensor_v3"): Global(_rebuild_untyped, _rebuild_untyped),
    (_UTILS, "_rebuild_parameter"): Global(_rebuild_parameter, _rebuild_parameter),
    ("torch.storage", "UntypedStorage"): Global(StorageClass(None)),
    **{("torch", name): Global(StorageClass(dtype)) for dtype, name in STORAGE_CLASSES.items()},
}
_OTHERS = {
    (_UTILS, "_rebuild_parameter_with_state"): Global(_rebuild_parameter_with_state, _rebuild_parameter_with_state),
    (_UTILS, "_rebuild_sparse_tensor"): Global(_rebuild_sparse, _rebuild_sparse),
    (_UTILS, "_rebuild_qtensor"): Global(_rebuild_quantized, _rebuild_quantized),
    (_UTILS, "_rebuild_nested_tensor"): Global(_rebuild_nested, _rebuild_nested),
    (_UTILS, "_rebuild_meta_tensor_no_storage"): Global(_rebuild_meta, _rebuild_meta),
    (_UTILS, "_rebuild_device_tensor_from_cpu_tensor"): Global(_rebuild_from_device, _rebuild_from_device),
    (_UTILS, "_rebuild_wrapper_subclass"): Global(_rebuild_wrapper),
    ("torch._tensor", "_rebuild_from_type_v2"): Global(_rebuild_from_type, _rebuild_from_type),
    ("torch", "Tensor"): Global(torch.Tensor),
    ("torch.nn.parameter", "Parameter"): Global(torch.nn.Parameter),
    **{("torch", name): Global(StorageClass(dtype)) for name, dtype in _QUANTIZED.items()},
}


def resolve_outline(module: str, name: str) -> Global | None:
    """What stands for a tensor while its storages hold zeros, where those would not do."""
    return Global(_outline_sparse, _outline_sparse) if (module, name) == (_UTILS, "_rebuild_sparse_tensor") else None


def resolve_plain_tensor(module: str, name: str) -> Global | None:
    """The allow-list for values, with what rebuilds a plain tensor or parameter from its storage."""
    return _PLAIN.get((module, name)) or resolve_value(module, name)


def resolve_tensor_value(module: str, name: str) -> Global | None:
    """The allow-list for values, with what rebuilds a tensor of any kind."""
    return _OTHERS.get((module, name)) or resolve_plain_tensor(module, name)
