"""Entries as ``torch.save`` writes them, read on a guess: right or wrong, what arrives is exact or an error."""

from __future__ import annotations

import io
import random

import pytest
import torch

from dcpfs.config import TransferConfig
from dcpfs.dcp.fetch import Fetch
from dcpfs.dcp.guess import guess_frame
from dcpfs.dcp.landing import TensorWant
from dcpfs.errors import CorruptCheckpointError
from dcpfs.format.entries import decode_tensor_entry
from dcpfs.format.frames import tensor_frame_sizes
from dcpfs.format.index import EntryLocation
from tests.unit.dcp.bytes_store import BytesStore

_ROWS, _COLUMNS = 600, 512


class _Entries:
    """A data file of another writer."""

    def __init__(self) -> None:
        self.data = bytearray()

    def add(self, tensor: torch.Tensor) -> EntryLocation:
        stream = io.BytesIO()
        torch.save(tensor, stream)
        offset = len(self.data)
        self.data += stream.getbuffer()
        return EntryLocation("f", offset, len(self.data) - offset)

    def load(self, *wants: TensorWant, verify: bool = True, **options: bool) -> tuple[Fetch, BytesStore]:
        store = BytesStore({"f": bytes(self.data)}, **options)
        fetch = Fetch(
            store,
            TransferConfig(),
            verify=verify,
            file_sizes={"f": len(self.data)},
            decode=lambda source, want: decode_tensor_entry(source, key=want.key),
            undo_transforms=lambda *_: b"",
        )
        for want in wants:
            fetch.add_tensor(want)
        fetch.run()
        return fetch, store


def _want(
    location: EntryLocation, like: torch.Tensor, target: torch.Tensor | None = None, key: str = "w"
) -> TensorWant:
    shape = tuple(like.shape)
    if target is None:
        target = torch.zeros(shape, dtype=like.dtype)
    return TensorWant(key, like.dtype, shape, location, (0,) * len(shape), shape, target)


def _assert_exact(found: torch.Tensor, expected: torch.Tensor) -> None:
    a, b = (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t.resolve_neg() for t in (found, expected))
    assert torch.equal(a, b)


def _tensors() -> dict[str, torch.Tensor]:
    """All above 1 MiB; of most the length of the entry says nothing of how they lie in it."""
    torch.manual_seed(1)
    plain = torch.randn(_ROWS, _COLUMNS)
    complex_ = torch.randn(400, 400, dtype=torch.complex64)
    raw = torch.randint(0, 255, (1_500_003,), dtype=torch.uint8)
    return {
        "plain": plain,
        "transposed": torch.randn(_COLUMNS, _ROWS).t(),
        "permuted": torch.randn(64, 96, 80).permute(2, 0, 1),
        "channels_last": torch.randn(8, 16, 64, 64).to(memory_format=torch.channels_last),
        "offset": raw[3:],
        "offset_by_one": torch.randint(0, 255, (1_500_004,), dtype=torch.uint8)[1:],
        "strided": torch.randn(700_000)[::2],
        "conjugate": complex_.conj(),
        "conjugate_transposed": complex_.t().conj(),
        "negative": complex_.conj().imag,
        "parameter": torch.nn.Parameter(torch.randn(_ROWS, _COLUMNS)),
        "bfloat16": torch.randn(1500, _COLUMNS).bfloat16(),
    }


@pytest.mark.parametrize("remote", [True, False])
@pytest.mark.parametrize("verify", [True, False])
def test_every_layout_arrives_exactly(remote: bool, verify: bool) -> None:
    entries, tensors = _Entries(), _tensors()
    wants = {key: _want(entries.add(tensor), tensor, key=key) for key, tensor in tensors.items()}
    assert {key for key, want in wants.items() if guess_frame(want)} >= {"plain", "transposed", "offset_by_one"}
    entries.load(*wants.values(), verify=verify, remote=remote)
    for key, tensor in tensors.items():
        _assert_exact(wants[key].target, tensor.detach())


@pytest.mark.parametrize("kind", ["plain", "transposed"])
@pytest.mark.parametrize("target", ["strided", "transposed", "cast"])
def test_into_targets_that_need_a_copy(kind: str, target: str) -> None:
    entries, tensor = _Entries(), _tensors()[kind]
    rows, columns = tensor.shape
    memory = {
        "strided": torch.zeros(rows, 2 * columns)[:, ::2],
        "transposed": torch.zeros(columns, rows).t(),
        "cast": torch.zeros(rows, columns, dtype=torch.float64),
    }[target]
    entries.load(_want(entries.add(tensor), tensor, memory))
    assert torch.equal(memory, tensor.to(memory.dtype))


@pytest.mark.parametrize("kind", ["plain", "transposed"])
def test_a_store_without_ranges(kind: str) -> None:
    entries, tensor = _Entries(), _tensors()[kind]
    want = _want(entries.add(tensor), tensor)
    entries.load(want, ranged_reads=False)
    _assert_exact(want.target, tensor)


def test_case_70_no_request_for_the_headers_of_large_entries() -> None:
    entries = _Entries()
    tensors = [torch.full((300_000,), float(n)) for n in range(60)]
    wants = [_want(entries.add(tensor), tensor, key=f"k{n}") for n, tensor in enumerate(tensors)]
    fetch, store = entries.load(*wants)
    assert all(torch.equal(want.target, tensor) for want, tensor in zip(wants, tensors, strict=True))
    assert len(store.reads) == fetch.totals.requests <= 34
    assert fetch.totals.moved_bytes <= 1.01 * fetch.totals.needed_bytes


def test_only_what_was_guessed_wrong_is_read_again() -> None:
    entries = _Entries()
    tensors = [torch.randn(_ROWS, _COLUMNS) for _ in range(40)]
    tensors[7] = torch.randn(_COLUMNS, _ROWS).t()
    wants = [_want(entries.add(tensor), tensor, key=f"k{n}") for n, tensor in enumerate(tensors)]
    fetch, store = entries.load(*wants)
    assert all(torch.equal(want.target, tensor) for want, tensor in zip(wants, tensors, strict=True))
    assert len(store.reads) <= 36
    assert fetch.totals.moved_bytes <= 1.01 * (fetch.totals.needed_bytes + tensors[7].nbytes)


def test_headers_of_slices_come_together_and_nothing_twice() -> None:
    """Slices of entries whose headers lie near each other: one request for all headers, not one each."""
    entries = _Entries()
    tensors = [torch.arange(8_000.0).reshape(100, 80) + n for n in range(50)]
    wants = []
    for number, tensor in enumerate(tensors):
        shape, target = tuple(tensor.shape), torch.zeros(1, 80)
        wants.append(TensorWant(f"k{number}", tensor.dtype, shape, entries.add(tensor), (50, 0), (1, 80), target))
    fetch, store = entries.load(*wants)
    assert all(torch.equal(want.target, tensor[50:51]) for want, tensor in zip(wants, tensors, strict=True))
    assert len(store.reads) <= 6
    assert fetch.totals.requests == len(store.reads) + len(store.heads)


def test_a_slice_of_a_large_entry_moves_its_share() -> None:
    entries = _Entries()
    tensor = torch.randn(4000, 1000).t()  # stored with strides (1, 1000): a guess would move it all twice
    target = torch.zeros(100, 4000)
    entries.load(TensorWant("w", tensor.dtype, (1000, 4000), entries.add(tensor), (0, 0), (100, 4000), target))
    assert torch.equal(target, tensor[:100])


# --- damage


def _flip(data: bytearray, at: int) -> None:
    data[at] ^= 1 << (at % 8)


@pytest.mark.parametrize("size", [100, 1_500_000])
@pytest.mark.parametrize("where", ["pickle", "payload", "crc", "mark", "length"])
@pytest.mark.parametrize("kind", ["plain", "transposed"])
def test_case_113_damage_is_noticed(size: int, where: str, kind: str) -> None:
    tensor = torch.randint(0, 255, (size // 50, 50), dtype=torch.uint8)
    if kind == "transposed":
        tensor = tensor.t()
    entries = _Entries()
    entries.add(torch.ones(3))
    location = entries.add(tensor)
    sizes = tensor_frame_sizes(tensor.dtype, tuple(tensor.shape))
    tail = location.length_bytes - sizes.tail_bytes
    at = {
        "pickle": 64 + 100,
        "payload": sizes.head_bytes + size // 2,
        "mark": tail + 1,
        "crc": tail + 5,
        "length": tail + 9,
    }[where]
    _flip(entries.data, location.offset_bytes + at)
    with pytest.raises(CorruptCheckpointError, match=r"'w'.*file 'f'") as caught:
        entries.load(_want(location, tensor))
    assert (caught.value.key, caught.value.file) == ("w", "f")


@pytest.mark.parametrize("kind", ["plain", "transposed"])
def test_case_113_no_damage_to_head_or_tail_gives_wrong_values(kind: str) -> None:
    random.seed(3)
    tensor = torch.randint(0, 255, (1_100, 1_000), dtype=torch.uint8)
    if kind == "transposed":
        tensor = tensor.t()
    entries = _Entries()
    location = entries.add(tensor)
    sizes = tensor_frame_sizes(tensor.dtype, tuple(tensor.shape))
    places = [*range(sizes.head_bytes), *range(location.length_bytes - sizes.tail_bytes, location.length_bytes)]
    for at in sorted(random.sample(places, 60)):
        _flip(entries.data, at)
        want = _want(location, tensor)
        try:
            entries.load(want)
        except CorruptCheckpointError:
            pass
        else:
            assert torch.equal(want.target, tensor), at
        _flip(entries.data, at)


def test_another_tensor_than_the_metadata_says() -> None:
    entries = _Entries()
    location = entries.add(torch.zeros(1000, 500))
    with pytest.raises(CorruptCheckpointError, match=r"shape \(1000, 500\) instead of .*shape \(500, 1000\)"):
        entries.load(_want(location, torch.zeros(500, 1000)))


def test_an_entry_without_checksums() -> None:
    torch.serialization.set_crc32_options(False)
    try:
        entries, tensor = _Entries(), torch.randn(_ROWS, _COLUMNS)
        want = _want(entries.add(tensor), tensor)
    finally:
        torch.serialization.set_crc32_options(True)
    entries.load(want)
    assert torch.equal(want.target, tensor)
