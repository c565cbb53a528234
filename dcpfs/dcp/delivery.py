"""Run planned reads against a store: bytes go from ranged requests to their landings.

Problem: what is read of a file says nothing of what is not: a file that was cut short is noticed only where somebody
reads past its end. Fresh scratch memory for every request is slower than the network, and a failure in the middle
leaves targets of which nobody knows whether they were written.

Way taken: one place that calls the store for a load. Requests run in the bounded pool of `dcpfs.dcp.transfer` with
what they hold counted in the budget; scratch buffers are reused; a file is read on to the end that the metadata gives
it when that is near, or its size is asked for; keys whose memory may have been touched are noted even when a request
fails.

Flow: segments by file → `dcpfs.dcp.read_plan.plan_requests` → `Delivery.run` → `Landing.accept` or `Landing.arrived`.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dcpfs.dcp.landing import Landing, LandingContext
from dcpfs.dcp.read_plan import Request, RequestLimits, Segment, choose_joins, plan_requests
from dcpfs.dcp.scratch import ScratchPool
from dcpfs.dcp.transfer import ByteBudget, Task, run_tasks
from dcpfs.errors import DamagedObjectError, IncompleteCheckpointError, ObjectNotFoundError, TransferSizeError
from dcpfs.storage.store import Store

if TYPE_CHECKING:
    from fsspec.callbacks import Callback

__all__ = ["Delivery", "FetchTotals", "Segments"]

_GAP_SCRATCH_BYTES = 64 << 10

Segments = dict[str, list[Segment[Landing]]]
"""What is wanted of each file."""


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


class Delivery:
    """One load's way to its store. `run` belongs to one thread; the workers are its own.

    Args:
        store: The checkpoint's store.
        context: The load; its ``written`` is kept up to date.
        concurrency: Requests in flight.
        budget_bytes: Memory beyond the targets.
        file_sizes: Least size of each data file, by the metadata.
        callback: Told the bytes of each finished request, one call at a time, from any thread.
    """

    def __init__(
        self,
        store: Store,
        context: LandingContext,
        *,
        concurrency: int,
        budget_bytes: int,
        file_sizes: Mapping[str, int],
        callback: Callback | None = None,
    ) -> None:
        self._store = store
        capabilities = store.capabilities
        self._remote = capabilities.remote
        self._copies_reads = capabilities.copies_reads
        self._context = context
        self._concurrency = concurrency
        self._budget = ByteBudget(budget_bytes)
        self._file_sizes = file_sizes
        self._callback = callback
        self._planned_bytes = 0
        self._scratch = ScratchPool()
        self._progress = threading.Lock()
        self._unpacking = threading.Lock()
        self._checked: set[str] = set()
        self.totals = FetchTotals()

    @property
    def peak_scratch_bytes(self) -> int:
        """The most memory beyond the targets that was held at once."""
        return self._budget.peak_bytes

    def run(self, segments: Segments, limits: RequestLimits) -> None:
        """Read segments, and once for each file that is touched make sure that it is not cut short.

        Raises:
            CorruptCheckpointError: A checksum or a file's size is wrong.
            IncompleteCheckpointError: A file is missing.
            StorageError: The store failed.
        """
        if not segments:
            return
        joins = choose_joins(segments, limits) if self._remote else {}
        self._scratch.size_bytes = limits.staged_bytes
        reads: list[tuple[Request[Landing], int]] = []
        checks: list[Task] = []
        for file, wanted in sorted(segments.items()):
            requests = plan_requests(file, wanted, limits, joins.get(file, ()))
            reads += [(request, request.stop) for request in requests]
            end, last = self._file_sizes.get(file, 0), requests[-1]
            if last.stop >= end:
                self._checked.add(file)
            elif file not in self._checked:
                self._checked.add(file)
                if end - last.stop <= limits.gap_bytes:
                    reads[-1] = (last, end)
                else:
                    checks.append(Task(0, self._size_task(last.segments[-1].destination.key, file, end)))
        self._planned_bytes += sum(tail - request.start for request, tail in reads)
        if self._callback is not None:
            self._callback.set_size(self._planned_bytes)
        tasks = itertools.chain(checks, (Task(*self._request_task(request, tail)) for request, tail in reads))
        run_tasks(tasks, concurrency=self._concurrency, budget=self._budget, name="dcpfs-load")

    def _request_task(self, request: Request[Landing], tail: int) -> tuple[int, Callable[[], None]]:
        """Cost and work of one request, which reads on to ``tail`` so that a short file is noticed."""
        copied_bytes = tail - request.start if self._copies_reads else 0
        if request.staged:
            held = self._scratch.cost_bytes(tail - request.start)
            read = self._read_staged
        else:
            held = self._scratch.cost_bytes(_scratch_bytes(request))
            read = self._read_scattered

        def run() -> None:
            if held > _BELIEVED_BYTES:
                self._size_task(request.segments[0].destination.key, request.file, request.stop)()
            read(request, tail)

        return held + copied_bytes, run

    def _read_staged(self, request: Request[Landing], tail: int) -> None:
        begin = request.start
        with self._scratch.borrow(tail - begin) as scratch:
            self._read_into(request.segments[0].destination.key, request.file, begin, [scratch], tail)
            # Many small copies keep the interpreter to themselves anyway. Threads that wait for it in turn, and not
            # here, take 1.6 times as long (20,000 tensors of 4-64 KB, 32 requests in flight).
            with self._unpacking:
                for start, stop, landing, position in request.segments:
                    landing.accept(position, scratch[start - begin : stop - begin])
        self._report(tail - begin)

    def _read_scattered(self, request: Request[Landing], tail: int) -> None:
        buffers: list[memoryview] = []
        at = request.start
        arrivals: list[tuple[Landing, int, memoryview, bool]] = []
        with self._scratch.borrow(_scratch_bytes(request)) as scratch:
            used = 0
            for start, stop, landing, position in request.segments:
                if start > at:
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
                self._read_into(request.segments[0].destination.key, request.file, request.start, buffers, tail)
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

    def _read_into(self, key: str, file: str, start: int, buffers: list[memoryview], stop: int) -> None:
        try:
            self._store.read_into(file, start, buffers)
        except TransferSizeError as error:
            recorded = self._file_sizes.get(file, 0)
            raise self._context.corrupt(
                key, file, f"the data ends before the {recorded} bytes that the metadata lists"
            ) from error
        except DamagedObjectError as error:
            raise self._context.corrupt(key, file, f"the store finds damage ({error.message})") from error
        except ObjectNotFoundError as error:
            raise self._missing(key, file) from error
        with self._progress:
            self.totals.requests += 1
            self.totals.moved_bytes += stop - start

    def _size_task(self, key: str, file: str, recorded_bytes: int) -> Callable[[], None]:
        def check() -> None:
            try:
                size_bytes = self._store.head(file).size_bytes
            except ObjectNotFoundError as error:
                raise self._missing(key, file) from error
            if size_bytes < recorded_bytes:
                raise self._context.corrupt(
                    key, file, f"only {size_bytes} of the {recorded_bytes} bytes that the metadata lists are"
                )
            with self._progress:
                self.totals.requests += 1

        return check

    def _missing(self, key: str, file: str) -> IncompleteCheckpointError:
        return IncompleteCheckpointError(
            f"loading key {key!r} from {self._context.url}: its file {file!r} is missing; the checkpoint is "
            f"incomplete, so load another one",
            missing=(file,),
        )

    def _report(self, size_bytes: int) -> None:
        if self._callback is not None:
            with self._progress:
                self._callback.relative_update(size_bytes)


def _scratch_bytes(request: Request[Landing]) -> int:
    """What of a scattered request goes through scratch memory."""
    return sum(segment.stop - segment.start for segment in request.segments if segment.position < 0)


def _fill_gap(buffers: list[memoryview], size_bytes: int) -> None:
    """Add buffers for bytes that nobody looks at: all the same memory, whatever the size."""
    while size_bytes > 0:
        piece = min(size_bytes, _GAP_SCRATCH_BYTES)
        buffers.append(_gap_scratch[:piece])
        size_bytes -= piece


_BELIEVED_BYTES = 64 << 20
"""Memory that the metadata's word is enough for. An entry that claims more is first held against its file's size."""
_gap_scratch = memoryview(bytearray(_GAP_SCRATCH_BYTES))
