"""One part of a training state on its way out of a checkpoint. Local: no collective, no I/O.

Problem: a model, an optimizer, a scheduler, a dict of a user's each want to be asked and given their state in another
way, under names that a fine-tuning run has changed; and a load may not begin before all of them fit, on all ranks.

Way taken: one value a part and rank, that goes through the same steps whatever the part is. Names of the state and of
the checkpoint are kept apart, so that what was placed, skipped or left out is said in the checkpoint's names, which all
ranks share, and what is missing in the state's.

::

    TemplatePart   template(stored) → filled → load_state_dict(what was filled; with the containers that were saved)
    Stateful       state_dict() → filled → load_state_dict(all of it)
    mapping        filled in place
    nobody         everything that is stored, whole
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import cast

import torch
from torch.distributed.checkpoint.stateful import Stateful

from dcpfs.checkpointer.layout import OPTIM, SCHEDULER, TRAINER
from dcpfs.checkpointer.renaming import FqnNaming, Placement, Renaming, optimizer_fqns
from dcpfs.checkpointer.stored_value import StoredValue, StoredValues, TemplatePart
from dcpfs.checkpointer.template_tree import add_empty, empty_values
from dcpfs.checkpointer.whole_state import WholeState
from dcpfs.config import CastPolicy
from dcpfs.dcp.flatten import Structure, flatten, unflatten
from dcpfs.dcp.landing import TensorWant
from dcpfs.dcp.matching import check_plausible
from dcpfs.dcp.state_filling import StateFilling
from dcpfs.errors import ConfigError
from dcpfs.format.index import BytesRecord, CheckpointIndex, EntryLocation, TensorRecord

__all__ = ["Fit", "KeyLoading", "all_placed", "check_part", "names_not_placed"]


def check_part(key: str, part: object) -> None:
    """Return when a part can be loaded into.

    Raises:
        ConfigError: It can't.
    """
    if not isinstance(part, (TemplatePart, Stateful, MutableMapping)):
        raise ConfigError(
            f"can't load {key!r} into a {type(part).__name__}: give an object with state_dict and load_state_dict, "
            "or a dict"
        )


@dataclass(frozen=True)
class Fit:
    """How one rank's part and the checkpoint fit. A small value that is exchanged.

    Attributes:
        placed: One bit for each record of the checkpoint, in its order: this rank has a place for it, skips it, or
            knows it and leaves it out.
        count: Number of records.
        missing: Names of the state that the checkpoint lacks.
        mismatched: Name of the state to how it differs.
    """

    placed: bytes = b""
    count: int = 0
    missing: tuple[str, ...] = ()
    mismatched: Mapping[str, str] = field(default_factory=dict)


class KeyLoading:
    """One key on one rank.

    Args:
        key: The key.
        part: What it is loaded into; None: nobody has it, and all of it is read.
        index: What the checkpoint has.
        allow_cast: Which dtype differences are no mismatch.
        renaming: Rules for parameter names; not applied to scheduler and trainer.
        known_names: Names of parameters that the model's loading has placed, from checkpoint to state.
        url: Redacted URL of the key, for errors.

    Attributes:
        fit: For the exchange.
        placement: What was renamed and skipped.
        left_out: Stored name to the reason why the part leaves it.

    Raises:
        ConfigError, UnsupportedValueError: The part's state can't be filled.
        KeyMismatchError: Renaming brings two entries to one place.
        CorruptCheckpointError: The metadata lists no data for a part of a tensor.
    """

    def __init__(
        self,
        key: str,
        part: object,
        index: CheckpointIndex,
        *,
        allow_cast: CastPolicy,
        renaming: Renaming | None = None,
        known_names: Mapping[str, str] | None = None,
        url: str = "",
    ) -> None:
        self.key = key
        self._part = part
        self._index = index
        self._own: MutableMapping[str, object] | None = None
        self.left_out: dict[str, str] = {}
        self.placement = Placement()
        if renaming is None or renaming.is_identity or key in (SCHEDULER, TRAINER) or part is None:
            self._fill(allow_cast, index.records, url)
        else:
            self._fill_renamed(allow_cast, renaming, known_names or {})

    def _fill(self, allow_cast: CastPolicy, records: Mapping[str, TensorRecord | BytesRecord], url: str) -> None:
        state = self._state_for(records) if self._part is not None else _whole_state(records, url)
        self._filling = StateFilling(state)
        self._filling.match_records(self._index, allow_cast=allow_cast)
        self._note_fit({*self._filling.leaves, *self.left_out})

    def _fill_renamed(self, allow_cast: CastPolicy, renaming: Renaming, known_names: Mapping[str, str]) -> None:
        records = self._index.records
        naming = FqnNaming.OPTIMIZER if self.key == OPTIM else FqnNaming.PLAIN
        if self.key == OPTIM and not known_names and isinstance(self._part, (TemplatePart, Stateful)):
            # The model is not loaded: the optimizer's own names say what the rules lead to.
            own = optimizer_fqns(self._part.state_dict())
            known_names = renaming.sources(optimizer_fqns(records)).place(own).fqns
        names = renaming.sources(records, naming, known=known_names)
        visible = {new: records[olds[0]] for new, olds in names.by_new.items()}
        self._filling = StateFilling(self._state_for(visible))
        placement = self.placement = names.place(self._filling.leaves)
        self._filling.match_records(
            self._index,
            allow_cast=allow_cast,
            records={new: records[old] for new, old in placement.sources.items()},
            leave=placement.skipped_wanted,
        )
        self.left_out = {names.by_new[new][0]: reason for new, reason in self.left_out.items() if new in names.by_new}
        self._note_fit({*placement.sources.values(), *placement.skipped_stored, *self.left_out})

    def _note_fit(self, placed: set[str]) -> None:
        match = self._filling.match
        records = self._index.records
        self.fit = Fit(_encode_names(placed, records), len(records), tuple(match.missing), dict(match.mismatched))

    def _state_for(self, records: Mapping[str, TensorRecord | BytesRecord]) -> MutableMapping[str, object]:
        part = self._part
        if isinstance(part, TemplatePart):
            stored = _stored_values(records, self._index)
            self.left_out = dict(part.left_out(stored))
            template = part.template(stored)
            if self._is_opened(part):
                add_empty(template, stored.empty)
            return template
        if isinstance(part, Stateful):
            state = part.state_dict()
            if not isinstance(state, MutableMapping):
                raise ConfigError(
                    f"can't load {self.key!r}: state_dict of a {type(part).__name__} gave a {type(state).__name__}, "
                    "which can't be filled; it must give a dict"
                )
            self._own = state
            return state
        return cast("MutableMapping[str, object]", part)

    @property
    def loaded(self) -> tuple[str, ...]:
        """Names of the state that are loaded."""
        return tuple(self._filling.match.loaded)

    def wants(self, directory: str) -> list[TensorWant]:
        """Boxes to read, their files and names relative to the step."""
        name, start = f"{self.key}/", f"{directory}/" if directory else ""
        return [
            want._replace(key=name + want.key, location=_relocate(want.location, start))
            for want in self._filling.match.wants
        ]

    def objects(self, directory: str) -> list[tuple[str, EntryLocation]]:
        """Non-tensor values to read."""
        start = f"{directory}/" if directory else ""
        return [(f"{self.key}/{name}", _relocate(each, start)) for name, each in self._filling.match.objects]

    def apply(self, values: Mapping[str, object]) -> Mapping[str, object]:
        """Give the part what was read. ``values`` has the decoded objects, named as in `objects`.

        Returns:
            The state that was given.
        """
        filling = self._filling
        start = len(self.key) + 1
        names = {name for name, _ in filling.match.objects}
        filling.put({name[start:]: value for name, value in values.items() if name[start:] in names})
        part = self._part
        if part is None:
            return self._unflatten()
        if isinstance(part, TemplatePart):
            filling.drop([*self.fit.missing, *self.fit.mismatched, *self.placement.skipped_wanted])
            given = self._as_saved(part, filling.template)
            part.load_state_dict(given)
            return given
        filling.hand_over()
        if isinstance(part, Stateful) and self._own is not None:
            part.load_state_dict(cast("dict[str, object]", self._own))
            return self._own
        return cast("Mapping[str, object]", part)

    def _as_saved(self, part: object, template: dict[str, object]) -> dict[str, object]:
        """The template in containers of the kinds that were saved, the empty ones too, as far as that is known.

        Models and optimizers have flat names, and containers of their own where there are any.
        """
        if not self._is_opened(part) or self._index.structure is None or self.placement.sources:
            return template
        leaves, _ = flatten(template)
        structure = Structure.from_json(self._index.structure, self._index.paths)
        tops = {str(key) for key in template}
        whole = isinstance(part, WholeState)
        empty = [
            path
            for path, note in structure.containers.items()
            if note.empty and path and (whole or str(path[0]) in tops)
        ]
        return cast("dict[str, object]", unflatten(leaves, structure.restricted(leaves, empty)))

    def _is_opened(self, part: object) -> bool:
        """Whether its containers are the user's own, and in the checkpoint as they stood."""
        return self.key in (SCHEDULER, TRAINER) or isinstance(part, WholeState)

    def _unflatten(self) -> Mapping[str, object]:
        structure = Structure.from_json(self._index.structure, self._index.paths)
        return cast("Mapping[str, object]", unflatten(self._filling.template, structure))


def all_placed(fits: Iterable[Fit]) -> bool:
    """Whether every record of a key has a place on some rank. Needs no names."""
    together, count = _union(fits)
    return together == (1 << count) - 1


def names_not_placed(fits: Iterable[Fit], names: Iterable[str]) -> list[str]:
    """The records that have a place on no rank."""
    together, count = _union(fits)
    bits = together.to_bytes((count + 7) // 8, "little")
    return [name for number, name in enumerate(names) if not bits[number >> 3] >> (number & 7) & 1]


def _union(fits: Iterable[Fit]) -> tuple[int, int]:
    together = count = 0
    for fit in fits:
        together |= int.from_bytes(fit.placed, "little")
        count = fit.count
    return together, count


def _encode_names(placed: set[str], names: Iterable[str]) -> bytes:
    order = list(names)
    bits = bytearray((len(order) + 7) // 8)
    for number, name in enumerate(order):
        if name in placed:
            bits[number >> 3] |= 1 << (number & 7)
    return bytes(bits)


def _stored_values(records: Mapping[str, TensorRecord | BytesRecord], index: CheckpointIndex) -> StoredValues:
    """What a part is told of it; of renamed entries not where they stood, of another tool's no key types."""
    structure = Structure.from_json(index.structure, index.paths)
    stored = {}
    for name, record in records.items():
        dtype, shape = (record.dtype, record.shape) if isinstance(record, TensorRecord) else (None, None)
        if name in structure.paths and index.records.get(name) is record:
            real_path = () if index.structure is None else structure.real_path(name)
            stored[name] = StoredValue(dtype, shape, structure.paths[name], real_path)
        else:
            stored[name] = StoredValue(dtype, shape)
    return StoredValues(stored, empty_values(structure) if records is index.records else {})


def _whole_state(records: Mapping[str, TensorRecord | BytesRecord], url: str) -> dict[str, object]:
    """Memory for everything that is stored, flat."""
    state: dict[str, object] = {}
    for name, record in records.items():
        if isinstance(record, TensorRecord):
            check_plausible(name, record, url)
            state[name] = torch.empty(record.shape, dtype=record.dtype, device="cpu")
        else:
            state[name] = None
    return state


def _relocate(location: EntryLocation, start: str) -> EntryLocation:
    return location._replace(file=start + location.file)
