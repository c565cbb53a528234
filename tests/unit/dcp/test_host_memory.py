"""Tensor memory as bytes, exactly, and device tensors through a bounded ring of host buffers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from dcpfs.dcp.host_memory import HostBuffer, HostStaging, flat_bytes, tensor_bytes, to_host
from dcpfs.dcp.transfer import ByteBudget, Task, run_tasks

DEADLINE_SECONDS = 60.0


def _is_storable(dtype: torch.dtype) -> bool:
    """Not the quantized ones, which are refused elsewhere, nor the bit-packed ones, which only have a name."""
    try:
        torch.zeros(16, dtype=torch.uint8).view(dtype)
    except (RuntimeError, TypeError):
        return False
    return not str(dtype).startswith(("torch.q", "torch.bits"))


DTYPES = sorted(
    {each for each in vars(torch).values() if isinstance(each, torch.dtype) and _is_storable(each)}, key=str
)


def random_tensor(dtype: torch.dtype, count: int) -> tuple[torch.Tensor, bytes]:
    """A flat tensor of any bit patterns (NaNs with payloads among them), and its bytes."""
    item_bytes = torch.empty(0, dtype=dtype).element_size()
    high = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, high, (count * item_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))
    return raw.clone().view(dtype), bytes(raw.tolist())


def content(tensor: torch.Tensor) -> bytes:
    """A copy of a tensor's bytes, made while the argument keeps the tensor alive: a view does not."""
    return bytes(tensor_bytes(tensor))


def test_the_dtypes_that_dcp_holds_are_all_tried() -> None:
    wanted = {torch.bool, torch.bfloat16, torch.complex32, torch.complex128, torch.uint16, torch.uint32, torch.uint64}
    wanted |= {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2}
    assert wanted <= set(DTYPES)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_case_28_the_bytes_of_every_dtype(dtype: torch.dtype) -> None:
    tensor, raw = random_tensor(dtype, 12)
    view = tensor_bytes(tensor)
    assert (view.format, view.ndim, view.readonly, view.nbytes) == ("B", 1, False, len(raw))
    assert bytes(view) == raw
    assert content(tensor.reshape(3, 4)[1:]) == raw[len(raw) // 3 :]
    assert content(flat_bytes(tensor)) == raw
    view[:] = bytes(len(raw))
    assert content(tensor) == bytes(len(raw))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_case_28_a_transpose_of_every_dtype_becomes_row_major_bit_by_bit(dtype: torch.dtype) -> None:
    tensor, raw = random_tensor(dtype, 12)
    item_bytes = tensor.element_size()
    items = [raw[start : start + item_bytes] for start in range(0, len(raw), item_bytes)]
    transposed = tensor.reshape(3, 4).t()
    wanted = b"".join(items[row * 4 + column] for column in range(4) for row in range(3))
    host = to_host(transposed)
    assert (host.dtype, host.shape, host.stride()) == (dtype, (4, 3), (3, 1))
    assert content(host) == wanted
    assert content(flat_bytes(transposed)) == wanted
    assert content(to_host(tensor[::3])) == b"".join(items[::3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.float8_e4m3fn, torch.complex128])
def test_0_dim_and_empty_tensors(dtype: torch.dtype) -> None:
    tensor, raw = random_tensor(dtype, 1)
    assert content(tensor.reshape(())) == raw
    assert content(to_host(tensor.reshape(()))) == raw
    assert flat_bytes(tensor.reshape(())).shape == (len(raw),)
    for shape in ((0,), (0, 3), (3, 0, 2)):
        empty = torch.empty(shape, dtype=dtype)
        assert tensor_bytes(empty).nbytes == 0
        assert to_host(empty).shape == shape
        assert flat_bytes(empty).shape == (0,)


def test_the_view_is_the_memory_itself() -> None:
    base = torch.zeros(1000, dtype=torch.int16)
    part = base[10:20]
    tensor_bytes(part)[:4] = b"\x01\x00\x02\x00"
    assert base[9:13].tolist() == [0, 1, 2, 0]
    parameter = torch.nn.Parameter(torch.ones(3))
    assert content(parameter) == content(torch.ones(3))


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.zeros(3, 4).t(), "not contiguous"),
        (torch.zeros(8)[::2], "not contiguous"),
        (torch.zeros(1).expand(4), "not contiguous"),
        (torch.zeros(4, dtype=torch.complex64).conj(), "resolve it first"),
        (torch._neg_view(torch.zeros(4)), "resolve it first"),
        (torch.zeros(4, device="meta"), "on meta"),
        (torch.eye(3).to_sparse(), "torch.sparse_coo"),
    ],
)
def test_what_is_not_its_own_plain_memory_is_refused(tensor: torch.Tensor, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        tensor_bytes(tensor)


def test_lazy_conjugates_and_negatives_are_resolved() -> None:
    tensor = torch.complex(torch.tensor([1.0, -2.0]), torch.tensor([3.0, 4.0]))
    for lazy in (tensor.conj(), tensor.conj().imag, torch._neg_view(tensor.real), tensor.conj().reshape(2, 1).t()):
        assert lazy.is_conj() or lazy.is_neg()
        host = to_host(lazy)
        assert not host.is_conj()
        assert not host.is_neg()
        assert torch.equal(host, lazy)
        wanted = content(torch.empty(lazy.shape, dtype=lazy.dtype).copy_(lazy))
        assert content(host) == content(flat_bytes(lazy)) == wanted


def test_nothing_is_copied_that_need_not_be() -> None:
    tensor = torch.ones(4, 5, requires_grad=True)
    host = to_host(tensor)
    assert host.data_ptr() == flat_bytes(tensor).data_ptr() == tensor.data_ptr()
    assert not host.requires_grad
    assert to_host(tensor.detach().t()).data_ptr() != tensor.data_ptr()


# -- the ring of host buffers; on the CPU the copies are synchronous, the rest is the same


@pytest.fixture
def staging() -> HostStaging:
    return HostStaging(torch.device("cpu"), buffer_bytes=16, buffers=2)


def test_buffers_are_made_when_needed_and_reused(staging: HostStaging) -> None:
    assert (staging.made, staging.pinned, staging.stream) == (0, False, None)
    first = staging.acquire()
    assert staging.made == 1
    first.release()
    assert staging.acquire() is first
    second = staging.acquire()
    assert second is not first
    second.release()
    first.release()
    for _ in range(10):
        staging.acquire().release()
    assert staging.made == 2


def test_a_buffer_shows_what_was_copied_in(staging: HostStaging) -> None:
    buffer = staging.acquire()
    source = torch.arange(10, dtype=torch.uint8)
    buffer.copy_in(0, source)
    buffer.copy_in(10, source[:3])
    source.zero_()
    assert bytes(buffer.view()) == bytes([*range(10), 0, 1, 2])
    buffer.copy_in(4, torch.full((2,), 99, dtype=torch.uint8))
    assert bytes(buffer.view())[3:7] == bytes([3, 99, 99, 6])
    with pytest.raises(ValueError, match="4 bytes at 13 do not fit a buffer of 16"):
        buffer.copy_in(13, torch.zeros(4, dtype=torch.uint8))
    buffer.release()
    again = staging.acquire()
    assert again.view().nbytes == 0
    again.copy_in(0, torch.zeros(1, dtype=torch.uint8))
    assert bytes(again.view()) == b"\0"


def test_wrong_sizes_are_refused() -> None:
    for buffer_bytes, buffers in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match=f"not {buffer_bytes} and {buffers}"):
            HostStaging(torch.device("cpu"), buffer_bytes=buffer_bytes, buffers=buffers)


def test_who_finds_no_free_buffer_waits_for_one(staging: HostStaging) -> None:
    held = [staging.acquire(), staging.acquire()]
    got = threading.Event()

    def take() -> None:
        staging.acquire().release()
        got.set()

    waiters = [threading.Thread(target=take) for _ in range(3)]
    for waiter in waiters:
        waiter.start()
    assert not got.is_set()
    held.pop().release()
    for waiter in waiters:
        waiter.join(DEADLINE_SECONDS)
        assert not waiter.is_alive()
    assert staging.made == 2


def test_a_failed_allocation_gives_its_place_back(staging: HostStaging, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> torch.Tensor:
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(staging, "_allocate", fail)
        for _ in range(3):
            with pytest.raises(MemoryError, match="no memory"):
                staging.acquire()
    assert staging.made == 0
    staging.acquire()
    staging.acquire()
    assert staging.made == 2


def test_case_62_many_tensors_pass_through_few_buffers() -> None:
    _pass_through(torch.device("cpu"))


def test_case_56_without_an_accelerator_plain_memory_is_used_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device, so page-locking succeeds")
    caplog.set_level(logging.INFO, "dcpfs.dcp.host_memory")
    staging = HostStaging(torch.device("cuda"), buffer_bytes=16, buffers=3)
    buffers = [staging.acquire() for _ in range(3)]
    assert not staging.pinned
    buffers[2].copy_in(0, torch.arange(5, dtype=torch.uint8))
    assert bytes(buffers[2].view()) == bytes(range(5))
    own = [record for record in caplog.records if record.name == "dcpfs.dcp.host_memory"]
    assert [record.levelname for record in own] == ["INFO"]
    assert "page-locked host memory is not available" in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; the CPU tests cover the same logic")
def test_device_tensors_pass_through_page_locked_buffers() -> None:
    device = torch.device("cuda")
    assert HostStaging(device, buffer_bytes=16, buffers=1).stream is not None
    _pass_through(device)
    for dtype in DTYPES:
        tensor, raw = random_tensor(dtype, 12)
        assert content(to_host(tensor.to(device))) == raw
        assert content(flat_bytes(tensor.to(device)).cpu()) == raw


def _pass_through(device: torch.device) -> None:
    """40 tensors, overwritten right after their copy is queued, through 3 buffers and 4 threads."""
    size_bytes = 1 << 16
    staging = HostStaging(device, buffer_bytes=size_bytes, buffers=3)
    results: dict[int, bytes] = {}
    source = torch.zeros(size_bytes, dtype=torch.uint8, device=device)

    def use(number: int, buffer: HostBuffer) -> None:
        results[number] = bytes(buffer.view())
        buffer.release()

    def tasks() -> Iterator[Task]:
        for number in range(40):
            source.fill_(number)
            buffer = staging.acquire()
            buffer.copy_in(0, source)
            yield Task(0, partial(use, number, buffer), buffer.release)

    run_tasks(tasks(), concurrency=4, budget=ByteBudget(1))
    assert [results[number] for number in range(40)] == [bytes([number]) * size_bytes for number in range(40)]
    assert 1 <= staging.made <= 3
