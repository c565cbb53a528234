"""Which store serves a location.

Local files and S3 have stores of their own, which move bytes straight from and into tensor memory; every
other scheme is served through its fsspec filesystem. A store's module, and with it its client library, is
imported only when it is the one. Caches around a location are left out (`dcpfs.storage.filesystems` says
why).
"""

from __future__ import annotations

from dcpfs.config import RetryConfig, TransferConfig
from dcpfs.storage.filesystems import uncached
from dcpfs.storage.location import Location
from dcpfs.storage.store import Store

__all__ = ["open_store"]


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
