"""What the writer of a step's key says about its files is what lies in the store."""

from __future__ import annotations

import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.planner import SavePlan

import dcpfs
from dcpfs.checkpointer.commit import claim_step, publish_step
from dcpfs.checkpointer.completeness import check_step, verify_step
from dcpfs.checkpointer.manifest import FileRecord, Manifest
from dcpfs.checkpointer.ownership import first_file_number
from dcpfs.checkpointer.step_writer import StepWriter
from dcpfs.config import RetryConfig, TransferConfig
from dcpfs.dcp.save_planner import SavePlanner
from dcpfs.errors import IncompleteCheckpointError, SupersededError
from dcpfs.storage.fsspec_store import FsspecStore
from dcpfs.storage.local_store import LocalStore
from dcpfs.storage.location import Location
from dcpfs.storage.opening import open_store
from dcpfs.storage.store import Store
from dcpfs.storage.subdirectory import Subdirectory
from dcpfs.testing.conformance import StoreConformance
from dcpfs.testing.recording import RecordingStore
from dcpfs.torch_private import StreamTransformExtension
from tests.conformance.step_scene import location_on

STEP = "iter_000000007"
STATE: dict[str, Any] = {
    "large": torch.arange(300_000.0).reshape(300, 1000),
    "larger": torch.arange(700_000, dtype=torch.int16),
    "strided": torch.arange(200_000.0).reshape(400, 500).t(),
    "conjugate": torch.ones(20_000, dtype=torch.complex64).conj(),
    "empty": torch.empty(0, 3),
    "scalar": torch.tensor(3.0),
    "text": "x" * 300_000,
    "nested": {str(number): torch.full((number,), float(number)) for number in range(200)},
    "bfloat": torch.ones(70_000, dtype=torch.bfloat16),
}


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    opened = open_store(location_on(request.param, tmp_path, lambda: pytest.fail("no server is needed")))
    yield opened
    opened.close()


def written(store: Store, state: dict[str, Any] = STATE, **options: Any) -> tuple[StepWriter, dict[str, FileRecord]]:
    """Save one key, all but the manifest; the files as the writer describes them."""
    options = {"save_id": "a" * 32, **options}
    writer = StepWriter(store, 7, "model", **options)
    writer.set_up_storage_writer(True, rank=2)
    planner = SavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    plan: SavePlan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    results = writer.write_data(plan, planner).value()
    writer.publish(metadata, [results])
    assert writer.metadata_file is not None
    return writer, {**writer.files, "model/.metadata": writer.metadata_file}


@pytest.mark.parametrize(
    "transfer",
    [
        TransferConfig(),
        TransferConfig(part_bytes=1 << 16),
        TransferConfig(part_bytes=1 << 18, file_bytes=1 << 20),
        TransferConfig(part_bytes=1 << 20, concurrency=1),
    ],
    ids=["one part", "small parts", "many files", "alone"],
)
def test_case_113_every_file_has_its_size_and_checksum(store: Store, transfer: TransferConfig) -> None:
    _, files = written(store, transfer=transfer)
    lying = {info.path.removeprefix(f"{STEP}/") for info in store.list(STEP)}
    assert set(files) == lying
    for name, record in files.items():
        content = store.get(f"{STEP}/{name}")
        assert (record.size_bytes, record.crc32) == (len(content), zlib.crc32(content)), name


class _Inverting(StreamTransformExtension):
    """Flips every byte."""

    @staticmethod
    def registry_name() -> str:
        return "inverting"

    @staticmethod
    def from_descriptor(version: str) -> _Inverting:
        return _Inverting()

    def get_descriptor(self) -> str:
        return "inverting/1"

    def transform_to(self, output: Any) -> Any:
        class Stream:
            def write(self, data: Any) -> int:
                return int(output.write(bytes(byte ^ 0xFF for byte in bytes(data))))

            def close(self) -> None:
                output.close()

        return Stream()

    def transform_from(self, input: Any) -> Any:  # noqa: A002 - torch's name
        raise NotImplementedError


def test_files_of_transformed_entries_have_checksums_too(store: Store) -> None:
    _, files = written(store, {"w": torch.arange(1000.0)}, extensions=[_Inverting()])
    (name,) = set(files) - {"model/.metadata"}
    assert files[name].crc32 == zlib.crc32(store.get(f"{STEP}/{name}"))


def test_no_checksum_costs_another_pass_over_large_tensors(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from dcpfs.dcp import payload as payload_module
    from dcpfs.dcp import upload as upload_module
    from dcpfs.format.checksum import crc32

    seen: dict[str, int] = {"payload": 0, "upload": 0}

    def counting(module: str) -> Any:
        def count(buffer: Any, value: int = 0) -> int:
            seen[module] += memoryview(buffer).nbytes
            return crc32(buffer, value)

        return count

    monkeypatch.setattr(payload_module, "crc32", counting("payload"))
    monkeypatch.setattr(upload_module, "crc32", counting("upload"))
    tensor = torch.arange(4_000_000.0)
    written(store, {"w": tensor}, transfer=TransferConfig(part_bytes=1 << 20))
    assert seen["payload"] >= tensor.nbytes
    assert seen["upload"] < 10_000


def test_files_are_numbered_from_where_the_claim_says(store: Store) -> None:
    number = first_file_number("x")
    _, files = written(store, {"w": torch.ones(3)}, first_file_number=number)
    assert set(files) == {f"model/__2_{number}.distcp", "model/.metadata"}
    check_ones(store)


def check_ones(store: Store) -> None:
    loaded = dcpfs.read(store.location.join(f"{STEP}/model").url)["w"]
    assert isinstance(loaded, torch.Tensor)
    assert torch.equal(loaded, torch.ones(3))


def test_a_writer_withdraws_nothing_lists_nothing_and_leaves_the_store_open(store: Store) -> None:
    recorded = RecordingStore(store)
    store.put(f"{STEP}/model/__9_0.distcp", [b"of nobody's business"])
    writer, _ = written(recorded, {"w": torch.ones(3)}, save_id="b" * 32)
    assert not {"list", "delete", "close", "exists", "head"} & set(recorded.verbs)
    assert recorded.paths("put") == [f"{STEP}/model/.metadata"]
    assert writer.save_id == "b" * 32 == writer.storage_meta().save_id
    assert store.exists(f"{STEP}/model/__9_0.distcp")
    with pytest.raises(TypeError, match="can't be pickled"):
        writer.__getstate__()


def test_the_metadata_of_a_save_that_owns_the_step_is_left_alone(store: Store) -> None:
    store.put(f"{STEP}/.writing", [b"other\n"])
    store.put(f"{STEP}/model/.metadata", [b"other's"])
    with pytest.raises(SupersededError, match="save other has taken over"):
        written(store, {"w": torch.ones(3)})
    assert store.get(f"{STEP}/model/.metadata") == b"other's"
    store.put(f"{STEP}/.writing", [b"a" * 32])
    written(store, {"w": torch.ones(3)})
    check_ones(store)


def test_case_1_an_item_without_a_result_publishes_nothing(store: Store) -> None:
    writer = StepWriter(store, 7, "model", save_id="a")
    writer.set_up_storage_writer(True, rank=0)
    planner = SavePlanner()
    planner.set_up_planner({"w": torch.ones(3), "v": 4}, is_coordinator=True)
    _, metadata = planner.create_global_plan([planner.create_local_plan()])
    with pytest.raises(IncompleteCheckpointError):
        writer.publish(metadata, [[]])
    assert not list(store.list(STEP))


def test_equal_contents_have_equal_fingerprints_and_others_do_not(store: Store) -> None:
    def fingerprint(value: float, **options: Any) -> int:
        state = {"w": torch.full((9,), value), "s": "text"}
        return written(store, state, save_id=uuid.uuid4().hex, **options)[0].fingerprint

    store.put(f"{STEP}/.writing", [b"x"])
    first = fingerprint(1.0)
    store.delete([f"{STEP}/model/.metadata"])
    second = fingerprint(1.0, first_file_number=100_000)
    store.delete([f"{STEP}/model/.metadata"])
    assert first == second != fingerprint(2.0)


def test_case_113_a_flipped_bit_is_found_by_the_manifest(store: Store) -> None:
    claim = claim_step(store, 7, "a" * 32)
    _, files = written(store)
    publish_step(store, claim, Manifest("a" * 32, 7, 3, files, keys=("model",)))
    assert verify_step(store, check_step(store, 7)) == []
    name = next(name for name in files if name.endswith(".distcp"))
    content = bytearray(store.get(f"{STEP}/{name}"))
    content[len(content) // 2] ^= 4
    store.put(f"{STEP}/{name}", [content])
    status = check_step(store, 7)
    assert status.is_complete, "sizes alone do not tell"
    assert [fault.file for fault in verify_step(store, status)] == [name]


PARTS = TransferConfig(part_bytes=64 << 10)
QUICK = RetryConfig(attempts=3, initial_backoff_seconds=0.001, max_backoff_seconds=0.001)


class TestSubdirectoryOfFiles(StoreConformance):
    """A directory of a store is a store."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        opened = LocalStore(Location(tmp_path), transfer=PARTS)
        yield Subdirectory(opened, "a/b")
        opened.close()

    def reopen(self, store: Store) -> Store:
        return LocalStore(store.location, transfer=PARTS)


class TestSubdirectoryInMemory(StoreConformance):
    """The same, of a store that makes no difference between a name and its directory."""

    shared_between_processes = False

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        opened = FsspecStore(Location(f"memory://{uuid.uuid4().hex}"), transfer=PARTS, retry=QUICK)
        yield Subdirectory(opened, "a")
        opened.close()

    def reopen(self, store: Store) -> Store:
        return FsspecStore(store.location, transfer=PARTS, retry=QUICK)
