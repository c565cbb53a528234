"""What a load asks of the store, counted at the store, for checkpoints of torch's writer and of dcpfs's own."""

from __future__ import annotations

import dataclasses
import uuid

import pytest
import torch
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import dcpfs
from dcpfs.dcp import source as source_module
from dcpfs.storage.capabilities import Capabilities
from dcpfs.storage.location import Location
from dcpfs.storage.opening import open_store
from dcpfs.storage.store import Store
from dcpfs.testing.recording import RecordingStore

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class _Remote(RecordingStore):
    """One whose requests cost a round trip."""

    @property
    def capabilities(self) -> Capabilities:
        return dataclasses.replace(super().capabilities, remote=True)


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> list[RecordingStore]:
    """The stores that loads have opened."""
    opened: list[RecordingStore] = []

    def record(location: Location, *, transfer: dcpfs.TransferConfig, retry: dcpfs.RetryConfig) -> Store:
        opened.append(_Remote(open_store(location, transfer=transfer, retry=retry)))
        return opened[-1]

    monkeypatch.setattr(source_module, "open_store", record)
    return opened


def _llama(layers: int) -> dict[str, torch.Tensor]:
    """Shapes of a small Llama, in bfloat16: 24 MB, and 23 MB a layer."""
    hidden, inner, words = 1024, 2816, 6000
    shapes: dict[str, tuple[int, ...]] = {"embed": (words, hidden), "head": (words, hidden), "norm": (hidden,)}
    for number in range(layers):
        for name in ("q", "o"):
            shapes[f"layers.{number}.{name}"] = (hidden, hidden)
        for name in ("k", "v"):
            shapes[f"layers.{number}.{name}"] = (hidden // 4, hidden)
        for name in ("gate", "up"):
            shapes[f"layers.{number}.{name}"] = (inner, hidden)
        shapes[f"layers.{number}.down"] = (hidden, inner)
        shapes[f"layers.{number}.n1"] = shapes[f"layers.{number}.n2"] = (hidden,)
    torch.manual_seed(1)
    return {key: torch.randn(shape).bfloat16() for key, shape in shapes.items()}


@pytest.mark.parametrize("writer", ["torch", "dcpfs"])
def test_case_70_a_full_load_takes_few_requests_whoever_wrote_it(stores: list[RecordingStore], writer: str) -> None:
    url = f"memory://{uuid.uuid4().hex}"
    state = _llama(6)
    if writer == "torch":
        dcp_save(dict(state), storage_writer=FsspecWriter(url))
    else:
        dcpfs.save(state, url)
    target = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    report = dcpfs.load(target, url)
    assert all(torch.equal(target[key], tensor) for key, tensor in state.items())
    store = stores[-1]
    assert store.verbs["read_into"] == report.requests <= 34  # 32 at once
    assert store.verbs["get"] == 1
    assert store.verbs["head"] == store.verbs["list"] == 0
    assert store.verbs["exists"] == (writer == "torch")  # whether ranks of torch saved over it by themselves
    assert store.bytes_read <= 1.01 * sum(tensor.nbytes for tensor in state.values())
