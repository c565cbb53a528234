"""The save planner without ranks: torch's items and keys, checks, structure, cache."""

from __future__ import annotations

import gc
import io
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner import SavePlanner as TorchSavePlanner

import dcpfs
from dcpfs.dcp.flatten import STRUCTURE_ATTRIBUTE, Structure, unflatten
from dcpfs.dcp.save_planner import _check_coverage
from dcpfs.errors import ReplicaMismatchError, UnsupportedValueError
from dcpfs.format.collector import paused_collector
from tests.unit.format.collecting import collects_again

STATE: dict[str, Any] = {
    "w": torch.ones(2, 3),
    "p": torch.nn.Parameter(torch.ones(4)),
    "s": torch.tensor(1.0),
    "nested": {"l": [torch.zeros(1), {"x": 3}], 2: "two", "empty": {}},
}


def _plan(planner: TorchSavePlanner, state: dict[str, Any] = STATE) -> SavePlan:
    planner.set_up_planner(state, is_coordinator=True)
    return planner.create_local_plan()


@pytest.fixture
def _clean_cache() -> Iterator[None]:
    names = ("_cached_save_plan", "_cached_final_save_plan", "_cached_all_plans", "_cached_global_plan")
    caches = [getattr(TorchSavePlanner, name) for name in (*names, "_cached_metadata")]
    for cache in caches:
        cache.clear()
    yield
    for cache in caches:
        cache.clear()


def test_items_and_metadata_are_those_of_torch() -> None:
    ours, torchs = dcpfs.SavePlanner(), DefaultSavePlanner()
    our_plan, torch_plan = _plan(ours), _plan(torchs)
    assert [(i.index, i.type, i.tensor_data) for i in our_plan.items] == [
        (i.index, i.type, i.tensor_data) for i in torch_plan.items
    ]
    (our_final,), our_metadata = ours.create_global_plan([our_plan])
    (torch_final,), torch_metadata = torchs.create_global_plan([torch_plan])
    assert our_metadata.state_dict_metadata == torch_metadata.state_dict_metadata
    assert list(our_metadata.state_dict_metadata) == list(torch_metadata.state_dict_metadata)
    assert our_metadata.planner_data == torch_metadata.planner_data
    assert [i.index.index for i in our_final.items] == [i.index.index for i in torch_final.items]


def test_structure_reaches_the_metadata() -> None:
    planner = dcpfs.SavePlanner()
    _, metadata = planner.create_global_plan([_plan(planner)])
    structure = Structure.from_json(getattr(metadata, STRUCTURE_ATTRIBUTE), metadata.planner_data)
    rebuilt = unflatten(dict.fromkeys(metadata.state_dict_metadata, 0), structure)
    assert rebuilt == {"w": 0, "p": 0, "s": 0, "nested": {"l": [0, {"x": 0}], 2: 0, "empty": {}}}


def test_data_is_the_states_own_memory_and_objects_are_what_torch_saves() -> None:
    planner = dcpfs.SavePlanner()
    plan = _plan(planner)
    for item in plan.items:
        found = planner.resolve_data(item)
        again = planner.resolve_data(item)
        if isinstance(found, io.BytesIO):
            assert isinstance(again, io.BytesIO)
            assert found.getvalue() == again.getvalue()
        else:
            assert found is again
    weight = planner.resolve_data(plan.items[0])
    assert isinstance(weight, torch.Tensor)
    assert weight.data_ptr() == STATE["w"].data_ptr()
    text = planner.resolve_data(next(item for item in plan.items if item.index.fqn == "nested.2"))
    assert isinstance(text, io.BytesIO)
    assert torch.load(text, weights_only=True) == "two"


def test_equal_numbers_are_encoded_once_and_minus_zero_is_its_own() -> None:
    planner = dcpfs.SavePlanner()
    plan = _plan(planner, {"a": 0.0, "b": -0.0, "c": 0, "d": False, "e": 0.0})
    found = []
    for item in plan.items:
        data = planner.resolve_data(item)
        assert isinstance(data, io.BytesIO)
        found.append(repr(torch.load(data, weights_only=True)))
    assert found == ["0.0", "-0.0", "0", "False", "0.0"]


def test_shards_that_do_not_fit_are_refused() -> None:
    planner = dcpfs.SavePlanner()
    data = _plan(planner, {"w": torch.ones(4)}).items[0].tensor_data
    assert data is not None
    metadata = TensorStorageMetadata(data.properties, torch.Size([9]), [data.chunk])
    with pytest.raises(UnsupportedValueError, match="'w': its chunks hold 4 of 9"):
        _check_coverage({"w": metadata}, complete=True)


@pytest.mark.usefixtures("_clean_cache")
def test_cached_plans_follow_dtypes_and_key_types() -> None:
    def step(state: dict[str, Any]) -> tuple[SavePlan, SavePlan, Any]:
        planner = dcpfs.SavePlanner(enable_plan_caching=True)
        local = _plan(planner, state)
        (change,), metadata = planner.create_global_plan([local])
        return local, planner.finish_plan(change), metadata

    first, final, metadata = step({"w": torch.ones(2), "m": {2: 1}})
    assert first.usable
    again, final_again, metadata_again = step({"w": torch.zeros(2), "m": {2: 5}})
    assert not again.usable
    assert final_again is final
    assert metadata_again is metadata
    for changed in ({"w": torch.ones(2, dtype=torch.int32), "m": {2: 1}}, {"w": torch.ones(2), "m": {"2": 1}}):
        local, final_changed, _ = step(changed)
        assert local.usable
        assert final_changed is not final


@pytest.mark.usefixtures("_clean_cache")
def test_a_cached_plan_without_a_cache_at_the_coordinator_is_refused() -> None:
    planner = dcpfs.SavePlanner(enable_plan_caching=True)
    with pytest.raises(ReplicaMismatchError, match="cached plan"):
        planner.create_global_plan([_plan(planner), SavePlan([], usable=False)])


def test_the_collector_is_paused_and_comes_back() -> None:
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with paused_collector():
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=hold)
    assert collects_again()
    with paused_collector():
        thread.start()
        assert inside.wait(30)
        with paused_collector():
            pass
        assert not gc.isenabled()
    assert not gc.isenabled()  # the thread's pause is still open
    leave.set()
    thread.join()
    assert collects_again()


@pytest.mark.usefixtures("_clean_cache")
@pytest.mark.parametrize("reuse", [False, True], ids=["a planner for each save", "one planner for all"])
@pytest.mark.parametrize("planned", [False, True], ids=["before the global plan", "after the global plan"])
def test_case_74_a_save_that_failed_leaves_no_plan_to_the_next(reuse: bool, planned: bool) -> None:
    """Else the next one, of the structure before, is published with its metadata, or written by another plan."""
    one = dcpfs.SavePlanner(enable_plan_caching=True)

    def save(state: dict[str, Any]) -> tuple[list[str], Any]:
        planner = one if reuse else dcpfs.SavePlanner(enable_plan_caching=True)
        (change,), metadata = planner.create_global_plan([_plan(planner, state)])
        final = planner.finish_plan(change)
        return [item.index.fqn for item in final.items], metadata

    def fail(state: dict[str, Any]) -> None:
        planner = one if reuse else dcpfs.SavePlanner(enable_plan_caching=True)
        plan = _plan(planner, state)
        if planned:
            planner.create_global_plan([plan])

    few, many = {"w": torch.ones(2)}, {"w": torch.ones(2, dtype=torch.bfloat16), "x": torch.ones(1)}
    for state, other in [(few, many), (few, many), (many, few), (few, many)]:
        keys, metadata = save(state)
        assert keys == list(state) == list(metadata.state_dict_metadata)
        assert metadata.state_dict_metadata["w"].properties.dtype is state["w"].dtype
        fail(other)


def test_case_8_parts_at_one_place_have_one_size() -> None:
    def plan(rows: int) -> SavePlan:
        data = TensorWriteData(
            ChunkStorageMetadata(torch.Size([0]), torch.Size([rows])),
            TensorProperties(torch.float32),
            torch.Size([2]),
        )
        return SavePlan([WriteItem(MetadataIndex("w", torch.Size([0])), WriteItemType.SHARD, tensor_data=data)])

    for sizes in ((2, 1), (2, 0)):
        with pytest.raises(
            ReplicaMismatchError, match=r"'w': at \(0,\) rank 0 holds a part of shape \(2,\) and rank 1"
        ):
            dcpfs.SavePlanner().create_global_plan([plan(rows) for rows in sizes])
