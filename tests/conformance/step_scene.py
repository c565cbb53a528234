"""Steps on a store, as our own saves, other tools, dead saves and users' hands leave them."""

from __future__ import annotations

import functools
import tempfile
import threading
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.distributed.checkpoint.state_dict_saver import save

from dcpfs.checkpointer.layout import LATEST_NAME, MANIFEST_NAME, WRITING_NAME, step_name
from dcpfs.checkpointer.manifest import FileRecord, Manifest, encode_manifest
from dcpfs.storage.location import Location
from dcpfs.storage.store import ObjectInfo, Store
from dcpfs.testing.recording import RecordingStore
from dcpfs.testing.servers import SeaweedServer

__all__ = ["FOREIGN_KEYS", "Scene", "TurningStore", "foreign_files", "location_on"]

FOREIGN_KEYS = ("model", "optim")


def location_on(backend: str, tmp_path: Path, seaweed: Callable[[], SeaweedServer]) -> Location:
    """A place nobody has used, on local files, in memory or on a real S3 server."""
    if backend == "local":
        return Location(tmp_path / "run")
    if backend == "memory":
        return Location(f"memory://{uuid.uuid4().hex}/run")
    server = seaweed()
    return Location(server.url(f"test-{uuid.uuid4().hex}"), server.storage_options)


@functools.cache
def foreign_files() -> Mapping[str, bytes]:
    """A step as plain `dcp.save` per key, and a trainer's own pickles, make it. By name relative to the step."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        for number, key in enumerate(FOREIGN_KEYS):
            state = {"weight": torch.arange(4096.0) + number, "bias": torch.ones(3), "steps": 7}
            save(state, checkpoint_id=root / key)
        (root / "dataloader").mkdir()
        (root / "dataloader" / "rank_0.pkl").write_bytes(b"position 0")
        return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


class Scene:
    """Writes steps, whole and torn, through a store that records what is asked of it.

    Attributes:
        store: The recording store.
    """

    def __init__(self, store: Store) -> None:
        self.store = RecordingStore(store)

    def put(self, path: str, content: bytes | str = b"") -> None:
        self.store.put(path, [content.encode() if isinstance(content, str) else content])

    def put_all(self, files: Mapping[str, bytes]) -> None:
        if len(files) < 16:
            for path, content in files.items():
                self.put(path, content)
            return
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(self.put, files, files.values()))

    def commit(
        self,
        iteration: int,
        *,
        metric: float | None = None,
        count: int = 2,
        size_bytes: int = 500,
        latest: bool = True,
        exports: bool = False,
    ) -> Manifest:
        """One of our own steps: data files, metadata, a rank file, the manifest last; with ``exports`` the model alone.

        Such a step is never named by ``latest_checkpoint.txt``.
        """
        names = [f"model/__0_{number}.distcp" for number in range(count)] + ["model/.metadata"]
        if not exports:
            names += ["trainer/.metadata", "trainer/__0_0.distcp", "dataloader/rank_0.pkl"]
        files = {name: f"{iteration} {name} ".encode() * (size_bytes // 10) for name in names}
        step = step_name(iteration)
        self.put_all({f"{step}/{name}": content for name, content in files.items()})
        manifest = Manifest(
            uuid.uuid4().hex,
            iteration,
            1,
            {name: FileRecord(len(content), zlib.crc32(content)) for name, content in files.items()},
            ("model",) if exports else ("model", "trainer"),
            {} if exports else {"dataloader": {0: "dataloader/rank_0.pkl"}},
            metric=metric,
        )
        self.put(f"{step}/{MANIFEST_NAME}", encode_manifest(manifest))
        if latest and not exports:
            self.name_latest(iteration)
        return manifest

    def foreign(self, iteration: int) -> None:
        self.put_all({f"{step_name(iteration)}/{name}": content for name, content in foreign_files().items()})

    def dead(self, iteration: int) -> None:
        """What a save leaves that was killed half-way."""
        self.put(f"{step_name(iteration)}/{WRITING_NAME}", "some save\n")
        self.put(f"{step_name(iteration)}/model/__0_0.distcp", b"half")

    def name_latest(self, iteration: int) -> None:
        self.put(LATEST_NAME, f"{step_name(iteration)}\n")

    def delete(self, iteration: int, name: str) -> None:
        self.store.delete([f"{step_name(iteration)}/{name}"])

    def cut(self, iteration: int, name: str, by_bytes: int = 1) -> None:
        path = f"{step_name(iteration)}/{name}"
        self.put(path, self.store.get(path)[:-by_bytes])

    def flip(self, iteration: int, name: str, at: int) -> None:
        path = f"{step_name(iteration)}/{name}"
        content = bytearray(self.store.get(path))
        content[at] ^= 4
        self.put(path, bytes(content))

    def names(self, directory: str = "") -> set[str]:
        return {info.path for info in self.store.list(directory)}

    def steps(self) -> list[str]:
        return sorted({name.split("/")[0] for name in self.names() if "/" in name})


class TurningStore(RecordingStore):
    """Lets something happen right before a call: what another process does in between.

    Args:
        store: Does the work.
        verb: Name of the method.
        path: What it is called with, or its end.
        event: What happens, once.
    """

    def __init__(self, store: Store, verb: str, path: str, event: Callable[[], object]) -> None:
        super().__init__(store)
        self._when = (verb, path)
        self._event: Callable[[], object] | None = event
        self._turn = threading.Lock()

    def _before(self, verb: str, path: str) -> None:
        with self._turn:
            event = self._event
            if event is None or verb != self._when[0] or not path.endswith(self._when[1]):
                return
            self._event = None
        event()

    def get(self, path: str) -> bytes:
        self._before("get", path)
        return super().get(path)

    def head(self, path: str) -> ObjectInfo:
        self._before("head", path)
        return super().head(path)

    def exists(self, path: str) -> bool:
        self._before("exists", path)
        return super().exists(path)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        self._before("list", prefix)
        return super().list(prefix)
