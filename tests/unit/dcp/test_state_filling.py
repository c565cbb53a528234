"""A state that is filled from a checkpoint whose note of containers can't be true."""

from __future__ import annotations

import pytest

from dcpfs.config import CastPolicy
from dcpfs.dcp.state_filling import StateFilling
from dcpfs.errors import CorruptCheckpointError
from dcpfs.format.index import CheckpointIndex


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
