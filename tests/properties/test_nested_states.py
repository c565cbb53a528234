"""Whatever the state: what is loaded is what was saved, with its types, or the save refuses it."""

from __future__ import annotations

import datetime as dt
import decimal
import io
import uuid
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Mapping
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

import dcpfs
from tests.peers.sample_state import DTYPES, assert_same, make_tensor, template_of
from tests.properties.bounds import examples

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]

_shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any dtype, any shape, and memory that need not be in order or its own."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(_shapes)
    salt = draw(st.integers(0, 99))
    layout = draw(st.sampled_from(["plain", "transposed", "part", "steps", "parameter", "expanded"]))
    if layout == "transposed":
        return make_tensor(shape[::-1], dtype, salt).permute(tuple(reversed(range(len(shape)))))
    if layout == "part":
        return make_tensor((3, *shape), dtype, salt)[1]
    if layout == "steps":
        return make_tensor((*shape, 2), dtype, salt)[..., 1]
    if layout == "expanded":
        return make_tensor((1, *shape), dtype, salt).expand(2, *shape)
    tensor = make_tensor(shape, dtype, salt)
    if layout == "parameter" and dtype.is_floating_point and dtype.itemsize > 1:
        return torch.nn.Parameter(tensor)
    return tensor


_scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**80), 2**80),
    st.floats(),
    st.text(max_size=20),
    st.binary(max_size=20),
    st.complex_numbers(allow_nan=False),
    st.dates(),
    st.datetimes(timezones=st.sampled_from([None, dt.timezone.utc, dt.timezone(dt.timedelta(minutes=-90))])),
    st.timedeltas(),
    st.decimals(allow_nan=False),
    st.fractions(),
    st.uuids(),
    st.binary(max_size=9).map(io.BytesIO),
    st.sampled_from([torch.float32, torch.int8, torch.Size([2, 0]), torch.strided, torch.device("cpu")]),
    st.sampled_from([np.float64(1.5), np.int8(-3), np.bool_(False), np.float16(2), np.datetime64("2024-01-02")]),
    st.sampled_from([np.arange(6).reshape(2, 3), np.zeros((0, 2), np.uint8), np.array(["a", "bc"])]),
    st.frozensets(st.integers(), max_size=3),
    st.lists(st.integers(), max_size=3).map(deque),
)
_leaves = st.one_of(tensors(), _scalars)
_texts = st.one_of(
    st.text(max_size=6),
    st.text(alphabet="ab.0/ ", max_size=4),
    st.sampled_from(["", ".", "a.b", "0", "-1", "None", "with space", "../x", "é", "\x00", "__dcpfs__", "'", '"']),
)
_keys = st.one_of(
    _texts,
    st.integers(-3, 12),
    st.booleans(),
    st.none(),
    st.floats(allow_nan=False, allow_infinity=False, width=16),
    st.tuples(st.integers(0, 3), st.text(max_size=2)),
    st.binary(max_size=3),
)


def _containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.dictionaries(_keys, children, max_size=4),
        st.dictionaries(st.integers(0, 9), children, max_size=3),
        st.dictionaries(_keys, children, max_size=3).map(OrderedDict),
        st.dictionaries(_keys, st.integers(0, 9), max_size=3).map(Counter),
        st.lists(children, max_size=4),
        st.lists(_scalars, max_size=3).map(tuple),
        st.tuples(tensors(), _scalars),
    )


_values = st.recursive(_leaves, _containers, max_leaves=12)
_states = st.dictionaries(_texts, _values, max_size=5)


def _flat_keys(value: object, prefix: str = "") -> Iterator[str]:
    """The keys of all leaves as torch names them, and those of leafless mappings, which must not clash either."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat_keys(item, f"{prefix}.{key}" if prefix else f".{key}")
        texts = Counter(str(key) for key in value)
        yield from (f"{prefix}.{text}" for text, count in texts.items() if count > 1 for _ in range(2))
    elif isinstance(value, list) and any(_is_open(item) for item in value):
        for position, item in enumerate(value):
            yield from _flat_keys(item, f"{prefix}.{position}")
    else:
        yield prefix


def _is_open(item: object) -> bool:
    return isinstance(item, (torch.Tensor, Mapping)) or (isinstance(item, list) and any(map(_is_open, item)))


@examples(100)
@given(state=_states)
def test_what_is_loaded_is_what_was_saved(state: dict[str, Any]) -> None:
    url = f"memory://{uuid.uuid4().hex}"
    names = list(_flat_keys(state))
    ambiguous = len(set(names)) < len(names)
    try:
        if ambiguous:
            with pytest.raises(dcpfs.UnsupportedValueError, match="key"):
                dcpfs.save(state, url)
            return
        dcpfs.save(state, url)
        assert_same(dcpfs.read(url), state)
        template = template_of(state)
        assert isinstance(template, dict)
        report = dcpfs.load(template, url)
        assert not report.missing
        assert not report.unexpected
        assert_same(template, state)
        template = template_of(state)
        assert isinstance(template, dict)
        dcp_load(template, storage_reader=dcpfs.FsspecStorageReader(url), planner=dcpfs.LoadPlanner())
        assert_same(template, state)
    finally:
        _forget(url)


def _forget(url: str) -> None:
    memory, path = fsspec.filesystem("memory"), url.removeprefix("memory:/")
    if memory.exists(path):
        memory.rm(path, recursive=True)


def test_decimals_keep_their_digits() -> None:
    """A value that compares equal to another form of itself."""
    url = f"memory://{uuid.uuid4().hex}"
    dcpfs.save({"d": decimal.Decimal("1.10")}, url)
    assert str(dcpfs.read(url)["d"]) == "1.10"


@pytest.mark.parametrize("key", ["\ud800", "a\udfff.b"])
def test_a_key_that_is_no_text_is_refused_or_kept(key: str) -> None:
    """Half of a surrogate pair has no UTF-8."""
    url = f"memory://{uuid.uuid4().hex}"
    state = {key: torch.ones(2), "ok": 1}
    try:
        dcpfs.save(state, url)
    except dcpfs.DcpfsError:
        return
    assert_same(dcpfs.read(url), state)
