"""What becomes of saves when a process ends without closing its checkpointer.

Problem: a script that ends after its last `save` loses it without a word, and with exit code 0 (case 48). By the time
that ``atexit`` hooks run, executors take no more work and threads have been waited for without a deadline; and children
of ``multiprocessing`` run none of them at all.

Way taken: a hook that runs where the interpreter begins to wait for threads (`threading`'s own list, of which executors
make use; ``atexit`` where there is none) waits for what is in flight, within a deadline, and says what failed. The exit
code of an interpreter that is on its way out can be changed by ``os._exit`` alone, which runs no other hook and flushes
nothing; so it is called only when a save has failed or is late, after everything has been flushed.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
import threading

from dcpfs.checkpointer.saver import Saver
from dcpfs.worker_deaths import undisturbed_by_workers

__all__ = ["FAILED_EXIT_CODE", "ExitHook"]

_logger = logging.getLogger(__name__)

FAILED_EXIT_CODE = 74
"""``EX_IOERR`` of sysexits.h."""

_waiting: list[ExitHook] = []
"""Hooks of this process that were not cancelled, in the order in which they were made."""


class ExitHook:
    """Waits for a saver at the end of the process. `cancel` once it has been closed.

    Args:
        saver: Whose saves.
        timeout_seconds: The longest wait.
    """

    def __init__(self, saver: Saver, timeout_seconds: float) -> None:
        self.saver = saver
        self.timeout_seconds = timeout_seconds
        self.pid = os.getpid()
        _waiting.append(self)
        _register_once()

    def cancel(self) -> None:
        """Leave the end of the process alone. Idempotent."""
        if self in _waiting:
            _waiting.remove(self)


@functools.cache
def _register_once() -> None:
    register: object = getattr(threading, "_register_atexit", None)  # what concurrent.futures uses, since 3.9
    if callable(register):
        register(_run_all)
    else:
        atexit.register(_run_all)


@undisturbed_by_workers()
def _run_all() -> None:
    errors: list[BaseException] = []
    while _waiting:
        hook = _waiting.pop()
        if hook.pid != os.getpid():  # a forked child ends: the saves are its parent's
            continue
        saver = hook.saver
        if saver.in_flight:
            names = ", ".join(map(str, saver.in_flight))
            _logger.warning("the process ends without close(): waiting for the save of iteration %s", names)
        try:
            failed = saver.drain(hook.timeout_seconds)
            if not failed:
                saver.close()
        except Exception as error:  # noqa: BLE001 - the other hooks have saves to wait for
            failed = [error]
        errors += failed
    if errors:
        _end(errors)


def _end(errors: list[BaseException]) -> None:
    for error in errors:
        print(f"dcpfs: {error}", file=sys.stderr)  # noqa: T201 - the log may be closed by now
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(FAILED_EXIT_CODE)
