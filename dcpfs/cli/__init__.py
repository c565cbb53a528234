"""The command line. `main` runs it; `app` holds the commands."""

from dcpfs.cli.app import main

__all__ = ["main"]
