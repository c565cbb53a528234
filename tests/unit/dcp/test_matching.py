"""What of a state fits a checkpoint, and how the rest is told."""

from __future__ import annotations

import pytest
import torch

from dcpfs.config import CastPolicy
from dcpfs.dcp.matching import key_mismatch_error, match_state, wants_of_box
from dcpfs.errors import CorruptCheckpointError
from dcpfs.format.index import BytesRecord, CheckpointIndex, ChunkRecord, EntryLocation, TensorRecord

_PLACE = EntryLocation("f", 0, 100, 0, 0)


def _tensor(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, *chunks: tuple[int, int]) -> TensorRecord:
    rows = chunks or ((0, shape[0]),) if shape else ()
    records = tuple(
        ChunkRecord((start, *(0,) * (len(shape) - 1)), (stop - start, *shape[1:]), _PLACE) for start, stop in rows
    )
    return TensorRecord(dtype, shape, records or (ChunkRecord((), (), _PLACE),))


def _index(**records: TensorRecord | BytesRecord) -> CheckpointIndex:
    return CheckpointIndex(dict(records))


def test_case_93_everything_that_does_not_fit_is_listed_at_once() -> None:
    index = _index(
        a=_tensor((4, 2)),
        b=_tensor((4,), torch.bfloat16),
        c=_tensor((4,)),
        d=BytesRecord(_PLACE),
        e=_tensor((4,)),
        f=_tensor((4,)),
        g=BytesRecord(_PLACE),
    )
    state = {
        "a": torch.zeros(4, 2),
        "b": torch.zeros(4),
        "c": torch.zeros(5),
        "d": torch.zeros(4),
        "e": 3,
        "g": None,
        "h": torch.zeros(1),
    }
    match = match_state(state, index)
    assert match.loaded == ["a", "g"]
    assert match.missing == ["h"]
    assert match.unexpected == ["f"]
    assert match.mismatched == {
        "b": "torch.float32 in the state, torch.bfloat16 in the checkpoint",
        "c": "shape (5,) in the state, (4,) in the checkpoint",
        "d": "a tensor in the state, another kind of value in the checkpoint",
        "e": "an int in the state, a tensor in the checkpoint",
    }
    assert [want.key for want in match.wants] == ["a"]
    assert [key for key, _ in match.objects] == ["g"]


def test_case_25_shapes_are_compared() -> None:
    assert match_state({"w": torch.zeros(2, 3)}, _index(w=_tensor((3, 2)))).mismatched


def test_case_3_casts_need_a_policy() -> None:
    index = _index(w=_tensor((4,), torch.bfloat16))
    state = {"w": torch.zeros(4)}
    assert match_state(state, index).mismatched
    assert match_state(state, index, allow_cast=CastPolicy.WIDEN).loaded == ["w"]


def test_unusual_targets_are_mismatches() -> None:
    index = _index(w=_tensor((2, 2)))
    for target in [torch.zeros(2, 2, device="meta"), torch.eye(2).to_sparse()]:
        assert "w" in match_state({"w": target}, index).mismatched


def test_boxes_are_cut_against_chunks() -> None:
    record = _tensor((100, 3), torch.float32, *((i, i + 5) for i in range(0, 100, 5)))
    target = torch.zeros(12, 3)
    wants = list(wants_of_box("w", record, (8, 0), (12, 3), target))
    assert [(want.offsets[0], want.lengths[0], want.target.shape[0]) for want in wants] == [
        (3, 2, 2),
        (0, 5, 5),
        (0, 5, 5),
    ]
    hole = record._replace(chunks=record.chunks[:2] + record.chunks[3:])
    with pytest.raises(CorruptCheckpointError, match="15 elements of key 'w'"):
        list(wants_of_box("w", hole, (8, 0), (12, 3), target))


def test_case_103_missing_keys_come_with_the_closest_names() -> None:
    error = key_mismatch_error(
        "s3://b/x",
        missing=["model.layer.weigth"],
        known=["model.layer.weight", "model.layer.bias", "optim.step"],
    )
    assert "'model.layer.weigth' (closest: 'model.layer.weight'" in str(error)
    assert error.missing == ("model.layer.weigth",)
    many = key_mismatch_error("u", missing=[f"k{i}" for i in range(500)])
    assert "and 490 more" in str(many)
    assert len(str(many)) < 1000


def test_a_share_of_a_rank_outside_a_mesh_is_nothing() -> None:
    match = match_state({"w": torch.zeros(0, 3)}, _index(w=_tensor((0, 3))))
    assert match.loaded == ["w"]


def test_an_expanded_target_is_a_mismatch_and_no_failure_amid_the_copies() -> None:
    index = _index(a=_tensor((4, 2)), b=_tensor((4, 2)), c=_tensor((1, 2)), d=_tensor((0, 2)))
    state = {
        "a": torch.zeros(2).expand(4, 2),
        "b": torch.zeros(2, 4).t(),
        "c": torch.zeros(2).expand(1, 2),
        "d": torch.zeros(2).expand(0, 2),
    }
    match = match_state(state, index)
    assert set(match.mismatched) == {"a"}
    assert "clone()" in match.mismatched["a"]


@pytest.mark.parametrize("kept", [0, 8])
def test_memory_that_was_freed_is_a_mismatch(kept: int) -> None:
    whole = torch.ones(20)
    state = {"view": whole[10:14], "rows": whole[4:16].view(3, 4).t(), "parameter": torch.nn.Parameter(whole[12:])}
    index = _index(view=_tensor((4,)), rows=_tensor((4, 3)), parameter=_tensor((8,)))
    assert match_state(dict(state), index).mismatched == {}
    whole.untyped_storage().resize_(kept)
    match = match_state(dict(state), index)
    assert match.wants == []
    assert set(match.mismatched) == set(state)
    assert all("memory has been freed" in text for text in match.mismatched.values())


def test_windows_that_overlap_are_a_mismatch_and_others_are_not() -> None:
    """The value that arrives last would win in the elements that two of them share."""
    memory = torch.zeros(64)
    targets = {
        "diagonals": (memory.as_strided((3, 3), (1, 1)), True),
        "windows": (memory[:4].unfold(0, 2, 1), True),
        "windows apart": (memory[:6].unfold(0, 2, 2), False),
        "crossed, and apart": (memory.as_strided((3, 2), (2, 3)), False),
        "crossed": (memory.as_strided((4, 2), (2, 6)), True),
        "columns": (memory.reshape(8, 8)[:, 2:5], False),
        "steps": (memory[::3], False),
        "transposed": (memory.reshape(4, 16).t(), False),
        "one element twice": (memory[:1].expand(2), True),
        "one element": (memory[:1].expand(1, 1), False),
        "nothing": (memory[:0].expand(3, 0), False),
    }
    index = _index(**{key: _tensor(tuple(target.shape)) for key, (target, _) in targets.items()})
    match = match_state({key: target for key, (target, _) in targets.items()}, index)
    assert set(match.mismatched) == {key for key, (_, overlaps) in targets.items() if overlaps}


def test_chunks_that_overlap_and_leave_a_gap_are_damage() -> None:
    """Their elements are as many as those of the tensor: what nobody wrote would stay as it was."""
    record = TensorRecord(torch.float32, (8,), tuple(ChunkRecord((start,), (4,), _PLACE) for start in (0, 2)))
    with pytest.raises(CorruptCheckpointError, match=r"contradicts itself about key 'w'.*overlap"):
        match_state({"w": torch.zeros(8)}, _index(w=record))
    assert len(match_state({"w": torch.zeros(8)}, _index(w=_tensor((8,), torch.float32, (0, 4), (4, 8)))).wants) == 2
