"""A save that a signal asks for.

Problem: a job that is about to be preempted gets a signal and some seconds. Whoever saves inside the signal handler
saves between two bytecodes of anything: in mid-step, in mid-collective, holding a lock. A handler that only notes the
signal and stays installed makes the job unkillable; one that replaces another's handler takes it away from the
launcher. And where the signal goes to the whole process group, the dataloader's workers die at once, so that training
fails before it comes to the save (case 42).

Way taken: the handler notes that a save was asked for, puts the old handler back, and calls it where it is a function
of somebody else's. So a second signal does what it would have done without us. The training loop asks between two steps
(`should_save`, which agrees over the ranks) and saves there. A forked child inherits the handler, but not its meaning:
there the signal does at once what it did before.

Workers of a dataloader are shielded with ``DataLoader(..., worker_init_fn=shield_worker)``: they outlive the first
signal by some seconds, or end with their parent, whichever comes first. What others say by dying is heard where the
loop next asks for a batch that they owe, and nowhere else, until the save was taken (`worker_deaths`).

::

    flag = SaveFlag()
    with install_signal_handler(flag):             # SIGTERM and SIGUSR1
        for batch in loader:
            step(batch)
            if flag.requested:                        # with several ranks: agree first
                save(); break
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, cast

from dcpfs.errors import ConfigError
from dcpfs.worker_deaths import hold_worker_deaths_back

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["SaveFlag", "SignalHandlers", "install_signal_handler", "shield_worker"]

_Handler = Callable[[int, FrameType | None], object]
_SHIELD_SECONDS = 30
"""What Kubernetes, by default, lets pass between its SIGTERM and its SIGKILL."""


class SaveFlag:
    """Whether somebody asked for a save. Takes no lock, so signal handlers and any thread may use it."""

    __slots__ = ("_served", "_signal", "_wanted")

    def __init__(self) -> None:
        self._wanted = self._served = object()
        self._signal: int | None = None

    def request(self, signal_number: int | None = None) -> None:
        """Ask. Asking again before the save changes nothing."""
        self._signal = signal_number if self._signal is None else self._signal
        self._wanted = object()

    @property
    def requested(self) -> bool:
        """Whether this process was asked since the last `clear`. Other ranks may not have been."""
        return self._wanted is not self._served

    @property
    def last_request(self) -> object:
        """What `clear` takes, so that it leaves standing what is asked from here on."""
        return self._wanted

    @property
    def reason(self) -> str:
        """Who asked, for a log: the signal's name, or the program."""
        return "the program" if self._signal is None else signal.Signals(self._signal).name

    def clear(self, last_request: object = None) -> None:
        """The save was taken.

        Args:
            last_request: Of `last_request`, when the values of the save had been read: what was asked after it stands.
                None: nothing does.
        """
        self._served = self._wanted if last_request is None else last_request
        if not self.requested:
            self._signal = None


class SignalHandlers:
    """The handlers that `install_signal_handler` put in place. Use it as a context manager, or call `uninstall`."""

    def __init__(self, flag: SaveFlag, previous: dict[int, object]) -> None:
        self._flag = flag
        self._previous = previous
        self._pid = os.getpid()
        self._wanted = True
        self._end_hold: Callable[[], None] | None = None

    def uninstall(self) -> None:
        """Put the old handlers back. Where another's stands by now, ours stays below it and notes nothing any more.

        Idempotent. In the main thread only.
        """
        self._wanted = False
        for number in list(self._previous):
            if signal.getsignal(number) == self._handle:
                signal.signal(number, cast("_Handler", self._previous.pop(number)))
        if self._end_hold is not None:
            self._end_hold()
            self._end_hold = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous.pop(number, signal.SIG_DFL)
        signal.signal(number, cast("_Handler", previous))
        if os.getpid() != self._pid:
            os.kill(os.getpid(), number)
            return
        if self._wanted:
            self._flag.request(number)
            if self._end_hold is None:  # the workers may have got the signal too
                self._end_hold = hold_worker_deaths_back(lambda: self._wanted and self._flag.requested)
        # The default handler of SIGINT raises KeyboardInterrupt: that is for the second time.
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.uninstall()


def install_signal_handler(
    flag: SaveFlag, signals: int | Iterable[int] = (signal.SIGTERM, signal.SIGUSR1)
) -> SignalHandlers:
    """Let signals ask for a save. In the main thread only; local to this process.

    The first of each signal asks, and calls the handler that was there, where that is a function. From then on the
    signal does what it did before; install again to be asked again.

    Args:
        flag: What notes it.
        signals: One signal or several, e.g. ``signal.SIGTERM``.

    Raises:
        ConfigError: This is not the main thread, or a signal can't be handled, or its handler isn't one that Python can
            put back. No handler was changed.
    """
    numbers = (signals,) if isinstance(signals, int) else tuple(signals)
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("can't handle signals from this thread: install the handler in the main thread")
    previous = {int(number): _handler_of(number) for number in numbers}
    handlers = SignalHandlers(flag, previous)
    for number in previous:
        signal.signal(number, handlers._handle)
    return handlers


def shield_worker(worker_id: int) -> None:
    """Let a dataloader's worker outlive a SIGTERM for 30 s. Give it as ``worker_init_fn``, or call it from yours.

    A worker that is no longer needed is told so otherwise, and ends at once; so does one whose parent is gone.

    Args:
        worker_id: Not used; ``worker_init_fn`` has it.
    """
    del worker_id
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, _die_later)


def _die_later(number: int, frame: FrameType | None) -> None:
    del frame
    signal.signal(number, signal.SIG_DFL)
    signal.alarm(_SHIELD_SECONDS)


def _handler_of(number: int) -> object:
    try:
        name = signal.Signals(number).name
        previous = signal.getsignal(number)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"can't handle signal {number!r}: there is none of that number") from error
    if number in (signal.SIGKILL, signal.SIGSTOP):
        raise ConfigError(f"can't handle {name}: no process can")
    if previous is None:
        raise ConfigError(f"can't handle {name}: its handler was not installed from Python, so it can't be put back")
    return previous
