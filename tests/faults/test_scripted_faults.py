"""What S3 can do wrong, at any request of a save, an overwrite, a load, a checkpointer's step and a resume.

For each: the exact requests, how long was waited, what is found afterwards, what is left at the server, what is said.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from dcpfs.errors import CredentialsError, DcpfsError, PermissionDeniedError, StorageError, StorageTimeoutError
from dcpfs.testing.loopback import LoopbackOnly
from dcpfs.testing.s3_exchange import Exchange, S3Request, Stage
from dcpfs.testing.s3_faults import (
    Action,
    Answer,
    Drip,
    Drop,
    Effect,
    ErrorInside200,
    Fault,
    Hang,
    Length,
    LosePart,
    ShortBody,
    StaleList,
    WrongETag,
    WrongRange,
    denied,
    internal_error,
    slow_down,
)
from dcpfs.testing.scripted_s3 import ScriptedS3Server
from tests.faults.scripted_scene import (
    RETRY,
    STEPS,
    WORKS,
    Clock,
    Profile,
    Sent,
    Work,
    check_error,
    forget_clients,
    impatient,
    line_of,
    on_clock,
    sent,
    settle,
)


@pytest.fixture(scope="module")
def module_server() -> Iterator[ScriptedS3Server]:
    with ScriptedS3Server() as server:
        yield server


@pytest.fixture
def server(module_server: ScriptedS3Server, caplog: pytest.LogCaptureFixture) -> Iterator[ScriptedS3Server]:
    caplog.set_level(logging.DEBUG, logger="dcpfs")
    with LoopbackOnly() as guard:
        yield module_server
    assert guard.foreign == []
    assert module_server.secret_key not in caplog.text
    assert not {"CreateBucket", "CopyObject", "Unknown"} & set(module_server.operations())


class Nth:
    """Picks the n-th request, and from then on those that ask for the same."""

    def __init__(self, number: int) -> None:
        self._left = number
        self.picked: S3Request | None = None

    def __call__(self, request: S3Request) -> bool:
        if request.operation == "Connect":
            return False
        if self.picked is not None:
            return line_of(request) == line_of(self.picked)
        self._left -= 1
        if self._left >= 0:
            return False
        self.picked = request
        return True


def has_body(request: S3Request) -> bool:
    return request.method in ("PUT", "POST") and int(request.header("content-length") or 0) > 10


def is_answered_at_length(request: S3Request) -> bool:
    return request.method in ("GET", "POST") and request.operation != "DeleteObjects"


def is_ranged(request: S3Request) -> bool:
    return request.operation == "GetObject" and request.header("range") is not None


def is_any(request: S3Request) -> bool:
    return True


def completes(request: S3Request) -> bool:
    return request.operation == "CompleteMultipartUpload"


@dataclass(frozen=True)
class Passing:
    """A fault that passes.

    Attributes:
        action: What happens.
        times: How often in a row.
        concerns: To which requests it can happen.
        takes_effect: The request had done its work.
        everywhere: Tried at every single request, rather than at the first of each kind.
        least_wait_seconds: What the store asks for each time.
    """

    action: Action
    times: int = 2
    concerns: Callable[[S3Request], bool] = is_any
    takes_effect: bool = False
    everywhere: bool = False
    least_wait_seconds: float = 0.0


PASSING = {
    "slow down": Passing(slow_down(), everywhere=True),
    "500": Passing(internal_error()),
    "500 though it was done": Passing(internal_error(Effect.APPLIED), 1, takes_effect=True),
    "429 with Retry-After": Passing(
        Answer(429, "TooManyRequests", headers={"Retry-After": "7"}), least_wait_seconds=7.0
    ),
    "reset after the head": Passing(Drop(Stage.HEAD)),
    "reset in the body": Passing(Drop(Stage.REQUEST_BODY, after_bytes=10), concerns=has_body),
    "closed without an answer": Passing(Drop(Stage.RESPONSE_HEAD, reset=False)),
    "reset in the answer's head": Passing(Drop(Stage.RESPONSE_HEAD, after_bytes=12)),
    "not confirmed": Passing(Drop(Stage.RESPONSE_HEAD, effect=Effect.APPLIED), 1, takes_effect=True, everywhere=True),
    "reset in the answer's body": Passing(
        Drop(Stage.RESPONSE_BODY, after_bytes=5), 1, is_answered_at_length, takes_effect=True
    ),
    "short answer": Passing(ShortBody(1), 1, is_answered_at_length, takes_effect=True),
    "short range, told so": Passing(ShortBody(10, Length.SENT), 2, is_ranged),
    "another range": Passing(WrongRange(1), 2, is_ranged),
    "error inside 200": Passing(ErrorInside200(), 2, completes),
}


def quiet_run(server: ScriptedS3Server, work: Work) -> list[S3Request]:
    """What a piece of work sends when nothing fails."""
    settle(server, work)
    work.run(server, server.storage_options)
    requests = server.requests()
    assert work.found(server) == work.after
    return requests


def places(requests: list[S3Request], concerns: Callable[[S3Request], bool], *, everywhere: bool) -> Iterator[int]:
    """Numbers of the requests at which something is to happen."""
    seen = set()
    for number, request in enumerate(requests):
        is_question = request.status == 412  # whose failure is an answer as well
        if concerns(request) and not is_question and (everywhere or request.operation not in seen):
            seen.add(request.operation)
            yield number


def repeats(request: S3Request, fault: Passing, usual: Sent) -> Sent:
    """What a fault at this request costs, and not one request more."""
    line = line_of(request)
    looks = "HEAD", "HeadObject", line[2], None
    if request.operation == "CompleteMultipartUpload":
        # A completion that may have taken effect is looked at before it is sent again: it is not idempotent.
        asked = Sent({looks: fault.times})
        refused = isinstance(fault.action, Answer) and fault.action.status < 500
        return (Sent() if refused else asked) + (Sent() if fault.takes_effect else Sent({line: fault.times}))
    cost = Sent({line: fault.times})
    if fault.takes_effect and request.header("if-none-match"):
        cost["GET", "GetObject", line[2], None] += 1  # whether it is ours that refuses ours
        # The first of a store is put a second time, to see that it keeps to the condition: here it has just shown it.
        cost[line] -= usual[line] - 1
    return cost


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind in WORKS for name in PASSING if kind != "overwrite" or PASSING[name].everywhere],
)
def test_cases_31_82_83_what_passes_costs_its_repeats_and_nothing_else(
    server: ScriptedS3Server, kind: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    work, fault = WORKS[kind], PASSING[name]
    with on_clock() as clock:
        requests = quiet_run(server, work)
        usual = Sent(map(line_of, requests))
        for at in places(requests, fault.concerns, everywhere=fault.everywhere):
            settle(server, work)
            waits = len(clock.waits)
            picks = Nth(at)
            scripted = server.fail(picks, fault.action, times=fault.times)
            work.run(server, server.storage_options)
            assert picks.picked is not None
            assert scripted.hits == fault.times
            assert sent(server) == usual + repeats(picks.picked, fault, usual), picks.picked
            check_waits(clock, waits, fault)
            uploads = server.open_uploads()
            assert not any(upload.parts for upload in uploads)
            assert len(uploads) <= (picks.picked.operation == "CreateMultipartUpload" and fault.takes_effect)
            assert work.found(server) == work.after
    assert server.secret_key not in caplog.text


def check_waits(clock: Clock, before: int, fault: Passing) -> None:
    waits = clock.waits[before:]
    assert len(waits) <= fault.times
    for number, seconds in enumerate(waits):
        assert fault.least_wait_seconds <= seconds <= fault.least_wait_seconds + 0.25 * 2**number


STAYING: dict[str, Action] = {
    "slow down": slow_down(),
    "500": internal_error(),
    "reset": Drop(Stage.RESPONSE_HEAD),
    "denied": denied(),
}


@pytest.mark.parametrize("name", STAYING)
@pytest.mark.parametrize("kind", WORKS)
def test_cases_31_83_90_a_request_that_never_succeeds_is_one_clear_error_in_bounded_time(
    server: ScriptedS3Server, kind: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    work = WORKS[kind]
    requests = quiet_run(server, work)
    usual = Sent(map(line_of, requests))
    for at in places(requests, is_any, everywhere=False):
        caplog.clear()
        settle(server, work)
        picks = Nth(at)
        server.fail(picks, STAYING[name], times=None)
        error: DcpfsError | None = None
        with on_clock() as clock:
            try:
                work.run(server, server.storage_options)
            except DcpfsError as caught:
                error = caught
        assert picks.picked is not None
        # One request is tried so often as the policy says; what is tidied up, and asked by the way, comes on top.
        # A store that never said a word is given up sooner.
        allowed = {"denied": [1], "reset": [RETRY.first_contact_attempts, RETRY.attempts]}.get(name, [RETRY.attempts])
        silently = 2 if name == "reset" and picks.picked.operation == "DeleteObject" else 1
        line = line_of(picks.picked)
        assert sent(server)[line] <= usual[line] - 1 + silently * max(allowed)
        assert not any(upload.parts for upload in server.open_uploads())
        server.reset_faults()
        if error is None:
            # The step is committed; that an old one could not be removed is no reason to fail the save.
            assert kind == "commit"
            assert "DeleteObjects" in line
            assert work.found(server) == work.after
            assert any(record.levelno >= logging.WARNING for record in caplog.records)
            continue
        check_error(error, server, caplog)
        assert clock.now_seconds <= RETRY.deadline_seconds
        said = any(f"({tries} attempts in " in str(error) for tries in allowed)
        assert name == "denied" or said or isinstance(error, StorageTimeoutError)
        assert work.found(server) in work.any_outcome - ({work.after} if work.after != work.before else set())


def thirds(count: int) -> tuple[int, ...]:
    """The first request, and two before a step is committed."""
    return 0, count // 3, count // 2


@pytest.mark.parametrize("kind", WORKS)
def test_case_81_keys_that_expire_for_good_are_said_at_once(
    server: ScriptedS3Server, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(at: int) -> None:
        server.expire_credential(server.access_key, after=at)

    check_refusals(server, kind, refuse, CredentialsError, "expired and could not be renewed", caplog)


@pytest.mark.parametrize("kind", WORKS)
def test_a_clock_that_is_wrong_is_said_at_once(
    server: ScriptedS3Server, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    class ClockJumps(Action):
        """From here on the server takes no signature of now."""

        def before_body(self, exchange: Exchange, fault: Fault) -> None:
            server.clock_skew_seconds = 3600

    def refuse(at: int) -> None:
        server.fail("*", ClockJumps(), after=at)

    check_refusals(server, kind, refuse, CredentialsError, "set this machine's clock", caplog)


@pytest.mark.parametrize("kind", WORKS)
def test_a_right_that_is_lost_on_the_way_is_said_at_once(
    server: ScriptedS3Server, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(at: int) -> None:
        server.fail("*", denied(), times=None, after=at)

    check_refusals(server, kind, refuse, PermissionDeniedError, "give the identity the right", caplog)


def check_refusals(
    server: ScriptedS3Server,
    kind: str,
    refuse: Callable[[int], None],
    expected: type[DcpfsError],
    remedy: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """From some request on everything is refused, the tidying up too."""
    work = WORKS[kind]
    count = len(quiet_run(server, work))
    for at in thirds(count):
        caplog.clear()
        settle(server, work)
        refuse(at)
        try:
            with on_clock() as clock, pytest.raises(expected, match=remedy) as caught:
                work.run(server, server.storage_options)
            check_error(caught.value, server, caplog)
        finally:
            server.accept_credential(server.access_key, server.secret_key)
            server.clock_skew_seconds = 0.0
            server.reset_faults()
        assert clock.waits == [], "no wait makes it better"
        assert len(server.requests()) <= at + 25
        assert work.found(server) in work.any_outcome


@pytest.mark.parametrize("kind", WORKS)
def test_case_81_keys_that_expire_on_the_way_are_renewed_and_one_request_repeated(
    server: ScriptedS3Server, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    profile = Profile(server, tmp_path / "credentials")
    options = {name: value for name, value in server.storage_options.items() if name not in ("key", "secret")}

    class Expiry(Action):
        def before_body(self, exchange: Exchange, fault: Fault) -> None:
            profile.renew()

    work = WORKS[kind]
    usual = Sent(map(line_of, quiet_run(server, work)))
    for at in (0, usual.total() // 2):
        settle(server, work)
        server.fail("*", Expiry(), after=at)
        with on_clock() as clock:
            work.run(server, options)
        assert work.found(server) == work.after
        assert clock.waits == []
        refused = [request for request in server.requests() if request.status == 400]
        # A HEAD can't say why it is refused: botocore asks twice, and one GET then finds out.
        assert 1 <= len(refused) <= 4
        assert not any(upload.parts for upload in server.open_uploads())


@pytest.mark.parametrize("kind", WORKS)
def test_case_82_half_a_minute_of_slow_down_is_outlasted(server: ScriptedS3Server, kind: str) -> None:
    work = WORKS[kind]
    usual = Sent(map(line_of, quiet_run(server, work)))
    for seed, busy_from in enumerate(thirds(usual.total())):
        settle(server, work)
        with on_clock(seed) as clock:
            busy_until = 0.0

            def is_busy(request: S3Request, busy_from: int = busy_from, clock: Clock = clock) -> bool:
                nonlocal busy_until
                if not busy_until and request.order >= busy_from:
                    busy_until = clock.now_seconds + 30
                return request.operation != "Connect" and clock.now_seconds < busy_until

            busy = server.fail(is_busy, slow_down(), times=None)
            work.run(server, server.storage_options)
        # A resume reads its keys at once, and the waits of all are added up here.
        assert 30 <= clock.now_seconds < 30 + 4 * RETRY.max_backoff_seconds
        # While a completion is refused, looking whether it took effect is refused as well.
        assert len(clock.waits) <= busy.hits <= 2 * len(clock.waits)
        assert len(clock.waits) < RETRY.attempts
        busy.release()
        assert sent(server).total() == usual.total() + busy.hits
        assert work.found(server) == work.after


@pytest.mark.parametrize("kind", WORKS)
def test_a_store_that_asks_for_more_time_than_there_is_gets_none(
    server: ScriptedS3Server, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    work = WORKS[kind]
    settle(server, work)
    server.fail("*", slow_down(3600), times=None)
    with on_clock() as clock, pytest.raises(StorageTimeoutError, match=r"\(1 attempt in ") as caught:
        work.run(server, server.storage_options)
    check_error(caught.value, server, caplog)
    assert clock.waits == []
    server.reset_faults()
    assert work.found(server) == work.before


@pytest.mark.parametrize("kind", WORKS)
def test_connections_that_are_reset_at_once_cost_no_request(server: ScriptedS3Server, kind: str) -> None:
    work = WORKS[kind]
    usual = Sent(map(line_of, quiet_run(server, work)))
    settle(server, work)
    forget_clients()
    reset = server.fail("Connect", Drop(), times=2)
    with on_clock() as clock:
        work.run(server, server.storage_options)
    assert reset.hits == 2
    assert 1 <= len(clock.waits) <= 2
    # A client that is new asks once whether the bucket is there.
    assert sent(server) - Sent({("HEAD", "HeadBucket", "", None): 1}) == usual
    assert work.found(server) == work.after


@pytest.mark.parametrize("kind", WORKS)
def test_tags_that_tell_nothing_true_do_no_harm(server: ScriptedS3Server, kind: str) -> None:
    work = WORKS[kind]
    usual = Sent(map(line_of, quiet_run(server, work)))
    settle(server, work)
    for operation in ("PutObject", "HeadObject", "GetObject"):
        server.fail(operation, WrongETag(), times=None)
    work.run(server, server.storage_options)
    assert sent(server) == usual
    server.reset_faults()
    assert work.found(server) == work.after


@pytest.mark.parametrize("kind", ["save", "overwrite"])
@pytest.mark.parametrize("action", [LosePart(), WrongETag()], ids=["lost", "wrong tag"])
def test_case_83_a_part_that_is_lost_fails_the_save_and_leaves_nothing(
    server: ScriptedS3Server, kind: str, action: Action, caplog: pytest.LogCaptureFixture
) -> None:
    work = WORKS[kind]
    settle(server, work)
    server.fail("UploadPart", action, after=1)
    with on_clock() as clock, pytest.raises(StorageError, match=r"InvalidPart.*so save again") as caught:
        work.run(server, server.storage_options)
    check_error(caught.value, server, caplog)
    assert clock.waits == []
    for operation in ("CreateMultipartUpload", "CompleteMultipartUpload", "AbortMultipartUpload"):
        assert len(server.requests(operation)) == 1
    assert len(server.requests("UploadPart")) == 2
    assert server.open_uploads() == []
    assert not any(request.key.endswith(".metadata") for request in server.requests("PutObject"))
    assert work.found(server) == "none"


@pytest.mark.parametrize("hidden", ["manifest.json", "model/.metadata", "model/__0_0.distcp", ""])
def test_case_78_a_listing_that_is_behind_hides_no_step(server: ScriptedS3Server, hidden: str) -> None:
    work = WORKS["resume"]
    usual = Sent(map(line_of, quiet_run(server, work)))
    settle(server, work)
    keys = {key for key in server.stored_keys() if key.startswith(STEPS) and key.endswith(hidden)}
    server.fail("ListObjectsV2", StaleList(keys), times=None)
    work.run(server, server.storage_options)
    more = sent(server) - usual
    assert {method for method, _, _, _ in more} <= {"HEAD"}
    assert more.total() <= len(keys)
    assert not usual - sent(server)


@pytest.mark.parametrize(
    ("kind", "operation", "drips"),
    [
        ("load", "GetObject", Drip(1)),
        ("load", "GetObject", Hang(Stage.RESPONSE_BODY, after_bytes=50)),
        ("resume", "GetObject", Drip(1)),
        ("save", "UploadPart", Hang(Stage.RESPONSE_HEAD)),
        ("commit", "ListObjectsV2", Hang(Stage.RESPONSE_BODY, after_bytes=50)),
        ("commit", "PutObject", Hang(Stage.HEAD)),
    ],
    ids=repr,
)
def test_an_answer_that_never_ends_is_asked_for_again(
    server: ScriptedS3Server, kind: str, operation: str, drips: Action
) -> None:
    work = WORKS[kind]
    usual = Sent(map(line_of, quiet_run(server, work)))
    settle(server, work)
    with on_clock(), impatient() as retry:
        endless = server.fail(operation, drips, after=1 if kind != "commit" else 0)
        with stepping(endless):
            work.run(server, server.storage_options)
        assert retry.read_timeout_seconds < 1
        assert endless.hits == 1
        endless.release()
        more = sent(server) - usual
    assert not usual - sent(server)
    assert set(more) - {("HEAD", "HeadBucket", "", None)} == {
        line_of(request) for request in server.requests(operation) if line_of(request) in more
    }
    assert work.found(server) == work.after


@contextmanager
def stepping(fault: Fault) -> Iterator[None]:
    """Let a drip go on, a little now and then, until the end."""
    ended = threading.Event()

    def go() -> None:
        while not ended.wait(0.05):
            fault.step()

    thread = threading.Thread(target=go)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(20)
