"""Fetching boxes of stored tensors into memory, checked on arrival, with a store that is a dict."""

from __future__ import annotations

import random
import threading
import zlib
from collections.abc import Sequence
from typing import NoReturn

import pytest
import torch

from dcpfs.config import TransferConfig
from dcpfs.dcp.fetch import Fetch
from dcpfs.dcp.host_memory import tensor_bytes, to_host
from dcpfs.dcp.landing import TensorWant
from dcpfs.errors import CorruptCheckpointError, IncompleteCheckpointError
from dcpfs.format.index import EntryLocation
from tests.unit.dcp.bytes_store import BytesStore

_HEAD, _TAIL = 100, 30


class _File:
    """A data file under construction: entries with a head and a tail around each payload."""

    def __init__(self) -> None:
        self.data = bytearray()

    def add(self, tensor: torch.Tensor) -> EntryLocation:
        payload = bytes(tensor_bytes(to_host(tensor)))
        offset = len(self.data)
        self.data += b"h" * _HEAD + payload + b"t" * _TAIL
        size = _HEAD + len(payload) + _TAIL
        return EntryLocation("f", offset, size, _HEAD, zlib.crc32(payload))

    def store(self, **options: bool) -> BytesStore:
        return BytesStore({"f": bytes(self.data)}, **options)

    def fetch(self, store: BytesStore, *, verify: bool = True, transfer: TransferConfig | None = None) -> Fetch:
        return Fetch(
            store,
            transfer or TransferConfig(),
            verify=verify,
            file_sizes={"f": len(self.data)},
            decode=_refuse,
            undo_transforms=_refuse,
        )


def _refuse(*_: object) -> NoReturn:
    raise AssertionError("nothing here needs decoding")


def _want(key: str, tensor: torch.Tensor, location: EntryLocation, target: torch.Tensor) -> TensorWant:
    shape = tuple(tensor.shape)
    return TensorWant(key, tensor.dtype, shape, location, (0,) * len(shape), shape, target)


_DTYPES = [
    torch.bool,
    torch.int8,
    torch.uint16,
    torch.uint64,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float64,
    torch.complex64,
    torch.complex128,
]


@pytest.mark.parametrize("remote", [True, False])
@pytest.mark.parametrize("ranged", [True, False])
def test_case_28_whole_tensors_of_every_dtype_arrive_bit_for_bit(remote: bool, ranged: bool) -> None:
    file = _File()
    wants, pairs = [], []
    for number, dtype in enumerate(_DTYPES):
        for shape in [(), (0,), (3, 5), (70, 1000)]:
            count = torch.Size(shape).numel() * dtype.itemsize
            raw = torch.randint(0, 2, (count,), dtype=torch.uint8)
            tensor = raw.view(dtype).reshape(shape)
            target = torch.zeros_like(tensor)
            key = f"{number}{shape}"
            wants.append(_want(key, tensor, file.add(tensor), target))
            pairs.append((tensor, target))
    store = file.store(remote=remote, ranged_reads=ranged)
    fetch = file.fetch(store)
    for want in wants:
        fetch.add_tensor(want)
    fetch.run()
    for tensor, target in pairs:
        assert bytes(tensor_bytes(tensor)) == bytes(tensor_bytes(target))
    if not ranged:
        assert len(store.reads) == 1


@pytest.mark.parametrize("seed", range(12))
def test_boxes_into_any_kind_of_target(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    file = _File()
    file.add(torch.zeros(random.randrange(200), dtype=torch.uint8))
    jobs = []
    for number in range(12):
        shape = tuple(random.randint(1, 40) for _ in range(random.randint(0, 3)))
        tensor = torch.randint(0, 100, shape, dtype=random.choice([torch.int16, torch.int32])).to(
            random.choice([torch.float32, torch.int64, torch.complex64])
        )
        location = file.add(tensor)
        offsets = tuple(random.randrange(size) for size in shape)
        lengths = tuple(random.randint(1, size - o) for size, o in zip(shape, offsets, strict=True))
        kind = random.choice(["plain", "transposed", "spread", "conjugate", "wide"])
        target = torch.zeros(lengths, dtype=tensor.dtype)
        if kind == "transposed":
            target = torch.zeros(lengths[::-1], dtype=tensor.dtype).permute(tuple(range(len(lengths)))[::-1])
        elif kind == "spread" and lengths:
            target = torch.zeros((*lengths[:-1], 2 * lengths[-1]), dtype=tensor.dtype)[..., ::2]
        elif kind == "conjugate" and tensor.is_complex():
            target = torch.zeros(lengths, dtype=tensor.dtype).conj()
        elif kind == "wide" and tensor.dtype is torch.float32:
            target = torch.zeros(lengths, dtype=torch.float64)
        jobs.append((TensorWant(f"k{number}", tensor.dtype, shape, location, offsets, lengths, target), tensor))
    config = TransferConfig(read_bytes=64 << 10, coalesce_gap_bytes=random.choice([0, 64, 1 << 16]))
    fetch = file.fetch(file.store(), transfer=config)
    for want, _ in jobs:
        fetch.add_tensor(want)
    fetch.run()
    for want, tensor in jobs:
        box = tuple(slice(o, o + n) for o, n in zip(want.offsets, want.lengths, strict=True))
        assert torch.equal(want.target, tensor[box].to(want.target.dtype)), want.key


@pytest.mark.parametrize("size", [10, 2_000, 5_000_000])
@pytest.mark.parametrize("kind", ["plain", "spread"])
def test_case_113_a_flipped_bit_is_noticed(size: int, kind: str) -> None:
    file = _File()
    tensor = torch.randint(0, 255, (size,), dtype=torch.uint8)
    locations = [file.add(tensor), file.add(tensor + 1)]
    file.data[locations[1].offset_bytes + _HEAD + size // 2] ^= 4
    plain = kind == "plain"
    target = torch.zeros(size, dtype=torch.uint8) if plain else torch.zeros(2 * size, dtype=torch.uint8)[::2]
    fetch = file.fetch(file.store(), transfer=TransferConfig(read_bytes=1 << 20))
    fetch.add_tensor(_want("good", tensor, locations[0], torch.zeros_like(tensor)))
    fetch.add_tensor(_want("bad", tensor, locations[1], target))
    with pytest.raises(CorruptCheckpointError, match=r"'bad'.*checksum.*file 'f'.*already written") as caught:
        fetch.run()
    assert (caught.value.key, caught.value.file) == ("bad", "f")

    fetch = file.fetch(file.store(), verify=False)
    fetch.add_tensor(_want("bad", tensor, locations[1], target))
    fetch.run()


@pytest.mark.parametrize("cut", [1, _TAIL + 1, 50_000])
def test_case_113_a_short_file_is_noticed_even_where_nothing_is_missing(cut: int) -> None:
    file = _File()
    tensor = torch.zeros(40_000, dtype=torch.float32)
    first, _ = file.add(tensor), file.add(tensor)
    store = file.store()
    store.objects["f"] = store.objects["f"][:-cut]
    fetch = file.fetch(store)
    fetch.add_tensor(_want("first", tensor, first, tensor.clone()))
    with pytest.raises(CorruptCheckpointError, match=r"'first'.*'f'"):
        fetch.run()


def test_a_missing_file_is_named() -> None:
    file = _File()
    tensor = torch.zeros(4)
    location = file.add(tensor)
    fetch = file.fetch(BytesStore({}))
    fetch.add_tensor(_want("w", tensor, location, tensor.clone()))
    with pytest.raises(IncompleteCheckpointError, match=r"'w'.*'f' is missing.*nothing was written") as caught:
        fetch.run()
    assert caught.value.missing == ("f",)


def test_case_63_scratch_memory_stays_within_the_budget() -> None:
    file = _File()
    tensors = [torch.randint(0, 9, (300_000,), dtype=torch.uint8) for _ in range(64)]
    locations = [file.add(tensor) for tensor in tensors]
    fetch = file.fetch(file.store(), transfer=TransferConfig(budget_bytes=1 << 20, concurrency=8))
    targets = [torch.zeros(600_000, dtype=torch.uint8)[::2] for _ in tensors]
    for number, (tensor, location, target) in enumerate(zip(tensors, locations, targets, strict=True)):
        fetch.add_tensor(_want(f"k{number}", tensor, location, target))
    fetch.run()
    assert all(torch.equal(a, b) for a, b in zip(tensors, targets, strict=True))
    assert 0 < fetch.peak_scratch_bytes <= 1 << 20


def test_case_64_rows_of_a_tensor_cost_only_their_bytes() -> None:
    file = _File()
    tensor = torch.arange(4_000_000, dtype=torch.int32).reshape(4000, 1000)
    location = file.add(tensor)
    store = file.store()
    fetch = file.fetch(store)
    target = torch.zeros(500, 1000, dtype=torch.int32)
    fetch.add_tensor(TensorWant("w", tensor.dtype, (4000, 1000), location, (1000, 0), (500, 1000), target))
    fetch.run()
    assert torch.equal(target, tensor[1000:1500])
    assert sum(stop - start for _, start, stop in store.reads) == 2_000_000
    assert store.heads == ["f"]


class _MeetingStore(BytesStore):
    """Answers no read before four are under way."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__(objects)
        self.barrier = threading.Barrier(4, timeout=60)

    def read_into(self, path: str, start: int, buffers: Sequence[memoryview]) -> None:
        self.barrier.wait()
        super().read_into(path, start, buffers)


def test_cases_69_70_one_large_tensor_is_read_by_several_requests_at_once() -> None:
    file = _File()
    tensor = torch.randint(0, 255, (4_000_000,), dtype=torch.uint8)
    location = file.add(tensor)
    target = torch.zeros_like(tensor)
    transfer = TransferConfig(read_bytes=1_000_000, coalesce_gap_bytes=0, concurrency=4)
    fetch = file.fetch(_MeetingStore({"f": bytes(file.data)}), transfer=transfer)
    fetch.add_tensor(_want("w", tensor, location, target))
    fetch.run()
    assert torch.equal(target, tensor)
    assert fetch.totals.requests == 5  # four ranges and the size of the file
