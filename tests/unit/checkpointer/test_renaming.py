"""Which entry of a checkpoint goes where."""

from __future__ import annotations

import pytest

from dcpfs.checkpointer.renaming import FqnNaming, RenameRules, Renaming, find_optimizer_prefixes, optimizer_fqns
from dcpfs.errors import ConfigError, KeyMismatchError

_MODEL = ["net.a.weight", "net.b.weight", "head.weight"]
_STRIPPED = {"a.weight": "net.a.weight", "head.weight": "head.weight"}


@pytest.mark.parametrize(
    ("rename", "stored", "wanted", "expected"),
    [
        (None, ["a", "b"], ["a", "c"], {"a": "a"}),
        ({r"^net\.": ""}, _MODEL, list(_STRIPPED), _STRIPPED),
        ({r"^": "net."}, ["a"], ["net.a"], {"net.a": "a"}),
        ({r"(\d)\.w": r"\1.weight"}, ["l.1.w"], ["l.1.weight"], {"l.1.weight": "l.1.w"}),
        # The other direction: rules of tools that rename what the state asks for.
        ({r"^net\.": "net_ema."}, ["net.a", "net_ema.a"], ["net.a"], {"net.a": "net_ema.a"}),
        ({r"^new\.": "old."}, ["old.a"], ["new.a"], {"new.a": "old.a"}),
        # One rule after another.
        ({r"^a\.": "b.", r"^b\.": "c."}, ["a.x"], ["c.x"], {"c.x": "a.x"}),
        ({r"^net\.": "unused.", r"^net_ema\.": "net."}, ["net.a", "net_ema.a"], ["net.a"], {"net.a": "net_ema.a"}),
        # A swap.
        (lambda name: {"a": "b", "b": "a"}.get(name, name), ["a", "b"], ["a", "b"], {"a": "b", "b": "a"}),
        (str.upper, ["a"], ["A"], {"A": "a"}),
    ],
)
def test_places(rename: RenameRules | None, stored: list[str], wanted: list[str], expected: dict[str, str]) -> None:
    assert Renaming(rename).sources(stored).place(wanted).sources == expected


def test_in_optimizer_keys_the_parameter_is_renamed() -> None:
    stored = ["state.net.w.exp_avg", "state.net.w.step", "param_groups.net.w.lr", "state.net.b.exp_avg"]
    names = Renaming({r"^net\.": "body.", r"w$": "weight"}, skip=[r"\bb$"]).sources(stored, FqnNaming.OPTIMIZER)
    placed = names.place(["state.body.weight.exp_avg", "param_groups.body.weight.lr", "state.body.b.exp_avg"])
    assert placed.sources == {
        "state.body.weight.exp_avg": "state.net.w.exp_avg",
        "param_groups.body.weight.lr": "param_groups.net.w.lr",
    }
    assert placed.skipped_wanted == ("state.body.b.exp_avg",)
    assert placed.skipped_stored == ("state.net.b.exp_avg",)
    assert placed.fqns == {"net.w": "body.weight"}
    assert optimizer_fqns(stored) == ["net.w", "net.b"]


def test_what_the_model_placed_leads_the_optimizer() -> None:
    rules = Renaming({r"^new\.": "old."})
    fqns = rules.sources(["old.w"]).place(["new.w"]).fqns
    assert fqns == {"old.w": "new.w"}
    names = rules.sources(["state.old.w.exp_avg"], FqnNaming.OPTIMIZER, known=fqns)
    assert names.by_new == {"state.new.w.exp_avg": ["state.old.w.exp_avg"]}


def test_skipped_names_are_nobodys_business() -> None:
    placed = Renaming(skip=[r"head"]).sources(["a", "head.old"]).place(["a", "head.new"])
    assert placed.sources == {"a": "a"}
    assert placed.skipped_wanted == ("head.new",)
    assert placed.skipped_stored == ("head.old",)
    # By the checkpoint's name alone, and where the rules would lead to it by the way back.
    placed = Renaming({"^x": "y"}, skip=["^y"]).sources(["y"]).place(["x"])
    assert (placed.sources, placed.skipped_wanted) == ({}, ("x",))


def test_two_sources_for_one_place_are_an_error_that_names_both() -> None:
    with pytest.raises(KeyMismatchError, match=r"'net\.a' and 'ema\.a'") as caught:
        Renaming({r"^ema\.": "net."}).sources(["net.a", "ema.a"]).place(["net.a"])
    assert list(caught.value.mismatched) == ["net.a"]
    # Where nobody asks, nobody is bothered.
    assert Renaming({r"^ema\.": "net."}).sources(["net.a", "ema.a"]).place(["other"]).sources == {}


@pytest.mark.parametrize(
    ("rename", "skip"),
    [
        ({"(": "x"}, ()),
        ({"a": r"\1"}, ()),
        ({"a": 3}, ()),
        (None, ["["]),
        (None, "head"),
        (None, [3]),
        (["a"], ()),
    ],
)
def test_wrong_rules_are_refused_at_once(rename: object, skip: object) -> None:
    with pytest.raises(ConfigError):
        Renaming(rename, skip)  # type: ignore[arg-type]  # that is what is refused


def test_a_function_that_gives_no_text_is_an_error() -> None:
    with pytest.raises(ConfigError, match="skip"):
        Renaming(lambda name: None).sources(["a"])  # type: ignore[arg-type]  # that is what is refused


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["state.w.exp_avg", "param_groups.w.lr"], ("",)),
        (["model.w", "optim.state.w.exp_avg", "optim.param_groups.w.lr"], ("optim.",)),
        (["state.w"], ()),
        (["model.state.w", "model.param_groups.lr", "model.other"], ()),
        ([], ()),
    ],
)
def test_optimizer_state_is_known_by_its_names(names: list[str], expected: tuple[str, ...]) -> None:
    assert find_optimizer_prefixes(names) == expected
