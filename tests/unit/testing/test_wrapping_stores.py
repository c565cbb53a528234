"""The recording and the fault-injecting store: what they note, where they fail, and that they are stores otherwise."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from dcpfs.config import TransferConfig
from dcpfs.errors import TransferSizeError
from dcpfs.storage.fsspec_store import FsspecStore
from dcpfs.storage.location import Location
from dcpfs.storage.store import Store
from dcpfs.testing.conformance import StoreConformance, pattern, write_parts
from dcpfs.testing.faulty import Aftermath, FaultPlan, FaultyStore, InjectedError, Moment
from dcpfs.testing.recording import RecordedCall, RecordingStore

PART = 64 << 10


def memory_store() -> FsspecStore:
    return FsspecStore(Location(f"memory://{uuid.uuid4().hex}"), transfer=TransferConfig(part_bytes=PART))


@pytest.mark.parametrize("store", [RecordingStore, FaultyStore], indirect=True)
class TestWrapped(StoreConformance):
    shared_between_processes = False

    @pytest.fixture
    def store(self, request: pytest.FixtureRequest) -> Iterator[Store]:
        store: Store = request.param(memory_store())
        assert isinstance(store, Store)
        yield store
        store.close()

    def test_a_store_survives_pickling(self, store: Store) -> None:
        """A wrapper is bound to its process: it counts."""


def test_calls_are_recorded() -> None:
    store = RecordingStore(memory_store())
    store.put("a", [b"12", b"345"])
    store.get("a")
    store.get_tail("a", 2)
    store.read_into("a", 1, [memoryview(bytearray(3))])
    store.head("a")
    sink = store.open_sink("b", 2 * PART)
    write_parts(sink, pattern(2 * PART))
    sink.commit()
    store.open_sink("c", 1).abort()
    store.exists("c")
    list(store.list())
    list(store.list_directories())
    store.delete(["a", "b"])
    assert store.calls == [
        RecordedCall("put", "a", 0, 5),
        RecordedCall("get", "a", 0, 5),
        RecordedCall("get_tail", "a", 3, 2),
        RecordedCall("read_into", "a", 1, 3),
        RecordedCall("head", "a"),
        RecordedCall("open_sink", "b", 0, 2 * PART),
        RecordedCall("write_part", "b", 0, PART),
        RecordedCall("write_part", "b", PART, PART),
        RecordedCall("commit", "b"),
        RecordedCall("open_sink", "c", 0, 1),
        RecordedCall("abort", "c"),
        RecordedCall("exists", "c"),
        RecordedCall("list", ""),
        RecordedCall("list_directories", ""),
        RecordedCall("delete", "a"),
        RecordedCall("delete", "b"),
    ]
    assert (store.bytes_read, store.bytes_written) == (10, 5 + 2 * PART)
    assert store.verbs["write_part"] == 2
    assert store.paths("delete") == ["a", "b"]
    store.clear()
    assert store.calls == []


def save(store: Store) -> None:
    """Three objects and a deletion, as a small save would."""
    store.put("first", [b"1"])
    sink = store.open_sink("second", 2 * PART)
    try:
        write_parts(sink, pattern(2 * PART))
        sink.commit()
    except BaseException:
        sink.abort()
        raise
    store.put("third", [b"3"])
    store.delete(["first"])


STATES: list[set[str]] = [
    set(),
    {"first"},
    {"first"},
    {"first"},
    {"first", "second"},
    {"first", "second", "third"},
    {"second", "third"},
]
"""What is there after so many mutations of `save`."""


def test_mutations_are_counted() -> None:
    store = FaultyStore(memory_store())
    save(store)
    assert store.mutations == len(STATES) - 1
    assert not store.reached.is_set()


@pytest.mark.parametrize("aftermath", Aftermath)
@pytest.mark.parametrize("moment", Moment)
@pytest.mark.parametrize("number", range(1, len(STATES)))
def test_the_nth_mutation_fails_before_or_after_it_takes_effect(
    number: int, moment: Moment, aftermath: Aftermath
) -> None:
    inner = memory_store()
    store = FaultyStore(inner, FaultPlan(mutation=number, moment=moment, aftermath=aftermath))
    with pytest.raises(InjectedError, match="as planned"):
        save(store)
    assert store.reached.is_set()
    assert {info.path for info in inner.list()} == STATES[number if moment is Moment.AFTER else number - 1]
    if aftermath is Aftermath.DEAD:
        for call in (lambda: store.put("x", [b""]), lambda: store.get("second"), lambda: store.exists("x")):
            with pytest.raises(InjectedError, match="dead"):
                call()
    else:
        store.put("x", [b""])


def test_reads_fail_flip_and_end_early() -> None:
    inner = memory_store()
    inner.put("x", [pattern(100)])
    store = FaultyStore(inner, FaultPlan(read=2, flipped_bits={"x": 50 * 8 + 3}))
    flipped = bytearray(pattern(100))
    flipped[50] ^= 1 << 3
    assert store.get("x") == flipped
    with pytest.raises(InjectedError):
        store.get("x")
    target = bytearray(30)
    store.read_into("x", 40, [memoryview(target)[:5], memoryview(target)[5:]])
    assert target == flipped[40:70]
    assert store.get_tail("x", 60) == (bytes(flipped[40:]), 100)
    assert store.reads == 4

    short = FaultyStore(inner, FaultPlan(shortened={"x": 80}))
    assert short.get("x") == pattern(100)[:80]
    assert short.head("x").size_bytes == 80
    assert short.get_tail("x", 10) == (pattern(100)[70:80], 80)
    assert [info.size_bytes for info in short.list()] == [80]
    with pytest.raises(TransferSizeError):
        short.read_into("x", 70, [memoryview(target)])


@pytest.mark.parametrize(
    ("plan", "call"),
    [
        (lambda event: FaultPlan(mutation=1, hang=event), lambda store: store.put("y", [b"y"])),
        (lambda event: FaultPlan(read=1, hang=event), lambda store: store.get("x")),
    ],
    ids=["mutation", "read"],
)
def test_a_call_hangs_until_it_is_let_go(
    plan: Callable[[threading.Event], FaultPlan], call: Callable[[Store], object]
) -> None:
    inner, let_go = memory_store(), threading.Event()
    inner.put("x", [b"x"])
    store = FaultyStore(inner, plan(let_go))
    with ThreadPoolExecutor(1) as pool:
        hanging = pool.submit(call, store)
        assert store.reached.wait(60)
        assert not hanging.done()
        let_go.set()
        hanging.result(60)
