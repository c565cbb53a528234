"""A server that stops answering in the middle: every call ends, says so, and the store works when it answers again.

The bounds are generous: what is shown is that there is one, not how exact it is.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
from fsspec import AbstractFileSystem, register_implementation

from dcpfs.config import RetryConfig, TransferConfig
from dcpfs.errors import MissingBackendError, StorageError
from dcpfs.storage import fsspec_connection, fsspec_writing
from dcpfs.storage.filesystems import OpenFilesystem, open_filesystem
from dcpfs.storage.fsspec_store import FsspecStore
from dcpfs.storage.location import Location
from dcpfs.storage.opening import open_store
from dcpfs.testing.conformance import pattern, write_parts
from dcpfs.testing.server_process import LoopbackServer
from dcpfs.testing.servers_files import FtpServer, WebdavServer
from dcpfs.testing.servers_objects import AzuriteServer, GcsServer
from dcpfs.testing.servers_system import OpensshServer, ParamikoSshServer, SambaServer
from tests.conformance.dummy_filesystems import DummyTree, registered_dummies
from tests.conformance.paramiko_alone import paramiko_alone
from tests.conformance.silent_relay import SilentRelay

pytestmark = pytest.mark.filterwarnings(
    # webdav4's file sends what it holds when it is let go, and a silent server does not answer that either.
    "ignore:.*SpooledTemporaryFile:pytest.PytestUnraisableExceptionWarning"
)

IMPATIENT = RetryConfig(
    attempts=3,
    deadline_seconds=2,
    connect_timeout_seconds=0.5,
    read_timeout_seconds=0.5,
    initial_backoff_seconds=0.001,
    max_backoff_seconds=0.001,
)
IMPATIENT_WITH_SERVERS = IMPATIENT.model_copy(
    update={"deadline_seconds": 4.0, "connect_timeout_seconds": 2.0, "read_timeout_seconds": 1.0}
)
"""Enough to log in to a real one, on a slow machine too."""
PATIENT = RetryConfig(attempts=3, initial_backoff_seconds=0.001, max_backoff_seconds=0.001)
SMALL_PARTS = TransferConfig(part_bytes=64 << 10)
BOUND_SECONDS = 60.0
"""Fifteen times the longer deadline."""

OFTEN: tuple[type[LoopbackServer], ...] = (OpensshServer, SambaServer)
SELDOM: tuple[type[LoopbackServer], ...] = (AzuriteServer, FtpServer, GcsServer, ParamikoSshServer, WebdavServer)


@pytest.fixture(
    scope="module",
    params=[*OFTEN, *(pytest.param(kind, marks=pytest.mark.nightly) for kind in SELDOM)],
    ids=lambda kind: kind.__name__,
)
def relayed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[SilentRelay, Location]]:
    """A server behind a relay, and where it is through that."""
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(request.param())
        except MissingBackendError as error:
            pytest.skip(str(error))
        if request.param is ParamikoSshServer:
            stack.enter_context(paramiko_alone(tmp_path_factory.mktemp("shadow")))
        port = int(server.address.rpartition(":")[2])
        relay = stack.enter_context(SilentRelay(port))

        def through(text: str) -> str:
            return text.replace(f":{port}", f":{relay.port}")

        options = {
            name: through(value) if isinstance(value, str) else value for name, value in server.storage_options.items()
        }
        yield relay, Location(through(server.url("run")), options)


@pytest.fixture
def relay(relayed: tuple[SilentRelay, Location]) -> Iterator[SilentRelay]:
    yield relayed[0]
    relayed[0].speak_again()


@pytest.fixture
def place(relayed: tuple[SilentRelay, Location]) -> Location:
    return relayed[1].join(uuid.uuid4().hex)


def test_every_call_ends_and_the_store_works_when_the_server_answers_again(relay: SilentRelay, place: Location) -> None:
    with contextlib.closing(FsspecStore(place, transfer=SMALL_PARTS, retry=PATIENT)) as store:
        store.put("object", [pattern(1000)])
    with contextlib.closing(FsspecStore(place, transfer=SMALL_PARTS, retry=IMPATIENT_WITH_SERVERS)) as store:
        sink = store.open_sink("large", 200_000)
        first = sink.parts()[0]
        sink.write_part(first, [bytes(first.size_bytes)])
        relay.fall_silent()
        for call in (
            lambda: store.get("object"),
            lambda: list(store.list()),
            lambda: store.put("object", [b"new"]),
            lambda: write_parts(sink, bytes(200_000)),
        ):
            before = time.monotonic()
            with pytest.raises(StorageError):
                call()
            assert time.monotonic() - before < BOUND_SECONDS
        sink.abort()
        relay.speak_again()
    with contextlib.closing(FsspecStore(place, transfer=SMALL_PARTS, retry=PATIENT)) as store:
        # The put may have taken effect after all, but nothing half.
        found = {info.path: store.get(info.path) for info in store.list()}
        assert found in ({"object": pattern(1000)}, {"object": b"new"})


def test_one_store_goes_on_after_a_silence(relay: SilentRelay, place: Location) -> None:
    retry = IMPATIENT_WITH_SERVERS.model_copy(update={"deadline_seconds": 20.0, "attempts": 30})
    with contextlib.closing(FsspecStore(place, retry=retry)) as store, ThreadPoolExecutor(2) as pool:
        store.put("object", [pattern(1000)])
        relay.fall_silent()
        reading = [pool.submit(store.get, "object") for _ in range(2)]
        # Somebody must have given up on a call before the server speaks again.
        deadline = time.monotonic() + BOUND_SECONDS * 3
        connection = store._connection
        while not connection.stalls and not connection.generation and not any(one.done() for one in reading):
            assert time.monotonic() < deadline
            threading.Event().wait(0.05)
        relay.speak_again()
        assert [one.result() for one in reading] == [pattern(1000)] * 2


LEAVING = """
import pickle, sys
from dcpfs.config import RetryConfig
from dcpfs.errors import StorageError
from dcpfs.storage.fsspec_store import FsspecStore

if __name__ == "__main__":
    location, retry = pickle.load(sys.stdin.buffer)
    FsspecStore(location).put("object", [b"x"])
    store = FsspecStore(location, retry=retry)
    store.head("object")
    print("ready", flush=True)
    assert sys.stdin.buffer.read(1) == b"s"
    try:
        store.get("object")
    except StorageError:
        print("failed", flush=True)
"""


def test_a_process_ends_though_the_server_does_not_answer(relay: SilentRelay, place: Location, tmp_path: Path) -> None:
    script = tmp_path / "leaving.py"
    script.write_text(LEAVING)
    with subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(pickle.dumps((place, IMPATIENT_WITH_SERVERS)))
        child.stdin.flush()
        assert child.stdout.readline() == b"ready\n"
        relay.fall_silent()
        try:
            said, _ = child.communicate(b"s", timeout=4 * BOUND_SECONDS)
        finally:
            child.kill()
    assert (said, child.returncode) == (b"failed\n", 0)


def test_a_client_without_time_outs_is_left_behind_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answered = threading.Event()
    listed = DummyTree.info

    def waits(self: DummyTree, path: str, **_: object) -> dict[str, object]:
        answered.wait()
        return listed(self, path)

    with registered_dummies():
        store = open_store(Location("dummytree:///run"), retry=IMPATIENT)
        assert isinstance(store, FsspecStore)
        store.put("object", [b"x"])
        monkeypatch.setattr(DummyTree, "info", waits)
        with caplog.at_level(logging.WARNING), pytest.raises(StorageError, match=r"no answer within .* s") as caught:
            store.head("object")
        assert "attempts in" in str(caught.value)
        left = store._connection.left_behind
        assert left >= 1
        assert caplog.text.count("it is left behind with its thread") == left
        answered.set()
        deadline = time.monotonic() + BOUND_SECONDS
        while store._connection.left_behind:
            assert time.monotonic() < deadline
            threading.Event().wait(0.01)
        assert store.head("object").size_bytes == 1


def test_what_comes_too_late_does_not_reach_the_callers_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    answered, came = threading.Event(), threading.Event()
    opened = DummyTree._open

    def waits(self: DummyTree, path: str, mode: str = "rb", **options: object) -> object:
        answered.wait()
        came.set()
        return opened(self, path, mode)

    with registered_dummies():
        store = FsspecStore(Location("dummytree:///run"), retry=IMPATIENT)
        store.put("object", [pattern(1000)])
        monkeypatch.setattr(DummyTree, "_open", waits)
        target = bytearray(1000)
        with pytest.raises(StorageError):
            store.read_into("object", 0, [memoryview(target)])
        answered.set()
        assert came.wait(BOUND_SECONDS)
        deadline = time.monotonic() + BOUND_SECONDS
        while store._connection.left_behind:
            assert time.monotonic() < deadline
            threading.Event().wait(0.01)
        assert target == bytes(1000)


def _one_at_a_time(retry: RetryConfig) -> FsspecStore:
    store = FsspecStore(Location("dummytree:///run"), retry=retry)
    store._connection._traits = replace(store._traits, serial=True)
    return store


def test_a_wait_for_the_turn_is_not_taken_from_a_calls_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    limits: list[float] = []

    class LongQueue:
        def __enter__(self) -> None:
            now[0] += 10 * PATIENT.deadline_seconds

        def __exit__(self, *_: object) -> None:
            return

    with registered_dummies():
        store = _one_at_a_time(PATIENT)
        store.put("object", [b"x"])
        here = store._connection._here()
        run = here.threads.run

        def noted(call: Callable[[], object], *, limit_seconds: float, what: str) -> object:
            limits.append(limit_seconds)
            return run(call, limit_seconds=limit_seconds, what=what)

        monkeypatch.setattr(here, "serial", LongQueue())
        monkeypatch.setattr(here.threads, "run", noted)
        monkeypatch.setattr(fsspec_connection, "time", SimpleNamespace(monotonic=lambda: now[0]))
        assert store.get("object") == b"x"
    assert limits
    assert min(limits) >= PATIENT.deadline_seconds / 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_case_80_a_process_forked_in_the_middle_of_anothers_turn_has_turns_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entered, leave = threading.Event(), threading.Event()
    described = DummyTree.info

    def waits(self: DummyTree, path: str, **_: object) -> dict[str, object]:
        if path.endswith("slow"):
            entered.set()
            leave.wait()
        return described(self, path)

    with registered_dummies(), ThreadPoolExecutor(1) as pool:
        store = _one_at_a_time(PATIENT)
        for name in ("slow", "object"):
            store.put(name, [b"x"])
        monkeypatch.setattr(DummyTree, "info", waits)
        turn = pool.submit(store.head, "slow")
        assert entered.wait(BOUND_SECONDS)
        status = _status_of_fork(lambda: store.head("object").size_bytes == 1)
        leave.set()
        assert turn.result(BOUND_SECONDS).size_bytes == 1
    assert status == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_threads_of_a_forked_child_that_ask_at_once_share_one_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)
    opened: list[OpenFilesystem] = []
    begin = fsspec_connection._InProcess

    def begin_together() -> fsspec_connection._InProcess:
        both.wait(BOUND_SECONDS)
        return begin()

    def note(location: Location) -> OpenFilesystem:
        opened.append(open_filesystem(location))
        return opened[-1]

    def ask_at_once() -> bool:
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(store.head, ["object"] * 2))
        parents = [kept.opened for kept in fsspec_connection._PARENTS]
        return [info.size_bytes for info in found] == [1, 1] and len(opened) == 1 and parents == [held]

    with registered_dummies():
        store = FsspecStore(Location("dummytree:///run"), retry=PATIENT)
        store.put("object", [b"x"])
        held = store._connection.filesystem()
        monkeypatch.setattr(fsspec_connection, "_PARENTS", [])
        monkeypatch.setattr(fsspec_connection, "_InProcess", begin_together)
        monkeypatch.setattr(fsspec_connection, "open_filesystem", note)
        assert _status_of_fork(ask_at_once) == 0


def _status_of_fork(check: Callable[[], bool]) -> int:
    """How a forked child ends that checks something: 0 where it holds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork with threads is what is tested
        child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(int(BOUND_SECONDS))
        try:
            os._exit(0 if check() else 1)
        finally:
            os._exit(2)
    return os.waitpid(child, 0)[1]


class CopyTree(DummyTree):
    """A tree whose client has no move, and whose copies take longer than a call may."""

    protocol = "copytree"
    copies: ClassVar[list[str]] = []
    mv = AbstractFileSystem.mv

    def cp_file(self, path1: str, path2: str, **_: object) -> None:
        self.copies.append(path2)
        self.files[path2] = self.files[path1][:1000]
        threading.Event().wait(IMPATIENT.deadline_seconds * 3 / 4)
        self.files[path2] = self.files[path1]


@pytest.mark.parametrize("size_bytes", [50_000, 200_000], ids=["in one call", "part by part"])
def test_a_copy_in_place_of_a_move_gets_time_for_its_size(monkeypatch: pytest.MonkeyPatch, size_bytes: int) -> None:
    monkeypatch.setattr(fsspec_writing, "_COPIED_BYTES_PER_SECOND", 1000)
    CopyTree.copies.clear()
    with registered_dummies():
        register_implementation("copytree", CopyTree, clobber=True)
        store = FsspecStore(Location("copytree:///run"), transfer=SMALL_PARTS, retry=IMPATIENT)
        sink = store.open_sink("object", size_bytes)
        write_parts(sink, pattern(size_bytes))
        assert sink.commit().size_bytes == size_bytes
        assert store.get("object") == pattern(size_bytes)
        assert [info.path for info in store.list()] == ["object"]
    assert CopyTree.copies == ["/run/object"]
    assert store._connection.stalls == 0
