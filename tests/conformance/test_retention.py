"""Retention on local files, in memory and on a real S3 server."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

from dcpfs.checkpointer.choices import BestMode
from dcpfs.checkpointer.completeness import StepState, check_step
from dcpfs.checkpointer.discovery import choose_step, list_statuses
from dcpfs.checkpointer.layout import LATEST_NAME, MANIFEST_NAME, PROTECTED_NAME, WRITING_NAME, step_name
from dcpfs.checkpointer.retention import (
    Retention,
    RetentionPolicy,
    RetentionReport,
    apply_retention,
    protect_step,
    unprotect_step,
)
from dcpfs.errors import CheckpointNotFoundError, PermissionDeniedError
from dcpfs.storage.location import Location
from dcpfs.storage.opening import open_store
from dcpfs.storage.store import Buffer, ObjectInfo, Store
from dcpfs.testing.faulty import Aftermath, FaultPlan, FaultyStore, Moment
from dcpfs.testing.recording import RecordingStore
from tests.conformance.step_scene import Scene, TurningStore

KEEP_1 = RetentionPolicy(keep_last=1)
KEEP_2 = RetentionPolicy(keep_last=2)


def names(*iterations: int) -> list[str]:
    return [step_name(iteration) for iteration in iterations]


def test_case_39_keep_one_of_three_on_any_store(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    retention = Retention(KEEP_1)
    reports = []
    with caplog.at_level(logging.INFO):
        for iteration in (1, 2, 3):
            scene.commit(iteration)
            reports.append(retention.apply(scene.store, newest=iteration))
    assert scene.steps() == names(3)
    assert [report.removed for report in reports] == [(), (1,), (2,)]
    assert all(report.objects == 7 for report in reports[1:])
    assert "removed iter_000000002: 7 files" in caplog.text
    assert check_step(scene.store, 3).is_complete


def test_a_step_of_more_than_a_thousand_objects_is_seen_whole_and_goes_whole(scene: Scene) -> None:
    scene.commit(1, count=1050, size_bytes=10)
    scene.commit(2)
    scene.store.clear()
    status = check_step(scene.store, 1)
    assert status.is_complete
    assert len(status.files) == 1055
    assert scene.store.verbs == {"get": 1, "list": 1}
    report = apply_retention(scene.store, KEEP_1)
    assert (report.removed, report.objects, report.failures) == ((1,), 1055, {})
    assert scene.steps() == names(2)
    assert not scene.names("iter_000000001")


def test_case_37_only_our_own_is_touched(scene: Scene) -> None:
    scene.commit(1)
    scene.foreign(2)
    scene.dead(3)
    scene.commit(4)
    scene.put("iter_000000005/model/__0_0.distcp", b"a shard whose save was swept while it wrote")
    scene.commit(6)
    scene.dead(8)
    theirs = {
        "iter_x/model/__0_0.distcp",
        "iter_000000003.bak/manifest.json",
        "iter_000000003.bak/.writing",
        "iter_3/.writing",
        "notes.txt",
        "eval/iter_000000001/.writing",
        "iter_000000001/eval/results.json",
        "iter_000000001/model/readme.md",
        "iter_000000001/hf/model.safetensors",
        "iter_000000007/readme.md",
    }
    for name in theirs:
        scene.put(name, b"theirs")
    before = scene.names()
    report = apply_retention(scene.store, KEEP_1)
    assert (report.removed, report.swept, report.failures) == ((1, 4), (3, 5), {})
    gone = before - scene.names()
    assert not gone & theirs
    assert {name.split("/")[0] for name in gone} == {*names(1, 3, 4, 5)}
    assert {name for name in scene.names() if name.startswith("iter_000000001/")} == {
        name for name in theirs if name.startswith("iter_000000001/")
    }
    assert apply_retention(scene.store, KEEP_1) == RetentionReport()


def test_case_44_a_copy_without_its_marker_is_never_removed(scene: Scene) -> None:
    for iteration in (1, 2, 3):
        scene.commit(iteration)
    scene.foreign(1)
    for iteration in (1, 2):
        scene.delete(iteration, MANIFEST_NAME)
    before = scene.names()
    assert apply_retention(scene.store, KEEP_1) == RetentionReport()
    assert scene.names() == before


def test_case_38_protected_steps_stay_until_they_are_not(scene: Scene) -> None:
    for iteration in (1, 2, 3):
        scene.commit(iteration)
    protect_step(scene.store, 1)
    assert check_step(scene.store, 1).is_protected
    with pytest.raises(CheckpointNotFoundError, match="iter_000000009"):
        protect_step(scene.store, 9)
    assert f"iter_000000009/{PROTECTED_NAME}" not in scene.names()
    retention = Retention(KEEP_1)
    assert retention.apply(scene.store).removed == (2,)
    assert retention.apply(scene.store).removed == ()
    unprotect_step(scene.store, 1)
    unprotect_step(scene.store, 1)
    assert retention.apply(scene.store).removed == (1,)
    assert scene.steps() == names(3)


def test_case_38_markers_are_read_again_at_the_last_second(scene: Scene) -> None:
    for iteration in (1, 2, 3):
        scene.commit(iteration)
    protected = TurningStore(
        scene.store, "exists", f"iter_000000001/{PROTECTED_NAME}", lambda: protect_step(scene.store, 1)
    )
    report = apply_retention(protected, KEEP_1)
    assert (report.removed, report.spared) == ((2,), {1: "it is protected"})
    unprotect_step(scene.store, 1)

    mark = f"iter_000000001/{PROTECTED_NAME}"
    late = _Later(scene.store, "exists", mark, lambda: protect_step(scene.store, 1))
    report = apply_retention(late, KEEP_1)
    assert (report.removed, report.spared) == ((), {1: "it is protected"})
    assert check_step(scene.store, 1).is_complete
    assert f"iter_000000001/{WRITING_NAME}" not in scene.names()
    unprotect_step(scene.store, 1)

    rolled_back = _CountingTurn(scene)
    report = apply_retention(rolled_back, KEEP_1)
    assert (report.removed, report.spared) == ((), {1: "latest_checkpoint.txt names it"})
    assert choose_step(scene.store).status == check_step(scene.store, 1)


class _Later(TurningStore):
    """Lets it happen right after the call."""

    def exists(self, path: str) -> bool:
        found = RecordingStore.exists(self, path)
        self._before("exists", path)
        return found


@pytest.mark.parametrize("moment", ["look", "mark", "manifest", "end"])
def test_who_protects_a_step_that_is_being_removed_is_told(scene: Scene, moment: str) -> None:
    scene.commit(1)
    scene.commit(2)
    refused: list[str] = []

    def remove() -> None:
        apply_retention(scene.store, KEEP_1)

    def protect() -> None:
        with pytest.raises(CheckpointNotFoundError, match="it is being removed") as caught:
            protect_step(scene.store, 1)
        refused.append(caught.value.message)

    if moment == "look":  # all of the removal between the look of `protect_step` and its mark
        with pytest.raises(CheckpointNotFoundError, match="it is being removed"):
            protect_step(_Later(scene.store, "exists", f"iter_000000001/{MANIFEST_NAME}", remove), 1)
    else:
        paths = {"mark": f"iter_000000001/{PROTECTED_NAME}", "manifest": MANIFEST_NAME, "end": WRITING_NAME}
        apply_retention(_Deleting(scene.store, paths[moment], protect), KEEP_1)
        assert refused
    assert scene.steps() == names(2)


class _Deleting(RecordingStore):
    """Lets something happen once: after the second question for a path, or right before its deletion."""

    def __init__(self, store: Store, path: str, event: Callable[[], object]) -> None:
        super().__init__(store)
        self._path = path
        self._event: Callable[[], object] | None = event
        self._asked = 0

    def _happen(self) -> None:
        event, self._event = self._event, None
        if event is not None:
            event()

    def exists(self, path: str) -> bool:
        found = super().exists(path)
        self._asked += path == self._path
        if self._asked == 2:
            self._happen()
        return found

    def delete(self, paths: Iterable[str]) -> None:
        gone = list(paths)
        if any(path.endswith(f"/{self._path}") for path in gone):
            self._happen()
        super().delete(gone)


def test_exports_of_the_model_take_no_place_of_what_training_goes_on_from(scene: Scene) -> None:
    retention = Retention(KEEP_2)
    for iteration in (1, 2, 3):
        scene.commit(iteration)
    for iteration in (4, 5, 6):
        scene.commit(iteration, exports=True)
    scene.commit(7)
    assert retention.apply(scene.store, newest=7).removed == (1, 2, 4, 5)
    scene.delete(7, "trainer/.metadata")
    found = choose_step(scene.store, load_step=3).status
    assert found is not None
    assert found.beside_model == ("trainer", "dataloader")


class _CountingTurn(RecordingStore):
    """The user rolls back to step 1 after retention has read the pointer for the first time."""

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene.store)
        self._scene = scene
        self._read = 0

    def get(self, path: str) -> bytes:
        if path == LATEST_NAME:
            self._read += 1
            if self._read == 2:
                self._scene.name_latest(1)
        return super().get(path)


def test_rules_on_a_store(scene: Scene) -> None:
    for iteration, metric in ((100, 0.5), (150, 0.9), (200, None), (250, 0.1), (300, 0.6), (350, 0.2)):
        scene.commit(iteration, metric=metric)
    policy = RetentionPolicy(keep_last=1, keep_every=200, keep_best=1, best_mode=BestMode.MAX)
    assert apply_retention(scene.store, policy).removed == (100, 250, 300)
    assert scene.steps() == names(150, 200, 350)


def test_without_rules_only_leftovers_go(scene: Scene) -> None:
    scene.commit(1)
    scene.dead(2)
    scene.commit(3)
    scene.dead(4)
    report = apply_retention(scene.store, RetentionPolicy())
    assert (report.removed, report.swept) == ((), (2,))
    assert scene.steps() == names(1, 3, 4)


def test_what_is_in_flight_is_left(scene: Scene) -> None:
    scene.dead(1)
    scene.commit(2)
    scene.commit(3)
    assert apply_retention(scene.store, KEEP_1, in_flight=[1, 2, 3], newest=3) == RetentionReport()


def test_case_34_the_last_step_that_loads_is_never_removed(scene: Scene) -> None:
    scene.commit(10)
    scene.commit(20)
    scene.delete(20, "model/.metadata")
    scene.dead(30)
    report = apply_retention(scene.store, KEEP_1)
    assert report.removed == ()
    assert choose_step(scene.store).status == check_step(scene.store, 10)
    # The step that was just saved turns out not to be there: nothing is removed on its behalf.
    assert apply_retention(scene.store, KEEP_1, newest=20).removed == ()
    scene.commit(40)
    assert apply_retention(scene.store, KEEP_1, newest=40).removed == (10, 20)
    assert scene.steps() == names(40)


def test_after_a_rollback_the_new_branch_is_kept(scene: Scene) -> None:
    retention = Retention(KEEP_2)
    for iteration in (10, 20, 30, 40):
        scene.commit(iteration)
    scene.name_latest(20)
    scene.commit(25)
    assert retention.apply(scene.store, newest=25).removed == (10,)
    scene.commit(35)
    assert retention.apply(scene.store, newest=35).removed == (20, 25)
    assert scene.steps() == names(30, 35, 40)


def test_case_78_retention_sees_what_others_wrote(scene: Scene) -> None:
    other = Scene(open_store(scene.store.location))
    retention = Retention(KEEP_1)
    scene.commit(1)
    retention.apply(scene.store)
    other.commit(2)
    assert retention.apply(scene.store).removed == (1,)
    other.commit(3)
    assert retention.apply(scene.store).removed == (2,)


def test_the_marker_goes_first_and_nothing_half_removed_loads(scene: Scene) -> None:
    scene.commit(1)
    scene.commit(2)
    scene.store.clear()
    apply_retention(scene.store, KEEP_1)
    deleted = [path.removeprefix("iter_000000001/") for path in scene.store.paths("delete")]
    assert deleted[0] == MANIFEST_NAME
    assert {*deleted[1:3]} == {"model/.metadata", "trainer/.metadata"}
    assert deleted[-1] == WRITING_NAME
    assert scene.store.paths("put") == [f"iter_000000001/{WRITING_NAME}"]


@pytest.mark.parametrize("moment", list(Moment))
@pytest.mark.parametrize("aftermath", list(Aftermath))
def test_a_removal_that_dies_leaves_nothing_that_loads_and_is_finished_next_time(
    local: Scene, moment: Moment, aftermath: Aftermath, caplog: pytest.LogCaptureFixture
) -> None:
    local.commit(1)
    local.commit(2)
    counting = FaultyStore(local.store, FaultPlan())
    apply_retention(counting, KEEP_1)
    assert counting.mutations >= 5
    for number in range(1, counting.mutations + 1):
        local.commit(1, latest=False)
        plan = FaultPlan(mutation=number, moment=moment, aftermath=aftermath)
        report = apply_retention(FaultyStore(local.store, plan), KEEP_1)
        status = check_step(local.store, 1)
        assert status.state in (StepState.COMPLETE, StepState.WRITING, StepState.ABSENT), number
        chosen = choose_step(local.store).status
        assert chosen is not None
        assert chosen.iteration == 2
        assert report.failures or number == 1  # without its mark a step is removed all the same
        apply_retention(local.store, KEEP_1)
        assert local.steps() == names(2), number
    assert "retention failed at iter_000000001" in caplog.text


def test_a_newest_step_that_is_withdrawn_meanwhile_ends_the_removals(local: Scene) -> None:
    for iteration in (1, 2, 3):
        local.commit(iteration)
    for name in (MANIFEST_NAME, WRITING_NAME):
        store = TurningStore(
            local.store,
            "exists",
            f"iter_000000003/{name}",
            lambda name=name: (
                local.put(f"iter_000000003/{WRITING_NAME}")  # type: ignore[misc] # a bound loop variable
                if name == WRITING_NAME
                else local.delete(3, name)
            ),
        )
        report = apply_retention(store, KEEP_1, newest=3)
        assert report.removed == ()
        assert {*report.spared.values()} == {"iter_000000003 is being overwritten or removed"}
        local.commit(3)
        local.delete(3, WRITING_NAME)


class _Sealed(RecordingStore):
    """A store that may be read alone."""

    def put(self, path: str, buffers: Sequence[Buffer], *, if_absent: bool = False) -> ObjectInfo:
        raise PermissionDeniedError(f"Can't write {path}: AccessDenied; you may read alone")

    def delete(self, paths: Iterable[str]) -> None:
        raise PermissionDeniedError(f"Can't delete {next(iter(paths))}: AccessDenied; you may read alone")


def test_a_failure_is_a_warning(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    for iteration in (1, 2, 3):
        scene.commit(iteration)
    report = apply_retention(_Sealed(scene.store), KEEP_1)
    assert [*report.failures] == [1, 2]
    assert report.removed == ()
    assert "retention failed at iter_000000001: Can't delete" in caplog.text
    assert check_step(scene.store, 1).is_complete
    assert apply_retention(open_store(Location("memory://nothing/here")), KEEP_1) == RetentionReport()


def test_a_step_that_may_not_be_read_stays_and_does_not_count(
    local: Scene, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for iteration in (1, 2, 4):
        local.commit(iteration)
    elsewhere = Scene(open_store(Location(tmp_path / "elsewhere")))
    elsewhere.commit(3)
    (tmp_path / "run" / "iter_000000003").symlink_to(tmp_path / "elsewhere" / "iter_000000003")
    report = apply_retention(local.store, KEEP_2)
    assert (report.removed, [*report.failures]) == ((1,), [3])
    assert "a symbolic link leads out" in caplog.text
    assert check_step(elsewhere.store, 3).is_complete


def test_a_store_that_does_not_answer_is_a_warning(local: Scene, caplog: pytest.LogCaptureFixture) -> None:
    local.commit(1)
    local.commit(2)
    report = apply_retention(FaultyStore(local.store, FaultPlan(read=1)), KEEP_1)
    assert [*report.failures] == [-1]
    assert "retention failed:" in caplog.text
    assert local.steps() == names(1, 2)


def test_settled_steps_cost_nothing_more(local: Scene) -> None:
    policy = RetentionPolicy(keep_last=2, keep_every=10)
    retention = Retention(policy)
    for iteration in range(10, 210, 10):
        local.commit(iteration)
    retention.apply(local.store, newest=200)
    local.commit(215)
    local.store.clear()
    assert retention.apply(local.store, newest=215).removed == ()
    looked_at = set(local.store.paths("list"))
    assert step_name(200) in looked_at
    assert len(looked_at) <= 9  # a batch of looks at once, and the newest
    assert local.store.verbs["list_directories"] == 1
    assert pickle.loads(pickle.dumps(retention)).policy == policy
    assert len(list_statuses(local.store)) == 21


def test_it_is_what_a_save_calls_after_its_commit(local: Scene) -> None:
    local.commit(1)
    local.commit(2)
    Retention(KEEP_1)(local.store, 2)
    assert local.steps() == names(2)
