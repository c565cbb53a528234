"""Tensors of a state that share memory get one value, or the load says why not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import dcpfs
from dcpfs.config import TransferConfig
from dcpfs.dcp.aliases import find_aliases
from dcpfs.dcp.landing import TensorWant
from dcpfs.dcp.matching import match_state
from dcpfs.dcp.source import CheckpointSource
from dcpfs.storage.location import Location

State = dict[str, torch.Tensor]


def _load_here(state: State, url: str) -> None:
    dcpfs.load(state, url)


def _load_what_fits(state: State, url: str) -> None:
    dcpfs.load(state, url, strict=False)


def _load_with_torch(state: State, url: str) -> None:
    dcp_load(dict(state), storage_reader=dcpfs.FsspecStorageReader(url))


def _save_here(state: State, url: str) -> None:
    dcpfs.save(state, url)


def _save_with_torch(state: State, url: str) -> None:
    dcp_save(dict(state), checkpoint_id=url)


loads = pytest.mark.parametrize("load", [_load_here, _load_what_fits, _load_with_torch])
saves = pytest.mark.parametrize("save", [_save_here, _save_with_torch])


@loads
@saves
def test_two_values_for_one_memory_are_an_error_that_names_both(
    save: Callable[[State, str], None], load: Callable[[State, str], None], tmp_path: Path
) -> None:
    url = str(tmp_path / "step")
    save({"left": torch.ones(4, 3), "right": torch.full((4, 3), 2.0)}, url)
    tied = torch.zeros(4, 3)
    # torch reports what a reader raises as a BaseException of its own, with the error in its text.
    with pytest.raises(BaseException, match="'left' and 'right' share memory in the state"):
        load({"left": tied, "right": tied}, url)
    if save is _save_here:
        assert torch.equal(tied, torch.zeros(4, 3)), "the metadata tells, so nothing is read"


@loads
@saves
def test_tied_weights_that_are_equal_load(
    save: Callable[[State, str], None], load: Callable[[State, str], None], tmp_path: Path
) -> None:
    url = str(tmp_path / "step")
    weight = torch.randn(5, 7)
    weight[0, 0] = float("nan")
    save({"embedding": weight, "head": weight.clone(), "flat": weight.reshape(-1).clone()}, url)
    tied = torch.zeros(5, 7)
    load({"embedding": tied, "head": tied, "flat": tied.view(-1)}, url)
    assert torch.equal(tied.view(torch.int32), weight.view(torch.int32))


@loads
@pytest.mark.parametrize("agree", [True, False])
def test_views_that_overlap_in_part_are_compared(
    agree: bool, load: Callable[[State, str], None], tmp_path: Path
) -> None:
    url = str(tmp_path / "step")
    whole = torch.arange(6.0)
    dcpfs.save({"all": whole, "end": whole[3:] + (0.0 if agree else 1.0)}, url)
    base = torch.zeros(6)
    state = {"all": base, "end": base[3:]}
    if agree:
        load(state, url)
        assert torch.equal(base, whole)
    else:
        with pytest.raises(BaseException, match="'all' and 'end' share memory"):
            load(state, url)


@loads
def test_columns_of_one_matrix_share_nothing(load: Callable[[State, str], None], tmp_path: Path) -> None:
    url = str(tmp_path / "step")
    whole = torch.randn(6, 9)
    dcpfs.save({name: whole[:, at : at + 3].clone() for name, at in (("q", 0), ("k", 3), ("v", 6))}, url)
    fused = torch.zeros(6, 9)
    load({"q": fused[:, :3], "k": fused[:, 3:6], "v": fused[:, 6:]}, url)
    assert torch.equal(fused, whole)


@loads
def test_a_transposed_view_is_compared(load: Callable[[State, str], None], tmp_path: Path) -> None:
    url = str(tmp_path / "step")
    weight = torch.randn(3, 4)
    dcpfs.save({"a": weight, "b": weight.t().contiguous(), "c": weight.clone()}, url)
    base = torch.zeros(3, 4)
    load({"a": base, "b": base.t(), "c": torch.zeros(3, 4)}, url)
    assert torch.equal(base, weight)
    other = str(tmp_path / "other")
    dcpfs.save({"a": weight, "b": torch.zeros(4, 3), "c": weight}, other)
    with pytest.raises(BaseException, match="'a' and 'b' share memory"):
        load({"a": base, "b": base.t(), "c": torch.zeros(3, 4)}, other)


def test_a_checkpointer_refuses_two_values_for_tied_weights_and_changes_nothing(tmp_path: Path) -> None:
    def make(kind: str) -> dict[str, torch.Tensor]:
        first = torch.randn(4, 4)
        return {"embedding": first, "head": first if kind == "tied" else torch.randn(4, 4)}

    for kind in ("free", "tied"):
        saved, state = make(kind), make(kind)
        with dcpfs.DistributedCheckpointer(dcpfs.CheckpointConfig(save_dir=str(tmp_path / kind))) as checkpointer:
            checkpointer.save_state(1, {"net": saved})
            assert checkpointer.load_state({"net": state}) == 1
        assert all(torch.equal(state[name], saved[name]) for name in saved)
    state = make("tied")
    before = state["head"].clone()
    config = dcpfs.CheckpointConfig(save_dir=str(tmp_path / "free"))
    with (
        dcpfs.DistributedCheckpointer(config) as checkpointer,
        pytest.raises(dcpfs.KeyMismatchError, match="'net/embedding' and 'net/head' share memory") as caught,
    ):
        checkpointer.load_state({"net": state})
    assert not caught.value.written_keys
    assert torch.equal(state["head"], before)


def test_only_tensors_that_overlap_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = str(tmp_path / "step")
    base = torch.randn(20_000, 2)
    dcpfs.save({f"k{row}": base[row].clone() for row in range(len(base))}, url)
    source = CheckpointSource(Location(url), verify="checksums", trust="allowlist", transfer=TransferConfig())
    index = source.decode_index(*source.read_all_metadata())
    source.close()
    wants = match_state({f"k{row}": base[row] for row in range(len(base))}, index).wants
    assert len(wants) == len(base)

    def refuse(first: TensorWant, second: TensorWant) -> bool:
        raise AssertionError(f"{first.key} and {second.key} don't overlap")

    monkeypatch.setattr("dcpfs.dcp.aliases._are_same", refuse)
    monkeypatch.setattr("dcpfs.dcp.aliases._share_memory", refuse)
    assert find_aliases(wants) == []
