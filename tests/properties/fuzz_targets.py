"""What reads bytes of a store, each with inputs for it and with what may come out of each of them.

An input says where it can what it may hold, and no other value will do: what was damaged at random under a checksum
is the value that was saved, or an error. What was made up under right checksums is what torch or Python make of the
same bytes, where dcpfs takes them at all.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import decimal
import fractions
import io
import json
import pathlib
import pickle
import random
import reprlib
import struct
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed.fsdp.api
import torch.distributed.tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import dcpfs
from dcpfs.checkpointer.choices import RngPolicy
from dcpfs.checkpointer.layout import LATEST_NAME, MANIFEST_NAME, parse_latest, step_name
from dcpfs.checkpointer.manifest import decode_manifest
from dcpfs.checkpointer.rank_state import decode_rank_state, encode_rank_state
from dcpfs.errors import DcpfsError
from dcpfs.format.entries import decode_object
from dcpfs.format.metadata import decode_both, decode_index
from dcpfs.format.tensor_values import StorageClass
from tests.properties import hostile_bytes as hostile

__all__ = ["TARGETS", "Input", "MetadataFiles", "Steps", "Target", "Tensors"]


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


def _is_name(value: object) -> bool:
    """A class or function, for which dcpfs may have its own."""
    return callable(value) or isinstance(value, StorageClass) or type(value).__name__ == "StorageType"


def equal(found: object, wanted: object) -> bool:
    """Of equal types and values, bit for bit, and in the same order. Names that no value was made with don't count."""
    if _is_name(found) and _is_name(wanted):
        return True
    if type(found) is not type(wanted):
        return False
    if isinstance(wanted, torch.Tensor) and isinstance(found, torch.Tensor):
        same = (found.dtype, found.shape, found.layout) == (wanted.dtype, wanted.shape, wanted.layout)
        return same and found.requires_grad == wanted.requires_grad and _elements(found) == _elements(wanted)
    if isinstance(wanted, np.ndarray) and isinstance(found, np.ndarray):
        if (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
            return False
        return equal(found.tolist(), wanted.tolist()) if wanted.dtype.hasobject else found.tobytes() == wanted.tobytes()
    if isinstance(wanted, Mapping) and isinstance(found, Mapping):
        # Item by item: a key that is no number, or a name, is not found by looking for it.
        return len(found) == len(wanted) and all(map(equal, found.items(), wanted.items()))
    if isinstance(wanted, (list, tuple, deque)) and isinstance(found, (list, tuple, deque)):
        return len(found) == len(wanted) and all(map(equal, found, wanted))
    if isinstance(wanted, io.BytesIO) and isinstance(found, io.BytesIO):
        return found.getvalue() == wanted.getvalue()
    if isinstance(wanted, float) and isinstance(found, float):
        return struct.pack("<d", found) == struct.pack("<d", wanted)
    if isinstance(wanted, complex) and isinstance(found, complex):
        return struct.pack("<dd", found.real, found.imag) == struct.pack("<dd", wanted.real, wanted.imag)
    if isinstance(wanted, np.generic) and isinstance(found, np.generic):
        return found.tobytes() == wanted.tobytes()
    if isinstance(wanted, (set, frozenset)) and isinstance(found, (set, frozenset)):
        return len(found) == len(wanted) and all(any(equal(each, other) for each in found) for other in wanted)
    if isinstance(wanted, torch.TypedStorage) and isinstance(found, torch.TypedStorage):
        return found.dtype == wanted.dtype and list(found) == list(wanted)
    return bool(found == wanted)


def _elements(tensor: torch.Tensor) -> object:
    """The bytes of a tensor's elements, row by row; of a kind of its own, with what else it holds."""
    if tensor.layout is not torch.strided:
        coalesced = tensor.detach().to_dense()
        return tensor.layout, _elements(coalesced)
    if tensor.is_quantized:
        return tensor.qscheme(), tensor.q_scale(), tensor.q_zero_point(), _elements(tensor.int_repr())
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.as_strided(plain.shape, (1,)).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def saved(value: object, **options: bool) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


# --- targets ------------------------------------------------------------------------------------------------------


class Input(NamedTuple):
    """What a target reads.

    Attributes:
        how: It was made, in words.
        content: The bytes.
        name: Of the file or state they stand for; of a target that has several.
        wanted: What it may hold, any of these; empty: it doesn't say.
    """

    how: str
    content: bytes
    name: str = ""
    wanted: tuple[object, ...] = ()


class Target:
    """Something that reads bytes of a store.

    Attributes:
        folder: For what it writes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make(self, chance: random.Random) -> Input:
        """An input."""
        raise NotImplementedError

    def read(self, made: Input) -> object:
        """What it holds. Anything but a `DcpfsError` is a fault; so is an AssertionError."""
        raise NotImplementedError

    def check(self, made: Input, found: object) -> str:
        """What that is, in a word. An AssertionError: a wrong value."""
        if not made.wanted:
            return "value"
        assert any(equal(found, each) for each in made.wanted), f"a wrong value: {reprlib.repr(found)}"
        return "right value"

    def size_of(self, made: Input) -> int:
        """The length of what it reads, in bytes."""
        return len(made.content)


def compare(found: object, read: Callable[[], object]) -> str:
    """Hold what was found against what torch or Python read of the same bytes: it was taken, so nothing in it harms."""
    try:
        wanted = read()
    except Exception:
        return "value, which others refuse for what stands beside it"
    try:
        same = equal(found, wanted)
    except Exception:
        return "value, which nobody can compare"
    assert same, f"a wrong value: {reprlib.repr(found)} instead of {reprlib.repr(wanted)}"
    return "value as others read it"


def _untouched(chance: random.Random) -> bool:
    """Some inputs are as they were saved: those must be read, and right."""
    return chance.random() < 0.03


class Entries(Target):
    """Values that are no plain tensor: in archives, which have checksums, and in the format before 1.6 without."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.values = values()
        self.files = [saved(value) for value in self.values]
        self.old = [saved(value, _use_new_zipfile_serialization=False) for value in self.values]
        self.records = [hostile.records_of(data) for data in self.files]
        self.pickles = [next(data for name, data in each.items() if name.endswith("data.pkl")) for each in self.records]

    def make(self, chance: random.Random) -> Input:
        number = chance.randrange(len(self.files))
        if _untouched(chance):
            files = chance.choice((self.files, self.old))
            return Input("untouched", files[number], wanted=(self.values[number],))
        way = chance.randrange(10)
        if way == 0:
            # Of pieces of other files the whole of another may come about.
            damaged = hostile.damage(self.files[number], self.files, chance)
            return Input("damaged", damaged, wanted=tuple(self.values))
        if way == 1:
            return Input("damaged old", hostile.damage(self.old[number], self.old, chance))
        if way == 2:
            return Input(
                "damaged pickle",
                self._forged(number, hostile.damage(self.pickles[number], self.pickles, chance), chance),
            )
        if way == 3:
            start, pickled, end = hostile.split_old_file(self.old[number])
            made = hostile.edit_pickle(pickled, self.pickles, chance) if chance.random() < 0.7 else None
            return Input("old, edited", start + (made or hostile.random_pickle(chance)) + end)
        if way <= 6:
            edited = hostile.edit_pickle(self.pickles[number], self.pickles, chance)
            return Input("edited", self._forged(number, edited, chance))
        return Input("made up", self._forged(number, hostile.random_pickle(chance), chance))

    def _forged(self, number: int, pickled: bytes, chance: random.Random) -> bytes:
        return hostile.forge_archive(self.records[number], pickled, chance)

    def read(self, made: Input) -> object:
        found = decode_object(made.content, key="k")
        touch(found)
        return found

    def check(self, made: Input, found: object) -> str:
        if made.wanted:
            return super().check(made, found)
        return compare(found, lambda: _load_with_torch(made.content))


class RankFiles(Target):
    """What belongs to one rank: plain pickles, whose checksums stand elsewhere (see `Steps`)."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.values = []
        self.files = []
        for value in values():
            if not isinstance(value, torch.Tensor):
                with contextlib.suppress(DcpfsError):
                    self.files.append(encode_rank_state(value, key="k", rank=0))
                    self.values.append(value)
        for value in ({"position": [1, 2]}, [1.5, "x"]):
            self.files.append(pickle.dumps(value, 2))
            self.values.append(value)

    def make(self, chance: random.Random) -> Input:
        number = chance.randrange(len(self.files))
        known = self.files[number]
        if _untouched(chance):
            return Input("untouched", known, wanted=(self.values[number],))
        way = chance.randrange(4)
        if way == 0:
            return Input("damaged", hostile.damage(known, self.files, chance))
        if way == 1:
            return Input("edited", hostile.edit_pickle(known, self.files, chance))
        return Input("made up", hostile.random_pickle(chance))

    def read(self, made: Input) -> object:
        found = decode_rank_state(made.content)
        touch(found)
        return found

    def check(self, made: Input, found: object) -> str:
        return super().check(made, found) if made.wanted else compare(found, lambda: pickle.loads(made.content))


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
        self.whole = dcpfs.read(self.where[0]), dcpfs.read(self.where[1])
        assert equal(self.whole[0], dict(_STATE)), self.whole[0]
        (folder / "outside").mkdir()
        (folder / "outside" / "secret").write_bytes((self.where[0] / "__0_0.distcp").read_bytes())

    def make(self, chance: random.Random) -> Input:
        if _untouched(chance):
            number = chance.randrange(2)
            return Input("untouched", self.files[number], ("own", "torch")[number], (self.whole[number],))
        way = chance.randrange(8)
        if way == 0:
            # Only pieces of this file: that of torch has no checksum.
            damaged = hostile.damage(self.files[0], [self.files[0], self.pickled], chance)
            return Input("own, damaged", damaged, "own", (self.whole[0],))
        if way == 1:
            return Input("torch's, damaged", hostile.damage(self.files[1], self.files, chance), "torch")
        if way <= 3:
            edited = hostile.edit_pickle(self.files[1], [self.files[1], self.pickled], chance)
            return Input("torch's, edited", edited, "torch")
        if way <= 6:
            forged = hostile.forge_metadata(self.pickled, hostile.edit_json(self.columns, chance))
            return Input("own, forged", forged, "own")
        return Input("made up", hostile.random_pickle(chance), "torch")

    def read(self, made: Input) -> object:
        where = self.folder / made.name
        (where / ".metadata").write_bytes(made.content)
        with contextlib.suppress(DcpfsError):
            decode_both(made.content)
        decode_index(made.content)
        found = dcpfs.read(where)
        touch(found)
        template = {"w": torch.zeros(6, 4), "deep": {"list": [torch.zeros(3, dtype=torch.int16), {"x": 0}]}}
        with contextlib.suppress(DcpfsError):
            dcpfs.load(template, where, strict=False)
            if made.wanted:
                loaded: Any = template
                held: Any = _STATE
                assert equal(loaded["w"], held["w"]), f"a wrong value was loaded: {template}"
                assert equal(loaded["deep"]["list"], held["deep"]["list"]), f"a wrong value was loaded: {template}"
        return found

    def size_of(self, made: Input) -> int:
        return 100_000


class Manifests(Target):
    """``manifest.json``, decoded alone."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        save_steps(folder / "run")
        self.content = (folder / "run" / step_name(2) / MANIFEST_NAME).read_bytes()

    def make(self, chance: random.Random) -> Input:
        if _untouched(chance):
            return Input("untouched", self.content, wanted=(decode_manifest(self.content, url="x"),))
        if chance.random() < 0.3:
            return Input("damaged", hostile.damage(self.content, [self.content], chance))
        edited = hostile.edit_json(json.loads(self.content), chance)
        return Input("edited", edited.encode("utf-8", "surrogatepass"))

    def read(self, made: Input) -> object:
        return decode_manifest(made.content, url="x")


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

    def make(self, chance: random.Random) -> Input:
        if _untouched(chance):
            name = chance.choice(self.newest)
            return Input("untouched", self.content[name], name, (2,))
        way = chance.randrange(10)
        if way <= 1:
            text = chance.choice(hostile.TEXTS) if way else step_name(chance.choice((1, 2, 3, 999)))
            end = chance.choice(("", "\n", "\r\n", "/model", " \n\n", "\n" + step_name(1)))
            content = (text + end).encode("utf-8", "surrogatepass")
            named = parse_latest(content.decode("utf-8", "replace"))
            return Input("pointer", content, LATEST_NAME, (1 if named == 1 else 2,))
        if way == 2:
            name = chance.choice((".writing", ".protected", "user.txt", "model/.extra", "model/rank_7.pkl"))
            return Input("another file", chance.randbytes(chance.randrange(300)), f"{step_name(2)}/{name}", (2,))
        name = chance.choice(self.newest)
        content = self.content[name]
        if name.endswith(MANIFEST_NAME) and chance.random() < 0.7:
            edited = hostile.edit_json(json.loads(content), chance)
            return Input("manifest edited", edited.encode("utf-8", "surrogatepass"), name, (1, 2))
        if way == 3:
            older = self.content.get(name.replace(step_name(2), step_name(1)), b"")
            return Input("file of the older step", older, name, (2,) if older == content else (1,))
        damaged = hostile.damage(content, list(self.content.values()), chance)
        return Input("damaged", damaged, name, (2,) if damaged == content else (1, 2))

    def read(self, made: Input) -> object:
        path = self.run / made.name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(made.content)
        try:
            return self._load()
        finally:
            if made.name in self.content:
                path.write_bytes(self.content[made.name])
            else:
                path.unlink()

    def _load(self) -> int:
        parts = step_state(0)
        parts["model"]["large"] = torch.zeros(500)
        with dcpfs.DistributedCheckpointer(self.config, access="read_only") as checkpointer:
            iteration = checkpointer.load_state(parts)
        assert iteration in (1, 2), f"iteration {iteration} was loaded"
        assert equal(parts, step_state(iteration)), f"what was loaded as {iteration} is none: {parts}"
        return iteration

    def check(self, made: Input, found: object) -> str:
        assert found in made.wanted, f"step {found} was loaded instead of {made.wanted}"
        return f"step {found}"

    def size_of(self, made: Input) -> int:
        return 100_000


def _tensors() -> dict[str, torch.Tensor]:
    """No two of one dtype, so that none passes for another."""
    return {
        "plain": torch.arange(24.0).reshape(6, 4),
        "turned": torch.arange(30.0, dtype=torch.float64).reshape(5, 6).t(),
        "part": torch.arange(100, dtype=torch.int32)[10:60:2],
        "conjugate": torch.complex(torch.arange(8.0), torch.ones(8)).reshape(4, 2).conj(),
        "parameter": torch.nn.Parameter(torch.arange(9.0, dtype=torch.bfloat16)),
        "scalar": torch.tensor(3, dtype=torch.int16),
        "nothing": torch.empty((0, 3), dtype=torch.uint8),
        "long": torch.arange(3000, dtype=torch.int64).reshape(100, 30),
    }


def _load_with_torch(content: bytes) -> object:
    """Whatever device it names."""
    return torch.load(io.BytesIO(content), map_location=lambda storage, _: storage, weights_only=False)


def _plain(value: object) -> object:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


class _Part(DefaultLoadPlanner):
    """Takes what is read into one tensor."""

    def __init__(self, target: torch.Tensor) -> None:
        super().__init__()
        self.target = target

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self.target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        pass


class Tensors(Target):
    """Checkpoints of torch's writer with one plain tensor, whose entry is another: read whole, in part, and loaded.

    Its pickle alone says where its elements are: sizes, strides, their start, and whether they are conjugates.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.tensors = _tensors()
        self.plain = {name: tensor.detach().clone() for name, tensor in self.tensors.items()}
        self.entries: dict[str, bytes] = {}
        self.metadata: dict[str, Any] = {}
        for name, tensor in self.tensors.items():
            dcp_save({"w": tensor}, storage_writer=FileSystemWriter(folder / name))
            self.entries[name] = (folder / name / "__0_0.distcp").read_bytes()
            self.metadata[name] = pickle.loads((folder / name / ".metadata").read_bytes())
            ((_, location),) = self.metadata[name].storage_data.items()
            assert (location.offset, location.length) == (0, len(self.entries[name]))
        self.records = {name: hostile.records_of(entry) for name, entry in self.entries.items()}
        self.pickles = {
            name: next(data for record, data in records.items() if record.endswith("data.pkl"))
            for name, records in self.records.items()
        }

    def make(self, chance: random.Random) -> Input:
        name = chance.choice(list(self.entries))
        wanted = (self.plain[name],)
        if _untouched(chance):
            return Input("untouched", self.entries[name], name, wanted)
        way = chance.randrange(10)
        if way <= 2:
            return Input(
                "damaged", hostile.damage(self.entries[name], list(self.entries.values()), chance), name, wanted
            )
        others = list(self.pickles.values())
        if way <= 6:
            pickled = hostile.edit_pickle(self.pickles[name], others, chance)
        elif way <= 8:
            pickled = hostile.edit_numbers(self.pickles[name], chance)
        else:
            pickled = hostile.random_tensor_pickle(chance)
        if chance.random() < 0.3:
            return Input("forged", hostile.forge_archive(self.records[name], pickled, chance), name)
        return Input("forged as torch does", hostile.forge_entry(self.records[name], pickled), name)

    def read(self, made: Input) -> object:
        where = self.folder / made.name
        metadata = self.metadata[made.name]
        ((_, location),) = metadata.storage_data.items()
        location.length = len(made.content)
        (where / "__0_0.distcp").write_bytes(made.content)
        (where / ".metadata").write_bytes(pickle.dumps(metadata))
        found = dcpfs.read(where)["w"]
        assert isinstance(found, torch.Tensor)
        touch(found)
        template = {"w": torch.zeros_like(self.plain[made.name])}
        dcpfs.load(template, where)
        assert equal(template["w"], found), f"loaded {template['w']} and read {found}"
        self._read_part(where, found)
        return found

    def _read_part(self, where: Path, whole: torch.Tensor) -> None:
        """Of each dimension the second half, where it has one."""
        starts = torch.Size(size // 2 for size in whole.shape)
        part = torch.zeros([size - start for size, start in zip(whole.shape, starts, strict=True)], dtype=whole.dtype)
        if part.numel() == 0:
            return
        index = MetadataIndex("w", torch.Size([0] * whole.dim()))
        here = torch.Size([0] * whole.dim())
        item = ReadItem(LoadItemType.TENSOR, index, here, index, starts, part.shape)
        reader = dcpfs.FsspecStorageReader(where)
        metadata = reader.read_metadata()
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        planner = _Part(part)
        planner.set_up_planner({"w": part}, metadata, is_coordinator=True)
        reader.read_data(LoadPlan([item]), planner).wait()
        slices = tuple(slice(start, None) for start in starts)
        assert equal(part, whole[slices].clone()), f"{part} was read of {whole}"

    def check(self, made: Input, found: object) -> str:
        if made.wanted:
            return super().check(made, found)
        return compare(found, lambda: _plain(_load_with_torch(made.content)))


TARGETS: dict[str, Callable[[Path], Target]] = {
    "entries": Entries,
    "rank files": RankFiles,
    "metadata": MetadataFiles,
    "manifests": Manifests,
    "steps": Steps,
    "tensors": Tensors,
}
