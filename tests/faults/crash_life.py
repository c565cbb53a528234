"""The life of a run whose saves fail where a plan says, whichever process does the saving.

Problem: which request of a save fails has to be said to a background process as well, and a new checkpointer for each
of a hundred requests would mean a hundred such processes.

Way taken: the plan is a file. Whoever opens the store of a save looks for it: this process through `armed`, a
background process through a ``sitecustomize`` on its path that calls `arm`. One checkpointer goes through all crash
points, each in the history that the one before has left: ::

    save clean … → plan → save fails → look with a new reader → no plan → save again → look at every object
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import pickle
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import s3fs
import torch

import dcpfs
from dcpfs.checkpointer import resume as resume_module
from dcpfs.checkpointer import save_step as save_step_module
from dcpfs.checkpointer.choices import AsyncMode, RngPolicy
from dcpfs.checkpointer.completeness import check_step
from dcpfs.checkpointer.layout import LATEST_NAME, MANIFEST_NAME, WRITING_NAME, parse_step_name, step_name
from dcpfs.checkpointer.retention import StepKind, _kind_of
from dcpfs.checkpointer.verification import verify_step
from dcpfs.config import Durability, RetryConfig, TransferConfig
from dcpfs.dcp import source as source_module
from dcpfs.storage.location import Location
from dcpfs.storage.opening import open_store
from dcpfs.storage.store import ObjectInfo, Store
from dcpfs.testing.faulty import FaultPlan, FaultyStore

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["LARGE_VALUES", "Life", "ReadFaultStore", "arm", "armed", "check_version", "fill", "opened", "states_of"]

PARTS = TransferConfig(part_bytes=64 << 10, concurrency=1, local_concurrency=1, durability=Durability.PAGE_CACHE)
"""One request after the other, so that the n-th is always the same."""
SMALL_VALUES, LARGE_VALUES = 20_000, 1_600_000
"""Of the largest tensor. The large one, 6.4 MB, goes to S3 in two parts: it takes none below 5 MiB."""
RETRY = RetryConfig(attempts=5)
"""A busy server is asked again. What fails as planned fails above the store, which tries nothing of that twice."""
FOLDER = "DCPFS_TESTS_CRASH_PLANS"

# --- the plan


def arm(folder: str) -> None:
    """Let every save of this process look for its plan in a folder."""
    setattr(save_step_module, "open_store", functools.partial(_open_planned, Path(folder)))  # noqa: B010 - not exported


@contextlib.contextmanager
def armed(folder: Path) -> Iterator[None]:
    """`arm` this process, and background processes that start meanwhile."""
    site = folder / "site"
    site.mkdir(parents=True)
    (site / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if any('dcpfs.background.worker' in each for each in sys.orig_argv):\n"
        "    from tests.faults.crash_life import arm\n"
        f"    arm(os.environ[{FOLDER!r}])\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FOLDER, str(folder))
        patch.syspath_prepend(site)
        patch.setattr(save_step_module, "open_store", functools.partial(_open_planned, folder))
        yield


def _open_planned(folder: Path, location: Location, **options: Any) -> Store:
    try:
        plan = pickle.loads((folder / "plan").read_bytes())
    except FileNotFoundError:
        plan = FaultPlan()
    return _PlannedStore(open_store(location, **options), plan, folder / "mutations")


class _PlannedStore(FaultyStore):
    """Tells a file which mutating calls there were."""

    def __init__(self, store: Store, plan: FaultPlan, told: Path) -> None:
        super().__init__(store, plan)
        self._told = told
        self._calls: list[str] = []

    def mutate(self, verb: str, path: str, action: Callable[[], Any]) -> Any:
        if not self.is_dead:
            self._calls.append(f"{verb} {path}\n")
        return super().mutate(verb, path, action)

    def close(self) -> None:
        self._told.write_text("".join(self._calls))
        super().close()


class ReadFaultStore(FaultyStore):
    """Fails at the n-th question of any kind, over all stores that share a counter; from then on it works again."""

    def __init__(self, store: Store, counter: Iterator[int], fails_at: int | None) -> None:
        super().__init__(store)
        self._counter = counter
        self._fails_at = fails_at

    def _ask(self, path: str) -> None:
        if next(self._counter) == self._fails_at:
            raise self._failure("read", path)

    def get(self, path: str) -> bytes:
        self._ask(path)
        return super().get(path)

    def get_tail(self, path: str, size_bytes: int) -> tuple[bytes, int]:
        self._ask(path)
        return super().get_tail(path, size_bytes)

    def read_into(self, path: str, start: int, buffers: Any) -> None:
        self._ask(path)
        super().read_into(path, start, buffers)

    def head(self, path: str) -> ObjectInfo:
        self._ask(path)
        return super().head(path)

    def exists(self, path: str) -> bool:
        self._ask(path)
        return super().exists(path)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        self._ask(prefix)
        return super().list(prefix)

    def list_directories(self, prefix: str = "") -> Iterator[str]:
        self._ask(prefix)
        return super().list_directories(prefix)


# --- the state


def states_of(version: int, values: int = SMALL_VALUES) -> dict[str, dict[str, Any]]:
    """A training state in which every value tells which save it is of."""
    return {
        "model": {"large": torch.full((values,), float(version)), "small": torch.full((7,), version + 0.5)},
        "optim": {"state.large.exp_avg": torch.full((300,), version - 0.25), "state.large.step": version},
        "dataloader": {"position": [version] * 20},
        "trainer": {"version": version, "note": f"of {version} " * 50},
    }


def fill(states: dict[str, dict[str, Any]], version: int) -> None:
    """Overwrite all values, as training does."""
    for key, values in states_of(version, states["model"]["large"].numel()).items():
        for name, value in values.items():
            if isinstance(value, torch.Tensor):
                states[key][name].copy_(value)
            else:
                states[key][name] = value


def check_version(found: Mapping[str, Mapping[str, Any]], version: int, values: int = SMALL_VALUES) -> None:
    """All values are those of a version.

    Raises:
        AssertionError: One is not.
    """
    for key, wanted in states_of(version, values).items():
        assert found[key].keys() == wanted.keys()
        for name, value in wanted.items():
            assert _equal(found[key][name], value), f"{key}/{name} of version {version}"


def _equal(found: object, wanted: object) -> bool:
    if isinstance(wanted, torch.Tensor):
        return isinstance(found, torch.Tensor) and found.dtype == wanted.dtype and torch.equal(found, wanted)
    return type(found) is type(wanted) and found == wanted


# --- the run


class Life:
    """A run with a checkpointer, and what it should find in its directory.

    Args:
        place: The run's directory.
        mode: Who saves.
        folder: That of `armed`.
        values: Of the largest tensor.

    Attributes:
        versions: Of the steps that should be there, as far as retention keeps them.
    """

    def __init__(self, place: Location, mode: str, folder: Path, values: int = SMALL_VALUES) -> None:
        self.place = place
        self.versions: dict[int, int] = {}
        self._folder = folder
        self._values = values
        self._config = dcpfs.CheckpointConfig(
            save_dir=place.url,
            storage_options=place.storage_options,
            async_mode=AsyncMode(mode),
            rng=RngPolicy.NONE,
            keep_last=2,
            transfer=PARTS,
            retry=RETRY,
        )
        self._states = states_of(0, values)
        self._checkpointer = dcpfs.DistributedCheckpointer(self._config)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._checkpointer.close()

    def save(self, step: int, version: int, plan: FaultPlan | None = None) -> Exception | None:
        """One save to its end; what it raised."""
        path = self._folder / "plan"
        if plan is not None:
            path.write_bytes(pickle.dumps(plan))
        try:
            fill(self._states, version)
            self._checkpointer.save_state(step, dict(self._states))
            self._checkpointer.maybe_wait_for_staging()
            fill(self._states, -1)
            self._checkpointer.wait()
        except Exception as error:
            return error
        finally:
            path.unlink(missing_ok=True)
        return None

    def save_clean(self, step: int, version: int) -> None:
        """One save that has to succeed."""
        error = self.save(step, version)
        if error is not None:
            raise AssertionError(f"the save of step {step} failed, and nothing was wrong: {error}") from error
        self.versions[step] = version
        self.versions = dict(sorted(self.versions.items())[-2:])

    def calls(self) -> list[tuple[str, str]]:
        """Mutating calls of the last save: verb and name."""
        lines = (self._folder / "mutations").read_text().splitlines()
        return [(verb, name) for verb, _, name in (line.partition(" ") for line in lines)]

    def uploads(self) -> set[str]:
        """Uploads in parts, below the run on S3, that are neither complete nor aborted."""
        bucket, _, prefix = self.place.path.partition("/")
        filesystem = s3fs.S3FileSystem(**self.place.storage_options)
        found = filesystem.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix).get("Uploads") or []
        return {each["UploadId"] for each in found if each["Key"].startswith(f"{prefix}/")}

    def resume(self, fails_at: int | None = None) -> tuple[int, int]:
        """Step and version that a new reader resumes from.

        Args:
            fails_at: Which of its questions to the store is not answered.

        Raises:
            AssertionError: It is not all of one save.
        """
        self.questions = itertools.count(1)

        def open_counted(location: Location, **options: Any) -> Store:
            return ReadFaultStore(open_store(location, **options), self.questions, fails_at)

        found = states_of(0, self._values)
        with pytest.MonkeyPatch.context() as patch:
            for module in (resume_module, source_module):
                patch.setattr(module, "open_store", open_counted)
            with dcpfs.DistributedCheckpointer(self._config, access="read_only") as reader:
                step = reader.load_state(dict(found))
        version = found["trainer"]["version"]
        assert isinstance(version, int)
        check_version(found, version, self._values)
        return step, version

    def check_step(self, step: int) -> int:
        """Version of a step, which is whole."""
        with opened(self.place) as store:
            status = check_step(store, step)
            assert status.is_complete, status.describe()
            assert verify_step(store, status) == []
        where = self.place.join(step_name(step))
        trainer: Any = dcpfs.read(where.join("trainer").url, storage_options=where.storage_options)
        version = trainer["user"]["version"]
        assert isinstance(version, int)
        return version

    def check_whole(self) -> None:
        """Every step there is whole, or a leftover that retention takes for one."""
        with opened(self.place) as store:
            for name in store.list_directories():
                step = parse_step_name(name)
                assert step is not None, f"{name} is no step"
                status = check_step(store, step)
                if status.is_complete:
                    assert verify_step(store, status) == []
                else:
                    assert not status.files or _kind_of(status) is StepKind.LEFTOVER, status.describe()

    def check_clean(self) -> None:
        """There is not one object beside those of the steps that should be there, and the pointer names the newest."""
        with opened(self.place) as store:
            expected = {LATEST_NAME}
            for step in self.versions:
                status = check_step(store, step)
                assert status.is_complete, status.describe()
                assert status.manifest is not None
                expected |= {f"{step_name(step)}/{name}" for name in (*status.manifest.files, MANIFEST_NAME)}
            # Beside a manifest it means nothing.
            allowed = {f"{step_name(step)}/{WRITING_NAME}" for step in self.versions}
            found = {info.path for info in store.list()}
            assert expected - found == set()
            assert found - expected - allowed == set()
            assert store.get(LATEST_NAME).decode() == f"{step_name(max(self.versions))}\n"


@contextlib.contextmanager
def opened(place: Location) -> Iterator[Store]:
    """The store at a place."""
    store = open_store(place, transfer=PARTS, retry=RETRY)
    try:
        yield store
    finally:
        store.close()
