"""What dcpfs writes, a process that can't import dcpfs reads; and the other way round."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

import dcpfs
from dcpfs.testing.servers import SeaweedServer
from tests.peers.exchange import HAS_CONNECTOR, HAS_MULTI_STORAGE, Place, connect_peers
from tests.peers.sample_state import assert_same, full_state, odd_state, template_of, textual, trained_state

ROOT = Path(__file__).parents[2]
SAMPLE = {**full_state(), **odd_state(), "trained": trained_state()}
PEERS = (
    *("files", "fsspec"),
    *(("connector",) if HAS_CONNECTOR else ()),
    *(("multi storage",) if HAS_MULTI_STORAGE else ()),
)


def _url_for(peer: str, place: Place) -> str:
    """As the peer takes it; see `connect_peers`."""
    if peer != "multi storage":
        return place.url
    (profile,) = json.loads(Path(os.environ["MSC_CONFIG"]).read_text())["profiles"]
    return f"msc://{profile}/{place.url.removeprefix('s3://').partition('/')[2]}"


def test_torch_alone_reads_what_we_wrote_and_we_read_what_it_wrote(tmp_path: Path, seaweed: SeaweedServer) -> None:
    """Local for torch's own file system, S3 for the others. One process for all, since each imports torch."""

    def place(peer: str) -> Place:
        name = uuid.uuid4().hex
        if peer == "files":
            return Place("local", str(tmp_path / name))
        return Place("s3", seaweed.url(name), seaweed.storage_options)

    ours, theirs = {peer: place(peer) for peer in PEERS}, {peer: place(peer) for peer in PEERS}
    for each in ours.values():
        dcpfs.save(SAMPLE, each.url, storage_options=each.options)
    jobs = [("read", peer, each) for peer, each in ours.items()]
    jobs += [("write", peer, each) for peer, each in theirs.items()]
    with connect_peers(seaweed):
        texts = [json.dumps([verb, peer, _url_for(peer, each), dict(each.options)]) for verb, peer, each in jobs]
        command = [sys.executable, "-m", "tests.peers.torch_alone", *texts]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    if done.returncode != 0:
        pytest.fail(done.stderr[-4000:])
    for each in theirs.values():
        template = template_of(SAMPLE)
        assert isinstance(template, dict)
        dcpfs.load(template, each.url, storage_options=each.options)
        assert_same(template, SAMPLE)
        assert_same(dcpfs.read(each.url, storage_options=each.options), textual(SAMPLE))
