"""Local files: the one suite on disk and on tmpfs, small and large, and what only files can get wrong."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import itertools
import multiprocessing
import os
import pickle
import signal
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dcpfs.config import DirectIO, Durability, RetryConfig, TransferConfig
from dcpfs.errors import (
    ConfigError,
    ObjectExistsError,
    ObjectNotFoundError,
    PermissionDeniedError,
    StorageError,
    TransferSizeError,
)
from dcpfs.storage import file_bytes, local_sink, local_store
from dcpfs.storage.file_bytes import BounceBuffers, gains_from_direct_writes
from dcpfs.storage.local_store import LocalStore
from dcpfs.storage.location import Location
from dcpfs.storage.store import PartRange, Store
from dcpfs.testing.conformance import StoreConformance, pattern, read_range, write_parts
from tests.conformance.servers_here import in_memory
from tests.open_files import open_links

MIB = 1 << 20
SMALL = 300_000
LARGE = 3 * MIB + 123
"""Nameless while it is written, its space reserved; with `direct_from_1_mib` past the page cache as well."""
QUICK = RetryConfig(attempts=3, initial_backoff_seconds=0.001, max_backoff_seconds=0.001)


def opened(root: Path, **transfer: object) -> LocalStore:
    return LocalStore(
        Location(root), transfer=TransferConfig.model_validate({"part_bytes": 64 << 10, **transfer}), retry=QUICK
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(root: Path) -> LocalStore:
    return opened(root)


@pytest.fixture
def direct_from_1_mib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_sink, "_DIRECT_FROM_BYTES", MIB)


def files(root: Path) -> list[str]:
    """Every file there is, hidden and temporary ones too."""
    return sorted(os.path.relpath(os.path.join(top, name), root) for top, _, names in os.walk(root) for name in names)


def directories(root: Path) -> list[str]:
    return sorted(os.path.relpath(os.path.join(top, name), root) for top, names, _ in os.walk(root) for name in names)


def write(store: Store, path: str, content: bytes) -> None:
    sink = store.open_sink(path, len(content))
    try:
        write_parts(sink, content)
        sink.commit()
    except BaseException:
        sink.abort()
        raise


# -- the suite


class TestOnDisk(StoreConformance):
    backend = "file"
    large_bytes = SMALL

    @pytest.fixture
    def store(self, root: Path) -> Iterator[Store]:
        store = opened(root)
        yield store
        store.close()


class TestLargeOnDisk(TestOnDisk):
    large_bytes = LARGE

    @pytest.fixture
    def store(self, root: Path, direct_from_1_mib: None) -> Iterator[Store]:
        store = opened(root, part_bytes=MIB)
        yield store
        store.close()


class TestInMemory(StoreConformance):
    backend = "tmpfs"
    large_bytes = SMALL

    @pytest.fixture
    def store(self) -> Iterator[Store]:
        with in_memory() as root:
            yield opened(root)


class TestLargeInMemory(TestInMemory):
    large_bytes = LARGE


class TestWithoutNamelessFiles(TestOnDisk):
    large_bytes = LARGE

    @pytest.fixture
    def store(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
        monkeypatch.setattr(local_sink, "_O_TMPFILE", 0)
        return opened(root, part_bytes=MIB)


class TestWithoutWaitingForTheDevice(TestOnDisk):
    @pytest.fixture
    def store(self, root: Path) -> Store:
        return opened(root, durability=Durability.PAGE_CACHE)


# -- large files


@pytest.mark.parametrize("size_bytes", [32 * MIB, 32 * MIB + 1, 37 * MIB + 4095])
@pytest.mark.parametrize("direct_io", DirectIO)
def test_large_files_are_exact(root: Path, size_bytes: int, direct_io: DirectIO) -> None:
    store = opened(root, part_bytes=5 * MIB + 4096, direct_io=direct_io)
    content = pattern(size_bytes)
    view = memoryview(content)
    sink = store.open_sink("a/large", size_bytes)

    def write_one(part: PartRange) -> None:
        edges = [part.start, part.start + 1, part.start + 7, (part.start + part.stop) // 2 + 3, part.stop]
        edges = sorted(min(edge, part.stop) for edge in edges)  # the last part may be tiny
        sink.write_part(part, [view[low:high] for low, high in itertools.pairwise(edges)])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write_one, sink.parts()))
    assert sink.commit().size_bytes == size_bytes
    assert store.get("a/large") == content
    store.put("b", [content[:100], content[100:]])
    assert store.get("b") == content
    assert os.stat(root / "b").st_size == size_bytes


@pytest.mark.parametrize("refused", ["flag", "write"])
def test_a_filesystem_that_refuses_direct_writes_gets_ordinary_ones(
    root: Path, refused: str, direct_from_1_mib: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_bytes, "gains_from_direct_writes", lambda directory: True)
    real_fcntl, real_write = fcntl.fcntl, os.pwritev
    refusals = 0

    def set_flags(fd: int, command: int, argument: int = 0) -> int:
        nonlocal refusals
        if refused == "flag" and argument & os.O_DIRECT:
            refusals += 1
            raise OSError(errno.EINVAL, "no direct writes")
        return real_fcntl(fd, command, argument & ~os.O_DIRECT)  # the rest must work on any filesystem

    def pwritev(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        nonlocal refusals
        if refused == "write" and refusals == 0 and offset:
            refusals += 1
            raise OSError(errno.EINVAL, "not now")
        return real_write(fd, buffers, offset)

    monkeypatch.setattr(fcntl, "fcntl", set_flags)
    monkeypatch.setattr(os, "pwritev", pwritev)
    write(opened(root, part_bytes=MIB), "large", pattern(LARGE))
    assert refusals == 1
    assert (root / "large").read_bytes() == pattern(LARGE)


def test_only_filesystems_on_a_device_are_written_directly() -> None:
    assert not gains_from_direct_writes("/proc")
    assert not gains_from_direct_writes("/absent")
    with in_memory() as memory:
        assert not gains_from_direct_writes(str(memory))


def test_case_80_buffers_of_direct_writes_are_not_shared_with_a_forked_process() -> None:
    bounce = BounceBuffers()
    buffer = bounce.borrow()
    buffer[:6] = b"parent"
    bounce.give_back(buffer)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            inherited = bounce.borrow()
            status = 0 if bytes(inherited[:6]) == b"parent" else 2
            inherited[:6] = b"child "
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert bytes(bounce.borrow()[:6]) == b"parent"


def test_a_store_is_pickled_without_its_buffers(root: Path, direct_from_1_mib: None) -> None:
    store = opened(root, part_bytes=MIB)
    write(store, "large", pattern(LARGE))  # makes buffers where the filesystem gains from direct writes
    store._bounce.give_back(store._bounce.borrow())
    text = pickle.dumps(store)
    assert len(text) < 10_000
    copy = pickle.loads(text)
    write(copy, "large", pattern(LARGE, 1))
    assert store.get("large") == pattern(LARGE, 1)
    assert copy._transfer == store._transfer


# -- nothing partial, nothing left


@pytest.mark.parametrize("size_bytes", [0, 5, SMALL, LARGE])
@pytest.mark.parametrize("nameless", ["nameless", "named"])
def test_case_31_an_abort_leaves_no_file_and_no_directory(
    root: Path, size_bytes: int, nameless: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if nameless == "named":
        monkeypatch.setattr(local_sink, "_O_TMPFILE", 0)
    store = opened(root)
    store.put("kept", [b"x"])
    sink = store.open_sink("new/directory/object", size_bytes)
    for part in sink.parts()[:2]:
        sink.write_part(part, [bytes(part.size_bytes)])
    assert [info.path for info in store.list()] == ["kept"]
    sink.abort()
    sink.abort()
    assert (files(root), directories(root)) == (["kept"], [])
    with pytest.raises(StorageError, match="its sink was aborted"):
        sink.write_part(sink.parts()[0], [bytes(sink.parts()[0].size_bytes)])
    with pytest.raises(StorageError, match="its sink was aborted"):
        sink.commit()


@pytest.mark.parametrize("size_bytes", [5, LARGE])
@pytest.mark.parametrize("call", ["fsync", "link", "replace", "ftruncate", "fstat"])
def test_case_31_any_failing_call_of_a_commit_leaves_the_old_object(
    root: Path, size_bytes: int, call: str, direct_from_1_mib: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(root, part_bytes=MIB)
    store.put("dir/object", [b"old"])
    sink = store.open_sink("dir/object", size_bytes)
    write_parts(sink, pattern(size_bytes))
    called = False

    def fail(*args: object, **kwargs: object) -> None:
        nonlocal called
        called = True
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        error: StorageError | None = None
        try:
            sink.commit()
        except StorageError as caught:
            error = caught
    assert called == (error is not None)
    if error is not None:
        assert error.errno == errno.EIO
        assert f"Can't write {root}/dir/object" in str(error)
        assert "EIO" in str(error)
        assert store.get("dir/object") == b"old"
    assert files(root) == ["dir/object"]


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_case_31_a_file_that_cannot_even_be_closed_is_given_up_and_the_first_failure_told(
    store: LocalStore, root: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """A network filesystem whose quota is used up says so when it writes, and again when the file is closed."""
    real_close = os.close
    broken: list[int] = []

    def close(fd: int) -> None:
        real_close(fd)
        if fd in broken:
            raise OSError(errno.EDQUOT, "at the close")

    def pwritev(fd: int, *_: object) -> int:
        broken.append(fd)
        raise OSError(errno.EDQUOT, "at the write")

    monkeypatch.setattr(os, "close", close)
    monkeypatch.setattr(os, "pwritev", pwritev)
    with pytest.raises(StorageError, match="at the write"):
        store.put("a/object", [bytes(size)])
    broken.clear()
    sink = store.open_sink("a/object", size)
    with pytest.raises(StorageError, match="at the write"):
        write_parts(sink, bytes(size))
    sink.abort()
    assert (files(root), directories(root)) == ([], [])


def test_a_lost_write_is_noticed(store: LocalStore, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = store.open_sink("object", 100)
    sink.write_part(sink.parts()[0], [bytes(100)])
    monkeypatch.setattr(os, "fstat", lambda fd, real=os.fstat: _shorter(real(fd)))
    with pytest.raises(TransferSizeError, match="99 bytes instead of 100"):
        sink.commit()
    assert files(root) == []


def _shorter(status: os.stat_result) -> os.stat_result:
    fields = list(status)
    fields[stat.ST_SIZE] -= 1
    return os.stat_result(fields)


def test_parts_and_their_sizes_are_checked(store: LocalStore, root: Path) -> None:
    sink = store.open_sink("object", 200_000)
    first, second, *_ = sink.parts()
    with pytest.raises(TransferSizeError, match="10 bytes were given"):
        sink.write_part(first, [bytes(10)])
    with pytest.raises(ValueError, match="is not a part of"):
        sink.write_part(PartRange(1, 5), [bytes(4)])
    with pytest.raises(ValueError, match="is not a part of"):
        sink.write_part(PartRange(0, second.stop), [bytes(second.stop)])
    with pytest.raises(TransferSizeError, match="4 of its parts were not written, the first at byte 0"):
        sink.commit()
    assert files(root) == []
    with pytest.raises(ValueError, match="-1 bytes"):
        store.open_sink("object", -1)
    with pytest.raises(StorageError, match="location itself is no object"):
        store.open_sink("", 1)


def test_a_commit_while_a_part_is_written_is_refused_and_an_abort_waits_for_nobody(
    store: LocalStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing, go_on = threading.Event(), threading.Event()
    real = os.pwritev

    def held(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        writing.set()
        assert go_on.wait(60)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", held)
    before = count_descriptors(root)
    sink = store.open_sink("object", 10)
    with ThreadPoolExecutor(1) as pool:
        part = pool.submit(sink.write_part, sink.parts()[0], [bytes(10)])
        assert writing.wait(60)
        with pytest.raises(StorageError, match="while a part is being written"):
            sink.commit()
        sink.abort()
        assert files(root) == []
        assert count_descriptors(root) == before + 1  # the write still needs its file: its number must not be reused
        go_on.set()
        part.result()
    assert count_descriptors(root) == before


def count_descriptors(root: Path) -> int:
    """Open files and directories in the store and beside it; others open and close theirs at any time."""
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("open files can't be seen without /proc")
    place = os.path.realpath(root.parent)
    return sum(f"{target}/".startswith(f"{place}/") for target in open_links())


def test_no_descriptor_leaks(root: Path, direct_from_1_mib: None, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(root, part_bytes=MIB)
    before = count_descriptors(root)
    for _ in range(3):
        for size_bytes in (0, 10, LARGE):
            write(store, "a/b", bytes(size_bytes))
            store.open_sink("a/c", size_bytes).abort()
            with contextlib.suppress(TransferSizeError):
                store.open_sink("a/c", size_bytes).commit()
        store.get("a/b")
        store.get_tail("a/b", 5)
        read_range(store, "a/b", 5, 6)
        list(store.list())
        list(store.list_directories())
        failing_calls: list[Callable[[], object]] = [
            lambda: store.get("a"),
            lambda: store.get("absent"),
            lambda: read_range(store, "a/b", LARGE, 1),
            lambda: store.put("a/b", [b"x"], if_absent=True),
        ]
        for call in failing_calls:
            with pytest.raises(StorageError):
                call()
        for place, name, number, call in (
            (os, "fsync", errno.EIO, lambda: store.put("a/d", [b"x"])),
            (os, "preadv", errno.EIO, lambda: read_range(store, "a/b", 0, 1)),
            (local_sink, "reserve", errno.ENOSPC, lambda: store.open_sink("a/d", LARGE)),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(place, name, functools.partial(_raise, number))
                with pytest.raises(StorageError):
                    call()
        store.delete(["a/b", "a/c", "absent"])
    assert count_descriptors(root) == before
    assert files(root) == []


def _raise(number: int, *args: object) -> None:
    raise OSError(number, os.strerror(number))


# -- durability


class Trace:
    """Notes what is flushed, renamed and linked, in order, and still does it."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        if not os.path.isdir("/proc/self/fd"):
            pytest.skip("names of open files can't be seen without /proc")
        self.events: list[str] = []
        self._root = root
        monkeypatch.setattr(os, "fsync", functools.partial(self._flush, os.fsync))
        monkeypatch.setattr(os, "replace", functools.partial(self._two, "rename", os.replace))
        monkeypatch.setattr(os, "link", functools.partial(self._two, "link", os.link))
        monkeypatch.setattr(os, "sync", lambda: self.events.append("sync"))

    def _flush(self, real: Callable[[int], None], fd: int) -> None:
        name = os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), self._root)
        kind = "directory" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file"
        self.events.append(f"flush {kind} {name if kind == 'directory' else ''}".strip())
        real(fd)

    def _two(self, verb: str, real: Callable[..., None], old: str, new: str, **kwargs: object) -> None:
        self.events.append(
            f"{verb} to {'temporary' if new.endswith('.dcpfs-tmp') else os.path.relpath(new, self._root)}"
        )
        real(old, new, **kwargs)


def test_case_32_file_and_directories_are_flushed_in_order_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path / "new")
    trace = Trace(tmp_path, monkeypatch)
    store.put("a/b/object", [b"x"])
    made = ["flush directory .", "flush directory new", "flush directory new/a"]
    publish = ["flush file", "rename to new/a/b/object", "flush directory new/a/b"]
    assert trace.events == made + publish
    trace.events.clear()
    store.put("a/b/object", [b"y"])
    assert trace.events == publish
    trace.events.clear()
    store.put("a/b/other", [b"y"], if_absent=True)
    assert trace.events == ["flush file", "link to new/a/b/other", "flush directory new/a/b"]
    trace.events.clear()
    store.delete(["a/b/other", "a/b/absent"])
    assert trace.events == ["flush directory new/a/b"]


def test_case_32_one_new_directory_is_flushed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path)
    trace = Trace(tmp_path, monkeypatch)
    store.put("step/object", [b"x"])
    publish = ["flush file", "rename to step/object", "flush directory step"]
    assert trace.events == ["flush directory .", *publish]
    trace.events.clear()
    write(store, "step/model/large", bytes(LARGE))
    assert trace.events[0] == "flush directory step"


def test_case_32_a_nameless_file_is_on_the_device_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    if store.open_sink("probe", LARGE)._named:
        pytest.skip("this filesystem knows no nameless files")
    trace = Trace(tmp_path, monkeypatch)
    write(store, "object", bytes(LARGE))
    assert trace.events == ["flush file", "link to temporary", "flush file", "rename to object", "flush directory ."]


def test_case_32_nothing_is_flushed_when_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(tmp_path, durability=Durability.PAGE_CACHE)
    trace = Trace(tmp_path, monkeypatch)
    store.put("a/object", [b"x"])
    write(store, "a/large", bytes(LARGE))
    store.delete(["a/object", "a/large"])
    assert [event for event in trace.events if "flush" in event or event == "sync"] == []


def test_a_directory_that_cannot_be_flushed_is_no_error_where_that_is_unknown(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def fsync(fd: int, number: int = errno.EINVAL) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(number, os.strerror(number))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    store.put("a/object", [b"x"])
    monkeypatch.setattr(os, "fsync", functools.partial(fsync, number=errno.EIO))
    with pytest.raises(StorageError, match="EIO"):
        store.put("a/object", [b"y"])
    assert store.get("a/object") == b"y"  # whole, though nobody knows whether it survives a power cut


# -- system calls that do less than asked, or fail


def test_short_reads_and_writes_are_completed(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    real_read, real_readv, real_writev = os.pread, os.preadv, os.pwritev
    monkeypatch.setattr(os, "pread", lambda fd, size, offset: real_read(fd, min(size, 1000), offset))
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: real_readv(fd, [views[0][:777]], offset))
    monkeypatch.setattr(os, "pwritev", lambda fd, views, offset: real_writev(fd, [views[0][:999]], offset))
    content = pattern(50_000)
    store.put("object", [content[:1], b"", content[1:30_000], content[30_000:]])
    assert store.get("object") == content
    assert store.get_tail("object", 40_000) == (content[-40_000:], 50_000)
    assert read_range(store, "object", 3, 49_000) == content[3:49_003]


def test_more_buffers_than_a_call_takes(store: LocalStore) -> None:
    content = pattern(9000)
    store.put("object", [content[start : start + 2] for start in range(0, 9000, 2)])
    assert store.get("object") == content
    target = bytearray(9000)
    store.read_into("object", 0, [memoryview(target)[start : start + 3] for start in range(0, 9000, 3)])
    assert bytes(target) == content


def test_a_file_that_takes_nothing_is_an_error(store: LocalStore, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwritev", lambda fd, views, offset: 0)
    with pytest.raises(StorageError, match="took 0 of 5 bytes"):
        store.put("object", [b"12345"])
    assert files(root) == []


def test_signals_interrupt_nothing(store: LocalStore) -> None:
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signal handlers belong to the main thread, and the test runner uses another")
    content = pattern(8 * MIB)
    seen: list[int] = []
    old = signal.signal(signal.SIGPROF, lambda number, frame: seen.append(number))
    signal.setitimer(signal.ITIMER_PROF, 0.001, 0.001)
    try:
        for _ in range(50):
            write(store, "object", content)
            assert store.get("object") == content
            if seen:
                break
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, old)
    assert seen


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_failed_write_is_not_tried_again(
    store: LocalStore, root: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def fail(fd: int, views: Sequence[memoryview], offset: int) -> int:
        nonlocal calls
        calls += 1
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwritev", fail)
    with pytest.raises(StorageError, match=errno.errorcode[number]) as caught:
        store.put("dir/object", [b"x"])
    assert (calls, caught.value.errno, files(root), directories(root)) == (1, number, [], [])


def failing(real: Callable[..., object], numbers: list[int]) -> Callable[..., object]:
    """The call, which fails with those error numbers first."""

    def call(*args: object, **kwargs: object) -> object:
        if numbers:
            number = numbers.pop(0)
            raise OSError(number, os.strerror(number))
        return real(*args, **kwargs)

    return call


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
@pytest.mark.parametrize("call", ["open", "pread", "preadv", "stat"])
def test_a_read_that_fails_for_a_moment_is_tried_again(
    store: LocalStore, call: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("object", [b"content"])
    verbs: dict[str, Callable[[], object]] = {
        "open": lambda: store.get("object"),
        "pread": lambda: store.get_tail("object", 7)[0],
        "preadv": lambda: read_range(store, "object", 0, 7),
        "stat": lambda: b"content" if store.head("object").size_bytes == 7 else b"",
    }
    for failures in (1, 2):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing(getattr(os, call), [number] * failures))
            assert verbs[call]() == b"content"
    left = [number] * 4
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing(getattr(os, call), left))
        with pytest.raises(StorageError, match=errno.errorcode[number]) as caught:
            verbs[call]()
    assert len(left) == 4 - QUICK.attempts
    assert caught.value.errno == number


def test_the_retry_policy_costs_nothing_while_nothing_fails(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("object", [b"x"])

    def refuse(config: RetryConfig) -> None:
        raise AssertionError("a retry policy was made")

    monkeypatch.setattr(local_store, "RetryPolicy", refuse)
    assert store.get("object") == b"x"
    for attempt in (lambda: store.get("absent"), lambda: store.head("absent")):
        with pytest.raises(ObjectNotFoundError):
            attempt()
    monkeypatch.setattr(os, "pread", functools.partial(_raise, errno.EACCES))
    with pytest.raises(PermissionDeniedError):
        store.get("object")


def test_a_store_that_may_not_retry_does_not(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(Location(root), retry=RetryConfig(attempts=1))
    store.put("object", [b"x"])
    left = [errno.EIO] * 3
    monkeypatch.setattr(os, "pread", failing(os.pread, left))
    with pytest.raises(StorageError, match="the device or its network failed"):
        store.get("object")
    assert len(left) == 2


# -- nameless files, and where there are none


@pytest.mark.parametrize("lacking", ["the flag", "the filesystem", "proc"])
def test_without_nameless_files_there_is_a_temporary_name(
    root: Path, lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lacking == "the flag":
        monkeypatch.setattr(local_sink, "_O_TMPFILE", 0)
    elif lacking == "proc":
        monkeypatch.setattr(local_sink, "_DESCRIPTORS", "/absent")
    else:
        real = os.open
        flag = local_sink._O_TMPFILE

        def refuse(path: str, flags: int, mode: int = 0o777, **kwargs: int) -> int:
            if flag and flags & flag == flag:
                raise OSError(errno.EOPNOTSUPP, "Operation not supported")
            return real(path, flags, mode, **kwargs)

        monkeypatch.setattr(os, "open", refuse)
    store = opened(root)
    sink = store.open_sink("object", LARGE)
    (temporary,) = files(root)
    assert temporary.startswith(".object.")
    assert temporary.endswith(".dcpfs-tmp")
    assert list(store.list()) == []
    write_parts(sink, pattern(LARGE))
    sink.commit()
    assert files(root) == ["object"]
    assert store.get("object") == pattern(LARGE)


def test_case_30_a_large_object_has_no_name_until_it_is_whole(store: LocalStore, root: Path) -> None:
    sink = store.open_sink("object", LARGE)
    if sink._named:
        sink.abort()
        pytest.skip("this filesystem knows no nameless files")
    write_parts(sink, pattern(LARGE))
    assert files(root) == []
    sink.commit()
    assert files(root) == ["object"]


def test_space_is_reserved_at_the_start(store: LocalStore, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reserved: list[int] = []
    real = file_bytes._allocate

    def allocate(fd: int, size_bytes: int) -> int:
        reserved.append(size_bytes)
        return real(fd, size_bytes)

    monkeypatch.setattr(file_bytes, "_allocate", allocate)
    store.open_sink("small", SMALL).abort()
    store.open_sink("large", LARGE).abort()
    assert reserved == [LARGE]
    for number, works in {errno.EOPNOTSUPP: True, errno.ENOSYS: True, errno.ENOSPC: False, errno.EDQUOT: False}.items():
        monkeypatch.setattr(file_bytes, "_allocate", lambda fd, size, number=number: number)
        if works:
            write(store, "large", pattern(LARGE))
            assert store.get("large") == pattern(LARGE)
        else:
            with pytest.raises(StorageError, match=errno.errorcode[number]):
                store.open_sink("large", LARGE)
    store.delete(["large"])
    assert files(root) == []


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o007])
def test_the_umask_decides_who_may_read(store: LocalStore, root: Path, umask: int) -> None:
    old = os.umask(umask)
    try:
        store.put("dir/small", [b"x"])
        store.put("dir/conditional", [b"x"], if_absent=True)
        write(store, "dir/large", bytes(LARGE))
    finally:
        os.umask(old)
    for name in ("small", "conditional", "large"):
        assert stat.S_IMODE((root / "dir" / name).stat().st_mode) == 0o666 & ~umask
    assert stat.S_IMODE((root / "dir").stat().st_mode) == 0o777 & ~umask


# -- names and links


def test_names_up_to_the_limit_of_the_filesystem(store: LocalStore, root: Path) -> None:
    for name in ("x" * 255, "雪" * 85, ".x" * 127):
        for size_bytes in (5, LARGE):
            write(store, f"dir/{name}", pattern(size_bytes))
            assert store.get(f"dir/{name}") == pattern(size_bytes)
            assert files(root) == [f"dir/{name}"]
        store.delete([f"dir/{name}"])
    assert not store.exists("x" * 256)
    with pytest.raises(StorageError, match="ENAMETOOLONG"):
        store.put("x" * 256, [b"x"])
    assert files(root) == []


def test_names_that_are_no_text_are_listed_and_read(store: LocalStore, root: Path) -> None:
    root.mkdir()
    name = os.fsdecode(b"caf\xe9")
    try:
        (root / name).write_bytes(b"x")
    except OSError:
        pytest.skip("this filesystem takes text only")
    assert [info.path for info in store.list()] == [name]
    assert store.get(name) == b"x"
    store.delete([name])
    assert files(root) == []


def test_only_what_looks_exactly_like_a_temporary_file_is_hidden(store: LocalStore, root: Path) -> None:
    names = [".a.dcpfs-tmp", "a.0123456789abcdef.dcpfs-tmp", ".a.0123456789abcdeg.dcpfs-tmp", ".hidden"]
    for name in names:
        store.put(name, [b"x"])
    (root / ".object.0123456789abcdef.dcpfs-tmp").write_bytes(b"half")
    (root / ".line\nbreak.0123456789abcdef.dcpfs-tmp").write_bytes(b"half")
    assert sorted(info.path for info in store.list()) == sorted(names)


@pytest.fixture
def linked(tmp_path: Path) -> LocalStore:
    """A location with links of all kinds, beside a directory that must not be touched."""
    root, outside = tmp_path / "store", tmp_path / "outside"
    for directory in (root / "inner", outside / "dir"):
        directory.mkdir(parents=True)
    (outside / "secret").write_bytes(b"secret")
    (root / "inner" / "object").write_bytes(b"inner")
    (root / "file-out").symlink_to(outside / "secret")
    (root / "dir-out").symlink_to(outside)
    (root / "parent").symlink_to("..")
    (root / "dangling").symlink_to(outside / "absent")
    (root / "file-in").symlink_to("inner/object")
    (root / "dir-in").symlink_to("inner")
    return opened(root)


@pytest.mark.parametrize("path", ["file-out", "dir-out/secret", "parent/outside/secret"])
def test_case_112_reading_through_a_link_that_leads_out_is_refused(linked: LocalStore, path: str) -> None:
    calls: list[Callable[[], object]] = [
        lambda: linked.get(path),
        lambda: linked.get_tail(path, 3),
        lambda: read_range(linked, path, 0, 3),
        lambda: linked.head(path),
        lambda: linked.exists(path),
    ]
    for call in calls:
        with pytest.raises(PermissionDeniedError, match="symbolic link leads out of the location") as caught:
            call()
        assert "secret" not in str(caught.value).replace(path, "").replace("outside/secret", "")
        assert str(caught.value).endswith("; open that place itself")


def test_case_112_writing_and_deleting_through_a_link_that_leads_out_is_refused(
    linked: LocalStore, tmp_path: Path
) -> None:
    before = files(tmp_path / "outside")
    calls: list[Callable[[], object]] = [
        lambda: linked.put("dir-out/new", [b"x"]),
        lambda: linked.put("dir-out/deep/new", [b"x"]),
        lambda: linked.put("dangling/new", [b"x"]),
        lambda: linked.open_sink("parent/outside/new", LARGE),
        lambda: linked.delete(["dir-out/secret"]),
        lambda: list(linked.list("dir-out")),
        lambda: list(linked.list("parent")),
        lambda: list(linked.list_directories("dir-out")),
    ]
    for call in calls:
        with pytest.raises(PermissionDeniedError, match="symbolic link leads out"):
            call()
    assert files(tmp_path / "outside") == before
    assert directories(tmp_path / "outside") == ["dir"]


def test_a_link_that_leads_to_itself_is_nothing_and_spoils_no_listing(linked: LocalStore, tmp_path: Path) -> None:
    before = sorted(info.path for info in linked.list()), sorted(linked.list_directories())
    (tmp_path / "store" / "loop").symlink_to("loop")
    assert (sorted(info.path for info in linked.list()), sorted(linked.list_directories())) == before
    assert list(linked.list("loop")) == []
    assert not linked.exists("loop")
    with pytest.raises(ObjectNotFoundError):
        linked.get("loop/object")


def test_case_112_a_link_itself_is_replaced_or_deleted_and_not_followed(linked: LocalStore, tmp_path: Path) -> None:
    linked.put("file-out", [b"mine"])
    linked.put("dangling", [b"mine too"])
    assert linked.get("file-out") == b"mine"
    assert linked.get("dangling") == b"mine too"
    assert (tmp_path / "outside" / "secret").read_bytes() == b"secret"
    linked.delete(["file-in"])
    assert linked.get("inner/object") == b"inner"


def test_links_within_the_location_are_followed(linked: LocalStore) -> None:
    assert linked.get("file-in") == b"inner"
    assert linked.get("dir-in/object") == b"inner"
    assert linked.head("file-in").size_bytes == 5
    linked.put("dir-in/new", [b"x"])
    assert linked.get("inner/new") == b"x"
    assert sorted(info.path for info in linked.list("dir-in")) == ["dir-in/new", "dir-in/object"]


def test_the_location_may_be_a_link_and_may_move(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to("one")
    store = opened(tmp_path / "link")
    store.put("object", [b"1"])
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to("two")
    store.put("object", [b"2"])
    assert store.get("object") == b"2"
    assert (tmp_path / "one" / "object").read_bytes() == b"1"


def test_what_is_no_file_is_no_object(store: LocalStore, root: Path) -> None:
    (root / "dir").mkdir(parents=True)
    os.mkfifo(root / "pipe")  # opening it must not wait for a writer
    for name in ("pipe", "dir", ""):
        assert not store.exists(name)
        with pytest.raises(ObjectNotFoundError):
            store.get(name)
    assert list(store.list()) == []
    with pytest.raises(StorageError, match="a directory of that name is there"):
        store.put("dir", [b"x"])
    store.put("file", [b"x"])
    with pytest.raises(StorageError, match="a part of the path is a file"):
        store.put("file/below", [b"x"])
    assert store.get("file") == b"x"


# -- directories come and go


def test_deletions_prune_emptied_directories_and_the_location_stays(store: LocalStore, root: Path) -> None:
    for name in ("a/b/c/1", "a/b/2", "d/3"):
        store.put(name, [b"x"])
    (root / "empty").mkdir()
    store.delete(["a/b/c/1"])
    assert directories(root) == ["a", "a/b", "d", "empty"]
    store.delete(["a/b/2", "d/3"])
    assert directories(root) == ["empty"]
    assert root.is_dir()
    store.delete(["absent/too"])
    assert list(opened(root / "absent").list()) == []


def test_a_directory_that_is_removed_while_it_is_written_to_is_made_again(
    store: LocalStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for size_bytes in (5, LARGE):
        real = os.mkdir
        removed = 0

        def mkdir(path: str, mode: int = 0o777, real: Callable[..., None] = real) -> None:
            nonlocal removed
            real(path, mode)
            if removed < 3 and path.endswith("/new"):
                removed += 1
                os.rmdir(path)

        with monkeypatch.context() as patch:
            patch.setattr(os, "mkdir", mkdir)
            write(store, "a/new/object", pattern(size_bytes))
        assert removed == 3
        assert store.get("a/new/object") == pattern(size_bytes)
        store.delete(["a/new/object"])


def test_a_nameless_file_survives_the_loss_of_its_directory(store: LocalStore, root: Path) -> None:
    sink = store.open_sink("a/b/object", LARGE)
    if sink._named:
        sink.abort()
        pytest.skip("this filesystem knows no nameless files")
    write_parts(sink, pattern(LARGE))
    (root / "a" / "b").rmdir()
    (root / "a").rmdir()
    with contextlib.suppress(StorageError):
        sink.commit()
        assert store.get("a/b/object") == pattern(LARGE)
    assert [name for name in files(root) if "tmp" in name] == []


def test_writers_and_a_cleaner_of_one_directory(store: LocalStore, root: Path) -> None:
    """Every deletion empties the directory and removes it while others make it."""

    def work(number: int) -> None:
        for turn in range(30):
            store.put(f"a/b/{number}", [bytes([turn])])
            assert store.get(f"a/b/{number}") == bytes([turn])
            store.delete([f"a/b/{number}"])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert (files(root), directories(root)) == ([], [])


# -- conditional puts


@pytest.mark.parametrize("links", ["hard links", "none"])
def test_one_of_eight_conditional_puts_wins(root: Path, links: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(root)
    if links == "none":
        monkeypatch.setattr(os, "link", functools.partial(_raise, errno.EPERM))
    for turn in range(10):
        together = threading.Barrier(8)

        def race(number: int, turn: int = turn, together: threading.Barrier = together) -> int | None:
            together.wait(60)
            try:
                store.put(f"dir/{turn}", [bytes([number]) * 1000], if_absent=True)
            except ObjectExistsError:
                return None
            return number

        with ThreadPoolExecutor(8) as pool:
            winners = [number for number in pool.map(race, range(8)) if number is not None]
        assert len(winners) == 1
        assert store.get(f"dir/{turn}") == bytes(winners) * 1000
    assert len(files(root)) == 10


def test_a_name_that_was_given_though_the_answer_was_lost_counts(
    store: LocalStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network filesystem asks again when an answer is lost, and then finds its own work done."""

    def twice(real: Callable[..., None], *names: object, **options: object) -> None:
        real(*names, **options)
        real(*names, **options)

    for name in ("link", "replace"):
        monkeypatch.setattr(os, name, functools.partial(twice, getattr(os, name)))
    assert store.put("object", [b"one"], if_absent=True).size_bytes == 3
    with pytest.raises(ObjectExistsError):
        store.put("object", [b"two"], if_absent=True)
    assert store.get("object") == b"one"
    store.put("object", [b"three"])
    assert store.get("object") == b"three"
    assert files(root) == ["object"]


def test_a_claimed_name_is_given_back_when_the_file_does_not_come(
    store: LocalStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", functools.partial(_raise, errno.EPERM))
    monkeypatch.setattr(os, "replace", functools.partial(_raise, errno.EIO))
    with pytest.raises(StorageError, match="EIO"):
        store.put("object", [b"one"], if_absent=True)
    assert files(root) == []


# -- the rest


def test_case_80_a_forked_process_writes_and_reads_with_the_parents_store(root: Path, direct_from_1_mib: None) -> None:
    store = opened(root, part_bytes=MIB)
    write(store, "parent", pattern(LARGE))
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=_write_and_check, args=(store, f"child/{seed}", seed)) for seed in range(3)]
    for child in children:
        child.start()
    for turn in range(5):
        write(store, "parent", pattern(LARGE, turn))
        assert store.get("parent") == pattern(LARGE, turn)
    for seed, child in enumerate(children):
        child.join(240)
        assert child.exitcode == 0
        assert store.get(f"child/{seed}") == pattern(LARGE, 10 + seed)


def _write_and_check(store: LocalStore, path: str, seed: int) -> None:
    for _ in range(5):
        write(store, path, pattern(LARGE, 10 + seed))
        assert store.get(path) == pattern(LARGE, 10 + seed)


def test_an_etag_changes_with_the_content(store: LocalStore) -> None:
    first = store.put("object", [b"1"])
    assert store.head("object").etag == first.etag
    assert store.head("object").modified_seconds is not None
    assert store.put("object", [b"2"]).etag != first.etag


def test_other_locations_are_refused() -> None:
    for url in ("s3://bucket/x", "memory://x"):
        with pytest.raises(ConfigError, match="is not a local path"):
            LocalStore(Location(url))


def test_a_short_file_says_where_it_ends(store: LocalStore, root: Path) -> None:
    store.put("object", [bytes(10)])
    with pytest.raises(TransferSizeError, match=f"bytes 5 to 25 of {root}/object: the file ends at 10"):
        read_range(store, "object", 5, 20)
