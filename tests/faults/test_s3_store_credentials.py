"""Credentials that expire in mid-run, with clients that have their own ideas about when to look them up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dcpfs.errors import CredentialsError, StorageError
from dcpfs.storage.location import Location
from dcpfs.storage.s3_store import S3Store
from dcpfs.testing.s3_exchange import Exchange
from dcpfs.testing.s3_faults import Action, Fault, expired_token
from dcpfs.testing.scripted_s3 import ScriptedS3Server
from tests.faults.s3_scene import LARGE, PARTS, PREFIX, RETRY, SMALL, Profile, check_words, open_store, write_large

pytestmark = pytest.mark.usefixtures("hear_everything")


@pytest.fixture
def profile(scripted_s3: ScriptedS3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Profile:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("x", "y"):
        scripted_s3.write(f"{PREFIX}/{name}", SMALL)
    return Profile(scripted_s3, tmp_path / "credentials")


@pytest.fixture
def store(scripted_s3: ScriptedS3Server, profile: Profile) -> S3Store:
    options = {name: value for name, value in scripted_s3.storage_options.items() if name not in ("key", "secret")}
    return S3Store(Location(scripted_s3.url(PREFIX), options), transfer=PARTS, retry=RETRY)


def read_all(store: S3Store) -> bytes:
    buffer = bytearray(len(SMALL))
    store.read_into("x", 0, [memoryview(buffer)])
    return bytes(buffer)


VERBS: dict[str, Callable[[S3Store], object]] = {
    "get": lambda store: store.get("x"),
    "get_tail": lambda store: store.get_tail("x", 3),
    "read_into": read_all,
    "head": lambda store: store.head("x"),
    "exists": lambda store: store.exists("x"),
    "list": lambda store: list(store.list()),
    "put": lambda store: store.put("new", [SMALL]),
    "put_absent": lambda store: store.put("new", [SMALL], if_absent=True),
    "large": write_large,
    "delete": lambda store: store.delete(["x"]),
    "delete_many": lambda store: store.delete(["x", "y"]),
}


@pytest.mark.parametrize("verb", VERBS)
def test_case_81_an_expired_credential_is_renewed_once(
    scripted_s3: ScriptedS3Server,
    profile: Profile,
    store: S3Store,
    verb: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store.get("x")
    profile.renew()
    scripted_s3.forget()
    VERBS[verb](store)
    refused = [request for request in scripted_s3.requests() if request.access_key != profile.key]
    assert 1 <= len(refused) <= 4
    assert scripted_s3.requests()[-1].access_key == profile.key
    assert "token-of-generation" not in caplog.text
    assert "secret-of-generation" not in caplog.text
    store.close()


@pytest.mark.parametrize("after", range(6))
def test_case_81_an_upload_survives_renewal_at_every_request(
    scripted_s3: ScriptedS3Server, profile: Profile, store: S3Store, after: int
) -> None:
    class Expiry(Action):
        def before_body(self, exchange: Exchange, fault: Fault) -> None:
            profile.renew()

    scripted_s3.fail("*", Expiry(), after=after)
    write_large(store)
    assert scripted_s3.read(f"{PREFIX}/new") == LARGE
    assert scripted_s3.open_uploads() == []
    assert scripted_s3.operations().count("CreateMultipartUpload") <= 2
    assert profile.generation == 2
    store.close()


def test_case_81_many_threads_renew_together(scripted_s3: ScriptedS3Server, profile: Profile, store: S3Store) -> None:
    store.get("x")
    for _ in range(3):
        profile.renew()
        gate = threading.Barrier(8)

        def read(_: int, gate: threading.Barrier = gate) -> bytes:
            gate.wait(20)
            return store.get("x")

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(read, range(8))) == [SMALL] * 8
    store.close()


@pytest.mark.parametrize("verb", VERBS)
def test_case_81_one_that_cannot_be_renewed_is_an_error(
    scripted_s3: ScriptedS3Server, verb: str, caplog: pytest.LogCaptureFixture
) -> None:
    scripted_s3.write(f"{PREFIX}/x", SMALL)
    store = open_store(scripted_s3)
    store.get("x")
    scripted_s3.expire_credential(scripted_s3.access_key)
    scripted_s3.forget()
    with pytest.raises(CredentialsError, match="expired") as caught:
        VERBS[verb](store)
    check_words(caught.value, scripted_s3, caplog)
    assert len(scripted_s3.requests()) <= 10
    store.close()


def test_case_81_a_credential_that_expires_again_and_again(scripted_s3: ScriptedS3Server) -> None:
    """Renewal is tried once a request, not for ever."""
    scripted_s3.write(f"{PREFIX}/x", SMALL)
    store = open_store(scripted_s3)
    scripted_s3.fail("GetObject", expired_token(), times=None)
    with pytest.raises(CredentialsError):
        store.get("x")
    assert len(scripted_s3.requests("GetObject")) == 2
    store.close()


def test_case_114_a_token_is_not_shown(scripted_s3: ScriptedS3Server, caplog: pytest.LogCaptureFixture) -> None:
    scripted_s3.accept_credential("TEMPORARY", "a-secret-key-of-some-length", "a-session-token-of-some-length")
    options = {
        **scripted_s3.storage_options,
        "key": "TEMPORARY",
        "secret": "a-wrong-secret-of-some-length",
        "token": "a-session-token-of-some-length",
    }
    store = S3Store(Location(scripted_s3.url(PREFIX), options), transfer=PARTS, retry=RETRY)
    for verb in VERBS.values():
        with pytest.raises(StorageError) as caught:
            verb(store)
        # This server's answer holds all that was signed, the session token included.
        check_words(caught.value, scripted_s3, caplog)
        for secret in ("a-wrong-secret-of-some-length", "a-session-token-of-some-length"):
            assert secret not in caplog.text
            assert secret not in str(caught.value) + repr(caught.value)
            assert secret not in repr(store) + repr(store.location)
    store.close()
