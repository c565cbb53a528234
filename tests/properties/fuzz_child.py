"""A process that decodes hostile bytes and watches itself: memory, time, what it does to the system, what it makes.

``python -m tests.properties.fuzz_child TARGET SEED COUNT SECONDS FOLDER``. It writes the number of the input that it is
at into ``FOLDER/at``, so that whoever started it knows which one ended it, and prints one JSON line at its end. What
one input does wrong is an entry of ``faults`` there, and the search goes on.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import decimal
import faulthandler
import fractions
import io
import json
import logging
import os
import pathlib
import pickle
import random
import resource
import sys
import time
import uuid
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
import torch.distributed.fsdp.api
import torch.distributed.tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import dcpfs
from dcpfs.checkpointer.choices import RngPolicy
from dcpfs.checkpointer.layout import LATEST_NAME, MANIFEST_NAME, step_name
from dcpfs.checkpointer.manifest import decode_manifest
from dcpfs.checkpointer.rank_state import decode_rank_state, encode_rank_state
from dcpfs.errors import DcpfsError
from dcpfs.format.entries import decode_object
from dcpfs.format.metadata import decode_both, decode_index
from tests.properties import hostile_bytes as hostile

__all__ = ["TARGETS"]

_MIB = 1 << 20
_SPARE_BYTES = 1 << 30
"""Address space beyond what the process has at its start."""
_GROWTH_BYTES = 192 * _MIB
_GROWTH_FACTOR = 600
_SLOW_SECONDS = 5.0
_HUNG_SECONDS = 40.0


# --- what nobody may do -------------------------------------------------------------------------------------------

_DEEDS = (
    "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "subprocess.Popen", "pty.spawn", "os.remove",
    "os.rename", "os.rmdir", "os.chmod", "os.symlink", "os.link", "os.putenv", "os.kill", "shutil.rmtree",
    "socket.connect", "socket.bind", "ctypes.dlopen", "pickle.find_class", "builtins.input", "sys._getframe.set",
    "urllib.Request", "webbrowser.open",
)  # fmt: skip
_deeds: list[str] = []
_watching = False
_allowed_folder = ""


def _watch(event: str, arguments: tuple[object, ...]) -> None:
    if not _watching:
        return
    if event == "pickle.find_class" and arguments[0] == "dcpfs.errors":
        return  # an error on its way to another rank
    if event in _DEEDS:
        _deeds.append(f"{event} {arguments!r}"[:200])
    elif event in ("exec", "compile"):
        code = arguments[0]
        name = getattr(code, "co_filename", arguments[-1] if event == "compile" else "")
        if str(name).startswith("<string"):
            _deeds.append(f"{event} {arguments!r}"[:200])
    elif event == "open" and isinstance(arguments[0], (str, bytes)):
        path, flags = os.fsdecode(arguments[0]), arguments[2]
        writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if writes or "secret" in path or "passwd" in path:
            _deeds.append(f"open {path!r} {flags}")


# --- what may come out --------------------------------------------------------------------------------------------


def touch(value: object, depth: int = 6) -> None:
    """Use a value as its owner would: what was made of bytes that are not there ends the process here."""
    if isinstance(value, torch.Tensor):
        str(value.dtype), value.shape
        if value.is_meta or value.is_sparse or value.is_nested or value.layout is not torch.strided:
            return
        if value.numel() * value.dtype.itemsize <= value.untyped_storage().nbytes():
            value.detach().clone()
    elif isinstance(value, np.ndarray):
        value.copy(), repr(value[:2] if value.ndim else value)
    elif isinstance(
        value, (dt.date, dt.time, dt.timedelta, uuid.UUID, fractions.Fraction, pathlib.PurePath, np.generic)
    ):
        repr(value)
    elif depth > 0 and isinstance(value, dict):
        for key in list(value)[:20]:
            touch(key, 0)
            touch(value[key], depth - 1)
    elif depth > 0 and isinstance(value, (list, tuple, deque, set, frozenset)):
        for item in list(value)[:20]:
            touch(item, depth - 1)


def values() -> list[object]:
    """What trainers store."""
    return [
        {"a": [1, (2, {"b": None})], 3: {(1, "x"): 2}, "f": [0.5, float("nan")], "long": 1 << 99, "b": b"bytes"},
        {"t": torch.arange(6.0).reshape(2, 3).t(), "p": torch.nn.Parameter(torch.ones(2)), "c": torch.ones(2) * 1j},
        [torch.ones(3, dtype=torch.uint16), torch.ones(2, dtype=torch.bfloat16), torch.eye(2).to_sparse()],
        [np.arange(6.0).reshape(2, 3), np.array([1, None], dtype=object), np.float32(2), np.array(["a", "bc"])],
        [np.datetime64("2026-01-02", "s"), np.dtype(">i8"), np.asfortranarray(np.ones((2, 2))), np.bool_(True)],
        [dt.datetime(2026, 1, 2, 3, tzinfo=dt.timezone.utc), dt.date(2026, 1, 2), dt.timedelta(1, 2, 3), dt.time(1, 2)],
        [decimal.Decimal("1.5"), fractions.Fraction(3, 7), uuid.UUID(int=5), pathlib.Path("a/b"), io.BytesIO(b"x")],
        [OrderedDict(a=1), defaultdict(list, {"a": [1]}), Counter("aab"), deque([1, 2], 3), {1, 2}, frozenset((3,))],
        [torch.float32, torch.device("cpu"), torch.Size((2, 3)), torch.strided, slice(1, 2), range(5), 1 + 2j],
        [random.Random(3).getstate(), np.random.RandomState(3).get_state(), torch.Generator().get_state()],
        torch.quantize_per_tensor(torch.ones(2), 0.5, 1, torch.qint8),
        torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)).state_dict(),
    ]


def saved(value: object, **options: bool) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


# --- targets ------------------------------------------------------------------------------------------------------


class Target:
    """Something that reads bytes of a store.

    Attributes:
        folder: For what it writes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make(self, chance: random.Random) -> tuple[str, object]:
        """How it was made, and the input."""
        raise NotImplementedError

    def read(self, made: object) -> str:
        """What became of it: a word. Anything but a `DcpfsError` is a fault; so is an AssertionError."""
        raise NotImplementedError

    def size_of(self, made: object) -> int:
        return len(made) if isinstance(made, bytes) else 100_000


class Entries(Target):
    """Values that are no plain tensor, in archives and in the format before 1.6."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.files = [saved(value) for value in values()]
        self.old = [saved(value, _use_new_zipfile_serialization=False) for value in values()]
        self.records = [hostile.records_of(data) for data in self.files]
        self.pickles = [next(data for name, data in each.items() if name.endswith("data.pkl")) for each in self.records]

    def make(self, chance: random.Random) -> tuple[str, bytes]:
        number = chance.randrange(len(self.files))
        way = chance.randrange(10)
        if way == 0:
            return "damaged", hostile.damage(self.files[number], self.files, chance)
        if way == 1:
            return "damaged old", hostile.damage(self.old[number], self.old, chance)
        if way == 2:
            return "damaged pickle", self._forged(
                number, hostile.damage(self.pickles[number], self.pickles, chance), chance
            )
        if way == 3:
            start, pickled, end = hostile.split_old_file(self.old[number])
            made = hostile.edit_pickle(pickled, self.pickles, chance) if chance.random() < 0.7 else None
            return "old, edited", start + (made or hostile.random_pickle(chance)) + end
        if way <= 6:
            return "edited", self._forged(
                number, hostile.edit_pickle(self.pickles[number], self.pickles, chance), chance
            )
        return "made up", self._forged(number, hostile.random_pickle(chance), chance)

    def _forged(self, number: int, pickled: bytes, chance: random.Random) -> bytes:
        return hostile.forge_archive(self.records[number], pickled, chance)

    def read(self, made: object) -> str:
        assert isinstance(made, bytes)
        touch(decode_object(made, key="k"))
        return "value"


class RankFiles(Target):
    """What belongs to one rank: plain pickles."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        plain = [value for value in values() if not isinstance(value, torch.Tensor)]
        self.files = []
        for value in plain:
            with contextlib.suppress(DcpfsError):
                self.files.append(encode_rank_state(value, key="k", rank=0))
        self.files += [pickle.dumps(self_, 2) for self_ in ({"position": [1, 2]}, [1.5, "x"])]

    def make(self, chance: random.Random) -> tuple[str, bytes]:
        known = chance.choice(self.files)
        way = chance.randrange(4)
        if way == 0:
            return "damaged", hostile.damage(known, self.files, chance)
        if way == 1:
            return "edited", hostile.edit_pickle(known, self.files, chance)
        return "made up", hostile.random_pickle(chance)

    def read(self, made: object) -> str:
        assert isinstance(made, bytes)
        touch(decode_rank_state(made))
        return "value"


_STATE: dict[str, object] = {
    "w": torch.arange(24.0).reshape(6, 4),
    "deep": {"list": [torch.ones(3, dtype=torch.int16), {"x": 3}], "none": None},
    "milestones": {2: 1, 5: 3},
    "keys": {(1, b"x"): 2, 1.5: {"empty": {}}},
    "ordered": OrderedDict(b=torch.zeros(2), a=1),
    "empty": {"a": {}},
}


class MetadataFiles(Target):
    """``.metadata`` of dcpfs and of torch, and a read of the checkpoint that it describes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.where = folder / "own", folder / "torch"
        dcpfs.save(dict(_STATE), self.where[0])
        dcp_save(dict(_STATE), storage_writer=FileSystemWriter(self.where[1]))
        self.files = [(where / ".metadata").read_bytes() for where in self.where]
        self.pickled, self.columns = hostile.split_metadata(self.files[0])
        self.whole = dcpfs.read(self.where[0])
        (folder / "outside").mkdir()
        (folder / "outside" / "secret").write_bytes((self.where[0] / "__0_0.distcp").read_bytes())

    def make(self, chance: random.Random) -> tuple[str, bytes]:
        way = chance.randrange(8)
        if way == 0:
            return "own, damaged", hostile.damage(self.files[0], self.files, chance)
        if way == 1:
            return "torch's, damaged", hostile.damage(self.files[1], self.files, chance)
        if way <= 3:
            return "torch's, edited", hostile.edit_pickle(self.files[1], [self.files[1], self.pickled], chance)
        if way <= 6:
            return "own, forged", hostile.forge_metadata(self.pickled, hostile.edit_json(self.columns, chance))
        return "made up", hostile.random_pickle(chance)

    def read(self, made: object) -> str:
        assert isinstance(made, bytes)
        own = made[-8:] == b"DCPFSIDX"
        where = self.where[0] if own else self.where[1]
        (where / ".metadata").write_bytes(made)
        with contextlib.suppress(DcpfsError):
            decode_both(made)
        decode_index(made)
        found = dcpfs.read(where)
        touch(found)
        template = {"w": torch.zeros(6, 4), "deep": {"list": [torch.zeros(3, dtype=torch.int16), {"x": 0}]}}
        with contextlib.suppress(DcpfsError):
            dcpfs.load(template, where, strict=False)
        return "value"


class Manifests(Target):
    """``manifest.json``, decoded alone."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        save_steps(folder / "run")
        self.content = (folder / "run" / step_name(2) / MANIFEST_NAME).read_bytes()

    def make(self, chance: random.Random) -> tuple[str, bytes]:
        if chance.random() < 0.3:
            return "damaged", hostile.damage(self.content, [self.content], chance)
        return "edited", hostile.edit_json(json.loads(self.content), chance).encode("utf-8", "surrogatepass")

    def read(self, made: object) -> str:
        assert isinstance(made, bytes)
        decode_manifest(made, url="x")
        return "value"


def step_state(version: int) -> dict[str, dict[str, object]]:
    """A training state in which every value tells which step it is of."""
    return {
        "model": {"large": torch.full((500,), float(version)), "small": torch.full((3,), version)},
        "optim": {"exp_avg": torch.full((9,), version + 0.5), "betas": (0.9, 0.5 + version)},
        "dataloader": {"position": [version] * 5, "order": torch.full((4,), version)},
        "extra": {"note": "x" * version, "n": version, "deep": {"k": [version, {"t": torch.tensor(version)}]}},
    }


def save_steps(where: Path) -> None:
    """Two steps by the checkpointer itself."""
    config = dcpfs.CheckpointConfig(save_dir=str(where), extra_keys=("extra",), rng=RngPolicy.NONE)
    with dcpfs.DistributedCheckpointer(config) as checkpointer:
        for version in (1, 2):
            checkpointer.save_state(version, step_state(version))


class Steps(Target):
    """A run's whole directory, of which one file is not what it was: what loads is one step, bit for bit."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.run = folder / "run"
        save_steps(self.run)
        self.content = {
            str(each.relative_to(self.run)): each.read_bytes() for each in self.run.rglob("*") if each.is_file()
        }
        self.newest = [name for name in self.content if name.startswith(step_name(2))]
        self.config = dcpfs.CheckpointConfig(save_dir=str(self.run), extra_keys=("extra",), rng=RngPolicy.NONE)

    def make(self, chance: random.Random) -> tuple[str, tuple[str, bytes]]:
        way = chance.randrange(10)
        if way <= 1:
            text = chance.choice(hostile.TEXTS) if way else step_name(chance.choice((1, 2, 3, 999)))
            end = chance.choice(("", "\n", "\r\n", "/model", " \n\n", "\n" + step_name(1)))
            return "pointer", (LATEST_NAME, (text + end).encode("utf-8", "surrogatepass"))
        if way == 2:
            name = chance.choice((".writing", ".protected", "user.txt", "model/.extra", "model/rank_7.pkl"))
            return "another file", (f"{step_name(2)}/{name}", chance.randbytes(chance.randrange(300)))
        name = chance.choice(self.newest)
        content = self.content[name]
        if name.endswith(MANIFEST_NAME) and chance.random() < 0.7:
            edited = hostile.edit_json(json.loads(content), chance)
            return "manifest edited", (name, edited.encode("utf-8", "surrogatepass"))
        if way == 3:
            return "file of the older step", (name, self._older(name))
        return "damaged", (name, hostile.damage(content, list(self.content.values()), chance))

    def _older(self, name: str) -> bytes:
        other = name.replace(step_name(2), step_name(1))
        return self.content.get(other, b"")

    def read(self, made: object) -> str:
        assert isinstance(made, tuple)
        name, content = made
        path = self.run / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        try:
            return self._load()
        finally:
            if name in self.content:
                path.write_bytes(self.content[name])
            else:
                path.unlink()

    def _load(self) -> str:
        parts = step_state(0)
        parts["model"]["large"] = torch.zeros(500)
        with dcpfs.DistributedCheckpointer(self.config, access="read_only") as checkpointer:
            iteration = checkpointer.load_state(parts)
        assert iteration in (1, 2), f"iteration {iteration} was loaded"
        assert equal(parts, step_state(iteration)), f"what was loaded as {iteration} is none: {parts}"
        return f"step {iteration}"


def equal(found: object, wanted: object) -> bool:
    """Of equal types and values, bit for bit."""
    if type(found) is not type(wanted):
        return False
    if isinstance(wanted, torch.Tensor) and isinstance(found, torch.Tensor):
        return found.dtype == wanted.dtype and torch.equal(found, wanted)
    if isinstance(wanted, Mapping) and isinstance(found, Mapping):
        return list(found) == list(wanted) and all(equal(found[key], wanted[key]) for key in wanted)
    if isinstance(wanted, (list, tuple)) and isinstance(found, (list, tuple)):
        return len(found) == len(wanted) and all(map(equal, found, wanted))
    return found == wanted


TARGETS: dict[str, Callable[[Path], Target]] = {
    "entries": Entries,
    "rank files": RankFiles,
    "metadata": MetadataFiles,
    "manifests": Manifests,
    "steps": Steps,
}


# --- one input after the other ------------------------------------------------------------------------------------


def _judge(target: Target, made: object) -> tuple[str, list[str]]:
    """What became of an input, and what was wrong with that."""
    global _watching
    faults = []
    before_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    started_seconds = time.process_time()
    _deeds.clear()
    _watching = True
    try:
        outcome = target.read(made)
    except DcpfsError as error:
        outcome = type(error).__name__
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, MemoryError) or "allocate memory" in str(cause):
                faults.append(f"asked for memory that is not there: {error}"[:400])
                break
            cause = cause.__cause__ or cause.__context__
    except BaseException as error:
        outcome = "fault"
        faults.append(f"{type(error).__name__}: {error}"[:600])
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        if trace is not None:
            faults[-1] += f" at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
    finally:
        _watching = False
    seconds = time.process_time() - started_seconds
    grown_bytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before_bytes
    if grown_bytes > _GROWTH_BYTES + _GROWTH_FACTOR * target.size_of(made):
        faults.append(f"took {grown_bytes} bytes for {target.size_of(made)}")
    if seconds > _SLOW_SECONDS:
        faults.append(f"took {seconds:.1f} s")
    faults.extend(
        deed for deed in _deeds if type(target) not in (Steps, MetadataFiles) or "'" + str(target.folder) not in deed
    )
    return outcome, faults


def main(kind: str, seed: int, count: int, seconds: float, folder: Path) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    target = TARGETS[kind](folder)
    for number in range(20):  # whatever is imported late
        with contextlib.suppress(DcpfsError, AssertionError):
            target.read(target.make(random.Random(-1 - number))[1])
    size_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size_bytes + _SPARE_BYTES, size_bytes + _SPARE_BYTES))
    sys.addaudithook(_watch)
    progress = os.open(folder / "at", os.O_CREAT | os.O_WRONLY)
    outcomes: Counter[str] = Counter()
    faults: list[dict[str, object]] = []
    deadline_seconds = time.monotonic() + seconds
    tried = 0
    for number in range(seed, seed + count):
        if time.monotonic() > deadline_seconds:
            break
        os.pwrite(progress, b"%20d" % number, 0)
        faulthandler.dump_traceback_later(_HUNG_SECONDS, exit=True)
        how, made = target.make(random.Random(number))
        outcome, wrong = _judge(target, made)
        outcomes[f"{how}: {outcome}"] += 1
        tried += 1
        faults.extend({"number": number, "how": how, "fault": each} for each in wrong)
    faulthandler.cancel_dump_traceback_later()
    print(json.dumps({"tried": tried, "outcomes": dict(sorted(outcomes.items())), "faults": faults[:40]}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), Path(sys.argv[5]))
