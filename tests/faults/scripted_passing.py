"""Faults of S3 that pass, with what each costs and to which requests it can happen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dcpfs.testing.s3_exchange import S3Request, Stage
from dcpfs.testing.s3_faults import (
    Action,
    Answer,
    Drop,
    Effect,
    ErrorInside200,
    Length,
    ShortBody,
    WrongRange,
    internal_error,
    slow_down,
)

__all__ = ["PASSING", "Passing", "completes", "is_any", "is_of_an_upload"]


def has_body(request: S3Request) -> bool:
    return request.method in ("PUT", "POST") and int(request.header("content-length") or 0) > 10


def is_answered_at_length(request: S3Request) -> bool:
    return request.method in ("GET", "POST") and request.operation != "DeleteObjects"


def is_ranged(request: S3Request) -> bool:
    return request.operation == "GetObject" and request.header("range") is not None


def is_any(request: S3Request) -> bool:
    return True


def is_of_an_upload(request: S3Request) -> bool:
    return request.operation in ("CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload")


def completes(request: S3Request) -> bool:
    return request.operation == "CompleteMultipartUpload"


@dataclass(frozen=True)
class Passing:
    """A fault that passes.

    Attributes:
        action: What happens.
        times: How often in a row.
        concerns: To which requests it can happen.
        takes_effect: The request had done its work.
        everywhere: Tried at every single request, rather than at the first of each kind.
        least_wait_seconds: What the store asks for each time.
        kinds: Works with a request that it can happen to, for which it is tried. An overwrite differs from a save only
            in what it takes away first, and is tried with what is tried everywhere.
    """

    action: Action
    times: int = 2
    concerns: Callable[[S3Request], bool] = is_any
    takes_effect: bool = False
    everywhere: bool = False
    least_wait_seconds: float = 0.0
    kinds: tuple[str, ...] = ("save", "load", "commit", "resume")


EVERYWHERE = *Passing.kinds, "overwrite", "commit multipart"
IN_PARTS = *Passing.kinds, "commit multipart"
PASSING = {
    "slow down": Passing(slow_down(), everywhere=True, kinds=EVERYWHERE),
    "500": Passing(internal_error()),
    "500 though it was done": Passing(internal_error(Effect.APPLIED), 1, takes_effect=True, kinds=IN_PARTS),
    "429 with Retry-After": Passing(
        Answer(429, "TooManyRequests", headers={"Retry-After": "7"}), least_wait_seconds=7.0
    ),
    "reset after the head": Passing(Drop(Stage.HEAD)),
    "reset in the body": Passing(
        Drop(Stage.REQUEST_BODY, after_bytes=10), concerns=has_body, kinds=("save", "commit", "commit multipart")
    ),
    "closed without an answer": Passing(Drop(Stage.RESPONSE_HEAD, reset=False)),
    "reset in the answer's head": Passing(Drop(Stage.RESPONSE_HEAD, after_bytes=12)),
    "not confirmed": Passing(
        Drop(Stage.RESPONSE_HEAD, effect=Effect.APPLIED), 1, takes_effect=True, everywhere=True, kinds=EVERYWHERE
    ),
    "reset in the answer's body": Passing(
        Drop(Stage.RESPONSE_BODY, after_bytes=5), 1, is_answered_at_length, takes_effect=True
    ),
    "short answer": Passing(ShortBody(1), 1, is_answered_at_length, takes_effect=True, kinds=IN_PARTS),
    "short range, told so": Passing(ShortBody(10, Length.SENT), 2, is_ranged, kinds=("load", "resume")),
    "another range": Passing(WrongRange(1), 2, is_ranged, kinds=("load", "resume")),
    "error inside 200": Passing(ErrorInside200(), 2, completes, kinds=("save", "commit multipart")),
}
