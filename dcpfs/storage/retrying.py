"""The one place where a request is tried again.

Problem: a store that is asked by thousands of ranks says "slow down" for minutes, while client libraries give up
after two seconds, each with a policy of its own; several of them on top of each other multiply the tries, and
equal waits make all ranks come back at the same moment. Retrying everything, on the other hand, turns a wrong key
into a wait of minutes.

Way taken: one policy for all stores, on tenacity: so many attempts (fewer while the store has never answered, since
then host or port are wrong, most likely: see `contacts`), within so many seconds, with full jitter
(a random wait between nothing and a bound that doubles), never less than the store asked for. Whether to try
again is what `dcpfs.storage.translate` makes of the exception, by code or type. A credential that expired is
renewed once, and the request sent again at once. What is run must be safe to run twice.

Flow: ``policy.run(operation, verb="read", target=str(location))`` → the operation's result, or an error of
`dcpfs.errors` that says how often and how long it was tried.
"""

from __future__ import annotations

import logging
import random
import threading
import time
import traceback
from collections.abc import Callable
from typing import NoReturn, TypeVar

import tenacity

from dcpfs.config import RetryConfig
from dcpfs.errors import DcpfsError, StorageError, StorageTimeoutError
from dcpfs.storage.contacts import Contact
from dcpfs.storage.location import Location, redact_text
from dcpfs.storage.translate import Classified, FailureKind, classify, has_answered

__all__ = ["RetryPolicy"]

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
_REPEATED = frozenset({FailureKind.TRANSIENT, FailureKind.THROTTLED})
_QUIET_ATTEMPTS = 2
"""So many failed attempts are daily business; further ones are worth a warning."""
_RANDOM = random.SystemRandom()
"""Not the trainer's: drawing from Python's own would shift it with every retry, and ranks that seeded theirs alike, as
most do, would all come back at the same moment."""


class RetryPolicy:
    """Runs operations until they succeed, can't, or time is up. Thread-safe; one a store is enough.

    Args:
        config: Attempts, deadline and waits.
        cancelled: When set, waits end and no further attempt is made; first attempts still are, so that an
            upload can be aborted.
        sleep: Waits so many seconds. By default it wakes up when ``cancelled`` is set.
        clock: Seconds that only go up.
        location: Where requests go: what other policies of this process heard from there counts too.
    """

    def __init__(
        self,
        config: RetryConfig | None = None,
        *,
        cancelled: threading.Event | None = None,
        sleep: Callable[[float], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
        location: Location | None = None,
    ) -> None:
        self._config = config or RetryConfig()
        self._cancelled = cancelled or threading.Event()
        self._sleep = sleep or self._cancelled.wait
        self._contact = Contact(location)
        self._clock = clock
        self._widest_wait = tenacity.wait_exponential(
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
        try:
            # Nearly always the only attempt: what more of them need is not made before.
            result = operation()
        except MemoryError:
            raise
        except Exception as exception:  # noqa: BLE001 - handed over as what it means
            request = _Request(self, verb, target, scrub, started_seconds, exception)
        else:
            self._contact.note_answer()
            return result
        return request.go_on(operation, refresh)

    # --- what its requests share

    @property
    def has_answered(self) -> bool:
        """Whether the store has ever said something."""
        return self._contact.has_answered

    @property
    def is_cancelled(self) -> bool:
        """Whether nothing is to be tried again."""
        return self._cancelled.is_set()

    @property
    def most_attempts(self) -> int:
        """Of a request, by what is known of the store."""
        config = self._config
        return config.attempts if self._contact.has_answered else min(config.attempts, config.first_contact_attempts)

    def note_answer(self) -> None:
        """The store is there."""
        self._contact.note_answer()

    def now(self) -> float:
        """Seconds that only go up."""
        return self._clock()

    def sleep(self, seconds: float) -> None:
        """Wait, at most until it is cancelled."""
        self._sleep(seconds)

    def backoff_seconds(self, state: tenacity.RetryCallState) -> float:
        """A random wait, whose bound doubles with each attempt."""
        return _RANDOM.uniform(0.0, self._widest_wait(state))


class _Request:
    """One request whose first attempt has failed. One thread; used once. See `RetryPolicy.run`.

    It stays until the collector comes to it, since tenacity's loop is a circle that holds it: so it keeps neither what
    is run, which may hold a whole training state, nor an exception, whose traceback leads there (`_let_go`).
    """

    def __init__(
        self,
        policy: RetryPolicy,
        verb: str,
        target: str,
        scrub: Callable[[str], str],
        started_seconds: float,
        failed: Exception,
    ) -> None:
        self._policy = policy
        self._verb = verb
        self._target = target
        self._scrub = scrub
        self._started_seconds = started_seconds
        self._failed = [failed]
        self._attempts = 0
        self._timed_out = False
        self._has_renewed = False
        self._last = self._unknown_failure()

    def go_on(self, operation: Callable[[], _T], refresh: Callable[[], object] | None) -> _T:
        """Try again until it succeeds, can't, or time is up."""
        try:
            result: _T = self._loop()(self._attempt, operation, refresh)
            return result
        except BaseException as error:
            _let_go(error)
            raise
        finally:
            self._last = self._unknown_failure()

    def _loop(self) -> tenacity.Retrying:
        return tenacity.Retrying(
            sleep=self._policy.sleep,
            stop=self._stop,
            wait=self._wait,
            retry=tenacity.retry_if_exception_type(_RepeatableError),
            before_sleep=self._announce,
            retry_error_callback=self._give_up,
        )

    def _attempt(self, operation: Callable[[], _T], refresh: Callable[[], object] | None) -> _T:
        """One attempt, and a second one with renewed credentials. The first has been made: it is only judged."""
        if self._attempts and self._policy.is_cancelled:
            self._fail(self._last)
        while True:
            self._attempts += 1
            try:
                if self._failed:
                    raise self._failed.pop()
                result = operation()
            except MemoryError:
                raise
            except Exception as exception:  # noqa: BLE001 - handed over as what it means
                if has_answered(exception):
                    self._policy.note_answer()
                failure = classify(exception, verb=self._verb, target=self._target, scrub=self._scrub)
            else:
                self._policy.note_answer()
                return result
            if failure.kind is FailureKind.EXPIRED_CREDENTIALS and refresh is not None and not self._has_renewed:
                self._has_renewed = True
                logger.warning("Credentials expired; renewing them to %s %s", self._verb, self._target)
                refresh()
                del failure  # its traceback leads to this call
                continue
            if failure.kind in _REPEATED or (failure.kind is FailureKind.UNKNOWN_HOST and self._policy.has_answered):
                raise _RepeatableError(failure)
            self._fail(failure)

    def _fail(self, failure: Classified) -> NoReturn:
        error, cause = failure.error, failure.error.__cause__
        if self._attempts > 1 or failure.kind in _REPEATED:
            count = f"{self._attempts} attempt{'s' if self._attempts > 1 else ''}"
            error = _extended(error, f"({count} in {self._elapsed_seconds():.1f} s)", self._timed_out)
        raise error from cause

    def _elapsed_seconds(self) -> float:
        return self._policy.now() - self._started_seconds

    def _unknown_failure(self) -> Classified:
        return Classified(StorageError(f"Can't {self._verb} {self._target}"), FailureKind.TRANSIENT)

    # --- what tenacity asks between attempts, in this order

    def _wait(self, state: tenacity.RetryCallState) -> float:
        return self._policy.backoff_seconds(state) + (_failure(state).retry_after_seconds or 0.0)

    def _stop(self, state: tenacity.RetryCallState) -> bool:
        if state.attempt_number >= self._policy.most_attempts or self._policy.is_cancelled:
            return True
        self._timed_out = self._elapsed_seconds() + state.upcoming_sleep >= self._policy.config.deadline_seconds
        return self._timed_out

    def _give_up(self, state: tenacity.RetryCallState) -> NoReturn:
        self._fail(_failure(state))

    def _announce(self, state: tenacity.RetryCallState) -> None:
        self._last = _failure(state)
        _let_go(self._last.error)
        level = logging.DEBUG if state.attempt_number <= _QUIET_ATTEMPTS else logging.WARNING
        logger.log(
            level,
            "%s; attempt %d of %d failed, the next follows in %.1f s",
            str(self._last.error),  # a record that is kept would keep the error
            state.attempt_number,
            self._policy.most_attempts,
            state.upcoming_sleep,
        )


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
