"""Whole steps, both ways: each key of ours by torch and every peer, and a step that any of them wrote by ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fsspec
import pytest

import dcpfs
from tests.peers.exchange import (
    NewPlace,
    Place,
    Reader,
    Writer,
    readers_of,
    storage_reader,
    write,
    writers_of,
)
from tests.peers.golden_state import Job, describe
from tests.peers.make_golden import read_flat

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

KEYS = ("model", "optim", "scheduler", "trainer")
_WITHOUT_TEMPLATE = (Reader.LOAD, Reader.READ, Reader.OWN_PLANNER)


def _below(place: Place, name: str) -> Place:
    return Place(place.kind, f"{place.url}/{name}", place.options)


def _open(place: Place) -> dcpfs.DistributedCheckpointer:
    config = dcpfs.CheckpointConfig(save_dir=place.url, storage_options=dict(place.options))
    return dcpfs.DistributedCheckpointer(config)


@pytest.fixture(scope="module")
def saved(new_place: NewPlace) -> Callable[[str], tuple[Place, Any]]:
    """A step of ours, saved once a kind of storage, and all that it holds."""
    steps: dict[str, tuple[Place, Any]] = {}

    def find(kind: str) -> tuple[Place, Any]:
        if kind not in steps:
            job, place = Job(), new_place(kind)
            job.train()
            with _open(place) as checkpointer:
                checkpointer.save(
                    *(job.net, job.optimizer, job.scheduler, None, 3), dataloader=job.position, trainer=job.progress
                )
            steps[kind] = place, job.whole()
        return steps[kind]

    return find


@pytest.mark.parametrize(
    ("kind", "reader"),
    [(kind, reader) for kind in ("local", "s3") for reader in readers_of(kind) if reader not in _WITHOUT_TEMPLATE],
    ids=lambda value: getattr(value, "name", value),
)
def test_each_key_of_our_step_is_read_by_torch_and_by_every_peer(
    saved: Callable[[str], tuple[Place, Any]], kind: str, reader: Reader
) -> None:
    run, whole = saved(kind)
    step = _below(run, "iter_000000003")
    found = {key: dict(sorted(read_flat(storage_reader(reader, _below(step, key))).items())) for key in KEYS}
    assert describe(found["model"]) == whole["model"]
    assert describe(found["optim"]) == whole["optim"]
    assert found["scheduler"]["last_epoch"] == 3
    assert found["scheduler"]["_last_lr"] == [0.125]
    assert {key: value for key, value in found["scheduler"].items() if key.startswith("milestones")} == {
        "milestones.2": 2,
        "milestones.9": 1,
    }
    assert found["trainer"]["iteration"] == 3
    assert found["trainer"]["user.tokens"] == 384


@pytest.mark.parametrize(
    ("kind", "writer"),
    [(kind, writer) for kind in ("local", "s3") for writer in writers_of(kind)],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_step_that_anyone_wrote_a_key_at_a_time_is_resumed(new_place: NewPlace, kind: str, writer: Writer) -> None:
    run, job = new_place(kind), Job()
    job.train()
    states = {
        "model": job.model_state(),
        "optim": job.optimizer_state(),
        "scheduler": job.scheduler.state_dict(),
        "trainer": {"iteration": 5, "user": {"tokens": 384}},
    }
    for key, state in states.items():
        write(writer, state, _below(_below(run, "iter_000000005"), key))
    files, path = fsspec.core.url_to_fs(run.url, **run.options)
    files.pipe_file(f"{path}/latest_checkpoint.txt", b"iter_000000005\n")
    other = Job()
    with _open(run) as checkpointer:
        assert checkpointer.latest() == 5
        assert checkpointer.load(other.net, other.optimizer, other.scheduler, trainer=other.progress) == 5
    assert other.whole() == job.whole()
    assert other.progress == {"tokens": 384}
