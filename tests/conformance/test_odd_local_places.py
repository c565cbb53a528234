"""Local directories whose names hold what elsewhere is syntax: as paths, in URLs, and behind a wrapper."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

import dcpfs
from dcpfs.storage.location import Location

NAMES = (
    "a b",
    " blank at its start",
    "and at its end ",
    "100%",
    "per%20cent",
    "#1",
    "what?x=1#f",
    "[x]",
    "star*",
    "ünï-雪-🧊",
    "new\nline",
    "tab\t",
    ".hidden",
    "-rf",
    "--help",
    "back\\slash",
    "quote'\"`$HOME",
    "a::b",
    "simplecache::b",
    "colon:name",
    "semi;colon&and",
    "{brace}",
    "~tilde",
    "n" * 255,
)


def state(value: float) -> dict[str, object]:
    return {"weight": torch.full((100,), value), "step": int(value)}


def values(found: Mapping[str, object]) -> dict[str, object]:
    weight = found["weight"]
    assert isinstance(weight, torch.Tensor)
    return {"weight": float(weight.mean()), "step": found["step"]}


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name)[:30])
def test_a_checkpoint_is_where_its_name_says(name: str, tmp_path: Path) -> None:
    directory = tmp_path / name / "step"
    places: tuple[str | Path, ...] = (str(directory), directory, f"file://{directory}", f"local://{directory}")
    for value, place in enumerate(places, 1):
        dcpfs.save(state(float(value)), place, overwrite=value > 1)
        assert sorted(path.name for path in tmp_path.iterdir()) == [name]
        assert sorted(path.name for path in directory.iterdir()) == [".metadata", "__0_0.distcp"]
        for again in (str(directory), f"file://{directory}", f"local://{directory}"):
            assert values(dcpfs.read(again)) == {"weight": float(value), "step": value}
    loaded = state(0.0)
    load(loaded, storage_reader=FileSystemReader(directory), no_dist=True)
    assert values(loaded) == {"weight": 4.0, "step": 4}


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name)[:30])
def test_a_run_is_where_its_name_says(name: str, tmp_path: Path) -> None:
    directory = tmp_path / name
    for save_dir in (str(directory), f"local://{directory}", f"dir::file://{directory}"):
        config = dcpfs.CheckpointConfig(save_dir=save_dir, keep_last=1)
        with dcpfs.DistributedCheckpointer(config) as checkpointer:
            for step in (1, 2):
                checkpointer.save_state(step, {"model": torch.nn.Linear(2, 2)})
        assert sorted(path.name for path in directory.iterdir()) == ["iter_000000002", "latest_checkpoint.txt"]
        assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("end", ["", "/", "/run"])
def test_what_looks_like_a_url_that_lost_a_slash_is_refused_at_once(end: str, tmp_path: Path) -> None:
    for make in (
        lambda: Location(f"{tmp_path}/s3:{end}"),
        lambda: dcpfs.CheckpointConfig(save_dir=f"{tmp_path}/s3:{end}").save_location(),
        lambda: dcpfs.FsspecStorageWriter(Path(f"s3:{end}")),
    ):
        with pytest.raises(ValueError, match="lost a slash"):
            make()


def test_a_name_that_reads_as_a_chain_is_one_unless_it_is_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Location("simplecache::b").components == ("simplecache", str(tmp_path / "b"))
    assert Location("./simplecache::b").url == str(tmp_path / "simplecache::b")
    assert Location(Path("a::b")).url == str(tmp_path / "a::b")
