"""Bring the wanted boxes and objects of a checkpoint into memory: many bounded ranged reads, each checked on arrival.

Problem: one thread reading one entry after another leaves a link idle; a thread pool that is handed everything
buffers everything (case 63). And a failure in the middle leaves a state of which nobody knows what is old and what is
new.

Way taken: wants become landings and segments (`dcpfs.dcp.landing`), and `dcpfs.dcp.delivery` brings these in bounded
requests. Entries of other writers say where their payload is only in their own header: small ones are read whole, most
large ones on a guess that the head confirms on arrival (`dcpfs.dcp.guess`), and of the rest the headers come first. An
error says which keys have been written.

Flow: ``fetch = Fetch(...)`` → ``fetch.add_tensor(want)`` / ``fetch.add_object(key, location)`` → ``fetch.run()`` →
``fetch.objects``. Everything but the requests happens in the calling thread.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from dcpfs.config import TransferConfig
from dcpfs.dcp.aliases import Alias, Detours
from dcpfs.dcp.delivery import Delivery, FetchTotals, Segments
from dcpfs.dcp.foreign import (
    DensePayload,
    check_header,
    decode_entry,
    dense_payload,
    expected_checksum,
    header_size_bytes,
    parse_header,
)
from dcpfs.dcp.guess import GuessedEntry, guess_frame
from dcpfs.dcp.host_memory import resident_bytes, tensor_bytes
from dcpfs.dcp.landing import (
    BlockLanding,
    EntryLanding,
    FrameLanding,
    Landing,
    LandingContext,
    MemoryLanding,
    ObjectLanding,
    PayloadCheck,
    TensorLanding,
    TensorWant,
    is_plain_memory,
)
from dcpfs.dcp.read_plan import RequestLimits, Segment, box_blocks, choose_limits, row_major_strides
from dcpfs.errors import DcpfsError
from dcpfs.format.collector import paused_collector
from dcpfs.format.frames import FrameSizes
from dcpfs.format.headers import TensorHeader
from dcpfs.format.index import EntryLocation
from dcpfs.storage.store import Store

if TYPE_CHECKING:
    from fsspec.callbacks import Callback

__all__ = ["Fetch"]

_KIB = 1 << 10
_MIB = 1 << 20
_LOCAL_READ_BYTES = 4 * _MIB
"""Longest read of a local file: a request costs nothing there, and the checksum finds the bytes in the cache."""
_PAUSED_READ_BYTES = 4 << 30
"""A load up to this size takes seconds: garbage collection, which would walk all its records, waits for its end."""
_WHOLE_ENTRY_BYTES = 1 * _MIB
"""Another writer's entry up to this size is read whole; a header request costs a round trip, as long as 1.6 MB."""

_make_segment = functools.partial(tuple.__new__, Segment)
_make_landing = functools.partial(tuple.__new__, TensorLanding)


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
        self._decode = decode
        self._undo_transforms = undo_transforms
        self._context = LandingContext(str(store.location), verify)
        self._segments: Segments = {}
        self._foreign: dict[tuple[str, int], list[TensorWant]] = {}
        self._transformed: dict[tuple[str, int], list[TensorWant]] = {}
        self._objects: list[tuple[str, EntryLocation]] = []
        self._detours: Detours | None = None
        self._wants: list[TensorWant] = []
        self._sizes_bytes: list[int] = []
        self._devices: set[torch.device] = set()
        self._delivery = Delivery(
            store,
            self._context,
            concurrency=self.concurrency,
            budget_bytes=transfer.budget_bytes,
            file_sizes=file_sizes,
            callback=callback,
        )
        self.objects: dict[str, bytes] = {}

    @property
    def concurrency(self) -> int:
        """Requests in flight."""
        return self._transfer.concurrency if self._remote else self._transfer.local_concurrency

    @property
    def totals(self) -> FetchTotals:
        """What it did so far."""
        return self._delivery.totals

    @property
    def peak_scratch_bytes(self) -> int:
        """The most memory beyond the targets that was held at once."""
        return self._delivery.peak_scratch_bytes

    @property
    def written(self) -> frozenset[str]:
        """Keys whose targets were written to, whole or in part, also when `run` failed."""
        return frozenset(self._context.written)

    def add_aliases(self, aliases: Sequence[Alias]) -> None:
        """Say which wants share memory, before they are added: what they get is compared after the reads."""
        if aliases:
            self._detours = Detours(aliases)

    def add_tensor(self, want: TensorWant) -> None:
        """Want a box. One without elements needs nothing."""
        if self._detours is not None:
            want = self._detours.of(want)
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
            KeyMismatchError: Keys that share memory in the state have different values.
            StorageError: The store failed.
        """
        try:
            limits = self._choose_limits()
            guesses = self._place_foreign(limits)
            with contextlib.ExitStack() as stack:
                with paused_collector():
                    self._place(limits)
                if self.totals.needed_bytes <= _PAUSED_READ_BYTES:
                    stack.enter_context(paused_collector())
                self._delivery.run(self._segments, limits)
                self._correct(guesses, limits)
            for device in self._devices:
                torch.accelerator.synchronize(device)
            if self._detours is not None:
                self._detours.settle(self._context.url)
        except DcpfsError as error:
            error.message = f"{error.message} ({self._describe_written()})"
            raise

    # --- planning -------------------------------------------------------------------------------------------------

    def _choose_limits(self) -> RequestLimits:
        self._sizes_bytes = [math.prod(want.lengths) * want.dtype.itemsize for want in self._wants]
        needed = sum(self._sizes_bytes)
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
        verify = self._context.verify
        for want, size_bytes in zip(self._wants, self._sizes_bytes, strict=True):
            if want.resident:
                self._place_resident(want, size_bytes, verify)
            else:
                self._place_want(want, limits)
        for wants in self._transformed.values():
            self._place_entry(wants)
        for key, location in self._objects:
            target = self.objects
            if location.length_bytes == 0:
                target[key] = b""
                continue
            landing_: Landing
            if location.transforms:
                landing_ = EntryLanding(self._context, key, location.file, self._object_decoder(key, location))
            else:
                landing_ = ObjectLanding(self._context, key, location.file, target, location.crc32 if verify else -1)
            self._add(location.file, location.offset_bytes, _end(location), landing_, -1)

    def _place_resident(self, want: TensorWant, size_bytes: int, verify: bool) -> None:
        """The same as `_place_want` for nearly all tensors, in a third of the time."""
        if size_bytes == 0:
            return
        key, _, _, (file, offset_bytes, _, payload_offset_bytes, crc, _), _, _, target, _ = want
        start = offset_bytes + payload_offset_bytes
        landing = _make_landing((key, file, self._context, target, size_bytes, start, crc if verify else -1))
        segments = self._segments.get(file)
        if segments is None:
            segments = self._segments[file] = []
        segments.append(_make_segment((start, start + size_bytes, landing, 0)))

    def _place_want(self, want: TensorWant, limits: RequestLimits) -> None:
        key, dtype, sizes, location, _, lengths, target, _ = want
        file, offset_bytes, _, payload_offset_bytes, crc, _ = location
        base = offset_bytes + payload_offset_bytes
        view = resident_bytes(target) if lengths == sizes and target.dtype is dtype else None
        if view is None:
            self._place_box(want, base, limits)
            return
        size_bytes = len(view)
        if size_bytes == 0:
            return
        context = self._context
        landing = MemoryLanding(context, key, file, view, target, crc if context.verify else -1)
        self._add(file, base, base + size_bytes, landing, 0)

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
        segments.append(_make_segment((start, stop, landing, position)))

    # --- other writers' entries -----------------------------------------------------------------------------------

    def _place_foreign(self, limits: RequestLimits) -> list[GuessedEntry]:
        """Place the entries of other writers: small ones whole, others by a guess, the rest by their headers."""
        guesses: list[GuessedEntry] = []
        unknown: list[list[TensorWant]] = []
        ranged = self._store.capabilities.ranged_reads
        for wants in self._foreign.values():
            location = wants[0].location
            needed = sum(math.prod(want.lengths) * want.dtype.itemsize for want in wants)
            whole_bytes = min(_WHOLE_ENTRY_BYTES, limits.request_bytes, 8 * needed + 16 * _KIB)
            if location.length_bytes <= whole_bytes:
                self._place_entry(wants)
                continue
            sizes = guess_frame(wants[0]) if len(wants) == 1 and wants[0].whole else None
            if sizes is not None:
                guesses.append(self._place_guess(wants[0], sizes, limits))
            elif ranged:
                unknown.append(wants)
            else:
                self._place_entry(wants)
        for wants, header in self._read_headers(unknown, limits):
            self._place_known(wants, header, limits)
        return guesses

    def _place_guess(self, want: TensorWant, sizes: FrameSizes, limits: RequestLimits) -> GuessedEntry:
        """Want an entry's payload as if it were where it mostly is, and the head that tells."""
        key, file, start, stop = want.key, want.location.file, want.location.offset_bytes, _end(want.location)
        check = None
        if self._context.verify:
            check = PayloadCheck(self._context, key, file, sizes.payload_bytes, -1)
        guess = GuessedEntry(self._context, want, sizes, check)
        payload = start + sizes.head_bytes
        self._add(file, start, payload, FrameLanding(key, file, guess.take_head), -1)
        self._place_box(want, payload, limits, check=check)
        if check is not None:
            self._add(file, stop - sizes.tail_bytes, stop, FrameLanding(key, file, guess.take_tail), -1)
        return guess

    def _correct(self, guesses: list[GuessedEntry], limits: RequestLimits) -> None:
        """Read again, knowing the headers, what was read by a wrong guess."""
        wrong = [guess for guess in guesses if guess.refuted]
        if not wrong:
            return
        self._segments = {}
        for guess in wrong:
            if guess.header is not None:
                self._place_known([guess.want], guess.header, limits)
        unknown = [[guess.want] for guess in wrong if guess.header is None]
        for wants, header in self._read_headers(unknown, limits):
            self._place_known(wants, header, limits)
        self._delivery.run(self._segments, limits)

    def _read_headers(
        self, entries: list[list[TensorWant]], limits: RequestLimits
    ) -> list[tuple[list[TensorWant], TensorHeader | None]]:
        """Read the headers of entries: near ones in one request, those that are longer than expected once more."""
        heads: dict[int, bytes] = {}
        found: list[tuple[list[TensorWant], TensorHeader | None]] = []
        waiting = [(wants, header_size_bytes(wants[0].location.length_bytes)) for wants in entries]
        while waiting:
            segments: Segments = {}
            for position, (wants, size_bytes) in enumerate(waiting):
                key, location = wants[0].key, wants[0].location
                landing = FrameLanding(key, location.file, functools.partial(heads.__setitem__, position))
                start = location.offset_bytes
                segments.setdefault(location.file, []).append(Segment(start, start + size_bytes, landing, -1))
            self._delivery.run(segments, limits)
            longer = []
            for position, (wants, _) in enumerate(waiting):
                parsed = parse_header(heads.pop(position), wants[0], self._context)
                if isinstance(parsed, int):
                    longer.append((wants, parsed))
                else:
                    found.append((wants, parsed))
            waiting = longer
        return found

    def _place_known(self, wants: list[TensorWant], header: TensorHeader | None, limits: RequestLimits) -> None:
        """Want boxes of an entry whose header has been read; None: only torch can decode it."""
        payload = None if header is None else dense_payload(header)
        if header is None or payload is None:
            self._place_entry(wants)
            return
        check_header(header, wants[0], self._context)
        for want in wants:
            self._place_payload(want, header, payload, limits)

    def _place_entry(self, wants: list[TensorWant]) -> None:
        """Want a whole entry."""
        location = wants[0].location
        landing = EntryLanding(self._context, wants[0].key, location.file, self._entry_decoder(wants))
        self._add(location.file, location.offset_bytes, _end(location), landing, -1)

    def _place_payload(
        self, want: TensorWant, header: TensorHeader, payload: DensePayload, limits: RequestLimits
    ) -> None:
        """Want a box of a payload whose place is known now."""
        location = want.location
        check = None
        if self._context.verify and want.whole and payload.checked_bytes:
            check = PayloadCheck(self._context, want.key, location.file, payload.checked_bytes, -1)
            take = functools.partial(self._expect, want, header, check)
            start = location.offset_bytes + header.payload_offset_bytes + header.payload_bytes
            stop = _end(location)
            if start == stop:
                take(b"")
            else:
                self._add(location.file, start, stop, FrameLanding(want.key, location.file, take), -1)
        base = location.offset_bytes + payload.start_bytes
        self._place_box(payload.reorder(want), base, limits, conjugate=payload.conjugate, check=check)

    def _expect(self, want: TensorWant, header: TensorHeader, check: PayloadCheck, tail: bytes) -> None:
        expected = expected_checksum(header, tail, want, self._context)
        if expected is not None:
            check.expect(expected)

    def _entry_decoder(self, wants: list[TensorWant]) -> Callable[[memoryview], None]:
        def decode(source: memoryview) -> None:
            decode_entry(source, wants, self._context, self._decode)

        return decode

    def _object_decoder(self, key: str, location: EntryLocation) -> Callable[[memoryview], None]:
        def decode(source: memoryview) -> None:
            self.objects[key] = self._undo_transforms(source, key, location)

        return decode

    def _describe_written(self) -> str:
        written = sorted(self._context.written)
        if not written:
            return "nothing was written yet"
        shown = ", ".join(repr(key) for key in written[:10])
        rest = f" and {len(written) - 10} more" if len(written) > 10 else ""
        return f"already written, whole or in part: {shown}{rest}"


def _end(location: EntryLocation) -> int:
    return location.offset_bytes + location.length_bytes
