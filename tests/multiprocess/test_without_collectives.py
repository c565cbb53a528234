"""Saves of which each rank publishes its own part: what of it belongs together."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import dcpfs
from dcpfs.format.metadata import decode_index
from dcpfs.storage.local_store import LocalStore
from tests.multiprocess.gloo import run_ranks, try_ranks


def _state(value: float) -> dict[str, Any]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return {"shared": torch.full((4,), value), f"own{rank}": torch.full((2,), value + rank), "note": f"at {value}"}


def _save(url: str, values: tuple[float, ...]) -> None:  # runs in each rank
    for value in values:
        save(_state(value), storage_writer=dcpfs.FsspecStorageWriter(url, overwrite=True), use_collectives=False)


def _save_with_torch(url: str, value: float) -> None:  # runs in each rank
    save(_state(value), storage_writer=FileSystemWriter(url), use_collectives=False)


def _load_own(url: str, kind: str) -> dict[str, Any]:  # runs in each rank
    target = _state(-1.0)
    load(target, storage_reader=dcpfs.FsspecStorageReader(url) if kind == "own" else FileSystemReader(url))
    return target


def _load_refused(url: str) -> str:  # runs in each rank
    try:
        load(_state(-1.0), storage_reader=dcpfs.FsspecStorageReader(url))
    except CheckpointException as error:
        return str(error)
    return ""


def _load_joined(url: str) -> list[float]:  # runs in each rank
    target: dict[str, Any] = {"shared": torch.zeros(4), "own0": torch.zeros(2), "own1": torch.zeros(2), "note": ""}
    dcpfs.load(target, url)
    return [target["shared"][0].item(), target["own0"][0].item(), target["own1"][0].item()]


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _keep(folder: Path, ranks: Iterable[int]) -> dict[str, bytes]:
    found = (path for rank in ranks for path in folder.glob(f"__{rank}[._]*"))
    return {path.name: path.read_bytes() for path in found}


def _put_back(folder: Path, kept: dict[str, bytes]) -> None:
    for name, data in kept.items():
        (folder / name).write_bytes(data)


def _saves(folder: Path) -> list[str | None]:
    notes = [decode_index(path.read_bytes()).rank_save for path in sorted(folder.glob("__*.metadata"))]
    return [None if note is None else note.name for note in notes]


# --- fewer ranks than before


def test_what_a_larger_world_saved_goes_when_a_smaller_one_overwrites_it(tmp_path: Path) -> None:
    url = str(tmp_path)
    run_ranks(_save, 3, url, (1.0,))
    (tmp_path / "__x.metadata").write_text("mine")
    run_ranks(_save, 2, url, (5.0,))
    assert _names(tmp_path) == ["__0.metadata", "__0_0.distcp", "__1.metadata", "__1_0.distcp", "__x.metadata"]
    found = dcpfs.read(url)
    assert set(found) == {"shared", "own0", "own1", "note"}
    assert [found[key][0].item() for key in ("shared", "own0", "own1")] == [5, 5, 6]  # type: ignore[index]
    for kind in ("own", "torch"):
        for rank, loaded in enumerate(run_ranks(_load_own, 2, url, kind)):
            assert loaded["note"] == "at 5.0"
            assert loaded[f"own{rank}"].tolist() == [5 + rank] * 2


@pytest.mark.parametrize("writer", ["own", "torch"])
def test_what_is_left_of_a_larger_world_is_not_joined(
    tmp_path: Path, writer: str, caplog: pytest.LogCaptureFixture
) -> None:
    url = str(tmp_path)
    if writer == "own":
        run_ranks(_save, 3, url, (1.0,))
    else:
        run_ranks(_save_with_torch, 3, url, 1.0)
    kept = _keep(tmp_path, [2])
    run_ranks(_save, 2, url, (5.0,))
    _put_back(tmp_path, kept)
    with caplog.at_level(logging.WARNING):
        assert set(dcpfs.read(url)) == {"shared", "own0", "own1", "note"}
    assert "metadata of 1 higher ranks there is of an older save" in caplog.text
    assert run_ranks(_load_joined, 3, url) == [[5, 5, 6]] * 3
    refused = run_ranks(_load_refused, 3, url)
    assert all("__2.metadata is left of an older save" in text for text in refused)


def test_one_process_without_a_group_overwrites_a_world(tmp_path: Path) -> None:
    url = str(tmp_path)
    run_ranks(_save, 2, url, (1.0,))
    _save(url, (5.0,))
    assert "__1.metadata" in _names(tmp_path)  # another process may be driving rank 1 by hand
    assert set(dcpfs.read(url)) == {"shared", "own0", "note"}
    assert _load_own(url, "own")["own0"].tolist() == [5, 5]


# --- two saves of the same world


def test_two_saves_in_one_launch_are_told_apart(tmp_path: Path) -> None:
    url = str(tmp_path)
    run_ranks(_save, 2, url, (1.0, 3.0))
    names = _saves(tmp_path)
    assert names[0] is not None
    assert names == [names[0]] * 2
    assert names[0].endswith("-2")
    assert run_ranks(_load_joined, 2, url) == [[3, 3, 4]] * 2


@pytest.mark.parametrize("anew", [True, False])
def test_a_rank_that_kept_its_older_save_is_found_out(tmp_path: Path, anew: bool) -> None:
    url = str(tmp_path / "c")
    if anew:
        run_ranks(_save, 2, url, (1.0,))
        kept = _keep(tmp_path / "c", [1])
        run_ranks(_save, 2, url, (5.0,))
    else:
        kept = run_ranks(_save_and_keep, 2, url)[1]
    assert run_ranks(_load_joined, 2, url) == [[5, 5, 6]] * 2
    _put_back(tmp_path / "c", kept)
    for outcome in try_ranks(_load_joined, 2, url):
        assert outcome.error_type == "CorruptCheckpointError"
        assert "__0.metadata and __1.metadata are of two saves" in outcome.error_text
    with pytest.raises(dcpfs.CorruptCheckpointError, match="of two saves"):
        dcpfs.read(url)
    assert all("of two saves" in text for text in run_ranks(_load_refused, 2, url))


def _save_and_keep(url: str) -> dict[str, bytes]:  # runs in each rank
    _save(url, (1.0,))
    kept = _keep(Path(url), [dist.get_rank()])
    _save(url, (5.0,))
    return kept


class _FailsOnce(DefaultSavePlanner):
    """Of rank 1, the first time."""

    failed = False

    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == 1 and not _FailsOnce.failed:
            _FailsOnce.failed = True
            raise OSError("not now")
        return super().resolve_data(write_item)


def _save_again(url: str, how: str) -> None:  # runs in each rank
    writer = dcpfs.FsspecStorageWriter(url, overwrite=True)
    _save(url, (1.0,))
    try:
        save(_state(2.0), storage_writer=writer, planner=_FailsOnce(), use_collectives=False)
    except OSError:
        if how == "again":
            save(_state(2.0), storage_writer=writer, use_collectives=False)
        else:
            dist.barrier()  # as torch does where a save ends


def test_a_rank_that_tries_again_is_in_the_save_of_the_others(tmp_path: Path) -> None:
    url = str(tmp_path)
    run_ranks(_save_again, 2, url, "again")
    assert run_ranks(_load_joined, 2, url) == [[2, 2, 3]] * 2


def test_a_rank_that_fails_leaves_nothing_older(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    url = str(tmp_path)
    run_ranks(_save_again, 2, url, "never")
    assert _names(tmp_path) == ["__0.metadata", "__0_0.distcp", "__1_0.distcp"]  # the last of no save, and not read
    with caplog.at_level(logging.WARNING):
        assert set(dcpfs.read(url)) == {"shared", "own0", "note"}
    assert "no metadata of the ranks 1, of 2 at most that saved it" in caplog.text
    assert all("no __1.metadata" in text for text in run_ranks(_load_refused, 2, url))


def _save_in_own_groups(folder: str) -> None:  # runs in each rank
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for value in (1.0, 2.0):
        save(
            {
                "shared": torch.full((4,), value),
                f"own{rank % 2}": torch.full((2,), value),
                "note": "",
                "group": rank // 2,
            },
            storage_writer=dcpfs.FsspecStorageWriter(f"{folder}/{rank // 2}", overwrite=True),
            process_group=groups[rank // 2],
            use_collectives=False,
        )


def test_groups_of_their_own(tmp_path: Path) -> None:
    run_ranks(_save_in_own_groups, 4, str(tmp_path))
    for group in range(2):
        found = dcpfs.read(tmp_path / str(group))
        assert set(found) == {"shared", "own0", "own1", "note", "group"}
        assert found["group"] == group


# --- beside a save with collectives


def test_the_common_metadata_of_torch_is_refused_when_a_later_save_wrote_over_its_files(tmp_path: Path) -> None:
    url = str(tmp_path)
    state = {"w": torch.ones(4)}
    save(state, storage_writer=FileSystemWriter(url))
    save({"w": torch.full((4,), 2.0)}, storage_writer=FileSystemWriter(url), use_collectives=False)
    assert _names(tmp_path) == [".metadata", "__0.metadata", "__0_0.distcp"]
    _set_times(tmp_path, [".metadata", "__0.metadata"])
    with pytest.raises(dcpfs.CorruptCheckpointError, match=r"\.metadata is older than its __0\.metadata"):
        dcpfs.read(url)
    target = {"w": torch.zeros(4)}
    with pytest.raises(CheckpointException):
        load(target, storage_reader=dcpfs.FsspecStorageReader(url))
    assert target["w"].tolist() == [0] * 4


def test_what_torch_saved_with_collectives_last_counts(tmp_path: Path) -> None:
    url = str(tmp_path)
    save({"w": torch.full((4,), 2.0)}, storage_writer=FileSystemWriter(url), use_collectives=False)
    save({"w": torch.ones(4)}, storage_writer=FileSystemWriter(url))
    _set_times(tmp_path, ["__0.metadata", ".metadata"])
    assert dcpfs.read(url)["w"].tolist() == [1] * 4  # type: ignore[attr-defined]
    target = {"w": torch.zeros(4)}
    load(target, storage_reader=dcpfs.FsspecStorageReader(url))
    assert target["w"].tolist() == [1] * 4


def test_who_may_not_ask_for_what_is_absent_loads_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save({"w": torch.ones(4)}, storage_writer=FileSystemWriter(str(tmp_path)))

    def deny(self: LocalStore, path: str) -> bool:
        raise dcpfs.PermissionDeniedError(f"asking for {path} at {self.location}: 403")

    monkeypatch.setattr(LocalStore, "exists", deny)
    assert dcpfs.read(tmp_path)["w"].tolist() == [1] * 4  # type: ignore[attr-defined]


def test_either_save_of_dcpfs_withdraws_the_other(tmp_path: Path) -> None:
    url = str(tmp_path)
    save({"w": torch.ones(4)}, storage_writer=FileSystemWriter(url))
    run_ranks(_save, 2, url, (3.0,))
    assert ".metadata" not in _names(tmp_path)
    dcpfs.save({"w": torch.ones(4)}, url, overwrite=True)
    assert _names(tmp_path) == [".metadata", "__0_0.distcp"]


def _set_times(folder: Path, names: list[str]) -> None:
    """Changed one after another, ten seconds apart."""
    for number, name in enumerate(names):
        os.utime(folder / name, (1_000_000 + 10 * number,) * 2)
