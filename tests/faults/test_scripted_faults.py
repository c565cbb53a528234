"""What S3 can do wrong, at any request of a save, an overwrite, a load, a checkpointer's step and a resume.

For each: the exact requests, how long was waited, what is found afterwards, what is left at the server, what is said.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import dcpfs
from dcpfs.checkpointer.probing import PROBE_PREFIX
from dcpfs.errors import CredentialsError, DcpfsError, PermissionDeniedError, StorageError, StorageTimeoutError
from dcpfs.testing.loopback import LoopbackOnly
from dcpfs.testing.s3_exchange import Exchange, S3Request, Stage
from dcpfs.testing.s3_faults import (
    Action,
    Answer,
    Drip,
    Drop,
    Fault,
    Hang,
    LosePart,
    StaleList,
    WrongETag,
    denied,
    internal_error,
    slow_down,
)
from dcpfs.testing.scripted_s3 import ScriptedS3Server
from tests.faults.scripted_passing import PASSING, Passing, completes, is_any, is_of_an_upload
from tests.faults.scripted_scene import (
    NAME,
    RETRY,
    STEPS,
    WORKS,
    Clock,
    Part,
    Profile,
    Sent,
    Work,
    check_error,
    config,
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


SMALL_KINDS = [kind for kind, work in WORKS.items() if not work.large]


def concerned(kind: str, concerns: Callable[[S3Request], bool]) -> Callable[[S3Request], bool]:
    """To which requests of a work something is to happen: the large one brings its uploads, the rest is known."""
    return (lambda request: is_of_an_upload(request) and concerns(request)) if WORKS[kind].large else concerns


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
        sort = request.operation, PROBE_PREFIX in request.key
        if concerns(request) and not is_question and (everywhere or sort not in seen):
            seen.add(sort)
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


@pytest.mark.parametrize("kind", WORKS)
def test_every_fault_that_passes_is_tried_wherever_it_can_happen(server: ScriptedS3Server, kind: str) -> None:
    requests = quiet_run(server, WORKS[kind])
    for name, fault in PASSING.items():
        can_happen = any(places(requests, concerned(kind, fault.concerns), everywhere=True))
        assert can_happen or kind not in fault.kinds, name
        if kind in Passing.kinds:
            assert can_happen == (kind in fault.kinds), name
    multipart = {"save", "overwrite", "commit multipart"}
    assert any(map(completes, requests)) == (kind in multipart)


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in WORKS for name, fault in PASSING.items() if kind in fault.kinds]
)
def test_cases_31_82_83_what_passes_costs_its_repeats_and_nothing_else(
    server: ScriptedS3Server, kind: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    work, fault = WORKS[kind], PASSING[name]
    with on_clock() as clock:
        requests = quiet_run(server, work)
        usual = Sent(map(line_of, requests))
        tried = list(places(requests, concerned(kind, fault.concerns), everywhere=fault.everywhere))
        assert tried
        for at in tried:
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


Line = tuple[str, str, str, int | None]
"""As `line_of` has it."""

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
    tried = list(places(requests, concerned(kind, is_any), everywhere=False))
    assert tried
    for at in tried:
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
        line = line_of(picks.picked)
        check_failing(sent(server), usual, line, max(allowed), is_reset=name == "reset")
        assert not any(upload.parts for upload in server.open_uploads())
        server.reset_faults()
        if error is None:
            # The step is committed; that an old one, or its own mark, could not be removed is no reason to fail it.
            assert kind == "commit"
            assert picks.picked.operation == "DeleteObjects" or (line[1] == "DeleteObject" and ".writing" in line[2])
            assert work.found(server) == work.after
            assert any(record.levelno >= logging.WARNING for record in caplog.records)
            continue
        check_error(error, server, caplog)
        assert clock.now_seconds <= RETRY.deadline_seconds
        said = any(f"({tries} attempts in " in str(error) for tries in allowed)
        assert name == "denied" or said or isinstance(error, StorageTimeoutError)
        assert work.found(server) in work.failed_outcome


def check_failing(found: Sent, usual: Sent, line: Line, tries: int, *, is_reset: bool) -> None:
    """All requests of a work of which one never succeeds, beside the usual ones: its tries, and what is tidied up."""
    _, operation, key, _ = line
    own = {each[2] for each in usual if each[1] in ("PutObject", "CompleteMultipartUpload")}
    most = Sent({("DELETE", "DeleteObject", each, None): 1 for each in own})
    most["DELETE", "AbortMultipartUpload", key, None] += operation in ("UploadPart", "CompleteMultipartUpload")
    if operation == "CompleteMultipartUpload":  # it may have taken effect
        most["HEAD", "HeadObject", key, None] += tries
    if operation == "HeadObject":  # which can't say why it is refused
        most["GET", "GetObject", key, None] += usual[line]
    # aiobotocore's own connections send a DELETE once more when they break before an answer.
    most[line] += tries * (2 if is_reset and operation == "DeleteObject" else 1)
    more = found - usual
    assert not more - most
    assert found[line] >= tries


def thirds(count: int) -> tuple[int, ...]:
    """The first request, and two before a step is committed."""
    return 0, count // 3, count // 2


@pytest.mark.parametrize("kind", SMALL_KINDS)
def test_case_81_keys_that_expire_for_good_are_said_at_once(
    server: ScriptedS3Server, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(at: int) -> None:
        server.expire_credential(server.access_key, after=at)

    check_refusals(server, kind, refuse, CredentialsError, "expired and could not be renewed", caplog)


@pytest.mark.parametrize("kind", SMALL_KINDS)
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
        assert work.found(server) in (work.failed_outcome if at else {work.before})


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


@pytest.mark.parametrize("kind", SMALL_KINDS)
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


@pytest.mark.parametrize("kind", SMALL_KINDS)
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


@pytest.mark.parametrize("kind", SMALL_KINDS)
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


@pytest.mark.parametrize("kind", ["save", "overwrite", "commit multipart"])
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
    marker = "/manifest.json" if kind == "commit multipart" else "/.metadata"
    assert not any(request.key.endswith(marker) for request in server.requests("PutObject"))
    assert work.found(server) == ("step 1" if kind == "commit multipart" else "none")


@pytest.mark.parametrize("hidden", ["manifest.json", "model/.metadata", "model/__0_0.distcp", ""])
def test_case_78_a_listing_that_is_behind_hides_no_step(server: ScriptedS3Server, hidden: str) -> None:
    work = WORKS["resume"]
    usual = Sent(map(line_of, quiet_run(server, work)))
    settle(server, work)
    keys = {key for key in server.stored_keys() if key.startswith(STEPS) and key.endswith(hidden)}
    stale = server.fail("ListObjectsV2", StaleList(keys), times=None)
    work.run(server, server.storage_options)
    assert stale.hits
    more = sent(server) - usual
    assert {method for method, _, _, _ in more} <= {"HEAD"}
    assert more.total() <= len(keys)
    assert not usual - sent(server)


@pytest.mark.parametrize("hidden", [".metadata", "__0_0.distcp", ""])
def test_case_78_a_listing_that_is_behind_mixes_no_overwrite(server: ScriptedS3Server, hidden: str) -> None:
    work = WORKS["overwrite"]
    settle(server, work)
    keys = {f"{NAME}/{name}" for name in (".metadata", "__0_0.distcp") if name.endswith(hidden)}
    assert keys <= set(server.stored_keys())
    stale = server.fail("ListObjectsV2", StaleList(keys), times=None)
    work.run(server, server.storage_options)
    assert stale.hits == 2
    server.reset_faults()
    assert work.found(server) == work.after


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("hidden", ["manifest.json", "model/.metadata", "model/__0_0.distcp", ""])
def test_case_78_a_listing_that_is_behind_has_no_live_step_removed(
    server: ScriptedS3Server, hidden: str, step: int
) -> None:
    work = WORKS["commit"]
    quiet_run(server, work)
    new = {key for key in server.stored_keys() if key.startswith(STEPS)}
    settle(server, work)
    old = {key for key in server.stored_keys() if key.startswith(STEPS)}
    keys = {key for key in (old if step == 1 else new) if f"/iter_{step:09}/" in key and key.endswith(hidden)}
    assert keys
    stale = server.fail("ListObjectsV2", StaleList(keys), times=None)
    work.run(server, server.storage_options)
    assert stale.hits
    assert work.found(server) == work.after
    server.reset_faults()
    assert work.found(server) == work.after
    assert {key for key in new if f"/iter_{2:09}/" in key} <= set(server.stored_keys())
    # What a listing hid while its step was removed went with it, by the manifest.
    with dcpfs.DistributedCheckpointer(config(server)) as checkpointer:
        checkpointer.save_state(3, {"model": Part(3), "optim": Part(30)})
        assert checkpointer.steps() == [3]
    assert not {key for key in server.stored_keys() if "/iter_000000001/" in key or "/iter_000000002/" in key}


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
    asked: list[S3Request] = []

    def is_endless(request: S3Request) -> bool:
        if request.operation == operation:
            asked.append(request)
        return request.operation == operation and len(asked) == (1 if kind == "commit" else 2)

    with on_clock(), impatient() as retry:
        endless = server.fail(is_endless, drips)
        with stepping(endless):
            work.run(server, server.storage_options)
        assert retry.read_timeout_seconds < RETRY.read_timeout_seconds
        assert endless.hits == 1
        endless.release()
        more = sent(server) - usual
    assert not usual - sent(server)
    again = line_of(asked[0 if kind == "commit" else 1])
    # A machine that is busy can be silent for as long once more.
    assert 1 <= more.pop(again) <= 3
    assert set(more) <= {("HEAD", "HeadBucket", "", None)}
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
