"""The generic store: what goes wrong on filesystems, and what is never asked of them."""

from __future__ import annotations

import functools
import http.server
import io
import logging
import sys
import threading
import tracemalloc
import zipfile
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from dcpfs.config import RetryConfig, TransferConfig
from dcpfs.errors import (
    ConfigError,
    CredentialsError,
    MissingBackendError,
    ObjectNotFoundError,
    StorageError,
    TransferSizeError,
    UnsupportedOperationError,
)
from dcpfs.storage.filesystems import Publishing, listed_traits
from dcpfs.storage.fsspec_sink import copy_bytes, is_temporary, part_ranges, temporary_name
from dcpfs.storage.fsspec_store import FsspecStore
from dcpfs.storage.leftovers import sweep_leftovers
from dcpfs.storage.local_store import LocalStore
from dcpfs.storage.location import Location
from dcpfs.storage.opening import open_store
from dcpfs.storage.s3_store import S3Store
from dcpfs.storage.store import Sink
from dcpfs.storage.subdirectory import Subdirectory
from dcpfs.testing.conformance import pattern, write_parts
from tests.conformance.dummy_filesystems import DummyObjectStore, DummyTree, registered_dummies

MIB = 1 << 20
PART = 64 << 10
QUICK = RetryConfig(attempts=3, initial_backoff_seconds=0.001, max_backoff_seconds=0.001)


def opened(url: str, part_bytes: int | None = PART, **options: object) -> FsspecStore:
    return FsspecStore(Location(url, options), transfer=TransferConfig(part_bytes=part_bytes), retry=QUICK)


@pytest.fixture
def objects() -> Iterator[FsspecStore]:
    with registered_dummies():
        yield opened("dummyobj://bucket/run")


@pytest.fixture
def tree() -> Iterator[FsspecStore]:
    with registered_dummies():
        yield opened("dummytree:///run")


def write_and_commit(sink: Sink, content: bytes) -> None:
    write_parts(sink, content)
    sink.commit()


# -- failed writes


def test_case_31_a_failed_upload_publishes_nothing(objects: FsspecStore, monkeypatch: pytest.MonkeyPatch) -> None:
    objects.put("old", [b"old"])
    content = pattern(12 * MIB)
    for name in ("new", "old"):
        monkeypatch.setattr(DummyObjectStore, "failing_uploads", 1)
        sink = objects.open_sink(name, len(content))
        with pytest.raises(StorageError, match="the upload broke"):
            write_parts(sink, content)
        with pytest.raises(StorageError, match="ended or failed"):
            sink.write_part(sink.parts()[0], [content[:PART]])
        with pytest.raises(StorageError):
            sink.commit()
        sink.abort()
    assert DummyObjectStore.published == []
    assert DummyObjectStore.objects == {"bucket/run/old": b"old"}


def test_case_31_a_failed_close_publishes_nothing(objects: FsspecStore, monkeypatch: pytest.MonkeyPatch) -> None:
    content = pattern(3 * PART)
    sink = objects.open_sink("new", len(content))
    write_parts(sink, content)
    monkeypatch.setattr(DummyObjectStore, "failing_uploads", 1)
    with pytest.raises(StorageError, match="the upload broke"):
        sink.commit()
    assert DummyObjectStore.objects == {}
    assert DummyObjectStore.published == []


@pytest.mark.parametrize("size_bytes", [1000, 3 * PART])
def test_case_31_a_failed_write_to_a_tree_leaves_no_file(
    tree: FsspecStore, monkeypatch: pytest.MonkeyPatch, size_bytes: int
) -> None:
    tree.put("dir/old", [b"old"])
    monkeypatch.setattr(DummyTree, "failing_writes", 100)
    for name in ("dir/new", "dir/old"):
        with pytest.raises(StorageError, match="the connection broke"):
            tree.put(name, [pattern(size_bytes)])
        sink = tree.open_sink(name, size_bytes)
        with pytest.raises(StorageError):
            write_and_commit(sink, pattern(size_bytes))
        sink.abort()
    assert DummyTree.files == {"/run/dir/old": b"old"}


def test_a_put_to_a_tree_is_repeated_whole(tree: FsspecStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DummyTree, "failing_writes", 2)
    tree.put("dir/new", [pattern(1000)])
    assert DummyTree.files == {"/run/dir/new": pattern(1000)}


@pytest.mark.parametrize("lost", ["mv", "info"], ids=["answer to the move", "look at what was moved"])
def test_a_file_of_a_tree_that_was_moved_is_there_though_the_answer_was_lost(
    tree: FsspecStore, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    content = pattern(200_000)
    tree.put("object", [pattern(200_000, 1)])
    real = getattr(DummyTree, lost)
    answers: list[str] = []

    def loses_one(self: DummyTree, path: str, *others: object, **options: object) -> object:
        answer = real(self, path, *others, **options)
        moved = lost == "mv" or path.endswith("/object")
        if moved and not answers:
            answers.append(path)
            raise ConnectionResetError("the answer was lost")
        return answer

    sink = tree.open_sink("object", len(content))
    write_parts(sink, content)
    monkeypatch.setattr(DummyTree, lost, loses_one)
    assert sink.commit().size_bytes == len(content)
    assert answers
    assert tree.get("object") == content
    assert [info.path for info in tree.list()] == ["object"]


def test_what_killed_writers_left_in_a_tree_goes_with_its_directory(tree: FsspecStore) -> None:
    content = pattern(3 * PART)
    tree.put("step/kept", [b"kept"])
    tree.put("beside/kept", [b"kept"])
    for path in ("step/model/object", "step/object", "beside/object"):
        sink = tree.open_sink(path, len(content))
        first = sink.parts()[0]
        sink.write_part(first, [content[: first.stop]])
    seen = sorted(info.path for info in tree.list())
    assert seen == ["beside/kept", "step/kept"]
    assert len(DummyTree.files) == 5
    other = opened("dummytree:///run")  # the writers' process is gone
    assert sweep_leftovers(other, "step") == 2
    assert sweep_leftovers(other, "absent") == 0
    assert sorted(info.path for info in other.list()) == seen
    assert len(DummyTree.files) == 3
    assert sorted(DummyTree.directories) == ["/", "/run", "/run/beside", "/run/step"]
    assert sweep_leftovers(Subdirectory(other, "beside"), "x") == 0
    with pytest.raises(ValueError, match="below one directory"):
        sweep_leftovers(other, "")


def test_where_objects_appear_whole_nothing_is_swept(objects: FsspecStore) -> None:
    objects.put("step/.dcpfs-0123456789abcdef0123456789abcdef.tmp", [b"a user's"])
    DummyObjectStore.calls.clear()
    assert sweep_leftovers(objects, "step") == 0
    assert DummyObjectStore.calls == []


def test_a_file_that_was_opened_though_the_answer_was_lost_does_not_stay(
    tree: FsspecStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = DummyTree._open
    lost: list[str] = []

    def open_and_lose(fs: DummyTree, path: str, mode: str = "rb", **options: object) -> io.BytesIO:
        file = real(fs, path, mode, **options)
        if mode == "wb" and len(lost) < 2:
            lost.append(path)
            raise ConnectionResetError("the answer was lost")
        return file

    monkeypatch.setattr(DummyTree, "_open", open_and_lose)
    content = pattern(3 * PART)
    write_and_commit(tree.open_sink("dir/object", len(content)), content)
    assert len(lost) == 2
    assert DummyTree.files == {"/run/dir/object": content}


def test_a_directory_may_be_named_with_its_slash(tree: FsspecStore, objects: FsspecStore) -> None:
    for store in (tree, objects):
        store.put("dir/sub/object", [b"1"])
        assert [info.path for info in store.list("dir/")] == ["dir/sub/object"]
        assert list(store.list_directories("dir/")) == ["sub"]


def test_a_move_that_does_nothing_and_does_not_say_so_is_found_out(
    tree: FsspecStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """WebHDFS answers a move onto an existing file with success and ``false``, which its client does not read."""
    real = DummyTree.mv

    def move_or_not(fs: DummyTree, path1: str, path2: str, **options: object) -> None:
        if path2 not in fs.files:
            real(fs, path1, path2, **options)

    monkeypatch.setattr(DummyTree, "mv", move_or_not)
    for content in (b"iter_000000001\n", b"iter_000000002\n"):
        tree.put("latest", [content])
        assert DummyTree.files == {"/run/latest": content}
    write_and_commit(tree.open_sink("latest", 3 * PART), pattern(3 * PART))
    assert DummyTree.files == {"/run/latest": pattern(3 * PART)}
    monkeypatch.setattr(DummyTree, "mv", lambda *_arguments, **_options: None)
    with pytest.raises(StorageError, match="did nothing"):
        tree.put("latest", [b"another"])
    assert DummyTree.files == {}


@pytest.mark.parametrize("scheme", ["hdfs", "webhdfs", "ftp", "dropbox"])
def test_where_a_move_replaces_nothing_no_put_is_called_atomic(scheme: str) -> None:
    traits = listed_traits(Location(f"{scheme}://host/run"))
    assert traits is not None
    assert (traits.publishing, traits.atomic) == (Publishing.MOVE, False)


def test_case_89_what_arrives_in_another_size_is_removed(objects: FsspecStore, monkeypatch: pytest.MonkeyPatch) -> None:
    async def framed(self: DummyObjectStore, path: str, value: bytes, **_: object) -> None:
        self.objects[path] = b"chunk;" + bytes(value)

    monkeypatch.setattr(DummyObjectStore, "_pipe_file", framed)
    with pytest.raises(TransferSizeError, match="10 bytes were sent and 16 are stored"):
        objects.put("x", [bytes(10)])
    assert DummyObjectStore.objects == {}


# -- memory


@pytest.mark.parametrize("url", ["dummyobj://bucket/big", "dummytree:///big"])
def test_cases_66_67_a_file_object_is_never_given_more_than_a_slice(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with registered_dummies():
        largest: list[int] = []
        for kind in (DummyObjectStore, DummyTree):
            monkeypatch.setattr(kind, "noted", largest)
        store = opened(url, part_bytes=None)
        content = pattern(40 * MIB)
        sink = store.open_sink("x", len(content))
        assert max(part.size_bytes for part in sink.parts()) <= 16 * MIB
        write_parts(sink, content)
        sink.commit()
        assert store.get("x") == content
    assert 0 < max(largest) <= 4 * MIB


def test_case_66_a_stream_of_many_parts_keeps_no_copy_of_them(tmp_path: Path) -> None:
    store = opened(f"dir::file://{tmp_path}", part_bytes=4 * MIB)
    part = memoryview(bytes(4 * MIB))

    def peak_bytes() -> int:
        sink = store.open_sink("x", 64 * MIB)
        tracemalloc.start()
        try:
            for place in sink.parts():
                sink.write_part(place, [part])
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert sink.commit().size_bytes == 64 * MIB
        return peak

    # Threads of others are measured as well: one time of three without them is enough.
    assert any(peak_bytes() < 2 * MIB for _ in range(3))


def test_large_copies_in_memory_are_exact() -> None:
    store = opened(f"memory://{id(object())}", part_bytes=MIB)
    content = pattern(5 * MIB + 77)
    sink = store.open_sink("x", len(content))
    for place in reversed(sink.parts()):
        sink.write_part(place, [bytearray(content[place.start : place.stop])])
    sink.commit()
    target = bytearray(len(content) - 3)
    store.read_into("x", 3, [memoryview(target)[: 2 * MIB], memoryview(target)[2 * MIB :]])
    assert target == content[3:]
    store.delete(["x"])


def test_copies_release_their_buffers() -> None:
    source, target = bytearray(pattern(MIB)), bytearray(MIB)
    copy_bytes(memoryview(target), memoryview(source))
    assert target == source
    source.extend(b"free")
    target.extend(b"free")


# -- never


def test_case_86_no_directory_and_no_bucket_is_made_on_an_object_store(objects: FsspecStore) -> None:
    # The dummy raises on mkdir, makedirs, copy, glob and expand_path.
    objects.put("deep/er/x", [b"x"])
    sink = objects.open_sink("deep/er/large", 3 * PART)
    write_and_commit(sink, pattern(3 * PART))
    objects.delete(["deep/er/x"])
    assert [info.path for info in objects.list()] == ["deep/er/large"]


def test_case_78_an_exact_name_is_never_listed_for(objects: FsspecStore) -> None:
    objects.put("x", [b"x"])
    objects.head("x")
    objects.exists("y")
    objects.get("x")
    assert "ls" not in DummyObjectStore.calls


def test_case_88_ranges_read_what_is_asked_for_and_raise_what_fails(
    objects: FsspecStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = pattern(MIB)
    objects.put("x", [content])
    buffers = [memoryview(bytearray(100)) for _ in range(3)]
    DummyObjectStore.calls.clear()
    objects.read_into("x", 500, buffers)
    assert b"".join(buffers) == content[500:800]
    assert DummyObjectStore.calls == ["cat_file"]
    with pytest.raises(ObjectNotFoundError):
        objects.read_into("absent", 0, buffers)
    with pytest.raises(TransferSizeError):
        objects.read_into("x", MIB - 10, buffers)

    # Without a ranged call of its own, through a file object that reads nothing ahead.
    monkeypatch.setattr("dcpfs.storage.fsspec_store.reads_ranges", lambda _fs: False)
    objects.read_into("x", 500, buffers)
    assert b"".join(buffers) == content[500:800]
    assert DummyObjectStore.ranges == [(500, 800)]


def test_a_short_body_is_read_again(objects: FsspecStore) -> None:
    objects.put("x", [pattern(100)])
    target = bytearray(50)
    DummyObjectStore.answers[:] = [lambda: b"short"]
    objects.read_into("x", 0, [memoryview(target)])
    assert target == pattern(100)[:50]
    DummyObjectStore.answers[:] = [lambda: b"1"] * 3
    with pytest.raises(TransferSizeError, match=r"1 of 50 bytes arrived.*3 attempts"):
        objects.read_into("x", 0, [memoryview(target)])


def test_exists_raises_what_is_no_answer(objects: FsspecStore, monkeypatch: pytest.MonkeyPatch) -> None:
    async def denied(_self: DummyObjectStore, _path: str, **_: object) -> dict[str, object]:
        raise PermissionError("no")

    monkeypatch.setattr(DummyObjectStore, "_info", denied)
    with pytest.raises(StorageError, match="PermissionError: no"):
        objects.exists("x")


def test_a_listing_that_fails_half_way_is_an_error(tree: FsspecStore, monkeypatch: pytest.MonkeyPatch) -> None:
    tree.put("a/x", [b"x"])
    tree.put("b/x", [b"x"])
    listed = DummyTree.ls

    def fails_in_b(self: DummyTree, path: str, detail: bool = True, **_: object) -> list[object]:
        if path.endswith("/b"):
            raise PermissionError("no")
        return listed(self, path, detail)

    monkeypatch.setattr(DummyTree, "ls", fails_in_b)
    with pytest.raises(StorageError, match="Can't list dummytree:///run/b"):
        list(tree.list())


def test_an_unfinished_file_of_a_tree_is_not_listed(tree: FsspecStore) -> None:
    sink = tree.open_sink("x", 3 * PART)
    sink.write_part(sink.parts()[0], [bytes(PART)])
    assert len(DummyTree.files) == 1
    assert list(tree.list()) == []
    sink.abort()
    assert DummyTree.files == {}


# -- credentials and options


class ExpiredError(Exception):
    code = "ExpiredToken"


def test_case_81_an_expired_token_is_renewed_by_a_fresh_instance(objects: FsspecStore) -> None:
    def expired() -> bytes:
        raise ExpiredError

    objects.put("x", [b"x"])
    before = DummyObjectStore.instances
    DummyObjectStore.answers[:] = [expired]
    assert objects.get("x") == b"x"
    assert DummyObjectStore.instances == before + 1
    DummyObjectStore.answers[:] = [expired, expired]
    with pytest.raises(CredentialsError, match="could not be renewed"):
        objects.get("x")
    assert DummyObjectStore.instances == before + 2


def test_instances_are_never_shared() -> None:
    with registered_dummies():
        before = DummyObjectStore.instances
        for _ in range(2):
            opened("dummyobj://bucket").exists("x")
        assert DummyObjectStore.instances == before + 2


def test_case_114_options_are_in_no_text(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with registered_dummies():
        store = opened("dummyobj://bucket", token="s3cr3t-value")
        with pytest.raises(ObjectNotFoundError) as caught:
            store.get("absent")
        unknown = opened("dummytree:///x", token="s3cr3t-value")
        shown = [repr(store), str(caught.value), repr(unknown.location), caplog.text]
    assert not any("s3cr3t" in text for text in shown)


def test_options_that_a_filesystem_refuses_are_named() -> None:
    class Strict(MemoryFileSystem):  # type: ignore[misc] # fsspec has no types
        protocol = "strictmem"

        def __init__(self, known: int = 0, **_: object) -> None:
            if _.keys() - {"skip_instance_cache"}:
                raise TypeError(f"unexpected {sorted(_)}")
            super().__init__()

    fsspec.register_implementation("strictmem", Strict, clobber=True)
    assert opened("strictmem://x", known=1).exists("y") is False
    with pytest.raises(ConfigError, match=r"refuses its storage_options \(unexpected \['unknown'\]\)"):
        opened("strictmem://x", unknown=1).exists("y")


# -- which store, and which can't


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("/tmp/x", LocalStore),
        ("file:///tmp/x", LocalStore),
        ("dir::file:///tmp/x", LocalStore),
        ("s3://bucket/x", S3Store),
        ("s3a://bucket/x", S3Store),
        ("simplecache::s3://bucket/x", S3Store),
        ("memory://x", FsspecStore),
        ("simplecache::memory://x", FsspecStore),
        ("zip://x::s3://bucket/a.zip", FsspecStore),
    ],
)
def test_a_location_is_served_by_its_store(url: str, kind: type) -> None:
    store = open_store(Location(url, {"s3": {"anon": True}} if "::s3" in url else None))
    assert type(store) is kind
    store.close()


@pytest.mark.parametrize(
    ("url", "extra"),
    [
        ("gs://bucket/x", "dcpfs[gcs]"),
        ("gcs://bucket/x", "dcpfs[gcs]"),
        ("az://container/x", "dcpfs[azure]"),
        ("abfs://container/x", "dcpfs[azure]"),
        ("webdav://x", "dcpfs[webdav]"),
        ("simplecache::gs://bucket/x", "dcpfs[gcs]"),
        ("zip://a::gs://bucket/x.zip", "dcpfs[gcs]"),
        ("oci://bucket/x", "Install ocifs"),
    ],
)
def test_case_109_a_missing_package_names_its_extra(url: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("gcsfs", "adlfs", "webdav4", "webdav4.fsspec", "ocifs"):
        monkeypatch.setitem(sys.modules, package, None)
    for protocol in ("gs", "gcs", "az", "abfs", "webdav", "oci"):
        # fsspec keeps the classes that it has once imported.
        monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, protocol, raising=False)
    with pytest.raises(MissingBackendError) as caught:
        open_store(Location(url))
    assert extra in str(caught.value)
    assert "needs a package that is not installed" in str(caught.value)


def test_case_109_an_unknown_scheme_is_named_with_its_likes() -> None:
    with pytest.raises(ConfigError, match=r"no filesystem is known for the scheme gss://; did you mean .*gs://"):
        open_store(Location("gss://bucket/x"))


def refuse_writes(store: FsspecStore) -> None:
    assert not store.capabilities.writable
    for write in (
        lambda: store.put("x", [b"x"]),
        lambda: store.open_sink("x", 1),
        lambda: store.delete(["x"]),
    ):
        with pytest.raises(UnsupportedOperationError, match="read-only"):
            write()


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    """A plain web server, which ignores ranges."""
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "q?x=1#f [a]").write_bytes(pattern(1000))

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=tmp_path))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/d"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_web_server_is_read_and_not_written(web: str) -> None:
    store = opened(web)
    name = "q?x=1#f [a]"
    assert store.get(name) == pattern(1000)
    assert store.head(name).size_bytes == 1000
    target = bytearray(100)
    store.read_into(name, 300, [memoryview(target)])
    assert target == pattern(1000)[300:400]
    assert store.get_tail(name, 10) == (pattern(1000)[-10:], 1000)
    assert not store.exists("absent")
    with pytest.raises(TransferSizeError):
        store.read_into(name, 950, [memoryview(target)])
    with pytest.raises(UnsupportedOperationError, match="no listing"):
        list(store.list())
    refuse_writes(store)


def test_an_archive_is_read_and_not_written(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("run/a b", pattern(1000))
        archive.writestr("run/d/y", b"y")
    store = opened(f"zip://run::{tmp_path}/a.zip")
    assert sorted(info.path for info in store.list()) == ["a b", "d/y"]
    assert list(store.list_directories()) == ["d"]
    target = bytearray(100)
    store.read_into("a b", 300, [memoryview(target)])
    assert target == pattern(1000)[300:400]
    assert not store.exists("x")
    assert not store.capabilities.ranged_reads
    refuse_writes(store)


# -- small parts of it


@pytest.mark.parametrize(("size", "part", "wanted"), [(0, 4, [0]), (1, 4, [1]), (4, 4, [4]), (9, 4, [4, 4, 1])])
def test_parts_cover_an_object(size: int, part: int, wanted: list[int]) -> None:
    ranges = part_ranges(size, part)
    assert [piece.size_bytes for piece in ranges] == wanted
    assert sum(wanted) == size


def test_temporary_names_are_beside_their_objects_and_known() -> None:
    name = temporary_name("/a/b/c")
    assert name.startswith("/a/b/")
    assert is_temporary(name.rpartition("/")[2])
    assert not is_temporary(".dcpfs-notes.tmp")
    assert not is_temporary("c")


def test_parts_that_do_not_fit_are_refused(tree: FsspecStore) -> None:
    sink = tree.open_sink("x", 3 * PART)
    first, second, _ = sink.parts()
    with pytest.raises(TransferSizeError, match="bytes were given for the part"):
        sink.write_part(first, [b"short"])
    with pytest.raises(StorageError, match="ascending order"):
        sink.write_part(second, [bytes(PART)])
    with pytest.raises(TransferSizeError, match="parts are missing"):
        sink.commit()
    assert DummyTree.files == {}
