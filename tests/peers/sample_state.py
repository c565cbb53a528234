"""A state with one of everything that a checkpoint can hold, templates for it, and comparison bit for bit.

Imports nothing of dcpfs: the same module serves a process in which dcpfs can't be imported, and other releases of
torch. Values come from arithmetic, not from a random generator, so that two processes make the same ones. A state is
made once and shared: nobody may change it.
"""

from __future__ import annotations

import datetime as dt
import enum
import functools
import io
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping

import numpy as np
import torch
from torch.distributed.fsdp import ShardingStrategy

__all__ = ["DTYPES", "assert_same", "full_state", "make_tensor", "odd_state", "template_of", "textual", "trained_state"]

_NAMES = (
    *("bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
)


def _can_be_copied(dtype: torch.dtype) -> bool:
    """torch 2.9 saves float4 and can't copy what it loaded into a state."""
    try:
        torch.zeros(dtype.itemsize, dtype=torch.uint8).view(dtype).clone()
    except NotImplementedError:
        return False
    return True


DTYPES = tuple(dtype for dtype in (getattr(torch, name) for name in _NAMES) if _can_be_copied(dtype))
"""Every dtype with memory of its own that torch can save and load."""


def make_tensor(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, salt: int = 1) -> torch.Tensor:
    """A tensor with values that repeat nowhere nearby; any bit pattern but those that are not numbers."""
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = (torch.arange(count, dtype=torch.int64) * 2_654_435_761 + salt * 40_503) >> 7
    if dtype is torch.bool:
        return (raw % 3 == 0).reshape(shape)
    return (raw % 251).to(torch.uint8).view(dtype).reshape(shape)


@functools.cache
def full_state() -> dict[str, object]:
    """Tensors of every dtype and layout, and values, in containers that torch's own flattening keeps."""
    base = make_tensor((6, 8))
    complex_base = make_tensor((4, 6), torch.float32, 5).abs().clamp(1e-3, 1e3)
    complex_base = torch.complex(complex_base, -complex_base)
    big = make_tensor((4096,), torch.float32, 7)
    tied = make_tensor((5, 3), torch.bfloat16, 9)
    state: dict[str, object] = {
        "dtypes": {str(d).removeprefix("torch."): make_tensor((2, 3), d, n) for n, d in enumerate(DTYPES)},
        "scalars": {str(d).removeprefix("torch."): make_tensor((), d, n) for n, d in enumerate(DTYPES)},
        "empty": {"none": torch.empty(0), "rows": torch.empty(0, 4, dtype=torch.int64), "columns": torch.empty(3, 0)},
        "layout": {
            "parameter": torch.nn.Parameter(make_tensor((3, 4), torch.float32, 2)),
            "transposed": base.t(),
            "permuted": make_tensor((3, 4, 5)).permute(2, 0, 1),
            "channels_last": make_tensor((2, 3, 4, 5)).to(memory_format=torch.channels_last),
            "strided": base[::2, 1::3],
            "offset": base[2:4],
            "expanded": torch.tensor([1.5, 2.5]).expand(4, 2),
            "narrow_of_big": big[1000:1010],
            "element_of_big": big[77],
            "conjugate": complex_base.conj(),
            "conjugate_transposed": complex_base.t().conj(),
            "negative": complex_base.conj().imag,
            "real_part": complex_base.real,
        },
        "tied": {"one": tied, "two": tied, "transposed": tied.t()},
        "large": make_tensor((700, 1001), torch.float32, 11),
        "large_transposed": make_tensor((700, 401), torch.float16, 13).t(),
        "large_bytes": make_tensor((1_500_003,), torch.uint8, 17),
        "nested": {"list": [make_tensor((2,)), {"deep": make_tensor((1,))}, 3, [4, make_tensor((3,))]], "lr": 0.1},
        "leaf_list": [1, "a", [2.5, None]],
        "pair": (1, (2, "x"), make_tensor((2,), torch.int32)),
        "values": {
            "int": 7,
            "big": 2**200 - 1,
            "negative_big": -(2**70),
            "float": -0.0,
            "infinite": float("-inf"),
            "bool": True,
            "none": None,
            "text": "ünïcode ☃ \x00",
            "long_text": "x" * 70_000,
            "bytes": b"\x00\xff",
            "complex": 1 - 2j,
            "size": torch.Size([2, 3]),
            "dtype": torch.bfloat16,
            "stream": io.BytesIO(b"raw"),
            "numpy_scalar": np.float32(1.25),
            "numpy_int": np.int64(-3),
            "numpy_bool": np.bool_(True),
            "numpy_array": np.arange(12, dtype=np.uint16).reshape(3, 4).T,
            "numpy_state": np.random.RandomState(3).get_state(),
            "torch_state": torch.arange(5056, dtype=torch.int64).to(torch.uint8),
            "date": dt.date(2024, 2, 29),
            "datetime": dt.datetime(2024, 2, 29, 12, 30, 1, 5, tzinfo=dt.timezone.utc),
            "zone": dt.datetime(2024, 2, 29, tzinfo=dt.timezone(dt.timedelta(hours=5, minutes=30))),
            "delta": dt.timedelta(days=-1, microseconds=3),
            "set": {1, 2},
            "frozen": frozenset({"a"}),
            "deque": deque([1, 2], 5),
            "range": range(1, 9, 2),
            "slice": slice(1, None, 2),
            "enum": ShardingStrategy.FULL_SHARD,
        },
        "with.dots": {"and/slash": make_tensor((2, 2), torch.int16), "ünï": 5, "": 6, " blank ": torch.ones(1)},
    }
    return state


@functools.cache
def odd_state() -> dict[str, object]:
    """Containers and keys that torch's flattening changes: it makes keys text and drops what is empty."""
    default: defaultdict[str, list[int]] = defaultdict(list)
    default["k"].append(1)
    return {
        "milestones": Counter({2: 1, 5: 3}),
        "by_int": {0: make_tensor((2,)), 10: {"lr": 0.5}, -1: "minus"},
        "mixed": {"a": 1, 2: make_tensor((3,)), None: 3, (1, "x"): 4, True: 5, b"b": 6, 2.5: 7},
        "ordered": OrderedDict([("z", make_tensor((2,))), ("a", 1)]),
        "default": default,
        "empty": {},
        "empty_list": [],
        "empty_tuple": (),
        "empty_ordered": OrderedDict(),
        "only_empty": {"a": {"b": {}}},
        "list_with_empty": [1, {"k": make_tensor((1,))}, [], {}],
    }


@functools.cache
def trained_state() -> dict[str, object]:
    """Model, AdamW and MultiStepLR after three steps on fixed data."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) / (10.0 + number))
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters(), "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, amsgrad=True)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[2, 2, 9])
    for step in range(3):
        optimizer.zero_grad()
        model(torch.arange(30.0).reshape(5, 6) / (step + 1)).square().sum().backward()
        optimizer.step()
        scheduler.step()
    state: dict[str, object] = {
        "model": model.state_dict(),
        "optim": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "iteration": 3,
    }
    _renumber(state)  # releases of torch train to other last digits
    return state


def _renumber(value: object, salt: int = 0) -> int:
    if isinstance(value, torch.Tensor):
        value.detach().copy_(make_tensor(tuple(value.shape), torch.int16, salt).abs())
    elif isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            salt = _renumber(item, salt + 1)
    return salt


def template_of(value: object) -> object:
    """The same containers, with zeros for tensors and a wrong value for everything else."""
    if isinstance(value, torch.Tensor):
        raw = torch.zeros(value.numel() * value.element_size(), dtype=torch.uint8)
        return raw.view(value.dtype).reshape(value.shape)
    if isinstance(value, Mapping):
        filled = {key: template_of(item) for key, item in value.items()}
        if isinstance(value, (OrderedDict, Counter)):
            return type(value)(filled)
        if isinstance(value, defaultdict):
            return defaultdict(value.default_factory, filled)
        return filled
    if isinstance(value, list) and _is_opened(value):
        return [template_of(item) for item in value]
    return "nothing yet"


def _is_opened(values: list[object]) -> bool:
    """Whether flattening opens a list: it holds a tensor or a mapping at any depth of lists."""
    return any(
        isinstance(item, (torch.Tensor, Mapping)) or (isinstance(item, list) and _is_opened(item)) for item in values
    )


def textual(value: object, *, keeps_empty: bool = False) -> object:
    """A state as torch's flattening keeps it: text keys, plain dicts, nothing that is empty (unless asked)."""
    if isinstance(value, Mapping):
        parts = {str(key): textual(item, keeps_empty=keeps_empty) for key, item in value.items()}
        parts = {key: item for key, item in parts.items() if item is not _NOTHING}
        return parts if parts or keeps_empty else _NOTHING
    if isinstance(value, list) and _is_opened(value):
        items = [textual(item, keeps_empty=keeps_empty) for item in value]
        while items and items[-1] is _NOTHING:
            items.pop()
        return [None if item is _NOTHING else item for item in items] or _NOTHING
    return value


_NOTHING = object()


def assert_same(found: object, expected: object, where: str = "state") -> None:
    """Raise unless both are equal to the bit, types, order and sharing of keys included."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor), f"{where}: {type(found)}"
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), where
        assert _bits(found) == _bits(expected), f"{where}: other values"
        return
    assert type(found) is type(expected), f"{where}: {type(found)} for {type(expected)}"
    if isinstance(expected, np.ndarray) and isinstance(found, np.ndarray):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), where
        assert found.tobytes() == expected.tobytes(), f"{where}: other values"
    elif isinstance(expected, Mapping) and isinstance(found, Mapping):
        assert [(type(key), key) for key in found] == [(type(key), key) for key in expected], where
        if isinstance(expected, defaultdict) and isinstance(found, defaultdict):
            assert found.default_factory is expected.default_factory, where
        for key in expected:
            assert_same(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, (list, tuple, deque)) and isinstance(found, (list, tuple, deque)):
        assert len(found) == len(expected), f"{where}: length {len(found)} for {len(expected)}"
        for position, item in enumerate(expected):
            assert_same(found[position], item, f"{where}.{position}")
        if isinstance(expected, deque) and isinstance(found, deque):
            assert found.maxlen == expected.maxlen, where
    elif isinstance(expected, io.BytesIO) and isinstance(found, io.BytesIO):
        assert found.getvalue() == expected.getvalue(), where
    elif isinstance(expected, float) and isinstance(found, float):
        assert struct.pack("<d", found) == struct.pack("<d", expected), where
    elif isinstance(expected, enum.Enum):
        assert found is expected, where
    else:
        assert found == expected, f"{where}: {found!r} for {expected!r}"


def _bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if plain.numel() == 0:
        return b""
    # One element may have any stride, and then no view as bytes.
    return plain.as_strided(plain.shape, (1,)).view(torch.uint8).numpy().tobytes()
