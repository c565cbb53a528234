"""Who is called with what, and what becomes of an exception."""

from __future__ import annotations

import functools
import logging
from typing import Any
from unittest.mock import MagicMock

import pytest
from torch import nn

from dcpfs.checkpointer.callbacks import CheckpointCallback, CheckpointCallbacks
from dcpfs.errors import ConfigError

MODEL = nn.Linear(1, 1)
CALLS: dict[str, dict[str, Any]] = {
    "on_save_checkpoint_start": {"model_parts": [MODEL], "iteration": 5},
    "on_save_checkpoint": {"model_parts": [MODEL], "state_dict": {"a": 1}},
    "on_save_checkpoint_success": {"iteration": 5, "elapsed_seconds": 1.5},
    "on_save_checkpoint_end": {"model_parts": [MODEL], "iteration": 5},
    "on_save_checkpoint_error": {"iteration": 5, "error": OSError("disk")},
    "on_load_checkpoint_start": {"model_parts": [MODEL]},
    "on_load_checkpoint": {"model_parts": [MODEL], "state_dict": {"a": 1}},
    "on_load_checkpoint_end": {"model_parts": [MODEL], "iteration": 5, "checkpoint_path": "s3://b/x"},
    "on_phase": {"name": "write", "seconds": 0.5, "bytes": 7},
}


def call_all(callbacks: CheckpointCallbacks) -> None:
    for name, arguments in CALLS.items():
        getattr(callbacks, name)(**arguments)


class Everything:
    """All methods, as the protocol has them."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name not in CALLS:
            return object.__getattribute__(self, name)

        def method(**arguments: object) -> None:
            assert arguments == CALLS[name]
            self.seen.append(name)

        return method


class Reference:
    """As the reference trainer's callbacks are written."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_save_checkpoint_start(self, model: nn.Module, iteration: int = 0) -> None:
        self.seen.append((model, iteration))

    def on_save_checkpoint_success(self, iteration: int = 0, elapsed_time: float = 0) -> None:
        self.seen.append((iteration, elapsed_time))

    def on_save_checkpoint_end(self, model: nn.Module | None, iteration: int = 0) -> None:
        self.seen.append((model, iteration))

    def on_load_checkpoint_start(self, model: nn.Module) -> None:
        self.seen.append(model)

    def on_load_checkpoint(self, model: nn.Module, state_dict: dict[str, Any]) -> None:
        state_dict["seen"] = True
        self.seen.append(model)

    def on_load_checkpoint_end(self, model: nn.Module, iteration: int = 0, checkpoint_path: str | None = None) -> None:
        self.seen.append((model, iteration, checkpoint_path))


def test_every_method_gets_what_the_protocol_says() -> None:
    one = Everything()
    call_all(CheckpointCallbacks([one, one]))
    assert one.seen == [name for name in CALLS for _ in range(2)]


def test_a_callback_needs_one_method_alone_and_of_it_the_parameters_that_it_wants() -> None:
    class OnlyPhases:
        def on_phase(self, seconds: float) -> None:
            seen.append(seconds)

    class Telemetry(Everything):
        pass

    seen: list[object] = []
    whole: CheckpointCallback = Telemetry()  # a type checker holds it against the protocol
    call_all(CheckpointCallbacks([OnlyPhases(), whole]))
    assert seen == [0.5]


def test_the_reference_trainers_callbacks_are_called_as_they_are_written() -> None:
    one = Reference()
    state: dict[str, object] = {}
    callbacks = CheckpointCallbacks(one)
    call_all(callbacks)
    callbacks.on_load_checkpoint([MODEL], state)
    assert one.seen[:3] == [(MODEL, 5), (5, 1.5), (MODEL, 5)]
    assert one.seen[3:] == [MODEL, MODEL, (MODEL, 5, "s3://b/x"), MODEL]
    assert state == {"seen": True}
    callbacks.on_save_checkpoint_start([MODEL, MODEL], 6)
    assert one.seen[-1] == ([MODEL, MODEL], 6)


def test_a_group_as_the_reference_has_it_is_its_members() -> None:
    class Unrelated:
        def on_training_step_end(self) -> None: ...

    class Group:
        def __init__(self, *members: object) -> None:
            self._callbacks = list(members)

        def __getattr__(self, name: str) -> Any:
            def call(*args: object, **kwargs: object) -> None:
                for member in self._callbacks:
                    getattr(member, name)(*args, **kwargs)  # fails for members without it

            return call

    one = Reference()
    call_all(CheckpointCallbacks(Group(one, Unrelated())))
    assert len(one.seen) == 6


@pytest.mark.parametrize(
    ("method", "wanted"),
    [
        (lambda: None, ()),
        (lambda iteration: (iteration,), (5,)),
        (lambda elapsed_seconds, iteration: (elapsed_seconds, iteration), (1.5, 5)),
        (lambda a, b: (a, b), (5, 1.5)),
        (lambda a: (a,), (5,)),
        (lambda a, /, b=3: (a, b), (5, 1.5)),
        (lambda *args: args, (5, 1.5)),
        (lambda **kwargs: tuple(kwargs.items()), (("iteration", 5), ("elapsed_seconds", 1.5))),
        (lambda iteration, *args, **kwargs: (iteration, args, kwargs), (5, (), {})),
        (lambda model=None, iteration=0, path="": (model, iteration, path), (None, 5, "")),
        (lambda *, elapsed_time: (elapsed_time,), (1.5,)),
        (MagicMock(return_value=None), None),
    ],
)
def test_a_method_gets_the_parameters_it_names_or_else_all_in_order(method: Any, wanted: object) -> None:
    got: list[object] = []

    class One:
        pass

    one: Any = One()
    one.on_save_checkpoint_success = method
    if isinstance(method, MagicMock):
        CheckpointCallbacks([one]).on_save_checkpoint_success(5, 1.5)
        method.assert_called_once_with(5, 1.5)
        return

    @functools.wraps(method)
    def keep(*args: Any, **kwargs: Any) -> None:
        got.append(method(*args, **kwargs) or ())

    one.on_save_checkpoint_success = keep
    CheckpointCallbacks([one]).on_save_checkpoint_success(5, 1.5)
    assert got == [wanted]


class Typo:
    def on_save_checkpoint_sucess(self) -> None: ...


class Lightning:
    def on_save_checkpoint(self, trainer: object, module: object, checkpoint: object) -> None: ...


class KeywordOnly:
    def on_phase(self, *, watts: float) -> None: ...


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([object()], "a object as a callback: it has none of"),
        ([Typo()], "did you mean on_save_checkpoint_success"),
        ([Lightning()], "own parameters don't fit"),
        ([KeywordOnly()], "own parameters don't fit"),
        ([Reference], "an instance"),
        (3, "a int as a callback"),
        ("abc", "a list of objects"),
        ({"a": 1}, "a list of objects"),
        ([lambda: None], "a function as a callback"),
    ],
)
def test_what_would_never_be_called_is_refused_at_construction(given: object, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        CheckpointCallbacks(given)


def test_nothing_and_a_misspelt_method_beside_a_good_one(caplog: pytest.LogCaptureFixture) -> None:
    nobody: tuple[object, ...] = ((), None, [])
    for callbacks in nobody:
        call_all(CheckpointCallbacks(callbacks))

    class Both(Reference, Typo):
        pass

    CheckpointCallbacks([Both()])
    assert "on_save_checkpoint_sucess will never be called" in caplog.text


class Failing:
    def __init__(self, text: str, seen: list[str]) -> None:
        self.text = text
        self.seen = seen

    def __getattr__(self, name: str) -> Any:
        if name not in CALLS:
            raise AttributeError(name)

        def fail(*_: object) -> None:
            self.seen.append(self.text)
            raise ValueError(self.text)

        return fail


@pytest.mark.parametrize("name", CALLS)
def test_an_exception_ends_what_has_not_begun_and_hides_nothing_else(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[str] = []
    callbacks = CheckpointCallbacks([Failing("first", seen), Failing("second", seen)])
    raised = ""
    with caplog.at_level(logging.ERROR):
        try:
            getattr(callbacks, name)(**CALLS[name])
        except ValueError as error:
            raised = str(error)
    told = name.endswith(("_success", "_end", "_error")) or name == "on_phase"
    assert seen == (["first", "second"] if told else ["first"])
    assert raised == ("" if name in ("on_save_checkpoint_error", "on_phase") else "first")
    own = [record for record in caplog.records if record.name == "dcpfs.checkpointer.callbacks"]
    logged = [str(record.exc_info and record.exc_info[1]) for record in own]
    assert logged == (["second"] if raised and told else [] if raised else ["first", "second"])
