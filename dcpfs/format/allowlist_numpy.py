"""The numpy part of the allow-list.

Problem: numpy's own ``__setstate__`` trusts its input: an object array with too short a list, or a dtype state whose
parts contradict each other, makes C code read past its end. And the names moved: ``numpy.core`` became
``numpy._core`` in 2.0, so a checkpoint of one is refused under the other.

Way taken: both names map to the same entries, sizes are checked before numpy sees them, and only plain dtypes (no
fields, no subarrays, no metadata) get a state.
"""

from __future__ import annotations

import math
from typing import Any

from dcpfs.errors import UntrustedDataError
from dcpfs.format.allowlist import Global

__all__ = ["resolve_numpy"]


def _refuse(what: str) -> UntrustedDataError:
    return UntrustedDataError(f"reading a pickle of a checkpoint: {what}; refused")


def resolve_numpy(module: str, name: str) -> Global | None:
    """The entry for a name of numpy, or None when it is refused or numpy is not installed."""
    try:
        import numpy as np
    except ImportError:
        return None
    core = module.removeprefix("numpy._core.").removeprefix("numpy.core.")
    if (core, name) == ("multiarray", "_reconstruct"):
        return Global(_reconstruct, _reconstruct)
    if (core, name) == ("multiarray", "scalar"):
        return Global(_make_scalar, _make_scalar)
    if (core, name) == ("numeric", "_frombuffer"):
        return Global(_from_buffer, _from_buffer)
    if module == "numpy" and name == "ndarray":
        return Global(np.ndarray, fill=_fill_array)
    if module == "numpy" and name == "dtype":
        return Global(np.dtype, _make_dtype, fill=_fill_dtype, fills_subclasses=True)
    value = getattr(np, name, None) if module == "numpy" and name.isidentifier() else None
    if isinstance(value, type) and issubclass(value, np.generic):
        return Global(value)
    if module == "numpy.dtypes" and name.isidentifier():
        kind = getattr(np.dtypes, name, None)
        if isinstance(kind, type) and issubclass(kind, np.dtype):
            return Global(kind)
    return None


def _check_shape(shape: object) -> tuple[int, ...]:
    if type(shape) is int:
        shape = (shape,)
    if type(shape) is not tuple or not all(type(size) is int and size >= 0 for size in shape):
        raise _refuse("a numpy array whose shape is no tuple of sizes")
    return shape


def _reconstruct(kind: object, shape: object, code: object) -> object:
    import numpy as np

    if kind is not np.ndarray or _check_shape(shape) != (0,) or code not in (b"b", "b"):
        raise _refuse("a numpy array that is not made the way numpy pickles one")
    return np.ndarray.__new__(np.ndarray, (0,), "b")


def _fill_array(instance: Any, state: object) -> None:
    import numpy as np

    if type(state) is not tuple or len(state) != 5:
        raise _refuse("a numpy array with an unknown state")
    version, shape, dtype, fortran, data = state
    sizes = _check_shape(shape)
    if version != 1 or not isinstance(dtype, np.dtype):
        raise _refuse("a numpy array with an unknown state")
    if dtype.hasobject:
        if type(data) is not list or len(data) != math.prod(sizes) or dtype != np.dtype(object):
            raise _refuse("a numpy array whose objects don't fill its shape")
    elif type(data) is not bytes or len(data) != math.prod(sizes) * dtype.itemsize:
        raise _refuse("a numpy array whose bytes don't fill its shape")
    else:
        _check_text(dtype, data)
    instance.__setstate__((1, sizes, dtype, bool(fortran), data))


def _check_text(dtype: Any, data: bytes | bytearray) -> None:
    """Refuse text of characters that there are not: whoever looks at it gets an error of the interpreter."""
    import numpy as np

    if dtype.kind == "U" and data:
        codes = np.frombuffer(data, dtype=np.dtype("u4").newbyteorder(dtype.byteorder))
        if codes.max() > 0x10FFFF:
            raise _refuse("numpy text of characters that there are not")


def _make_scalar(dtype: object, data: object = b"") -> object:
    import numpy as np
    from numpy._core.multiarray import scalar

    if not isinstance(dtype, np.dtype) or dtype.hasobject or type(data) is not bytes or len(data) != dtype.itemsize:
        raise _refuse("a numpy scalar whose bytes don't fit its dtype")
    _check_text(dtype, data)
    return scalar(dtype, data)


def _from_buffer(data: object, dtype: object, shape: object, order: object = "C") -> object:
    import numpy as np

    if (
        not isinstance(data, bytes | bytearray)
        or not isinstance(dtype, np.dtype)
        or dtype.hasobject
        or order not in ("C", "F")
        or len(data) != math.prod(_check_shape(shape)) * dtype.itemsize
    ):
        raise _refuse("a numpy array whose bytes don't fill its shape")
    _check_text(dtype, data)
    return np.frombuffer(bytearray(data), dtype=dtype).reshape(_check_shape(shape), order="F" if order == "F" else "C")


def _make_dtype(code: object, align: object = False, _copy: object = True) -> object:
    import numpy as np

    if type(code) is not str or len(code) > 32:
        raise _refuse("a numpy dtype that is not named by a short code")
    # A copy always: the dtypes that numpy shares must not receive a state.
    return np.dtype(code, bool(align), True)


def _fill_dtype(instance: Any, state: object) -> None:
    """Set byte order and, for dates, the unit: all that the state of a plain dtype adds to its code.

    numpy crashes on states that contradict themselves, so it gets the dtype's own state with these two replaced.
    """
    own = instance.__reduce__()[2]
    if (
        type(state) is not tuple
        or len(state) != len(own)
        or any(type(number) is not int for number in (state[0], *state[5:8]))
        or (state[0], *state[2:8]) != (own[0], *own[2:8])
    ):
        raise _refuse("a numpy dtype with fields, a subarray or another state than its code's")
    if type(state[1]) is not str or state[1] not in ("<", ">", "|", "="):
        raise _refuse("a numpy dtype with an unknown byte order")
    order = own[1] if own[1] == "|" or state[1] == "|" else state[1]
    rest = own[8:] if len(own) == 8 else ((own[8][0], _check_unit(state[8])),)
    instance.__setstate__((own[0], order, *own[2:8], *rest))


_UNITS = frozenset(b"Y M W D h m s ms us ns ps fs as generic".split())


def _check_unit(part: object) -> tuple[object, ...]:
    """The unit of dates; metadata of somebody's own is refused."""
    if type(part) is not tuple or len(part) != 2 or part[0] not in (None, {}) or type(part[1]) is not tuple:
        raise _refuse("a numpy dtype with metadata")
    unit = part[1]
    if (
        len(unit) != 4
        or type(unit[0]) is not bytes
        or unit[0] not in _UNITS
        or not all(type(number) is int and 0 < number < 1 << 31 for number in unit[1:])
    ):
        raise _refuse("a numpy date with an unknown unit")
    return unit
