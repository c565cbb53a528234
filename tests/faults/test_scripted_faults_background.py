"""What S3 can do wrong to a checkpointer that saves in the calling thread, in another one, or in a process.

One checkpointer a mode goes through all of it, as a run does: what fails is one error, at the save or at the next call
that waits for it, and the same saver then saves the next step. Faults are the server's, and the waits between tries are
real, if short: a process of its own can't be given a clock. Whatever a mode prints, logs and raises is searched for
secrets.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import dcpfs
from dcpfs.config import TransferConfig
from dcpfs.errors import CredentialsError, DcpfsError, PermissionDeniedError, StorageError
from dcpfs.testing.loopback import LoopbackOnly
from dcpfs.testing.s3_exchange import Exchange, Stage
from dcpfs.testing.s3_faults import Action, Drop, Effect, Fault, LosePart, denied, slow_down
from dcpfs.testing.scripted_s3 import ScriptedS3Server
from tests.faults.proxied_state import MODES
from tests.faults.s3_scene import MIB, RETRY, Profile, said_by
from tests.faults.scripted_scene import STEPS, VALUES, Part, forget_clients

PROCESS = "async_with_pinned_mem"
TRANSFER = TransferConfig(part_bytes=5 * MIB, concurrency=1)


class Scene:
    """A server, the keys of a run that saves there, and every text that must hold none of their secrets."""

    def __init__(self, server: ScriptedS3Server, profile: Profile) -> None:
        self.server = server
        self.profile = profile
        self.tokens = [profile.token]
        self.signatures: set[str] = set()

    def config(self, mode: str) -> dcpfs.CheckpointConfig:
        options = {name: value for name, value in self.server.storage_options.items() if name not in ("key", "secret")}
        return dcpfs.CheckpointConfig.model_validate(
            {
                "save_dir": self.server.url(STEPS),
                "storage_options": options,
                "async_mode": mode,
                "rng": "none",
                "transfer": TRANSFER,
                "retry": RETRY,
                "timeout_seconds": 100,
            }
        )

    def renew(self) -> None:
        self.profile.renew()
        self.tokens.append(self.profile.token)

    def expire(self) -> None:
        self.server.expire_credential(self.profile.key)

    def found(self) -> int:
        """What a new run resumes, whole, with keys of its own."""
        options = self.server.storage_options
        config = self.config("disabled").model_copy(update={"storage_options": options})
        model = Part(0, VALUES)
        with dcpfs.DistributedCheckpointer(config, access="read_only") as checkpointer:
            step = checkpointer.load_state({"model": model})
        assert torch.equal(model.values, Part(step, VALUES).values)
        return step

    def end_round(self) -> None:
        """Nothing fails any more, and what was signed so far is remembered."""
        self.server.reset_faults()
        for request in self.server.requests():
            _, found, signature = str(request.header("authorization")).rpartition("Signature=")
            if found:
                self.signatures.add(signature)
        self.server.forget()

    def check_silence(self, text: str) -> None:
        """No key's secret, no token and no signature is in a text."""
        assert len(self.tokens) > 2
        assert len(self.signatures) > 100
        for secret in (self.server.secret_key, "secret-of-generation", "X-Amz-Signature", *self.tokens):
            assert secret not in text
        assert not any(signature in text for signature in self.signatures)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    forget_clients()
    with ScriptedS3Server() as server, LoopbackOnly() as guard:
        yield Scene(server, Profile(server, tmp_path / "credentials"))
    assert guard.foreign == []


@dataclass(frozen=True)
class Round:
    """One save with something that goes wrong.

    Attributes:
        begin: Makes it go wrong from some request on; returns the fault, if it is one.
        error: What the save ends with; None: it is saved all the same.
        words: In its text.
        end: Makes it right again.
    """

    begin: Callable[[Scene], Fault | None]
    error: type[DcpfsError] | None = None
    words: str = ""
    end: Callable[[Scene], object] = lambda _scene: None


def expires(scene: Scene, then: Callable[[], None]) -> Fault:
    """Keys expire when the save has sent some requests."""

    class Expiry(Action):
        def before_body(self, exchange: Exchange, fault: Fault) -> None:
            then()

    return scene.server.fail("UploadPart", Expiry(), after=1)


ROUNDS = {
    "slow down": Round(lambda scene: scene.server.fail("PutObject", slow_down(), times=3)),
    "slow down in a part": Round(lambda scene: scene.server.fail("UploadPart", slow_down(), times=3)),
    "a completion that is not confirmed": Round(
        lambda scene: scene.server.fail("CompleteMultipartUpload", Drop(Stage.RESPONSE_HEAD, effect=Effect.APPLIED))
    ),
    "keys that are renewed": Round(lambda scene: expires(scene, scene.renew)),
    "keys that expire for good": Round(
        lambda scene: expires(scene, scene.expire), CredentialsError, "expired and could not be renewed", Scene.renew
    ),
    "a lost right": Round(
        lambda scene: scene.server.fail("UploadPart", denied(), times=None),
        PermissionDeniedError,
        "give the identity the right",
    ),
    "a lost part": Round(
        lambda scene: scene.server.fail("UploadPart", LosePart(), after=1), StorageError, "InvalidPart.*so save again"
    ),
    "slow down for good": Round(
        lambda scene: scene.server.fail(
            lambda request: request.operation == "PutObject" and request.key.endswith("/manifest.json"),
            slow_down(),
            times=None,
        ),
        StorageError,
        rf"SlowDown.*\({RETRY.attempts} attempts in ",
    ),
    "nothing": Round(lambda _scene: None),
}


@pytest.mark.parametrize("mode", MODES)
def test_cases_31_81_82_83_what_s3_does_wrong_is_survived_or_said_in_every_mode(
    scene: Scene, mode: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG, logger="dcpfs")
    said: list[str] = []
    saved = [1]
    with dcpfs.DistributedCheckpointer(scene.config(mode)) as checkpointer:

        def save(step: int) -> None:
            checkpointer.save_state(step, {"model": Part(step, VALUES)})
            checkpointer.wait()

        save(1)
        scene.end_round()
        for step, (name, trial) in enumerate(ROUNDS.items(), 2):
            fault = trial.begin(scene)
            if trial.error is None:
                save(step)
                saved.append(step)
            else:
                with pytest.raises(trial.error, match=trial.words) as caught:
                    save(step)
                assert str(caught.value).startswith("Can't "), name
                assert "s3://dcpfs/run" in str(caught.value), name
                said.append(said_by(caught.value, caplog))
            assert fault is None or fault.hits >= 1, name
            uploads = scene.server.open_uploads()
            trial.end(scene)
            scene.end_round()
            # Whose keys have expired can't take its upload back.
            assert bool(uploads) == (name == "keys that expire for good"), name
            for upload in uploads:
                scene.server.objects.abort_upload(upload.bucket, upload.key, upload.upload_id)
            assert checkpointer.steps() == saved, name
            assert scene.found() == saved[-1], name
    printed = "".join(capfd.readouterr())
    # What is searched is there: the third try of a request is worth a warning, wherever it is made.
    assert "SlowDown" in (printed if mode == PROCESS else caplog.text)
    assert ("[save process of rank 0]" in printed) == (mode == PROCESS)
    scene.check_silence("\n".join([printed, caplog.text, *said]))
