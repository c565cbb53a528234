"""A nested template with exactly the leaves that a checkpoint holds. Pure.

Problem: a part's live state rarely has the keys that were saved: a user's mapping is still empty, a scheduler's list of
milestones has other entries, a module's extra state was not yet filled. A template of the live state then lacks what
should be loaded, or asks for what there is not.

Way taken: the tree is built from the stored paths. A leaf that the live state has too is put in as it is, so tensors
are filled in place and differences are noticed when the state is matched; for all others there is memory for a tensor,
or a None that the load replaces. Mappings and lists are told apart by the path, as torch notes it, with all keys as
text: numbers are they that the live mapping has numbers for, such as a scheduler's milestones. Where a checkpoint has
no paths, by the live state, else a container with the positions 0, 1, … is taken for a list. A mapping is of the
kind that the live one is: a scheduler's milestones are a ``Counter``. Empty mappings, which have no leaf, are added
where they decide whether a list is opened.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from typing import cast

import torch

from dcpfs.checkpointer.stored_value import StoredValue
from dcpfs.dcp.flatten import Structure, flatten
from dcpfs.errors import CorruptCheckpointError

__all__ = [
    "Steps",
    "add_empty",
    "below",
    "build_below",
    "build_tree",
    "empty_values",
    "nest_leaves",
    "placeholder",
    "starts_with_name",
    "steps_within",
    "with_empty",
]

_MOST_POSITIONS = 1 << 24
"""Positions of a list that a path may name: more is an attack on memory."""

_ROOT = "root"

_Step = tuple[object, bool]
"""One step of a path: the real key, and whether it is a position in a list."""

Steps = list[_Step]
"""A path within a nested state."""


def starts_with_name(key: str, name: str) -> bool:
    """Whether a flat key is a name, or lies below it."""
    return key.startswith(name) and (len(key) == len(name) or key[len(name)] == ".")


def below(stored: Mapping[str, StoredValue], name: str) -> dict[str, StoredValue]:
    """What lies below a name, with keys and paths relative to it."""
    found = {}
    for key, value in stored.items():
        if len(key) > len(name) and starts_with_name(key, name):
            depth = _depth_of(name, value.path)
            found[key[len(name) + 1 :]] = StoredValue(
                value.dtype, value.shape, value.path[depth:], value.real_path[depth:]
            )
    return found


def _depth_of(name: str, path: tuple[str | int, ...]) -> int:
    """How many steps of a path spell the name."""
    for depth in range(1, len(path)):
        if ".".join(map(str, path[:depth])) == name:
            return depth
    return len(path)


def build_tree(stored: Mapping[str, StoredValue], live: Mapping[str, object]) -> dict[str, object]:
    """Build the template.

    Args:
        stored: Flat key to what the checkpoint holds; all of them are in the result.
        live: The live state, nested; its leaves are used where keys agree.
    """
    leaves, structure = flatten(live)
    root: dict[object, object] = {}
    unknown: dict[str, StoredValue] = {}
    for key, value in stored.items():
        leaf = leaves.get(key)
        if value.path and len(value.path) == len(value.real_path):
            steps = _steps(value.path, value.real_path)
        elif value.path and not value.real_path:
            steps = _typed_steps(value.path, live)
        elif key in structure.paths:
            steps = _steps(structure.paths[key], structure.real_path(key))
        else:
            unknown[key] = value
            continue
        # A list that a live plain value stood in where a tensor was saved would be taken for one value.
        closes = value.shape is not None and not isinstance(leaf, torch.Tensor) and any(step[1] for step in steps)
        _place(root, steps, placeholder(value) if key not in leaves or closes else leaf, live)
    for key, steps in _guess(unknown, live).items():
        _place(root, steps, placeholder(unknown[key]), live)
    return cast("dict[str, object]", root)


def empty_values(structure: Structure) -> dict[str, StoredValue]:
    """The mappings with nothing in them that a state had, by joined path."""
    paths = [path for path, container in structure.containers.items() if container.empty and path]
    real_paths = [path for path in structure.empty_paths() if path]
    return {
        ".".join(map(str, path)): StoredValue(None, None, path, real_path)
        for path, real_path in zip(paths, real_paths, strict=True)
    }


def add_empty(root: dict[str, object], empty: Mapping[str, StoredValue]) -> None:
    """Add the empty mappings that stood in lists: a list of plain values is one value, one with mappings is not.

    Args:
        root: What `build_tree` has built, of a state or a part of it. Containers in it may be the live ones: those that
            get something are copied.
        empty: As `StoredValues.empty`, of the whole state.
    """
    for value in empty.values():
        if any(isinstance(step, int) for step in value.path) and value.path[0] in root:
            top, *steps = _steps(value.path, value.real_path)
            name = cast("str", top[0])
            root[name] = with_empty(root[name], steps)


def with_empty(found: object, steps: Steps) -> object:
    """A copy of what stands there with an empty mapping at a path, where nothing does."""
    if not steps:
        return {} if found is None else found
    (key, in_list), *rest = steps
    if in_list and (found is None or isinstance(found, list)):
        values: list[object] = [] if found is None else list(found)
        _put(values, key, in_list, with_empty(_get(values, key, in_list), rest))
        return values
    if not in_list and (found is None or isinstance(found, dict)):
        mapping: dict[object, object] = {} if found is None else copy.copy(found)
        mapping[key] = with_empty(mapping.get(key), rest)
        return mapping
    return found


def build_below(stored: Mapping[str, StoredValue], name: str, live: object) -> object:
    """Build what lies below a name: a mapping or a list; None where nothing does. ``live`` is what stands there now."""
    found = {
        f"{_ROOT}.{key}": StoredValue(
            value.dtype, value.shape, (_ROOT, *value.path), (_ROOT, *value.real_path) if value.real_path else ()
        )
        if value.path
        else value
        for key, value in below(stored, name).items()
    }
    return build_tree(found, {_ROOT: live}).get(_ROOT)


def nest_leaves(
    leaves: Mapping[str, object], live: Mapping[object, object], known_steps: Mapping[str, Steps] | None = None
) -> dict[object, object]:
    """A nested state of leaves by flat key.

    Args:
        leaves: Flat key to leaf.
        live: A state like the one wanted, if there is any: for its containers and types of keys.
        known_steps: Flat key to path, for leaves of which the checkpoint says it.
    """
    paths: dict[str, Steps] = dict(known_steps or {})
    if not paths and not any("." in key for key in leaves):
        texts = {str(key): key for key in live}
        return {texts.get(key, key): leaf for key, leaf in leaves.items()}
    own = cast("Mapping[str, object]", live)
    _, structure = flatten(own)
    for key in leaves:
        if key not in paths and key in structure.paths:
            paths[key] = _steps(structure.paths[key], structure.real_path(key))
    paths |= _guess([key for key in leaves if key not in paths], own)
    root: dict[object, object] = {}
    for key, leaf in leaves.items():
        _place(root, paths[key], leaf, live)
    return root


def steps_within(key: str, name: str, value: StoredValue) -> Steps | None:
    """The stored path of a key from where ``name``, with which it ends, begins; None where no path was stored."""
    real_path = value.real_path or value.path
    if len(value.path) < 2 or len(real_path) != len(value.path):
        return None
    steps: Steps = []
    start = len(name) - len(key)
    for step, real in zip(value.path, real_path, strict=True):
        text = str(step)
        if start >= 0:
            steps.append((real, isinstance(step, int)))
        elif start + len(text) > 0:
            steps += [(part, False) for part in text[-start:].split(".")]
        start += len(text) + 1
    return steps


def placeholder(value: StoredValue) -> torch.Tensor | None:
    """What stands for a leaf that the live state lacks."""
    return torch.zeros(value.shape, dtype=value.dtype, device="cpu") if value.shape is not None else None


def _steps(path: tuple[str | int, ...], real_path: tuple[object, ...]) -> list[_Step]:
    return [(real, isinstance(step, int)) for step, real in zip(path, real_path, strict=True)]


def _typed_steps(path: tuple[str | int, ...], live: object) -> list[_Step]:
    """A path of which the types of the keys are not known: they are like those of the live state."""
    steps: list[_Step] = []
    for step in path:
        real: object = step
        if isinstance(step, str) and isinstance(live, Mapping) and step not in live:
            real = _like_siblings(step, live)
        steps.append((real, isinstance(step, int)))
        live = _at(live, real)
    return steps


def _guess(stored: Iterable[str], live: Mapping[str, object]) -> dict[str, list[_Step]]:
    """Paths of keys that have none, from their dots and from the containers of the live state."""
    parts = {key: tuple(key.split(".")) for key in stored}
    children: dict[tuple[str, ...], set[str]] = {}
    for path in parts.values():
        for depth in range(len(path)):
            children.setdefault(path[:depth], set()).add(path[depth])
    found = {}
    for key, path in parts.items():
        steps: list[_Step] = []
        container: object = live
        for depth, text in enumerate(path):
            names = children[path[:depth]]
            if isinstance(container, Mapping):
                real = {str(name): name for name in container}.get(text, _like_siblings(text, container))
                steps.append((real, False))
                container = container.get(real)
            elif depth and (isinstance(container, list) or names == {str(n) for n in range(len(names))}):
                position = int(text) if text.isdecimal() else 0
                steps.append((position, True))
                has = isinstance(container, list) and position < len(container)
                container = cast("list[object]", container)[position] if has else None
            else:
                steps.append((text, False))
                container = None
        found[key] = steps
    return found


def _like_siblings(text: str, container: Mapping[object, object]) -> object:
    """A key that a live mapping lacks: a number where all its keys are."""
    return int(text) if container and text.isdecimal() and all(type(key) is int for key in container) else text


def _place(root: dict[object, object], steps: list[_Step], leaf: object, live: object) -> None:
    """Put a leaf at its place; ``live`` is what stands at the root now."""
    container: dict[object, object] | list[object] = root
    for (key, in_list), (_, next_in_list) in itertools.pairwise(steps):
        live = _at(live, key)
        found = _get(container, key, in_list)
        if not isinstance(found, (dict, list)):
            found = cast("list[object]", []) if next_in_list else _mapping_like(live)
            _put(container, key, in_list, found)
        container = found
    key, in_list = steps[-1]
    _put(container, key, in_list, leaf)


def _at(live: object, key: object) -> object:
    if isinstance(live, Mapping):
        return live.get(key)
    if isinstance(live, list) and type(key) is int and key < len(live):
        return cast("list[object]", live)[key]
    return None


def _mapping_like(live: object) -> dict[object, object]:
    """An empty mapping of the same kind, as far as kinds are told apart (`ContainerKind`)."""
    if isinstance(live, OrderedDict):
        return OrderedDict()
    if isinstance(live, Counter):
        return cast("dict[object, object]", Counter())
    if isinstance(live, defaultdict):
        return defaultdict(live.default_factory)
    return {}


def _get(container: dict[object, object] | list[object], key: object, in_list: bool) -> object:
    if isinstance(container, list):
        return container[cast("int", key)] if in_list and cast("int", key) < len(container) else None
    return container.get(key)


def _put(container: dict[object, object] | list[object], key: object, in_list: bool, value: object) -> None:
    if isinstance(container, list) and in_list:
        position = cast("int", key)
        if not 0 <= position < _MOST_POSITIONS:
            raise CorruptCheckpointError(f"the checkpoint's paths name position {position} of a list; they are damaged")
        container.extend([None] * (position + 1 - len(container)))
        container[position] = value
    elif isinstance(container, dict):
        container[key] = value
