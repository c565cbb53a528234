"""An in-memory server that speaks enough S3 for every contender and costs as little CPU as it can.

Problem: a full S3 server on the same cores spends 8-13 CPU seconds per GB uploaded, so a run against it
measures the server. It proves that a client is correct; it cannot rank clients.

Way taken: a process of its own with blocking sockets, a thread a connection, no authentication, no hashing,
and object memory that is used again (`benchmarks.object_memory`). With ``--latency-ms`` and
``--mbps-per-connection`` it behaves like a remote store: time to the first byte, and a rate that only more
connections can raise.

Control: ``GET /__stats`` gives requests and body bytes by verb since the last ``GET /__reset``. Any request
below ``/__free/`` is served without latency, without pacing and without being counted: preparation and
verification.

Flow: `main` prints one JSON line with the port and serves until its stdin closes, so it cannot outlive its
parent.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import json
import socket
import sys
import threading
import time
import urllib.parse
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from email.utils import formatdate
from itertools import count

from .object_memory import BlockPool, StoredObject, UploadBuffer
from .traffic import Traffic
from .wire import ConnectionClosedError, Pacer, RequestHead, Wire

__all__ = ["Sink", "main"]

_FREE_PREFIX = "/__free/"
_AFTER_ALL = "\U0010ffff"
"""Sorts behind every character of a key."""
_XML_HEAD = '<?xml version="1.0" encoding="UTF-8"?>\n'
_NAMESPACE = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
_REASONS = {
    200: "OK",
    204: "No Content",
    206: "Partial Content",
    404: "Not Found",
    412: "Precondition Failed",
    416: "Range Not Satisfiable",
    501: "Not Implemented",
}


@dataclass
class _Upload:
    key: str
    parts: dict[int, UploadBuffer] = field(default_factory=dict)


@dataclass
class _Reply:
    verb: str
    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    stored: StoredObject | None = None
    start: int = 0
    stop: int = 0
    bytes_in: int = 0
    length_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class _Address:
    bucket: str
    key: str
    query: dict[str, str]


class Sink:
    """The server. `serve` runs in the calling thread; everything else is thread-safe."""

    def __init__(
        self,
        buckets: tuple[str, ...],
        latency_seconds: float,
        bytes_per_second: float | None,
        reserve_bytes: int,
    ) -> None:
        self._latency_seconds = latency_seconds
        self._bytes_per_second = bytes_per_second
        self._pool = BlockPool()
        self._pool.reserve(reserve_bytes)
        self._lock = threading.Lock()
        self._buckets: dict[str, dict[str, StoredObject]] = {name: {} for name in buckets}
        self._sorted: dict[str, list[str]] = {name: [] for name in buckets}
        """Keys of each bucket in order, so that a listing costs what it lists, however many objects there are."""
        self._uploads: dict[str, _Upload] = {}
        self._numbers = count(1)
        self._traffic = Traffic()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port: int = self._listener.getsockname()[1]

    def serve(self) -> None:
        """Accept connections until the process ends."""
        while True:
            connection, _ = self._listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._traffic.connect()
            threading.Thread(target=self._serve_connection, args=(connection,), daemon=True).start()

    def stats(self) -> dict[str, object]:
        """Requests and bytes by verb, connections opened and server CPU seconds since the last reset."""
        with self._lock:
            return {
                **self._traffic.figures(),
                "uploads_open": len(self._uploads),
                "allocated_bytes": self._pool.allocated_bytes,
            }

    def reset(self) -> None:
        """Set the counters to zero. Objects stay."""
        self._traffic.reset()

    def _serve_connection(self, connection: socket.socket) -> None:
        pacer = Pacer(self._bytes_per_second)
        wire = Wire(connection, pacer)
        # A client that resets its connection is its own business; the next one is served all the same.
        with connection, contextlib.suppress(ConnectionClosedError, ConnectionError):
            while (head := wire.read_head()) is not None:
                free = head.target.startswith(_FREE_PREFIX)
                pacer.enabled = not free
                if free:
                    head = replace(head, target=head.target.removeprefix(_FREE_PREFIX[:-1]))
                elif head.target.startswith("/__"):
                    self._control(wire, head)
                    continue
                elif self._latency_seconds:
                    time.sleep(self._latency_seconds)
                if head.headers.get("expect", "").lower() == "100-continue":
                    wire.send(b"HTTP/1.1 100 Continue\r\n\r\n")
                reply = self._handle(wire, head)
                if not free:
                    self._count(head, reply)  # before the answer: who has it finds it counted
                self._answer(wire, head, reply)
                if head.headers.get("connection", "").lower() == "close":
                    return

    def _control(self, wire: Wire, head: RequestHead) -> None:
        if head.target == "/__reset":
            self.reset()
        body = json.dumps(self.stats()).encode()
        wire.send(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)

    def _answer(self, wire: Wire, head: RequestHead, reply: _Reply) -> None:
        length_bytes = len(reply.body) if reply.stored is None else reply.stop - reply.start
        if reply.length_bytes is not None:
            length_bytes = reply.length_bytes
        lines = [
            f"HTTP/1.1 {reply.status} {_REASONS[reply.status]}",
            "Server: sink",
            f"Date: {formatdate(usegmt=True)}",
        ]
        lines += [f"{name}: {value}" for name, value in reply.headers.items()]
        lines += ["x-amz-request-id: 1", f"Content-Length: {length_bytes}", "", ""]
        answer = "\r\n".join(lines).encode()
        if reply.stored is None:
            wire.send(answer + (b"" if head.method == "HEAD" else reply.body))
            return
        try:
            wire.send(answer, reply.stored.views(reply.start, reply.stop))
        finally:
            reply.stored.release()

    def _count(self, head: RequestHead, reply: _Reply) -> None:
        sent_bytes = 0 if head.method == "HEAD" else len(reply.body) + reply.stop - reply.start
        self._traffic.count(reply.verb, requests=1, received_bytes=reply.bytes_in, sent_bytes=sent_bytes)

    def _handle(self, wire: Wire, head: RequestHead) -> _Reply:
        length = head.headers.get("x-amz-decoded-content-length", head.headers.get("content-length"))
        upload = UploadBuffer(self._pool, int(length) if length else None)
        keep = False
        try:
            if head.method in ("PUT", "POST"):
                wire.receive_body(head, upload)
            path, _, query = head.target.partition("?")
            bucket, _, key = urllib.parse.unquote(path.lstrip("/")).partition("/")
            address = _Address(bucket, key, dict(urllib.parse.parse_qsl(query, keep_blank_values=True)))
            reply = self._dispatch(head, address, upload)
            keep = reply.verb in ("PutObject", "UploadPart") and reply.status == 200
            reply.bytes_in = upload.size_bytes
        finally:
            if not keep:
                upload.discard()
        return reply

    def _dispatch(self, head: RequestHead, address: _Address, upload: UploadBuffer) -> _Reply:
        method, query = head.method, address.query
        if not address.bucket:
            names = "".join(f"<Bucket><Name>{name}</Name></Bucket>" for name in self._buckets)
            return _xml(
                "ListBuckets",
                f"<ListAllMyBucketsResult {_NAMESPACE}><Buckets>{names}</Buckets></ListAllMyBucketsResult>",
            )
        if address.bucket not in self._buckets:
            if method == "PUT" and not address.key:
                with self._lock:
                    self._buckets[address.bucket], self._sorted[address.bucket] = {}, []
                return _Reply("CreateBucket", 200)
            return _error("NoSuchBucket", 404, "NoSuchBucket")
        if not address.key:
            return self._bucket_request(method, address, upload)
        if "uploadId" in query or "uploads" in query:
            return self._multipart_request(method, address, upload)
        if method == "PUT":
            return self._put(head, address, upload)
        if method in ("GET", "HEAD"):
            return self._read(head, address)
        if method == "DELETE":
            self._drop(address.bucket, address.key)
            return _Reply("DeleteObject", 204)
        return _error(method, 501, "NotImplemented")

    def _bucket_request(self, method: str, address: _Address, upload: UploadBuffer) -> _Reply:
        if method == "HEAD":
            return _Reply("HeadBucket", 200, {"x-amz-bucket-region": "us-east-1"})
        if method == "PUT":
            return _Reply("CreateBucket", 200)
        if method == "POST" and "delete" in address.query:
            deleted = [element.text or "" for element in _elements(upload, "Key")]
            for key in deleted:
                self._drop(address.bucket, key)
            rows = "".join(f"<Deleted><Key>{_escape(key)}</Key></Deleted>" for key in deleted)
            return _xml("DeleteObjects", f"<DeleteResult {_NAMESPACE}>{rows}</DeleteResult>")
        if "location" in address.query:
            return _xml("GetBucketLocation", f"<LocationConstraint {_NAMESPACE}>us-east-1</LocationConstraint>")
        if "uploads" in address.query:
            with self._lock:
                rows = "".join(
                    f"<Upload><Key>{_escape(upload.key)}</Key><UploadId>{number}</UploadId></Upload>"
                    for number, upload in self._uploads.items()
                )
            return _xml(
                "ListMultipartUploads",
                f"<ListMultipartUploadsResult {_NAMESPACE}>{rows}</ListMultipartUploadsResult>",
            )
        return self._list(address)

    def _list(self, address: _Address) -> _Reply:
        query = address.query
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token", query.get("start-after", query.get("marker", "")))
        limit = int(query.get("max-keys", "1000"))

        def shown(name: str) -> str:
            return urllib.parse.quote(name) if query.get("encoding-type") == "url" else _escape(name)

        with self._lock:
            objects, names = self._buckets[address.bucket], self._sorted[address.bucket]
            first = max(bisect.bisect_left(names, prefix), bisect.bisect_right(names, after))
            last_of_all = bisect.bisect_left(names, prefix + _AFTER_ALL)
            # Folded keys count once, so a page can be of any number of objects.
            chosen = names[first:last_of_all] if delimiter else names[first : min(last_of_all, first + limit + 1)]
            stored = [(name, objects[name]) for name in chosen]
        rows: list[str] = []
        folded = ""
        last, truncated = "", False
        for key, value in stored:
            if folded and key.startswith(folded):
                continue
            if len(rows) == limit:
                truncated = True
                break
            cut = key.find(delimiter, len(prefix)) if delimiter else -1
            if cut >= 0:
                folded = key[: cut + len(delimiter)]
                # Every key below the folded prefix sorts before this, so a page can go on right behind them.
                last = folded + _AFTER_ALL
                rows.append(f"<CommonPrefixes><Prefix>{shown(folded)}</Prefix></CommonPrefixes>")
                continue
            last = key
            modified = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(value.modified_seconds))
            rows.append(
                f"<Contents><Key>{shown(key)}</Key><LastModified>{modified}</LastModified>"
                f"<ETag>{_escape(value.etag)}</ETag><Size>{value.size_bytes}</Size>"
                "<StorageClass>STANDARD</StorageClass></Contents>"
            )
        token = f"<NextContinuationToken>{_escape(last)}</NextContinuationToken>" if truncated else ""
        encoding = "<EncodingType>url</EncodingType>" if query.get("encoding-type") == "url" else ""
        return _xml(
            "ListObjectsV2",
            f"<ListBucketResult {_NAMESPACE}><Name>{address.bucket}</Name><Prefix>{shown(prefix)}</Prefix>"
            f"<KeyCount>{len(rows)}</KeyCount><MaxKeys>{limit}</MaxKeys>{encoding}"
            f"<IsTruncated>{str(truncated).lower()}</IsTruncated>{token}{''.join(rows)}</ListBucketResult>",
        )

    def _multipart_request(self, method: str, address: _Address, upload: UploadBuffer) -> _Reply:
        if "uploads" in address.query:
            number = f"upload-{next(self._numbers)}"
            with self._lock:
                self._uploads[number] = _Upload(address.key)
            return _xml(
                "CreateMultipartUpload",
                f"<InitiateMultipartUploadResult {_NAMESPACE}><Bucket>{address.bucket}</Bucket>"
                f"<Key>{_escape(address.key)}</Key><UploadId>{number}</UploadId>"
                "</InitiateMultipartUploadResult>",
            )
        number = address.query["uploadId"]
        with self._lock:
            pending = self._uploads.get(number)
        if pending is None:
            return _error("UploadPart" if method == "PUT" else "CompleteMultipartUpload", 404, "NoSuchUpload")
        if method == "PUT":
            part = int(address.query["partNumber"])
            with self._lock:
                replaced = pending.parts.pop(part, None)
                pending.parts[part] = upload
            if replaced is not None:
                replaced.discard()
            return _Reply("UploadPart", 200, {"ETag": self._etag()})
        with self._lock:
            del self._uploads[number]
        if method == "DELETE":
            for part_upload in pending.parts.values():
                part_upload.discard()
            return _Reply("AbortMultipartUpload", 204)
        wanted = sorted(int(element.text or "0") for element in _elements(upload, "PartNumber"))
        stored = self._keep(address, [pending.parts[part] for part in wanted], self._etag(f"-{len(wanted)}"))
        return _xml(
            "CompleteMultipartUpload",
            f"<CompleteMultipartUploadResult {_NAMESPACE}><Bucket>{address.bucket}</Bucket>"
            f"<Key>{_escape(address.key)}</Key><ETag>{_escape(stored.etag)}</ETag>"
            "</CompleteMultipartUploadResult>",
        )

    def _put(self, head: RequestHead, address: _Address, upload: UploadBuffer) -> _Reply:
        source = head.headers.get("x-amz-copy-source")
        if source is not None:
            return self._copy(urllib.parse.unquote(source).lstrip("/"), address)
        if head.headers.get("if-none-match") == "*" and address.key in self._buckets[address.bucket]:
            return _error("PutObject", 412, "PreconditionFailed")
        return _Reply("PutObject", 200, {"ETag": self._keep(address, [upload], self._etag()).etag})

    def _copy(self, source: str, address: _Address) -> _Reply:
        bucket, _, key = source.partition("/")
        stored = self._hold(bucket, key)
        if stored is None:
            return _error("CopyObject", 404, "NoSuchKey")
        try:
            duplicate = UploadBuffer(self._pool, stored.size_bytes)
            for view in stored.views(0, stored.size_bytes):
                at = 0
                for space in duplicate.space(len(view)):
                    space[:] = view[at : at + len(space)]
                    at += len(space)
        finally:
            stored.release()
        etag = self._keep(address, [duplicate], self._etag()).etag
        modified = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
        return _xml(
            "CopyObject",
            f"<CopyObjectResult><LastModified>{modified}</LastModified><ETag>{_escape(etag)}</ETag></CopyObjectResult>",
        )

    def _read(self, head: RequestHead, address: _Address) -> _Reply:
        verb = "GetObject" if head.method == "GET" else "HeadObject"
        stored = self._hold(address.bucket, address.key)
        if stored is None:
            return _error(verb, 404, "NoSuchKey")
        size_bytes = stored.size_bytes
        headers = {
            "ETag": stored.etag,
            "Last-Modified": formatdate(stored.modified_seconds, usegmt=True),
            "Accept-Ranges": "bytes",
            "Content-Type": "binary/octet-stream",
        }
        start, stop, status = 0, size_bytes, 200
        asked = head.headers.get("range", "")
        if asked.startswith("bytes="):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            if first:
                start = int(first)
                stop = min(int(last) + 1, size_bytes) if last else size_bytes
            else:
                start = max(0, size_bytes - int(last))
            if start >= size_bytes:
                stored.release()
                return _error(verb, 416, "InvalidRange")
            status = 206
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size_bytes}"
        if head.method == "HEAD":
            stored.release()
            return _Reply(verb, status, headers, length_bytes=stop - start)
        return _Reply(verb, status, headers, stored=stored, start=start, stop=stop)

    def _etag(self, suffix: str = "") -> str:
        return f'"{next(self._numbers):032x}{suffix}"'

    def _keep(self, address: _Address, uploads: list[UploadBuffer], etag: str) -> StoredObject:
        stored = StoredObject(self._pool, uploads, etag, time.time())
        with self._lock:
            old = self._buckets[address.bucket].get(address.key)
            self._buckets[address.bucket][address.key] = stored
            if old is None:
                bisect.insort(self._sorted[address.bucket], address.key)
        if old is not None:
            old.release()
        return stored

    def _hold(self, bucket: str, key: str) -> StoredObject | None:
        with self._lock:
            stored = self._buckets.get(bucket, {}).get(key)
            return stored if stored is not None and stored.acquire() else None

    def _drop(self, bucket: str, key: str) -> None:
        with self._lock:
            stored = self._buckets[bucket].pop(key, None)
            if stored is not None:
                del self._sorted[bucket][bisect.bisect_left(self._sorted[bucket], key)]
        if stored is not None:
            stored.release()


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace('"', "&quot;")


def _elements(upload: UploadBuffer, name: str) -> Iterator[ET.Element]:
    for element in ET.fromstring(b"".join(upload.segments)).iter():
        if element.tag.rpartition("}")[2] == name:
            yield element


def _xml(verb: str, body: str) -> _Reply:
    return _Reply(verb, 200, {"Content-Type": "application/xml"}, (_XML_HEAD + body).encode())


def _error(verb: str, status: int, code: str) -> _Reply:
    body = f"{_XML_HEAD}<Error><Code>{code}</Code><Message>{code}</Message></Error>"
    return _Reply(verb, status, {"Content-Type": "application/xml"}, body.encode())


def main() -> None:
    """Serve until stdin closes; print ``{"port": N}`` first."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sink", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--bucket", action="append", default=[], help="a bucket that exists from the start")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="wait before every answer")
    parser.add_argument("--mbps-per-connection", type=float, default=0.0, help="MB/s; 0: as fast as it goes")
    parser.add_argument("--reserve-mib", type=int, default=0, help="object memory touched at the start")
    arguments = parser.parse_args()
    rate = arguments.mbps_per_connection * 1e6 or None
    buckets = tuple(arguments.bucket) or ("bench",)
    sink = Sink(buckets, arguments.latency_ms / 1000, rate, arguments.reserve_mib << 20)
    threading.Thread(target=sink.serve, daemon=True).start()
    print(json.dumps({"port": sink.port}), flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        sys.stdin.read()


if __name__ == "__main__":
    main()
