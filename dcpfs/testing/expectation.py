"""What a shipped test expects, said without ``assert``, which vanishes under ``python -O``."""

from __future__ import annotations

import contextlib
import unittest
from collections.abc import Iterator
from typing import NoReturn, TypeVar

__all__ = ["expect", "expect_error", "skip"]

_T = TypeVar("_T")


def expect(found: _T, wanted: _T, what: str) -> None:
    """Fail unless two values are equal.

    Args:
        found: What there is.
        wanted: What there should be.
        what: Named in the failure.
    """
    if found != wanted:
        raise AssertionError(f"{what}: found {_short(found)}, wanted {_short(wanted)}")


@contextlib.contextmanager
def expect_error(kind: type[BaseException], what: str) -> Iterator[None]:
    """Fail unless the block raises that kind of error."""
    try:
        yield
    except kind:
        return
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__} instead of {kind.__name__}: {error}") from error
    raise AssertionError(f"{what}: no {kind.__name__}")


def skip(reason: str) -> NoReturn:
    """Leave a test; pytest and unittest both understand."""
    raise unittest.SkipTest(reason)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}… ({len(text)} characters)"
