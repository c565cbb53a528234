"""`dcp.async_save` of two ranks, in a thread and in torch's background process, and saves without collectives."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from dcpfs.storage.location import Location
from tests.multiprocess.gloo import run_ranks


def _state(rank: int, number: int) -> dict[str, Any]:
    return {
        "shared": torch.arange(5000.0) + number,
        f"own{rank}": {"w": torch.full((300, 40), float(10 * number + rank)), "list": [rank, number]},
        "epoch": number,
    }


def _expected(number: int) -> dict[str, Any]:
    return {key: value for rank in range(2) for key, value in _state(rank, number).items()}


def _change(state: dict[str, Any], rank: int, number: int) -> None:
    new = _state(rank, number)
    state["shared"].copy_(new["shared"])
    state[f"own{rank}"]["w"].copy_(new[f"own{rank}"]["w"])
    state[f"own{rank}"]["list"][:] = new[f"own{rank}"]["list"]
    state["epoch"] = number


def _save_three_times(
    urls: list[str], options: Mapping[str, object], kind: str, stager_kind: str
) -> None:  # runs in each rank
    import torch.distributed as dist
    from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse, async_save

    import dcpfs

    rank = dist.get_rank()
    writer = dcpfs.FsspecStorageWriter(urls[0], storage_options=options)
    stager: Any = None
    if stager_kind == "default":
        stager = DefaultStager(StagingOptions(False, True, True, False))
    elif stager_kind == "blocking":
        stager = BlockingAsyncStager()
    state = _state(rank, 0)
    try:
        for number, url in enumerate(urls):
            response = async_save(
                state,
                checkpoint_id=url,
                storage_writer=writer,
                async_checkpointer_type=AsyncCheckpointerType(kind),
                async_stager=stager,
            )
            upload: Any = response
            if isinstance(response, AsyncSaveResponse):
                response.staging_completion.result(180)
                upload = response.upload_completion
            _change(state, rank, number + 1)
            upload.result(180)
        # What stands there is refused, the message comes back, and the process goes on.
        again: Any = async_save(
            state, checkpoint_id=urls[0], storage_writer=writer, async_checkpointer_type=AsyncCheckpointerType(kind)
        )
        failure = again.exception(180)
        assert "CheckpointExistsError" in str(failure)
    finally:
        if stager is not None:
            stager.close()


@pytest.mark.parametrize(
    ("kind", "stager"),
    [(kind, stager) for kind in ("thread", "process") for stager in ("none", "default", "blocking")],
)
def test_case_16_55_async_saves_of_two_ranks(tmp_path: Path, kind: str, stager: str) -> None:
    import dcpfs
    from tests.peers.sample_state import assert_same

    urls = [str(tmp_path / f"c{number}") for number in range(3)]
    run_ranks(_save_three_times, 2, urls, {}, kind, stager)
    for number, url in enumerate(urls):
        found = dcpfs.read(url)
        expected = _expected(number)
        assert_same({key: found[key] for key in expected}, expected)
        assert set(found) == set(expected)


def test_case_76_the_background_process_gets_the_options(s3_prefix: Location) -> None:
    import dcpfs
    from tests.peers.sample_state import assert_same

    urls = [s3_prefix.join(f"c{number}").url for number in range(2)]
    run_ranks(_save_three_times, 2, urls, s3_prefix.storage_options, "process", "none")
    for number, url in enumerate(urls):
        found = dcpfs.read(url, storage_options=s3_prefix.storage_options)
        expected = _expected(number)
        assert_same({key: found[key] for key in expected}, expected)


def _without_collectives(url: str, writer_kind: str) -> None:  # runs in each rank
    import torch.distributed as dist
    from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    import dcpfs
    from tests.peers.sample_state import assert_same, template_of

    rank = dist.get_rank()
    state = _state(rank, rank)
    own: Any = dcpfs.FsspecStorageWriter(url) if writer_kind == "own" else FileSystemWriter(url)
    save(state, storage_writer=own, use_collectives=False)
    dist.barrier()
    readers: list[Any] = [dcpfs.FsspecStorageReader(url)]
    if hasattr(FileSystemReader, "read_metadata"):
        readers.append(FileSystemReader(url))
    for reader in readers:
        template = template_of(state)
        assert isinstance(template, dict)
        load(template, storage_reader=reader)
        assert_same(template, state)


@pytest.mark.parametrize("writer", ["own", "torch"])
def test_each_rank_by_itself_in_both_directions(tmp_path: Path, writer: str) -> None:
    run_ranks(_without_collectives, 2, str(tmp_path / "c"), writer)
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == [
        *("__0.metadata", "__0_0.distcp", "__1.metadata", "__1_0.distcp"),
    ]
