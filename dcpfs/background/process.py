"""A process beside this one, started from nothing but dcpfs.

Problem: ``multiprocessing`` starts a process by forking, which copies locks in the state that they are in and a CUDA
context that can't be used (cases 58, 80), or by running the user's script again, which trains a second time where it is
not guarded, and does not exist in a notebook. A process that died is found when a pipe breaks, again and again (case
53).

Way taken: a fresh interpreter that runs a module of dcpfs, with one end of a socket pair, the module path of this
process, and no view of a GPU. A thread reads what it sends. Its end, whatever the cause, closes the socket, and is told
at once with the exit code put into words. Signals that end the trainer are ignored there: it ends when its work is done
and its parent is gone.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

from dcpfs.background.channel import Channel, ChannelClosedError
from dcpfs.errors import ConfigError

__all__ = ["BackgroundProcess", "start_command"]

_logger = logging.getLogger(__name__)

_REAP_SECONDS = 10.0


class BackgroundProcess:
    """One process and the channel to it. `send` may be called by several threads.

    Args:
        target: ``module:function`` of dcpfs that the process calls with its end of the channel.
        name: For logs and errors, e.g. ``the background process of rank 3``.
        on_message: Told each message, in the reading thread.
        on_end: Told once, in the reading thread, why the process ended, unless `stop` was called.
        niceness: Added to its priority number: 0 to 19, the larger the less CPU it gets beside training.

    Raises:
        ConfigError: There is no Python interpreter to start.
        OSError: It can't be started.
    """

    def __init__(
        self,
        target: str,
        *,
        name: str,
        on_message: Callable[[object], None],
        on_end: Callable[[str], None],
        niceness: int = 0,
    ) -> None:
        if not sys.executable:
            raise ConfigError("can't start a background process: this program does not say where Python is")
        self._name = name
        self._on_message = on_message
        self._on_end = on_end
        self._stopping = False
        own, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._channel = Channel(own)
        try:
            self._process = subprocess.Popen(
                [*start_command("dcpfs.background.worker"), str(other.fileno()), target, str(niceness)],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                env=_environment(),
                start_new_session=True,  # a signal to the trainer's group is not for this process
            )
        except BaseException:
            self._channel.close()
            raise
        finally:
            other.close()
        self._reader = threading.Thread(target=self._read, name=f"dcpfs-reader-{self._process.pid}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def send(self, message: bytes | object, descriptors: Sequence[int] = ()) -> None:
        """Send a message; see `Channel.send`.

        Raises:
            ChannelClosedError: The process has ended; ``on_end`` tells why.
        """
        self._channel.send(message, descriptors)

    def stop(self, *, grace_seconds: float) -> None:
        """End it: it finds its channel closed. Killed when it is still there after that time. Idempotent."""
        self._stopping = True
        self._channel.shut_sending()
        try:
            self._process.wait(grace_seconds)
        except subprocess.TimeoutExpired:
            _logger.warning("%s did not end within %.0f s and is killed", self._name, grace_seconds)
            self._process.kill()
            self._process.wait(_REAP_SECONDS)
        if threading.current_thread() is not self._reader:
            self._reader.join(_REAP_SECONDS)
        self._channel.close()

    def _read(self) -> None:
        reason = ""
        try:
            while True:
                message, descriptors = self._channel.receive()
                for descriptor in descriptors:
                    os.close(descriptor)
                self._on_message(message)
        except ChannelClosedError:
            pass
        except Exception as error:  # noqa: BLE001 - handed over as the reason why the process is given up
            reason = f"sent what can't be read ({type(error).__name__}: {error})"
            self._process.kill()
        try:
            self._process.wait(_REAP_SECONDS)
        except subprocess.TimeoutExpired:  # it closed its channel and goes on: nobody can tell it anything any more
            self._process.kill()
            self._process.wait()
            reason = reason or "closed its channel and did not end"
        if not self._stopping:
            self._on_end(f"{self._name} {reason or describe_exit(self._process.returncode)}")


def start_command(module: str) -> list[str]:
    """The command that calls ``main`` of a module with its arguments, and ends with the code that it returns.

    ``-m`` puts the current directory before the library, where a ``random.py`` would be taken for Python's; the
    variable that forbids it is only known to Python 3.11 and later.
    """
    safe = "import sys; getattr(sys.flags, 'safe_path', False) or sys.path.pop(0); "
    return [sys.executable, "-c", f"{safe}from {module} import main; sys.exit(main(sys.argv[1:]))"]


def describe_exit(code: int) -> str:
    """What an exit code says, in words."""
    if code >= 0:
        return f"ended with exit code {code}; its log has the reason"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = "; the kernel does so when memory runs out, which its log would say" if -code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"


def _environment() -> dict[str, str]:
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    environment["PYTHONSAFEPATH"] = "1"  # and not the current directory before all of these
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        environment[name] = ""
    environment["OMP_NUM_THREADS"] = "1"  # it computes nothing, and idle threads spin
    return environment
