"""The writer's order of calls, its refusals, and what a failure leaves: on a store in memory."""

from __future__ import annotations

import contextlib
import io
import logging
import pickle
import re
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fsspec.callbacks import Callback
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import dcpfs
from dcpfs.dcp import writer as writer_module
from dcpfs.dcp.predecessor import refuse_existing
from dcpfs.errors import (
    CheckpointExistsError,
    ConfigError,
    IncompleteCheckpointError,
    UnsupportedValueError,
)
from dcpfs.format.metadata import decode_index
from tests.unit.dcp.memory_store import MemoryStore

STATE: dict[str, Any] = {"a": torch.arange(10.0), "b": {"c": torch.ones(3, 4).t(), "n": 5}, "e": {}}


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryStore]:
    made = MemoryStore(part_bytes=1000)
    monkeypatch.setattr(writer_module, "open_store", lambda location, **_: made)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield made


def _save(how: str, state: dict[str, Any] = STATE, **options: Any) -> None:
    if how == "dcpfs.save":
        dcpfs.save(state, "memory://x/y", **options)
    elif how == "planner":
        writer = dcpfs.FsspecStorageWriter("memory://x/y", **options)
        dcp_save(state, storage_writer=writer, planner=dcpfs.SavePlanner())
    else:
        dcp_save(state, storage_writer=dcpfs.FsspecStorageWriter("memory://x/y", **options))


HOW = ["dcpfs.save", "planner", "dcp.save"]


@pytest.mark.parametrize("how", HOW)
def test_case_33_metadata_is_one_put_and_comes_last(store: MemoryStore, how: str) -> None:
    _save(how)
    assert store.calls[-1] == ("put", ".metadata")
    assert [verb for verb, path in store.calls if path == ".metadata"] == ["put"]
    assert {path for _, path in store.calls} == {"__0_0.distcp", ".metadata"}
    assert store.closed


@pytest.mark.parametrize("how", HOW)
def test_case_106_an_existing_checkpoint_is_refused_before_a_byte(store: MemoryStore, how: str) -> None:
    _save(how)
    store.calls.clear()
    before = dict(store.objects)
    with pytest.raises((CheckpointExistsError, CheckpointException), match="overwrite=True"):
        _save(how)
    assert store.calls == []
    assert store.objects == before


def test_overwriting_withdraws_first_and_cleans_up_last(store: MemoryStore) -> None:
    names = ("__0.metadata", "__3.metadata", "__7_0.distcp", "__0_9.distcp", "notes.txt", "__1_0.distcp.bak")
    store.objects = dict.fromkeys(names, b"old")
    store.objects[".metadata"] = b"old"
    _save("dcpfs.save", overwrite=True)
    assert store.calls[0] == ("delete", ".metadata")
    assert set(store.calls[1:3]) == {("delete", "__0.metadata"), ("delete", "__3.metadata")}
    put = store.calls.index(("put", ".metadata"))
    assert set(store.calls[put + 1 :]) == {("delete", "__7_0.distcp"), ("delete", "__0_9.distcp")}
    assert set(store.objects) == {".metadata", "__0_0.distcp", "notes.txt", "__1_0.distcp.bak"}


def test_leftovers_that_stay_do_not_fail_a_published_save(store: MemoryStore, caplog: pytest.LogCaptureFixture) -> None:
    store.objects = {"__7_0.distcp": b"old"}

    def fail(called: str, path: str) -> None:
        if called == "delete" and path == "__7_0.distcp":
            raise OSError("not allowed")

    store.hook = fail
    _save("dcpfs.save", overwrite=True)
    assert {".metadata", "__0_0.distcp"} <= set(store.objects)
    assert "are left: not allowed" in caplog.text


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("verb", ["open", "part", "commit", "put"])
def test_case_1_2_and_31_a_failure_leaves_nothing_loadable(
    store: MemoryStore, how: str, overwrite: bool, verb: str
) -> None:
    if overwrite:
        _save(how)

    def fail(called: str, path: str) -> None:
        if called == verb:
            raise OSError(f"{verb} of {path} failed")

    store.hook = fail
    with pytest.raises((OSError, CheckpointException), match=f"{verb} of"):
        _save(how, overwrite=overwrite)
    assert ".metadata" not in store.objects
    if not overwrite or verb == "put":
        assert store.objects == {}
    assert store.open_sinks == set()


def test_an_empty_plan_writes_no_data_file(store: MemoryStore) -> None:
    _save("dcpfs.save", {"e": {}})
    assert list(store.objects) == [".metadata"]


class _Losing(dcpfs.FsspecStorageWriter):
    """Loses a result on its way to the coordinator."""

    def finish(self, metadata: Metadata, results: Any) -> None:
        super().finish(metadata, [results[0][1:]])


def test_case_1_and_45_every_planned_item_is_accounted_for(store: MemoryStore) -> None:
    with pytest.raises(CheckpointException, match="1 planned item was not written: 'a'"):
        dcp_save(STATE, storage_writer=_Losing("memory://x"))
    assert store.objects == {}


def test_case_45_entries_that_nobody_planned_are_refused(store: MemoryStore) -> None:
    writer = dcpfs.FsspecStorageWriter("memory://x")
    planner = DefaultSavePlanner()
    planner.set_up_planner(STATE, is_coordinator=True)
    writer.set_up_storage_writer(True, rank=0, use_collectives=True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    plans = writer.prepare_global_plan(plans)
    results = writer.write_data(planner.finish_plan(plans[0]), planner).value()
    del metadata.state_dict_metadata["a"]
    with pytest.raises(IncompleteCheckpointError, match="'a'"):
        writer.finish(metadata, [results])


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.empty(2, device="meta"), "meta"),
        (lambda: 1, "pickle"),
        (io.StringIO, "'bad'"),
    ],
    ids=["sparse", "meta", "lambda", "class"],
)
@pytest.mark.parametrize("how", HOW)
def test_case_17_and_109_refused_before_a_byte_is_written(
    store: MemoryStore, how: str, value: object, words: str
) -> None:
    with pytest.raises((UnsupportedValueError, CheckpointException)) as caught:
        _save(how, {"good": torch.ones(3), "bad": value})
    if not (how == "dcp.save" and words == "pickle"):  # torch's planner pickles it, with words of its own
        assert "'bad'" in str(caught.value)
        assert words in str(caught.value)
    assert store.calls == []


def test_trust_saves_what_a_default_load_refuses(store: MemoryStore) -> None:
    for how in ("dcpfs.save", "dcp.save"):
        _save(how, {"k": io.StringIO}, trust=dcpfs.Trust.PICKLE, overwrite=True)
        assert ".metadata" in store.objects


class _Changing(DefaultSavePlanner):
    """Makes other tensors than it planned."""

    def transform_object(self, write_item: Any, object: Any) -> Any:  # noqa: A002 - torch's name
        value = super().transform_object(write_item, object)
        return value.to(torch.float64) if isinstance(value, torch.Tensor) else value


def test_a_tensor_that_is_not_what_was_planned_is_refused(store: MemoryStore) -> None:
    with pytest.raises(CheckpointException, match=r"torch.float64 .* planned as torch.float32"):
        dcp_save({"w": torch.ones(3)}, storage_writer=dcpfs.FsspecStorageWriter("memory://x"), planner=_Changing())
    assert store.objects == {}


def test_nothing_of_a_save_rides_in_storage_data(store: MemoryStore) -> None:
    writer = dcpfs.FsspecStorageWriter("memory://x")
    writer.set_up_storage_writer(True, rank=0, use_collectives=True)
    planner = DefaultSavePlanner()
    planner.set_up_planner(STATE, is_coordinator=True)
    local = writer.prepare_local_plan(planner.create_local_plan())
    plans, _ = planner.create_global_plan([local])
    assert [plan.storage_data for plan in writer.prepare_global_plan(plans)] == [None]
    foreign = SavePlan([], storage_data="of a plugin")
    assert writer.prepare_global_plan([foreign]) == [foreign]


def test_each_save_has_an_id_of_its_own(store: MemoryStore) -> None:
    writer = dcpfs.FsspecStorageWriter("memory://x", overwrite=True)
    ids = []
    for _ in range(2):
        dcp_save(STATE, storage_writer=writer)
        ids.append(writer.save_id)
        assert decode_index(store.objects[".metadata"]).save_id == writer.save_id
        meta = pickle.loads(store.objects[".metadata"]).storage_meta
        assert (meta.save_id, meta.checkpoint_id) == (writer.save_id, "memory://x")
    assert ids[0] != ids[1]


def test_case_76_options_stay_when_a_writer_is_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []

    def open_store(location: Any, **_: Any) -> MemoryStore:
        opened.append(location)
        return MemoryStore()

    monkeypatch.setattr(writer_module, "open_store", open_store)
    options = {"key": "k", "client_kwargs": {"endpoint_url": "http://localhost:1"}}
    writer = dcpfs.FsspecStorageWriter("s3://b/1", storage_options=options)
    dcp_save(STATE, storage_writer=writer, no_dist=True)
    dcp_save(STATE, storage_writer=writer, checkpoint_id="s3://b/2", no_dist=True)
    assert [location.url for location in opened] == ["s3://b/1", "s3://b/2"]
    assert all(location.storage_options == options for location in opened)


def test_case_114_no_secret_in_any_text(store: MemoryStore, caplog: pytest.LogCaptureFixture) -> None:
    url = "sftp://user:hunter2@host/run"
    writer = dcpfs.FsspecStorageWriter(url, storage_options={"secret": "s3cr3t"})
    with caplog.at_level(logging.DEBUG):
        dcp_save(STATE, storage_writer=writer)
    texts = [caplog.text, repr(writer), str(writer.checkpoint_id), str(writer.storage_meta())]
    assert not any("hunter2" in text or "s3cr3t" in text for text in texts)
    assert b"hunter2" not in store.objects[".metadata"]
    assert b"s3cr3t" not in store.objects[".metadata"]


def test_one_line_per_save(store: MemoryStore, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="dcpfs"):
        _save("dcpfs.save")
    (line,) = [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("dcpfs") and record.levelno == logging.INFO
    ]
    assert line.startswith("rank 0 saved 0.0 MB to memory://x/y in ")


def test_a_writer_is_picklable_without_its_store_and_callback(store: MemoryStore) -> None:
    writer = dcpfs.FsspecStorageWriter(
        "memory://x", storage_options={"o": 1}, overwrite=True, callback=Callback(hooks={"f": lambda *_: None})
    )
    copy = pickle.loads(pickle.dumps(writer))
    assert copy.location == writer.location
    dcp_save(STATE, storage_writer=copy)
    assert ".metadata" in store.objects


def test_progress_in_bytes(store: MemoryStore) -> None:
    callback = Callback()
    report = dcpfs.save(STATE, "memory://x", callback=callback)
    assert callback.value == callback.size == report.bytes_written == len(store.objects["__0_0.distcp"])


def test_files_of_a_wished_size(store: MemoryStore) -> None:
    state = {f"k{n}": torch.full((1 << 17,), float(n)) for n in range(8)}  # 0.5 MB each
    dcpfs.save(state, "memory://x", transfer=dcpfs.TransferConfig(file_bytes=1 << 20))
    assert sorted(store.objects) == [".metadata", *(f"__0_{n}.distcp" for n in range(5))]


def test_what_is_no_mapping_is_refused() -> None:
    with pytest.raises(ConfigError, match="list"):
        dcpfs.save([1], "memory://x")  # type: ignore[arg-type]  # the point of the test


@pytest.mark.parametrize("bad", ["", "s3:/b/x"])
def test_checkpoint_ids(bad: str) -> None:
    assert dcpfs.FsspecStorageWriter.validate_checkpoint_id("s3://b/x")
    assert not dcpfs.FsspecStorageWriter.validate_checkpoint_id(bad)


@pytest.mark.parametrize("how", HOW)
def test_a_quantized_tensor_is_refused_by_its_key(store: MemoryStore, how: str) -> None:
    state = {"a": torch.ones(2), "layer.weight": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)}
    with pytest.raises((UnsupportedValueError, CheckpointException), match=r"layer\.weight"):
        _save(how, state)
    assert store.calls == []


@pytest.mark.parametrize("taken", [None, ".metadata", "__0.metadata"])
def test_case_106_a_remote_store_is_asked_for_all_markers_at_once(taken: str | None) -> None:
    store = MemoryStore()
    if taken is not None:
        store.objects[taken] = b"old"
    together = threading.Barrier(2, timeout=20)
    ask = store.exists

    def wait_for_the_other(path: str) -> bool:
        together.wait()
        return ask(path)

    store.exists = wait_for_the_other  # type: ignore[method-assign]  # seen by this one store alone
    raises = contextlib.nullcontext() if taken is None else pytest.raises(CheckpointExistsError, match=re.escape(taken))
    with raises:
        refuse_existing(store, (".metadata", "__0.metadata"), concurrency=2)
