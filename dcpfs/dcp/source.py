"""A checkpoint that is being read: its store, its metadata, and how its entries are decoded.

Problem: a missing checkpoint shows, with torch, as an ``AssertionError`` inside a multi-page trace (case 103), and what
a load may unpickle depends on which of three code paths meets the pickle first.

Way taken: one value that `dcpfs.load`, `dcpfs.read` and the storage reader share. It opens the store when it is first
needed, says plainly that there is no checkpoint, and carries the caller's trust to everything that decodes.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping
from typing import IO, TYPE_CHECKING, cast

import torch
from torch.distributed.checkpoint.metadata import Metadata

from dcpfs import torch_private
from dcpfs.config import RetryConfig, TransferConfig, Trust, VerifyMode
from dcpfs.dcp.checkpoints_below import point_below
from dcpfs.dcp.fetch import Fetch
from dcpfs.dcp.landing import TensorWant
from dcpfs.errors import (
    BucketNotFoundError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    DamagedObjectError,
    ObjectNotFoundError,
    PermissionDeniedError,
)
from dcpfs.format.entries import decode_object, decode_tensor_entry
from dcpfs.format.index import CheckpointIndex, EntryLocation, RankSave
from dcpfs.format.index_block import ends_with_index
from dcpfs.format.metadata import decode_both, decode_index, merge_indexes
from dcpfs.format.names import METADATA_NAME, parse_rank_metadata_name, rank_metadata_name
from dcpfs.format.rank_saves import check_one_save, is_beyond
from dcpfs.storage.location import Location
from dcpfs.storage.opening import open_store
from dcpfs.storage.store import Store

if TYPE_CHECKING:
    from fsspec.callbacks import Callback

    from dcpfs.torch_private import ExtensionRegistry

__all__ = ["CheckpointSource"]

_logger = logging.getLogger(__name__)

_ALIKE_BYTES = 2048
"""Entries up to this size are decoded once for all with the same bytes: an optimizer has some ten plain values for each
of its parameters, most of them equal, and decoding one takes 60 µs."""
_CONSTANTS = frozenset({int, float, bool, complex, str, bytes, type(None)})


class CheckpointSource:
    """Reads one checkpoint. Belongs to one thread at a time; `close` when done.

    Args:
        location: Where it is.
        verify: What is checked beside sizes.
        trust: What may be unpickled.
        transfer: Concurrency, memory and request sizes; None: the defaults.
        retry: When a request is tried again; None: the defaults.
        callback: Told the bytes of the load.
        registry: torch's stream transforms; None: those that torch brings.
    """

    def __init__(
        self,
        location: Location,
        *,
        verify: VerifyMode | str = VerifyMode.CHECKSUMS,
        trust: Trust | str = Trust.ALLOWLIST,
        transfer: TransferConfig | None = None,
        retry: RetryConfig | None = None,
        callback: Callback | None = None,
        registry: ExtensionRegistry | None = None,
    ) -> None:
        self.location = location
        self.verify = VerifyMode(verify)
        self.trust = Trust(trust)
        self.transfer = TransferConfig.given(transfer)
        self._retry = RetryConfig.given(retry)
        self._callback = callback
        self._registry = registry
        self._store: Store | None = None
        self._alike: dict[bytes, object] = {}

    @property
    def url(self) -> str:
        """Redacted URL."""
        return self.location.redacted

    @property
    def store(self) -> Store:
        """The store, opened when first asked for."""
        if self._store is None:
            self._store = open_store(self.location, transfer=self.transfer, retry=self._retry)
        return self._store

    def close(self) -> None:
        """Close the store; a later use opens it again. Idempotent."""
        store, self._store = self._store, None
        if store is not None:
            store.close()

    def read_all_metadata(self) -> list[bytes]:
        """Read ``.metadata``, or where there is none the metadata that ranks wrote by themselves, by rank.

        Raises:
            CheckpointNotFoundError: There is neither.
        """
        try:
            found_common = self.read_metadata()
        except CheckpointNotFoundError:
            # Asked first: the URL may be that of a run, with millions of files to list.
            if not self.store.capabilities.listable or not self.store.exists(rank_metadata_name(0)):
                raise
            ranks = [parse_rank_metadata_name(info.path) for info in self.store.list()]
            found = sorted(rank for rank in ranks if rank is not None)
            if not found:
                raise
            return [self.read_metadata(rank) for rank in found]
        self.require_newest(found_common)
        return [found_common]

    def require_newest(self, common: bytes) -> None:
        """Return when the ``.metadata`` is not older than a save without collectives at the same URL.

        dcpfs's writer removes either before it writes the other. torch's removes neither, and its data files have the
        same names, so that the older metadata then describes what the newer save wrote.

        Args:
            common: The ``.metadata``. That of dcpfs has checksums, and is not asked about.

        Raises:
            CorruptCheckpointError: It is older.
        """
        own = rank_metadata_name(0)
        if ends_with_index(common):
            return
        try:
            if not self.store.exists(own):
                return
        except PermissionDeniedError:  # S3's answer for what is absent, where listing is not allowed
            return
        times = [self.store.head(name).modified_seconds for name in (METADATA_NAME, own)]
        if times[0] is None or times[1] is None:
            _logger.warning(
                "loading %s: %s and %s stand there, and nothing tells which is newer", self.url, METADATA_NAME, own
            )
        elif times[1] > times[0]:
            raise CorruptCheckpointError(
                f"loading {self.url}: its {METADATA_NAME} is older than its {own}, of a save without collectives that "
                "has written files of the same names; delete that of the save that you don't want, or load another "
                "checkpoint",
                file=METADATA_NAME,
            )

    def explain_absence(self, error: CheckpointNotFoundError) -> CheckpointNotFoundError:
        """The error of a load that ends here, with the URL that was meant where that can be found out."""
        return point_below(error, self.store)

    def read_metadata(self, rank: int | None = None) -> bytes:
        """Read ``.metadata``, or the metadata that one rank wrote by itself.

        Raises:
            CheckpointNotFoundError: There is none.
            CorruptCheckpointError: The store itself finds that it is damaged.
        """
        name = METADATA_NAME if rank is None else rank_metadata_name(rank)
        try:
            return self.store.get(name)
        except BucketNotFoundError:
            raise
        except DamagedObjectError as error:
            raise CorruptCheckpointError(
                f"reading the {name} of {self.url}: the store finds damage ({error.message})", file=name
            ) from error
        except ObjectNotFoundError as error:
            raise CheckpointNotFoundError(
                f"no checkpoint at {self.url}: it has no {name}; check the URL (a save that failed or still runs "
                f"leaves none)"
            ) from error

    def decode_index(self, *files: bytes) -> CheckpointIndex:
        """The checkpoint's table of contents from `read_all_metadata`."""
        indexes = [decode_index(data, trust=self.trust, url=self.url) for data in files]
        if len(indexes) == 1 and indexes[0].rank_save is None:
            return indexes[0]
        return merge_indexes(indexes, url=self.url)

    def require_same_save(self, rank: int, own: RankSave | None) -> None:
        """Return when a rank's own metadata is of the save that rank 0 has published, or rank 0 has none.

        Raises:
            CheckpointNotFoundError: Fewer ranks saved it.
            CorruptCheckpointError: It is of another save.
        """
        try:
            first = decode_index(self.read_metadata(0), trust=self.trust, url=self.url).rank_save
        except CheckpointNotFoundError:
            return
        if is_beyond(first, rank, own):
            raise CheckpointNotFoundError(
                f"no checkpoint of rank {rank} at {self.url}: fewer ranks saved it, and {rank_metadata_name(rank)} is "
                "left of an older save; load it with as many ranks as saved it, or with dcpfs.load"
            )
        check_one_save([first, own], url=self.url)

    def decode_both(self, data: bytes) -> tuple[CheckpointIndex, Metadata]:
        """The table of contents, and torch's metadata, of one file."""
        return decode_both(data, trust=self.trust, url=self.url)

    def decode_object(self, key: str, data: bytes | memoryview) -> object:
        """A non-tensor value from its bytes.

        Raises:
            UntrustedDataError: It holds a class outside the allow-list.
            CorruptCheckpointError: The bytes are not a value.
        """
        if len(data) > _ALIKE_BYTES:
            return decode_object(data, trust=self.trust, key=key)
        encoded = bytes(data)
        if encoded in self._alike:
            return self._alike[encoded]
        value = decode_object(encoded, trust=self.trust, key=key)
        if _is_constant(value):
            self._alike[encoded] = value
        return value

    def new_fetch(self, index: CheckpointIndex) -> Fetch:
        """An empty fetch from this checkpoint."""
        return self.new_fetch_of(index.data_files())

    def new_fetch_of(self, file_sizes: Mapping[str, int]) -> Fetch:
        """An empty fetch from files of which the least sizes are known: several checkpoints below one location."""
        return Fetch(
            self.store,
            self.transfer,
            verify=self.verify is VerifyMode.CHECKSUMS,
            file_sizes=file_sizes,
            decode=self._decode_tensor,
            undo_transforms=self._undo_transforms,
            callback=self._callback,
        )

    def _decode_tensor(self, data: memoryview, want: TensorWant) -> torch.Tensor:
        plain = self._undo_transforms(data, want.key, want.location) if want.location.transforms else data
        return decode_tensor_entry(plain, trust=self.trust, key=want.key)

    def _undo_transforms(self, data: memoryview, key: str, location: EntryLocation) -> bytes:
        """Undo the stream transforms of an entry.

        Raises:
            ConfigError: The registry does not know one, or its package is not installed.
            CorruptCheckpointError: The stream is damaged.
        """
        if self._registry is None:
            self._registry = torch_private.new_extension_registry()
        try:
            undo_all = torch_private.stream_transforms(self._registry, location.transforms)
        except ValueError as error:
            raise ConfigError(
                f"loading key {key!r} from {self.url}: saved through {', '.join(location.transforms)} ({error}); "
                f"install what that needs, or pass an extension_registry that knows it"
            ) from error
        try:
            stream = cast("IO[bytes]", io.BytesIO(data))
            for undo in undo_all:
                stream = undo(stream)
            return stream.read(-1)
        except Exception as error:
            raise CorruptCheckpointError(
                f"loading key {key!r} from {self.url}: undoing {', '.join(location.transforms)} of its entry in file "
                f"{location.file!r} failed ({error}); the data changed since it was saved, so load another checkpoint",
                file=location.file,
                key=key,
            ) from error


def _is_constant(value: object) -> bool:
    """Whether nobody can change the value, so that many places may have the same one."""
    return type(value) in _CONSTANTS or (type(value) is tuple and all(type(part) in _CONSTANTS for part in value))
