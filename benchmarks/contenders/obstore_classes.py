"""obstore's fsspec class, below dcpfs and below torch: what another client of S3 makes of both.

dcpfs opens ``s3://`` with its own client whatever fsspec knows, so for dcpfs the class is given a scheme of its own
(``obstore-s3://``). For torch it takes the place of s3fs for the time of a call, as its users do it with ``register``.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

import fsspec
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ..settings import S3Access, Target
from ..workloads import State
from . import Layout, Scope
from .ours import import_dcpfs

if TYPE_CHECKING:
    from obstore.store import ClientConfig, S3Config

__all__ = ["DcpfsOnObstore", "TorchOnObstore"]

_SCHEME = "obstore-s3"


class _OnObstore:
    layout = Layout.DCP
    sharding = True

    def available(self) -> str | None:
        """Absent when the package is."""
        if importlib.util.find_spec("obstore") is None:
            return "obstore is not installed (extra: bench)"
        return None


class DcpfsOnObstore(_OnObstore):
    """dcpfs's writer and reader, which serve it like any filesystem that nobody listed."""

    def import_modules(self, target: Target) -> None:
        """obstore, and dcpfs's writer, reader and store."""
        import_dcpfs(_address(target)[0])

    def save(self, state: State, target: Target) -> None:
        """Save."""
        import dcpfs

        url, options = _address(target)
        save(state, storage_writer=dcpfs.FsspecStorageWriter(url, storage_options=options))

    def load(self, template: State, target: Target, scope: Scope) -> None:
        """Load."""
        import dcpfs

        del scope
        url, options = _address(target)
        load(template, storage_reader=dcpfs.FsspecStorageReader(url, storage_options=options))


class TorchOnObstore(_OnObstore):
    """torch's ``FsspecWriter`` and ``FsspecReader``."""

    def import_modules(self, target: Target) -> None:
        """Obstore."""
        del target
        _make_class("s3")

    def save(self, state: State, target: Target) -> None:
        """Save."""
        with _in_place_of_s3fs():
            save(state, storage_writer=FsspecWriter(target.url, sync_files=False, **_options(target)))  # type: ignore[arg-type] # options are what the scheme takes

    def load(self, template: State, target: Target, scope: Scope) -> None:
        """Load."""
        del scope
        with _in_place_of_s3fs():
            load(template, storage_reader=FsspecReader(target.url, **_options(target)))


def _address(target: Target) -> tuple[str, dict[str, object]]:
    """URL under our own scheme, and options."""
    access = _access(target)
    fsspec.register_implementation(_SCHEME, _make_class(_SCHEME), clobber=True)
    return f"{_SCHEME}://{access.bucket}/{access.key}", _options(target)


@contextlib.contextmanager
def _in_place_of_s3fs() -> Iterator[None]:
    before = fsspec.get_filesystem_class("s3")
    fsspec.register_implementation("s3", _make_class("s3"), clobber=True)
    try:
        yield
    finally:
        fsspec.register_implementation("s3", before, clobber=True)


def _access(target: Target) -> S3Access:
    access = target.s3()
    if access is None:
        raise ValueError(f"obstore's class is used for S3 only, not {target.scheme}")
    return access


def _options(target: Target) -> dict[str, object]:
    """In obstore's words."""
    access = _access(target)
    config: dict[str, object] = {"region": access.region}
    if access.endpoint is not None:
        config |= {"endpoint": access.endpoint, "virtual_hosted_style_request": False}
    if access.access_key is not None and access.secret_key is not None:
        config |= {"access_key_id": access.access_key, "secret_access_key": access.secret_key}
    if access.token is not None:
        config["session_token"] = access.token
    return {"config": config, "client_options": {"allow_http": True}}


@lru_cache(maxsize=2)
def _make_class(scheme: str) -> type[fsspec.AbstractFileSystem]:
    from obstore.fsspec import FsspecStore

    class ObstoreS3(FsspecStore):
        """Says ``s3`` to obstore, and its own scheme to fsspec."""

        protocol = scheme

        def __init__(self, config: S3Config, client_options: ClientConfig) -> None:
            super().__init__("s3", config=config, client_options=client_options)

    return ObstoreS3
