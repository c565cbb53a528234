"""Ranks are killed while they save and load, and the run goes on from one whole step, bit for bit.

`test_crash_points_checkpointer` says where a single process can fail; here several die for real, alone or together,
with their background processes or without, and what is left of them has to raise in time.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dcpfs.testing.scripted_s3 import ScriptedS3Server
from tests.faults.kill_storm import CHANGES, ForkedRanks, Hit, Storm, Victims

THREAD, PROCESS = "async", "async_with_pinned_mem"
PLANTED = 3
"""Steps of the first round."""


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="dcpfs")


def change_of(ending: str, asks: int | None = None) -> Callable[[str, str, int], bool]:
    """Requests of a rank that change an object whose name ends so."""

    def matches(operation: str, name: str, rank: int) -> bool:
        return operation in CHANGES and name.endswith(ending) and asks in (None, rank)

    return matches


def put_of(ending: str) -> Callable[[str, str, int], bool]:
    """Requests that put such an object."""
    return lambda operation, name, _: operation == "PutObject" and name.endswith(ending)


def of_step(step: int, what: Callable[[str, str, int], bool]) -> Callable[[str, str, int], bool]:
    """Those below a step."""
    return lambda operation, name, rank: name.startswith(f"iter_{step:09d}/") and what(operation, name, rank)


HITS: dict[str, tuple[Hit, int]] = {
    "a rank in its first write": (Hit(Victims.RANK, 1, matches=change_of(".distcp", 1), applied=False), 0),
    "a rank after its last write": (Hit(Victims.RANK, 1, matches=change_of("rank_1.pkl", 1)), 0),
    "the coordinator before the commit": (Hit(Victims.RANK, 0, matches=put_of("manifest.json"), applied=False), 0),
    "the coordinator at the commit": (Hit(Victims.RANK, 0, matches=put_of("manifest.json")), 0),
    "the other rank at the commit": (Hit(Victims.RANK, 1, matches=put_of("manifest.json")), 1),
    "all before the pointer": (Hit(Victims.ALL, matches=put_of("latest_checkpoint.txt"), applied=False), 0),
    "all after the pointer": (Hit(Victims.ALL, matches=put_of("latest_checkpoint.txt")), 1),
    "all in a load": (Hit(Victims.ALL, at=9), 0),
}
"""What is hit in a round, and how many steps later than it the next one resumes. A step that stands and that nothing
points to yet is not resumed from: the pointer decides."""


def test_cases_30_34_49_ranks_killed_at_chosen_requests_leave_one_whole_step(
    scripted_s3: ScriptedS3Server, forked_ranks: ForkedRanks, tmp_path: Path
) -> None:
    storm = Storm(scripted_s3, forked_ranks, tmp_path, world_size=2, mode="disabled")
    storm.run(saves=PLANTED).check()
    stands = PLANTED
    for name, (hit, progress) in HITS.items():
        report = storm.run(hit)
        assert report.struck, name
        report.check()
        assert set(report.steps("resumed")) <= {stands}, name
        if hit.victims is Victims.RANK:
            (survivor,) = report.survivors
            assert report.words(survivor, "failed"), name
        stands += progress
    report = storm.run(saves=2)
    report.check()
    assert report.steps("resumed") == [stands] * 2
    storm.check_clean()


def test_cases_30_42_53_background_processes_and_their_trainers_killed_leave_one_whole_step(
    scripted_s3: ScriptedS3Server, forked_ranks: ForkedRanks, tmp_path: Path
) -> None:
    storm = Storm(scripted_s3, forked_ranks, tmp_path, world_size=2, mode=PROCESS)
    child = storm.run(Hit(Victims.CHILD, 1, matches=of_step(2, change_of(".distcp", 1))))
    child.check()
    for rank in (0, 1):
        ((step, *text),) = child.words(rank, "failed")
        assert step == "2"
        assert "the background process of rank 1 was killed by SIGKILL" in " ".join(text)
    assert set(child.steps("saved")) == {1, 3}, "its successor saves the next step"
    trainer = storm.run(Hit(Victims.RANK, 0, matches=of_step(4, change_of(".metadata"))))
    trainer.check()
    assert trainer.steps("resumed") == [3, 3]
    assert trainer.words(1, "failed")
    last = storm.run(saves=2)
    last.check()
    assert last.steps("resumed") == [3, 3], "nothing is published for a trainer that is gone"
    storm.check_clean()


def upload(operation: str, asks: int, ending: str = "") -> Callable[[str, str, int], bool]:
    """A rank's requests of one kind about its uploads."""
    return lambda given, name, rank: given == operation and rank == asks and name.endswith(ending)


UPLOAD_HITS: dict[str, tuple[Hit, set[int]]] = {
    "before it starts": (Hit(Victims.RANK, 1, matches=upload("CreateMultipartUpload", 1), applied=False), set()),
    "as it has started": (Hit(Victims.RANK, 1, matches=upload("CreateMultipartUpload", 1)), {1}),
    "in a part": (Hit(Victims.RANK, 0, matches=upload("UploadPart", 0), applied=False), {0}),
    "after all parts": (Hit(Victims.RANK, 1, matches=upload("UploadPart", 1), at=1), {1}),
    "before it is whole": (Hit(Victims.RANK, 0, matches=upload("CompleteMultipartUpload", 0), applied=False), {0}),
    "as it is whole": (Hit(Victims.RANK, 1, matches=upload("CompleteMultipartUpload", 1)), set()),
}
"""What is hit of a rank's upload, and whose upload is left: nobody else's, and never one that is whole."""


def test_cases_31_83_ranks_killed_in_uploads_leave_their_own_and_the_others_none(
    scripted_s3: ScriptedS3Server, forked_ranks: ForkedRanks, tmp_path: Path
) -> None:
    storm = Storm(scripted_s3, forked_ranks, tmp_path, world_size=2, mode="disabled", large=True)
    storm.run(saves=2).check()
    assert "UploadPart" in scripted_s3.operations()
    for name, (hit, leave) in UPLOAD_HITS.items():
        before = set(storm.left)
        report = storm.run(hit, saves=1)
        assert report.struck, name
        report.check()
        assert report.steps("saved") == [], name
        assert {rank for each, rank in storm.left.items() if each not in before} == leave, name
        scripted_s3.forget()
    report = storm.run(saves=2)
    report.check()
    assert report.steps("resumed") == [2, 2]
    storm.check_clean()
    assert len(storm.left) == sum(len(leave) for _, leave in UPLOAD_HITS.values())


# --- the storm


UPLOADS = frozenset({"CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"})


def random_hit(chance: random.Random, world_size: int, mode: str, requests: int, *, large: bool) -> Hit:
    """Anybody, at any request of a round; large: at any of those that upload in parts, two an object."""
    victims = [Victims.RANK, Victims.ALL]
    if mode == PROCESS:
        victims += [Victims.CHILD, Victims.CHILD, Victims.MACHINE, Victims.EVERYTHING]
    return Hit(
        chance.choice(victims),
        chance.randrange(world_size),
        at=chance.randrange(4 * PLANTED * world_size if large else requests),
        matches=(lambda operation, name, rank: operation in UPLOADS) if large else None,
        applied=chance.random() < 0.5,
    )


def storm_of(
    server: ScriptedS3Server,
    ranks: ForkedRanks,
    folder: Path,
    mode: str,
    world_size: int,
    kills: int,
    seed: int,
    *,
    large: bool = False,
) -> str:
    """Rounds until so many kills have come; then one without."""
    chance = random.Random(seed)
    started = time.monotonic()
    struck, rounds, slowest = 0, 0, 0.0
    storm = Storm(server, ranks, folder, world_size=world_size, mode=mode, large=large)
    calm = storm.run(saves=PLANTED)
    calm.check()
    requests = calm.requests
    while struck < kills:
        rounds += 1
        assert rounds < 3 * kills, "hardly a hit comes to its request"
        hit = random_hit(chance, world_size, mode, requests, large=large)
        report = storm.run(hit, waits=chance.random() < 0.5)
        report.check()
        struck += bool(report.struck)
        heard = [at - report.struck_at for each in report.survivors for at, words in report.said[each]]
        slowest = max([slowest, *heard]) if report.struck and report.lost_a_rank else slowest
        server.forget()
    last = storm.run(saves=3)
    last.check()
    probes = storm.check_clean()
    assert bool(storm.left) == large
    minutes = (time.monotonic() - started) / 60
    return (
        f"{mode}, {world_size} ranks, seed {seed}: {struck} kills in {rounds} rounds survived in {minutes:.1f} min, "
        f"step {storm.confirmed} reached, {probes} probes and {len(storm.left)} uploads of the dead left, "
        f"survivors ended within {slowest:.1f} s"
    )


def test_a_short_storm_in_a_thread(scripted_s3: ScriptedS3Server, forked_ranks: ForkedRanks, tmp_path: Path) -> None:
    print(storm_of(scripted_s3, forked_ranks, tmp_path, THREAD, 3, kills=4, seed=1))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("mode", "world_size", "kills"),
    [
        *(("disabled", world_size, 40) for world_size in (2, 3, 4)),
        *((THREAD, world_size, 40) for world_size in (2, 3, 4)),
        (PROCESS, 2, 20),
        (PROCESS, 4, 6),
    ],
)
def test_hundreds_of_kills(
    scripted_s3: ScriptedS3Server, forked_ranks: ForkedRanks, tmp_path: Path, mode: str, world_size: int, kills: int
) -> None:
    print(storm_of(scripted_s3, forked_ranks, tmp_path, mode, world_size, kills, seed=world_size))


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("mode", "world_size", "kills"), [("disabled", 2, 30), (THREAD, 3, 30), (PROCESS, 2, 10)])
def test_kills_among_uploads_in_parts(
    scripted_s3: ScriptedS3Server, forked_ranks: ForkedRanks, tmp_path: Path, mode: str, world_size: int, kills: int
) -> None:
    print(storm_of(scripted_s3, forked_ranks, tmp_path, mode, world_size, kills, seed=world_size, large=True))
