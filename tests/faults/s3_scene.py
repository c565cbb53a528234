"""What the fault tests of the S3 store share: a store that retries at once, contents, and an ear for secrets."""

from __future__ import annotations

import os
import pickle
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dcpfs.config import RetryConfig, TransferConfig
from dcpfs.errors import DcpfsError
from dcpfs.storage.location import Location
from dcpfs.storage.s3_store import S3Store
from dcpfs.storage.store import ObjectInfo
from dcpfs.testing.scripted_s3 import ScriptedS3Server

MIB = 1 << 20
ATTEMPTS = 4
PREFIX = "run/step 1"
SMALL = bytes(range(256)) * 4
LARGE = os.urandom(11 * MIB)
RETRY = RetryConfig(
    attempts=ATTEMPTS, initial_backoff_seconds=0.001, max_backoff_seconds=0.002, read_timeout_seconds=20
)
PARTS = TransferConfig(part_bytes=5 * MIB)


class Profile:
    """A credentials file that is renewed while the store runs, as role helpers do."""

    def __init__(self, server: ScriptedS3Server, path: Path) -> None:
        self.server = server
        self.path = path
        self.generation = 0
        self.key = ""
        self.token = ""
        self.renew()

    def renew(self) -> None:
        """Write new keys, which the server takes; the old ones expire."""
        old = self.key
        self.generation += 1
        self.key, secret = f"RENEWED{self.generation}", f"secret-of-generation-{self.generation}"
        self.token = f"token-of-generation-{self.generation}"
        self.server.accept_credential(self.key, secret, self.token)
        self.path.write_text(
            f"[default]\naws_access_key_id={self.key}\naws_secret_access_key={secret}\naws_session_token={self.token}\n"
        )
        if old:
            self.server.expire_credential(old)


def open_store(server: ScriptedS3Server, *, retry: RetryConfig = RETRY, **options: object) -> S3Store:
    location = Location(server.url(PREFIX), {**server.storage_options, **options})
    return S3Store(location, transfer=PARTS, retry=retry)


def write_large(store: S3Store, path: str = "new") -> ObjectInfo:
    sink = store.open_sink(path, len(LARGE))
    try:
        with ThreadPoolExecutor(3) as pool:
            view = memoryview(LARGE)
            done = [pool.submit(sink.write_part, part, [view[part.start : part.stop]]) for part in sink.parts()]
            for one in done:
                one.result()
        return sink.commit()
    except BaseException:
        sink.abort()
        raise


def said_by(error: BaseException, caplog: pytest.LogCaptureFixture) -> str:
    """Every text in which a secret could show."""
    texts = ["".join(traceback.format_exception(error)), str(error), repr(error), str(error.args)]
    if isinstance(error, DcpfsError):
        travelled = pickle.loads(pickle.dumps(error))
        texts += [str(travelled), repr(travelled), str(travelled.cause_text)]
    texts += [record.getMessage() for record in caplog.records if record.name.startswith("dcpfs")]
    texts += [str(record.exc_text) for record in caplog.records if record.name.startswith("dcpfs")]
    return "\n".join(texts)


def check_words(error: DcpfsError, server: ScriptedS3Server, caplog: pytest.LogCaptureFixture) -> None:
    """One sentence that names the object, and no secret anywhere."""
    text = str(error)
    assert "\n" not in text
    assert text.startswith("Can't ")
    assert f"s3://dcpfs/{PREFIX}" in text or "bucket 'dcpfs'" in text
    everything = said_by(error, caplog)
    assert server.secret_key not in everything
    assert "Signature=" not in everything
    for request in server.requests():
        assert str(request.header("authorization")).rpartition("=")[2] not in everything
