"""Which steps are complete and which one is resumed from, on local files, in memory and on a real S3 server."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from dcpfs.checkpointer.completeness import StepState, check_step, share_files, verify_step
from dcpfs.checkpointer.discovery import (
    Place,
    StepSearch,
    check_location,
    choose_step,
    list_statuses,
    list_steps,
    read_latest,
)
from dcpfs.checkpointer.layout import LATEST_NAME, MANIFEST_NAME, WRITING_NAME, step_name
from dcpfs.checkpointer.manifest import Manifest, encode_manifest
from dcpfs.config import TransferConfig
from dcpfs.errors import (
    BucketNotFoundError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    StorageError,
)
from dcpfs.storage.capabilities import Capabilities
from dcpfs.storage.location import Location
from dcpfs.storage.opening import open_store
from dcpfs.storage.store import ObjectInfo, Store
from dcpfs.testing.faulty import FaultPlan, FaultyStore
from dcpfs.testing.recording import RecordingStore
from dcpfs.testing.servers import SeaweedServer
from tests.conformance.step_scene import FOREIGN_KEYS, Scene, TurningStore, foreign_files


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What dcpfs itself has logged; threads of other libraries may log at any time."""
    return [record.getMessage() for record in caplog.records if record.name.partition(".")[0] == "dcpfs"]


def chosen(scene: Scene) -> int | None:
    status = choose_step(scene.store).status
    return None if status is None else status.iteration


# -- what is a step


def test_a_run_without_a_step_starts_from_scratch_with_a_warning(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    choice = choose_step(scene.store)
    assert (choice.status, choice.skipped, choice.committed_ever, choice.latest) == (None, (), False, None)
    assert "starts from scratch" in caplog.text
    assert list_steps(scene.store) == []
    assert list_statuses(scene.store) == []
    assert read_latest(scene.store) is None


def test_the_step_that_latest_names_is_found_with_few_requests(scene: Scene) -> None:
    for iteration in (10, 20, 30):
        scene.commit(iteration)
    scene.store.clear()
    status = choose_step(scene.store).status
    assert status is not None
    assert (status.iteration, status.state, status.keys) == (30, StepState.COMPLETE, ("model", "trainer"))
    assert status.rank_files == {"dataloader": {0: "dataloader/rank_0.pkl"}}
    assert status.locate(scene.store.location) == scene.store.location.join("iter_000000030")
    assert scene.store.paths("get") == [LATEST_NAME, f"iter_000000030/{MANIFEST_NAME}"]
    assert scene.store.paths("list") == ["iter_000000030"]
    assert scene.store.verbs == {"get": 2, "list": 1, "list_directories": 1}


def test_cases_37_40_only_complete_steps_by_strict_names_are_candidates(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.commit(10, latest=False)
    scene.commit(30, latest=False)
    scene.dead(40)
    scene.foreign(50)
    scene.commit(60, latest=False)
    scene.delete(60, "model/__0_1.distcp")
    for name in ("iter_x", "iter_000000070.bak", "iter_70", "iter_0000000070", "backup", "iter_000000080 "):
        scene.put(f"{name}/{MANIFEST_NAME}", scene.store.get(f"iter_000000030/{MANIFEST_NAME}"))
    scene.put("iter_000000090", b"a file of that name")
    scene.put("notes.txt", b"users' own")
    choice = choose_step(scene.store)
    assert choice.status is not None
    assert choice.status.iteration == 30
    assert [(each.iteration, each.state) for each in choice.skipped] == [
        (60, StepState.DAMAGED),
        (50, StepState.UNKNOWN),
        (40, StepState.WRITING),
    ]
    for name in ("iter_000000040", "iter_000000050", "iter_000000060", "iter_000000070.bak", "iter_x"):
        assert name in caplog.text
    assert list_steps(scene.store) == [10, 30, 40, 50, 60]
    assert [each.state.value for each in list_statuses(scene.store)] == [
        "complete", "complete", "writing", "unknown", "damaged",
    ]  # fmt: skip


def test_rolling_back_by_hand(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    for iteration in (10, 20, 30):
        scene.commit(iteration)
    for text in (
        "iter_000000010",
        "iter_000000010/\r\n\n",
        "/some/where/iter_000000010",
        "\ufeffiter_000000010\n# old",
    ):
        scene.put(LATEST_NAME, text)
        assert chosen(scene) == 10
    assert "iter_000000030 is complete and newer" in caplog.text
    scene.delete(10, "trainer/.metadata")
    assert chosen(scene) == 30
    assert choose_step(scene.store, load_step=20).status is not None


@pytest.mark.parametrize("text", ["", "\n\n", "step 5", "iter_5", "iter_000000005.bak", "\x00\xff", "x" * 10**5])
def test_a_pointer_that_names_no_step_is_a_warning(local: Scene, text: str, caplog: pytest.LogCaptureFixture) -> None:
    local.put(LATEST_NAME, text)
    assert read_latest(local.store) is None
    assert LATEST_NAME in caplog.text
    assert len("\n".join(said(caplog))) < 1000
    assert chosen(local) is None
    local.commit(3, latest=False)
    caplog.clear()
    assert chosen(local) == 3
    assert f"iter_000000003 is taken instead, the newest usable step; {LATEST_NAME} names none" in caplog.text
    local.commit(2, latest=False)
    local.name_latest(9)
    assert chosen(local) == 3
    assert f"iter_000000003 is taken instead, the newest usable step; {LATEST_NAME} names iter_000000009" in caplog.text
    local.name_latest(3)
    caplog.clear()
    assert chosen(local) == 3
    assert not said(caplog)


@pytest.mark.parametrize("text", ["", "iter_", "\x00\x00"])
def test_a_pointer_that_was_cut_off_is_a_sign_that_something_was_saved(local: Scene, text: str) -> None:
    """Steps of another tool, of which nothing else says that they are whole: no run starts over beside them unasked."""
    local.foreign(10)
    local.put(LATEST_NAME, text)
    with pytest.raises(IncompleteCheckpointError, match=rf"iter_000000010 .*write the name of one .*{LATEST_NAME}"):
        choose_step(local.store)
    assert choose_step(local.store, load_step=10).status is not None
    local.name_latest(10)
    assert chosen(local) == 10


def test_a_load_step_that_is_left_in_the_settings_is_said(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.commit(10)
    assert choose_step(scene.store, load_step=10).status is not None
    assert not said(caplog)
    scene.commit(20)
    assert choose_step(scene.store, load_step=10).status is not None
    assert f"load_step is 10, so that is loaded, although {LATEST_NAME} names iter_000000020" in caplog.text


def test_a_pointer_to_a_step_that_is_gone_falls_back_or_fails(scene: Scene) -> None:
    scene.name_latest(9)
    with pytest.raises(IncompleteCheckpointError, match=r"iter_000000009 \(it holds no file\)"):
        choose_step(scene.store)
    scene.commit(4, latest=False)
    assert chosen(scene) == 4


def rejected_in_turn(search: StepSearch, count: int, reason: str) -> list[int | None]:
    """Iterations of the next candidates, none of which serves."""
    found = []
    for _ in range(count):
        status = search.find()
        assert status is not None
        found.append(status.iteration)
        search.reject(reason)
    return found


def test_a_model_alone_is_resumed_from_when_nothing_else_is_left(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    for iteration in (1, 2):
        scene.commit(iteration)
    for iteration in (3, 4):
        scene.commit(iteration, exports=True)
    assert chosen(scene) == 2
    scene.delete(2, "trainer/.metadata")
    assert chosen(scene) == 1
    assert "iter_000000001 is taken although iter_000000004 is newer, which holds the model alone" in caplog.text
    search = StepSearch(scene.store)
    found = rejected_in_turn(search, 3, "it turned out damaged")
    assert found == [1, 4, 3]
    with pytest.raises(IncompleteCheckpointError):
        search.find()
    scene.name_latest(4)
    assert chosen(scene) == 4


def test_committed_steps_of_which_none_is_usable_are_an_error_that_names_them(scene: Scene) -> None:
    for iteration in (10, 20):
        scene.commit(iteration, latest=False)
        scene.delete(iteration, "model/.metadata")
    scene.dead(30)
    with pytest.raises(IncompleteCheckpointError, match="none can be used") as caught:
        choose_step(scene.store)
    for name in ("iter_000000010", "iter_000000020", "iter_000000030", "model/.metadata"):
        assert name in str(caught.value)
    assert caught.value.missing == ("model/.metadata",) * 2


def test_only_dead_saves_are_from_scratch(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.dead(1)
    scene.dead(2)
    choice = choose_step(scene.store)
    assert (choice.status, choice.committed_ever, len(choice.skipped)) == (None, False, 2)
    assert "iter_000000002 (a save is at work there, or died)" in caplog.text


def test_load_step_is_that_step_or_an_error(scene: Scene) -> None:
    scene.commit(10)
    scene.commit(20)
    scene.foreign(30)
    scene.dead(40)
    for iteration in (10, 30):
        choice = choose_step(scene.store, load_step=iteration)
        assert choice.status is not None
        assert choice.status.iteration == iteration
    with pytest.raises(IncompleteCheckpointError, match="a save is at work there"):
        choose_step(scene.store, load_step=40)
    with pytest.raises(CheckpointNotFoundError, match=r"there is no such step.*iter_000000020") as caught:
        choose_step(scene.store, load_step=11)
    assert "iter_000000011" in str(caught.value)


# -- damage


@pytest.mark.parametrize("name", ["model/__0_1.distcp", "model/.metadata", "dataloader/rank_0.pkl"])
def test_case_41_every_file_counts_at_its_size(scene: Scene, name: str) -> None:
    scene.commit(1)
    assert check_step(scene.store, 1).is_complete
    scene.cut(1, name)
    short = check_step(scene.store, 1)
    assert (short.state, short.missing) == (StepState.DAMAGED, (name,))
    assert name in short.reason
    scene.delete(1, name)
    assert check_step(scene.store, 1).missing == (name,)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "manifest"),
        (b"{}", "manifest"),
        (b'{"schema": 99}', "schema 99"),
        (encode_manifest(Manifest("id", 6, 1, {})), "iteration 6"),
        (
            encode_manifest(Manifest("id", 5, 1, {})).replace(b'"files": {', b'"files": {"../x": {"size": 1}'),
            "manifest",
        ),
    ],
)
def test_a_manifest_that_does_not_check_out_is_damage(local: Scene, content: bytes, reason: str) -> None:
    local.commit(5)
    local.put(f"iter_000000005/{MANIFEST_NAME}", content)
    status = check_step(local.store, 5)
    assert status.state is StepState.DAMAGED
    assert reason in status.reason
    with pytest.raises(IncompleteCheckpointError):
        choose_step(local.store)


def test_a_mark_of_writing_beside_a_manifest_means_nothing(scene: Scene) -> None:
    scene.commit(1)
    scene.put(f"iter_000000001/{WRITING_NAME}", "another save")
    assert check_step(scene.store, 1).is_complete


@pytest.mark.parametrize("foreign", [False, True], ids=["own", "foreign"])
def test_case_113_a_flipped_bit_is_found_and_the_next_step_is_taken(scene: Scene, foreign: bool) -> None:
    name = "model/__0_0.distcp"
    scene.commit(10)
    if foreign:
        scene.foreign(20)
        scene.name_latest(20)
        scene.flip(20, name, len(foreign_files()[name]) // 2)
    else:
        scene.commit(20)
        scene.flip(20, name, 77)
    assert chosen(scene) == 20  # of the same size
    choice = choose_step(scene.store, verify=lambda status: verify_step(scene.store, status))
    assert choice.status is not None
    assert choice.status.iteration == 10
    assert name in choice.skipped[0].reason
    status = check_step(scene.store, 20, named=True)
    assert [fault.file for fault in verify_step(scene.store, status)] == [name]
    assert verify_step(scene.store, status, files=["model/.metadata", "dataloader/rank_0.pkl"]) == []
    shares = [share_files(status, rank, 3) for rank in range(3)]
    faults = [fault for files in shares for fault in verify_step(scene.store, status, files=files)]
    assert [fault.file for fault in faults] == [name]
    assert sorted(file for files in shares for file in files) == sorted({*status.files} - {MANIFEST_NAME})


def test_a_step_is_verified_in_bounded_reads(scene: Scene) -> None:
    scene.commit(1, count=3, size_bytes=300_000)
    scene.foreign(2)
    limits = TransferConfig(read_bytes=64 << 10, concurrency=4)
    for iteration in (1, 2):
        status = check_step(scene.store, iteration, named=True)
        scene.store.clear()
        assert verify_step(scene.store, status, transfer=limits) == []
        reads = [call.size_bytes for call in scene.store.calls if call.verb == "read_into"]
        assert max(reads) <= 64 << 10
        sizes = status.files
        assert sum(reads) >= sum(size for name, size in sizes.items() if name.endswith(".distcp"))
    scene.flip(1, "model/__0_2.distcp", 200_001)
    scene.delete(1, "model/__0_1.distcp")
    scene.cut(1, "trainer/__0_0.distcp")
    faults = verify_step(scene.store, check_step(scene.store, 1), transfer=limits)
    assert [fault.file for fault in faults] == ["model/__0_1.distcp", "model/__0_2.distcp", "trainer/__0_0.distcp"]
    assert "is missing" in str(faults[0])


# -- steps of other tools


def test_plain_dcp_steps_count_when_something_names_them(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    scene.foreign(10)
    scene.foreign(20)
    assert chosen(scene) is None
    assert "iter_000000020 (it has no manifest.json, and latest_checkpoint.txt does not name it)" in caplog.text
    assert "set load_step" in caplog.text
    scene.name_latest(10)
    scene.store.clear()
    status = choose_step(scene.store).status
    assert status is not None
    assert (status.iteration, status.foreign, status.manifest, status.keys) == (10, True, None, FOREIGN_KEYS)
    assert status.rank_files == {"dataloader": {0: "dataloader/rank_0.pkl"}}
    assert scene.store.verbs["head"] == 0
    assert scene.store.paths("list") == ["iter_000000020", "iter_000000010"] or scene.store.paths("list") == [
        "iter_000000010",
        "iter_000000020",
    ]
    scene.commit(15, latest=False)
    assert chosen(scene) == 10


@pytest.mark.parametrize("name", ["model/.metadata", "optim/.metadata", "model/__0_0.distcp", "optim/__0_0.distcp"])
def test_a_named_step_of_another_tool_must_hold_what_it_lists(scene: Scene, name: str) -> None:
    scene.foreign(7)
    scene.name_latest(7)
    assert check_step(scene.store, 7, named=True).is_complete
    scene.cut(7, name)
    short = check_step(scene.store, 7, named=True)
    scene.delete(7, name)
    lacking = check_step(scene.store, 7, named=True)
    for status in (short, lacking):
        assert (status.state, status.foreign) == (StepState.PARTIAL, True)
        assert name.partition("/")[0] in status.reason
    assert lacking.missing == (name,)
    with pytest.raises(IncompleteCheckpointError, match="iter_000000007"):
        choose_step(scene.store)


def test_case_110_a_crafted_metadata_of_another_tool_is_not_run(local: Scene, tmp_path: Path) -> None:
    import pickle

    class Attack:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "owned",)

    local.commit(1)
    local.foreign(7)
    local.put("iter_000000007/model/.metadata", pickle.dumps(Attack()))
    local.name_latest(7)
    assert chosen(local) == 1
    assert not (tmp_path / "owned").exists()


def test_users_own_directories_in_a_step_are_nobodys_business(scene: Scene) -> None:
    scene.foreign(7)
    scene.put("iter_000000007/tokenizer/vocab.json", b"{}")
    scene.put("iter_000000007/.hidden/__0_0.distcp", b"")
    scene.put("iter_000000007/readme.md", b"")
    status = check_step(scene.store, 7, named=True)
    assert (status.state, status.keys) == (StepState.COMPLETE, FOREIGN_KEYS)


# -- load_path


def test_a_load_path_is_a_step_a_run_or_a_key(scene: Scene) -> None:
    scene.commit(10)
    scene.foreign(20)
    root = scene.store.location

    def look(path: str) -> tuple[str, int | None, str | None, str]:
        with_path = open_store(root.join(path))
        try:
            found = check_location(with_path)
            assert found.status.is_complete
            return found.place.value, found.status.iteration, found.key, found.status.path
        finally:
            with_path.close()

    assert look("") == (Place.RUN.value, 10, None, "iter_000000010")
    assert look("iter_000000010") == ("step", 10, None, "")
    assert look("iter_000000020") == ("step", 20, None, "")
    assert look("iter_000000020/model") == ("key", 20, "model", "")
    with pytest.raises(CheckpointNotFoundError, match="there is no checkpoint"):
        look("iter_000000020/dataloader")
    with pytest.raises(CheckpointNotFoundError, match="there is no checkpoint"):
        look("elsewhere")


def test_a_load_path_by_other_names(scene: Scene) -> None:
    manifest = scene.commit(10)
    for name, content in {path: scene.store.get(path) for path in scene.names("iter_000000010")}.items():
        scene.put(name.replace("iter_000000010", "best/of_all"), content)
    for name, file in foreign_files().items():
        scene.put(f"imported/{name}", file)
    for name in [*scene.names()]:
        if name.startswith("iter_") or name == LATEST_NAME:
            scene.put(f"job/checkpoints/{name}", scene.store.get(name))
    root = scene.store.location
    best = check_location(open_store(root.join("best/of_all")))
    assert (best.place, best.status.iteration, best.status.manifest) == (Place.STEP, 10, manifest)
    imported = check_location(open_store(root.join("imported")))
    assert (imported.place, imported.status.iteration, imported.status.foreign) == (Place.STEP, None, True)
    job = check_location(open_store(root.join("job")))
    assert (job.place, job.status.path) == (Place.RUN, "checkpoints/iter_000000010")
    with pytest.raises(ConfigError, match="load_step 10"):
        check_location(open_store(root.join("best/of_all")), load_step=10)


def test_a_load_path_that_is_damaged_is_an_error(scene: Scene) -> None:
    scene.commit(10)
    scene.flip(10, "model/__0_0.distcp", 9)
    step = open_store(scene.store.location.join("iter_000000010"))
    assert check_location(step).status.is_complete
    with pytest.raises(CorruptCheckpointError, match=r"model/__0_0.distcp"):
        check_location(step, verify=lambda status: verify_step(step, status))
    scene.delete(10, "model/__0_0.distcp")
    with pytest.raises(IncompleteCheckpointError, match=r"model/__0_0.distcp"):
        check_location(step)


def test_what_lies_below_a_mistyped_load_path_is_not_listed(local: Scene) -> None:
    for number in range(5):
        local.put(f"photos/{number}/a.jpg", b"")
    store = RecordingStore(open_store(local.store.location))
    with pytest.raises(CheckpointNotFoundError):
        check_location(store)
    assert store.verbs["list"] == 0


# -- what stores do


def test_case_78_what_another_process_wrote_is_seen_at_once(scene: Scene) -> None:
    other = Scene(open_store(scene.store.location))
    assert chosen(scene) is None
    assert list_steps(scene.store) == []
    other.commit(1)
    assert chosen(scene) == 1
    other.commit(2)
    assert chosen(scene) == 2
    other.delete(2, "model/.metadata")
    assert chosen(scene) == 1


class _Stale(RecordingStore):
    """A listing that does not show the newest objects yet, or their old sizes."""

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        for info in super().list(prefix):
            if info.path.endswith("__0_0.distcp"):
                continue
            yield ObjectInfo(info.path, info.size_bytes - 1) if info.path.endswith("__0_1.distcp") else info


def test_what_a_listing_lacks_is_asked_for(scene: Scene) -> None:
    scene.commit(1)
    scene.foreign(2)
    stale = _Stale(scene.store)
    assert check_step(stale, 1).is_complete
    assert sorted(stale.paths("head")) == [
        f"iter_000000001/{name}" for name in ("model/__0_0.distcp", "model/__0_1.distcp", "trainer/__0_0.distcp")
    ]
    assert check_step(stale, 2, named=True).is_complete


class _Unlisted(RecordingStore):
    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(listable=False, writable=False)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        raise AssertionError("listed")

    def list_directories(self, prefix: str = "") -> Iterator[str]:
        raise AssertionError("listed")


def test_a_store_without_a_listing_serves_what_is_named(scene: Scene) -> None:
    scene.commit(1)
    scene.foreign(2)
    unlisted = _Unlisted(scene.store)
    assert choose_step(unlisted).status == check_step(unlisted, 1)
    assert check_step(unlisted, 2, named=True).keys == FOREIGN_KEYS
    assert check_step(unlisted, 2).state is StepState.UNKNOWN
    status = check_step(unlisted, 2, named=True)
    assert verify_step(unlisted, status) == []
    assert check_location(_Unlisted(open_store(scene.store.location.join("iter_000000002")))).place is Place.STEP
    scene.delete(2, "model/__0_0.distcp")
    assert check_step(unlisted, 2, named=True).state is StepState.PARTIAL
    assert check_step(unlisted, 3, named=True).state is StepState.ABSENT


def test_a_store_that_does_not_answer_is_an_error_and_never_a_no(scene: Scene) -> None:
    scene.commit(1)
    for read in (1, 2):
        faulty = FaultyStore(scene.store, FaultPlan(read=read))
        with pytest.raises(StorageError):
            choose_step(faulty)


def test_a_missing_bucket_is_an_error(seaweed: SeaweedServer) -> None:
    store = open_store(Location("s3://no-such-bucket/run", seaweed.storage_options))
    with pytest.raises(BucketNotFoundError):
        choose_step(store)
    with pytest.raises(BucketNotFoundError):
        check_location(store)


def test_a_read_only_store_is_enough(scene: Scene) -> None:
    scene.commit(1)
    scene.store.clear()
    choose_step(scene.store, verify=lambda status: verify_step(scene.store, status))
    list_statuses(scene.store)
    assert not {"put", "delete", "open_sink"} & {*scene.store.verbs}


def test_a_read_only_directory_is_enough(local: Scene, tmp_path: Path) -> None:
    local.commit(1)
    run = tmp_path / "run"
    directories = [run, *(path for path in run.rglob("*") if path.is_dir())]
    for path in directories:
        path.chmod(0o555)
    try:
        assert chosen(local) == 1
    finally:
        for path in directories:
            path.chmod(0o755)


# -- what happens in between


def test_a_step_that_is_committed_during_the_look_is_whole_or_not_there(scene: Scene) -> None:
    def turned(verb: str, path: str) -> Store:
        return TurningStore(scene.store, verb, path, lambda: scene.commit(5))

    scene.dead(5)
    assert check_step(turned("get", MANIFEST_NAME), 5).is_complete
    scene.delete(5, MANIFEST_NAME)
    assert check_step(turned("list", "iter_000000005"), 5).is_complete


def test_a_step_that_is_removed_during_the_look_is_not_complete(scene: Scene) -> None:
    scene.commit(5)
    store = TurningStore(
        scene.store, "list", "iter_000000005", lambda: scene.store.delete(scene.names("iter_000000005"))
    )
    assert not check_step(store, 5).is_complete


def test_a_search_goes_on_where_a_load_failed(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    for iteration in (10, 20, 30):
        scene.commit(iteration)
    scene.name_latest(20)
    search = StepSearch(scene.store)
    found = rejected_in_turn(search, 3, "a checksum")
    with pytest.raises(IncompleteCheckpointError, match=r"iter_000000010 \(a checksum\)"):
        search.find()
    assert found == [20, 30, 10]
    chosen_step = StepSearch(scene.store, load_step=20)
    assert chosen_step.find() is not None
    chosen_step.reject("a checksum")
    with pytest.raises(IncompleteCheckpointError, match="a checksum"):
        chosen_step.find()


def test_what_is_passed_over_is_not_said_a_thousand_times(local: Scene, caplog: pytest.LogCaptureFixture) -> None:
    for iteration in range(1, 40):
        local.dead(iteration)
    with caplog.at_level(logging.WARNING):
        assert chosen(local) is None
    assert caplog.text.count("passed over") < 12
    assert step_name(39) in caplog.text


@pytest.mark.parametrize("below", ["file", "file/run", "file/a/b"])
def test_a_run_at_or_below_a_file_is_an_error_and_not_from_scratch(local: Scene, tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("somebody's")
    store = open_store(Location(tmp_path / below))
    for ask in (lambda: choose_step(store), lambda: list_statuses(store), lambda: list_steps(store)):
        with pytest.raises(StorageError, match=rf"Can't list .*{below}: .*a part of the path is a file"):
            ask()
    assert choose_step(open_store(Location(tmp_path / "nothing" / below))).status is None
