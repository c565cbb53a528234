"""A name for a save without collectives, in one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from dcpfs.dcp.joint_save import begin_joint_save, find_world_size
from dcpfs.format.index import RankSave


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=c10d.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_without_a_group_a_save_has_no_name() -> None:
    assert begin_joint_save(0, "memory://a").note == RankSave(0, 1)
    assert begin_joint_save(3, "memory://a").note == RankSave(3)
    begin_joint_save(0, "memory://a").count_published()


@pytest.mark.usefixtures("group")
def test_a_save_is_counted_when_it_is_published() -> None:
    first, again = (begin_joint_save(0, "memory://a") for _ in range(2))
    assert first.note == again.note
    again.count_published()
    later, other = begin_joint_save(0, "memory://a").note, begin_joint_save(0, "memory://b").note
    assert later.name is not None
    assert later.name != first.note.name
    assert later.name.rpartition("-")[0] == (first.note.name or "").rpartition("-")[0]
    assert other.name == first.note.name


@pytest.mark.usefixtures("group")
def test_the_world_is_that_of_the_default_group() -> None:
    assert find_world_size(0) == 1
    assert find_world_size(1) is None


@pytest.mark.usefixtures("group")
def test_a_store_that_is_gone_costs_the_name_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun = begin_joint_save(0, "memory://a")

    def fail(*args: object) -> None:
        raise RuntimeError("connection lost")

    monkeypatch.setattr(c10d.Store, "add", fail)
    monkeypatch.setattr(c10d.PrefixStore, "add", fail, raising=False)
    begun.count_published()
    assert begin_joint_save(0, "memory://a").note == RankSave(0, 1)
    assert caplog.text.count("connection lost") == 2
