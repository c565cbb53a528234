"""Send the files of one rank: parts straight from tensor memory, in parallel, within a byte budget, all or nothing.

Problem: torch's writer pushes each entry through one stream, so one thread frames, copies and sends everything, and
what it holds is the store's business. More threads of that kind lose errors (case 1) and memory (case 66), and a
failure leaves a truncated file under its final name (case 31).

Way taken: files are placed already (`placement`), so each part is an independent task: list the buffers that fill it
(no copy, except that runs of small ones are joined), checksum them, send them. Tensors are asked from the planner in
the calling thread, as late as their first part. What can't be sent from where it lies takes memory, and that is
acquired from the budget before it is made:

* row-major memory of a CPU tensor: nothing.
* a tensor on a device: copied part by part into a bounded ring of host buffers, the copy overlapping with sending.
* a strided or conjugate CPU tensor, or one that a planner makes on the fly: the whole tensor, until its last part.
* small buffers: their sum, while the part that joins them is in flight.

All that a part needs is acquired at once, and by then nothing is held that only a later part gives back; so a part
that is larger than the budget passes alone, and no order of events ends in a circle. Files become visible only after
the last part of the last file has been sent; on any failure all are aborted, or deleted again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from dcpfs.dcp.file_checksums import FileChecksums
from dcpfs.dcp.host_memory import HostBuffer, HostStaging, flat_bytes, tensor_bytes, to_host
from dcpfs.dcp.payload import BytesPayload, Payload, TensorPayload
from dcpfs.dcp.placement import FileLayout, Piece, cut
from dcpfs.dcp.transfer import ByteBudget, Task, run_tasks
from dcpfs.format.checksum import crc32, crc32_combine
from dcpfs.storage.store import Buffer, PartMemory, PartRange, Sink, Store

__all__ = ["UploadReport", "Uploader"]

_SMALL_BYTES = 64 << 10
"""Buffers below this are joined with their neighbours: copying 64 KiB costs about as much as one more vector."""


@dataclass
class UploadReport:
    """What was sent.

    Attributes:
        bytes_written: Size of all files.
        requests: Parts sent.
        files: Files published.
    """

    bytes_written: int = 0
    requests: int = 0
    files: int = 0


class Uploader:
    """Sends one rank's files once. Every method belongs to the calling thread.

    Args:
        store: Where to.
        payloads: All entries of the plan. Those with values attached already are not asked for again.
        resolve: Gives the tensor of an entry by its position in the plan; called in this thread, once per tensor.
        makes_tensors: ``resolve`` makes tensors that nobody else holds, so they count against the budget.
        concurrency: Most parts in flight.
        budget: Memory beyond the state itself.
        on_bytes: Told the size of each part when it has been sent; called in any thread, one call at a time.
        checksums: Told the checksum of each part before it is sent; None: nobody needs those of whole files.
    """

    def __init__(
        self,
        store: Store,
        payloads: Sequence[Payload],
        resolve: Callable[[int], torch.Tensor],
        *,
        makes_tensors: bool,
        concurrency: int,
        budget: ByteBudget,
        on_bytes: Callable[[int], None] | None = None,
        checksums: FileChecksums | None = None,
    ) -> None:
        self._store = store
        self._payloads = payloads
        self._resolve = resolve
        self._makes_tensors = makes_tensors
        self._concurrency = concurrency
        self._budget = budget
        self._on_bytes = on_bytes
        self._checksums = checksums
        self._lock = threading.Lock()
        self._parallel_parts = store.capabilities.parallel_parts
        self._sizes_bytes = [payload.size_bytes for payload in payloads]
        self._staging: dict[torch.device, HostStaging] = {}
        self._on_device: dict[int, torch.Tensor] = {}
        self._borrowed: dict[int, _Loan] = {}
        self._report = UploadReport()
        self._memory = self._find_part_memory()

    def upload(self, files: Sequence[tuple[str, FileLayout]]) -> UploadReport:
        """Send all files and publish them under their names.

        Raises:
            BaseException: The first failure of any part; no file of this call is left behind.
        """
        sinks: list[tuple[str, Sink]] = []
        published: list[str] = []
        try:
            run_tasks(
                self._interleave(files, sinks),
                concurrency=self._concurrency,
                budget=self._budget,
                name="dcpfs-save",
            )

            def publish(name: str, sink: Sink) -> Callable[[], None]:
                def run() -> None:
                    published.append(name)  # before: a commit that fails may still have taken effect
                    sink.commit()

                return run

            commits = [Task(0, publish(name, sink)) for name, sink in sinks]
            run_tasks(commits, concurrency=min(self._concurrency, 16), budget=self._budget, name="dcpfs-commit")
        except BaseException as error:
            self._withdraw(sinks, published, error)
            raise
        self._report.files = len(sinks)
        self._report.bytes_written = sum(layout.size_bytes for _, layout in files)
        return self._report

    def _withdraw(self, sinks: list[tuple[str, Sink]], published: list[str], cause: BaseException) -> None:
        notes = []
        for name, sink in sinks:
            try:
                sink.abort()
            except Exception as error:  # noqa: BLE001, PERF203 - noted on the error that is raised
                notes.append(f"{name} could not be aborted: {error}")
        try:
            if published:
                self._store.delete(published)
        except Exception as error:  # noqa: BLE001 - noted on the error that is raised
            notes.append(f"{', '.join(published)} could not be deleted again: {error}")
        if notes:
            cause.__notes__ = [*getattr(cause, "__notes__", ()), *notes]  # type: ignore[attr-defined]  # new in 3.11

    def _interleave(self, files: Sequence[tuple[str, FileLayout]], sinks: list[tuple[str, Sink]]) -> Iterator[Task]:
        """Tasks of all files. Where a file takes one part at a time, files take turns."""
        supplies = [self._file_tasks(name, layout, sinks) for name, layout in files]
        # `run_tasks` looks for a second task before it runs the first; ours waits in here for what the first holds.
        yield Task(0, _do_nothing)
        if self._parallel_parts or self._makes_tensors or len(supplies) == 1:
            for supply in supplies:
                yield from supply
            return
        while supplies:
            alive = []
            for supply in supplies:
                task = next(supply, None)
                if task is not None:
                    alive.append(supply)
                    yield task
                    # An entry that is held for a later part of this file must not wait for another file's turn.
                    while self._borrowed and (task := next(supply, None)) is not None:
                        yield task
            supplies = alive

    def _file_tasks(self, name: str, layout: FileLayout, sinks: list[tuple[str, Sink]]) -> Iterator[Task]:
        sink = self._store.open_sink(name, layout.size_bytes, memory=self._memory)
        sinks.append((name, sink))
        turn = None if self._parallel_parts else _Turn()
        parts = sink.parts()
        largest_bytes = max(part.size_bytes for part in parts)
        for index, (part, pieces) in enumerate(cut(layout, self._sizes_bytes, parts)):
            job = self._prepare(_PartJob(self, name, sink, part, index, turn), pieces, largest_bytes)
            self._report.requests += 1
            yield Task(0, job.run, job.discard)

    def _find_part_memory(self) -> PartMemory:
        """In place: no tensor is copied, and the small buffers of all parts, once joined, fit the budget together.

        Then no part waits for memory, however large parts are.
        """
        if self._makes_tensors:
            return PartMemory.COPIED
        joined_bytes = 0
        for payload in self._payloads:
            if isinstance(payload, TensorPayload) and payload.host is None:
                return PartMemory.COPIED
            joined_bytes += payload.size_bytes
            if payload.payload_bytes >= _SMALL_BYTES:
                joined_bytes -= payload.payload_bytes
        return PartMemory.IN_PLACE if joined_bytes <= self._budget.total_bytes else PartMemory.COPIED

    def _prepare(self, job: _PartJob, pieces: list[Piece], largest_bytes: int) -> _PartJob:
        """Collect what fills the part, and acquire the memory that takes."""
        cost_bytes = 0
        make: list[tuple[TensorPayload, int, torch.Tensor]] = []
        staged: list[tuple[int, int, int, torch.Tensor]] = []  # slot, first and last byte of the payload, flat
        staged_bytes = 0
        for piece in pieces:
            payload = self._payloads[piece.number]
            slot = len(job.loads)
            job.loads.append((payload, piece, None))
            cost_bytes += _joined_bytes(payload, piece)
            if isinstance(payload, BytesPayload):
                continue
            if piece.start == 0 and not piece.whole:
                payload.split()
            if piece.start == 0 and payload.host is None:
                tensor = self._resolve(piece.number)
                if payload.payload_bytes == 0:
                    payload.host = to_host(tensor)
                elif not _is_on_host(tensor):
                    self._on_device[piece.number] = flat_bytes(tensor)
                elif self._makes_tensors or not payload.attach(tensor):
                    make.append((payload, piece.number, tensor))
                    cost_bytes += payload.payload_bytes
            flat = self._on_device.get(piece.number)
            if flat is not None:
                first, last = payload.payload_range(piece.start, piece.stop)
                staged.append((slot, first, last, flat))
                staged_bytes += last - first
                if piece.stop == payload.size_bytes:
                    del self._on_device[piece.number]
        cost_bytes += staged_bytes
        self._continue_loans(job, detach=cost_bytes > 0)
        if cost_bytes:
            self._budget.acquire(cost_bytes)
            job.cost_bytes = cost_bytes - sum(payload.payload_bytes for payload, _, _ in make)
        for payload, number, tensor in make:
            payload.host = to_host(tensor)
            loan = _Loan(payload, self._budget)
            loan.share()
            job.loans.append(loan)
            last_here = pieces[-1].number == number and pieces[-1].stop < payload.size_bytes
            if last_here:
                self._borrowed[number] = loan
            else:
                loan.give_back()
        if staged_bytes:
            self._stage(job, staged, staged_bytes, largest_bytes)
        return job

    def _continue_loans(self, job: _PartJob, *, detach: bool) -> None:
        """Go on with the entry that an earlier part made, if any reaches into this one."""
        for slot, (payload, piece, _) in enumerate(job.loads):
            loan = self._borrowed.get(piece.number)
            if loan is None or piece.start == 0 or not isinstance(payload, TensorPayload):
                continue
            ends = piece.stop == payload.size_bytes
            if detach:
                first, last = payload.payload_range(piece.start, piece.stop)
                if payload.host is None:
                    raise RuntimeError("the values of this entry are gone already")
                copied = bytearray(tensor_bytes(payload.host)[first:last])
                job.loads[slot] = (payload, piece, memoryview(copied))
                ends = True
            else:
                loan.share()
                job.loans.append(loan)
            if ends:
                del self._borrowed[piece.number]
                loan.give_back()

    def _stage(
        self,
        job: _PartJob,
        staged: list[tuple[int, int, int, torch.Tensor]],
        staged_bytes: int,
        largest_bytes: int,
    ) -> None:
        device = staged[0][3].device
        staging = self._staging.get(device)
        if staging is None or staging.buffer_bytes < staged_bytes:
            buffers = max(2, min(self._concurrency + 2, self._budget.total_bytes // max(1, largest_bytes)))
            staging = HostStaging(device, buffer_bytes=max(largest_bytes, staged_bytes), buffers=buffers)
            self._staging[device] = staging
        job.buffer = buffer = staging.acquire()
        position = 0
        for slot, first, last, flat in staged:
            buffer.copy_in(position, flat[first:last])
            job.staged.append((slot, position, position + last - first))
            position += last - first

    def count(self, size_bytes: int) -> None:
        """A part has been sent. Any thread."""
        if self._on_bytes is not None:
            with self._lock:
                self._on_bytes(size_bytes)

    def note_checksum(self, name: str, part: PartRange, joined: Sequence[Buffer], known: Mapping[int, int]) -> None:
        """Take the checksum of a part. Any thread.

        Args:
            name: Of the file.
            part: The part.
            joined: What fills it.
            known: CRC-32 of those buffers that have one already, by their address.
        """
        if self._checksums is None:
            return
        total = 0
        for buffer in joined:
            crc = known.get(id(buffer))
            total = crc32(buffer, total) if crc is None else crc32_combine(total, crc, len(buffer))
        self._checksums.add(name, part.start, part.size_bytes, total)

    def give_back(self, size_bytes: int) -> None:
        """Memory of a part is free again. Any thread."""
        if size_bytes:
            self._budget.release(size_bytes)


class _Loan:
    """An entry's whole host copy, shared by the parts that send it. The budget gets it back with the last one."""

    __slots__ = ("_budget", "_lock", "_payload", "_users")

    def __init__(self, payload: TensorPayload, budget: ByteBudget) -> None:
        self._payload = payload
        self._budget = budget
        self._users = 1
        self._lock = threading.Lock()

    def share(self) -> None:
        with self._lock:
            self._users += 1

    def give_back(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users:
                return
        self._payload.done()
        self._budget.release(self._payload.payload_bytes)


class _Turn:
    """Lets the parts of one file pass in ascending order."""

    def __init__(self) -> None:
        self._next = 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def wait(self, index: int) -> None:
        with self._changed:
            while self._next != index and self._error is None:
                self._changed.wait()
            if self._error is not None:
                raise self._error

    def advance(self) -> None:
        with self._changed:
            self._next += 1
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()


class _PartJob:
    """One part: what fills it, and what it holds while in flight."""

    __slots__ = (
        "_index",
        "_name",
        "_part",
        "_sink",
        "_turn",
        "_uploader",
        "buffer",
        "cost_bytes",
        "loads",
        "loans",
        "staged",
    )

    def __init__(
        self, uploader: Uploader, name: str, sink: Sink, part: PartRange, index: int, turn: _Turn | None
    ) -> None:
        self._uploader = uploader
        self._name = name
        self._sink = sink
        self._part = part
        self._index = index
        self._turn = turn
        self.loads: list[tuple[Payload, Piece, memoryview | None]] = []
        self.loans: list[_Loan] = []
        self.staged: list[tuple[int, int, int]] = []
        self.buffer: HostBuffer | None = None
        self.cost_bytes = 0

    def run(self) -> None:
        """Send the part. Any thread."""
        try:
            self._sink_part()
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._end()
        self._uploader.count(self._part.size_bytes)

    def discard(self) -> None:
        """The part will never be sent. Any thread."""
        self._fail(RuntimeError("another part of this save failed first"))
        self._end()

    def _sink_part(self) -> None:
        if self.buffer is not None:
            view = self.buffer.view()
            for slot, start, stop in self.staged:
                payload, piece, _ = self.loads[slot]
                self.loads[slot] = (payload, piece, view[start:stop])
        buffers: list[Buffer] = []
        known: dict[int, int] = {}
        for payload, piece, host in self.loads:
            if isinstance(payload, BytesPayload):
                buffers += payload.piece(piece.start, piece.stop)
            elif piece.whole:
                buffers += payload.whole(host)
                if payload.payload_bytes >= _SMALL_BYTES:
                    known[id(buffers[-2])] = payload.crc32
            else:
                position = len(buffers) + (piece.start < payload.head_bytes)
                buffers += payload.piece(piece.start, piece.stop, host)
                crc = payload.crc32_from(payload.payload_range(piece.start, piece.stop)[0])
                if crc is not None and position < len(buffers):
                    known[id(buffers[position])] = crc
        joined = _join_small(buffers)
        self._uploader.note_checksum(self._name, self._part, joined, known)
        if self._turn is not None:
            self._turn.wait(self._index)
        self._sink.write_part(self._part, joined)
        if self._turn is not None:
            self._turn.advance()

    def _fail(self, error: BaseException) -> None:
        for payload, piece, _ in self.loads:
            if not piece.whole:
                payload.fail(error)
        if self._turn is not None:
            self._turn.fail(error)

    def _end(self) -> None:
        self.loads = []
        if self.buffer is not None:
            self.buffer.release()
            self.buffer = None
        for loan in self.loans:
            loan.give_back()
        self.loans = []
        self._uploader.give_back(self.cost_bytes)
        self.cost_bytes = 0


def _do_nothing() -> None:
    """A task of no work."""


def _is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu


def _joined_bytes(payload: Payload, piece: Piece) -> int:
    """How much of a piece is copied when small buffers are joined."""
    size_bytes = piece.stop - piece.start
    if piece.start > 0 and piece.stop < payload.size_bytes:
        return 0  # it fills the part alone, so there is nothing to join it with
    if payload.payload_bytes < _SMALL_BYTES or size_bytes < _SMALL_BYTES:
        return size_bytes
    return payload.size_bytes - payload.payload_bytes if piece.whole else 0


def _join_small(buffers: list[Buffer]) -> list[Buffer]:
    """Join runs of small buffers; large ones stay where they are."""
    joined: list[Buffer] = []
    run: list[Buffer] = []
    for buffer in buffers:
        if len(buffer) < _SMALL_BYTES:
            run.append(buffer)
            continue
        if run:
            joined.append(run[0] if len(run) == 1 else b"".join(run))
            run = []
        joined.append(buffer)
    if run:
        joined.append(run[0] if len(run) == 1 else b"".join(run))
    return joined
