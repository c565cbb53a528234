"""Which keys a run asks for."""

from __future__ import annotations

import pytest

from dcpfs.checkpointer.layout import KEYS
from dcpfs.checkpointer.load_step import Strictness, choose_strictness
from dcpfs.checkpointer.resume import Origin, ResumeRules, choose_keys

_ALL = ("model", "optim", "scheduler", "trainer", "dataloader")


@pytest.mark.parametrize(
    ("origin", "rules", "held", "expected"),
    [
        (Origin.SCRATCH, ResumeRules(load_training_state=True), (), ()),
        (Origin.RESUME, ResumeRules(), (), _ALL),
        (Origin.RESUME, ResumeRules(only_load_scheduler_state=True), ("model",), _ALL),
        (Origin.RESUME, ResumeRules(extra_keys=("ema",)), (), (*_ALL, "ema")),
        (Origin.RESUME, ResumeRules(), ("optim", "ema"), (*_ALL, "ema")),
        (Origin.RESUME, ResumeRules(keys_not_to_resume=("optim", "ema")), ("ema",), _ALL[:1] + _ALL[2:]),
        (Origin.WARM_START, ResumeRules(), _ALL, ("model",)),
        (Origin.WARM_START, ResumeRules(only_load_scheduler_state=True), _ALL, ("model", "scheduler")),
        (Origin.WARM_START, ResumeRules(load_training_state=True), _ALL, _ALL),
        (Origin.WARM_START, ResumeRules(load_training_state=True, only_load_scheduler_state=True), (), _ALL),
        (Origin.WARM_START, ResumeRules(keys_not_to_resume=("model",)), _ALL, ()),
    ],
)
def test_keys(origin: Origin, rules: ResumeRules, held: tuple[str, ...], expected: tuple[str, ...]) -> None:
    assert choose_keys(origin, rules, held) == expected


def test_the_five_keys_are_those_of_the_reference() -> None:
    assert KEYS == _ALL


def test_strictness_of_keys() -> None:
    assert choose_strictness(["model", "trainer"], strict=True) == {
        "model": Strictness.EXACT,
        "trainer": Strictness.REQUIRED,
    }
    assert set(choose_strictness(["model", "trainer"], strict=False).values()) == {Strictness.LOOSE}
    assert choose_strictness(["model", "optim"], strict={"model": False}) == {
        "model": Strictness.LOOSE,
        "optim": Strictness.EXACT,
    }
