"""A state that is filled: who is asked for its own, and which notes of containers are none."""

from __future__ import annotations

import uuid
from typing import cast

import pytest
from torch.distributed.checkpoint.state_dict_saver import save

import dcpfs
from dcpfs.config import CastPolicy
from dcpfs.dcp.flatten import flatten, merge_structures
from dcpfs.dcp.state_filling import StateFilling
from dcpfs.errors import CorruptCheckpointError
from dcpfs.format.index import BytesRecord, CheckpointIndex, EntryLocation


def test_two_keys_that_are_said_to_be_one_are_damage() -> None:
    """The first is an empty mapping below a mapping, which the second one covers."""
    containers = [
        [[], {"kind": "dict", "order": ["a"]}],
        [["a"], {"kind": "dict", "keys": [["b", 1], ["c", 1]], "order": ["b", "c"]}],
        [["a", "b"], {"kind": "dict", "order": ["e"]}],
        [["a", "b", "e"], {"kind": "dict", "empty": True}],
        [["a", "c"], {"kind": "dict", "empty": True}],
    ]
    index = CheckpointIndex({}, {"containers": containers}, {})
    state: dict[str, object] = {}
    filling = StateFilling(state)
    with pytest.raises(CorruptCheckpointError, match=r"note of its containers is damaged"):
        filling.match_records(index, allow_cast=CastPolicy.NEVER)
    assert state == {}


class _Settings(dict[str, object]):
    """A mapping that has more to its state than its items."""

    def __init__(self, items: dict[str, object], step: int) -> None:
        super().__init__(items)
        self.step = step

    def state_dict(self) -> dict[str, object]:
        return {"items": dict(self), "step": self.step}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.clear()
        self.update(state["items"])  # type: ignore[call-overload]  # as state_dict made it
        self.step = state["step"]  # type: ignore[assignment]  # likewise


class _History(list[int]):
    def state_dict(self) -> dict[str, object]:
        return {"length": len(self)}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self[:] = [0] * cast("int", state["length"])


class _ByAttribute(dict[str, object]):
    """A mapping whose attributes are its keys, and whatever it is asked for."""

    def __getattr__(self, name: str) -> object:
        return self.get(name, _ByAttribute())

    def __call__(self) -> None:
        raise AssertionError("nobody calls a mapping")


@pytest.mark.parametrize("how", ["dcpfs.save", "dcp.save"])
def test_case_20_containers_with_a_state_of_their_own_are_asked_and_given(how: str) -> None:
    url = f"memory://stateful-{uuid.uuid4().hex}"
    saved = {"settings": _Settings({"a": 1}, 7), "history": _History([1, 2]), "attributes": _ByAttribute(a=1)}
    if how == "dcpfs.save":
        dcpfs.save(saved, url)
    else:
        writer = dcpfs.FsspecStorageWriter(url)
        save(saved, storage_writer=writer, planner=dcpfs.SavePlanner(), no_dist=True)
    settings, history = _Settings({"a": 0}, 0), _History()
    state = {"settings": settings, "history": history, "attributes": _ByAttribute(a=0)}
    dcpfs.load(state, url)
    assert state["settings"] is settings
    assert (settings, settings.step) == ({"a": 1}, 7)
    assert history == [0, 0]
    assert state["attributes"] == {"a": 1}


def test_a_ranks_value_is_not_replaced_by_another_ranks_empty_container() -> None:
    """One rank saves a value where another has an empty mapping: the value is there, and is what is loaded."""
    structure = merge_structures([flatten({"a": 5, "z": {}})[1], flatten({"a": {}})[1]])
    place = EntryLocation("f", 0, 1, 0, 0)
    index = CheckpointIndex({"a": BytesRecord(place)}, structure.to_json(), structure.paths)
    state: dict[str, object] = {"a": 0}
    filling = StateFilling(state)
    assert filling.match_records(index, allow_cast=CastPolicy.NEVER).loaded == ["a"]
    filling.put({"a": 5})
    filling.hand_over()
    assert state == {"a": 5, "z": {}}
