"""Runs of the benchmarks at a size of no account: the frame is what is tested, not the figures."""

from __future__ import annotations

import contextlib
import gc
import socket
from collections.abc import Iterator, Sequence

from benchmarks.figures import Figure, Missing, StepFigure
from benchmarks.runner import Isolation, Plan, Runner
from benchmarks.settings import Link, Target

__all__ = ["TINY_BYTES", "measure", "measured", "refusing_port"]

TINY_BYTES = 400_000


def measure(
    place: Target,
    cases: str | Sequence[str],
    *contenders: str,
    rounds: int = 1,
    isolation: Isolation = Isolation.INLINE,
    link: Link | None = None,
    told: list[str] | None = None,
) -> list[Figure | StepFigure | Missing]:
    """Whatever comes out."""
    plan = Plan(
        setting=place.setting,
        cases=(cases,) if isinstance(cases, str) else tuple(cases),
        contenders=contenders,
        size_bytes=TINY_BYTES,
        repetitions=1,
        rounds=rounds,
        isolation=isolation,
        timeout_seconds=900,
        link=link,
    )
    said: list[str] = [] if told is None else told
    gc.freeze()  # each figure begins with a collection, which would look at all of torch again
    try:
        return list(Runner(plan, place, said.append).run())
    finally:
        gc.unfreeze()


def measured(place: Target, cases: str | Sequence[str], *contenders: str, rounds: int = 1) -> list[Figure]:
    """Figures of states, and nothing missing."""
    figures = []
    for result in measure(place, cases, *contenders, rounds=rounds):
        assert isinstance(result, Figure), result
        figures.append(result)
    return figures


@contextlib.contextmanager
def refusing_port() -> Iterator[int]:
    """A port that nobody listens on, nor can while it is held."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        yield port
