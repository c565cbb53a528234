"""The scripted S3 server, judged by clients that other people wrote: botocore, and s3fs on aiobotocore."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import botocore.session
import fsspec
import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError

from dcpfs.testing.loopback import LoopbackOnly
from dcpfs.testing.s3_exchange import Stage
from dcpfs.testing.s3_faults import (
    Answer,
    Drip,
    Drop,
    Effect,
    ErrorInside200,
    ExtraBytes,
    FlipByte,
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
    expired_token,
    internal_error,
    moved_to,
    no_such_bucket,
    not_implemented,
    slow_down,
    too_skewed,
)
from dcpfs.testing.s3_service import Dialect, Trailers
from dcpfs.testing.scripted_s3 import ScriptedS3Server
from dcpfs.testing.tls import TlsAuthority

ODD_NAME = "a/b x+ü%20~!*'()[]?#&=@:,;$.bin"
SESSION = botocore.session.get_session()  # keeps the API models it has parsed
Client = Any
Signing = dict[str, object]


def client_of(
    server: ScriptedS3Server,
    *,
    secret: str | None = None,
    token: str | None = None,
    region: str = "us-east-1",
    **config: object,
) -> Client:
    return SESSION.create_client(
        "s3",
        region_name=region,
        endpoint_url=server.endpoint_url,
        aws_access_key_id=server.access_key,
        aws_secret_access_key=secret or server.secret_key,
        aws_session_token=token,
        config=Config(**{"retries": {"total_max_attempts": 1}, "read_timeout": 20, "proxies": {}, **config}),
    )


@pytest.fixture
def client(scripted_s3: ScriptedS3Server) -> Iterator[Client]:
    client = client_of(scripted_s3)
    yield client
    client.close()


def upload(client: Client, key: str, parts: list[bytes]) -> Any:
    upload_id = client.create_multipart_upload(Bucket="dcpfs", Key=key)["UploadId"]
    tags = [
        client.upload_part(Bucket="dcpfs", Key=key, UploadId=upload_id, PartNumber=number, Body=part)["ETag"]
        for number, part in enumerate(parts, 1)
    ]
    listed = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, 1)]
    return client.complete_multipart_upload(
        Bucket="dcpfs", Key=key, UploadId=upload_id, MultipartUpload={"Parts": listed}
    )


def code_of(call: Callable[[], object]) -> str:
    with pytest.raises(ClientError) as caught:
        call()
    return str(caught.value.response["Error"]["Code"])


def _failure_of(client: Client) -> BaseException:
    with pytest.raises(HTTPClientError) as caught:
        client.get_object(Bucket="dcpfs", Key="x")
    failure: BaseException = caught.value
    return failure


class TestService:
    @pytest.mark.parametrize("signing", [{}, {"payload_signing_enabled": True}, {"payload_signing_enabled": False}])
    def test_objects_by_any_name_and_with_any_payload_signing(
        self, scripted_s3: ScriptedS3Server, signing: Signing
    ) -> None:
        client = client_of(scripted_s3, s3=signing)
        for name in (ODD_NAME, "//double//slash/", "plain"):
            put = client.put_object(Bucket="dcpfs", Key=name, Body=b"0123456789")
            assert put["ETag"] == f'"{hashlib.md5(b"0123456789").hexdigest()}"'
            assert client.head_object(Bucket="dcpfs", Key=name)["ContentLength"] == 10
            assert client.get_object(Bucket="dcpfs", Key=name)["Body"].read() == b"0123456789"
        assert scripted_s3.stored_keys() == sorted(["//double//slash/", ODD_NAME, "plain"])
        assert {request.key for request in scripted_s3.requests("PutObject")} == set(scripted_s3.stored_keys())

    @pytest.mark.parametrize(
        ("wanted", "body", "told"),
        [
            ("bytes=2-4", b"234", "bytes 2-4/10"),
            ("bytes=7-", b"789", "bytes 7-9/10"),
            ("bytes=-3", b"789", "bytes 7-9/10"),
            ("bytes=-99", b"0123456789", "bytes 0-9/10"),
            ("bytes=8-99", b"89", "bytes 8-9/10"),
        ],
    )
    def test_ranges(self, scripted_s3: ScriptedS3Server, client: Client, wanted: str, body: bytes, told: str) -> None:
        upload(client, "x", [b"0123", b"456", b"789"])
        answer = client.get_object(Bucket="dcpfs", Key="x", Range=wanted)
        assert (answer["Body"].read(), answer["ContentRange"]) == (body, told)
        assert scripted_s3.requests("GetObject")[0].status == 206

    def test_a_range_past_the_end_is_refused(self, scripted_s3: ScriptedS3Server, client: Client) -> None:
        scripted_s3.write("x", b"0123456789")
        assert code_of(lambda: client.get_object(Bucket="dcpfs", Key="x", Range="bytes=10-")) == "InvalidRange"

    def test_conditions(self, client: Client) -> None:
        tag = client.put_object(Bucket="dcpfs", Key="x", Body=b"1", IfNoneMatch="*")["ETag"]
        refused = "PreconditionFailed"
        assert code_of(lambda: client.put_object(Bucket="dcpfs", Key="x", Body=b"2", IfNoneMatch="*")) == refused
        assert code_of(lambda: client.put_object(Bucket="dcpfs", Key="x", Body=b"2", IfMatch='"0"')) == refused
        client.put_object(Bucket="dcpfs", Key="x", Body=b"2", IfMatch=tag)
        assert code_of(lambda: client.get_object(Bucket="dcpfs", Key="x", IfMatch=tag)) == refused

    def test_a_multipart_upload_leaves_nothing_open(self, scripted_s3: ScriptedS3Server, client: Client) -> None:
        upload(client, ODD_NAME, [b"abc", b"", b"de"])
        assert scripted_s3.read(ODD_NAME) == b"abcde"
        assert scripted_s3.open_uploads() == []
        assert [request.part_number for request in scripted_s3.requests("UploadPart")] == [1, 2, 3]

    def test_an_upload_is_listed_and_aborted(self, scripted_s3: ScriptedS3Server, client: Client) -> None:
        upload_id = client.create_multipart_upload(Bucket="dcpfs", Key=ODD_NAME)["UploadId"]
        target = {"Bucket": "dcpfs", "Key": ODD_NAME, "UploadId": upload_id}
        for number in (3, 1):
            client.upload_part(**target, PartNumber=number, Body=b"abc")
        listed = client.list_multipart_uploads(Bucket="dcpfs", Prefix="a/")["Uploads"]
        assert [(one["Key"], one["UploadId"]) for one in listed] == [(ODD_NAME, upload_id)]
        parts = client.list_parts(**target)["Parts"]
        assert [(part["PartNumber"], part["Size"]) for part in parts] == [(1, 3), (3, 3)]
        wrong = [{"PartNumber": 1, "ETag": '"0"'}]
        refusal = code_of(lambda: client.complete_multipart_upload(**target, MultipartUpload={"Parts": wrong}))
        assert refusal == "InvalidPart"
        client.abort_multipart_upload(**target)
        assert scripted_s3.open_uploads() == []
        assert code_of(lambda: client.upload_part(**target, PartNumber=1, Body=b"")) == "NoSuchUpload"

    def test_small_parts_are_refused_on_request(self) -> None:
        with ScriptedS3Server(minimum_part_bytes=4) as server:
            client = client_of(server)
            upload(client, "x", [b"0123", b"4"])
            assert code_of(lambda: upload(client, "y", [b"012", b"34"])) == "EntityTooSmall"

    def test_listings_come_in_pages_and_directories(self) -> None:
        with ScriptedS3Server(dialect=Dialect(page_size=3)) as server:
            names = sorted([ODD_NAME, *(f"run/{number}" for number in range(5)), "run/d/x", "run/d/y", "run/e/x"])
            for name in names:
                server.write(name, b"x")
            client = client_of(server)
            pages = list(client.get_paginator("list_objects_v2").paginate(Bucket="dcpfs"))
            assert [one["Key"] for page in pages for one in page["Contents"]] == names
            assert [page["KeyCount"] for page in pages] == [3, 3, 3]
            pages = list(client.get_paginator("list_objects_v2").paginate(Bucket="dcpfs", Prefix="run/", Delimiter="/"))
            found = [one["Prefix"] for page in pages for one in page.get("CommonPrefixes", [])]
            assert found == ["run/d/", "run/e/"]
            assert len([one for page in pages for one in page.get("Contents", [])]) == 5

    def test_objects_are_deleted_together(self, scripted_s3: ScriptedS3Server, client: Client) -> None:
        for name in (ODD_NAME, "x", "y"):
            scripted_s3.write(name, b"x")
        objects = [{"Key": ODD_NAME}, {"Key": "x"}, {"Key": "absent"}]
        told = client.delete_objects(Bucket="dcpfs", Delete={"Objects": objects})["Deleted"]
        assert {one["Key"] for one in told} == {ODD_NAME, "x", "absent"}
        assert scripted_s3.stored_keys() == ["y"]

    def test_case_86_buckets_are_not_made(self, client: Client) -> None:
        assert code_of(lambda: client.create_bucket(Bucket="another")) == "AccessDenied"
        assert code_of(lambda: client.put_object(Bucket="another", Key="x", Body=b"")) == "NoSuchBucket"
        assert code_of(lambda: client.head_bucket(Bucket="another")) == "404"

    @pytest.mark.parametrize("trailers", list(Trailers))
    def test_case_85_checksum_trailers(self, trailers: Trailers, tls_authority: TlsAuthority) -> None:
        with ScriptedS3Server(dialect=Dialect(trailers=trailers), tls=tls_authority) as server:
            client = SESSION.create_client(
                "s3",
                region_name="us-east-1",
                endpoint_url=server.endpoint_url,
                aws_access_key_id=server.access_key,
                aws_secret_access_key=server.secret_key,
                verify=tls_authority.ca_path,
                config=Config(retries={"total_max_attempts": 1}, s3={"payload_signing_enabled": False}),
            )
            if trailers is Trailers.REFUSED:
                assert code_of(lambda: client.put_object(Bucket="dcpfs", Key="x", Body=b"abc")) == (
                    "MissingContentLength"
                )
                return
            client.put_object(Bucket="dcpfs", Key="x", Body=b"abc")
            assert str(server.requests("PutObject")[0].header("x-amz-content-sha256")).startswith("STREAMING-")
            stored = server.read("x")
            assert stored == b"abc" if trailers is Trailers.DECODED else len(stored) > 3

    def test_a_wrong_checksum_is_refused(self, client: Client) -> None:
        wrong = {"Bucket": "dcpfs", "Key": "x", "Body": b"abc"}
        assert code_of(lambda: client.put_object(**wrong, ChecksumCRC32="AAAAAA==")) == "BadDigest"
        assert code_of(lambda: client.put_object(**wrong, ContentMD5="1B2M2Y8AsgTpgAmY7PhCfg==")) == "BadDigest"

    def test_s3fs_finds_its_way(self, scripted_s3: ScriptedS3Server) -> None:
        options: Any = scripted_s3.storage_options
        fs = fsspec.filesystem("s3", **options, use_listings_cache=False, skip_instance_cache=True)
        name = scripted_s3.url(ODD_NAME)
        data = os.urandom(11 << 20)
        with fs.open(name, "wb", block_size=5 << 20) as file:
            file.write(data)
        assert fs.cat_file(name) == data
        assert fs.cat_file(name, start=-10) == data[-10:]
        fs.cp_file(name, scripted_s3.url("copy"))
        fs.rm_file(name)
        assert fs.find("s3://dcpfs") == ["dcpfs/copy"]
        assert fs.info(scripted_s3.url("copy"))["size"] == len(data)

    def test_buckets_in_host_names_and_tls(self, tls_authority: TlsAuthority) -> None:
        with ScriptedS3Server(tls=tls_authority) as server, LoopbackOnly() as guard:
            options: Any = {**server.storage_options, "endpoint_url": server.virtual_endpoint_url}
            style = {"s3": {"addressing_style": "virtual"}}
            fs = fsspec.filesystem("s3", **options, config_kwargs=style, skip_instance_cache=True)
            fs.pipe_file(server.url(ODD_NAME), b"abc")
            assert fs.cat_file(server.url(ODD_NAME)) == b"abc"
            assert server.hosts() == {f"dcpfs.s3.localhost:{server.port}"}
            assert guard.foreign == []


class TestSignatures:
    @pytest.mark.parametrize(
        ("wrong", "code"),
        [
            ({"secret": "another"}, "SignatureDoesNotMatch"),
            ({"region": "eu-west-1"}, "AuthorizationHeaderMalformed"),
        ],
    )
    def test_a_wrong_one_is_refused(self, scripted_s3: ScriptedS3Server, wrong: dict[str, str], code: str) -> None:
        client = client_of(scripted_s3, **wrong)
        assert code_of(lambda: client.put_object(Bucket="dcpfs", Key="x", Body=b"")) == code
        assert scripted_s3.stored_keys() == []

    @pytest.mark.parametrize(
        ("name", "value", "code"),
        [
            ("x-amz-meta-added", "unsigned", "AccessDenied"),
            ("x-amz-content-sha256", hashlib.sha256(b"other").hexdigest(), "XAmzContentSHA256Mismatch"),
            ("x-amz-date", "20250131T235959Z", "SignatureDoesNotMatch"),
            ("Authorization", "AWS nonsense", "AccessDenied"),
        ],
    )
    def test_what_was_changed_after_signing_is_refused(self, client: Client, name: str, value: str, code: str) -> None:
        def tamper(request: Any, **_: object) -> None:
            request.headers[name] = value

        client.meta.events.register("before-send.s3.PutObject", tamper)
        assert code_of(lambda: client.put_object(Bucket="dcpfs", Key="x", Body=b"abc")) == code

    def test_a_session_token_must_come_along(self, scripted_s3: ScriptedS3Server) -> None:
        scripted_s3.accept_credential(scripted_s3.access_key, scripted_s3.secret_key, "the-token")
        put = {"Bucket": "dcpfs", "Key": "x", "Body": b""}
        assert code_of(lambda: client_of(scripted_s3).put_object(**put)) == "InvalidToken"
        client_of(scripted_s3, token="the-token").put_object(**put)

    def test_case_81_a_credential_expires_after_some_calls_and_another_is_taken(
        self, scripted_s3: ScriptedS3Server, client: Client
    ) -> None:
        scripted_s3.expire_credential(scripted_s3.access_key, after=2)
        put = {"Bucket": "dcpfs", "Key": "x", "Body": b""}
        client.put_object(**put)
        client.put_object(**put)
        for _ in range(2):
            assert code_of(lambda: client.put_object(**put)) == "ExpiredToken"
        scripted_s3.access_key, scripted_s3.secret_key = "RENEWED", "another secret"
        scripted_s3.accept_credential("RENEWED", "another secret")
        client_of(scripted_s3).put_object(**put)

    def test_clocks_that_differ(self, scripted_s3: ScriptedS3Server, client: Client) -> None:
        scripted_s3.clock_skew_seconds = 3600
        get = {"Bucket": "dcpfs", "Key": "x"}
        assert code_of(lambda: client.get_object(**get)) == "RequestTimeTooSkewed"

    def test_checking_can_be_switched_off(self) -> None:
        with ScriptedS3Server(verify_signatures=False) as server:
            client_of(server, secret="another").put_object(Bucket="dcpfs", Key="x", Body=b"")


class TestFaults:
    @pytest.fixture(autouse=True)
    def stored(self, scripted_s3: ScriptedS3Server) -> None:
        scripted_s3.write("x", b"0123456789")

    @pytest.mark.parametrize(
        ("answer", "code"),
        [
            (slow_down(), "SlowDown"),
            (internal_error(), "InternalError"),
            (expired_token(), "ExpiredToken"),
            (too_skewed(), "RequestTimeTooSkewed"),
            (denied(), "AccessDenied"),
            (no_such_bucket(), "NoSuchBucket"),
            (not_implemented(), "NotImplemented"),
            (Answer(429, "TooManyRequests"), "TooManyRequests"),
        ],
    )
    def test_answers(self, scripted_s3: ScriptedS3Server, client: Client, answer: Answer, code: str) -> None:
        fault = scripted_s3.fail("PutObject", answer, times=2, after=1)
        put = {"Bucket": "dcpfs", "Key": "y", "Body": b"abc"}
        client.put_object(**put)
        scripted_s3.objects.delete("dcpfs", "y")
        for _ in range(2):
            assert code_of(lambda: client.put_object(**put)) == code
        assert scripted_s3.stored_keys() == ["x"]
        assert fault.hits == 2
        client.put_object(**put)
        assert [request.status for request in scripted_s3.requests("PutObject")] == [200, *[answer.status] * 2, 200]

    def test_until_released_and_for_chosen_requests(self, scripted_s3: ScriptedS3Server, client: Client) -> None:
        fault = scripted_s3.fail(lambda request: request.key == "x", slow_down(7), times=None)
        client.put_object(Bucket="dcpfs", Key="y", Body=b"")
        for _ in range(3):
            with pytest.raises(ClientError) as caught:
                client.get_object(Bucket="dcpfs", Key="x")
            assert caught.value.response["ResponseMetadata"]["HTTPHeaders"]["retry-after"] == "7"
        fault.release()
        client.get_object(Bucket="dcpfs", Key="x")

    def test_an_error_after_the_effect(self, scripted_s3: ScriptedS3Server, client: Client) -> None:
        scripted_s3.fail("DeleteObject", internal_error(Effect.APPLIED))
        assert code_of(lambda: client.delete_object(Bucket="dcpfs", Key="x")) == "InternalError"
        assert scripted_s3.stored_keys() == []

    def test_a_redirect_is_told(self, scripted_s3: ScriptedS3Server) -> None:
        scripted_s3.fail("GetObject", moved_to("eu-west-1"))
        with LoopbackOnly() as guard, pytest.raises(ClientError) as caught:
            client_of(scripted_s3).get_object(Bucket="dcpfs", Key="x")
        assert caught.value.response["ResponseMetadata"]["HTTPStatusCode"] in (301, 400)
        assert guard.foreign == []

    @pytest.mark.parametrize(
        ("match", "drop", "applied"),
        [
            ("Connect", Drop(), False),
            ("PutObject", Drop(Stage.HEAD), False),
            ("PutObject", Drop(Stage.REQUEST_BODY, after_bytes=1 << 16), False),
            ("PutObject", Drop(Stage.RESPONSE_HEAD), False),
            ("PutObject", Drop(Stage.RESPONSE_HEAD, after_bytes=9, reset=False), False),
            ("PutObject", Drop(Stage.RESPONSE_HEAD, after_bytes=30, effect=Effect.APPLIED), True),
        ],
    )
    def test_a_connection_breaks_in_a_put(
        self, scripted_s3: ScriptedS3Server, client: Client, match: str, drop: Drop, applied: bool
    ) -> None:
        fault = scripted_s3.fail(match, drop)
        with pytest.raises(BotoCoreError):
            client.put_object(Bucket="dcpfs", Key="y", Body=bytes(4 << 20))
        assert fault.hits == 1
        assert scripted_s3.stored_keys() == (["x", "y"] if applied else ["x"])
        client.put_object(Bucket="dcpfs", Key="y", Body=b"")
        assert scripted_s3.connections == 2

    @pytest.mark.parametrize(
        "action",
        [
            Drop(Stage.RESPONSE_BODY, after_bytes=4),
            Drop(Stage.RESPONSE_BODY, after_bytes=4, reset=False),
            ShortBody(2),
        ],
    )
    def test_a_body_that_stops_early(
        self, scripted_s3: ScriptedS3Server, client: Client, action: Drop | ShortBody
    ) -> None:
        scripted_s3.fail("GetObject", action)
        with pytest.raises(Exception, match=r"IncompleteRead|Connection broken|Connection reset"):
            client.get_object(Bucket="dcpfs", Key="x")["Body"].read()
        assert client.get_object(Bucket="dcpfs", Key="x")["Body"].read() == b"0123456789"

    @pytest.mark.parametrize(
        ("action", "body", "told"),
        [
            (ShortBody(2, Length.SENT), b"23", "bytes 2-5/10"),
            (ExtraBytes(2), b"2345\0\0", "bytes 2-5/10"),
            (ExtraBytes(2, Length.PROMISED), b"2345", "bytes 2-5/10"),
            (FlipByte(1), b"2245", "bytes 2-5/10"),
            (FlipByte(-1), b"2344", "bytes 2-5/10"),
            (WrongRange(3), b"2345", "bytes 5-8/10"),
            (IgnoreRange(), b"0123456789", None),
        ],
    )
    def test_a_body_that_is_wrong(
        self, scripted_s3: ScriptedS3Server, client: Client, action: Any, body: bytes, told: str | None
    ) -> None:
        scripted_s3.fail("GetObject", action)
        answer = client.get_object(Bucket="dcpfs", Key="x", Range="bytes=2-5")
        assert (answer["Body"].read(), answer.get("ContentRange")) == (body, told)
        assert scripted_s3.read("x") == b"0123456789"

    @pytest.mark.parametrize("stage", list(Stage))
    def test_silence_until_released(self, scripted_s3: ScriptedS3Server, client: Client, stage: Stage) -> None:
        fault = scripted_s3.fail("GetObject", Hang(stage, after_bytes=4))
        got: list[bytes] = []
        reader = threading.Thread(target=lambda: got.append(client.get_object(Bucket="dcpfs", Key="x")["Body"].read()))
        reader.start()
        assert fault.reached.wait(20)
        assert got == []
        fault.release()
        reader.join(20)
        assert got == [b"0123456789"]

    def test_a_body_that_drips(self, scripted_s3: ScriptedS3Server, client: Client) -> None:
        fault = scripted_s3.fail("GetObject", Drip(3))
        fault.step()
        body = client.get_object(Bucket="dcpfs", Key="x")["Body"]
        assert body.read(3) == b"012"
        fault.step()
        assert body.read(3) == b"345"
        fault.release()
        assert body.read() == b"6789"

    def test_a_server_stops_although_it_hangs(self) -> None:
        with ScriptedS3Server() as server:
            fault = server.fail("GetObject", Hang())
            client = client_of(server)
            failures: list[BaseException] = []
            reader = threading.Thread(target=lambda: failures.append(_failure_of(client)))
            reader.start()
            assert fault.reached.wait(20)
        reader.join(20)
        assert isinstance(failures[0], HTTPClientError)

    def test_an_error_inside_200(self, scripted_s3: ScriptedS3Server, client: Client) -> None:
        scripted_s3.fail("CompleteMultipartUpload", ErrorInside200())
        assert code_of(lambda: upload(client, "y", [b"a", b"b"])) in ("InternalError", "500")
        assert len(scripted_s3.open_uploads()) == 1
        assert scripted_s3.requests("CompleteMultipartUpload")[0].status == 200

    def test_a_completion_that_is_never_confirmed(self, scripted_s3: ScriptedS3Server, client: Client) -> None:
        scripted_s3.fail("CompleteMultipartUpload", Drop(Stage.RESPONSE_HEAD, effect=Effect.APPLIED))
        with pytest.raises(HTTPClientError):
            upload(client, "y", [b"a", b"b"])
        assert scripted_s3.read("y") == b"ab"
        assert scripted_s3.open_uploads() == []

    def test_a_part_that_is_lost(self, scripted_s3: ScriptedS3Server, client: Client) -> None:
        scripted_s3.fail("UploadPart", LosePart(), after=1)
        assert code_of(lambda: upload(client, "y", [b"a", b"b", b"c"])) == "InvalidPart"

    @pytest.mark.parametrize("match", ["UploadPart", "CompleteMultipartUpload"])
    def test_bytes_that_are_lost(self, scripted_s3: ScriptedS3Server, client: Client, match: str) -> None:
        scripted_s3.fail(match, Truncate(1), after=1 if match == "UploadPart" else 0)
        upload(client, "y", [b"abc", b"def"])
        assert scripted_s3.read("y") == b"abcde"

    def test_a_wrong_tag(self, scripted_s3: ScriptedS3Server, client: Client) -> None:
        scripted_s3.fail("PutObject", WrongETag('"0"'))
        assert client.put_object(Bucket="dcpfs", Key="y", Body=b"")["ETag"] == '"0"'

    def test_a_listing_that_is_behind(self, scripted_s3: ScriptedS3Server, client: Client) -> None:
        scripted_s3.write("y", b"")
        scripted_s3.fail("ListObjectsV2", StaleList({"y"}))
        listed = [client.list_objects_v2(Bucket="dcpfs")["Contents"] for _ in range(2)]
        assert [[one["Key"] for one in page] for page in listed] == [["x"], ["x", "y"]]

    def test_conditional_puts_that_the_store_does_not_know(self) -> None:
        with ScriptedS3Server(dialect=Dialect(conditional_puts=False)) as server:
            put = {"Bucket": "dcpfs", "Key": "x", "Body": b"", "IfNoneMatch": "*"}
            assert code_of(lambda: client_of(server).put_object(**put)) == "NotImplemented"


def test_case_76_whoever_is_not_on_loopback_is_refused_and_named() -> None:
    with LoopbackOnly() as guard, pytest.raises(OSError, match="example"):
        socket.create_connection(("bucket.example", 443), timeout=5)
    assert guard.foreign == ["bucket.example"]
