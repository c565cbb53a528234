"""Objects in an S3 bucket, at the speed of the link.

Problem: through s3fs a checkpoint moves at 0.2-0.4 GB/s for 3-7 CPU seconds per GB: bodies are copied several times
in one event loop, parts go one after another, reads come in large blocks of which most is thrown away. Listings
come from a cache, a directory "created" in a missing bucket creates the bucket, and a failed write is uploaded.

Way taken, by module:

- `dcpfs.storage.s3_session`: the client, credentials and options are those of s3fs.
- `dcpfs.storage.s3_signing`: botocore prepares and signs requests.
- `dcpfs.storage.s3_http`, `dcpfs.storage.s3_transfer`: bodies go over blocking connections, one per calling thread,
  from and into the caller's memory. There are no threads here but fsspec's loop.
- `dcpfs.storage.s3_multipart`: parts, completion and abort.
- here: the verbs of `dcpfs.storage.store`, each under the one retry policy, with its errors.

Names are literal. Nothing is cached, nothing is renamed, no bucket is made, and only the configured endpoint is
spoken to. A 404 doesn't say whether object or bucket is missing when it answers a HEAD: then the bucket is asked
for, once in a client's life.
"""

from __future__ import annotations

import datetime as dt
import enum
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from http.client import HTTPException
from typing import TypeVar, cast

from dcpfs.config import RetryConfig, TransferConfig
from dcpfs.errors import (
    BucketNotFoundError,
    ObjectExistsError,
    ObjectNotFoundError,
    PermissionDeniedError,
    StorageError,
    TransferSizeError,
    UnsupportedOperationError,
)
from dcpfs.storage.capabilities import Capabilities
from dcpfs.storage.location import Location, check_name
from dcpfs.storage.retrying import RetryPolicy
from dcpfs.storage.s3_http import Scatter
from dcpfs.storage.s3_multipart import MAX_OBJECT_BYTES, S3Sink, plan_part_bytes
from dcpfs.storage.s3_session import S3Session
from dcpfs.storage.s3_signing import S3Signer
from dcpfs.storage.s3_transfer import RangedRead, S3Transfer
from dcpfs.storage.store import Buffer, ObjectInfo, PartMemory
from dcpfs.storage.translate import Fault, fault_of

__all__ = ["S3Store"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SMALL_BYTES = 256
"""An object no larger than this, a mark of who is at work, may be put twice, to find out what a condition is worth."""
_BATCH = 1000
"""Keys in one bulk delete: S3's limit."""
_DELETE_CONCURRENCY = 16
_NO_BULK_DELETE = frozenset(
    {"InvalidArgument", "InvalidDigest", "MalformedXML", "MethodNotAllowed", "MissingContentMD5", "NotImplemented"}
)
"""What old and partial stores say to a bulk delete without Content-MD5."""


class _Conditions(enum.Enum):
    """What the store makes of a put with ``If-None-Match``."""

    UNKNOWN = "unknown"
    KEPT = "kept"
    IGNORED = "ignored"
    """Written all the same, or refused as unknown."""


class S3Store:
    """A `dcpfs.storage.store.Store` in an S3 bucket. Thread-safe, picklable, usable in a forked child.

    Args:
        location: ``s3://bucket/prefix`` with the options that `s3fs.S3FileSystem` takes.
        transfer: Part size and requests in flight.
        retry: Attempts, deadline and time-outs. s3fs' and botocore's own retries are switched off.
    """

    def __init__(
        self, location: Location, *, transfer: TransferConfig | None = None, retry: RetryConfig | None = None
    ) -> None:
        self._location = location
        self._transfer_config = transfer or TransferConfig()
        self._retry_config = retry or RetryConfig()
        self._session = S3Session(location, self._retry_config, self._transfer_config.concurrency)
        self._transfer = S3Transfer(self._session, S3Signer(self._session))
        self._policy = RetryPolicy(self._retry_config, location=location)
        self._prefix = f"{self._session.prefix}/" if self._session.prefix else ""
        self._bucket_asked = False
        self._conditions = _Conditions.UNKNOWN
        self._bulk_delete = True

    def __reduce__(self) -> tuple[object, ...]:
        return _reopen, (self._location, self._transfer_config, self._retry_config)

    def __repr__(self) -> str:
        return f"S3Store({self._location.redacted!r})"

    @property
    def location(self) -> Location:
        """Where this store is."""
        return self._location

    @property
    def capabilities(self) -> Capabilities:
        """Parallel parts, and conditional puts once the store has refused one, or is Amazon's."""
        return Capabilities(
            parallel_parts=True,
            conditional_put=self._conditions is _Conditions.KEPT,
            max_object_bytes=MAX_OBJECT_BYTES,
        )

    # -- reading

    def get(self, path: str) -> bytes:
        """Read a whole object."""
        key, target = self._key(path), self._target(path)
        return self._attempt("read", path, lambda: self._transfer.read_whole(key, target))

    def get_tail(self, path: str, size_bytes: int) -> tuple[bytes, int]:
        """Read the end of an object by a suffix range: one request, but for an empty object."""
        key, target = self._key(path), self._target(path)
        if size_bytes <= 0:
            return b"", self.head(path).size_bytes
        try:
            return self._attempt("read", path, lambda: self._transfer.read_tail(key, target, size_bytes))
        except TransferSizeError:
            # An empty object has no last byte, and some stores refuse a range that is longer than the object.
            found_bytes = self.head(path).size_bytes
            if found_bytes > size_bytes:
                raise
            whole = self.get(path) if found_bytes else b""
            return whole[max(0, len(whole) - size_bytes) :], len(whole)

    def read_into(self, path: str, start: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers with one ranged GET, which goes on where it broke off when it is tried again."""
        scatter = Scatter([buffer.cast("B") for buffer in buffers])
        if not scatter.total_bytes:
            return
        read = RangedRead(self._key(path), self._target(path), start, scatter)
        self._attempt("read", path, lambda: self._transfer.read_range(read))

    def head(self, path: str) -> ObjectInfo:
        """Describe an object by a HEAD of its key."""
        key = self._key(path)
        answer = self._attempt("look up", path, lambda: self._transfer.head(key))
        return _info(path, answer, "ContentLength")

    def exists(self, path: str) -> bool:
        """Whether `head` finds it. A missing bucket is an error, not a "no"."""
        try:
            self.head(path)
        except BucketNotFoundError:
            raise
        except ObjectNotFoundError:
            return False
        return True

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """All objects below a directory, a page of up to 1,000 at a time."""
        for page in self._pages(prefix, {}):
            for entry in cast("Sequence[Mapping[str, object]]", page.get("Contents") or ()):
                name = str(entry["Key"])[len(self._prefix) :]
                if not name.endswith("/") and name:
                    yield _info(name, entry, "Size")

    def list_directories(self, prefix: str = "") -> Iterator[str]:
        """Names of the directories right below a directory."""
        depth = len(self._directory(prefix))
        for page in self._pages(prefix, {"Delimiter": "/"}):
            for entry in cast("Sequence[Mapping[str, object]]", page.get("CommonPrefixes") or ()):
                name = str(entry["Prefix"])[depth:].rstrip("/")
                if name:
                    yield name

    # -- writing

    def put(self, path: str, buffers: Sequence[Buffer], *, if_absent: bool = False) -> ObjectInfo:
        """Write an object in one request, and have the store confirm its size.

        By a HEAD, although an ETag that is an MD5 sum would say more: a store can keep less than it answered for.

        With ``if_absent`` the store itself refuses a second one, where it knows the condition.
        """
        views = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
        if if_absent:
            etag = self._put_absent(path, views)
        else:
            key = self._key(path)
            etag = self._attempt("write", path, lambda: self._transfer.put_object(key, views, if_absent=False))
        return self._confirm(path, sum(map(len, views)), etag)

    def open_sink(self, path: str, size_bytes: int, *, memory: PartMemory = PartMemory.COPIED) -> S3Sink:
        """Start an object; the first part makes the first request."""
        config = self._transfer_config
        part_bytes = plan_part_bytes(size_bytes, config.part_bytes, config.concurrency, memory)
        return S3Sink(_Writer(self, path), self._session, self._transfer, size_bytes, part_bytes)

    def delete(self, paths: Iterable[str]) -> None:
        """Delete objects, 1,000 a request. Every key's own answer is checked."""
        batch: list[str] = []
        for path in paths:
            batch.append(path)
            if len(batch) == _BATCH:
                self._delete_batch(batch)
                batch = []
        if batch:
            self._delete_batch(batch)

    def close(self) -> None:
        """Close all connections. Idempotent."""
        self._session.close()

    # -- names

    def _key(self, path: str) -> str:
        return f"{self._prefix}{check_name(path)}" if path else self._session.prefix

    def _directory(self, prefix: str) -> str:
        prefix = prefix.rstrip("/")
        return f"{self._prefix}{check_name(prefix)}/" if prefix else self._prefix

    def _target(self, path: str) -> str:
        return self._location.join(path).redacted if path else self._location.redacted

    # -- one attempt after another

    def _attempt(self, verb: str, path: str, action: Callable[[], T]) -> T:
        """Run an action under the retry policy; on a missing object, find out whether the bucket is missing."""
        generation = 0

        def attempt() -> T:
            nonlocal generation
            generation = self._session.generation
            return action()

        target = self._target(path)
        try:
            result = self._policy.run(
                attempt,
                verb=verb,
                target=target,
                refresh=lambda: self._session.refresh(generation),
                scrub=self._location.scrub,
            )
        except BucketNotFoundError:
            raise
        except (ObjectNotFoundError, PermissionDeniedError) as failure:
            if isinstance(failure, PermissionDeniedError):
                self._session.distrust()
            # Some stores deny a write to a bucket that does not exist, since it would be made.
            self._require_bucket(verb, target)
            raise
        except (ObjectExistsError, UnsupportedOperationError):
            raise
        except BaseException:
            self._session.distrust()
            raise
        self._session.note_bucket()
        return result

    def _require_bucket(self, verb: str, target: str) -> None:
        if self._bucket_asked or self._session.client.bucket_seen:
            return
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            self._session.call("head_bucket")
        except ClientError as failure:
            if failure.response.get("ResponseMetadata", {}).get("HTTPStatusCode") == 404:
                raise BucketNotFoundError(
                    f"Can't {verb} {target}: bucket {self._session.bucket!r} does not exist; create it or correct "
                    "the URL; dcpfs creates no buckets"
                ) from None
        except (BotoCoreError, HTTPException, OSError) as failure:
            logger.debug("No answer about the bucket: %s", type(failure).__name__)
        else:
            self._session.note_bucket()
        self._bucket_asked = True

    def _pages(self, prefix: str, parameters: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
        arguments = {"Prefix": self._directory(prefix), **parameters}
        while True:
            page = self._attempt("list", prefix, lambda: self._session.call("list_objects_v2", **arguments))
            yield page
            if not page.get("IsTruncated"):
                return
            token = page.get("NextContinuationToken")
            if not token or token == arguments.get("ContinuationToken"):
                raise UnsupportedOperationError(
                    f"Can't list {self._target(prefix)}: the store says that there is more and not how to ask for "
                    "it; use one that knows ListObjectsV2"
                )
            arguments["ContinuationToken"] = token

    def _put_absent(self, path: str, views: Sequence[memoryview]) -> str | None:
        key = self._key(path)
        if self.exists(path):
            raise self._taken(path)
        if self._conditions is not _Conditions.IGNORED:
            tries = 0

            def attempt() -> str | None:
                nonlocal tries
                tries += 1
                return self._transfer.put_object(key, views, if_absent=True)

            try:
                etag = self._attempt("write", path, attempt)
            except ObjectExistsError as failure:
                self._conditions = _Conditions.KEPT
                # A try whose answer was lost may itself have made the object that refuses the next one.
                if tries > 1 and self.get(path) == b"".join(views):
                    return None
                raise self._taken(path) from failure
            except UnsupportedOperationError:
                logger.info("%s knows no conditional writes: looking before writing instead", self._location)
                self._conditions = _Conditions.IGNORED
            else:
                return self._ask_about_conditions(path, views, etag)
        return self._attempt("write", path, lambda: self._transfer.put_object(key, views, if_absent=False))

    def _ask_about_conditions(self, path: str, views: Sequence[memoryview], etag: str | None) -> str | None:
        """Whether the store keeps to conditions: some (rclone, JuiceFS) take the header and write all the same.

        The same put again, of a small object that has just been put, must be refused. Once a store.
        """
        if self._conditions is not _Conditions.UNKNOWN:
            return etag
        if self._session.is_amazon:
            self._conditions = _Conditions.KEPT
        elif sum(map(len, views)) <= _SMALL_BYTES:
            try:
                etag = self._transfer.put_object(self._key(path), views, if_absent=True)
            except Exception as error:  # noqa: BLE001 - only one answer is of interest; the object is there
                if fault_of(error) is Fault.EXISTS:
                    self._conditions = _Conditions.KEPT
            else:
                logger.info("%s ignores the condition of a put: looking before writing instead", self._location)
                self._conditions = _Conditions.IGNORED
        return etag

    def _taken(self, path: str) -> ObjectExistsError:
        return ObjectExistsError(
            f"Can't write {self._target(path)}: there is an object of that name; choose another name or allow "
            "overwriting"
        )

    def _confirm(self, path: str, size_bytes: int, etag: str | None) -> ObjectInfo:
        """Have the store say that an object arrived whole."""
        info = self.head(path)
        if info.size_bytes == size_bytes:
            return info
        ours = etag is None or info.etag == etag.strip('"')
        if ours:
            self.delete([path])
        raise TransferSizeError(
            f"Can't write {self._target(path)}: {size_bytes} bytes were sent and the store reports {info.size_bytes}; "
            + (
                "the object was deleted. Check what stands between here and the store"
                if ours
                else "another writer replaced it meanwhile"
            )
        )

    # -- deleting

    def _delete_batch(self, paths: Sequence[str]) -> None:
        keys = {self._key(path): path for path in paths}
        plain = [key for key in keys if key.isprintable() or not any(ord(letter) < 32 for letter in key)]
        if len(plain) > 1 and self._bulk_delete:
            left = self._delete_bulk(keys, plain)
            single = [key for key in keys if key not in plain or key in left]
        else:
            single = list(keys)
        self._delete_singly(keys, single)

    def _delete_bulk(self, keys: Mapping[str, str], plain: Sequence[str]) -> set[str]:
        """Delete in one request; returns the keys to delete one by one."""
        left = list(plain)

        def attempt() -> None:
            nonlocal left
            answer = self._session.call(
                "delete_objects", Delete={"Objects": [{"Key": key} for key in left], "Quiet": True}
            )
            failed = {
                str(entry.get("Key")): entry
                for entry in cast("Sequence[Mapping[str, object]]", answer.get("Errors") or ())
                if entry.get("Code") not in ("NoSuchKey", "NoSuchVersion")
            }
            if failed.keys() <= set(left):
                left = [key for key in left if key in failed]
            # Else one failed without a name, or under another: it can be any.
            if failed:
                raise _key_error(next(iter(failed.values())))
            left = []

        try:
            self._attempt("delete", keys[left[0]], attempt)
        except StorageError as failure:
            if not _refuses_bulk(failure):
                raise
            logger.info("%s knows no bulk delete without an MD5 sum: deleting one by one", self._location)
            self._bulk_delete = False
        return set(left)

    def _delete_singly(self, keys: Mapping[str, str], single: Sequence[str]) -> None:
        left = list(single)

        def attempt() -> None:
            nonlocal left
            outcomes = self._session.call_each(
                "delete_object", [{"Key": key} for key in left], concurrency=_DELETE_CONCURRENCY
            )
            failed = {key: outcome for key, outcome in zip(left, outcomes, strict=True) if outcome is not None}
            # That one is gone already, as some stores say, must not hide what another one failed of.
            left = [key for key, outcome in failed.items() if not _says_absent(outcome)]
            for key in left or failed:
                raise failed[key]

        if left:
            try:
                self._attempt("delete", keys[left[0]], attempt)
            except BucketNotFoundError:
                raise
            except ObjectNotFoundError:
                pass


class _Writer:
    """The verbs of a store on one object, for its sink."""

    def __init__(self, store: S3Store, path: str) -> None:
        self._store = store
        self.path = path
        self.key = store._key(path)
        self.target = store._target(path)

    def attempt(self, verb: str, action: Callable[[], T]) -> T:
        return self._store._attempt(verb, self.path, action)

    def put(self, buffers: Sequence[memoryview]) -> ObjectInfo:
        return self._store.put(self.path, buffers)

    def head(self) -> ObjectInfo:
        return self._store.head(self.path)

    def delete(self) -> None:
        self._store.delete([self.path])


def _reopen(location: Location, transfer: TransferConfig, retry: RetryConfig) -> S3Store:
    return S3Store(location, transfer=transfer, retry=retry)


def _info(path: str, answer: Mapping[str, object], size_name: str) -> ObjectInfo:
    modified, etag = answer.get("LastModified"), answer.get("ETag")
    return ObjectInfo(
        path,
        int(cast("int", answer.get(size_name) or 0)),
        str(etag).strip('"') if etag else None,
        modified.timestamp() if isinstance(modified, dt.datetime) else None,
    )


def _key_error(entry: Mapping[str, object]) -> Exception:
    """What a bulk delete says of one key, as an exception like that of a single delete."""
    from botocore.exceptions import ClientError

    return cast(
        "Exception",
        ClientError(
            {"Error": {"Code": str(entry.get("Code")), "Message": str(entry.get("Message") or "")}}, "DeleteObjects"
        ),
    )


def _says_absent(outcome: BaseException) -> bool:
    return isinstance(outcome, Exception) and fault_of(outcome) is Fault.NOT_FOUND


def _refuses_bulk(failure: StorageError) -> bool:
    response = getattr(failure.__cause__, "response", None)
    details = response.get("Error") if isinstance(response, dict) else None
    return isinstance(details, dict) and details.get("Code") in _NO_BULK_DELETE
