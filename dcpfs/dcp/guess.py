"""An entry of another writer that is read before its header is known, as most of them can be.

Problem: where the payload of such an entry starts stands in its own header. Asking for the header first costs a
request and a round trip for each large entry: hundreds for a checkpoint of one gigabyte, while the data itself takes
eighty requests.

Way taken: the frame of a row-major tensor has, whoever wrote it with ``torch.save``, the lengths that dcpfs's own has
(`dcpfs.format.frames`). When an entry's length is the sum of these, its payload is read as if it lay there, in the
same requests as head and tail. The head that arrives with it confirms or refutes the guess: a transposed tensor, or a
part of a larger storage, can have the same length. What a refuted guess wrote into the target is overwritten by a
second read that knows the header; until then the load has not succeeded.

A part of an entry is not read so: when wrong it would move twice, and the header costs no more than it saves.

Flow: ``guess_frame(want)`` → the fetch places head, payload and tail → ``take_head`` and ``take_tail``, in any order,
from any thread → ``refuted`` once everything has arrived.
"""

from __future__ import annotations

import threading

from dcpfs.dcp.foreign import check_header, expected_checksum, parse_header
from dcpfs.dcp.landing import LandingContext, PayloadCheck, TensorWant
from dcpfs.errors import UnsupportedValueError
from dcpfs.format.frames import FrameSizes, tensor_frame_sizes
from dcpfs.format.headers import TensorHeader

__all__ = ["GuessedEntry", "guess_frame"]


def guess_frame(want: TensorWant) -> FrameSizes | None:
    """The lengths of an entry's pieces if it is framed as ``torch.save`` frames a row-major tensor, else None."""
    try:
        sizes = tensor_frame_sizes(want.dtype, want.sizes)
    except UnsupportedValueError:
        return None
    return sizes if sizes.entry_bytes == want.location.length_bytes else None


class GuessedEntry:
    """What is known of an entry whose payload was read on a guess.

    Args:
        context: The load.
        want: The tensor of the entry, which is wanted whole.
        sizes: The guess.
        check: Gets the payload's checksum; None: nothing is to be verified.

    Attributes:
        want: As given.
        header: What the entry's head says, once it has arrived; None: more than the head is needed to understand it.
        refuted: The payload was not where it was read, or not row-major.
    """

    __slots__ = ("_check", "_context", "_lock", "_sizes", "_tail", "header", "refuted", "want")

    def __init__(
        self, context: LandingContext, want: TensorWant, sizes: FrameSizes, check: PayloadCheck | None
    ) -> None:
        self.want = want
        self.header: TensorHeader | None = None
        self.refuted = True
        self._context = context
        self._sizes = sizes
        self._check = check
        self._tail: bytes | None = None
        self._lock = threading.Lock()

    def take_head(self, head: bytes) -> None:
        """Compare the entry's head with the guess. Thread-safe.

        Raises:
            CorruptCheckpointError: It is damaged, or describes another tensor than the metadata.
        """
        want, sizes = self.want, self._sizes
        parsed = parse_header(head, want, self._context)
        if not isinstance(parsed, TensorHeader):
            return
        check_header(parsed, want, self._context)
        confirmed = parsed.is_row_major and parsed.payload_offset_bytes == sizes.head_bytes
        with self._lock:
            self.header = parsed
            self.refuted = not confirmed
        self._expect()

    def take_tail(self, tail: bytes) -> None:
        """Note the entry's tail, which has the checksum in it. Thread-safe."""
        with self._lock:
            self._tail = tail
        self._expect()

    def _expect(self) -> None:
        with self._lock:
            header, tail = self.header, self._tail
            if header is None or tail is None or self.refuted or self._check is None:
                return
        expected = expected_checksum(header, tail, self.want, self._context)
        if expected is not None:
            self._check.expect(expected)
