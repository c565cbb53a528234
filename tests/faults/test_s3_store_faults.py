"""Every fault of S3 against every verb of the store: what was sent, what came of it, what was left, what was said."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest

from dcpfs.errors import (
    BucketNotFoundError,
    CredentialsError,
    DcpfsError,
    ObjectNotFoundError,
    PermissionDeniedError,
    StorageError,
    UnsupportedOperationError,
)
from dcpfs.storage.s3_store import S3Store
from dcpfs.storage.store import ObjectInfo
from dcpfs.testing.s3_exchange import Stage
from dcpfs.testing.s3_faults import (
    Action,
    Answer,
    Drop,
    Effect,
    denied,
    internal_error,
    no_such_bucket,
    not_implemented,
    slow_down,
    too_skewed,
)
from dcpfs.testing.scripted_s3 import ScriptedS3Server
from tests.faults.s3_scene import ATTEMPTS, LARGE, PREFIX, SMALL, check_words, write_large

pytestmark = pytest.mark.usefixtures("hear_everything")

# -- the verbs


def read_range(store: S3Store) -> bytes:
    buffers = [bytearray(100), bytearray(1), bytearray(200)]
    store.read_into("x", 50, [memoryview(buffer) for buffer in buffers])
    return b"".join(buffers)


@dataclass(frozen=True)
class Verb:
    """One verb, the request it is about, and how to tell that it succeeded."""

    operation: str
    run: Callable[[S3Store], object]
    succeeded: Callable[[ScriptedS3Server, object], bool]
    requests: int = 1
    """How many of that request it takes when nothing fails."""

    def __str__(self) -> str:
        return self.operation


def is_stored(content: bytes) -> Callable[[ScriptedS3Server, object], bool]:
    def check(server: ScriptedS3Server, result: object) -> bool:
        assert isinstance(result, ObjectInfo)
        return result.size_bytes == len(content) and server.read(f"{PREFIX}/new") == content

    return check


READS = {
    "get": Verb("GetObject", lambda store: store.get("x"), lambda _, result: result == SMALL),
    "get_tail": Verb(
        "GetObject", lambda store: store.get_tail("x", 10), lambda _, result: result == (SMALL[-10:], len(SMALL))
    ),
    "read_into": Verb("GetObject", read_range, lambda _, result: result == SMALL[50:351]),
}
VERBS = {
    **READS,
    "head": Verb(
        "HeadObject",
        lambda store: store.head("x"),
        lambda _, result: isinstance(result, ObjectInfo) and result.size_bytes == len(SMALL),
    ),
    "exists": Verb("HeadObject", lambda store: store.exists("x"), lambda _, result: result is True),
    "list": Verb(
        "ListObjectsV2",
        lambda store: [info.path for info in store.list()],
        lambda _, result: result == ["x", "y"],
    ),
    "list_directories": Verb(
        "ListObjectsV2", lambda store: list(store.list_directories()), lambda _, result: result == []
    ),
    "put": Verb("PutObject", lambda store: store.put("new", [SMALL]), is_stored(SMALL)),
    "put_absent": Verb("PutObject", lambda store: store.put("new", [SMALL], if_absent=True), is_stored(SMALL)),
    "confirm": Verb("HeadObject", lambda store: store.put("new", [SMALL]), is_stored(SMALL)),
    "create": Verb("CreateMultipartUpload", write_large, is_stored(LARGE)),
    "part": Verb("UploadPart", write_large, is_stored(LARGE), requests=3),
    "complete": Verb("CompleteMultipartUpload", write_large, is_stored(LARGE)),
    "delete": Verb(
        "DeleteObject", lambda store: store.delete(["x"]), lambda server, _: server.stored_keys() == [f"{PREFIX}/y"]
    ),
    "delete_many": Verb(
        "DeleteObjects", lambda store: store.delete(["x", "y"]), lambda server, _: server.stored_keys() == []
    ),
}
WRITES = ("put", "put_absent", "create", "part", "complete")

TRANSIENT: dict[str, Action] = {
    "slow_down": slow_down(),
    "retry_after": slow_down(0),
    "internal_error": internal_error(),
    "too_many_requests": Answer(429, "TooManyRequests"),
    "bad_gateway": Answer(502, ""),
    "request_timeout": Answer(400, "RequestTimeout"),
    "reset": Drop(Stage.HEAD),
    "reset_in_body": Drop(Stage.REQUEST_BODY, after_bytes=700),
    "closed_unanswered": Drop(Stage.RESPONSE_HEAD, reset=False),
    "reset_in_answer": Drop(Stage.RESPONSE_HEAD, after_bytes=12),
    "unconfirmed": Drop(Stage.RESPONSE_HEAD, effect=Effect.APPLIED),
    "unconfirmed_error": internal_error(Effect.APPLIED),
}
"""What may pass when the request is sent again."""

PERMANENT: dict[str, tuple[Answer, type[DcpfsError]]] = {
    "denied": (denied(), PermissionDeniedError),
    "wrong_signature": (Answer(403, "SignatureDoesNotMatch"), CredentialsError),
    "unknown_key": (Answer(403, "InvalidAccessKeyId"), CredentialsError),
    "too_skewed": (too_skewed(), CredentialsError),
    "no_such_bucket": (no_such_bucket(), BucketNotFoundError),
    "not_implemented": (not_implemented(), UnsupportedOperationError),
    "malformed": (Answer(400, "MalformedXML"), StorageError),
}
"""What does not pass, and the error that says so."""


# -- the matrix

Cell = tuple[str, str]

DROPPED = {name for name, action in TRANSIENT.items() if isinstance(action, Drop)}
AIOHTTP_CALLS = {"DeleteObject"}
"""Go over aiohttp, which by itself sends an idempotent request once more when its connection broke."""
FOUND_DONE = {(verb, fault) for verb in ("complete",) for fault in ("unconfirmed", "unconfirmed_error")}
"""The store looks, finds that the request had taken effect, and is content."""
NOT_TOLD = {(verb, "request_timeout") for verb in ("head", "exists", "confirm")}
"""An answer to HEAD has no body, so only its status speaks."""
FALLS_BACK = {("put_absent", "not_implemented"), ("delete_many", "not_implemented"), ("delete_many", "malformed")}
"""A store that does not know the call is asked in another way; see below."""


def cells(faults: Iterable[str], without: set[Cell]) -> list[Cell]:
    return [(verb, fault) for verb in VERBS for fault in faults if (verb, fault) not in without]


@pytest.mark.parametrize(("verb", "fault"), cells(TRANSIENT, NOT_TOLD))
def test_case_82_what_passes_is_tried_again(
    s3_server: ScriptedS3Server, s3_store: S3Store, verb: str, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    action = VERBS[verb]
    times = 1 if (verb, fault) in FOUND_DONE else 2
    scripted = s3_server.fail(action.operation, TRANSIENT[fault], times=times)
    result = action.run(s3_store)
    assert action.succeeded(s3_server, result)
    assert scripted.hits == times
    wanted = action.requests + (0 if (verb, fault) in FOUND_DONE else times)
    assert len(s3_server.requests(action.operation)) == wanted
    assert not any(upload.parts for upload in s3_server.open_uploads())
    assert s3_server.secret_key not in caplog.text


@pytest.mark.parametrize(("verb", "fault"), cells(TRANSIENT, NOT_TOLD | FOUND_DONE))
def test_cases_31_83_90_what_does_not_pass_is_given_up_and_cleaned_up(
    s3_server: ScriptedS3Server, s3_store: S3Store, verb: str, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    action = VERBS[verb]
    s3_server.fail(action.operation, TRANSIENT[fault], times=None)
    with pytest.raises(StorageError) as caught:
        action.run(s3_store)
    check_words(caught.value, s3_server, caplog)
    assert f"({ATTEMPTS} attempts in " in str(caught.value)
    asked = len(s3_server.requests(action.operation))
    silently = 2 if fault in DROPPED and action.operation in AIOHTTP_CALLS else 1
    assert ATTEMPTS <= asked <= ATTEMPTS * action.requests * silently
    assert not any(upload.parts for upload in s3_server.open_uploads())
    if verb in WRITES and "unconfirmed" not in fault:
        assert f"{PREFIX}/new" not in s3_server.stored_keys()


@pytest.mark.parametrize(("verb", "fault"), cells(PERMANENT, FALLS_BACK | {("exists", "no_such_bucket")}))
def test_cases_31_83_90_what_cannot_pass_is_not_tried_again(
    s3_server: ScriptedS3Server, s3_store: S3Store, verb: str, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    action = VERBS[verb]
    answer, expected = PERMANENT[fault]
    if action.operation == "HeadObject":
        expected = {403: PermissionDeniedError, 404: ObjectNotFoundError}.get(answer.status, expected)
    s3_server.fail(action.operation, answer, times=None)
    with pytest.raises(expected) as caught:
        action.run(s3_store)
    check_words(caught.value, s3_server, caplog)
    # botocore takes a 400 to a HEAD for a wrong region, and asks once more.
    assert len(s3_server.requests(action.operation)) <= action.requests + (answer.status == 400)
    assert s3_server.open_uploads() == []
    if verb in WRITES:
        assert f"{PREFIX}/new" not in s3_server.stored_keys()
