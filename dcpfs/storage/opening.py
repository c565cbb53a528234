"""Which store serves a location.

Local files and S3 have stores of their own, which move bytes straight from and into tensor memory; every
other scheme is served through its fsspec filesystem. A store's module, and with it its client library, is
imported only when it is the one. Caches around a location are left out (`dcpfs.storage.filesystems` says
why).
"""

from __future__ import annotations

from dcpfs.config import RetryConfig, TransferConfig
from dcpfs.errors import ConfigError, UnsupportedOperationError
from dcpfs.storage.filesystems import Publishing, listed_traits, uncached
from dcpfs.storage.location import Location
from dcpfs.storage.store import Store

__all__ = ["open_store", "require_shared", "require_writable"]


def require_shared(location: Location) -> None:
    """Return when another process of this machine finds there what this one puts, as far as the scheme says.

    Raises:
        ConfigError: It is the memory of one process.
    """
    traits = listed_traits(location)
    if traits is not None and traits.publishing is Publishing.MEMORY:
        raise ConfigError(
            f"Can't save to {location} from a process of its own: {location.scheme}:// is the memory of one process, "
            "and nobody else would find the checkpoint there; save in this process (async_mode='async') or to a store"
        )


def require_writable(location: Location) -> None:
    """Return when the scheme of a location can be written at all. Opens nothing, and imports no client.

    Raises:
        UnsupportedOperationError: It can only be read.
    """
    traits = listed_traits(location)
    if traits is not None and traits.publishing is Publishing.NEVER:
        raise UnsupportedOperationError(
            f"Can't save to {location}: {location.scheme}:// is read-only here; save to a store that can be written, "
            "or only load (a checkpointer is made for that with access='read_only')"
        )


def open_store(
    location: Location, *, transfer: TransferConfig | None = None, retry: RetryConfig | None = None
) -> Store:
    """Make the store of a location. No request is made yet.

    Args:
        location: Where it is.
        transfer: Part sizes, concurrency, durability.
        retry: Attempts and time-outs.

    Raises:
        ConfigError: The scheme is unknown.
        MissingBackendError: The scheme's package is not installed; names the extra to install.
    """
    plain = uncached(location)
    if plain.scheme == "file":
        from dcpfs.storage.local_store import LocalStore

        return LocalStore(plain, transfer=transfer, retry=retry)
    if plain.scheme == "s3":
        from dcpfs.storage.s3_store import S3Store

        return S3Store(plain, transfer=transfer, retry=retry)
    from dcpfs.storage.fsspec_store import FsspecStore

    return FsspecStore(location, transfer=transfer, retry=retry)
