"""Names of a step's files: what dcpfs makes there, and nothing else."""

from __future__ import annotations

import pytest

from dcpfs.checkpointer.step_files import is_data_file, is_metadata_file, is_own_file, is_rank_file


@pytest.mark.parametrize(
    ("name", "is_metadata", "is_data", "is_rank"),
    [
        ("model/.metadata", True, False, False),
        ("model/__3.metadata", True, False, False),
        ("model/__0_0.distcp", False, True, False),
        ("optim/__1_68694700000.distcp", False, True, False),
        ("dataloader/rank_12.pkl", False, False, True),
        ("manifest.json", False, False, False),
        (".writing", False, False, False),
    ],
)
def test_what_dcpfs_makes_is_told_apart(name: str, is_metadata: bool, is_data: bool, is_rank: bool) -> None:
    assert is_own_file(name)
    assert (is_metadata_file(name), is_data_file(name), is_rank_file(name)) == (is_metadata, is_data, is_rank)


@pytest.mark.parametrize(
    "name",
    [
        ".protected",
        "notes.txt",
        ".metadata",
        "__0_0.distcp",
        "rank_0.pkl",
        "model/notes.txt",
        "model/rank_00.pkl",
        "model/sub/__0_0.distcp",
        ".cache/__0_0.distcp",
        "a b/.metadata",
        "model/manifest.json",
        "",
    ],
)
def test_what_is_the_users_is_none_of_ours(name: str) -> None:
    assert not is_own_file(name)
