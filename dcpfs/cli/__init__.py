"""The command line: ``dcpfs demo`` and what follows it."""

from dcpfs.cli.app import main

__all__ = ["main"]
