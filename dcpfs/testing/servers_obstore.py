"""S3 through obstore's class of fsspec filesystem, under a scheme of its own, on SeaweedFS.

Problem: ``s3://`` is served by the store for S3, whatever class is registered for it, so another client of S3 is only
reached by another scheme. fsspec keeps such a scheme in a dictionary of the process that registered it: a process that
is started later knows nothing of it.

Way taken: `obstore_scheme` registers ``obs3://`` for this process, as people do with ``register``. With
`obstore_installed` an entry point of a distribution names the class, so that started processes have it as well.

Flow: ``with obstore_scheme(), ObstoreServer() as server:`` → ``Location(server.url("run"), server.storage_options)``.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dcpfs.testing.servers import S3Server, SeaweedServer

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

__all__ = ["ObstoreServer", "obstore_installed", "obstore_options", "obstore_scheme"]

_SCHEME = "obs3"
_PATH = "PYTHONPATH"


def obstore_options(server: S3Server) -> dict[str, object]:
    """The options by which obstore's class reaches a server; a fresh dict."""
    config = {
        "endpoint": server.endpoint_url,
        "access_key_id": server.access_key,
        "secret_access_key": server.secret_key,
        "region": server.region,
        "virtual_hosted_style_request": False,
    }
    return {"config": config, "client_options": {"allow_http": True}}


class ObstoreServer(SeaweedServer):
    """SeaweedFS, for obstore's class, which takes other options and here another scheme."""

    @property
    def storage_options(self) -> dict[str, object]:
        """Options as obstore takes them; a fresh dict."""
        return obstore_options(self)

    def url(self, path: str = "") -> str:
        """URL of a name in the bucket."""
        return f"{_SCHEME}://{self.bucket}/{path}"


@functools.cache
def _obstore_class() -> type[AbstractFileSystem]:
    from obstore.fsspec import FsspecStore

    class Obs3Filesystem(FsspecStore):
        protocol = "s3"  # which kind of store obstore opens

        @classmethod
        def _strip_protocol(cls, path: str | list[str]) -> str | list[str]:
            known = path.replace(f"{_SCHEME}://", "s3://", 1) if isinstance(path, str) else path
            stripped: str | list[str] = super()._strip_protocol(known)
            return stripped

        def _split_path(self, path: str) -> tuple[str, str]:
            bucket, name = super()._split_path(path.replace(f"{_SCHEME}://", "s3://", 1))
            return bucket, name

    return Obs3Filesystem


def __getattr__(name: str) -> object:
    # What the entry point names. obstore is imported by whoever asks for its class, and by nobody else.
    if name == "Obs3Filesystem":
        return _obstore_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@contextmanager
def obstore_scheme() -> Iterator[None]:
    """``obs3://`` is S3 through obstore, for fsspec in this process and so for torch and dcpfs.

    Raises:
        ImportError: obstore is not installed.
    """
    import fsspec  # noqa: F401 - brings the module below

    # fsspec's own registry, so that a name registered here is gone afterwards.
    registry = sys.modules["fsspec.registry"].__dict__["_registry"]
    before = registry.get(_SCHEME)
    registry[_SCHEME] = _obstore_class()
    try:
        yield
    finally:
        if before is None:
            del registry[_SCHEME]
        else:
            registry[_SCHEME] = before


@contextmanager
def obstore_installed(directory: Path) -> Iterator[None]:
    """The same, in processes that are started from here as well.

    Args:
        directory: An empty one, for a distribution that names the class by an entry point.

    Raises:
        ImportError: obstore is not installed.
    """
    installed = directory / "dcpfs_obstore_scheme-0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: dcpfs-obstore-scheme\nVersion: 0\n")
    (installed / "entry_points.txt").write_text(f"[fsspec.specs]\n{_SCHEME} = {__name__}:Obs3Filesystem\n")
    before = os.environ.get(_PATH)
    os.environ[_PATH] = os.pathsep.join([str(directory), *([before] if before else [])])
    sys.path.insert(0, str(directory))
    try:
        with obstore_scheme():
            yield
    finally:
        sys.path.remove(str(directory))
        if before is None:
            del os.environ[_PATH]
        else:
            os.environ[_PATH] = before
