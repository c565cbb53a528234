"""The store's server is killed in mid-save and in mid-load, and comes back on its own data, or does not.

Real servers behind a relay that keeps their address: at a chosen byte the relay says so, the server is killed, and a
restart follows once the client has been seen to fail.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest
import torch

import dcpfs
from dcpfs.config import RetryConfig, TransferConfig
from dcpfs.errors import CheckpointNotFoundError, IncompleteCheckpointError, StorageError
from dcpfs.storage import s3_store
from dcpfs.storage.location import Location
from dcpfs.storage.retrying import RetryPolicy
from dcpfs.testing.servers import RcloneServer, S3Server, SeaweedServer
from dcpfs.testing.tcp_proxy import Cut, Direction, TcpProxy
from tests.faults.proxied_state import MODES, VALUES, options_through, seed_of, state_of, template_of
from tests.faults.s3_scene import MIB, said_by
from tests.faults.scripted_scene import Part

RETRY = RetryConfig(
    attempts=100,
    initial_backoff_seconds=0.01,
    max_backoff_seconds=4.0,
    deadline_seconds=280,
    connect_timeout_seconds=2,
    read_timeout_seconds=10,
)
GIVES_UP = RETRY.model_copy(update={"attempts": 4, "max_backoff_seconds": 0.05})
TRANSFER = TransferConfig(part_bytes=5 * MIB, concurrency=2, read_bytes=4 * MIB)
SMALL = 1000


class Scene:
    """A server behind a relay, and what its clients saw."""

    def __init__(self, server: S3Server, proxy: TcpProxy) -> None:
        self.server = server
        self.proxy = proxy
        self.failed = threading.Event()
        self.prefix = f"restart-{uuid.uuid4().hex}"

    @property
    def options(self) -> dict[str, object]:
        return options_through(self.proxy, self.server.storage_options)

    def url(self, name: str) -> str:
        return self.server.url(f"{self.prefix}/{name}")

    def save(self, seed: int, count: int, retry: RetryConfig = RETRY) -> None:
        dcpfs.save(
            state_of(seed, count), self.url("model"), storage_options=self.options, transfer=TRANSFER, retry=retry
        )

    def load(self, seed: int, count: int, retry: RetryConfig = RETRY) -> None:
        found = template_of(count)
        dcpfs.load(found, self.url("model"), storage_options=self.options, transfer=TRANSFER, retry=retry)
        assert seed_of(found) == seed

    def kill(self) -> None:
        """The server and all its connections die at once."""
        self.server.process.kill()
        self.proxy.cut(Cut.RESET)

    def restart(self) -> None:
        """The server comes back, perhaps elsewhere, under the same address."""
        self.server.restart()
        self.proxy.retarget(urlsplit(self.server.endpoint_url).port or 0)
        self.proxy.mend()

    @contextmanager
    def restarts_at(self, pattern: bytes, direction: Direction, after_bytes: int) -> Iterator[None]:
        """Kill the server at a byte, and start it again when a request has failed."""
        point = self.proxy.cut_at(Cut.RESET, pattern=pattern, direction=direction, after_bytes=after_bytes)
        errors: list[BaseException] = []

        def follow() -> None:
            try:
                assert point.reached.wait(240)
                self.server.process.kill()
                assert self.failed.wait(240)
                self.restart()
            except BaseException as error:
                errors.append(error)

        self.failed.clear()
        thread = threading.Thread(target=follow)
        thread.start()
        try:
            yield
        finally:
            thread.join(300)
        assert not thread.is_alive()
        assert errors == []


@contextmanager
def opened(kind: Callable[[], S3Server]) -> Iterator[Scene]:
    with kind() as server, TcpProxy(urlsplit(server.endpoint_url).port or 0) as proxy:
        yield Scene(server, proxy)


def watch(scene: Scene, patch: pytest.MonkeyPatch) -> None:
    """Have the scene told that a request has failed, before its client waits."""

    class Watched(RetryPolicy):
        def __init__(self, config: RetryConfig, location: Location) -> None:
            never = threading.Event()

            def wait(seconds: float) -> None:
                scene.failed.set()
                never.wait(seconds)

            super().__init__(config, sleep=wait, location=location)

    patch.setattr(s3_store, "RetryPolicy", Watched)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(RcloneServer, id="rclone"),
        # Takes up to half a minute to come back after a kill.
        pytest.param(SeaweedServer, id="seaweed", marks=pytest.mark.nightly),
    ],
)
def module_scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    kind: Callable[[], S3Server] = request.param
    with opened(kind) as scene:
        yield scene


@pytest.fixture
def scene(module_scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Scene]:
    caplog.set_level(logging.DEBUG, logger="dcpfs")
    module_scene.prefix = f"restart-{uuid.uuid4().hex}"
    watch(module_scene, monkeypatch)
    yield module_scene
    assert module_scene.server.secret_key not in caplog.text


PART = rb"PUT /\S*partNumber=2"


def test_case_82_a_save_outlives_a_restart_of_seaweed_in_the_middle_of_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(SeaweedServer) as scene:
        watch(scene, monkeypatch)
        with scene.restarts_at(PART, Direction.TO_SERVER, MIB):
            scene.save(1, VALUES)
        scene.load(1, VALUES)


def test_a_restart_that_loses_an_upload_fails_the_save_and_not_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploads to rclone lie in its memory: nobody can send their parts again but who holds the state."""
    with opened(RcloneServer) as scene:
        watch(scene, monkeypatch)
        with scene.restarts_at(PART, Direction.TO_SERVER, MIB), pytest.raises(StorageError, match="so save again"):
            scene.save(1, VALUES)
        with pytest.raises((CheckpointNotFoundError, IncompleteCheckpointError)):
            scene.load(1, VALUES)
        scene.save(1, VALUES)
        scene.load(1, VALUES)


def test_case_82_a_save_and_a_load_outlive_a_restart_at_the_marker(scene: Scene) -> None:
    with scene.restarts_at(rb"PUT /\S*/\.metadata", Direction.TO_SERVER, 0):
        scene.save(2, SMALL)
    with scene.restarts_at(rb"GET /\S*/\.metadata", Direction.TO_SERVER, 0):
        scene.load(2, SMALL)


def test_case_82_a_load_outlives_a_restart_in_the_middle_of_a_range(scene: Scene) -> None:
    scene.save(3, VALUES)
    with scene.restarts_at(rb"GET /\S*distcp", Direction.TO_CLIENT, MIB):
        scene.load(3, VALUES)


def test_cases_31_90_beyond_the_retries_it_is_one_error_and_nothing_is_loaded(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.save(4, SMALL)
    point = scene.proxy.cut_at(Cut.RESET, pattern=rb"PUT /\S*__0_0\.distcp")
    name, scene.prefix = scene.prefix, f"{scene.prefix}/second"
    with pytest.raises(StorageError) as caught:
        scene.save(5, SMALL, GIVES_UP)
    assert point.reached.is_set()
    scene.kill()
    with pytest.raises(StorageError) as caught_again:
        scene.load(5, SMALL, GIVES_UP)
    for error in (caught.value, caught_again.value):
        text = str(error)
        assert "\n" not in text
        assert "Can't " in text
        assert "s3://dcpfs/restart-" in text
        assert "check network and endpoint" in text
        assert "(4 attempts in " in text
        assert scene.server.secret_key not in said_by(error, caplog)
    scene.restart()
    with pytest.raises((CheckpointNotFoundError, IncompleteCheckpointError)):
        scene.load(5, SMALL)
    scene.prefix = name
    scene.load(4, SMALL)


@pytest.mark.parametrize("mode", MODES)
def test_case_82_a_checkpointer_outlives_restarts_in_every_mode(scene: Scene, mode: str) -> None:
    def config(mode: str) -> dcpfs.CheckpointConfig:
        return dcpfs.CheckpointConfig.model_validate(
            {
                "save_dir": scene.url("steps"),
                "storage_options": scene.options,
                "async_mode": mode,
                "rng": "none",
                "transfer": TRANSFER,
                "retry": RETRY,
                "timeout_seconds": 200,
            }
        )

    def resumed() -> int:
        model = Part(0)
        with dcpfs.DistributedCheckpointer(config("disabled"), access="read_only") as checkpointer:
            step = checkpointer.load_state({"model": model})
        assert torch.equal(model.values, Part(step).values)
        return step

    with dcpfs.DistributedCheckpointer(config(mode)) as checkpointer:
        checkpointer.save_state(1, {"model": Part(1)})
        checkpointer.wait()
        pattern = rb"PUT /\S*/iter_000000002/manifest\.json"
        with scene.restarts_at(pattern, Direction.TO_SERVER, 0):
            checkpointer.save_state(2, {"model": Part(2)})
            if mode == "async_with_pinned_mem":
                scene.failed.set()  # its failures are seen by nobody here
            checkpointer.wait()
        assert resumed() == 2
        with scene.restarts_at(rb"GET /\S*/iter_000000002/model", Direction.TO_SERVER, 0):
            assert resumed() == 2
        checkpointer.save_state(3, {"model": Part(3)})
        checkpointer.wait()
        assert resumed() == 3
