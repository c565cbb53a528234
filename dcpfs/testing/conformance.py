"""What every store promises, as a suite that anyone can run on a filesystem of their own.

The promises stand in `dcpfs.storage.store`; backends differ in declared `Capabilities` only. Each test makes
its own objects in a store that nobody else uses, and looks at the result through a second client, since a
client that remembers what it wrote would vouch for itself.

Flow::

    class TestMyStore(StoreConformance):
        @pytest.fixture
        def store(self):
            return open_store(Location("myfs://fresh-directory"), transfer=TransferConfig(part_bytes=...))
"""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.context import BaseContext
from typing import ClassVar

from dcpfs.errors import ConfigError, DcpfsError, ObjectExistsError, ObjectNotFoundError, TransferSizeError
from dcpfs.format.collector import paused_collector
from dcpfs.storage.location import Location
from dcpfs.storage.opening import open_store
from dcpfs.storage.store import Buffer, Sink, Store
from dcpfs.testing.expectation import expect, expect_error, skip

__all__ = ["ODD_NAMES", "StoreConformance", "pattern", "read_range", "run_child", "write_parts"]

ODD_NAMES: Sequence[str] = (
    "a b",
    "per%cent%20",
    "ünï-雪",
    "q?x=1#f",
    "[x]*",
    "a*",
    ".leading",
    "..two",
    "back\\slash",
    "plus+and&=;,@$",
    "quote'\"`",
    "~tilde",
    "colon:name",
    "-dash",
    "n" * 200,
    "a::b",
    "deep/er/a b/[x]?/name",
)
_THREADS = 8
_DEADLINE_SECONDS = 120


def pattern(size_bytes: int, seed: int = 0) -> bytes:
    """Bytes in which no two places look alike for long."""
    line = bytes((value * 131 + seed * 17 + value // 7) % 256 for value in range(4093))
    return (line * (size_bytes // len(line) + 1))[:size_bytes]


def write_parts(sink: Sink, content: bytes) -> None:
    """Write all parts in order, each from two buffers."""
    for part in sink.parts():
        middle = (part.start + part.stop) // 2
        view = memoryview(content)
        sink.write_part(part, [view[part.start : middle], view[middle : part.stop]])


def read_range(store: Store, path: str, start: int, size_bytes: int) -> bytes:
    """A range, read into three buffers of which one is empty."""
    content = bytearray(size_bytes)
    view, third = memoryview(content), size_bytes // 3
    store.read_into(path, start, [view[:third], view[third:third], view[third:]])
    return bytes(content)


class StoreConformance:
    """The suite. A subclass gives a fixture ``store`` that makes a fresh, empty store for each test.

    Attributes:
        large_bytes: Size of an object that needs several parts with the fixture's `TransferConfig`.
        shared_between_processes: False where another process sees other objects (``memory://``).
        odd_names: Names that the tests use, less those with `Capabilities.refused_characters`.
    """

    large_bytes: ClassVar[int] = 300_000
    shared_between_processes: ClassVar[bool] = True
    odd_names: ClassVar[Sequence[str]] = ODD_NAMES

    def reopen(self, store: Store) -> Store:
        """A second client of the same objects."""
        return open_store(store.location)

    # -- whole objects

    def test_what_is_put_is_read(self, store: Store) -> None:
        """Whole objects of any number of buffers."""
        content = pattern(1000)
        cases: dict[str, list[Buffer]] = {
            "one": [content],
            "three": [content[:10], bytearray(content[10:11]), memoryview(content)[11:]],
            "none": [],
            "empty": [b"", b""],
        }
        for name, buffers in cases.items():
            wanted = b"".join(buffers)
            info = store.put(name, buffers)
            expect((info.path, info.size_bytes), (name, len(wanted)), "what put says")
            expect(self.reopen(store).get(name), wanted, name)
            expect(store.head(name).size_bytes, len(wanted), f"size of {name}")

    def test_names_are_literal(self, store: Store) -> None:
        """Nothing in a name is syntax, for any verb."""
        refused = set(store.capabilities.refused_characters)
        names = [name for name in self.odd_names if not refused & set(name)]
        for number, name in enumerate(names):
            store.put(name, [pattern(10, number)])
        other = self.reopen(store)
        for number, name in enumerate(names):
            expect(other.get(name), pattern(10, number), f"content of {name!r}")
            expect(other.head(name).path, name, "path of head")
            expect(read_range(other, name, 2, 5), pattern(10, number)[2:7], f"range of {name!r}")
            sink = store.open_sink(name, 20)
            write_parts(sink, pattern(20, number))
            sink.commit()
            expect(other.get_tail(name, 4), (pattern(20, number)[-4:], 20), f"tail of {name!r}")
        if other.capabilities.listable:
            expect(sorted(info.path for info in other.list()), sorted(names), "listing")
        for number, name in enumerate(names):
            store.delete([name])
            expect(other.exists(name), False, f"{name!r} after its deletion")
            for left in names[number + 1 :]:
                expect(other.exists(left), True, f"{left!r} after the deletion of {name!r}")

    def test_names_that_lead_elsewhere_are_refused(self, store: Store) -> None:
        """Absolute names, dots, and what the client would take for syntax, before anything is touched."""
        elsewhere = [f"a{mark}b" for mark in store.capabilities.refused_characters]
        for name in ("/absolute", "a//b", "../up", "a/../../up", "./here", "a/..", *elsewhere):
            for call in (
                lambda name=name: store.get(name),
                lambda name=name: store.put(name, [b"x"]),
                lambda name=name: store.open_sink(name, 1),
                lambda name=name: store.delete([name]),
                lambda name=name: store.head(name),
            ):
                with expect_error(ConfigError, f"name {name!r}"):
                    call()
        if store.capabilities.listable:
            expect(list(self.reopen(store).list()), [], "what is there")

    # -- large objects

    def test_large_objects_are_written_in_parts(self, store: Store) -> None:
        """Parts cover the object; what is committed is read."""
        content = pattern(self.large_bytes)
        sink = store.open_sink("dir/large", len(content))
        parts = sink.parts()
        expect(len(parts) > 1, True, "several parts")
        edges = [part.start for part in parts] + [parts[-1].stop]
        expect(edges, [0] + [part.stop for part in parts], "parts without gap or overlap")
        expect(edges[-1], len(content), "end of the last part")
        write_parts(sink, content)
        info = sink.commit()
        expect((info.path, info.size_bytes), ("dir/large", len(content)), "what commit says")
        other = self.reopen(store)
        expect(other.get("dir/large") == content, True, "equal content")
        for start, size in ((0, 1), (1, 4096), (parts[1].start - 3, 7), (len(content) - 5, 5)):
            wanted = content[start : start + size]
            expect(read_range(other, "dir/large", start, size), wanted, f"[{start}, +{size})")

    def test_an_empty_object_has_one_empty_part(self, store: Store) -> None:
        """It exists and has no bytes."""
        sink = store.open_sink("empty", 0)
        expect([(part.start, part.stop) for part in sink.parts()], [(0, 0)], "parts")
        sink.write_part(sink.parts()[0], [])
        expect(sink.commit().size_bytes, 0, "size")
        other = self.reopen(store)
        expect((other.get("empty"), other.get_tail("empty", 5)), (b"", (b"", 0)), "content")
        expect(other.exists("empty"), True, "exists")

    def test_parts_may_come_in_any_order_from_many_threads(self, store: Store) -> None:
        """Where the store says so; a part that is written again replaces the first try."""
        if not store.capabilities.parallel_parts:
            skip("this store takes parts in order")
        content = pattern(self.large_bytes)
        sink = store.open_sink("large", len(content))
        parts = list(sink.parts())
        sink.write_part(parts[0], [bytes(parts[0].size_bytes)])
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(lambda part: sink.write_part(part, [content[part.start : part.stop]]), reversed(parts)))
        sink.commit()
        expect(self.reopen(store).get("large") == content, True, "equal content")

    # -- nothing partial

    def test_nothing_is_seen_before_the_commit(self, store: Store) -> None:
        """Neither a new object nor a change of an old one."""
        content, other = pattern(self.large_bytes), self.reopen(store)
        store.put("old", [b"old"])
        for name in ("new", "old"):
            sink = store.open_sink(name, len(content))
            write_parts(sink, content)
            expect(other.exists(name), name == "old", f"{name} before its commit")
            if name == "old":
                expect(other.get(name), b"old", "old content before the commit")
            sink.commit()
            expect(other.get(name) == content, True, f"{name} after its commit")

    def test_case_31_an_abort_leaves_nothing(self, store: Store) -> None:
        """At any time, twice, and an old object stays whole."""
        content, other = pattern(self.large_bytes), self.reopen(store)
        store.put("dir/old", [b"old"])
        for name in ("dir/new", "dir/old"):
            for written in range(3):
                sink = store.open_sink(name, len(content))
                for part in list(sink.parts())[:written]:
                    sink.write_part(part, [content[part.start : part.stop]])
                sink.abort()
                sink.abort()
            sink = store.open_sink(name, len(content))
            write_parts(sink, content)
            sink.abort()
        self._expect_only_old(other)

    def test_case_31_a_failed_commit_leaves_nothing(self, store: Store) -> None:
        """With a part missing there is no object, and an old one stays whole."""
        content, other = pattern(self.large_bytes), self.reopen(store)
        store.put("dir/old", [b"old"])
        for name in ("dir/new", "dir/old"):
            sink = store.open_sink(name, len(content))
            for part in list(sink.parts())[:-1]:
                sink.write_part(part, [content[part.start : part.stop]])
            with expect_error(TransferSizeError, "commit with a missing part"):
                sink.commit()
            sink.abort()
        self._expect_only_old(other)

    def _expect_only_old(self, other: Store) -> None:
        expect(other.exists("dir/new"), False, "the new object")
        expect(other.get("dir/old"), b"old", "the old object")
        if other.capabilities.listable:
            expect([info.path for info in other.list()], ["dir/old"], "listing")

    def test_a_reader_sees_the_old_object_or_the_new_one(self, store: Store) -> None:
        """While it is overwritten again and again, by puts and by sinks."""
        if not store.capabilities.atomic_put:
            skip("overwriting is not atomic here")
        size = min(self.large_bytes, 1 << 20)
        store.put("object", [bytes(size)])
        done = threading.Event()

        def overwrite() -> None:
            with contextlib.ExitStack() as stack:
                stack.callback(done.set)
                for value in range(1, 9):
                    content = bytes([value]) * size
                    if value % 2:
                        store.put("object", [content])
                    else:
                        sink = store.open_sink("object", size)
                        write_parts(sink, content)
                        sink.commit()

        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(overwrite)
            other = self.reopen(store)
            while not done.is_set():
                content = other.get("object")
                expect((len(content), len(set(content))), (size, 1), "one whole object")
            writing.result()
        expect(store.get("object"), bytes([8]) * size, "the last one")

    # -- reading

    def test_a_range_past_the_end_is_an_error(self, store: Store) -> None:
        """Never fewer bytes in silence."""
        store.put("object", [pattern(100)])
        for start, size in ((0, 101), (99, 2), (100, 1), (1000, 10)):
            with expect_error(TransferSizeError, f"[{start}, +{size}) of 100"):
                read_range(store, "object", start, size)
        store.read_into("object", 40, [])
        expect(read_range(store, "object", 0, 100), pattern(100), "all of it")

    def test_the_tail_of_an_object(self, store: Store) -> None:
        """Its last bytes and its size."""
        store.put("object", [pattern(100)])
        for size in (0, 1, 99, 100, 101, 100_000):
            wanted = pattern(100)[max(0, 100 - size) :]
            expect(store.get_tail("object", size), (wanted, 100), f"tail of {size}")

    def test_what_is_absent_is_not_found(self, store: Store) -> None:
        """By one kind of error, also where a directory of that name is."""
        store.put("dir/object", [b"x"])
        for name in ("absent", "dir", "dir/absent", "dir/object/below"):
            expect(store.exists(name), False, name)
            for call in (
                lambda name=name: store.head(name),
                lambda name=name: store.get(name),
                lambda name=name: store.get_tail(name, 1),
                lambda name=name: read_range(store, name, 0, 1),
            ):
                with expect_error(ObjectNotFoundError, name):
                    call()

    # -- listing

    def test_case_78_what_another_client_did_is_seen(self, store: Store) -> None:
        """No answer comes from a cache."""
        other = self.reopen(store)
        listable = store.capabilities.listable

        def look() -> tuple[bool, list[str]]:
            return store.exists("dir/object"), [info.path for info in store.list("dir")] if listable else []

        expect(look(), (False, []), "before")
        other.put("dir/object", [b"1"])
        expect(look(), (True, ["dir/object"] if listable else []), "after the other's put")
        expect(store.head("dir/object").size_bytes, 1, "size")
        other.put("dir/object", [b"four"])
        expect(store.head("dir/object").size_bytes, 4, "size after the other's overwrite")
        expect(store.get("dir/object"), b"four", "content after the other's overwrite")
        other.delete(["dir/object"])
        expect(look(), (False, []), "after the other's deletion")

    def test_a_listing_is_of_the_directory_alone(self, store: Store) -> None:
        """Recursive, with sizes, without siblings whose names begin alike."""
        if not store.capabilities.listable:
            skip("this store can't list")
        names = ["a/1", "a/b/2", "a/b/c/3", "ab/4", "a.txt", "b"]
        for size, name in enumerate(names):
            store.put(name, [bytes(size)])
        for prefix, wanted in {
            "": names,
            "a": names[:3],
            "a/b": names[1:3],
            "ab": ["ab/4"],
            "absent": [],
            "b": [],
            "a/b/c/3/4": [],
        }.items():
            found = {info.path: info.size_bytes for info in store.list(prefix)}
            expect(found, {name: names.index(name) for name in wanted}, f"listing of {prefix!r}")
        for prefix, directories in {"": ["a", "ab"], "a": ["b"], "a/b/c": [], "absent": []}.items():
            expect(sorted(store.list_directories(prefix)), directories, f"directories in {prefix!r}")

    # -- deleting

    def test_a_deletion_takes_what_is_named_and_no_more(self, store: Store) -> None:
        """In a batch, with names that are absent, given twice, or those of directories."""
        names = [f"dir/{number}" for number in range(20)]
        for name in [*names, "kept", "directory/kept"]:
            store.put(name, [b"x"])
        store.delete([])
        store.delete(iter([*names, "absent", "absent/too", names[0], "directory", "dir"]))
        other = self.reopen(store)
        expect([name for name in names if other.exists(name)], [], "what is left")
        expect([other.exists("kept"), other.exists("directory/kept")], [True, True], "what was not named")
        if other.capabilities.listable:
            expect(sorted(other.list_directories()), ["directory"], "directories, of which empty ones are none")

    # -- conditions and concurrency

    def test_a_conditional_put_spares_an_old_object(self, store: Store) -> None:
        """One of many wins where the condition is atomic."""
        store.put("object", [b"first"], if_absent=True)
        with expect_error(ObjectExistsError, "second conditional put"):
            store.put("object", [b"second"], if_absent=True)
        expect(store.get("object"), b"first", "the old object")
        if not store.capabilities.conditional_put:
            return

        def race(number: int) -> int | None:
            try:
                store.put("raced", [str(number).encode()], if_absent=True)
            except ObjectExistsError:
                return None
            return number

        with ThreadPoolExecutor(_THREADS) as pool:
            winners = [number for number in pool.map(race, range(_THREADS)) if number is not None]
        expect(len(winners), 1, "winners")
        expect(store.get("raced"), str(winners[0]).encode(), "the winner's content")

    def test_many_threads_at_once(self, store: Store) -> None:
        """Each with objects of its own in shared directories."""

        def work(number: int) -> None:
            content = pattern(5000, number)
            for turn in range(3):
                name = f"dir{turn}/sub/{number}"
                store.put(name, [content])
                expect(read_range(store, name, number, 100), content[number : number + 100], name)
                expect(store.head(name).size_bytes, len(content), name)
                sink = store.open_sink(f"{name}.sink", len(content))
                write_parts(sink, content)
                sink.commit()
                expect(store.get(f"{name}.sink"), content, name)
                store.delete([name])
                expect(store.exists(name), False, name)

        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(work, range(_THREADS)))
        if store.capabilities.listable:
            expect(len(list(store.list())), 3 * _THREADS, "objects")

    # -- processes

    def test_case_80_a_spawned_process_opens_the_pickled_location(self, store: Store) -> None:
        """URL and options suffice, and nothing else is handed over."""
        if not self.shared_between_processes:
            skip("another process sees other objects")
        store.put("from parent", [b"parent"])
        location = pickle.dumps(store.location)
        run_child(multiprocessing.get_context("spawn"), _visit_location, location)
        expect(store.get("from child"), b"parent child", "what the child wrote")

    def test_case_80_a_forked_process_uses_an_open_store(self, store: Store) -> None:
        """It opens anew; the parent's connections stay the parent's."""
        if "fork" not in multiprocessing.get_all_start_methods():
            skip("no fork on this system")
        store.put("from parent", [b"parent"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # a fork with threads is what is tested
            run_child(multiprocessing.get_context("fork"), _visit, store)
        if self.shared_between_processes:
            expect(store.get("from child"), b"parent child", "what the child wrote")
        expect(store.get("from parent"), b"parent", "what the parent wrote")

    def test_a_store_survives_pickling(self, store: Store) -> None:
        """As its location and settings."""
        store.put("object", [b"x"])
        copy = pickle.loads(pickle.dumps(store))
        expect(copy.location, store.location, "location")
        expect(copy.get("object"), b"x", "content")

    def test_close_can_be_repeated(self, store: Store) -> None:
        """And the store is of no use afterwards, or opens again; it never hangs."""
        store.put("object", [b"x"])
        other = self.reopen(store)
        expect(other.get("object"), b"x", "content")
        other.close()
        other.close()
        with contextlib.suppress(DcpfsError):
            other.get("object")


def _visit(store: Store) -> None:
    store.put("from child", [store.get("from parent") + b" child"])


def _visit_location(location: bytes) -> None:
    opened: Location = pickle.loads(location)
    _visit(open_store(opened))


def run_child(context: BaseContext, work: Callable[..., None], argument: object) -> None:
    """Run a function in a process of its own, which fails when the function does, or after two minutes."""
    process = context.Process(target=work, args=(argument,))  # type: ignore[attr-defined] # every context has it
    with paused_collector():  # in a forked child too: what other threads were at is not for it to finalize
        process.start()
    process.join(_DEADLINE_SECONDS)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise AssertionError(f"the child process was not done after {_DEADLINE_SECONDS} s")
    expect(process.exitcode, 0, "exit code of the child")
