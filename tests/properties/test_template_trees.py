"""Templates of any nested state: from the checkpoint's word alone they have its keys and its structure."""

from __future__ import annotations

import copy
from typing import Any

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dcpfs.checkpointer.stored_value import StoredValue
from dcpfs.checkpointer.template_tree import build_tree
from dcpfs.dcp.flatten import flatten
from dcpfs.dcp.places import put_value
from dcpfs.errors import UnsupportedValueError
from tests.properties.bounds import examples
from tests.unit.checkpointer.part_exchange import equal_states, stored_values

_LEAVES = st.one_of(
    st.integers(),
    st.text(max_size=3),
    st.none(),
    st.tuples(st.integers()),
    st.integers(0, 3).map(lambda size: torch.arange(size, dtype=torch.int16)),
)
_KEYS = st.one_of(st.sampled_from(["a", "b", "c.d", "0", "1", "x"]), st.integers(-1, 3))
_STATES = st.dictionaries(
    st.sampled_from(["a", "b", "c.d", "0"]),
    st.recursive(
        _LEAVES,
        lambda inner: st.one_of(
            st.lists(inner, min_size=1, max_size=3), st.dictionaries(_KEYS, inner, min_size=1, max_size=3)
        ),
        max_leaves=8,
    ),
    max_size=4,
)


def _filled(template: dict[str, object], state: dict[str, Any]) -> dict[str, object]:
    leaves, _ = flatten(copy.deepcopy(state))
    wanted, structure = flatten(template)
    assert wanted.keys() == leaves.keys()
    for key, value in leaves.items():
        put_value(template, structure.real_path(key), value)
    return template


def _flat(state: dict[str, Any]) -> bool:
    try:
        flatten(state)
    except UnsupportedValueError:  # two paths have one key
        return False
    return True


@examples(150)
@example({"a": [torch.arange(0, dtype=torch.int16)]}, {"a": {0: None}})
@example({"a": [torch.arange(2, dtype=torch.int16)]}, {"a": [None, torch.arange(2, dtype=torch.int16)]})
@given(_STATES.filter(_flat), _STATES.filter(_flat))
def test_an_empty_live_state_gets_what_was_saved_and_any_other_does_too(
    state: dict[str, Any], live: dict[str, Any]
) -> None:
    stored = stored_values(state)
    assert equal_states(_filled(build_tree(stored, {}), state), state)
    assert equal_states(_filled(build_tree(stored, copy.deepcopy(live)), state), state)
    assert equal_states(_filled(build_tree(stored_values(state, paths=False), copy.deepcopy(state)), state), state)


def test_a_position_far_outside_is_refused() -> None:
    import pytest

    from dcpfs.errors import CorruptCheckpointError

    with pytest.raises(CorruptCheckpointError, match="position 1099511627776 of a list"):
        build_tree({"a": StoredValue(None, None, ("a", 1 << 40), ("a", 1 << 40))}, {})
