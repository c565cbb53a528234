"""Whole pieces of work over a scripted S3 server, on a clock of their own, and what they sent.

The retry policy is the real one with its default limits; only its clock and its sleep are replaced, so that half a
minute of SlowDown costs nothing and what would be waited can be compared.
"""

from __future__ import annotations

import functools
import random
import re
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pytest
import torch

import dcpfs
from dcpfs.checkpointer.choices import RngPolicy
from dcpfs.config import RetryConfig, TransferConfig
from dcpfs.errors import CheckpointNotFoundError, DcpfsError, IncompleteCheckpointError
from dcpfs.storage import s3_store
from dcpfs.storage.retrying import RetryPolicy
from dcpfs.storage.s3_clients import CLIENTS
from dcpfs.testing.s3_exchange import S3Request
from dcpfs.testing.scripted_s3 import ScriptedS3Server
from tests.faults.s3_scene import MIB, Profile, said_by

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = [
    "NAME",
    "RETRY",
    "STEPS",
    "WORKS",
    "Clock",
    "Part",
    "Profile",
    "Sent",
    "Work",
    "check_error",
    "config",
    "forget_clients",
    "impatient",
    "line_of",
    "on_clock",
    "sent",
    "settle",
]

NAME = "run/step 1"
STEPS = "run/steps"
RETRY = RetryConfig(read_timeout_seconds=20)
TRANSFER = TransferConfig(part_bytes=5 * MIB, concurrency=1, read_bytes=4 * MIB)
"""One request at a time, so that the n-th is the same one in every run."""
VALUES = 3 * MIB // 2
"""6 MiB: just two parts."""
_FEW_VALUES = 40

Sent = Counter[tuple[str, str, str, int | None]]
"""Method, operation, key and part number, with how often."""


class Clock:
    """Time that passes only while somebody waits. Thread-safe."""

    def __init__(self) -> None:
        self.now_seconds = 0.0
        self.waits: list[float] = []
        self._lock = threading.Lock()

    def read(self) -> float:
        return self.now_seconds

    def sleep(self, seconds: float) -> None:
        with self._lock:
            self.waits.append(seconds)
            self.now_seconds += seconds


@contextmanager
def on_clock(seed: int = 0) -> Iterator[Clock]:
    """Have S3 stores that are opened from here on retry on a clock of their own, with a jitter of that seed."""
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dcpfs.storage.retrying._RANDOM", random.Random(seed))
        policy = functools.partial(RetryPolicy, sleep=clock.sleep, clock=clock.read)
        patch.setattr(s3_store, "RetryPolicy", policy)
        yield clock


@contextmanager
def impatient() -> Iterator[RetryConfig]:
    """Have what follows wait for three seconds where it waited for twenty: longer than a busy machine is silent."""
    with pytest.MonkeyPatch.context() as patch:
        retry = RETRY.model_copy(update={"read_timeout_seconds": 3.0})
        patch.setitem(globals(), "RETRY", retry)
        yield retry


_PROBE = re.compile(r"\.dcpfs-probe-[0-9a-f]+")


def line_of(request: S3Request) -> tuple[str, str, str, int | None]:
    return request.method, request.operation, _PROBE.sub(".dcpfs-probe", request.key), request.part_number


def sent(server: ScriptedS3Server) -> Sent:
    return Counter(line_of(request) for request in server.requests())


def state_of(seed: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(seed)
    return {"weights": torch.randn(VALUES, generator=generator), "bias": torch.randn(7, 5), "step": seed}


def _template() -> dict[str, object]:
    return {"weights": torch.zeros(VALUES), "bias": torch.zeros(7, 5), "step": -1}


class Part:
    """One key of a training state, whose values tell which save they are of, and where they belong."""

    def __init__(self, seed: int, count: int = _FEW_VALUES) -> None:
        self.values = torch.arange(count, dtype=torch.float32) + seed

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"values": self.values}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        self.values.copy_(state["values"])


def config(server: ScriptedS3Server, options: Mapping[str, object] | None = None) -> dcpfs.CheckpointConfig:
    return dcpfs.CheckpointConfig(
        save_dir=server.url(STEPS),
        storage_options=server.storage_options if options is None else options,
        rng=RngPolicy.NONE,
        keep_last=1,
        transfer=TRANSFER,
        retry=RETRY,
    )


def _save(server: ScriptedS3Server, options: Mapping[str, object]) -> None:
    dcpfs.save(state_of(2), server.url(NAME), storage_options=options, transfer=TRANSFER, retry=RETRY)


def _overwrite(server: ScriptedS3Server, options: Mapping[str, object]) -> None:
    url = server.url(NAME)
    dcpfs.save(state_of(2), url, storage_options=options, transfer=TRANSFER, retry=RETRY, overwrite=True)


def _load(server: ScriptedS3Server, options: Mapping[str, object]) -> None:
    found = _template()
    dcpfs.load(found, server.url(NAME), storage_options=options, transfer=TRANSFER, retry=RETRY)
    _check(found, 1)


def _check(found: Mapping[str, object], seed: int) -> None:
    wanted, got = state_of(seed)["weights"], found["weights"]
    assert found["step"] == seed
    assert isinstance(wanted, torch.Tensor)
    assert isinstance(got, torch.Tensor)
    assert torch.equal(wanted, got)


def _commit(server: ScriptedS3Server, options: Mapping[str, object]) -> None:
    with dcpfs.DistributedCheckpointer(config(server, options)) as checkpointer:
        checkpointer.save_state(2, {"model": Part(2), "optim": Part(20)})


def _commit_multipart(server: ScriptedS3Server, options: Mapping[str, object]) -> None:
    with dcpfs.DistributedCheckpointer(config(server, options)) as checkpointer:
        checkpointer.save_state(2, {"model": Part(2, VALUES), "optim": Part(20)})


def _resume(server: ScriptedS3Server, options: Mapping[str, object]) -> None:
    _loaded_step(server, options, wanted=1)


def _loaded_step(
    server: ScriptedS3Server, options: Mapping[str, object], *, wanted: int, count: int = _FEW_VALUES
) -> None:
    model, optim = Part(0, count), Part(0)
    with dcpfs.DistributedCheckpointer(config(server, options), access="read_only") as checkpointer:
        iteration = checkpointer.load_state({"model": model, "optim": optim})
    assert iteration == wanted
    assert torch.equal(model.values, Part(wanted, count).values)
    assert torch.equal(optim.values, Part(10 * wanted).values)


def found_state(server: ScriptedS3Server) -> str:
    """What a plain load finds, once nothing fails any more: all of one state, or none."""
    found = _template()
    try:
        dcpfs.load(found, server.url(NAME), storage_options=server.storage_options, transfer=TRANSFER, retry=RETRY)
    except (CheckpointNotFoundError, IncompleteCheckpointError):
        return "none"
    seed = found["step"]
    assert isinstance(seed, int)
    _check(found, seed)
    return f"state {seed}"


def found_step(server: ScriptedS3Server, *, count: int = _FEW_VALUES) -> str:
    """The same of a resume. A step after the first is to have so many values."""
    with dcpfs.DistributedCheckpointer(config(server), access="read_only") as checkpointer:
        latest = checkpointer.latest()
    if latest is None:
        return "none"
    _loaded_step(server, server.storage_options, wanted=latest, count=_FEW_VALUES if latest == 1 else count)
    return f"step {latest}"


@dataclass(frozen=True)
class Work:
    """One piece of work.

    Attributes:
        run: Does it and checks what it returns.
        found: What is found afterwards.
        before: What is found before, or when it failed before its first change.
        after: What is found when it was done.
        between: What may be found when it failed on the way.
        large: It differs from the one of the same name only in that it uploads in parts.
    """

    run: Callable[[ScriptedS3Server, Mapping[str, object]], None]
    found: Callable[[ScriptedS3Server], str]
    before: str
    after: str
    between: frozenset[str] = field(default_factory=frozenset)
    large: bool = False

    @property
    def any_outcome(self) -> set[str]:
        """All that may be found whatever happened."""
        return {self.before, self.after, *self.between}

    @property
    def failed_outcome(self) -> set[str]:
        """All that may be found when it failed."""
        return {self.before, *self.between}


WORKS = {
    "save": Work(_save, found_state, "none", "state 2"),
    "overwrite": Work(_overwrite, found_state, "state 1", "state 2", frozenset({"none"})),
    "load": Work(_load, found_state, "state 1", "state 1"),
    "commit": Work(_commit, found_step, "step 1", "step 2"),
    "commit multipart": Work(
        _commit_multipart, functools.partial(found_step, count=VALUES), "step 1", "step 2", large=True
    ),
    "resume": Work(_resume, found_step, "step 1", "step 1"),
}


@functools.cache
def _prepared() -> dict[str, bytes]:
    """What stands in the bucket before: a state and a step of 1."""
    with ScriptedS3Server() as server:
        options = server.storage_options
        dcpfs.save(state_of(1), server.url(NAME), storage_options=options, transfer=TRANSFER, retry=RETRY)
        with dcpfs.DistributedCheckpointer(config(server)) as checkpointer:
            checkpointer.save_state(1, {"model": Part(1), "optim": Part(10)})
        return {key: server.read(key) for key in server.stored_keys()}


def settle(server: ScriptedS3Server, work: Work) -> None:
    """Put back what stands there before a piece of work, with a client that knows its bucket."""
    server.reset()
    for key, content in _prepared().items():
        if not (work is WORKS["save"] and key.startswith(NAME)):
            server.write(key, content)
    # Older than whatever is done now, also by a store's clock of whole seconds.
    aged = {
        key: replace(one, modified_seconds=one.modified_seconds - 60)
        for key, one in server.objects.snapshot(server.bucket).items()
    }
    server.objects.restore(server.bucket, aged)
    assert work.found(server) == work.before
    server.forget()


def forget_clients() -> None:
    """Have the next store make new connections."""
    CLIENTS.close()


def check_error(error: DcpfsError, server: ScriptedS3Server, caplog: pytest.LogCaptureFixture) -> None:
    """One sentence that names what was tried and where, and no secret in any text."""
    text = str(error)
    assert "\n" not in text
    assert text.startswith("Can't ")
    assert "s3://dcpfs/run" in text
    everything = said_by(error, caplog) + caplog.text
    for secret in (server.secret_key, "Signature=", "X-Amz-Signature"):
        assert secret not in everything
    signatures = {str(request.header("authorization")).rpartition("=")[2] for request in server.requests()}
    assert not any(signature in everything for signature in signatures - {"None"})
