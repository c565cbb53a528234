"""Which classes a checkpoint may name, and what may be done with each.

Problem: ``.metadata``, non-tensor entries and rank pickles are pickles, and whoever can write them can run code in
every rank that loads them (cases 110, 111). Refusing all classes would refuse what trainers really store: numpy
scalars and random states, paths, dates, ordered and default dicts.

Way taken: each entry of the list is a `Global`: the value that its name stands for, and functions that check their
arguments for the ways in which a pickle may use it: calling it (REDUCE), creating it (NEWOBJ), filling it (BUILD). A
name that is only a value (a dtype, a class as a dict's value) can't be called. Entries are made on first use, so
numpy is imported only for a checkpoint that holds numpy values.

Constructors whose cost is not bounded by the length of their input (``bytearray(2**40)``, ``Fraction("1e999999")``)
take only the forms that pickling produces. Paths of all systems and Python versions decode to a path of this system
where it is one of this system's kind, else to a pure one. Enums of torch are rebuilt by value. What the user
registered with ``torch.serialization.add_safe_globals`` is allowed as torch allows it.
"""

from __future__ import annotations

import collections
import datetime as dt
import decimal
import enum
import fractions
import functools
import importlib
import io
import os
import pathlib
import re
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch

from dcpfs.errors import UntrustedDataError

__all__ = ["ALLOWLIST", "MANY_KEYS", "Global", "Resolver", "check_hashable", "resolve_value"]


class Global(NamedTuple):
    """A name that a pickle may use.

    Attributes:
        value: What it stands for.
        call: Called with the arguments of a REDUCE; None: it may not be called.
        new: Called with the arguments of a NEWOBJ, the class left out; None: refused.
        fill: Called with an instance and its state (BUILD); None: refused.
        fills_subclasses: `fill` also takes instances of subclasses of ``value``.
    """

    value: Any
    call: Callable[..., object] | None = None
    new: Callable[..., object] | None = None
    fill: Callable[[Any, object], None] | None = None
    fills_subclasses: bool = False


Resolver = Callable[[str, str], "Global | None"]
"""From module and name to the entry of the list, or None when it is refused."""


def _refuse(what: str) -> UntrustedDataError:
    return UntrustedDataError(f"reading a pickle of a checkpoint: {what}, which no save writes; refused")


_MOST_PARTS = 10_000
_DEEPEST_KEY = 100
MANY_KEYS = 1024
"""Fewer keys cost no time, whatever they are."""
_MOST_ALIKE = 256
_LONG_BYTES = 256


def check_hashable(keys: Iterable[object]) -> int:
    """Refuse keys that can't be put into a table in a time that their number tells.

    Hashing tuples that are nested deeply or widely exhausts the stack, which ends the process; and of keys that are
    made to have one hash, each is compared with all before it.

    Returns:
        About how many bytes hashing them looks at: a long tuple or number can be named again and again.

    Raises:
        UntrustedDataError: One is such a tuple, or too many have one hash.
    """
    looked_at = 0
    others = []
    for key in keys:
        kind = type(key)
        if kind is str or kind is bytes:
            continue
        others.append(key)
        level: list[object] = [key]
        looked_at += _long_bytes(key)
        seen = 0
        for _ in range(_DEEPEST_KEY):
            level = [part for item in level if type(item) is tuple for part in item]
            seen += len(level)
            looked_at += sum(map(_long_bytes, level))
            if not level or seen > _MOST_PARTS:
                break
        looked_at += seen
        if level:
            raise _refuse("a key of deeply nested tuples")
        if looked_at > 4_000_000 + 64 * len(others):
            raise _refuse("keys that are long tuples, again and again")
    if len(others) > MANY_KEYS:
        _check_hashes(others)
    return looked_at


def _check_hashes(keys: Sequence[object]) -> None:
    counts = collections.Counter(map(hash, keys))
    if max(counts.values()) <= _MOST_ALIKE:
        return
    alike: dict[int, list[object]] = {}
    for key in keys:
        if counts[hash(key)] > _MOST_ALIKE:
            known = alike.setdefault(hash(key), [])
            if key not in known:  # the same key again is no harm
                known.append(key)
            if len(known) > _MOST_ALIKE:
                raise _refuse("keys that were made to have one hash")


def _long_bytes(part: object) -> int:
    """Size of a value whose hash takes longer than a moment."""
    size_bytes = sys.getsizeof(part) if type(part) in (int, decimal.Decimal) else 0
    return size_bytes if size_bytes > _LONG_BYTES else 0


# --- builtins and standard library --------------------------------------------------------------------------------


def _make_set(kind: type) -> Callable[..., object]:
    def make(items: object = ()) -> object:
        if type(items) not in (list, tuple, set, frozenset):
            raise _refuse(f"{kind.__name__}() of {type(items).__name__}")
        check_hashable(cast("Iterable[object]", items))
        return kind(items)

    return make


def _make_bytes() -> bytes:
    return b""


def _make_bytearray(data: object = b"", encoding: object = "latin-1") -> bytearray:
    if type(data) is str and encoding in ("latin-1", "latin1"):
        return bytearray(data, "latin-1")
    if type(data) is bytes:
        return bytearray(data)
    raise _refuse(f"bytearray() of {type(data).__name__}")


def _encode_text(text: object, encoding: object = None) -> bytes:
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise _refuse("_codecs.encode() that is not the form of bytes")
    return text.encode("latin-1")


def _make_default_dict(factory: object = None, *items: object) -> object:
    if factory is not None and factory not in _FACTORIES:
        raise _refuse("a defaultdict with a factory that is no plain container or number")
    if items:
        raise _refuse("defaultdict() of more than a factory")
    return collections.defaultdict(factory)


_FACTORIES = (
    list, dict, set, int, float, str, bool, tuple, bytes, complex, frozenset,
    collections.OrderedDict, collections.deque, collections.Counter, collections.defaultdict,
)  # fmt: skip


def _make_deque(items: object = (), longest: object = None) -> object:
    if type(items) not in (list, tuple) or not (longest is None or type(longest) is int):
        raise _refuse("deque() of something else than a list and a length")
    return collections.deque(items, longest)  # type: ignore[call-overload]  # checked above


def _make_ordered_dict(items: object = ()) -> object:
    if type(items) not in (list, tuple, dict):
        raise _refuse(f"OrderedDict() of {type(items).__name__}")
    if type(items) is not dict:
        check_hashable(pair[0] for pair in cast("Iterable[Sequence[object]]", items))
    return collections.OrderedDict(items)  # type: ignore[call-overload]  # checked above


def _fill_ordered_dict(instance: Any, state: object) -> None:
    # A module's state_dict carries its versions in an attribute, `_metadata`.
    if type(state) is not dict or any(type(name) is not str or hasattr(type(instance), name) for name in state):
        raise _refuse("a state of an OrderedDict that replaces its methods")
    instance.__dict__.update(state)


def _make_counter(counts: object = None) -> object:
    if counts is not None and type(counts) is not dict:
        raise _refuse(f"Counter() of {type(counts).__name__}")
    return collections.Counter(counts)


def _make_fraction(*parts: object) -> object:
    if len(parts) == 1 and type(parts[0]) is str and re.fullmatch(r"-?[0-9]{1,4000}(/[0-9]{1,4000})?", parts[0]):
        return fractions.Fraction(parts[0])
    if len(parts) == 2 and all(type(part) is int and part.bit_length() <= 1 << 14 for part in parts):
        return fractions.Fraction(*cast("tuple[int, int]", parts))
    raise _refuse("Fraction() of something else than two integers")


def _make_decimal(text: object) -> object:
    if type(text) is not str:
        raise _refuse(f"Decimal() of {type(text).__name__}")
    return decimal.Decimal(text)


def _fill_uuid(instance: Any, state: object) -> None:
    if type(state) is not dict or type(state.get("int")) is not int or not 0 <= state["int"] < 1 << 128:
        raise _refuse("a UUID without a 128-bit number")
    object.__setattr__(instance, "int", state["int"])
    object.__setattr__(instance, "is_safe", uuid.SafeUUID.unknown)


def _fill_bytes_io(instance: Any, state: object) -> None:
    if (
        type(state) is not tuple
        or len(state) != 3
        or type(state[0]) is not bytes
        or type(state[1]) is not int
        or not (state[2] is None or type(state[2]) is dict)
    ):
        raise _refuse("a BytesIO without bytes and a position")
    instance.__setstate__((state[0], state[1], None))


def _make_path(kind: type[pathlib.PurePath]) -> Callable[..., object]:
    def make(*parts: object) -> object:
        if not all(type(part) is str for part in parts):
            raise _refuse("a path of something else than strings")
        return kind(*parts)  # type: ignore[arg-type]  # checked above

    return make


def _path_kind(name: str) -> type[pathlib.PurePath]:
    windows = os.name == "nt"
    return {
        "PosixPath": pathlib.PurePosixPath if windows else pathlib.Path,
        "WindowsPath": pathlib.Path if windows else pathlib.PureWindowsPath,
        "Path": pathlib.Path,
        "PurePosixPath": pathlib.PurePosixPath,
        "PureWindowsPath": pathlib.PureWindowsPath,
        "PurePath": pathlib.PurePath,
    }[name]


def _checked(kind: Callable[..., object], *types: tuple[type | None, ...]) -> Callable[..., object]:
    """A constructor that takes arguments of these exact types (None: the value None), trailing ones optional."""

    def make(*arguments: object) -> object:
        if len(arguments) > len(types) or not all(
            type(argument) in allowed or (argument is None and None in allowed)
            for argument, allowed in zip(arguments, types, strict=False)
        ):
            raise _refuse(f"{getattr(kind, '__name__', kind)}() of other arguments than its own pickles have")
        return kind(*arguments)

    return make


def _of_numbers(kind: Callable[..., object]) -> Callable[..., object]:
    """A range or slice of numbers that a computer counts to."""

    def make(*limits: object) -> object:
        if not 1 <= len(limits) <= 3 or not all(
            limit is None or (type(limit) is int and limit.bit_length() <= _MOST_BITS) for limit in limits
        ):
            raise _refuse(f"{getattr(kind, '__name__', kind)}() of other arguments than its own pickles have")
        return kind(*limits)

    return make


_MOST_BITS = 1024
_INT = (int,)
_ZONE = (dt.timezone, None)
_TEXT = (bytes, str)


def _standard() -> dict[tuple[str, str], Global]:
    standard = {
        ("builtins", "set"): Global(set, _make_set(set)),
        ("builtins", "frozenset"): Global(frozenset, _make_set(frozenset)),
        ("builtins", "bytes"): Global(bytes, _make_bytes),
        ("builtins", "bytearray"): Global(bytearray, _make_bytearray),
        ("builtins", "complex"): Global(complex, _checked(complex, (float, int), (float, int))),
        ("builtins", "slice"): Global(slice, _of_numbers(slice)),
        ("builtins", "range"): Global(range, _of_numbers(range)),
        ("_codecs", "encode"): Global(_encode_text, _encode_text),
        ("collections", "OrderedDict"): Global(
            collections.OrderedDict, _make_ordered_dict, _make_ordered_dict, _fill_ordered_dict
        ),
        ("collections", "defaultdict"): Global(collections.defaultdict, _make_default_dict),
        ("collections", "deque"): Global(collections.deque, _make_deque),
        ("collections", "Counter"): Global(collections.Counter, _make_counter),
        ("datetime", "date"): Global(dt.date, _checked(dt.date, _TEXT)),
        ("datetime", "time"): Global(dt.time, _checked(dt.time, _TEXT, _ZONE)),
        ("datetime", "datetime"): Global(dt.datetime, _checked(dt.datetime, _TEXT, _ZONE)),
        ("datetime", "timedelta"): Global(dt.timedelta, _checked(dt.timedelta, _INT, _INT, _INT)),
        ("datetime", "timezone"): Global(dt.timezone, _checked(dt.timezone, (dt.timedelta,), (str,))),
        ("decimal", "Decimal"): Global(decimal.Decimal, _make_decimal),
        ("fractions", "Fraction"): Global(fractions.Fraction, _make_fraction),
        ("uuid", "UUID"): Global(uuid.UUID, None, lambda: uuid.UUID(int=0), _fill_uuid),
        ("uuid", "SafeUUID"): Global(uuid.SafeUUID, lambda _: uuid.SafeUUID.unknown),
        ("io", "BytesIO"): Global(io.BytesIO, None, io.BytesIO, _fill_bytes_io),
        ("_io", "BytesIO"): Global(io.BytesIO, None, io.BytesIO, _fill_bytes_io),
    }
    for name, kind in (
        ("int", int), ("float", float), ("str", str), ("bool", bool), ("list", list), ("dict", dict), ("tuple", tuple),
    ):  # fmt: skip
        standard["builtins", name] = Global(kind)
    for module in ("pathlib", "pathlib._local"):
        for name in ("PosixPath", "WindowsPath", "Path", "PurePosixPath", "PureWindowsPath", "PurePath"):
            kind_of_path = _path_kind(name)
            standard[module, name] = Global(kind_of_path, _make_path(kind_of_path))
    return standard


_STANDARD = _standard()

_PYTHON2_NAMES = {
    ("builtins", "xrange"): ("builtins", "range"),
    ("builtins", "unicode"): ("builtins", "str"),
    ("builtins", "long"): ("builtins", "int"),
}
_PYTHON2_MODULES = {"__builtin__": "builtins"}


# --- torch --------------------------------------------------------------------------------------------------------


def _make_size(sizes: object = ()) -> object:
    if type(sizes) not in (tuple, list) or not all(type(size) is int for size in sizes):  # type: ignore[attr-defined]  # a tuple or list
        raise _refuse("torch.Size() of something else than integers")
    return torch.Size(sizes)  # type: ignore[arg-type]  # checked above


def _get_layout(name: object) -> object:
    layout = getattr(torch, name.removeprefix("torch."), None) if type(name) is str else None
    if not isinstance(layout, torch.layout):
        raise _refuse("a layout that torch does not have")
    return layout


_TORCH_VALUES = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)
_ENUM_MODULES = ("torch.amp", "torch.distributed", "torch.nn", "torch.optim", "torch.serialization", "torch.utils.data")


def _resolve_torch(module: str, name: str) -> Global | None:
    if module == "torch":
        if name == "Size":
            return Global(torch.Size, _make_size, _make_size)
        if name == "device":
            return Global(torch.device, _checked(torch.device, (str,), (int, None)))
        value = getattr(torch, name, None) if name.isidentifier() else None
        return Global(value) if isinstance(value, _TORCH_VALUES) else None
    if (module, name) == ("torch.serialization", "_get_layout"):
        return Global(_get_layout, _get_layout)
    return _resolve_torch_enum(module, name)


def _resolve_torch_enum(module: str, name: str) -> Global | None:
    if module not in sys.modules:
        if not module.startswith(_ENUM_MODULES) or "_internal" in module or "__main__" in module:
            return None
        try:
            importlib.import_module(module)
        except ImportError:
            return None
    kind = getattr(sys.modules[module], name, None) if name.isidentifier() else None
    if not isinstance(kind, enum.EnumMeta):
        return None
    members: enum.EnumMeta = kind

    def make(value: object) -> object:
        if type(value) not in (int, str, float, bool, tuple, type(None)):
            raise _refuse(f"the enum {name} of {type(value).__name__}")
        check_hashable((value,))
        return members(value)

    return Global(kind, make)


def _resolve_user_global(module: str, name: str) -> Global | None:
    """What the user told torch to trust, used as torch's weights-only unpickler would.

    torch tells itself to trust some classes when parts of it are imported. Their pickles create and fill them; calling
    one does work that nobody asked for: a device mesh makes process groups.
    """
    full_name = f"{module}.{name}"
    for registered in torch.serialization.get_safe_globals():
        value: Any = registered
        if isinstance(registered, tuple):
            value, registered_name = registered
        else:
            registered_name = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
        if registered_name == full_name:
            kind = value if isinstance(value, type) else None
            new = functools.partial(kind.__new__, kind) if kind is not None else None
            call = None if module.partition(".")[0] == "torch" else value
            return Global(value, call, new, _fill_user_object if kind is not None else None)
    return None


def _fill_user_object(instance: Any, state: Any) -> None:
    if hasattr(instance, "__setstate__"):
        instance.__setstate__(state)
        return
    slots: Mapping[str, object] | None = None
    if type(state) is tuple and len(state) == 2:
        state, slots = state
    if state:
        instance.__dict__.update(state)
    for name, value in (slots or {}).items():
        setattr(instance, name, value)


def resolve_value(module: str, name: str) -> Global | None:
    """The entry for a name, or None when it is refused. Thread-safe."""
    module = _PYTHON2_MODULES.get(module, module)
    module, name = _PYTHON2_NAMES.get((module, name), (module, name))
    found = _STANDARD.get((module, name))
    if found is not None:
        return found
    if name.startswith("torch."):
        # Memory formats pickle as a path from whichever module imports torch.
        value = getattr(torch, name[6:], None)
        return Global(value) if isinstance(value, torch.memory_format) else None
    root = module.partition(".")[0]
    if root == "torch":
        found = _resolve_torch(module, name)
    elif root == "numpy":
        from dcpfs.format.allowlist_numpy import resolve_numpy

        found = resolve_numpy(module, name)
    return found if found is not None else _resolve_user_global(module, name)


ALLOWLIST: Resolver = resolve_value
"""The list for values: everything but the classes of ``.metadata`` and torch's storages."""
