"""Answers that are no errors and still wrong, and stores that do less than S3."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from dcpfs.errors import (
    BucketNotFoundError,
    ConfigError,
    ObjectExistsError,
    ObjectNotFoundError,
    PermissionDeniedError,
    StorageError,
    TransferSizeError,
)
from dcpfs.storage.location import Location
from dcpfs.storage.s3_store import S3Store
from dcpfs.storage.store import PartRange
from dcpfs.testing.http_exchange import Response
from dcpfs.testing.loopback import LoopbackOnly
from dcpfs.testing.s3_exchange import DroppedError, Exchange, S3Request, Stage
from dcpfs.testing.s3_faults import (
    Action,
    Answer,
    Drip,
    Drop,
    Effect,
    ErrorInside200,
    ExtraBytes,
    Fault,
    Hang,
    IgnoreRange,
    Length,
    LosePart,
    ShortBody,
    StaleList,
    Truncate,
    WrongETag,
    WrongRange,
    denied,
    internal_error,
    moved_to,
    no_such_bucket,
    slow_down,
)
from dcpfs.testing.s3_service import Dialect, Trailers, error_response
from dcpfs.testing.scripted_s3 import ScriptedS3Server
from dcpfs.testing.tls import TlsAuthority
from tests.faults.s3_scene import (
    ATTEMPTS,
    LARGE,
    MIB,
    PARTS,
    PREFIX,
    RETRY,
    SMALL,
    check_words,
    open_store,
    write_large,
)

pytestmark = pytest.mark.usefixtures("hear_everything")


@contextmanager
def fresh(server: ScriptedS3Server, **options: object) -> Iterator[S3Store]:
    """A store without experience of this server."""
    store = S3Store(Location(server.url(PREFIX), {**server.storage_options, **options}), transfer=PARTS, retry=RETRY)
    try:
        yield store
    finally:
        store.close()


def read(store: S3Store, start: int, size: int, name: str = "x") -> bytes:
    buffers = [bytearray(size // 3), bytearray(size - size // 3)]
    store.read_into(name, start, [memoryview(buffer) for buffer in buffers])
    return b"".join(buffers)


class _Refusal(Action):
    """503 as soon as the head is read, and the connection closed with the body on its way."""

    def before_body(self, exchange: Exchange, fault: Fault) -> None:
        answer = error_response(exchange, 503, "SlowDown")
        exchange.connection.send(Response(answer.status, {**answer.headers, "Connection": "close"}, answer.body))
        raise DroppedError


@dataclass
class _ReplacedMidway(Action):
    """The connection breaks in the middle of the body, and then the object is another."""

    after_bytes: int
    content: bytes

    def send(self, exchange: Exchange, fault: Fault, response: Response) -> None:
        exchange.connection.send_head(response)
        exchange.connection.send_body(response, 0, self.after_bytes)
        exchange.objects.put(exchange.request.bucket, exchange.request.key, (self.content,))
        raise DroppedError


class _ShortWhole(IgnoreRange):
    """A ranged read is answered with the start of the whole object, under the length of all of it."""

    def send(self, exchange: Exchange, fault: Fault, response: Response) -> None:
        ShortBody(10).send(exchange, fault, response)


class TestReads:
    @pytest.mark.parametrize(
        "action",
        [
            ShortBody(10),
            ShortBody(10, Length.SENT),
            ShortBody(10_000),
            Drop(Stage.RESPONSE_BODY, after_bytes=40),
            Drop(Stage.RESPONSE_BODY, after_bytes=40, reset=False),
            ExtraBytes(3),
            WrongRange(1),
            WrongRange(-1),
        ],
        ids=repr,
    )
    @pytest.mark.parametrize("times", [1, 2])
    def test_case_89_a_range_that_comes_wrong_is_asked_for_again(
        self, s3_server: ScriptedS3Server, s3_store: S3Store, action: Action, times: int
    ) -> None:
        fault = s3_server.fail("GetObject", action, times=times)
        assert read(s3_store, 100, 300) == SMALL[100:400]
        assert fault.hits == times
        assert len(s3_server.requests("GetObject")) == times + 1

    def test_a_range_goes_on_where_it_broke_off(self, s3_server: ScriptedS3Server, s3_store: S3Store) -> None:
        s3_server.write(f"{PREFIX}/big", LARGE)
        s3_server.fail("GetObject", Drop(Stage.RESPONSE_BODY, after_bytes=8 * MIB, reset=False))
        assert read(s3_store, 0, len(LARGE), "big") == LARGE
        ranges = [request.header("range") for request in s3_server.requests("GetObject")]
        assert ranges == [f"bytes=0-{len(LARGE) - 1}", f"bytes={8 * MIB}-{len(LARGE) - 1}"]

    def test_a_range_does_not_go_on_in_another_object(self, s3_server: ScriptedS3Server, s3_store: S3Store) -> None:
        old, new = b"old" * MIB, b"new" * MIB
        s3_server.write(f"{PREFIX}/big", old)
        s3_server.fail("GetObject", _ReplacedMidway(MIB, new))
        assert read(s3_store, 0, len(old), "big") == new
        assert len(s3_server.requests("GetObject")) == 3

    @pytest.mark.parametrize(
        "action", [ShortBody(10), ShortBody(10, Length.SENT), ExtraBytes(3), WrongRange(1)], ids=repr
    )
    def test_case_89_a_range_that_always_comes_wrong_is_an_error(
        self,
        s3_server: ScriptedS3Server,
        s3_store: S3Store,
        action: Action,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        s3_server.fail("GetObject", action, times=None)
        with pytest.raises(StorageError) as caught:
            read(s3_store, 100, 300)
        check_words(caught.value, s3_server, caplog)
        assert len(s3_server.requests("GetObject")) <= ATTEMPTS + 30  # those that make way go on

    def test_a_range_past_the_end_is_not_asked_for_again(
        self, s3_server: ScriptedS3Server, s3_store: S3Store, caplog: pytest.LogCaptureFixture
    ) -> None:
        for start in (len(SMALL) - 10, len(SMALL), len(SMALL) + 10):
            s3_server.forget()
            with pytest.raises(TransferSizeError) as caught:
                read(s3_store, start, 30)
            check_words(caught.value, s3_server, caplog)
            assert len(s3_server.requests("GetObject")) == 1

    def test_a_store_without_ranges_is_read_all_the_same(self, s3_server: ScriptedS3Server, s3_store: S3Store) -> None:
        s3_server.fail("GetObject", IgnoreRange(), times=None)
        assert read(s3_store, 100, 300) == SMALL[100:400]
        assert s3_store.get_tail("x", 10) == (SMALL[-10:], len(SMALL))

    @pytest.mark.parametrize(
        "action",
        [ShortBody(10), Drop(Stage.RESPONSE_BODY, after_bytes=40), ShortBody(10_000), _ShortWhole()],
        ids=lambda action: type(action).__name__,
    )
    @pytest.mark.parametrize(
        ("verb", "expected"),
        [
            (lambda store: store.get("x"), SMALL),
            (lambda store: store.get_tail("x", 500), (SMALL[-500:], len(SMALL))),
        ],
        ids=["get", "get_tail"],
    )
    def test_a_short_body_is_read_again(
        self,
        s3_server: ScriptedS3Server,
        s3_store: S3Store,
        verb: Callable[[S3Store], object],
        expected: object,
        action: Action,
    ) -> None:
        s3_server.fail("GetObject", action, times=2)
        assert verb(s3_store) == expected
        assert len(s3_server.requests("GetObject")) == 3

    @pytest.mark.parametrize("size", [0, 1, 10, 1024, 5000])
    @pytest.mark.parametrize("tail", [0, 1, 10, 4000])
    def test_tails_of_all_sizes(self, s3_server: ScriptedS3Server, s3_store: S3Store, size: int, tail: int) -> None:
        content = bytes(index % 251 for index in range(size))
        s3_server.write(f"{PREFIX}/t", content)
        assert s3_store.get_tail("t", tail) == (content[max(0, size - tail) :] if tail else b"", size)
        assert len(s3_server.requests()) == 1 + (size == 0 and tail > 0)

    def test_what_is_missing_is_told_apart(
        self, s3_server: ScriptedS3Server, s3_store: S3Store, caplog: pytest.LogCaptureFixture
    ) -> None:
        for verb in (s3_store.get, s3_store.head, lambda path: s3_store.get_tail(path, 3)):
            with pytest.raises(ObjectNotFoundError) as caught:
                verb("absent")
            assert not isinstance(caught.value, BucketNotFoundError)
            check_words(caught.value, s3_server, caplog)
        with pytest.raises(ObjectNotFoundError):
            read(s3_store, 0, 3, "absent")
        assert not s3_store.exists("absent")

    @pytest.mark.parametrize("stage", [Stage.HEAD, Stage.RESPONSE_HEAD, Stage.RESPONSE_BODY])
    def test_silence_ends_by_the_read_timeout(self, scripted_s3: ScriptedS3Server, stage: Stage) -> None:
        scripted_s3.write(f"{PREFIX}/x", SMALL)
        retry = RETRY.model_copy(update={"read_timeout_seconds": 0.5, "attempts": 20})
        store = open_store(scripted_s3, retry=retry)
        fault = scripted_s3.fail("GetObject", Hang(stage, after_bytes=50))
        assert read(store, 0, 300) == SMALL[:300]
        assert fault.hits == 1
        assert len(scripted_s3.requests("GetObject")) >= 2  # more on a machine that stands still for so long
        fault.release()
        store.close()

    def test_a_slow_body_is_not_given_up(self, s3_server: ScriptedS3Server, s3_store: S3Store) -> None:
        fault = s3_server.fail("GetObject", Drip(100))
        got: list[bytes] = []
        reader = threading.Thread(target=lambda: got.append(read(s3_store, 0, 1000)))
        reader.start()
        for _ in range(10):
            fault.step()
        reader.join(20)
        assert got == [SMALL[:1000]]
        assert len(s3_server.requests("GetObject")) == 1


class TestWrites:
    def test_case_33_a_marker_is_one_put(self, s3_server: ScriptedS3Server, s3_store: S3Store) -> None:
        s3_store.put(".metadata", [b"one", b"", b"two"])
        s3_store.put(".metadata", [b"three"])
        assert s3_server.read(f"{PREFIX}/.metadata") == b"three"
        assert set(s3_server.operations()) == {"PutObject", "HeadObject"}
        assert len(s3_server.requests("PutObject")) == 2

    def test_case_33_the_store_itself_refuses_a_second_one(
        self, s3_server: ScriptedS3Server, s3_store: S3Store, caplog: pytest.LogCaptureFixture
    ) -> None:
        s3_store.put("marker", [b"one"], if_absent=True)
        assert s3_server.requests("PutObject")[0].header("if-none-match") == "*"
        s3_server.fail("HeadObject", Answer(404, "NotFound"))  # another rank's came between look and put
        with pytest.raises(ObjectExistsError) as caught:
            s3_store.put("marker", [b"two"], if_absent=True)
        check_words(caught.value, s3_server, caplog)
        assert s3_server.read(f"{PREFIX}/marker") == b"one"

    def test_case_33_an_unconfirmed_put_is_not_mistaken_for_another_ones(
        self, s3_server: ScriptedS3Server, s3_store: S3Store
    ) -> None:
        s3_server.fail("PutObject", Drop(Stage.RESPONSE_HEAD, effect=Effect.APPLIED))
        s3_store.put("marker", [b"one"], if_absent=True)
        assert s3_server.read(f"{PREFIX}/marker") == b"one"

    def test_a_store_without_conditions_is_asked_before(self) -> None:
        with ScriptedS3Server(dialect=Dialect(conditional_puts=False)) as server, fresh(server) as store:
            store.put("marker", [b"one"], if_absent=True)
            with pytest.raises(ObjectExistsError):
                store.put("marker", [b"two"], if_absent=True)
            assert server.read(f"{PREFIX}/marker") == b"one"

    @pytest.mark.parametrize(
        ("match", "write"),
        [
            ("PutObject", lambda store: store.put("new", [SMALL])),
            ("PutObject", lambda store: store.put("new", [SMALL], if_absent=True)),
            ("UploadPart", write_large),
            ("CompleteMultipartUpload", write_large),
        ],
        ids=["put", "put_absent", "part", "complete"],
    )
    def test_cases_31_85_89_what_arrived_short_does_not_stay(
        self,
        s3_server: ScriptedS3Server,
        s3_store: S3Store,
        match: str,
        write: Callable[[S3Store], object],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        s3_server.fail(match, Truncate(1))
        with pytest.raises(TransferSizeError) as caught:
            write(s3_store)
        check_words(caught.value, s3_server, caplog)
        assert f"{PREFIX}/new" not in s3_server.stored_keys()
        assert s3_server.open_uploads() == []

    def test_case_31_a_wrong_tag_is_no_reason_to_delete(self, s3_server: ScriptedS3Server, s3_store: S3Store) -> None:
        s3_server.fail("PutObject", WrongETag())
        assert s3_store.put("new", [SMALL]).size_bytes == len(SMALL)
        s3_server.fail("UploadPart", WrongETag())
        with pytest.raises(StorageError):
            write_large(s3_store, "large")
        assert s3_server.stored_keys() == [f"{PREFIX}/new", f"{PREFIX}/x", f"{PREFIX}/y"]
        assert s3_server.open_uploads() == []

    def test_case_83_a_lost_part_is_an_error_and_leaves_nothing(
        self, s3_server: ScriptedS3Server, s3_store: S3Store, caplog: pytest.LogCaptureFixture
    ) -> None:
        s3_server.fail("UploadPart", LosePart())
        with pytest.raises(StorageError, match="InvalidPart") as caught:
            write_large(s3_store)
        check_words(caught.value, s3_server, caplog)
        assert len(s3_server.requests("CompleteMultipartUpload")) == 1
        assert f"{PREFIX}/new" not in s3_server.stored_keys()
        assert s3_server.open_uploads() == []

    @pytest.mark.parametrize("code", ["InternalError", "SlowDown"])
    def test_an_error_inside_a_completions_200_is_seen(
        self, s3_server: ScriptedS3Server, s3_store: S3Store, code: str
    ) -> None:
        s3_server.fail("CompleteMultipartUpload", ErrorInside200(code), times=2)
        write_large(s3_store)
        assert s3_server.read(f"{PREFIX}/new") == LARGE
        assert len(s3_server.requests("CompleteMultipartUpload")) == 3

    def test_an_error_inside_a_completions_200_that_stays_leaves_nothing(
        self, s3_server: ScriptedS3Server, s3_store: S3Store, caplog: pytest.LogCaptureFixture
    ) -> None:
        s3_server.fail("CompleteMultipartUpload", ErrorInside200(), times=None)
        with pytest.raises(StorageError) as caught:
            write_large(s3_store)
        check_words(caught.value, s3_server, caplog)
        assert f"{PREFIX}/new" not in s3_server.stored_keys()
        assert s3_server.open_uploads() == []

    def test_a_completion_that_took_effect_is_not_repeated(
        self, s3_server: ScriptedS3Server, s3_store: S3Store
    ) -> None:
        s3_server.fail("CompleteMultipartUpload", Drop(Stage.RESPONSE_HEAD, effect=Effect.APPLIED))
        assert write_large(s3_store).size_bytes == len(LARGE)
        assert s3_server.read(f"{PREFIX}/new") == LARGE
        assert len(s3_server.requests("CompleteMultipartUpload")) == 1

    def test_a_completion_is_not_mistaken_for_an_older_object(
        self, s3_server: ScriptedS3Server, s3_store: S3Store
    ) -> None:
        s3_server.write(f"{PREFIX}/new", bytes(len(LARGE)))
        s3_server.fail("CompleteMultipartUpload", internal_error(), times=None)
        with pytest.raises(StorageError):
            write_large(s3_store)
        assert s3_server.read(f"{PREFIX}/new") == bytes(len(LARGE))
        assert s3_server.open_uploads() == []

    def test_case_31_an_aborted_upload_leaves_nothing(self, s3_server: ScriptedS3Server, s3_store: S3Store) -> None:
        for written in range(4):
            sink = s3_store.open_sink("new", len(LARGE))
            for part in sink.parts()[:written]:
                sink.write_part(part, [LARGE[part.start : part.stop]])
            sink.abort()
            sink.abort()
            with pytest.raises(StorageError):
                sink.commit()
        assert s3_server.open_uploads() == []
        assert f"{PREFIX}/new" not in s3_server.stored_keys()
        assert len(s3_server.requests("CompleteMultipartUpload")) == 0

    def test_case_83_an_abort_is_tried_again(self, s3_server: ScriptedS3Server, s3_store: S3Store) -> None:
        s3_server.fail("UploadPart", denied(), times=None)
        s3_server.fail("AbortMultipartUpload", slow_down(), times=2)
        with pytest.raises(PermissionDeniedError):
            write_large(s3_store)
        assert s3_server.open_uploads() == []

    def test_case_83_a_part_that_is_late_is_removed_too(self, s3_server: ScriptedS3Server, s3_store: S3Store) -> None:
        """Its request creates the upload's part again after the abort, as S3 allows."""
        sink = s3_store.open_sink("new", len(LARGE))
        first, second = sink.parts()[:2]
        sink.write_part(first, [LARGE[first.start : first.stop]])
        fault = s3_server.fail("UploadPart", Hang(Stage.RESPONSE_HEAD))
        failures: list[BaseException] = []

        def write() -> None:
            try:
                sink.write_part(second, [LARGE[second.start : second.stop]])
            except StorageError as error:
                failures.append(error)

        writer = threading.Thread(target=write)
        writer.start()
        assert fault.reached.wait(20)
        sink.abort()
        fault.release()
        writer.join(20)
        assert s3_server.open_uploads() == []
        assert len(s3_server.requests("AbortMultipartUpload")) == 2

    def test_case_31_a_commit_without_all_parts_leaves_nothing(
        self, s3_server: ScriptedS3Server, s3_store: S3Store, caplog: pytest.LogCaptureFixture
    ) -> None:
        sink = s3_store.open_sink("new", len(LARGE))
        part = sink.parts()[1]
        sink.write_part(part, [LARGE[part.start : part.stop]])
        with pytest.raises(TransferSizeError) as caught:
            sink.commit()
        check_words(caught.value, s3_server, caplog)
        assert s3_server.open_uploads() == []  # without being aborted
        sink.abort()
        assert f"{PREFIX}/new" not in s3_server.stored_keys()

    def test_case_84_parts_fit_s3s_limits(self, s3_server: ScriptedS3Server, s3_store: S3Store) -> None:
        for size in (0, 1, 5 * MIB, 50 << 30, 488 << 30, 1 << 40, 5 << 40):
            parts = s3_store.open_sink("new", size).parts()
            assert len(parts) <= 10_000
            assert parts[0] == PartRange(0, parts[0].stop)
            assert parts[-1].stop == size
            assert all(part.size_bytes >= 5 * MIB for part in parts[:-1])
        with pytest.raises(ConfigError):
            s3_store.open_sink("new", (5 << 40) + 1)
        assert s3_server.requests() == []

    def test_an_empty_object_is_written_by_either_way(self, s3_server: ScriptedS3Server, s3_store: S3Store) -> None:
        s3_store.put("empty", [])
        sink = s3_store.open_sink("hollow", 0)
        sink.write_part(sink.parts()[0], [])
        assert sink.commit().size_bytes == 0
        assert s3_server.read(f"{PREFIX}/empty") == s3_server.read(f"{PREFIX}/hollow") == b""


class TestChecksums:
    @pytest.mark.parametrize("trailers", list(Trailers))
    @pytest.mark.parametrize("config", [{}, {"request_checksum_calculation": "when_supported"}], ids=repr)
    def test_case_85_a_store_that_knows_no_trailers_gets_none(
        self, trailers: Trailers, config: dict[str, str], tls_authority: TlsAuthority
    ) -> None:
        with ScriptedS3Server(dialect=Dialect(trailers=trailers), tls=tls_authority) as server:
            with fresh(server, config_kwargs=config) as store:
                store.put("small", [SMALL])
                write_large(store)
                store.delete(["small", "other"])
            assert server.read(f"{PREFIX}/new") == LARGE
            for request in server.requests():
                assert not str(request.header("x-amz-content-sha256")).startswith("STREAMING-")
            checked = {request.header("x-amz-checksum-crc32") is not None for request in server.requests("UploadPart")}
            assert checked == {bool(config)}

    def test_payloads_are_signed_on_request(self, scripted_s3: ScriptedS3Server) -> None:
        with fresh(scripted_s3, config_kwargs={"s3": {"payload_signing_enabled": True}}) as store:
            store.put("small", [SMALL])
            write_large(store)
        assert scripted_s3.read(f"{PREFIX}/new") == LARGE
        for request in scripted_s3.requests("UploadPart") + scripted_s3.requests("PutObject"):
            assert len(str(request.header("x-amz-content-sha256"))) == 64


class TestListings:
    def test_case_78_what_another_wrote_is_seen_at_once(self, s3_server: ScriptedS3Server, s3_store: S3Store) -> None:
        assert not s3_store.exists("late")
        assert {info.path for info in s3_store.list()} == {"x", "y"}
        s3_server.write(f"{PREFIX}/late", b"1")
        assert s3_store.exists("late")
        assert {info.path for info in s3_store.list()} == {"x", "y", "late"}

    def test_case_78_a_listing_that_is_behind_does_not_hide_an_exact_name(
        self, s3_server: ScriptedS3Server, s3_store: S3Store
    ) -> None:
        s3_server.fail("ListObjectsV2", StaleList({f"{PREFIX}/x"}), times=None)
        assert {info.path for info in s3_store.list()} == {"y"}
        assert s3_store.exists("x")

    def test_pages(self) -> None:
        with ScriptedS3Server(dialect=Dialect(page_size=7)) as server, fresh(server) as store:
            names = sorted([*(f"iter_{number:02}/f" for number in range(23)), "a ü%+&", "z"])
            for name in names:
                server.write(f"{PREFIX}/{name}", name.encode())
            server.write(f"{PREFIX} neighbour/x", b"not ours")
            server.fail("ListObjectsV2", slow_down(), times=2, after=1)
            assert sorted(info.path for info in store.list()) == names
            assert sorted(store.list_directories()) == [f"iter_{number:02}" for number in range(23)]
            assert [info.path for info in store.list("iter_03")] == ["iter_03/f"]
            assert list(store.list("absent")) == []


class TestDeletes:
    def test_many_are_deleted_together(self, s3_server: ScriptedS3Server, s3_store: S3Store) -> None:
        names = [f"n {number}" for number in range(1500)]
        for name in names:
            s3_server.write(f"{PREFIX}/{name}", b"")
        s3_store.delete(names)
        assert s3_server.stored_keys() == [f"{PREFIX}/x", f"{PREFIX}/y"]
        assert s3_server.operations() == ["DeleteObjects", "DeleteObjects"]

    @pytest.mark.parametrize("answer", [Answer(501, "NotImplemented"), Answer(400, "MalformedXML")], ids=repr)
    def test_a_store_without_bulk_deletes_is_asked_one_by_one(
        self, scripted_s3: ScriptedS3Server, answer: Answer
    ) -> None:
        for name in ("x", "y", "z"):
            scripted_s3.write(f"{PREFIX}/{name}", b"")
        scripted_s3.fail("DeleteObjects", answer, times=None)
        with fresh(scripted_s3) as store:
            store.delete(["x", "y", "absent"])
        assert scripted_s3.stored_keys() == [f"{PREFIX}/z"]

    def test_a_denied_delete_is_an_error(
        self, s3_server: ScriptedS3Server, s3_store: S3Store, caplog: pytest.LogCaptureFixture
    ) -> None:
        s3_server.fail("DeleteObject", denied())
        with pytest.raises(PermissionDeniedError) as caught:
            s3_store.delete(["x"])
        check_words(caught.value, s3_server, caplog)


class TestBuckets:
    @pytest.mark.parametrize(
        "verb",
        [
            lambda store: store.get("x"),
            lambda store: store.get_tail("x", 3),
            lambda store: read(store, 0, 3),
            lambda store: store.head("x"),
            lambda store: store.exists("x"),
            lambda store: list(store.list()),
            lambda store: list(store.list_directories()),
            lambda store: store.put("new", [SMALL]),
            lambda store: store.put("new", [SMALL], if_absent=True),
            write_large,
            lambda store: store.delete(["x"]),
            lambda store: store.delete(["x", "y"]),
        ],
        ids=["get", "tail", "read", "head", "exists", "list", "dirs", "put", "absent", "large", "delete", "deletes"],
    )
    def test_case_86_a_missing_bucket_is_named_and_not_made(
        self, s3_server: ScriptedS3Server, verb: Callable[[S3Store], object], caplog: pytest.LogCaptureFixture
    ) -> None:
        location_of = s3_server.url
        try:
            s3_server.url = lambda path="": f"s3://typo-bucket/{path}"  # type: ignore[method-assign] # put back
            with fresh(s3_server) as store, pytest.raises(BucketNotFoundError, match="typo-bucket") as caught:
                verb(store)
        finally:
            s3_server.url = location_of  # type: ignore[method-assign] # put back
        assert s3_server.secret_key not in caplog.text + str(caught.value)
        assert "CreateBucket" not in s3_server.operations()
        assert s3_server.open_uploads() == []

    def test_case_86_no_directory_is_made(self, s3_server: ScriptedS3Server, s3_store: S3Store) -> None:
        s3_store.put("a/b/c", [b"1"])
        write_large(s3_store, "a/b/d")
        assert s3_server.stored_keys() == [f"{PREFIX}/{name}" for name in ("a/b/c", "a/b/d", "x", "y")]

    def test_case_76_a_redirect_leads_nowhere_else(
        self, s3_server: ScriptedS3Server, caplog: pytest.LogCaptureFixture
    ) -> None:
        s3_server.fail("*", moved_to("eu-west-1"), times=None)
        with fresh(s3_server) as store, pytest.raises(StorageError) as caught:
            store.get("x")
        check_words(caught.value, s3_server, caplog)
        assert len(s3_server.requests()) < 40

    def test_case_86_a_bucket_that_vanishes_is_named(
        self, s3_server: ScriptedS3Server, s3_store: S3Store, caplog: pytest.LogCaptureFixture
    ) -> None:
        s3_server.fail("*", no_such_bucket(), times=None)
        with pytest.raises(BucketNotFoundError, match="'dcpfs'") as caught:
            s3_store.put("new", [SMALL])
        check_words(caught.value, s3_server, caplog)


class TestHosts:
    def test_case_76_buckets_in_host_names_over_tls(self, tls_authority: TlsAuthority) -> None:
        with ScriptedS3Server(tls=tls_authority) as server, LoopbackOnly() as guard:
            style = {"s3": {"addressing_style": "virtual"}}
            with fresh(server, endpoint_url=server.virtual_endpoint_url, config_kwargs=style) as store:
                store.put("a ü%20?#&+=[]*", [SMALL])
                write_large(store)
                assert store.get("a ü%20?#&+=[]*") == SMALL
                assert read(store, 5 * MIB - 10, 300, "new") == LARGE[5 * MIB - 10 : 5 * MIB + 290]
                assert sorted(info.path for info in store.list()) == ["a ü%20?#&+=[]*", "new"]
                store.delete(["a ü%20?#&+=[]*", "new"])
            assert server.stored_keys() == []
            assert server.hosts() == {f"dcpfs.s3.localhost:{server.port}"}
        assert guard.foreign == []

    def test_case_76_a_server_that_nobody_vouches_for_is_not_spoken_to(
        self, tls_authority: TlsAuthority, caplog: pytest.LogCaptureFixture
    ) -> None:
        with ScriptedS3Server(tls=tls_authority) as server:
            client = {"region_name": "us-east-1"}
            with fresh(server, client_kwargs=client) as store:
                for verb in (lambda: store.head("x"), lambda: store.get("x"), lambda: store.put("x", [SMALL])):
                    with pytest.raises(StorageError, match=r"certificate") as caught:
                        verb()
                    check_words(caught.value, server, caplog)
            assert server.requests() == []

    def test_a_server_that_is_gone_is_an_error(self, caplog: pytest.LogCaptureFixture) -> None:
        with ScriptedS3Server() as server:
            store = open_store(server)
            server.write(f"{PREFIX}/x", SMALL)
            assert store.get("x") == SMALL
        for verb in (lambda: store.head("x"), lambda: store.get("x"), lambda: write_large(store)):
            with pytest.raises(StorageError, match=f"{ATTEMPTS} attempts") as caught:
                verb()
            check_words(caught.value, server, caplog)
        store.close()

    @pytest.mark.parametrize("times", [1, 2])
    def test_connections_that_are_reset_at_once(self, scripted_s3: ScriptedS3Server, times: int) -> None:
        scripted_s3.write(f"{PREFIX}/x", SMALL)
        scripted_s3.fail("Connect", Drop(), times=times)
        with fresh(scripted_s3) as store:
            assert store.head("x").size_bytes == len(SMALL)
        scripted_s3.fail("Connect", Drop(), times=times)
        with fresh(scripted_s3) as store:
            assert store.get("x") == SMALL


def test_case_82_slow_down_for_long_at_part_level(s3_server: ScriptedS3Server) -> None:
    """More refusals than s3fs would bear, in the middle of an upload: only the refused parts are sent again."""
    retry = RETRY.model_copy(update={"attempts": 30})
    store = open_store(s3_server, retry=retry)
    second: Callable[[S3Request], bool] = lambda request: request.part_number == 2  # noqa: E731 - a predicate
    s3_server.fail(second, slow_down(0), times=12)
    write_large(store)
    store.close()
    assert s3_server.read(f"{PREFIX}/new") == LARGE
    numbers = sorted(request.part_number or 0 for request in s3_server.requests("UploadPart"))
    assert numbers == [1, *[2] * 13, 3]
    assert s3_server.operations().count("CreateMultipartUpload") == 1


@pytest.mark.parametrize("early", [True, False])
def test_a_refusal_before_the_body_was_read_is_understood(
    s3_server: ScriptedS3Server, s3_store: S3Store, early: bool
) -> None:
    action: Action = _Refusal() if early else slow_down()
    s3_server.fail("UploadPart", action, times=2)
    write_large(s3_store)
    assert s3_server.read(f"{PREFIX}/new") == LARGE


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"bogus": "hush", "other": "hush"}, "named bogus, other;"),
        ({"client_kwargs": {"bogus": "hush"}}, "bogus"),
        ({"config_kwargs": {"bogus": "hush"}}, "bogus"),
        ({"max_concurrency": 0}, "max_concurrency"),
    ],
    ids=["unknown", "of the client", "of its config", "wrong"],
)
def test_an_option_that_s3fs_does_not_know_is_a_config_error(
    s3_server: ScriptedS3Server, options: dict[str, object], named: str
) -> None:
    given = s3_server.storage_options
    merged: dict[str, object] = {**given, **options}
    kept, added = given.get("client_kwargs"), options.get("client_kwargs")
    if isinstance(kept, dict) and isinstance(added, dict):
        merged["client_kwargs"] = {**kept, **added}
    store = S3Store(Location(s3_server.url("x"), merged))
    with pytest.raises(ConfigError, match="storage_options") as caught:
        store.get("x")
    assert named in str(caught.value)
    assert "hush" not in "".join(traceback.format_exception(caught.value))
    store.close()
