"""The states of a rank's random number generators, as one value.

Problem: a resumed run repeats the data order and the dropout masks of its start, or mixes streams: states that are
stored under the same key on all ranks are taken for replicas, and one rank's comes back everywhere (case 8).

Way taken: the generators of Python, numpy, torch and the accelerator are read into one value of plain numbers and bytes
tensors, which is saved under a name that only this rank has. It needs no numpy to be read. A generator that the process
which loads does not have is passed over, and said.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from typing import Protocol, cast

import torch

from dcpfs.errors import CorruptCheckpointError

__all__ = ["capture_random_state", "restore_random_state"]

_logger = logging.getLogger(__name__)

_CURRENT = "current"


class _DeviceModule(Protocol):
    """What torch.cuda, torch.xpu and others have in common."""

    def is_initialized(self) -> bool: ...

    def device_count(self) -> int: ...

    def get_rng_state(self, device: int | str = ...) -> torch.Tensor: ...

    def set_rng_state(self, new_state: torch.Tensor, device: int | str = ...) -> None: ...


def capture_random_state() -> tuple[tuple[str, object], ...]:
    """Read all generators of this process: name to state, as a tuple, which a checkpoint keeps as one value."""
    states: list[tuple[str, object]] = [("python", random.getstate())]
    numpy_state = _capture_numpy()
    if numpy_state is not None:
        states.append(("numpy", numpy_state))
    states.append(("torch", torch.get_rng_state()))
    device = _device_module()
    if device is not None:
        kind, module = device
        own: list[tuple[str, object]] = [(_CURRENT, module.get_rng_state())]
        own += [(str(index), module.get_rng_state(index)) for index in _indexes(module)]
        states.append((kind, tuple(own)))
    return tuple(states)


def restore_random_state(state: object) -> None:
    """Put all generators of this process back to a captured state.

    Raises:
        CorruptCheckpointError: It is none. Some generators may have been set.
    """
    try:
        named = dict(cast("Sequence[tuple[str, object]]", state))
        for name, value in named.items():
            if name == "python":
                version, words, gauss = cast("tuple[int, Sequence[int], float | None]", value)
                random.setstate((version, tuple(words), gauss))
            elif name == "numpy":
                _restore_numpy(value)
            elif name == "torch":
                torch.set_rng_state(cast("torch.Tensor", value))
            else:
                _restore_device(name, dict(cast("Sequence[tuple[str, torch.Tensor]]", value)))
    except (TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        raise CorruptCheckpointError(
            f"restoring the random states: {type(error).__name__}: {error}; load without them, or another step"
        ) from error


def _capture_numpy() -> object:
    try:
        import numpy as np
    except ImportError:
        return None
    return _to_plain(np.random.get_state(legacy=False))


def _to_plain(value: object) -> object:
    """The same without numpy: arrays become lists."""
    if isinstance(value, Mapping):
        return {name: _to_plain(each) for name, each in value.items()}
    tolist = getattr(value, "tolist", None)
    return value if tolist is None else tolist()


def _restore_numpy(state: object) -> None:
    try:
        import numpy as np
    except ImportError:
        _logger.warning("the random state of numpy was saved, and is not restored: numpy is not installed")
        return
    named = dict(cast("Mapping[str, object]", state))
    inner = dict(cast("Mapping[str, object]", named["state"]))
    if "key" in inner:
        inner["key"] = np.asarray(inner["key"], dtype=np.uint32 if named["bit_generator"] == "MT19937" else np.uint64)
    np.random.set_state({**named, "state": inner})


def _device_module() -> tuple[str, _DeviceModule] | None:
    """The accelerator's module, where it is in use."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None:
        return None
    module = cast("_DeviceModule", torch.get_device_module(device))
    if not hasattr(module, "get_rng_state") or not hasattr(module, "device_count"):
        return None
    if hasattr(module, "is_initialized") and not module.is_initialized():
        return None  # nothing was drawn from it, and asking would take memory on the device
    return device.type, module


def _indexes(module: _DeviceModule) -> range:
    """Devices beside the current one, if there are."""
    count = module.device_count()
    return range(count if count > 1 else 0)


def _restore_device(kind: str, states: Mapping[str, torch.Tensor]) -> None:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None or device.type != kind:
        _logger.warning("the random state of %s was saved, and is not restored: there is no such device", kind)
        return
    module = cast("_DeviceModule", torch.get_device_module(device))
    for index in _indexes(module):
        if str(index) in states:
            module.set_rng_state(states[str(index)], index)
    if _CURRENT in states:  # last: the rank may use another of the devices now
        module.set_rng_state(states[_CURRENT])
