"""What a writer leaves that is killed in the middle of a small file: hidden, and gone with its step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dcpfs.checkpointer.commit import Stragglers, abandon_step, claim_step
from dcpfs.checkpointer.layout import WRITING_NAME, step_name
from dcpfs.checkpointer.retention import RetentionPolicy, apply_retention
from dcpfs.storage.leftovers import sweep_leftovers
from dcpfs.storage.local_store import LocalStore
from dcpfs.storage.location import Location
from dcpfs.storage.subdirectory import Subdirectory
from tests.conformance.step_scene import Scene

KILLED = """
import os, signal, sys
from dcpfs.storage.local_store import LocalStore
from dcpfs.storage.location import Location

store = LocalStore(Location(sys.argv[1]))
for path in sys.argv[2:]:
    sink = store.open_sink(path, 4)
    sink.write_part(sink.parts()[0], [b"half"])
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def scene(root: Path) -> Scene:
    return Scene(LocalStore(Location(root)))


def kill_while_writing(root: Path, *paths: str) -> None:
    """Small files that are being written when their process is killed."""
    before = len(hidden(root))
    done = subprocess.run([sys.executable, "-c", KILLED, str(root), *paths], check=False, timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert len(hidden(root)) == before + len(paths), "nothing was left, so nothing is shown"


def hidden(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob(".*.dcpfs-tmp"))


def test_case_34_a_removed_step_takes_along_what_a_killed_writer_left(root: Path, scene: Scene) -> None:
    scene.commit(1)
    scene.dead(2)
    kill_while_writing(
        root, f"{step_name(1)}/model/__1_0.distcp", f"{step_name(2)}/model/.metadata", f"{step_name(3)}/{WRITING_NAME}"
    )
    scene.commit(4)
    kill_while_writing(root, f"{step_name(4)}/trainer/__1_0.distcp", f"{step_name(5)}/{WRITING_NAME}")
    left = [name for name in hidden(root) if name.startswith((step_name(4), step_name(5)))]
    report = apply_retention(scene.store, RetentionPolicy(keep_last=1))
    assert (report.removed, report.swept, report.failures) == ((1,), (2, 3), {})
    assert sorted(os.listdir(root)) == [step_name(4), step_name(5), "latest_checkpoint.txt"]
    assert hidden(root) == left, "of steps that stay, nothing goes: a writer may be at work"
    assert len(left) == 2
    assert apply_retention(scene.store, RetentionPolicy(keep_last=1)).objects == 0


@pytest.mark.parametrize("stragglers", list(Stragglers))
def test_case_30_an_abandoned_step_takes_along_what_a_killed_writer_left(
    root: Path, scene: Scene, stragglers: Stragglers
) -> None:
    claim = claim_step(scene.store, 5, "a")
    kill_while_writing(root, f"{step_name(5)}/model/__1_0.distcp")
    abandon_step(scene.store, claim, [], stragglers=stragglers)
    if stragglers is Stragglers.NONE:
        assert os.listdir(root) == []
    else:
        assert len(hidden(root)) == 1, "its writer may be at work still"
        assert scene.names() == {f"{step_name(5)}/{WRITING_NAME}"}


def test_only_the_leftovers_of_one_directory_are_swept(root: Path, tmp_path: Path) -> None:
    store = LocalStore(Location(root))
    kill_while_writing(root, "step/model/object", "step/object", "beside/object", "step.old/object")
    for name in ("model/object", ".notes.dcpfs-tmp", ".x.0123456789ABCDEF.dcpfs-tmp", "x.0123456789abcdef.dcpfs-tmp"):
        store.put(f"step/{name}", [b"a user's"])
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / ".object.0123456789abcdef.dcpfs-tmp").write_bytes(b"another's")
    (root / "step" / "link").symlink_to(outside)
    (root / "step" / ".link.0123456789abcdef.dcpfs-tmp").symlink_to(outside / ".object.0123456789abcdef.dcpfs-tmp")
    (root / "step" / ".dir.0123456789abcdef.dcpfs-tmp").mkdir()
    (root / "step" / ".dir.0123456789abcdef.dcpfs-tmp" / "kept").write_bytes(b"x")
    seen = sorted(info.path for info in store.list())
    assert sweep_leftovers(Subdirectory(store, "step"), "model") == 1
    assert sweep_leftovers(store, "step") == 1
    assert sweep_leftovers(store, "absent") == 0
    assert sorted(info.path for info in store.list()) == seen
    assert len(os.listdir(outside)) == 1
    assert [name.split(".")[0] for name in hidden(root) if not name.startswith("step/")] == ["beside/", "step"]
    with pytest.raises(ValueError, match="below one directory"):
        sweep_leftovers(store, "")
    with pytest.raises(ValueError, match="below one directory"):
        sweep_leftovers(Subdirectory(store, "step"), "")
