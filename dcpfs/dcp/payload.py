"""One entry on its way out: where its bytes come from, its frame, and a checksum that several parts add up to.

Problem: an entry ends with the CRC-32 of its payload, but a large payload leaves in parts that different threads send
at the same time, and nobody sees all of it.

Way taken: each part's thread computes the checksum of its own piece, straight before it sends it, and joins it to the
others'. Only the part that holds the entry's tail waits for them. The head does not hold the checksum, so whoever is
waited for lies earlier in the file and was started earlier: nothing can wait in a circle.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from dcpfs.dcp.host_memory import resident_bytes, tensor_bytes
from dcpfs.format.checksum import crc32, crc32_combine
from dcpfs.format.frames import Frame, encode_tensor_frame, tensor_frame_sizes
from dcpfs.storage.store import Buffer

__all__ = ["BytesPayload", "Payload", "TensorPayload"]


class BytesPayload:
    """A non-tensor value: an entry without a frame, in memory already.

    Attributes:
        data: The entry.
        crc32: Its CRC-32.
    """

    __slots__ = ("crc32", "data", "head_bytes", "payload_bytes", "size_bytes")

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.crc32 = crc32(data)
        self.head_bytes = 0
        self.payload_bytes = len(data)
        self.size_bytes = len(data)

    def whole(self) -> list[Buffer]:
        """Its bytes."""
        return [self.data]

    def piece(self, start: int, stop: int) -> list[Buffer]:
        """The bytes from ``start`` to ``stop``."""
        return [self.data[start:stop]]

    def fail(self, error: BaseException) -> None:
        """Nothing waits for it."""


class TensorPayload:
    """A tensor entry. `whole` or `piece` is called once for each part, from any thread.

    Attributes:
        dtype: Of the values.
        shape: Of the chunk.
        head_bytes: Length of what stands before the payload.
        payload_bytes: Length of the row-major values.
        size_bytes: Length of the entry.
        crc32: Of the payload; -1 until all of it has been seen.
        host: The values as a resolved row-major CPU tensor, from the first part on until the last is sent.
        release: Called when the last part has been sent and ``host`` is no longer needed, or None.
    """

    __slots__ = (
        "_frame",
        "_seen",
        "_view",
        "crc32",
        "dtype",
        "head_bytes",
        "host",
        "payload_bytes",
        "release",
        "shape",
        "size_bytes",
    )

    def __init__(self, dtype: torch.dtype, shape: torch.Size) -> None:
        self.dtype = dtype
        self.shape = shape
        sizes = tensor_frame_sizes(dtype, shape)
        self.head_bytes, self.payload_bytes, tail_bytes = sizes
        self.size_bytes = self.head_bytes + self.payload_bytes + tail_bytes
        self.crc32 = -1
        self.host: torch.Tensor | None = None
        self.release: Callable[[], None] | None = None
        self._view: memoryview | None = None
        self._frame: Frame | None = None
        self._seen: _Seen | None = None

    def attach(self, tensor: torch.Tensor) -> bool:
        """Send the values from where they lie, if that is row-major CPU memory; False: they have to be copied.

        Done for all entries before any thread sends: torch's calls give up the GIL, and taking it back among busy
        threads costs far more than the call.
        """
        view = resident_bytes(tensor)
        if view is None:
            return False
        self.host = tensor
        self._view = view
        return True

    def whole(self, host: memoryview | None = None) -> list[Buffer]:
        """Head, payload and tail of an entry that lies in one part.

        Args:
            host: The payload, where it doesn't come from ``self.host``.
        """
        view = host if host is not None else self._payload_view()
        self.crc32 = crc32(view)
        frame = encode_tensor_frame(self.dtype, self.shape, self.crc32)
        return [frame.head, view, frame.tail]

    def split(self) -> None:
        """Get ready to leave in several parts. Called once, before the first `piece`."""
        self._seen = _Seen(self.payload_bytes)
        self._frame = encode_tensor_frame(self.dtype, self.shape, 0)

    def piece(self, start: int, stop: int, host: memoryview | None = None) -> list[Buffer]:
        """The bytes ``start`` to ``stop`` of the entry. A piece with the tail waits for the pieces before it.

        Args:
            start: First byte.
            stop: Past the last byte.
            host: The payload's bytes among them, where they don't come from ``self.host``.

        Raises:
            BaseException: What an earlier piece failed with.
        """
        seen, frame = self._seen, self._frame
        if seen is None or frame is None:
            raise RuntimeError("an entry that is cut must be split first")
        payload_stop = self.head_bytes + self.payload_bytes
        buffers: list[Buffer] = []
        if start < self.head_bytes:
            buffers.append(frame.head[start:stop])
        first, last = max(start, self.head_bytes), min(stop, payload_stop)
        if first < last:
            view = host if host is not None else self._payload_view()[first - self.head_bytes : last - self.head_bytes]
            seen.add(first - self.head_bytes, len(view), crc32(view))
            buffers.append(view)
        if stop > payload_stop:
            self.crc32 = seen.total()
            tail = encode_tensor_frame(self.dtype, self.shape, self.crc32).tail
            buffers.append(tail[max(0, start - payload_stop) : stop - payload_stop])
        return buffers

    def crc32_from(self, first: int) -> int | None:
        """CRC-32 of the piece of the payload that starts at its byte ``first`` and that `piece` gave out, else None."""
        return None if self._seen is None else self._seen.crc32_from(first)

    def payload_range(self, start: int, stop: int) -> tuple[int, int]:
        """The part of the payload, in its own bytes, that lies within the entry's bytes ``start`` to ``stop``."""
        first = min(max(start - self.head_bytes, 0), self.payload_bytes)
        return first, min(max(stop - self.head_bytes, first), self.payload_bytes)

    def fail(self, error: BaseException) -> None:
        """Wake whoever waits for the checksum of a piece that will never be seen."""
        if self._seen is not None:
            self._seen.fail(error)

    def done(self) -> None:
        """The last part has been sent, or never will be."""
        self._view = None
        self.host = None
        release, self.release = self.release, None
        if release is not None:
            release()

    def _payload_view(self) -> memoryview:
        if self._view is None:
            self._view = tensor_bytes(self._tensor())
        return self._view

    def _tensor(self) -> torch.Tensor:
        if self.host is None:
            raise RuntimeError("the values of this entry are gone already")
        return self.host


Payload = BytesPayload | TensorPayload


class _Seen:
    """Checksums of pieces in any order, joined when all are there."""

    __slots__ = ("_changed", "_error", "_missing_bytes", "_pieces")

    def __init__(self, payload_bytes: int) -> None:
        self._missing_bytes = payload_bytes
        self._pieces: list[tuple[int, int, int]] = []
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    def add(self, start: int, length: int, crc: int) -> None:
        with self._changed:
            self._pieces.append((start, length, crc))
            self._missing_bytes -= length
            if self._missing_bytes <= 0:
                self._changed.notify_all()

    def crc32_from(self, start: int) -> int | None:
        with self._changed:
            return next((crc for first, _, crc in reversed(self._pieces) if first == start), None)

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def total(self) -> int:
        with self._changed:
            while self._missing_bytes > 0 and self._error is None:
                self._changed.wait()
            if self._error is not None:
                raise self._error
            joined = 0
            for _, length, crc in sorted(self._pieces):
                joined = crc32_combine(joined, crc, length)
            return joined
