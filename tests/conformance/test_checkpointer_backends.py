"""The checkpointer on every kind of storage: save, resume, retention, and a load where nothing can be written."""

from __future__ import annotations

import contextlib
import uuid
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import dcpfs
from dcpfs.errors import MissingBackendError, UnsupportedOperationError
from dcpfs.storage.location import Location
from dcpfs.storage.opening import open_store
from dcpfs.testing.backends import BACKENDS
from dcpfs.testing.servers_files import HttpServer

SERVERS = {backend.server.__name__: backend.server for backend in BACKENDS if backend.server and not backend.read_only}
WRAPPED = ("GcsServer", "SeaweedServer", "WebdavServer", "memory")


@pytest.fixture(scope="module", params=["file", "memory", *SERVERS])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Location]:
    """A writable place on each kind of storage."""
    if request.param == "file":
        yield Location(tmp_path_factory.mktemp("run"))
    elif request.param == "memory":
        yield Location(f"memory://{uuid.uuid4().hex}")
    else:
        try:
            with SERVERS[request.param]() as server:
                yield Location(server.url("run"), server.storage_options)
        except MissingBackendError as error:
            pytest.skip(str(error))


def model(value: float) -> torch.nn.Module:
    made = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 3))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(value)
    return made


def config(place: Location, mode: str = "disabled", keep_last: int | None = None) -> dcpfs.CheckpointConfig:
    return dcpfs.CheckpointConfig.model_validate(
        {
            "save_dir": place.url,
            "storage_options": place.storage_options,
            "async_mode": mode,
            "keep_last": keep_last,
            "load_training_state": True,
        }
    )


def optimizer_of(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.5)


@pytest.mark.parametrize("wrapper", ["", "dir::", "simplecache::", "filecache::"])
def test_what_is_saved_is_resumed_and_old_steps_go(
    request: pytest.FixtureRequest, place: Location, wrapper: str
) -> None:
    if wrapper and not any(f"[{name}-" in request.node.name for name in WRAPPED):
        pytest.skip("of wrapped kinds, a few stand for all")
    modes = ["disabled", "async"] if not wrapper else ["disabled"]
    kept = {"iter_000000002", "iter_000000003"}
    for mode in modes:
        save_dir = Location(f"{wrapper}{place.join(f'{wrapper[:-2]}{mode}').url}", _options(place, wrapper))
        with dcpfs.DistributedCheckpointer(config(save_dir, mode, keep_last=2)) as checkpointer:
            for step in (1, 2, 3):
                module = model(float(step))
                checkpointer.save(module, optimizer_of(module), None, None, step, trainer={"seen": step * 10})
                checkpointer.maybe_wait_for_staging()
        with dcpfs.DistributedCheckpointer(config(save_dir)) as checkpointer:
            module, trainer = model(0.0), {"seen": 0}
            assert checkpointer.load(module, optimizer_of(module), None, None, trainer=trainer) == 3
            assert trainer == {"seen": 30}
            assert all(bool((parameter == 3.0).all()) for parameter in module.parameters())
        with contextlib.closing(open_store(save_dir)) as store:
            # SeaweedFS lists an emptied directory for a while, so look at the objects.
            assert {info.path.split("/")[0] for info in store.list() if "/" in info.path} == kept


def _options(place: Location, wrapper: str) -> dict[str, object]:
    if not wrapper or not place.storage_options:
        return place.storage_options
    return {place.scheme: place.storage_options}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step on local files."""
    directory = tmp_path_factory.mktemp("saved")
    with dcpfs.DistributedCheckpointer(config(Location(directory))) as checkpointer:
        module = model(7.0)
        checkpointer.save(module, optimizer_of(module), None, None, 5, trainer={"seen": 50})
    return directory


@pytest.fixture(scope="module", params=["http", "simplecache::http", "zip"])
def readable(request: pytest.FixtureRequest, saved: Path) -> Iterator[Location]:
    """The step again, where it can only be read."""
    if request.param == "zip":
        path = saved.parent / f"{saved.name}.zip"
        with zipfile.ZipFile(path, "w") as archive:
            for file in saved.rglob("*"):
                if file.is_file():
                    archive.write(file, f"run/{file.relative_to(saved)}")
        yield Location(f"zip://run::file://{path}")
        return
    with HttpServer() as server:
        for file in saved.rglob("*"):
            if file.is_file():
                target = server.data / "run" / file.relative_to(saved)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(file.read_bytes())
        url, options = server.url("run"), server.storage_options
        yield Location(url, options) if request.param == "http" else Location(f"simplecache::{url}", {"http": options})


def test_a_store_that_can_only_be_read_is_loaded_from(readable: Location) -> None:
    module = model(0.0)
    state = {"0.weight": torch.zeros(64, 64)}
    step = readable.join("iter_000000005/model")
    dcpfs.load(state, step.url, storage_options=step.storage_options, strict=False)
    assert bool((state["0.weight"] == 7.0).all())
    with dcpfs.DistributedCheckpointer(
        dcpfs.CheckpointConfig.model_validate(
            {
                "save_dir": "memory://nothing-here",
                "load_path": readable.join("iter_000000005").url,
                "load_storage_options": readable.storage_options,
                "load_training_state": True,
            }
        )
    ) as checkpointer:
        trainer = {"seen": 0}
        assert checkpointer.load(module, optimizer_of(module), None, None, trainer=trainer) == 5
    assert trainer == {"seen": 50}
    assert all(bool((parameter == 7.0).all()) for parameter in module.parameters())


def test_a_store_that_can_only_be_read_says_so_before_a_byte(readable: Location) -> None:
    with pytest.raises(UnsupportedOperationError, match="read-only"):
        dcpfs.save({"x": torch.ones(3)}, readable.join("new").url, storage_options=readable.storage_options)
    module = model(1.0)
    with (
        pytest.raises(UnsupportedOperationError, match="read-only"),
        dcpfs.DistributedCheckpointer(config(readable)) as checkpointer,
    ):
        checkpointer.save(module, optimizer_of(module), None, None, 9)
