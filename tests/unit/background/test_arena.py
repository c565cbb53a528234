"""Where a state is copied to: values, and nobody reads or writes a slot too early."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from dcpfs.background import free_memory
from dcpfs.background.arena import Arena, cut_block, layout_of, size_of
from dcpfs.background.copying import CopyToHost, CudaCopier, HostCopier, Pair, copier_for, copy_value, pin_block
from dcpfs.errors import StorageFullError

pytestmark = pytest.mark.usefixtures("_memory_is_not_asked_for")


class LateCopy:
    """Copies when it is waited for, like a stream that has other things to do first."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self.pairs = list(pairs)
        self.waits = 0
        self.held = False

    def wait(self) -> None:
        self.waits += 1
        with torch.no_grad():
            for slot, tensor in self.pairs:
                copy_value(slot, tensor, non_blocking=False)
        self.pairs = []

    def hold_computing(self) -> None:
        """What is computed next finds the copies complete: as if they had been waited for."""
        self.held = True
        self.wait()


class LateCopier:
    """Stands in for a GPU's: `begin` returns before anything is copied."""

    def __init__(self) -> None:
        self.begun: list[LateCopy] = []

    def begin(self, pairs: Sequence[Pair]) -> CopyToHost:
        self.begun.append(LateCopy(pairs))
        return self.begun[-1]


def pending(arena: Arena) -> bool:
    return arena.is_pending


def tensors_of_all_kinds() -> list[torch.Tensor]:
    whole = torch.arange(48.0).view(6, 8)
    tied = torch.nn.Parameter(torch.randn(5, 3))
    complex_ = torch.randn(3, 4, dtype=torch.complex64)
    return [
        *(whole, whole[1:4], whole[:, 3], whole.t(), whole[::2, 1::3], whole[0, 0], whole[:0], whole.expand(2, 6, 8)),
        *(tied, tied, tied.detach().view(-1)),
        *(
            complex_,
            complex_.conj(),
            complex_.conj().t(),
            complex_.imag,
            torch.ones(2, dtype=torch.complex64).conj().imag,
        ),
        *(torch.tensor(7), torch.tensor([True, False]), torch.zeros(0, 4), torch.randn(3).to(torch.bfloat16)),
        torch.randint(0, 255, (4, 6), dtype=torch.uint8).view(torch.float8_e4m3fn).t(),
        torch.randint(0, 255, (4, 6), dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        torch.randint(0, 255, (4, 8), dtype=torch.uint8).view(torch.uint32)[:, 1:],
        torch.tensor([float("nan"), -0.0, float("inf")], dtype=torch.float16),
    ]


def bits(tensor: torch.Tensor) -> list[int]:
    carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    plain = tensor.detach().resolve_conj().resolve_neg()
    return list(plain.view(carrier).reshape(-1).tolist())


def test_cases_16_27_28_copies_are_values_whatever_a_tensor_is() -> None:
    tensors = tensors_of_all_kinds()
    wanted = [bits(tensor) for tensor in tensors]
    copies = Arena().stage(tensors)
    for tensor, copy in zip(tensors, copies, strict=True):
        assert (copy.dtype, copy.shape, copy.requires_grad) == (tensor.dtype, tensor.shape, False)
        assert copy.is_contiguous()
    with torch.no_grad():
        for tensor in tensors:
            if tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1:
                tensor[...] = 3.0 if tensor.shape != (2, 6, 8) else tensor
    assert [bits(copy) for copy in copies] == wanted


def test_slots_do_not_overlap_and_are_aligned() -> None:
    tensors = [torch.zeros(3, dtype=torch.uint8), torch.zeros(()), torch.zeros(0), torch.zeros(65, dtype=torch.uint8)]
    layout = layout_of(tensors)
    block = torch.zeros(size_of(layout), dtype=torch.uint8)
    slots = cut_block(block, layout)
    for number, slot in enumerate(slots, 1):
        slot.fill_(number)
    assert [int(slot.reshape(-1)[0]) for slot in slots if slot.numel()] == [1, 2, 4]
    assert all((slot.data_ptr() - block.data_ptr()) % 64 == 0 for slot in slots if slot.numel())
    assert size_of(layout) == 64 + 64 + 0 + 128


def test_cases_13_62_the_block_is_kept_while_the_structure_is_and_made_anew_when_it_changes() -> None:
    made: list[int] = []

    def make(size_bytes: int) -> torch.Tensor:
        made.append(size_bytes)
        return torch.empty(size_bytes, dtype=torch.uint8)

    arena = Arena(make)
    first = arena.stage([torch.ones(4), torch.zeros(2)])
    again = arena.stage([torch.full((4,), 2.0), torch.zeros(2)])  # other tensors of the same shapes
    assert [copy.data_ptr() for copy in first] == [copy.data_ptr() for copy in again]
    assert first[0].eq(2).all()
    assert arena.stage([torch.ones(4, dtype=torch.int32), torch.zeros(2)])[0].dtype == torch.int32
    arena.stage([torch.ones(4), torch.zeros(2), torch.zeros(100)])
    assert made == [128, 128, 128 + 448]
    assert arena.size_bytes == 576
    arena.release()
    arena.release()
    assert arena.size_bytes == 0
    assert arena.stage([torch.ones(4)])[0].eq(1).all()


def test_case_15_no_slot_is_written_before_earlier_copies_are_complete() -> None:
    copier = LateCopier()
    arena = Arena(choose_copier=lambda device: copier)
    source = torch.ones(1000)
    (copy,) = arena.stage([source])
    assert pending(arena)
    arena.wait()
    assert not pending(arena)
    source.fill_(-1)  # what training may do from here on
    assert copy.eq(1).all()
    arena.wait()
    assert copier.begun[0].waits == 1  # nothing to wait for costs nothing
    arena.stage([source])
    arena.stage([torch.zeros(7)])  # another structure: the block goes, so the copy into it has to be complete before
    assert copier.begun[1].waits == 1
    arena.release()
    assert copier.begun[2].waits == 1


def test_case_12_what_a_forward_pass_writes_is_copied_before_anything_is_computed() -> None:
    copier = LateCopier()
    arena = Arena(choose_copier=lambda device: copier)
    weights, means = torch.ones(5), torch.ones(3)
    slots = arena.stage([weights, means, weights], first={1})
    means.fill_(-1)  # a forward pass, before anybody has waited
    assert [copy.held for copy in copier.begun] == [True, False]
    assert arena.is_pending
    arena.wait()
    assert [slot.eq(1).all().item() for slot in slots] == [True, True, True]
    assert not pending(arena)
    again = arena.stage([weights, means, weights])
    arena.wait()
    assert again[1].eq(-1).all()


def test_each_device_has_one_copier_and_all_are_waited_for() -> None:
    copiers: dict[str, LateCopier] = {}

    def choose(device: torch.device) -> LateCopier:
        assert device.type not in copiers
        return copiers.setdefault(device.type, LateCopier())

    arena = Arena(choose_copier=choose)
    for _ in range(2):
        arena.stage([torch.ones(2), torch.ones(2, device="meta"), torch.ones(3)])
        for copier in copiers.values():
            copier.begun[-1].pairs = [pair for pair in copier.begun[-1].pairs if not pair[1].is_meta]
    arena.wait()
    assert {name: [copy.waits for copy in copier.begun] for name, copier in copiers.items()} == {
        "cpu": [1, 1],
        "meta": [1, 1],
    }


def test_case_56_without_a_gpu_memory_is_plain() -> None:
    assert isinstance(copier_for(torch.device("cpu")), HostCopier)
    block = torch.zeros(100, dtype=torch.uint8)
    assert torch.cuda.is_available() or not pin_block(block)


def test_case_68_too_little_memory_is_an_error_and_the_arena_stays_usable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arena = Arena()
    arena.stage([torch.ones(4)])
    monkeypatch.setattr(free_memory, "available_bytes", lambda: (256 << 20) + 1000)
    with pytest.raises(StorageFullError, match=r"takes 0\.00 GB of host memory and 0\.27 GB are free, of which 0\.27"):
        arena.stage([torch.ones(4000)])
    assert arena.stage([torch.full((4,), 9.0)])[0].eq(9).all()
    monkeypatch.setattr(free_memory, "available_bytes", lambda: None)  # not known: it is tried
    arena.stage([torch.ones(4000)])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_from_a_gpu_overtake_nothing_and_are_not_overtaken() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    arena = Arena()
    source = torch.zeros(64 << 20, dtype=torch.uint8, device=device)
    for number in range(1, 5):
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]  # the compute stream is busy; what it writes next is what has to be copied
        source.fill_(number)
        begun = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's has no annotations
        (copy,) = arena.stage([source])
        begun.record()
        assert arena.is_pending
        arena.wait()
        source.fill_(255)
        torch.cuda.synchronize()
        assert copy.eq(number).all()
        assert copy.is_pinned()
    assert isinstance(copier_for(device), CudaCopier)
    arena.release()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_case_12_computing_on_a_gpu_waits_for_what_it_may_write() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    arena = Arena()
    parameter = torch.zeros(256 << 20, dtype=torch.uint8, device=device)
    buffer = torch.zeros(64 << 20, dtype=torch.uint8, device=device)
    for number in range(1, 5):
        parameter.fill_(number)
        buffer.fill_(number)
        copies = arena.stage([parameter, buffer], first={1})
        buffer.fill_(255)  # at once, as a forward pass does
        arena.wait()
        parameter.fill_(255)
        torch.cuda.synchronize()
        assert [int(copy.min()) for copy in copies] == [int(copy.max()) for copy in copies] == [number, number]
    arena.release()
