"""What the golden checkpoints hold, and their values as JSON, so that a reader needs neither the writer nor this code.

Imports nothing of dcpfs: every release of torch makes its goldens with it. ``describe`` is total and exact (dtype,
shape and bits of tensors, types of keys and containers), and goes one way only: what was read is described as well, and
the two descriptions are compared. ``template_from`` makes a state to load into from a description.
"""

from __future__ import annotations

import datetime as dt
import enum
import io
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.peers.sample_state import DTYPES, make_tensor

__all__ = [
    "Job",
    "describe",
    "dtypes_state",
    "has_dtype",
    "layouts_state",
    "new_dtypes",
    "sharded_state",
    "template_from",
    "values_state",
    "whole_sharded_state",
    "without_lacking",
]

Json = Any
"""Lists, texts and numbers of `json`."""


def new_dtypes() -> tuple[list[torch.dtype], dict[str, str]]:
    """Dtypes of this torch that others lack, and those that it has and that no checkpoint of its own can hold."""
    found, without = [], {}
    named = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    for name, dtype in sorted(named.items()):
        if dtype in DTYPES:
            continue
        try:
            make_tensor((2, 3), dtype).clone()
            if not dtype.is_complex:
                # Its planner asks for the bits of one of these two.
                (torch.finfo if dtype.is_floating_point else torch.iinfo)(dtype)
        except (NotImplementedError, RuntimeError, TypeError) as error:
            without[name] = type(error).__name__
        else:
            found.append(dtype)
    return found, without


def dtypes_state(dtypes: tuple[torch.dtype, ...] | list[torch.dtype] = DTYPES) -> dict[str, object]:
    """A tensor of each dtype."""
    return {str(dtype).removeprefix("torch."): make_tensor((2, 3), dtype, n) for n, dtype in enumerate(dtypes)}


def layouts_state() -> dict[str, object]:
    """Tensors that are no plain row-major memory."""
    base = make_tensor((4, 6))
    pairs = make_tensor((3, 2), torch.float32, 5).abs().clamp(1e-3, 1e3)
    pairs = torch.complex(pairs, -pairs)
    tied = make_tensor((2, 3), torch.bfloat16, 9)
    return {
        "transposed": base.t(),
        "strided": base[::2, 1::3],
        "expanded": torch.tensor([1.5, 2.5]).expand(3, 2),
        "offset": base[2:3],
        "conjugate": pairs.conj(),
        "negative": pairs.conj().imag,
        "channels_last": make_tensor((1, 2, 2, 3)).to(memory_format=torch.channels_last),
        "parameter": nn.Parameter(make_tensor((3,), torch.float32, 2)),
        "zero_dimensions": make_tensor((), torch.float64, 3),
        "empty": torch.empty(0, 4, dtype=torch.int64),
        "tied": {"one": tied, "two": tied},
    }


def values_state() -> dict[str, object]:
    """What is no tensor, and containers that hold both."""
    default: defaultdict[str, list[int]] = defaultdict(list)
    default["k"].append(1)
    return {
        "values": {
            "int": 7,
            "big": 2**200 - 1,
            "float": -0.0,
            "infinite": float("-inf"),
            "bool": True,
            "none": None,
            "text": "ünïcode ☃ \x00",
            "bytes": b"\x00\xff",
            "complex": 1 - 2j,
            "size": torch.Size([2, 3]),
            "dtype": torch.bfloat16,
            "stream": io.BytesIO(b"raw"),
            "numpy_scalar": np.float32(1.25),
            "numpy_array": np.arange(6, dtype=np.uint16).reshape(2, 3).T,
            "datetime": dt.datetime(2024, 2, 29, 12, 30, 1, 5, tzinfo=dt.timezone.utc),
            "delta": dt.timedelta(days=-1, microseconds=3),
            "set": {1, 2},
            "deque": deque([1, 2], 5),
            "range": range(1, 9, 2),
        },
        "nested": {
            "list": [make_tensor((2,)), {"deep": make_tensor((1,))}, 3],
            "lr": 0.1,
            "leaf": [1, "a", [2.5, None]],
        },
        "pair": (1, (2, "x"), make_tensor((2,), torch.int32)),
        "by_int": {0: make_tensor((2,)), 10: {"lr": 0.5}, -1: "minus"},
        "milestones": Counter({2: 1, 5: 3}),
        "ordered": OrderedDict([("z", make_tensor((2,))), ("a", 1)]),
        "default": default,
        "empty": {},
        "with.dots": {"and/slash": make_tensor((2,), torch.int16), "": 6, " blank ": 5},
    }


def whole_sharded_state() -> dict[str, object]:
    """What `sharded_state` is in one piece."""
    return {
        "rows": make_tensor((5, 3)),
        "columns": make_tensor((3, 5), torch.bfloat16, 2),
        "one_row": make_tensor((1, 4), torch.int32, 3),
        "replicated": make_tensor((2, 2), torch.float64, 4),
        "flat": make_tensor((7,), torch.float32, 5),
        "plain": make_tensor((3,), torch.uint8, 6),
        "nested": {"rows": make_tensor((4,), torch.bool, 7), "step": 5},
    }


def sharded_state(mesh: DeviceMesh, *, fill: bool = True, swapped: bool = False) -> dict[str, Any]:
    """DTensors and a ShardedTensor (as FSDP1 makes them) over the two ranks of a mesh; swapped: cut another way."""
    whole: dict[str, Any] = whole_sharded_state()
    if not fill:
        whole = {key: torch.zeros_like(value) for key, value in whole.items() if isinstance(value, torch.Tensor)}
        whole["nested"] = {"rows": torch.zeros(4, dtype=torch.bool), "step": 0}
    rank, cut = dist.get_rank(), 2 if swapped else 4
    start, stop = (0, cut) if rank == 0 else (cut, 7)
    local = LocalShard(whole["flat"][start:stop].clone(), ShardMetadata([start], [stop - start], f"rank:{rank}/cpu"))
    first, second = (Shard(1), Shard(0)) if swapped else (Shard(0), Shard(1))
    return {
        "rows": distribute_tensor(whole["rows"], mesh, [first]),
        "columns": distribute_tensor(whole["columns"], mesh, [second]),
        "one_row": distribute_tensor(whole["one_row"], mesh, [first]),
        "replicated": distribute_tensor(whole["replicated"], mesh, [Replicate()]),
        "flat": init_from_local_shards([local], 7),
        "plain": whole["plain"],
        "nested": {
            "rows": distribute_tensor(whole["nested"]["rows"], mesh, [Replicate() if swapped else Shard(0)]),
            "step": whole["nested"]["step"],
        },
    }


class Net(nn.Module):
    """Rows that two ranks don't share evenly, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 3)
        self.down = nn.Linear(3, 2, bias=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down(torch.relu(self.up(values)))
        return output


class Job:
    """A small training run, under FSDP2 where there is a mesh; its values are set, not trained, so that no release of
    torch makes others.

    Attributes:
        position: This rank's place in its data.
        progress: What the trainer counts.
    """

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        self.net = Net()
        if mesh is not None:
            fully_shard(self.net, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.5, betas=(0.5, 0.75))
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, milestones=[2, 2, 9], gamma=0.5)
        self.position: dict[str, object] = {"next": 0}
        self.progress: dict[str, object] = {"tokens": 0}

    def train(self) -> None:
        """Three steps, after which parameters and moments get their values."""
        for _ in range(3):
            self.net(torch.ones(2, 4)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
        rank = dist.get_rank() if dist.is_initialized() else 0
        for salt, parameter in enumerate(self.net.parameters()):
            for place, value in enumerate([parameter, *self.optimizer.state[parameter].values()]):
                local = value.to_local() if isinstance(value, DTensor) else value
                if local.dim():
                    local.detach().copy_(make_tensor(tuple(local.shape), torch.int16, 10 * salt + place + rank))
        self.net.seen.fill_(3)  # type: ignore[operator]  # a tensor
        self.position["next"] = 9 + rank
        self.progress["tokens"] = 384

    def model_state(self) -> dict[str, Any]:
        """As the reference checkpointer asks torch for it."""
        return get_model_state_dict(self.net)

    def optimizer_state(self) -> dict[str, Any]:
        """As the reference checkpointer asks torch for it."""
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        return get_optimizer_state_dict(self.net, self.optimizer, options=options)

    def whole(self) -> dict[str, Any]:
        """All values, gathered and described. Collective where there is a mesh."""
        states = {"model": self.model_state(), "optim": self.optimizer_state()}
        whole = {
            key: {
                name: value.full_tensor() if isinstance(value, DTensor) else value
                for name, value in sorted(state.items())
            }
            for key, state in states.items()
        }
        return {key: describe(state) for key, state in [*whole.items(), ("scheduler", self.scheduler.state_dict())]}


# --- descriptions


def describe(value: object) -> Json:
    """A value as JSON: a kind, and what that kind has."""
    if isinstance(value, torch.Tensor):
        plain = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        # One element may have any stride, and then no view as bytes.
        raw = b"" if plain.numel() == 0 else plain.as_strided(plain.shape, (1,)).view(torch.uint8).numpy().tobytes()
        return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape), raw.hex()]
    if isinstance(value, np.ndarray):
        return ["array", value.dtype.str, list(value.shape), value.tobytes().hex()]
    if isinstance(value, np.generic):
        return ["numpy", value.dtype.str, value.tobytes().hex()]
    kind = type(value).__qualname__
    if isinstance(value, Mapping):
        return [kind, [[describe(key), describe(item)] for key, item in value.items()]]
    if isinstance(value, (set, frozenset)):
        return [kind, [describe(item) for item in sorted(value)]]
    if isinstance(value, (list, tuple, deque)):
        items = [describe(item) for item in value]
        return [kind, items, value.maxlen] if isinstance(value, deque) else [kind, items]
    return [kind, _text(value)]


def _text(value: object) -> str:
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, io.BytesIO):
        return value.getvalue().hex()
    if isinstance(value, enum.Enum):
        return value.name
    return value if isinstance(value, str) else repr(value)


_MAPPINGS: dict[str, Callable[[dict[object, Any]], Any]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": Counter,
    "defaultdict": lambda items: defaultdict(None, items),
}


def has_dtype(name: str) -> bool:
    """This torch has the dtype, and can copy it (2.9 can't copy float4)."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        return False
    try:
        torch.zeros(16, dtype=torch.uint8).view(dtype).clone()
    except NotImplementedError:
        return False
    return True


def without_lacking(description: Json) -> Json:
    """A description without tensors of dtypes that this torch lacks."""
    kind, *rest = description
    if kind != "dict":
        return description
    items = [[key, without_lacking(item)] for key, item in rest[0] if item[0] != "tensor" or has_dtype(item[1])]
    return [kind, items]


def template_from(description: Json) -> Any:
    """A state to load into: zeros for tensors, a wrong value for what is none, and the same containers."""
    kind, *rest = description
    if kind == "tensor":
        dtype = getattr(torch, rest[0])
        return torch.zeros(torch.Size(rest[1]).numel() * dtype.itemsize, dtype=torch.uint8).view(dtype).reshape(rest[1])
    if kind in _MAPPINGS:
        items = [(_key_from(key), template_from(item)) for key, item in rest[0]]
        return _MAPPINGS[kind](dict(items))
    if kind == "list" and _is_opened(description):
        return [template_from(item) for item in rest[0]]
    return "nothing yet"


def _key_from(description: Json) -> object:
    kind, text = description
    return int(text) if kind == "int" else text


def _is_opened(description: Json) -> bool:
    """Whether flattening opens a list: it holds a tensor or a mapping at any depth of lists."""
    return any(
        item[0] == "tensor" or item[0] in _MAPPINGS or (item[0] == "list" and _is_opened(item))
        for item in description[1]
    )
