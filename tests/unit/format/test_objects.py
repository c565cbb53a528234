from __future__ import annotations

import collections
import contextlib
import datetime as dt
import decimal
import enum
import fractions
import io
import pathlib
import pickle
import random
import struct
import threading
import uuid
import zipfile
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.tensor
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.fsdp import ShardingStrategy

from dcpfs.config import Trust
from dcpfs.errors import CorruptCheckpointError, UnsupportedValueError, UntrustedDataError
from dcpfs.format.entries import check_storable_object, decode_object, decode_tensor_entry, encode_object
from dcpfs.format.unpickling import loads
from tests.properties.bounds import examples
from tests.unit.format.values import ALL_DTYPES, filled, raw_bytes, torch_save

ZONE = dt.timezone(dt.timedelta(hours=2), "CEST")


def same(left: Any, right: Any) -> bool:
    """Equal, and of equal types all the way down."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and raw_bytes(left) == raw_bytes(right)
    if isinstance(left, np.ndarray) and left.dtype != object:
        return bool(left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes())
    if isinstance(left, np.ndarray):
        return same(left.tolist(), right.tolist())
    if isinstance(left, collections.abc.Mapping):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple | collections.deque):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, io.BytesIO):
        return bool(left.getvalue() == right.getvalue() and left.tell() == right.tell())
    if isinstance(left, np.generic):
        return bool(left.dtype == right.dtype and left.tobytes() == right.tobytes())
    return bool(left == right) or repr(left) == repr(right)


def stream(data: bytes, position: int) -> io.BytesIO:
    made = io.BytesIO(data)
    made.seek(position)
    return made


def module_state() -> dict[str, Any]:
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)).state_dict()


STORABLE: dict[str, Any] = {
    "none": None,
    "int": 3,
    "long": 1 << 200,
    "negative long": -(1 << 77),
    "float": 2.5,
    "nan": float("nan"),
    "infinity": float("-inf"),
    "complex": 1 + 2j,
    "str": "ünïcode \ud800 \0",
    "bytes": bytes(range(256)),
    "bytearray": bytearray(b"abc"),
    "bools": [True, False],
    "nested": {"a": [1, (2, {"b": None}), []], 3: {(1, "x"): 2}},
    "long list": list(range(3000)),
    "wide dict": {f"k{number}": number for number in range(2500)},
    "set": {1, 2, "x"},
    "frozenset": frozenset((1, (2, 3))),
    "slice": slice(1, None, 2),
    "range": range(1, 9, 3),
    "size": torch.Size((2, 3)),
    "dtype": [torch.float8_e4m3fn, torch.bfloat16],
    "device": torch.device("cuda", 1),
    "layout": torch.strided,
    "ordered dict": collections.OrderedDict(b=1, a=2),
    "default dict": collections.defaultdict(list, {"a": [1]}),
    "default dict of dicts": collections.defaultdict(dict, {1: {2: 3}}),
    "counter": collections.Counter("aab"),
    "deque": collections.deque([1, 2, 3]),
    "bounded deque": collections.deque([1, 2, 3], 2),
    "date": dt.date(2026, 1, 2),
    "time": dt.time(1, 2, 3, 4),
    "datetime": dt.datetime(2026, 1, 2, tzinfo=None),  # noqa: DTZ001 - without a zone is a case of its own
    "datetime utc": dt.datetime(2026, 1, 2, tzinfo=dt.timezone.utc),
    "datetime zone": dt.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=ZONE, fold=1),
    "timedelta": dt.timedelta(-1, 2, 3),
    "decimal": decimal.Decimal("-1.50"),
    "fraction": fractions.Fraction(3, 7),
    "uuid": uuid.UUID(int=5),
    "path": pathlib.Path("a/b"),
    "pure paths": [pathlib.PurePosixPath("/a"), pathlib.PureWindowsPath("C:\\a")],
    "bytes io": stream(b"some bytes", 4),
    "python random state": random.Random(3).getstate(),
    "numpy random state": np.random.RandomState(3).get_state(),
    "numpy scalars": [np.float32(1.5), np.int64(-3), np.bool_(True), np.complex128(1j), np.float16(0.1), np.uint16(9)],
    "numpy dates": [np.datetime64("2026-01-02T03:04", "s"), np.timedelta64(5, "h")],
    "numpy strings": np.array(["a", "bcd"]),
    "numpy array": np.arange(12, dtype=np.float64).reshape(3, 4),
    "numpy fortran": np.asfortranarray(np.arange(12).reshape(3, 4)),
    "numpy objects": np.array([1, None, "x"], dtype=object),
    "numpy empty": np.zeros((0, 3), dtype=np.int8),
    "numpy 0-dim": np.array(3),
    "numpy dtypes": [np.dtype("float32"), np.dtype(">i8"), np.dtype("M8[ns]"), np.dtype("U7")],
    "numpy types": [np.float32, np.int64],
    "tensor": torch.arange(6.0).reshape(2, 3),
    "tensors": {"a": torch.arange(6).t(), "b": [torch.zeros(0), torch.tensor(3)]},
    "module state": module_state(),
    "enum of torch": ShardingStrategy.FULL_SHARD,
}


@pytest.mark.parametrize("name", STORABLE)
def test_case_111_what_trainers_store_comes_back_under_the_allow_list(name: str) -> None:
    value = STORABLE[name]
    data = encode_object(value, key="trainer/x")
    assert same(decode_object(data, key="trainer/x"), value)
    assert same(decode_object(memoryview(bytearray(data))), value)
    check_storable_object(data, "trainer/x")
    # torch itself reads it too.
    assert same(torch.load(io.BytesIO(data), weights_only=False), value)


@pytest.mark.parametrize("protocol", range(2, 6))
@pytest.mark.parametrize("name", [name for name in STORABLE if not {"tensor", "tensors", "module state"} & {name}])
def test_plain_pickles_of_every_protocol_come_back(name: str, protocol: int) -> None:
    value = STORABLE[name]
    assert same(loads(pickle.dumps(value, protocol)), value)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_numpy_arrays_of_another_byte_order_come_back_as_pickle_gives_them(protocol: int) -> None:
    # numpy swaps to the order of the machine for protocols before 5.
    data = pickle.dumps(np.arange(4, dtype=">i4"), protocol)
    assert same(loads(data), pickle.loads(data))


@pytest.mark.parametrize("protocol", [4, 5])
def test_memory_formats_come_back_whichever_module_pickle_found_them_in(protocol: int) -> None:
    assert loads(pickle.dumps(torch.channels_last, protocol)) is torch.channels_last
    for name in ("torch.load", "torch.nn", "torch.nn.Linear", "torch.__builtins__", "torch.os"):
        with pytest.raises(UntrustedDataError):
            loads(b"\x80\x04\x8c\x0ctorch._utils\x8c%c%s\x93." % (len(name), name.encode()))


def test_names_of_numpy_before_2_and_python_3_13_mean_the_same() -> None:
    array = np.arange(3)
    old = pickle.dumps(array, 2).replace(b"numpy._core.", b"numpy.core.")
    assert same(loads(old), array)
    assert loads(b"\x80\x02cpathlib._local\nPosixPath\n(X\x01\0\0\0aX\x01\0\0\0btR.") == pathlib.Path("a/b")
    assert loads(b"\x80\x02cpathlib\nWindowsPath\nX\x03\0\0\0C:a\x85R.") == pathlib.PureWindowsPath("C:a")


def test_a_time_of_an_hour_that_comes_twice_keeps_which_it_is() -> None:
    day = dt.datetime(2026, 10, 25, 2, 30, fold=1)  # noqa: DTZ001 - without a zone is a case of its own
    value: Any = {"a": [day, day.time(), day.replace(tzinfo=ZONE)], "b": day.replace(fold=0)}
    data = encode_object(value)
    decoded: tuple[Any, ...] = (decode_object(data), torch.load(io.BytesIO(data), weights_only=False))
    for made in decoded:
        assert same(made, value)
        assert [each.fold for each in (*made["a"], made["b"])] == [1, 1, 1, 0]
        assert made["a"][2].tzname() == "CEST"
    assert decode_object(encode_object(day)).fold == 1  # type: ignore[attr-defined]


def test_dates_of_numpy_get_no_other_metadata_than_from_pickle() -> None:
    """None, but of an older numpy, such as 2.2, which makes an empty mapping of it."""
    dates = np.array(["2026-01-02"], dtype="M8[D]")
    made: Any = decode_object(encode_object(dates))
    assert made.dtype.metadata == pickle.loads(pickle.dumps(dates)).dtype.metadata
    assert not made.dtype.metadata


def test_a_module_state_keeps_its_versions() -> None:
    made: Any = decode_object(encode_object(module_state()))
    assert made._metadata == module_state()._metadata  # type: ignore[attr-defined]  # torch sets it on the dict


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_case_28_tensors_of_every_dtype_inside_a_value_come_back(dtype: torch.dtype) -> None:
    value = {"a": filled(dtype, (3, 2)), "b": filled(dtype, ()), "c": filled(dtype, (0, 3))}
    assert same(decode_object(encode_object(value)), value)


def test_case_27_tensors_that_share_memory_still_do() -> None:
    weight = torch.arange(12.0).reshape(3, 4)
    made: Any = decode_object(encode_object({"a": weight, "b": weight, "row": weight[1], "t": weight.t()}))
    made["a"][1, 2] = 99
    assert made["b"][1, 2] == 99
    assert made["row"][2] == 99
    assert made["t"][2, 1] == 99
    size_bytes = len(encode_object({"a": weight, "b": weight}))
    assert size_bytes < len(encode_object({"a": weight, "b": weight.clone()}))


def test_views_and_parameters_inside_a_value_come_back_as_they_were() -> None:
    value = {
        "conj": torch.tensor([1 + 2j]).conj(),
        "neg": torch.tensor([1 + 2j]).conj().imag,
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "gradient": torch.ones(2, requires_grad=True),
    }
    made: Any = decode_object(torch_save(value))
    assert made["conj"].is_conj()
    assert made["neg"].is_neg()
    assert made["conj"].item() == 1 - 2j
    assert made["neg"].item() == -2
    assert [type(made[name]) for name in ("parameter", "frozen")] == [torch.nn.Parameter] * 2
    assert [made[name].requires_grad for name in ("parameter", "frozen", "gradient")] == [True, False, True]


def test_decoded_tensors_can_be_resized_and_written() -> None:
    made: Any = decode_object(encode_object([torch.ones(2)]))
    made[0].untyped_storage().resize_(400)
    made[0].fill_(3)


class Mode(enum.Enum):
    FAST = 1


class Plain:
    def __init__(self, value: int = 0) -> None:
        self.value = value


class Slotted:
    __slots__ = ("value",)
    value: int


class WithState:
    def __getstate__(self) -> dict[str, int]:
        return {"value": 7}

    def __setstate__(self, state: dict[str, int]) -> None:
        self.value = state["value"] + 1


class Dict(dict[str, int]):
    pass


UNSTORABLE: dict[str, Any] = {
    "enum": (Mode.FAST, "Mode"),
    "object": (Plain(3), "Plain"),
    "nested object": ([{"a": (1, Plain(3))}], "Plain"),
    "subclass of dict": (Dict(), "Dict"),
    "class": (Plain, "Plain"),
    "function": (module_state, "module_state"),
    "builtin": (print, "print"),
    "module": (torch.nn.Linear(1, 1), "Linear"),
    "generator": (torch.Generator(), "Generator"),
    "default dict of a function": (collections.defaultdict(module_state), "module_state"),
    "numpy record": (np.zeros(2, dtype=[("a", "i4")]), "numpy"),
}


@pytest.mark.parametrize("name", UNSTORABLE)
def test_case_111_other_classes_are_refused_before_anything_is_written(name: str) -> None:
    value, class_name = UNSTORABLE[name]
    with pytest.raises(UnsupportedValueError, match=class_name) as caught:
        encode_object(value, key="trainer/best")
    assert "'trainer/best'" in str(caught.value)
    assert "trust=" not in str(caught.value)


@pytest.mark.parametrize("name", [name for name in UNSTORABLE if name != "generator"])
def test_case_111_other_classes_are_refused_when_reading_with_key_and_class(name: str) -> None:
    value, class_name = UNSTORABLE[name]
    data = encode_object(value, trust=Trust.PICKLE)
    with pytest.raises(UntrustedDataError, match=class_name) as caught:
        decode_object(data, key="trainer/best")
    assert "'trainer/best'" in str(caught.value) or "numpy" in str(caught.value)
    decode_object(data, trust=Trust.PICKLE)


@pytest.mark.parametrize("value", [lambda: 0, threading.Lock(), iter(lambda: 0, 1)], ids=["lambda", "lock", "iterator"])
@pytest.mark.parametrize("trust", list(Trust))
def test_what_cannot_be_pickled_is_said_with_its_key(value: object, trust: Trust) -> None:
    with pytest.raises(UnsupportedValueError, match=r"saving 'trainer/x'.*can't be pickled"):
        encode_object(value, key="trainer/x", trust=trust)


@pytest.mark.parametrize("value", [Plain(3), WithState(), Mode.FAST], ids=lambda value: type(value).__name__)
def test_classes_that_the_user_registered_are_allowed(value: Any) -> None:
    with torch.serialization.safe_globals([type(value)]):
        made: Any = decode_object(encode_object(value))
    assert type(made) is type(value)
    if isinstance(value, WithState):
        assert made.value == 8
    with pytest.raises(UnsupportedValueError):
        encode_object(value)


def test_a_class_registered_under_another_name_is_found_by_that_name() -> None:
    data = encode_object(Plain(4), trust=Trust.PICKLE)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        pickled = archive.read("archive/data.pkl")
    moved = pickled.replace(f"c{Plain.__module__}\nPlain\n".encode(), b"cold_package.old\nPlain\n")
    with torch.serialization.safe_globals([(Plain, "old_package.old.Plain")]):
        made: Any = loads(moved)
    assert (type(made), made.value) == (Plain, 4)


def test_slots_are_filled_for_registered_classes() -> None:
    value = Slotted()
    value.value = 5
    with torch.serialization.safe_globals([Slotted]):
        made: Any = loads(pickle.dumps(value, 2))
    assert made.value == 5


def test_a_value_that_is_no_tensor_is_no_tensor_entry() -> None:
    with pytest.raises(CorruptCheckpointError, match=r"'w'.*holds a dict"):
        decode_tensor_entry(torch_save({}), key="w")


@pytest.mark.parametrize("data", [b"", b"PK", b"PK\x03\x04", b"<html>no</html>", b"\x80\x02", b"\x80\x02N."], ids=repr)
@pytest.mark.parametrize("trust", list(Trust))
def test_bytes_of_something_else_are_damage(data: bytes, trust: Trust) -> None:
    with pytest.raises(CorruptCheckpointError) as caught:
        decode_object(data, trust=trust, key="trainer/x")
    assert caught.value.key == "trainer/x"


def test_safetensors_are_named_as_such() -> None:
    data = struct.pack("<Q", 8) + b'{"a":1}  '
    with pytest.raises(CorruptCheckpointError, match="safetensors"):
        decode_object(data)


def test_case_113_each_bit_of_a_record_is_covered_by_its_checksum() -> None:
    value = {"step": 3, "weights": torch.arange(4.0)}
    entry = bytearray(torch_save(value))
    with zipfile.ZipFile(io.BytesIO(bytes(entry))) as archive:
        starts = [(info.header_offset, info.filename, info.file_size) for info in archive.infolist()]
    tried = 0
    for offset, name, size_bytes in starts:
        name_bytes, extra_bytes = struct.unpack_from("<HH", entry, offset + 26)
        start = offset + 30 + name_bytes + extra_bytes
        for position in range(start, start + size_bytes):
            damaged = bytearray(entry)
            damaged[position] ^= 1 << (position % 8)
            with pytest.raises(CorruptCheckpointError, match="checksum") as caught:
                decode_object(bytes(damaged), key="trainer/x")
            assert caught.value.key == "trainer/x"
            assert name.partition("/")[2] in str(caught.value)
            tried += 1
    assert tried > 100


def test_a_value_without_checksums_is_read() -> None:
    torch.serialization.set_crc32_options(False)
    try:
        data = torch_save({"a": torch.arange(3)})
    finally:
        torch.serialization.set_crc32_options(True)
    made: Any = decode_object(data)
    assert made["a"].tolist() == [0, 1, 2]


def archive_of(records: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, data in records.items():
            archive.writestr(f"archive/{name}", data)
    return buffer.getvalue()


def test_archives_that_torch_does_not_write_are_refused() -> None:
    with pytest.raises(CorruptCheckpointError, match="no archive of torch"):
        decode_object(archive_of({"other": b""}))
    with pytest.raises(CorruptCheckpointError, match="compressed"):
        decode_object(archive_of({"data.pkl": b"\x80\x02N."}, zipfile.ZIP_DEFLATED))
    with pytest.raises(UntrustedDataError, match="TorchScript"):
        decode_object(archive_of({"data.pkl": b"\x80\x02N.", "constants.pkl": b"\x80\x02)."}))


def stored(name: str, count: int, kind: bytes = b"FloatStorage") -> bytes:
    """Instructions that put a storage on the stack."""
    return b"(X\x07\0\0\0storagectorch\n%s\nX\x01\0\0\0%sX\x03\0\0\0cpu\x8a\x08%stQ" % (
        kind, name.encode(), count.to_bytes(8, "little"),
    )  # fmt: skip


def tensor_pickle(storage: bytes, offset: int, size: int, stride: int) -> bytes:
    numbers = b"".join(b"\x8a\x08" + number.to_bytes(8, "little", signed=True) for number in (offset, size, stride))
    first, second, third = numbers[:10], numbers[10:20], numbers[20:]
    return (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n("
        + storage
        + first
        + second
        + b"\x85"
        + third
        + b"\x85\x89ccollections\nOrderedDict\n)RtR."
    )


@pytest.mark.parametrize(
    "pickled",
    [
        tensor_pickle(stored("0", 4), 0, 5, 1),
        tensor_pickle(stored("0", 4), 4, 1, 1),
        tensor_pickle(stored("0", 4), 0, 2, 4),
        tensor_pickle(stored("0", 4), -1, 1, 1),
        tensor_pickle(stored("0", 4), 0, -1, 1),
        tensor_pickle(stored("0", 4), 2, 2, -1),
        tensor_pickle(stored("0", 4), 0, 1 << 61, 1 << 61),
        tensor_pickle(stored("0", 4), 0, 1 << 62, 0),
        tensor_pickle(stored("0", 1 << 60), 0, 4, 1),
        tensor_pickle(stored("0", 5), 0, 4, 1),
        tensor_pickle(stored("9", 4), 0, 4, 1),
        tensor_pickle(stored("0", 4, b"float32"), 0, 4, 1),
    ],
)
def test_tensors_never_reach_beyond_their_bytes(pickled: bytes) -> None:
    data = archive_of({"data.pkl": pickled, "byteorder": b"little", "data/0": bytes(16)})
    with pytest.raises((CorruptCheckpointError, UntrustedDataError)):
        decode_object(data, key="k")


@examples(300)
@given(st.sampled_from(["nested", "tensors", "numpy objects", "uuid"]), st.data())
def test_damaged_values_are_errors_of_ours(name: str, data: st.DataObject) -> None:
    entry = bytearray(torch_save(STORABLE[name]))
    for _ in range(data.draw(st.integers(1, 4))):
        entry[data.draw(st.integers(0, len(entry) - 1))] = data.draw(st.integers(0, 255))
    entry = entry[: data.draw(st.integers(0, len(entry)) | st.just(len(entry)))]
    with contextlib.suppress(CorruptCheckpointError, UntrustedDataError):
        decode_object(bytes(entry), key="k")


@examples(300)
@given(st.sampled_from(["nested", "tensors", "numpy objects", "uuid", "numpy dates", "bytes io"]), st.data())
def test_damaged_pickles_behind_right_checksums_are_errors_of_ours(name: str, data: st.DataObject) -> None:
    with zipfile.ZipFile(io.BytesIO(torch_save(STORABLE[name]))) as archive:
        records = {info.filename.partition("/")[2]: archive.read(info) for info in archive.infolist()}
    pickled = bytearray(records["data.pkl"])
    for _ in range(data.draw(st.integers(1, 3))):
        pickled[data.draw(st.integers(0, len(pickled) - 1))] = data.draw(st.integers(0, 255))
    records["data.pkl"] = bytes(pickled)
    with contextlib.suppress(CorruptCheckpointError, UntrustedDataError):
        decode_object(archive_of(records), key="k")


# --- what torch rebuilds in ways of its own


class Tagged(torch.Tensor):
    """A subclass with memory of its own."""


class Wrapping(torch.Tensor):
    """A subclass without memory: an inner tensor is its state."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.held = inner
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's has annotations of its own
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*[each.held if isinstance(each, Wrapping) else each for each in args], **(kwargs or {}))


def with_attribute(tensor: torch.Tensor) -> torch.Tensor:
    tensor.scale = [1, 2]  # type: ignore[attr-defined]  # of the user's own
    return tensor


def other_tensors() -> dict[str, torch.Tensor]:
    matrix = torch.tensor([[1.0, 0, 2], [0, 3, 0]])
    return {
        "coo": matrix.to_sparse(),
        "coo, not coalesced": torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.tensor([1.0, 2.0]), (3,)),
        "csr": matrix.to_sparse_csr(),
        "csc": matrix.to_sparse_csc(),
        "bsr": torch.eye(4).to_sparse_bsr((2, 2)),
        "quantized": torch.quantize_per_tensor(matrix, 0.5, 1, torch.qint8),
        "quantized by channel": torch.quantize_per_channel(
            matrix, torch.tensor([0.5, 0.25]), torch.tensor([0, 1]), 0, torch.quint8
        ),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.arange(3.0)]),
        "meta": torch.empty(2, 3, device="meta", dtype=torch.float16),
        "attributes": with_attribute(torch.ones(2)),
        "parameter with attributes": with_attribute(torch.nn.Parameter(torch.ones(2))),
        "subclass": torch.arange(3.0).as_subclass(Tagged),
        "wrapper": Wrapping(torch.arange(3.0)),
    }


OTHER_TENSORS = list(other_tensors())


def as_plain(tensor: torch.Tensor) -> list[torch.Tensor]:
    """What a tensor consists of."""
    if isinstance(tensor, Wrapping):
        return [tensor.held]
    if tensor.is_nested:
        return list(tensor.unbind())
    if tensor.is_quantized:
        scales = tensor.q_per_channel_scales() if tensor.qscheme() is torch.per_channel_affine else None
        return [tensor.int_repr(), tensor.dequantize(), *([] if scales is None else [scales])]
    return [] if tensor.is_meta else [tensor.detach().to_dense().as_subclass(torch.Tensor)]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", OTHER_TENSORS)
def test_tensors_of_every_kind_come_back_without_torchs_unpickler(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value = other_tensors()[name]
    data = torch_save({"a": value})
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("torch must not read what nobody trusts"))
    with torch.serialization.safe_globals([Tagged, Wrapping]):
        made = decode_object(data, key="k")
    assert isinstance(made, dict)
    found = made["a"]
    assert (type(found), found.dtype, found.layout, found.device) == (
        type(value), value.dtype, value.layout, value.device,
    )  # fmt: skip
    assert found.is_nested or found.shape == value.shape
    assert all(map(torch.equal, as_plain(found), as_plain(value)))
    assert getattr(found, "scale", None) == getattr(value, "scale", None)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ["nested", "tensors", "module state", "python random state"])
def test_files_of_the_format_before_1_6_come_back(name: str) -> None:
    buffer = io.BytesIO()
    torch.save(STORABLE[name], buffer, _use_new_zipfile_serialization=False)
    data = buffer.getvalue()
    assert same(decode_object(data, key="k"), STORABLE[name])
    for cut in range(0, len(data) - 1, 1 + len(data) // 200):
        with pytest.raises(CorruptCheckpointError):
            decode_object(data[:cut], key="k")


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", OTHER_TENSORS)
def test_tensors_of_every_kind_come_back_from_files_of_the_format_before_1_6(name: str) -> None:
    value = other_tensors()[name]
    buffer = io.BytesIO()
    torch.save([value, value], buffer, _use_new_zipfile_serialization=False)
    with torch.serialization.safe_globals([Tagged, Wrapping]):
        made = decode_object(buffer.getvalue(), key="k")
    assert isinstance(made, list)
    for found in made:
        assert (type(found), found.dtype, found.layout) == (type(value), value.dtype, value.layout)
        for mine, theirs in zip(as_plain(found), as_plain(value), strict=True):
            assert torch.equal(mine, theirs)


def test_a_large_file_of_the_format_before_1_6_comes_back() -> None:
    value = {f"k{number}": torch.full((number % 5,), float(number)) for number in range(1000)}
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=False)
    assert same(decode_object(buffer.getvalue()), value)


def test_tensors_of_a_machine_of_another_byte_order_come_back() -> None:
    value = {"a": torch.arange(5, dtype=torch.int32), "b": torch.ones(2, dtype=torch.complex64)}
    with zipfile.ZipFile(io.BytesIO(torch_save(value))) as archive:
        records = {info.filename.partition("/")[2]: archive.read(info) for info in archive.infolist()}
    records["byteorder"] = b"big"
    records["data/0"] = np.frombuffer(records["data/0"], "<i4").byteswap().tobytes()
    records["data/1"] = np.frombuffer(records["data/1"], "<f4").byteswap().tobytes()
    assert same(decode_object(archive_of(records)), value)
    records["byteorder"] = b"middle"
    with pytest.raises(CorruptCheckpointError, match="byte order"):
        decode_object(archive_of(records))


def number(value: int) -> bytes:
    return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)


def function(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


PLAIN = tensor_pickle(stored("0", 4), 0, 4, 1)[2:-1]
REPEATED = tensor_pickle(stored("0", 4), 0, 1 << 40, 0)[2:-1]
LONGS = b"ctorch._utils\n_rebuild_tensor_v2\n(" + stored("1", 2, b"LongStorage")
HOOKS = b"\x89ccollections\nOrderedDict\n)Rt"
QUANTIZED = function("torch._utils", "_rebuild_qtensor") + b"(" + stored("0", 16, b"QUInt8Storage") + b"K\0"
ABUSES: dict[str, bytes] = {
    "bytearray of a size": function("builtins", "bytearray") + number(1 << 32) + b"\x85R",
    "memory that nobody wrote": function("torch", "FloatTensor") + number(1 << 20) + b"\x85R",
    "tensor of a size": function("torch", "Tensor") + number(1 << 20) + b"\x85\x81",
    "storage of a size": function("torch.storage", "UntypedStorage") + number(1 << 20) + b"\x85R",
    "typed storage": function("torch.storage", "TypedStorage") + number(1 << 20) + b"\x85R",
    "quantized, larger than its bytes": QUANTIZED + number(1 << 40) + b"\x85K\1\x85("
    + function("torch", "per_tensor_affine") + b"G?\xe0\0\0\0\0\0\0K\0t" + HOOKS + b"R",
    "quantized, repeated": QUANTIZED + number(1 << 40) + b"\x85K\0\x85("
    + function("torch", "per_tensor_affine") + b"G?\xe0\0\0\0\0\0\0K\0t" + HOOKS + b"R",
    "quantized, no scheme": QUANTIZED + b"K\4\x85K\1\x85)" + HOOKS + b"R",
    "quantized, repeated scales": QUANTIZED + b"K\4\x85K\1\x85("
    + function("torch", "per_channel_affine") + REPEATED + REPEATED + b"K\0t" + HOOKS + b"R",
    "sparse of repeated": function("torch._utils", "_rebuild_sparse_tensor") + function("torch", "sparse_coo") + b"("
    + REPEATED + REPEATED + number(9) + b"\x85t\x86R",
    "sparse outside": function("torch._utils", "_rebuild_sparse_tensor") + function("torch", "sparse_coo") + b"("
    + LONGS + b"K\0K\1K\2\x86K\2K\1\x86" + HOOKS + b"R" + tensor_pickle(stored("0", 4), 0, 2, 1)[2:-1]
    + b"K\3\x85t\x86R",
    "nested outside": function("torch._utils", "_rebuild_nested_tensor") + b"(" + PLAIN
    + LONGS + b"K\0K\1K\1\x86K\1K\1\x86" + HOOKS + b"R" + LONGS + b"K\0K\1K\1\x86K\1K\1\x86" + HOOKS + b"R"
    + LONGS + b"K\1K\1\x85K\1\x85" + HOOKS + b"RtR",
    "copy of repeated": function("torch._utils", "_rebuild_device_tensor_from_cpu_tensor") + b"(" + REPEATED
    + function("torch", "float64") + b"X\x03\0\0\0cpu\x89tR",
    "methods of a tensor": function("torch._tensor", "_rebuild_from_type_v2") + b"("
    + function("torch._utils", "_rebuild_parameter") + function("torch.nn.parameter", "Parameter") + PLAIN
    + b"\x89N\x87}X\x04\0\0\0dataNstR",
    "a type made by anything": function("torch._tensor", "_rebuild_from_type_v2") + b"("
    + function("builtins", "bytearray") + function("torch", "Tensor") + number(1 << 32) + b"\x85NtR",
    "a type that is none": function("torch._tensor", "_rebuild_from_type_v2") + b"("
    + function("torch._utils", "_rebuild_parameter") + function("builtins", "int") + PLAIN + b"\x89N\x87NtR",
    "a wrapper of nothing": function("torch._tensor", "_rebuild_from_type_v2") + b"("
    + function("torch._utils", "_rebuild_wrapper_subclass") + function("torch", "Tensor") + b"("
    + function("torch", "Tensor") + function("torch", "float32") + b"K\1\x85K\1\x85K\0"
    + function("torch", "strided") + b"X\x03\0\0\0cpu\x89tNtR",
    # torch.distributed.tensor lets torch trust classes of its own.
    "a mesh, which makes process groups": function("torch.distributed.device_mesh", "DeviceMesh")
    + b"X\x03\0\0\0cpu](K\0K\1e\x86R",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", ABUSES)
def test_case_111_no_way_to_rebuild_a_tensor_takes_more_than_its_bytes(name: str) -> None:
    records = {"data.pkl": b"\x80\x02" + ABUSES[name] + b".", "byteorder": b"little"}
    data = archive_of({**records, "data/0": bytes(16), "data/1": struct.pack("<qq", 5, 1 << 40)})
    with pytest.raises((CorruptCheckpointError, UntrustedDataError)):
        decode_object(data, key="k")


def test_a_file_of_the_format_before_1_6_takes_no_more_than_its_bytes() -> None:
    buffer = io.BytesIO()
    torch.save(torch.ones(1000), buffer, _use_new_zipfile_serialization=False)
    for count in (1 << 40, 1 << 62, 999, 1001):
        data = buffer.getvalue().replace(struct.pack("<BH", ord("M"), 1000), b"\x8a\x08" + struct.pack("<q", count))
        assert data != buffer.getvalue()
        with pytest.raises((CorruptCheckpointError, UntrustedDataError)):
            decode_object(data, key="k")


def test_a_file_that_starts_with_what_can_not_be_compared_is_damage() -> None:
    tensor = pickle.dumps(np.int8(3), 2)
    with pytest.raises(CorruptCheckpointError, match=r"no file of torch\.save"):
        decode_object(tensor + b"\x80\2M\xe9\3.", key="k")


def test_an_archive_whose_records_share_bytes_is_refused() -> None:
    data = bytearray(archive_of({"data.pkl": b"\x80\x02N.", "data/0": bytes(400), "data/1": bytes(400)}))
    first, second = data.index(b"PK\x01\x02"), data.rindex(b"PK\x01\x02")
    middle = data.index(b"PK\x01\x02", first + 1)
    data[second + 42 : second + 46] = data[middle + 42 : middle + 46]
    with pytest.raises(CorruptCheckpointError, match="overlap"):
        decode_object(bytes(data), key="k")
