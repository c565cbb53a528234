"""Files of ranks that saved by themselves: which belong together."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dcpfs.errors import CorruptCheckpointError
from dcpfs.format.index import CheckpointIndex, EntryLocation, RankSave, TensorRecord
from dcpfs.format.metadata import decode_both, decode_index, encode_metadata, merge_indexes
from dcpfs.format.rank_saves import decode_rank_save

URL = "memory://run"


def make(note: RankSave | None, *, rank: int, crc32: int = 7) -> CheckpointIndex:
    """What a rank wrote: a tensor that all hold, and one of its own."""
    size = torch.Size((2,))
    chunk = ChunkStorageMetadata(torch.Size((0,)), size)
    keys = ("shared", f"own{rank}")
    state = {key: TensorStorageMetadata(TensorProperties(torch.float32), size, [chunk]) for key in keys}
    storage = {
        MetadataIndex(key, torch.Size((0,)), 0): EntryLocation(f"__{rank}_0.distcp", 100 * number, 100, 92, crc32)
        for number, key in enumerate(keys)
    }
    return decode_index(encode_metadata(Metadata(state, None, storage), rank_save=note))  # type: ignore[arg-type]


@pytest.mark.parametrize("note", [None, RankSave(0), RankSave(3, 4), RankSave(3, 4, "launch-1")])
def test_a_note_comes_back(note: RankSave | None) -> None:
    assert make(note, rank=0).rank_save == note


@pytest.mark.parametrize("value", [[0, 0, None], [-1, 1, None], [0, True, None], [0, 1, 5], [0, 1], 3, ["0", 1, None]])
def test_a_malformed_note_is_an_error(value: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        decode_rank_save(value)


def test_torch_reads_a_file_with_a_note() -> None:
    index = make(RankSave(1, 2, "a"), rank=1)
    assert set(index.records) == {"shared", "own1"}
    data = encode_metadata(Metadata({}, None, {}), rank_save=RankSave(1, 2, "a"))
    assert decode_both(data)[1].state_dict_metadata == {}


def test_ranks_of_an_older_larger_world_do_not_count(caplog: pytest.LogCaptureFixture) -> None:
    new = [make(RankSave(rank, 2, "b-1"), rank=rank) for rank in range(2)]
    old = [make(RankSave(rank, 4, "a-1"), rank=rank, crc32=9) for rank in (2, 3)]
    with caplog.at_level(logging.WARNING):
        merged = merge_indexes([*new, *old], url=URL)
    assert set(merged.records) == {"shared", "own0", "own1"}
    assert "metadata of 2 higher ranks there is of an older save" in caplog.text
    assert merged.rank_save is None


def test_ranks_of_another_writers_larger_world_do_not_count() -> None:
    merged = merge_indexes([make(RankSave(0, 1), rank=0), make(None, rank=1, crc32=9)], url=URL)
    assert set(merged.records) == {"shared", "own0"}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (RankSave(0, 2, "a-2"), RankSave(1, 2, "a-1")),  # rank 1 failed in the second save
        (RankSave(0, 2, "b-1"), RankSave(1, 2, "a-1")),  # and the job was started anew
        (RankSave(0, None, "b-1"), RankSave(1, 4, "a-1")),
        (RankSave(0, 2), RankSave(1, 4)),
        (RankSave(0, 2, "a-1"), None),
        (None, RankSave(1, 2, "a-1")),
    ],
)
def test_two_saves_are_not_joined(first: RankSave | None, second: RankSave | None) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"of two saves|of another save") as caught:
        merge_indexes([make(first, rank=0), make(second, rank=1)], url=URL)
    assert URL in str(caught.value)
    assert caught.value.file is not None


@pytest.mark.parametrize("notes", [(None, None), (RankSave(0, 2), RankSave(1, 2)), (RankSave(0, 1), RankSave(1))])
def test_what_may_be_two_saves_is_joined_only_when_the_values_agree(notes: tuple[RankSave | None, ...]) -> None:
    merged = merge_indexes([make(note, rank=rank) for rank, note in enumerate(notes)], url=URL)
    assert set(merged.records) == {"shared", "own0", "own1"}
    with pytest.raises(CorruptCheckpointError, match="different values of 'shared'") as caught:
        merge_indexes([make(note, rank=rank, crc32=rank) for rank, note in enumerate(notes)], url=URL)
    assert caught.value.key == "shared"


def test_ranks_of_one_save_may_differ_and_the_first_counts(caplog: pytest.LogCaptureFixture) -> None:
    merged = merge_indexes([make(RankSave(rank, 2, "a-1"), rank=rank, crc32=rank) for rank in range(2)], url=URL)
    shared = merged.records["shared"]
    assert isinstance(shared, TensorRecord)
    assert shared.chunks[0].location.file == "__0_0.distcp"
    assert "hold different values of 'shared'; that of the lowest rank counts" in caplog.text


def test_absent_ranks_are_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        merge_indexes([make(RankSave(rank, 9, "a-1"), rank=rank) for rank in (0, 2)], url=URL)
    assert "no metadata of the ranks 1, 3, 4, 5, 6 and 2 more, of 9" in caplog.text
