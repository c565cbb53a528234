"""States of a user's own come back as what they were, and what nobody takes of them is said."""

from __future__ import annotations

import copy
import logging
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.optim.lr_scheduler import MultiStepLR

import dcpfs
from dcpfs.checkpointer.load_step import load_step
from dcpfs.errors import UnsupportedValueError
from dcpfs.storage.location import Location


def state() -> dict[str, Any]:
    """Every kind of mapping that is told apart, at the top, nested, in a list, and empty."""
    return {
        "counter": Counter({"b": 1, "a": 2}),
        "ordered": OrderedDict(z=1, a=torch.arange(2)),
        "lists": defaultdict(list, x=[1]),
        "numbers": defaultdict(int, a=3),
        "empty": {},
        "empties": {"plain": {}, "ordered": OrderedDict(), "counter": Counter()},
        "deep": {"counter": Counter({3: 1}), "list": [OrderedDict(k=torch.ones(1)), {}]},
        "by number": {1: {2: torch.zeros(1)}},
    }


def shape_of(value: object) -> object:
    """A value as text, with the kinds of its mappings."""
    if isinstance(value, torch.Tensor):
        return ("tensor", value.tolist())
    if isinstance(value, dict):
        kind = (type(value).__name__, getattr(value, "default_factory", None))
        items = value.items() if isinstance(value, OrderedDict) else sorted(value.items(), key=str)
        return (kind, [(key, shape_of(each)) for key, each in items])
    if isinstance(value, list):
        return [shape_of(each) for each in value]
    return value


class Holder:
    """An object that is empty before it is given its state."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = dict(state_dict)


def dcp_save_to(state: dict[str, object], path: str) -> None:
    dcp_save(state, storage_writer=FileSystemWriter(path), no_dist=True)


@pytest.fixture
def save_dir() -> str:
    return f"memory://{uuid.uuid4().hex}/run"


def checkpointer_at(save_dir: str) -> dcpfs.DistributedCheckpointer:
    return dcpfs.DistributedCheckpointer(dcpfs.CheckpointConfig(save_dir=save_dir, extra_keys=["own"]))


@pytest.mark.parametrize("make", [dict, Holder])
@pytest.mark.parametrize("key", ["trainer", "own"])
def test_mappings_come_back_as_the_kinds_that_they_were_into_what_is_empty(
    save_dir: str, key: str, make: Callable[[], Any]
) -> None:
    with checkpointer_at(save_dir) as checkpointer:
        checkpointer.save_state(1, {key: state()})
        holder = make()
        assert checkpointer.load_state({key: holder}) == 1
    found = holder if isinstance(holder, dict) else holder.state
    assert shape_of(found) == shape_of(state())


LISTS_WITH_NOTHING = [
    [1, {}],
    [None, {}, 3],
    [[], {}],
    [{"a": {}}, 1],
    [[{}], 1],
    [[{}, [{}]], 2],
    [1, {"k": OrderedDict()}, {"b": torch.ones(1)}],
    {"l": [1, {}]},
    [{}],
]


@pytest.mark.parametrize("make", [dict, Holder])
@pytest.mark.parametrize("key", ["trainer", "own"])
def test_a_list_with_an_empty_mapping_beside_plain_values_comes_back(
    save_dir: str, key: str, make: Callable[[], Any]
) -> None:
    """Such a list is opened, and one of plain values alone is not: a template without the mapping asks for another."""
    saved = {str(number): value for number, value in enumerate(LISTS_WITH_NOTHING)}
    with checkpointer_at(save_dir) as checkpointer:
        checkpointer.save_state(1, {key: saved})
        for live in ({}, copy.deepcopy(saved)):
            holder = make()
            (holder if isinstance(holder, dict) else holder.state).update(live)
            assert checkpointer.load_state({key: holder}) == 1
            found = holder if isinstance(holder, dict) else holder.state
            assert shape_of(found) == shape_of(saved)


def test_a_state_is_left_as_it_is_where_a_list_in_it_does_not_fit(save_dir: str) -> None:
    with checkpointer_at(save_dir) as checkpointer:
        checkpointer.save_state(1, {"own": {"x": [1, {}], "n": 1}})
        holder = Holder()
        holder.state = {"x": [7], "y": [{"a": 5}], "n": 0}
        own = holder.state["x"]
        with pytest.raises(dcpfs.KeyMismatchError):
            checkpointer.load_state({"own": holder})
        assert holder.state == {"x": [7], "y": [{"a": 5}], "n": 0}
        assert holder.state["x"] is own


class Remembering(nn.Module):
    """A module with an extra state, and its optimizer with values and a field of their own."""

    def __init__(self, memory: object) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.memory = memory
        self.optimizer = torch.optim.SGD([self.weight], lr=1.0)

    def get_extra_state(self) -> Any:
        return self.memory

    def set_extra_state(self, state: Any) -> None:
        self.memory = state

    def note(self, value: object) -> None:
        self.optimizer.state[self.weight] = {"m": torch.ones(2), "note": value}
        self.optimizer.param_groups[0]["note"] = value


@pytest.mark.parametrize("value", [*LISTS_WITH_NOTHING, {"e": {}, "n": 1}, {1: {}, 2: [1]}, [torch.ones(1), {}]])
@pytest.mark.parametrize("knows", [True, False])
def test_nothing_in_a_list_of_a_module_or_an_optimizer_comes_back(save_dir: str, value: Any, knows: bool) -> None:
    model = Remembering(copy.deepcopy(value))
    model.note(copy.deepcopy(value))
    fresh = Remembering(copy.deepcopy(value) if knows else None)
    if knows:
        fresh.note(copy.deepcopy(value))
    else:
        fresh.optimizer.param_groups[0]["note"] = None
    with checkpointer_at(save_dir) as checkpointer:
        checkpointer.save(model, model.optimizer, iteration=1)
        assert checkpointer.load(fresh, fresh.optimizer) == 1
    plain = {"v": copy.deepcopy(value)}
    for found in (
        fresh.memory,
        fresh.optimizer.state[fresh.weight]["note"],
        fresh.optimizer.param_groups[0]["note"],
    ):
        assert plain_shape({"v": found}) == plain_shape(plain)


def plain_shape(value: object) -> object:
    """As `shape_of`, mappings of any kind alike."""
    if isinstance(value, dict):
        return sorted(((repr(key), plain_shape(each)) for key, each in value.items()), key=str)
    return [plain_shape(each) for each in value] if isinstance(value, list) else shape_of(value)


FACTORIES = (int, float, complex, str, bool, bytes, list, dict, set, frozenset, tuple, OrderedDict, Counter, deque)


def count_from_five() -> int:
    return 5


@pytest.mark.parametrize("factory", [None, *FACTORIES, defaultdict])
@pytest.mark.parametrize("content", [{}, {"key": 1}])
def test_the_factory_of_a_defaultdict_comes_back(
    save_dir: str, factory: Callable[[], object] | None, content: dict[str, object]
) -> None:
    with checkpointer_at(save_dir) as checkpointer:
        checkpointer.save_state(1, {"own": {"nested": [defaultdict(factory, content)]}})
        holder: dict[str, Any] = {}
        checkpointer.load_state({"own": holder})
    (found,) = holder["nested"]
    assert shape_of(found) == shape_of(defaultdict(factory, content))


@pytest.mark.parametrize("factory", [count_from_five, lambda: 5, Counter(a=1).copy, Fraction])
@pytest.mark.parametrize("content", [{}, {"key": 1}])
def test_a_factory_that_would_be_lost_is_refused_before_anything_is_written(
    save_dir: str, factory: Callable[[], object], content: dict[str, object]
) -> None:
    """Also into a holder that has it: `dcpfs.read` and an empty holder would come to know of it at a missing key."""
    own = {"deep": [{"counts": defaultdict(factory, content)}]}
    said = r"the defaultdict at \('deep', 0, 'counts'\) has the factory .*, which would be lost; save dict\(\) of it"
    with pytest.raises(UnsupportedValueError, match=said):
        dcpfs.save(own, f"{save_dir}/alone")
    with checkpointer_at(save_dir) as checkpointer:
        with pytest.raises(UnsupportedValueError, match=said):
            checkpointer.save_state(1, {"own": own})
        assert checkpointer.steps() == []
        own["deep"][0]["counts"] = dict(content)  # type: ignore[assignment]  # what the error says
        checkpointer.save_state(2, {"own": own})
        live = {"deep": [{"counts": defaultdict(factory, content)}]}
        mapping = live["deep"][0]["counts"]
        checkpointer.load_state({"own": live})
        assert live["deep"][0]["counts"] is mapping
        assert mapping.default_factory is factory


LEAFLESS: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({"a": {"b": {"e": {}}}}, {}, {"a": {"b": {"e": {}}}}),
    ({"a": {"b": {"e": {}}}}, {"a": {}}, {"a": {"b": {"e": {}}}}),
    ({"a": {"b": {"e": {}}, "x": 1}}, {"a": {"x": 0}}, {"a": {"b": {"e": {}}, "x": 1}}),
    ({"a": {"b": {"e": {}}, "x": 1}}, {"a": {"x": 0, "b": {"e": {}}}}, {"a": {"b": {"e": {}}, "x": 1}}),
    ({"list": [{}, OrderedDict(q={})]}, {}, {"list": [{}, OrderedDict(q={})]}),
    ({"list": [{}, OrderedDict(q={})]}, {"list": []}, {"list": [{}, OrderedDict(q={})]}),
    ({"list": [{}]}, {"list": [3, 4]}, {"list": [{}]}),
    ({"a": {1: {2: Counter(), (3,): {}}}}, {"a": {}}, {"a": {1: {2: Counter(), (3,): {}}}}),
    (
        {"a": {"b": {}}, "c": OrderedDict(d=defaultdict(set))},
        {},
        {"a": {"b": {}}, "c": OrderedDict(d=defaultdict(set))},
    ),
    ({"a": {"b": {}}}, {"a": None}, {"a": {"b": {}}}),
    ({"e": {}}, {"e": [1, 2]}, {"e": {}}),
    ({"e": {}}, {"e": 3}, {"e": {}}),
]


@pytest.mark.parametrize(("saved", "live", "expected"), LEAFLESS)
def test_mappings_with_nothing_in_them_come_back_where_a_state_lacks_them(
    save_dir: str, saved: dict[str, Any], live: dict[str, Any], expected: dict[str, Any]
) -> None:
    """They have no records, so nobody would tell that they are missing."""
    live = copy.deepcopy(live)
    kept = {key: value for key, value in live.items() if isinstance(value, dict)}
    dcpfs.save({**saved, "n": 1}, save_dir)
    state = {**live, "n": 0}
    report = dcpfs.load(state, save_dir)
    assert shape_of(state) == shape_of({**expected, "n": 1})
    assert list(report.missing) == list(report.unexpected) == []
    assert all(state[key] is value for key, value in kept.items())
    assert shape_of(dcpfs.read(save_dir)) == shape_of({**saved, "n": 1})


def test_an_empty_mapping_beside_values_that_a_state_lacks_stays_away_with_them(save_dir: str) -> None:
    """Half of a mapping would be worse than none of it, which the report tells."""
    dcpfs.save({"a": {"e": {}, "x": 1}, "t": {}, "n": 1}, save_dir)
    state: dict[str, Any] = {"n": 0, "t": torch.ones(2)}
    report = dcpfs.load(state, save_dir, strict=False)
    assert list(report.unexpected) == ["a.x"]
    assert list(report.mismatched) == ["t"]
    assert set(state) == {"n", "t"}
    assert state["n"] == 1
    assert state["t"].tolist() == [1.0, 1.0]


def test_mappings_that_are_there_are_updated_in_place(save_dir: str) -> None:
    with checkpointer_at(save_dir) as checkpointer:
        checkpointer.save_state(1, {"trainer": state()})
        live = state()
        tensor = live["ordered"]["a"].zero_()
        mappings = {name: live[name] for name in ("counter", "ordered", "numbers")}
        for mapping in (mappings["counter"], mappings["numbers"]):
            mapping.clear()
        checkpointer.load_state({"trainer": live})
    assert shape_of(live) == shape_of(state())
    assert all(live[name] is mapping for name, mapping in mappings.items())
    assert live["ordered"]["a"] is tensor


@pytest.mark.parametrize("save", [dcp_save_to, dcpfs.save])
def test_the_milestones_of_a_scheduler_stay_a_counter(
    tmp_path: Path, save: Callable[[dict[str, object], str], object]
) -> None:
    """Without one, `MultiStepLR` fails when it is stepped to an epoch. torch alone does not note what mappings were."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    saved, resumed = MultiStepLR(optimizer, [2, 2, 4], gamma=0.5), MultiStepLR(optimizer, [3, 5], gamma=0.5)
    save(dcpfs.SchedulersWrapper(saved).state_dict(), f"{tmp_path}/scheduler")
    load_step({"scheduler": dcpfs.SchedulersWrapper(resumed)}, Location(tmp_path), keys=("scheduler",))
    assert resumed.milestones == Counter({2: 2, 4: 1})
    assert type(resumed.milestones) is Counter
    resumed.last_epoch = 3
    assert resumed._get_closed_form_lr() == [0.25]  # type: ignore[no-untyped-call]  # torch's has no annotations


def test_what_nobody_takes_of_the_trainers_state_is_a_warning(save_dir: str, caplog: pytest.LogCaptureFixture) -> None:
    net = torch.nn.Linear(2, 2)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with checkpointer_at(save_dir) as checkpointer:
        checkpointer.save(net, grad_scaler=scaler, iteration=1, trainer={"tokens": 5, "epoch": 1})
        with caplog.at_level(logging.WARNING):
            assert checkpointer.load(net) == 1
    texts = [record.getMessage() for record in caplog.records if "leaves out" in record.getMessage()]
    of_scaler = ", ".join(f"grad_scaler.{name}" for name in scaler.state_dict())
    assert [text.partition("/trainer ")[2] for text in texts] == [
        f"leaves out {of_scaler}: there is no grad scaler, or it is disabled",
        "leaves out user.tokens, user.epoch: no trainer state was passed",
    ]


class ScoreBoard(dict[str, Any]):
    """A dict that knows more than its items."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.best = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"items": dict(self), "best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.clear()
        self.update(state["items"])
        self.best = state["best"]


def test_case_20_a_mapping_with_a_state_of_its_own_is_asked_for_it_by_a_whole_step_too(tmp_path: Path) -> None:
    """Stored as its items, it would lose what it knows beside them."""
    saved = ScoreBoard(rounds=3)
    saved.best = 0.75
    with dcpfs.DistributedCheckpointer(dcpfs.CheckpointConfig(save_dir=str(tmp_path))) as step:
        step.save_state(5, {"model": {"w": torch.ones(2)}, "game": {"player": saved}})
    loaded = ScoreBoard(rounds=0)
    with dcpfs.DistributedCheckpointer(dcpfs.CheckpointConfig(save_dir=str(tmp_path))) as step:
        step.load_state({"model": {"w": torch.zeros(2)}, "game": {"player": loaded}})
    assert (dict(loaded), loaded.best) == ({"rounds": 3}, 0.75)
