"""One retry policy: what is tried again, how long, and what it says in the end. Nothing here really waits."""

from __future__ import annotations

import logging
import random
import socket
import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcpfs.config import RetryConfig
from dcpfs.errors import CredentialsError, ObjectNotFoundError, StorageError, StorageTimeoutError
from dcpfs.storage import contacts
from dcpfs.storage.location import Location
from dcpfs.storage.retrying import RetryPolicy
from dcpfs.storage.translate import ResponseError


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sleeps: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds


def policy(clock: Clock, **limits: float) -> RetryPolicy:
    return policy_at(None, clock, **limits)


def policy_at(location: Location | None, clock: Clock, **limits: float) -> RetryPolicy:
    return RetryPolicy(RetryConfig.model_validate(limits), sleep=clock.sleep, clock=clock, location=location)


def failing(times: int, error: Callable[[], Exception]) -> Callable[[], int]:
    calls = 0

    def operation() -> int:
        nonlocal calls
        calls += 1
        if calls <= times:
            raise error()
        return calls

    return operation


def slow_down() -> Exception:
    return ResponseError(503, "SlowDown", "busy")


def test_a_transient_failure_is_tried_again_until_it_succeeds() -> None:
    clock = Clock()
    assert policy(clock).run(failing(4, slow_down), verb="read", target="s3://b/x") == 5
    assert len(clock.sleeps) == 4
    assert all(0 <= wait <= 0.25 * 2**index for index, wait in enumerate(clock.sleeps))


def test_a_permanent_failure_passes_at_once() -> None:
    clock = Clock()
    with pytest.raises(ObjectNotFoundError, match=r"^Can't read s3://b/x: NoSuchKey \(HTTP 404\)$"):
        policy(clock).run(failing(9, lambda: ResponseError(404, "NoSuchKey")), verb="read", target="s3://b/x")
    assert clock.sleeps == []


def test_the_last_error_names_verb_target_attempts_seconds_cause_and_remedy() -> None:
    clock = Clock()
    with pytest.raises(StorageError) as caught:
        policy(clock, attempts=3).run(failing(9, slow_down), verb="write", target="s3://b/x")
    assert str(caught.value).startswith("Can't write s3://b/x: SlowDown (HTTP 503): busy; lower")
    assert f"(3 attempts in {clock.now:.1f} s)" in str(caught.value)
    assert isinstance(caught.value.__cause__, ResponseError)


def test_case_82_slow_down_is_borne_for_minutes_not_seconds() -> None:
    clock = Clock()
    with pytest.raises(StorageTimeoutError, match=r"attempts in \d+\.\d s"):
        policy(clock, attempts=100).run(failing(1000, slow_down), verb="write", target="s3://b/x")
    assert 200 < clock.now < 300
    assert max(clock.sleeps) <= 20
    assert len({round(wait, 6) for wait in clock.sleeps}) > len(clock.sleeps) // 2, "waits are jittered"


@pytest.mark.parametrize("busy_seconds", [30, 100])
def test_case_82_the_default_policy_outlasts_a_busy_store_whatever_the_jitter(
    busy_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save has many requests at once, and one that gives up fails it: most is not enough."""
    for seed in range(300):
        clock, chance = Clock(), random.Random(seed)
        monkeypatch.setattr("dcpfs.storage.retrying._RANDOM", chance)

        def write(clock: Clock = clock) -> float:
            if clock.now < busy_seconds:
                raise slow_down()
            return clock.now

        assert policy(clock).run(write, verb="write", target="s3://b/x") >= busy_seconds
        assert len(clock.sleeps) < 30


def test_a_retry_leaves_the_random_numbers_of_training_alone_and_ranks_that_seeded_alike_wait_apart() -> None:
    waits, streams = [], []
    for _ in range(2):
        random.seed(42)
        clock = Clock()
        assert policy(clock).run(failing(9, slow_down), verb="read", target="s3://b/x") == 10
        waits.append(clock.sleeps)
        streams.append(random.random())
    random.seed(42)
    assert streams == [random.random()] * 2
    assert waits[0] != waits[1]


@given(attempts=st.integers(1, 20), deadline_seconds=st.floats(0.01, 1000), asked=st.none() | st.floats(0, 100))
def test_limits_hold_for_every_setting(attempts: int, deadline_seconds: float, asked: float | None) -> None:
    clock = Clock()
    made = 0

    def operation() -> None:
        nonlocal made
        made += 1
        raise ResponseError(503, retry_after=asked)

    limits = {"attempts": attempts, "deadline_seconds": deadline_seconds}
    with pytest.raises(StorageError):
        policy(clock, **limits).run(operation, verb="read", target="t")
    assert made <= attempts
    assert clock.now < deadline_seconds
    assert all(wait >= (asked or 0) for wait in clock.sleeps)


def test_case_81_expired_credentials_are_renewed_once() -> None:
    clock = Clock()
    renewed: list[int] = []
    operation = failing(1, lambda: ResponseError(400, "ExpiredToken"))
    assert policy(clock).run(operation, verb="read", target="t", refresh=lambda: renewed.append(1)) == 2
    assert renewed == [1]
    assert clock.sleeps == []
    with pytest.raises(CredentialsError, match=r"could not be renewed \(2 attempts"):
        policy(clock).run(
            failing(9, lambda: ResponseError(400, "ExpiredToken")),
            verb="read",
            target="t",
            refresh=lambda: renewed.append(2),
        )
    assert renewed == [1, 2]


def test_expired_credentials_that_nobody_can_renew_fail_at_once() -> None:
    with pytest.raises(CredentialsError):
        policy(Clock()).run(failing(1, lambda: ResponseError(403, "ExpiredToken")), verb="read", target="t")


def test_a_cancelled_transfer_stops_waiting() -> None:
    cancelled = threading.Event()
    calls: list[int] = []

    def operation() -> None:
        calls.append(1)
        raise slow_down()

    def sleep(_seconds: float) -> None:
        cancelled.set()

    with pytest.raises(StorageError, match="1 attempt in"):
        RetryPolicy(cancelled=cancelled, sleep=sleep).run(operation, verb="write", target="t")
    with pytest.raises(StorageError, match="1 attempt in"):
        RetryPolicy(cancelled=cancelled).run(operation, verb="write", target="t")
    assert len(calls) == 2


def test_a_wait_ends_when_another_thread_cancels() -> None:
    cancelled = threading.Event()
    policy = RetryPolicy(RetryConfig(initial_backoff_seconds=600, max_backoff_seconds=600), cancelled=cancelled)
    failed = threading.Event()

    def operation() -> None:
        failed.set()
        raise ResponseError(503, retry_after=200)

    def cancel() -> None:
        failed.wait()
        cancelled.set()

    thread = threading.Thread(target=cancel)
    thread.start()
    with pytest.raises(StorageError):
        policy.run(operation, verb="write", target="t")
    thread.join()


def test_every_retry_is_logged_and_late_ones_as_warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "dcpfs.storage.retrying")
    policy(Clock(), attempts=10).run(failing(4, slow_down), verb="read", target="s3://b/x")
    own = [record for record in caplog.records if record.name == "dcpfs.storage.retrying"]
    assert [record.levelname for record in own] == ["DEBUG", "DEBUG", "WARNING", "WARNING"]
    assert "attempt 3 of 10 failed" in own[2].getMessage()


def test_memory_errors_and_interrupts_pass_untouched() -> None:
    for error in (MemoryError, KeyboardInterrupt):
        with pytest.raises(error):
            policy(Clock()).run(failing(1, error), verb="read", target="t")  # type: ignore[arg-type] # an interrupt is no Exception


def refused() -> Exception:
    return ConnectionRefusedError(111, "Connection refused")


def test_a_store_that_never_answered_is_given_up_sooner() -> None:
    clock = Clock()
    retries = policy(clock, attempts=30)
    with pytest.raises(StorageError, match=r"\(10 attempts in "):
        retries.run(failing(99, refused), verb="read", target="s3://b/x")
    assert clock.now < 120
    # One that has answered, be it with a wish to slow down, is there and may come back.
    assert retries.run(failing(1, slow_down), verb="read", target="s3://b/x") == 2
    assert retries.run(failing(20, refused), verb="read", target="s3://b/x") == 21


@pytest.mark.parametrize("limits", [{"attempts": 4}, {"attempts": 30, "first_contact_attempts": 4}])
def test_first_contact_takes_the_smaller_of_both_limits(limits: dict[str, float]) -> None:
    with pytest.raises(StorageError, match=r"\(4 attempts in "):
        policy(Clock(), **limits).run(failing(99, refused), verb="read", target="s3://b/x")


def test_case_107_a_name_that_cannot_be_looked_up_is_asked_for_again_where_it_was_known_before() -> None:
    clock = Clock()
    retries = policy(clock)
    unknown = lambda: socket.gaierror(socket.EAI_NONAME, "Name or service not known")  # noqa: E731 - an error's maker
    with pytest.raises(StorageError, match="endpoint's name"):
        retries.run(failing(1, unknown), verb="read", target="s3://b/x")
    assert clock.sleeps == []
    assert retries.run(lambda: 1, verb="read", target="s3://b/x") == 1
    assert retries.run(failing(3, unknown), verb="read", target="s3://b/x") == 4
    assert len(clock.sleeps) == 3


def test_case_82_what_one_store_heard_from_a_service_counts_for_all_that_are_opened_there() -> None:
    options = {"endpoint_url": "http://one.test:1", "client_kwargs": {"region_name": "x", "verify": False}}
    known = Location("s3://bucket-of-contacts/runs/1", options)
    assert policy_at(known, Clock()).run(lambda: 1, verb="read", target="s3://b/x") == 1
    same = Location(
        "s3://bucket-of-contacts/runs/2",
        {"client_kwargs": {"verify": False, "region_name": "x"}, "endpoint_url": "http://one.test:1"},
    )
    assert policy_at(same, Clock(), attempts=30).run(failing(20, refused), verb="read", target="s3://b/x") == 21
    unknown = lambda: socket.gaierror(socket.EAI_NONAME, "Name or service not known")  # noqa: E731 - an error's maker
    assert policy_at(same, Clock()).run(failing(3, unknown), verb="read", target="s3://b/x") == 4


@pytest.mark.parametrize(
    "other",
    [
        Location("s3://other-bucket-of-contacts/runs", {"endpoint_url": "http://two.test:1"}),
        Location("s3://bucket-of-contacts/runs", {"endpoint_url": "http://two.test:2"}),
        Location("s3://bucket-of-contacts/runs"),
        Location("gs://bucket-of-contacts/runs", {"endpoint_url": "http://two.test:1"}),
        None,
    ],
    ids=["bucket", "endpoint", "no-options", "scheme", "none"],
)
def test_what_one_service_said_says_nothing_of_another(other: Location | None) -> None:
    known = Location("s3://bucket-of-contacts/runs", {"endpoint_url": "http://two.test:1"})
    policy_at(known, Clock()).run(lambda: 1, verb="read", target="s3://b/x")
    with pytest.raises(StorageError, match=r"\(10 attempts in "):
        policy_at(other, Clock(), attempts=30).run(failing(20, refused), verb="read", target="s3://b/x")


def test_no_secret_is_kept_of_a_service_that_answered() -> None:
    secret = "a-secret-nobody-sees"
    known = Location(f"sftp://user:{secret}@contacts.test/runs", {"password": secret})
    policy_at(known, Clock()).run(lambda: 1, verb="read", target="sftp://contacts.test/runs")
    assert secret not in repr(contacts._answered)
    assert secret.encode() not in b"".join(contacts._answered)
