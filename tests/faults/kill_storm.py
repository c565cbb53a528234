"""Runs whose ranks are killed or stopped when a request of theirs arrives, and what the next round finds.

Problem: where a process dies can't be chosen with a clock. And what a run that died may leave is only known by whoever
saw what each rank had said by then.

Way taken: all ranks save to a scripted S3 server in this process, each with an identity of its own, so that the server
knows who asks. When the request that a `Hit` describes has arrived, its victims get their signal; when they are gone
(or stopped) the request takes effect, or does not, and the others go on. The ranks come from `storm_ranks`; a round's
lines are heard until all its ranks have ended. ::

    storm = Storm(server, ranks, folder, world_size=2, mode="async")
    report = storm.run(Hit(...))            # some ranks die
    report.check()                          # survivors have raised, in time; background processes are gone
    storm.run()                             # resumes: bit for bit one step, none older than what was confirmed
    storm.check_clean()
"""

from __future__ import annotations

import contextlib
import enum
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from dcpfs.checkpointer.completeness import check_step
from dcpfs.checkpointer.discovery import choose_step
from dcpfs.checkpointer.layout import LATEST_NAME, MANIFEST_NAME, WRITING_NAME, parse_step_name, step_name
from dcpfs.checkpointer.probing import PROBE_PREFIX
from dcpfs.checkpointer.verification import verify_step
from dcpfs.storage.location import Location
from dcpfs.storage.opening import open_store
from dcpfs.testing.http_exchange import Response
from dcpfs.testing.s3_exchange import DroppedError, Exchange, S3Request
from dcpfs.testing.s3_faults import Action, Fault
from dcpfs.testing.scripted_s3 import ScriptedS3Server
from tests.faults.processes import has_ended
from tests.faults.storm_ranks import KEEP_LAST, Order, columns_of, gate_of

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["CHANGES", "ForkedRanks", "Hit", "Report", "Storm", "Victims", "check_resumable", "open_gate"]

ROOT = Path(__file__).parents[2]
CHANGES = frozenset(
    {
        *("PutObject", "DeleteObject", "DeleteObjects"),
        *("CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload", "AbortMultipartUpload"),
    }
)
SOON_SECONDS = 60.0
"""Within which survivors raise, on a machine with little time for them; the time-out of their groups is twice that."""


class Victims(enum.Enum):
    """Whom a hit kills."""

    RANK = "a rank"
    CHILD = "its background process"
    MACHINE = "a rank and its background process"
    ALL = "all ranks"
    EVERYTHING = "all ranks and their background processes"


@dataclass(frozen=True)
class Hit:
    """When which processes get a signal.

    Attributes:
        victims: Who.
        rank: Which one, of one rank.
        at: After so many requests that match.
        matches: Which requests count, by operation, name below the run, and rank that asks; None: all.
        applied: Whether the request takes effect, where a victim has sent it. A survivor's always does.
        signal: What they get.
    """

    victims: Victims
    rank: int = 0
    at: int = 0
    matches: Callable[[str, str, int], bool] | None = None
    applied: bool = True
    signal: signal.Signals = signal.SIGKILL


@dataclass
class Report:
    """What a round was seen to do.

    Attributes:
        order: That was carried out.
        hit: That was planned.
        ranks: Pids by rank.
        savers: Pids of background processes by rank; those that replaced others are not known.
        struck: Victims' pids, when the hit has come.
        struck_at: When it came, on the monotonic clock; 0: it did not.
        request: That it came with.
        said: Words of each rank, with the time at which they were heard.
        exits: Exit code of each rank.
        requests: Of the whole round.
    """

    order: Order
    hit: Hit | None
    ranks: dict[int, int] = field(default_factory=dict)
    savers: dict[int, int] = field(default_factory=dict)
    struck: set[int] = field(default_factory=set)
    struck_at: float = 0.0
    request: str = ""
    said: dict[int, list[tuple[float, list[str]]]] = field(default_factory=dict)
    exits: dict[int, int] = field(default_factory=dict)
    requests: int = 0

    def words(self, rank: int, verb: str) -> list[list[str]]:
        """What a rank said that begins with a word."""
        return [words[1:] for _, words in self.said.get(rank, []) if words[0] == verb]

    def steps(self, verb: str) -> list[int]:
        """Steps that any rank said something of."""
        found = (words[0] for rank in self.said for words in self.words(rank, verb))
        return [int(word) for word in found if word.isdigit()]

    @property
    def survivors(self) -> list[int]:
        """Ranks that were not killed."""
        return [rank for rank, pid in self.ranks.items() if pid not in self.struck]

    @property
    def struck_ranks(self) -> set[int]:
        """Ranks that were killed, or whose background process was."""
        return {rank for pids in (self.ranks, self.savers) for rank, pid in pids.items() if pid in self.struck}

    @property
    def lost_a_rank(self) -> bool:
        """Whether a rank was a victim, not just a background process."""
        return any(pid in self.struck for pid in self.ranks.values())

    def check(self) -> None:
        """Nothing was mixed up; survivors have raised, in time, and come to their end.

        Raises:
            AssertionError: Not so.
        """
        assert not self.steps("mixed"), self
        assert all(code == 0 for rank, code in self.exits.items() if rank in self.survivors), self
        for rank in self.survivors:
            ended = self.words(rank, "done") or any(words[0] == "close" for words in self.words(rank, "failed"))
            assert ended, self
            if not self.struck_at:
                assert not self.words(rank, "failed"), self
            late = [(at - self.struck_at, words) for at, words in self.said[rank] if words[0] == "failed"]
            assert all(seconds < SOON_SECONDS for seconds, _ in late), (late, self)


class Storm:
    """Rounds of one run.

    Args:
        server: Where it saves to.
        ranks: Who forks its ranks.
        folder: For gates and rendezvous.
        world_size: Ranks of each round.
        mode: Who saves.
        large: Each rank uploads its share of the state in parts.

    Attributes:
        confirmed: The newest step that a rank was told of.
        begun: The newest step that a rank has begun to save.
        left: Uploads that the dead have left, by their id: the rank. Nobody else may leave one.
    """

    def __init__(
        self,
        server: ScriptedS3Server,
        ranks: ForkedRanks,
        folder: Path,
        *,
        world_size: int,
        mode: str,
        large: bool = False,
    ) -> None:
        self.name = f"storm-{uuid.uuid4().hex}"
        self.confirmed = 0
        self.begun = 0
        self.left: dict[str, int] = {}
        self._columns = columns_of(world_size, large=large)
        self._server = server
        self._folder = folder
        self._mode = mode
        self._ranks = ranks
        self._keys = [f"RANK{rank}" for rank in range(world_size)]
        for key in self._keys:
            server.accept_credential(key, f"secret of {key}")
        self._rounds = 0

    def run(
        self,
        hit: Hit | None = None,
        *,
        saves: int = 3,
        timeout_seconds: float = 2 * SOON_SECONDS,
        waits: bool = True,
        on_line: Callable[[Report, int, list[str]], None] | None = None,
        settings: Mapping[str, Any] | None = None,
        cut_off: int | None = None,
    ) -> Report:
        """One round. What it resumes from is compared with what the rounds before have said, and uploads that it leaves
        are those of its victims, or of a rank that is cut off. Settings are more of `Order`'s.
        """
        self._rounds += 1
        options = [{**self._server.storage_options, "key": key, "secret": f"secret of {key}"} for key in self._keys]
        order = Order(
            f"{self.name}-{self._rounds}",
            str(self._folder),
            self._server.url(self.name),
            options,
            self._mode,
            saves=saves,
            timeout_seconds=timeout_seconds,
            waits=waits,
            columns=self._columns,
            **(settings or {}),
        )
        report = Report(order, hit)
        first = self._server.connections
        ambush = _Ambush(report, self.name, self._keys)
        fault = self._server.fail(ambush.matches, ambush, times=None)
        try:
            self._ranks.carry_out(order, report, on_line)
        finally:
            fault.release()
            self._server.reset_faults()
        report.requests = ambush.seen
        resumed = set(report.steps("resumed"))
        assert len(resumed) <= 1, report
        if resumed:
            assert self.confirmed <= min(resumed) <= self.begun, (self.confirmed, self.begun, report)
        self.confirmed = max(self.confirmed, *resumed, *report.steps("saved"), 0)
        self.begun = max(self.begun, *report.steps("began"), 0)
        _wait_until(lambda: not self._speaks_to_ranks(first))
        left = {name: rank for name, rank in self._open_uploads().items() if name not in self.left}
        assert set(left.values()) <= report.struck_ranks | {cut_off}, (left, report)
        assert len(set(left.values())) == len(left), (left, report)
        self.left.update(left)
        return report

    def _speaks_to_ranks(self, first: int) -> bool:
        """Whether the server still reads what ranks that have ended had sent; their connections begin with a number."""
        own = {each.connection for each in self._server.requests() if each.access_key == self._server.access_key}
        return any(each.number >= first and each.number not in own for each in list(self._server._connections))

    def _open_uploads(self) -> dict[str, int]:
        """Rank of each upload of this run."""
        found = {}
        for upload in self._server.open_uploads():
            if upload.key.startswith(f"{self.name}/"):
                name = re.search(r"/__(\d+)_\d+\.distcp$", upload.key)
                assert name is not None, upload.key
                found[upload.upload_id] = int(name[1])
        return found

    def check_resumable(self, step: int) -> None:
        """What a resume would find is a step, which is whole.

        Raises:
            AssertionError: It is not.
        """
        check_resumable(Location(self._server.url(self.name), self._server.storage_options), step)

    def check_clean(self) -> int:
        """After a round without a hit: there is nothing but whole steps, the pointer, and probes. Number of probes.

        Uploads that the dead have left stay: they are the store's to end, and no save asks for others' uploads.

        Raises:
            AssertionError: There is more.
        """
        place = Location(self._server.url(self.name), self._server.storage_options)
        store = open_store(place)
        try:
            found = {info.path for info in store.list()}
            expected = {LATEST_NAME}
            steps = [step for name in store.list_directories() if (step := parse_step_name(name)) is not None]
            assert len(steps) == KEEP_LAST
            for step in steps:
                status = check_step(store, step)
                assert status.manifest is not None, status.describe()
                assert verify_step(store, status) == []
                expected |= {f"{step_name(step)}/{name}" for name in (*status.manifest.files, MANIFEST_NAME)}
            assert expected <= found
            more = found - expected - {f"{step_name(step)}/{WRITING_NAME}" for step in steps}
            assert all(name.startswith(PROBE_PREFIX) for name in more), more
            assert store.get(LATEST_NAME).decode() == f"{step_name(self.confirmed)}\n"
            assert self._open_uploads() == self.left
            return len(more)
        finally:
            store.close()


def check_resumable(place: Location, step: int) -> None:
    """What a resume from a run would find is a step, which is whole.

    Raises:
        AssertionError: It is not.
    """
    store = open_store(place)
    try:
        status = choose_step(store).status
        assert status is not None
        assert status.iteration == step
        assert verify_step(store, status) == []
    finally:
        store.close()


class ForkedRanks:
    """The process that forks ranks, and what is heard from it and them. A context manager."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.storm_ranks"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        threading.Thread(target=self._hear, args=(self._process.stdout,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process = self._process
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def carry_out(
        self, order: Order, report: Report, on_line: Callable[[Report, int, list[str]], None] | None = None
    ) -> None:
        """Let ranks carry out an order, and hear them until all have ended, and their background processes too."""
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.ExitStack() as stack:
            for rank in range(order.world_size):
                for number in range(2):
                    os.mkfifo(gate_of(order, rank, number))
            self._process.stdin.write(order.to_line())
            self._process.stdin.flush()
            ends: list[int] = []
            try:
                for words in self._rounds_lines(order):
                    if words[0] == "over":
                        break
                    self._take(words, order, report, ends, stack)
                    if on_line is not None and words[0].isdigit():
                        on_line(report, int(words[0]), words[1:])
            except BaseException:
                for pid in {*report.ranks.values(), *report.savers.values()} - {0}:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                raise
            for end in ends:
                assert has_ended(end, SOON_SECONDS), f"a background process is left: {report}"

    def _hear(self, stdout: Any) -> None:
        for line in stdout:
            self._lines.put(line)
        self._lines.put("")

    def _rounds_lines(self, order: Order) -> Iterator[list[str]]:
        deadline = time.monotonic() + 4 * SOON_SECONDS
        while True:
            line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            assert line, "the process that forks ranks has ended"
            name, *words = line.split()
            if name == order.name:
                yield words

    def _take(
        self, words: list[str], order: Order, report: Report, ends: list[int], stack: contextlib.ExitStack
    ) -> None:
        if words[0] == "ranks":
            report.ranks.update(enumerate(map(int, words[1:])))
        elif words[0] == "ended":
            report.exits[int(words[1])] = int(words[2])
        else:
            rank = int(words[0])
            report.said.setdefault(rank, []).append((time.monotonic(), words[1:]))
            if words[1] == "saver":
                report.savers[rank] = int(words[2])
                if report.savers[rank]:
                    ends.append(os.pidfd_open(report.savers[rank]))
                    stack.callback(os.close, ends[-1])
                if len(report.savers) == order.world_size:
                    for each in range(order.world_size):
                        open_gate(order, each)


def open_gate(order: Order, rank: int, number: int = 0) -> None:
    """Wait until a rank has come to a gate, and let it pass."""
    with open(gate_of(order, rank, number), "wb"):
        pass


class _Ambush(Action):
    """Signals its victims when the request has arrived, and lets it go on when they are gone."""

    def __init__(self, report: Report, run: str, keys: list[str]) -> None:
        self.seen = 0
        self._report = report
        self._run = run
        self._keys = keys
        self._left = report.hit.at if report.hit is not None else 0
        self._lock = threading.Lock()

    def matches(self, request: S3Request) -> bool:
        return request.access_key in self._keys and len(self._report.savers) == len(self._keys)

    def before_effect(self, exchange: Exchange, fault: Fault) -> Response | None:
        request, hit, report = exchange.request, self._report.hit, self._report
        asks = self._keys.index(request.access_key or "")
        name = request.key.partition("/")[2]
        with self._lock:
            self.seen += 1
            if hit is None or report.struck or not (hit.matches or _any)(request.operation, name, asks):
                return None
            self._left -= 1
            if self._left >= 0:
                return None
            with contextlib.ExitStack() as stack:
                victims = _descriptors(self._choose(hit), stack)
                if not victims:
                    return None
                report.request = f"{request.operation} {name} of rank {asks}"
                report.struck.update(victims)
                report.struck_at = time.monotonic()
                _strike(victims, hit.signal)
        if not hit.applied and {report.ranks[asks], report.savers[asks]} & victims.keys():
            raise DroppedError
        return None

    def _choose(self, hit: Hit) -> set[int]:
        ranks, savers = self._report.ranks, self._report.savers
        chosen = {
            Victims.RANK: [ranks[hit.rank]],
            Victims.CHILD: [savers[hit.rank]],
            Victims.MACHINE: [ranks[hit.rank], savers[hit.rank]],
            Victims.ALL: list(ranks.values()),
            Victims.EVERYTHING: [*ranks.values(), *savers.values()],
        }
        return {pid for pid in chosen[hit.victims] if pid}


def _any(operation: str, name: str, rank: int) -> bool:
    return True


def _descriptors(pids: set[int], stack: contextlib.ExitStack) -> dict[int, int]:
    """Descriptors of those that are there still, until the stack is closed."""
    found = {}
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            found[pid] = os.pidfd_open(pid)
            stack.callback(os.close, found[pid])
    return found


def _strike(victims: Mapping[int, int], number: signal.Signals) -> None:
    """Send a signal to processes, by their descriptors, and wait until it has done its work."""
    for descriptor in victims.values():
        with contextlib.suppress(ProcessLookupError):  # it has ended by itself
            signal.pidfd_send_signal(descriptor, number)
    for pid, descriptor in victims.items():
        if number == signal.SIGKILL:
            assert has_ended(descriptor, SOON_SECONDS)
        elif number == signal.SIGSTOP:
            _wait_until(lambda pid=pid: _is_stopped(pid))  # type: ignore[misc]


def _is_stopped(pid: int) -> bool:
    """Whether all threads of a process are."""
    tasks = Path(f"/proc/{pid}/task")
    try:
        return all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks.iterdir())
    except (FileNotFoundError, ProcessLookupError):  # a thread that has just ended
        return False


def _wait_until(holds: Callable[[], bool]) -> None:
    """Ask until it does.

    Raises:
        AssertionError: It does not within a minute.
    """
    deadline = time.monotonic() + SOON_SECONDS
    while not holds():
        assert time.monotonic() < deadline, "it does not come about"
        time.sleep(0.005)
