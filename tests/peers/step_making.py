"""Steps to load: our own, committed, and those of other tools."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from dcpfs.checkpointer.layout import DATALOADER, LATEST_NAME, rank_file_name, step_name
from dcpfs.checkpointer.manifest import Manifest, decode_manifest
from dcpfs.checkpointer.rank_state import encode_rank_state
from dcpfs.checkpointer.save_context import SaveContext
from dcpfs.checkpointer.save_step import save_step
from dcpfs.checkpointer.step_plan import plan_step
from dcpfs.ranks import Ranks
from dcpfs.storage.location import Location

__all__ = ["flip_byte", "make_foreign_step", "make_step", "read_manifest", "same"]


def make_step(
    root: str | Path,
    iteration: int,
    states: Mapping[str, Mapping[str, object]],
    *,
    ranks: Ranks | None = None,
    rank_state: object = None,
) -> Location:
    """Commit a step of ours. Collective over the ranks."""
    ranks = Ranks() if ranks is None else ranks
    files = {}
    if rank_state is not None:
        name = f"{DATALOADER}/{rank_file_name(ranks.rank)}"
        files[name] = encode_rank_state(rank_state, key=DATALOADER, rank=ranks.rank)
    step = plan_step(iteration, states, rank_files=files, world_size=ranks.world_size)
    save_step(step, SaveContext(Location(str(root)), ranks))
    return Location(str(root)).join(step_name(iteration))


def make_foreign_step(
    root: str | Path,
    name: str,
    states: Mapping[str, Mapping[str, object]],
    *,
    rank_state: object = None,
    latest: bool = True,
) -> Path:
    """A step as a trainer makes it with one ``dcp.save`` a key, and pickled files of ranks. Collective if there is a
    group."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    step = Path(root) / name
    for key, state in states.items():
        dcp_save(dict(state), storage_writer=FileSystemWriter(step / key), no_dist=not dist.is_initialized())
    if rank_state is not None:
        folder = step / DATALOADER
        folder.mkdir(parents=True, exist_ok=True)
        (folder / rank_file_name(rank)).write_bytes(pickle.dumps(rank_state))
    if latest and rank == 0:
        (Path(root) / LATEST_NAME).write_text(f"{name}\n")
    return step


def read_manifest(step: Location) -> Manifest:
    """The manifest of a local step."""
    return decode_manifest((Path(step.path) / "manifest.json").read_bytes(), url=step.redacted)


def flip_byte(path: Path, offset: int | None = None) -> None:
    """Damage a file: one byte in its middle."""
    data = bytearray(path.read_bytes())
    at = len(data) // 2 if offset is None else offset
    data[at] ^= 0x40
    path.write_bytes(data)


def same(first: Mapping[str, object], second: Mapping[str, object]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        other = second[name]
        if isinstance(value, torch.Tensor):
            assert isinstance(other, torch.Tensor)
            assert torch.equal(value, other), name
        else:
            assert value == other, name
