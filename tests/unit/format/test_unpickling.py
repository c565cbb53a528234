from __future__ import annotations

import builtins
import contextlib
import io
import os
import pickle
import struct
import subprocess
import sys
import tracemalloc
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcpfs.config import Trust
from dcpfs.errors import CorruptCheckpointError, UntrustedDataError
from dcpfs.format.allowlist import check_hashable
from dcpfs.format.unpickling import SafeUnpickler, loads
from tests.properties.bounds import examples


def text(value: str) -> bytes:
    """Instructions that put a string on the stack."""
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def name_of(module: str, name: str) -> bytes:
    """Instructions that put a global on the stack."""
    return f"c{module}\n{name}\n".encode()


def call(module: str, name: str, *arguments: bytes) -> bytes:
    """A pickle of protocol 4 that calls a global."""
    return b"\x80\x04" + name_of(module, name) + b"(" + b"".join(arguments) + b"tR."


def path_of(module: str, name: str) -> bytes:
    """A pickle of protocol 4 that is a global, found through attributes."""
    return b"\x80\x04" + text(module) + text(name) + b"\x93."


class Reduces:
    """Pickles to a call of anything."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


ATTACKS: dict[str, Any] = {
    "os.system": Reduces(os.system, ("false",)),
    "eval": Reduces(eval, ("1",)),
    "exec": Reduces(exec, ("",)),
    "import": Reduces(__import__, ("os",)),
    "open": Reduces(open, (os.devnull,)),
    "getattr": Reduces(getattr, ("x", "upper")),
    "type": Reduces(type, ("X", (), {})),
    "object": Reduces(object, ()),
    "subprocess": Reduces(subprocess.Popen, (["false"],)),
    "pickle.loads": Reduces(pickle.loads, (b"N.",)),
    "torch.load": Reduces(torch.load, (os.devnull,)),
    "np.load": Reduces(np.load, (os.devnull,)),
    "input": Reduces(builtins.input, ()),
    "dict of": {"a": [Reduces(os.system, ("false",))]},
}


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("name", ATTACKS)
def test_cases_110_111_calls_of_anything_else_are_refused_by_name(name: str, protocol: int) -> None:
    data = pickle.dumps(ATTACKS[name], protocol)
    with pytest.raises(UntrustedDataError, match=r"names .*allow-list.*trust='pickle'") as caught:
        loads(data, what="the entry 'trainer/x'")
    assert "the entry 'trainer/x'" in str(caught.value)


def test_case_111_trust_is_explicit() -> None:
    data = pickle.dumps(Reduces(os.path.join, ("a", "b")))
    with pytest.raises(UntrustedDataError, match="join"):
        loads(data)
    assert loads(data, trust=Trust.PICKLE) == os.path.join("a", "b")
    with pytest.raises(CorruptCheckpointError):
        loads(b"junk", trust=Trust.PICKLE)


GADGETS: dict[str, bytes] = {
    "chain of attributes": path_of("builtins", "list.__init__"),
    "class of a class": path_of("collections", "OrderedDict.__class__.x"),
    "module of torch": path_of("torch", "os.system"),
    "attribute of torch": path_of("torch", "os"),
    "module of numpy": path_of("numpy", "load"),
    "enum that is none": path_of("torch.serialization", "load"),
    "main": path_of("torch.utils.data.__main__", "x"),
    "inst": b"(X\x01\0\0\0xios\nsystem\n.",
    "obj": b"\x80\x04(" + name_of("os", "system") + text("x") + b"o.",
    "newobj": b"\x80\x04" + name_of("builtins", "int") + b")\x81.",
    "newobj of a function": b"\x80\x04" + name_of("_codecs", "encode") + b")\x81.",
    "newobj_ex with keywords": b"\x80\x04" + name_of("collections", "OrderedDict") + b")}X\x01\0\0\0aNs\x92.",
    "call of a type that is a value": call("builtins", "int", text("9" * 9)),
    "call of a string": b"\x80\x04" + text("eval") + b")R.",
    "call of a list": b"\x80\x04])R.",
    "call with no tuple": b"\x80\x04" + name_of("builtins", "set") + b"]R.",
    "call of what a call made": b"\x80\x04" + name_of("builtins", "set") + b")R)R.",
    "state of a class": b"\x80\x04" + name_of("collections", "OrderedDict") + b"}X\x05\0\0\0itemsNsb.",
    "slots of a class": b"\x80\x04" + name_of("collections", "OrderedDict") + b"N}X\x05\0\0\0itemsNs\x86b.",
    "state of a function": b"\x80\x04" + name_of("_codecs", "encode") + b"}X\x08\0\0\0__code__Nsb.",
    "state of a list": b"\x80\x04]}b.",
    "state of a number": b"\x80\x04K\x01Nb.",
    "methods of a dict": b"\x80\x04" + name_of("collections", "OrderedDict") + b")R}X\x05\0\0\0itemsNsb.",
    "items of a class": b"\x80\x04" + name_of("collections", "OrderedDict") + b"K\x01K\x02s.",
    "items of a number": b"\x80\x04K\x03K\x01K\x02s.",
    "append to a dict": b"\x80\x04}K\x01a.",
    "append to a class": b"\x80\x04" + name_of("builtins", "list") + b"K\x01a.",
    "add to a list": b"\x80\x04](K\x01\x90.",
    "extension": b"\x80\x02\x82\x01.",
    "persistent": b"\x80\x02NQ.",
    "persistent text": b"Px\n.",
    "out of band": b"\x80\x05\x97.",
    "read only out of band": b"\x80\x05\x97\x98.",
    "codec that runs": call("_codecs", "encode", text("x"), text("rot13")),
    "codec default": call("_codecs", "encode", text("x")),
    "codec of bytes": call("_codecs", "encode", b"C\x01x", text("latin1")),
    "default dict that calls": call("collections", "defaultdict", name_of("_codecs", "encode")),
    "default dict of a class with a call": call("collections", "defaultdict", name_of("uuid", "UUID")),
    "set of a string": call("builtins", "set", text("abc")),
    "deque of a size": call("collections", "deque", b"K\x09"),
    "date of numbers": call("datetime", "date", b"M\xea\x07", b"K\x01", b"K\x01"),
    "path of bytes": call("pathlib", "PurePath", b"C\x01a"),
    "uuid of text": b"\x80\x04" + name_of("uuid", "UUID") + b")\x81}X\x03\0\0\0int" + text("x") + b"sb.",
    "uuid too long": b"\x80\x04" + name_of("uuid", "UUID") + b")\x81}X\x03\0\0\0int\x8a\x12" + b"\1" * 18 + b"sb.",
    "stream with attributes": b"\x80\x04" + name_of("io", "BytesIO") + b")\x81C\0K\0K\1\x87b.",
    "layout": call("torch.serialization", "_get_layout", text("torch.load")),
    "device": call("torch", "device", b"K\x01"),
    "size of text": call("torch", "Size", b"(" + text("x") + b"t"),
}


@pytest.mark.parametrize("name", GADGETS)
def test_case_111_what_allowed_names_can_be_abused_for_is_refused(name: str) -> None:
    with pytest.raises(UntrustedDataError):
        loads(GADGETS[name])


BOMBS: dict[str, bytes] = {
    "bytes of a size": call("builtins", "bytes", b"\x8a\x06\0\0\0\0\0\1"),
    "bytearray of a size": call("builtins", "bytearray", b"\x8a\x06\0\0\0\0\0\1"),
    "bytearray8": b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b".",
    "bytes8": b"\x80\x04\x8e" + (1 << 40).to_bytes(8, "little") + b".",
    "bytes": b"\x80\x04B\xff\xff\xff\xff.",
    "text8": b"\x80\x04\x8d" + (1 << 40).to_bytes(8, "little") + b".",
    "text": b"\x80\x04X\xff\xff\xff\xff.",
    "frame": b"\x80\x04\x95" + (1 << 40).to_bytes(8, "little") + b"N.",
    "memo": b"\x80\x04Nr\xff\xff\xff\xff.",
    "number": b"\x80\x04\x8b\xff\xff\xff\x7f.",
    "number of digits": b"I" + b"9" * 100_000 + b"\n.",
    "fraction": call("fractions", "Fraction", text("1e999999999")),
    "fraction of decimals": call("fractions", "Fraction", text("0." + "1" * 5000)),
    "deque": call("collections", "deque", b"]", text("x")),
    "set of a range": call("builtins", "set", name_of("builtins", "range") + b"\x8a\x06\0\0\0\0\0\1\x85R"),
    "numpy array": b"\x80\x04"
    + name_of("numpy._core.multiarray", "_reconstruct")
    + name_of("numpy", "ndarray")
    + b"\x8a\x06\0\0\0\0\0\1\x85C\1b\x87R.",
    "numpy dtype": call("numpy._core.multiarray", "scalar", name_of("numpy", "dtype") + text("S2000000000") + b"\x85R"),
    "counter": call("collections", "Counter", name_of("builtins", "range") + b"K\x09\x85R"),
}  # fmt: skip


def peak_bytes(action: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", BOMBS)
def test_no_instruction_takes_more_memory_than_there_are_bytes(name: str) -> None:
    def decode() -> None:
        with contextlib.suppress(CorruptCheckpointError, UntrustedDataError):
            loads(BOMBS[name])

    assert peak_bytes(decode) < 4 << 20


LONG = text("x" * 100_000)
AGAIN = 1000
COPIES: dict[str, bytes] = {
    "bytes": name_of("_codecs", "encode") + b"q\1" + LONG + text("latin1") + b"\x86q\0R" + b"0h\1h\0R" * AGAIN,
    "bytearray": name_of("builtins", "bytearray") + b"q\1" + LONG + b"\x85q\0R" + b"h\1h\0R" * AGAIN,
    "decimal": name_of("decimal", "Decimal") + b"q\1" + text("9" * 100_000) + b"\x85q\0R" + b"h\1h\0R" * AGAIN,
    "path": name_of("pathlib", "PurePath") + b"q\1" + LONG + b"\x85q\0R" + b"h\1h\0R" * AGAIN,
    "set": name_of("builtins", "set") + b"q\1](" + b"K\1K\2" * 25_000 + b"e\x85q\0R" + b"h\1h\0R" * AGAIN,
    "deque": name_of("collections", "deque") + b"q\1](" + b"N" * 50_000 + b"e\x85q\0R" + b"h\1h\0R" * AGAIN,
    "size": name_of("torch", "Size") + b"q\1](" + b"K\1" * 50_000 + b"e\x85q\0R" + b"h\1h\0R" * AGAIN,
    "numpy": name_of("numpy._core.numeric", "_frombuffer")
    + b"q\1(B"
    + struct.pack("<I", 100_000)
    + bytes(100_000)
    + name_of("numpy", "dtype")
    + text("u1")
    + b"\x85RJ\xa0\x86\1\0\x85"
    + text("C")
    + b"tq\0R"
    + b"h\1h\0R" * AGAIN,
    "stream": name_of("io", "BytesIO")
    + b"q\1)\x81B"
    + struct.pack("<I", 100_000)
    + bytes(100_000)
    + b"K\0N\x87q\0b"
    + b"h\1)\x81h\0b" * AGAIN,
    "attributes": name_of("collections", "OrderedDict")
    + b"q\1)R}("
    + b"".join(text(f"a{number}") + b"N" for number in range(3000))
    + b"uq\0b"
    + b"h\1)Rh\0b" * AGAIN,
}


@pytest.mark.parametrize("name", COPIES)
def test_a_value_named_again_and_again_is_not_copied_without_bound(name: str) -> None:
    data = b"\x80\x04" + COPIES[name] + b"."

    def decode() -> None:
        with pytest.raises(UntrustedDataError, match="copies"):
            loads(data)

    assert peak_bytes(decode) < 30 << 20


def test_short_values_may_be_named_as_often_as_one_likes() -> None:
    data = name_of("collections", "deque") + b"q\1](" + b"N" * 250 + b"e\x85q\0R" + b"0h\1h\0R" * AGAIN
    assert len(loads(b"\x80\x04" + data + b".")) == 250  # type: ignore[arg-type]  # a deque


DEPTH = 50_000
DEEP: dict[str, bytes] = {
    "key of a dict": b"\x80\2})" + b"\x85" * DEPTH + b"Ns.",
    "keys of a dict": b"\x80\2}()" + b"\x85" * DEPTH + b"Nu.",
    "dict": b"(()" + b"\x85" * DEPTH + b"Nd.",
    "set": b"\x80\4\x8f()" + b"\x85" * DEPTH + b"\x90.",
    "frozenset": b"\x80\4()" + b"\x85" * DEPTH + b"\x91.",
    "set by a call": b"\x80\2" + name_of("builtins", "set") + b"])" + b"\x85" * DEPTH + b"a\x85R.",
    "ordered dict by a call": b"\x80\2"
    + name_of("collections", "OrderedDict")
    + b"])"
    + b"\x85" * DEPTH
    + b"N\x86a\x85R.",
    "enum": b"\x80\2" + name_of("torch.distributed.fsdp.api", "ShardingStrategy") + b")" + b"\x85" * DEPTH + b"\x85R.",
    "doubled": b"\x80\2})" + b"".join(b"q%ch%c\x86" % (slot, slot) for slot in range(60)) + b"Ns.",
}


@pytest.mark.parametrize("name", DEEP)
def test_keys_are_bounded_before_they_are_hashed(name: str) -> None:
    with pytest.raises(UntrustedDataError, match="nested tuples"):
        loads(DEEP[name])


def test_sensible_keys_pass() -> None:
    key: tuple[Any, ...] = ()
    for number in range(50):
        key = (number, key)
    check_hashable([key, "x", 3, (1,) * 5000])
    assert loads(pickle.dumps({key: 1})) == {key: 1}


@pytest.mark.parametrize("opening", [b"]", b"}", b"\x8f"], ids=["list", "dict", "set"])
def test_deeply_nested_values_do_not_exhaust_the_stack(opening: bytes) -> None:
    made: Any = loads(b"\x80\4N" + b"\x85" * DEPTH + b".")
    assert type(made) is tuple
    with contextlib.suppress(CorruptCheckpointError, UntrustedDataError):
        loads(b"\x80\4" + opening * DEPTH + b"a" * (DEPTH - 1) + b".")


BAD_DTYPES: dict[str, Any] = {
    "other version": (9, "<", None, None, None, -1, -1, 0),
    "no tuple": [3, "<", None, None, None, -1, -1, 0],
    "too short": (3, "<", None, None, None, -1, -1),
    "size": (3, "<", None, None, None, 1 << 20, -1, 0),
    "alignment": (3, "<", None, None, None, -1, 1 << 20, 0),
    "flags": (3, "<", None, None, None, -1, -1, 63),
    "fields": (3, "|", None, ("a",), {"a": (np.dtype("i4"), 1 << 30)}, 4, 1, 0),
    "subarray": (3, "|", (np.dtype("i4"), (1 << 30,)), None, None, 4, 1, 0),
    "byte order": (3, "x", None, None, None, -1, -1, 0),
    "byte order of a number": (3, 60, None, None, None, -1, -1, 0),
    "true for a number": (3, "<", None, None, None, -1, -1, False),
    "metadata": (4, "<", None, None, None, -1, -1, 0, ({"a": 1}, (b"s", 1, 1, 1))),
    "unit of no date": (4, "<", None, None, None, -1, -1, 0, ({}, (b"s", 1, 1, 1))),
}
BAD_DATES: dict[str, Any] = {
    "unit": ({}, (b"xx", 1, 1, 1)),
    "unit of text": ({}, ("s", 1, 1, 1)),
    "zero": ({}, (b"s", 0, 1, 1)),
    "negative": ({}, (b"s", -1, 1, 1)),
    "too large": ({}, (b"s", 1 << 40, 1, 1)),
    "short": ({}, (b"s", 1)),
    "nothing": (),
    "none": None,
    "metadata": ({"a": 1}, (b"s", 1, 1, 1)),
}


def dtype_with(code: str, state: object) -> bytes:
    start = name_of("numpy", "dtype") + text(code) + b"\x89\x88\x87R"
    return b"\x80\4" + start + pickle.dumps(state, 2)[2:-1] + b"b."


@pytest.mark.parametrize("name", BAD_DTYPES)
@pytest.mark.parametrize("code", ["i4", "f8", "O8", "U4", "V4", "b1"])
def test_a_numpy_dtype_keeps_its_own_state_whatever_the_pickle_says(code: str, name: str) -> None:
    with contextlib.suppress(CorruptCheckpointError, UntrustedDataError):
        made: Any = loads(dtype_with(code, BAD_DTYPES[name]))
        own = np.dtype(code)
        assert (made.itemsize, made.alignment, made.flags, made.names) == (own.itemsize, own.alignment, own.flags, None)
        repr(np.zeros(2, made))


@pytest.mark.parametrize("name", BAD_DATES)
def test_units_of_numpy_dates_are_checked(name: str) -> None:
    with pytest.raises((UntrustedDataError, CorruptCheckpointError)):
        loads(dtype_with("M8", (4, "<", None, None, None, -1, -1, 0, BAD_DATES[name])))


ARRAY = name_of("numpy._core.multiarray", "_reconstruct") + name_of("numpy", "ndarray") + b"K\0\x85C\1b\x87R"


@pytest.mark.parametrize(
    "state",
    [
        (1, (5,), np.dtype("i4"), False, b"\0" * 4),
        (1, (1 << 40,), np.dtype("i4"), False, b""),
        (1, (-1,), np.dtype("i4"), False, b""),
        (1, (1 << 62, 4), np.dtype("i4"), False, b""),
        (1, (5,), np.dtype("O"), False, [1]),
        (1, (1,), np.dtype("O"), False, b"\1" * 8),
        (1, (1,), np.dtype("i4"), False, [1]),
        (1, (1,), "O", False, [1]),
        (1, 1, np.dtype("i4"), False, "abcd"),
        ((1,), np.dtype("i4"), False, b"\0" * 4),
        (2, (1,), np.dtype("i4"), False, b"\0" * 4),
        None,
        {"a": 1},
    ],
    ids=repr,
)
def test_numpy_arrays_hold_what_their_shape_says(state: object) -> None:
    with pytest.raises((UntrustedDataError, CorruptCheckpointError)):
        loads(b"\x80\4" + ARRAY + pickle.dumps(state, 2)[2:-1] + b"b.")


@pytest.mark.parametrize("length_bytes", range(60))
def test_a_pickle_that_was_cut_is_damaged(length_bytes: int) -> None:
    for protocol in range(6):
        data = pickle.dumps({"a": [1, 2.5, b"x" * 20, np.dtype("i4")], "b": set(range(9))}, protocol)
        with pytest.raises(CorruptCheckpointError):
            loads(data[: min(length_bytes, len(data) - 1)])


def test_names_that_were_cut_are_damage_not_other_names() -> None:
    data = b"\x80\2ccollections\nOrderedDict\n)R."
    for length_bytes in range(3, data.index(b")")):
        with pytest.raises(CorruptCheckpointError):
            loads(data[:length_bytes])


def test_every_protocol_beyond_those_of_python_is_damage() -> None:
    with pytest.raises(CorruptCheckpointError, match="protocol"):
        loads(b"\x80\x06N.")


def test_what_follows_the_pickle_is_left_alone() -> None:
    unpickler = SafeUnpickler(b"\x80\2K\1.rest", what="x")
    assert unpickler.load() == 1
    assert unpickler.position_bytes == 5


def test_the_interpreter_of_the_standard_library_is_not_changed() -> None:
    data = pickle.dumps(Reduces(os.path.join, ("a", "b")))
    assert pickle._Unpickler(io.BytesIO(data)).load() == os.path.join("a", "b")


def test_numpy_is_imported_only_for_values_of_numpy() -> None:
    code = (
        "import sys; sys.modules['numpy'] = None\n"
        "from dcpfs.format.unpickling import loads; import pickle, collections\n"
        "assert loads(pickle.dumps(collections.deque([1]))) == collections.deque([1])\n"
        "try: loads(b'\\x80\\2cnumpy\\nndarray\\n.')\n"
        "except Exception as error: print(type(error).__name__)\n"
    )
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert result.stdout.strip() == "UntrustedDataError"


SEEDS: list[Any] = [
    {"a": [1, 2.5, "x", None, (1, 2)], "b": {1, 2}, "c": b"bytes"},
    [np.arange(4), np.float32(1), np.array([1, None], dtype=object), np.datetime64("2026-01-01")],
    [{(1, (2, 3)): 4}, io.BytesIO(b"abc"), bytearray(b"abc"), 1 << 90],
]


@examples(600)
@given(st.sampled_from(SEEDS), st.integers(2, 5), st.data())
def test_damaged_pickles_are_errors_of_ours(value: Any, protocol: int, data: st.DataObject) -> None:
    pickled = bytearray(pickle.dumps(value, protocol))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(pickled) - 1))
        match data.draw(st.integers(0, 2)):
            case 0:
                pickled[position] = data.draw(st.integers(0, 255))
            case 1:
                pickled[position:position] = data.draw(st.binary(min_size=1, max_size=4))
            case _:
                del pickled[position : position + data.draw(st.integers(1, 3))]
        if not pickled:
            break
    with contextlib.suppress(CorruptCheckpointError, UntrustedDataError):
        loads(bytes(pickled))


@examples(600)
@given(st.binary(max_size=200))
def test_random_bytes_are_errors_of_ours(data: bytes) -> None:
    with contextlib.suppress(CorruptCheckpointError, UntrustedDataError):
        loads(data + b".")


PRIME = (1 << 61) - 1
"""Whole numbers that differ by this have one hash."""
ALIKE = [PRIME * number for number in range(1, 20_001)]
FLOODS: dict[str, bytes] = {
    "dict": pickle.dumps(dict.fromkeys(ALIKE), 2),
    "set": pickle.dumps(set(ALIKE[:3000]), 2),
    "items of a set": pickle.dumps(set(ALIKE[:3000]), 4),
    "frozenset": pickle.dumps(frozenset(ALIKE[:3000]), 4),
    "one by one": b"\x80\2}" + b"".join(b"\x8a\x0b" + key.to_bytes(11, "little") + b"Ns" for key in ALIKE) + b".",
    "in threes": b"\x80\2}"
    + b"".join(b"(" + b"".join(b"\x8a\x0b" + key.to_bytes(11, "little") + b"N" for key in ALIKE[at : at + 3]) + b"u"
               for at in range(0, len(ALIKE), 3))
    + b".",
    "tuples": pickle.dumps(dict.fromkeys((key, 1) for key in ALIKE), 2),
    "complex": pickle.dumps(dict.fromkeys(complex(1_000_003.0 * (5000 - n), n) for n in range(5000)), 2),
}  # fmt: skip


@pytest.mark.parametrize("name", FLOODS)
def test_keys_that_were_made_to_have_one_hash_are_refused(name: str) -> None:
    with pytest.raises(UntrustedDataError, match="one hash"):
        loads(FLOODS[name])


def test_a_short_list_of_long_keys_named_again_and_again_is_not_hashed_without_bound() -> None:
    long = pickle.dumps((1,) * 9000, 2)[2:-1] + b"q\7"
    for kind in (name_of("builtins", "set"), name_of("collections", "OrderedDict")):
        items = b"](" + (b"h\7" if b"set" in kind else b"h\7N\x86") * 200 + b"e\x85q\0"
        with pytest.raises(UntrustedDataError, match=r"copies"):
            loads(b"\x80\4" + long + b"0" + kind + b"q\1" + items + b"R" + b"0h\1h\0R" * AGAIN + b".")


@pytest.mark.parametrize(
    "key", [(1,) * 9000, 1 << 400_000, ((5,) * 4000, (6,) * 4000)], ids=["tuple", "number", "tuples"]
)
def test_a_long_key_named_again_and_again_is_not_hashed_without_bound(key: object) -> None:
    long = pickle.dumps(key, 2)[2:-1] + b"q\7"
    for again in (
        b"0}(" + b"h\7N" * 20_000 + b"u.",
        b"0}" + b"h\7Ns" * 20_000 + b".",
        b"0\x8f(" + b"h\7" * 20_000 + b"\x90.",
    ):
        with pytest.raises(UntrustedDataError, match=r"copies|again"):
            loads(b"\x80\4" + long + again)


def test_ordinary_tables_of_any_length_pass() -> None:
    for value in (
        dict.fromkeys(range(50_000)),
        dict.fromkeys((n % 300, n // 300) for n in range(50_000)),
        dict.fromkeys(n / 8 for n in range(50_000)),
        set(range(-50_000, 50_000)),
        frozenset(1 << n for n in range(5000)),
        [{(0, 1): n, 5: n} for n in range(20_000)],
        [range(5), slice(None, 7)],
    ):
        for protocol in (2, 4):
            assert loads(pickle.dumps(value, protocol)) == value


def test_ranges_and_slices_are_of_numbers_that_one_counts_to() -> None:
    for name in ("range", "slice"):
        with pytest.raises(UntrustedDataError):
            loads(call("builtins", name, pickle.dumps(1 << 5000, 2)[2:-1]))
        with pytest.raises(UntrustedDataError):
            loads(call("builtins", name, b"K\1K\1K\1K\1"))


def test_a_uuid_that_is_never_filled_is_a_whole_one() -> None:
    assert repr(loads(b"\x80\4" + name_of("uuid", "UUID") + b")\x81.")) == repr(uuid.UUID(int=0))


@pytest.mark.parametrize("order", "<>")
def test_numpy_text_of_characters_that_there_are_not_is_refused(order: str) -> None:
    good = np.array(["ab", "\U0010ffff"], dtype=f"{order}U2")
    assert (loads(pickle.dumps(good, 2)) == good).all()
    codes = good.view(f"{order}u4").copy()
    codes[3] = 0x110000
    for value in (codes.view(f"{order}U2"), codes.view(f"{order}U2")[1]):
        for protocol in (2, 5):
            with pytest.raises(UntrustedDataError, match="characters"):
                loads(pickle.dumps(value, protocol))
