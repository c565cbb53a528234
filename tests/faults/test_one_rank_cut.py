"""One rank of several is cut off from the store, while the ranks still reach each other.

The server knows each rank by its access key, and lets down every request of one of them: from a chosen one on, until
all ranks have said that their save or load has failed. Then it hears that rank again, and they all go on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dcpfs.checkpointer.layout import MANIFEST_NAME, step_name
from dcpfs.testing.s3_exchange import S3Request, Stage
from dcpfs.testing.s3_faults import Action, Drop, Hang
from dcpfs.testing.scripted_s3 import ScriptedS3Server
from tests.faults.kill_storm import CHANGES, ForkedRanks, Report, Storm, open_gate

THREAD, PROCESS = "async", "async_with_pinned_mem"
WORLD_SIZE = 3
SILENCE_SECONDS = 2.0
RETRY: dict[str, Any] = {
    "attempts": 5,
    "initial_backoff_seconds": 0.01,
    "max_backoff_seconds": 0.02,
    "connect_timeout_seconds": SILENCE_SECONDS,
    "read_timeout_seconds": SILENCE_SECONDS,
}
BOUND_SECONDS = 2 * RETRY["attempts"] * SILENCE_SECONDS + 24.0
"""Within which all raise: the request that failed, one that tidies up, and what a busy machine may add."""
RESET, SILENT = Drop(Stage.HEAD), Hang(Stage.HEAD)
"""Requests that hang arrive when the network is whole again, long after everybody has given them up."""


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL", logger="dcpfs")


Begins = Callable[[S3Request], bool]


class CutOff:
    """Which requests are let down: all of a rank, from the first one that begins it.

    Args:
        rank: The rank.
        begins: Whether the cut begins with a request.

    Attributes:
        began_at: When it began, on the monotonic clock; 0: it has not.
    """

    def __init__(self, rank: int, begins: Begins) -> None:
        self.began_at = 0.0
        self._key = f"RANK{rank}"
        self._begins = begins
        self._lock = threading.Lock()

    def __call__(self, request: S3Request) -> bool:
        if request.access_key != self._key:
            return False
        with self._lock:
            if not self.began_at and self._begins(request):
                self.began_at = time.monotonic()
            return self.began_at > 0.0


def run_cut(storm: Storm, server: ScriptedS3Server, rank: int, action: Action, begins: Begins, resumes: int) -> Report:
    """A round in which a rank is cut off, until all have failed once; then a resume would find a step."""
    cut = CutOff(rank, begins)
    fault = server.fail(cut, action, times=None)

    def hear(report: Report, asks: int, words: list[str]) -> None:
        if words[0] != "failed" or fault.released.is_set():
            return
        report.struck_at = cut.began_at
        ranks = range(report.order.world_size)
        if all(report.words(each, "failed") for each in ranks):
            assert time.monotonic() - cut.began_at < BOUND_SECONDS
            storm.check_resumable(resumes)
            fault.release()
            if report.words(asks, "failed")[0][0] != "load":
                for each in ranks:
                    open_gate(report.order, each, 1)

    report = storm.run(saves=3, on_line=hear, settings={"retry": RETRY, "pauses": True}, cut_off=rank)
    assert fault.released.is_set(), report
    assert fault.hits >= RETRY["attempts"]
    report.check()
    for each in report.ranks:
        ((_, kind, *text),) = report.words(each, "failed")
        said = " ".join(text)
        assert kind in {"StorageError:", "CheckpointError:", "RankError:"}, said
        assert "Can't " in said
        assert f"s3://dcpfs/{storm.name}" in said
        assert "check network and endpoint" in said
    return report


def data_of(step: int, *, large: bool) -> Begins:
    """A rank's data of a step: its first change; or its second part, when an upload has begun."""
    where = f"/{step_name(step)}/model/__"
    return lambda request: (
        where in request.key and request.operation in CHANGES and (not large or request.part_number == 2)
    )


def reads(where: str) -> Begins:
    """The first read of an object of such a name."""
    return lambda request: request.operation == "GetObject" and where in request.key


@pytest.mark.parametrize(
    ("mode", "rank", "action", "large"),
    [
        pytest.param("disabled", 1, RESET, True, id="caller, reset, in parts"),
        pytest.param("disabled", 0, SILENT, False, id="coordinator, silent", marks=pytest.mark.nightly),
        pytest.param("disabled", 1, SILENT, True, id="caller, silent, in parts", marks=pytest.mark.nightly),
        pytest.param(THREAD, 1, SILENT, False, id="thread, silent"),
        pytest.param(THREAD, 0, RESET, True, id="coordinator, thread, reset, in parts", marks=pytest.mark.nightly),
        pytest.param(PROCESS, 1, RESET, False, id="process, reset"),
        pytest.param(PROCESS, 0, SILENT, True, id="coordinator, process, silent, in parts", marks=pytest.mark.nightly),
    ],
)
def test_cases_30_49_101_a_save_of_which_one_rank_is_cut_off_from_the_store_fails_on_all(
    scripted_s3: ScriptedS3Server,
    forked_ranks: ForkedRanks,
    tmp_path: Path,
    mode: str,
    rank: int,
    action: Action,
    large: bool,
) -> None:
    world_size = 2 if mode == PROCESS else WORLD_SIZE
    storm = Storm(scripted_s3, forked_ranks, tmp_path, world_size=world_size, mode=mode, large=large)
    report = run_cut(storm, scripted_s3, rank, action, data_of(2, large=large), resumes=1)
    assert {words[0][0] for words in (report.words(each, "failed") for each in report.ranks)} == {"2"}
    assert set(report.steps("saved")) == {1, 3}, "the same ranks go on"
    if large and action is RESET:
        assert list(storm.left.values()) == [rank], "it could not be reached any more"
    assert f"{storm.name}/{step_name(2)}/{MANIFEST_NAME}" not in scripted_s3.stored_keys()
    last = storm.run(saves=2)
    last.check()
    assert last.steps("resumed") == [3] * world_size
    storm.check_clean()


@pytest.mark.parametrize(
    ("rank", "action", "begins"),
    [
        pytest.param(1, RESET, reads("/model/__"), id="in its data, reset"),
        pytest.param(2, SILENT, reads("/iter_"), id="at once, silent"),
        pytest.param(0, RESET, reads("/latest_checkpoint"), id="coordinator, choosing", marks=pytest.mark.nightly),
    ],
)
def test_cases_40_49_101_a_load_of_which_one_rank_is_cut_off_from_the_store_fails_on_all(
    scripted_s3: ScriptedS3Server,
    forked_ranks: ForkedRanks,
    tmp_path: Path,
    rank: int,
    action: Action,
    begins: Begins,
) -> None:
    """It does not take what one rank can't read for damaged, and an older step for all."""
    storm = Storm(scripted_s3, forked_ranks, tmp_path, world_size=WORLD_SIZE, mode="disabled")
    storm.run(saves=2).check()
    report = run_cut(storm, scripted_s3, rank, action, begins, resumes=2)
    assert report.steps("resumed") == report.steps("saved") == []
    last = storm.run(saves=1)
    last.check()
    assert last.steps("resumed") == [2] * WORLD_SIZE
    storm.check_clean()
