"""The network between a rank and its store is cut: for a while, for good, and in the middle of a request's bytes.

A cut is mended when the client has been seen to fail so and so often, never by a clock.
"""

from __future__ import annotations

import functools
import logging
import textwrap
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch

import dcpfs
import dcpfs.testing
from dcpfs.checkpointer.layout import step_name
from dcpfs.config import RetryConfig, TransferConfig
from dcpfs.errors import CheckpointNotFoundError, DcpfsError, IncompleteCheckpointError, StorageError
from dcpfs.storage import s3_store
from dcpfs.storage.retrying import RetryPolicy
from dcpfs.testing.s3_faults import slow_down
from dcpfs.testing.scripted_s3 import ScriptedS3Server
from dcpfs.testing.tcp_proxy import Cut, CutPoint, Direction, TcpProxy
from tests.faults.proxied_state import MODES, options_through, seed_of, state_of, template_of
from tests.faults.s3_scene import MIB, said_by
from tests.faults.scripted_scene import Part, forget_clients

RETRY = RetryConfig(
    attempts=40,
    initial_backoff_seconds=0.01,
    max_backoff_seconds=0.05,
    connect_timeout_seconds=0.5,
    read_timeout_seconds=0.5,
)
GIVES_UP = RETRY.model_copy(update={"attempts": 3})
GIVES_UP_LATE = RETRY.model_copy(update={"attempts": 3, "read_timeout_seconds": 2.0})
"""Where a save before the cut and one after it have to succeed, also on a machine that is busy."""
TRANSFER = TransferConfig(part_bytes=5 * MIB, concurrency=4, read_bytes=4 * MIB)
FAILURES = 3
"""So many failed attempts the client makes before the network is whole again."""


class Large(Part):
    """6 MiB, which go to S3 in two parts."""

    def __init__(self, seed: int) -> None:
        self.values = torch.full((6 * MIB // 4,), float(seed))


@dataclass
class Scene:
    """A store behind a network that can break."""

    server: ScriptedS3Server
    proxy: TcpProxy
    failures: list[float] = field(default_factory=list)

    @property
    def options(self) -> dict[str, object]:
        return options_through(self.proxy, self.server.storage_options)

    def save(self, seed: int, retry: RetryConfig = RETRY, *, overwrite: bool = False) -> None:
        dcpfs.save(
            state_of(seed),
            self.server.url("run/model"),
            storage_options=self.options,
            transfer=TRANSFER,
            retry=retry,
            overwrite=overwrite,
        )

    def load(self, retry: RetryConfig = RETRY) -> int:
        """The seed of the state that is found, after proving that it is all of that one."""
        found = template_of()
        dcpfs.load(found, self.server.url("run/model"), storage_options=self.options, transfer=TRANSFER, retry=retry)
        return seed_of(found)

    def config(self, mode: str, retry: RetryConfig = RETRY) -> dcpfs.CheckpointConfig:
        return dcpfs.CheckpointConfig.model_validate(
            {
                "save_dir": self.server.url("run/steps"),
                "storage_options": self.options,
                "async_mode": mode,
                "rng": "none",
                "transfer": TRANSFER,
                "retry": retry,
                "timeout_seconds": 120,
            }
        )

    def resumed(self) -> int:
        """The step that a fresh checkpointer resumes, after proving that it is all of that one."""
        model, optim = Large(0), Part(0)
        with dcpfs.DistributedCheckpointer(self.config("disabled"), access="read_only") as checkpointer:
            step = checkpointer.load_state({"model": model, "optim": optim})
        assert torch.equal(model.values, Large(step).values)
        assert torch.equal(optim.values, Part(step * 10).values)
        return step


@pytest.fixture(scope="module")
def module_scene() -> Iterator[Scene]:
    with ScriptedS3Server() as server, TcpProxy(server.port) as proxy:
        yield Scene(server, proxy)


@pytest.fixture
def scene(module_scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Scene]:
    caplog.set_level(logging.DEBUG, logger="dcpfs")
    module_scene.proxy.mend()
    module_scene.server.reset()
    module_scene.failures.clear()

    def wait(_: float) -> None:
        """What the retry policy does between two attempts."""
        module_scene.failures.append(0.0)
        if len(module_scene.failures) >= FAILURES:
            module_scene.proxy.mend()

    monkeypatch.setattr(s3_store, "RetryPolicy", functools.partial(RetryPolicy, sleep=wait))
    yield module_scene
    module_scene.proxy.mend()
    assert module_scene.server.secret_key not in caplog.text


def never_mends(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often the client fails, it is for others to mend the network."""
    monkeypatch.setattr(s3_store, "RetryPolicy", RetryPolicy)


def upload_starts(cut: Cut, scene: Scene) -> CutPoint:
    return scene.proxy.cut_at(cut, pattern=rb"POST /\S*\?uploads")


def part_is_half_sent(cut: Cut, scene: Scene) -> CutPoint:
    return scene.proxy.cut_at(cut, pattern=rb"PUT /\S*partNumber=2", after_bytes=MIB)


def completion_is_not_confirmed(cut: Cut, scene: Scene) -> CutPoint:
    return scene.proxy.cut_at(cut, pattern=rb"POST /\S*\?uploadId=", direction=Direction.TO_CLIENT)


def marker_is_not_confirmed(cut: Cut, scene: Scene) -> CutPoint:
    return scene.proxy.cut_at(cut, pattern=rb"PUT /\S*/\.metadata", direction=Direction.TO_CLIENT)


def metadata_is_asked_for(cut: Cut, scene: Scene) -> CutPoint:
    return scene.proxy.cut_at(cut, pattern=rb"GET /\S*/\.metadata")


def data_is_half_read(cut: Cut, scene: Scene) -> CutPoint:
    return scene.proxy.cut_at(cut, pattern=rb"GET /\S*distcp", direction=Direction.TO_CLIENT, after_bytes=MIB)


Place = Callable[[Cut, Scene], CutPoint]
IN_SAVE: list[Place] = [upload_starts, part_is_half_sent, completion_is_not_confirmed, marker_is_not_confirmed]
IN_LOAD: list[Place] = [metadata_is_asked_for, data_is_half_read]


def name_of(value: object) -> str:
    return value.value if isinstance(value, Cut) else getattr(value, "__name__", str(value))


@pytest.mark.parametrize("place", IN_SAVE, ids=name_of)
@pytest.mark.parametrize("cut", Cut, ids=name_of)
def test_case_82_a_save_gets_over_a_cut_that_is_mended(scene: Scene, cut: Cut, place: Place) -> None:
    point = place(cut, scene)
    scene.save(3)
    assert point.reached.is_set()
    assert len(scene.failures) >= FAILURES
    assert not any(upload.parts for upload in scene.server.open_uploads())
    # Requests that were held back arrive in the end: S3 keeps an empty upload for each that was not confirmed.
    assert scene.server.operations().count("CreateMultipartUpload") <= 1 + len(scene.failures)
    assert scene.load() == 3


@pytest.mark.parametrize("place", IN_LOAD, ids=name_of)
@pytest.mark.parametrize("cut", Cut, ids=name_of)
def test_case_82_a_load_gets_over_a_cut_that_is_mended(scene: Scene, cut: Cut, place: Place) -> None:
    scene.save(4)
    point = place(cut, scene)
    assert scene.load() == 4
    assert point.reached.is_set()
    assert len(scene.failures) >= FAILURES


@pytest.mark.parametrize("place", IN_SAVE, ids=name_of)
@pytest.mark.parametrize("cut", Cut, ids=name_of)
def test_cases_31_90_a_save_whose_network_stays_cut_fails_in_words_and_leaves_nothing_to_load(
    scene: Scene, cut: Cut, place: Place, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    never_mends(monkeypatch)
    place(cut, scene)
    with pytest.raises(StorageError) as caught:
        scene.save(5, GIVES_UP)
    check_words(caught.value, scene, caplog)
    scene.proxy.mend()
    # A marker that arrived and could be neither confirmed nor withdrawn vouches for a whole state.
    published = place is marker_is_not_confirmed
    assert found(scene) in ([5, None] if published else [None])
    scene.save(6, overwrite=True)
    assert scene.load() == 6


def found(scene: Scene) -> int | None:
    try:
        return scene.load()
    except (CheckpointNotFoundError, IncompleteCheckpointError):
        return None


def check_words(error: DcpfsError, scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    text = str(error)
    assert "\n" not in text
    assert "Can't " in text
    assert "s3://dcpfs/run" in text
    assert "check network and endpoint, or raise RetryConfig's limits" in text
    assert "(3 attempts in " in text
    everything = said_by(error, caplog) + caplog.text
    assert scene.server.secret_key not in everything
    assert "Signature=" not in everything


@pytest.mark.parametrize("cut", Cut, ids=name_of)
def test_a_load_whose_network_stays_cut_fails_in_words(
    scene: Scene, cut: Cut, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.save(7)
    never_mends(monkeypatch)
    data_is_half_read(cut, scene)
    with pytest.raises(StorageError) as caught:
        scene.load(GIVES_UP)
    check_words(caught.value, scene, caplog)
    scene.proxy.mend()
    assert scene.load() == 7


@pytest.mark.parametrize("cut", Cut)
def test_who_has_never_reached_the_store_is_told_so(scene: Scene, cut: Cut, caplog: pytest.LogCaptureFixture) -> None:
    forget_clients()
    # A network of its own: one that is mended lets through what was on its way.
    with TcpProxy(scene.server.port) as proxy:
        lonely = Scene(scene.server, proxy)
        proxy.cut(cut)
        for work in (lambda: lonely.save(8, GIVES_UP), lambda: lonely.load(GIVES_UP)):
            with pytest.raises(StorageError) as caught:
                work()
            check_words(caught.value, lonely, caplog)
        assert scene.server.requests() == []


# -- the checkpointer


@pytest.fixture(scope="module", params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


COMMIT_POINTS = {
    "upload": rb"POST /\S*/model/__0_0\.distcp\?uploads",
    "part": rb"PUT /\S*/model/__0_0\.distcp\?\S*partNumber=2",
    "completion": rb"POST /\S*/model/__0_0\.distcp\?uploadId=",
    "marker": rb"PUT /\S*/manifest\.json",
    "pointer": rb"PUT /\S*/latest_checkpoint\.txt",
}


def save_step(checkpointer: dcpfs.DistributedCheckpointer, step: int) -> None:
    checkpointer.save_state(step, {"model": Large(step), "optim": Part(step * 10)})


def test_case_82_a_step_gets_over_cuts_that_are_mended_in_every_mode(
    scene: Scene, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    never_mends(monkeypatch)
    with dcpfs.DistributedCheckpointer(scene.config(mode)) as checkpointer:
        save_step(checkpointer, 1)
        checkpointer.wait()
        for step, (pattern, cut) in enumerate(
            [(pattern, cut) for pattern in COMMIT_POINTS.values() for cut in (Cut.RESET, Cut.SILENT)], 2
        ):
            # In the background nobody can be watched but the connections that are made.
            point = scene.proxy.cut_at(cut, pattern=pattern, direction=Direction.TO_CLIENT, mends_after=2)
            save_step(checkpointer, step)
            checkpointer.wait()
            assert point.reached.is_set()
            assert scene.resumed() == step
    # An upload whose start was not confirmed stays, empty: nobody knows its name. Those are of the first two cuts.
    left = scene.server.open_uploads()
    assert not any(upload.parts for upload in left)
    assert {upload.key for upload in left} <= {f"run/steps/{step_name(step)}/model/__0_0.distcp" for step in (2, 3)}


@pytest.mark.parametrize("where", ["part", "marker"])
def test_cases_30_48_a_step_whose_network_stays_cut_fails_in_words_in_every_mode(
    scene: Scene, mode: str, where: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    never_mends(monkeypatch)
    with dcpfs.DistributedCheckpointer(scene.config(mode, GIVES_UP_LATE)) as checkpointer:
        save_step(checkpointer, 1)
        checkpointer.wait()
        point = scene.proxy.cut_at(Cut.SILENT, pattern=COMMIT_POINTS[where])

        def save_and_wait() -> None:
            save_step(checkpointer, 2)
            checkpointer.wait()

        with pytest.raises(StorageError) as caught:
            save_and_wait()
        assert point.reached.is_set()
        check_words(caught.value, scene, caplog)
        # What was sent before the silence may arrive later, as on any network.
        scene.proxy.mend()
        assert scene.resumed() in ([1] if where == "part" else [1, 2])
        save_step(checkpointer, 3)
        checkpointer.wait()
        assert scene.resumed() == 3


def test_a_store_that_is_cut_off_while_the_checkpointer_rests_is_found_again(scene: Scene, mode: str) -> None:
    """Connections that were kept open are dead, and nobody has said so: they cost a try, not a save."""
    with dcpfs.DistributedCheckpointer(scene.config(mode)) as checkpointer:
        for step, cut in enumerate(Cut, 1):
            save_step(checkpointer, step)
            checkpointer.wait()
            scene.proxy.cut(cut)
            scene.proxy.mend()
            assert scene.resumed() == step


def test_a_cut_hits_all_connections_of_two_saves_at_once(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """All parts of all threads fail together, and all come back."""
    never_mends(monkeypatch)
    threads: list[threading.Thread] = []
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        url = scene.server.url(f"run/{seed}")
        try:
            dcpfs.save(state_of(seed), url, storage_options=scene.options, transfer=TRANSFER, retry=RETRY)
        except BaseException as error:
            errors.append(error)

    point = scene.proxy.cut_at(Cut.RESET, pattern=rb"partNumber=3", after_bytes=1000, mends_after=5)
    for seed in range(2):
        threads.append(threading.Thread(target=work, args=(seed,)))
        threads[-1].start()
    for thread in threads:
        thread.join(240)
    assert not any(thread.is_alive() for thread in threads)
    assert errors == []
    assert point.reached.is_set()
    for seed in range(2):
        assert seed_of(dcpfs.read(scene.server.url(f"run/{seed}"), storage_options=scene.options)) == seed
    assert not any(upload.parts for upload in scene.server.open_uploads())


def test_the_example_of_the_package_runs() -> None:
    _, _, example = str(dcpfs.testing.__doc__).partition("::\n\n")
    names = {"state": {"weights": torch.zeros(5 * MIB)}, "dcpfs": dcpfs, "slow_down": slow_down}
    exec(textwrap.dedent(example), {**names, "Cut": Cut, "ScriptedS3Server": ScriptedS3Server, "TcpProxy": TcpProxy})
