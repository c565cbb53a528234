"""An unpickler that can only build what an allow-list says.

Problem: a pickle is a program. Restricting `pickle.Unpickler.find_class` is not enough: what it lets through can
still be called with any arguments (``bytearray(2**40)``, ``Fraction("1e999999999")``), classes and functions can be
written to by a BUILD instruction with a slot state, and C code that trusts its ``__setstate__`` can be fed sizes that
don't match. torch's own weights-only unpickler knows neither numpy nor most of what trainers store, and its list is a
global.

Way taken: the interpreter of the standard library in Python (its loop and protocols 0-5), with the five instructions
that act on objects replaced. Each allow-listed global (`allowlist.Global`) brings its own functions for being called,
created and filled, which check their arguments; nothing else is ever called, and nothing is ever set on a class,
function or module. What an instruction allocates is bounded by the bytes that are there.

Flow: bytes → `SafeUnpickler.load` → instructions → `find_class` asks the allow-list → value. Everything that goes
wrong is one of two errors: `UntrustedDataError` (names the refused class) or `CorruptCheckpointError`.
"""

from __future__ import annotations

import io
import pickle
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from dcpfs.config import Trust
from dcpfs.errors import CorruptCheckpointError, DcpfsError, UntrustedDataError
from dcpfs.format.allowlist import ALLOWLIST, MANY_KEYS, Global, Resolver, check_hashable

__all__ = ["SafeUnpickler", "loads"]

_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_SEQUENCES = (list, deque)
_SIZED = frozenset((str, bytes, bytearray, list, tuple, dict, set, frozenset))
_SHORT = 256

_LOAD: dict[int, Callable[[Any], None]] = dict(pickle._Unpickler.dispatch)
"""The standard library's table of instructions; a private name that all Python versions have."""


class SafeUnpickler(pickle._Unpickler):
    """Decodes one pickle through an allow-list. Use an instance once.

    Args:
        data: The pickle; what follows its STOP is left alone.
        what: What is decoded, for errors, e.g. ``the entry 'trainer/step' of s3://bucket/run``.
        resolve: The allow-list.
        load_persistent: Resolves persistent ids (torch's storages); None: they are refused.
    """

    dispatch = _LOAD
    if TYPE_CHECKING:
        stack: list[Any]
        append: Callable[[object], None]
        read: Callable[[int], bytes]
        readline: Callable[[], bytes]
        pop_mark: Callable[[], list[Any]]

    def __init__(
        self,
        data: bytes | memoryview,
        *,
        what: str,
        resolve: Resolver = ALLOWLIST,
        load_persistent: Callable[[object], object] | None = None,
    ) -> None:
        self._bytes = io.BytesIO(data)
        super().__init__(self._bytes, encoding="latin1")
        self._size_bytes = self._bytes.getbuffer().nbytes
        self._what = what
        self._resolve = resolve
        self._load_persistent = load_persistent
        self._globals: dict[int, Global] = {}
        self._copied = 0

    def load(self) -> Any:
        """Decode the pickle.

        Raises:
            UntrustedDataError: It names a class that is not allowed, or uses an allowed one in a way that is not.
            CorruptCheckpointError: It is no well-formed pickle.
        """
        try:
            return super().load()
        except DcpfsError:
            raise
        except Exception as error:
            if isinstance(error, KeyError) and self._bytes.tell() <= 1:  # its first byte is no instruction
                raise CorruptCheckpointError(
                    f"reading {self._what}: it is no pickle but begins with {self._bytes.getvalue()[:16]!r}, so that "
                    f"something else was put in its place, such as a server's answer in words"
                ) from error
            raise CorruptCheckpointError(
                f"reading {self._what}: its pickle is damaged ({type(error).__name__}: {str(error)[:200]})"
            ) from error

    @property
    def position_bytes(self) -> int:
        """How many bytes have been read; after `load`, the length of the pickle."""
        return self._bytes.tell()

    def persistent_load(self, pid: object) -> object:
        """Resolve a persistent id: torch's storages."""
        if self._load_persistent is None:
            raise self._refused("a persistent id")
        return self._load_persistent(pid)

    def find_class(self, module: str, name: str) -> Any:
        """Look a global up in the allow-list. Called by the instructions."""
        found = self._resolve(module, name)
        if found is None and module == "torch" and not hasattr(torch, name):
            raise UntrustedDataError(
                f"reading {self._what}: its pickle names torch.{name[:200]}, which torch {torch.__version__} does not "
                f"have; load it with a release of torch that has it"
            )
        if found is None:
            raise UntrustedDataError(
                f"reading {self._what}: its pickle names {module[:200]}.{name[:200]}, which is not on dcpfs' "
                f"allow-list; pass trust='pickle' only if you trust everyone who can write this checkpoint"
            )
        self._globals[id(found.value)] = found
        return found.value

    def get_extension(self, code: int) -> None:
        """Refuse copyreg extension codes: they are not part of any checkpoint."""
        raise self._refused(f"the copyreg extension {code}")

    def _refused(self, what: str) -> UntrustedDataError:
        return UntrustedDataError(
            f"reading {self._what}: its pickle uses {what}, which dcpfs' allow-list does not permit; pass "
            f"trust='pickle' only if you trust everyone who can write this checkpoint"
        )

    def _call(self, function: object, arguments: object) -> object:
        found = self._globals.get(id(function))
        if found is None or found.value is not function or found.call is None or type(arguments) is not tuple:
            raise self._refused(f"a call of {_describe(function)}")
        self._count_copied(arguments)
        self._count_hashed(found.value, arguments)
        return found.call(*arguments)

    def _count_copied(self, values: tuple[Any, ...]) -> None:
        """Bound what calls and states copy: a few bytes can name a long value again and again."""
        for value in values:
            if type(value) in _SIZED and len(value) > _SHORT:
                self._count(len(value))

    def _count_hashed(self, kind: object, arguments: tuple[Any, ...]) -> None:
        """Bound what hashing the items of a call looks at, likewise."""
        for value in arguments:
            if type(value) is tuple:
                self._count(check_hashable((value,)))
            elif type(value) is list and kind in (set, frozenset):
                self._count(check_hashable(value))
            elif type(value) is list and kind is OrderedDict:
                self._count(check_hashable([pair[0] for pair in value if type(pair) in (list, tuple) and pair]))

    def _count(self, size_bytes: int) -> None:
        self._copied += size_bytes
        if self._copied > 8 * self._size_bytes + 4096:
            raise self._refused("far more copies of its data than it has data")

    def _fill(self, target: Any, fill: Callable[[], object]) -> None:
        """Add items to a table, with a look at all of its keys whenever their number has doubled."""
        before = len(target)
        fill()
        if len(target) > MANY_KEYS and len(target).bit_length() > before.bit_length():
            check_hashable(target)

    def _instantiate(self, klass: object, args: object) -> None:
        self.append(self._call(klass, tuple(args) if isinstance(args, list) else args))

    def _read_line(self) -> str:
        line = self.readline()
        if line[-1:] != b"\n":
            raise pickle.UnpicklingError("a name is cut short")
        return line[:-1].decode("utf-8")

    def _load_global(self) -> None:
        module = self._read_line()
        self.append(self.find_class(module, self._read_line()))

    def _load_reduce(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = self._call(self.stack[-1], arguments)

    def _load_newobj(self) -> None:
        arguments = self.stack.pop()
        kind = self.stack.pop()
        found = self._globals.get(id(kind))
        if found is None or found.value is not kind or found.new is None or type(arguments) is not tuple:
            raise self._refused(f"a new {_describe(kind)}")
        self._count_copied(arguments)
        self.append(found.new(*arguments))

    def _load_newobj_ex(self) -> None:
        keywords = self.stack.pop()
        if keywords:
            raise self._refused("keyword arguments")
        self._load_newobj()

    def _load_build(self) -> None:
        state = self.stack.pop()
        instance = self.stack[-1]
        kind = type(instance)
        for base in kind.__mro__:
            found = self._globals.get(id(base))
            if found is not None and found.fill is not None and (base is kind or found.fills_subclasses):
                self._count_copied((state, *state) if type(state) is tuple else (state,))
                found.fill(instance, state)
                return
        raise self._refused(f"a state for {_describe(kind)}")

    def _target(self, kinds: tuple[type, ...]) -> Any:
        target = self.stack[-1]
        if type(target) not in kinds:
            raise self._refused(f"items for {_describe(type(target))}")
        return target

    def _load_setitem(self) -> None:
        value = self.stack.pop()
        key = self.stack.pop()
        self._count(check_hashable((key,)))
        target = self._target(_MAPPINGS)
        self._fill(target, lambda: target.__setitem__(key, value))

    def _load_setitems(self) -> None:
        items = self.pop_mark()
        if len(items) % 2:
            raise pickle.UnpicklingError("odd number of items for SETITEMS")
        target = self._target(_MAPPINGS)
        self._count(check_hashable(items[::2]))

        def fill() -> None:
            for position in range(0, len(items), 2):
                target[items[position]] = items[position + 1]

        self._fill(target, fill)

    def _load_append(self) -> None:
        value = self.stack.pop()
        self._target(_SEQUENCES).append(value)

    def _load_appends(self) -> None:
        items = self.pop_mark()
        self._target(_SEQUENCES).extend(items)

    def _load_additems(self) -> None:
        items = self.pop_mark()
        self._count(check_hashable(items))
        target = self._target((set,))
        self._fill(target, lambda: target.update(items))

    def _load_frozenset(self) -> None:
        items = self.pop_mark()
        self._count(check_hashable(items))
        self.append(frozenset(items))

    def _load_dict(self) -> None:
        items = self.pop_mark()
        self._count(check_hashable(items[::2]))
        self.append({items[position]: items[position + 1] for position in range(0, len(items), 2)})

    def _load_bytearray8(self) -> None:
        size_bytes = int.from_bytes(self.read(8), "little")
        if size_bytes > self._size_bytes:
            raise pickle.UnpicklingError("BYTEARRAY8 is longer than the pickle")
        self.append(bytearray(self.read(size_bytes)))

    def _load_buffer(self) -> None:
        raise self._refused("an out-of-band buffer")

    _LOAD.update(
        {
            pickle.GLOBAL[0]: _load_global,
            pickle.REDUCE[0]: _load_reduce,
            pickle.NEWOBJ[0]: _load_newobj,
            pickle.NEWOBJ_EX[0]: _load_newobj_ex,
            pickle.BUILD[0]: _load_build,
            pickle.SETITEM[0]: _load_setitem,
            pickle.SETITEMS[0]: _load_setitems,
            pickle.APPEND[0]: _load_append,
            pickle.APPENDS[0]: _load_appends,
            pickle.ADDITEMS[0]: _load_additems,
            pickle.FROZENSET[0]: _load_frozenset,
            pickle.DICT[0]: _load_dict,
            pickle.BYTEARRAY8[0]: _load_bytearray8,
            pickle.NEXT_BUFFER[0]: _load_buffer,
            pickle.READONLY_BUFFER[0]: _load_buffer,
        }
    )


def _describe(thing: object) -> str:
    kind = thing if isinstance(thing, type) else type(thing)
    name = getattr(thing, "__qualname__", None)
    if isinstance(name, str):
        return f"{getattr(thing, '__module__', '?')}.{name}"
    return f"an object of {kind.__module__}.{kind.__qualname__}"


def loads(data: bytes | memoryview, *, trust: Trust = Trust.ALLOWLIST, what: str = "a pickle") -> object:
    """Decode a plain pickle (not a file of ``torch.save``: see `dcpfs.format.objects.decode_object`).

    Args:
        data: The pickle.
        trust: Whether the allow-list applies.
        what: What is decoded, for errors.

    Raises:
        UntrustedDataError: A class is not on the allow-list.
        CorruptCheckpointError: The bytes are no well-formed pickle.
    """
    if trust is Trust.PICKLE:
        try:
            return pickle.loads(data)
        except Exception as error:
            raise CorruptCheckpointError(
                f"reading {what}: its pickle can't be loaded ({type(error).__name__}: {str(error)[:200]})"
            ) from error
    return SafeUnpickler(data, what=what).load()
