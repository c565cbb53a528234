"""Flattening: torch's keys exactly, and nothing lost on the way back."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from types import MappingProxyType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from dcpfs.dcp.flatten import Structure, flatten, merge_structures, unflatten
from dcpfs.errors import CorruptCheckpointError, ReplicaMismatchError, UnsupportedValueError

T0 = torch.zeros(1)

STATES: list[dict[str, object]] = [
    {},
    {"a": T0, "b": {"c": T0, "d": 1}},
    {"milestones": Counter({2: 1, 5: 3}), "lr": [0.1, 0.2]},
    {"state": {0: {"step": T0}, 1: {"step": T0}}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]},
    {"e": {}, "n": None, "l": [], "t": (), "nest": {"x": {"y": {}}}},
    {"l": [{}, {"a": 1}], "m": [{}], "k": [T0, {}, [T0, 1]], "deep": [[[T0]], [1, 2]]},
    {"t": (1, 2), "tt": {"u": (T0,)}},
    {"od": OrderedDict([("b", 1), ("e", {}), ("a", 2)]), "dd": defaultdict(list, {"x": [1]})},
    {"mixed": {1: "a", "b": 2, None: 3, (1, "x"): 4, b"q": 5, 2.5: 6, False: 7}},
    {"layers.0.weight": T0, "layers": {"1.weight": T0}},
    OrderedDict([("z", 1), ("a", {})]),
]


def _round_trip(state: Mapping[str, object]) -> object:
    leaves, structure = flatten(state)
    value = json.loads(json.dumps(structure.to_json()))
    return unflatten(leaves, Structure.from_json(value, structure.paths))


def _same(first: object, second: object) -> bool:
    if type(first) is not type(second):
        return False
    if isinstance(first, dict):
        assert isinstance(second, dict)
        if isinstance(first, OrderedDict) and list(first) != list(second):
            return False
        if isinstance(first, defaultdict):
            assert isinstance(second, defaultdict)
            if first.default_factory is not second.default_factory:
                return False
        same_keys = {(type(k), k) for k in first} == {(type(k), k) for k in second}
        return same_keys and all(_same(first[k], second[k]) for k in first)
    if isinstance(first, list):
        assert isinstance(second, list)
        return len(first) == len(second) and all(map(_same, first, second))
    return first is second or bool(first == second)


@pytest.mark.parametrize("state", STATES, ids=range(len(STATES)))
def test_keys_and_paths_are_those_of_torch(state: dict[str, object]) -> None:
    leaves, structure = flatten(state)
    torch_leaves, torch_paths = flatten_state_dict(state)
    assert list(leaves) == list(torch_leaves)
    assert all(leaves[fqn] is torch_leaves[fqn] for fqn in leaves)
    assert structure.paths == torch_paths


@pytest.mark.parametrize("state", STATES, ids=range(len(STATES)))
def test_nothing_is_lost_on_the_way_back(state: dict[str, object]) -> None:
    assert _same(_round_trip(state), state)


def test_other_mappings_come_back_as_dicts() -> None:
    assert _round_trip({"m": MappingProxyType({1: 2})}) == {"m": {1: 2}}


KEYS = st.one_of(st.text(".ab1", max_size=3), st.integers(-2, 3), st.none(), st.booleans())
VALUES = st.recursive(
    st.one_of(st.integers(), st.just(T0), st.none(), st.just(()), st.just((1, T0))),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=2).map(OrderedDict),
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.text("ab.1", min_size=1, max_size=3), VALUES, max_size=4))
def test_any_state_round_trips_or_is_refused(state: dict[str, object]) -> None:
    try:
        leaves, structure = flatten(state)
    except UnsupportedValueError:
        return
    torch_leaves, torch_paths = flatten_state_dict(state)
    assert list(leaves) == list(torch_leaves)
    assert structure.paths == torch_paths
    assert _same(_round_trip(state), state)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"a": {"b": 1}, "a.b": 2}, ["('a', 'b')", "('a.b',)"]),
        ({"x": {2: 1, "2": 1}}, ["'x.2'"]),
        ({"x": {2: {"a": 1}, "2": {"b": 1}}}, ["'x.2'"]),
        ({"x": {2: {}, "2": {}}}, ["'x.2'"]),
        ({"x": {torch.float32: 1}}, ["dtype", "('x',)"]),
    ],
)
def test_what_would_collide_or_come_back_as_text_is_refused(state: dict[str, object], words: list[str]) -> None:
    with pytest.raises(UnsupportedValueError) as caught:
        flatten(state)
    assert all(word in str(caught.value) for word in words)


def test_real_paths_and_empties() -> None:
    _, structure = flatten({"s": {"milestones": Counter({2: 1})}, "e": {3: {}}})
    assert structure.real_path("s.milestones.2") == ("s", "milestones", 2)
    assert structure.empty_paths() == [("e", 3)]
    assert structure.real_path("unknown") == ("unknown",)


def test_restricted_keeps_only_what_the_keys_need() -> None:
    state = {"a": {1: "x"}, "b": {2: "y"}, "c": {}}
    leaves, structure = flatten(state)
    assert unflatten({"a.1": leaves["a.1"]}, structure.restricted(["a.1"])) == {"a": {1: "x"}}


def test_ranks_merge_their_structures() -> None:
    first = flatten({"a": {1: "x"}, "e": {}})[1]
    second = flatten({"a": {2: "y"}, "e": {5: 1}, "f": OrderedDict()})[1]
    merged = merge_structures([first, second])
    rebuilt = unflatten({"a.1": "x", "a.2": "y", "e.5": 1}, merged)
    assert rebuilt == {"a": {1: "x", 2: "y"}, "e": {5: 1}, "f": OrderedDict()}


@pytest.mark.parametrize(
    "other", [{"a": Counter({1: 1})}, {"a": {None: 1, "b": 2}}], ids=["another kind", "other key types"]
)
def test_ranks_that_disagree_are_refused(other: dict[str, object]) -> None:
    with pytest.raises(ReplicaMismatchError, match="'a'"):
        merge_structures([flatten({"a": {1: 1}})[1], flatten(other)[1]])


def test_contradicting_paths_are_corrupt() -> None:
    structure = Structure({"a": ("a",), "a.b": ("a", "b")})
    with pytest.raises(CorruptCheckpointError):
        unflatten({"a": 1, "a.b": 2}, structure)


def test_damaged_notes_are_corrupt() -> None:
    with pytest.raises(CorruptCheckpointError):
        Structure.from_json({"containers": [[["a"], {"kind": "no such kind"}]]}, {})


@pytest.mark.parametrize(
    "paths",
    [
        {"a": ("x", 1 << 40)},
        {"a": ()},
        {"a": ("x", -1)},
        {"a": ("x",), "b": ("x", "y")},
        {f"k{n}": (f"k{n}", 1 << 23) for n in range(4)},
    ],
)
def test_paths_of_a_hostile_metadata_are_refused_without_taking_memory(paths: dict[str, tuple[str | int, ...]]) -> None:
    with pytest.raises(CorruptCheckpointError):
        unflatten(dict.fromkeys(paths, 1), Structure(paths))


def test_a_state_without_end_is_refused() -> None:
    state: dict[str, object] = {}
    state["self"] = state
    with pytest.raises(UnsupportedValueError, match="holds itself"):
        flatten(state)


HOSTILE_NOTES: dict[str, dict[str, object]] = {
    "a key that is a list": {"keys": [["a", [1]]]},
    "a key that is a dict": {"keys": [["a", {"x": 1}]]},
    "a text that is none": {"keys": [[1, 2]]},
    "an order of lists": {"order": [["a"]]},
    "bytes that are none": {"keys": [["a", {"bytes": 5}]]},
    "a kind that is none": {"kind": "list"},
}


@pytest.mark.parametrize("name", HOSTILE_NOTES)
def test_a_note_that_no_state_makes_is_damage(name: str) -> None:
    note: dict[str, object] = {"kind": "dict", **HOSTILE_NOTES[name]}
    with pytest.raises(CorruptCheckpointError):
        Structure.from_json({"containers": [[["m"], note]]}, {"m.a": ("m", "a")})


def test_a_note_that_is_nested_without_end_is_damage() -> None:
    key: object = 0
    for _ in range(1500):
        key = {"tuple": [key]}
    with pytest.raises(CorruptCheckpointError):
        Structure.from_json({"containers": [[["m"], {"kind": "dict", "keys": [["a", key]]}]]}, {"m.a": ("m", "a")})


@pytest.mark.parametrize("path", [["m", -1], ["m", None], ["m", ["x"]], ["m", True], 5])
def test_a_path_of_something_else_than_names_and_positions_is_damage(path: object) -> None:
    with pytest.raises(CorruptCheckpointError):
        Structure.from_json({"containers": [[path, {"kind": "dict"}]]}, {})


def test_texts_that_are_no_ints_among_int_keys_are_damage() -> None:
    structure = Structure.from_json({"containers": [[["m"], {"kind": "dict", "keys": "int"}]]}, {"m.x": ("m", "x")})
    with pytest.raises(CorruptCheckpointError, match="no int"):
        unflatten({"m.x": 1}, structure)


def test_negative_positions_are_damage() -> None:
    structure = Structure({"a.-1.x": ("a", -1, "x"), "a.0": ("a", 0)})
    with pytest.raises(CorruptCheckpointError, match="contradict"):
        unflatten({"a.-1.x": 1, "a.0": 2}, structure)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"m": {1: 1}}, {"m": {"2": 1}}),
        ({"m": {1: 1}}, {"m": {"x": 1}}),
        ({"m": {1: 1}}, {"m": OrderedDict({"2": 1})}),
        ({"m": {None: 1, "b": 2}}, {"m": {"None": 1}}),
        ({"m": {None: 1, "b": 2}}, {"m": {"None": 1, 2.5: 1}}),
        ({"l": [{1: 1}]}, {"l": [{"1": 1}]}),
        ({1: 1}, {"2": 1}),
    ],
    ids=repr,
)
def test_text_keys_never_get_the_type_of_another_ranks_keys(one: dict[str, object], other: dict[str, object]) -> None:
    for ranks in ((one, other), (other, one), (one, other, {"z": 1})):
        with pytest.raises(ReplicaMismatchError, match="ranks disagree about the mapping"):
            merge_structures([flatten(each)[1] for each in ranks])


def test_ranks_with_other_keys_of_the_same_types_merge() -> None:
    states: list[dict[str, object]] = [{"m": {None: 1, "b": 2}}, {"m": {"b": 2, 2.5: 3}}, {"m": {}}, {"z": {"None": 1}}]
    leaves: dict[str, object] = {}
    structures = []
    for state in states:
        own, structure = flatten(state)
        leaves |= own
        structures.append(structure)
    rebuilt = unflatten(leaves, merge_structures(structures))
    assert rebuilt == {"m": {None: 1, "b": 2, 2.5: 3}, "z": {"None": 1}}


def test_numbers_that_json_does_not_have_are_keys_like_others() -> None:
    leaves, structure = flatten({"m": {math.inf: 1, -math.inf: 2, (math.inf, "x"): 3}})
    text = json.dumps(structure.to_json(), allow_nan=False)
    rebuilt = unflatten(leaves, Structure.from_json(json.loads(text), structure.paths))
    assert rebuilt == {"m": {math.inf: 1, -math.inf: 2, (math.inf, "x"): 3}}
    leaves, structure = flatten({"m": {math.nan: 1}})
    rebuilt = unflatten(leaves, Structure.from_json(structure.to_json(), structure.paths))
    assert repr(rebuilt) == "{'m': {nan: 1}}"
