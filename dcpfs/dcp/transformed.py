"""Entries that pass through torch's stream transforms (compression) on their way out.

Problem: the length of a compressed entry is known only afterwards, so neither offsets nor file sizes can be known
before. Writing through one growing stream would give up parallel parts and the size check.

Way taken: entries are gathered into batches of bounded size; each batch is encoded in memory, by one of several
threads, and becomes one file of then known size. Memory is bounded by the budget: a batch counts twice, since its
tensors may be copied and its result is held. On any failure every file of the call is deleted again.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, cast

import torch

from dcpfs.dcp.file_checksums import FileChecksums
from dcpfs.dcp.host_memory import tensor_bytes, to_host
from dcpfs.dcp.payload import BytesPayload, Payload
from dcpfs.dcp.transfer import ByteBudget, Task, run_tasks
from dcpfs.dcp.upload import UploadReport
from dcpfs.format.checksum import crc32
from dcpfs.storage.store import Store

if TYPE_CHECKING:
    from dcpfs.torch_private import StreamTransformExtension

__all__ = ["Stored", "upload_transformed"]

_BATCH_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Stored:
    """Where an encoded entry ended up."""

    file: str
    offset_bytes: int
    length_bytes: int


class _KeepOpen(io.RawIOBase):
    """Passes writes on and survives the close that transforms send down the chain."""

    def __init__(self, target: io.BytesIO) -> None:
        self._target = target

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        return self._target.write(cast("bytes", data))


def upload_transformed(
    store: Store,
    payloads: Sequence[Payload],
    resolve: Callable[[int], torch.Tensor],
    name_of: Callable[[int], str],
    extensions: Sequence[StreamTransformExtension],
    *,
    concurrency: int,
    budget: ByteBudget,
    on_bytes: Callable[[int], None],
    checksums: FileChecksums | None = None,
) -> tuple[dict[int, Stored], UploadReport]:
    """Encode and send all entries. ``resolve`` is called in the calling thread; ``name_of`` names the n-th file.

    ``checksums``, where given, is told that of each file.

    Raises:
        BaseException: The first failure; no file of this call is left behind.
    """
    stored: dict[int, Stored] = {}
    report = UploadReport()
    published: list[str] = []
    batch_bytes = max(1, min(_BATCH_BYTES, budget.total_bytes // 4))

    def tasks() -> Iterator[Task]:
        for batch in _batches(payloads, batch_bytes):
            name = name_of(report.files)
            report.files += 1
            report.requests += 1
            tensors = {n: resolve(n) for n in batch if not isinstance(payloads[n], BytesPayload)}
            cost_bytes = 2 * sum(payloads[number].size_bytes for number in batch)
            yield Task(cost_bytes, _write_batch(name, batch, tensors))

    def _write_batch(name: str, batch: list[int], tensors: dict[int, torch.Tensor]) -> Callable[[], None]:
        def run() -> None:
            content = io.BytesIO()
            for number in batch:
                offset = content.tell()
                _encode(payloads[number], tensors.pop(number, None), content, extensions)
                stored[number] = Stored(name, offset, content.tell() - offset)
            published.append(name)  # before: a put that fails may still have taken effect
            encoded = memoryview(content.getvalue())
            if checksums is not None:
                checksums.add(name, 0, len(encoded), crc32(encoded))
            _send(store, name, encoded)
            on_bytes(content.tell())

        return run

    try:
        run_tasks(tasks(), concurrency=concurrency, budget=budget, name="dcpfs-save")
    except BaseException as error:
        try:
            store.delete(published)
        except Exception as failure:  # noqa: BLE001 - noted on the error that is raised
            note = f"{', '.join(published)} could not be deleted again: {failure}"
            error.__notes__ = [*getattr(error, "__notes__", ()), note]  # type: ignore[attr-defined]  # new in 3.11
        raise
    report.bytes_written = sum(entry.length_bytes for entry in stored.values())
    return stored, report


def _send(store: Store, name: str, content: memoryview) -> None:
    if len(content) <= 2 * _BATCH_BYTES:
        store.put(name, [content])
        return
    sink = store.open_sink(name, len(content))
    try:
        for part in sink.parts():
            sink.write_part(part, [content[part.start : part.stop]])
        sink.commit()
    except BaseException:
        sink.abort()
        raise


def _encode(
    payload: Payload,
    tensor: torch.Tensor | None,
    content: io.BytesIO,
    extensions: Sequence[StreamTransformExtension],
) -> None:
    stream = cast("IO[bytes]", _KeepOpen(content))
    for extension in extensions:
        stream = extension.transform_to(stream)
    if isinstance(payload, BytesPayload):
        buffers = payload.whole()
    else:
        host = to_host(cast("torch.Tensor", tensor))
        buffers = payload.whole(tensor_bytes(host))
    for buffer in buffers:
        stream.write(buffer)
    stream.close()


def _batches(payloads: Sequence[Payload], batch_bytes: int) -> Iterator[list[int]]:
    batch: list[int] = []
    filled_bytes = 0
    for number, payload in enumerate(payloads):
        if batch and filled_bytes + payload.size_bytes > batch_bytes:
            yield batch
            batch, filled_bytes = [], 0
        batch.append(number)
        filled_bytes += payload.size_bytes
    if batch:
        yield batch
