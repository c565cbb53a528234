"""A checkpointer's save fails at each of its requests, before and after it takes effect, and the run goes on.

What `test_crash_points` shows of one save by itself is shown here of the whole: a history, retention, the pointer, the
next save, a resume; in the caller, in a thread and in a process; on files and on a real S3 server.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from dcpfs.storage.location import Location
from dcpfs.testing.faulty import Aftermath, FaultPlan, InjectedError, Moment
from dcpfs.testing.servers import SeaweedServer
from tests.conformance.step_scene import location_on
from tests.faults.crash_life import LARGE_VALUES, Life, armed

MODES = ["disabled", "async", "async_with_pinned_mem"]
COMMITTED = "is complete"
"""What an error says of a step that stands, though its save failed."""


class Scene(enum.Enum):
    """Which save fails."""

    NEXT = "the next step: the oldest one makes room for it"
    AGAIN = "the newest step once more"
    REMAINS = "the next step, of which a dead save has left something"


class Pick(enum.Enum):
    """Which crash points are tried."""

    ALL = "every request, both moments, both aftermaths"
    BY_TURNS = "every request and both moments, the aftermaths by turns"
    FEW = "every third request, moments and aftermaths by turns"
    PARTS = "those of uploads in parts, the aftermaths by turns"
    ALL_PARTS = "those of uploads in parts, both moments, both aftermaths"


Call = tuple[str, str]
"""Verb and name of a mutating call."""


def points(calls: Sequence[Call], pick: Pick) -> Iterator[FaultPlan]:
    """Crash points of a save of such mutating calls."""
    for (mutation, call), moment, aftermath in itertools.product(enumerate(calls, 1), Moment, Aftermath):
        even = (moment is Moment.BEFORE) == (aftermath is Aftermath.DEAD)
        if pick in (Pick.BY_TURNS, Pick.PARTS) and even == mutation % 2:
            continue
        if pick in (Pick.PARTS, Pick.ALL_PARTS) and not is_of_upload(calls, call):
            continue
        if pick is Pick.FEW and (mutation % 3 != 1 or even or (moment is Moment.BEFORE) == (mutation % 2 == 0)):
            continue
        yield FaultPlan(mutation=mutation, moment=moment, aftermath=aftermath)


def is_of_upload(calls: Sequence[Call], call: Call) -> bool:
    """Whether a call is one of those that write an object in several parts."""
    verb, name = call
    return verb in {"write", "commit"} and calls.count(("write", name)) > 1


def leaves_upload(calls: Sequence[Call], plan: FaultPlan) -> bool:
    """Whether a process that dies at a crash point leaves an upload that was neither completed nor aborted."""
    number = plan.mutation or 0
    if plan.aftermath is not Aftermath.DEAD or not is_of_upload(calls, calls[number - 1]):
        return False
    verb, name = calls[number - 1]
    if verb == "commit":
        return plan.moment is Moment.BEFORE
    return plan.moment is Moment.AFTER or ("write", name) in calls[: number - 1]


def begin(life: Life, scene: Scene) -> int:
    """Make what the save of a scene finds. The step that it saves."""
    newest = max(life.versions)
    if scene is Scene.AGAIN:
        return newest
    if scene is Scene.REMAINS:
        assert life.save(newest + 1, 1000, FaultPlan(mutation=9, aftermath=Aftermath.DEAD)) is not None
    return newest + 1


def go_through(life: Life, scene: Scene, pick: Pick) -> int:
    """Let the save of a scene fail at its crash points, one after the other. How many there were."""
    for version in range(1, 4):
        life.save_clean(version, version)
    life.save_clean(begin(life, scene), 4)
    tried = 0
    calls = life.calls()
    for plan in points(calls, pick):
        target, new = begin(life, scene), 5 + 2 * tried
        uploads = life.uploads() if pick in (Pick.PARTS, Pick.ALL_PARTS) else set()
        error = life.save(target, new, plan)
        if pick in (Pick.PARTS, Pick.ALL_PARTS):
            left = life.uploads()
            assert uploads <= left
            assert len(left) == len(uploads) + leaves_upload(calls, plan), plan
            uploads = left
        step, version = life.resume()
        before = dict(sorted(life.versions.items())[-2:] if scene is Scene.AGAIN else [max(life.versions.items())])
        assert (step, version) in {*before.items(), (target, new)}, plan
        committed = error is None or COMMITTED in str(error)
        assert error is None or isinstance(error, InjectedError), plan
        if error is None:
            assert (step, version) == (target, new), f"{plan}: a save that succeeded is not loaded"
        elif plan.aftermath is Aftermath.RECOVERED and not committed:
            assert version != new, f"{plan}: a save that failed is loaded"
        life.check_whole()
        if committed:
            assert life.check_step(target) == new, plan
            life.versions[target] = new
        life.save_clean(target if error is not None else target + 1, new + 1)  # the same one again, if it failed
        assert life.resume() == max(life.versions.items()), f"{plan}: the next save"
        life.check_clean()
        if pick in (Pick.PARTS, Pick.ALL_PARTS):
            assert life.uploads() == uploads, f"{plan}: the next save"
        tried += 1
    return tried


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="dcpfs")


def try_all(
    place: Location, mode: str, scenes: Iterable[tuple[Scene, Pick]], folder: Path, *, large: bool = False
) -> int:
    """All scenes in one directory, with one checkpointer. How many crash points were tried."""
    sizes = {"values": LARGE_VALUES} if large else {}
    with armed(folder / "plans"), Life(place, mode, folder / "plans", **sizes) as life:
        return sum(go_through(life, scene, pick) for scene, pick in scenes)


@pytest.mark.parametrize("mode", MODES)
def test_cases_2_30_34_35_a_run_on_files_outlives_a_failure_at_any_request(tmp_path: Path, mode: str) -> None:
    pick = Pick.ALL if mode == "disabled" else Pick.FEW
    scenes = [(Scene.NEXT, pick), (Scene.AGAIN, pick), (Scene.REMAINS, Pick.FEW)]
    tried = try_all(Location(tmp_path / "run"), mode, scenes, tmp_path)
    assert tried >= (150 if mode == "disabled" else 15)


@pytest.mark.parametrize("mode", ["disabled", "async_with_pinned_mem"])
def test_cases_2_30_34_35_a_run_on_s3_outlives_a_failure_at_any_request(
    seaweed: SeaweedServer, tmp_path: Path, mode: str
) -> None:
    scenes = [(scene, Pick.FEW) for scene in (Scene.NEXT, Scene.AGAIN)]
    assert try_all(location_on("s3", tmp_path, lambda: seaweed), mode, scenes, tmp_path) >= 10


def test_cases_31_83_a_failure_within_an_upload_leaves_no_part_of_it(seaweed: SeaweedServer, tmp_path: Path) -> None:
    """Only a process that dies leaves an upload, which no later save takes for its own."""
    place = location_on("s3", tmp_path, lambda: seaweed)
    assert try_all(place, "disabled", [(Scene.NEXT, Pick.PARTS)], tmp_path, large=True) == 2 * (2 + 1)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", MODES)
def test_every_crash_point_within_an_upload(seaweed: SeaweedServer, tmp_path: Path, mode: str) -> None:
    place = location_on("s3", tmp_path, lambda: seaweed)
    assert try_all(place, mode, [(Scene.AGAIN, Pick.ALL_PARTS)], tmp_path, large=True) == 4 * (2 + 1)


@pytest.mark.parametrize("scene", [Scene.NEXT, Scene.REMAINS])
def test_cases_40_78_a_resume_whose_store_fails_at_any_question_says_so(tmp_path: Path, scene: Scene) -> None:
    """It does not take what it could not ask about for damaged, and an older step, or nothing, for the newest."""
    with armed(tmp_path / "plans"), Life(Location(tmp_path / "run"), "disabled", tmp_path / "plans") as life:
        for version in range(1, 4):
            life.save_clean(version, version)
        begin(life, scene)
        assert life.resume() == (3, 3)
        questions = next(life.questions)
        assert questions > 8
        failed = 0
        for number in range(1, questions):
            with contextlib.suppress(InjectedError):
                failed += 1
                assert life.resume(number) == (3, 3)
                failed -= 1
        assert failed > questions // 2


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("backend", ["local", "s3"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scene", Scene, ids=lambda scene: scene.name.lower())
def test_every_crash_point_of_every_scene(
    request: pytest.FixtureRequest, tmp_path: Path, scene: Scene, mode: str, backend: str
) -> None:
    """On S3 the aftermaths go by turns but for one mode: a point costs a second there."""
    place = location_on(backend, tmp_path, lambda: request.getfixturevalue("seaweed"))
    pick = Pick.ALL if backend == "local" or mode == "disabled" else Pick.BY_TURNS
    tried = try_all(place, mode, [(scene, pick)], tmp_path)
    assert tried >= (4 if pick is Pick.ALL else 2) * 15
    print(f"{tried} crash points")
