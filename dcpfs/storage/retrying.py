"""The one place where a request is tried again.

Problem: a store that is asked by thousands of ranks says "slow down" for minutes, while client libraries give up
after two seconds, each with a policy of its own; several of them on top of each other multiply the tries, and
equal waits make all ranks come back at the same moment. Retrying everything, on the other hand, turns a wrong key
into a wait of minutes.

Way taken: one policy for all stores, on tenacity: so many attempts (fewer while the store has never answered, since
then host or port are wrong, most likely), within so many seconds, with full jitter
(a random wait between nothing and a bound that doubles), never less than the store asked for. Whether to try
again is what `dcpfs.storage.translate` makes of the exception, by code or type. A credential that expired is
renewed once, and the request sent again at once. What is run must be safe to run twice.

Flow: ``policy.run(operation, verb="read", target=str(location))`` → the operation's result, or an error of
`dcpfs.errors` that says how often and how long it was tried.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable
from typing import NoReturn, TypeVar

import tenacity

from dcpfs.config import RetryConfig
from dcpfs.errors import DcpfsError, StorageError, StorageTimeoutError
from dcpfs.storage.location import redact_text
from dcpfs.storage.translate import Classified, FailureKind, classify, has_answered

__all__ = ["RetryPolicy"]

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
_REPEATED = frozenset({FailureKind.TRANSIENT, FailureKind.THROTTLED})
_QUIET_ATTEMPTS = 2
"""So many failed attempts are daily business; further ones are worth a warning."""


class RetryPolicy:
    """Runs operations until they succeed, can't, or time is up. Thread-safe; one a store is enough.

    Args:
        config: Attempts, deadline and waits.
        cancelled: When set, waits end and no further attempt is made; first attempts still are, so that an
            upload can be aborted.
        sleep: Waits so many seconds. By default it wakes up when ``cancelled`` is set.
        clock: Seconds that only go up.
    """

    def __init__(
        self,
        config: RetryConfig | None = None,
        *,
        cancelled: threading.Event | None = None,
        sleep: Callable[[float], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config or RetryConfig()
        self._cancelled = cancelled or threading.Event()
        self._sleep = sleep or self._cancelled.wait
        self._answered = False
        self._clock = clock
        self._backoff = tenacity.wait_random_exponential(
            multiplier=self._config.initial_backoff_seconds, max=self._config.max_backoff_seconds
        )

    @property
    def config(self) -> RetryConfig:
        """Its limits."""
        return self._config

    def run(
        self,
        operation: Callable[[], _T],
        *,
        verb: str,
        target: str,
        refresh: Callable[[], object] | None = None,
        scrub: Callable[[str], str] = redact_text,
    ) -> _T:
        """Run an operation that may be run more than once, and return its result.

        Args:
            operation: One attempt. It raises what the client library raises.
            verb: What it does, as in "Can't *read*".
            target: Redacted URL.
            refresh: Renews credentials; called at most once, after which the attempt is repeated at once.
            scrub: Takes secrets out of a text, e.g. `Location.scrub`.

        Raises:
            StorageError: Or the kind of it that fits, naming verb, target, attempts, seconds, cause and remedy.
            StorageTimeoutError: Another attempt might have helped, but the deadline would have passed.
        """
        started_seconds = self._clock()
        failed: list[Exception] = []
        try:
            # Nearly always the only attempt: what more of them need is not made before.
            result = operation()
        except MemoryError:
            raise
        except Exception as exception:  # noqa: BLE001 - handed over as what it means
            failed.append(exception)
        else:
            self._answered = True
            return result
        attempts = 0
        renewals = 0

        def attempt() -> _T:
            nonlocal attempts, renewals
            if attempts and self._cancelled.is_set():
                fail(last)
            while True:
                attempts += 1
                try:
                    if failed:
                        raise failed.pop()
                    result = operation()
                except MemoryError:
                    raise
                except Exception as exception:  # noqa: BLE001 - handed over as what it means
                    self._answered = self._answered or has_answered(exception)
                    failure = classify(exception, verb=verb, target=target, scrub=scrub)
                else:
                    self._answered = True
                    return result
                if failure.kind is FailureKind.EXPIRED_CREDENTIALS and refresh is not None and not renewals:
                    renewals += 1
                    logger.warning("Credentials expired; renewing them to %s %s", verb, target)
                    refresh()
                    continue
                if failure.kind in _REPEATED:
                    raise _RepeatableError(failure)
                fail(failure)

        def fail(failure: Classified, *, out_of_time: bool = False) -> NoReturn:
            error, cause = failure.error, failure.error.__cause__
            if attempts > 1 or failure.kind in _REPEATED:
                count = f"{attempts} attempt{'s' if attempts > 1 else ''}"
                error = _extended(error, f"({count} in {self._clock() - started_seconds:.1f} s)", out_of_time)
            raise error from cause

        def wait(state: tenacity.RetryCallState) -> float:
            return self._backoff(state) + (_failure(state).retry_after_seconds or 0.0)

        def out_of_time(state: tenacity.RetryCallState) -> bool:
            elapsed_seconds = self._clock() - started_seconds
            return elapsed_seconds + state.upcoming_sleep >= self._config.deadline_seconds

        def most_attempts() -> int:
            config = self._config
            return config.attempts if self._answered else min(config.attempts, config.first_contact_attempts)

        timed_out = False

        def stop(state: tenacity.RetryCallState) -> bool:
            nonlocal timed_out
            if state.attempt_number >= most_attempts() or self._cancelled.is_set():
                return True
            timed_out = out_of_time(state)
            return timed_out

        def give_up(state: tenacity.RetryCallState) -> NoReturn:
            fail(_failure(state), out_of_time=timed_out)  # asked again, another call may have changed the answer

        last = Classified(StorageError(f"Can't {verb} {target}"), FailureKind.TRANSIENT)

        def announce(state: tenacity.RetryCallState) -> None:
            nonlocal last
            last = _failure(state)
            level = logging.DEBUG if state.attempt_number <= _QUIET_ATTEMPTS else logging.WARNING
            logger.log(
                level,
                "%s; attempt %d of %d failed, the next follows in %.1f s",
                last.error,
                state.attempt_number,
                most_attempts(),
                state.upcoming_sleep,
            )

        def sleep(seconds: float) -> None:
            self._sleep(seconds)

        retrying = tenacity.Retrying(
            sleep=sleep,
            stop=stop,
            wait=wait,
            retry=tenacity.retry_if_exception_type(_RepeatableError),
            before_sleep=announce,
            retry_error_callback=give_up,
        )
        try:
            return retrying(attempt)
        except BaseException as error:
            last = Classified(StorageError(f"Can't {verb} {target}"), FailureKind.TRANSIENT)
            _let_go(error)
            raise


def _let_go(error: BaseException) -> None:
    """Take the variables from the calls that an error has come through.

    They hold the error, which holds them, and by them what whoever called has, a whole training state maybe: a circle
    that stays until the collector comes to it. That a file is missing is an everyday answer.
    """
    each: BaseException | None = error
    while each is not None:
        traceback.clear_frames(each.__traceback__)
        each = each.__cause__


class _RepeatableError(Exception):
    """A failed attempt that may be made again; never leaves this module."""

    def __init__(self, failure: Classified) -> None:
        super().__init__()
        self.failure = failure


def _failure(state: tenacity.RetryCallState) -> Classified:
    exception = state.outcome.exception() if state.outcome is not None else None
    if not isinstance(exception, _RepeatableError):
        raise TypeError("tenacity asked about an attempt that did not fail") from exception
    return exception.failure


def _extended(error: DcpfsError, effort: str, out_of_time: bool) -> DcpfsError:
    """The error with what was done against it; of a plain one whose time is up, a `StorageTimeoutError`."""
    message = f"{error.message} {effort}"
    if out_of_time and type(error) is StorageError:
        return StorageTimeoutError(message)
    error.message = message
    error.args = (message,)
    return error
