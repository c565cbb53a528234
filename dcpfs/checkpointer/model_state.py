"""A model as a part of a training state: one module, or the parts that a pipeline holds on this rank.

Problem: names carry the prefixes of wrappers; parts of a pipeline have to become one state; ``load_state_dict`` copies
every tensor that a load has already filled in place once more; a module on the meta device has no memory to fill; and a
state that is kept from one save to the next goes stale where a hook makes its tensors (case 13).

Way taken: the module is asked for its ``state_dict`` at each call, its keys become clean names (`ModuleNames`), and the
parts are merged. What a load fills are the module's own tensors, so afterwards each is handed over as itself, which
copies nothing, while the module's hooks and extra states still get what they expect. A tensor on the meta device gets
memory in the template, and adopts it when the state is taken over.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import torch
from torch import nn

from dcpfs import torch_private
from dcpfs.checkpointer.flat_shards import load_flat_model, read_flat_model
from dcpfs.checkpointer.parameter_names import ModuleNames
from dcpfs.checkpointer.stored_value import StoredValue, StoredValues
from dcpfs.checkpointer.template_tree import add_empty, build_below, placeholder
from dcpfs.checkpointer.tensor_memory import adopt_memory, has_same_bits, home_device, is_same_memory, zeros_like_part
from dcpfs.errors import ConfigError, KeyMismatchError

__all__ = ["ModelWrapper", "list_names", "model_parts_of"]

_logger = logging.getLogger(__name__)

_EXTRA_STATE = "_extra_state"
_SHOWN = 10


def list_names(names: Iterable[str]) -> str:
    """The first names, and how many more, for texts."""
    every = list(names)
    more = f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else ""
    return ", ".join(every[:_SHOWN]) + more


def model_parts_of(model: object) -> tuple[nn.Module, ...]:
    """The modules of a model.

    Raises:
        ConfigError: It is no module, and no sequence of modules.
    """
    if isinstance(model, nn.Module):
        return (model,)
    parts = tuple(model) if isinstance(model, Sequence) else ()
    if not parts or not all(isinstance(part, nn.Module) for part in parts):
        raise ConfigError(f"a model must be a module or a sequence of modules, not {_describe(model)}")
    return tuple(dict.fromkeys(parts))


class ModelWrapper:
    """The state of a model under clean names. Can be given to `dcpfs.save`, `dcpfs.load` and torch's ``dcp``.

    Names carry no prefix of ``torch.compile``, DDP or activation checkpointing, and DTensors stay DTensors. Not
    thread-safe; no method is collective unless a hook of the module is.

    Args:
        model: A module, or the parts of a pipeline that this rank holds.
        device: Where tensors on the meta device get their memory; None: where the model's others lie (for a DTensor:
            the device of its mesh), else torch's default device.

    Raises:
        ConfigError: ``model`` is something else.
    """

    def __init__(self, model: nn.Module | Sequence[nn.Module], *, device: torch.device | str | None = None) -> None:
        self.parts = model_parts_of(model)
        self._device = None if device is None else torch.device(device)

    def state_dict(self) -> dict[str, object]:
        """Name to tensor, and to extra state, of all parts. The tensors are the model's own, not copies.

        Raises:
            ConfigError: Two parts have a name in common, and not the tensor.
        """
        return self._collect()[0]

    def template(self, stored: Mapping[str, StoredValue]) -> dict[str, object]:
        """What a load fills: the model's own tensors, and memory for those on the meta device that are stored."""
        state, live = self._collect()
        memory: dict[int, torch.Tensor] = {}
        for name, value in list(state.items()):
            entry = stored.get(name)
            if name.rpartition(".")[2] == _EXTRA_STATE:
                state[name] = _extra_template(name, value, stored)
            elif isinstance(value, torch.Tensor) and torch_private.is_on_meta(value) and _fits(value, entry):
                owner = live.get(name, value)
                if id(owner) not in memory:
                    memory[id(owner)] = zeros_like_part(value, device=self._device_for(value, live))
                state[name] = memory[id(owner)]
        add_empty(state, {key: value for key, value in StoredValues.empty_of(stored).items() if _is_extra(value)})
        return state

    def left_out(self, stored: Mapping[str, StoredValue]) -> dict[str, str]:  # noqa: ARG002 - part of the protocol
        """Nothing: every name of the model's checkpoint is asked for, or is a mismatch."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Take over a filled template, or a state of another model of the same names.

        Names that are not given are left as they are, with a warning.

        Raises:
            KeyMismatchError: A name that no part has, or a shape that does not fit. For a name, nothing was changed.
        """
        own = [(part, _read(part)) for part in self.parts]
        names = [ModuleNames.of(part) for part, _ in own]
        known = {each.clean(key) for each, (_, state) in zip(names, own, strict=True) for key in state}
        unknown = [name for name in state_dict if name not in known]
        if unknown:
            raise KeyMismatchError(
                f"loading a model: it has no {list_names(unknown)}; nothing was changed: give it the names that its "
                "state_dict() has",
                unexpected=unknown,
            )
        for (part, state), each in zip(own, names, strict=True):
            _load_part(part, state, each, state_dict)
        absent = [name for name in known if name not in state_dict]
        if absent:
            _logger.warning("a model was given no value for %s: left as it is", list_names(sorted(absent)))
        bare = [
            name
            for part in self.parts
            for name, tensor in _live_tensors(ModuleNames.of(part), unsaved=True).items()
            if torch_private.is_on_meta(tensor)
        ]
        if bare:
            _logger.warning("still on the meta device: %s: it was not loaded, so give it values", list_names(bare))

    def _collect(self) -> tuple[dict[str, object], dict[str, torch.Tensor]]:
        """The merged state, and the live parameters and buffers, by name."""
        state: dict[str, object] = {}
        live: dict[str, torch.Tensor] = {}
        for part in self.parts:
            own = _read(part)  # before the names: a sharded module gathers and shards its parameters in turns
            names = ModuleNames.of(part)
            tensors = {} if torch_private.has_flat_parameters(part) else _live_tensors(names)
            for key, value in own.items():
                name = names.clean(key)
                if name in state:
                    _check_shared(name, state[name], value, live.get(name), tensors.get(name))
                    continue
                state[name] = value
            for name, tensor in tensors.items():
                live.setdefault(name, tensor)
        return state, live

    def _device_for(self, tensor: torch.Tensor, live: Mapping[str, torch.Tensor]) -> torch.device | None:
        if self._device is not None or torch_private.has_shards(tensor):
            return self._device
        return home_device(live.values())


def _fits(tensor: torch.Tensor, entry: StoredValue | None) -> bool:
    return entry is not None and entry.shape == tuple(tensor.shape)


def _live_tensors(names: ModuleNames, *, unsaved: bool = False) -> dict[str, torch.Tensor]:
    rest = names.unsaved_buffers if unsaved else {}
    return dict(chain(names.parameters.items(), names.buffers.items(), rest.items()))


def _check_shared(
    name: str, first: object, second: object, first_live: torch.Tensor | None, second_live: torch.Tensor | None
) -> None:
    """Let two parts have a name in common when it is one tensor, or a buffer that both hold alike.

    Raises:
        ConfigError: It is neither.
    """
    if first is second or (first_live is not None and first_live is second_live):
        return
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        if is_same_memory(first, second):
            return
        if not isinstance(first_live, nn.Parameter) and has_same_bits(first, second):
            return
    raise ConfigError(
        f"two parts of the model have the name {name!r} for different tensors, of which a checkpoint can hold one: "
        "name the parts as they are named in the whole model"
    )


def _is_extra(value: StoredValue) -> bool:
    """Whether it stands in the extra state of a module."""
    return str(value.path[0]).rpartition(".")[2] == _EXTRA_STATE


def _extra_template(name: str, value: object, stored: Mapping[str, StoredValue]) -> object:
    """What stands for an extra state, which the module makes up anew: of the kind that is stored."""
    entry = stored.get(name)
    if entry is None:
        nested = build_below(stored, name, value)
        return value if nested is None else nested
    if entry.is_tensor:
        return placeholder(entry)
    return None if isinstance(value, (torch.Tensor, Mapping, list)) else value


def _read(part: nn.Module) -> dict[str, object]:
    return read_flat_model(part) if torch_private.has_flat_parameters(part) else part.state_dict()


def _load_part(
    part: nn.Module, own: Mapping[str, object], names: ModuleNames, state_dict: Mapping[str, object]
) -> None:
    if torch_private.has_flat_parameters(part):
        load_flat_model(part, {key: state_dict[key] for key in own if key in state_dict})
        return
    tensors = _live_tensors(names)
    given: dict[str, object] = {}
    for key in own:
        name = names.clean(key)
        if name not in state_dict:
            continue
        value, live = state_dict[name], tensors.get(name)
        if isinstance(value, torch.Tensor) and live is not None:
            if torch_private.is_on_meta(value):
                continue
            if torch_private.is_on_meta(live) and not adopt_memory(live, value):
                live = _replace(part, live, value)
            if is_same_memory(live, value):
                value = live  # copying a tensor to itself is nothing
        given[key] = value
    try:
        result = part.load_state_dict(given, strict=False)
    except RuntimeError as error:
        raise KeyMismatchError(f"loading a model: {error}") from error
    if result.unexpected_keys:
        _logger.debug("%s takes no %s, which it saves", type(part).__name__, list_names(result.unexpected_keys))


def _replace(part: nn.Module, old: torch.Tensor, filled: torch.Tensor) -> torch.Tensor:
    """Put a tensor in the place of one that something holds on to, wherever the modules have it."""
    new = filled.detach()
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, requires_grad=old.requires_grad)
    for module in part.modules():
        owned = chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
        for name in [name for name, tensor in owned if tensor is old]:
            setattr(module, name, new)
    return new


def _describe(value: object) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        kinds = {type(item).__name__ for item in value if not isinstance(item, nn.Module)}
        return f"a {type(value).__name__} with {', '.join(sorted(kinds)) or 'nothing in it'}"
    return f"a {type(value).__name__}"
