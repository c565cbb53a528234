"""What every store that can only be read promises, as a suite for a filesystem of your own.

The suite of `dcpfs.testing.conformance` makes its own objects. Here somebody else has: a web server's directory or an
archive is filled beforehand with `ReadOnlyConformance.contents`, and nothing that a test does may change it.

Flow::

    class TestMyArchive(ReadOnlyConformance):
        @pytest.fixture
        def store(self):
            pack(self.contents())
            return open_store(Location("myarchive://run::file:///archive"))
"""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ClassVar

from dcpfs.errors import (
    ConfigError,
    DcpfsError,
    ObjectNotFoundError,
    TransferSizeError,
    UnsupportedOperationError,
)
from dcpfs.storage.location import Location
from dcpfs.storage.opening import open_store
from dcpfs.storage.store import Store
from dcpfs.testing.conformance import ODD_NAMES, pattern, read_range, run_child
from dcpfs.testing.expectation import expect, expect_error

__all__ = ["ReadOnlyConformance"]

_THREADS = 8
_LARGE = "dir/large"
_EMPTY = "dir/empty"


class ReadOnlyConformance:
    """The suite. A subclass gives a fixture ``store`` of a place that holds `contents` and nothing else.

    Attributes:
        large_bytes: Size of the largest object.
        odd_names: Names that the tests use, less those with `Capabilities.refused_characters`.
    """

    large_bytes: ClassVar[int] = 3_000_000
    odd_names: ClassVar[Sequence[str]] = ODD_NAMES

    @classmethod
    def contents(cls) -> dict[str, bytes]:
        """What there has to be: names and bytes."""
        odd = {name: pattern(10, number) for number, name in enumerate(cls.odd_names)}
        return {**odd, "object": pattern(100), _EMPTY: b"", _LARGE: pattern(cls.large_bytes)}

    def reopen(self, store: Store) -> Store:
        """A second client of the same objects."""
        return open_store(store.location)

    def readable(self, store: Store) -> dict[str, bytes]:
        """`contents`, less names with characters that the store refuses."""
        refused = set(store.capabilities.refused_characters)
        return {name: content for name, content in self.contents().items() if not refused & set(name)}

    # -- what is there

    def test_whole_objects(self, store: Store) -> None:
        """All of them, by names in which nothing is syntax, with their sizes."""
        for name, content in self.readable(store).items():
            expect(store.get(name) == content, True, f"content of {name!r}")
            info = store.head(name)
            expect((info.path, info.size_bytes), (name, len(content)), f"description of {name!r}")
            expect(store.exists(name), True, f"{name!r} exists")

    def test_ranges(self, store: Store) -> None:
        """At the beginning, in the middle and at the end, into several buffers."""
        content = self.contents()[_LARGE]
        for start, size in ((0, 1), (1, 4096), (len(content) // 2, 100_000), (len(content) - 5, 5), (0, len(content))):
            wanted = content[start : start + size]
            expect(read_range(store, _LARGE, start, size) == wanted, True, f"[{start}, +{size})")
        for name, odd in self.readable(store).items():
            if len(odd) >= 7:
                expect(read_range(store, name, 2, 5), odd[2:7], f"range of {name!r}")
        store.read_into("object", 40, [])

    def test_a_range_past_the_end_is_an_error(self, store: Store) -> None:
        """Never fewer bytes in silence."""
        for name, start, size in (
            *(("object", start, size) for start, size in ((0, 101), (99, 2), (100, 1), (1000, 10))),
            (_EMPTY, 0, 1),
            (_LARGE, self.large_bytes - 1, 2),
        ):
            with expect_error(TransferSizeError, f"[{start}, +{size}) of {name}"):
                read_range(store, name, start, size)
        expect(read_range(store, "object", 0, 100), pattern(100), "all of it")

    def test_tails(self, store: Store) -> None:
        """The last bytes of an object and its size."""
        for name, content in self.readable(store).items():
            for size in (0, 1, len(content), len(content) + 1):
                wanted = content[len(content) - min(size, len(content)) :]
                expect(store.get_tail(name, size) == (wanted, len(content)), True, f"tail of {size} of {name!r}")

    def test_many_threads_at_once(self, store: Store) -> None:
        """Each with its own range of the same object."""
        content = self.contents()[_LARGE]

        def work(number: int) -> None:
            for turn in range(4):
                start = (number * 7919 + turn * 104_729) % (len(content) - 1000)
                expect(read_range(store, _LARGE, start, 1000), content[start : start + 1000], f"range at {start}")
                expect(store.get("object"), pattern(100), "an object")

        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(work, range(_THREADS)))

    # -- what is not there

    def test_what_is_absent_is_not_found(self, store: Store) -> None:
        """By one kind of error, also below an object."""
        for name in ("absent", "dir/absent", "absent/too", "object/below", "obj", "object "):
            expect(store.exists(name), False, name)
            for call in (
                partial(store.head, name),
                partial(store.get, name),
                partial(store.get_tail, name, 1),
                partial(read_range, store, name, 0, 1),
            ):
                with expect_error(ObjectNotFoundError, name):
                    call()

    def test_names_that_lead_elsewhere_are_refused(self, store: Store) -> None:
        """Absolute names, dots, and what the client would take for syntax."""
        elsewhere = [f"a{mark}b" for mark in store.capabilities.refused_characters]
        for name in ("/object", "dir//large", "../object", "dir/../../object", "./object", "dir/..", *elsewhere):
            for call in (partial(store.get, name), partial(store.head, name), partial(store.put, name, [b"x"])):
                with expect_error(ConfigError, f"name {name!r}"):
                    call()

    def test_a_listing_is_whole_or_refused(self, store: Store) -> None:
        """As the store declares: never a part of what is there."""
        if not store.capabilities.listable:
            for call in (lambda: list(store.list()), lambda: list(store.list_directories("dir"))):
                with expect_error(UnsupportedOperationError, "listing"):
                    call()
            return
        wanted = {name: len(content) for name, content in self.contents().items()}
        for prefix in ("", "dir", "deep/er", "absent", "object"):
            found = {info.path: info.size_bytes for info in store.list(prefix)}
            below = {name: size for name, size in wanted.items() if not prefix or name.startswith(f"{prefix}/")}
            expect(found, below, f"listing of {prefix!r}")
        expect(sorted(store.list_directories()), ["deep", "dir"], "directories")
        expect(list(store.list_directories("dir")), [], "directories in one that has none")

    # -- what can't be done

    def test_nothing_is_written_or_deleted(self, store: Store) -> None:
        """It is declared, refused each time by one kind of error, and leaves all as it is."""
        expect(store.capabilities.writable, False, "declared as writable")
        for name in ("object", "new", "dir/new", "newdir/new", _LARGE):
            calls: dict[str, Callable[[], object]] = {
                "put": partial(store.put, name, [b"x"]),
                "conditional put": partial(store.put, name, [b"x"], if_absent=True),
                "put of nothing": partial(store.put, name, []),
                "sink": partial(store.open_sink, name, 1000),
                "empty sink": partial(store.open_sink, name, 0),
                "deletion": partial(store.delete, [name]),
                "deletions": partial(store.delete, iter(["absent", name])),
            }
            for verb, call in calls.items():
                with expect_error(UnsupportedOperationError, f"{verb} of {name!r}"):
                    call()
        other = self.reopen(store)
        for name, content in self.readable(store).items():
            expect(other.get(name) == content, True, f"content of {name!r} afterwards")
        for name in ("new", "dir/new", "newdir/new"):
            expect(other.exists(name), False, f"{name!r} afterwards")

    # -- processes

    def test_a_spawned_process_opens_the_pickled_location(self, store: Store) -> None:
        """URL and options suffice."""
        run_child(multiprocessing.get_context("spawn"), _visit_location, pickle.dumps(store.location))

    def test_a_forked_process_uses_an_open_store(self, store: Store) -> None:
        """It opens anew; the parent's connections stay the parent's."""
        expect(store.get("object"), pattern(100), "content")
        if "fork" in multiprocessing.get_all_start_methods():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # a fork with threads is what is tested
                run_child(multiprocessing.get_context("fork"), _visit, store)
        expect(store.get("object"), pattern(100), "content after the child")

    def test_a_store_survives_pickling(self, store: Store) -> None:
        """As its location and settings."""
        copy = pickle.loads(pickle.dumps(store))
        expect(copy.location, store.location, "location")
        expect(copy.get("object"), pattern(100), "content")

    def test_close_can_be_repeated(self, store: Store) -> None:
        """And the store is of no use afterwards, or opens again; it never hangs."""
        other = self.reopen(store)
        expect(other.get("object"), pattern(100), "content")
        other.close()
        other.close()
        with contextlib.suppress(DcpfsError):
            other.get("object")


def _visit(store: Store) -> None:
    expect(store.get("object"), pattern(100), "content in the child")
    expect(read_range(store, "object", 90, 10), pattern(100)[90:], "range in the child")


def _visit_location(location: bytes) -> None:
    opened: Location = pickle.loads(location)
    _visit(open_store(opened))
