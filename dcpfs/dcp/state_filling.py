"""One nested state that is being filled from one checkpoint. Local: no collective, no I/O.

Problem: between "here is a dict" and "these bytes go there" lie five questions that each loader of a trainer answers
anew, and differently: what stands in for an object that has a state of its own, which flat key is which place, where
an empty container has no record, whether a place can be written at all, and what the object gets when all is read.

Way taken: one value that is asked in turn, by a load of one checkpoint as by that of a whole training state. Nothing
of the caller's changes before `put`, but for the memory of the tensors in ``match.wants``, which the fetch fills.

Flow: ``StateFilling(state)`` → ``match_records(...)`` → (fetch ``match.wants`` and ``match.objects``) → ``put(values)``
→ ``hand_over()``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping
from typing import cast

from torch.distributed.checkpoint.stateful import Stateful

from dcpfs.config import CastPolicy
from dcpfs.dcp.flatten import Structure, flatten, unflatten
from dcpfs.dcp.matching import Match, match_state
from dcpfs.dcp.places import check_place, find_container, put_value
from dcpfs.dcp.stateful import is_stateful
from dcpfs.errors import ConfigError, CorruptCheckpointError
from dcpfs.format.index import BytesRecord, CheckpointIndex, TensorRecord

__all__ = ["StateFilling"]


class StateFilling:
    """A state and what of it a checkpoint fills. Not thread-safe.

    Args:
        state: Nested values. A top-level value with ``state_dict`` and ``load_state_dict`` is asked for its state, and
            given it in `hand_over`.

    Attributes:
        leaves: Flat key to tensor or value.
        match: What fits; filled by `match_records`.

    Raises:
        ConfigError: It is no mutable mapping.
        UnsupportedValueError: It can't be flattened.
    """

    def __init__(self, state: MutableMapping[str, object]) -> None:
        if not isinstance(state, MutableMapping):
            raise ConfigError(f"can't load into a {type(state).__name__}: the state must be a dict")
        self._state = state
        self._stateful: dict[str, Stateful] = {}
        self._template: dict[str, object] = {}
        for key, value in state.items():
            if is_stateful(value):
                self._stateful[key] = value
                self._template[key] = value.state_dict()
            else:
                self._template[key] = value
        self.leaves, self._structure = flatten(self._template)
        self._empties: dict[str, tuple[tuple[object, ...], object]] = {}
        self.match = Match()

    @property
    def template(self) -> dict[str, object]:
        """The nested state in which stateful objects are replaced by their states."""
        return self._template

    def match_records(
        self,
        index: CheckpointIndex,
        *,
        allow_cast: CastPolicy,
        records: Mapping[str, TensorRecord | BytesRecord] | None = None,
        leave: Collection[str] = (),
    ) -> Match:
        """Hold the state against a checkpoint.

        Args:
            index: The checkpoint.
            allow_cast: Which dtype differences are no mismatch.
            records: Its records by the state's names, where these differ.
            leave: Flat keys of the state that are left untouched, and are no mismatch whatever the checkpoint has.

        Raises:
            CorruptCheckpointError: The chunks of a tensor don't cover what its shape promises.
            KeyMismatchError: A value's place can't be written.
        """
        leaves: Mapping[str, object] = self.leaves
        if leave:
            left = frozenset(leave)
            leaves = {key: leaf for key, leaf in leaves.items() if key not in left}
        if records is not None:
            index = CheckpointIndex(
                dict(records), index.structure, index.paths, index.save_id, written_by_dcpfs=index.written_by_dcpfs
            )
        self._empties = _leafless_values(index)
        self.match = match_state(leaves, index, allow_cast=allow_cast, empties=frozenset(self._empties))
        for key, _ in self.match.objects:
            check_place(self._template, self._structure.real_path(key))
        return self.match

    def put(self, values: Mapping[str, object]) -> None:
        """Put decoded values, and empty containers, at their places in the template."""
        for key, value in values.items():
            put_value(self._template, self._structure.real_path(key), value)
        for key, (path, value) in self._empties.items():
            container = find_container(self._template, path[:-1])
            replaced = key in self.leaves and key not in self.match.mismatched
            if container is not None and (path[-1] not in container or replaced):
                put_value(self._template, path, value)

    def drop(self, keys: Collection[str]) -> None:
        """Take leaves out of the template, so that `hand_over`'s receiver does not take them for loaded."""
        for key in keys:
            path = self._structure.real_path(key)
            container = find_container(self._template, path[:-1])
            if container is not None:
                container.pop(path[-1], None)

    def hand_over(self) -> None:
        """Give the stateful objects their states, and put all else back into the caller's mapping."""
        for key in self._state:
            stateful = self._stateful.get(key)
            if stateful is not None:
                stateful.load_state_dict(cast("dict[str, object]", self._template[key]))
            else:
                self._state[key] = self._template[key]
        for key in self._template.keys() - self._state.keys():
            self._state[key] = self._template[key]


def _leafless_values(index: CheckpointIndex) -> dict[str, tuple[tuple[object, ...], object]]:
    """Containers of the saved state at and below which is no leaf: flat key to real path and value.

    Those that lie within another one come after it.
    """
    if index.structure is None:
        return {}
    structure = Structure.from_json(index.structure, index.paths)
    empties = [path for path, note in structure.containers.items() if note.empty and path]
    if not empties:
        return {}
    # A whole path among them: one rank had a value where another had the empty container.
    with_leaves = {path[:end] for path in structure.paths.values() for end in range(1, len(path) + 1)}
    nested = unflatten({}, structure.restricted((), empties))
    found: dict[str, tuple[tuple[object, ...], object]] = {}
    for empty in empties:
        real_path = Structure({"": empty}, structure.containers).real_path("")
        value: object = nested
        for end, key in enumerate(real_path, start=1):
            try:
                value = cast("dict[object, object]", value)[key]
            except (KeyError, IndexError, TypeError) as error:
                raise CorruptCheckpointError(
                    f"the checkpoint's note of its containers is damaged: two keys at {empty[: end - 1]} are the same"
                ) from error
            if empty[:end] not in with_leaves:
                found.setdefault(".".join(map(str, empty[:end])), (real_path[:end], value))
    return found
