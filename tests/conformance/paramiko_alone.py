"""An environment in which fsspec's own class serves ``sftp://``, as where sshfs is not installed.

sshfs registers itself for that scheme by an entry point of its distribution. Here another distribution of that name
stands before it on the path, of this process and of those that it starts, whose entry points name fsspec's class.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

__all__ = ["paramiko_alone"]

_CLASS = "fsspec.implementations.sftp:SFTPFileSystem"


@contextmanager
def paramiko_alone(directory: Path) -> Iterator[None]:
    """Let paramiko serve ``sftp://`` here and in processes started from here.

    Args:
        directory: An empty one.
    """
    from fsspec.implementations.sftp import SFTPFileSystem

    shadow = directory / "sshfs-0.dist-info"
    shadow.mkdir()
    (shadow / "METADATA").write_text("Metadata-Version: 2.1\nName: sshfs\nVersion: 0\n")
    (shadow / "entry_points.txt").write_text(f"[fsspec.specs]\nsftp = {_CLASS}\nssh = {_CLASS}\n")
    inherited = os.environ.get("PYTHONPATH")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(directory), *([inherited] if inherited else [])]))
        patch.syspath_prepend(str(directory))
        # What this process has registered already: fsspec keeps the classes that it has once imported.
        for protocol in ("sftp", "ssh"):
            patch.setitem(sys.modules["fsspec.registry"].__dict__["_registry"], protocol, SFTPFileSystem)
        yield
