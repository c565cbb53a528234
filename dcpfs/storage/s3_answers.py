"""Error answers over HTTP: what they say, and whether they are the store's.

Problem: what stands before a store answers in its place when the store is away, and not always with 502 or 503. An
ingress that has just been loaded knows no routes and says 404. Taken for the store's, that is "no such object": a
marker that was to be withdrawn stays, a step that is complete counts as none, and a training starts over.

Way taken: a store that says 404 says so in S3's error document, or in none. A page that is no such document comes from
elsewhere, and is a failure of the way, which passes.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Mapping
from typing import cast

from dcpfs.storage.translate import ResponseError

__all__ = ["headers_of", "is_foreign", "is_text_404", "not_the_stores", "parse_error"]


def parse_error(body: bytes) -> tuple[str, str]:
    """Read code and message of an S3 error body; empty texts when it is none."""
    try:
        root = ET.fromstring(body)  # noqa: S314 - at most 64 KiB, and expat limits entity expansion
    except ET.ParseError:
        return "", ""
    found = {"Code": "", "Message": ""}
    for element in root.iter():
        name = element.tag.rpartition("}")[2]
        if name in found and not found[name]:
            found[name] = (element.text or "").strip()
    return found["Code"], found["Message"]


def is_foreign(status: int, body: bytes) -> bool:
    """Whether an answer that something is not there is somebody else's than the store's."""
    return status == 404 and bool(body.strip()) and not parse_error(body)[0]


def headers_of(response: Mapping[str, Mapping[str, object]]) -> Mapping[str, str]:
    """The headers of an answer as botocore parsed it."""
    return cast("Mapping[str, str]", response.get("ResponseMetadata", {}).get("HTTPHeaders") or {})


def is_text_404(response: Mapping[str, Mapping[str, object]]) -> bool:
    """Whether an answer that botocore parsed is a 404 without a code of the store's, and of a type that pages have."""
    is_absent = response.get("Error", {}).get("Code") == "404"
    return is_absent and headers_of(response).get("content-type", "").startswith("text/")


def not_the_stores(status: int, reason: str) -> ResponseError:
    """What such an answer is instead."""
    return ResponseError(502, "", f"{status} {reason} was answered in a page that is not the store's")
