"""Where a background process begins: ``main(["DESCRIPTOR", "MODULE:FUNCTION", "NICENESS"])``.

Problem: what a new process does before it does its work decides whether it survives: a launcher's SIGTERM to the whole
group kills the save that the SIGTERM asked for (case 42).

Way taken: signals that end trainers are ignored first. The function gets the channel and ends when that closes.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Run the function; the exit code of the process.

    Args:
        arguments: Descriptor of the channel, ``module:function``, niceness.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    descriptor, target, niceness = int(arguments[0]), arguments[1], int(arguments[2])
    if niceness:
        os.nice(niceness)
    from dcpfs.background.channel import Channel

    module, _, name = target.partition(":")
    if module.partition(".")[0] != "dcpfs":
        raise ValueError(f"{target!r} is no function of dcpfs")
    run = getattr(importlib.import_module(module), name)
    run(Channel(socket.socket(fileno=descriptor)))
    return 0
