"""Two incarnations of a job save one step: in every order, at most one commits, and no mix ever loads."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpfs.checkpointer.layout import step_name
from dcpfs.checkpointer.manifest import Manifest, encode_manifest
from dcpfs.errors import SupersededError
from tests.faults.two_saves import READ_WHOLE, STEP, Objects, Outcome, SharedStore, check_unmixed, run_saves, save_all
from tests.properties.bounds import examples

OLDER = f"{step_name(STEP - 1)}/manifest.json"


def prepared(before: str, *, conditional: bool = True, splits_puts: bool = False) -> Objects:
    """What the saves find: an older step, and in theirs nothing, what a dead save left, or a committed step."""
    objects = Objects(conditional=conditional, splits_puts=splits_puts)
    objects.content[OLDER] = encode_manifest(Manifest("older", STEP - 1, 1, {}))
    step = step_name(STEP)
    if before == "dead":
        objects.content[f"{step}/.writing"] = b"dead\n"
        objects.content[f"{step}/model/__0_0.distcp"] = b"dead data 0"
        objects.content[f"{step}/model/.metadata"] = b"dead metadata"
    elif before == "committed":
        assert save_all(SharedStore(objects), "0").committed
    return objects


def gap_of(requests: Sequence[tuple[str, str]], name: str) -> bool:
    """Whether others made requests between a save's last question and what it deletes or replaces because of it."""
    own = [number for number, (who, _) in enumerate(requests) if who == name]
    for before, after in itertools.pairwise(own):
        request = requests[after][1]
        deletes = request.startswith("delete ") and request.endswith(("manifest.json", ".writing", *READ_WHOLE))
        replaces = request.endswith(READ_WHOLE) and requests[before][1].endswith(("manifest.json", ".writing"))
        if after > before + 1 and (deletes or replaces):
            return True
    return False


def check_end(objects: Objects, outcomes: dict[str, Outcome], requests: Sequence[tuple[str, str]]) -> None:
    loaded = check_unmixed(objects, strictly=False)
    committed = {name for name, outcome in outcomes.items() if outcome.committed}
    lost = [outcome.error for outcome in outcomes.values() if outcome.error is not None]
    assert all(isinstance(error, SupersededError) for error in lost)
    if loaded is not None:
        assert loaded in committed
    elif committed:
        # The one thing that can't be closed without conditional deletes: it costs the step, and mixes nothing.
        assert any(gap_of(requests, name) for name in outcomes)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="dcpfs")


@pytest.mark.parametrize("conditional", [True, False], ids=["conditional puts", "plain puts"])
@pytest.mark.parametrize("before", ["empty", "dead", "committed"])
def test_case_2_an_old_save_that_wakes_up_anywhere_makes_no_mix(before: str, conditional: bool) -> None:
    """A makes some requests, B some, A all the rest, B its rest: at every pair of places."""
    alone = len(run_saves(prepared(before, conditional=conditional), ["A"], [])[1])
    stride = {"empty": 1, "dead": 2, "committed": 5}[before]
    for first, second in itertools.product(range(alone + 1), range(1, alone + 12)):
        if (first + second) % stride:
            continue
        objects = prepared(before, conditional=conditional)
        schedule = ["A"] * first + ["B"] * second + ["A"] * 100
        outcomes, requests = run_saves(objects, ["A", "B"], schedule)
        check_end(objects, outcomes, requests)


@examples(100)
@given(
    st.sampled_from(["empty", "dead", "committed"]),
    st.lists(st.sampled_from("ABC"), max_size=120),
)
def test_three_saves_in_any_order_make_no_mix(before: str, schedule: list[str]) -> None:
    objects = prepared(before)
    outcomes, requests = run_saves(objects, ["A", "B", "C"], schedule, strictly=False)
    check_end(objects, outcomes, requests)


@pytest.mark.parametrize("before", ["empty", "dead"])
def test_where_a_put_looks_before_it_writes_checksums_tell_a_mix(before: str) -> None:
    """Data files have names of their own there too; every load checks what all saves call by one name."""
    alone = len(run_saves(prepared(before, conditional=False, splits_puts=True), ["A"], [])[1])
    for first, second in itertools.product(range(alone + 1), range(1, alone + 12, 2)):
        objects = prepared(before, conditional=False, splits_puts=True)
        run_saves(objects, ["A", "B"], ["A"] * first + ["B"] * second + ["A"] * 100, strictly=False)


def test_one_save_after_the_other_replaces_it() -> None:
    objects = prepared("empty")
    outcomes, _ = run_saves(objects, ["A", "B"], ["A"] * 100)
    assert outcomes["A"].committed
    assert outcomes["B"].committed
    assert check_unmixed(objects) == "B"
    assert {path for path in objects.content if "/model/__" in path} == {
        f"{step_name(STEP)}/model/__{rank}_{outcomes['B'].claim.first_file_number}.distcp"  # type: ignore[union-attr]  # it has one
        for rank in range(2)
    }
