"""The names of a model's tensors, without the prefixes of its wrappers.

Problem: ``torch.compile``, DDP and activation checkpointing each put a module around another, and with it a prefix
(``_orig_mod.``, ``module.``, ``_checkpoint_wrapped_module.``) into every name. A checkpoint of a wrapped model then
does not load into a bare one. Replacing text in names would also rename a user's own submodule called ``module``.

Way taken: the module tree is walked once and each wrapper is known by its class. The map goes both ways, by the longest
prefix that is a module, so names that a state dict hook makes up keep what follows their module's name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from dcpfs import torch_private

__all__ = ["ModuleNames"]


@dataclass(slots=True)
class ModuleNames:
    """The names of one module tree at this moment.

    Attributes:
        parameters: Clean name to parameter, tied ones under each of their names, in the order of the modules.
        buffers: Clean name to persistent buffer.
        unsaved_buffers: Clean name to buffer that is in no state dict.
    """

    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    unsaved_buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    _prefixes: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, module: nn.Module) -> ModuleNames:
        """Walk a module tree."""
        names = cls()
        for state_prefix, prefix, child in _walk(module, "", ""):
            names._prefixes[state_prefix] = prefix
            for name, parameter in child.named_parameters(recurse=False, remove_duplicate=False):
                names.parameters[prefix + name] = parameter
            unsaved = child._non_persistent_buffers_set
            for name, buffer in child.named_buffers(recurse=False, remove_duplicate=False):
                (names.unsaved_buffers if name in unsaved else names.buffers)[prefix + name] = buffer
        return names

    def clean(self, state_key: str) -> str:
        """The clean name of a key of the module's own ``state_dict``."""
        head, dot, _ = state_key.rpartition(".")
        while dot:
            prefix = self._prefixes.get(f"{head}.")
            if prefix is not None:
                return prefix + state_key[len(head) + 1 :]
            head, dot, _ = head.rpartition(".")
        return self._prefixes[""] + state_key


def _walk(module: nn.Module, state_prefix: str, prefix: str) -> Iterator[tuple[str, str, nn.Module]]:
    """Every module, those reached on several ways once for each: prefix in its state dict, clean prefix."""
    yield state_prefix, prefix, module
    wrapped, hides_itself = torch_private.wrapped_child(module)
    for name, child in module._modules.items():
        if child is None:
            continue
        if name == wrapped:
            yield from _walk(child, state_prefix if hides_itself else f"{state_prefix}{name}.", prefix)
        else:
            yield from _walk(child, f"{state_prefix}{name}.", f"{prefix}{name}.")
