"""One S3 object being written: in a single request, or in parts that travel at once.

Problem: an upload that fails half-way must leave nothing, neither a short object nor parts that nobody sees and
everybody pays for; a limit of 10,000 parts must not be found out after terabytes; and a lost answer to the last
request leaves open whether the object exists.

Way taken:

- The part size comes from the object's size, which is known. Small objects are kept (a copy of at most 5 MiB) and
  written by one PUT at `commit`, which is atomic.
- The upload is created by the first part. `abort` removes it and every part at the store, and does so again when
  parts that were on their way as it was called have ended, since such a part can arrive after it.
- Completing is not repeated blindly: after a lost or failed answer the object itself is asked, whose ETag is made
  of those of the parts, and then the upload, which is gone once it has been completed.
- After that the store must report the size that was sent. An object of another size is deleted.

Flow: `plan_part_bytes` → ``write_part`` per part, from any thread → ``commit`` or ``abort``.
"""

from __future__ import annotations

import datetime as dt
import email.utils
import hashlib
import logging
import re
import threading
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar, cast

from dcpfs.errors import ConfigError, DcpfsError, ObjectNotFoundError, StorageError, TransferSizeError
from dcpfs.storage.s3_session import S3Session
from dcpfs.storage.s3_signing import PartSigner
from dcpfs.storage.s3_transfer import S3Transfer
from dcpfs.storage.store import Buffer, ObjectInfo, PartMemory, PartRange

__all__ = ["MAX_OBJECT_BYTES", "ObjectWriter", "S3Sink", "plan_part_bytes"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MIB = 1 << 20
_COPIED_PART_BYTES = 16 * _MIB
_IN_PLACE_PART_BYTES = 64 * _MIB
"""A part costs a request, an answer and changes of threads: a save took 0.48 CPU seconds per GB in parts of 14 MiB and
0.41 in parts of 43 MiB. Still larger ones bring little and repeat more after a failure."""
_LARGE_PART_ROUNDS = 3
"""Parts grow beyond the usual size only as far as every connection still has so many: when each had one, saves took a
fifth longer, since all waited for the slowest connection."""
_MIN_PART_BYTES = 5 * _MIB
"""S3 refuses smaller parts, but for the last."""
_EVEN_PART_BYTES = 8 * _MIB
_ALIGNMENT_BYTES = 64 << 10
_MAX_PARTS = 10_000
MAX_OBJECT_BYTES = 5 << 40
_SINGLE_PUT_BYTES = 5 * _MIB
"""Up to here one request with a copy is quicker than the three of an upload in one part."""
_MD5 = re.compile(r'"?([0-9a-f]{32})"?$')


def plan_part_bytes(
    size_bytes: int, part_bytes: int | None, concurrency: int, memory: PartMemory = PartMemory.COPIED
) -> int:
    """Size of the parts of an object, of which the last may be shorter.

    Args:
        size_bytes: Of the object.
        part_bytes: What the user asked for: raised where S3's limits demand it. None: 8 to 16 MiB, and of large
            objects up to 64 MiB where parts take no memory, such that all requests in flight have work until the end.
        concurrency: Requests in flight.
        memory: What a part takes.

    Raises:
        ConfigError: No part size fits the object.
    """
    if size_bytes > MAX_OBJECT_BYTES:
        raise ConfigError(
            f"An object of {size_bytes} bytes is larger than S3 takes ({MAX_OBJECT_BYTES} bytes); set "
            "TransferConfig.file_bytes to split it into several"
        )
    needed = _rounded(-(-size_bytes // _MAX_PARTS))
    if part_bytes is None:
        most_bytes = _COPIED_PART_BYTES
        if memory is PartMemory.IN_PLACE:
            share = _rounded(-(-size_bytes // (_LARGE_PART_ROUNDS * concurrency)))
            most_bytes = min(max(share, most_bytes), _IN_PLACE_PART_BYTES)
        rounds = max(1, -(-size_bytes // (most_bytes * concurrency)))
        even = _rounded(-(-size_bytes // (rounds * concurrency)))
        part_bytes = min(max(even, _EVEN_PART_BYTES), most_bytes)
    return max(part_bytes, _MIN_PART_BYTES, needed)


def _rounded(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


class ObjectWriter(Protocol):
    """What a sink needs of its store: verbs on its one object, each retried and raising `dcpfs.errors`."""

    @property
    def path(self) -> str:
        """Name in the store."""
        ...

    @property
    def key(self) -> str:
        """Name in the bucket."""
        ...

    @property
    def target(self) -> str:
        """Redacted URL."""
        ...

    def attempt(self, verb: str, action: Callable[[], T]) -> T:
        """Run an action under the retry policy."""
        ...

    def put(self, buffers: Sequence[memoryview]) -> ObjectInfo:
        """Write it in one request and check its size."""
        ...

    def head(self) -> ObjectInfo:
        """Describe it."""
        ...

    def delete(self) -> None:
        """Delete it."""
        ...


class S3Sink:
    """A `dcpfs.storage.store.Sink`. Thread-safe."""

    def __init__(
        self,
        writer: ObjectWriter,
        session: S3Session,
        transfer: S3Transfer,
        size_bytes: int,
        part_bytes: int,
    ) -> None:
        self._writer = writer
        self._session = session
        self._transfer = transfer
        self._size_bytes = size_bytes
        starts = range(0, size_bytes, part_bytes) if size_bytes else [0]
        self._parts = tuple(PartRange(start, min(start + part_bytes, size_bytes)) for start in starts)
        self._numbers = {part.start: number for number, part in enumerate(self._parts, 1)}
        self._single = len(self._parts) == 1 and size_bytes <= _SINGLE_PUT_BYTES
        self._content: bytes | None = None
        self._done: dict[int, dict[str, object]] = {}
        self._upload_id: str | None = None
        self._creation_failure: DcpfsError | None = None
        self._created: dt.datetime | None = None
        self._maybe_completed = False
        self._signer: PartSigner | None = None
        self._lock = threading.Lock()
        self._creation = threading.Lock()
        self._in_flight = 0
        self._aborted = False
        self._committed: ObjectInfo | None = None

    def parts(self) -> Sequence[PartRange]:
        """The parts, ascending."""
        return self._parts

    def write_part(self, part: PartRange, buffers: Sequence[Buffer]) -> None:
        """Write one part straight from the buffers; up to 5 MiB in all are copied and written at `commit`."""
        number = self._numbers.get(part.start)
        views = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
        if number is None or part != self._parts[number - 1] or sum(map(len, views)) != part.size_bytes:
            raise TransferSizeError(
                f"Can't write {self._writer.target}: {sum(map(len, views))} bytes were given for the part "
                f"{part.start}-{part.stop}, which must be one of the sink's parts"
            )
        with self._lock:
            self._refuse_aborted()
            self._in_flight += 1
        try:
            if self._single:
                self._content = b"".join(views)
            else:
                done = self._upload(number, views)
                with self._lock:
                    self._done[number] = done
        finally:
            with self._lock:
                self._in_flight -= 1
                late = self._aborted and not self._in_flight
            if late:
                self._abort_quietly()

    def commit(self) -> ObjectInfo:
        """Publish the object, check its size, and return it."""
        with self._lock:
            self._refuse_aborted()
            if self._committed is not None:
                return self._committed
        try:
            info = self._publish_single() if self._single else self._publish_parts()
        except BaseException:
            self._give_up()
            raise
        self._committed = info
        return info

    def abort(self) -> None:
        """Leave neither object nor parts. A part still being written by another thread is removed when it ends."""
        with self._lock:
            if self._committed is not None:
                return
            self._aborted = True
            self._content = None
        self._abort_upload()

    def _refuse_aborted(self) -> None:
        if self._aborted:
            raise StorageError(f"Can't write {self._writer.target}: its upload was aborted")

    def _upload(self, number: int, views: Sequence[memoryview]) -> dict[str, object]:
        signer = self._create()

        def attempt() -> str:
            self._refuse_aborted()
            return self._transfer.put_part(signer, number, views)

        etag = self._writer.attempt(f"write part {number} of", attempt)
        return {"PartNumber": number, "ETag": etag, **self._transfer.checksum(views)}

    def _create(self) -> PartSigner:
        with self._creation:
            if self._creation_failure is not None:
                raise self._creation_failure
            if self._upload_id is None or self._signer is None:
                key = self._writer.key

                def attempt() -> str:
                    self._refuse_aborted()
                    answer = self._session.call("create_multipart_upload", Key=key)
                    self._created = _answer_date(answer)
                    return str(answer["UploadId"])

                try:
                    self._upload_id = self._writer.attempt("start the upload of", attempt)
                except DcpfsError as failure:
                    # The threads that wait here with other parts need not find out for themselves.
                    self._creation_failure = failure
                    raise
                self._signer = self._transfer.part_signer(key, self._upload_id, len(self._parts))
            return self._signer

    def _publish_single(self) -> ObjectInfo:
        if self._content is None:
            if self._size_bytes:
                raise self._missing([1])
            self._content = b""
        content, self._content = self._content, None
        return self._writer.put([memoryview(content)] if content else [])

    def _publish_parts(self) -> ObjectInfo:
        missing = [number for number in range(1, len(self._parts) + 1) if number not in self._done]
        if missing or self._upload_id is None:
            raise self._missing(missing)
        upload_id = self._upload_id
        parts = [self._done[number] for number in range(1, len(self._parts) + 1)]

        def attempt() -> None:
            try:
                answer = self._session.call(
                    "complete_multipart_upload",
                    Key=self._writer.key,
                    UploadId=upload_id,
                    MultipartUpload={"Parts": parts},
                )
            except Exception as failure:
                if not self._was_completed(upload_id, parts, failure):
                    raise
                return
            if not answer.get("ETag") and not self._was_completed(upload_id, parts, None):
                raise TransferSizeError(f"Can't write {self._writer.target}: completing it was not confirmed")

        self._writer.attempt("complete the upload of", attempt)
        self._upload_id = None
        info = self._writer.head()
        if info.size_bytes != self._size_bytes:
            self._writer.delete()
            raise TransferSizeError(
                f"Can't write {self._writer.target}: {self._size_bytes} bytes were sent and the store reports "
                f"{info.size_bytes}; the object was deleted. Check what stands between here and the store"
            )
        return info

    def _missing(self, numbers: Sequence[int]) -> TransferSizeError:
        shown = ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")
        return TransferSizeError(
            f"Can't write {self._writer.target}: part {shown} of {len(self._parts)} was never written; nothing was "
            "published"
        )

    def _was_completed(self, upload_id: str, parts: Sequence[dict[str, object]], failure: Exception | None) -> bool:
        """Whether the upload has been completed although its answer was lost or an error."""
        if failure is not None:
            if not _is_ambiguous(failure):
                return False
            self._maybe_completed |= _error_code(failure) != "NoSuchUpload"
        try:
            answer = self._session.call("head_object", Key=self._writer.key)
        except Exception as missing:  # noqa: BLE001 - the failure of completing itself is raised by the caller
            logger.debug("No answer about an upload's object: %s", type(missing).__name__)
            return False
        if answer.get("ContentLength") != self._size_bytes:
            return False
        expected = _combined_etag(parts)
        if expected is not None and str(answer.get("ETag")).strip('"') == expected:
            return True
        # A store with ETags of its own: an object no older than the upload, which is gone after we may have
        # completed it.
        modified = answer.get("LastModified")
        fresh = (
            isinstance(modified, dt.datetime)
            and self._created is not None
            and modified.replace(microsecond=0) >= self._created
        )
        return fresh and self._maybe_completed and self._is_gone(upload_id)

    def _is_gone(self, upload_id: str) -> bool:
        """Whether the store no longer knows the upload."""
        try:
            self._session.call("list_parts", Key=self._writer.key, UploadId=upload_id, MaxParts=1)
        except Exception as failure:  # noqa: BLE001 - asked for evidence; anything but the one answer is none
            return _error_code(failure) == "NoSuchUpload"
        return False

    def _give_up(self) -> None:
        with self._lock:
            self._aborted = True
        self._abort_quietly()

    def _abort_quietly(self) -> None:
        """Abort while another failure is on its way to the caller."""
        try:
            self._abort_upload()
        except DcpfsError as failure:
            logger.warning("After a failed write: %s", failure)

    def _abort_upload(self) -> None:
        with self._creation:
            upload_id = self._upload_id
        if upload_id is None:
            return

        def attempt() -> None:
            try:
                self._session.call("abort_multipart_upload", Key=self._writer.key, UploadId=upload_id)
            except Exception as failure:
                if _error_code(failure) != "NoSuchUpload":
                    raise

        try:
            self._writer.attempt("abort the upload of", attempt)
        except ObjectNotFoundError:
            logger.debug("The upload to abort is gone")
        with self._lock:
            if not self._in_flight:  # a part that is late would make it anew, and is aborted when it ends
                self._upload_id = None


def _combined_etag(parts: Sequence[dict[str, object]]) -> str | None:
    """The ETag S3 gives an object made of parts, where those of the parts are MD5 sums."""
    digest = hashlib.md5(usedforsecurity=False)
    for part in parts:
        match = _MD5.match(str(part["ETag"]))
        if match is None:
            return None
        digest.update(bytes.fromhex(match.group(1)))
    return f"{digest.hexdigest()}-{len(parts)}"


def _answer_date(answer: dict[str, object]) -> dt.datetime | None:
    """The store's clock as it answered, in whole seconds."""
    metadata = cast("dict[str, dict[str, str]]", answer.get("ResponseMetadata") or {})
    try:
        date = email.utils.parsedate_to_datetime(metadata.get("HTTPHeaders", {}).get("date", ""))
    except ValueError:
        return None
    return date if date.tzinfo is not None else date.replace(tzinfo=dt.timezone.utc)


def _error_code(failure: Exception) -> str:
    response = getattr(failure, "response", None)
    details = response.get("Error") if isinstance(response, dict) else None
    return str(details.get("Code")) if isinstance(details, dict) else ""


def _is_ambiguous(failure: Exception) -> bool:
    """Whether a request may have taken effect although it failed."""
    response = getattr(failure, "response", None)
    if not isinstance(response, dict):
        return True
    metadata = cast("dict[str, object]", response.get("ResponseMetadata") or {})
    status = metadata.get("HTTPStatusCode")
    return _error_code(failure) == "NoSuchUpload" or not isinstance(status, int) or status >= 500
