"""What becomes of saves when a process ends without closing its checkpointer.

Problem: a script that ends after its last `save` loses it without a word, and with exit code 0 (case 48).

Way taken: a hook at the interpreter's exit waits for what is in flight, within a deadline, and says what failed. The
exit code of a process whose interpreter is on its way out can be changed by ``os._exit`` alone, which runs no other
hook and flushes nothing; so it is called only when a save has failed, after everything has been flushed.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys

from dcpfs.checkpointer.saver import Saver

__all__ = ["FAILED_EXIT_CODE", "ExitHook"]

_logger = logging.getLogger(__name__)

FAILED_EXIT_CODE = 74
"""``EX_IOERR`` of sysexits.h."""


class ExitHook:
    """Waits for a saver at the end of the process. `cancel` once it has been closed.

    Args:
        saver: Whose saves.
        timeout_seconds: The longest wait.
    """

    def __init__(self, saver: Saver, timeout_seconds: float) -> None:
        self._saver = saver
        self._timeout_seconds = timeout_seconds
        self._pid = os.getpid()
        atexit.register(self._run)

    def cancel(self) -> None:
        """Leave the end of the process alone. Idempotent."""
        atexit.unregister(self._run)

    def _run(self) -> None:
        if os.getpid() != self._pid:  # a forked child ends: the saves are its parent's
            return
        waiting = self._saver.in_flight
        if waiting:
            _logger.warning("the process ends without close(): waiting for the save of iteration %s", waiting)
        errors = self._saver.drain(self._timeout_seconds)
        if not errors:
            self._saver.close()
            return
        for error in errors:
            print(f"dcpfs: {error}", file=sys.stderr)  # noqa: T201 - the log may be closed by now
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(FAILED_EXIT_CODE)
