"""Uploading: every byte in place, within the budget, all files or none."""

from __future__ import annotations

import io
import random
import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcpfs.dcp import upload
from dcpfs.dcp.payload import BytesPayload, Payload, TensorPayload
from dcpfs.dcp.placement import place
from dcpfs.dcp.transfer import ByteBudget
from dcpfs.dcp.upload import Uploader
from dcpfs.storage.store import PartMemory
from tests.properties.bounds import examples
from tests.unit.dcp.memory_store import MemoryStore


def _entry(value: torch.Tensor | bytes) -> bytes:
    """What torch would write for it."""
    if isinstance(value, bytes):
        return value
    buffer = io.BytesIO()
    torch.save(torch.empty(value.shape, dtype=value.dtype).copy_(value), buffer)
    return buffer.getvalue()


def _upload(
    store: MemoryStore,
    values: list[torch.Tensor | bytes],
    *,
    files: int = 1,
    budget: ByteBudget | None = None,
    concurrency: int = 4,
    makes_tensors: bool = False,
) -> None:
    payloads: list[Payload] = [
        BytesPayload(memoryview(value)) if isinstance(value, bytes) else TensorPayload(value.dtype, value.shape)
        for value in values
    ]
    caller = threading.current_thread()

    def resolve(number: int) -> torch.Tensor:
        assert threading.current_thread() is caller, "planners are asked in the calling thread only"
        value = values[number]
        assert isinstance(value, torch.Tensor)
        return value.clone() if makes_tensors else value

    layouts = place([payload.size_bytes for payload in payloads], files=files)
    uploader = Uploader(
        store,
        payloads,
        resolve,
        makes_tensors=makes_tensors,
        concurrency=concurrency,
        budget=budget or ByteBudget(1 << 20),
    )
    named = [(f"__0_{number}.distcp", layout) for number, layout in enumerate(layouts)]
    report = uploader.upload(named)
    assert report.files == len(named)
    for name, layout in named:
        expected = b"".join(_entry(values[number]) for number in layout.numbers)
        assert store.objects[name] == expected
    assert not store.open_sinks


def _values(seed: int, largest: int) -> list[torch.Tensor | bytes]:
    rng = random.Random(seed)
    values: list[torch.Tensor | bytes] = []
    for _ in range(rng.randint(1, 12)):
        kind = rng.randrange(6)
        size = rng.choice([1, 10, 300, largest])
        if kind == 0:
            values.append(rng.randbytes(rng.randrange(200)))
        elif kind == 1:
            values.append(torch.randn(size, 2).t())
        elif kind == 2:
            values.append(torch.randn(size, dtype=torch.complex64).conj())
        elif kind == 3:
            values.append(torch.randn(0, size))
        else:
            values.append(torch.randn(size))
    return values


@examples(60)
@given(
    seed=st.integers(0, 10_000),
    part_bytes=st.sampled_from([300, 1000, 5000, 1 << 16]),
    budget_bytes=st.sampled_from([1, 2000, 20_000, 1 << 20]),
    files=st.integers(1, 3),
    concurrency=st.sampled_from([1, 2, 5]),
    parallel_parts=st.booleans(),
    makes_tensors=st.booleans(),
)
def test_any_mix_arrives_as_torch_would_write_it(
    seed: int,
    part_bytes: int,
    budget_bytes: int,
    files: int,
    concurrency: int,
    parallel_parts: bool,
    makes_tensors: bool,
) -> None:
    torch.manual_seed(seed)
    store = MemoryStore(part_bytes=part_bytes, parallel_parts=parallel_parts)
    budget = ByteBudget(budget_bytes)
    _upload(
        store,
        _values(seed, 3000),
        files=files,
        budget=budget,
        concurrency=concurrency,
        makes_tensors=makes_tensors,
    )
    assert budget.in_flight_bytes == 0


def test_case_66_what_is_copied_stays_within_the_budget() -> None:
    values: list[torch.Tensor | bytes] = [torch.randn(50, 100).t() for _ in range(20)]  # 20 kB each, copied
    budget = ByteBudget(100_000)
    _upload(MemoryStore(part_bytes=8000), values, budget=budget)
    assert 20_000 <= budget.peak_bytes <= 100_000


def test_plain_tensors_take_no_budget() -> None:
    budget = ByteBudget(1)
    _upload(MemoryStore(part_bytes=100_000), [torch.randn(200_000)], budget=budget)
    assert budget.peak_bytes < 2000  # the frame


@pytest.mark.parametrize("verb", ["open", "part", "commit"])
@pytest.mark.parametrize("parallel_parts", [True, False])
@pytest.mark.parametrize("makes_tensors", [True, False])
def test_case_1_and_31_any_failure_is_raised_and_leaves_nothing(
    verb: str, parallel_parts: bool, makes_tensors: bool
) -> None:
    values: list[torch.Tensor | bytes] = [torch.randn(1000 + n) for n in range(40)]
    for fail_at in (1, 2, 3, 7):
        seen = 0

        def fail(called: str, path: str, at: int = fail_at) -> None:
            nonlocal seen
            if called == verb:
                seen += 1
                if seen == min(at, 3 if verb != "part" else at):
                    raise OSError(f"{verb} of {path} failed")

        store = MemoryStore(part_bytes=9000, parallel_parts=parallel_parts, hook=fail)
        with pytest.raises(OSError, match=f"{verb} of"):
            _upload(store, values, files=3, makes_tensors=makes_tensors, budget=ByteBudget(20_000))
        assert store.objects == {}
        assert store.open_sinks == set()


@pytest.mark.parametrize(
    ("attached", "makes_tensors", "budget_bytes", "memory"),
    [
        (3, False, 1 << 20, PartMemory.IN_PLACE),
        (3, False, 1500, PartMemory.COPIED),  # joined small buffers alone would wait for each other
        (2, False, 1 << 20, PartMemory.COPIED),
        (3, True, 1 << 20, PartMemory.COPIED),
    ],
)
def test_the_store_learns_whether_parts_take_memory(
    attached: int, makes_tensors: bool, budget_bytes: int, memory: PartMemory
) -> None:
    values = [torch.randn(1 << 16), torch.randn(100), torch.randn(1 << 15)]
    payloads = [TensorPayload(value.dtype, value.shape) for value in values]
    for payload, value in zip(payloads[:attached], values, strict=False):
        assert payload.attach(value)
    store = MemoryStore(part_bytes=1 << 16)
    uploader = Uploader(
        store,
        payloads,
        lambda number: values[number],
        makes_tensors=makes_tensors,
        concurrency=4,
        budget=ByteBudget(budget_bytes),
    )
    uploader.upload([("f", place([payload.size_bytes for payload in payloads], files=1)[0])])
    assert store.sink_memory == {"f": memory}
    assert store.objects["f"] == b"".join(map(_entry, values))


def test_case_31_a_planner_that_fails_leaves_nothing() -> None:
    store = MemoryStore(part_bytes=1000)
    payloads: list[Payload] = [TensorPayload(torch.float32, torch.Size([1000])) for _ in range(8)]

    def resolve(number: int) -> torch.Tensor:
        if number == 5:
            raise ValueError("no such tensor")
        return torch.randn(1000)

    uploader = Uploader(store, payloads, resolve, makes_tensors=True, concurrency=4, budget=ByteBudget(5000))
    with pytest.raises(ValueError, match="no such tensor"):
        uploader.upload([("f", place([payload.size_bytes for payload in payloads], files=1)[0])])
    assert store.objects == {}
    assert store.open_sinks == set()


@pytest.mark.parametrize("parallel_parts", [True, False])
@pytest.mark.parametrize("budget_bytes", [1, 10_000, 1 << 20])
def test_device_tensors_pass_through_a_ring_of_host_buffers(
    parallel_parts: bool, budget_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "_is_on_host", lambda _: False)  # a CPU stand-in for a device
    for seed in range(30):
        torch.manual_seed(seed)
        budget = ByteBudget(budget_bytes)
        store = MemoryStore(part_bytes=1000, parallel_parts=parallel_parts)
        _upload(store, _values(seed, 3000), files=1 + seed % 3, budget=budget)
        assert budget.in_flight_bytes == 0


def test_progress_adds_up() -> None:
    store = MemoryStore(part_bytes=1000)
    values: list[Any] = [torch.randn(1000), torch.randn(10)]
    payloads: list[Payload] = [TensorPayload(value.dtype, value.shape) for value in values]
    told: list[int] = []
    uploader = Uploader(
        store,
        payloads,
        values.__getitem__,
        makes_tensors=False,
        concurrency=3,
        budget=ByteBudget(10_000),
        on_bytes=told.append,
    )
    report = uploader.upload([("f", place([payload.size_bytes for payload in payloads], files=1)[0])])
    assert sum(told) == report.bytes_written == len(store.objects["f"])
    assert report.requests == len(told)
