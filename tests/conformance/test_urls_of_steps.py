"""A step's URL, or a run's, where the URL of one checkpoint is meant."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

import dcpfs
from dcpfs.dcp.checkpoints_below import point_below
from dcpfs.errors import CheckpointNotFoundError, StorageError
from dcpfs.storage.location import Location
from dcpfs.storage.opening import open_store
from dcpfs.testing.recording import RecordingStore


@pytest.fixture
def run() -> str:
    """The URL of a run with steps 3 and 12, and step 13 just begun."""
    url = f"memory://{uuid.uuid4().hex}/run"
    model = torch.nn.Linear(2, 2)
    with dcpfs.DistributedCheckpointer(dcpfs.CheckpointConfig(save_dir=f"{url}/checkpoints")) as checkpointer:
        for iteration in (3, 12):
            checkpointer.save(model, torch.optim.SGD(model.parameters(), lr=0.1), iteration=iteration)
    store = open_store(Location(f"{url}/checkpoints"))
    store.put("iter_000000013/.writing", [b"somebody"])
    store.close()
    return url


def load_by_torch(url: str) -> None:
    dcp_load({"weight": torch.zeros(2, 2)}, storage_reader=dcpfs.FsspecStorageReader(url))


LOADS: dict[str, Callable[[str], object]] = {
    "read": dcpfs.read,
    "load": lambda url: dcpfs.load({"weight": torch.zeros(2, 2)}, url, strict=False),
    "load_checkpoint": lambda url: dcpfs.load_checkpoint(torch.nn.Linear(2, 2), url),
}


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(
    ("below", "kind"),
    [
        ("/checkpoints/iter_000000012", r"checkpoints by key \(a step\)"),
        ("/checkpoints", r"directories of checkpoints \(a run of a checkpointer\)"),
        ("", r"directories of checkpoints \(a run of a checkpointer\)"),
    ],
)
def test_a_load_of_one_checkpoint_from_a_step_or_run_names_the_url_that_is_meant(
    run: str, load: str, below: str, kind: str
) -> None:
    meant = f"{run}/checkpoints/iter_000000012/model"
    text = (
        rf"^no checkpoint at {run}{below}: it has no .metadata, and holds {kind}: give the URL .* such as {meant}, or"
    )
    with pytest.raises(CheckpointNotFoundError, match=text):
        LOADS[load](f"{run}{below}")
    LOADS[load](meant)


def test_torchs_own_load_of_a_step_logs_the_url_that_is_meant(run: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR), pytest.raises(BaseException, match="no checkpoint at"):
        load_by_torch(f"{run}/checkpoints/iter_000000012")
    assert f"such as {run}/checkpoints/iter_000000012/model" in caplog.text


def test_where_nothing_is_below_the_error_says_no_more_and_little_is_asked(run: str) -> None:
    with pytest.raises(CheckpointNotFoundError, match=r"it has no .metadata; check the URL"):
        dcpfs.read(f"{run}/elsewhere")
    store = RecordingStore(open_store(Location(run)))
    assert run in str(point_below(CheckpointNotFoundError("there is none"), store))
    store.close()
    assert store.verbs == {"list_directories": 4, "exists": 2, "close": 1}


class Refusing(RecordingStore):
    """May not be listed."""

    def list_directories(self, prefix: str = "") -> Iterator[str]:
        raise StorageError(f"may not list {prefix}")


def test_a_store_that_may_not_be_listed_leaves_the_error_as_it_is(run: str) -> None:
    store = Refusing(open_store(Location(run)))
    error = CheckpointNotFoundError("there is none")
    assert point_below(error, store) is error
    assert str(error) == "there is none"
    store.close()
