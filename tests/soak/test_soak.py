"""Two hundred saves of a state that grows and shrinks, with retention, on a real S3 server: what they hold is flat."""

from __future__ import annotations

import os
import statistics
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import botocore.session
import pytest
import torch

import dcpfs
from dcpfs.checkpointer.choices import AsyncMode, RngPolicy
from dcpfs.checkpointer.completeness import check_step
from dcpfs.checkpointer.layout import LATEST_NAME, MANIFEST_NAME, step_name
from dcpfs.checkpointer.process_saver import ProcessSaver
from dcpfs.storage.location import Location
from dcpfs.storage.opening import open_store
from dcpfs.testing.servers import SeaweedServer

MB = 1 << 20
SAVES = 200
PERIOD = 25
"""Saves in which the state grows from its smallest to its largest and back: two such in each quarter."""
KEEP_LAST, KEEP_EVERY = 3, 40
PARTS = dcpfs.TransferConfig(part_bytes=5 * MB)
"""The largest states, of 10 MB, are uploaded in several, the smallest in one request."""


def rows_at(step: int) -> int:
    """How many rows the state has: up and down."""
    phase = step % PERIOD
    return 64 + min(phase, PERIOD - phase) * 200


def state_at(step: int) -> dict[str, Any]:
    """Tensors whose number and size depend on the step, and whose values do too."""
    rows = rows_at(step)
    state: dict[str, Any] = {f"layer{number}": torch.full((rows, 256), step + number / 8) for number in range(3)}
    state["embedding"] = torch.arange(rows * 256, dtype=torch.float32).reshape(rows, 256) + step
    state |= {f"extra{number}": torch.full((number + 1,), float(step)) for number in range(rows // 100)}
    state["step"] = step
    return state


def held_by(pid: int) -> dict[str, int]:
    """What a process holds."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {
        "resident": int(status["VmRSS"].split()[0]) * 1024,
        "threads": int(status["Threads"]),
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "shared mappings": Path(f"/proc/{pid}/maps").read_text().count("dcpfs-staging"),
    }


def staging_names() -> set[str]:
    """Shared memory of dcpfs that has a name."""
    return {name for name in os.listdir("/dev/shm") if "dcpfs" in name}


@contextmanager
def admin_of(server: SeaweedServer) -> Iterator[Any]:
    client = botocore.session.get_session().create_client(
        "s3",
        region_name=server.region,
        endpoint_url=server.endpoint_url,
        aws_access_key_id=server.admin_access_key,
        aws_secret_access_key=server.admin_secret_key,
    )
    try:
        yield client
    finally:
        client.close()


def check_flat(rows: list[dict[str, int]]) -> str:
    """The last quarter holds what the second one held, but for what allocators and pools move by.

    In the first, buffers and pools reach their size. Between the other two lie fifty saves, of 250 MB in all.
    """
    quarter = len(rows) // 4
    told = []
    for name in rows[0]:
        first = statistics.median(row[name] for row in rows[quarter : 2 * quarter])
        last = statistics.median(row[name] for row in rows[-quarter:])
        most = {"resident": 16 * MB, "threads": 1, "descriptors": 2, "shared mappings": 0}[name]
        assert last - first <= most, f"{name} grew from {first} to {last}"
        unit, scale = (" MB", MB) if name == "resident" else ("", 1)
        told.append(f"{name} {first / scale:.4g} → {last / scale:.4g}{unit}")
    return "; ".join(told)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", [AsyncMode.DISABLED, AsyncMode.ASYNC, AsyncMode.ASYNC_WITH_PINNED_MEM])
def test_cases_39_46_62_two_hundred_saves_cost_no_more_than_the_first(seaweed: SeaweedServer, mode: AsyncMode) -> None:
    started = time.monotonic()
    name = f"soak-{uuid.uuid4().hex}"
    place = Location(seaweed.url(name), seaweed.storage_options)
    config = dcpfs.CheckpointConfig(
        save_dir=place.url,
        storage_options=place.storage_options,
        async_mode=mode,
        rng=RngPolicy.NONE,
        keep_last=KEEP_LAST,
        keep_every=KEEP_EVERY,
        transfer=PARTS,
    )
    names_before = staging_names()
    held: dict[str, list[dict[str, int]]] = {}
    size_bytes = 0
    with dcpfs.DistributedCheckpointer(config) as checkpointer:
        saver = checkpointer._saver
        pids = {"trainer": os.getpid()}
        if isinstance(saver, ProcessSaver):
            assert saver.pid is not None
            pids["background process"] = saver.pid
        for step in range(1, SAVES + 1):
            state = state_at(step)
            size_bytes += sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))
            checkpointer.save_state(step, {"model": state, "dataloader": {"position": step}})
            checkpointer.maybe_wait_for_staging()
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.fill_(-1)
            del state
            checkpointer.wait()
            for role, pid in pids.items():
                held.setdefault(role, []).append(held_by(pid))
        if isinstance(saver, ProcessSaver):
            assert saver.pid == pids["background process"], "it was replaced"
    kept = sorted({*range(KEEP_EVERY, SAVES + 1, KEEP_EVERY), *range(SAVES - KEEP_LAST + 1, SAVES + 1)})
    check_kept(seaweed, name, place, kept)
    assert staging_names() <= names_before
    if isinstance(saver, ProcessSaver):
        for role, rows in held.items():
            assert all(row["shared mappings"] for row in rows[-KEEP_LAST:]), (
                f"{role} maps nothing that this could count"
            )
    minutes = (time.monotonic() - started) / 60
    print(f"{mode.value}: {SAVES} saves of {size_bytes / 1e9:.2f} GB in all, {minutes:.1f} min")
    for role, rows in held.items():
        print(f"  {role}: {check_flat(rows)}")


def uploads_of(admin: Any, server: SeaweedServer, name: str) -> list[Any]:
    """Uploads that were begun below a name, and neither ended nor aborted."""
    found: list[Any] = admin.list_multipart_uploads(Bucket=server.bucket, Prefix=name).get("Uploads", [])
    return found


def check_kept(server: SeaweedServer, name: str, place: Location, kept: list[int]) -> None:
    """There is nothing but the steps that should be kept, and each loads bit for bit."""
    expected = {LATEST_NAME}
    store = open_store(place)
    try:
        for step in kept:
            status = check_step(store, step)
            assert status.is_complete, status.describe()
            assert status.manifest is not None
            expected |= {f"{step_name(step)}/{file}" for file in (*status.manifest.files, MANIFEST_NAME)}
        listed = list(store.list())
        assert {info.path for info in listed} == expected
        assert max(info.size_bytes for info in listed) > 5 * MB, "no file was uploaded in parts"
    finally:
        store.close()
    with admin_of(server) as admin:
        # One that is there is listed: an empty list means that there is none.
        upload = admin.create_multipart_upload(Bucket=server.bucket, Key=f"{name}/control")["UploadId"]
        assert [each["UploadId"] for each in uploads_of(admin, server, name)] == [upload]
        admin.abort_multipart_upload(Bucket=server.bucket, Key=f"{name}/control", UploadId=upload)
        assert uploads_of(admin, server, name) == []
    sizes = set()
    for step in kept:
        found = dcpfs.read(place.join(f"{step_name(step)}/model").url, storage_options=place.storage_options)
        wanted = state_at(step)
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            other = found[key]
            same = torch.equal(other, value) if isinstance(value, torch.Tensor) else other == value  # type: ignore[arg-type]
            assert same, f"{key} of step {step}"
        sizes.add(rows_at(step))
    assert len(sizes) > 3
