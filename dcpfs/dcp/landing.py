"""Where the bytes of a request land, and how they are checked on arrival.

Problem: torch's reader buffers an entry, decodes it, narrows it and copies it: three passes over fresh memory, and
nothing compares the checksum that the entry carries (cases 63, 113). Collecting everything first and copying then
holds the state twice.

Way taken: a landing is the destination of a segment. It offers its own memory to be filled in place (`window`), or
takes the bytes out of a scratch buffer (`accept`), and adds the CRC-32 of what arrived to that of the entry while the
bytes are still in the cache. Pieces arrive in any order, from any thread; the last one compares.

::

    TensorLanding   a whole row-major CPU tensor of the stored dtype: filled directly
    MemoryLanding   a part of one, or one whose checksum comes later: filled directly
    BlockLanding    anything else: strided, on a device, cast, or a slice that comes with gaps
    EntryLanding    an entry that can only be understood whole: another writer's small one, or a compressed one
    ObjectLanding   the bytes of a non-tensor value
    FrameLanding    what stands before and after a payload that another writer wrote
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from dcpfs.dcp.host_memory import known_bytes
from dcpfs.dcp.read_plan import Block
from dcpfs.errors import CorruptCheckpointError
from dcpfs.format.checksum import crc32, crc32_combine
from dcpfs.format.index import EntryLocation

__all__ = [
    "BlockLanding",
    "EntryLanding",
    "FrameLanding",
    "Landing",
    "LandingContext",
    "MemoryLanding",
    "ObjectLanding",
    "PayloadCheck",
    "TensorLanding",
    "TensorWant",
    "copy_exact",
    "flat_elements",
    "is_plain_memory",
]

MISMATCH = "the checksum does not match"
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of an element's width: not every dtype has a copy of its own, and bits travel exactly."""


class TensorWant(NamedTuple):
    """A box of one stored chunk, and the tensor that gets it.

    Attributes:
        key: State key, for errors.
        dtype: Stored dtype.
        sizes: Shape of the stored chunk.
        location: Its entry.
        offsets: Origin of the box in the chunk.
        lengths: Shape of the box, and of ``target``.
        target: Detached tensor to fill; any device, strides and dtype (the caller has allowed the cast).
        resident: The box is the whole chunk, and row-major CPU memory of the stored dtype holds the target's values:
            who made the want has looked, so that nobody needs to look again.
    """

    key: str
    dtype: torch.dtype
    sizes: tuple[int, ...]
    location: EntryLocation
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    target: torch.Tensor
    resident: bool = False

    @property
    def whole(self) -> bool:
        """The box is the whole chunk."""
        return self.lengths == self.sizes


@dataclass(slots=True)
class LandingContext:
    """What the landings of one load share.

    Attributes:
        url: Redacted URL of the checkpoint, for errors.
        verify: Checksums are compared.
        written: Keys whose memory was written to, whole or in part.
        checks: For each tensor that arrives in pieces what is known of its checksum, by the place of its payload and
            the key that gets it: one entry may go to several.
    """

    url: str
    verify: bool
    written: set[str] = field(default_factory=set)
    checks: dict[tuple[str, int, str], PayloadCheck] = field(default_factory=dict)

    def corrupt(self, key: str, file: str, what: str) -> CorruptCheckpointError:
        """The error for bytes that are not what was saved."""
        return CorruptCheckpointError(
            f"loading key {key!r} from {self.url}: {what} in file {file!r}; the data changed since it was saved, "
            f"so load another checkpoint",
            file=file,
            key=key,
        )


class Landing(Protocol):
    """Destination of a segment. Thread-safe for pieces that don't overlap."""

    key: str
    file: str

    def window(self, position: int, size_bytes: int) -> memoryview | None:
        """Memory that may be filled directly, before `arrived`; None: bytes come through `accept`."""
        ...

    def arrived(self, position: int, view: memoryview) -> None:
        """Check bytes that were put into a window."""
        ...

    def accept(self, position: int, source: memoryview) -> None:
        """Take bytes from a scratch buffer that is reused afterwards, and check them."""
        ...


class PayloadCheck:
    """The CRC-32 of a payload whose pieces arrive in any order. Thread-safe.

    Args:
        expected: The CRC-32, or -1 when it arrives later through `expect`.
    """

    __slots__ = ("_context", "_expected", "_file", "_key", "_lock", "_missing_bytes", "_pieces")

    def __init__(self, context: LandingContext, key: str, file: str, size_bytes: int, expected: int) -> None:
        self._context = context
        self._key = key
        self._file = file
        self._expected = expected
        self._missing_bytes = size_bytes
        self._pieces: list[tuple[int, int, int]] = []
        self._lock = threading.Lock()

    def add(self, start: int, size_bytes: int, crc: int) -> None:
        """Note one piece."""
        with self._lock:
            self._pieces.append((start, size_bytes, crc))
            self._missing_bytes -= size_bytes
        self._compare()

    def expect(self, crc: int) -> None:
        """Say what it should be."""
        with self._lock:
            self._expected = crc
        self._compare()

    def _compare(self) -> None:
        with self._lock:
            if self._missing_bytes or self._expected < 0:
                return
            pieces = sorted(self._pieces)
        total = 0
        for _, size_bytes, crc in pieces:
            total = crc32_combine(total, crc, size_bytes)
        if total != self._expected:
            raise self._context.corrupt(self._key, self._file, MISMATCH)


class TensorLanding(NamedTuple):
    """A whole row-major CPU tensor that holds the bytes as they are stored, of which there may be tens of thousands.

    So it is made in one step, and its memory is looked up when its bytes arrive, in the thread that brings them.

    Attributes:
        key: State key.
        file: File of the entry.
        context: The load.
        target: The tensor.
        size_bytes: Its size, not 0.
        start_bytes: Start of the payload in the file.
        expected: Its CRC-32, or -1.
    """

    key: str
    file: str
    context: LandingContext
    target: torch.Tensor
    size_bytes: int
    start_bytes: int
    expected: int

    def window(self, position: int, size_bytes: int) -> memoryview | None:
        """Part of the memory itself."""
        view = known_bytes(self.target, self.size_bytes)
        return view if size_bytes == self.size_bytes else view[position : position + size_bytes]

    def arrived(self, position: int, view: memoryview) -> None:
        """Check bytes that were put into a window."""
        key, file, context, _, size_bytes, start_bytes, expected = self
        context.written.add(key)
        if expected < 0:
            return
        if len(view) == size_bytes:
            if crc32(view) != expected:
                raise context.corrupt(key, file, MISMATCH)
            return
        with _starting:
            check = context.checks.get((file, start_bytes, key))
            if check is None:
                check = PayloadCheck(context, key, file, size_bytes, expected)
                context.checks[file, start_bytes, key] = check
        check.add(position, len(view), crc32(view))

    def accept(self, position: int, source: memoryview) -> None:
        """Copy bytes into the memory, and check them."""
        size_bytes = len(source)
        view = known_bytes(self.target, self.size_bytes)
        view[position : position + size_bytes] = source
        self.arrived(position, source)


class MemoryLanding:
    """Row-major CPU memory that holds the bytes as they are stored.

    Args:
        view: The memory. The landing keeps ``owner`` alive, which it belongs to.
        expected: CRC-32 of the whole memory when it is one payload, else -1.
    """

    __slots__ = ("_check", "_context", "_expected", "_owner", "_view", "file", "key")

    def __init__(
        self,
        context: LandingContext,
        key: str,
        file: str,
        view: memoryview,
        owner: torch.Tensor,
        expected: int = -1,
        check: PayloadCheck | None = None,
    ) -> None:
        self.key = key
        self.file = file
        self._context = context
        self._view = view
        self._owner = owner
        self._expected = expected
        self._check = check

    def window(self, position: int, size_bytes: int) -> memoryview | None:
        """Part of the memory itself."""
        return self._view[position : position + size_bytes]

    def arrived(self, position: int, view: memoryview) -> None:
        """Check bytes that were put into a window."""
        self._context.written.add(self.key)
        check = self._check
        if check is not None:
            check.add(position, len(view), crc32(view))
        elif self._expected >= 0:
            if len(view) == len(self._view):
                if crc32(view) != self._expected:
                    raise self._context.corrupt(self.key, self.file, MISMATCH)
            else:
                self._start_check().add(position, len(view), crc32(view))

    def accept(self, position: int, source: memoryview) -> None:
        """Copy bytes into the memory, and check them."""
        self._view[position : position + len(source)] = source
        self.arrived(position, source)

    def _start_check(self) -> PayloadCheck:
        check = PayloadCheck(self._context, self.key, self.file, len(self._view), self._expected)
        with _starting:
            if self._check is None:
                self._check = check
            return self._check


_starting = threading.Lock()


class BlockLanding:
    """One block of a box, for a target that has to be copied to.

    Args:
        want: The box.
        block: The block of it.
        conjugate: The stored values are the conjugates of the real ones.
        check: The payload's checksum, which this block is a piece of, or None.
    """

    __slots__ = ("_block", "_check", "_conjugate", "_context", "_want", "file", "key")

    def __init__(
        self,
        context: LandingContext,
        want: TensorWant,
        block: Block,
        *,
        conjugate: bool = False,
        check: PayloadCheck | None = None,
    ) -> None:
        self.key = want.key
        self.file = want.location.file
        self._context = context
        self._want = want
        self._block = block
        self._conjugate = conjugate
        self._check = check

    def window(self, position: int, size_bytes: int) -> memoryview | None:  # noqa: ARG002 - the protocol's
        """None: the bytes need a copy."""
        return None

    def arrived(self, position: int, view: memoryview) -> None:
        """Never called: there is no window."""

    def accept(self, position: int, source: memoryview) -> None:  # noqa: ARG002 - a block comes in one piece
        """Copy the block into its part of the target."""
        block, want = self._block, self._want
        if self._check is not None:
            self._check.add(block.start_bytes, len(source), crc32(source))
        flat = flat_elements(source, want.dtype)
        part = flat.as_strided(block.lengths, block.strides)
        box = tuple(slice(offset, offset + length) for offset, length in zip(block.offsets, block.lengths, strict=True))
        self._context.written.add(self.key)
        copy_exact(want.target[box], part.conj() if self._conjugate else part)


class EntryLanding:
    """A whole entry, from which ``decode`` takes what the wants need.

    Args:
        decode: Gets the entry's bytes, which are only valid during the call, and fills the targets.
    """

    __slots__ = ("_context", "_decode", "file", "key")

    def __init__(self, context: LandingContext, key: str, file: str, decode: Callable[[memoryview], None]) -> None:
        self.key = key
        self.file = file
        self._context = context
        self._decode = decode

    def window(self, position: int, size_bytes: int) -> memoryview | None:  # noqa: ARG002 - the protocol's
        """None: the bytes have to be decoded."""
        return None

    def arrived(self, position: int, view: memoryview) -> None:
        """Never called: there is no window."""

    def accept(self, position: int, source: memoryview) -> None:  # noqa: ARG002 - an entry comes in one piece
        """Decode the entry."""
        self._context.written.add(self.key)
        self._decode(source)


class ObjectLanding:
    """The bytes of a non-tensor value, kept in ``values[key]`` until they are decoded."""

    __slots__ = ("_context", "_expected", "_values", "file", "key")

    def __init__(self, context: LandingContext, key: str, file: str, values: dict[str, bytes], expected: int) -> None:
        self.key = key
        self.file = file
        self._context = context
        self._values = values
        self._expected = expected

    def window(self, position: int, size_bytes: int) -> memoryview | None:  # noqa: ARG002 - the protocol's
        """None: the bytes are copied."""
        return None

    def arrived(self, position: int, view: memoryview) -> None:
        """Never called: there is no window."""

    def accept(self, position: int, source: memoryview) -> None:  # noqa: ARG002 - it comes in one piece
        """Keep the bytes."""
        if self._context.verify and self._expected >= 0 and crc32(source) != self._expected:
            raise self._context.corrupt(self.key, self.file, "the checksum does not match")
        self._values[self.key] = bytes(source)


class FrameLanding:
    """Bytes around a payload, in another writer's entry: what is in them concerns whoever takes them.

    Args:
        take: Gets them, in any thread.
    """

    __slots__ = ("_take", "file", "key")

    def __init__(self, key: str, file: str, take: Callable[[bytes], None]) -> None:
        self.key = key
        self.file = file
        self._take = take

    def window(self, position: int, size_bytes: int) -> memoryview | None:  # noqa: ARG002 - the protocol's
        """None: the bytes are looked at and dropped."""
        return None

    def arrived(self, position: int, view: memoryview) -> None:
        """Never called: there is no window."""

    def accept(self, position: int, source: memoryview) -> None:  # noqa: ARG002 - it comes in one piece
        """Hand the bytes over."""
        self._take(bytes(source))


def is_plain_memory(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """The tensor's own memory is what a row-major payload of that dtype is: it can be filled directly."""
    return (
        tensor.dtype is dtype
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not (dtype.is_complex and tensor.is_conj())
        and not tensor.is_neg()
    )


def copy_exact(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy values: bit for bit where the dtypes are equal, else by the cast that the caller has allowed."""
    lazy = source.is_conj() or source.is_neg() or target.is_conj() or target.is_neg()
    if target.dtype is source.dtype and not lazy:
        carrier = _CARRIERS.get(source.element_size())
        if carrier is not None:
            target, source = target.view(carrier), source.view(carrier)
    target.copy_(source)


def flat_elements(source: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor over the bytes; a copy when they are not aligned to the elements."""
    raw = torch.frombuffer(source, dtype=torch.uint8)
    if raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype)
