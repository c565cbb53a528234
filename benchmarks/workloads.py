"""States to save and load: what a trainer has, generated from a seed and comparable without a second copy.

Problem: a state to compare with costs as much memory as the state itself, and random numbers take longer to
draw than to save. Constant tensors, on the other hand, hide tensors that were mixed up.

Way taken: every 4-byte word of a tensor is a function of the tensor's seed and the word's position, made from
one random block by an exclusive or. Filling and comparing run at the speed of memory, any row range can be
made alone, and no two tensors, nor two blocks of one, are equal. Two exponent bits stay clear: no NaN, no
infinity.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

__all__ = [
    "ANCHOR_BYTES",
    "State",
    "TensorSpec",
    "Workload",
    "build",
    "differences",
    "first_row",
    "local",
    "poison",
    "specs",
]

State = dict[str, torch.Tensor]
"""A flat state dict."""

ANCHOR_BYTES = 1_340_000_000
"""Size of the Llama-shaped state that the published figures were measured with."""

_ANCHOR_SMALL_COUNT = 20_000
_BLOCK_WORDS = 1 << 20
_FINITE_MASK = 0xBFFFBFFF
_LAYERS = 12


class Workload(str, enum.Enum):
    """What is saved."""

    LLAMA = "llama"
    """333 tensors: bf16 weights with two fp32 Adam moments each; 1.34 GB unless scaled."""
    SMALL = "small"
    """fp32 tensors of 4-64 KB; 20,000 of them (0.44 GB) unless scaled."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a workload."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    seed: int

    @property
    def size_bytes(self) -> int:
        """Its payload."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """One step of the first dimension."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize


def specs(workload: Workload, size_bytes: int) -> tuple[TensorSpec, ...]:
    """The tensors of a workload scaled to about ``size_bytes`` (Llama) or that share of 20,000 (small)."""
    scale = size_bytes / ANCHOR_BYTES
    if workload is Workload.SMALL:
        return tuple(_small(max(20, round(_ANCHOR_SMALL_COUNT * scale))))
    return tuple(_llama(math.sqrt(scale)))


def build(tensors: tuple[TensorSpec, ...], mesh: DeviceMesh | None) -> State:
    """Make the state of this rank: whole tensors, or its rows of each as DTensors over ``mesh``."""
    state: State = {}
    for spec in tensors:
        start, stop = _rows(spec, mesh)
        rows = torch.empty((stop - start, *spec.shape[1:]), dtype=spec.dtype)
        for words, position in _blocks(rows, start * spec.row_bytes):
            torch.bitwise_xor(_random_words(position, len(words)), _key(spec.seed, position), out=words)
        state[spec.key] = rows if mesh is None else _shard(rows, spec, mesh)
    return state


def poison(state: State) -> None:
    """Overwrite every byte with a value that no workload has, so an old one is no success. Touches all pages."""
    for tensor in state.values():
        for words, _ in _blocks(local(tensor), 0):
            words.fill_(0x7F7F7F7F)


def differences(spec: TensorSpec, rows: torch.Tensor, first_row: int) -> str | None:
    """Say how rows of a tensor differ from what was generated, bit for bit; None: not at all."""
    if rows.dtype != spec.dtype or tuple(rows.shape[1:]) != spec.shape[1:]:
        return f"{spec.key}: {rows.dtype} {tuple(rows.shape)} instead of {spec.dtype} {spec.shape}"
    for words, position in _blocks(rows.contiguous(), first_row * spec.row_bytes):
        expected = torch.bitwise_xor(_random_words(position, len(words)), _key(spec.seed, position))
        if not torch.equal(words, expected):
            return f"{spec.key}: wrong bytes near byte {position * 4}"
    return None


def first_row(spec: TensorSpec, mesh: DeviceMesh | None) -> int:
    """Where this rank's rows start."""
    return _rows(spec, mesh)[0]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _llama(scale: float) -> Iterator[TensorSpec]:
    def size(width: int) -> int:
        return max(8, round(width * scale / 8) * 8)

    width, hidden, vocabulary = size(768), size(2048), size(32_000)
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (vocabulary, width)}
    for layer in range(_LAYERS):
        for name in ("wq", "wk", "wv", "wo"):
            shapes[f"layers.{layer}.attention.{name}.weight"] = (width, width)
        shapes[f"layers.{layer}.feed_forward.w1.weight"] = (hidden, width)
        shapes[f"layers.{layer}.feed_forward.w2.weight"] = (width, hidden)
        shapes[f"layers.{layer}.feed_forward.w3.weight"] = (hidden, width)
        shapes[f"layers.{layer}.attention_norm.weight"] = (width,)
        shapes[f"layers.{layer}.ffn_norm.weight"] = (width,)
    shapes["norm.weight"] = (width,)
    shapes["output.weight"] = (vocabulary, width)
    seed = 0
    for name, shape in shapes.items():
        yield TensorSpec(f"model.{name}", torch.bfloat16, shape, seed := seed + 1)
    for name, shape in shapes.items():
        for moment in ("exp_avg", "exp_avg_sq"):
            yield TensorSpec(f"optim.state.{name}.{moment}", torch.float32, shape, seed := seed + 1)


def _small(count: int) -> Iterator[TensorSpec]:
    # 4, 5, ... KB with a mean of 22 KB, skewed to the small as a real mix is; always an even number of rows.
    generator = torch.Generator().manual_seed(7)
    kilobytes = 4 + (torch.rand(count, generator=generator) ** 2.3 * 61).long()
    for number, size in enumerate(kilobytes.tolist()):
        yield TensorSpec(f"block.{number // 100}.tensor.{number}", torch.float32, (size * 2, 125), number + 1)


def _rows(spec: TensorSpec, mesh: DeviceMesh | None) -> tuple[int, int]:
    if mesh is None:
        return 0, spec.shape[0]
    share = -(-spec.shape[0] // mesh.size())
    start = min(spec.shape[0], share * mesh.get_rank())
    return start, min(spec.shape[0], start + share)


def _shard(rows: torch.Tensor, spec: TensorSpec, mesh: DeviceMesh) -> torch.Tensor:
    stride = tuple(math.prod(spec.shape[at + 1 :]) for at in range(len(spec.shape)))
    return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=torch.Size(spec.shape), stride=stride)


def _blocks(rows: torch.Tensor, start_bytes: int) -> Iterator[tuple[torch.Tensor, int]]:
    """Pieces of 4-byte words with their position in the whole tensor, none across a block boundary."""
    words = rows.detach().reshape(-1).view(torch.int32)
    position, at = start_bytes // 4, 0
    while at < len(words):
        length = min(len(words) - at, _BLOCK_WORDS - position % _BLOCK_WORDS)
        yield words[at : at + length], position
        at, position = at + length, position + length


@lru_cache(maxsize=1)
def _block() -> torch.Tensor:
    generator = torch.Generator().manual_seed(20_260_101)
    words = torch.randint(-(1 << 31), 1 << 31, (_BLOCK_WORDS,), generator=generator, dtype=torch.int32)
    return words & (_FINITE_MASK - (1 << 32))


def _random_words(position: int, length: int) -> torch.Tensor:
    start = position % _BLOCK_WORDS
    return _block()[start : start + length]


def _key(seed: int, position: int) -> int:
    mixed = (seed * 0x9E3779B1 + position // _BLOCK_WORDS * 0x85EBCA77) & 0xFFFFFFFF
    return (mixed ^ mixed >> 15) & _FINITE_MASK & 0x7FFFFFFF
