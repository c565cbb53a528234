"""Optimizers as a part of a training state, by the names of the parameters.

Problem: a fresh optimizer has no state, so a template made of it asks for nothing, and the resume "succeeds" without
a single moment (case 5). torch's way out is a step with zero gradients, which does nothing where gradients or a part of
the state are there already (case 6), changes what it should only look at, and passes over parameters that are frozen
now (case 7). Its ``load_state_dict`` then casts moments to the parameter's type without a word.

Way taken: the template is made from the keys that the checkpoint holds. Each value gets memory like the parameter it
belongs to, in the type that was saved, whatever the optimizer holds at the moment. What can't be placed is known by
name: parameters without stored state start afresh, with a warning; stored state of a parameter that the model has and
no optimizer holds is left out, with the reason; all else is a mismatch. Values are put in through the optimizer's own
``load_state_dict``, so its hooks run, and where that casts, the exact value is put back.

::

    stored keys ──sort by parameter──► memory like it ──load fills──► by index ──► optimizer.load_state_dict
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import nn
from torch.optim import Optimizer

from dcpfs import torch_private
from dcpfs.checkpointer.flat_shards import sort_by_part
from dcpfs.checkpointer.model_state import list_names, model_parts_of
from dcpfs.checkpointer.optimizer_container import StateHolder, container_template, sort_optimizers
from dcpfs.checkpointer.optimizer_keys import (
    PARAM_NAMES,
    ParameterKeys,
    flatten_values,
    group_key,
    separate_values,
    sort_keys,
    state_key,
)
from dcpfs.checkpointer.optimizer_values import load_exactly
from dcpfs.checkpointer.parameter_names import ModuleNames
from dcpfs.checkpointer.stored_value import StoredValue, StoredValues
from dcpfs.checkpointer.template_tree import Steps, nest_leaves, steps_within, with_empty
from dcpfs.checkpointer.tensor_memory import has_same_bits, zeros_like_part, zeros_of_shape
from dcpfs.dcp.flatten import flatten
from dcpfs.errors import ConfigError, KeyMismatchError, UnsupportedValueError

__all__ = ["OptimizersWrapper"]

_logger = logging.getLogger(__name__)

_LIKE_PARAMETER = frozenset(
    {
        *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "sum", "square_avg", "grad_avg"),
        *("acc_delta", "prev", "step_size", "ax"),
    }
)
"""Values of torch's optimizers that have the shape of their parameter."""


@dataclass(slots=True)
class _Group:
    """One group of one optimizer, as its ``state_dict`` shows it."""

    fields: dict[str, object]
    parameters: list[tuple[int, nn.Parameter, str]]
    """Index in the optimizer, parameter, name."""


@dataclass(slots=True)
class _View:
    """One optimizer at this moment."""

    optimizer: Optimizer
    groups: list[_Group]
    state: dict[int, Mapping[object, object]]
    rest: dict[str, object] = field(default_factory=dict)


class OptimizersWrapper:
    """The state of optimizers under torch's flat names. Can be given to `dcpfs.save` and torch's ``dcp``.

    The names are those of ``get_optimizer_state_dict(flatten_optimizer_state_dict=True)``. Nothing is changed by asking
    for the state; an optimizer that has not stepped has none. Not thread-safe; no method is collective.

    Args:
        model: The model, or its parts on this rank, that the parameters belong to. Not looked at for containers.
        optimizers: An optimizer, a sequence of optimizers, or a container with ``state_dict`` and ``load_state_dict``
            that is none of torch's own: what that gives is saved as it is.

    Raises:
        ConfigError: An argument is something else.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizers: Optimizer | StateHolder | Iterable[Optimizer | StateHolder],
    ) -> None:
        self._optimizers, self._containers = sort_optimizers(optimizers)
        self._parts = model_parts_of(model) if self._optimizers else ()
        if any(torch_private.has_flat_parameters(part) for part in self._parts):
            self._containers += sort_by_part(self._parts, self._optimizers)
            self._optimizers = []
        self._unfit: set[str] = set()
        self._asked: frozenset[str] = frozenset()
        self._stored: Mapping[str, StoredValue] = {}
        self._empty: Mapping[str, StoredValue] = {}

    def state_dict(self) -> dict[str, object]:
        """Flat key to tensor or value. The tensors are the optimizers' own, not copies.

        A mapping in a parameter's state is opened, as torch does, where its names suffice to put it together again.

        Raises:
            ConfigError: An optimizer holds a parameter that the model lacks, or two hold the same one.
            UnsupportedValueError: An optimizer keeps state that belongs to no parameter.
        """
        states: dict[str, object] = {}
        fields: dict[str, object] = {}
        for view in self._views():
            for group in view.groups:
                for index, _, name in group.parameters:
                    values = view.state.get(index, {})
                    for value_name, value in separate_values(values) if values else ():
                        states[state_key(name, value_name)] = value
                    for field_name, value in group.fields.items():
                        fields[group_key(name, field_name)] = _own_names(field_name, value, name)
        merged = {**states, **fields}
        for container in self._containers:
            for key, value in container.state_dict().items():
                if key in merged:
                    raise ConfigError(f"two optimizers have a state under the key {key!r}: give them as one container")
                merged[key] = value
        return merged

    def template(self, stored: Mapping[str, StoredValue]) -> dict[str, object]:
        """What a load fills: all that the checkpoint holds for parameters of these optimizers.

        Values that an optimizer has already, and that fit, are filled in place.
        """
        template: dict[str, object] = {}
        views, sorted_keys = self._sorted(stored)
        shaped = self._names_shaped_like_parameters(views, sorted_keys, stored)
        self._unfit = set()
        self._asked = frozenset(sorted_keys)
        self._stored = stored
        self._empty = StoredValues.empty_of(stored)
        for view in views:
            for group in view.groups:
                fields = dict(flatten_values(cast("Mapping[object, object]", group.fields)))
                for index, parameter, name in group.parameters:
                    keys = sorted_keys.get(name, ParameterKeys())
                    live = dict(flatten_values(view.state.get(index, {}))) if keys.state else {}
                    told = shaped if _may_be_reshaped(parameter, keys, stored) else _LIKE_PARAMETER
                    for value_name, key in keys.state.items():
                        value = stored[key]
                        if value.shape is None or value.dtype is None:
                            template[key] = _plain_or_none(live.get(value_name))
                            continue
                        template[key], fits = _state_memory(
                            parameter, value_name, value.shape, value.dtype, live.get(value_name), told
                        )
                        if not fits:
                            self._unfit.add(name)
                    for field_name, key in keys.group.items():
                        template[key] = _field_memory(fields.get(field_name), stored[key])
        for container in self._containers:
            template.update(container_template(container, stored))
        return template

    def left_out(self, stored: Mapping[str, StoredValue]) -> dict[str, str]:
        """Keys of parameters that the model has and no optimizer holds: they were frozen since, or left out."""
        if self._containers:
            return {}
        views, _ = self._sorted(())
        held = {name for view in views for group in view.groups for _, _, name in group.parameters}
        aliases = self._aliases()
        found, _ = sort_keys(stored, aliases)
        reasons = {}
        for name, keys in found.items():
            if aliases[name] not in held:
                reason = f"no optimizer holds {name}: it is frozen now, or was left out"
            elif name != self._name_in(found, aliases[name]):
                reason = f"{name} is tied to {aliases[name]}, the state of which is taken"
            else:
                continue
            reasons.update(dict.fromkeys((*keys.state.values(), *keys.group.values()), reason))
        return reasons

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Take over a filled template, or the state of other optimizers of the same parameters.

        All of an optimizer's state is replaced: parameters that the checkpoint has nothing for start afresh, with a
        warning. Those that a load was asked to skip keep what they have.

        Raises:
            ConfigError: An optimizer holds a parameter that the model lacks.
            KeyMismatchError: Parameters of one group were in groups that differ. Nothing was changed.
        """
        leaves, paths = _flatten_with_paths(state_dict)
        views, sorted_keys = self._sorted(leaves)
        stored = {**self._stored, **paths}
        empty, _ = sort_keys(self._empty, self._aliases())
        ready = [(view.optimizer, self._packed(view, sorted_keys, leaves, stored, empty)) for view in views]
        self._warn_of_afresh(views, sorted_keys)
        self._unfit, self._asked, self._stored, self._empty = set(), frozenset(), {}, {}
        for optimizer, packed in ready:
            load_exactly(optimizer, packed)
        if len(self._containers) == 1 and not self._optimizers:
            self._containers[0].load_state_dict(dict(state_dict))
            return
        for container in self._containers:
            known = container.state_dict()
            container.load_state_dict({key: state_dict[key] for key in known if key in state_dict})

    def _views(self) -> list[_View]:
        names = self._parameter_names()
        held = {id(p) for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]}
        if not held <= names.keys():
            for part in self._parts:
                part.state_dict()  # a sharded module that is gathered at the moment shards its parameters again
            names = self._parameter_names()
        seen: dict[str, int] = {}
        return [_view(optimizer, position, names, seen) for position, optimizer in enumerate(self._optimizers)]

    def _parameter_names(self) -> dict[int, str]:
        """Identity of each parameter to its first name."""
        names: dict[int, str] = {}
        owners: dict[str, nn.Parameter] = {}
        for part in self._parts:
            for name, parameter in ModuleNames.of(part).parameters.items():
                if owners.setdefault(name, parameter) is not parameter:
                    raise ConfigError(
                        f"two parts of the model have the name {name!r} for different parameters: name the parts as "
                        "they are named in the whole model"
                    )
                names.setdefault(id(parameter), name)
        return names

    def _aliases(self) -> dict[str, str]:
        """Every name of every parameter to its first name."""
        first: dict[int, str] = {}
        aliases: dict[str, str] = {}
        for part in self._parts:
            for name, parameter in ModuleNames.of(part).parameters.items():
                aliases[name] = first.setdefault(id(parameter), name)
        return aliases

    def _sorted(self, keys: Iterable[str]) -> tuple[list[_View], dict[str, ParameterKeys]]:
        """The optimizers, and first name of each parameter to its keys, be they under another name of it."""
        views = self._views()
        aliases = self._aliases()
        found, _ = sort_keys(keys, aliases)
        own = {}
        for first in dict.fromkeys(aliases.values()):
            name = self._name_in(found, first, aliases)
            if name is not None:
                own[first] = found[name]
        return views, own

    def _name_in(
        self, found: Mapping[str, ParameterKeys], first: str, aliases: Mapping[str, str] | None = None
    ) -> str | None:
        """Which of a parameter's names the keys use: the first, else any other."""
        if first in found:
            return first
        every = self._aliases() if aliases is None else aliases
        return next((name for name in found if every[name] == first), None)

    def _names_shaped_like_parameters(
        self, views: list[_View], sorted_keys: Mapping[str, ParameterKeys], stored: Mapping[str, StoredValue]
    ) -> frozenset[str]:
        """Names of values that have the shape of their parameter, in most of the parameters that have them.

        One alone may be chance: Adafactor's factors of a matrix with one row.
        """
        counts: dict[str, int] = {}
        for view in views:
            for group in view.groups:
                for _, parameter, name in group.parameters:
                    for value_name, key in sorted_keys.get(name, ParameterKeys()).state.items():
                        shape = stored[key].shape
                        if shape:
                            like = shape == tuple(parameter.shape)
                            counts[value_name] = counts.get(value_name, 0) + (1 if like else -1)
        return _LIKE_PARAMETER.union(name for name, count in counts.items() if count > 0)

    def _packed(
        self,
        view: _View,
        sorted_keys: Mapping[str, ParameterKeys],
        leaves: Mapping[str, object],
        stored: Mapping[str, StoredValue],
        empty: Mapping[str, ParameterKeys],
    ) -> dict[str, object]:
        """What ``load_state_dict`` of one optimizer takes."""
        state: dict[int, object] = {}
        groups = []
        for group in view.groups:
            owner: dict[str, str] = {}
            fields: dict[str, object] = {}
            known_fields: dict[str, Steps] = {}
            without: dict[str, str] = {}
            for index, _, name in group.parameters:
                keys = sorted_keys.get(name, ParameterKeys())
                nothing = empty.get(name, ParameterKeys())
                without |= nothing.group
                if keys.state and name not in self._unfit:
                    values = {value_name: leaves[key] for value_name, key in keys.state.items()}
                    known = {
                        value_name: steps
                        for value_name, key in keys.state.items()
                        if key in stored and (steps := steps_within(key, value_name, stored[key]))
                    }
                    nested = nest_leaves(values, view.state.get(index, {}), known)
                    state[index] = self._filled_up(nested, nothing.state)
                elif name in self._asked and name not in sorted_keys and index in view.state:
                    state[index] = view.state[index]
                for field_name, key in keys.group.items():
                    if field_name == PARAM_NAMES or field_name.startswith(f"{PARAM_NAMES}."):
                        continue
                    if field_name not in owner:
                        owner[field_name], fields[field_name] = name, leaves[key]
                        if key in stored and (steps := steps_within(key, field_name, stored[key])):
                            known_fields[field_name] = steps
                    elif not _is_equal(fields[field_name], leaves[key]):
                        raise KeyMismatchError(
                            f"loading an optimizer: {owner[field_name]!r} and {name!r} are in one group, but were "
                            f"saved with {field_name} {fields[field_name]!r} and {leaves[key]!r}; nothing was "
                            "changed: group the parameters as they were, or resume without 'optim'",
                            mismatched={key: f"{field_name} differs within a group"},
                        )
            restored = nest_leaves(fields, cast("Mapping[object, object]", group.fields), known_fields)
            restored = self._filled_up(restored, without)
            packed: dict[object, object] = {k: v for k, v in group.fields.items() if k != PARAM_NAMES}
            packed |= restored
            packed["params"] = [index for index, _, _ in group.parameters]
            groups.append(packed)
        return {**view.rest, "state": state, "param_groups": groups}

    def _filled_up(self, nested: dict[object, object], empty: Mapping[str, str]) -> dict[object, object]:
        """With the mappings that have nothing in them where they stood: name within ``nested`` to joined path."""
        filled: object = nested
        for name, key in empty.items():
            steps = steps_within(key, name, self._empty[key])
            if steps and len(steps) > 1:
                filled = with_empty(filled, steps)
        return cast("dict[object, object]", filled)

    def _warn_of_afresh(self, views: list[_View], sorted_keys: Mapping[str, ParameterKeys]) -> None:
        unknown, stateless = [], []
        for view in views:
            members = [name for group in view.groups for _, _, name in group.parameters]
            has_state = any(name in sorted_keys and sorted_keys[name].state for name in members)
            for name in members:
                if name not in sorted_keys:
                    unknown += [name] if name not in self._asked else []
                elif has_state and not sorted_keys[name].state:
                    stateless.append(name)
        if unknown:
            _logger.warning("no optimizer state was saved for %s: they start afresh", list_names(unknown))
        if stateless:
            _logger.warning(
                "no gradient had reached %s when the optimizer was saved: they start without state",
                list_names(stateless),
            )
        if self._unfit:
            _logger.warning(
                "the optimizer state of %s was saved in another shape: they start afresh", list_names(self._unfit)
            )


def _view(optimizer: Optimizer, position: int, names: Mapping[int, str], seen: dict[str, int]) -> _View:
    packed = dict(optimizer.state_dict())
    packed_groups, state = packed.pop("param_groups"), packed.pop("state")
    groups = []
    known: set[object] = set()
    for number, (group, packed_group) in enumerate(zip(optimizer.param_groups, packed_groups, strict=True)):
        parameters = []
        for index, parameter in zip(packed_group["params"], group["params"], strict=True):
            name = names.get(id(parameter))
            if name is None:
                raise ConfigError(
                    f"group {number} of optimizer {position} holds a parameter of shape {tuple(parameter.shape)} that "
                    "the model lacks: give the model, or the parts, that the optimizer was made for"
                )
            if seen.setdefault(name, position) != position or index in known:
                raise ConfigError(f"two optimizers or groups hold {name!r}: a checkpoint can hold one state for it")
            known.add(index)
            parameters.append((index, parameter, name))
        fields = {name: value for name, value in packed_group.items() if name != "params"}
        groups.append(_Group(fields, parameters))
    for index in state:
        if index not in known:
            raise UnsupportedValueError(
                f"can't save optimizer {position}: it keeps state under {index!r}, which belongs to no parameter; wrap "
                "it in a container with state_dict and load_state_dict of its own"
            )
    return _View(optimizer, groups, state, packed)


def _own_names(field_name: str, value: object, name: str) -> object:
    """A group's list of names, once for every parameter in it, would be the square of it."""
    return [name] if field_name == PARAM_NAMES else value


def _plain_or_none(value: object) -> object:
    return None if isinstance(value, torch.Tensor) else value


def _may_be_reshaped(parameter: torch.Tensor, keys: ParameterKeys, stored: Mapping[str, StoredValue]) -> bool:
    """Whether the values of a parameter could be those of one of another shape: none has its own, all have one."""
    shapes = {stored[key].shape for key in keys.state.values()} - {None, ()}
    return len(shapes) == 1 and tuple(parameter.shape) not in shapes


def _flatten_with_paths(state_dict: Mapping[str, object]) -> tuple[dict[str, object], dict[str, StoredValue]]:
    """The leaves, with empty mappings among them, and where those stand that stand in containers."""
    leaves, structure = flatten(state_dict)
    paths = {
        key: StoredValue(None, None, path, structure.real_path(key))
        for key, path in structure.paths.items()
        if len(path) > 1
    }
    empty = [path for path, container in structure.containers.items() if container.empty]
    for path, real_path in zip(empty, structure.empty_paths(), strict=True):
        key = ".".join(map(str, path))
        leaves[key], paths[key] = {}, StoredValue(None, None, path, real_path)
    return leaves, paths


def _state_memory(
    parameter: torch.Tensor,
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    live: object,
    shaped: frozenset[str],
) -> tuple[torch.Tensor, bool]:
    """Where a value of a parameter is loaded to, and whether its shape is one that the parameter can use."""
    if isinstance(live, torch.Tensor) and tuple(live.shape) == shape and live.dtype is dtype and not live.is_meta:
        return live.detach(), True
    if name == "step" and not shape:
        return torch.zeros((), dtype=dtype, device="cpu"), True  # from where the optimizer moves it if it wants to
    if shape == tuple(parameter.shape):
        return zeros_like_part(parameter, dtype=dtype), True
    if name.rpartition(".")[2] in shaped or name in shaped:
        return zeros_like_part(parameter, dtype=dtype), False
    return zeros_of_shape(parameter, shape, dtype), True


def _field_memory(live: object, value: StoredValue) -> object:
    if value.shape is None:
        return _plain_or_none(live)
    device = live.device if isinstance(live, torch.Tensor) and not live.is_meta else None
    return torch.zeros(value.shape, dtype=value.dtype, device=device or torch.device("cpu"))


def _is_equal(first: object, second: object) -> bool:
    if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
        both = isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)
        return both and has_same_bits(cast("torch.Tensor", first), cast("torch.Tensor", second))
    return type(first) is type(second) and (first == second or repr(first) == repr(second))
