"""Bring the wanted boxes and objects of a checkpoint into memory: many bounded ranged reads, each checked on arrival.

Problem: one thread reading one entry after another leaves a link idle; a thread pool that is handed everything
buffers everything (case 63). A file that was cut short is noticed only where somebody reads past its end, and a
failure in the middle leaves a state of which nobody knows what is old and what is new.

Way taken: wants become landings and segments (`dcpfs.dcp.landing`), segments become requests (`dcpfs.dcp.read_plan`),
and requests run in the bounded pool of `dcpfs.dcp.transfer`; scratch memory is reused and counted in the budget. Every
file that is touched is read up to the end that the metadata gives it, or its size is asked for. Entries of other
writers say where their payload is only in their own header: small ones are read whole, of large ones the headers come
first. An error says which keys have been written.

Flow: ``fetch = Fetch(...)`` → ``fetch.add_tensor(want)`` / ``fetch.add_object(key, location)`` → ``fetch.run()`` →
``fetch.objects``. Everything but the requests happens in the calling thread.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dcpfs.config import TransferConfig
from dcpfs.dcp.collection import collection_paused
from dcpfs.dcp.foreign import (
    DensePayload,
    check_header,
    decode_entry,
    dense_payload,
    header_size_bytes,
    read_header,
)
from dcpfs.dcp.host_memory import tensor_bytes
from dcpfs.dcp.landing import (
    BlockLanding,
    EntryLanding,
    Landing,
    LandingContext,
    MemoryLanding,
    ObjectLanding,
    PayloadCheck,
    TailLanding,
    TensorWant,
    is_plain_memory,
)
from dcpfs.dcp.read_plan import (
    Request,
    RequestLimits,
    Segment,
    box_blocks,
    choose_limits,
    plan_requests,
    row_major_strides,
)
from dcpfs.dcp.transfer import ByteBudget, Task, run_tasks
from dcpfs.errors import DcpfsError, IncompleteCheckpointError, ObjectNotFoundError, TransferSizeError
from dcpfs.format.headers import TensorHeader, parse_tensor_tail
from dcpfs.format.index import EntryLocation
from dcpfs.storage.store import Store

if TYPE_CHECKING:
    from fsspec.callbacks import Callback

__all__ = ["Fetch", "FetchTotals"]

_KIB = 1 << 10
_MIB = 1 << 20
_GAP_SCRATCH_BYTES = 64 * _KIB
_LOCAL_READ_BYTES = 4 * _MIB
"""Longest read of a local file: a request costs nothing there, and the checksum finds the bytes in the cache."""
_PAUSED_READ_BYTES = 4 << 30
"""A load up to this size takes seconds: garbage collection, which would walk all its records, waits for its end."""
_WHOLE_ENTRY_BYTES = 1 * _MIB
"""Another writer's entry up to this size is read whole; a header request costs a round trip, as long as 1.6 MB."""


@dataclass(slots=True)
class FetchTotals:
    """What a fetch did.

    Attributes:
        needed_bytes: Bytes of the boxes and objects that were wanted.
        moved_bytes: Bytes that were asked of the store.
        requests: Ranged reads and size queries.
    """

    needed_bytes: int = 0
    moved_bytes: int = 0
    requests: int = 0


class Fetch:
    """One load's reads. Not thread-safe; its workers are its own.

    Args:
        store: The checkpoint's store.
        transfer: Concurrency, budget and request sizes.
        verify: Compare checksums of entries that are read whole.
        file_sizes: Least size of each data file, by the metadata.
        decode: Turns a whole entry into its tensor.
        undo_transforms: Turns a whole entry that went through stream transforms into the bytes before them.
        callback: Told the bytes of each finished request, one call at a time, from any thread.
    """

    def __init__(
        self,
        store: Store,
        transfer: TransferConfig,
        *,
        verify: bool,
        file_sizes: Mapping[str, int],
        decode: Callable[[memoryview, TensorWant], torch.Tensor],
        undo_transforms: Callable[[memoryview, str, EntryLocation], bytes],
        callback: Callback | None = None,
    ) -> None:
        self._store = store
        self._transfer = transfer
        self._remote = store.capabilities.remote
        self._file_sizes = file_sizes
        self._decode = decode
        self._undo_transforms = undo_transforms
        self._callback = callback
        self._context = LandingContext(str(store.location), verify)
        self._budget = ByteBudget(transfer.budget_bytes)
        self._segments: dict[str, list[Segment[Landing]]] = {}
        self._foreign: dict[tuple[str, int], list[TensorWant]] = {}
        self._transformed: dict[tuple[str, int], list[TensorWant]] = {}
        self._objects: list[tuple[str, EntryLocation]] = []
        self._wants: list[TensorWant] = []
        self._devices: set[torch.device] = set()
        self._progress = threading.Lock()
        self._scratch = _ScratchPool()
        self.objects: dict[str, bytes] = {}
        self.totals = FetchTotals()

    @property
    def concurrency(self) -> int:
        """Requests in flight."""
        return self._transfer.concurrency if self._remote else self._transfer.local_concurrency

    @property
    def peak_scratch_bytes(self) -> int:
        """The most memory beyond the targets that was held at once."""
        return self._budget.peak_bytes

    def add_tensor(self, want: TensorWant) -> None:
        """Want a box. One without elements needs nothing."""
        location = want.location
        if location.transforms:
            self._transformed.setdefault((location.file, location.offset_bytes), []).append(want)
        elif location.payload_offset_bytes < 0:
            self._foreign.setdefault((location.file, location.offset_bytes), []).append(want)
        else:
            self._wants.append(want)

    def add_object(self, key: str, location: EntryLocation) -> None:
        """Want the bytes of a non-tensor value, in ``objects[key]`` afterwards."""
        self._objects.append((key, location))

    def run(self) -> None:
        """Read everything.

        Raises:
            CorruptCheckpointError: A checksum or a file's size is wrong.
            IncompleteCheckpointError: A file is missing.
            StorageError: The store failed.
        """
        try:
            limits = self._choose_limits()
            self._read_headers(limits)
            with contextlib.ExitStack() as stack:
                with collection_paused():
                    self._place(limits)
                if self.totals.needed_bytes <= _PAUSED_READ_BYTES:
                    stack.enter_context(collection_paused())
                self._read(limits)
            for device in self._devices:
                torch.accelerator.synchronize(device)
        except DcpfsError as error:
            error.message = f"{error.message} ({self._describe_written()})"
            raise

    # --- planning -------------------------------------------------------------------------------------------------

    def _choose_limits(self) -> RequestLimits:
        needed = sum(math.prod(want.lengths) * want.dtype.itemsize for want in self._wants)
        for wants in self._foreign.values():
            needed += sum(math.prod(want.lengths) * want.dtype.itemsize for want in wants)
        for wants in self._transformed.values():
            needed += wants[0].location.length_bytes
        needed += sum(location.length_bytes for _, location in self._objects)
        self.totals.needed_bytes = needed
        transfer = self._transfer
        read_bytes = transfer.read_bytes if self._remote else min(transfer.read_bytes, _LOCAL_READ_BYTES)
        return choose_limits(
            needed,
            concurrency=self.concurrency,
            gap_bytes=transfer.coalesce_gap_bytes,
            read_bytes=read_bytes,
            budget_bytes=transfer.budget_bytes,
            ranged=self._store.capabilities.ranged_reads,
            remote=self._remote,
        )

    def _place(self, limits: RequestLimits) -> None:
        for want in self._wants:
            self._place_want(want, limits)
        for wants in self._transformed.values():
            self._place_entry(wants)
        verify = self._context.verify
        for key, location in self._objects:
            target = self.objects
            start = location.offset_bytes
            if location.length_bytes == 0:
                target[key] = b""
                continue
            landing_: Landing
            if location.transforms:
                landing_ = EntryLanding(self._context, key, location.file, self._object_decoder(key, location))
            else:
                landing_ = ObjectLanding(self._context, key, location.file, target, location.crc32 if verify else -1)
            self._add(location.file, start, start + location.length_bytes, landing_, -1)

    def _place_want(self, want: TensorWant, limits: RequestLimits) -> None:
        key, dtype, sizes, location, _, lengths, target = want
        base = location.offset_bytes + location.payload_offset_bytes
        whole = lengths == sizes
        if whole and is_plain_memory(target, dtype):
            view = tensor_bytes(target)
            size_bytes = len(view)
            if size_bytes == 0:
                return
            expected = location.crc32 if self._context.verify else -1
            landing = MemoryLanding(self._context, key, location.file, view, target, expected)
            self._add(location.file, base, base + size_bytes, landing, 0)
            return
        self._place_box(want, base, limits)

    def _place_box(
        self,
        want: TensorWant,
        base: int,
        limits: RequestLimits,
        *,
        conjugate: bool = False,
        check: PayloadCheck | None = None,
    ) -> None:
        if 0 in want.lengths:
            return
        target, itemsize = want.target, want.dtype.itemsize
        if not target.is_cpu:
            self._devices.add(target.device)
        direct = not conjugate and is_plain_memory(target, want.dtype)
        view = tensor_bytes(target) if direct else memoryview(b"")
        strides = row_major_strides(want.lengths)
        if check is None and want.whole and self._context.verify and want.location.crc32 >= 0:
            size_bytes = math.prod(want.sizes) * itemsize
            check = PayloadCheck(self._context, want.key, want.location.file, size_bytes, want.location.crc32)
        for block in box_blocks(
            want.sizes,
            want.offsets,
            want.lengths,
            itemsize=itemsize,
            gap_bytes=limits.gap_bytes,
            block_bytes=limits.request_bytes,
            direct=direct,
        ):
            start = base + block.start_bytes
            if direct and block.dense:
                at = sum(o * s for o, s in zip(block.offsets, strides, strict=True)) * itemsize
                part = view[at : at + block.size_bytes]
                landing: Landing = MemoryLanding(self._context, want.key, want.location.file, part, target, check=check)
                self._add(want.location.file, start, start + block.size_bytes, landing, 0)
            else:
                landing = BlockLanding(self._context, want, block, conjugate=conjugate, check=check)
                self._add(want.location.file, start, start + block.size_bytes, landing, -1)

    def _add(self, file: str, start: int, stop: int, landing: Landing, position: int) -> None:
        segments = self._segments.get(file)
        if segments is None:
            segments = self._segments[file] = []
        segments.append(Segment(start, stop, landing, position))

    # --- other writers' entries -----------------------------------------------------------------------------------

    def _read_headers(self, limits: RequestLimits) -> None:
        """Read the headers of large foreign entries, and place all foreign ones."""
        headers: dict[tuple[str, int], TensorHeader | None] = {}
        tasks = []
        for wants in self._foreign.values():
            location = wants[0].location
            needed = sum(math.prod(want.lengths) * want.dtype.itemsize for want in wants)
            whole_bytes = min(_WHOLE_ENTRY_BYTES, limits.request_bytes, 8 * needed + 16 * _KIB)
            if location.length_bytes <= whole_bytes:
                self._place_entry(wants)
            else:
                size_bytes = header_size_bytes(location.length_bytes)
                tasks.append(Task(size_bytes, self._header_task(wants[0].key, location, headers)))
        if tasks:
            run_tasks(tasks, concurrency=self.concurrency, budget=self._budget, name="dcpfs-headers")
        for place, header in headers.items():
            wants = self._foreign[place]
            payload = None if header is None else dense_payload(header)
            if header is None or payload is None:
                self._place_entry(wants)
                continue
            check_header(header, wants[0], self._context)
            for want in wants:
                self._place_payload(want, header, payload, limits)

    def _place_entry(self, wants: list[TensorWant]) -> None:
        """Want a whole entry."""
        location = wants[0].location
        landing = EntryLanding(self._context, wants[0].key, location.file, self._entry_decoder(wants))
        start = location.offset_bytes
        self._add(location.file, start, start + location.length_bytes, landing, -1)

    def _place_payload(
        self, want: TensorWant, header: TensorHeader, payload: DensePayload, limits: RequestLimits
    ) -> None:
        """Want a box of a payload whose place is known now."""
        location = want.location
        check = None
        if self._context.verify and want.whole and payload.checked_bytes:
            check = PayloadCheck(self._context, want.key, location.file, payload.checked_bytes, -1)
            tail = header.payload_offset_bytes + header.payload_bytes
            if tail < location.length_bytes:
                landing = TailLanding(want.key, location.file, check, lambda data: parse_tensor_tail(header, data))
                start = location.offset_bytes
                self._add(location.file, start + tail, start + location.length_bytes, landing, -1)
        base = location.offset_bytes + payload.start_bytes
        self._place_box(payload.reorder(want), base, limits, conjugate=payload.conjugate, check=check)

    def _header_task(
        self, key: str, location: EntryLocation, headers: dict[tuple[str, int], TensorHeader | None]
    ) -> Callable[[], None]:
        def read_head(size_bytes: int) -> bytes:
            head = bytearray(min(size_bytes, location.length_bytes))
            self._read_into(key, location.file, location.offset_bytes, [memoryview(head)])
            return bytes(head)

        def read() -> None:
            what = f"key {key!r} in file {location.file!r} of {self._context.url}"
            headers[location.file, location.offset_bytes] = read_header(read_head, location.length_bytes, what)

        return read

    def _entry_decoder(self, wants: list[TensorWant]) -> Callable[[memoryview], None]:
        def decode(source: memoryview) -> None:
            decode_entry(source, wants, self._context, self._decode)

        return decode

    def _object_decoder(self, key: str, location: EntryLocation) -> Callable[[memoryview], None]:
        def decode(source: memoryview) -> None:
            self.objects[key] = self._undo_transforms(source, key, location)

        return decode

    # --- reading --------------------------------------------------------------------------------------------------

    def _read(self, limits: RequestLimits) -> None:
        self._scratch.size_bytes = limits.staged_bytes
        reads: list[tuple[Request[Landing], int]] = []
        checks: list[Task] = []
        for file, segments in sorted(self._segments.items()):
            requests = plan_requests(file, segments, limits)
            end, last = self._file_sizes.get(file, 0), requests[-1]
            reads += [(request, request.stop) for request in requests]
            if 0 < end - last.stop <= limits.gap_bytes:
                reads[-1] = (last, end)
            elif last.stop < end:
                checks.append(Task(0, self._size_task(file, end)))
        if self._callback is not None:
            self._callback.set_size(sum(tail - request.start for request, tail in reads))
        tasks = itertools.chain(checks, (Task(*self._request_task(request, tail)) for request, tail in reads))
        run_tasks(tasks, concurrency=self.concurrency, budget=self._budget, name="dcpfs-load")

    def _request_task(self, request: Request[Landing], tail: int) -> tuple[int, Callable[[], None]]:
        """Cost and work of one request, which reads on to ``tail`` so that a short file is noticed."""
        if request.staged:
            size_bytes = max(tail - request.start, self._scratch.size_bytes)
            if self._store.capabilities.copies_reads:
                size_bytes += tail - request.start
            return size_bytes, lambda: self._read_staged(request, tail)
        held = sum(s.stop - s.start for s in request.segments if s.position < 0)
        if self._store.capabilities.copies_reads:
            held += tail - request.start
        return held, lambda: self._read_scattered(request, tail)

    def _read_staged(self, request: Request[Landing], tail: int) -> None:
        begin = request.start
        with self._scratch.borrow(tail - begin) as scratch:
            self._read_into(request.segments[0].destination.key, request.file, begin, [scratch])
            for start, stop, landing, position in request.segments:
                landing.accept(position, scratch[start - begin : stop - begin])
        self._report(tail - begin)

    def _read_scattered(self, request: Request[Landing], tail: int) -> None:
        buffers: list[memoryview] = []
        at = request.start
        held = sum(s.stop - s.start for s in request.segments if s.position < 0)
        arrivals: list[tuple[Landing, int, memoryview, bool]] = []
        with self._scratch.borrow(held) as scratch:
            used = 0
            for start, stop, landing, position in request.segments:
                _fill_gap(buffers, start - at)
                window = landing.window(position, stop - start) if position >= 0 else None
                if window is None:
                    view = scratch[used : used + stop - start]
                    used += stop - start
                    arrivals.append((landing, position, view, False))
                else:
                    view = window
                    arrivals.append((landing, position, view, True))
                buffers.append(view)
                at = stop
            _fill_gap(buffers, tail - at)
            try:
                self._read_into(request.segments[0].destination.key, request.file, request.start, buffers)
            except IncompleteCheckpointError:
                raise
            except BaseException:  # some of it may have arrived
                self._context.written.update(landing.key for landing, _, _, filled in arrivals if filled)
                raise
            for landing, position, view, filled in arrivals:
                if filled:
                    landing.arrived(position, view)
                else:
                    landing.accept(position, view)
        self._report(tail - request.start)

    def _read_into(self, key: str, file: str, start: int, buffers: list[memoryview]) -> None:
        try:
            self._store.read_into(file, start, buffers)
        except TransferSizeError as error:
            recorded = self._file_sizes.get(file, 0)
            raise self._context.corrupt(
                key, file, f"the data ends before the {recorded} bytes that the metadata lists"
            ) from error
        except ObjectNotFoundError as error:
            raise IncompleteCheckpointError(
                f"loading key {key!r} from {self._context.url}: its file {file!r} is missing; the checkpoint is "
                f"incomplete, so load another one",
                missing=(file,),
            ) from error
        size_bytes = sum(len(buffer) for buffer in buffers)
        with self._progress:
            self.totals.requests += 1
            self.totals.moved_bytes += size_bytes

    def _size_task(self, file: str, recorded_bytes: int) -> Callable[[], None]:
        def check() -> None:
            key = self._segments[file][-1].destination.key
            try:
                size_bytes = self._store.head(file).size_bytes
            except ObjectNotFoundError as error:
                raise IncompleteCheckpointError(
                    f"loading key {key!r} from {self._context.url}: its file {file!r} is missing; the checkpoint is "
                    f"incomplete, so load another one",
                    missing=(file,),
                ) from error
            if size_bytes < recorded_bytes:
                raise self._context.corrupt(
                    key, file, f"only {size_bytes} of the {recorded_bytes} bytes that the metadata lists are"
                )
            with self._progress:
                self.totals.requests += 1

        return check

    def _report(self, size_bytes: int) -> None:
        if self._callback is not None:
            with self._progress:
                self._callback.relative_update(size_bytes)

    def _describe_written(self) -> str:
        written = sorted(self._context.written)
        if not written:
            return "nothing was written yet"
        shown = ", ".join(repr(key) for key in written[:10])
        rest = f" and {len(written) - 10} more" if len(written) > 10 else ""
        return f"already written, whole or in part: {shown}{rest}"


def _fill_gap(buffers: list[memoryview], size_bytes: int) -> None:
    """Add buffers for bytes that nobody looks at: all the same memory, whatever the size."""
    while size_bytes > 0:
        piece = min(size_bytes, _GAP_SCRATCH_BYTES)
        buffers.append(_gap_scratch[:piece])
        size_bytes -= piece


_gap_scratch = memoryview(bytearray(_GAP_SCRATCH_BYTES))


class _ScratchPool:
    """Buffers that are reused while one load runs: the first touch of fresh pages is slower than the network."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._free: list[memoryview] = []

    def borrow(self, size_bytes: int) -> _Loan:
        """A buffer of that length for a ``with`` block."""
        return _Loan(self, size_bytes)


class _Loan:
    __slots__ = ("_buffer", "_pool", "_size_bytes")

    def __init__(self, pool: _ScratchPool, size_bytes: int) -> None:
        self._pool = pool
        self._size_bytes = size_bytes
        self._buffer = memoryview(b"")

    def __enter__(self) -> memoryview:
        free = self._pool._free
        if 0 < self._size_bytes <= self._pool.size_bytes:
            try:
                self._buffer = free.pop()
            except IndexError:
                self._buffer = memoryview(bytearray(self._pool.size_bytes))
        elif self._size_bytes:
            self._buffer = memoryview(bytearray(self._size_bytes))
        return self._buffer[: self._size_bytes]

    def __exit__(self, *_: object) -> None:
        if len(self._buffer) == self._pool.size_bytes and self._size_bytes:
            self._pool._free.append(self._buffer)
