"""Whether ranks share the data as those did that saved, told by what is on record."""

from __future__ import annotations

import pytest

from dcpfs.checkpointer.manifest import FileRecord
from dcpfs.checkpointer.rank_dealing import describe_dealing, describe_remeshing


def files(*owners: int) -> dict[int, str]:
    return {rank: f"dataloader/rank_{owner}.pkl" for rank, owner in enumerate(owners)}


def records(*contents: int) -> dict[str, FileRecord]:
    return {f"dataloader/rank_{rank}.pkl": FileRecord(9, content) for rank, content in enumerate(contents)}


def reads(*leaders: int | None) -> dict[int, int | None]:
    return dict(enumerate(leaders))


@pytest.mark.parametrize(
    ("saved", "now"),
    [
        (files(0, 1, 2, 3), reads(None, None, None, None)),
        (files(0, 1, 2, 3), reads(0, 1, 2, 3)),
        (files(0, 0, 2, 2), reads(0, 0, 2, 2)),
        (files(0), reads(None, None)),  # a rank that has no file: said elsewhere
        ({}, reads(None)),
    ],
)
def test_the_same_sharing(saved: dict[int, str], now: dict[int, int | None]) -> None:
    assert describe_dealing(saved, now, records(1, 2, 3, 4)) == ""


def test_cases_10_11_another_sharing_is_told_by_the_files() -> None:
    four, pairs = files(0, 1, 2, 3), files(0, 0, 2, 2)
    apart, together = reads(*[None] * 4), reads(0, 0, 2, 2)
    assert "rank 1 had the same part of the data as rank 0" in describe_dealing(pairs, apart, records(1, 2, 3))
    assert "rank 1 has the same part of the data as rank 0" in describe_dealing(four, together, records(1, 2, 3, 4))
    assert describe_dealing(four, together, records(1, 1, 3, 3)) == ""  # equal positions are one
    assert describe_dealing(four, together, {}) == ""  # another tool's: nothing is on record
    assert "rank 1" in describe_dealing(four, together, dict.fromkeys(records(1, 1, 3, 3), FileRecord(9)))


def mesh(*shape: int, names: tuple[str, ...] | None = None) -> dict[str, object]:
    return {"mesh_shape": list(shape), "mesh_dim_names": None if names is None else list(names)}


@pytest.mark.parametrize(
    ("before", "now", "differs"),
    [
        ({}, {}, False),
        ({}, mesh(4), False),
        (mesh(4), {}, False),
        (mesh(4), mesh(4), False),
        (mesh(1, 4), mesh(4), False),
        (mesh(4, names=("dp",)), mesh(4), False),
        (mesh(4, names=("dp",)), mesh(1, 4, names=("replicate", "dp")), False),
        (mesh(4), mesh(2, 2), True),
        (mesh(2, 4), mesh(4, 2), True),
        (mesh(2, 2, names=("replicate", "shard")), mesh(2, 2, names=("dp", "tp")), True),
        ({"mesh_shape": "4"}, mesh(2, 2), False),  # edited by somebody
        ({"mesh_shape": [2, "x"]}, mesh(2, 2), False),
        ({"mesh_shape": [4], "mesh_dim_names": ["a", "b"]}, mesh(4, names=("dp",)), False),
    ],
)
def test_case_10_another_mesh(before: dict[str, object], now: dict[str, object], differs: bool) -> None:
    assert bool(describe_remeshing(before, now)) is differs
