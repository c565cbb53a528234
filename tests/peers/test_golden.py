"""Checkpoints that were written once and are kept, read to the bit.

By every release of torch that is supported, by other libraries, in the layout of the reference checkpointer, and by
dcpfs. See `tests.peers.make_golden`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import dcpfs
from tests.multiprocess.gloo import run_ranks
from tests.peers.golden_state import (
    Job,
    describe,
    has_dtype,
    sharded_state,
    template_from,
    whole_sharded_state,
    without_lacking,
)
from tests.peers.make_golden import GOLDEN, NOTE

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]

RELEASES = ("2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1")
PEERS = ("s3torchconnector", "s3torchconnector-prefixes", "multi-storage-client")
_HELD: dict[str, dict[str, Any]] = {
    file.parent.name: json.loads(file.read_text(encoding="utf-8"))["checkpoints"]
    for file in sorted(GOLDEN.glob(f"*/{NOTE}"))
}


def _dtypes_of(description: Any) -> set[str]:
    if isinstance(description, list):
        own = {description[1]} if description[:1] == ["tensor"] else set()
        return own.union(*map(_dtypes_of, description))
    return set()


_STATES = [
    (folder, name)
    for folder, held in _HELD.items()
    for name in held
    if "state" in held[name] and all(map(has_dtype, _dtypes_of(held[name]["state"])))
]
"""What this torch can hold; the rest is in the test of what it lacks."""


def test_all_releases_and_peers_are_here_with_every_dtype_of_theirs() -> None:
    assert set(_HELD) == {*(f"torch-{release}" for release in RELEASES), *PEERS, "dcpfs", "reference"}
    for release in RELEASES:
        held = _HELD[f"torch-{release}"]
        wanted = {"dtypes", "threads", "file_per_item", "values", "zstandard", "fsspec", "sharded"}
        assert wanted <= set(held)
        assert len(_dtypes_of(held["dtypes"]["state"])) == (21 if release == "2.9.1" else 22)
        assert len(list((GOLDEN / f"torch-{release}" / "threads").glob("*.distcp"))) == 3
        assert len(list((GOLDEN / f"torch-{release}" / "file_per_item").glob("*.distcp"))) == 12
    assert _dtypes_of(_HELD["torch-2.14.1"]["new_dtypes"]["state"]) == {"bcomplex32", "float32"}


def test_no_secret_and_no_path_of_a_machine_is_kept() -> None:
    for file in GOLDEN.rglob("*"):
        if file.is_file():
            data = file.read_bytes()
            for word in (b"secret", b"127.0.0.1", b"/home/", b"/root/", b"/tmp/", str(GOLDEN).encode()):
                assert word not in data, file


@pytest.mark.parametrize(("folder", "name"), _STATES, ids=lambda value: value)
@pytest.mark.parametrize("how", ["read", "load", "dcp.load", "dcp.load, own planner"])
def test_case_28_a_golden_checkpoint_is_read_to_the_bit(folder: str, name: str, how: str) -> None:
    held, url = _HELD[folder][name], GOLDEN / folder / name
    state = held["state"]
    textual = held.get("textual", state)
    if how == "read":
        found = dcpfs.read(url)
        if name == "sharded":
            # Which rank's items come first is the planner's choice.
            found = {key: found[key] for key in whole_sharded_state()}
        # Without a template the types of keys and containers are known only where the writer noted them.
        noted = folder == "dcpfs" and name not in ("writer", "zstandard")
        assert describe(found) == (state if noted else textual)
        return
    if how == "load":
        for expected in (state, textual) if folder != "dcpfs" else (state,):
            template = template_from(expected)
            report = dcpfs.load(template, url)
            assert (report.missing, report.unexpected, report.mismatched) == ((), (), {})
            assert describe(template) == expected
        return
    template = template_from(textual)
    planner = dcpfs.LoadPlanner() if how == "dcp.load, own planner" else DefaultLoadPlanner()
    dcp_load(template, storage_reader=dcpfs.FsspecStorageReader(url), planner=planner, no_dist=True)
    assert describe(template) == textual


@pytest.mark.parametrize("folder", [folder for folder in _HELD if folder.startswith("torch")])
def test_a_checkpoint_with_dtypes_that_this_torch_lacks(folder: str) -> None:
    """Each dtype that both have is read to the bit; what this torch lacks is an error that names it, or all is read."""
    for name in ("dtypes", "new_dtypes"):
        if name not in _HELD[folder]:
            continue
        held = _HELD[folder][name]["state"]
        lacking = {dtype for dtype in _dtypes_of(held) if not hasattr(torch, dtype)}
        if lacking:
            with pytest.raises(dcpfs.DcpfsError, match="|".join(lacking)):
                dcpfs.read(GOLDEN / folder / name)
        else:
            template = template_from(without_lacking(held))
            dcpfs.load(template, GOLDEN / folder / name, strict=False)
            assert describe(template) == without_lacking(held)


def _load_in_two(root: str) -> int:
    loads = 0
    for folder in sorted(_HELD):
        if "sharded" not in _HELD[folder]:
            continue
        for swapped in (False, True):
            for how in ("load", "dcp.load"):
                state = sharded_state(DeviceMesh("cpu", [0, 1]), fill=False, swapped=swapped)
                url = Path(root) / folder / "sharded"
                if how == "load":
                    dcpfs.load(state, url)
                else:
                    dcp_load(state, storage_reader=dcpfs.FsspecStorageReader(url))
                expected = sharded_state(DeviceMesh("cpu", [0, 1]), swapped=swapped)
                assert describe(_local(state)) == describe(_local(expected)), f"{folder}, {how}"
                loads += 1
    return loads


def _local(state: Mapping[str, Any]) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in state.items():
        if isinstance(value, dict):
            found[key] = _local(value)
        elif isinstance(value, DTensor):
            found[key] = value.to_local()
        elif hasattr(value, "local_shards"):
            found[key] = [shard.tensor for shard in value.local_shards()]
        else:
            found[key] = value
    return found


def test_two_ranks_load_what_two_ranks_of_any_release_saved_cut_the_same_way_or_another() -> None:
    assert describe(whole_sharded_state()) == _HELD["dcpfs"]["sharded"]["state"]
    assert run_ranks(_load_in_two, 2, str(GOLDEN)) == [4 * (len(RELEASES) + 1)] * 2


def test_torch_alone_reads_what_dcpfs_wrote() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.peers.make_golden", "read"]
    done = subprocess.run(command, cwd=GOLDEN.parents[1], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "read 7 checkpoints of dcpfs" in done.stdout


# --- whole steps


def _resume_in_two(root: str, iteration: int) -> tuple[Any, dict[str, object], dict[str, object]]:
    job = Job(DeviceMesh("cpu", [0, 1]))
    config = dcpfs.CheckpointConfig(save_dir=root, verify_on_resume=True)
    with dcpfs.DistributedCheckpointer(config) as checkpointer:
        found = checkpointer.load(job.net, job.optimizer, job.scheduler, dataloader=job.position, trainer=job.progress)
        assert found == iteration
        assert checkpointer.has_resumable_checkpoint()
        whole = job.whole()
        checkpointer.save(
            job.net, job.optimizer, job.scheduler, None, iteration + 1, dataloader=job.position, trainer=job.progress
        )
    again = Job(DeviceMesh("cpu", [0, 1]))
    with dcpfs.DistributedCheckpointer(config) as checkpointer:
        assert (
            checkpointer.load(
                again.net, again.optimizer, again.scheduler, dataloader=again.position, trainer=again.progress
            )
            == iteration + 1
        )
    assert again.whole() == whole
    assert again.position == job.position
    return whole, job.position, job.progress


@pytest.mark.parametrize(
    ("folder", "step", "iteration", "tokens"),
    [("reference", "iter_000000005", 5, 0), ("dcpfs/run", "iter_000000003", 3, 384)],
    ids=["reference layout", "dcpfs"],
)
def test_two_ranks_resume_a_golden_step_and_save_the_next(
    tmp_path: Path, folder: str, step: str, iteration: int, tokens: int
) -> None:
    root = tmp_path / "run"
    shutil.copytree(GOLDEN / folder, root)
    assert (root / step / "manifest.json").exists() == (folder == "dcpfs/run")
    held = _HELD["reference"][step] if folder == "reference" else _HELD["dcpfs"][f"run/{step}"]
    for rank, (whole, position, progress) in enumerate(run_ranks(_resume_in_two, 2, str(root), iteration)):
        assert whole == held
        assert position == {"next": 9 + rank}
        assert progress == {"tokens": tokens}
    after = {file.name for file in (root / step / "model").iterdir()}
    assert after == {file.name for file in (GOLDEN / folder / step / "model").iterdir()}


@pytest.mark.parametrize(
    ("folder", "step"), [("reference", "iter_000000005"), ("dcpfs/run", "iter_000000003")], ids=["reference", "dcpfs"]
)
def test_one_process_takes_a_golden_step_of_two_ranks(folder: str, step: str) -> None:
    """A key's directory is a checkpoint by itself, for dcpfs and for torch."""
    held = _HELD["reference"][step] if folder == "reference" else _HELD["dcpfs"][f"run/{step}"]
    job = Job()
    config = dcpfs.CheckpointConfig(save_dir=str(GOLDEN / folder))
    checkpointer = dcpfs.DistributedCheckpointer(config, access="read_only")
    # The dataloader's place is each rank's own, and not asked for.
    assert checkpointer.load(job.net, job.optimizer, job.scheduler) == int(step[-9:])
    checkpointer.close()
    assert job.whole() == held
    template = template_from(held["model"])
    dcpfs.load(template, GOLDEN / folder / step / "model")
    assert describe(template) == held["model"]
    template = template_from(held["model"])
    dcp_load(template, storage_reader=FileSystemReader(GOLDEN / folder / step / "model"), no_dist=True)
    assert describe(template) == held["model"]
