"""Makes the checkpoints in ``tests/golden``: by releases of torch, by other libraries, and by dcpfs.

They are made once and kept. A format that changes shows against files that nobody wrote today, and releases of torch
that the tests don't run on are read all the same. From the root of the repository::

    python -m tests.peers.make_golden releases 2.9.1 2.14.1   # installs each into a venv of its own, which it removes
    python -m tests.peers.make_golden torch                   # by the torch of this interpreter, without dcpfs
    python -m tests.peers.make_golden peers                   # S3 connector and multi-storage-client, on SeaweedFS
    python -m tests.peers.make_golden own                     # by dcpfs as it stands
    python -m tests.peers.make_golden reference               # a step as the reference checkpointer lays it out
    python -m tests.peers.make_golden read                    # torch alone reads what dcpfs made; no dcpfs needed

``--into`` names another folder, ``--interpreter`` one that has a release already. Wheels of torch for Linux bring CUDA,
several GB a release; an index of CPU builds is chosen with ``PIP_INDEX_URL``. Each folder has a ``golden.json``: who
wrote it with which versions, and what it holds (`tests.peers.golden_state.describe`), a line a checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import pickle
import platform
import shutil
import subprocess
import sys
import tempfile
import venv
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.spawn import spawn

from tests.peers.golden_state import (
    Job,
    describe,
    dtypes_state,
    layouts_state,
    new_dtypes,
    sharded_state,
    template_from,
    values_state,
    whole_sharded_state,
    without_lacking,
)
from tests.peers.sample_state import textual

__all__ = ["GOLDEN", "NOTE", "read_flat", "run_two_ranks"]

_ROOT = Path(__file__).parents[2]
GOLDEN = _ROOT / "tests" / "golden"
NOTE = "golden.json"

_VERSIONS = ("torch", "numpy", "fsspec", "zstandard", "s3torchconnector", "multi-storage-client", "dcpfs")


class Golden:
    """One folder of checkpoints, and its note."""

    def __init__(self, folder: Path, writer: str, *names: str) -> None:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        self.folder = folder
        self._note: dict[str, Any] = {"writer": writer, "versions": {"python": platform.python_version()}}
        self._note["versions"] |= {name: importlib.metadata.version(name) for name in names}
        self._held: dict[str, Any] = {}

    def tell(self, name: str, value: object) -> None:
        """Note something beside what is held."""
        self._note[name] = value

    def hold(self, name: str, expected: Mapping[str, Any]) -> Path:
        """Note what a checkpoint holds.

        Returns:
            Where it belongs.
        """
        self._held[name] = dict(expected)
        return self.folder / name

    def hold_state(self, name: str, state: Mapping[str, object]) -> Path:
        """Note a state: as it is, and as torch's flattening keeps it, where that is something else."""
        held = {"state": describe(state), "textual": describe(textual(state))}
        if held["state"] == held["textual"]:
            del held["textual"]
        return self.hold(name, held)

    def finish(self) -> None:
        """Write the note."""
        lines = [f"  {json.dumps(name)}: {_compact(value)}" for name, value in self._held.items()]
        note = [f" {json.dumps(name)}: {json.dumps(value)},\n" for name, value in self._note.items()]
        text = "{\n" + "".join(note) + ' "checkpoints": {\n' + ",\n".join(lines) + "\n }\n}\n"
        json.loads(text)
        (self.folder / NOTE).write_text(text, encoding="utf-8")


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True)


# --- two ranks


def run_two_ranks(function: Callable[..., None], *arguments: object) -> None:
    """Run a function on two ranks of a gloo group."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, args=(folder, function, arguments), nprocs=2)  # type: ignore[no-untyped-call]  # torch's


def _rank(rank: int, folder: str, function: Callable[..., None], arguments: tuple[object, ...]) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", store=FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    function(*arguments)
    dist.barrier()
    dist.destroy_process_group()


def _mesh() -> DeviceMesh:
    return DeviceMesh("cpu", [0, 1])


# --- by torch


def make_by_torch(root: Path) -> None:
    release = torch.__version__.partition("+")[0]
    golden = Golden(root / f"torch-{release}", f"torch {release}", "torch", "numpy", "fsspec", "zstandard")
    new, without = new_dtypes()
    golden.tell("dtypes that it can't hold", without)

    def write(name: str, state: Mapping[str, Any], **options: Any) -> None:
        writer = FileSystemWriter(golden.hold_state(name, state), **options)
        dcp_save(dict(state), storage_writer=writer, no_dist=True)

    write("dtypes", dtypes_state())
    if new:
        write("new_dtypes", {**dtypes_state(new), "known": torch.ones(2)})
    write("threads", {name: value[0, 0] for name, value in _tensors(dtypes_state())[:6]}, thread_count=3)
    write("file_per_item", layouts_state(), single_file_per_rank=False, thread_count=2)
    write("values", values_state())
    few = {"w": torch.arange(300, dtype=torch.int32), "nested": {"list": [torch.ones(2), 3]}, "text": "x" * 500}
    write("zstandard", few, _extensions=[ZStandard()])
    few = {"w": torch.arange(6.0), "step": 5}
    writer = FsspecWriter(f"file://{golden.hold_state('fsspec', few)}")
    dcp_save(dict(few), storage_writer=writer, no_dist=True)
    run_two_ranks(_save_sharded, str(golden.hold_state("sharded", whole_sharded_state())))
    golden.finish()


def _tensors(state: Mapping[str, object]) -> list[tuple[str, torch.Tensor]]:
    return [(name, value) for name, value in state.items() if isinstance(value, torch.Tensor)]


def _save_sharded(url: str) -> None:
    dcp_save(sharded_state(_mesh()), storage_writer=FileSystemWriter(url))


def make_reference(root: Path) -> None:
    """One ``dcp.save`` a key, a pickle a rank, the pointer; no manifest."""
    golden = Golden(root / "reference", "torch, in the layout of the reference checkpointer", "torch")
    with tempfile.TemporaryDirectory() as folder:
        run_two_ranks(_save_reference, str(golden.folder), f"{folder}/whole.json")
        golden.hold("iter_000000005", json.loads(Path(folder, "whole.json").read_text()))
    golden.finish()


def _save_reference(root: str, whole: str) -> None:
    job = Job(_mesh())
    job.train()
    step = Path(root) / "iter_000000005"
    states = {
        "model": job.model_state(),
        "optim": job.optimizer_state(),
        "scheduler": job.scheduler.state_dict(),
        "trainer": {"grad_scaler": {}, "iteration": 5},
    }
    for key, state in states.items():
        dcp_save(state, storage_writer=FileSystemWriter(step / key))
    rank = dist.get_rank()
    (step / "dataloader").mkdir(exist_ok=True)
    (step / "dataloader" / f"rank_{rank}.pkl").write_bytes(pickle.dumps(job.position))
    if rank == 0:
        Path(root, "latest_checkpoint.txt").write_text("iter_000000005\n")
    _note_whole(job, whole)


def _note_whole(job: Job, file: str) -> None:
    whole = job.whole()
    if dist.get_rank() == 0:
        Path(file).write_text(_compact(whole))


# --- on a server, so that no path of a machine stands in what is kept


class _Bucket:
    """A server's files, and how they come here."""

    def __init__(self, server: Any) -> None:
        import fsspec

        self.server = server
        self._files = fsspec.filesystem("s3", **server.storage_options)

    def keep(self, name: str, golden: Golden) -> None:
        """Fetch what lies below a name into the folder, under the same name."""
        source = self.server.url(f"{golden.folder.name}/{name}").removeprefix("s3://")
        for path in self._files.find(source):
            kept = golden.folder / name / path.removeprefix(f"{source}/")
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_bytes(self._files.cat_file(path))


def make_own(root: Path) -> None:
    import dcpfs
    from dcpfs.testing.servers import SeaweedServer

    golden = Golden(root / "dcpfs", f"dcpfs {dcpfs.__version__}", "dcpfs", "torch", "numpy", "zstandard")
    few = {"w": torch.arange(300, dtype=torch.int32), "nested": {"list": [torch.ones(2), 3]}, "text": "x" * 500}
    values = {**values_state(), "layouts": layouts_state()}
    with SeaweedServer() as server, tempfile.TemporaryDirectory() as folder:
        options, bucket = server.storage_options, _Bucket(server)
        for name, state in (("dtypes", dtypes_state()), ("values", values)):
            dcpfs.save(state, server.url(f"dcpfs/{name}"), storage_options=options)
            golden.hold_state(name, state)
        for name, state, extensions in (("writer", layouts_state(), ()), ("zstandard", few, (ZStandard(),))):
            url = server.url(f"dcpfs/{name}")
            writer = dcpfs.FsspecStorageWriter(url, storage_options=options, extensions=extensions)
            dcp_save(dict(state), storage_writer=writer, no_dist=True)
            golden.hold_state(name, state)
        run_two_ranks(_save_sharded_by_dcpfs, server.url("dcpfs/sharded"), options)
        golden.hold_state("sharded", whole_sharded_state())
        run_two_ranks(_save_step_by_dcpfs, server.url("dcpfs/run"), options, f"{folder}/whole.json")
        golden.hold("run/iter_000000003", json.loads(Path(folder, "whole.json").read_text()))
        for name in ("dtypes", "values", "writer", "zstandard", "sharded", "run"):
            bucket.keep(name, golden)
    golden.finish()


def _save_sharded_by_dcpfs(url: str, options: dict[str, object]) -> None:
    import dcpfs

    dcpfs.save(sharded_state(_mesh()), url, storage_options=options)


def _save_step_by_dcpfs(url: str, options: dict[str, object], whole: str) -> None:
    import dcpfs

    job = Job(_mesh())
    job.train()
    config = dcpfs.CheckpointConfig(save_dir=url, storage_options=options)
    with dcpfs.DistributedCheckpointer(config) as checkpointer:
        checkpointer.save(job.net, job.optimizer, job.scheduler, None, 3, dataloader=job.position, trainer=job.progress)
    _note_whole(job, whole)


def make_by_peers(root: Path) -> None:
    from dcpfs.testing.servers import SeaweedServer
    from tests.peers.exchange import HAS_CONNECTOR, HAS_MULTI_STORAGE, Place, Writer, connect_peers, write

    peers = []
    if HAS_CONNECTOR:
        peers += [(Writer.CONNECTOR, "s3torchconnector"), (Writer.CONNECTOR_PREFIXES, "s3torchconnector-prefixes")]
    if HAS_MULTI_STORAGE:
        peers += [(Writer.MULTI_STORAGE, "multi-storage-client")]
    with SeaweedServer() as server, connect_peers(server):
        bucket = _Bucket(server)
        for peer, name in peers:
            package = "multi-storage-client" if name.startswith("multi") else "s3torchconnector"
            golden = Golden(root / name, name, "torch", "numpy", package)
            for what, state in (("values", values_state()), ("layouts", layouts_state())):
                write(peer, state, Place("s3", server.url(f"{name}/{what}"), server.storage_options))
                golden.hold_state(what, state)
                bucket.keep(what, golden)
            golden.finish()


# --- read back


def read_flat(reader: StorageReader) -> dict[str, Any]:
    """Everything that a checkpoint holds by the names of torch, through its own load."""
    template: dict[str, Any] = {}
    for key, record in reader.read_metadata().state_dict_metadata.items():
        template[key] = None
        if isinstance(record, TensorStorageMetadata):
            template[key] = torch.empty(record.size, dtype=record.properties.dtype)
    dcp_load(template, storage_reader=reader, no_dist=True)
    return template


def read_own(root: Path) -> int:
    """Read all that dcpfs wrote by torch alone, and compare.

    Returns:
        How many checkpoints.
    """
    sys.modules["dcpfs"] = None  # type: ignore[assignment]  # from here on `import dcpfs` fails
    note = json.loads((root / "dcpfs" / NOTE).read_text(encoding="utf-8"))
    count = 0
    for name, held in note["checkpoints"].items():
        place = root / "dcpfs" / name
        if "state" not in held:
            for key in ("model", "optim"):
                found = read_flat(FileSystemReader(place / key))
                if describe(dict(sorted(found.items()))) != held[key]:
                    raise AssertionError(f"{place / key}: torch reads other values")
                count += 1
            continue
        expected = without_lacking(held.get("textual", held["state"]))
        template = template_from(expected)
        dcp_load(template, storage_reader=FileSystemReader(place), no_dist=True)
        if describe(template) != expected:
            raise AssertionError(f"{place}: torch reads other values")
        count += 1
    leaked = [name for name in sys.modules if name.startswith("dcpfs.")]
    if leaked:
        raise AssertionError(f"dcpfs was imported: {leaked}")
    return count


# --- releases


def make_by_releases(root: Path, releases: list[str]) -> None:
    """Each release makes its goldens, and reads those of dcpfs."""
    for release in releases:
        with tempfile.TemporaryDirectory() as folder:
            venv.create(folder, with_pip=True)
            python = Path(folder, "bin", "python")
            wanted = (f"torch=={release}", "numpy", "zstandard", "fsspec", "setuptools")
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", *wanted], check=True)
            _run_elsewhere(python, root)


def _run_elsewhere(python: Path, root: Path) -> None:
    for job in ("torch", "read"):
        command = [str(python), "-m", "tests.peers.make_golden", job, "--into", str(root)]
        subprocess.run(command, check=True, cwd=_ROOT)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _main() -> None:
    jobs: dict[str, Callable[[Path], object]] = {
        "torch": make_by_torch,
        "peers": make_by_peers,
        "own": make_own,
        "reference": make_reference,
        "read": lambda root: print(f"torch {torch.__version__} read {read_own(root)} checkpoints of dcpfs"),
    }
    parser = argparse.ArgumentParser(description="Make the golden checkpoints.")
    parser.add_argument("job", choices=[*jobs, "releases"])
    parser.add_argument("release", nargs="*", help="releases of torch")
    parser.add_argument("--into", type=Path, default=GOLDEN, help="the folder")
    parser.add_argument("--interpreter", type=Path, help="one that has a release already; with 'releases'")
    arguments = parser.parse_args()
    # Paths stand in what is written: relative ones, from the root of the repository.
    arguments.into = Path(os.path.relpath(arguments.into, _ROOT))
    os.chdir(_ROOT)
    with _quiet():
        if arguments.job != "releases":
            jobs[arguments.job](arguments.into)
        elif arguments.interpreter is not None:
            _run_elsewhere(arguments.interpreter, arguments.into)
        else:
            make_by_releases(arguments.into, arguments.release)


if __name__ == "__main__":
    _main()
