"""Memory that two processes see; here two mappings of one process, which is the same to the kernel."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from dcpfs.background import free_memory
from dcpfs.background.shared_block import SharedBlock
from dcpfs.errors import StorageFullError
from tests.open_files import open_links


def descriptors() -> int:
    """Those of blocks that this process has."""
    gc.collect()
    return sum("dcpfs-staging" in target for target in open_links())


@pytest.mark.parametrize("has_call", [True, False])
def test_cases_46_52_one_descriptor_a_block_and_no_name(monkeypatch: pytest.MonkeyPatch, has_call: bool) -> None:
    if not has_call:
        monkeypatch.delattr(os, "memfd_create", raising=False)
    before = descriptors()
    own = SharedBlock.create(1 << 20)
    other = SharedBlock(os.dup(own.descriptor), own.size_bytes)
    own.tensor.fill_(7)
    assert other.tensor.eq(7).all()
    assert os.fstat(own.descriptor).st_nlink == 0
    assert before < descriptors() <= before + 4  # a mapping has one, too
    view = own.tensor[5:9]
    own.close()
    own.close()
    assert view.eq(7).all()  # whoever still holds a view keeps the memory
    assert other.tensor.eq(7).all()
    other.close()
    del view, own, other
    assert descriptors() == before


def test_discarded_memory_is_given_back_while_the_other_side_maps_it() -> None:
    own = SharedBlock.create(8 << 20)
    other = SharedBlock(os.dup(own.descriptor), own.size_bytes)
    own.tensor.fill_(7)
    used = os.fstat(other.descriptor).st_blocks
    own.discard()
    own.close()
    assert used * 512 >= 8 << 20
    assert os.fstat(other.descriptor).st_blocks == 0
    assert other.tensor.eq(0).all()
    other.close()


def test_an_empty_block() -> None:
    block = SharedBlock.create(0)
    assert block.tensor.shape == (0,)
    block.discard()
    block.close()


def test_case_68_a_full_dev_shm_is_no_bus_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    block = SharedBlock.create(4096)
    block.tensor.fill_(1)
    assert os.readlink(f"/proc/self/fd/{block.descriptor}").startswith(str(tmp_path))
    assert "/dev/shm has 0.00 GB free: the copy of the state goes to the temporary directory" in caplog.text
    block.close()
    assert list(tmp_path.iterdir()) == []


def test_case_68_more_than_there_is_is_refused_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_memory, "available_bytes", lambda: 1 << 20)
    before = descriptors()
    with pytest.raises(StorageFullError, match="set async_mode to 'disabled'"):
        SharedBlock.create(1 << 20)
    assert descriptors() == before
