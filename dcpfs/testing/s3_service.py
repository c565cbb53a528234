"""What S3 answers: from a request to a response, for the operations that dcpfs, s3fs and s3torchconnector use.

Way taken: one function an operation, over `S3Objects`, written from the public API reference. What can differ
between stores is a field of `Dialect`, not a branch a test has to patch in.

Flow: ``Service(dialect).serve(exchange)`` → `Response`; a refusal comes out as S3's error document.
"""

from __future__ import annotations

import base64
import enum
import hashlib
import re
import uuid
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import formatdate
from urllib.parse import quote, unquote
from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape

from dcpfs.testing.http_exchange import Response
from dcpfs.testing.s3_exchange import Exchange
from dcpfs.testing.s3_objects import S3Error, StoredObject

__all__ = ["Dialect", "Service", "Trailers", "error_response", "plain_body"]

_NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
_RANGE = re.compile(r"bytes=(\d*)-(\d*)$")


class Trailers(enum.Enum):
    """What the store makes of a body in ``aws-chunked`` framing with a checksum after it."""

    DECODED = "decoded"
    """It is taken apart, and the checksum compared where it is a CRC-32."""
    STORED = "stored"
    """The store does not know it: the framing becomes part of the object (case 85)."""
    REFUSED = "refused"
    """The store asks for a plain Content-Length."""


@dataclass(frozen=True)
class Dialect:
    """In what this store differs from others.

    Attributes:
        region: Told in redirects and by GetBucketLocation.
        trailers: See `Trailers`.
        conditional_puts: False: 501 for If-None-Match and If-Match in a put.
        page_size: Most names in a page of a listing, whatever the client asks for.
    """

    region: str = "us-east-1"
    trailers: Trailers = Trailers.DECODED
    conditional_puts: bool = True
    page_size: int = 1000


def error_response(
    exchange: Exchange, status: int, code: str, message: str = "", headers: dict[str, str] | None = None
) -> Response:
    """S3's error document; without one for HEAD, which has no body."""
    text = _document(
        "Error",
        f"<Code>{escape(code)}</Code><Message>{escape(message or code)}</Message>"
        f"<Resource>{escape(exchange.head.raw_path)}</Resource><RequestId>{uuid.uuid4().hex[:16]}</RequestId>",
        namespace=False,
    )
    body = () if exchange.head.method == "HEAD" else (text,)
    return Response(status, {"Content-Type": "application/xml", **(headers or {})}, body)


def plain_body(exchange: Exchange, raw: bytes | bytearray, trailers: Trailers) -> bytes | bytearray | memoryview:
    """The payload of a body as it came over the wire.

    Raises:
        S3Error: The store refuses the framing, or a checksum is not that of the payload.
    """
    headers = exchange.head.headers
    framed = "aws-chunked" in headers.get("content-encoding", "") or headers.get("x-amz-content-sha256", "").startswith(
        "STREAMING-"
    )
    checksum = headers.get("x-amz-checksum-crc32")
    if framed:
        if trailers is Trailers.STORED:
            return raw
        if trailers is Trailers.REFUSED:
            raise S3Error(411, "MissingContentLength", "You must provide the Content-Length HTTP header.")
        raw, fields = _decode_aws_chunked(raw)
        if int(headers.get("x-amz-decoded-content-length", len(raw))) != len(raw):
            raise S3Error(400, "IncompleteBody", "The body is not as long as x-amz-decoded-content-length")
        checksum = fields.get("x-amz-checksum-crc32", checksum)
    if checksum is not None and base64.b64decode(checksum) != zlib.crc32(raw).to_bytes(4, "big"):
        raise S3Error(400, "BadDigest", "The CRC32 you specified did not match the calculated checksum.")
    md5 = headers.get("content-md5")
    if md5 is not None and base64.b64decode(md5) != hashlib.md5(raw, usedforsecurity=False).digest():
        raise S3Error(400, "BadDigest", "The Content-MD5 you specified did not match what we received.")
    return raw


def _decode_aws_chunked(raw: bytes | bytearray) -> tuple[bytearray, dict[str, str]]:
    payload = bytearray()
    at = 0
    while True:
        end = raw.index(b"\r\n", at)
        size = int(bytes(raw[at:end]).split(b";")[0], 16)
        at = end + 2
        if size == 0:
            break
        payload += memoryview(raw)[at : at + size]
        at += size + 2
    lines = bytes(raw[at:]).decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines if line)
    return payload, {name.strip().lower(): value.strip() for name, _, value in pairs}


class Service:
    """The operations. Thread-safe: the state is in `S3Objects`."""

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect

    def serve(self, exchange: Exchange) -> Response:
        """Do what the request asks, and answer it."""
        operation = _OPERATIONS.get(exchange.request.operation)
        try:
            if operation is None:
                raise S3Error(501, "NotImplemented", "This server does not do that.")
            return operation(self, exchange)
        except S3Error as error:
            return error_response(exchange, error.status, error.code, str(error), error.headers)

    def _list_buckets(self, exchange: Exchange) -> Response:
        stamp = _iso(0.0)
        names = "".join(
            f"<Bucket><Name>{name}</Name><CreationDate>{stamp}</CreationDate></Bucket>"
            for name in exchange.objects.buckets()
        )
        return _xml("ListAllMyBucketsResult", f"<Owner><ID>0</ID></Owner><Buckets>{names}</Buckets>")

    def _head_bucket(self, exchange: Exchange) -> Response:
        exchange.objects.check_bucket(exchange.request.bucket)
        return Response(200, {"x-amz-bucket-region": self.dialect.region})

    def _get_bucket_location(self, exchange: Exchange) -> Response:
        exchange.objects.check_bucket(exchange.request.bucket)
        region = "" if self.dialect.region == "us-east-1" else self.dialect.region
        return _xml("LocationConstraint", region)

    def _refuse_bucket_change(self, _exchange: Exchange) -> Response:
        raise S3Error(403, "AccessDenied", "Access Denied")

    def _list_objects(self, exchange: Exchange) -> Response:
        query = exchange.request.query
        plain = query.get("encoding-type") != "url"
        token = query.get("continuation-token")
        after = _from_token(token) if token else query.get("start-after", "")
        limit = min(int(query.get("max-keys", "1000")), self.dialect.page_size)
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        page = exchange.objects.list(
            exchange.request.bucket, prefix=prefix, delimiter=delimiter, after=after, limit=limit
        )
        objects = [(key, one) for key, one in page.objects if key not in exchange.hidden_keys]
        prefixes = page.prefixes
        if exchange.hidden_keys:
            shown = exchange.objects.snapshot(exchange.request.bucket).keys() - exchange.hidden_keys
            prefixes = tuple(one for one in prefixes if any(key.startswith(one) for key in shown))
        parts = [
            f"<Name>{exchange.request.bucket}</Name><Prefix>{_name(prefix, plain)}</Prefix>",
            f"<MaxKeys>{limit}</MaxKeys><KeyCount>{len(objects) + len(prefixes)}</KeyCount>",
            f"<IsTruncated>{'true' if page.next_after is not None else 'false'}</IsTruncated>",
            f"<Delimiter>{_name(delimiter, plain)}</Delimiter>" if delimiter else "",
            "" if plain else "<EncodingType>url</EncodingType>",
            f"<ContinuationToken>{token}</ContinuationToken>" if token else "",
        ]
        if page.next_after is not None:
            parts.append(f"<NextContinuationToken>{_to_token(page.next_after)}</NextContinuationToken>")
        parts += [
            f"<Contents><Key>{_name(key, plain)}</Key><LastModified>{_iso(one.modified_seconds)}</LastModified>"
            f"<ETag>{escape(one.etag)}</ETag><Size>{one.size_bytes}</Size>"
            "<StorageClass>STANDARD</StorageClass></Contents>"
            for key, one in objects
        ]
        parts += [f"<CommonPrefixes><Prefix>{_name(one, plain)}</Prefix></CommonPrefixes>" for one in prefixes]
        return _xml("ListBucketResult", "".join(parts))

    def _list_multipart_uploads(self, exchange: Exchange) -> Response:
        query = exchange.request.query
        exchange.objects.check_bucket(exchange.request.bucket)
        plain = query.get("encoding-type") != "url"
        found = [
            one
            for one in exchange.objects.uploads(exchange.request.bucket)
            if one.key.startswith(query.get("prefix", ""))
            and (one.key, one.upload_id) > (query.get("key-marker", ""), query.get("upload-id-marker", ""))
        ]
        found.sort(key=lambda one: (one.key, one.upload_id))
        limit = min(int(query.get("max-uploads", "1000")), self.dialect.page_size)
        page, more = found[:limit], len(found) > limit
        parts = [
            f"<Bucket>{exchange.request.bucket}</Bucket><IsTruncated>{'true' if more else 'false'}</IsTruncated>",
            "" if plain else "<EncodingType>url</EncodingType>",
        ]
        if more:
            parts.append(
                f"<NextKeyMarker>{_name(page[-1].key, plain)}</NextKeyMarker>"
                f"<NextUploadIdMarker>{page[-1].upload_id}</NextUploadIdMarker>"
            )
        parts += [
            f"<Upload><Key>{_name(one.key, plain)}</Key><UploadId>{one.upload_id}</UploadId>"
            f"<Initiated>{_iso(one.started_seconds)}</Initiated></Upload>"
            for one in page
        ]
        return _xml("ListMultipartUploadsResult", "".join(parts))

    def _delete_objects(self, exchange: Exchange) -> Response:
        headers = exchange.head.headers
        if "content-md5" not in headers and not any(
            name.startswith(("x-amz-checksum-", "x-amz-sdk-checksum", "x-amz-trailer")) for name in headers
        ):
            raise S3Error(400, "InvalidRequest", "Missing required header for this request: Content-MD5")
        tree = _parse(exchange.body)
        quiet = (tree.findtext("{*}Quiet") or "").lower() == "true"
        keys = [node.findtext("{*}Key") or "" for node in tree.findall("{*}Object")]
        if not 1 <= len(keys) <= 1000:
            raise S3Error(400, "MalformedXML", "between 1 and 1000 objects are deleted at once")
        exchange.objects.check_bucket(exchange.request.bucket)
        for key in keys:
            exchange.objects.delete(exchange.request.bucket, key)
        told = "" if quiet else "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
        return _xml("DeleteResult", told)

    def _head_object(self, exchange: Exchange) -> Response:
        answer = self._get_object(exchange)
        return Response(answer.status, answer.headers, answer.body, send_body=False)

    def _get_object(self, exchange: Exchange) -> Response:
        found = exchange.objects.get(exchange.request.bucket, exchange.request.key)
        headers = exchange.head.headers
        tag = found.etag.strip('"')
        if "if-match" in headers and headers["if-match"].strip('"') not in (tag, "*"):
            raise S3Error(412, "PreconditionFailed", "At least one of the pre-conditions did not hold")
        if headers.get("if-none-match", "").strip('"') in (tag, "*"):
            return Response(304, {"ETag": found.etag})
        told = {
            "ETag": found.etag,
            "Last-Modified": formatdate(found.modified_seconds, usegmt=True),
            "Accept-Ranges": "bytes",
            "Content-Type": "application/octet-stream",
        }
        whole = Response(200, told, found.body)
        wanted = _RANGE.match(headers.get("range", ""))
        if wanted is None:
            return whole
        start, stop = _range(wanted[1], wanted[2], found)
        told["Content-Range"] = f"bytes {start}-{stop - 1}/{found.size_bytes}"
        return Response(206, told, whole.body_range(start, stop))

    def _put_object(self, exchange: Exchange) -> Response:
        made = exchange.objects.put(
            exchange.request.bucket,
            exchange.request.key,
            (exchange.body,),
            if_none_match=self._condition(exchange, "if-none-match"),
            if_match=self._condition(exchange, "if-match"),
        )
        return Response(200, {"ETag": made.etag})

    def _condition(self, exchange: Exchange, name: str) -> str | None:
        value = exchange.head.headers.get(name)
        if value is not None and not self.dialect.conditional_puts:
            raise S3Error(501, "NotImplemented", "A header you provided implies functionality that is not implemented")
        return value

    def _copy_object(self, exchange: Exchange) -> Response:
        made = exchange.objects.put(exchange.request.bucket, exchange.request.key, self._copied(exchange))
        return _xml("CopyObjectResult", _tag_and_time(made.etag, made.modified_seconds))

    def _copied(self, exchange: Exchange) -> Sequence[bytes | bytearray | memoryview]:
        bucket, _, key = unquote(exchange.head.headers["x-amz-copy-source"]).lstrip("/").partition("/")
        found = exchange.objects.get(bucket, key)
        wanted = _RANGE.match(exchange.head.headers.get("x-amz-copy-source-range", ""))
        if wanted is None:
            return found.body
        return Response(200, {}, found.body).body_range(*_range(wanted[1], wanted[2], found))

    def _create_multipart_upload(self, exchange: Exchange) -> Response:
        upload = exchange.objects.create_upload(exchange.request.bucket, exchange.request.key)
        return _xml(
            "InitiateMultipartUploadResult",
            f"<Bucket>{upload.bucket}</Bucket><Key>{escape(upload.key)}</Key><UploadId>{upload.upload_id}</UploadId>",
        )

    def _upload_part(self, exchange: Exchange) -> Response:
        return Response(200, {"ETag": self._put_part(exchange, (exchange.body,))})

    def _upload_part_copy(self, exchange: Exchange) -> Response:
        tag = self._put_part(exchange, self._copied(exchange))
        return _xml("CopyPartResult", _tag_and_time(tag, 0.0))

    def _put_part(self, exchange: Exchange, body: Sequence[bytes | bytearray | memoryview]) -> str:
        request = exchange.request
        number = request.part_number or 0
        return exchange.objects.put_part(request.bucket, request.key, request.query["uploadId"], number, body).etag

    def _complete_multipart_upload(self, exchange: Exchange) -> Response:
        tree = _parse(exchange.body)
        parts = [
            (int(node.findtext("{*}PartNumber") or 0), node.findtext("{*}ETag") or "")
            for node in tree.findall("{*}Part")
        ]
        request = exchange.request
        made = exchange.objects.complete_upload(
            request.bucket,
            request.key,
            request.query["uploadId"],
            parts,
            if_none_match=self._condition(exchange, "if-none-match"),
        )
        return _xml(
            "CompleteMultipartUploadResult",
            f"<Bucket>{request.bucket}</Bucket><Key>{escape(request.key)}</Key><ETag>{escape(made.etag)}</ETag>",
        )

    def _abort_multipart_upload(self, exchange: Exchange) -> Response:
        request = exchange.request
        exchange.objects.abort_upload(request.bucket, request.key, request.query["uploadId"])
        return Response(204)

    def _list_parts(self, exchange: Exchange) -> Response:
        request = exchange.request
        upload = exchange.objects.upload(request.bucket, request.key, request.query["uploadId"])
        after = int(request.query.get("part-number-marker", "0"))
        limit = min(int(request.query.get("max-parts", "1000")), self.dialect.page_size)
        found = [(number, part) for number, part in sorted(upload.parts.items()) if number > after]
        page, more = found[:limit], len(found) > limit
        told = f"<UploadId>{upload.upload_id}</UploadId><IsTruncated>{'true' if more else 'false'}</IsTruncated>"
        if more:
            told += f"<NextPartNumberMarker>{page[-1][0]}</NextPartNumberMarker>"
        told += "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(part.etag)}</ETag>"
            f"<Size>{part.size_bytes}</Size></Part>"
            for number, part in page
        )
        return _xml("ListPartsResult", told)

    def _delete_object(self, exchange: Exchange) -> Response:
        exchange.objects.delete(exchange.request.bucket, exchange.request.key)
        return Response(204)


_OPERATIONS = {
    "AbortMultipartUpload": Service._abort_multipart_upload,
    "CompleteMultipartUpload": Service._complete_multipart_upload,
    "CopyObject": Service._copy_object,
    "CreateBucket": Service._refuse_bucket_change,
    "CreateMultipartUpload": Service._create_multipart_upload,
    "DeleteBucket": Service._refuse_bucket_change,
    "DeleteObject": Service._delete_object,
    "DeleteObjects": Service._delete_objects,
    "GetBucketLocation": Service._get_bucket_location,
    "GetObject": Service._get_object,
    "HeadBucket": Service._head_bucket,
    "HeadObject": Service._head_object,
    "ListBuckets": Service._list_buckets,
    "ListMultipartUploads": Service._list_multipart_uploads,
    "ListObjectsV2": Service._list_objects,
    "ListParts": Service._list_parts,
    "PutObject": Service._put_object,
    "UploadPart": Service._upload_part,
    "UploadPartCopy": Service._upload_part_copy,
}


def _range(first: str, last: str, found: StoredObject) -> tuple[int, int]:
    """Half-open range of a Range header's two numbers."""
    size = found.size_bytes
    if first:
        start, stop = int(first), min(size, int(last) + 1 if last else size)
    else:
        start, stop = max(0, size - int(last or 0)), size
    if start >= stop:
        raise S3Error(
            416, "InvalidRange", "The requested range is not satisfiable", {"Content-Range": f"bytes */{size}"}
        )
    return start, stop


def _parse(body: bytes | bytearray | memoryview) -> ET.Element:
    try:
        return ET.fromstring(bytes(body))  # noqa: S314 - what a test's own client sends
    except ET.ParseError as error:
        raise S3Error(400, "MalformedXML", f"The XML is not well-formed: {error}") from error


def _xml(root: str, content: str) -> Response:
    return Response(200, {"Content-Type": "application/xml"}, (_document(root, content),))


def _document(root: str, content: str, *, namespace: bool = True) -> bytes:
    attribute = f' xmlns="{_NAMESPACE}"' if namespace else ""
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<{root}{attribute}>{content}</{root}>'.encode()


def _tag_and_time(etag: str, seconds: float) -> str:
    return f"<LastModified>{_iso(seconds)}</LastModified><ETag>{escape(etag)}</ETag>"


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.000Z")


def _name(text: str, plain: bool) -> str:
    return escape(text if plain else quote(text, safe="/-_.~"))


def _to_token(name: str) -> str:
    return base64.urlsafe_b64encode(name.encode()).decode()


def _from_token(token: str) -> str:
    return base64.urlsafe_b64decode(token).decode()
