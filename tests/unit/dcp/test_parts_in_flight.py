"""A large file goes up in several parts at once, whatever the shape of the state."""

from __future__ import annotations

import threading

import pytest
import torch

import dcpfs
from dcpfs.dcp import writer as writer_module
from tests.unit.dcp.memory_store import MemoryStore

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

_AT_ONCE = 4


@pytest.mark.parametrize("tensors", [1, 3, 200])
def test_case_69_parts_of_one_file_are_written_at_once(monkeypatch: pytest.MonkeyPatch, tensors: int) -> None:
    """The first parts end only when four are under way: a writer that goes part by part would wait in vain."""
    barrier = threading.Barrier(_AT_ONCE, timeout=60)
    tickets = iter(range(1 << 30))

    def meet(verb: str, path: str) -> None:
        if verb == "part" and path != ".metadata" and next(tickets) < _AT_ONCE:
            barrier.wait()

    store = MemoryStore(part_bytes=200_000, hook=meet)
    monkeypatch.setattr(writer_module, "open_store", lambda location, **_: store)
    state = {f"k{n}": torch.full((600_000 // tensors,), float(n)) for n in range(tensors)}
    dcpfs.save(state, "memory://x/y")
    assert set(store.objects) == {".metadata", "__0_0.distcp"}
    assert not barrier.broken
