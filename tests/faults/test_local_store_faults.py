"""The local store when the process, the disk or the right to write goes away. Real faults, each in a process."""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from dcpfs.storage.local_store import LocalStore
from dcpfs.storage.location import Location
from tests.faults.processes import fork_child

PROLOGUE = """
import errno, os, resource, sys
from dcpfs import errors
from dcpfs.config import TransferConfig
from dcpfs.storage.local_store import LocalStore
from dcpfs.storage.location import Location

MIB = 1 << 20
root = sys.argv[1]
store = LocalStore(Location(root), transfer=TransferConfig(part_bytes=64 << 10))

def there():
    return sorted(os.path.relpath(os.path.join(top, name), root) for top, _, names in os.walk(root) for name in names)

def write(path, size):
    sink = store.open_sink(path, size)
    try:
        for part in sink.parts():
            sink.write_part(part, [bytes(part.size_bytes)])
        return sink.commit()
    except BaseException:
        sink.abort()
        raise
"""


def script(code: str) -> str:
    return PROLOGUE + textwrap.dedent(code)


def has_nameless_files(directory: Path) -> bool:
    try:
        os.close(os.open(directory, os.O_RDWR | getattr(os, "O_TMPFILE", 0), 0o600))
    except OSError:
        return False
    return True


def run_in_own_mount(mount: str, code: str, place: Path) -> str:
    """Run code in a process with a filesystem of its own at ``place``, which ends with the process."""
    if shutil.which("unshare") is None or os.geteuid() != 0:
        pytest.skip("mounting a small filesystem needs unshare and root")
    place.mkdir()
    command = f'mount {mount} "$0" && exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command, str(place), sys.executable, "-c", script(code), str(place)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    if done.returncode in {1, 32} and ("unshare" in done.stderr or "mount:" in done.stderr):
        pytest.skip(f"this machine does not allow mounts: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("old", [None, b"the step before"])
@pytest.mark.parametrize("size_bytes", [900_000, 4 << 20])
def test_cases_30_31_a_killed_writer_leaves_nothing_under_the_name(
    tmp_path: Path, old: bytes | None, size_bytes: int
) -> None:
    code = f"""
        sink = store.open_sink("step/object", {size_bytes})
        for part in sink.parts()[:-1]:
            sink.write_part(part, [b"x" * part.size_bytes])
        print("all but the last part", flush=True)
        sys.stdin.read()
        """
    store = LocalStore(Location(tmp_path))
    if old is not None:
        store.put("step/object", [old])
    with subprocess.Popen(
        [sys.executable, "-c", script(code), str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "all but the last part\n"
        child.send_signal(signal.SIGKILL)
        assert child.wait(30) == -signal.SIGKILL
    assert store.exists("step/object") == (old is not None)
    assert [found.path for found in store.list()] == (["step/object"] if old is not None else [])
    if old is not None:
        assert store.get("step/object") == old
    left = [path.name for path in (tmp_path / "step").iterdir() if path.name != "object"]
    nameless = size_bytes > 1 << 20 and has_nameless_files(tmp_path)
    assert len(left) == (0 if nameless else 1)
    assert all(name.startswith(".object.") for name in left)
    store.put("step/object", [b"the next"])
    assert store.get("step/object") == b"the next"


MUTATING = ("open", "mkdir", "pwritev", "ftruncate", "fsync", "link", "unlink", "replace", "close")


@pytest.mark.parametrize("size_bytes", [900_000, 2 << 20])
@pytest.mark.parametrize(
    ("verb", "old"),
    [("put", None), ("put if absent", None), ("sink", None), ("put", b"the step before"), ("sink", b"the step before")],
)
def test_cases_30_31_killed_at_any_call_the_object_is_the_old_one_or_the_new_one(
    tmp_path: Path, old: bytes | None, size_bytes: int, verb: str
) -> None:
    content = os.urandom(size_bytes)
    seen = set()
    for number in itertools.count():
        root = tmp_path / str(number)
        store = LocalStore(Location(root))
        if old is not None:
            store.put("step/object", [old])
        status = fork_child(functools.partial(_write_until_killed, store, verb, content, number))
        found = store.get("step/object") if store.exists("step/object") else None
        assert found in (old, content), f"killed at call {number}"
        assert [info.path for info in store.list()] == ([] if found is None else ["step/object"])
        seen.add(found)
        shutil.rmtree(root, ignore_errors=True)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            assert found == content
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
    assert number >= 10  # before and after each call
    assert seen == {old, content}


def _write_until_killed(store: LocalStore, verb: str, content: bytes, kill_at: int) -> None:
    """In a child: every call is two points, before and after it takes effect."""
    points = itertools.count()

    def die_at(call: Callable[..., object], *args: object, **kwargs: object) -> object:
        if next(points) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        result = call(*args, **kwargs)
        if next(points) == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    for name in MUTATING:
        setattr(os, name, functools.partial(die_at, getattr(os, name)))
    if verb == "sink":
        sink = store.open_sink("step/object", len(content))
        for part in sink.parts():
            sink.write_part(part, [memoryview(content)[part.start : part.stop]])
        sink.commit()
    else:
        store.put("step/object", [content], if_absent=verb != "put")


@pytest.mark.parametrize("kind", ["bytes", "files"])
def test_case_31_a_full_disk_is_said_and_leaves_nothing(tmp_path: Path, kind: str) -> None:
    options = "size=1m" if kind == "bytes" else "size=8m,nr_inodes=3"
    code = """
        store.put("a", [b"kept"])
        try:
            for number in range(3):
                write(f"b{number}", 900_000 if number else 2 * MIB)
        except errors.StorageFullError as error:
            assert error.errno == errno.ENOSPC
            assert f"Can't write {root}/b" in str(error) and "No space left" in str(error), error
            assert "free space or raise the quota" in str(error), error
        else:
            raise SystemExit("no error")
        print(len([name for name in there() if "tmp" in name]), store.get("a").decode())
        """
    assert run_in_own_mount(f"-t tmpfs -o {options} tmpfs", code, tmp_path / "small") == "0 kept\n"


def test_a_disk_that_fills_in_the_middle_is_said_too(tmp_path: Path) -> None:
    # Below 1 MiB no space is reserved: the write itself fails.
    code = """
        try:
            write("b", 900_000)
        except errors.StorageFullError as error:
            print("No space left" in str(error), there())
        """
    assert run_in_own_mount("-t tmpfs -o size=512k tmpfs", code, tmp_path / "small") == "True []\n"


def test_a_read_only_filesystem_is_said(tmp_path: Path) -> None:
    code = """
        for attempt in (lambda: write("a/b", 5), lambda: store.put("b", [b"x"])):
            try:
                attempt()
            except errors.PermissionDeniedError as error:
                print("read-only" in str(error))
        print(store.exists("a"), list(store.list()))
        """
    assert run_in_own_mount("-t tmpfs -o ro tmpfs", code, tmp_path / "fixed") == "True\nTrue\nFalse []\n"


def test_a_limit_of_the_file_size_is_said(tmp_path: Path) -> None:
    code = """
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB // 2, MIB // 2))
        for size in (2 * MIB, 900_000):
            try:
                write("a/b", size)
            except errors.StorageFullError as error:
                print(error.errno == errno.EFBIG, "limit of a file's size" in str(error), there())
        """
    done = subprocess.run(
        [sys.executable, "-c", script(code), str(tmp_path)], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout == "True True []\n" * 2


def test_case_100_nothing_is_written_to_the_working_directory(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    code = """
        os.chdir(os.path.join(root, "gone"))
        os.rmdir(os.getcwd())  # no file can be made here now
        write("a/b", 2 * MIB)
        store.put("c", [b"x"])
        print(there(), store.get("c"))
        """
    done = subprocess.run(
        [sys.executable, "-c", script(code), str(tmp_path)], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout == "['a/b', 'c'] b'x'\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become someone without rights")
def test_a_directory_of_others_is_said() -> None:
    code = """
        os.setgroups([]); os.setgid(65534); os.setuid(65534)
        for attempt in (
            lambda: store.put("theirs/b", [b"x"]),
            lambda: store.put("mine/b", [b"x"]),
            lambda: store.get("theirs/object"),
            lambda: store.exists("theirs/object"),
            lambda: list(store.list("theirs")),
            lambda: store.delete(["theirs/object"]),
        ):
            try:
                attempt()
                print("no error")
            except errors.PermissionDeniedError as error:
                print(error.errno == errno.EACCES, "Permission denied" in str(error))
        """
    with tempfile.TemporaryDirectory() as name:  # pytest's own directories are closed to others
        os.chmod(name, 0o755)
        (Path(name) / "theirs").mkdir(mode=0o700)
        (Path(name) / "theirs" / "object").write_bytes(b"x")
        done = subprocess.run(
            [sys.executable, "-c", script(code), name], capture_output=True, text=True, check=False, timeout=120
        )
    assert done.stdout == "True True\n" * 6, done.stderr
