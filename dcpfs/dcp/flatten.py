"""Flatten a nested state into the keys that torch uses, and remember what those keys lose.

Problem: torch's DCP stores a nested state as flat keys, the path joined by dots. On the way it turns every key
into text (a scheduler's milestones ``{2: 1}`` come back as ``{"2": 1}``, or as twins of both), drops empty
mappings, and forgets which mappings were an ``OrderedDict``, ``Counter`` or ``defaultdict``. Two different
paths can end as one key (``{"a": {"b": 1}, "a.b": 2}``).

Why not another naming: checkpoints must be readable by torch alone, and torch's by us, so the keys are exactly
those of ``torch.distributed.checkpoint``: mappings are opened; a list is opened when it holds, at any depth of
lists, a tensor or a mapping, else it is one value; tuples are one value.

Way taken: beside the flat leaves and torch's own map of key to path, a `Structure` notes the containers that
differ from what the paths say: other key types, another kind of mapping, an empty one. Most states need a
handful of notes; they travel as a small JSON value in the checkpoint's index. Paths that collide are refused.

Flow: ``leaves, structure = flatten(state)`` → save the leaves, ``structure.paths`` as torch's ``planner_data``,
``structure.to_json()`` in the index → ``unflatten(leaves, Structure.from_json(value, paths))``.
"""

from __future__ import annotations

import enum
import itertools
import math
import numbers
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch

from dcpfs.errors import CorruptCheckpointError, ReplicaMismatchError, UnsupportedValueError
from dcpfs.format.metadata_classes import STRUCTURE_ATTRIBUTE

__all__ = [
    "STRUCTURE_ATTRIBUTE",
    "Container",
    "ContainerKind",
    "KeyPath",
    "Structure",
    "flatten",
    "merge_structures",
    "unflatten",
]

KeyPath = tuple[str | int, ...]
"""Path as torch notes it: text for mapping keys, int for list positions."""

_MOST_POSITIONS = 1 << 24
"""List positions of one state, those without a leaf included: what more a metadata names is an attack on memory."""

_NEVER_CONTAINERS = frozenset({int, float, str, bool, bytes, complex, type(None)})
_FACTORIES: dict[str, Callable[[], object]] = {
    kind.__name__: kind
    for kind in (
        *(int, float, complex, str, bool, bytes, list, dict, set, frozenset, tuple),
        *(OrderedDict, Counter, deque, defaultdict),
    )
}
"""Those that the allow-list has for a ``defaultdict`` inside a value."""


class ContainerKind(str, enum.Enum):
    """Mappings that are told apart. Any other mapping comes back as a plain dict."""

    DICT = "dict"
    ORDERED_DICT = "OrderedDict"
    COUNTER = "Counter"
    DEFAULT_DICT = "defaultdict"


@dataclass(frozen=True)
class Container:
    """What the flat keys don't say about one mapping.

    Attributes:
        kind: Which mapping it is.
        int_keys: All its keys are ints.
        keys: Text to real key, for keys that are not text, unless ``int_keys``.
        order: The texts of all keys in order, where some key leads to nothing but empty mappings (such a key
            has no leaf to stand for it); else empty.
        empty: It has no keys at all.
        factory: Name of a ``defaultdict``'s factory, or None where it has none.
        lost_factory: What its factory is, where that can't be noted; not stored.
    """

    kind: ContainerKind = ContainerKind.DICT
    int_keys: bool = False
    keys: Mapping[str, object] = field(default_factory=dict)
    order: tuple[str, ...] = ()
    empty: bool = False
    factory: str | None = None
    lost_factory: str = field(default="", compare=False)

    def real_key(self, text: str) -> object:
        """The key as it was, from its text.

        Raises:
            CorruptCheckpointError: All keys are ints, and this is none.
        """
        if not self.int_keys:
            return self.keys.get(text, text)
        try:
            return int(text)
        except ValueError as error:
            raise CorruptCheckpointError(
                f"the checkpoint's note of its containers is damaged: {text[:80]!r} is no int"
            ) from error


@dataclass(frozen=True)
class Structure:
    """Paths of all leaves, and the containers that need a note.

    Attributes:
        paths: Flat key to torch's path, in the order of the state.
        containers: Path of a mapping to its note; ``()`` is the state itself.
    """

    paths: dict[str, KeyPath]
    containers: dict[KeyPath, Container] = field(default_factory=dict)

    def real_path(self, fqn: str) -> tuple[object, ...]:
        """The path with keys of their real types, e.g. ``("milestones", 2)``. ``(fqn,)`` for an unknown key."""
        return self._real(self.paths.get(fqn, (fqn,)))

    def empty_paths(self) -> list[tuple[object, ...]]:
        """Real paths of the empty mappings."""
        return [self._real(path) for path, container in self.containers.items() if container.empty]

    def require_factories(self) -> None:
        """Return when the factories of all ``defaultdict`` are noted.

        Who loads into a mapping that is there keeps its factory; elsewhere it would be gone, which shows when a key is
        first missed.

        Raises:
            UnsupportedValueError: One is a function or class of somebody's own.
        """
        for path, note in self.containers.items():
            if note.lost_factory:
                raise UnsupportedValueError(
                    f"can't save the state: the defaultdict at {path} has the factory {note.lost_factory}, which would "
                    f"be lost; save dict() of it, or use one of {', '.join(_FACTORIES)}"
                )

    def restricted(self, fqns: Iterable[str], empties: Iterable[KeyPath] = ()) -> Structure:
        """The same with only these leaves and empty mappings, and only the containers that they live in."""
        paths = {fqn: self.paths.get(fqn, (fqn,)) for fqn in fqns}
        alive: set[KeyPath] = {()}
        for path in paths.values():
            alive.update(path[:end] for end in range(1, len(path)))
        for path in empties:
            alive.update(path[:end] for end in range(1, len(path) + 1))
        return Structure(paths, {path: note for path, note in self.containers.items() if path in alive})

    def to_json(self) -> object:
        """A JSON value of the notes alone; the paths travel as torch's ``planner_data``."""
        return {"containers": [[list(path), _container_to_json(c)] for path, c in self.containers.items()]}

    @classmethod
    def from_json(cls, value: object, paths: Mapping[str, Sequence[str | int]]) -> Structure:
        """Rebuild from `to_json`'s value (None: no notes) and torch's map of key to path.

        Raises:
            CorruptCheckpointError: It is not such a value.
        """
        own_paths = {fqn: tuple(path) for fqn, path in paths.items()}
        if value is None:
            return cls(own_paths)
        try:
            containers = {
                _path_from_json(path): _container_from_json(note)
                for path, note in value["containers"]  # type: ignore[index]  # checked by the except below
            }
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise CorruptCheckpointError("the checkpoint's note of its containers is damaged") from error
        return cls(own_paths, containers)

    def _real(self, path: KeyPath) -> tuple[object, ...]:
        real: list[object] = []
        for depth, key in enumerate(path):
            note = self.containers.get(path[:depth]) if isinstance(key, str) else None
            real.append(key if note is None else note.real_key(cast("str", key)))
        return tuple(real)


def flatten(state_dict: Mapping[str, object]) -> tuple[dict[str, object], Structure]:
    """Flatten a nested state. Leaves are the same objects, not copies. About 1 µs per leaf.

    Raises:
        UnsupportedValueError: Two paths have the same key, or a mapping has a key that is neither text, number,
            None, bytes nor a tuple of those; or the nesting has no end.
    """
    leaves: dict[str, object] = {}
    structure = Structure({})
    try:
        _visit_mapping(state_dict, (), "", leaves, structure)
    except RecursionError as error:
        raise UnsupportedValueError("the state is nested too deeply, or a mapping or list holds itself") from error
    return leaves, structure


def unflatten(leaves: Mapping[str, object], structure: Structure) -> dict[object, object]:
    """Rebuild the nested state from leaves. List positions without a leaf are None.

    Raises:
        CorruptCheckpointError: The paths contradict each other, e.g. one path is both a value and a mapping.
    """
    root: dict[object, object] = {}
    _check_positions([*(structure.paths[fqn] for fqn in leaves if fqn in structure.paths), *structure.containers])
    for fqn, value in leaves.items():
        _place(root, structure.paths.get(fqn, (fqn,)), value)
    for path, container in structure.containers.items():
        if container.empty and path:
            _place_empty(root, path)
    # Deepest first: a container above still has its text keys while those below it are rebuilt.
    for path in sorted(structure.containers, key=len, reverse=True):
        container = structure.containers[path]
        if not path:
            return _rebuild(root, container)
        parent = _find(root, path[:-1])
        if parent is None:
            continue
        found = _child(parent, path[-1])
        if isinstance(found, dict):
            parent[path[-1]] = _rebuild(found, container)  # type: ignore[index]  # a dict with text, or a list
    return root


def merge_structures(structures: Sequence[Structure]) -> Structure:
    """One structure for the states of all ranks; earlier ranks lead the order.

    Raises:
        ReplicaMismatchError: Ranks disagree about the type of a key or the kind of a container.
    """
    if len(structures) == 1:
        return structures[0]
    paths: dict[str, KeyPath] = {}
    containers: dict[KeyPath, Container] = {}
    for structure in structures:
        for fqn, path in structure.paths.items():
            if paths.setdefault(fqn, path) != path:
                raise ReplicaMismatchError(f"ranks disagree about the path of the key {fqn!r}: {paths[fqn]} and {path}")
        for where, note in structure.containers.items():
            known = containers.get(where)
            containers[where] = note if known is None or known == note else _merge(where, known, note)
    typed = {where: note for where, note in containers.items() if note.int_keys or note.keys}
    for structure in structures:
        other = {where: note for where, note in typed.items() if not _has_types(structure.containers.get(where), note)}
        if other:
            _require_same_types(structure, other)
    return Structure(paths, containers)


# --- flattening


def _visit_mapping(
    mapping: Mapping[str, object],
    path: KeyPath,
    prefix: str,
    leaves: dict[str, object],
    structure: Structure,
) -> bool:
    """Visit a mapping; True when a leaf was found at or below it."""
    typed: dict[str, object] = {}
    has_leaf, has_leafless = False, False
    paths = structure.paths
    for key, value in mapping.items():
        if type(key) is str:
            text = key
        else:
            text, real = _text_and_key(key, path)
            if type(real) is not str:
                typed[text] = real
        fqn = prefix + text
        found = True
        if not isinstance(value, torch.Tensor) and type(value) not in _NEVER_CONTAINERS:
            if isinstance(value, Mapping):
                found = _visit_mapping(value, (*path, text), fqn + ".", leaves, structure)
            elif isinstance(value, list) and not _is_leaf_list(value):
                found = _visit_list(value, (*path, text), fqn + ".", leaves, structure)
            else:
                _add_leaf(fqn, (*path, text), value, leaves, paths)
        else:
            if fqn in paths:
                raise _collision(fqn, paths[fqn], (*path, text))
            leaves[fqn] = value
            paths[fqn] = (*path, text)
        if found:
            has_leaf = True
        else:
            has_leafless = True
    _note_container(mapping, path, typed, has_leafless=has_leafless, structure=structure)
    return has_leaf


def _visit_list(
    values: list[object], path: KeyPath, prefix: str, leaves: dict[str, object], structure: Structure
) -> bool:
    has_leaf = False
    for position, value in enumerate(values):
        fqn = f"{prefix}{position}"
        if isinstance(value, torch.Tensor):
            _add_leaf(fqn, (*path, position), value, leaves, structure.paths)
            has_leaf = True
        elif isinstance(value, Mapping):
            has_leaf |= _visit_mapping(value, (*path, position), fqn + ".", leaves, structure)
        elif isinstance(value, list) and not _is_leaf_list(value):
            has_leaf |= _visit_list(value, (*path, position), fqn + ".", leaves, structure)
        else:
            _add_leaf(fqn, (*path, position), value, leaves, structure.paths)
            has_leaf = True
    return has_leaf


def _is_leaf_list(values: list[object]) -> bool:
    for value in values:
        if type(value) in _NEVER_CONTAINERS:
            continue
        if isinstance(value, (torch.Tensor, Mapping)) or (isinstance(value, list) and not _is_leaf_list(value)):
            return False
    return True


def _add_leaf(fqn: str, path: KeyPath, value: object, leaves: dict[str, object], paths: dict[str, KeyPath]) -> None:
    if fqn in paths:
        raise _collision(fqn, paths[fqn], path)
    leaves[fqn] = value
    paths[fqn] = path


def _collision(fqn: str, first: KeyPath, second: KeyPath) -> UnsupportedValueError:
    if first == second:
        return UnsupportedValueError(
            f"can't save the state: two keys of one mapping have the same text, {fqn!r} (e.g. 2 and '2'); rename one"
        )
    return UnsupportedValueError(
        f"can't save the state: the paths {first} and {second} both have the key {fqn!r}; rename one"
    )


def _text_and_key(key: object, path: KeyPath) -> tuple[str, object]:
    """A key's text as torch makes it, and the plain key that equals it."""
    text = str(key)
    if isinstance(key, str) and text == key:
        return text, str(text)
    if key is None or isinstance(key, bool):
        return text, key
    if isinstance(key, numbers.Integral):
        return text, int(key)
    if _is_portable(key):
        return text, key
    raise UnsupportedValueError(
        f"can't save the state: the mapping at {path} has a key of type {type(key).__name__} ({text:.80}), which "
        "would come back as text; use text, a number, None, bytes or a tuple of those"
    )


def _is_portable(key: object) -> bool:
    if type(key) is tuple:
        return all(_is_portable(part) for part in key)
    return type(key) in (float, bytes, int, str, bool) or key is None


def _note_container(
    mapping: Mapping[str, object],
    path: KeyPath,
    typed: dict[str, object],
    *,
    has_leafless: bool,
    structure: Structure,
) -> None:
    empty = not mapping
    if type(mapping) is dict and not typed and not empty and not has_leafless:
        return
    order = tuple(str(key) for key in mapping) if has_leafless or typed else ()
    if len(set(order)) != len(order):
        twin = next(text for text, count in Counter(order).items() if count > 1)
        raise _collision(".".join(map(str, (*path, twin))), (*path, twin), (*path, twin))
    kind, factory, lost_factory = _kind_of(mapping)
    int_keys = len(typed) == len(mapping) and bool(typed) and _all_ints(typed)
    if kind is ContainerKind.DICT and not typed and not empty and not has_leafless:
        return
    structure.containers[path] = Container(
        kind, int_keys, {} if int_keys else typed, order if has_leafless else (), empty, factory, lost_factory
    )


def _all_ints(typed: Mapping[str, object]) -> bool:
    return all(type(key) is int and str(key) == text for text, key in typed.items())


def _kind_of(mapping: Mapping[str, object]) -> tuple[ContainerKind, str | None, str]:
    """Its kind; of a ``defaultdict`` the factory's name, or what it is where that can't be noted."""
    if isinstance(mapping, OrderedDict):
        return ContainerKind.ORDERED_DICT, None, ""
    if isinstance(mapping, Counter):
        return ContainerKind.COUNTER, None, ""
    if isinstance(mapping, defaultdict):
        factory = mapping.default_factory
        name = getattr(factory, "__name__", "")
        if factory is None or _FACTORIES.get(name) is factory:
            return ContainerKind.DEFAULT_DICT, name or None, ""
        return ContainerKind.DEFAULT_DICT, None, getattr(factory, "__qualname__", type(factory).__qualname__)
    return ContainerKind.DICT, None, ""


# --- rebuilding


def _check_positions(paths: Iterable[KeyPath]) -> None:
    lengths: dict[KeyPath, int] = {}
    for path in paths:
        for depth, key in enumerate(path):
            if isinstance(key, int):
                where = path[:depth]
                lengths[where] = max(lengths.get(where, 0), key + 1)
    if sum(lengths.values()) > _MOST_POSITIONS:
        where = max(lengths, key=lengths.__getitem__)
        raise CorruptCheckpointError(f"the checkpoint's paths name {lengths[where]} positions of a list at {where}")


def _place(root: dict[object, object], path: KeyPath, value: object) -> None:
    container: dict[object, object] | list[object] = root
    if not path:
        raise CorruptCheckpointError("the checkpoint's paths are damaged: one is empty")
    for key, following in itertools.pairwise(path):
        found = _child(container, key)
        if found is None:
            found = {} if isinstance(following, str) else []
            _set(container, key, found, path)
        if not isinstance(found, (dict, list)):
            raise CorruptCheckpointError(f"the checkpoint's paths contradict each other at {path}")
        container = found
    _set(container, path[-1], value, path)


def _place_empty(root: dict[object, object], path: KeyPath) -> None:
    container: dict[object, object] | list[object] | None = _find(root, path[:-1])
    if container is None or _child(container, path[-1]) is None:
        _place(root, path, {})


def _find(root: dict[object, object], path: KeyPath) -> dict[object, object] | list[object] | None:
    found: object = root
    for key in path:
        found = _child(found, key) if isinstance(found, (dict, list)) else None
    return found if isinstance(found, (dict, list)) else None


def _child(container: dict[object, object] | list[object], key: str | int) -> object:
    if isinstance(container, list):
        return container[key] if isinstance(key, int) and 0 <= key < len(container) else None
    return container.get(key)


def _set(container: dict[object, object] | list[object], key: str | int, value: object, path: KeyPath) -> None:
    if isinstance(container, list):
        if not isinstance(key, int) or key < 0:
            raise CorruptCheckpointError(f"the checkpoint's paths contradict each other at {path}")
        container.extend([None] * (key + 1 - len(container)))
        container[key] = value
    elif isinstance(key, str):
        container[key] = value
    else:
        raise CorruptCheckpointError(f"the checkpoint's paths contradict each other at {path}")


def _rebuild(found: dict[object, object], note: Container) -> dict[object, object]:
    texts: Iterator[object] = iter(found)
    if note.order:
        known = set(note.order)
        texts = iter([*(text for text in note.order if text in found), *(t for t in found if t not in known)])
    items = [(note.real_key(cast("str", text)), found[text]) for text in texts]
    if note.kind is ContainerKind.ORDERED_DICT:
        return OrderedDict(items)
    if note.kind is ContainerKind.COUNTER:
        return _filled(Counter(), items)
    if note.kind is ContainerKind.DEFAULT_DICT:
        return defaultdict(_FACTORIES.get(note.factory or ""), items)
    return dict(items)


def _filled(mapping: MutableMapping[object, int], items: list[tuple[object, object]]) -> dict[object, object]:
    for key, value in items:
        mapping[key] = cast("int", value)
    return cast("dict[object, object]", mapping)


# --- merging and JSON


def _merge(where: KeyPath, first: Container, second: Container) -> Container:
    if first.empty and not first.order:
        first, second = second, first
    keyless = second.empty
    clash = {text for text, key in first.keys.items() if second.keys.get(text, key) != key}
    kinds_differ = first.kind is not second.kind or first.factory != second.factory
    if kinds_differ or clash or (not keyless and first.int_keys != second.int_keys):
        raise ReplicaMismatchError(
            f"ranks disagree about the mapping at {where}: kinds {first.kind.value} and {second.kind.value}, "
            f"key types differ for {sorted(clash) or 'some keys'}"
        )
    order = tuple(dict.fromkeys((*first.order, *second.order)))
    keys = {**first.keys, **second.keys}
    return Container(first.kind, first.int_keys, keys, order, first.empty and second.empty, first.factory)


def _has_types(own: Container | None, merged: Container) -> bool:
    """A rank types its keys as all ranks together do: nothing needs a look."""
    return own is not None and own.int_keys == merged.int_keys and own.keys == merged.keys


def _require_same_types(structure: Structure, typed: Mapping[KeyPath, Container]) -> None:
    """Return when no key of a rank that is text would come back as something else, since it is that on another rank.

    Args:
        structure: Of the rank.
        typed: Path of a mapping to the note of all ranks.

    Raises:
        ReplicaMismatchError: One would.
    """
    depths = {len(where) for where in typed}
    for path in structure.paths.values():
        for depth in depths:
            note = typed.get(path[:depth]) if depth < len(path) else None
            if note is None:
                continue
            own, text = structure.containers.get(path[:depth]), path[depth]
            is_text = own is None or not (own.int_keys or text in own.keys)
            if is_text and (note.int_keys or text in note.keys):
                raise ReplicaMismatchError(
                    f"ranks disagree about the mapping at {path[:depth]}: the key {text!r} is text on one rank, and "
                    "others have keys there that are not; use keys of one type, or mappings of different names"
                )


def _container_to_json(container: Container) -> dict[str, object]:
    value: dict[str, object] = {"kind": container.kind.value}
    if container.int_keys:
        value["keys"] = "int"
    elif container.keys:
        value["keys"] = [[text, _key_to_json(key)] for text, key in container.keys.items()]
    if container.order:
        value["order"] = list(container.order)
    if container.empty:
        value["empty"] = True
    if container.factory is not None:
        value["factory"] = container.factory
    return value


def _path_from_json(value: list[str | int]) -> KeyPath:
    if not all(type(part) is str or (type(part) is int and part >= 0) for part in value):
        raise TypeError("a path is made of something else than names and positions")
    return tuple(value)


def _container_from_json(value: Mapping[str, object]) -> Container:
    keys = value.get("keys", [])
    int_keys = keys == "int"
    pairs = cast("list[tuple[str, object]]", [] if int_keys else keys)
    factory = value.get("factory")
    real = {text: _key_from_json(key) for text, key in pairs}
    order = tuple(cast("list[str]", value.get("order", ())))
    if not all(map(_is_portable, real.values())) or not {*map(type, (*real, *order))} <= {str}:
        raise TypeError("a key is none that a mapping of a state has")
    return Container(
        ContainerKind(value["kind"]),
        int_keys,
        real,
        order,
        bool(value.get("empty", False)),
        str(factory) if factory is not None else None,
    )


def _key_to_json(key: object) -> object:
    if isinstance(key, tuple):
        return {"tuple": [_key_to_json(part) for part in key]}
    if isinstance(key, bytes):
        return {"bytes": key.hex()}
    if isinstance(key, float) and not math.isfinite(key):
        return {"float": repr(key)}  # JSON has no such numbers
    return key


def _key_from_json(value: object) -> object:
    if isinstance(value, dict):
        if "bytes" in value:
            return bytes.fromhex(value["bytes"])
        if "float" in value:
            return float(value["float"])
        return tuple(_key_from_json(part) for part in value["tuple"])
    return value
