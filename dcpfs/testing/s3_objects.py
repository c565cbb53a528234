"""The buckets of a scripted S3 server: objects, multipart uploads and listings, in memory, without HTTP.

Problem: to see what a client left behind (an object under its final name, parts that nobody completes), the state
must be open to the test, and exact about what S3 makes of each call.

Way taken: plain values behind one lock. Bodies are kept as the buffers they came in; completing an upload joins
nothing. Refusals are `S3Error` with S3's own code, and become responses elsewhere.
"""

from __future__ import annotations

import hashlib
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Listing", "S3Error", "S3Objects", "StoredObject", "StoredPart", "Upload"]

Body = Sequence[bytes | bytearray | memoryview]


class S3Error(Exception):
    """A refusal.

    Attributes:
        status: HTTP status.
        code: S3's error code.
        headers: Further headers of the answer.
    """

    def __init__(self, status: int, code: str, message: str = "", headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message or code)
        self.status = status
        self.code = code
        self.headers = dict(headers or {})


@dataclass(frozen=True)
class StoredObject:
    """One object, as buffers that follow each other."""

    body: tuple[bytes | bytearray | memoryview, ...]
    etag: str
    modified_seconds: float

    @property
    def size_bytes(self) -> int:
        """Its length."""
        return sum(len(buffer) for buffer in self.body)

    def joined(self) -> bytes:
        """Its content in one piece."""
        return b"".join(self.body)


@dataclass(frozen=True)
class StoredPart:
    """One part of an upload; ``lost`` ones are known by tag and have no content."""

    body: tuple[bytes | bytearray | memoryview, ...]
    etag: str
    size_bytes: int


@dataclass
class Upload:
    """A multipart upload that is neither completed nor aborted."""

    upload_id: str
    bucket: str
    key: str
    parts: dict[int, StoredPart] = field(default_factory=dict)
    started_seconds: float = field(default_factory=time.time)


@dataclass(frozen=True)
class Listing:
    """One page: objects, common prefixes, and the name to go on after, or None."""

    objects: tuple[tuple[str, StoredObject], ...]
    prefixes: tuple[str, ...]
    next_after: str | None


class S3Objects:
    """Buckets with their objects and uploads. Thread-safe.

    Args:
        buckets: Names of the buckets that exist.
        minimum_part_bytes: Smallest part but the last; S3 asks for 5 MiB.
    """

    def __init__(self, buckets: Sequence[str], *, minimum_part_bytes: int = 0) -> None:
        self.lock = threading.RLock()
        self.minimum_part_bytes = minimum_part_bytes
        self._objects: dict[str, dict[str, StoredObject]] = {name: {} for name in buckets}
        self._uploads: dict[str, Upload] = {}

    def check_bucket(self, bucket: str) -> dict[str, StoredObject]:
        """The bucket's objects, or NoSuchBucket."""
        with self.lock:
            if bucket not in self._objects:
                raise S3Error(404, "NoSuchBucket", f"The specified bucket does not exist: {bucket}")
            return self._objects[bucket]

    def buckets(self) -> list[str]:
        """Names of the buckets."""
        with self.lock:
            return sorted(self._objects)

    def get(self, bucket: str, key: str) -> StoredObject:
        """An object, or NoSuchKey."""
        with self.lock:
            try:
                return self.check_bucket(bucket)[key]
            except KeyError:
                raise S3Error(404, "NoSuchKey", "The specified key does not exist.") from None

    def put(
        self, bucket: str, key: str, body: Body, *, if_none_match: str | None = None, if_match: str | None = None
    ) -> StoredObject:
        """Store an object whole, on the conditions given."""
        made = StoredObject(tuple(body), f'"{_md5(body).hexdigest()}"', time.time())
        with self.lock:
            self._publish(bucket, key, made, if_none_match, if_match)
        return made

    def _publish(
        self, bucket: str, key: str, made: StoredObject, if_none_match: str | None, if_match: str | None
    ) -> None:
        objects = self.check_bucket(bucket)
        present = objects.get(key)
        if if_none_match is not None and if_none_match != "*":
            raise S3Error(501, "NotImplemented", "If-None-Match takes only * in a put")
        if if_none_match == "*" and present is not None:
            raise S3Error(412, "PreconditionFailed", "At least one of the pre-conditions did not hold")
        if if_match is not None:
            if present is None:
                raise S3Error(404, "NoSuchKey", "The specified key does not exist.")
            if present.etag.strip('"') != if_match.strip('"'):
                raise S3Error(412, "PreconditionFailed", "At least one of the pre-conditions did not hold")
        objects[key] = made

    def replace(self, bucket: str, key: str, body: Body) -> None:
        """Change an object's content behind everyone's back: its tag stays."""
        with self.lock:
            old = self.get(bucket, key)
            self.check_bucket(bucket)[key] = StoredObject(tuple(body), old.etag, old.modified_seconds)

    def delete(self, bucket: str, key: str) -> None:
        """Delete an object; absent is as good."""
        with self.lock:
            self.check_bucket(bucket).pop(key, None)

    def snapshot(self, bucket: str) -> dict[str, StoredObject]:
        """The objects as they are; bodies are shared."""
        with self.lock:
            return dict(self.check_bucket(bucket))

    def restore(self, bucket: str, objects: Mapping[str, StoredObject]) -> None:
        """Have these objects in the bucket and no others, and no uploads."""
        with self.lock:
            held = self.check_bucket(bucket)
            held.clear()
            held.update(objects)
            self._uploads.clear()

    def clear(self) -> None:
        """Delete all objects and uploads; the buckets stay."""
        with self.lock:
            for objects in self._objects.values():
                objects.clear()
            self._uploads.clear()

    def create_upload(self, bucket: str, key: str) -> Upload:
        """Start a multipart upload."""
        with self.lock:
            self.check_bucket(bucket)
            upload = Upload(uuid.uuid4().hex, bucket, key)
            self._uploads[upload.upload_id] = upload
            return upload

    def upload(self, bucket: str, key: str, upload_id: str) -> Upload:
        """An upload in progress, or NoSuchUpload."""
        with self.lock:
            self.check_bucket(bucket)
            found = self._uploads.get(upload_id)
            if found is None or (found.bucket, found.key) != (bucket, key):
                raise S3Error(404, "NoSuchUpload", "The specified upload does not exist.")
            return found

    def put_part(self, bucket: str, key: str, upload_id: str, number: int, body: Body) -> StoredPart:
        """Store a part, replacing one of that number."""
        if not 1 <= number <= 10_000:
            raise S3Error(400, "InvalidArgument", "Part number must be an integer between 1 and 10000, inclusive")
        part = StoredPart(tuple(body), f'"{_md5(body).hexdigest()}"', sum(len(buffer) for buffer in body))
        with self.lock:
            self.upload(bucket, key, upload_id).parts[number] = part
        return part

    def complete_upload(
        self,
        bucket: str,
        key: str,
        upload_id: str,
        parts: Sequence[tuple[int, str]],
        *,
        if_none_match: str | None = None,
    ) -> StoredObject:
        """Publish an upload from the parts named, by number and tag."""
        with self.lock:
            upload = self.upload(bucket, key, upload_id)
            numbers = [number for number, _ in parts]
            if not parts:
                raise S3Error(400, "MalformedXML", "no parts")
            if numbers != sorted(set(numbers)):
                raise S3Error(400, "InvalidPartOrder", "The list of parts was not in ascending order.")
            chosen: list[StoredPart] = []
            for number, etag in parts:
                part = upload.parts.get(number)
                if part is None or part.etag.strip('"') != etag.strip('"'):
                    raise S3Error(400, "InvalidPart", f"part {number} was not found, or has another entity tag")
                chosen.append(part)
            for part in chosen[:-1]:
                if part.size_bytes < self.minimum_part_bytes:
                    raise S3Error(400, "EntityTooSmall", "a part but the last is smaller than the minimum")
            digest = hashlib.md5(
                b"".join(bytes.fromhex(part.etag.strip('"')) for part in chosen), usedforsecurity=False
            )
            body = tuple(buffer for part in chosen for buffer in part.body)
            made = StoredObject(body, f'"{digest.hexdigest()}-{len(chosen)}"', time.time())
            self._publish(bucket, key, made, if_none_match, None)
            del self._uploads[upload_id]
            return made

    def abort_upload(self, bucket: str, key: str, upload_id: str) -> None:
        """Drop an upload with its parts."""
        with self.lock:
            self.upload(bucket, key, upload_id)
            del self._uploads[upload_id]

    def uploads(self, bucket: str | None = None) -> list[Upload]:
        """Uploads in progress, by key and start."""
        with self.lock:
            found = [one for one in self._uploads.values() if bucket in (None, one.bucket)]
        return sorted(found, key=lambda one: (one.key, one.started_seconds))

    def list(
        self, bucket: str, *, prefix: str = "", delimiter: str = "", after: str = "", limit: int = 1000
    ) -> Listing:
        """One page of names in order, from the one after ``after``; names below a delimiter roll up."""
        with self.lock:
            names = sorted(name for name in self.check_bucket(bucket) if name.startswith(prefix))
            objects: list[tuple[str, StoredObject]] = []
            prefixes: list[str] = []
            last: str | None = None
            for name in names:
                at = name.find(delimiter, len(prefix)) if delimiter else -1
                entry = name if at < 0 else name[: at + len(delimiter)]
                if entry <= after or (prefixes and entry == prefixes[-1]):
                    continue
                if len(objects) + len(prefixes) == limit:
                    return Listing(tuple(objects), tuple(prefixes), last)
                if at < 0:
                    objects.append((name, self.check_bucket(bucket)[name]))
                else:
                    prefixes.append(entry)
                last = entry
            return Listing(tuple(objects), tuple(prefixes), None)


def _md5(body: Body) -> hashlib._Hash:
    digest = hashlib.md5(usedforsecurity=False)
    for buffer in body:
        digest.update(buffer)
    return digest
