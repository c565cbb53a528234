"""Hold a state to load into against a checkpoint: what fits, what is missing, what nobody asked for.

Problem: torch's load checks sizes, raises on the first missing key, casts dtypes in silence, and says nothing of keys
that the checkpoint has and the state lacks, so a fresh optimizer "resumes" with none of its moments (cases 3, 5, 93).

Way taken: one pass over the flat state, before a byte is read. Every leaf is matched by key, kind, shape and dtype; all
differences are collected, with the closest names for the missing. Sharded tensors are asked for the boxes that this
rank holds, and each box is cut against the chunks that the checkpoint has.
"""

from __future__ import annotations

import difflib
import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from dcpfs import torch_private
from dcpfs.config import CastPolicy
from dcpfs.dcp.casting import allows_cast
from dcpfs.dcp.coverage import find_fault
from dcpfs.dcp.host_memory import has_memory, is_resident
from dcpfs.dcp.landing import TensorWant
from dcpfs.dcp.read_plan import intersect_boxes
from dcpfs.errors import CorruptCheckpointError, KeyMismatchError
from dcpfs.format.index import BytesRecord, CheckpointIndex, ChunkRecord, EntryLocation, TensorRecord

__all__ = [
    "FREED",
    "OVERLAPPING",
    "Match",
    "check_plausible",
    "describe_mismatch",
    "describe_mismatches",
    "key_mismatch_error",
    "local_boxes",
    "match_state",
    "no_data_error",
    "overlaps_itself",
    "wants_of_box",
]

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_SHOWN = 10
OVERLAPPING = "an expanded tensor or overlapping windows: elements share memory, so it can't be loaded into; clone() it"
FREED = (
    "its memory has been freed (as of a sharded parameter that is not gathered), so it can't be loaded into; gather it"
)
_REMEDY = "correct the state, or load with strict=False to take what fits and get a report of the rest"


@dataclass(slots=True)
class Match:
    """What a state and a checkpoint have in common.

    Attributes:
        wants: Boxes to read for the tensors that fit.
        objects: Key and entry of the non-tensor values that fit.
        loaded: All keys that fit.
        missing: Keys of the state that the checkpoint lacks.
        unexpected: Keys of the checkpoint that the state lacks.
        mismatched: Key to a sentence that says how kind, shape or dtype differ.
    """

    wants: list[TensorWant] = field(default_factory=list)
    objects: list[tuple[str, EntryLocation]] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: dict[str, str] = field(default_factory=dict)


def match_state(
    leaves: Mapping[str, object],
    index: CheckpointIndex,
    *,
    allow_cast: CastPolicy = CastPolicy.NEVER,
    empties: frozenset[str] = frozenset(),
) -> Match:
    """Match the leaves of a state with the records of a checkpoint. About 5 µs per plain tensor.

    Args:
        leaves: Flat key to tensor or value.
        index: The checkpoint.
        allow_cast: Which dtype differences are no mismatch.
        empties: Flat keys at which the checkpoint holds an empty container, which has no record.

    Raises:
        CorruptCheckpointError: The chunks of a tensor don't cover what its shape promises.
    """
    match = Match()
    records = index.records
    loaded, wants = match.loaded, match.wants
    for key, leaf in leaves.items():
        record = records.get(key)
        if record is None:
            if key not in empties:
                match.missing.append(key)
            elif isinstance(leaf, torch.Tensor):
                match.mismatched[key] = "a tensor in the state, an empty container in the checkpoint"
            continue
        if type(leaf) in _PLAIN and isinstance(leaf, torch.Tensor) and isinstance(record, TensorRecord):
            want = _plain_want(key, leaf, record)
            if want is not None:
                loaded.append(key)
                wants.append(want)
                continue
        if isinstance(record, BytesRecord):
            if isinstance(leaf, torch.Tensor):
                match.mismatched[key] = "a tensor in the state, another kind of value in the checkpoint"
                continue
            match.objects.append((key, record.location))
            loaded.append(key)
            continue
        difference = _describe_whole(leaf, record.dtype, record.shape, allow_cast)
        if difference is not None:
            match.mismatched[key] = difference
            continue
        difference = _add_wants(key, leaf, record, wants) if isinstance(leaf, torch.Tensor) else None
        if difference is not None:
            match.mismatched[key] = difference
            continue
        loaded.append(key)
    if len(loaded) + sum(key in records for key in match.mismatched) < len(records):
        match.unexpected = [key for key in records if key not in leaves]
    return match


def _plain_want(key: str, leaf: torch.Tensor, record: TensorRecord) -> TensorWant | None:
    """The one want of a plain row-major tensor that fits a tensor stored whole; None: look more closely.

    The same as what follows, for nearly all tensors, in a third of the time.
    """
    dtype, shape, chunks = record
    if len(chunks) != 1 or leaf.dtype is not dtype or leaf.shape != shape or leaf.layout is not torch.strided:
        return None
    offsets, sizes, location = chunks[0]
    if (sizes is not shape and sizes != shape) or not leaf.is_contiguous():
        return None
    resident = is_resident(leaf)
    if (not resident and leaf.is_meta) or torch_private.global_shape(leaf) is not None or not has_memory(leaf):
        return None
    target = leaf.detach() if leaf.requires_grad else leaf
    return _make_want((key, dtype, shape, location, offsets, shape, target, resident))


_make_want = partial(tuple.__new__, TensorWant)


def describe_mismatch(leaf: object, dtype: torch.dtype, shape: tuple[int, ...], allow_cast: CastPolicy) -> str | None:
    """How a leaf differs from a stored tensor, as a part of a sentence, or None."""
    difference = _describe_whole(leaf, dtype, shape, allow_cast)
    if difference is None and isinstance(leaf, torch.Tensor) and type(leaf) not in _PLAIN:
        return _describe_boxes(local_boxes("", leaf))
    return difference


def _describe_whole(leaf: object, dtype: torch.dtype, shape: tuple[int, ...], allow_cast: CastPolicy) -> str | None:
    """`describe_mismatch`, but for what only a look at each local part shows."""
    if not isinstance(leaf, torch.Tensor):
        return f"{_article(type(leaf).__name__)} in the state, a tensor in the checkpoint"
    if leaf.layout is not torch.strided:
        return f"a tensor of layout {leaf.layout} in the state, a dense tensor in the checkpoint"
    if torch_private.is_on_meta(leaf):
        return "on the meta device, which has no memory to load into; give it some with to_empty()"
    wanted = torch_private.global_shape(leaf) or tuple(leaf.shape)
    if wanted != shape:
        return f"shape {wanted} in the state, {shape} in the checkpoint"
    if leaf.dtype is not dtype and not allows_cast(allow_cast, dtype, leaf.dtype):
        return f"{leaf.dtype} in the state, {dtype} in the checkpoint"
    if type(leaf) not in _PLAIN and torch_private.has_shards(leaf):
        return torch_private.describe_sharding_fault(leaf)
    if type(leaf) not in _PLAIN and torch_private.is_wrapper(leaf):
        return f"{_article(type(leaf).__name__)}, a tensor subclass that can't be loaded into in place"
    if type(leaf) in _PLAIN and not has_memory(leaf):
        return FREED
    if overlaps_itself(leaf):
        return OVERLAPPING
    return None


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """True for a tensor of which some elements are the same memory: expanded ones, and windows that overlap."""
    if tensor.is_contiguous() or tensor.numel() < 2:
        return False
    dims = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    reach = 0
    apart = True
    for stride, size in dims:
        apart = apart and stride > reach
        reach += stride * (size - 1)
    if apart or dims[0][0] == 0:
        return not apart
    places = torch.zeros(1, dtype=torch.int64, device="cpu")
    for stride, size in dims:
        places = (places.unsqueeze(-1) + torch.arange(size, device="cpu") * stride).reshape(-1)
    ordered = places.sort().values
    return bool((ordered[1:] == ordered[:-1]).any())


def _article(name: str) -> str:
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def local_boxes(key: str, tensor: torch.Tensor) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]]:
    """The boxes of a tensor that this rank holds: offsets and sizes in the whole, and the memory of each."""
    if type(tensor) in _PLAIN and torch_private.global_shape(tensor) is None:
        yield (0,) * tensor.dim(), tuple(tensor.shape), tensor
        return
    for offsets, sizes, shard in torch_private.local_shards(key, tensor):
        yield offsets, sizes, torch_private.settle(shard)


def _add_wants(key: str, leaf: torch.Tensor, record: TensorRecord, wants: list[TensorWant]) -> str | None:
    """Want the boxes of a tensor that this rank holds; or why its memory can't take them, as a part of a sentence."""
    shape, chunks = record.shape, record.chunks
    if len(chunks) == 1 and type(leaf) in _PLAIN and torch_private.global_shape(leaf) is None:
        chunk = chunks[0]
        if chunk.sizes == shape and tuple(leaf.shape) == shape:
            target = leaf.detach() if leaf.requires_grad else leaf
            wants.append(TensorWant(key, record.dtype, shape, chunk.location, chunk.offsets, shape, target))
            return None
    boxes = list(local_boxes(key, leaf))
    difference = _describe_boxes(boxes)
    if difference is not None:
        return difference
    for offsets, sizes, target in boxes:
        wants.extend(wants_of_box(key, record, offsets, sizes, target.detach()))
    return None


def _describe_boxes(boxes: Iterable[tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]]) -> str | None:
    """Why the memory of a part on this rank can't take its box, as a part of a sentence; None: all can."""
    for _, sizes, target in boxes:
        if target.shape != sizes:
            return (
                f"a part of shape {tuple(target.shape)} on this rank, to which its placements give {sizes}; pass shape "
                "and stride of the whole to DTensor.from_local"
            )
        if not torch_private.is_wrapper(target) and not has_memory(target):
            return FREED
        if overlaps_itself(target):
            return OVERLAPPING
    return None


def wants_of_box(
    key: str, record: TensorRecord, offsets: tuple[int, ...], sizes: tuple[int, ...], target: torch.Tensor
) -> Iterator[TensorWant]:
    """Cut one box of a tensor against the chunks that are stored.

    Raises:
        CorruptCheckpointError: They don't cover it.
    """
    missing = math.prod(sizes)
    if missing == 0:
        return
    parts: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for chunk in _near_chunks(record.chunks, offsets, sizes):
        shared = intersect_boxes(chunk.offsets, chunk.sizes, offsets, sizes)
        if shared is None:
            continue
        in_chunk, in_box, lengths = shared
        missing -= math.prod(lengths)
        parts.append((in_box, lengths))
        part = target
        if lengths != sizes:
            part = target[tuple(slice(o, o + n) for o, n in zip(in_box, lengths, strict=True))]
        yield TensorWant(key, record.dtype, chunk.sizes, chunk.location, in_chunk, lengths, part)
    if missing > 0:
        raise no_data_error(key, missing)
    fault = find_fault(sizes, parts, complete=True) if len(parts) > 1 else None
    if fault is not None:
        raise CorruptCheckpointError(
            f"the checkpoint's metadata contradicts itself about key {key!r}: {fault}; it is damaged, or it joins "
            "saves that don't belong together",
            key=key,
        )


def no_data_error(key: str, elements: int) -> CorruptCheckpointError:
    """The metadata lists a tensor, and no chunk for some of its elements."""
    return CorruptCheckpointError(
        f"the checkpoint's metadata lists no data for {elements} elements of key {key!r}: it is damaged, or it belongs "
        "to a save that did not finish",
        key=key,
    )


def check_plausible(key: str, record: TensorRecord, url: str) -> None:
    """Return when the entries of a tensor can hold it, so that no memory is asked for what isn't there.

    Raises:
        CorruptCheckpointError: They can't.
    """
    needed_bytes = math.prod(record.shape) * record.dtype.itemsize
    if any(chunk.location.transforms for chunk in record.chunks):
        return  # compressed: what is stored is smaller
    stored_bytes = sum(chunk.location.length_bytes for chunk in record.chunks)
    if stored_bytes < needed_bytes:
        raise CorruptCheckpointError(
            f"loading key {key!r} from {url}: the metadata promises {needed_bytes} bytes and lists entries of "
            f"{stored_bytes}; it is damaged, so load another checkpoint",
            key=key,
        )


def _near_chunks(
    chunks: tuple[ChunkRecord, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> Iterable[ChunkRecord]:
    """The chunks that can meet a box: those of a tensor that was cut by rows are found by bisection."""
    if len(chunks) < 16 or not offsets:
        return chunks
    starts = [chunk.offsets[0] for chunk in chunks]
    if any(a > b for a, b in itertools.pairwise(starts)):
        return chunks
    if any(chunk.sizes[1:] != chunks[0].sizes[1:] for chunk in chunks):
        return chunks
    first = max(0, bisect_right(starts, offsets[0]) - 1)
    while first and starts[first - 1] == starts[first]:
        first -= 1
    return chunks[first : bisect_right(starts, offsets[0] + sizes[0] - 1)]


def key_mismatch_error(
    url: str,
    *,
    missing: Iterable[str] = (),
    unexpected: Iterable[str] = (),
    mismatched: Mapping[str, str] | None = None,
    known: Iterable[str] = (),
    remedy: str = _REMEDY,
) -> KeyMismatchError:
    """The one error for everything that does not fit, with the closest names of what the checkpoint has."""
    missing, unexpected, mismatched = list(missing), list(unexpected), dict(mismatched or {})
    text = describe_mismatches(missing=missing, unexpected=unexpected, mismatched=mismatched, known=known)
    message = f"loading {url}: {text}. Nothing was read: {remedy}"
    return KeyMismatchError(message, missing=missing, unexpected=unexpected, mismatched=mismatched)


def describe_mismatches(
    *,
    missing: Iterable[str] = (),
    unexpected: Iterable[str] = (),
    mismatched: Mapping[str, str] | None = None,
    known: Iterable[str] = (),
) -> str:
    """What does not fit, as a part of a sentence."""
    missing, unexpected, mismatched = list(missing), list(unexpected), dict(mismatched or {})
    parts = []
    if missing:
        candidates = unexpected or list(known)
        shown = [_with_closest(key, candidates) for key in missing[:_SHOWN]]
        parts.append(f"the checkpoint lacks {_list(shown, len(missing))}")
    if unexpected:
        shown = [repr(key) for key in unexpected[:_SHOWN]]
        parts.append(f"the state has no place for {_list(shown, len(unexpected))}")
    if mismatched:
        shown = [f"{key!r} ({text})" for key, text in list(mismatched.items())[:_SHOWN]]
        parts.append(f"these differ: {_list(shown, len(mismatched))}")
    return "; ".join(parts)


def _with_closest(key: str, candidates: list[str]) -> str:
    pool = candidates if len(candidates) <= 2000 else _same_end(key, candidates)
    close = difflib.get_close_matches(key, pool, n=2)
    return f"{key!r} (closest: {', '.join(map(repr, close))})" if close else repr(key)


def _same_end(key: str, candidates: list[str]) -> list[str]:
    """Of very many names those that end alike, since comparing takes a millisecond each."""
    end = key.rsplit(".", 1)[-1]
    return [name for name in candidates if name.endswith(end)][:2000]


def _list(shown: list[str], count: int) -> str:
    text = ", ".join(shown)
    return text if count <= len(shown) else f"{text} and {count - len(shown)} more"
