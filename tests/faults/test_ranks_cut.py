"""A rank stops answering, or its network is cut: all the others raise in time, and what comes back can't publish.

A killed rank closes its connections, so that everybody notices at once (`test_sigkill_storm`). One that is stopped, or
that no packet reaches, says nothing at all: the others find out by their time-out, and it finds out when it comes back.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dcpfs.checkpointer.layout import MANIFEST_NAME, step_name
from dcpfs.storage.location import Location
from dcpfs.testing.scripted_s3 import ScriptedS3Server
from tests.faults.kill_storm import ForkedRanks, Hit, Report, Storm, Victims, check_resumable, open_gate
from tests.faults.storm_ranks import Order

THREAD, PROCESS = "async", "async_with_pinned_mem"
TIMEOUT_SECONDS = 6.0
PROCESS_TIMEOUT_SECONDS = 20.0
"""Within it the background processes of all ranks start, and meet."""
LATE_SECONDS = 24.0
"""What a busy machine may add."""


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL", logger="dcpfs")


class Return:
    """Does something once all ranks but some have raised: hears a round's lines. A rank that halts counts as hit."""

    def __init__(self, away: set[int], act: Callable[[Report], None]) -> None:
        self.happened_at = 0.0
        self._away = away
        self._act = act

    def __call__(self, report: Report, rank: int, words: list[str]) -> None:
        if words[0] == "halted":
            report.struck_at = time.monotonic()
        others = set(range(report.order.world_size)) - self._away
        if words[0] != "failed" or self.happened_at or not all(report.words(each, "failed") for each in others):
            return
        assert not any(report.words(each, "failed") for each in self._away)
        self.happened_at = time.monotonic()
        self._act(report)


def check_raised(report: Report, since: float, ranks: Iterable[int]) -> None:
    """Every rank has said why its save failed, and some of them, who could, in time."""
    for rank in report.ranks:
        assert f"rank {rank} can't reach the other ranks any more" in " ".join(report.words(rank, "failed")[0])
    for rank in ranks:
        first_at = next(at for at, words in report.said[rank] if words[0] == "failed")
        assert first_at - since < report.order.timeout_seconds + LATE_SECONDS


def timeout_of(mode: str) -> float:
    return PROCESS_TIMEOUT_SECONDS if mode == PROCESS else TIMEOUT_SECONDS


def wake(report: Report) -> None:
    for pid in report.struck:
        os.kill(pid, signal.SIGCONT)


def writes_data(rank: int, step: int) -> Callable[[str, str, int], bool]:
    where = f"{step_name(step)}/model/__{rank}_"
    return lambda operation, name, asks: operation == "PutObject" and name.startswith(where) and asks == rank


@pytest.mark.parametrize(
    ("mode", "rank"),
    [
        pytest.param("disabled", 1, id="caller"),
        pytest.param(THREAD, 0, id="coordinator, thread"),
        pytest.param(PROCESS, 1, id="process", marks=pytest.mark.nightly),
        pytest.param(PROCESS, 0, id="coordinator, process", marks=pytest.mark.nightly),
    ],
)
def test_cases_49_60_101_a_rank_that_is_stopped_is_given_up_and_does_not_publish_when_it_goes_on(
    scripted_s3: ScriptedS3Server, forked_ranks: ForkedRanks, tmp_path: Path, mode: str, rank: int
) -> None:
    storm = Storm(scripted_s3, forked_ranks, tmp_path, world_size=3, mode=mode)
    back = Return({rank}, wake)
    hit = Hit(Victims.MACHINE, rank, matches=writes_data(rank, 2), signal=signal.SIGSTOP)
    report = storm.run(hit, timeout_seconds=timeout_of(mode), on_line=back)
    assert back.happened_at
    report.check()
    check_raised(report, report.struck_at, {0, 1, 2} - {rank})
    assert set(report.steps("saved")) == {1}
    assert f"{storm.name}/{step_name(2)}/{MANIFEST_NAME}" not in scripted_s3.stored_keys()
    storm.check_resumable(1)


# --- the network


class Networks:
    """A network namespace for each rank, all on one bridge. A context manager; needs root and iproute2.

    Args:
        count: Of the ranks.
    """

    def __init__(self, count: int) -> None:
        self.names = [f"dcpfs-{os.getpid()}-{rank}" for rank in range(count)]
        self.addresses = [f"192.0.2.{rank + 1}" for rank in range(count)]
        self._bridge = f"dcpfs-{os.getpid()}-b"

    def __enter__(self) -> list[str]:
        self._made: list[str] = []
        try:
            for name in (*self.names, self._bridge):
                _ip("netns", "add", name)
                self._made.append(name)
            _ip("-n", self._bridge, "link", "add", "bridge", "type", "bridge")
            _ip("-n", self._bridge, "link", "set", "bridge", "up")
            for rank, name in enumerate(self.names):
                port = f"port{rank}"
                _ip("link", "add", "ranks", "netns", name, "type", "veth", "peer", "name", port, "netns", self._bridge)
                _ip("-n", self._bridge, "link", "set", port, "master", "bridge", "up")
                _ip("-n", name, "addr", "add", f"{self.addresses[rank]}/24", "dev", "ranks")
                for device in ("lo", "ranks"):
                    _ip("-n", name, "link", "set", device, "up")
        except BaseException:
            self.__exit__()
            raise
        return self.names

    def __exit__(self, *_: object) -> None:
        for name in self._made:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", name)

    def cut(self, rank: int) -> None:
        """No packet reaches a rank any more, nor comes from it."""
        _ip("-n", self._bridge, "link", "set", f"port{rank}", "nomaster")

    def mend(self, rank: int) -> None:
        """As before."""
        _ip("-n", self._bridge, "link", "set", f"port{rank}", "master", "bridge")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=60)


@pytest.fixture
def networks() -> Iterator[Networks]:
    made = Networks(3)
    try:
        made.__enter__()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespace can be made, which takes root and iproute2: {error}")
    try:
        yield made
    finally:
        made.__exit__()


def test_cases_31_101_a_rank_that_is_stopped_in_an_upload_ends_it_when_it_goes_on(
    scripted_s3: ScriptedS3Server, forked_ranks: ForkedRanks, tmp_path: Path
) -> None:
    storm = Storm(scripted_s3, forked_ranks, tmp_path, world_size=2, mode="disabled", large=True)
    back = Return({1}, wake)
    where = f"{step_name(2)}/model/__1_"
    hit = Hit(
        Victims.RANK,
        1,
        matches=lambda operation, name, asks: operation == "UploadPart" and name.startswith(where) and asks == 1,
        signal=signal.SIGSTOP,
    )
    report = storm.run(hit, timeout_seconds=TIMEOUT_SECONDS, on_line=back)
    assert back.happened_at
    report.check()
    check_raised(report, report.struck_at, {0})
    assert set(report.steps("saved")) == {1}
    assert storm.left == {}, "nobody has killed it"
    storm.check_resumable(1)


@pytest.mark.parametrize(
    ("mode", "rank"),
    [
        pytest.param("disabled", 1, id="caller", marks=pytest.mark.nightly),
        pytest.param(THREAD, 0, id="coordinator, thread"),
        pytest.param(PROCESS, 1, id="process", marks=pytest.mark.nightly),
        pytest.param(PROCESS, 0, id="coordinator, process", marks=pytest.mark.nightly),
    ],
)
def test_cases_49_60_a_rank_whose_network_is_cut_is_given_up_and_does_not_publish(
    networks: Networks, forked_ranks: ForkedRanks, tmp_path: Path, mode: str, rank: int
) -> None:
    place = Location(tmp_path / "run")
    order = Order(
        "cut",
        str(tmp_path),
        place.url,
        [{}] * 3,
        mode,
        timeout_seconds=timeout_of(mode),
        networks=networks.names,
        addresses=networks.addresses if mode == PROCESS else [],
        halts={str(rank): f"{step_name(2)}/model/__{rank}_0.distcp"},
    )
    report = carry_out_cut(order, rank, networks, forked_ranks)
    assert f"{step_name(2)}/model/__{rank}_0.distcp" in " ".join(report.words(rank, "halted")[0])
    # Background processes are replaced, and meet again when the network is whole.
    saved = set(report.steps("saved"))
    assert saved == {1} or (mode == PROCESS and saved == {1, 3})
    check_resumable(place, max(saved))


def carry_out_cut(order: Order, rank: int, networks: Networks, forked_ranks: ForkedRanks) -> Report:
    """A round in which a rank's network is cut where the rank halts, and mended when all have raised, in time."""
    back = Return(set(), lambda _: networks.mend(rank))

    def hear(report: Report, asks: int, words: list[str]) -> None:
        if words[0] == "halted":
            networks.cut(rank)
            open_gate(report.order, asks, 1)
        back(report, asks, words)

    report = Report(order, Hit(Victims.RANK, rank))
    forked_ranks.carry_out(order, report, hear)
    assert back.happened_at
    report.check()
    check_raised(report, report.struck_at, range(3))
    return report


@pytest.mark.parametrize(
    "rank", [pytest.param(1, id="one"), pytest.param(0, id="coordinator", marks=pytest.mark.nightly)]
)
def test_cases_49_60_a_rank_whose_network_is_cut_in_a_load_is_given_up(
    networks: Networks, forked_ranks: ForkedRanks, tmp_path: Path, rank: int
) -> None:
    place = Location(tmp_path / "run")

    def order(name: str, **settings: Any) -> Order:
        settings.update(saves=1, timeout_seconds=TIMEOUT_SECONDS, networks=networks.names)
        return Order(name, str(tmp_path), place.url, [{}] * 3, "disabled", **settings)

    planted = Report(order("planted"), None)
    forked_ranks.carry_out(planted.order, planted)
    planted.check()
    cut = order("cut", load_halts={str(rank): f"model/__{rank}_0.distcp"})
    report = carry_out_cut(cut, rank, networks, forked_ranks)
    assert report.steps("began") == []
    check_resumable(place, 1)
    again = Report(order("again"), None)
    forked_ranks.carry_out(again.order, again)
    again.check()
    assert again.steps("resumed") == [1] * 3


def test_cases_30_101_a_coordinator_that_was_given_up_does_not_commit_any_more(
    forked_ranks: ForkedRanks, tmp_path: Path
) -> None:
    """It has the results of all ranks, and comes to put the manifest when nobody waits for that any longer."""
    place = Location(tmp_path / "run")
    halts = {"0": f"{step_name(2)}/model/.metadata"}
    order = Order("late", str(tmp_path), place.url, [{}] * 2, "disabled", timeout_seconds=TIMEOUT_SECONDS, halts=halts)
    back = Return({0}, lambda report: open_gate(report.order, 0, 1))
    report = Report(order, Hit(Victims.RANK, 0))
    forked_ranks.carry_out(order, report, back)
    assert back.happened_at
    report.check()
    said = " ".join(report.words(0, "failed")[0])
    assert said.startswith("2 CheckpointError: can't publish")
    assert "the other ranks have given up rank 0" in said
    check_resumable(place, 1)
