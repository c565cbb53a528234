"""What others are told of a save or load, and how they are called.

Problem: a callback with a misspelt method is never called, and nobody notices; one whose parameters differ a little
fails at the first save, hours later. Trainers differ in what they call the parameters: ``model`` or ``model_parts``,
``elapsed_time`` or ``elapsed_seconds``, some left out.

Way taken: any object with at least one of the methods below. Each method is looked up, and the call matched with its
parameters, once, at construction; what could not be called is refused there. A parameter that bears a known name gets
that value; a method that names its parameters otherwise gets them in the order in which the protocol has them. Two
kinds of call:

- Those before anything is done (``..._start``, ``on_save_checkpoint``, ``on_load_checkpoint``): an exception ends the
  save or load, and the callbacks after it are not called.
- Those that tell what has been done: all callbacks are told, then the first exception is raised.
  `on_save_checkpoint_error` and `on_phase` never raise: they must hide no other error, and a figure is worth no save.
"""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Protocol

from dcpfs.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["CheckpointCallback", "CheckpointCallbacks"]

_logger = logging.getLogger(__name__)

_METHODS: Mapping[str, tuple[str, ...]] = {
    "on_save_checkpoint_start": ("model_parts", "iteration"),
    "on_save_checkpoint": ("model_parts", "state_dict"),
    "on_save_checkpoint_success": ("iteration", "elapsed_seconds"),
    "on_save_checkpoint_end": ("model_parts", "iteration"),
    "on_save_checkpoint_error": ("iteration", "error"),
    "on_load_checkpoint_start": ("model_parts",),
    "on_load_checkpoint": ("model_parts", "state_dict"),
    "on_load_checkpoint_end": ("model_parts", "iteration", "checkpoint_path"),
    "on_phase": ("name", "seconds", "bytes"),
}
_ALIASES = {"model": "model_parts", "elapsed_time": "elapsed_seconds", "path": "checkpoint_path"}
_Call = Callable[[Mapping[str, object]], None]


class CheckpointCallback(Protocol):
    """What a callback may have; it needs only one of these methods, and of their parameters only those it wants.

    All are called on every rank, in the thread that calls `save`, `load`, `wait` or `close`. ``model_parts`` is the
    list of modules that was given to `save` or `load`, empty for `save_state` and `load_state`; a parameter called
    ``model`` gets the module itself when there is exactly one.
    """

    def on_save_checkpoint_start(self, model_parts: Sequence[nn.Module], iteration: int) -> None:
        """Before anything is read from the state."""

    def on_save_checkpoint(self, model_parts: Sequence[nn.Module], state_dict: MutableMapping[str, object]) -> None:
        """The state by key, about to be saved; keys may be added, on all ranks alike."""

    def on_save_checkpoint_success(self, iteration: int, elapsed_seconds: float) -> None:
        """The step is committed; of a save in the background, told by the collective call that learns of it."""

    def on_save_checkpoint_end(self, model_parts: Sequence[nn.Module], iteration: int) -> None:
        """`save` is about to return; in the background the save may still be at work."""

    def on_save_checkpoint_error(self, iteration: int, error: BaseException) -> None:
        """The save failed, and nothing was published. What this raises is logged."""

    def on_load_checkpoint_start(self, model_parts: Sequence[nn.Module]) -> None:
        """Before a step is looked for."""

    def on_load_checkpoint(self, model_parts: Sequence[nn.Module], state_dict: MutableMapping[str, object]) -> None:
        """What was loaded: rank files and extra keys that the caller passed no part for are in here alone."""

    def on_load_checkpoint_end(
        self, model_parts: Sequence[nn.Module], iteration: int, checkpoint_path: str | None
    ) -> None:
        """Loaded, or nothing to load: then ``checkpoint_path``, a redacted URL, is None."""

    def on_phase(self, name: str, seconds: float, bytes: int) -> None:  # noqa: A002 - the name is the contract
        """A phase of a save or load ended on this rank; it moved that many bytes. What this raises is logged."""


class CheckpointCallbacks:
    """The callbacks of one checkpointer. Each method calls those that have it, in the order given.

    Args:
        callbacks: Objects with any of the methods of `CheckpointCallback`; one alone; or a group that keeps its members
            in ``_callbacks``, as the reference trainer has it.

    Raises:
        ConfigError: One has none of the methods, or a method that could not be called with what it would be told.
    """

    def __init__(self, callbacks: object = ()) -> None:
        self._calls: dict[str, list[tuple[str, _Call]]] = {name: [] for name in _METHODS}
        for callback in _members(callbacks):
            self._add(callback)

    def listens(self, method: str) -> bool:
        """Whether any callback has a method of `CheckpointCallback`."""
        return bool(self._calls[method])

    def on_save_checkpoint_start(self, model_parts: Sequence[nn.Module], iteration: int) -> None:
        """See `CheckpointCallback`. An exception of one ends the save."""
        self._ask("on_save_checkpoint_start", model_parts=model_parts, iteration=iteration)

    def on_save_checkpoint(self, model_parts: Sequence[nn.Module], state_dict: MutableMapping[str, object]) -> None:
        """See `CheckpointCallback`. An exception of one ends the save."""
        self._ask("on_save_checkpoint", model_parts=model_parts, state_dict=state_dict)

    def on_save_checkpoint_success(self, iteration: int, elapsed_seconds: float) -> None:
        """See `CheckpointCallback`. The step is committed: once all are told, the first exception is raised."""
        self._tell("on_save_checkpoint_success", iteration=iteration, elapsed_seconds=elapsed_seconds)

    def on_save_checkpoint_end(self, model_parts: Sequence[nn.Module], iteration: int) -> None:
        """See `CheckpointCallback`. Raises the first exception once all are told."""
        self._tell("on_save_checkpoint_end", model_parts=model_parts, iteration=iteration)

    def on_save_checkpoint_error(self, iteration: int, error: BaseException) -> None:
        """See `CheckpointCallback`. Never raises."""
        self._report("on_save_checkpoint_error", iteration=iteration, error=error)

    def on_load_checkpoint_start(self, model_parts: Sequence[nn.Module]) -> None:
        """See `CheckpointCallback`. An exception of one ends the load."""
        self._ask("on_load_checkpoint_start", model_parts=model_parts)

    def on_load_checkpoint(self, model_parts: Sequence[nn.Module], state_dict: MutableMapping[str, object]) -> None:
        """See `CheckpointCallback`. An exception of one ends the load."""
        self._ask("on_load_checkpoint", model_parts=model_parts, state_dict=state_dict)

    def on_load_checkpoint_end(
        self, model_parts: Sequence[nn.Module], iteration: int, checkpoint_path: str | None
    ) -> None:
        """See `CheckpointCallback`. Raises the first exception once all are told."""
        self._tell(
            "on_load_checkpoint_end", model_parts=model_parts, iteration=iteration, checkpoint_path=checkpoint_path
        )

    def on_phase(self, name: str, seconds: float, bytes: int) -> None:  # noqa: A002 - the name is the contract
        """See `CheckpointCallback`. Never raises."""
        self._report("on_phase", name=name, seconds=seconds, bytes=bytes)

    def _add(self, callback: object) -> None:
        if isinstance(callback, type):
            raise ConfigError(f"can't use the class {callback.__name__} as a callback: give an instance of it")
        found = 0
        for name, arguments in _METHODS.items():
            method = getattr(callback, name, None)
            if callable(method):
                self._calls[name].append((type(callback).__name__, _bind(callback, name, method, arguments)))
                found += 1
        strange = sorted(set(_hooks_of(callback)) - set(_METHODS))
        if not found:
            close = difflib.get_close_matches(strange[0], _METHODS, n=1) if strange else []
            hint = f"; it has {strange[0]}, did you mean {close[0]}?" if close else ""
            raise ConfigError(
                f"can't use a {type(callback).__name__} as a callback: it has none of {', '.join(_METHODS)}{hint}"
            )
        for name in strange:
            close = difflib.get_close_matches(name, _METHODS, n=1)
            _logger.warning(
                "%s.%s will never be called: no such moment is known%s",
                type(callback).__name__,
                name,
                f"; did you mean {close[0]}?" if close else "",
            )

    def _ask(self, method: str, **arguments: object) -> None:
        for _, call in self._calls[method]:
            call(arguments)

    def _tell(self, method: str, **arguments: object) -> None:
        failures = [(owner, _attempt(call, arguments)) for owner, call in self._calls[method]]
        errors = [(owner, error) for owner, error in failures if error is not None]
        for owner, error in errors[1:]:
            _logger.error("%s.%s failed as well", owner, method, exc_info=error)
        if errors:
            raise errors[0][1]

    def _report(self, method: str, **arguments: object) -> None:
        for owner, call in self._calls[method]:
            error = _attempt(call, arguments)
            if error is not None:
                _logger.error("%s.%s failed; the save or load goes on", owner, method, exc_info=error)


def _attempt(call: _Call, arguments: Mapping[str, object]) -> Exception | None:
    try:
        call(arguments)
    except Exception as error:  # noqa: BLE001 - handed to the caller, which raises or logs it
        return error
    return None


def _members(callbacks: object) -> Iterable[object]:
    if callbacks is None:
        return ()
    if isinstance(callbacks, (str, bytes, Mapping)):
        raise ConfigError(f"can't use a {type(callbacks).__name__} as callbacks: give a list of objects")
    group = getattr(callbacks, "__dict__", {}).get("_callbacks")
    if isinstance(group, (list, tuple)):
        # A group answers to any name and then fails for members without it; and many have nothing to do with saving.
        return [member for member in group if any(callable(getattr(member, name, None)) for name in _METHODS)]
    if isinstance(callbacks, Iterable) and not any(callable(getattr(callbacks, name, None)) for name in _METHODS):
        return list(callbacks)
    return (callbacks,)


def _hooks_of(callback: object) -> list[str]:
    return [name for name in dir(callback) if name.startswith(("on_save_checkpoint", "on_load_checkpoint"))]


def _bind(callback: object, name: str, method: Callable[..., object], arguments: tuple[str, ...]) -> _Call:
    """How to call the method, decided from its parameters.

    Raises:
        ConfigError: It wants more than it would be told.
    """
    try:
        parameters = list(inspect.signature(method).parameters.values())
    except (TypeError, ValueError):  # built in: it says nothing of its parameters
        return lambda values: _ignore(method(*(values[each] for each in arguments)))
    by_name = {
        p.name: _ALIASES.get(p.name, p.name) for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    known = {parameter: source for parameter, source in by_name.items() if source in arguments}
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    slots = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_rest = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    takes_names = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if set(required) <= set(known) and (known or not (slots or takes_rest)):
        names = {**({each: each for each in arguments} if takes_names and not known else {}), **known}
        return lambda values: _ignore(method(**{p: _value(p, values[source]) for p, source in names.items()}))
    given = arguments if takes_rest else arguments[: len(slots)]
    try:
        inspect.signature(method).bind(*given)
    except TypeError as error:
        raise ConfigError(
            f"can't use a {type(callback).__name__} as a callback: {name} is called with ({', '.join(arguments)}), and "
            f"its own parameters don't fit: {error}"
        ) from error
    return lambda values: _ignore(method(*(values[each] for each in given)))


def _value(parameter: str, value: object) -> object:
    if parameter == "model" and isinstance(value, (list, tuple)) and len(value) == 1:
        return value[0]
    return value


def _ignore(_: object) -> None:
    """What a callback returns is nobody's business."""
