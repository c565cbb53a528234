"""Claim, withdraw, publish, abandon: what each does, in which order, with how many requests."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping

import pytest
import torch

import dcpfs
from dcpfs.checkpointer.choices import OnExisting
from dcpfs.checkpointer.commit import (
    Claim,
    ClaimState,
    Stragglers,
    abandon_step,
    claim_step,
    move_latest,
    publish_step,
    withdraw_step,
)
from dcpfs.checkpointer.completeness import check_step
from dcpfs.checkpointer.layout import LATEST_NAME
from dcpfs.checkpointer.manifest import FileRecord, Manifest, encode_manifest
from dcpfs.checkpointer.ownership import FILE_BLOCK, first_file_number, put_owned, read_owner
from dcpfs.errors import CheckpointExistsError, ConfigError, StorageError, SupersededError
from dcpfs.storage.location import Location
from dcpfs.storage.opening import open_store
from dcpfs.testing.faulty import FaultPlan, FaultyStore, InjectedError, Moment
from dcpfs.testing.recording import RecordingStore
from tests.faults.two_saves import Objects, SharedStore

STEP = "iter_000000005"


@pytest.fixture
def objects() -> Objects:
    return Objects()


def committed(objects: Objects, iteration: int, save_id: str) -> None:
    name = "model/__0_0.distcp"
    objects.content[f"iter_{iteration:09}/{name}"] = save_id.encode()
    objects.content[f"iter_{iteration:09}/model/.metadata"] = b"meta"
    files = {name: FileRecord(len(save_id)), "model/.metadata": FileRecord(4)}
    manifest = Manifest(save_id, iteration, 1, files, keys=("model",))
    objects.content[f"iter_{iteration:09}/manifest.json"] = encode_manifest(manifest)


def wrote(objects: Objects, claim: Claim) -> Manifest:
    """The ranks' part of a save."""
    names = [f"model/__0_{claim.first_file_number}.distcp", "model/.metadata", "dataloader/rank_0.pkl"]
    for name in names:
        objects.content[f"{STEP}/{name}"] = claim.save_id.encode()
    return Manifest(claim.save_id, 5, 1, dict.fromkeys(names, FileRecord(len(claim.save_id))), keys=("model",))


def mutations(store: RecordingStore) -> list[tuple[str, str]]:
    return [(call.verb, call.path) for call in store.calls if call.verb in ("put", "delete")]


def test_cases_33_35_the_order_of_a_fresh_save(objects: Objects) -> None:
    store = RecordingStore(SharedStore(objects))
    claim = claim_step(store, 5, "a")
    assert claim == Claim(5, "a", ClaimState.FRESH)
    assert store.verbs == {"list": 2, "put": 1}, "and a get of the pointer, which is not there"
    publish_step(store, claim, wrote(objects, claim))
    move_latest(store, 5, claim)
    assert mutations(store) == [
        ("put", f"{STEP}/.writing"),
        ("put", f"{STEP}/manifest.json"),
        ("delete", f"{STEP}/.writing"),
        ("put", LATEST_NAME),
    ]
    assert objects.content[LATEST_NAME] == b"iter_000000005\n"
    assert check_step(store, 5).is_complete


def test_case_2_withdrawing_removes_what_vouches_before_anything_else(objects: Objects) -> None:
    for iteration, save_id in ((4, "old4"), (5, "old5")):
        committed(objects, iteration, save_id)
    others = {f"{STEP}/notes.txt": b"mine", f"{STEP}/.protected": b"", f"{STEP}/model/__0_0.distcp.bak": b"mine"}
    objects.content |= others | {f"{STEP}/optim/__3.metadata": b"x", f"{STEP}/dataloader/rank_3.pkl": b"x"}
    before = dict(objects.content)
    store = RecordingStore(SharedStore(objects))
    claim = claim_step(store, 5, "new")
    assert (claim.state, claim.predecessor) == (ClaimState.EXISTS, "old5")
    assert claim.first_file_number == first_file_number("new") >= FILE_BLOCK
    assert objects.content == before, "a claim of what stands touches nothing"
    withdraw_step(store, claim)
    assert mutations(store) == [
        ("put", f"{STEP}/.writing"),
        ("delete", f"{STEP}/manifest.json"),
        ("delete", f"{STEP}/model/.metadata"),
        ("delete", f"{STEP}/optim/__3.metadata"),
        ("delete", f"{STEP}/dataloader/rank_3.pkl"),
        ("delete", f"{STEP}/model/__0_0.distcp"),
    ]
    assert {path for path in objects.content if path.startswith(STEP)} == {*others, f"{STEP}/.writing"}
    publish_step(store, claim, wrote(objects, claim))
    assert check_step(store, 5).is_complete


@pytest.mark.parametrize("standing", ["committed", "foreign"])
def test_the_only_complete_step_is_not_overwritten(objects: Objects, standing: str) -> None:
    if standing == "committed":
        committed(objects, 5, "old")
    else:
        committed(objects, 5, "old")
        del objects.content[f"{STEP}/manifest.json"]
        objects.content |= _foreign_step()
    committed(objects, 4, "damaged")
    objects.content["iter_000000004/model/__0_0.distcp"] = b""
    before = dict(objects.content)
    with pytest.raises(CheckpointExistsError, match="only complete step"):
        claim_step(SharedStore(objects), 5, "new")
    with pytest.raises(CheckpointExistsError, match="only complete step"):
        withdraw_step(SharedStore(objects), Claim(5, "new", ClaimState.EXISTS, predecessor="old"))
    assert objects.content == before


def _foreign_step() -> Mapping[str, bytes]:
    """What plain DCP makes: one value under ``model``."""
    url = f"memory://{uuid.uuid4().hex}/model"
    dcpfs.save({"w": torch.ones(3)}, url)
    store = open_store(Location(url))
    return {f"{STEP}/model/{info.path}": store.get(info.path) for info in store.list()}


def test_a_step_that_stands_is_skipped_or_refused_when_that_was_asked_for(
    objects: Objects, caplog: pytest.LogCaptureFixture
) -> None:
    committed(objects, 5, "old")
    before = dict(objects.content)
    store = SharedStore(objects)
    with pytest.raises(CheckpointExistsError, match="stands there already"):
        claim_step(store, 5, "new", OnExisting.ERROR)
    claim = claim_step(store, 5, "new", OnExisting.SKIP)
    assert claim.state is ClaimState.SKIPPED
    assert "on_existing is 'skip'" in caplog.text
    abandon_step(store, claim, ["model/__0_0.distcp"])
    assert objects.content == before
    objects.content[f"{STEP}/model/__0_0.distcp"] = b""  # damaged: leaving it would leave nothing that loads
    assert claim_step(store, 5, "new", OnExisting.SKIP).state is ClaimState.EXISTS
    with pytest.raises(CheckpointExistsError):
        claim_step(store, 5, "new", OnExisting.ERROR)


@pytest.mark.parametrize("on_existing", list(OnExisting))
def test_case_46_what_a_dead_save_left_is_taken_over_with_a_warning(
    objects: Objects, on_existing: OnExisting, caplog: pytest.LogCaptureFixture
) -> None:
    objects.content |= {
        f"{STEP}/.writing": b"dead\n",
        f"{STEP}/model/__7_0.distcp": b"x",
        f"{STEP}/model/.metadata": b"",
    }
    store = SharedStore(objects)
    claim = claim_step(store, 5, "new", on_existing)
    assert "taking over memory://bucket/run/iter_000000005" in caplog.text
    assert (claim.state, claim.predecessor) == (ClaimState.EXISTS, None)
    withdraw_step(store, claim)
    assert objects.content == {f"{STEP}/.writing": b"new\n"}


@pytest.mark.parametrize("on_existing", [OnExisting.ERROR, OnExisting.SKIP])
def test_a_commit_since_the_claim_is_not_withdrawn_unless_that_was_asked_for(
    objects: Objects, on_existing: OnExisting
) -> None:
    objects.content[f"{STEP}/.writing"] = b"other\n"
    store = SharedStore(objects)
    claim = claim_step(store, 5, "new", on_existing)
    committed(objects, 5, "other")
    before = dict(objects.content)
    with pytest.raises(SupersededError, match="save other has taken over"):
        withdraw_step(store, claim)
    assert objects.content == before


@pytest.mark.parametrize("moment", ["claimed", "committed"])
def test_a_save_that_another_took_over_from_publishes_and_deletes_nothing(objects: Objects, moment: str) -> None:
    committed(objects, 4, "older")
    store = SharedStore(objects)
    old = claim_step(store, 5, "old")
    manifest = wrote(objects, old)
    new = claim_step(store, 5, "new")
    withdraw_step(store, new)
    wanted = wrote(objects, new)
    if moment == "committed":
        publish_step(store, new, wanted)
    before = dict(objects.content)
    with pytest.raises(SupersededError) as caught:
        publish_step(store, old, manifest)
    assert isinstance(caught.value, CheckpointExistsError)
    with pytest.raises(SupersededError):
        put_owned(store, f"{STEP}/model/.metadata", [b"old"], iteration=5, save_id="old")
    abandon_step(store, old, manifest.files)
    assert objects.content == before
    if moment == "claimed":
        publish_step(store, new, wanted)
    assert check_step(store, 5).manifest == wanted


def test_the_owner_replaces_what_a_save_that_lost_has_put(objects: Objects) -> None:
    store = SharedStore(objects)
    claim = claim_step(store, 5, "new")
    objects.content[f"{STEP}/model/.metadata"] = b"old"
    objects.content[f"{STEP}/manifest.json"] = encode_manifest(Manifest("old", 5, 1, {}))
    put_owned(store, f"{STEP}/model/.metadata", [b"new"], iteration=5, save_id="new")
    assert objects.content[f"{STEP}/model/.metadata"] == b"new"
    assert f"{STEP}/manifest.json" not in objects.content, "it would vouch for the new file"
    objects.content[f"{STEP}/manifest.json"] = b"damaged"
    publish_step(store, claim, wrote(objects, claim))
    assert check_step(store, 5).is_complete


@pytest.mark.parametrize("stragglers", list(Stragglers))
def test_case_30_a_failed_save_leaves_nothing_or_the_mark_of_its_death(
    objects: Objects, stragglers: Stragglers
) -> None:
    store = SharedStore(objects)
    claim = claim_step(store, 5, "a")
    wrote(objects, claim)
    objects.content[f"{STEP}/optim/__1_0.distcp"] = b"of a rank that was never heard of"
    objects.content[f"{STEP}/model/__0_{first_file_number('b')}.distcp"] = b"another save's"
    objects.content[f"{STEP}/manifest.json"] = encode_manifest(Manifest("a", 5, 1, {}))
    abandon_step(store, claim, ["model/__0_0.distcp"], stragglers=stragglers)
    left = {f"{STEP}/model/__0_{first_file_number('b')}.distcp"}
    if stragglers is Stragglers.POSSIBLE:
        left.add(f"{STEP}/.writing")
        assert claim_step(store, 5, "b").first_file_number > 0, "files of the next save have names of their own"
    assert set(objects.content) == left


def test_abandoning_never_raises(objects: Objects, caplog: pytest.LogCaptureFixture) -> None:
    store = FaultyStore(SharedStore(objects), FaultPlan(mutation=2))
    claim = claim_step(store, 5, "a")
    wrote(objects, claim)
    abandon_step(store, claim, ["model/__0_0.distcp"])
    assert "are left, and are no step" in caplog.text
    assert read_owner(store, 5) == "a"


def test_a_manifest_whose_answer_was_lost_is_a_commit(objects: Objects, caplog: pytest.LogCaptureFixture) -> None:
    store = FaultyStore(SharedStore(objects), FaultPlan(mutation=2, moment=Moment.AFTER))
    claim = claim_step(store, 5, "a")
    publish_step(store, claim, wrote(objects, claim))
    assert "although its manifest's put failed" in caplog.text
    assert check_step(store, 5).is_complete
    store = FaultyStore(SharedStore(objects), FaultPlan(mutation=1))
    claim = Claim(6, "b", ClaimState.FRESH)
    objects.content["iter_000000006/.writing"] = b"b\n"
    with pytest.raises(InjectedError):
        publish_step(store, claim, Manifest("b", 6, 1, {}))


def test_a_mark_that_stays_beside_a_manifest_means_nothing(objects: Objects, caplog: pytest.LogCaptureFixture) -> None:
    store = FaultyStore(SharedStore(objects), FaultPlan(mutation=3))
    claim = claim_step(store, 5, "a")
    publish_step(store, claim, wrote(objects, claim))
    assert "is left" in caplog.text
    assert read_owner(store, 5) == "a"
    assert check_step(store, 5).is_complete


def test_case_34_the_pointer_is_left_alone_when_someone_has_moved_it_since(
    objects: Objects, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    store = SharedStore(objects)
    objects.content[LATEST_NAME] = b"iter_000000003\n"
    claim = claim_step(store, 5, "a")
    objects.content[LATEST_NAME] = b"iter_000000009\n"
    move_latest(store, 5, claim)
    assert objects.content[LATEST_NAME] == b"iter_000000009\n"
    assert "it was changed to 'iter_000000009'" in caplog.text
    move_latest(store, 5)
    assert objects.content[LATEST_NAME] == b"iter_000000005\n"
    again = claim_step(store, 6, "b")  # a roll back is followed by smaller steps
    move_latest(store, 4, again)
    assert objects.content[LATEST_NAME] == b"iter_000000004\n"


def test_a_pointer_that_can_not_be_moved_is_an_error_that_names_the_step(objects: Objects) -> None:
    store = FaultyStore(SharedStore(objects), FaultPlan(mutation=1))
    with pytest.raises(StorageError, match="iter_000000005 is complete: load_step=5 loads it"):
        move_latest(store, 5)


def test_numbers_of_two_saves_do_not_meet() -> None:
    numbers = {first_file_number(f"{save:032x}") for save in range(300)}
    assert len(numbers) == 300
    assert all(number % FILE_BLOCK == 0 and 0 < number < 10**12 for number in numbers)


def test_an_iteration_that_names_no_step_is_refused(objects: Objects) -> None:
    with pytest.raises(ConfigError):
        claim_step(SharedStore(objects), -1, "a")
    assert objects.content == {}
