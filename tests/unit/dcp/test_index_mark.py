"""A ``.metadata`` that lost its index, and nothing else, is damaged; it never passes for another writer's."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import pytest
import torch

import dcpfs


def test_case_113_a_metadata_cut_at_the_end_of_its_pickle_is_refused(tmp_path: Path) -> None:
    dcpfs.save({"schedule": {2: 1}, "w": torch.ones(3)}, tmp_path / "step")
    path = tmp_path / "step" / ".metadata"
    whole = path.read_bytes()
    stream = io.BytesIO(whole)
    pickle.load(stream)  # what torch reads ends here
    assert stream.tell() < len(whole)
    path.write_bytes(whole[: stream.tell()])
    with pytest.raises(dcpfs.CorruptCheckpointError, match="cut short, or changed behind its pickle"):
        dcpfs.read(tmp_path / "step")
    path.write_bytes(whole + b"junk")
    with pytest.raises(dcpfs.CorruptCheckpointError, match="changed behind its pickle"):
        dcpfs.read(tmp_path / "step")
    path.write_bytes(whole)
    assert dcpfs.read(tmp_path / "step")["schedule"] == {2: 1}
