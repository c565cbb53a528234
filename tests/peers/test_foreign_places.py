"""A writer's own class of paths stands in ``.metadata``, as the place that it wrote to.

Whoever reads needs neither the class nor the place, and what the class would do on being unpickled is not done.
Anywhere else it is refused.
"""

from __future__ import annotations

import pickle
import sys
import types
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import dcpfs
from dcpfs.errors import CorruptCheckpointError, UntrustedDataError
from dcpfs.format.metadata import decode_both

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SOURCE = '''
import pathlib

run = []

class Filled:
    """As NVIDIA's multi-storage-client has it: a state with a path of another class, and a hook that opens a client."""
    def __init__(self, place):
        self.place, self.inner = place, pathlib.PurePosixPath(place)
    def __getstate__(self):
        return {"place": self.place, "inner": self.inner}
    def __setstate__(self, state):
        run.append("setstate")
        self.__dict__.update(state)

class Called:
    def __init__(self, place):
        run.append("init")
        self.place = place
    def __reduce__(self):
        return make, (self.place, {"options": [Filled("inner")]}), {"loose": Filled("state")}

def make(place, options):
    run.append("make")
    return Called(place)

class Subclass(pathlib.PurePosixPath):
    pass

class Keyword:
    def __new__(cls, place):
        run.append("new")
        return object.__new__(cls)
    def __init__(self, place):
        self.place = place
    def __getnewargs__(self):
        return (self.place,)

def kinds():
    """One of each, made without a trace."""
    made = [Filled("x/y"), Called("x/y"), Subclass("x/y"), Keyword("x/y"), [Filled("x/y"), {"a": Filled}], Filled, make]
    run.clear()
    return made
'''
NAME = "paths_of_another_library"


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType(NAME)
    monkeypatch.setitem(sys.modules, NAME, module)
    exec(SOURCE, module.__dict__)
    return module


def _write(url: Path, change: Callable[[Metadata], None]) -> bytes:
    dcp_save({"w": torch.arange(4.0), "n": 3}, storage_writer=FileSystemWriter(url))
    file = url / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))
    return file.read_bytes()


@pytest.mark.parametrize("gone", [False, True], ids=["library here", "library gone"])
@pytest.mark.parametrize("number", range(7))
def test_a_place_of_any_class_is_passed_over_and_not_run(
    tmp_path: Path, library: types.ModuleType, monkeypatch: pytest.MonkeyPatch, number: int, *, gone: bool
) -> None:
    place = library.kinds()[number]

    def change(metadata: Metadata) -> None:
        assert metadata.storage_meta is not None
        metadata.storage_meta.checkpoint_id = place

    data = _write(tmp_path / "c", change)
    if gone:
        monkeypatch.delitem(sys.modules, NAME)
    for target in (dcpfs.read(tmp_path / "c"), {"w": torch.zeros(4), "n": 0}, {"w": torch.zeros(4), "n": 1}):
        if target["n"] == 0:
            dcpfs.load(target, tmp_path / "c")
        elif target["n"] == 1:
            own = dcpfs.FsspecStorageReader(tmp_path / "c")
            dcp_load(target, storage_reader=own, planner=DefaultLoadPlanner())
        assert target["w"].tolist() == [0.0, 1.0, 2.0, 3.0]  # type: ignore[attr-defined]  # a tensor
        assert target["n"] == 3
    _, metadata = decode_both(data)
    assert metadata.storage_meta is not None
    assert metadata.storage_meta.checkpoint_id is None
    assert metadata.storage_meta.save_id
    assert library.run == []


def _elsewhere(metadata: Metadata, field: str, thing: object) -> None:
    meta = metadata.storage_meta
    assert meta is not None
    meta.checkpoint_id = thing  # type: ignore[assignment]  # allowed, and no excuse for the other
    if field == "planner_data":
        metadata.planner_data = {"w": thing}
    elif field == "planner_data, hidden":
        metadata.planner_data = {"w": deque([thing])}
    elif field == "planner_data, in an array":
        objects = np.empty(1, dtype=object)
        objects[0] = thing
        metadata.planner_data = {"w": objects}
    elif field == "planner_data, another":
        metadata.planner_data = {"w": pickle.loads}
    elif field == "storage_data":
        metadata.storage_data["more"] = thing
    elif field == "relative_path":
        next(iter(metadata.storage_data.values())).relative_path = thing
    elif field == "chunks":
        metadata.state_dict_metadata["w"].chunks[0].sizes = thing  # type: ignore[union-attr]  # a tensor's
    elif field == "modules":
        meta.modules = [thing]  # type: ignore[list-item]  # as damage has it
    else:
        assert hasattr(meta, field) != hasattr(metadata, field)
        setattr(meta if hasattr(meta, field) else metadata, field, thing)


@pytest.mark.parametrize("kind", [0, 1, 5])
@pytest.mark.parametrize(
    "field",
    [
        *("planner_data", "planner_data, hidden", "planner_data, in an array", "planner_data, another"),
        *("storage_data", "relative_path", "chunks", "modules", "save_id", "load_id", "version", "state_dict_metadata"),
    ],
)
def test_case_110_the_same_class_elsewhere_is_refused_and_not_run(
    tmp_path: Path, library: types.ModuleType, field: str, kind: int
) -> None:
    thing = library.kinds()[kind]
    _write(tmp_path / "c", lambda metadata: _elsewhere(metadata, field, thing))
    library.run.clear()
    with pytest.raises((UntrustedDataError, CorruptCheckpointError)) as caught:
        dcpfs.read(tmp_path / "c")
    if field not in ("relative_path", "chunks"):
        assert isinstance(caught.value, UntrustedDataError)
        assert "allow-list" in str(caught.value)
    assert library.run == []


def test_case_110_a_name_that_was_called_and_dropped_is_refused(tmp_path: Path) -> None:
    data = _write(tmp_path / "c", lambda metadata: None)
    trap = tmp_path / "sprung"
    call = f"cposix\nmkdir\n(S'{trap}'\ntR0".encode()
    (tmp_path / "c" / ".metadata").write_bytes(data[:2] + call + data[2:])
    with pytest.raises(UntrustedDataError, match=r"posix\.mkdir"):
        dcpfs.read(tmp_path / "c")
    assert not trap.exists()


def test_a_place_that_holds_itself_and_is_wide_takes_linear_time(tmp_path: Path, library: types.ModuleType) -> None:
    """Each level names the one before twice: looked at once each, or never done."""
    wide: list[object] = [library.kinds()[0]]
    for _ in range(200):
        wide = [wide, wide]
    wide.append(wide)

    def change(metadata: Metadata) -> None:
        assert metadata.storage_meta is not None
        metadata.storage_meta.checkpoint_id = wide  # type: ignore[assignment]  # as damage has it

    _write(tmp_path / "c", change)
    assert dcpfs.read(tmp_path / "c", ["n"]) == {"n": 3}
