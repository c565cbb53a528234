"""What the ranks of a save tell each other before it: one small reduction.

Problem: before a byte is written all ranks must know whether any of them failed, that they mean the same step, whose
save this is, what lies there already, and whether the plans that they remember fit. An exchange of pickled values for
each of these costs a round trip of its own.

Way taken: numbers, of which every rank brings its own and learns the largest. A number and its negative together tell
the largest and the least, and so whether two ranks differ. What only the coordinator knows is 0 on all others.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["OpeningWords", "TogetherWords"]

_SHIFTS = (96, 64, 32, 0)
_WORD = 0xFFFFFFFF
_NO_METRIC = -(1 << 63)


@dataclass(frozen=True)
class OpeningWords:
    """What one rank brings.

    Attributes:
        failed: It has nothing to save.
        state: What the coordinator found, as a number.
        token: Of the plans that it remembers; 0: of none that fit.
        iteration: Of the step.
        save_id: At the coordinator; "" elsewhere.
        first_file_number: At the coordinator; 0 elsewhere.
        metric: Finite, or None.
    """

    failed: bool
    state: int
    token: int
    iteration: int
    save_id: str
    first_file_number: int
    metric: float | None

    def encode(self) -> list[int]:
        """Numbers of 64 bits with sign, as many for every rank."""
        own_id = int(self.save_id, 16) if self.save_id else 0
        return [
            self.failed,
            self.state,
            self.token,
            -self.token,
            self.iteration,
            -self.iteration,
            *((own_id >> shift) & _WORD for shift in _SHIFTS),
            self.first_file_number,
            *_encode_metric(self.metric),
        ]


@dataclass(frozen=True)
class TogetherWords:
    """What all ranks know then.

    Attributes:
        failed: Any rank has nothing to save.
        state: What the coordinator found.
        plans_fit: All remember plans of one exchange.
        iterations: The least and the largest.
        save_id: Of the save.
        first_file_number: Of new files.
        metrics: Those that were given: none, one, or two of those that differ.
    """

    failed: bool
    state: int
    plans_fit: bool
    iterations: tuple[int, int]
    save_id: str
    first_file_number: int
    metrics: tuple[float, ...]

    @classmethod
    def decode(cls, largest: Sequence[int]) -> TogetherWords:
        """From the largest of each of the numbers that `OpeningWords.encode` gives."""
        failed, state, most, least, last, first, *identity, number, upper, lower = largest
        return cls(
            bool(failed),
            state,
            most == -least and most > 0,
            (-first, last),
            f"{sum(word << shift for word, shift in zip(identity, _SHIFTS, strict=True)):032x}",
            number,
            _decode_metrics(upper, lower),
        )


def _encode_metric(metric: float | None) -> tuple[int, int]:
    """A metric's bits and their negative. The least of 64 bits, below all of these, is None, which agrees with all."""
    if metric is None:
        return _NO_METRIC, _NO_METRIC
    (bits,) = struct.unpack("<q", struct.pack("<d", metric + 0.0))  # no negative zero, which equals the other one
    return bits, -bits


def _decode_metrics(upper: int, lower: int) -> tuple[float, ...]:
    if upper == _NO_METRIC:
        return ()
    return tuple(struct.unpack("<d", struct.pack("<q", bits))[0] for bits in dict.fromkeys((upper, -lower)))
