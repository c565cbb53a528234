"""The flat keys of an optimizer's state, by parameter. Pure.

Problem: an optimizer numbers its parameters, so its state means something else when parameters are regrouped, when a
pipeline stage holds others, or when some are frozen. torch's own answer is a key per parameter and value, which makes
what was saved independent of groups, stages and order.

Way taken: torch's names, exactly: ``state.{fqn}.{name}`` and ``param_groups.{fqn}.{field}``, nested values joined by
further dots. Names of parameters hold dots themselves, so a key is taken apart with the parameters that are known, the
longest name first. A mapping that can't be told from such a name (keys that are no text, that are numbers, hold dots,
or are none) stays a mapping in the state: its values get the same keys in the checkpoint, and its kind is noted there.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

__all__ = [
    "GROUPS",
    "PARAM_NAMES",
    "STATE",
    "ParameterKeys",
    "flatten_values",
    "group_key",
    "separate_values",
    "sort_keys",
    "state_key",
]

STATE = "state"
GROUPS = "param_groups"

PARAM_NAMES = "param_names"
"""A field that lists the names of a whole group, so each parameter keeps its own."""

V = TypeVar("V")


@dataclass(slots=True)
class ParameterKeys:
    """What a checkpoint holds for one parameter.

    Attributes:
        state: Name of a value, nested ones joined by dots, to the flat key.
        group: Field of its group to the flat key.
    """

    state: dict[str, str] = field(default_factory=dict)
    group: dict[str, str] = field(default_factory=dict)


def state_key(fqn: str, name: str) -> str:
    """Flat key of a value that belongs to one parameter, or of all of them where the name is empty."""
    return f"{STATE}.{fqn}.{name}" if name else f"{STATE}.{fqn}"


def group_key(fqn: str, name: str) -> str:
    """Flat key of a field of the group that a parameter is in."""
    return f"{GROUPS}.{fqn}.{name}"


def flatten_values(values: Mapping[object, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """The values of one parameter, those of nested mappings by joined name, as torch flattens them."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten_values(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def separate_values(values: Mapping[object, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """As `flatten_values`, but mappings that joined names don't tell from others are left whole, under their name."""
    if not _are_plain(values):
        yield prefix.removesuffix("."), dict(values)
        return
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from separate_values(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def sort_keys(keys: Iterable[str], names: Container[str]) -> tuple[dict[str, ParameterKeys], list[str]]:
    """Sort flat keys by the parameter they belong to.

    Args:
        keys: The flat keys.
        names: The parameters that are known.

    Returns:
        Name to its keys, and the keys that belong to none of them.
    """
    found: dict[str, ParameterKeys] = {}
    rest: list[str] = []
    for key in keys:
        kind, _, body = key.partition(".")
        name = _longest_name(body, names) if kind in (STATE, GROUPS) else None
        if name is None:
            rest.append(key)
            continue
        entry = found.setdefault(name, ParameterKeys())
        (entry.state if kind == STATE else entry.group)[body[len(name) + 1 :]] = key
    return found, rest


def _are_plain(values: Mapping[object, object]) -> bool:
    """Whether the keys' texts are enough to put the mapping together again."""
    return bool(values) and all(
        type(name) is str and name and "." not in name and not name.isdecimal() for name in values
    )


def _longest_name(body: str, names: Container[str]) -> str | None:
    end = body.rfind(".")
    while end > 0:
        if body[:end] in names:
            return body[:end]
        end = body.rfind(".", 0, end)
    return None
