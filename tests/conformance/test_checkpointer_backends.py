"""Writer, reader and checkpointer on every kind of storage, in every mode, and a load where nothing can be written."""

from __future__ import annotations

import contextlib
import tarfile
import uuid
import zipfile
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

import dcpfs
from dcpfs.errors import CheckpointExistsError, UnsupportedOperationError
from dcpfs.storage.location import Location
from dcpfs.storage.opening import open_store
from dcpfs.testing.backends import BACKENDS
from dcpfs.testing.servers_files import FileServer, HttpServer
from dcpfs.testing.servers_obstore import ObstoreServer, obstore_installed
from dcpfs.testing.servers_system import NginxServer, ParamikoSshServer
from tests.conformance.paramiko_alone import paramiko_alone
from tests.conformance.servers_here import in_memory, started

SERVERS = {backend.server.__name__: backend.server for backend in BACKENDS if backend.server and not backend.read_only}
READERS: tuple[type[FileServer], ...] = (HttpServer, NginxServer)
WRAPPED = ("GcsServer", "SeaweedServer", "WebdavServer", "memory")
WRAPPERS = ("dir::", "simplecache::", "filecache::", "blockcache::")
PLACES = ("file", "tmpfs", "memory", *SERVERS)
MODES = ("disabled", "async", "async_with_pinned_mem")
FROM_A_PROCESS = (
    "file",
    "ObstoreServer",
    "FtpServer",
    "GcsServer",
    "OpensshServer",
    "SambaServer",
    "SeaweedServer",
)
"""Where a process of its own saves in every run of the tests; elsewhere in the nightly one."""


@pytest.fixture(scope="module", params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Location]:
    """A writable place on each kind of storage."""
    if request.param == "file":
        yield Location(tmp_path_factory.mktemp("run"))
    elif request.param == "tmpfs":
        with in_memory() as directory:
            yield Location(directory)
    elif request.param == "memory":
        yield Location(f"memory://{uuid.uuid4().hex}")
    else:
        with contextlib.ExitStack() as stack:
            server = stack.enter_context(started(SERVERS[request.param]))
            if isinstance(server, ParamikoSshServer):
                stack.enter_context(paramiko_alone(tmp_path_factory.mktemp("shadow")))
            if isinstance(server, ObstoreServer):
                pytest.importorskip("obstore", reason="the client is not installed")
                stack.enter_context(obstore_installed(tmp_path_factory.mktemp("scheme")))
            yield Location(server.url("run"), server.storage_options)


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


def save_steps(save_dir: Location, mode: str) -> None:
    with dcpfs.DistributedCheckpointer(config(save_dir, mode, keep_last=2)) as checkpointer:
        for step in (1, 2, 3):
            module = model(float(step))
            checkpointer.save(module, optimizer_of(module), None, None, step, trainer={"seen": step * 10})
            checkpointer.maybe_wait_for_staging()


def check_steps(save_dir: Location) -> None:
    """The last step is resumed, the one before is kept, the first is gone."""
    with dcpfs.DistributedCheckpointer(config(save_dir)) as checkpointer:
        module, trainer = model(0.0), {"seen": 0}
        assert checkpointer.load(module, optimizer_of(module), None, None, trainer=trainer) == 3
        assert trainer == {"seen": 30}
        assert all(bool((parameter == 3.0).all()) for parameter in module.parameters())
    with contextlib.closing(open_store(save_dir)) as store:
        # SeaweedFS lists an emptied directory for a while, so look at the objects.
        kept = {info.path.split("/")[0] for info in store.list() if "/" in info.path}
    assert kept == {"iter_000000002", "iter_000000003"}


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_what_is_saved_is_resumed_and_old_steps_go(place: Location, mode: str) -> None:
    save_steps(place.join(mode), mode)
    check_steps(place.join(mode))


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(name, marks=() if name in FROM_A_PROCESS else pytest.mark.nightly)
        for name in PLACES
        if name != "memory"
    ],
    indirect=True,
)
def test_what_a_process_of_its_own_saves_is_resumed_and_old_steps_go(place: Location) -> None:
    save_steps(place.join("process"), "async_with_pinned_mem")
    check_steps(place.join("process"))


def test_a_process_of_its_own_does_not_save_to_its_own_memory() -> None:
    for url in ("memory://run", "dir::memory://run", "simplecache::memory://run"):
        # Nobody would find the checkpoint there.
        with pytest.raises(dcpfs.ConfigError, match="is the memory of one process"):
            dcpfs.DistributedCheckpointer(config(Location(url), "async_with_pinned_mem"))


@pytest.mark.parametrize("place", WRAPPED, indirect=True)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_wrapper_in_front_changes_nothing(place: Location, wrapper: str, mode: str) -> None:
    check_wrapped(place, wrapper, mode)


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(name, marks=() if name == "SeaweedServer" else pytest.mark.nightly)
        for name in WRAPPED
        if name != "memory"
    ],
    indirect=True,
)
@pytest.mark.parametrize(
    "wrapper", [pytest.param(name, marks=() if name == "dir::" else pytest.mark.nightly) for name in WRAPPERS]
)
def test_a_wrapper_in_front_of_a_process_of_its_own_changes_nothing(place: Location, wrapper: str) -> None:
    check_wrapped(place, wrapper, "async_with_pinned_mem")


def check_wrapped(place: Location, wrapper: str, mode: str) -> None:
    below = place.join(f"{wrapper[:-2]}-{mode}")
    save_dir = Location(f"{wrapper}{below.url}", {place.scheme: place.storage_options} if place.storage_options else {})
    save_steps(save_dir, mode)
    check_steps(save_dir)
    # What another process does behind the wrapper is seen in front of it.
    with dcpfs.DistributedCheckpointer(config(below)) as checkpointer:
        module = model(4.0)
        checkpointer.save(module, optimizer_of(module), None, None, 3, trainer={"seen": 40})
    with dcpfs.DistributedCheckpointer(config(save_dir)) as checkpointer:
        module = model(0.0)
        assert checkpointer.load(module, optimizer_of(module)) == 3
        assert all(bool((parameter == 4.0).all()) for parameter in module.parameters())


def state(value: int) -> dict[str, object]:
    return {
        "model": {
            "large": torch.arange(60_000.0).reshape(300, 200) + value,
            "half": torch.full((7,), value).bfloat16(),
        },
        "step": value,
        "note": f"of {value}",
    }


def check_state(found: dict[str, object], value: int) -> None:
    wanted = state(value)
    for name, tensor in wanted["model"].items():  # type: ignore[attr-defined] # a mapping, as above
        assert torch.equal(found["model"][name], tensor)  # type: ignore[index] # the same
    assert (found["step"], found["note"]) == (value, f"of {value}")


def test_writer_and_reader_under_torchs_own_calls(place: Location) -> None:
    location = place.join("bare/step 1")
    options = location.storage_options
    for value in (1, 2):
        writer = dcpfs.FsspecStorageWriter(location.url, storage_options=options, overwrite=value == 2)
        save(state(value), storage_writer=writer, no_dist=True)
        loaded = state(0)
        reader = dcpfs.FsspecStorageReader(location.url, storage_options=options)
        load(loaded, storage_reader=reader, no_dist=True)
        check_state(loaded, value)
    with pytest.raises(CheckpointExistsError):
        dcpfs.save(state(3), location.url, storage_options=options)
    check_state(dcpfs.read(location.url, storage_options=options), 2)
    saving = async_save(
        state(4), storage_writer=dcpfs.FsspecStorageWriter(place.join("bare/step 4").url, storage_options=options)
    )
    assert isinstance(saving, Future)
    saving.result()
    check_state(dcpfs.read(place.join("bare/step 4").url, storage_options=options), 4)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step on local files."""
    directory = tmp_path_factory.mktemp("saved")
    with dcpfs.DistributedCheckpointer(config(Location(directory))) as checkpointer:
        module = model(7.0)
        checkpointer.save(module, optimizer_of(module), None, None, 5, trainer={"seen": 50})
    return directory


READ_ONLY = ("http", "nginx", "simplecache::http", "filecache::nginx", "zip", "tar", "zip::simplecache::nginx")


@pytest.fixture(scope="module", params=READ_ONLY)
def readable(request: pytest.FixtureRequest, saved: Path) -> Iterator[Location]:
    """The step again, where it can only be read."""
    files = [file for file in saved.rglob("*") if file.is_file()]
    archive = saved.parent / f"{saved.name}.{request.param[:3]}"
    if request.param.startswith("zip"):
        with zipfile.ZipFile(archive, "w") as zipped:
            for file in files:
                zipped.write(file, f"run/{file.relative_to(saved)}")
    if request.param == "tar":
        with tarfile.open(archive, "w") as tarred:
            for file in files:
                tarred.add(file, f"run/{file.relative_to(saved)}")
    if request.param in ("zip", "tar"):
        yield Location(f"{request.param}://run::file://{archive}")
        return
    kind = READERS[request.param.endswith("nginx")]
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(started(kind))
        if request.param.startswith("zip"):
            server.data.joinpath("run.zip").write_bytes(archive.read_bytes())
            yield Location(f"zip://run::simplecache::{server.url('run.zip')}", {"http": server.storage_options})
            return
        for file in files:
            target = server.data / "run" / file.relative_to(saved)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
        url, options, wrapper = server.url("run"), server.storage_options, request.param.rpartition("::")[0]
        yield Location(f"{wrapper}::{url}", {"http": options}) if wrapper else Location(url, options)


def test_a_store_that_can_only_be_read_is_loaded_from(readable: Location) -> None:
    module = model(0.0)
    found = {"0.weight": torch.zeros(64, 64)}
    step = readable.join("iter_000000005/model")
    dcpfs.load(found, step.url, storage_options=step.storage_options, strict=False)
    assert bool((found["0.weight"] == 7.0).all())
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


def test_a_run_that_can_only_be_read_is_resumed_from(readable: Location) -> None:
    with dcpfs.DistributedCheckpointer(config(readable), access="read_only") as checkpointer:
        module = model(0.0)
        assert checkpointer.load(module, optimizer_of(module)) == 5
    assert all(bool((parameter == 7.0).all()) for parameter in module.parameters())


@pytest.mark.parametrize(
    "url",
    [
        "https://host.invalid/run",
        "simplecache::https://host.invalid/run",
        "zip://run::s3://bucket/run.zip",
        "tar://run::/nowhere/run.tar",
        "github://owner:name@main/run",
    ],
)
@pytest.mark.parametrize("mode", MODES)
def test_what_can_only_be_read_is_refused_before_anything_is_opened(url: str, mode: str) -> None:
    # None of these is there: to ask would fail, and late.
    place = Location(url)
    for make in (
        lambda: dcpfs.FsspecStorageWriter(place.url),
        lambda: dcpfs.save({"x": torch.ones(3)}, place.url),
        lambda: dcpfs.DistributedCheckpointer(config(place, mode)),
    ):
        with pytest.raises(UnsupportedOperationError, match="is read-only here; save to a store that can be written"):
            make()
