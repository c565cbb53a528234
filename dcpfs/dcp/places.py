"""Put values into a nested state at the places, and under the keys, that it has itself."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import cast

from dcpfs.errors import KeyMismatchError

__all__ = ["check_place", "find_container", "put_value"]


def put_value(state: object, path: Sequence[object], value: object) -> None:
    """Replace the value at a path of real keys and list positions. Containers on the way exist already.

    Raises:
        KeyMismatchError: The container is neither a mutable mapping nor a list.
    """
    check_place(state, path)[path[-1]] = value


def check_place(state: object, path: Sequence[object]) -> MutableMapping[object, object]:
    """The mapping, or list, in which `put_value` would replace a value.

    Raises:
        KeyMismatchError: It is neither a mutable mapping nor a list.
    """
    container = state
    for key in path[:-1]:
        container = cast("dict[object, object]", container)[key]
    if not isinstance(container, (MutableMapping, list)):
        raise KeyMismatchError(
            f"can't put the loaded value of {'.'.join(map(str, path))!r} into a {type(container).__name__}: it can't "
            f"be changed in place; give a dict or list there"
        )
    return cast("dict[object, object]", container)


def find_container(state: object, path: Sequence[object]) -> MutableMapping[object, object] | None:
    """The mapping at a path of real keys, or None when the state has no such mapping."""
    found = state
    for key in path:
        if isinstance(found, MutableMapping):
            if key not in found:
                return None
            found = found[key]
        elif isinstance(found, list) and isinstance(key, int) and key < len(found):
            found = found[key]
        else:
            return None
    return found if isinstance(found, MutableMapping) else None
